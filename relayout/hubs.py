"""Hubs: which destination rank of a node fetches a relayed block. Balanced by bytes over the NICs, largest first.

``assign_hubs(requests, buckets, start, topology)`` gives each request its hub slot per tensor. With one hub for all,
relay would be no faster than direct where every rank has its own NIC. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.topology import Topology

__all__ = ["HubRequest", "assign_hubs"]

IntArray = NDArray[np.int64]
#: From so many equal blocks on their hubs are found by sorting the loads they lead to instead of one by one.
_SORT_FROM = 16


@dataclass(frozen=True)
class HubRequest:
    """``groups`` equal groups of unit ``unit``, of ``bytes`` each, relayed to ``members`` (the possible hubs)."""

    unit: int
    groups: int
    members: tuple[int, ...]
    bytes: int


def assign_hubs(
    requests: Sequence[HubRequest], buckets: Sequence[IntArray], start: NDArray[np.float64], topology: Topology
) -> list[NDArray[np.int16]]:
    """Hub slots (index into ``members``) of each request, an array (tensors of its unit, groups).

    ``buckets[unit]`` (u) is the bucket of each tensor of the unit; ``start`` (buckets, world) the bytes that each rank
    receives from other nodes anyway. Within a bucket the largest blocks are placed first, each on the NIC with the
    least bytes so far (ties: the rank with the least, then the one with the least over the whole move).
    """
    nic = topology.nic_array
    total: NDArray[np.float64] = np.zeros(topology.world_size)
    slots = [np.zeros((len(buckets[r.unit]), r.groups), dtype=np.int16) for r in requests]
    runs: list[tuple[int, int, int, IntArray]] = []
    for number, request in enumerate(requests):
        for bucket in np.unique(buckets[request.unit]).tolist():
            runs.append((bucket, -request.bytes, number, np.flatnonzero(buckets[request.unit] == bucket)))
    runs.sort(key=lambda run: run[:3])
    current = -1
    rank_load: NDArray[np.float64] = total
    nic_load: NDArray[np.float64] = total
    for bucket, _, number, places in runs:
        if bucket != current:
            current = bucket
            rank_load = start[bucket].copy()
            nic_load = np.bincount(nic, weights=rank_load, minlength=int(nic.max()) + 1).astype(np.float64)
        request = requests[number]
        count = len(places) * request.groups
        chosen: IntArray = _place(count, request, rank_load, nic_load, nic, total)
        members = np.asarray(request.members)
        added = np.bincount(chosen, minlength=len(members)) * float(request.bytes)
        rank_load[members] += added
        total[members] += added
        nic_load += np.bincount(nic[members], weights=added, minlength=len(nic_load))
        slots[number][places] = chosen.reshape(len(places), request.groups)
    return slots


def _place(
    count: int,
    request: HubRequest,
    rank_load: NDArray[np.float64],
    nic_load: NDArray[np.float64],
    nic: IntArray,
    total: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Slots of ``count`` equal blocks, each on the least loaded NIC at its turn; the loads given stay as they are."""
    members = np.asarray(request.members)
    ports = nic[members]
    shared = len(set(ports.tolist()))
    by_nic, by_rank, by_total = nic_load[ports].copy(), rank_load[members].copy(), total[members].copy()
    if count >= _SORT_FROM and shared in (1, len(members)):
        level = by_nic if shared > 1 else by_rank
        steps = np.arange(count, dtype=np.float64) * max(request.bytes, 1)
        levels = (level[:, None] + steps[None, :]).reshape(-1)
        slot = np.repeat(np.arange(len(members)), count)
        return slot[np.lexsort((by_total[slot], levels))[:count]]
    chosen = np.zeros(count, dtype=np.int64)
    for item in range(count):
        slot_of = int(np.lexsort((by_total, by_rank, by_nic))[0])
        chosen[item] = slot_of
        by_nic[ports == ports[slot_of]] += request.bytes
        by_rank[slot_of] += request.bytes
        by_total[slot_of] += request.bytes
    return chosen
