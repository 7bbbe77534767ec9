"""Jobs that measure moves of a validation on the pool's ranks."""

from __future__ import annotations

from typing import Any

import torch
from pool import Seat

from relaymeter.harness.jobs import Fault
from relaymeter.harness.validate_cases import Agenda
from relaymeter.harness.validate_measure import Repeats
from relaymeter.harness.validate_ranks import RankMoves
from relaymeter.harness.world import World
from relaymeter.relayout.topology import Topology


def moves(seat: Seat, agenda: str, flip: int | None = None) -> list[dict[str, Any]]:
    """Measure the moves of an agenda on two declared nodes; ``flip``: the rank that damages the first message."""
    topology = Topology.grid(2, seat.world_size // 2)
    world = World(
        rank=seat.rank, world_size=seat.world_size, topology=topology, store=seat.store, backend="gloo",
        device=torch.device("cpu"), local_rank=0, declared=True, interface="lo", wire_source="",
    )  # fmt: skip
    fault = None if flip is None else Fault(kind="flip", rank=flip)
    measure = RankMoves(world, topology, time_limit_s=20.0, heartbeat=None, say=lambda text: None, fault=fault)
    found = measure(Agenda.from_json(agenda).moves, Repeats(least=2, most=2), lambda share: None)
    return [
        {"times": list(one.times_s), "passed": one.passed, "total": one.total, "mismatch": one.mismatch}
        for one in found
    ]
