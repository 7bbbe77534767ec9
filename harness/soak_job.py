"""The job of ``soak`` inside the ranks: a guarded soak of the joined world, its progress, and damage put in for tests.

``run_soak_job(job, world, say)`` is called by every rank; rank 0 gets the rows so far, so that a soak that is
interrupted or loses a rank still tells what it found.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from relaymeter.calibration.labels import UNIT_BYTES
from relaymeter.calibration.soak import SoakProgress, soak
from relaymeter.calibration.soak_plan import SHAPES, SoakSettings
from relaymeter.calibration.wrong_bytes import WrongRun
from relaymeter.errors import InputError
from relaymeter.harness.jobs import SoakFault, SoakJob
from relaymeter.harness.soak_rows import SoakRecord, binary_text, by_origin, soak_rows
from relaymeter.harness.world import World, watching
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.guard import guarded
from relaymeter.units import counted, format_rate

__all__ = ["Damage", "run_soak_job"]

#: Runs of wrong bytes that are kept in all.
_MOST_RUNS = 10_000
#: A line of progress each tenth of the way, and after so many seconds.
_LINE_S = 30.0
#: Rows are written at most so often while nothing is wrong, in seconds.
_KEEP_S = 1.0
#: The call that is damaged: the second whose messages all have the full size, so that earlier bytes can be stale.
_DAMAGED_CALL = len(SHAPES)
_BLOCK_BYTES = 128 << 10


def run_soak_job(job: SoakJob, world: World, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Soak the joined ``world``. Every rank exhausts it; raises what ``soak`` raises."""
    settings = SoakSettings(
        seconds=job.seconds, total_bytes=job.total_bytes, message_bytes=job.message_bytes, executor=job.executor
    )
    damage = Damage(job.fault) if job.fault is not None and job.fault.rank == world.rank else None
    runs: list[WrongRun] = []
    shown, said_at, kept_at = 0, time.monotonic(), 0.0
    with (
        watching(world, "soak") as heartbeat,
        guarded(
            "the soak", rank=world.rank, time_limit_s=job.time_limit_s, heartbeat=heartbeat, consequence=""
        ) as deadline,
    ):
        for progress in soak(world, settings, deadline=deadline, poll=heartbeat.poll, tamper=damage):
            runs += progress.new_runs[: _MOST_RUNS - len(runs)]
            now, tenths = time.monotonic(), int(_fraction(job, progress) * 10)
            if progress.new_runs or tenths > shown or now - said_at >= _LINE_S:
                say(_line(job, progress))
                shown, said_at = tenths, now
            if progress.new_runs or progress.finished or now - kept_at >= _KEEP_S:
                yield {"rows": _rows(job, world, progress, runs)}
                kept_at = now
        if job.fault is not None:
            idle = damage is not None and not damage.done
            text = f"--fault {job.fault.kind}:{job.fault.rank}: no message that it could damage was received"
            Assembly(None, deadline, heartbeat.poll).refuse(InputError(text) if idle else None)


def _fraction(job: SoakJob, progress: SoakProgress) -> float:
    """How far the soak has come, 0 to 1."""
    if progress.finished:
        return 1.0
    timed = progress.elapsed_s / job.seconds if job.seconds is not None else 0.0
    moved = progress.total_bytes / job.total_bytes if job.total_bytes is not None else 0.0
    return min(1.0, max(timed, moved))


def _line(job: SoakJob, progress: SoakProgress) -> str:
    rate = format_rate(progress.total_bytes / max(progress.elapsed_s, 1e-9))
    wrong = "no byte wrong"
    if progress.wrong_bytes:
        wrong = f"WRONG: {counted(progress.wrong_bytes, 'byte')} of {counted(progress.wrong_messages, 'message')}"
    return (
        f"soak {_fraction(job, progress):4.0%}  {progress.elapsed_s:.0f} s  {binary_text(progress.total_bytes)} moved"
        f", {rate}, {counted(progress.calls, 'call')}, {wrong}"
    )


def _rows(job: SoakJob, world: World, progress: SoakProgress, runs: Sequence[WrongRun]) -> list[dict[str, Any]]:
    """All rows so far."""
    ranks = progress.ranks

    def slowest(name: str) -> float | None:
        return max((getattr(totals, name) for totals in ranks), default=None)

    verdict = "wrong bits" if progress.wrong_bytes else "ok" if progress.finished else "not finished"
    record = SoakRecord(
        utc=job.stamp.utc,
        machine_id=job.stamp.machine_id,
        launch_id=job.stamp.launch_id,
        commit=job.stamp.commit,
        shaped=job.stamp.shaped,
        ranks=world.world_size,
        nodes=world.topology.nodes,
        backend=world.backend,
        executors=progress.executors,
        seconds_asked=job.seconds,
        bytes_asked=job.total_bytes,
        message_bytes=progress.size.message_bytes,
        peers=progress.size.peers,
        calls=progress.calls,
        messages=progress.messages,
        bytes_total=progress.total_bytes,
        elapsed_s=progress.elapsed_s,
        make_s=slowest("make_s"),
        exchange_s=slowest("exchange_s"),
        check_s=slowest("check_s"),
        wrong_messages=progress.wrong_messages,
        wrong_bytes=progress.wrong_bytes,
        runs=len(runs),
        origins=by_origin(runs),
        finished=progress.finished,
        verdict=verdict,
        ok=verdict == "ok",
    )
    places = list(zip(world.topology.node, world.hosts, strict=True))
    return soak_rows(record, [asdict(totals) for totals in ranks], [run.to_dict() for run in runs], places)


class Damage:
    """What a bad link would do, done once to what this rank received (tests): two blocks ``swap`` places, one bit is
    ``flip``ped, a block keeps what was there before (``stale``) or is ``zeros``; or the rank itself ends or freezes.

    Blocks in the middle of the largest message, of 128 KiB, of a small message half. ``done`` once it has happened.
    """

    def __init__(self, fault: SoakFault) -> None:
        self.done = False
        self._kind = fault.kind
        self._before: torch.Tensor | None = None

    def before(self, call: int, buffer: torch.Tensor) -> None:
        """Before an exchange: note what is in the receive buffer; the moment to kill or stop this rank."""
        if self.done or call < _DAMAGED_CALL:
            return
        if self._kind in ("kill", "stop"):
            self.done = True
            os.kill(os.getpid(), signal.SIGKILL if self._kind == "kill" else signal.SIGSTOP)
        elif self._kind == "stale":
            self._before = buffer.clone()

    def after(self, call: int, buffer: torch.Tensor, received: Sequence[torch.Tensor]) -> None:
        """After an exchange: damage the largest message."""
        target = max(received, key=len)
        block = min(_BLOCK_BYTES, len(target) // 2 // UNIT_BYTES * UNIT_BYTES)
        if self.done or call < _DAMAGED_CALL or not block:
            return
        at = len(target) // block // 2 * block
        first, second = target[at - block : at], target[at : at + block]
        if self._kind == "swap":
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
        elif self._kind == "flip":
            target[len(target) // 3] ^= 32
        elif self._kind == "zeros":
            second.zero_()
        elif self._before is not None:
            begin = second.data_ptr() - buffer.data_ptr()
            second.copy_(self._before[begin : begin + block])
        self.done = True
