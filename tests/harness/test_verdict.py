"""A run's exit code is the worst of its rows and of how its ranks ended."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_records import ROW

from relaymeter.errors import EXIT_GATE_MISSED, EXIT_NOTHING_MEASURED, EXIT_OK, EXIT_RANK_LOST, EXIT_WRONG_BITS
from relaymeter.harness import commands_run
from relaymeter.harness.emit import Output
from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.scenario import load_scenario
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


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """``report(verdict, ended)``: code, lines and errors of a run whose every file is in the way by its end."""

    def call(digests: int, ended: int) -> tuple[int, list[str], list[str]]:
        row = replace(ROW, digest_passed=digests, verdict="ok" if digests == ROW.digest_total else "wrong bits")
        out = Output(str(tmp_path / "rows.jsonl"), force=True)
        (tmp_path / ROW.machine_id).write_text("a file")
        for name in ("rows.jsonl", "run.png"):
            (tmp_path / name).mkdir()
        args = argparse.Namespace(json=str(tmp_path / "rows.jsonl"), plot=tmp_path / "run.png", results=tmp_path,
                                  force=True, suite=None)  # fmt: skip
        stamp = RunStamp(utc=ROW.utc, launch_id=ROW.launch_id, machine_id=ROW.machine_id, commit=None)
        asked: Any = SimpleNamespace(scenario=load_scenario("smoke"), files={})
        code = commands_run._report(args, [row], ended, None, asked, stamp, out)
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err.splitlines()

    return call


@pytest.mark.parametrize(("digests", "ended", "code"), [(0, 0, 6), (6, 7, 7), (6, 0, 2)])
def test_the_verdict_is_told_first_and_outranks_files_that_cannot_be_written(
    report: Any, digests: int, ended: int, code: int
) -> None:
    found, said, errors = report(digests, ended)
    assert found == code
    if code == 6:
        assert said[0].startswith("WRONG BITS in tp1 by ")
    assert any("6/6" in line or "0/6" in line for line in said), "the table"
    assert [line.partition(" was not written: ")[0] for line in errors] == [
        "relaymeter: --json", "relaymeter: --plot", "relaymeter: --results",
    ]  # fmt: skip
