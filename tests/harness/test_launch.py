"""The launcher: environment of the ranks, verdict on their ends, and that nothing outlives it. No torch, no root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from relaymeter.errors import InputError
from relaymeter.harness.job_folder import JobFolder
from relaymeter.harness.launch import ClusterSpec, LaunchResult, RankEnd, already_in_world, launch, verdict
from relaymeter.harness.processes import own_mark
from relaymeter.harness.worker import meeting_limit

STAND_IN = """
import json, os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
action, _, value = sys.argv[1 + rank % (len(sys.argv) - 1)].partition(":")
if action == "exit":
    print(f"rank {rank} says why", file=sys.stderr)
    sys.exit(int(value))
if action == "environment":
    pathlib.Path(value, f"{rank}.json").write_text(json.dumps(dict(os.environ)))
if action == "child":
    import subprocess
    pathlib.Path(value).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
if action == "wait":
    pathlib.Path(value, f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(60)
if action == "build":
    import subprocess
    lock = pathlib.Path(value, f"{rank}.lock")
    lock.touch()
    try:
        own = [{"process_group": 0}, {"start_new_session": True}][rank % 2]
        compiler = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True, **own)
        pathlib.Path(value, f"{rank}.pids").write_text(f"{compiler.pid} {compiler.stdout.readline()}")
        compiler.wait()
    finally:
        lock.unlink()
if action == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
if action == "until":
    while not pathlib.Path(value).exists():
        time.sleep(0.02)
    sys.exit(7)
