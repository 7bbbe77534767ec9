"""Rows that contradict themselves are refused where they are read; odd names, times and numbers of rows are drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_report import CANNOT, COMPARE, FAILED, MOVE, OFFLOAD, STATE, UNIVERSAL, WRONG
from test_report_input import SOAK
from validate_rows_by_hand import row as validation_row

from relaymeter.errors import EXIT_WRONG_BITS, InputError
from relaymeter.harness import report_plots
from relaymeter.harness.cli import main
from relaymeter.harness.plots import drawable, drawn
from relaymeter.harness.report_figures import ratio_text
from relaymeter.harness.report_plots import draw_plots
from relaymeter.harness.report_sources import read_sources
from relaymeter.records import MoveRecord, Row, dump_json, dump_lines, load_json, read_records
from relaymeter.validation_records import read_validation

NO_SECONDS = {name: None for name in COMPARE.to_dict() if name.endswith("_s")}


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (COMPARE, {"verdict": "nonsense"}, 'verdict = "nonsense": expected one of ok, wrong bits, cannot, failed'),
        (COMPARE, {"ok": False}, 'ok = false: expected true where verdict is "ok"'),
        (CANNOT, {"digest_passed": 3, "digest_total": 72}, 'digest_passed = 3: expected 0 where verdict is "cannot"'),
        (CANNOT, {"total_s": 1.0}, 'total_s = 1.0: expected null where verdict is "cannot"'),
        (CANNOT, {"load_s": 1.0}, 'load_s = 1.0: expected null where verdict is "cannot"'),
        (CANNOT, {"cannot": None}, 'cannot = null: expected the reason where verdict is "cannot"'),
        (FAILED, {"cannot": "x"}, 'cannot = "x": expected null where verdict is "failed"'),
        (COMPARE, {"digest_passed": 99999}, "digest_passed = 99999: expected at most digest_total, which is 90"),
        (CANNOT, {"mismatch": "w"}, 'mismatch = "w": expected null where verdict is "cannot"'),
        (WRONG, {"digest_passed": 90, "mismatch": None}, 'verdict = "wrong bits": expected ok where all digests '
         "passed"),
        (COMPARE, NO_SECONDS, 'pause_s = null: expected a number where verdict is "ok"'),
        (COMPARE, {"pause_s": -1.0}, "pause_s = -1.0: expected at least 0"),
        (COMPARE, {"pause_s": 1e308, "total_s": 1e308}, "pause_s = 1e+308: expected at most 1e10, some 300 years"),
        (COMPARE, {"pause_s": 2.0}, "pause_s = 2.0: expected at most total_s, which is 1.25"),
        (UNIVERSAL, {"pause_s": 9.0}, "pause_s = 9.0: expected at least relaunch_s and import_s, together 10.0"),
        (COMPARE, {"launch": -5}, "launch = -5: expected at least 1"),
        (COMPARE, {"ranks": 0}, "ranks = 0: expected at least 1"),
        (COMPARE, {"utc": "never"}, 'utc = "never": expected a time in UTC such as 2026-01-02T03:04:05Z'),
        (COMPARE, {"utc": "2026-13-02T03:04:05Z"}, 'utc = "2026-13-02T03:04:05Z": expected a time in UTC such as '
         "2026-01-02T03:04:05Z"),
        (COMPARE, {"path": "warp"}, 'path = "warp": expected one of in-memory, gather, dcp, universal, megatron'),
        (COMPARE, {"change": ""}, 'change = "": expected a name, not nothing'),
        (COMPARE, {"storage": " "}, 'storage = " ": expected a name, not nothing'),
        (MOVE, {"schema_version": True}, "record of schema_version true: this version reads 1 to 3"),
        (COMPARE, {"schema_version": 1.0}, "record of schema_version 1.0: this version reads 1"),
        (MOVE, {"samples_s": [[0.5], [0.5, -1]]}, "samples_s[1][1] = -1.0: expected at least 0"),
        (MOVE, {"route_bytes": {"direct": -7}}, "route_bytes.direct = -7: expected at least 0"),
        (MOVE, {"error": -1.5}, "error = -1.5: expected at least -1"),
        (MOVE, {"nodes": 5}, "nodes = 5: expected at most ranks, which is 4"),
        (MOVE, {"measured_low_s": 0.6}, "measured_low_s = 0.6: expected at most measured_s, which is 0.5"),
        (MOVE, {"measured_s": None}, 'measured_s = null: expected a number where verdict is "ok"'),
        (MOVE, {"simulated": "h100"}, 'simulated = "h100": expected null where verdict is "ok"'),
        (MOVE, {"verdict": "wrong bits", "ok": False}, 'verdict = "wrong bits": expected another one where all digests '
         "passed"),
        (STATE, {"oracle_passed": 31}, "oracle_passed = 31: expected at most oracle_total, which is 30"),
        (STATE, {"fields": ["lr"]}, 'verdict = "ok": expected wrong bits where a field or training on differs'),
        (STATE, {"checkpoint": "differs: w"}, 'checkpoint = "differs: w": expected no difference where verdict is '
         '"ok"'),
        (STATE, {"refused": "no"}, 'refused = "no": expected null where verdict is "ok"'),
        (STATE, {"planner": "mine"}, 'planner = "mine": expected one of classes, affine'),
        (OFFLOAD, {"equal": False}, 'verdict = "ok": expected wrong bits where the state differs'),
        (OFFLOAD, {"reload_s": None}, 'reload_s = null: expected a number where verdict is "ok"'),
        (OFFLOAD, {"way": "other"}, 'way = "other": expected one of deepspeed, release'),
        (SOAK, {"wrong_bytes": 3}, 'verdict = "ok": expected wrong bits where wrong_bytes is 3 and finished is true'),
        (SOAK, {"verdict": "fine"}, 'verdict = "fine": expected one of ok, wrong bits, not finished'),
    ],
)  # fmt: skip
def test_a_row_that_contradicts_itself_is_refused(
    row: Row, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(dump_json({**row.to_dict(), **change}, indent=None))
    with pytest.raises(InputError) as refused:
        read_sources([path])
    assert str(refused.value) == f"records {path}, line 1: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hard": ["tough"]}, 'hard[0] = "tough": expected one of two-way, in-node, small segments, incast, unshaped'),
        ({"measured_s": 0.0, "measured_low_s": 0.0}, "measured_s = 0.0: expected above 0"),
        ({"digest_passed": 9, "digest_total": 8}, "digest_passed = 9: expected at most digest_total, which is 8"),
        ({"schema_version": True}, "record of schema_version true: this version reads 1"),
    ],
)
def test_rows_of_validate_are_checked_the_same_way(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(dump_json({**validation_row("size", 0.5, 0.5).to_dict(), **change}, indent=None))
    with pytest.raises(InputError) as refused:
        read_validation(path)
    assert str(refused.value) == f"records {path}, line 1: {message}"


@pytest.mark.parametrize("row", [COMPARE, MOVE, STATE], ids=lambda row: type(row).__name__)
@pytest.mark.parametrize("change", [{"digest_passed": 1}, {"mismatch": "w: elements 0 to 9"}], ids=str)
def test_digests_that_differ_are_wrong_bits_whatever_the_verdict_says(
    row: Any, change: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(dump_lines([replace(row, **change)]))
    assert main(["report", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "report")]) == EXIT_WRONG_BITS


def test_every_verdict_that_a_command_gives_is_read(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("plan_s", "prepare_s", "move_s", "fields_s", "refresh_s", "total_s"))
    none = {"digest_passed": 0, "digest_total": 0, "ok": False}
    rows = [
        COMPARE, UNIVERSAL, CANNOT, WRONG, FAILED, replace(COMPARE, **{**none, "verdict": "wrong bits"}), MOVE, STATE,
        OFFLOAD, replace(MOVE, **{**none, "ok": True, "simulated": "h100", "verdict": "simulated"}),
        replace(MOVE, verdict="wire bytes differ", ok=False), replace(MOVE, **none, verdict="not measured"),
        replace(MOVE, digest_passed=5, verdict="wrong bits", ok=False),
        replace(STATE, **none, **nothing, leg=0, oracle_passed=0, oracle_total=0, refused="no", verdict="refused"),
        replace(STATE, **none, verdict="not checked"),
        replace(STATE, checkpoint="differs: w", verdict="checkpoint differs", ok=False),
        replace(STATE, continuation_ok=False, verdict="wrong bits", ok=False),
        replace(OFFLOAD, equal=None, trains=None, offload_s=None, reload_s=None, verdict="not offered"),
        replace(OFFLOAD, equal=None, verdict="failed", ok=False), replace(OFFLOAD, host_growth_bytes=-7),
        replace(OFFLOAD, trains="differs: loss", verdict="wrong bits", ok=False),
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text(dump_lines(rows))
    assert list(read_sources([path])[0][0].rows) == rows


@pytest.mark.parametrize(
    ("name", "told"), [("a\ud800b", "a\\ud800b"), ("a\rb", "a\\rb"), ("a\0b", "a\\x00b"), ("\u4e2d", "\\u4e2d")]
)
def test_a_name_of_any_letters_is_written_and_drawn(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(dump_lines([replace(COMPARE, change=name), replace(STATE, change=name, fields=()), MOVE]))
    assert drawn(name) == told
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == ""
    if name == "a\ud800b":
        assert told in (tmp_path / "out" / "rows.csv").read_text()
        assert told in (tmp_path / "out" / "report.md").read_text().replace("\\\\", "\\")


def test_a_ratio_without_end_has_a_text() -> None:
    assert ratio_text(1.0, 5e-324) == "over 1e308x"


def test_names_are_cut_and_keep_to_one_line() -> None:
    assert drawn("x" * 9, most=8) == "xxxxx..." and drawn("x" * 8, most=8) == "x" * 8 and drawn("a\nb") == "a\\nb"


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e308])
def test_times_that_no_axis_has_are_drawn(seconds: float, tmp_path: Path) -> None:
    odd = dict.fromkeys(("pause_s", "total_s", "move_s", "build_s"), seconds)
    rows = [
        replace(COMPARE, **odd), replace(UNIVERSAL, load_s=seconds),
        replace(STATE, plan_s=seconds, move_s=seconds, total_s=seconds),
        replace(MOVE, measured_s=seconds, measured_low_s=seconds, measured_high_s=seconds, bound_s=seconds),
    ]  # fmt: skip
    assert "moves.png" in draw_plots(rows, tmp_path)
    assert (drawable(5e-324), drawable(1e308), drawable(0.0), drawable(2.5)) == (1e-12, 1e12, 0.0, 2.5)


def test_of_many_panels_the_first_are_drawn_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_plots, "_MOST_PANELS", 1)
    monkeypatch.setattr(report_plots, "_MANY_PANELS", 1)
    said: list[str] = []
    rows = [replace(row, change=name) for name in ("one", "two") for row in (COMPARE, UNIVERSAL)]
    moves = [replace(MOVE, move=name) for name in ("tp1", "tp2")]
    found = draw_plots([*rows, *moves], tmp_path, said.append)
    left = "; the first 1 of 2 panels: the others are in the tables alone"
    assert found["ratios.png"] == f"time of every path over the path in memory{left}"
    assert [text.partition(":")[0] for text in said] == [
        "drawing phases.png", "drawing ratios.png", "drawing moves.png"
    ]  # fmt: skip
    assert said[0].endswith(left) and said[2].endswith("the first 1 of 2 moves: the others are in the tables alone")


@pytest.mark.parametrize(
    ("old", "new"), [("", "\ufeff"), ("\n", "\r\n"), ("}\n{", "}\n\ufeff{")], ids=["mark", "crlf", "two marks"]
)
def test_files_of_other_systems_are_read(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(dump_lines([MOVE, MOVE]).replace(old, new, 1 if old != "\n" else -1).encode())
    assert read_records(path) == [MOVE, MOVE]
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert load_json(path, "plan") == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "line 1: an empty line: every line holds one row, so delete it"),
        ('{"a" 1}\n', "line 1: not valid JSON at column 6: Expecting ':' delimiter"),
        ("[" * 100_000, "line 1: nested too deeply for a row"),
    ],
)
def test_a_line_that_is_no_row_is_told_in_plain_words(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_records(path)
    assert str(refused.value) == f"records {path}, {message}"


def test_a_version_of_another_type_is_no_version() -> None:
    with pytest.raises(InputError, match=r"schema_version 1\.0: this version reads 1 to 3"):
        MoveRecord.from_dict({**json.loads(dump_lines([MOVE])), "schema_version": 1.0})
