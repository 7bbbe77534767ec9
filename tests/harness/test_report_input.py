"""What ``report`` reads: rows of every type and kind, rows that stand twice, files that were kept with them, soaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_report import COMPARE, MOVE, OFFLOAD, STATE, keep, line, text_of

from relaymeter.harness.cli import main
from relaymeter.harness.report_document import make_document
from relaymeter.harness.report_markdown import markdown
from relaymeter.harness.report_plots import draw_plots
from relaymeter.harness.report_sources import read_sources
from relaymeter.harness.soak_rows import SoakRecord, soak_rows
from relaymeter.records import Row, dump_json, dump_lines

SOAK = SoakRecord(
    utc="2026-01-02T03:04:05Z", machine_id="abc", launch_id="s", commit="c0ffee", shaped=False, ranks=2, nodes=1,
    backend="gloo", executors=("send-recv",), seconds_asked=2.0, bytes_asked=None, message_bytes=256, peers=1, calls=4,
    messages=8, bytes_total=1024, elapsed_s=2.0, make_s=0.5, exchange_s=1.0, check_s=0.5, wrong_messages=0,
    wrong_bytes=0, runs=0, finished=True, verdict="ok", ok=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (COMPARE, {"pause_s": "3"}, 'line 1: pause_s = "3": expected a number or null'),
        (MOVE, {"samples_s": "ab"}, 'line 1: samples_s = "ab": expected a list'),
        (STATE, {"fields": {}}, "line 1: fields = {}: expected a list"),
        (OFFLOAD, {"bytes": "4"}, 'line 1: bytes = "4": expected a whole number of 64 bits or null'),
        (SOAK, {"executors": "send-recv"}, 'line 1: executors = "send-recv": expected a list'),
    ],
)
def test_a_value_of_another_type_is_one_line_and_no_traceback(
    row: Row, change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**row.to_dict(), **change}) + "\n")
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"relaymeter: records {path}, {message}\n"


def test_a_row_that_stands_twice_in_a_file_counts_once(tmp_path: Path) -> None:
    other = replace(COMPARE, launch=2, pause_s=0.4)
    path = keep(tmp_path / "one", [COMPARE, COMPARE, other, COMPARE]) / "rows.jsonl"
    sources, notes = read_sources([path])
    assert sources[0].rows == (COMPARE, other)
    assert notes == (f"2 rows of {path} repeat an earlier one of it: counted once",)
    assert line(markdown(make_document(sources, notes), {}), "in-memory")[1].startswith("300 [200, 400] ms")


def test_a_scenario_that_was_a_file_is_shown_as_it_was_kept(tmp_path: Path) -> None:
    how = "relaymeter compare --scenario my/own.toml --results r\ntorch: 2.13.0\n"
    for name in ("one", "two"):
        keep(tmp_path / name, [replace(COMPARE, launch_id=name)], how)
        (tmp_path / name / "scenario.toml").write_text('kind = "compare"\n# ```\n')
    sources, _ = read_sources([tmp_path])
    document = make_document(sources)
    text = markdown(document, {})
    assert (
        "<details><summary>my/own.toml, kept as scenario.toml in one, two</summary>\n\n"
        '````toml\nkind = "compare"\n# ```\n````\n\n</details>'
    ) in text
    assert "not kept here" not in text
    assert document.to_dict()["sources"][0]["files"] == {"scenario.toml": 'kind = "compare"\n# ```\n'}
    (tmp_path / "two" / "scenario.toml").unlink()
    assert "their content is not kept here (attach them): my/own.toml" in markdown(
        make_document(read_sources([tmp_path / "two"])[0]), {}
    )


def test_soaks_have_a_line_each_and_wrong_bytes_come_first(tmp_path: Path) -> None:
    wrong = replace(
        SOAK, launch_id="w", wrong_messages=1, wrong_bytes=26, runs=1, verdict="wrong bits", ok=False,
        origins={"zeros": {"runs": 1, "bytes": 26, "grid_bytes": 16}},
    )  # fmt: skip
    ranks = [{"rank": rank, "calls": 1} for rank in range(2)]
    path = tmp_path / "soak.jsonl"
    path.write_text("".join(dump_json(row, indent=None) for row in soak_rows(SOAK, ranks, [])) + dump_lines([COMPARE]))
    sources, notes = read_sources([path])
    assert notes == (f"left out: {path}: 2 rows of single ranks of a soak, whose sums are in its line",)
    text = markdown(make_document(sources, notes), {})
    assert text.startswith("# rfc-small, soak\n") and "2 rows of 1 result, no wrong bit" in text
    assert line(text, "2026-01-02T03:04:05Z")[3:] == [
        "2", "1", "send-recv over gloo", "1 KiB", "4", "8", "2 s", "512 B/s", "0", "ok"
    ]  # fmt: skip
    path.write_text(dump_lines([wrong]))
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 6
    told = (tmp_path / "out" / "report.md").read_text()
    assert "- **WRONG BITS** in soak of 2026-01-02T03:04:05Z (2 ranks, send-recv): 26 bytes of 1 message not" in told
    assert "zeros: 26 wrong bytes in 1 run" in told
    assert "soak,1,2026" in (tmp_path / "out" / "rows.csv").read_text()


def test_a_dollar_in_a_name_begins_no_formula(tmp_path: Path) -> None:
    assert list(draw_plots([replace(COMPARE, change="a$_$b")], tmp_path)) == ["phases.png"]


def test_a_time_of_nothing_has_no_ratio() -> None:
    assert "| direct |" in text_of(replace(MOVE, route="direct", measured_s=0.0, bound_s=0.0))