"""
PLAIN = ClusterSpec(nodes=2, ranks_per_node=1, shape=False)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., LaunchResult]:
    (tmp_path / "standin.py").write_text(STAND_IN)

    def run(*actions: str, cluster: ClusterSpec = PLAIN, **options: object) -> LaunchResult:
        options = {"time_limit_s": 30.0, "env": {"PYTHONPATH": str(tmp_path)}, **options}
        return launch(list(actions), cluster, log_dir=tmp_path / "logs", module="standin", **options)  # type: ignore[arg-type]

    return run


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone_within(seconds: float, pids: list[int]) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    return path.read_text()


def end(code: int | None = None, number: int | None = None, ended: bool = False) -> RankEnd:
    return RankEnd(0, 1, code, number, ended, 0.1, Path("log"))


@pytest.mark.parametrize(
    ("ends", "timed_out", "expected"),
    [
        ([end(0), end(0)], False, 0),
        ([end(7), end(6)], False, 6),
        ([end(number=signal.SIGKILL), end(2)], False, 7),
        ([end(number=signal.SIGSEGV), end(6)], False, 6),
        ([end(3), end(2)], False, 2),
        ([end(5), end(4)], False, 4),
        ([end(1), end(5)], False, 5),
        ([end(1)], True, 124),
        ([end(124), end(1)], False, 124),
        ([end(number=signal.SIGKILL, ended=True), end(0)], True, 124),
        ([end(number=signal.SIGTERM, ended=True), end(1)], False, 1),
        ([end(6, ended=True)], True, 6),
        ([end(77)], False, 1),
    ],
)
def test_the_worst_end_of_a_rank_decides_the_verdict(ends: list[RankEnd], timed_out: bool, expected: int) -> None:
    assert verdict(ends, timed_out) == expected


def test_ranks_get_the_environment_of_torch_distributed(
    start: Callable[..., LaunchResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    import json

    cluster = ClusterSpec(nodes=2, ranks_per_node=2, shape=False)
    result = start(f"environment:{tmp_path}", cluster=cluster)
    assert (result.exit_code, result.in_box, result.report()) == (0, False, "")
    environments = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [env["RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1", "0", "1"]
    assert [env["RELAYMETER_PLACE"] for env in environments] == ["0:0", "0:1", "1:2", "1:3"]
    assert len({env["MASTER_PORT"] for env in environments}) == 1
    for env in environments:
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["LOCAL_SIZE"]) == ("4", "2", "2")
        assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
        assert (env["OMP_NUM_THREADS"], env["PYTHONUNBUFFERED"]) == ("1", "1")
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env


def test_failures_are_gathered_and_printed_once_worst_first(
    start: Callable[..., LaunchResult], capsys: pytest.CaptureFixture[str]
) -> None:
    result = start("exit:2", "exit:6")
    assert result.exit_code == 6
    printed = capsys.readouterr().err
    assert printed == result.report()
    assert printed.index("[rank 1] exit code 6") < printed.index("[rank 0] exit code 2")
    assert printed.count("[rank 1] rank 1 says why") == 1


def test_equal_failures_share_one_report() -> None:
    ends = tuple(RankEnd(rank, rank, 2, None, False, 0.1, Path(f"rank{rank}.log")) for rank in range(3))
    result = LaunchResult(2, ends, False, False, False, None, 0.2, {0: "bad value", 1: "bad value", 2: "other"})
    assert "[ranks 0, 1] bad value" in result.report()
    assert "[rank 2] other" in result.report()


def test_a_killed_rank_is_a_lost_rank(start: Callable[..., LaunchResult], tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    def kill(pids: list[int]) -> None:
        os.kill(pids[1], signal.SIGKILL)
        flag.touch()

    result = start(f"until:{flag}", "wait:/nowhere", on_started=kill)
    assert (result.exit_code, result.ranks[0].code, result.ranks[1].signal) == (7, 7, signal.SIGKILL)
    assert "killed by SIGKILL" in result.report()
    assert gone_within(0, [rank.pid for rank in result.ranks])


def test_the_others_are_ended_when_their_grace_is_over(start: Callable[..., LaunchResult]) -> None:
    result = start("stubborn", "exit:3", grace_s=0.3)
    assert result.exit_code == 3
    assert result.ranks[0].ended_by_launcher
    assert result.ranks[0].signal == signal.SIGKILL  # it ignored SIGTERM
    assert result.seconds < 15


def test_a_frozen_rank_is_killed_as_soon_as_the_others_have_ended(
    start: Callable[..., LaunchResult], tmp_path: Path
) -> None:
    flag = tmp_path / "flag"

    def freeze(pids: list[int]) -> None:
        os.kill(pids[0], signal.SIGSTOP)
        flag.touch()

    result = start("stubborn", f"until:{flag}", on_started=freeze, grace_s=60.0)
    assert result.exit_code == 7
    assert result.ranks[0].ended_by_launcher
    assert result.ranks[0].signal == signal.SIGKILL
    assert result.seconds < 15


def test_the_time_limit_ends_every_rank(start: Callable[..., LaunchResult], tmp_path: Path) -> None:
    pids: list[int] = []
    result = start(f"wait:{tmp_path}", time_limit_s=1.0, on_started=pids.extend)
    assert (result.exit_code, result.timed_out) == (124, True)
    assert "time limit" in result.report()
    assert len(pids) == 2
    assert gone_within(0, pids)


def test_a_rank_that_is_frozen_at_the_time_limit_is_named_and_lost(start: Callable[..., LaunchResult]) -> None:
    result = start("stubborn", "exit:0", time_limit_s=1.0, on_started=lambda pids: os.kill(pids[0], signal.SIGSTOP))
    assert (result.exit_code, result.timed_out, result.frozen) == (7, True, (0,))
    assert "\nrank 0 was frozen" in result.report()


@pytest.mark.parametrize(
    ("limit_s", "age_s", "expected"), [(60, 5, 40), (60, 58, 10), (600, 5, 580), (1800, 5, 600), (604800, 5, 600)]
)
def test_ranks_wait_for_each_other_less_than_the_command_has_left(
    limit_s: float, age_s: float, expected: float
) -> None:
    assert meeting_limit(limit_s, age_s) == expected


def test_what_a_rank_has_started_ends_with_it(start: Callable[..., LaunchResult], tmp_path: Path) -> None:
    note = tmp_path / "child"
    assert start(f"child:{note}", "exit:0").exit_code == 0
    assert gone_within(2, [int(note.read_text())])


@pytest.mark.parametrize("killed", [False, True])
def test_compilers_end_with_the_ranks_and_a_rank_takes_its_lock_back(
    start: Callable[..., LaunchResult], tmp_path: Path, killed: bool
) -> None:
    def stop(pids: list[int]) -> None:
        for rank in range(2):
            wait_for(tmp_path / f"{rank}.pids")
        if killed:  # nothing is told to a rank that is killed from outside: its session alone names its compilers
            os.kill(pids[0], signal.SIGKILL)
        else:
            raise KeyboardInterrupt

    result = start(f"build:{tmp_path}", on_started=stop, grace_s=0.1)
    assert result.exit_code == (7 if killed else 130)
    compilers = [int(pid) for rank in range(2) for pid in (tmp_path / f"{rank}.pids").read_text().split()]
    assert len(compilers) == 4
    assert gone_within(1, compilers)
    assert [(tmp_path / f"{rank}.lock").exists() for rank in range(2)] == [killed, False]


def test_a_process_that_no_rank_started_stays(start: Callable[..., LaunchResult]) -> None:
    with subprocess.Popen(["sleep", "60"]) as own, subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        assert start("stubborn", "exit:3", grace_s=0.1).exit_code == 3
        assert alive(own.pid) and alive(other.pid)
        own.kill()
        other.kill()


LEAVER = """
import os, pathlib, signal, sys, tempfile, time
left = tempfile.mkdtemp(prefix="universal-")
if os.environ["END"] == "kill" and os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["END"] != "well":
    time.sleep(60)
