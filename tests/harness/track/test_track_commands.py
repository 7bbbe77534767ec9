"""The commands ``track run``, ``check`` and ``show``: their surface, what they write, and the examples of the docs."""

from __future__ import annotations

import argparse
import json
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table

from relaymeter.harness.cli import build_parser, main
from relaymeter.harness.track import history
from relaymeter.harness.track.records import CaseRecord, LaunchRecord
from surface import TRACK, TRACK_HIDDEN

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

EXACT = {"bytes_cross_node": 4096, "messages": 3, "digest": "00ff"}


def _launch(number: int, commit: str, move_s: float, **exact: int | str) -> LaunchRecord:
    noise = 1 + (number * 7 % 5 - 2) / 200
    case = CaseRecord(
        name="k", exact={**EXACT, **exact}, samples={"move_s": (move_s * noise,)}, digest_passed=2, digest_total=2
    )
    return LaunchRecord(
        utc=f"2026-01-0{1 + (commit != 'a')}T03:04:{number:02d}Z", session_id=commit, launch=number, machine_id="m",
        config_hash="c", suite="ci", version="0.1.0", commit=commit * 40, commit_utc="2026-01-01T00:00:00Z",
        dirty=False, cases=(case,),
    )  # fmt: skip


def _kept(path: Path, *sides: Sequence[LaunchRecord]) -> str:
    history.append(path, [launch for side in sides for launch in side])
    return str(path)


def _side(commit: str, move_s: float, **exact: int | str) -> list[LaunchRecord]:
    return [_launch(number, commit, move_s, **exact) for number in range(1, 7)]


def _actions() -> dict[str, argparse.ArgumentParser]:
    def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
        return dict(next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices)

    return commands(commands(build_parser())["track"])


def test_the_options_of_each_command_are_exactly_these() -> None:
    actions = _actions()
    assert set(actions) == set(TRACK)
    for name, parser in actions.items():
        options = [a for a in parser._actions if a.dest != "help"]
        shown = {option for a in options if a.help != argparse.SUPPRESS for option in a.option_strings}
        hidden = {option for a in options if a.help == argparse.SUPPRESS for option in a.option_strings}
        assert (shown, hidden) == (TRACK[name], TRACK_HIDDEN.get(name, set())), name


