"""docs/tracking.md: its example suite is one, its workflows are whole, and their commands run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from track_launches import case, launch

from relaymeter.harness.cli import build_parser, main
from relaymeter.harness.track import history
from relaymeter.harness.track.exports import otava_config
from relaymeter.harness.track.records import LaunchRecord
from surface import TRACK

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs" / "tracking.md"
GITHUB = (".github/workflows/moves.yml", ".github/workflows/moves-main.yml", ".github/workflows/upgrade.yml")
COMMENT, GITLAB = ".github/workflows/moves-comment.yml", ".gitlab-ci.yml"
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
#: What their commands end with: on made launches, of which the bases have none of another commit.
EXPECTED = {"run": 0, "check --against": 5, "check --ab": 0, "show": 0}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def files() -> dict[str, Any]:
    """Every YAML file of the page, by the name in its first line."""
    return {block.splitlines()[0].removeprefix("# "): yaml.safe_load(block) for block in blocks("yaml")}


def jobs(name: str, workflow: Mapping[Any, Any]) -> dict[str, Any]:
    found = workflow["jobs"] if name.startswith(".github") else workflow
    return {key: value for key, value in found.items() if key != "variables"}


def commands(job: Mapping[str, Any]) -> Iterator[str]:
    """Every line that a job runs, on GitHub or GitLab, in order."""
    for step in job.get("steps", ()):
        yield from step.get("run", "").strip().splitlines()
    yield from (*job.get("script", ()), *job.get("after_script", ()))


def words_of(line: str, folder: Path) -> list[str]:
    """A command of relaymeter as it is run here: a tiny suite, this checkout for the base, this python for another."""
    found = []
    for word in shlex.split(line):
        if word == "ci":
            word = "tiny.toml"
        elif word.endswith("/bin/python"):
            word = sys.executable
        elif "/base" in word:
            word = str(ROOT)
        found.append(word)
    assert found[0].rpartition("/")[2] == "relaymeter" and found[1] == "track"
    return found[1:]


def kind_of(words: Sequence[str]) -> str:
    return words[1] if words[1] != "check" else f"check {'--ab' if '--ab' in words else '--against'}"


def relaymeter_lines() -> list[tuple[str, str]]:
    """File and command."""
    return [
        (name, line)
        for name in (*GITHUB, GITLAB)
        for job in jobs(name, files()[name]).values()
        for line in commands(job)
        if re.match(r'("[^"]*/)?relaymeter\b', line)
    ]


def test_the_example_suite_of_the_docs_is_one(tmp_path: Path) -> None:
    from relaymeter.harness.track.case_plan import refuse_idle_routes
    from relaymeter.harness.track.suite import CaseConfig, TrackSuite, WorldConfig, load_suite

    (text,) = blocks("toml")
    (tmp_path / "moves.toml").write_text(text, encoding="utf-8")
    suite = load_suite(str(tmp_path / "moves.toml"))
    refuse_idle_routes(suite)
    assert suite.cases[0].times == ("move_s",), "what a user waits for, and nothing that may stay undecided besides"
    for model in (TrackSuite, WorldConfig, CaseConfig):
        keys = {field.alias or name for name, field in model.model_fields.items()} - {"cases", "models", "world"}
        assert not [key for key in keys if key != "name" and f"{key} =" not in text], model


def test_every_exit_code_of_the_docs_and_every_option_of_a_report_is_there() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for option in TRACK["check"] & {"--junit", "--github", "--markdown", "--action-benchmark", "--hud", "--otava"}:
        assert f"| `{option}" in text, option
    for option in TRACK["check"] - {"--force"}:
        assert option in text, option
    for code in (0, 2, 3, 4, 5, 6):
        assert re.search(rf"^\| {code} \|", text, re.MULTILINE), code


def test_the_first_sentences_say_what_is_tracked_and_for_whom() -> None:
    text = re.sub(r"\s+", " ", DOCS.read_text(encoding="utf-8").split("\n## ")[0])
    assert "measures *builds of relaymeter*" in text and "torch" in text[:300]
    assert text.index("who changes relaymeter") < text.index("who uses the package")


def test_the_otava_configuration_of_the_docs_is_what_one_is_for_its_column() -> None:
    times = case("zero3-tp2", exact={})
    assert files()["otava.yaml"] == yaml.safe_load(otava_config([launch(times)], "track.csv"))


@pytest.mark.parametrize("name", [*GITHUB, COMMENT])
def test_github_workflows_have_least_rights_one_run_at_a_time_and_an_end(name: str) -> None:
    workflow = files()[name]
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}, "YAML 1.1 reads the key on as true"
    assert f".github/workflows/{workflow['name']}.yml" == name
    rights = {
        GITHUB[0]: {"contents": "read"},
        GITHUB[1]: {"contents": "write"},
        GITHUB[2]: {"contents": "read"},
        COMMENT: {"actions": "read", "pull-requests": "write"},
    }
    assert workflow["permissions"] == rights[name]
    assert ("pull_request" in workflow[True]) == (rights[name] == {"contents": "read"}), "nothing may write there"
    assert workflow["concurrency"]["group"].startswith(workflow["name"])
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 40
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), "an expression in a command is an injection"
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
        if name != COMMENT:
            python = next(step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/setup-py"))
            assert python["cache"] == "pip" and job["env"]["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")


def test_the_comment_is_written_by_a_workflow_that_runs_no_code_of_the_pull_request() -> None:
    comment, moves = files()[COMMENT], files()[GITHUB[0]]
    assert comment[True] == {"workflow_run": {"workflows": [moves["name"]], "types": ["completed"]}}
    steps = comment["jobs"]["comment"]["steps"]
    assert not [step for step in steps if "checkout" in step.get("uses", "") or "pip" in step.get("run", "")]
    upload = next(step for step in moves["jobs"]["track"]["steps"] if "upload-artifact" in step.get("uses", ""))
    download = next(step for step in steps if "download-artifact" in step.get("uses", ""))
    assert upload["with"]["name"] == download["with"]["name"] and upload["if"] == "always()"
    (line,) = [line for _, line in relaymeter_lines() if "--json track.json" in line]
    assert "--markdown track.md" in line and f"{download['with']['path']}/track.md" in steps[-1]["run"]


def test_gitlab_keeps_its_history_when_the_first_job_fails_and_draws_it_in_any_case() -> None:
    workflow = files()[GITLAB]
    found = jobs(GITLAB, workflow)
    moves = found["moves"]
    assert moves["allow_failure"] == {"exit_codes": [5]} and "allow_failure" not in found["moves-merge-request"]
    (kept,) = [cache for cache in moves["cache"] if ".relaymeter" in cache["paths"]]
    assert kept["when"] == "always" and kept["unprotect"] is True
    assert all(job["resource_group"] and job["timeout"] for job in found.values())
    assert [line for line in moves["after_script"] if "track show" in line]
    assert workflow["variables"]["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *named, "-C", str(folder), *words], check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()


@pytest.mark.parametrize("name", [GITHUB[0], GITHUB[1], GITLAB])
def test_the_base_is_checked_out_twice_on_one_runner(name: str, tmp_path: Path) -> None:
    """The second time as on a runner of one's own, where the checkout stays while the folder of the job is emptied."""
    origin, clone, temporary = tmp_path / "origin", tmp_path / "clone", tmp_path / "temp"
    origin.mkdir()
    git(origin, "init", "-q", "-b", "main")
    git(origin, "commit", "-q", "--allow-empty", "-m", "base")
    base = git(origin, "rev-parse", "HEAD")
    git(origin, "checkout", "-q", "-b", "change")
    git(origin, "commit", "-q", "--allow-empty", "-m", "change")
    git(origin, "checkout", "-q", "main")
    git(origin, "merge", "-q", "--no-ff", "-m", "merge", "change")
    git(origin, "config", "uploadpack.allowAnySHA1InWant", "true")
    depth = "2" if name == GITHUB[0] else "1" if name == GITHUB[1] else "9"
    git(tmp_path, "clone", "-q", "--depth", depth, origin.as_uri(), str(clone))
    job = next(reversed(jobs(name, files()[name]).values()))
    lines = [line for line in commands(job) if line.startswith("git ")]
    assert lines
    for number in ("1", "2"):
        temporary.mkdir()
        env = {**os.environ, "RUNNER_TEMP": str(temporary), "BEFORE": base, "CI_MERGE_REQUEST_DIFF_BASE_SHA": base,
               "CI_JOB_ID": number}  # fmt: skip
        script = "\n".join(lines).replace("/tmp/base-", f"{temporary}/base-")
        subprocess.run(["bash", "-ec", script], cwd=clone, env=env, check=True, capture_output=True, timeout=30)
        (checked,) = temporary.iterdir()
        assert git(checked, "rev-parse", "HEAD") == base
        subprocess.run(["rm", "-rf", str(temporary)], check=True)


