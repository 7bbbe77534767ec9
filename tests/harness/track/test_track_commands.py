"""The commands ``track run``, ``check`` and ``show``: their surface, what they write, and the examples of the docs."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from relaymeter.harness.cli import build_parser, main
from relaymeter.harness.track import history
from relaymeter.harness.track.records import CaseRecord, LaunchRecord
from surface import TRACK, TRACK_HIDDEN

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs" / "tracking.md"
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
    "unknown suite": (["track", "run", "--suite", "cii"], "unknown suite 'cii': did you mean 'ci'? valid: ci, or a"),
    "unknown case": (["track", "run", "--case", "none"], "suite ci has no case 'none': valid: "),
    "unknown fault": (["track", "run", "--fault", "slow"], "'slow' is not slow=SHARE or flip"),
    "launches of a history": (["track", "check", "--against", "history", "--launches", "3"], "--against takes none of"),
    "a folder without code": (["track", "check", "--ab", "."], "--ab . holds no src/relaymeter/__init__.py"),
    "output exists": (["track", "check", "--against", "history", "--junit", "there"], "there exists"),
    "two outputs of one name": (
        ["track", "check", "--against", "history", "--junit", "x", "--hud", "x"], "--junit and --hud both name x",
    ),
    "a page over its history": (
        ["track", "show", "--history", "there", "--out", "there", "--force"], "would replace the file that",
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
    after: list[LaunchRecord], code: int, warned: int, tmp_path: Path
) -> None:
    path = _kept(tmp_path / "h.jsonl", _side("a", 1.0), after)
    asked = ["track", "check", "--history", path, "--against", "aaaa"]
    assert main(asked) == code
    assert main([*asked, "--warn-only"]) == warned


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
    assert "slower" in summary
    suite = ElementTree.parse("j").getroot()
    assert len(list(suite.iter("failure"))) == 1
    assert "slower" in Path("m").read_text(encoding="utf-8")
    assert json.loads(Path("a").read_text(encoding="utf-8"))
    values = [record["metric"]["benchmark_values"] for record in json.loads(Path("h").read_text(encoding="utf-8"))]
    assert max(map(len, values)) == 6, "of the newest commit's launches alone"
    assert len(Path("o").read_text(encoding="utf-8").splitlines()) == 13
    assert main([*asked, *files]) == 2, "nothing is replaced without --force"


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


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _scripts(entry: Any) -> Iterator[str]:
    """Every command of a workflow: the values of ``run`` (GitHub), the lists under ``script`` (GitLab)."""
    if isinstance(entry, dict):
        for key, value in entry.items():
            if key == "run" and isinstance(value, str):
                yield from value.strip().splitlines()
            elif key == "script":
                yield from value
            else:
                yield from _scripts(value)
    elif isinstance(entry, list):
        for value in entry:
            yield from _scripts(value)


def test_the_example_suite_of_the_docs_is_one(tmp_path: Path) -> None:
    from relaymeter.harness.track.case_plan import refuse_idle_routes
    from relaymeter.harness.track.suite import CaseConfig, TrackSuite, WorldConfig, load_suite

    (text,) = _blocks("toml")
    (tmp_path / "moves.toml").write_text(text, encoding="utf-8")
    suite = load_suite(str(tmp_path / "moves.toml"))
    refuse_idle_routes(suite)
    for model in (TrackSuite, WorldConfig, CaseConfig):
        keys = {field.alias or name for name, field in model.model_fields.items()} - {
            "cases",
            "models",
            "world",
            "name",
        }
        assert not [key for key in keys if f"{key} =" not in text.replace("tensors = [", "tensors =")], model


def test_every_exit_code_of_the_docs_and_every_option_of_a_report_is_there() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for option in TRACK["check"] & {"--junit", "--github", "--markdown", "--action-benchmark", "--hud", "--otava"}:
        assert f"| `{option}" in text, option
    for code in (0, 2, 3, 4, 5, 6):
        assert re.search(rf"^\| {code} \|", text, re.MULTILINE), code


TINY = """
repeats = 1
warmups = 0
[world]
nodes = 2
ranks_per_node = 1
[[cases]]
name = "k"
tensors = [{ shape = [64] }]
from = { kind = "zero3", nodes = [0] }
to = { kind = "zero3", nodes = [1] }
"""


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_the_example_workflows_of_the_docs_run(cli: Cli, tmp_path: Path) -> None:
    """Their commands for real, on a tiny suite, with one launch where they take several."""
    workflows = [yaml.safe_load(block) for block in _blocks("yaml")]
    github, gitlab = workflows
    assert set(github) == {"name", True, "jobs"}, "YAML 1.1 reads the key on as true, as GitHub knows"
    assert gitlab["moves"]["allow_failure"] == {"exit_codes": [5]}
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    (tmp_path / "base").symlink_to(ROOT)
    expected = {"run": 0, "check --against": 5, "check --ab": 4, "show": 0}
    done = []
    for line in (line for workflow in workflows for line in _scripts(workflow.get("jobs", workflow))):
        words = shlex.split(line)
        if words[0] != "relaymeter":
            assert re.match(r"(pip install -e \.|git worktree add \.\./base )", line), line
            continue
        assert words[1] == "track"
        words = ["tiny.toml" if word == "ci" else "base" if word == "../base" else word for word in words[1:]]
        ranks = words[1] == "run" or "--ab" in words
        at = words.index("--launches") if "--launches" in words else None
        words = words if at is None else words[:at] + words[at + 2 :]
        words += ["--launches", "1"] if ranks else []
        warm = words[1] == "run"
        found = cli(*words, env={"GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}, limit_s=100.0, warm=warm)
        key = words[1] if words[1] != "check" else f"check {'--ab' if '--ab' in words else '--against'}"
        assert found.returncode == expected[key], (line, found.stderr)
        done.append(key)
        for name in [name for name in ("track.xml", "track.md") if (tmp_path / name).exists() and key == "check --ab"]:
            (tmp_path / name).unlink()  # each workflow has a folder of its own
    assert sorted(done) == sorted(expected)
    assert (tmp_path / "summary").stat().st_size
    assert (tmp_path / "track.html").stat().st_size
    assert (tmp_path / "track.csv").stat().st_size
