"""Jobs for real ranks: a soak of the world on loopback, clean or with damage done to what some ranks receive."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from pool import Seat

from relaymeter.calibration.soak import SoakProgress, soak
from relaymeter.calibration.soak_plan import SoakSettings
from relaymeter.errors import InputError, RankLost
from relaymeter.harness.jobs import SoakFault
from relaymeter.harness.soak_job import Damage
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.topology import Topology


def _world(seat: Seat) -> Any:
    return SimpleNamespace(
        rank=seat.rank,
        world_size=seat.world_size,
        topology=Topology.grid(2, seat.world_size // 2),
        backend="gloo",
        device=torch.device("cpu"),
    )


def soaked(
    seat: Seat, executor: str, message: int, total: int | None, seconds: float | None, faults: dict[str, str]
) -> dict[str, Any]:
    """A whole soak. ``faults``: kind of damage by rank. What this rank saw of all ranks, and its own totals."""
    settings = SoakSettings(seconds=seconds, total_bytes=total, message_bytes=message, executor=executor)
    kind: Any = faults.get(str(seat.rank))
    damage = None if kind is None else Damage(SoakFault(kind=kind, rank=seat.rank))
    last: SoakProgress | None = None
    runs = []
    for last in soak(_world(seat), settings, tamper=damage):
        runs += [run.to_dict() for run in last.new_runs]
    if last is None:
        return {}
    shared = {name: value for name, value in asdict(last).items() if name not in ("own", "new_runs")}
    return {"shared": {**shared, "runs": runs}, "own": asdict(last.own), "done": damage is not None and damage.done}


def refused(seat: Seat, message: int) -> str:
    """A soak whose messages do not fit."""
    try:
        next(soak(_world(seat), SoakSettings(message_bytes=message)))
    except InputError as error:
        return str(error)
    return ""


def bereft(seat: Seat) -> dict[str, Any]:
    """Rank 2 ends in the middle; what the others say, and how far they had come."""
    calls = 0
    damage = Damage(SoakFault(kind="kill", rank=2)) if seat.rank == 2 else None
    settings = SoakSettings(seconds=30.0, message_bytes=65536)
    heartbeat = Heartbeat(seat.store, seat.rank, seat.world_size, 0.1, 1.0, prefix="soak-bereft")
    try:
        with (
            heartbeat,
            guarded("the soak", rank=seat.rank, time_limit_s=40.0, heartbeat=heartbeat, consequence="") as deadline,
        ):
            for progress in soak(_world(seat), settings, deadline=deadline, poll=heartbeat.poll, tamper=damage):
                calls = progress.calls
    except RankLost as error:
        return {"lost": list(error.ranks), "text": str(error), "calls": calls}
    return {}
