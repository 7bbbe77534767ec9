"""Starts the ranks of a job on this machine, in a cluster in a box or on loopback, and gives the verdict on their ends.

``launch(["job.json"], ClusterSpec(nodes=2, ranks_per_node=2, nic_rate_bytes_per_s=50e6), time_limit_s=120,
log_dir=logs)`` runs ``python -m relaymeter.harness.worker job.json`` once per rank and waits for all of them.
``already_in_world()`` says whether torchrun, deepspeed, srun or mpirun has started this process as a rank itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from relaymeter.errors import (
    EXIT_CRASH,
    EXIT_GATE_MISSED,
    EXIT_NOTHING_MEASURED,
    EXIT_OK,
    EXIT_RANK_LOST,
    EXIT_TIME_LIMIT,
    EXIT_UNDECIDED,
    EXIT_USAGE,
    EXIT_WRONG_BITS,
    InputError,
)
from relaymeter.harness.box import Box, BoxSpec, BoxUnavailable, Place
from relaymeter.harness.processes import end_offspring, state_of
from relaymeter.harness.signals import EndingSignal, ending_signals, exit_code

__all__ = [
    "PLACE_VARIABLE",
    "ClusterSpec",
    "LaunchResult",
    "RankEnd",
    "WorldHint",
    "already_in_world",
    "launch",
    "verdict",
    "visible_gpus",
]

#: "NODE:NIC" of a rank that runs on loopback and only stands for a rank of that node.
PLACE_VARIABLE = "RELAYMETER_PLACE"

#: Exit codes from the one that outranks all others to the least telling.
PRIORITY = (
    EXIT_WRONG_BITS,
    EXIT_RANK_LOST,
    EXIT_USAGE,
    EXIT_GATE_MISSED,
    EXIT_UNDECIDED,
    EXIT_NOTHING_MEASURED,
    EXIT_TIME_LIMIT,
    EXIT_CRASH,
)

_POLL_S = 0.02
_TERM_WAIT_S = 3.0
_TIDY_WAIT_S = 0.5  # for a rank to take its build lock back once its compilers have been ended
_FROZEN_WAIT_S = 1.0
_TAIL_LINES = 25
_TAIL_BYTES = 16384
_NOT_INHERITED = ("TORCHELASTIC_", PLACE_VARIABLE)  # would point the ranks at another world

_FAMILIES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
_SLURM_BATCH_STEP = (
    0xFFFFFFF0  # step ids from here on are the batch script's and other steps without tasks of their own
)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The cluster to start ranks on: numbers as in BoxSpec."""

    nodes: int
    ranks_per_node: int
    nic_per: Literal["rank", "node"] = "rank"
    nic_rate_bytes_per_s: float | None = None
    """What a NIC passes each way, headers included; None is no limit."""
    shape: bool = True
    """Whether to make a box. False: plain processes on loopback, where nodes are only declared."""

    def __post_init__(self) -> None:
        self.box_spec()

    def box_spec(self) -> BoxSpec:
        """The box of this cluster. Raises InputError on numbers it does not take."""
        return BoxSpec(
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            nic_per=self.nic_per,
            rate_bytes_per_s=self.nic_rate_bytes_per_s,
        )


@dataclass(frozen=True)
class WorldHint:
    """A world that a launcher has made already: who made it and this process's place in it."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: ``code`` or ``signal`` (the other one is None), and whether the launcher ended it."""

    rank: int
    pid: int
    code: int | None
    signal: int | None
    ended_by_launcher: bool
    seconds: float
    log: Path

    @property
    def verdict(self) -> int:
        """The rank's say in the verdict of the launch. What the launcher ended has none, unless it had one to give."""
        if self.ended_by_launcher:
            return self.code if self.code in PRIORITY[:6] else EXIT_OK
        if self.signal is not None:
            return EXIT_RANK_LOST
        return EXIT_CRASH if self.code not in (EXIT_OK, *PRIORITY) else int(self.code or 0)

    def describe(self) -> str:
        """For people: ``exit code 7``, ``killed by SIGKILL``."""
        how = f"exit code {self.code}" if self.signal is None else f"killed by {_signal_name(self.signal)}"
        return f"{how} after {self.seconds:.1f} s" + (", ended by the launcher" if self.ended_by_launcher else "")


