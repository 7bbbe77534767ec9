"""``track check`` by its options: what is judged, what a refused or an ended comparison leaves. No rank runs."""

from __future__ import annotations

import json
import os
import signal
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from track_launches import case, launch, side

from relaymeter.errors import InputError
from relaymeter.harness.cli import main
from relaymeter.harness.commands_track_ab import Compared
from relaymeter.harness.signals import EndingSignal
from relaymeter.harness.track import ab, ab_sides, history, judge, launches, terminal
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.suite import suite_path
from relaymeter.harness.track.targets import check_history, check_summary
from relaymeter.harness.track.wrong_base import right_ones, told


def _kept(path: Path, *sides: Sequence[LaunchRecord]) -> str:
    history.append(path, [launch for side in sides for launch in side])
    return str(path)


def _side(commit: str, move_s: float) -> list[LaunchRecord]:
    return side(move_s, 12, commit=commit)


def test_a_base_is_what_git_means_and_an_unknown_one_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"main": "a" * 40, "feature": "b" * 40, "unmeasured": "d" * 40}
    monkeypatch.setattr(launches, "revision", known.get)
    path = _kept(tmp_path / "h.jsonl", _side("a", 1.0), _side("b", 1.5), _side("c", 1.5))
    asked = ["track", "check", "--history", path, "--against"]
    assert main([*asked, "main"]) == 3
    assert main([*asked, "feature"]) == 0
    assert main([*asked, "main", "--commit", "feature"]) == 3
    assert main([*asked, "unmeasured"]) == 5
    capsys.readouterr()
    assert main([*asked, "mian"]) == 2
    assert "holds no launch of mian: it holds aaaaaaaaa, bbbbbbbbb, ccccccccc" in capsys.readouterr().err
    assert main([*asked, "main", "--commit", "mian"]) == 2


def test_the_commit_of_the_checkout_is_judged_where_the_history_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _kept(tmp_path / "h.jsonl", _side("a", 1.0), _side("b", 1.5), _side("c", 1.5))
    asked = ["track", "check", "--history", path, "--against", "history"]

    def at(commit: str | None) -> None:
        monkeypatch.setattr(launches, "checkout", lambda: launches.Checkout(commit and commit * 40, None, False))

    at("b")
    assert main(asked) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "bbbbbbbbb is judged, which is this checkout's; the last launch is of ccccccccc" in said
    for other, line in (
        ("c", ""),
        ("e", "note: ccccccccc is judged, which is that of the last launch: the history holds no launch of eeeeeeeee"),
        (None, "the history holds no launch of version "),
    ):
        at(other)
        assert main(asked) == 0
        said = capsys.readouterr().out
        assert line in said and ("is judged" in said) == bool(line)
    assert main([*asked, "--window", "2"]) == 3


def _two(commit: str, *names: str, move_s: float = 1.0, suite: str = "ci") -> list[LaunchRecord]:
    """Launches of the cases of these names."""
    cases = [case(name, samples={"move_s": [move_s]}) for name in names]
    return [replace(launch(*cases, commit=commit, number=number), suite=suite) for number in range(1, 6)]


LATER = _two("d", "other", move_s=1.5)