@pytest.mark.parametrize("action", sorted(TRACK))
def test_help_of_each_command_carries_an_example(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["track", action, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"example:\n  relaymeter track {action} " in text
    assert "--fault" not in text


BAD: dict[str, tuple[list[str], str]] = {
    "no action": (["track"], "run|check|show"),
    "nothing to compare with": (["track", "check"], "one of the arguments --against --ab is required"),
    "two bases": (["track", "check", "--against", "history", "--ab", "."], "not allowed with argument"),
    "a history in a file": (["track", "check", "--ab", ".", "--history", "there/h"], "cannot write history there/h: "),
    "no suite": (["track", "run", "--suite", ""], "argument --suite: '' names nothing: give a name, or leave"),
    "no base": (["track", "check", "--against", ""], "argument --against: '' names nothing"),
    "unknown suite": (["track", "run", "--suite", "cii"], "unknown suite 'cii': did you mean 'ci'? valid: ci, or a"),
    "unknown case": (["track", "run", "--case", "none"], "suite ci has no case 'none': valid: "),
    "unknown fault": (["track", "run", "--fault", "slow"], "'slow' is not slow=SHARE or flip"),
    "launches of a history": (["track", "check", "--against", "history", "--launches", "3"], "--against takes none of"),
    "a limit of a history": (["track", "check", "--against", "history", "--time-limit", "3"], "--time-limit is about"),
    "a commit of an a/b": (["track", "check", "--ab", ".", "--commit", "HEAD"], "--commit is about a history"),
    "a window of one": (["track", "check", "--against", "a", "--window", "3"], "it takes --against history"),
    "unknown option of check": (
        ["track", "check", "--against", "a", "--fast"],
        "relaymeter track check: unrecognized arguments: --fast (see relaymeter track check --help)",
    ),
    "unknown option of run": (["track", "run", "--out", "x"], "(see relaymeter track run --help)"),
    "unknown case of an a/b": (["track", "check", "--ab", ".", "--case", "none"], "suite ci has no case 'none'"),
    "a folder without code": (["track", "check", "--ab", "."], "--ab . holds no src/relaymeter/__init__.py"),
    "output exists": (["track", "check", "--against", "history", "--junit", "there"], "there exists"),
    "two outputs of one name": (
        ["track", "check", "--against", "history", "--junit", "x", "--hud", "x"], "--junit and --hud both name x",
    ),
    "a page over its history": (
        ["track", "show", "--history", "there", "--out", "there", "--force"], "--out and --history both name there",
    ),
    "github elsewhere": (
        ["track", "check", "--against", "history", "--github"], "--github writes to the file that GITHUB_STEP_SUMMARY",
    ),
    "a history that is none": (["track", "run", "--history", "there"], "history there, line 1: "),
    "a history that is none to check": (["track", "check", "--against", "a", "--history", "there"], "there, line 1: "),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_is_one_line_and_exit_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    Path("there").write_text("nothing\n", encoding="utf-8")
    arguments, said = BAD[name]
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = int(str(ended.code))
    err = capsys.readouterr().err
    assert (code, said in err, err.count("\n")) == (2, True, 1), err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_no_output_replaces_the_default_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = Path(".relaymeter/track.jsonl")
    _kept(kept, _side("a", 1.0), _side("b", 1.0))
    before = kept.read_bytes()
    for option in ("--json", "--otava", "--junit"):
        assert main(["track", "check", "--against", "history", option, str(kept), "--force"]) == 2
        assert "both name .relaymeter/track.jsonl" in capsys.readouterr().err
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(kept))
    assert main(["track", "check", "--against", "history", "--github"]) == 2
    assert kept.read_bytes() == before


def test_without_a_history_or_a_baseline_a_check_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["track", "check", "--against", "history"]) == 5
    assert "history .relaymeter/track.jsonl does not exist: relaymeter track run" in capsys.readouterr().err
    _kept(Path(".relaymeter/track.jsonl"), _side("a", 1.0))
    for options in ([], ["--warn-only"]):
        assert main(["track", "check", "--against", "history", *options]) == 5
        assert "no baseline" in capsys.readouterr().out
    assert main(["track", "check", "--against", "history", "--suite", "other.toml"]) == 5
    assert "has no launch of suite other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("after", "code", "warned"),
    [
        (_side("b", 1.0), 0, 0),
        (_side("b", 1.5), 3, 0),
        (_side("b", 1.0, messages=4), 3, 0),
        (_side("b", 1.0, digest="0100"), 6, 6),
        ([replace(one, cases=(replace(one.cases[0], digest_passed=1),)) for one in _side("b", 1.0)], 6, 6),
        ([replace(one, machine_id="other") for one in _side("b", 1.0)], 4, 4),
    ],
    ids=["equal", "slower", "more messages", "other bits", "wrong bits", "another machine"],
)
def test_exit_codes_and_what_warn_only_makes_of_them(
    after: list[LaunchRecord], code: int, warned: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _kept(tmp_path / "h.jsonl", _side("a", 1.0), after)
    asked = ["track", "check", "--history", path, "--against", "aaaa"]
    assert main(asked) == code
    assert "in place of" not in capsys.readouterr().out
    assert main([*asked, "--warn-only"]) == warned
    said = f"note: exit code {warned} in place of {code}: --warn-only"
    assert (said in capsys.readouterr().out) is (code != warned)


def test_every_report_is_written_of_one_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    Path("summary").write_text("before\n", encoding="utf-8")
    path = _kept(tmp_path / "h.jsonl", _side("a", 1.0), _side("b", 1.5))
    asked = ["track", "check", "--history", path, "--against", "history", "--github", "--json", "-"]
    files = ["--junit", "j", "--markdown", "m", "--action-benchmark", "a", "--hud", "h", "--otava", "o"]
    assert main([*asked, *files]) == 3
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert (document["exit_code"], document["counts"]["regression"], document["schema_version"]) == (3, 1, 1)
    assert document["rows"][0]["metric"] == "move_s"
    assert document["before"]["launches"] == document["after"]["launches"] == 6
    assert "::error " in said.err
    summary = Path("summary").read_text(encoding="utf-8")
    assert summary.startswith("before\n")
    assert "regression: 1 of 4 rows" in summary
    suite = ElementTree.parse("j").getroot()
    assert len(list(suite.iter("failure"))) == 1
    assert "regression" in Path("m").read_text(encoding="utf-8")
    assert json.loads(Path("a").read_text(encoding="utf-8"))
    values = [record["metric"]["benchmark_values"] for record in json.loads(Path("h").read_text(encoding="utf-8"))]
    assert max(map(len, values)) == 6, "of the newest commit's launches alone"
    assert len(Path("o").read_text(encoding="utf-8").splitlines()) == 13
    assert main([*asked, *files]) == 2, "nothing is replaced without --force"


def test_a_run_that_is_interrupted_between_launches_says_wrong_bits_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from relaymeter.harness import commands_track

    taken = _side("a", 1.0)

    def measure(number: int, _: float) -> tuple[int, LaunchRecord]:
        if number > passed:
            raise KeyboardInterrupt
        return 0, taken[number - 1]

    plan = SimpleNamespace(hint=None, measure=measure, suite=SimpleNamespace(name="ci"), machine_id="m")
    monkeypatch.setattr(commands_track, "plan_launches", lambda *_, **__: plan)
    monkeypatch.setattr(commands_track, "_table", lambda _: Table())
    asked = ["track", "run", "--history", str(tmp_path / "h")]
    for passed, code in ((0, 130), (2, 130), (3, 6)):
        taken[2] = replace(taken[2], cases=(replace(taken[2].cases[0], digest_passed=1),))
        assert main(asked) == code
        said = capsys.readouterr()
        assert f"SIGINT: {passed} of 5 launches were measured" in said.err
        assert said.out.startswith("WRONG BITS: k") == (code == 6)


def test_show_writes_the_page_of_a_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["track", "show", "--history", "h.jsonl", "--out", "p.html"]) == 5
    _kept(Path("h.jsonl"), _side("a", 1.0), _side("b", 1.5))
    assert main(["track", "show", "--history", "h.jsonl", "--out", "p.html"]) == 0
    assert "page: p.html (12 launches, " in capsys.readouterr().out
    assert "move_s" in Path("p.html").read_text(encoding="utf-8")
    assert main(["track", "show", "--history", "h.jsonl", "--out", "p.html"]) == 2
    assert main(["track", "show", "--history", "h.jsonl", "--out", "p.html", "--force"]) == 0
    assert main(["track", "show", "--out", "q.html"]) == 5
    assert "history .relaymeter/track.jsonl does not exist" in capsys.readouterr().err
    _kept(Path(".relaymeter/track.jsonl"), _side("a", 1.0))
    assert main(["track", "show", "--out", "q.html"]) == 0
