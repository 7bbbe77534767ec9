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
from relaymeter.harness import emit, emit_plan, emit_run
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
    tables = emit_run.run_tables(found)
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


def both_planners(**changes: Any) -> list[MoveRecord]:
    return [replace(row, planner=planner, **changes) for planner in ("classes", "affine") for row in rows()[:3]]


def test_planner_and_executor_are_columns_only_where_rows_differ_in_them() -> None:
    assert "planner" not in text_of(emit_run.run_tables(rows())[0])
    text = text_of(emit_run.run_tables(both_planners())[0])
    assert "planner" in text and "affine" in text and "executor" not in text
    text = text_of(emit_run.run_tables([*rows(), replace(ROW, executor="all-to-all")])[0])
    assert "executor" in text and "all-to-all" in text and "planner" not in text


def test_rows_without_prices_show_neither_prediction_nor_bound() -> None:
    (row, *_) = rows()
    bare = replace(row, predicted_s=None, predicted_low_s=None, predicted_high_s=None, error=None, bound_s=None,
                   bound_by=None)  # fmt: skip
    text = text_of(emit_run.run_tables([bare])[0])
    assert "bound" not in text.splitlines()[0] and "None" not in text
    assert "predicted" not in text_of(emit_run.suite_table([bare]))


def test_a_suite_is_one_table_of_all_moves_with_the_bytes_of_each_source() -> None:
    found = [*both_planners(), *both_planners(move="grow", source_bytes={"old": 15_000, "trainer": 5_000})]
    text = text_of(emit_run.suite_table(found))
    assert text.splitlines()[0].startswith("smoke: 12 rows")
    lines = [line for line in text.splitlines() if "6/6" in line]
    assert len(lines) == 12
    assert all(piece in lines[-1] for piece in ("grow", "affine", "spread", "15 kB", "5 kB", "500 ms", "ok"))
    assert all(piece in lines[0] for piece in ("tp1", "classes", "direct", " - ", "20 B"))


def test_a_suite_names_the_fastest_row_of_each_move_that_crosses_nodes() -> None:
    direct, relay, *_ = rows()
    slow = replace(direct, route="direct", measured_s=0.5, bytes_cross_node=20)
    fast = replace(relay, route="relay", measured_s=0.25, bytes_cross_node=10)
    inside = replace(slow, move="inside", bytes_cross_node=0)
    assert emit_run.fastest_lines([slow, fast, inside]) == [
        f"fastest of {fast.move}: 250 ms (relay, {fast.planner}, {fast.executor}), 0.50 of direct"
    ]
    assert emit_run.fastest_lines([slow]) == [
        f"fastest of {slow.move}: 500 ms (direct, {slow.planner}, {slow.executor})"
    ]
    assert "[interval]" in emit_run.run_headline([slow]) and "[interval]" not in emit_run.run_headline(
        [slow], suite=True
    )


@pytest.mark.parametrize("make", [emit_run.suite_table, lambda found: emit_run.run_tables(found)[0]])
def test_the_widest_rows_fit_120_columns_without_cutting_a_number(make: Any) -> None:
    wide = replace(
        ROW, move="tp2x2-tp1x4-both", planner="affine", executor="all-to-all", route="spread",
        verdict="wire bytes differ",
        measured_s=0.634, measured_low_s=0.63, measured_high_s=0.64, predicted_s=0.651, predicted_low_s=0.62,
        predicted_high_s=0.7, bytes_cross_node=14_155_776, wire_cross_node_bytes=14_812_345, digest_passed=1104,
        digest_total=1104, peak_bytes=3_421_000, source_bytes={"old": 14_176_256, "trainer": 14_155_776},
    )  # fmt: skip
    table = make([wide, replace(wide, planner="classes", executor="send-recv")])
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(table)
    (line, *_) = [one for one in console.export_text().splitlines() if "all-to-all" in one]
    assert len(line) <= 120
    for piece in ("affine", "634", "651 ms", "14.2 MB", "14.8 MB", "1104/1104"):
        assert piece in line


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("make", [emit_run.suite_table, lambda found: emit_run.run_tables(found)[0]])
def test_a_narrow_terminal_gets_every_cell_whole(make: Any, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    rows_ = [*both_planners(executor="all-to-all", bytes_cross_node=14_155_776), replace(ROW, executor="send-recv")]
    table = make(rows_)
    out = emit.Output(None, force=False)
    out.console.width = width
    out.table(table)
    lines = capsys.readouterr().out.splitlines()
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    found = [line for line in lines if "6/6" in line]
    assert len(found) == len(cells) == 7
    for line, row in zip(found, cells, strict=True):
        assert all(str(cell) in line for cell in row), (line, row)
    assert all(word in "\n".join(lines) for column in table.columns for word in str(column.header).split())
    assert out.console.width == width


def test_planner_lines_say_whether_the_bytes_are_equal_and_what_fell_back() -> None:
    found = both_planners()
    assert emit_run.planner_lines(rows()) == []
    assert emit_run.planner_lines(found) == ["both planners send the same bytes between nodes in 3 of 3 configurations"]
    found[-1] = replace(found[-1], bytes_cross_node=99, fallback_tensors=4)
    assert emit_run.planner_lines(found) == [
        "both planners send the same bytes between nodes in 2 of 3 configurations",
        "tp1 by spread: classes 10 B, affine 99 B between nodes",
        "tp1: affine fell back for 4 tensors (relaymeter plan says which and why)",
    ]


def test_intervals_share_the_unit_of_their_middle() -> None:
    text = text_of(
        emit_run.run_tables([replace(ROW, measured_s=0.0172, measured_low_s=0.0113, measured_high_s=1.25)])[0]
    )
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
        "extrapolated": False, "fixed_constants_s": 0.11, "found_constants_s": 0.11, "chosen_s": 0.1,
        "classes": [{"route": "chain"}, {"route": "relay"}],
        "thresholds": {"min_relay": {"2": {"elements": 65536, "low": 30000, "high": 70000}}, "min_split": {"2": never}},
        **changes,
    }  # fmt: skip


def test_thresholds_are_printed_in_elements_and_never_is_an_answer() -> None:
    lines = emit_plan.choice_lines(_move())
    assert "min_relay(2 ranks per node) = 65,536 elements [30,000, 70,000]" in lines
    assert "min_split(2 ranks per node) = never [4,096, never]" in lines
    assert "the scatter of the measurement only" in lines[-2]
    assert lines[-1] == (
        "predicted: 65,536 for both 110 ms; the thresholds found 110 ms (the same); routes by class 100 ms (-9.1%, "
        "with chain, which the two constants cannot ask for)"
    )
    assert emit_plan.choice_lines(_move(choice=None)) == []


@pytest.mark.parametrize("name", ["run.png", "run.svg"])
def test_plot_is_written_whole_and_not_over_another(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    plot_rows(rows(), path)
    assert path.stat().st_size > 5000
    with pytest.raises(InputError, match="--force"):
        plot_rows(rows(), path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_plots_of_both_planners_and_without_prices_are_drawn(tmp_path: Path) -> None:
    bare = {"predicted_s": None, "predicted_low_s": None, "predicted_high_s": None, "bound_s": None, "bound_by": None}
    found = [row for k in range(7) for row in both_planners(move=f"m{k}", **bare)]
    plot_rows(found, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 5000


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
