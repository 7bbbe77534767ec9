"""A pool of ranks for tests: processes of one gloo world on loopback that run named functions and answer in JSON.

``RankPool(4).call("jobs_execute:ring", count=3)`` runs ``jobs_execute.ring(seat, count=3)`` on four ranks and returns
the four values. Ranks are forked from a warm process that has imported torch and DeepSpeed (``nursery.py``); those of
``RankPool(4, fresh=True)`` are new interpreters, for tests of what a rank imports, and run this file as a script.

A job is a module-level function ``job(seat: Seat, **arguments)`` in a file ``tests/dist/jobs_*.py``; arguments and
results are JSON. The processes stay for the next call. They are replaced where a call failed in a way that may have
broken the gloo world, and end with the pool, with their parent, or at a call's time limit, whichever comes first.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import nursery

__all__ = ["Outcome", "RankPool", "Seat"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Seat:
    """What a job gets: its rank, the size of the world and the world's store (a TCPStore that rank 0 hosts)."""

    rank: int
    world_size: int
    store: Any


@dataclass(frozen=True)
class Outcome:
    """What one rank answered: a value, or an error's type name, text and trace, or (answered False) nothing.

    ``exit_code`` is None while the process lives, -9 after SIGKILL; ``seconds`` from the call to the answer.
    """

    rank: int
    answered: bool
    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