pathlib.Path(sys.argv[2]).parents[1].joinpath(os.environ["RANK"]).write_text(left)
pathlib.Path(sys.argv[2]).write_text("{}")
"""


@pytest.mark.parametrize(("how", "code"), [("well", 0), ("kill", 7), ("Ctrl-C", 130)])
def test_temporary_files_of_ranks_go_however_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int
) -> None:
    from relaymeter.harness import commands_ranks, emit
    from relaymeter.harness.jobs import CalibrateJob, ClusterConfig

    (tmp_path / "leaver.py").write_text(LEAVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("END", how)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def left() -> list[Path]:
        return list(tmp_path.rglob("universal-*"))

    def started(_: list[int]) -> None:
        deadline = time.monotonic() + 20
        while how != "well" and len(left()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert how == "well" or len(left()) == 2
        if how == "Ctrl-C":
            raise KeyboardInterrupt

    def launch_leaver(*given: Any, **options: Any) -> LaunchResult:
        return launch(*given, module="leaver", grace_s=0.1, on_started=started, **options)

    monkeypatch.setattr(commands_ranks, "launch", launch_leaver)
    job = CalibrateJob(executor="auto", quick=True, budget_s=1.0, time_limit_s=30.0, nic_per=None, cluster=None)
    two = ClusterConfig(nodes=2, ranks_per_node=1, shape=False)
    assert commands_ranks.work_together(job, two, None, emit.Output(None, force=False))[0] == code
    assert left() == []
    assert len(list(tmp_path.glob("relaymeter-*/rank0.log"))) == (code == 7)  # logs of a failure stay
    if how == "well":
        places = [Path((tmp_path / str(rank)).read_text()) for rank in range(2)]
        assert {place.parent.name for place in places} == {"tmp"}


def test_what_killed_commands_left_is_removed_by_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary files of ranks at once, logs after a day; nothing without an owner, and nothing of one that runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = own_mark().replace(f"-{os.getpid()}-", "-999999999-")
    owners = {"gone_new": gone, "gone_old": gone, "runs_old": own_mark(), "other_ns": f"1{gone}", "no_owner": None}
    owners |= {"bad_mark": "x-y-z", "much-longer": gone}
    for name, mark in owners.items():
        folder = tmp_path / f"relaymeter-{name}"
        (folder / "tmp").mkdir(parents=True)
        (folder / "rank0.log").touch()
        if mark is not None:
            (folder / "owner").write_text(mark)
        if "new" not in name:
            os.utime(folder, (0, 0))
    (tmp_path / "relaymeter-linked__").symlink_to(tmp_path / "relaymeter-gone_new")
    with JobFolder() as work:
        assert work.scratch.is_dir() and (work.folder / "owner").read_text() == own_mark()
        work.done = True
    left = sorted(path.name.removeprefix("relaymeter-") for path in tmp_path.iterdir())
    assert left == ["bad_mark", "gone_new", "linked__", "much-longer", "no_owner", "other_ns", "runs_old"]
    assert [name for name in left if not (tmp_path / f"relaymeter-{name}" / "tmp").exists()] == ["gone_new", "linked__"]
    assert (tmp_path / "relaymeter-gone_new" / "rank0.log").exists()


@pytest.mark.parametrize(("error", "stays"), [(None, True), (InputError("x"), True), (KeyboardInterrupt(), False)])
def test_logs_stay_unless_a_launch_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, stays: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with suppress(InputError, KeyboardInterrupt), JobFolder() as work:
        if error is not None:
            raise error
    assert (work.folder.exists(), work.scratch.exists()) == (stays, False)


def test_a_failing_hook_leaves_no_rank(start: Callable[..., LaunchResult], tmp_path: Path) -> None:
    pids: list[int] = []

    def fail(started: list[int]) -> None:
        pids.extend(started)
        raise RuntimeError("hook")

    with pytest.raises(RuntimeError, match="hook"):
        start(f"wait:{tmp_path}", on_started=fail)
    assert gone_within(0, pids)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_rank_outlives_its_launcher(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "standin.py").write_text(STAND_IN)
    program = (
        "import sys, pathlib, signal; from relaymeter.harness.launch import ClusterSpec, launch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "sys.exit(launch([f'wait:{here}'], ClusterSpec(nodes=2, ranks_per_node=1, shape=False), time_limit_s=60,\n"
        "    log_dir=here / 'logs', env={'PYTHONPATH': str(here)}, module='standin').exit_code)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as launcher:
        pids = [int(wait_for(tmp_path / f"{rank}.pid")) for rank in range(2)]
        launcher.send_signal(number)
        assert launcher.wait(20) == code
    assert gone_within(5, pids)


def test_where_no_box_can_be_made_the_ranks_run_on_loopback(
    start: Callable[..., LaunchResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    from relaymeter.harness import launch as module
    from relaymeter.harness.box import BoxUnavailable

    def refuse(_: object) -> None:
        raise BoxUnavailable("not root")

    monkeypatch.setattr(module, "Box", refuse)
    result = start("exit:0", cluster=ClusterSpec(nodes=2, ranks_per_node=1, shape=True))
    assert (result.exit_code, result.in_box, result.reason) == (0, False, "not root")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ("torchrun", 1, 4, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, None)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3", "SLURM_STEP_ID": "0"}, ("srun", 3, 8, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": str(0xFFFFFFFB)}, None),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, ("mpirun", 2, 4, None)),
    ],
)
def test_a_world_that_a_launcher_made_is_noticed(
    environment: dict[str, str], expected: tuple[str, int, int, int | None] | None
) -> None:
    hint = already_in_world(environment)
    assert (hint and (hint.launcher, hint.rank, hint.world_size, hint.local_rank)) == expected


@pytest.mark.parametrize("rank", ["4", "-1", "one"])
def test_a_rank_outside_its_world_is_refused(rank: str) -> None:
    with pytest.raises(InputError, match=f"RANK={rank} and WORLD_SIZE=4"):
        already_in_world({"RANK": rank, "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"nodes": 0, "ranks_per_node": 2}, "0 x 2"),
        ({"nodes": 2, "ranks_per_node": 2, "nic_per": "gpu"}, "rank, node"),
        ({"nodes": 2, "ranks_per_node": 2, "nic_rate_bytes_per_s": 0.0}, "8kbit"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(numbers: dict[str, int], text: str) -> None:
    with pytest.raises(InputError, match=text):
        ClusterSpec(**numbers)  # type: ignore[arg-type]
