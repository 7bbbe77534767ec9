"""A run's exit code is the worst of its rows and of how its ranks ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_records import ROW

from relaymeter.errors import EXIT_GATE_MISSED, EXIT_NOTHING_MEASURED, EXIT_OK, EXIT_RANK_LOST, EXIT_WRONG_BITS
from relaymeter.harness.verdict import judge, notes, row_verdict

INTERRUPTED = 130


@pytest.mark.parametrize(
    ("verdict", "ended", "code"),
    [
        ("ok", EXIT_OK, EXIT_OK),
        ("ok", EXIT_RANK_LOST, EXIT_RANK_LOST),
        ("ok", INTERRUPTED, INTERRUPTED),
        ("wrong bits", EXIT_RANK_LOST, EXIT_WRONG_BITS),
        ("wrong bits", INTERRUPTED, EXIT_WRONG_BITS),
        ("wire bytes differ", EXIT_RANK_LOST, EXIT_RANK_LOST),
        ("wire bytes differ", EXIT_OK, EXIT_GATE_MISSED),
        ("not measured", EXIT_RANK_LOST, EXIT_RANK_LOST),
        ("not measured", EXIT_OK, EXIT_NOTHING_MEASURED),
    ],
)
def test_how_the_ranks_ended_outranks_all_but_wrong_bits(verdict: str, ended: int, code: int) -> None:
    row = replace(ROW, verdict=verdict, ok=verdict == "ok")
    assert judge([ROW, row], ended).exit_code == code


def test_a_lost_rank_and_wrong_bits_have_the_documented_codes() -> None:
    assert (EXIT_RANK_LOST, EXIT_WRONG_BITS) == (7, 6)


def test_a_row_without_digests_is_not_measured_however_fast_it_was() -> None:
    found = row_verdict(digest_passed=0, digest_total=0, measured_s=0.5, planned_bytes=100, wire_bytes=100)
    assert found == "not measured"


def test_notes_speak_of_rows_that_took_more_memory_than_they_were_allowed() -> None:
    rows = [replace(ROW, move=str(peak), max_extra_bytes=1000, peak_bytes=peak) for peak in (900, 1000, 1001)]
    assert notes([*rows, replace(ROW, peak_bytes=10**9)]) == (
        "1001 by chosen: a process took 1 kB beyond its larger layout, 1 kB were allowed and 8 B predicted",
    )


def test_notes_speak_of_rows_clearly_below_their_bound_only() -> None:
    rows = [
        replace(ROW, move=move, bound_s=2.0, measured_s=None if share is None else 2.0 * share)
        for move, share in (("far", 0.5), ("below", 0.96), ("near", 0.98), ("at", 1.0), ("over", 1.1), ("none", None))
    ]
    said = notes([*rows, replace(ROW, move="no bound", bound_s=0.0, measured_s=0.5)])
    assert [line.split(" by ")[0] for line in said] == ["far", "below"]
    assert "(0.960 of it)" in said[1]
