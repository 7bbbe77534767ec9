"""What a check is written as: well formed whatever stands in a name, bounded, and the worst comes first."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from relaymeter.harness.track import exports, github, junit, markdown, row_texts, terminal
from relaymeter.harness.track.records import CaseRecord, LaunchRecord
from relaymeter.harness.track.verdicts import Check, Row, Side

BEFORE = Side(label="main", commit="a" * 40, version="1.0", machine_id="m1", config_hash="c1", launches=8)
AFTER = replace(BEFORE, label="change", commit="b" * 40)
ROW = Row(
    case="weights", metric="move_s", verdict="ok", before=0.0172, after=0.0173, ratio=1.01, ratio_low=0.97,
    ratio_high=1.04, p_value=0.4, launches_before=8, launches_after=8, text="1.01x, 95 % 0.97-1.04, 8 launches",
)  # fmt: skip
SLOWER = replace(
    ROW, case="state", verdict="regression", after=0.023, ratio=1.34, ratio_low=1.22, ratio_high=1.47, p_value=2e-5,
    text="1.34x slower, 95 % 1.22-1.47, 8 launches",
)  # fmt: skip
NOISY = replace(ROW, case="noisy", verdict="inconclusive", ratio=1.2, text="not enough launches: run 8")
EXACT = replace(
    ROW, metric="bytes_cross_node", before=16_777_216, after=16_777_216, ratio=None, ratio_low=None, ratio_high=None,
    p_value=None, text="equal",
)  # fmt: skip
WRONG = replace(
    EXACT, case="broken", metric="digest", verdict="wrong bits", before="00ff", after="00fe", text="3 of 4 digests"
)
CHECK = Check(suite="ci", kind="ab", before=BEFORE, after=AFTER, rows=(ROW, NOISY, WRONG, EXACT, SLOWER))
NO_BASE = replace(
    CHECK, before=None, rows=(replace(ROW, verdict="no baseline", before=None, ratio=None, text="none yet"),)
)
#: Whatever may stand in a name: markup of every output, controls, bytes that were no UTF-8, text that runs backwards.
NASTY = (
    "a|b`c`\\|\"'<b>&amp;</b> [x](http://y)\n::error::z\t\x1b[31m\x00\ud800\udcff\u202e\ufffe @user #12 %0A, 100%: \\"
)


def nasty() -> Check:
    row = replace(SLOWER, case=NASTY, text=NASTY)
    return replace(
        CHECK, suite=NASTY, after=replace(AFTER, label=NASTY, version=NASTY, machine_id=NASTY), rows=(row, ROW),
        notes=(NASTY,), mismatch=("machine_id",),
    )  # fmt: skip


def many(count: int) -> Check:
    """Rows of which the last are the worst."""
    rows = [replace(ROW, case=f"case-{number:05d}-" + "\u00e4" * 60) for number in range(count)]
    rows += [replace(SLOWER, case=f"slow-{number:02d}", ratio=1.3 + number / 100) for number in range(30)]
    return replace(CHECK, rows=tuple(rows))


def printed(check: Check, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for table in terminal.tables(check):
        console.print(table)
    return console.export_text()


def test_the_table_shows_the_worst_rows_first_with_both_values_the_ratio_and_its_interval() -> None:
    text = printed(CHECK)
    order = [text.index(name) for name in ("wrong bits", "regression", "inconclusive", "ok ")]
    assert order == sorted(order)
    for piece in ("17.2 ms", "23 ms", "1.34x [1.22, 1.47]", "16,777,216 B", "00ff", "00fe", "interleaved"):
        assert piece in text
    assert terminal.lines(CHECK) == ["WRONG BITS: 1 of 5 rows; also 1 regression, 1 inconclusive, 2 ok"]


def test_a_row_is_one_line_of_120_characters_and_what_its_columns_say_is_not_said_again() -> None:
    name = "zero3-tp2-all-to-all"
    check = replace(CHECK, rows=tuple(replace(row, case=name) for row in (ROW, NOISY, EXACT, SLOWER)))
    lines = printed(check).splitlines()
    assert max(map(len, map(str.rstrip, lines))) <= 120
    table = "\n".join(lines[: next(at for at, line in enumerate(lines) if line.startswith("ratio:"))])
    assert table.count(name) == 4 and len([line for line in table.splitlines() if line.strip()]) == 7
    assert "slower" not in "\n".join(lines) and "equal" not in "\n".join(lines)
    (told,) = [line for line in lines if NOISY.text in line]
    assert told.split()[:2] == [name, "move_s"]


def test_undecided_rows_with_one_reason_stand_in_one_line() -> None:
    few = "1 launch on a side can never decide, 5 are needed"
    rows = [replace(NOISY, case=f"c{at}", text=f"{few}: 1.{at}x slower so far: take more") for at in range(3)]
    text = printed(replace(CHECK, rows=(*rows, EXACT)))
    assert text.count(few) == 1 and f"{few}: take more" in text and "3 rows" in text


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (SLOWER, ""),
        (replace(SLOWER, text="1.34x slower since 1a2b3c4d5 (2 commits ago), 95 % 1.2-1.4, 8 launches"),
         "since 1a2b3c4d5 (2 commits ago)"),
        (EXACT, ""),
        (replace(EXACT, verdict="regression", after=16_777_217, text="1 B more"), "1 B more"),
        (replace(EXACT, before=None, text="new: there is nothing to hold it against"),
         "new: there is nothing to hold it against"),
        (replace(NOISY, text="a slow-down of 1.75x is not excluded: 0.95x, 95 % 0.36-1.75, 9 and 5 launches: more"),
         "a slow-down of 1.75x is not excluded: more"),
        (WRONG, "3 of 4 digests"),
    ],
)  # fmt: skip
def test_a_remark_is_what_the_columns_do_not_say(row: Row, told: str) -> None:
    assert row_texts.remark(row) == told


def test_values_of_a_row_as_a_change_its_launches_and_its_ratio() -> None:
    more = replace(EXACT, metric="messages", before=32, after=44, launches_before=9, launches_after=5)
    assert (row_texts.change_text(more), row_texts.launches_text(more)) == ("32 -> 44", "9+5")
    none = replace(WRONG, before=None, after=None, launches_before=0, launches_after=0)
    assert (row_texts.change_text(none), row_texts.launches_text(none)) == ("", "-")
    assert row_texts.change_text(replace(more, before=None)) == "44"
    assert row_texts.ratio_text(replace(SLOWER, ratio=16.84, ratio_low=9.999, ratio_high=120.3)) == "16.8x [10.00, 120]"


def test_a_side_with_changed_files_says_so() -> None:
    assert row_texts.side_text(replace(BEFORE, dirty=True)) == "main (aaaaaaaaa-dirty, 8 launches)"


def test_names_with_markup_and_controls_show_as_they_are_on_the_terminal() -> None:
    check = replace(CHECK, rows=(replace(ROW, case="[red]x[/red]\x1b[0m"),), mismatch=("machine_id", "config_hash"))
    text = printed(check)
    assert "[red]x[/red]\\x1b[0m" in text
    assert "MISMATCH in machine_id, config_hash:" in text
    assert terminal.lines(check)[1].startswith("MISMATCH")


def test_no_baseline_and_no_rows_never_look_like_a_pass() -> None:
    assert terminal.lines(NO_BASE)[0] == "no baseline: 1 of 1 row"
    first = replace(NO_BASE, rows=NO_BASE.rows * 12)
    assert terminal.tables(first) == [] and len(terminal.lines(first)) <= 9
    assert {"track run", ".gitignore"} <= {word for word in ("track run", ".gitignore") for line in
                                           terminal.lines(first) if word in line}  # fmt: skip
    assert "WRONG" in terminal.lines(replace(first, rows=(*first.rows, WRONG)))[0]
    assert len(terminal.tables(replace(first, rows=(*first.rows, WRONG)))) == 2
    assert any("no pass" in line for line in terminal.lines(NO_BASE))
    empty = replace(CHECK, rows=())
    assert terminal.tables(empty) == [] and terminal.lines(empty)[0] == "nothing was compared"
    assert "skipped" in junit.junit(empty) and "no pass" in github.annotations(empty)[0]
    assert "nothing was compared" in markdown.comment(empty) and "nothing was compared" in github.step_summary(empty)


def test_differences_behind_the_first_digits_of_a_digest_are_shown() -> None:
    row = replace(WRONG, before="0" * 40, after="0" * 39 + "1")
    assert row_texts.values_text(row) == ("0" * 40, "0" * 39 + "1")
    assert row_texts.values_text(replace(row, before="1" * 40)) == ("1" * 11 + "\u2026", "0" * 11 + "\u2026")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("weights-tp4", "weights-tp4"),
        ("gr\u00f6\u00dfe \u6d4b", "gr\u00f6\u00dfe \u6d4b"),
        ("a\nb\tc\r\x00\x7f\x85", "a\\nb\\tc\\r\\x00\\x7f\\x85"),
        ("\udcff\ud800\u202e\ufeff\uffff", "\\xff\\ud800\\u202e\\ufeff\\uffff"),
    ],
)
def test_what_does_not_show_is_escaped(text: str, shown: str) -> None:
    assert row_texts.visible(text) == shown


#: Jenkins' xUnit schema (junit-10.xsd), as far as it is used: children and attributes, required ones with a star.
SCHEMA: dict[str, tuple[set[str], set[str]]] = {
    "testsuites": ({"testsuite"}, {"name", "time", "tests", "failures", "errors"}),
    "testsuite": (
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
        {"name*", "tests*", "failures*", "errors*", "group", "time", "skipped", "timestamp", "hostname", "id"},
    ),
    "properties": ({"property"}, set()),
    "property": (set(), {"name*", "value*"}),
    "testcase": ({"skipped", "error", "failure", "system-out", "system-err"}, {"name*", "time", "classname", "group"}),
    "failure": (set(), {"type", "message"}),
    "skipped": (set(), {"type", "message"}),
    "system-out": (set(), set()),
}


def schema_errors(element: ET.Element) -> list[str]:
    children, attributes = SCHEMA[element.tag]
    known = {name.rstrip("*") for name in attributes}
    wrong = [f"{element.tag}: attribute {name}" for name in element.attrib if name not in known]
    wrong += [f"{element.tag}: no {name}" for name in attributes if name[-1] == "*" and name[:-1] not in element.attrib]
    for child in element:
        wrong += schema_errors(child) if child.tag in children else [f"{element.tag}: child {child.tag}"]
    return wrong


@pytest.mark.parametrize("check", [CHECK, NO_BASE, replace(CHECK, rows=()), nasty()])
def test_junit_is_valid_and_its_counts_are_those_of_its_test_cases(check: Check) -> None:
    root = ET.fromstring(junit.junit(check).encode("utf-8"))
    assert not schema_errors(root)
    suite = root.find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    found = (len(cases), len(suite.findall("testcase/failure")), len(suite.findall("testcase/skipped")))
    assert found == tuple(int(suite.attrib[name]) for name in ("tests", "failures", "skipped"))


def test_junit_fails_regressions_and_wrong_bits_and_skips_what_is_undecided() -> None:
    root = ET.fromstring(junit.junit(CHECK))
    found = {(case.attrib["classname"], case.attrib["name"]): case for case in root.iter("testcase")}
    failure = found["ci.state", "move_s"].find("failure")
    assert failure is not None and failure.attrib["message"] == SLOWER.text
    assert failure.attrib["type"] == "regression" and "17.2 ms" in str(failure.text)
    assert found["ci.broken", "digest"].find("failure") is not None
    skipped = found["ci.noisy", "move_s"].find("skipped")
    assert skipped is not None and skipped.attrib["message"] == f"inconclusive: {NOISY.text}"
    assert skipped.text == "inconclusive: 17.2 ms -> 17.3 ms, 1.20x [0.97, 1.04], launches 8"
    assert failure.text == "regression: 17.2 ms -> 23 ms, 1.34x [1.22, 1.47], launches 8"
    bare = replace(WRONG, before=None, after=None)
    (wrong,) = ET.fromstring(junit.junit(replace(CHECK, rows=(bare,)))).iter("failure")
    assert wrong.text == "wrong bits: 3 of 4 digests"
    assert [child.tag for child in found["ci.weights", "move_s"]] == ["system-out"]
    properties = {entry.attrib["name"]: entry.attrib["value"] for entry in root.iter("property")}
    assert properties["before.commit"] == "a" * 40 and properties["after.launches"] == "8"
    assert "no baseline" in {entry.attrib["value"] for entry in ET.fromstring(junit.junit(NO_BASE)).iter("property")}


def test_junit_has_a_time_stamp_and_no_time_of_a_test_case() -> None:
    when = datetime(2026, 12, 1, 2, 3, 4, tzinfo=timezone.utc)
    root = ET.fromstring(junit.junit(CHECK, utc=when))
    assert root[0].attrib["timestamp"] == "2026-12-01T02:03:04" and root[0].attrib["tests"] == "5"
    assert re.fullmatch(r"[\d-]{10}T[\d:]{8}", ET.fromstring(junit.junit(CHECK))[0].attrib["timestamp"])
    assert not [case for case in root.iter("testcase") if "time" in case.attrib]


def test_junit_carries_any_name() -> None:
    root = ET.fromstring(junit.junit(nasty()))
    case = next(iter(root.iter("testcase")))
    assert case.attrib["classname"] == row_texts.visible(f"{NASTY}.{NASTY}")
    assert any("MISMATCH" in entry.attrib["value"] for entry in root.iter("property"))


@pytest.mark.parametrize("make", [markdown.comment, github.step_summary])
def test_names_cannot_break_out_of_a_markdown_table(make: Callable[[Check], str]) -> None:
    text = make(nasty())
    text.encode("utf-8")
    html = MarkdownIt("commonmark").enable("table").render(text)
    rows = re.findall("<tr>.*?</tr>", html, re.S)
    assert len(rows) >= 3 and {len(re.findall("<t[hd]", row)) for row in rows} == {8}
    assert "<b>" not in html and "<a " not in html and "<strong>MISMATCH" in html
    name = re.search("<code>(.*?)</code>", text)
    assert name is not None
    shown = ET.fromstring(name.group()).text
    assert shown == row_texts.visible(NASTY)
    outside = re.sub("<code>.*?</code>", "", text)
    assert "@user" not in outside and "#12" not in outside


def test_the_comment_shows_what_is_not_ok_and_folds_the_rest() -> None:
    text = markdown.comment(CHECK)
    shown, folded = text.split("<details>")
    assert "WRONG BITS" in shown.splitlines()[0]
    assert shown.index("wrong bits |") < shown.index("regression |") < shown.index("inconclusive |")
    assert "16,777,216 B" in folded and "16,777,216 B" not in shown and "2 other rows (2 ok)" in folded
    assert "This is no pass" in markdown.comment(NO_BASE)


def test_the_comment_is_bounded_and_says_what_it_leaves_out() -> None:
    text = markdown.comment(many(5000))
    assert len(text) < 65_536
    assert text.index("slow-29") < text.index("slow-28") and "10 more rows that are not ok" in text
    left = re.search(r"(\d+) rows left out", text)
    assert left is not None and int(left.group(1)) + text.count("<code>case") + text.count("<code>slow") == 5030


def test_the_summary_stays_below_900_kib_with_the_worst_rows_first() -> None:
    text = github.step_summary(many(20_000))
    assert 700 * 1024 < len(text.encode()) < 900 * 1024
    assert text.index("slow-29") < text.index("slow-28") < text.index("case-00000")
    left = re.search(r"(\d+) rows left out", text)
    assert left is not None and int(left.group(1)) + text.count("<code>case") == 20_000
    assert "left out" not in github.step_summary(CHECK)


@pytest.mark.parametrize("held", [1, 600 * 1024, 1_030_000, 1_043_400, 2**20])
def test_the_summary_leaves_room_for_what_its_file_holds_already(held: int) -> None:
    text = github.step_summary(replace(many(6000), mismatch=("machine_id",), notes=("n" * 3000,) * 20), held=held)
    assert held + len(text.encode()) < max(2**20, held + 1)
    assert ("regression: 30 of 6030 rows" in text) == ("MISMATCH" in text) == ("rows left out" in text) == bool(text)
    assert bool(text) == (held < 1_043_400)
    assert not text or text.startswith("\n\n### "), "on a line of its own"


def test_one_huge_text_does_not_fill_the_summary() -> None:
    huge = replace(CHECK, rows=(replace(SLOWER, text="x" * 10**6, case="y" * 10**6),), notes=("z" * 10**6,) * 100)
    assert len(github.step_summary(huge)) < 30_000 and len(markdown.comment(huge)) < 30_000
    assert max(map(len, github.annotations(huge))) < 3000


def test_annotations_are_at_most_ten_and_the_last_counts_the_others() -> None:
    found = github.annotations(many(3))
    assert len(found) == 10
    assert found[0].startswith("::error title=regression%3A slow-29 move_s::17.2 ms -> 23 ms: 1.34x slower, 95 %25 ")
    assert found[-1] == "::error title=21 more::21 regression: see the step summary"
    assert [line.split(" ")[0] for line in github.annotations(CHECK)] == ["::error", "::error", "::warning"]
    assert github.annotations(replace(CHECK, rows=(ROW, EXACT))) == []
    (told,) = github.annotations(replace(CHECK, rows=(ROW,), mismatch=("machine_id",)))
    assert told.startswith("::notice title=mismatch::MISMATCH in machine_id: ")
    assert len(github.annotations(replace(CHECK, rows=(SLOWER,) * 10))) == 10


def test_an_annotation_of_an_exact_metric_says_both_values() -> None:
    row = replace(EXACT, metric="messages", verdict="regression", before=32, after=44, text="12 more, +37.5%")
    (found,) = github.annotations(replace(CHECK, rows=(row,)))
    assert found == "::error title=regression%3A weights messages::32 -> 44: 12 more, +37.5%25"


def test_rows_that_could_not_be_decided_share_one_warning() -> None:
    rows = [replace(NOISY, case=f"c{at}") for at in range(12)]
    error, warning = github.annotations(replace(CHECK, rows=(*rows, SLOWER)))
    assert error.startswith("::error ")
    assert warning.startswith("::warning title=inconclusive%3A 12 of 13 rows::c0 move_s, c1 move_s, ")
    assert "and 7 more" in warning and NOISY.text in warning


def test_annotations_escape_what_would_be_another_command() -> None:
    line = github.annotations(nasty())[0]
    assert "\n" not in line and "\r" not in line
    head, _, message = line.removeprefix("::error title=").partition("::")
    assert ":" not in head and "," not in head and "%250A%2C 100%25%3A" in head
    assert "%250A, 100%25: \\\\" in message.replace("\\", "\\\\") and "%0AMISMATCH" in message


def test_smaller_is_better_in_every_entry_of_the_action_benchmark() -> None:
    def entries(bandwidth: float, seconds: float) -> dict[str, float]:
        rate = replace(ROW, metric="moved_bytes_per_s", before=100.0, after=bandwidth)
        rows = (rate, replace(ROW, before=10.0, after=seconds), EXACT, replace(WRONG, verdict="ok"))
        document = json.loads(exports.action_benchmark(replace(CHECK, rows=rows)))
        assert all(set(entry) <= {"name", "unit", "value", "range", "extra"} for entry in document)
        return {entry["name"]: entry["value"] for entry in document}

    before, after = entries(100.0, 10.0), entries(120.0, 12.0)
    rate, time = "ci/weights/moved_bytes_per_s as s_per_byte", "ci/weights/move_s"
    assert set(before) == {rate, time, "ci/weights/bytes_cross_node"}
    assert after[rate] / before[rate] == pytest.approx(100 / 120)  # better: no alarm
    assert after[time] / before[time] == pytest.approx(1.2)  # worse


def test_the_action_benchmark_leaves_out_wrong_bits_zero_rates_and_what_is_no_number() -> None:
    rows = (
        WRONG,
        replace(ROW, case="broken"),
        replace(ROW, case="8 B", metric="moved_bytes_per_s", after=0.0),
        replace(ROW, case="nan", after=math.nan),
        replace(SLOWER, case='a|`"'),
    )
    (entry,) = json.loads(exports.action_benchmark(replace(CHECK, rows=rows, mismatch=("machine_id",))))
    assert entry["name"] == 'ci/a\\x7c\\x60"/move_s' and entry["unit"] == "s"
    assert "MISMATCH" in entry["extra"]
    # the action reads a number behind the sign
    assert float(entry["range"].removeprefix("\u00b1 ")) == pytest.approx(0.0172 * 0.125, rel=1e-3)


def launch(number: int, *, ok: bool = True, machine: str = "m1", cases: tuple[str, ...] = ("weights",)) -> LaunchRecord:
    found = tuple(
        CaseRecord(
            name=name,
            exact={"bytes_total": 123_456_789, "digest": "00ff"},
            samples={"move_s": (0.01, 0.012, 0.011 + number / 1e5), "moved_bytes_per_s": (5e9,)},
            digest_passed=4 if ok else 3,
            digest_total=4,
        )
        for name in cases
    )
    return LaunchRecord(
        utc=f"2026-11-30T00:00:{number:02d}Z", session_id="s1", launch=number + 1, machine_id=machine,
        config_hash="c1", suite="ci", version="1.0", commit="b" * 40, commit_utc="2026-11-29T00:00:00Z", dirty=False,
        cases=found,
    )  # fmt: skip


def test_hud_records_have_a_value_for_each_launch_in_microseconds() -> None:
    rows = (replace(SLOWER, case="weights"), replace(WRONG, case="other"))
    launches = [launch(0, cases=("weights", "other")), launch(1)]
    records = json.loads(exports.hud(replace(CHECK, rows=rows, mismatch=("machine_id",)), launches))
    assert [record["metric"]["name"] for record in records] == ["move_us", "moved_bytes_per_s", "bytes_total"]
    assert {record["model"]["name"] for record in records} == {"weights"}  # the other one has wrong bits
    first = records[0]
    assert set(first) == {"benchmark", "model", "metric"}
    assert set(first["benchmark"]) == {"name", "mode", "dtype", "extra_info"}
    assert first["benchmark"]["extra_info"]["mismatch"] == "machine_id"
    assert first["metric"]["benchmark_values"] == pytest.approx([11000.0, 11010.0])
    assert first["metric"]["target_value"] == pytest.approx(17200.0)
    assert records[2]["metric"]["extra_info"]["exact"] == "123456789"
    texts = [extra for part in first.values() for extra in part.get("extra_info", {}).values()]
    assert texts and all(isinstance(text, str) for text in texts)


def test_otava_gets_a_line_for_each_whole_launch_of_the_newest_setting() -> None:
    launches = [launch(4), launch(0, machine="m0"), launch(1), launch(2, ok=False), launch(3, cases=("other",))]
    launches.append(launch(5, cases=("weights",)))
    header, *lines = csv.reader(io.StringIO(exports.otava_csv(launches)))
    assert header[:5] == ["time", "commit", "version", "session", "launch"]
    assert header[5:] == ["weights/move_s", "weights/moved_bytes_per_s", "weights/bytes_total"]
    assert [line[0][-3:] for line in lines] == ["01Z", "04Z", "05Z"]
    assert all(math.isfinite(float(value)) for line in lines for value in line[5:])
    assert [line[0][-3:] for line in csv.reader(io.StringIO(exports.otava_csv(launches, launches[1])))][1:] == ["00Z"]
    stamped = list(csv.reader(io.StringIO(exports.otava_csv(launches, mismatch=("machine_id", "suite")))))
    assert [line[5] for line in stamped] == ["mismatch", *["machine_id suite"] * 3]
    assert [line[:5] + line[6:] for line in stamped] == [header, *lines]
    config = exports.otava_config(launches, "track.csv")
    assert '"weights/moved_bytes_per_s":' in config and config.count("direction: -1") == 2
    assert exports.otava_csv([]) == "time,commit,version,session,launch\n"


def test_no_cell_of_the_csv_is_a_formula_and_the_configuration_names_the_same_columns() -> None:
    moved = CaseRecord(name="=cmd|'/C calc'!A0", exact={}, samples={"move_s": (1.0,)}, digest_passed=1, digest_total=1)
    launch = LaunchRecord(
        utc="2026-01-01T00:00:00Z", session_id="@s", launch=1, machine_id="m", config_hash="c", suite="ci",
        version="+1", commit="-2", commit_utc=None, dirty=False, cases=(moved,),
    )  # fmt: skip
    header, line = csv.reader(io.StringIO(exports.otava_csv([launch], mismatch=("=m",))))
    assert header[-1] == "\\x3dcmd|'/C calc'!A0/move_s"
    assert line[1:6] == ["\\x2d2", "\\x2b1", "\\x40s", "1", "\\x3dm"]
    assert json.dumps(header[-1]) in exports.otava_config([launch], "track.csv")
