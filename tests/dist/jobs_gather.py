"""Jobs that gather whole weights and slice shards out of them."""

from __future__ import annotations

from typing import Any

import torch
from pool import Seat

from relaymeter.errors import RelaymeterError
from relaymeter.harness.paths.gather import GatherThenSlice
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.placements import Cut, tensor_parallel_layout, zero3_layout

SPECS = {
    name: TensorSpec(name, shape, dtype)
    for name, shape, dtype in (
        ("rows", (12, 5), "bfloat16"),
        ("columns", (7, 9), "bfloat16"),
        ("heads", (4, 3), "bfloat16"),
        ("norm", (3,), "float32"),
        ("deep", (2, 6, 3), "float32"),
        ("empty", (0, 4), "float32"),
    )
}
CUTS = {
    "rows": Cut(0), "columns": Cut(1), "heads": Cut(0, 2), "norm": Cut(None), "deep": Cut(1), "empty": Cut(0),
}  # fmt: skip


def _whole(turn: int) -> dict[str, torch.Tensor]:
    """The weights, the same on every rank: small whole numbers, which both dtypes hold exactly."""
    return {
        name: ((torch.arange(spec.numel) * 7 + 11 * turn + number) % 251).to(getattr(torch, spec.dtype))
        for number, (name, spec) in enumerate(SPECS.items())
    }


def shards(seat: Seat, together_bytes: int, replicas: list[list[int]]) -> dict[str, Any]:
    """Two runs with other weights in between; what each rank got in the second, and what it should have."""
    world, rank = seat.world_size, seat.rank
    source = zero3_layout(SPECS, range(world), world)
    destination = tensor_parallel_layout(SPECS, CUTS, replicas, world)
    held = {
        name: torch.zeros(source.placements[name].storage.get(rank, 0), dtype=w.dtype) for name, w in _whole(0).items()
    }
    into = {
        name: torch.full((place.storage[rank],), -1, dtype=getattr(torch, SPECS[name].dtype))
        for name, place in destination.placements.items()
        if rank in place.storage
    }
    path = GatherThenSlice(source, destination, rank, held, into, together_bytes=together_bytes)
    for turn in (1, 2):
        for name, weight in _whole(turn).items():
            part = -(-weight.numel() // world)
            mine = weight[rank * part : (rank + 1) * part]
            held[name][: len(mine)] = mine
        path.run()
    wanted = {}
    replica = next((ranks for ranks in replicas if rank in ranks), [])
    for name, weight in _whole(2).items():
        if replica and SPECS[name].numel:
            wanted[name] = _slice(name, weight.view(SPECS[name].shape), replica.index(rank), len(replica))
    return {
        "found": {name: into[name].tolist() for name in wanted},
        "wanted": wanted,
        "received": path.received_bytes,
        "collectives": path.collectives,
    }


def _slice(name: str, weight: torch.Tensor, index: int, degree: int) -> list[float]:
    cut = CUTS[name]
    if cut.dim is None or degree == 1:
        return list(weight.reshape(-1).tolist())
    extent = weight.shape[cut.dim]
    if cut.units is not None and cut.units < degree:
        index, degree = index * cut.units // degree, cut.units
    begin, end = index * extent // degree, (index + 1) * extent // degree
    return list(weight.narrow(cut.dim, begin, end - begin).reshape(-1).tolist())


def refused(seat: Seat, ranks: list[int]) -> str:
    """What a source that one gather in order of the ranks would not put together is refused with."""
    source = zero3_layout(SPECS, ranks, seat.world_size)
    held = {name: torch.zeros(64) for name in SPECS}
    try:
        GatherThenSlice(source, source, seat.rank, held, held)
    except RelaymeterError as error:
        return f"{type(error).__name__}: {error}"
    return ""
