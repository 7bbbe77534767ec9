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
FloatArray = NDArray[np.float64]
#: Runs of more equal blocks than this are placed on their own, so that short ones beside them need no room for as many.
_TOGETHER_MOST = 64


@dataclass(frozen=True)
class HubRequest:
    """``groups`` equal groups of unit ``unit``, of ``bytes`` each, sent to one of ``members`` (the possible hubs),
    where they arrive ``delay`` rounds after the first of their bucket."""

    unit: int
    groups: int
    members: tuple[int, ...]
    bytes: int
    delay: int = 0


@dataclass(frozen=True, eq=False)
class _Runs:
    """Equal blocks that arrive in one round at one of the same members, each an entry of the arrays (runs)."""

    request: IntArray
    """A request whose blocks they are; all are alike to ``_Loads``."""
    round: IntArray
    count: IntArray
    begin: IntArray
    """Where the slots of the run's blocks lie among those of all, (runs + 1)."""


def assign_hubs(
    requests: Sequence[HubRequest], buckets: Sequence[IntArray], start: FloatArray, topology: Topology
) -> list[NDArray[np.int16]]:
    """Hub slots (index into ``members``) of each request, an array (tensors of its unit, groups).

    ``buckets[unit]`` (u) is the bucket of each tensor of the unit, whose first round has the same number; ``start``
    (rounds, world) the bytes that each rank receives from other nodes anyway. Within a round the largest blocks are
    placed first, each on the NIC with the least bytes so far (ties: the rank with the least, then the one with the
    least over the whole move).
    """
    if not requests:
        return []
    orders = [np.argsort(bucket, kind="stable") for bucket in buckets]
    runs, part, place = _runs(requests, buckets, topology)
    turn = _turns(part)
    order = np.argsort(turn, kind="stable")
    loads = _Loads(requests, start, topology)
    slots = np.empty(len(place), dtype=np.int16)
    begin = 0
    for end in np.cumsum(np.bincount(turn)).tolist():  # the k-th run of every part: none touches a NIC of another
        loads.place(order[begin:end], runs, slots)
        begin = end
    ordered = np.empty_like(slots)
    ordered[place] = slots
    return _by_tensor(requests, orders, ordered)


def _runs(
    requests: Sequence[HubRequest], buckets: Sequence[IntArray], topology: Topology
) -> tuple[_Runs, IntArray, IntArray]:
    """The runs in the order in which they are placed, part after part; the part of each (runs); and of each of their
    blocks its place among those of all, request by request and bucket by bucket."""
    found = [np.unique(bucket, return_counts=True) for bucket in buckets]
    number = np.repeat(np.arange(len(requests)), [len(found[request.unit][0]) for request in requests])
    round_ = np.concatenate([found[request.unit][0] + request.delay for request in requests])
    count = np.concatenate([found[request.unit][1] * request.groups for request in requests])
    named = {members: index for index, members in enumerate(dict.fromkeys(r.members for r in requests))}
    size, alike = (np.asarray(column) for column in zip(*((r.bytes, named[r.members]) for r in requests), strict=True))
    part = _parts(requests, topology)[number]
    size, alike = size[number], alike[number]
    order = np.lexsort((number, -size, round_, part))
    keys = np.stack([column[order] for column in (part, round_, size, alike)])
    first = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    begin, count = np.concatenate([[0], np.cumsum(count)[:-1]])[order], count[order]
    ends = np.cumsum(count)
    place = np.repeat(begin - ends + count, count) + np.arange(int(ends[-1]))
    lead = order[first]
    starts = np.concatenate([(ends - count)[first], ends[-1:]])
    return _Runs(number[lead], round_[lead], np.diff(starts), starts), part[lead], place


def _parts(requests: Sequence[HubRequest], topology: Topology) -> IntArray:
    """A number for each request, (requests): those with different numbers share no NIC, nor through others."""
    nic = topology.nic_array
    label = np.arange(int(nic.max()) + 1)
    sets = {request.members: np.unique(nic[list(request.members)]) for request in requests}
    for ports in sets.values():
        if len(named := np.unique(label[ports])) > 1:
            label[np.isin(label, named)] = named[0]
    of = {members: int(label[ports[0]]) for members, ports in sets.items()}
    return np.asarray([of[request.members] for request in requests], dtype=np.int64)


def _turns(part: IntArray) -> IntArray:
    """Position of each run among those of its part; ``part`` is sorted."""
    first = np.concatenate([[True], part[1:] != part[:-1]])
    starts = np.flatnonzero(first)
    turn: IntArray = np.arange(len(part)) - starts[np.cumsum(first) - 1]
    return turn


