"""The interleaved A/B: turns, sides, what is kept, what a failed or interrupted launch leaves behind."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from relaymeter.errors import InputError, Undecided
from relaymeter.harness.processes import state_of
from relaymeter.harness.signals import EndingSignal
from relaymeter.harness.track import ab, ab_sides
from relaymeter.harness.track.ab import LaunchFailed, LaunchPairs, OutOfTime, launch_side, turns
from relaymeter.harness.track.ab_sides import (
    Side,
    other_side,
    refuse_other_suite,
    same_code,
    this_side,
    versions_differ,
)
from relaymeter.harness.track.records import CaseRecord, LaunchRecord
from relaymeter.harness.track.suite import config_hash, load_suite, select_cases, suite_path

RECORD = LaunchRecord(
    utc="2026-01-02T03:04:05Z", session_id="one", launch=1, machine_id="m", config_hash="c", suite="ci",
    version="0.1.0", commit="a" * 40, commit_utc="2026-01-01T00:00:00Z", dirty=False,
    cases=(CaseRecord(name="k", exact={"messages": 3}, samples={"move_s": (1.0,)}, digest_passed=1, digest_total=1),),
)  # fmt: skip


def _stub(folder: Path, main: str, *, version: str = "0.0.9", track: bool = True) -> Path:
    """A checkout of a package of that name, which does ``main`` when it is run."""
    package = folder / "src" / "relaymeter"
    for name in ("", *(("harness", "harness/track") if track else ())):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").write_text(f"__version__ = {version!r}\n", encoding="utf-8")
    if track:
        (package / "harness" / "options_track.py").write_text("", encoding="utf-8")
    (package / "__main__.py").write_text(main, encoding="utf-8")
    return folder


def _says(folder: Path, text: str, *, code: int = 0, **options: object) -> Path:
    main = (
        "import sys\nprint('not of it')\n"
        f"open(sys.argv[-1], 'w').write({text!r})\nprint('what went wrong', file=sys.stderr)\nsys.exit({code})\n"
    )
    return _stub(folder, main, **options)  # type: ignore[arg-type]


def _side(label: str) -> Side:
    return Side(label, sys.executable, None)


def test_sides_take_turns_so_that_drift_falls_on_both() -> None:
    assert "".join("AB"[which] for pair in range(4) for which in turns(pair)) == "ABBAABBA"


def test_launches_are_numbered_by_side_kept_at_once_and_told_with_the_time_left(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept: list[LaunchRecord] = []
    asked: list[tuple[str, Sequence[str]]] = []

    def launch(side: Side, options: Sequence[str]) -> LaunchRecord:
        assert len(kept) == len(asked)
        asked.append((side.label, options))
        return RECORD

    suite = tmp_path / "s.toml"
    pairs = LaunchPairs((_side("base"), _side("this")), suite, keep=kept.append, fault="slow=0.25", launch=launch)
    pairs.take(2)
    pairs.take(3)
    assert [label for label, _ in asked] == ["base", "this", "this", "base", "base", "this"]
    assert asked[0][1] == ["--suite", str(suite)], "the base is launched with the caller's suite and no fault"
    assert asked[1][1] == ["--suite", str(suite), "--fault", "slow=0.25"]
    before, after = pairs.launches
    assert [record.launch for record in before] == [record.launch for record in after] == [1, 2, 3]
    assert {record.session_id for record in before}.isdisjoint(record.session_id for record in after)
    assert sorted(map(id, kept)) == sorted(map(id, [*before, *after]))
    lines = capsys.readouterr().err.splitlines()
    assert lines[3].startswith("launch 4 of 4 (before: base) ")
    assert lines[3].endswith("about 0 s left")
    assert lines[5].startswith("launch 6 of 6 (after: this) ")


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path: Path) -> None:
    kept: list[LaunchRecord] = []

    def launch(_: Side, __: Sequence[str]) -> LaunchRecord:
        if len(kept) == 3:
            raise KeyboardInterrupt
        return RECORD

    pairs = LaunchPairs((_side("base"), _side("this")), tmp_path / "s.toml", keep=kept.append, launch=launch)
    with pytest.raises(KeyboardInterrupt):
        pairs.take(5)
    assert [record.launch for record in kept] == [1, 1, 2]


def test_a_time_limit_goes_to_each_launch_and_ends_the_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(ab, "time", SimpleNamespace(monotonic=lambda: clock.now))
    asked: list[Sequence[str]] = []

    def launch(_: Side, options: Sequence[str]) -> LaunchRecord:
        asked.append(options[-4:])
        clock.now += 10
        return RECORD

    sides = (_side("base"), _side("this"))
    pairs = LaunchPairs(
        sides, tmp_path / "s.toml", keep=lambda _: None, cases=["k"], time_limit_s=30, launch=launch
    )  # fmt: skip
    with pytest.raises(OutOfTime, match="time limit: 1 before and 2 after of 5 launches a side were measured") as ended:
        pairs.take(5)
    assert ended.value.exit_code == 124
    assert asked == [["--case", "k", "--time-limit", left] for left in ("30", "20", "10")]


def test_what_differs_between_the_sides_besides_their_code_is_told() -> None:
    old, new = (replace(_side(name), versions={"torch": name, "nvidia-nccl-cu12": "2.21"}) for name in ("2.9", "2.10"))
    assert versions_differ(old, new) == ["torch 2.9 before, 2.10 after"]
    assert versions_differ(old, _side("bare"))[1] == "nvidia-nccl-cu12 2.21 before, none after"
    assert versions_differ(new, new) == []
    assert other_side(sys.executable).versions == this_side().versions


def test_this_side_is_the_code_that_runs() -> None:
    side = this_side()
    assert side.python == sys.executable
    assert side.path is not None
    assert (Path(side.path) / "relaymeter" / "harness" / "track" / "ab.py").is_file()


def test_a_side_s_own_code_is_launched_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    main = (
        "import json, os, sys\n"
        f"record = json.loads({json.dumps(RECORD.to_dict())!r})\n"
        "seen = [sys.argv[1:], os.getcwd(), os.listdir(), os.environ['PYTHONPATH']]\n"
        "json.dump(seen, open(os.environ['SEEN'], 'w'))\n"
        "json.dump(record, open(sys.argv[-1], 'w'))\n"
    )
    side = other_side(str(_stub(tmp_path / "base", main)))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    assert launch_side(side, ["--suite", "/s.toml"]) == RECORD
    arguments, folder, files, path = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert arguments[:6] == ["track", "run", "--suite", "/s.toml", "--launches", "1"]
    assert arguments[-2] == "--json"
    assert (files, path) == (["log"], f"{tmp_path / 'base' / 'src'}:/nowhere")
    assert not Path(folder).exists()


def test_a_side_imports_its_own_code_first_and_then_what_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "relaymeter").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"/site{os.pathsep}{os.pathsep}mine")
    base, other = replace(_side("base"), path="/base/src"), _side("python")
    assert base.import_path == f"/base/src:/site:{tmp_path}/mine"
    assert other.import_path == "/site", "no relaymeter but its own"
    assert [side.environment().get("PYTHONPATH") for side in (base, other)] == [base.import_path, "/site"]
    monkeypatch.delenv("PYTHONPATH")
    assert (base.import_path, other.import_path) == ("/base/src", None)
    assert "PYTHONPATH" not in other.environment()


KILLED = """import os, signal, subprocess, sys, tempfile
folder = os.path.join(tempfile.gettempdir(), 'relaymeter-abcd1234')
os.mkdir(folder)
start = open('/proc/self/stat').read().rpartition(')')[2].split()[19]
open(os.path.join(folder, 'owner'), 'w').write(f"{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-{start}")
rank = subprocess.Popen(['sleep', '60'])
open(os.environ['SEEN'], 'w').write(str(rank.pid))
print('it was here', flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launch_that_is_killed_is_a_lost_rank_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    side = replace(_side("base"), path=str(_stub(tmp_path / "base", KILLED) / "src"))
    with pytest.raises(LaunchFailed) as failed:
        launch_side(side, [])
    assert failed.value.exit_code == 7
    how = "a launch of base was killed by SIGKILL (is there too little memory?) and gave no record:\n  it was here"
    assert str(failed.value) == how
    assert list(place.iterdir()) == []
    assert _wait(lambda: not _runs(int((tmp_path / "seen").read_text(encoding="utf-8"))))


def _runs(pid: int) -> bool:
    return bool(state_of(pid).strip("ZX"))


@pytest.mark.parametrize(
    ("code", "verdict", "how"),
    [
        (-9, 7, "was killed by SIGKILL (is there too little memory?)"),
        (137, 7, "was killed by SIGKILL (is there too little memory?)"),
        (-11, 7, "was killed by SIGSEGV"),
        (-62, 7, "was killed by signal 62"),
        (130, 130, "ended with exit code 130"),
        (124, 124, "ended with exit code 124"),
        (0, 1, "ended with exit code 0"),
    ],
)
def test_how_a_launch_ended_is_told_and_judged(code: int, verdict: int, how: str) -> None:
    assert (ab._verdict_of(code), ab._how_it_ended(code)) == (verdict, how)


def test_a_second_signal_does_not_cut_the_end_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    def end(_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        ended.append(True)

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(pid=0))
    monkeypatch.setattr(ab, "_exit_code", interrupted)
    monkeypatch.setattr(ab, "_end", end)
    with pytest.raises(EndingSignal):
        launch_side(_side("this"), [])
    assert ended == [True]


def test_wrong_bits_of_a_launch_are_a_record_like_any_other(tmp_path: Path) -> None:
    assert launch_side(other_side(str(_says(tmp_path, json.dumps(RECORD.to_dict()), code=6))), []) == RECORD


@pytest.mark.parametrize(("code", "text", "exit_code"), [(124, "{}", 124), (0, "", 1)])
def test_a_launch_that_fails_ends_the_comparison_with_its_exit_code_and_words(
    code: int, text: str, exit_code: int, tmp_path: Path
) -> None:
    side = other_side(str(_says(tmp_path, text, code=code)))
    with pytest.raises(LaunchFailed) as failed:
        launch_side(side, [])
    assert failed.value.exit_code == exit_code
    assert (
        f"a launch of {tmp_path} ended with exit code {code} and gave no record:\n  not of it\n  what went wrong"
        in str(failed.value)
    )


def test_a_base_that_writes_another_schema_cannot_be_compared() -> None:
    other = replace(RECORD, schema_version=2).to_dict()
    with pytest.raises(Undecided, match="the base writes launches of schema_version 2, this version reads 1"):
        ab._record(json.dumps(other), _side("the base"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            json.dumps({**RECORD.to_dict(), "new": 1}),
            "the base wrote a record that this version does not read: launch: new",
        ),
        ("{", "the base wrote no record of a launch"),
    ],
)
def test_a_record_that_cannot_be_read_is_said_with_its_side(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ab._record(text, _side("the base"))


def test_the_same_code_on_both_sides_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (replace(_side(name), origin=f"/{name}/relaymeter/__init__.py") for name in ("a", "b"))
    trees: dict[str, str | None] = {"a": "t" * 40, "b": "u" * 40}
    monkeypatch.setattr(ab_sides, "tree_of", lambda path: trees[path.parts[1]])
    assert same_code(old, new) is None
    assert same_code(old, old) == "both sides are the same code, in /a/relaymeter: what differs is noise"
    assert same_code(old, replace(old, versions={"torch": "2.9"})) is None
    trees["b"] = trees["a"]
    assert same_code(old, new) == "both sides are checkouts of the same files (tree ttttttttt): what differs is noise"
    trees.update(a=None, b=None)
    assert same_code(old, new) is None
    assert same_code(_side("a"), _side("a")) is None


def test_a_side_that_reads_the_suite_otherwise_is_refused_before_a_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suite_path("ci")
    own = config_hash(select_cases(load_suite("ci"), ["small-blocks"]), {})
    monkeypatch.setattr(sys, "argv", ["-c", str(suite), "small-blocks"])
    exec(ab_sides._SUITE_PROBE, {})
    assert capsys.readouterr().out == f'\n{ab_sides._MARK}["{own}", ""]\n'
    answer: list[object] = []
    monkeypatch.setattr(ab_sides, "_probe", lambda *_: (answer[-1], "said"))
    for known in ([own, ""], None, 7):  # alike, or not known
        answer.append(known)
        refuse_other_suite(_side("old"), suite, [], own, allowed=False)
    answer.append(["other", ""])
    refuse_other_suite(_side("old"), suite, [], own, allowed=True)
    with pytest.raises(Undecided, match="config_hash differs: --ab old reads the suite with other defaults"):
        refuse_other_suite(_side("old"), suite, [], own, allowed=False)
    answer.append([None, "unknown key 'x'"])
    with pytest.raises(InputError, match="--ab old cannot read the suite: unknown key 'x': give a --suite"):
        refuse_other_suite(_side("old"), suite, [], own, allowed=True)


def test_a_base_from_before_track_is_refused_with_its_version(tmp_path: Path) -> None:
    old = _says(tmp_path, "", version="0.0.1", track=False)
    with pytest.raises(InputError, match=r"is relaymeter 0\.0\.1 from before track run existed: choose a base that"):
        other_side(str(old))


def test_what_is_no_side_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no src/relaymeter/__init__\.py: name a checkout"):
        other_side(str(tmp_path))
    with pytest.raises(InputError, match="is neither the folder of a checkout nor a python executable"):
        other_side(str(tmp_path / "none"))
    with pytest.raises(InputError, match="--ab '' names nothing"):
        other_side("")
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no python here >&2\nexit 3\n", encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(InputError, match="is no python that imports relaymeter: no python here"):
        other_side(str(script))
    script.write_text("#!/bin/sh\nprintf '\\377\\n'\n", encoding="utf-8")
    with pytest.raises(InputError, match=f"--ab {script} is no python that imports relaymeter: nothing on standard"):
        other_side(str(script))
    script.write_text(
        "#!/bin/sh\nprintf '\\377'\necho\necho 'relaymeter-probe: [null, null, null, null]'\necho bye\n",
        encoding="utf-8",
    )
    with pytest.raises(InputError, match="relaymeter is not installed there"):
        other_side(str(script))


def test_another_python_is_a_side_without_a_path_of_its_own() -> None:
    side = other_side(sys.executable)
    assert (side.python, side.path) == (sys.executable, None)


WAITS = """import os, signal, sys, time
def end(*_):
    open(os.environ['SEEN'], 'a').write('ended\\n')
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
open(os.environ['SEEN'], 'w').write(f'{os.getpid()}\\n')
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launch_ends_with_the_command_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    base = _stub(tmp_path / "base", WAITS)
    seen = tmp_path / "seen"
    # a shell's background job ignores SIGINT
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    modules = "from relaymeter.harness.track.ab import *\nfrom relaymeter.harness.track.ab_sides import *\n"
    script = f"{heard}{modules}launch_side(other_side({str(base)!r}), [])\n"
    command = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "SEEN": str(seen)}, cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    try:
        pid = _wait(lambda: seen.is_file() and seen.read_text(encoding="utf-8").endswith("\n") and seen.read_text())
        command.send_signal(number)
        command.wait(20)
    finally:
        command.kill()
        command.wait()
    assert command.returncode in (-number, 128 + number)
    assert _wait(lambda: not Path(f"/proc/{int(pid.split()[0])}").exists())
    told = number != signal.SIGKILL
    assert ("ended" in seen.read_text(encoding="utf-8")) == told, (
        "told to end, not killed, so that its ranks end in order"
    )


def _wait(until: object, limit_s: float = 20.0) -> str:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = until()  # type: ignore[operator]
        if found:
            return str(found)
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def test_a_launch_that_does_not_end_when_told_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab, "_ENDING_S", 0.2)
    stubborn = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('on', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    ab._end(process)
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
