"""Jobs in which one rank dies, freezes, raises or dawdles in the middle of a move."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from jobs_execute import HandSchedule, Segment, bits, fingerprint
from pool import Seat

from relaymeter.errors import RankLost, RelaymeterError
from relaymeter.relayout.execute import Hooks, Mover
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.transport import exchange_messages


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


def die_half_sent(seat: Seat, move_limit_s: float) -> dict[str, Any] | None:
    """Rank 1 is killed as soon as the first bytes of its large message to rank 2 are there; what rank 2 then sees."""
    size = 1 << 30
    tensor = torch.full((size if seat.rank else 0,), int(seat.rank == 1), dtype=torch.uint8)
    if seat.rank == 1:
        seat.store.set("sender", str(os.getpid()))
    with Heartbeat(seat.store, seat.rank, seat.world_size, 0.1, 1.5, prefix="half") as heartbeat:
        dist.barrier()
        if seat.rank == 1:
            exchange_messages([(2, tensor)], [], tag=1)
        if seat.rank != 2:
            return None
        sender = int(seat.store.get("sender"))

        def kill_in_time() -> None:
            while not int(tensor[0]):
                time.sleep(0.0005)
            os.kill(sender, signal.SIGKILL)

        threading.Thread(target=kill_in_time, daemon=True).start()
        begin = time.monotonic()
        try:
            with guarded("the move", rank=2, time_limit_s=move_limit_s, heartbeat=heartbeat) as deadline:
                exchange_messages([], [(1, tensor)], tag=1, deadline=deadline, poll=heartbeat.poll)
        except RankLost as error:
            return {"ranks": list(error.ranks), "seconds": time.monotonic() - begin, "last": int(tensor[-1])}
    return None
