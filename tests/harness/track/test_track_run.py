"""``track run`` on real ranks: the project's exact metrics, wrong bits, the planted slow-down, what is kept."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exact_metrics import committed, exact_of

import relaymeter
from relaymeter.harness import emit
from relaymeter.harness.git import tree_of
from relaymeter.harness.results import make_stamp
from relaymeter.harness.track import launches
from relaymeter.harness.track.launches import checkout, plan_launches, revision
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.suite import TIMES, load_suite, suite_path

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

TINY = """
repeats = 5
warmups = 1
plan_repeats = 2

[world]
nodes = 2
ranks_per_node = 1

[[cases]]
name = "to-copy"
tensors = [{ shape = [512, 256], count = 4 }]
from = { kind = "zero3", nodes = "all" }
to = { kind = "replicas", nodes = "second-half" }

[[cases]]
name = "states"
tensors = [{ shape = [1000] }, { shape = [333, 7], cut = 1 }]
dtype = "float32"
from = { kind = "zero12", nodes = "all" }
to = { kind = "zero12", nodes = "first-half" }
executor = "all-to-all"
times = ["move_s"]
"""


def _lines(path: Path) -> list[LaunchRecord]:
    return [LaunchRecord.from_dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.dist
def test_the_exact_metrics_of_this_project_are_those_committed(cli: Cli, tmp_path: Path) -> None:
    text = suite_path("ci").read_text(encoding="utf-8")
    fewer, count = re.subn(r"^(repeats|plan_repeats) = \d+$", r"\1 = 2", text, flags=re.MULTILINE)
    assert count == 2
    (tmp_path / "ci.toml").write_text(fewer, encoding="utf-8")  # what is exact is so in every repeat
    done = cli("track", "run", "--suite", "ci.toml", "--launches", "1", "--json", "-", warm=True, limit_s=110.0)
    assert done.returncode == 0, done.stderr
    assert exact_of(done.stdout) == committed(), (
        "a change that moves other bytes, messages, segments, rounds or bits: if it is meant to, "
        "python tests/harness/track/exact_metrics.py writes them anew"
    )
    (record,) = (LaunchRecord.from_dict(json.loads(line)) for line in done.stdout.splitlines())
    assert all(case.ok for case in record.cases)
    for case, config in zip(record.cases, load_suite("ci").cases, strict=True):
        assert set(case.samples) == set(config.times)
        assert {len(values) for values in case.samples.values()} == {2}


@pytest.mark.dist
def test_launches_are_kept_in_order_with_what_they_were_made_of(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    done = cli("track", "run", "--suite", "tiny.toml", "--launches", "2", "--json", "out.jsonl", warm=True)
    assert done.returncode == 0, done.stderr
    kept = _lines(tmp_path / ".relaymeter" / "track.jsonl")
    assert kept == _lines(tmp_path / "out.jsonl")
    assert [record.launch for record in kept] == [1, 2]
    assert len({(record.session_id, record.config_hash, record.machine_id) for record in kept}) == 1
    assert (kept[0].suite, kept[0].commit) == ("tiny", checkout().commit)
    assert kept[0].cases[0].exact == kept[1].cases[0].exact
    assert [set(case.samples) for case in kept[0].cases] == [set(TIMES), {"move_s"}]
    assert kept[0].cases[1].exact["bytes_total"] == (1000 + 333 * 7) * 4
    assert "launch 1 of 2: " in done.stderr
    assert "s left" in done.stderr
    assert "2 launches of " in done.stdout


@pytest.mark.dist
def test_a_flipped_bit_is_exit_6_said_first_and_in_the_record(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    done = cli("track", "run", "--suite", "tiny.toml", "--launches", "1", "--fault", "flip", warm=True)
    assert done.returncode == 6
    assert done.stdout.startswith("WRONG BITS: states, to-copy: what arrived is not what was sent\n")
    (record,) = _lines(tmp_path / ".relaymeter" / "track.jsonl")
    case = record.cases[0]
    assert (case.ok, case.digest_total - case.digest_passed) == (False, 1)


@pytest.mark.dist
def test_a_planted_slow_down_is_in_the_communication_of_every_case(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")

    def communicate_s(*fault: str) -> float:
        asked = ("track", "run", "--suite", "tiny.toml", "--launches", "1", "--case", "to-copy", "--json", "-")
        done = cli(*asked, *fault, warm=True)
        assert done.returncode == 0, done.stderr
        return statistics.median(json.loads(done.stdout)["cases"][0]["samples"]["communicate_s"])

    assert communicate_s("--fault", "slow=20") > 4 * communicate_s()


@pytest.mark.dist
def test_in_a_world_that_was_joined_a_run_is_one_launch_of_the_world_s_ranks(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
    asked = ("track", "run", "--suite", "tiny.toml")
    many = cli(*asked, "--launches", "2", env=world)
    assert (many.returncode, "a world of torchrun is one launch" in many.stderr) == (2, True)
    other = cli(*asked, env=world, warm=True)
    assert other.returncode == 2
    assert "suite tiny is measured on 2 ranks of 2 nodes, this world has 1 of 1" in other.stderr
    assert not (tmp_path / ".relaymeter").exists()


def test_nics_with_a_rate_are_refused_where_nothing_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relaymeter.errors import InputError
    from relaymeter.harness import box

    file = tmp_path / "shaped.toml"
    file.write_text(TINY.replace("ranks_per_node = 1", 'ranks_per_node = 1\nnic = "400mbit"'), encoding="utf-8")
    monkeypatch.setattr(box, "capability", lambda: "not root")
    with pytest.raises(InputError) as refused:
        plan_launches(load_suite(str(file)), emit.Output(None, force=False))
    said = "suite shaped has NICs of 400 Mbit/s, which this machine cannot hold (not root): take a suite without a rate"
    assert str(refused.value).startswith(said)


def test_the_machine_s_id_outlives_a_new_version_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {"relaymeter": "0.1", "torch": "2.9"}
    monkeypatch.setattr(launches, "machine_facts", lambda: facts)
    known = launches.track_machine_id()
    facts["relaymeter"] = "0.2"
    assert launches.track_machine_id() == known
    facts["torch"] = "2.10"
    assert launches.track_machine_id() != known


def test_the_revision_is_that_of_the_checkout_that_holds_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        about = ("-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *about, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "src" / "relaymeter" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("", encoding="utf-8")
    assert (checkout(package), revision("HEAD", package)) == (launches.Checkout(None, None, False), None)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first", "--date", "2026-01-02T03:04:05+02:00")
    assert [revision(text, package) for text in ("HEAD", "HEAD~0", "none", "--all", "")] == [
        *[git("rev-parse", "HEAD")] * 2, None, None, None,
    ]  # fmt: skip
    found = checkout(package)
    assert (found.commit, found.dirty) == (git("rev-parse", "HEAD"), False)
    assert found.commit_utc is not None
    assert found.commit_utc.endswith("Z")
    whole = git("rev-parse", "HEAD^{tree}")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))  # as a hook of another repository has them
    assert (checkout(package), revision("HEAD", package), tree_of(package)) == (found, found.commit, whole)
    monkeypatch.setattr(relaymeter, "__file__", str(package))
    assert make_stamp("m", shaped=False).commit == str(found.commit)[:10]
    (tmp_path / "new").write_text("", encoding="utf-8")
    assert checkout(package) == found, "untracked files change nothing that runs"
    package.write_text("x = 1\n", encoding="utf-8")
    assert (checkout(package).dirty, tree_of(package)) == (True, None)
