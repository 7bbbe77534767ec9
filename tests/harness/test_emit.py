"""Tables, plots and verdicts are made from rows; JSON goes where it was asked to go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from test_records import ROW

from relaymeter.errors import InputError
from relaymeter.harness import emit
from relaymeter.harness.plots import plot_rows
from relaymeter.harness.verdict import judge, row_verdict
from relaymeter.records import MoveRecord, dump_lines


def text_of(table: Table) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(table)
    return console.export_text()


def rows() -> list[MoveRecord]:
    return [replace(ROW, route=route, chosen=route == "chosen") for route in ("direct", "relay", "spread", "chosen")]


def test_run_table_shows_every_route_with_bound_error_bytes_and_digests() -> None:
    found = [*rows(), replace(ROW, move="tp2", measured_s=None, error=None, wire_cross_node_bytes=None)]
    tables = emit.run_tables(found)
    assert len(tables) == 2
    text = text_of(tables[0])
    for piece in (
        "direct",
        "relay",
        "spread",
        "chosen (spread)",
        "bound 450 ms (node 1 receive)",
        "1.111",
        "6/6",
        "11 B",
    ):
        assert piece in text
    assert "+0.0%" in text
    assert " - " in text_of(tables[1])


def test_intervals_share_the_unit_of_their_middle() -> None:
    text = text_of(emit.run_tables([replace(ROW, measured_s=0.0172, measured_low_s=0.0113, measured_high_s=1.25)])[0])
    assert "17.2 [11.3, 1250] ms" in text


def test_output_sends_tables_to_stderr_when_json_has_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    out = emit.Output("-", force=False)
    out.say("for people")
    out.json({"a": float("nan")})
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": None}
    assert printed.err == "for people\n"


def test_output_refuses_an_existing_file_before_any_work_is_done(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(InputError, match="--force"):
        emit.Output(str(path), force=False)
    out = emit.Output(str(path), force=True)
    out.json(dump_lines([ROW]))
    assert json.loads(path.read_text())["move"] == "tp1"


def _move(**changes: Any) -> dict[str, Any]:
    never = {"elements": None, "low": 4096, "high": None}
    return {
        "move": "tp1", "choice": "direct", "price_error": 0.03, "price_error_matrices": 6,
        "extrapolated": False, "regret_fixed_s": 0.01, "fixed_constants_s": 0.11,
        "thresholds": {"min_relay": {"2": {"elements": 65536, "low": 30000, "high": 70000}}, "min_split": {"2": never}},
        **changes,
    }  # fmt: skip


def test_thresholds_are_printed_in_elements_and_never_is_an_answer() -> None:
    lines = emit.choice_lines(_move())
    assert "min_relay(2 ranks per node) = 65,536 elements [30,000, 70,000]" in lines
    assert "min_split(2 ranks per node) = never [4,096, never]" in lines
    assert "would take 110 ms: +10 ms" in lines[-1]
    assert emit.choice_lines(_move(choice=None)) == []


@pytest.mark.parametrize("name", ["run.png", "run.svg"])
def test_plot_is_written_whole_and_not_over_another(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    plot_rows(rows(), path)
    assert path.stat().st_size > 5000
    with pytest.raises(InputError, match="--force"):
        plot_rows(rows(), path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_plot_names_the_formats_it_knows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        plot_rows(rows(), tmp_path / "run.bmp")


@pytest.mark.parametrize(
    ("passed", "measured", "wire", "expected"),
    [
        (6, 0.5, 105_000_000, "ok"),
        (6, 0.5, None, "ok"),
        (6, 0.5, 200_000_000, "wire bytes differ"),
        (6, 0.5, 0, "wire bytes differ"),
        (5, 0.5, 0, "wrong bits"),
        (6, None, None, "not measured"),
    ],
)
def test_row_verdicts_put_wrong_bits_first(
    passed: int, measured: float | None, wire: int | None, expected: str
) -> None:
    found = row_verdict(
        digest_passed=passed, digest_total=6, measured_s=measured, planned_bytes=100_000_000, wire_bytes=wire
    )
    assert found == expected


def test_the_worst_row_decides_the_exit_code_and_is_printed_first() -> None:
    wire = replace(ROW, verdict="wire bytes differ", ok=False)
    wrong = replace(ROW, verdict="wrong bits", ok=False, digest_passed=5, mismatch="w, elements [0, 4096)")
    found = judge([ROW, wire, wrong])
    assert found.exit_code == 6
    assert found.lines[0] == "WRONG BITS in tp1 by chosen: 1 of 6 digests differ; first: w, elements [0, 4096)"
    assert judge([ROW, wire]).exit_code == 3
    assert judge([ROW]) == judge(rows())
    assert judge([ROW]).exit_code == 0
    assert judge([]).exit_code == 5