class RankPool:
    """``size`` ranks, started at the first call. ``env`` is added to their environment. Use it as a context manager.

    With ``fresh`` each rank is an interpreter of its own that has imported nothing yet.
    """

    def __init__(self, size: int, env: Mapping[str, str] | None = None, *, fresh: bool = False) -> None:
        self.size = size
        self._env = dict(env or {})
        self._fresh = fresh
        self._processes: list[subprocess.Popen[bytes] | nursery.Child] = []
        self._answers: list[IO[bytes]] = []
        self._logs: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while nothing runs."""
        return [process.pid for process in self._processes]

    def call(self, job: str, *, limit_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Run ``job`` ("module:function") on every rank, return the values by rank. Raises RuntimeError otherwise."""
        outcomes = self.outcomes(job, limit_s=limit_s, **arguments)
        bad = [outcome for outcome in outcomes if outcome.error is not None or not outcome.answered]
        if bad:
            texts = [
                outcome.trace or f"no answer within {limit_s:g} s (exit code {outcome.exit_code})\n{outcome.message}"
                for outcome in bad
            ]
            lines = "\n".join(f"[rank {o.rank}] {text}" for o, text in zip(bad, texts, strict=True))
            raise RuntimeError(f"{job} failed on {len(bad)} of {self.size} ranks:\n{lines}")
        return [outcome.value for outcome in outcomes]

    def outcomes(self, job: str, *, limit_s: float = 60.0, **arguments: Any) -> list[Outcome]:
        """Like ``call``, but returns what each rank did, errors and silence included."""
        if not self._processes:
            self._start()
        request = json.dumps({"job": job, "arguments": arguments}).encode() + b"\n"
        for process in self._processes:
            self._send(process, request)
        try:
            outcomes = self._collect(limit_s)
        except BaseException:  # a test ran out of time: late answers would pass for those of the next call
            self.close()
            raise
        errors = {outcome.error for outcome in outcomes}
        if not all(outcome.answered for outcome in outcomes) or len(errors) > 1:
            self.close()  # the same error on every rank is a refusal; anything else may have broken the world
        return outcomes

    def close(self) -> None:
        """End every process of the pool, by pid, and remove their logs. The next call starts new ones."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        deadline = time.monotonic() + 3.0
        for process in self._processes:
            if _is_stopped(process.pid):
                process.kill()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for answers in self._answers:
            answers.close()
        self._processes, self._answers = [], []
        if self._logs is not None:
            self._logs.cleanup()
            self._logs = None

    def _start(self) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="rank-pool-")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "MASTER_", "GLOO_"))}
        inherited |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(self.size))
        inherited |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(self.size):
            reading, writing = os.pipe()
            env = inherited | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | self._env
            with (Path(self._logs.name) / f"{rank}.log").open("wb") as log:
                if self._fresh:
                    command = [sys.executable, __file__, str(writing)]
                    self._processes.append(
                        subprocess.Popen(
                            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, pass_fds=(writing,)
                        )
                    )
                else:
                    self._processes.append(nursery.of(rank).fork(env, writing, log.fileno()))
            os.close(writing)
            self._answers.append(os.fdopen(reading, "rb", buffering=0))
        first = self._collect(60.0, only=0)[0]
        for process in self._processes[1:]:
            self._send(process, json.dumps({"port": first.value}).encode() + b"\n")
        ready = self._collect(120.0)
        bad = [outcome for outcome in ready if not outcome.answered or outcome.error is not None]
        if bad:
            self.close()
            raise RuntimeError("\n".join(f"[rank {o.rank}] did not start: {o.trace or o.message}" for o in bad))

    @staticmethod
    def _send(process: subprocess.Popen[bytes] | nursery.Child, line: bytes) -> None:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # a dead rank shows as a missing answer
                process.stdin.write(line)
                process.stdin.flush()

    def _collect(self, limit_s: float, only: int | None = None) -> list[Outcome]:
        """One answer of each rank (or of ``only``), or silence at the time limit or at the end of the process."""
        begin = time.monotonic()
        found: dict[int, Outcome] = {}
        partial: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for rank in range(self.size) if only is None else (only,):
                selector.register(self._answers[rank], selectors.EVENT_READ, rank)
            while selector.get_map():
                remaining = begin + limit_s - time.monotonic()
                events = selector.select(min(max(0.0, remaining), 0.2))
                waiting = [self._processes[key.data].pid for key in selector.get_map().values()]
                if not events and (remaining <= 0 or all(_is_stopped(pid) for pid in waiting)):
                    break
                for key, _ in events:
                    rank, seconds = key.data, time.monotonic() - begin
                    chunk = os.read(key.fd, 1 << 16)
                    partial[rank] = partial.get(rank, b"") + chunk
                    if chunk and not partial[rank].endswith(b"\n"):
                        continue
                    selector.unregister(key.fileobj)
                    if chunk:
                        found[rank] = Outcome(rank, True, seconds=seconds, **json.loads(partial[rank]))
            silent = [key.data for key in selector.get_map().values()]
        wanted = range(self.size) if only is None else (only,)
        return [found.get(rank) or self._silent(rank, rank in silent, time.monotonic() - begin) for rank in wanted]

    def _silent(self, rank: int, running: bool, seconds: float) -> Outcome:
        process = self._processes[rank]
        exit_code = process.poll() if running else process.wait(10.0)
        log = Path(self._logs.name) / f"{rank}.log" if self._logs is not None else None
        tail = log.read_text(errors="replace")[-4000:] if log is not None and log.exists() else ""
        return Outcome(rank, False, message=tail, exit_code=exit_code, seconds=seconds)


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, so that waiting for it is of no use."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _serve(answers: IO[bytes]) -> None:
    """Body of one rank: join the world, then run one job per line of standard input until it is closed."""
    import datetime

    import torch.distributed as dist

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields).encode() + b"\n")
        answers.flush()

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=60)
    if rank == 0:
        store = dist.TCPStore(LOOPBACK, 0, world_size, True, timeout=limit, wait_for_workers=False)
        answer(value=store.port)
    else:
        store = dist.TCPStore(LOOPBACK, json.loads(sys.stdin.readline())["port"], world_size, False, timeout=limit)
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(store.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    answer(value="ready")
    seat = Seat(rank, world_size, store)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            module, _, function = request["job"].partition(":")
            value = getattr(importlib.import_module(module), function)(seat, **request["arguments"])
            json.dumps(value)
        except BaseException as error:
            answer(error=type(error).__name__, message=str(error), trace=traceback.format_exc())
        else:
            answer(value=value)


def rank_main(fd: int) -> None:
    """Serve as a rank that answers to the descriptor ``fd``. Does not return."""
    answers = os.fdopen(fd, "wb")
    try:
        _serve(answers)
    except BaseException as error:
        with contextlib.suppress(OSError):
            fields = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
            answers.write(json.dumps(fields).encode() + b"\n")
            answers.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a broken gloo world may hold a thread that an ordinary exit would wait for


if __name__ == "__main__":
    nursery.die_with_parent(os.getppid())
    rank_main(int(sys.argv[1]))
