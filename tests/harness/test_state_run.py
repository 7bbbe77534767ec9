"""Real runs of training states: a part of the matrix by the command; a wrong bit, a refusal and rounds in a pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool

from relaymeter.harness.config import check
from relaymeter.harness.jobs import Fault, RunStamp, StateJob, dump
from relaymeter.harness.state_config import StateScenario
from relaymeter.harness.verdict import judge_states
from relaymeter.row_files import read_rows
from relaymeter.state_records import StateRecord

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

STAMP = RunStamp(utc="2026-01-02T03:04:05Z", launch_id="def", machine_id="abc", commit=None)
THIRD, SECOND = {"stage": 3, "ranks": 2}, {"stage": 2, "ranks": 2}


def job(fault: Fault | None = None, **entry: Any) -> dict[str, Any]:
    scenario = check(StateScenario, {"kind": "training-state", "name": "mine", **entry}, "mine.toml")
    return dump(
        StateJob(scenario=scenario, planner="both", time_limit_s=100, move_limit_s=50, stamp=STAMP, fault=fault)
    )


def rows_of(found: dict[str, Any]) -> list[StateRecord]:
    return [StateRecord.from_dict(entry) for entry in found["rows"]]


def test_a_part_of_the_matrix_is_all_equal_by_every_check(cli: Any, tmp_path: Path) -> None:
    names = ("z3-1-3-1", "z2-z3-z1", "tp2-tp4-z1", "fp16", "several-groups")
    chosen = [text for name in names for text in ("--change", name)]
    done = cli("run", "--suite", "state-matrix", *chosen, "--json", "rows.jsonl", limit_s=220, warm=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if isinstance(row, StateRecord)]
    assert [(row.change, row.leg) for row in rows] == [(name, leg) for name in names for leg in (1, 2)]
    for row in rows:
        assert row.ok and row.digest_passed == row.digest_total > 0 and row.fields == (), row
        assert row.oracle_passed == row.oracle_total > 0
        assert row.bytes_total == row.bytes_in_rank + row.bytes_in_node > 0 and row.bytes_cross_node == 0
        assert row.plan_s is not None and row.move_s is not None and row.refresh_s is not None
    last = {row.change: row.continuation for row in rows}
    assert last.pop("z2-z3-z1").startswith("within")
    assert set(last.values()) == {"bit-equal, 20 steps"}
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.rstrip().endswith("change")] == [
        "world size", "stage", "AutoTP", "dtype", "optimizer",
    ]  # fmt: skip
    assert lines[-1].startswith("total: 5 of 5 changes ok; ")
    assert "change 5 of 5: several-groups: zero1 x4 -> zero3 x2 -> zero1 x4 (classes)" in done.stderr


def test_a_wrong_bit_and_a_refusal_mark_their_rows_and_the_next_change_is_clean(
    ranks: Callable[[int], RankPool],
) -> None:
    def change(name: str, stage: int = 2, dtype: str = "bfloat16") -> dict[str, Any]:
        path = [THIRD, {**SECOND, "stage": stage}]
        return {"name": name, "row": "stage", "path": path, "continuation": 1, "training": {"dtype": dtype}}

    changes = [change("flipped"), change("odd", 0, "float16"), change("clean")]
    wanted = job(Fault(kind="flip", rank=1), changes=changes)
    found, other = ranks(2).call("jobs_state_run:run", asked=wanted, name="faults", limit_s=120)
    rows = rows_of(found)
    assert found["counts"] == [1, 2, 3, 4, 5, 6]
    assert [(row.change, row.planner, row.verdict) for row in rows] == [
        (name, planner, verdict)
        for name, verdicts in (("flipped", ("wrong bits", "ok")), ("odd", ("refused",) * 2), ("clean", ("ok",) * 2))
        for planner, verdict in zip(("classes", "affine"), verdicts, strict=True)
    ]
    assert rows[0].digest_total - rows[0].digest_passed == 1
    assert rows[0].mismatch is not None and rows[0].mismatch.startswith("exp_avg ")
    assert rows[0].oracle_passed < rows[0].oracle_total and rows[0].oracle_mismatch is not None
    assert "exp_avg " in rows[0].oracle_mismatch
    assert all("the history of a dynamic scale has no place there" in str(row.refused) for row in rows[2:4])
    verdict = judge_states(rows)
    assert verdict.exit_code == 6
    assert verdict.lines[0].startswith("WRONG BITS in flipped (zero3 x2 -> zero2 x2, classes): 1 of ")
    assert [row.verdict for row in rows_of(other)] == [row.verdict for row in rows]


def test_two_engines_hand_the_state_back_and_forth_planned_once_by_each_planner(
    ranks: Callable[[int], RankPool],
) -> None:
    rounds = {"first": THIRD, "second": {"stage": 3, "ranks": [1]}, "first_name": "DP2", "second_name": "DP1"}
    wanted = job(rounds={**rounds, "rounds": 2})
    found, _ = ranks(2).call("jobs_state_run:run", asked=wanted, name="rounds", limit_s=120)
    rows = rows_of(found)
    assert [(row.planner, row.leg, row.change) for row in rows] == [
        (planner, leg, way)
        for planner in ("classes", "affine") for leg in (1, 2) for way in ("DP2 -> DP1", "DP1 -> DP2")
    ]  # fmt: skip
    assert all(row.ok and row.digest_passed == row.digest_total > 0 and row.fields == () for row in rows)
    assert len({(row.planner, row.change, row.plan_s) for row in rows}) == 4
    first, *others = rows
    assert first.held_bytes is not None and first.held_after_bytes is not None
    assert first.held_bytes < first.held_after_bytes  # the first move allocates the moments of the second engine
    assert {row.held_bytes for row in others} == {first.held_after_bytes}
