from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaymeter.calibration.wrong_bytes import WrongRun
from relaymeter.errors import InputError
from relaymeter.harness import commands_soak, emit
from relaymeter.harness.cli import main
from relaymeter.harness.soak_rows import SoakRecord, by_origin, runs_of, soak_rows

BLOCK = 128 << 10


def _record(**changes: Any) -> SoakRecord:
    known = SoakRecord(
        utc="2026-01-02T03:04:05Z", machine_id="abc", launch_id="1", commit=None, shaped=False, ranks=4, nodes=2,
        backend="nccl", executors=("all-to-all",), seconds_asked=10.0, bytes_asked=None, message_bytes=1 << 30, peers=3,
        calls=12, messages=144, bytes_total=150_000_000_000, elapsed_s=10.0, make_s=0.1, exchange_s=9.5, check_s=0.2,
        wrong_messages=0, wrong_bytes=0, runs=0, finished=True, verdict="ok", ok=True,
    )  # fmt: skip
    return replace(known, **changes)


def _run(begin: int, source: int | None, origin: str) -> WrongRun:
    return WrongRun(
        executor="all-to-all", call=3, sender=0, receiver=2, message_bytes=1 << 30, begin_bytes=begin,
        length_bytes=BLOCK, wrong_bytes=BLOCK - 500, begin_grid_bytes=BLOCK, length_grid_bytes=BLOCK, origin=origin,
        origin_sender=None if source is None else 1, origin_receiver=None if source is None else 2,
        origin_calls_back=None if source is None else 2, origin_begin_bytes=source,
    )  # fmt: skip


def _report(record: SoakRecord, runs: Sequence[WrongRun], code: int, target: str | None = None) -> int:
    places = [(0, "east"), (0, "east"), (1, "west"), (1, "west")]
    rows = soak_rows(record, [], [run.to_dict() for run in runs], places)
    return commands_soak._report(argparse.Namespace(json=target), rows, code, emit.Output(target, force=False))


def test_a_clean_soak_is_one_sentence_over_all_ranks_and_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert _report(_record(), [], 0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "no wrong byte in 144 messages, 139.7 GiB (all 4 ranks together)",
        "soak of 4 ranks on 2 nodes by all-to-all over nccl: 12 calls in 10 s, messages of up to 1 GiB, 15 GB/s",
        "slowest rank: exchange 9.5 s, making 100 ms, checking 200 ms (3% of the time for both)",
    ]


@pytest.mark.parametrize("code", [0, 7, 124, 130])
def test_wrong_bits_come_first_and_outrank_all_else(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        _run(3 * BLOCK, 640, "earlier call"), _run(5 * BLOCK, None, "zeros"),
        replace(_run(8 * BLOCK, 7 * BLOCK, "another offset"), origin_calls_back=0),
    ]  # fmt: skip
    record = _record(wrong_messages=3, wrong_bytes=391716, runs=3, origins=by_origin(runs), verdict="wrong bits")
    assert _report(record, runs, code) == 6
    text = capsys.readouterr().out
    assert text.startswith("WRONG BITS: 391716 bytes of 3 messages not as sent (all 4 ranks together: 144 messages")
    assert "zeros: 130572 wrong bytes in 1 run (1 x 128 KiB), all on a grid of 128 KiB" in text
    for piece in (
        "0, node 0 (east)",
        "2, node 1 (west)",
        "bytes from 640 of rank 1's message to rank 2 of call 1",
        f"bytes from {7 * BLOCK} of the same message",
    ):
        assert piece in " ".join(text.split())


@pytest.mark.parametrize("code", [7, 124, 130])
def test_a_soak_that_breaks_off_says_what_was_right_and_keeps_the_code(
    code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _record(finished=False, verdict="not finished", ok=False, make_s=None, exchange_s=None, check_s=None)
    assert _report(record, [], code) == code
    assert f"the soak broke off (exit code {code}): what was checked before was right" in capsys.readouterr().out


def test_rows_read_back_and_refuse_what_they_do_not_know(tmp_path: Path) -> None:
    runs = [_run(3 * BLOCK, 640, "earlier call")]
    target = tmp_path / "soak.jsonl"
    record = _record(origins=by_origin(runs), runs=1, wrong_bytes=5)
    assert _report(record, runs, 0, str(target)) == 6
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["soak", "soak-run"]
    assert SoakRecord.from_dict(rows[0]) == record
    assert runs_of(rows) == runs
    assert rows[1]["launch_id"] == record.launch_id
    for wrong in ({**rows[0], "schema_version": 9}, {**rows[0], "kind": "run"}, {**rows[0], "more": 1}):
        with pytest.raises(InputError):
            SoakRecord.from_dict(wrong)


BAD = {
    "message too long": (
        ["--message", "17GiB"],
        2,
        "--message 18253611008 is more than a label can number: give at most",
    ),
    "no size": (["--bytes", "much"], 2, "'much' is not a size in bytes"),
    "no time": (["--seconds", "0"], 2, "'0' is not a positive number of seconds"),
    "one rank": (["--nodes", "1", "--ranks-per-node", "1"], 5, "a soak needs two ranks"),
    "a fault of no rank": (["--fault", "swap:4"], 2, "--fault: rank 4 of 4 ranks"),
    "an unknown fault": (["--fault", "spill:1"], 2, "'spill:1' is not one of swap, flip, stale, zeros, kill, stop"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_a_rank_starts(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, code, text = BAD[case]
    try:
        found = main(["soak", *arguments])
    except SystemExit as ended:
        found = int(ended.code or 0)
    captured = capsys.readouterr()
    assert found == code
    assert text in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.dist
def test_the_command_finds_what_was_damaged_on_a_rank_that_is_not_rank_0(cli: Any, tmp_path: Path) -> None:
    done = cli(
        "soak", "--bytes", "9MiB", "--message", "512KiB", "--executor", "all-to-all", "--nodes", "2",
        "--ranks-per-node", "1", "--fault", "swap:1", "--json", "soak.jsonl", limit_s=100, warm=True,
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    assert done.stdout.splitlines()[0 if "cannot shape" not in done.stdout else 1].startswith("WRONG BITS: 26")
    assert "another offset: 26" in done.stdout and "all on a grid of 128 KiB" in done.stdout
    assert "soak 100%" in done.stderr and "MiB moved" in done.stderr and "WRONG: 26" in done.stderr
    summary, *rows = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["soak-rank"] * 2 + ["soak-run"] * 2
    assert (summary["verdict"], summary["ok"], summary["finished"]) == ("wrong bits", False, True)
    assert summary["bytes_total"] == sum(row["received_bytes"] for row in rows[:2])
    assert 0 <= summary["bytes_total"] - (9 << 20) < 2 * 16
    assert [row["receiver"] for row in rows[2:]] == [1, 1]
    assert [(row["sender_node"], row["receiver_node"]) for row in rows[2:]] == [(0, 1)] * 2
