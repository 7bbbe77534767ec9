"""What the fields of a training state become in an engine of other groups: tables with the right values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from relaymeter.errors import InputError
from relaymeter.relayout.plain_state import decode, encode
from relaymeter.relayout.training_match import expected_fields

STATIC = {"type": "LossScaler", "dynamic": False, "fields": {"cur_scale": 1.0}, "flags": {}}
DYNAMIC = {"type": "DynamicLossScaler", "dynamic": True, "fields": {"cur_scale": 1024.0, "cur_iter": 3}, "flags": {}}


def fields(
    groups: list[tuple[list[str], float]],
    homes: list[list[str]],
    steps: dict[str, float],
    *,
    accumulation: int = 1,
    micro: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """Fields of an Adam engine: groups of (names, lr), homes, the step of every parameter that has state."""
    return {
        "engine": {"global_steps": 3, "global_samples": 24, "micro_steps": micro, "skipped_steps": 1},
        "accumulation": accumulation,
        "optimizer": "torch.optim.adamw.AdamW",
        "groups": [{"names": names, "fields": {"lr": lr, "initial_lr": 1.0}} for names, lr in groups],
        "homes": homes,
        "per_weight": {"exp_avg": dict.fromkeys(steps, "float32")} if steps else {},
        "per_parameter": {name: {"step": encode(torch.tensor(step), "")} for name, step in steps.items()},
        "scheduler": None,
        "scaler": STATIC,
        "autocast": None,
        "shaped": False,
        **more,
    }


EACH = [["a"], ["b"], ["c"]]


def test_parameters_bring_their_group_and_step_into_other_homes() -> None:
    source = fields([(["a", "b"], 0.1), (["c"], 0.2)], [["a", "b"], ["c"]], {"a": 3.0, "b": 3.0, "c": 5.0})
    wanted = expected_fields(source, fields([(["c"], 9.0), (["a", "b"], 9.0)], EACH, {}))
    assert [group["fields"]["lr"] for group in wanted["groups"]] == [0.2, 0.1]
    assert {n: decode(kept["step"]).item() for n, kept in wanted["per_parameter"].items()} == {"a": 3, "b": 3, "c": 5}
    assert wanted["per_weight"] == {"exp_avg": {"a": "float32", "b": "float32", "c": "float32"}}
    assert wanted["filled"] == []


def test_two_steps_in_one_home_are_refused_by_name() -> None:
    source = fields([(["a", "b", "c"], 0.1)], EACH, {"a": 3.0, "b": 3.0, "c": 5.0})
    with pytest.raises(InputError, match=r"a and c share one optimizer state in the destination.*step: 3\.0.*5\.0"):
        expected_fields(source, fields([(["a", "b", "c"], 0.1)], [["a", "b", "c"]], {}))


def test_two_rates_in_one_group_are_refused_by_name() -> None:
    source = fields([(["a"], 0.1), (["b", "c"], 0.2)], EACH, {})
    with pytest.raises(InputError, match=r"a and b share parameter group 0.*groups 0 and 1.*lr: 0\.1.*0\.2"):
        expected_fields(source, fields([(["a", "b", "c"], 0.1)], EACH, {}))


def test_a_parameter_without_state_gets_zeros_among_others_and_none_alone() -> None:
    source = fields([(["a", "b", "c"], 0.1)], EACH, {"a": 3.0, "b": 3.0})
    together = expected_fields(source, fields([(["a", "b", "c"], 0.1)], [["a", "b", "c"]], {}))
    assert together["filled"] == [["exp_avg", "c"]]
    assert decode(together["per_parameter"]["c"]["step"]).item() == 3
    alone = expected_fields(source, fields([(["a", "b", "c"], 0.1)], EACH, {"c": 7.0}))
    assert alone["filled"] == [] and "c" not in alone["per_weight"]["exp_avg"] and "c" not in alone["per_parameter"]


def test_before_the_first_step_nothing_is_expected() -> None:
    wanted = expected_fields(fields([(["a"], 0.1)], [["a"]], {}), fields([(["a"], 0.2)], [["a"]], {"a": 4.0}))
    assert wanted["per_weight"] == {} and wanted["per_parameter"] == {}


def test_groups_without_parameters_keep_their_position() -> None:
    source = fields([([], 0.3), (["a"], 0.1), ([], 0.5)], [["a"]], {})
    wanted = expected_fields(source, fields([([], 9.0), (["a"], 9.0), ([], 9.0)], [["a"]], {}))
    assert [group["fields"]["lr"] for group in wanted["groups"]] == [0.3, 0.1, 0.5]


@pytest.mark.parametrize(("source", "micro", "destination", "wanted"), [(1, 3, 1, 3), (1, 3, 2, 6), (4, 12, 2, 6)])
def test_micro_steps_count_in_the_micro_batches_of_the_destination(
    source: int, micro: int, destination: int, wanted: int
) -> None:
    one = fields([(["a"], 0.1)], [["a"]], {}, accumulation=source, micro=micro)
    found = expected_fields(one, fields([(["a"], 0.1)], [["a"]], {}, accumulation=destination))
    assert found["engine"] == {"global_steps": 3, "global_samples": 24, "micro_steps": wanted, "skipped_steps": 1}


def scheduler(kind: str = "StepLR", settings: dict[str, Any] | None = None, **state: Any) -> dict[str, Any]:
    return {"type": f"torch.optim.lr_scheduler.{kind}", "state": encode(state, ""), "settings": settings or {}}


def test_a_schedulers_rates_follow_the_groups_they_belong_to() -> None:
    source = fields([(["a"], 0.1), (["b", "c"], 0.2)], EACH, {}, scheduler=scheduler(base_lrs=[1.0, 2.0], last_epoch=3))
    other = fields([(["b"], 1.0), (["c"], 1.0), (["a"], 1.0)], EACH, {}, scheduler=scheduler(base_lrs=[0.0] * 3))
    found = decode(expected_fields(source, other)["scheduler"]["state"])
    assert found == {"base_lrs": [2.0, 2.0, 1.0], "last_epoch": 3}


def test_rates_follow_groups_that_are_as_many_but_in_another_order() -> None:
    settings = {"org_lrs": encode([0.1, 0.01], ""), "warmup_num_steps": 9}
    inner = {"base_lrs": [0.1, 0.01], "last_epoch": 3}
    state = {"lr_lambdas": [None, {"k": 1}], "_schedulers": [inner, inner], "_milestones": [4, 8]}
    source = fields([(["a"], 0.1), (["b", "c"], 0.01)], EACH, {}, scheduler=scheduler(settings=settings, **state))
    other = fields([(["b", "c"], 0.1), (["a"], 0.01)], EACH, {}, scheduler=scheduler())
    found = expected_fields(source, other)["scheduler"]
    turned = {"base_lrs": [0.01, 0.1], "last_epoch": 3}
    assert decode(found["state"]) == {
        "lr_lambdas": [{"k": 1}, None],
        "_schedulers": [turned, turned],
        "_milestones": [4, 8],  # as long as the groups are many, but not theirs
    }
    assert decode(found["settings"]["org_lrs"]) == [0.01, 0.1] and found["settings"]["warmup_num_steps"] == 9


def test_a_list_that_only_happens_to_be_as_long_as_the_groups_is_kept() -> None:
    phases = [{"end_step": 2}, {"end_step": 9}]
    source = fields([(["a"], 0.1), (["b", "c"], 0.1)], EACH, {}, scheduler=scheduler(_schedule_phases=phases))
    other = fields([(["a", "b", "c"], 0.1)], EACH, {}, scheduler=scheduler())
    assert decode(expected_fields(source, other)["scheduler"]["state"]) == {"_schedule_phases": phases}


def test_an_unknown_schedulers_lists_are_not_guessed_at() -> None:
    mine = {"type": "mine.Schedule", "state": encode({"rates": [1, 2]}, ""), "settings": {}}
    source = fields([(["a"], 0.1), (["b", "c"], 0.2)], EACH, {}, scheduler=mine)
    assert expected_fields(source, source)["scheduler"] == mine
    with pytest.raises(InputError, match=r"which lists of mine\.Schedule go by group is not known"):
        expected_fields(source, fields([(["b", "c"], 0.2), (["a"], 0.1)], EACH, {}, scheduler=mine))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"optimizer": "torch.optim.sgd.SGD"}, "optimizer is torch.optim.adamw.AdamW.*torch.optim.sgd.SGD"),
        ({"scheduler": scheduler()}, "scheduler is missing, the destination's torch.optim.lr_scheduler.StepLR"),
        ({"scaler": DYNAMIC}, r"LossScaler \(static\), the destination by DynamicLossScaler \(dynamic\)"),
        ({"scaler": {**DYNAMIC, "type": "Other"}}, "loss"),
        ({"autocast": {"dict": []}}, "only the destination scales gradients under torch_autocast"),
    ],
)
def test_engines_of_different_kinds_are_refused(change: dict[str, Any], text: str) -> None:
    source = fields([(["a"], 0.1)], [["a"]], {})
    with pytest.raises(InputError, match=text):
        expected_fields(source, {**copy.deepcopy(source), **change})


def test_an_optimizer_that_looks_at_shapes_stays_among_its_kind() -> None:
    flat = fields([(["a"], 0.1)], [["a"]], {}, optimizer="torch.optim._adafactor.Adafactor")
    assert expected_fields(flat, flat)["optimizer"] == "torch.optim._adafactor.Adafactor"
    with pytest.raises(InputError, match="the source has flat parameters, the destination whole ones"):
        expected_fields(flat, {**flat, "shaped": True})


def test_the_history_of_an_autocast_scaler_is_kept() -> None:
    history = encode({"scale": 65536.0, "_growth_tracker": 3}, "")
    source = fields([(["a"], 0.1)], [["a"]], {}, autocast=history)
    fresh = fields([(["a"], 0.1)], [["a"]], {}, autocast=encode({"scale": 65536.0, "_growth_tracker": 0}, ""))
    assert expected_fields(source, fresh)["autocast"] == history


def test_two_types_in_one_tensor_are_refused() -> None:
    source = fields([(["a", "b"], 0.1)], [["a"], ["b"]], {"a": 3.0, "b": 3.0})
    source["per_weight"] = {"exp_avg": {"a": "float32", "b": "bfloat16"}}
    with pytest.raises(InputError, match="exp_avg of a is float32, of b bfloat16"):
        expected_fields(source, fields([(["a", "b"], 0.1)], [["a", "b"]], {}))


def test_the_history_of_a_dynamic_loss_scale_is_kept() -> None:
    source = fields([(["a"], 0.1)], [["a"]], {}, scaler=DYNAMIC)
    fresh = {**DYNAMIC, "fields": {"cur_scale": 65536.0, "cur_iter": 0}}
    assert expected_fields(source, fields([(["a"], 0.1)], [["a"]], {}, scaler=fresh))["scaler"] == DYNAMIC
