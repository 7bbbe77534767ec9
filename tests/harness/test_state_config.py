"""Scenarios of training states: what a file may say, what is refused with key and place, and the shipped ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relaymeter.errors import InputError
from relaymeter.harness.config import Scenario, check
from relaymeter.harness.jobs import OffloadJob, RunStamp, StateJob, dump, job_of
from relaymeter.harness.scenario import load_any, load_scenario, load_suite, shipped_scenarios, shipped_suites
from relaymeter.harness.state_config import ROWS, ChangeConfig, EngineConfig, OffloadScenario, StateScenario

MODEL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 10}  # fmt: skip
ONE = {"stage": 3, "ranks": 4}
TWO = {"stage": 3, "ranks": 2}
CHANGE = {"name": "a", "row": "world size", "path": [ONE, TWO]}
STAMP = RunStamp(utc="2026-01-02T03:04:05Z", launch_id="def", machine_id="abc", commit=None)


def scenario(**entry: Any) -> StateScenario:
    return check(StateScenario, {"kind": "training-state", "name": "s", "changes": [CHANGE], **entry}, "s.toml")


@pytest.mark.parametrize(
    ("entry", "label", "ranks"),
    [
        ({"stage": 3, "ranks": 4}, "zero3 x4", (0, 1, 2, 3)),
        ({"stage": 1, "ranks": 4, "tensor_parallel": 2}, "zero1 x4 tp2", (0, 1, 2, 3)),
        ({"stage": 2, "ranks": [0, 1], "expert_parallel": 2}, "zero2 x2 ep2", (0, 1)),
        ({"stage": 2, "ranks": [3, 1], "gradient_accumulation": 2}, "zero2 x2 accum2 (ranks 3, 1)", (3, 1)),
    ],
)
def test_an_engine_is_named_by_stage_ranks_and_degrees(
    entry: dict[str, Any], label: str, ranks: tuple[int, ...]
) -> None:
    engine = check(EngineConfig, entry, "engine")
    assert (engine.label, engine.ranks) == (label, ranks)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"stage": 4, "ranks": 2}, "stage = 4: Input should be less than or equal to 3"),
        ({"stage": 3, "ranks": 0}, "ranks = 0: give the number of ranks"),
        ({"stage": 3, "ranks": [1, 1]}, "ranks = [1, 1]: give the number of ranks"),
        ({"stage": 3, "ranks": True}, "ranks = True: give the number of ranks"),
        ({"stage": 3, "ranks": 4, "tensor_parallel": 3}, "4 ranks % tensor_parallel 3 = 1, not 0"),
        ({"stage": 3, "ranks": 4, "expert_parallel": 3}, "4 ranks % expert_parallel 3 = 1, not 0"),
        (
            {"stage": 1, "ranks": 4, "tensor_parallel": 2, "expert_parallel": 4},
            "tensor_parallel 2 and expert_parallel 4: an engine has one of them",
        ),
        ({"stage": 3, "ranks": 5}, "= 5, which does not divide the 24 samples of a step"),
        ({"stage": 3, "ranks": 2, "gradient_accumulation": 5}, "= 10, which does not divide the 24 samples of a step"),
        ({"stage": 3, "ranks": 2, "tp": 2}, "unknown key 'tp': "),
    ],
)
def test_an_engine_that_cannot_be_is_refused(entry: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as refused:
        check(EngineConfig, entry, "engine")
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"changes": [CHANGE, CHANGE]}, "two [[changes]] are named 'a': give each a name of its own"),
        ({"changes": []}, "give [[changes]] or [rounds]: there is neither"),
        ({"rounds": {"first": ONE, "second": TWO}}, "give [[changes]] or [rounds], not both"),
        ({"changes": [{**CHANGE, "path": [ONE]}]}, "[[changes]] number 1, key 'path' = [{"),
        ({"changes": [CHANGE, {**CHANGE, "name": "b", "row": "size"}]}, "[[changes]] number 2, key 'row' = 'size': "),
        ({"changes": [{**CHANGE, "training": {"step": 1}}]}, "[[changes]] number 1, unknown key 'training.step': did"),
        ({"changes": [{**CHANGE, "world": 3}]}, "path number 1: rank 3 of a world of 3 ranks"),
        (
            {"changes": [{**CHANGE, "path": [ONE, {**ONE, "expert_parallel": 2}]}]},
            "path number 2: expert_parallel 2 needs training.model 'moe', not 'dense'",
        ),
        ({"training": {"model": "qwen3"}}, "training.model 'qwen3' needs the table [model] with its geometry"),
        ({"training": {"dtype": "int8"}}, "training.dtype = 'int8': "),
        ({"source": {}}, "unknown key 'source': "),
    ],
)
def test_a_scenario_that_cannot_be_is_refused_with_its_place(entry: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as refused:
        scenario(**entry)
    assert str(refused.value).startswith("s.toml: ")
    assert expected in str(refused.value)


def test_a_change_takes_the_training_of_the_scenario_but_for_its_own_keys() -> None:
    found = scenario(training={"steps": 5, "optimizer": "SGD"}, changes=[{**CHANGE, "training": {"steps": 0}}])
    (change,) = found.changes
    assert (change.training.steps, change.training.optimizer, change.training.dtype) == (0, "SGD", "bfloat16")
    assert change.engines == "zero3 x4 -> zero3 x2"
    assert not change.returns
    assert found.world == change.least_world == 4


def test_the_shared_world_holds_every_change_that_asks_for_none_of_its_own() -> None:
    small = {**CHANGE, "name": "b", "path": [TWO, {"stage": 2, "ranks": [1, 2]}, TWO]}
    found = scenario(changes=[{**CHANGE, "world": 6}, small])
    assert found.world == 3
    assert found.changes[1].returns
    assert scenario(changes=[{**CHANGE, "world": 6}]).world == 6


@pytest.mark.parametrize("name", ["state-matrix", "dp4-dp2-dp4"])
def test_a_job_reaches_the_ranks_as_it_was_made(name: str) -> None:
    found = load_any(name)
    assert isinstance(found, StateScenario)
    job = StateJob(scenario=found, time_limit_s=5, move_limit_s=1, stamp=STAMP)
    assert job_of(dump(job), "job.json") == job


def test_a_job_of_an_unknown_kind_is_refused() -> None:
    found = load_any("offload")
    assert isinstance(found, OffloadScenario)
    job = OffloadJob(scenario=found, time_limit_s=5, move_limit_s=1, stamp=STAMP)
    assert job_of(dump(job), "job.json") == job
    with pytest.raises(
        InputError,
        match=r"job\.json: kind = 'move' is no job: valid: calibrate, check, compare-load, compare-save, off",
    ):
        job_of({"kind": "move"}, "job.json")


def test_shipped_scenarios_are_of_the_kind_that_they_say() -> None:
    assert shipped_suites() == ("state-matrix", "transitions")
    weights = set(shipped_scenarios(weights_only=True))
    assert set(shipped_scenarios()) - weights == {"state-matrix", "dp4-dp2-dp4", "offload", "rfc-small"}
    assert all(isinstance(load_any(name), Scenario) and load_scenario(name).kind == "weights" for name in weights)


def test_the_matrix_has_every_row_and_every_case_of_it() -> None:
    matrix = load_suite("state-matrix")
    assert isinstance(matrix, StateScenario)
    changes = matrix.changes
    assert matrix.world == 4
    assert tuple(dict.fromkeys(change.row for change in changes)) == ROWS
    assert all(any(c.checkpoint for c in changes if c.row == row) for row in ROWS)

    def legs(row: str) -> set[tuple[str, str]]:
        return {
            (one.label, two.label)
            for change in changes
            if change.row == row
            for one, two in zip(change.path, change.path[1:], strict=False)
        }

    assert {("zero3 x4", "zero3 x2"), ("zero3 x2", "zero3 x4"), ("zero3 x1", "zero3 x3")} <= legs("world size")
    pairs = [(3, 2), (3, 1), (2, 1)]
    both = {(f"zero{one} x4", f"zero{two} x4") for a, b in pairs for one, two in ((a, b), (b, a))}
    assert both | {("zero2 x4", "zero3 x2"), ("zero3 x2", "zero1 x4")} <= legs("stage")
    for row, degree in (("AutoTP", "tp"), ("AutoEP", "ep")):
        for stage in (1, 2, 3):
            found = legs(row)
            wide, narrow = f"zero{stage} x4 {degree}4", f"zero{stage} x4 {degree}2"
            assert {(wide, narrow), (narrow, wide)} <= found
            assert any(
                one.startswith(f"zero{stage}") and two == f"{one} {degree}2" and (two, one) in found
                for one, two in found
            )
    assert any(one.split()[0] != two.split()[0] for one, two in legs("AutoTP"))
    assert {c.training.dtype for c in changes if c.row == "dtype"} == {"bfloat16", "float16", "float32"}
    kinds = {c.training.optimizer for c in changes}
    assert kinds == {"Adam", "AdamW", "deepspeed-Adam", "deepspeed-AdamW", "group-step", "SGD"}
    assert {"mixed", "unused", "moe", "dense"} == {c.training.model for c in changes}
    assert any(c.training.frozen for c in changes) and any(c.training.steps == 0 for c in changes)
    assert any(c.training.groups == "several" for c in changes)


def test_keys_are_documented(request: pytest.FixtureRequest) -> None:
    text = Path(request.config.rootpath, "docs", "scenarios.md").read_text()
    for model in (EngineConfig, ChangeConfig, StateScenario, OffloadScenario):
        for name, field in model.model_fields.items():
            assert f"`{name}`" in text or f"`[{name}]`" in text or f"`[[{name}]]`" in text, name
            assert field.description, name


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"rounds": {"first_name": "DP", "second_name": "DP"}}, "first_name and second_name are both 'DP'"),
        ({"rounds": {"second_name": "first"}}, "first_name and second_name are both 'first'"),
        (
            {"rounds": {"first": {"stage": 3, "ranks": 2, "expert_parallel": 2}}},
            "rounds.first: expert_parallel 2 needs training.model 'moe', not 'dense'",
        ),
        (
            {"training": {"model": "moe"}, "rounds": {"second": {"stage": 3, "ranks": 2, "tensor_parallel": 2}}},
            "rounds.second: tensor_parallel 2 does not go with training.model 'moe'",
        ),
        ({"training": {"frozen": "yes"}}, "training.frozen"),
        ({"suite": {"bound_s": "9"}}, "suite.bound_s"),
    ],
)
def test_rounds_that_cannot_be_are_refused(entry: dict[str, Any], expected: str) -> None:
    whole = {"kind": "training-state", "name": "mine", **entry}
    engines = {"first": {"stage": 3, "ranks": 2}, "second": {"stage": 3, "ranks": 1}}
    whole["rounds"] = engines | entry.get("rounds", {})
    with pytest.raises(InputError) as refused:
        check(StateScenario, whole, "mine.toml")
    assert expected in str(refused.value)