def _by_tensor(
    requests: Sequence[HubRequest], orders: Sequence[IntArray], slots: NDArray[np.int16]
) -> list[NDArray[np.int16]]:
    """The slots of all runs, request by request and bucket by bucket, as an array per request."""
    found, begin = [], 0
    for request in requests:
        order = orders[request.unit]
        end = begin + len(order) * request.groups
        table = np.empty((len(order), request.groups), dtype=np.int16)
        table[order] = slots[begin:end].reshape(table.shape)
        found.append(table)
        begin = end
    return found


class _Loads:
    """Bytes that ranks and NICs are to receive, round by round and over the whole move."""

    def __init__(self, requests: Sequence[HubRequest], start: FloatArray, topology: Topology) -> None:
        self._nic = topology.nic_array
        self._rank = start.copy()
        self._port = np.zeros((len(start), int(self._nic.max()) + 1))
        for rank, port in enumerate(self._nic.tolist()):
            self._port[:, port] += start[:, rank]
        self._total: FloatArray = np.zeros(topology.world_size)
        self._bytes = np.asarray([request.bytes for request in requests], dtype=np.float64)
        self._width = np.asarray([len(request.members) for request in requests])
        self._members = np.zeros((len(requests), int(self._width.max())), dtype=np.int64)
        for row, request in zip(self._members, requests, strict=True):
            row[: len(request.members)] = request.members
        ports = {request.members: len(set(self._nic[list(request.members)].tolist())) for request in requests}
        self._distinct = np.asarray([ports[request.members] for request in requests])

    def place(self, which: IntArray, runs: _Runs, slots: NDArray[np.int16]) -> None:
        """Place these runs, of which no two touch the same NIC, and write their blocks' slots."""
        number, count = runs.request[which], runs.count[which]
        ports = self._distinct[number]
        merged = (ports == self._width[number]) | (ports == 1)
        together = merged & (count <= _TOGETHER_MOST)
        self._merge(which[together], runs, slots)
        for run in which[merged & ~together].tolist():
            self._merge(np.asarray([run]), runs, slots)
        for run in which[~merged].tolist():
            self._in_turn(run, runs, slots)

    def _merge(self, which: IntArray, runs: _Runs, slots: NDArray[np.int16]) -> None:
        """Runs whose members have a NIC each, or all the same one. What a member would have after each further block
        only grows, so the least loaded one at every turn is the next in the sorted order of all of these."""
        if not len(which):
            return
        number, at, count = runs.request[which], runs.round[which], runs.count[which]
        members, width, most = self._members[number], self._members.shape[1], int(count.max())
        by_rank = self._rank[at[:, None], members]
        by_nic = np.where(self._distinct[number, None] > 1, self._port[at[:, None], self._nic[members]], by_rank)
        by_nic[np.arange(width)[None, :] >= self._width[number, None]] = np.inf
        steps = self._bytes[number, None, None] * np.arange(most)
        keys = np.stack([self._total[members], by_rank, by_nic])[:, :, :, None] + steps
        slot = np.lexsort(keys.reshape(3, len(which), -1), axis=-1)[:, :most] // most
        row, block = np.nonzero(np.arange(most) < count[:, None])
        chosen = slot[row, block]
        slots[runs.begin[which][row] + block] = chosen
        rank, round_, added = members[row, chosen], at[row], self._bytes[number][row]
        np.add.at(self._total, rank, added)
        np.add.at(self._rank, (round_, rank), added)
        np.add.at(self._port, (round_, self._nic[rank]), added)

    def _in_turn(self, run: int, runs: _Runs, slots: NDArray[np.int16]) -> None:
        """A run some of whose members share a NIC: each block on the least loaded NIC at its turn."""
        number, at = int(runs.request[run]), int(runs.round[run])
        members, nbytes = self._members[number, : self._width[number]], float(self._bytes[number])
        ports = self._nic[members]
        alike = [np.flatnonzero(ports == port).tolist() for port in ports.tolist()]
        keys = (self._port[at, ports], self._rank[at, members], self._total[members])
        loads = list(map(list, zip(*(key.tolist() for key in keys), strict=True)))
        for block in range(int(runs.begin[run]), int(runs.begin[run + 1])):
            slot = loads.index(min(loads))
            slots[block] = slot
            for other in alike[slot]:
                loads[other][0] += nbytes
            loads[slot][1] += nbytes
            loads[slot][2] += nbytes
        for load, port, rank in zip(loads, ports.tolist(), members.tolist(), strict=True):
            self._port[at, port], self._rank[at, rank], self._total[rank] = load