def test_every_command_of_the_workflows_is_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run here, in one process, with made launches in the place of real ones."""

    def made(side: object, options: Sequence[str]) -> LaunchRecord:
        return replace(launch(case("k")), version="0.1.0")

    monkeypatch.setattr("relaymeter.harness.track.ab.launch_side", made)
    done = set()
    for name, line in relaymeter_lines():
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary"))
        Path("tiny.toml").write_text(TINY, encoding="utf-8")
        words = words_of(line, folder)
        build_parser().parse_args(words)
        kind = kind_of(words)
        done.add(kind)
        if kind != "check --ab":
            history.append(Path(".relaymeter/track.jsonl"), [launch(case("k"))])
        if kind != "run":  # real ranks: below
            assert main(words) == EXPECTED[kind], (name, line, capsys.readouterr().err)
        for option in ("--junit", "--markdown", "--action-benchmark", "--json", "--otava", "--out"):
            if option in words:
                assert Path(words[words.index(option) + 1]).stat().st_size, (line, option)
        assert ("--github" in words) == Path("summary").exists() == (name in GITHUB)
    assert done == set(EXPECTED)


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_the_commands_of_the_workflows_run(cli: Cli, tmp_path: Path) -> None:
    """One of each kind for real, on a tiny suite, with one launch where they take several."""
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    kinds = {kind_of(words): words for words in (words_of(line, tmp_path) for _, line in reversed(relaymeter_lines()))}
    for kind in EXPECTED:
        words = kinds[kind]
        if kind in ("run", "check --ab"):
            at = words.index("--launches") if "--launches" in words else len(words)
            words = [*words[:at], *words[at + 2 :], "--launches", "1"]
        summary = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
        found = cli(*words, env=summary, limit_s=100.0, warm=kind == "run")
        assert found.returncode == EXPECTED[kind], (words, found.stderr)
        for one in tmp_path.glob("track.[xm]*"):
            one.unlink()  # each workflow has a folder of its own
    assert (tmp_path / "summary").stat().st_size and (tmp_path / "track.html").stat().st_size