@dataclass(frozen=True)
class LaunchResult:
    """The end of a launch. ``exit_code`` is the command's: wrong bits outrank a lost rank, that the rest."""

    exit_code: int
    ranks: tuple[RankEnd, ...]
    timed_out: bool
    interrupted: bool
    in_box: bool
    reason: str | None
    """Why the ranks ran on plain loopback although a box was asked for."""
    seconds: float
    tails: Mapping[int, str] = field(default_factory=dict)
    """Last lines of the error output of each rank that failed."""
    frozen: tuple[int, ...] = ()
    """Ranks that were found stopped when the time limit ended all."""

    def report(self) -> str:
        """Failures of all ranks in one text, worst first, each line prefixed with its ranks; empty without any."""
        lines = []
        if self.timed_out:
            lines.append(f"time limit: ranks were ended after {self.seconds:.1f} s")
        if self.frozen:
            names = ", ".join(map(str, self.frozen))
            lines.append(f"rank {names} was frozen (stopped by a signal, as kill -STOP does): the others waited for it")
        groups: dict[tuple[int, str, str], list[RankEnd]] = {}
        for end in self.ranks:
            if end.rank in self.tails:
                how = end.describe().partition(" after ")[0] + (", ended" if end.ended_by_launcher else "")
                groups.setdefault((_order(end.verdict), how, self.tails[end.rank]), []).append(end)
        for (_, _, tail), ends in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0].rank)):
            numbers = ", ".join(str(end.rank) for end in ends)
            prefix = f"[rank{'s' if len(ends) > 1 else ''} {numbers}]"
            lines.append(f"{prefix} {ends[0].describe()}; log {ends[0].log}")
            lines += [f"{prefix} {line}" for line in tail.splitlines()]
        return "\n".join(lines) + "\n" if lines else ""


def already_in_world(environment: Mapping[str, str] | None = None) -> WorldHint | None:
    """The world that a launcher made and this process is a rank of, or None. Starts and joins nothing.

    Knows RANK/WORLD_SIZE (torchrun, deepspeed), the tasks of an srun step and Open MPI's mpirun. ``environment``:
    os.environ by default. Raises InputError where rank and size contradict each other.
    """
    env = os.environ if environment is None else environment
    for launcher, rank_name, size_name, local_name in _FAMILIES:
        if rank_name not in env or size_name not in env:
            continue
        if launcher == "srun" and not _is_srun_task(env):
            continue
        try:
            rank, size = int(env[rank_name]), int(env[size_name])
            local = int(env[local_name]) if local_name in env else None
        except ValueError:
            rank, size, local = -1, 0, None
        if not 0 <= rank < size:
            raise InputError(
                f"{rank_name}={env[rank_name]} and {size_name}={env[size_name]} name no rank of a world: "
                f"expected 0 <= {rank_name} < {size_name}; unset both to let relaymeter start the ranks"
            )
        return WorldHint(launcher, rank, size, local)
    return None


