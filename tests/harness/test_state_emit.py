"""Tables and verdicts of training states are made from rows, and say what a reader looks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_emit import text_of
from test_state_records import OFFLOAD, STATE

from relaymeter.harness import state_emit
from relaymeter.harness.verdict import judge_states, state_verdict
from relaymeter.state_records import StateRecord

BACK = replace(
    STATE, leg=2, source="zero3 x2", destination="zero3 x4", move_s=0.03, continuation="bit-equal, 20 steps",
    checkpoint="bit-equal", digest_passed=44, digest_total=44,
)  # fmt: skip
WRONG = replace(
    STATE, change="tp", row="AutoTP", digest_passed=39, mismatch="exp_avg of layers.0.weight, elements 0 to 4095",
    verdict="wrong bits", ok=False,
)  # fmt: skip
REFUSED = replace(
    STATE, change="ep", row="AutoEP", leg=0, refused="AutoEP takes every rank", plan_s=None, move_s=None,
    refresh_s=None, total_s=None, bytes_total=0, digest_passed=0, digest_total=0, oracle_passed=0, oracle_total=0,
    verdict="refused", ok=False,
)  # fmt: skip


def lines(rows: list[StateRecord]) -> list[list[str]]:
    return [[line.strip() for line in text_of(table).splitlines()] for table in state_emit.change_tables(rows)]


def test_a_change_is_one_line_with_its_moves_added_up_under_its_row_of_the_matrix() -> None:
    (table,) = lines([STATE, BACK])
    assert table[0] == "world size: 1 change"
    (line,) = [text for text in table if "z3-4-2-4" in text]
    expected = [
        "z3-4-2-4",
        "zero3",
        "x4",
        "<->",
        "zero3",
        "x2",
        "20.0",
        "50.0",
        "6.0",
        "52.0",
        "108",
        "kB",
        "84/84",
        "60/60",
    ]
    assert line.split() == [*expected, "bit-equal", "bit-equal", "ok"]
    assert state_emit.checkpoint_lines([STATE, BACK]) == []
    (text,) = state_emit.checkpoint_lines([replace(BACK, checkpoint="cannot: no AutoTP")])
    assert text == "z3-4-2-4 through a checkpoint: cannot: no AutoTP"


def test_a_path_of_other_ends_and_training_that_went_astray_are_shown_in_full() -> None:
    astray = "differs after 20 steps: exp_avg of a"
    last = replace(BACK, destination="zero1 x4", continuation=astray, continuation_ok=False)
    text = "".join(lines([STATE, last])[0])
    assert "zero3 x4 -> zero3 x2 -> zero1 x4" in text and astray in text


def test_rows_of_the_matrix_keep_their_order_whatever_ran_first() -> None:
    found = lines([REFUSED, WRONG, STATE, BACK])
    assert [table[0] for table in found] == ["world size: 1 change", "AutoTP: 1 change", "AutoEP: 1 change"]
    assert "check-" in "".join(found[0]) and "check-" in "".join(found[2])
    assert "39/40" in "".join(found[1]) and "wrong bits" in "".join(found[1])
    assert "refused" in "".join(found[2])


def test_planners_are_a_column_only_where_there_are_two() -> None:
    assert "planner" not in "".join(lines([STATE])[0])
    both = "".join(lines([STATE, replace(STATE, planner="affine")])[0])
    assert "planner" in both and "affine" in both


def test_the_total_counts_changes_and_every_check() -> None:
    text = state_emit.total_line([STATE, BACK, WRONG, REFUSED], 61.4)
    assert text == (
        "total: 1 of 3 changes ok; 123 of 124 digests equal, 90 of 90 by the oracle, 1 of 1 continuation bit-equal, "
        "1 of 1 checkpoint bit-equal; 61 s in all"
    )


def test_progress_says_what_a_move_did_or_why_not() -> None:
    assert state_emit.leg_text(BACK) == (
        "  zero3 x2 -> zero3 x4: 26 ms, 54 kB, 44/44 digests, 30/30 by the oracle, bit-equal, 20 steps"
    )
    assert state_emit.leg_text(WRONG).endswith("39/40 digests, 30/30 by the oracle: WRONG BITS")
    assert state_emit.leg_text(REFUSED) == "  refused: AutoEP takes every rank"


def _round(number: int, way: str, planner: str, total_s: float, **more: Any) -> StateRecord:
    source, destination = ("zero3 x4", "zero3 x2") if way == "DP4 -> DP2" else ("zero3 x2", "zero3 x4")
    return replace(
        STATE, scenario="dp4-dp2-dp4", row=None, change=way, leg=number, planner=planner, source=source, build_s=1.5,
        destination=destination, total_s=total_s, plan_s=0.04 if planner == "classes" else 0.37, oracle_total=0,
        held_bytes=30_000, held_after_bytes=35_000, **more,
    )  # fmt: skip


def test_rounds_show_the_plan_once_and_the_median_of_each_direction() -> None:
    rows = [
        _round(number, way, planner, seconds)
        for planner in ("classes", "affine")
        for number, seconds in ((1, 0.9), (2, 0.65), (3, 0.6))
        for way in ("DP4 -> DP2", "DP2 -> DP4")
    ]
    rows[-1] = replace(rows[-1], peak_bytes=12_000)
    text = text_of(state_emit.rounds_table(rows))
    assert text.startswith("dp4-dp2-dp4: zero3 x4 -> zero3 x2, 54 kB of masters and moments")
    (ours,) = [line for line in text.splitlines() if "classes" in line]
    (theirs,) = [line for line in text.splitlines() if "affine" in line]
    alike = "650 ms 650 ms 30 kB 35 kB {} kB 40 kB 240/240 6/6"
    assert " ".join(ours.split()) == f"classes 80 ms {alike.format(39)}"
    assert " ".join(theirs.split()) == f"affine 740 ms {alike.format(42)}"
    assert "DP2 rank" in text
    assert state_emit.rounds_lines(rows) == [
        "engines built in: DP2 1.5 s, DP4 1.5 s", "12 of 12 moves bitwise equal",
    ]  # fmt: skip


def test_memory_of_an_offload_is_shown_where_the_device_has_an_allocator() -> None:
    missing = replace(
        OFFLOAD, stage=1, state="contiguous_grad_buffer", bytes=None, offload_s=None, reload_s=None, equal=None,
        trains=None, note="not offered by DeepSpeed below ZeRO-3", verdict="not offered",
    )  # fmt: skip
    text = text_of(state_emit.offload_table([OFFLOAD, missing]))
    (line,) = [line for line in text.splitlines() if "hp_params" in line]
    pieces = "zero3 hp_params deepspeed yes no 4 MB 10 ms 20 ms 0.4 0.2 not applicable yes"
    assert " ".join(line.split()) == pieces
    assert "not offered" in " ".join(text.split())
    pinned = replace(
        OFFLOAD, state="lp_params", equal=None, note="not applicable: no pinning", verdict="not applicable"
    )
    assert "lp_params" not in text_of(state_emit.offload_table([OFFLOAD, pinned]))
    assert state_emit.offload_lines([OFFLOAD, pinned])[1] == "zero3 lp_params: not applicable: no pinning"
    assert state_emit.offload_lines([OFFLOAD, missing, replace(missing, stage=2)]) == [
        "1 of 1 offload equal after the reload, 1 bit-equal after the next step",
        "zero1/2 contiguous_grad_buffer: not offered by DeepSpeed below ZeRO-3",
    ]
    assert state_emit.offload_text(missing).endswith("by deepspeed: not offered by DeepSpeed below ZeRO-3")
    shown = "  zero3 hp_params by deepspeed (pinned, not blocking): 4 MB, 10 ms out, 20 ms back"
    assert state_emit.offload_text(OFFLOAD) == shown
    held = replace(
        OFFLOAD, allocated_before_bytes=9_000_000, allocated_after_bytes=5_000_000, allocated_reloaded_bytes=9_000_000
    )
    text = text_of(state_emit.offload_table([held]))
    assert "not applicable" not in text and "5 MB" in text and text.count("9 MB") == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "ok"),
        ({"digests": (3, 4)}, "wrong bits"),
        ({"oracle": (3, 4)}, "wrong bits"),
        ({"fields": ("engine global_steps: 3 there, 4 here",)}, "wrong bits"),
        ({"continuation_ok": False}, "wrong bits"),
        ({"checkpoint": "differs: exp_avg of a"}, "checkpoint differs"),
        ({"checkpoint": "differs: exp_avg of a", "digests": (3, 4)}, "wrong bits"),
        ({"checkpoint": "cannot: stage 1 only"}, "ok"),
        ({"digests": (0, 0)}, "not checked"),
    ],
)
def test_a_move_is_ok_only_where_nothing_differs(change: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {
        "digests": (4, 4), "oracle": (0, 0), "fields": (), "continuation_ok": True, "checkpoint": "not asked",
    }  # fmt: skip
    assert state_verdict(**{**given, **change}) == expected


@pytest.mark.parametrize(
    ("rows", "ended", "seconds", "expected"),
    [
        ([STATE, BACK], 0, 10.0, 0),
        ([STATE, BACK], 0, 99.0, 3),
        ([STATE, REFUSED], 0, 99.0, 2),
        ([REFUSED, WRONG], 7, 10.0, 6),
        ([REFUSED, replace(REFUSED, verdict="failed")], 0, 10.0, 1),
        ([replace(OFFLOAD, verdict="failed", ok=False)], 0, 10.0, 3),
        ([STATE, REFUSED], 7, 10.0, 7),
        ([STATE, replace(BACK, checkpoint="differs: x", verdict="checkpoint differs", ok=False)], 0, 10.0, 3),
        ([STATE], 130, 10.0, 130),
        ([replace(STATE, verdict="not checked", ok=False)], 0, 10.0, 5),
        ([], 0, 10.0, 5),
        ([], 2, 10.0, 2),
    ],
)
def test_wrong_bits_outrank_a_lost_rank_that_a_refusal_and_that_a_bound(
    rows: list[StateRecord], ended: int, seconds: float, expected: int
) -> None:
    assert judge_states(rows, ended, seconds=seconds, bound_s=60.0).exit_code == expected


def test_the_verdict_names_parameter_and_state_first() -> None:
    verdict = judge_states([REFUSED, STATE, WRONG], 0)
    assert verdict.lines == (
        "WRONG BITS in tp (zero3 x4 -> zero3 x2, classes): 1 of 40 digests differ: exp_avg of layers.0.weight, "
        "elements 0 to 4095",
        "refused: ep (zero3 x4 -> zero3 x2, classes): AutoEP takes every rank",
    )
    wrong = replace(OFFLOAD, ok=False, equal=False, mismatch="master of a", verdict="wrong bits")
    (line,) = judge_states([OFFLOAD, wrong]).lines
    assert line == "WRONG BITS after offload and reload of hp_params (zero3, deepspeed): master of a"