@pytest.mark.parametrize(
    ("more", "options", "code", "line"),
    [
        ([], ["--case", "k"], 4, "relaymeter: ccccccccc has no launch with case k: the newest"),
        ([], ["--case", "k", "--commit", "cccc", "--undecided-ok"], 4, "the newest commit that has one is bbbbbbbbb"),
        ([], ["--case", "k", "--commit", "bbbb"], 3, ""),
        ([], ["--case", "k", "--case", "other"], 4, "note: ccccccccc has no launch with case k: the newest"),
        ([], ["--case", "k", "--case", "other", "--undecided-ok"], 4, ""),
        (LATER, ["--case", "k", "--case", "other", "--undecided-ok"], 4, "note: ddddddddd has no launch with case k"),
        (LATER, ["--case", "other"], 0, ""),
        (_two("d", "k", suite="own"), ["--suite", "ci"], 4, "ddddddddd has no launch of suite ci: the newest"),
        (_two("d", "k", suite="own"), ["--suite", "own", "--commit", "cccc"], 4, "ccccccccc has no launch of suite"),
        ([], ["--commit", "eeee"], 2, "the history holds no launch of eeee: it holds aaaaaaaaa, bbbbbbbbb, ccccccccc"),
    ],
)  # fmt: skip
def test_a_commit_that_lacks_what_was_asked_for_is_undecided_and_no_older_one_is_judged_instead(
    more: list[LaunchRecord], options: list[str], code: int, line: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(launches, "checkout", lambda: launches.Checkout("f" * 40, None, False))
    held = [_two("a", "k", "other"), _two("b", "k", "other", move_s=1.5), _two("c", "other", move_s=1.5)]
    path = _kept(tmp_path / "h.jsonl", *held, more)
    assert main(["track", "check", "--history", path, "--against", "history", *options]) == code
    assert line in "".join(capsys.readouterr())


def test_of_a_changed_checkout_an_earlier_session_that_has_the_suite_is_judged_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = [
        [replace(one, dirty=True, session_id=suite) for one in _two("b", "k", suite=suite)] for suite in ("ci", "own")
    ]
    path = _kept(tmp_path / "h.jsonl", _two("a", "k"), *sessions)
    asked = ["track", "check", "--history", path, "--against", "history", "--suite"]
    line = "note: the newest session of bbbbbbbbb-dirty has none of that: an earlier one is judged"
    assert main([*asked, "ci"]) == 0
    assert line in capsys.readouterr().out
    assert main([*asked, "own"]) == 5
    assert line not in capsys.readouterr().out


def test_a_base_that_lacks_what_was_asked_for_is_no_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _kept(tmp_path / "h.jsonl", _two("a", "k"), _two("b", "other"), _two("c", "k"))
    assert main(["track", "check", "--history", path, "--against", "bbbb", "--case", "k"]) == 5
    assert "bbbbbbbbb has no launch with case k: the newest commit that has one is ccccccccc" in capsys.readouterr().out


def test_launches_of_an_older_commit_that_end_the_file_of_a_suite_do_not_stand_in(tmp_path: Path) -> None:
    """The judged commit was launched in the suite that is asked for, an older one later than that, and it last."""
    late = [_two("b", "k"), _two("a", "k", move_s=0.5), _two("b", "k", suite="own")]
    path = _kept(tmp_path / "h.jsonl", _two("a", "k", move_s=0.5), *late)
    asked = ["track", "check", "--history", path, "--against", "history", "--suite", "ci", "--json"]
    assert main([*asked, str(tmp_path / "c")]) == 3
    assert json.loads((tmp_path / "c").read_text(encoding="utf-8"))["after"]["commit"] == "b" * 40


def test_what_options_and_histories_say_is_shown_and_not_obeyed(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    red, kept = "\x1b[31mred", tmp_path / "h.jsonl"
    foreign = [replace(one, commit=None, version=red) for one in _two("a", "k")]
    path = _kept(kept, foreign, _two("b", "k"))
    asked = ["track", "check", "--history", path]
    for options in (
        ["--against", red + "s"], ["--against", "history", "--commit", red + "s"], ["--against", "cc"], ["--ab", red],
        ["--against", "history", "--suite", red], ["--against", "history", "--case", red],
        ["--against", "history", "--junit", f"{red}/none/j"],
    ):  # fmt: skip
        main(asked[:2] + options if "--ab" in options else asked + options)
        said = "".join(capsys.readouterr())
        assert "\x1b" not in said and "\\x1b[31m" in said, options
    _launched(monkeypatch, _raises(3, ab.LaunchFailed(f"a launch ended:\n  {red}", 7)))
    assert main(["track", "check", "--ab", base]) == 7
    assert "a launch ended:\n  \\x1b[31mred\n" in capsys.readouterr().err


def test_a_case_of_a_history_and_exact_metrics_alone_are_judged_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _kept(tmp_path / "h.jsonl", _side("a", 1.0), _side("b", 1.5))
    asked = ["track", "check", "--history", path, "--against", "history"]
    assert [main([*asked, *more]) for more in (["--case", "tp2"], ["--exact-only"])] == [3, 0]
    assert main([*asked, "--case", "kk"]) == 2
    assert "has no case 'kk'" in capsys.readouterr().err
    few = _kept(tmp_path / "few.jsonl", _side("a", 1.0), _side("b", 1.0)[:3])
    asked = ["track", "check", "--history", few, "--against", "history", "--json", "-"]
    assert main(asked) == 4
    capsys.readouterr()
    assert main([*asked, "--undecided-ok"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["exit_code"], document["counts"]["inconclusive"]) == (0, 1)


def test_times_of_another_machine_are_refused_in_a_report_that_is_written(tmp_path: Path) -> None:
    new = [replace(one, machine_id="other") for one in _side("b", 1.0)]
    path = _kept(tmp_path / "h.jsonl", _side("a", 1.0), new)
    asked = ["track", "check", "--history", path, "--against", "history", "--junit", str(tmp_path / "j")]
    assert main(asked) == 4
    suite = ElementTree.parse(tmp_path / "j").getroot()
    assert (len(list(suite.iter("testcase"))), len(list(suite.iter("skipped")))) == (3, 1)
    assert main([*asked, "--force", "--undecided-ok"]) == 0
    files = {name: tmp_path / name for name in ("hud", "otava")}
    exports = [text for name, file in files.items() for text in (f"--{name}", str(file))]
    assert main([*asked, "--force", "--exact-only", *exports]) == 0
    for file in files.values():  # times that were not judged are no points of a series
        text = file.read_text(encoding="utf-8")
        assert "messages" in text and "move_" not in text


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkout to compare with, of which no launch is real."""
    package = tmp_path / "base" / "src" / "relaymeter" / "harness"
    package.mkdir(parents=True)
    for name in ("../__init__.py", "__init__.py", "options_track.py"):
        (package / name).write_text("__version__ = '0.0.9'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "base"


def _launched(monkeypatch: pytest.MonkeyPatch, stop: Callable[[int], None], after_s: float = 1.0) -> list[Any]:
    """Launches made by hand from now on; ``stop`` is called before each with how many there were."""
    asked: list[Any] = []

    def launch(side: ab_sides.Side, options: Sequence[str]) -> LaunchRecord:
        stop(len(asked))
        asked.append((side.label, list(options), Path(options[1]).read_text(encoding="utf-8")))
        mine = sum(label == side.label for label, *_ in asked)
        return _side("a", 1.0)[mine - 1] if side.label == "base" else _side("b", after_s)[mine - 1]

    monkeypatch.setattr(ab, "launch_side", launch)
    return asked


def _raises(at: int, error: BaseException) -> Callable[[int], None]:
    def stop(taken: int) -> None:
        if taken == at:
            raise error

    return stop


@pytest.mark.parametrize(
    ("at", "error", "after_s", "code"),
    [
        (7, KeyboardInterrupt(), 1.0, 130),
        (7, EndingSignal(143), 1.5, 143),
        (7, ab.LaunchFailed("a launch of this ended with exit code 7 and gave no record:\n  what it said", 7), 1.0, 7),
        (7, ab.LaunchFailed("a launch of this ended with exit code 124", 124), 1.0, 124),
        (7, ab.OutOfTime("time limit"), 1.0, 124),
    ],
    ids=["Ctrl-C", "SIGTERM", "lost", "limit within a launch", "limit"],
)
def test_what_was_measured_before_an_a_b_was_ended_is_reported(
    at: int, error: BaseException, after_s: float, code: int, base: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    _launched(monkeypatch, _raises(at, error), after_s)
    assert main(["track", "check", "--ab", base, "--json", "c.json", "--junit", "j"]) == code
    document = json.loads(Path("c.json").read_text(encoding="utf-8"))
    assert document["exit_code"] == code
    assert (document["before"]["launches"], document["after"]["launches"]) == (3, 4)
    assert "judged by 3 and 4 launches of 5 a side" in document["notes"][0]
    said = capsys.readouterr()
    assert "ended early" in said.out
    assert ":)" not in document["notes"][0]
    name = {130: "SIGINT", 143: "SIGTERM"}.get(code)
    line = f"relaymeter: interrupted by {name}: 3 launches before and 4 after were measured\n"
    assert name is None or line in said.err
    assert Path("j").stat().st_size
    _launched(monkeypatch, _raises(1, error))
    assert main(["track", "check", "--ab", base, "--json", "d.json"]) == code
    assert not Path("d.json").exists(), "one side alone is nothing to report"


def test_a_second_signal_costs_no_report(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(_: object) -> list[str]:
        signal.raise_signal(signal.SIGTERM)
        return []

    _launched(monkeypatch, _raises(2, KeyboardInterrupt()))
    monkeypatch.setattr(terminal, "lines", lines)
    assert main(["track", "check", "--ab", base, "--json", "c.json"]) == 130
    assert json.loads(Path("c.json").read_text(encoding="utf-8"))["exit_code"] == 130


@pytest.mark.parametrize("ended", [129, 130, 143, 7, 124, 1])
def test_wrong_bits_are_6_whatever_ended_an_a_b(ended: int) -> None:
    found = judge.check_ab(_flawed([8] * 5), _flawed([8, 7, 8, 8, 8], "b"), labels=("base", "this"))
    compared = Compared(found, (), (), ended)
    assert compared.exit_code(found.exit_code(warn_only=True)) == 6
    assert [compared.exit_code(code) for code in (0, 3, 4)] == [ended, 3 if ended == 124 else ended, ended]


def test_a_time_limit_after_as_many_launches_as_were_asked_for_leaves_the_verdict(
    base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge, "next_launches", lambda before, after, asked, **_: asked + 3 - len(before))
    monkeypatch.setattr(judge, "unsettled", lambda *_: [("k", "move_s")] * 5)
    _launched(monkeypatch, _raises(10, ab.OutOfTime("time limit")))
    assert main(["track", "check", "--ab", base]) in (0, 4)
    said = capsys.readouterr()
    assert "ended it after 5 and 5 launches" in said.out


def test_why_an_a_b_goes_on_and_to_how_many_launches_is_told(
    base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = _launched(monkeypatch, lambda _: None)
    monkeypatch.setattr(judge, "next_launches", lambda before, *_, **__: {0: 5, 5: 3}.get(len(before), 0))
    monkeypatch.setattr(judge, "unsettled", lambda *_: [("k", f"t{at}") for at in range(5)])
    main(["track", "check", "--ab", base, "--time-limit", "900"])
    line = "5 launches a side leave k t0, k t1, k t2 and 2 more undecided: 3 more a side, 12 at most\n"
    assert line in capsys.readouterr().err
    assert len(asked) == 16
    assert asked[0][1][-2] == "--time-limit"


def test_one_launch_a_side_judges_exact_metrics_and_exact_only_makes_it_a_short_one(
    base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, repeats in ((["--launches", "1"], 25), (["--exact-only", "--case", "small-blocks"], 1)):
        asked = _launched(monkeypatch, lambda _: None, 2.0)
        assert main(["track", "check", "--ab", base, "--json", "-", *options]) == 0
        document = json.loads(capsys.readouterr().out)
        assert {row["metric"] for row in document["rows"]} == {"messages", "digest"}
        assert [label for label, *_ in asked] == ["base", "this"]
        assert all(f"repeats = {repeats}\n" in text for *_, text in asked)
        assert ("--case" in asked[0][1]) == ("--case" in options)
        assert "times are not judged" in " ".join(document["notes"])
        assert document["before"]["label"] == "base"


def test_another_torch_is_compared_and_both_are_said(
    base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from relaymeter.harness import commands_track_ab

    monkeypatch.setattr(
        commands_track_ab, "other_side", lambda text: ab_sides.Side(text, "python", None, {"torch": "2.9"})
    )
    monkeypatch.setattr(
        commands_track_ab, "this_side", lambda: ab_sides.Side("this", "python", None, {"torch": "2.10"})
    )

    def launch(side: ab_sides.Side, _: Sequence[str]) -> LaunchRecord:
        return replace(_side("a", 1.0)[0], machine_id=side.versions["torch"])

    monkeypatch.setattr(ab, "launch_side", launch)
    assert main(["track", "check", "--ab", "venv/bin/python", "--launches", "5", "--json", "-"]) == 0
    assert "torch 2.9 before, 2.10 after" in json.loads(capsys.readouterr().out)["notes"]


def _flawed(passed: Sequence[int], commit: str = "a") -> list[LaunchRecord]:
    """Launches of two cases, of which one had so many of 8 digests right."""
    return [
        replace(one, cases=(replace(one.cases[0], digest_passed=right), case("k2", samples={})))
        for one, right in zip(_side(commit, 1.0), passed, strict=False)
    ]


@pytest.mark.parametrize(
    ("before", "after", "codes", "said"),
    [
        ([8] * 6, [8] * 6, (0, 0), ""),
        (
            [8, 7, 8, 8, 8, 8],
            [8] * 6,
            (0, 0),
            "7 of 8 digests matched in 1 of 6 launches of the base: those launches do",
        ),
        ([0] * 6, [8] * 6, (4, 0), "0 of 8 digests matched in 6 of 6 launches of the base: nothing of it counts"),
        ([0] * 6, [8, 8, 8, 7, 8, 8], (6, 6), "nothing of it counts"),
        ([8] * 6, [8, 8, 8, 7, 8, 8], (6, 6), ""),
    ],
    ids=["right", "once wrong", "always wrong", "both wrong", "change wrong"],
)
@pytest.mark.parametrize("alone", [False, True], ids=["two cases", "one case"])
def test_wrong_bits_of_the_base_are_told_and_the_change_is_judged(
    before: list[int], after: list[int], codes: tuple[int, int], said: str, alone: bool
) -> None:
    sides = [_flawed(before), _flawed(after, "b")]
    if alone:
        sides = [[replace(one, cases=one.cases[:1]) for one in launches] for launches in sides]
    found = told(judge.check_ab(right_ones(sides[0]), sides[1], labels=("base", "this")), sides[0])
    assert tuple(found.exit_code(warn_only=True, undecided_ok=ok) for ok in (False, True)) == codes
    assert [note.startswith("WRONG BITS ON THE BASE: tp2: ") for note in found.notes] == [True] * bool(said)
    assert said in "".join(found.notes)
    assert judge.next_launches(right_ones(sides[0]), sides[1], 5) == 0


def test_a_change_that_mends_wrong_bits_passes_its_own_gate(
    base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(one: ab_sides.Side, _: Sequence[str]) -> LaunchRecord:
        return _flawed([0 if one.label == "base" else 8], "a" if one.label == "base" else "b")[0]

    monkeypatch.setattr(ab, "launch_side", made)
    assert main(["track", "check", "--ab", base, "--exact-only", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["notes"][0].startswith("WRONG BITS ON THE BASE: tp2: 0 of 8")
    assert document["counts"] == {"ok": 4}


def test_reports_of_a_history_hold_the_judged_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = [replace(one, machine_id="other") for one in _side("c", 9.0)]
    mine = [replace(one, suite="own", config_hash="own") for one in _side("b", 9.0)]
    path = _kept(tmp_path / "h.jsonl", _side("a", 1.0), _side("b", 1.0), mine[:3], other)
    asked = ["track", "check", "--history", path, "--against", "history", "--commit", "b" * 40]
    assert main([*asked, "--hud", "h", "--otava", "o"]) == 0
    values = [record["metric"]["benchmark_values"] for record in json.loads(Path("h").read_text(encoding="utf-8"))]
    assert {len(found) for found in values} == {12}
    assert max(values[0]) < 2e6, "microseconds of the judged ones"
    lines = Path("o").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 25, "those of the judged suite, machine and configuration"


def test_a_suite_is_found_in_a_history_by_the_name_that_its_file_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = 'name = "inner"\n' + suite_path("ci").read_text(encoding="utf-8")
    Path("outer.toml").write_text(text, encoding="utf-8")
    path = _kept(tmp_path / "h.jsonl", [replace(launch(), suite="inner")])
    asked = ["track", "check", "--history", path, "--against", "history", "--suite"]
    for named, said in (
        ("outer.toml", "first commit"),
        ("inner", "first commit"),
        ("outer", "no launch of suite outer"),
    ):
        assert main([*asked, named]) == 5
        assert said in "".join(capsys.readouterr())
    before = Path("outer.toml").read_bytes()
    assert main([*asked, "outer.toml", "--junit", "outer.toml", "--force"]) == 2
    assert Path("outer.toml").read_bytes() == before


def test_what_could_not_be_added_to_is_refused_before_a_launch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    bad = {"file/h": "is no folder", "folder": "it is a folder", "pipe": ""}
    for name, said in bad.items():
        with pytest.raises(InputError, match=f"cannot write history .*{said}.*: name another with --history"):
            check_history(tmp_path / name)
    for name, said in {**bad, "file/h": "there is no folder", "none/s": "there is no folder"}.items():
        with pytest.raises(InputError, match=f"--github cannot add to .*{said}.*: set it to a file, or leave --github"):
            check_summary(str(tmp_path / name))
    for name in ("new/deep/h", "file", "new"):
        check_history(tmp_path / name)
    check_summary(str(tmp_path / "new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "pipe"]