def launch(
    arguments: Sequence[str],
    cluster: ClusterSpec,
    *,
    time_limit_s: float,
    log_dir: Path,
    env: Mapping[str, str] | None = None,
    module: str = "relaymeter.harness.worker",
    grace_s: float = 30.0,
    on_started: Callable[[list[int]], None] | None = None,
    print_failures: bool = True,
) -> LaunchResult:
    """Run ``python -m module *arguments`` once per rank, wait for all of them and judge. The parent calls it, no rank.

    Rank 0's standard output is the parent's standard error; everything else goes to ``log_dir/rank<k>.log``. After
    ``time_limit_s`` every rank is ended. When one rank fails, the others have ``grace_s`` to notice and say so
    themselves. ``env`` is added to the environment of every rank. ``on_started`` gets the process ids, by rank, once
    all run. With ``cluster.shape`` where this machine makes no box, the ranks run on loopback and the result says why.
    Ctrl-C ends all ranks and the box: exit code 130 (SIGTERM: 143). Raises OSError where a rank cannot be started.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    reason: str | None = None
    began = time.monotonic()
    running: _Ranks | None = None
    interrupted = 0
    with ExitStack() as stack:
        try:
            stack.enter_context(ending_signals())
            places: tuple[Place, ...] | None = None
            if cluster.shape:
                try:
                    places = stack.enter_context(Box(cluster.box_spec())).places
                except BoxUnavailable as unavailable:
                    reason = str(unavailable)
            running = stack.enter_context(_Ranks(log_dir))
            running.start(_environments(cluster, places, env or {}), places, [module, *arguments])
            if on_started is not None:
                on_started(running.pids)
            timed_out = running.wait(began + time_limit_s, grace_s)
        except (KeyboardInterrupt, EndingSignal) as stop:
            interrupted = exit_code(stop)
            timed_out = False
            if running is not None:
                running.end_all()
    ends = running.ends if running is not None else ()
    frozen = running.frozen if running is not None else ()
    code = interrupted or verdict(ends, timed_out, frozen)
    result = LaunchResult(
        exit_code=code,
        ranks=ends,
        timed_out=timed_out,
        interrupted=bool(interrupted),
        in_box=bool(cluster.shape and reason is None),
        reason=reason,
        seconds=time.monotonic() - began,
        tails={} if interrupted else {end.rank: _tail(end.log) for end in ends if _failed(end)},
        frozen=frozen,
    )
    if print_failures:
        sys.stderr.write(result.report())
        sys.stderr.flush()
    return result


def verdict(ends: Sequence[RankEnd], timed_out: bool = False, frozen: Sequence[int] = ()) -> int:
    """Exit code of a launch: 6 (wrong bits), 7 (a rank lost, killed or ``frozen`` at the time limit), 2, 3, 4, 5, 124
    (time limit), 1, else 0."""
    codes = [end.verdict for end in ends] + ([EXIT_TIME_LIMIT] if timed_out else [])
    codes += [EXIT_RANK_LOST] if frozen else []
    return min(codes, key=_order, default=EXIT_OK)


class _Ranks:
    """The processes of a launch. Leaving the context ends whatever still runs, by process id."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started: list[float] = []
        self._ends: dict[int, RankEnd] = {}
        self._told: set[int] = set()
        self.frozen: tuple[int, ...] = ()

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def ends(self) -> tuple[RankEnd, ...]:
        return tuple(self._ends[rank] for rank in sorted(self._ends))

    def start(
        self, environments: Sequence[dict[str, str]], places: tuple[Place, ...] | None, command: Sequence[str]
    ) -> None:
        for rank, environment in enumerate(environments):
            shim = [sys.executable, "-m", "relaymeter.harness.enter", "--parent", str(os.getpid())]
            if places is not None:
                shim += ["--netns", places[rank].namespace, "--hostname", places[rank].hostname]
            with open(self._log(rank), "wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*shim, "--", sys.executable, "-m", *command],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=2 if rank == 0 else log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the ranks in order
                    )
                )
                self._started.append(time.monotonic())

    def wait(self, deadline: float, grace_s: float) -> bool:
        """Wait for all ranks; True where the time limit ended them."""
        failed_at: float | None = None
        frozen_since: float | None = None
        while self._collect():
            now = time.monotonic()
            if now >= deadline:
                self.frozen = tuple(k for k in self._running() if state_of(self._processes[k].pid) == "T")
                self.end_all()
                return True
            if failed_at is None and any(_failed(end) for end in self._ends.values()):
                failed_at = now
            if failed_at is not None:
                frozen = all(state_of(self._processes[rank].pid) == "T" for rank in self._running())
                frozen_since = (frozen_since or now) if frozen else None
                if now - failed_at >= grace_s or (frozen_since is not None and now - frozen_since >= _FROZEN_WAIT_S):
                    self.end_all()
                    return False
            time.sleep(_POLL_S)
        return False

    def end_all(self) -> None:
        """SIGTERM to every rank that runs, SIGKILL to those that are frozen or do not end in time.

        What a rank has started ends first, and such a rank gets a moment before its own SIGTERM: where it waits for a
        compiler it so hears of the end, and removes the lock of the build.
        """
        running = self._collect()
        self._told.update(running)
        parents = [rank for rank in running if self._end_offspring(rank)]
        self._terminate([rank for rank in running if rank not in parents])
        self._wait_for(parents, _TIDY_WAIT_S)
        self._terminate([rank for rank in self._collect() if rank in parents])
        self._wait_for(running, _TERM_WAIT_S)
        while left := self._collect():
            for rank in left:
                self._signal(rank, signal.SIGKILL)
            time.sleep(_POLL_S)

    def _terminate(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._end_offspring(rank)
            self._signal(rank, signal.SIGKILL if state_of(self._processes[rank].pid) == "T" else signal.SIGTERM)

    def _wait_for(self, ranks: Sequence[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not set(ranks).isdisjoint(self._collect()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _end_offspring(self, rank: int) -> bool:
        """SIGKILL to every process that this rank, which is not reaped yet, has started; whether there were any.

        A compiler of a build is in a process group of its own, so the rank's group alone would leave it behind.
        """
        return end_offspring(self._processes[rank].pid)

    def _running(self) -> list[int]:
        return [rank for rank in range(len(self._processes)) if rank not in self._ends]

    def _collect(self) -> list[int]:
        """Note the ranks that have ended, with whatever they started; returns those that still run."""
        for rank in self._running():
            process = self._processes[rank]
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # The process is not reaped yet, so its group cannot be anybody else's.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            self._end_offspring(rank)
            code = process.wait()
            self._ends[rank] = RankEnd(
                rank=rank,
                pid=process.pid,
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                ended_by_launcher=rank in self._told,
                seconds=time.monotonic() - self._started[rank],
                log=self._log(rank),
            )
        return self._running()

    def _signal(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, number)

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"rank{rank}.log"


def _environments(
    cluster: ClusterSpec, places: tuple[Place, ...] | None, extra: Mapping[str, str]
) -> list[dict[str, str]]:
    """Environment of every rank, in order: what torch.distributed, gloo and DeepSpeed read."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    shared = {
        "WORLD_SIZE": str(cluster.nodes * cluster.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "LOCAL_SIZE": str(cluster.ranks_per_node),
        "MASTER_ADDR": places[0].address if places else "127.0.0.1",
        "MASTER_PORT": str(29500 if places else _free_port()),  # a new namespace has every port free
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
    }
    gpus = visible_gpus(inherited)
    if not gpus:
        shared["DS_ACCELERATOR"] = "cpu"
    environments = []
    for rank in range(cluster.nodes * cluster.ranks_per_node):
        node, local_rank = divmod(rank, cluster.ranks_per_node)
        interface = places[rank].interface if places else "lo"
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GLOO_SOCKET_IFNAME": interface}
        if len(gpus) >= cluster.nodes * cluster.ranks_per_node:  # all nodes are this machine: each gets its share
            first = node * cluster.ranks_per_node
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + cluster.ranks_per_node])
        if places is None:
            own[PLACE_VARIABLE] = f"{node}:{rank if cluster.nic_per == 'rank' else node}"
            if cluster.nodes > 1:  # declared nodes: NCCL too takes them for machines of their own, joined by sockets
                own |= {"NCCL_HOSTID": f"{socket.gethostname()}-{node}", "NCCL_SOCKET_IFNAME": interface}
        else:
            own["NCCL_SOCKET_IFNAME"] = interface
        environments.append({**inherited, **shared, **own, **extra})
    return environments


def _is_srun_task(env: Mapping[str, str]) -> bool:
    """A batch script has SLURM_PROCID too, but is no task of a step: it would wait for ranks that nobody starts."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _SLURM_BATCH_STEP


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Names, for CUDA_VISIBLE_DEVICES, of the NVIDIA GPUs that a process of this environment sees."""
    present = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if not present or visible is None:
        return [str(index) for index in range(len(present))]
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _failed(end: RankEnd) -> bool:
    return end.ended_by_launcher or end.code != EXIT_OK


def _order(code: int) -> int:
    return PRIORITY.index(code) if code in PRIORITY else len(PRIORITY)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: Path) -> str:
    with open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
