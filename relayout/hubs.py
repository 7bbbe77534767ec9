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
    """``groups`` equal groups of unit ``unit``, of ``bytes`` each, sent to one of ``members`` (the possible hubs),
    where they arrive ``delay`` rounds after the first of their bucket."""

    unit: int
    groups: int
    members: tuple[int, ...]
    bytes: int
    delay: int = 0


def assign_hubs(
    requests: Sequence[HubRequest], buckets: Sequence[IntArray], start: NDArray[np.float64], topology: Topology
) -> list[NDArray[np.int16]]:
    """Hub slots (index into ``members``) of each request, an array (tensors of its unit, groups).

    ``buckets[unit]`` (u) is the bucket of each tensor of the unit, whose first round has the same number; ``start``
    (rounds, world) the bytes that each rank receives from other nodes anyway. Within a round the largest blocks are
    placed first, each on the NIC with the least bytes so far (ties: the rank with the least, then the one with the
    least over the whole move).
    """
    nic = topology.nic_array
    total: NDArray[np.float64] = np.zeros(topology.world_size)
    slots = [np.zeros((len(buckets[r.unit]), r.groups), dtype=np.int16) for r in requests]
    runs: list[tuple[int, int, int, IntArray]] = []
    for number, request in enumerate(requests):
        for bucket in np.unique(buckets[request.unit]).tolist():
            places = np.flatnonzero(buckets[request.unit] == bucket)
            runs.append((bucket + request.delay, -request.bytes, number, places))
    runs.sort(key=lambda run: run[:3])
    current = -1
    rank_load: NDArray[np.float64] = total
    nic_load: NDArray[np.float64] = total
    for arrives, _, number, places in runs:
        if arrives != current:
            current = arrives
            rank_load = start[arrives].copy()
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
    alike = [np.flatnonzero(ports == port).tolist() for port in ports.tolist()]
    loads = list(map(list, zip(by_nic.tolist(), by_rank.tolist(), by_total.tolist(), strict=True)))
    chosen = []
    for _ in range(count):  # over a few members lists are faster than arrays
        slot_of = loads.index(min(loads))
        chosen.append(slot_of)
        for other in alike[slot_of]:
            loads[other][0] += request.bytes
        loads[slot_of][1] += request.bytes
        loads[slot_of][2] += request.bytes
    return np.asarray(chosen, dtype=np.int64)
