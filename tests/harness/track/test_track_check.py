"""``track check`` by its options: what is judged, what a refused or an ended comparison leaves. No rank runs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from track_launches import side

from relaymeter.harness.cli import main
from relaymeter.harness.signals import EndingSignal
from relaymeter.harness.track import ab, history, judge, launches
from relaymeter.harness.track.records import LaunchRecord


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
    for other in ("c", "e", None):
        at(other)
        assert main(asked) == 0
        assert "is judged" not in capsys.readouterr().out
    assert main([*asked, "--window", "2"]) == 3


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
    assert main([*asked, "--force", "--exact-only"]) == 0


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

    def launch(side: ab.Side, options: Sequence[str]) -> LaunchRecord:
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
        (7, ab.LaunchFailed("a launch of this ended with exit code 7\n  what it said", 7), 1.0, 7),
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
    assert "ended early" in capsys.readouterr().out
    assert Path("j").stat().st_size
    _launched(monkeypatch, _raises(1, error))
    assert main(["track", "check", "--ab", base, "--json", "d.json"]) == code
    assert not Path("d.json").exists(), "one side alone is nothing to report"


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

    monkeypatch.setattr(commands_track_ab, "other_side", lambda text: ab.Side(text, "python", None, {"torch": "2.9"}))
    monkeypatch.setattr(commands_track_ab, "this_side", lambda: ab.Side("this", "python", None, {"torch": "2.10"}))

    def launch(side: ab.Side, _: Sequence[str]) -> LaunchRecord:
        return replace(_side("a", 1.0)[0], machine_id=side.versions["torch"])

    monkeypatch.setattr(ab, "launch_side", launch)
    assert main(["track", "check", "--ab", "venv/bin/python", "--launches", "5", "--json", "-"]) == 0
    assert "torch 2.9 before, 2.10 after" in json.loads(capsys.readouterr().out)["notes"]
