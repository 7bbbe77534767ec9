"""Jobs for the runner of training states: a whole job in the world of the pool, as a rank of ``run`` does it."""

from __future__ import annotations

from typing import Any

import torch
from pool import Seat
from torch.distributed import PrefixStore

from relaymeter.harness.jobs import StateJob, job_of
from relaymeter.harness.state_run import run_state_job
from relaymeter.harness.world import World
from relaymeter.relayout.topology import Topology


def run(seat: Seat, asked: dict[str, Any], name: str) -> dict[str, Any]:
    """The rows of the job ``asked`` for, and what was said; ``name`` keeps the keys of two calls apart."""
    found = job_of(asked, "job")
    assert isinstance(found, StateJob)
    store: Any = PrefixStore(name, seat.store)
    world = World(
        rank=seat.rank,
        world_size=seat.world_size,
        topology=Topology.grid(1, seat.world_size),
        store=store,
        backend="gloo",
        device=torch.device("cpu"),
        local_rank=seat.rank,
        declared=True,
        interface="lo",
        wire_source="",
    )
    said: list[str] = []
    kept = [[row.to_dict() for row in rows] for rows in run_state_job(found, world, said.append)]
    return {"rows": kept[-1], "counts": [len(rows) for rows in kept], "said": said}
