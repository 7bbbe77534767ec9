"""Reports of kept results: nothing is averaged that does not belong together, and wrong bits come first."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_records import ROW as MOVE
from test_state_records import OFFLOAD, STATE

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import InputError, NothingMeasured
from relaymeter.harness import commands_report
from relaymeter.harness.cli import main
from relaymeter.harness.compare_config import CompareScenario
from relaymeter.harness.report_document import make_document
from relaymeter.harness.report_figures import Figure, figure, figure_text, interval_note, over
from relaymeter.harness.report_files import check_folder, default_folder, write_folder
from relaymeter.harness.report_frame import NO_PARQUET
from relaymeter.harness.report_markdown import escaped, markdown
from relaymeter.harness.report_sources import How, Source, read_sources
from relaymeter.harness.report_tables import ReportTable
from relaymeter.harness.scenario import load_any
from relaymeter.records import Row, dump_lines
from relaymeter.units import counted

RESULTS = Path(__file__).resolve().parents[2] / "results"
COMPARE = CompareRecord(
    utc="2026-01-02T03:04:05Z", machine_id="abc", launch_id="l1", commit="c0ffee", shaped=False, scenario="rfc-small",
    change="dp4-dp2", source="zero3 x4", destination="zero3 x2", path="in-memory", storage=None, filesystem=None,
    cache=None, launch=1, ranks=4, nodes=1, model="blocks", dtype="bfloat16", optimizer="AdamW",
    state_bytes=125_000_000, plan_s=0.05, move_s=0.15, refresh_s=0.05, build_s=1.0, digest_s=0.1, pause_s=0.2,
    transfer_s=0.25, total_s=1.25, digest_version=1, digest_passed=90, digest_total=90, verdict="ok", ok=True,
)  # fmt: skip
UNIVERSAL = replace(
    COMPARE, path="universal", storage="disk", filesystem="ext4", cache="warm", plan_s=None, move_s=None, save_s=2.0,
    convert_s=3.0, relaunch_s=2.0, import_s=8.0, build_s=1.0, load_s=4.0, refresh_s=None, pause_s=20.0, transfer_s=9.0,
    total_s=20.0, note="learning rates | schedulers are not in it",
)  # fmt: skip
NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "save_s",
        "convert_s",
        "relaunch_s",
        "import_s",
        "build_s",
        "load_s",
        "digest_s",
        "pause_s",
        "transfer_s",
        "total_s",
    )
)
CANNOT = replace(
    UNIVERSAL, **NOTHING, path="megatron", digest_passed=0, digest_total=0, cannot="Megatron is not installed",
    verdict="cannot", ok=False, note=None,
)  # fmt: skip
WRONG = replace(
    UNIVERSAL, path="dcp", convert_s=None, digest_passed=89, mismatch="exp_avg of w, elements 0 to 4095",
    verdict="wrong bits", ok=False, note=None,
)  # fmt: skip
FAILED = replace(
    CANNOT, path="gather", storage=None, filesystem=None, cache=None, cannot=None, failed="rank 2 ran out of memory",
    verdict="failed",
)  # fmt: skip


def text_of(*rows: Row, command: str = "relaymeter compare --scenario rfc-small") -> str:
    source = Source(Path("rows.jsonl"), tuple(rows), How(command, (("torch", "2.13.0"), ("cores", "2"))))  # type: ignore[arg-type]
    return markdown(make_document([source]), {})


def line(text: str, start: str) -> list[str]:
    """The cells of the first line of a table that begins with ``start``."""
    (found, *_) = [one for one in text.splitlines() if one.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split(" | ")]


def keep(folder: Path, rows: Sequence[Row], how: str | None = "relaymeter compare\ntorch: 2.13.0\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text(dump_lines(rows))
    if how is not None:
        (folder / "how.txt").write_text(how)
    return folder


def test_a_path_has_pause_and_total_with_and_without_relaunch_beside_the_path_in_memory() -> None:
    text = text_of(COMPARE, UNIVERSAL)
    assert line(text, "path") == ["path", "pause", "pause without relaunch and imports", "state only", "total",
                                  "total without relaunch and imports", "digests equal"]  # fmt: skip
    assert line(text, "in-memory")[1:] == ["200 ms", "-", "250 ms", "1.25 s", "-", "90/90"]
    assert line(text, "universal, disk (ext4), warm cache[^1]")[1:] == [
        "20 s, 100x", "10 s, 50x", "9 s, 36x", "20 s, 16x", "10 s, 8.0x", "90/90",
    ]  # fmt: skip
    assert "[^1]: learning rates \\| schedulers are not in it" in text
    assert "1 launch: no interval" in text
    assert "- no change by gather\n- no change by dcp\n- no change by megatron" in text
    scenario = load_any("rfc-small")
    assert isinstance(scenario, CompareScenario)
    left = [change.name for change in scenario.changes if change.name != "dp4-dp2"]
    assert f"- {counted(len(left), 'change')} of {len(scenario.changes)}: {', '.join(left)}" in text
    assert (
        "zero3 x2, 1 launch: training stands still for 200 ms in memory; 20 s by universal on disk (ext4), warm cache "
        "(100x; 50x without relaunch and imports; 36x state only)\n"
    ) in text


def test_a_reader_who_knows_none_of_its_words_has_a_legend_and_the_facts() -> None:
    cluster = "1 x 4 ranks on loopback, a NIC per rank, unshaped"
    text = text_of(replace(COMPARE, cluster=cluster), replace(UNIVERSAL, cluster=cluster))
    assert text.startswith("# Resharding in memory beside checkpoints: rfc-small\n")
    legend = text[text.index("### Legend") :]
    assert line(legend, "in-memory")[2] == "stay" and line(legend, "universal")[2] == "started anew"
    assert "| gather |" not in legend  # no row has it
    assert "zero3 x4 tp2: ZeRO stage 3 on 4 ranks, tensor-parallel degree 2" in legend and "digests equal: " in legend
    assert text.count("that overlap was not measured, and both engines are alive then, so the state is held twice") == 2
    assert f"4 ranks on 1 node (cluster: {cluster}); 125 MB of state: fp32 masters and moments" in text
    assert "blocks (5 residual blocks of width 512) in bfloat16, AdamW" in text
    weights = text_of(replace(COMPARE, destination="tp2 x 2 copies", state_bytes=21_000_000))
    assert "21 MB of weights" in weights and "masters" not in weights
    how = How("relaymeter compare", (("gpu_driver", "None"), ("torch", "2.13.0"), ("deepspeed", "0.19.8")))
    facts = markdown(make_document([Source(Path("r"), (COMPARE,), how)]), {"phases.png": "phases"})
    assert "torch 2.13.0, deepspeed 0.19.8; not kept: python, backend, device" in facts and "None" not in facts
    assert "upload `phases.png` beside it" in facts
    assert "Resharding" not in text_of(COMPARE, OFFLOAD).splitlines()[0]


def test_a_path_that_moves_weights_alone_stands_in_no_ratio_to_what_moves_all() -> None:
    refit = replace(
        COMPARE, path="megatron", build_s=0.5, plan_s=0.02, move_s=0.01, refresh_s=None, pause_s=0.01, transfer_s=0.01,
        total_s=0.53, digest_passed=30, digest_total=30, note="weights alone",
    )  # fmt: skip
    text = text_of(COMPARE, refit)
    assert line(text, "megatron[^1]")[1:] == ["10 ms", "10 ms", "530 ms", "30/30"]
    assert "10 ms by megatron (weights alone: no ratio)" in text
    copies = text_of(*(replace(row, destination="tp2 x 2 copies") for row in (COMPARE, refit)))
    assert line(copies, "megatron[^1]")[1] == "10 ms, 0.05x"


def test_the_summary_names_the_storage_of_its_ratios_and_the_range_over_all() -> None:
    cold = replace(UNIVERSAL, cache="cold", pause_s=18.0, transfer_s=10.0)
    assert (
        "; 18 s by universal on disk (ext4), cold cache (90x; 40x without relaunch and imports; 40x state only; 90x to "
        "100x over all 2 storages and caches)"
    ) in text_of(COMPARE, UNIVERSAL, cold)


@pytest.mark.parametrize(
    ("value", "text"), [(16.84, "168x"), (1.0, "10.0x"), (0.332, "3.32x"), (0.1, "1.00x"), (0.05, "0.50x")]
)
def test_ratios_of_few_launches_have_two_digits(value: float, text: str) -> None:
    few = {"168x": "170x", "10.0x": "10x", "3.32x": "3.3x", "1.00x": "1.0x", "0.50x": "0.50x"}
    base = Figure(0.1, 0.1, 0.1, samples=3, launches=3)
    assert over(Figure(value, value, value, samples=3, launches=3), base) == text
    assert over(Figure(value, value, value, samples=3, launches=1), base) == few[text]
    assert over(None, base) == "-"


def test_what_a_command_did_not_select_was_not_left_out_by_accident() -> None:
    text = text_of(COMPARE, UNIVERSAL, command="relaymeter compare --change=dp4-dp2 --paths in-memory,universal")
    assert (
        "- not selected by --change: 4 changes of 5: " in text and "- not selected by --paths: no change by dcp" in text
    )
    assert "not selected" not in text_of(COMPARE, UNIVERSAL)
    known = Source(Path("a"), (COMPARE,), How("relaymeter compare --change dp4-dp2", ()))
    other = Source(Path("b"), (UNIVERSAL,), How("relaymeter compare", ()))
    assert "not selected" not in markdown(make_document([known, other]), {})


def test_each_of_several_commands_says_what_it_made_and_a_scenario_of_ones_own_is_named() -> None:
    command = "relaymeter compare --scenario my/own.toml --journal j --results 'r s'"
    sources = [
        Source(Path("one/rows.jsonl"), (COMPARE,), How(command, ())),
        Source(Path("two/rows.jsonl"), (UNIVERSAL,), How(f"{command} --force", ())),
    ]
    text = markdown(make_document(sources), {})
    assert f"# made one (1 row)\n{command}\n# made two (1 row): the same command again, over files" in text
    assert "content is not kept here (attach them): my/own.toml." in text
    assert "# made" not in text_of(COMPARE) and "attach" not in text_of(COMPARE)


def test_no_table_of_paths_is_wider_than_seven_columns() -> None:
    storages = [replace(UNIVERSAL, path=path, storage=f"s{n}") for path in ("dcp", "universal") for n in range(5)]
    rows = [replace(row, change=f"c{n}", predicted_pause_s=0.3) for n in range(8) for row in (COMPARE, *storages)]
    (section,) = make_document([Source(Path("r"), tuple(rows), None)]).sections
    assert max(len(table.columns) for table in section.tables) == 7
    assert [table.title for table in section.tables[:2]] == [
        f"pause of every change of rfc-small, {part}" for part in ("1 to 6", "7 to 8")
    ]
    assert "digests equal by every path that made the change: 90/90" in section.tables[2].captions


def test_phases_are_lines_and_those_that_no_path_has_are_left_out() -> None:
    text = text_of(COMPARE, UNIVERSAL)
    stay, anew = text.index(": phases, processes stay"), text.index(": phases, processes started anew")
    phases = [one.split(" | ") for one in text[stay:anew].splitlines() if one.startswith("| ")]
    assert [(name.removeprefix("| "), time.removesuffix(" |")) for name, time in phases] == [
        ("phase", "in-memory"), ("plan (not in pause)", "50 ms"), ("move", "150 ms"), ("build (not in pause)", "1 s"),
        ("refresh", "50 ms"), ("digest (the proof)", "100 ms"),
    ]  # fmt: skip
    assert line(text[anew:], "phase") == ["phase", "universal, disk (ext4), warm cache"]
    names = [one.split(" | ")[0][2:] for one in text[anew : text.index("### Legend")].splitlines() if one[:2] == "| "]
    assert names[1:] == ["save", "convert", "relaunch", "import", "build", "load", "digest (the proof)"]


def test_launches_give_medians_with_intervals() -> None:
    rows = [replace(COMPARE, launch=n, move_s=0.1 * n, pause_s=0.1 * n + 0.05) for n in (1, 2, 3)]
    rows += [replace(COMPARE, launch=1, launch_id="l2", move_s=0.9, pause_s=0.95)]
    text = text_of(*rows)
    assert line(text, "in-memory")[1] == "300 [150, 950] ms" and ", 4 launches: training stands still" in text
    assert "median of 4 launches [smallest, largest]" in text
    assert interval_note(6) == "median of 6 launches [95 % interval from order statistics]"
    assert interval_note(1, 3, "round") == "median of 3 rounds in 1 launch [smallest, largest]"
    assert figure({"a": [3.0, 1.0, 2.0], "b": [5.0]}) == Figure(3.5, 2.0, 5.0, samples=2, launches=2)
    assert figure({}) is None
    assert figure_text(figure({"a": [0.5]}), Figure(0.25, 0.25, 0.25, 1, 1)) == "500 ms, 2.0x"


def test_cannot_and_failed_are_footnotes_and_wrong_bits_come_first() -> None:
    text = text_of(COMPARE, CANNOT, FAILED, WRONG)
    disk = "disk (ext4), warm cache"
    assert line(text, f"megatron, {disk}")[1] == "cannot[^3]"
    assert line(text, "gather")[1] == "failed[^1]"
    assert line(text, f"dcp, {disk}")[1] == "**WRONG BITS**[^2]"
    assert line(text, f"dcp, {disk}")[-1] == "89/90 **WRONG BITS**"
    assert "[^3]: Megatron is not installed" in text
    assert text.split("\n\n")[1] == (
        "- **WRONG BITS** in dp4-dp2 by dcp on disk: 1 of 90 digests differ; first: exp_avg of w, elements 0 to 4095"
    )
    assert "- dp4-dp2 by gather: failed: rank 2 ran out of memory" in text
    assert "no wrong bit" not in text


def test_a_launch_that_failed_or_had_wrong_bits_is_in_no_median() -> None:
    text = text_of(COMPARE, replace(COMPARE, launch=2, digest_passed=89, pause_s=99.0, verdict="ok"))
    assert line(text, "in-memory (1 of 2 launches)[^1]")[1] == "200 ms"
    document = make_document([Source(Path("r"), (replace(COMPARE, digest_passed=89),), None)])
    assert document.exit_code == 6 and "1 of 90 digests differ" in document.wrong[0]


def test_commits_machines_and_states_never_share_a_table() -> None:
    other = replace(COMPARE, commit="beef-dirty", launch_id="l2", pause_s=0.4)
    text = text_of(COMPARE, other, replace(COMPARE, state_bytes=7_000_000, pause_s=0.7))
    assert [line_ for line_ in text.splitlines() if line_.startswith("### ") and "phases" not in line_][:-1] == [
        "### pause of every change of rfc-small, commit c0ffee on abc",
        "### dp4-dp2: zero3 x4 -> zero3 x2, commit c0ffee on abc",
        "### dp4-dp2: zero3 x4 -> zero3 x2, 7 MB of blocks on 4 ranks, commit c0ffee on abc",
        "### dp4-dp2: zero3 x4 -> zero3 x2, commit beef-dirty on abc",
    ]
    assert "rows of 2 commits (c0ffee, beef-dirty): each has tables of its own" in text
    assert "commit beef-dirty (the tree differed from the commit), machine abc, unshaped; 4 ranks" in text
    assert "300 ms" not in text  # the mean of 0.2 and 0.4
    for other in (replace(COMPARE, setting="b", pause_s=0.4), replace(COMPARE, cluster="2 x 2 ranks", pause_s=0.4)):
        assert "300 ms" not in text_of(COMPARE, other)


def test_every_change_and_path_of_a_scenario_stands_in_one_table() -> None:
    back = {"change": "dp2-dp4", "source": "zero3 x2", "destination": "zero3 x4"}
    rows = (COMPARE, UNIVERSAL, replace(COMPARE, **back, pause_s=0.25), replace(CANNOT, **back))
    text = text_of(*rows)
    assert line(text, "path") == ["path", "dp4-dp2: zero3 x4 -> zero3 x2", "dp2-dp4: zero3 x2 -> zero3 x4"]
    assert line(text, "in-memory")[1:] == ["200 ms", "250 ms"]
    assert line(text, "universal, disk (ext4), warm cache")[1:] == ["20 s, 100x", "not run"]
    assert "- dp2-dp4: zero3 x2 -> zero3 x4: universal on disk (ext4), warm cache" in text


def test_moves_have_price_and_bound_beside_the_measured_time() -> None:
    direct = replace(MOVE, route="direct", measured_s=1.0, measured_low_s=0.9, measured_high_s=1.1, error=-0.5)
    text = text_of(direct, replace(MOVE, route="relay"))
    assert line(text, "planner")[3:8] == ["measured", "of direct", "/ bound", "predicted", "error"]
    assert line(text, "classes | send-recv | relay")[3:8] == [
        "500 [490, 510] ms", "0.50x", "1.111", "500 [400, 600] ms", "+0.0%",
    ]  # fmt: skip
    assert "bound by node 1 receive" in text and "median of 2 repeats in 1 launch" in text
    again = replace(direct, launch_id="two", measured_s=2.0)
    assert line(text_of(direct, again), "classes | send-recv | direct")[3] == "1.5 [1, 2] s"
    other = text_of(direct, replace(again, bucket_bytes=16))
    assert "1.5 [" not in other and "buckets of 16 B" in other


def test_simulated_rows_say_so_everywhere() -> None:
    row = replace(MOVE, simulated="h100-2x8", digest_passed=0, digest_total=0, verdict="simulated", route="direct")
    text = text_of(row)
    assert "# smoke (simulated: h100-2x8)" in text and "### smoke, tp1 (simulated: h100-2x8)" in text
    assert "- simulated: h100-2x8: nothing moved, no bit was checked" in text and "no wrong bit" not in text
    assert line(text, "classes | send-recv | direct")[-2] == "simulated"


def test_a_move_whose_wire_bytes_differ_keeps_its_time_with_a_note() -> None:
    text = text_of(replace(MOVE, route="direct", wire_cross_node_bytes=10**9, verdict="wire bytes differ", ok=False))
    assert line(text, "classes | send-recv | direct")[3] == "500 [490, 510] ms[^1]"
    assert "[^1]: wire bytes differ in tp1 by direct: the kernel counted 1 GB" in text


def test_training_states_are_added_up_by_change_and_launch() -> None:
    back = replace(STATE, leg=2, source="zero3 x2", destination="zero3 x4", checkpoint="cannot: no AutoTP")
    cells = line(text_of(STATE, back), STATE.change)
    assert cells[1] == "zero3 x4 &lt;-> zero3 x2"
    once = text_of(STATE, back)
    again = [replace(row, launch_id="two", total_s=row.total_s * 3) for row in (STATE, back)]
    total = line(once, "change").index("total")
    assert STATE.total_s is not None
    assert line(once, STATE.change)[total] == f"{2e3 * STATE.total_s:.3g} ms"
    assert line(text_of(STATE, back, *again), STATE.change)[total].startswith(f"{4e3 * STATE.total_s:.3g} [")
    assert "cannot: no AutoTP" in once and "cannot[^1]" in once
    larger = replace(again[0], bytes_total=again[0].bytes_total + 1)
    two = text_of(STATE, larger)  # another state under the same name
    assert two.count(f"| {STATE.change} |") == 2 and f"{4e3 * STATE.total_s:.3g} [" not in two


def test_offloads_have_their_table() -> None:
    text = text_of(OFFLOAD)
    assert f"| zero{OFFLOAD.stage} | {OFFLOAD.state} |" in text and ": offload and reload" in text


@pytest.mark.parametrize(
    ("folder", "title", "start", "count"),
    [
        ("*_run-transitions", "### every move of transitions", "| sync-tp4 | direct |", 30),
        ("*_run-dp4-dp2-dp4", "### dp4-dp2-dp4\n", "| affine | 126 ms | 179 [170, 203] ms |", 2),
        ("*_run-state-matrix", "### state-matrix, world size", "| z3-4-2-4 | zero3 x4 &lt;-> zero3 x2 |", 6),
    ],
)
def test_kept_results_give_the_tables_of_the_pull_requests(folder: str, title: str, start: str, count: int) -> None:
    sources, _ = read_sources(list((RESULTS / "a2f3b263b63e").glob(folder)))
    text = markdown(make_document(sources), {})
    table = text[text.index(title) :].split("\n\n")[1].splitlines()
    assert len(table) == count + 2
    assert any(one.startswith(start) for one in table)
    assert "no wrong bit" in text and "Not run" not in text
    assert "relaymeter run --s" in text and "torch 2.13.0+cpu" in text


def test_what_was_left_out_of_a_scenario_is_said() -> None:
    sources, _ = read_sources(list((RESULTS / "a2f3b263b63e").glob("*_run-transitions")))
    rows = [row for row in sources[0].rows if getattr(row, "move", "") != "sync-tp4"][1:]
    text = markdown(make_document([replace(sources[0], rows=tuple(rows))]), {})
    assert "Not run:\n\n- 1 move of 10: sync-tp4\n- sync-tp2x2: classes, send-recv, direct" in text
    assert "| sync-tp2x2 | direct | not run |" in text
    own = How("relaymeter run --scenario my/transitions.toml", ())
    assert "1 move of 10" not in markdown(make_document([replace(sources[0], rows=tuple(rows), how=own)]), {})


def test_text_is_no_markup() -> None:
    assert escaped("a | b\n<class 'x'> *y* _z_ a_b [1, 2] ~") == "a \\| b &lt;class 'x'> \\*y\\* \\_z\\_ a_b [1, 2] \\~"
    table = ReportTable("t", (("a", "left"), ("b", "right")), ())
    assert table.without_empty().columns == ()


def test_a_name_that_is_no_utf8_is_told_by_its_escapes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"d\xff.jsonl")
    path.write_text(dump_lines([COMPARE]))
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "d\\udcff.jsonl" in (tmp_path / "out" / "rows.csv").read_text()
    assert "d\\udcff.jsonl" in (tmp_path / "out" / "report.md").read_text().replace("\\\\", "\\")


def test_rows_that_stand_in_two_files_count_once_and_reports_are_no_results(tmp_path: Path) -> None:
    keep(tmp_path / "m" / "one", [COMPARE])
    keep(tmp_path / "m" / "two", [COMPARE, UNIVERSAL], how=None)
    (tmp_path / "m" / "report").mkdir()
    (tmp_path / "m" / "report" / "report.md").write_text("")
    sources, notes = read_sources(sorted((tmp_path / "m").iterdir()))
    assert [len(source.rows) for source in sources] == [1, 1]
    assert any(note.startswith("1 row of ") and note.endswith("counted once") for note in notes)
    assert any(note.endswith("m/report: a report") for note in notes)
    assert "two/rows.jsonl" not in sources[0].name and sources[1].how is None
    assert sources[0].how == How("relaymeter compare", (("torch", "2.13.0"),))
    assert "rows.jsonl: no how.txt beside the rows" in markdown(make_document(sources), {})


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda path: None, InputError, "does not exist: name a folder that --results kept"),
        (lambda path: path.mkdir(), NothingMeasured, "no rows in .*no rows.jsonl in it.*relaymeter run --results DIR"),
        (lambda path: path.write_text(""), NothingMeasured, "no rows in"),
        (
            lambda path: path.write_text('{"kind": "size"}\n'),
            NothingMeasured,
            "1 row of validate, whose report.md lies",
        ),
        (lambda path: path.write_text('{"kind": "odd"}\n'), InputError, "line 1: record of kind 'odd'"),
        (lambda path: path.write_text("[1]\n"), InputError, "line 1"),
    ],
)
def test_what_holds_no_rows_is_named(write: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    write(tmp_path / "r")
    with pytest.raises(error, match=message):
        read_sources([tmp_path / "r"])


def test_the_command_writes_everything_at_once_and_wrong_bits_are_exit_code_6(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rows = [COMPARE, replace(COMPARE, launch=2, pause_s=0.3), UNIVERSAL, CANNOT, WRONG, MOVE, STATE, OFFLOAD]
    kept = keep(tmp_path / "machine" / "one", rows)
    assert main(["report", str(kept), "--json", str(tmp_path / "report.json")]) == 6
    printed = capsys.readouterr()
    assert printed.out.startswith("WRONG BITS in dp4-dp2 by dcp on disk") and printed.err == ""
    made = kept / "report"
    assert {path.name for path in made.iterdir()} == {
        "report.md", "rows.csv", "rows.parquet", "phases.png", "ratios.png", "state-phases.png", "moves.png",
    }  # fmt: skip
    assert [path.name for path in kept.iterdir() if path.name.startswith(".")] == []
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["exit_code"] == 6 and document["sections"][0]["tables"][0]["columns"][0] == "path"
    with (made / "rows.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [one["path"] for one in lines[:3]] == ["in-memory", "in-memory", "universal"]
    for frame in (pandas.read_csv(made / "rows.csv"), pandas.read_parquet(made / "rows.parquet")):
        assert frame["pause_s"].dtype == "float64" and frame["state_bytes"].dropna().tolist() == [125_000_000.0] * 5
        assert frame["save_s"].isna().sum() == 6 and frame["pause_without_relaunch_s"][2] == 10.0
        assert frame["kind"].tolist()[-3:] == ["move", "training-state", "offload"]
        assert frame["route_bytes_spread"][5] == 10
    assert main(["report", str(kept)]) == 2
    assert "report exists: choose another folder with --out, or add --force" in capsys.readouterr().err
    assert main(["report", str(kept), "--force"]) == 6


def test_without_pyarrow_one_line_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands_report, "has_parquet", lambda: False)
    kept = keep(tmp_path / "one", [OFFLOAD])
    assert main(["report", str(kept), "--out", str(tmp_path / "out")]) == 0
    assert NO_PARQUET in capsys.readouterr().out and "pip install 'relaymeter[report]'" in NO_PARQUET
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.md", "rows.csv"}


def test_no_folder_is_replaced_that_holds_more_than_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "report"

    def write(path: Path) -> None:
        (path / "report.md").write_text("new")

    write_folder(folder, write, force=False)
    with pytest.raises(InputError, match="exists: choose another folder"):
        write_folder(folder, write, force=False)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'notes.txt', which no report writes"):
        check_folder(folder, (), force=True)
    (folder / "notes.txt").unlink()

    def fail(path: Path) -> None:
        write(path)
        raise OSError(28, "No space left on device")

    (folder / "report.md").write_text("old")
    with pytest.raises(InputError, match="No space left on device: choose another folder"):
        write_folder(folder, fail, force=True)
    assert (folder / "report.md").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["report"]
    write_folder(folder, write, force=True)
    assert (folder / "report.md").read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["report"]
    with pytest.raises(InputError, match="holds rows that are read"):
        check_folder(tmp_path, [tmp_path / "a" / "rows.jsonl"], force=True)


def test_a_report_lies_in_the_folder_or_beside_the_folders(tmp_path: Path) -> None:
    one, two = tmp_path / "m" / "one", tmp_path / "m" / "two"
    for folder in (one, two, tmp_path / "n" / "three"):
        folder.mkdir(parents=True)
    assert default_folder([one]) == one / "report"
    assert default_folder([one, two]) == tmp_path / "m" / "report"
    assert default_folder([one / "rows.jsonl"]) == one / "report"
    with pytest.raises(InputError, match="lie in different folders: say with --out DIR"):
        default_folder([one, tmp_path / "n" / "three"])


def test_a_cluster_in_a_box_is_told_in_words() -> None:
    kept = sorted(RESULTS.glob("0b4f439f3732/*_run-demo"))
    text = markdown(make_document(read_sources(kept)[0]), {})
    assert "cluster of 2 nodes x 2 ranks in a box, 50 MB/s a NIC, one per rank" in text
    assert line(text, "classes | send-recv | chosen (relay)")[3:8] == [
        "624 [622, 632] ms", "0.49x", "1.010", "627 [586, 670] ms", "+0.4%",
    ]  # fmt: skip
