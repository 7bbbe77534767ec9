"""Jobs in which one rank dies, freezes, raises or dawdles in the middle of a move."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from jobs_execute import HandSchedule, Segment, bits, fingerprint
from pool import Seat

from relaymeter.errors import RelaymeterError
from relaymeter.relayout.execute import Hooks, Mover
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import TensorSpec


def _chain(world_size: int) -> HandSchedule:
    """Four rounds in which every rank but the last sends the tensor to the next: rank 0 and rank 2 never talk."""
    spec = TensorSpec("w", (300_000,), "bfloat16")
    segments = [
        Segment(0, rank, rank + 1, [75_000], [1], [1], 75_000 * step, 75_000 * step, round=step)
        for step in range(4)
        for rank in range(world_size - 1)
    ]
    return HandSchedule((spec,), tuple(segments), 4)


def stop_in_a_move(
    seat: Seat, how: str, victim: int, executor: str, move_limit_s: float, lost_after_s: float, own_group: bool
) -> dict[str, Any]:
    """Move over the world, or a group of all ranks, while ``victim`` stops in round 1. What this rank then sees."""

    def on_round(number: int) -> None:
        if seat.rank == victim and number == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "raise":
                raise ValueError("no such luck")
            else:
                time.sleep(move_limit_s + 1)

    others = [rank for rank in range(seat.world_size) if rank != victim]
    trainer = dist.new_group(others)
    group = dist.new_group() if own_group else None
    source = {"w": bits(300_000, "bfloat16", seat.rank)}
    before = fingerprint(source)
    target = {"w": torch.zeros(300_000, dtype=torch.bfloat16)}
    found: dict[str, Any] = {"error": None}
    with Heartbeat(seat.store, seat.rank, seat.world_size, 0.1, lost_after_s, prefix=f"{how}-{executor}") as heartbeat:
        mover = Mover(
            _chain(seat.world_size), seat.rank, source, target, executor, group=group, time_limit_s=move_limit_s,
            heartbeat=heartbeat, hooks=Hooks(on_round=on_round),
        )  # fmt: skip
        mover.agree()
        begin = time.monotonic()
        try:
            mover.run()
        except (RelaymeterError, ValueError) as error:
            found = {"error": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ()))}
        found["seconds"] = time.monotonic() - begin
    if seat.rank != victim:
        alive = torch.ones(1)
        dist.all_reduce(alive, group=trainer)
        found["alive"] = int(alive)
    found["source_kept"] = fingerprint(source) == before
    try:
        mover.run()
    except RelaymeterError as error:
        found["again"] = str(error)
    return found
