"""Replica choice: which of several holders serves a region, by rule or by price.

``ReplicaSelector("priced", topology, rates)`` fits DeepSpeed's ``plan_transfer(..., replica_selector=...)``;
``rows_by("priced", topology, rates)`` makes this package's planner choose so: ``plan_move(..., rows_of=rows_by(...))``.
Both keep the loads of what they were asked for: one for each move, equal on every rank that asks in the same order.

================  ===================================================================================================
``target``        the destination rank itself where it holds the region, else the caller's order
``node``          itself, then a holder on its node, then the caller's order
``order``         the caller's order alone
``least-loaded``  as ``node``, among equals the holder that has served the fewest bytes so far
``priced``        itself, else the holder with which the busiest link on the way is through first: the rates of the
                  profile on the loads so far, of in-node ports and NICs
================  ===================================================================================================

Ranks of one node that need a region of another node get it from one holder, so that it can be relayed or spread. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.relayout.holders import Hits, Preference
from relaymeter.relayout.planner import RowsOf, plan_rows
from relaymeter.relayout.topology import Topology

__all__ = ["REPLICA_CHOICES", "Rates", "ReplicaSelector", "holder_preference", "rows_by"]

IntArray = NDArray[np.int64]

#: The replica choices, by name.
REPLICA_CHOICES = ("target", "node", "order", "least-loaded", "priced")
_SELF, _NEAR, _FAR = range(3)
#: Added to the level of a holder that is not to serve a region.
_PASSED_OVER = 3


@dataclass(frozen=True)
class Rates:
    """Payload bytes per second: of each NIC in one direction, and of one rank inside its node (None: not measured)."""

    nic: Mapping[int, float]
    port: float | None

    @classmethod
    def of(cls, profile: Profile, topology: Topology) -> Rates:
        """The rates of a profile, for ``topology``."""
        return cls(profile.nic_rates(topology), profile.port_rate())


class _Loads:
    """Seconds that each NIC and each rank's in-node port is busy so far, by direction."""

    def __init__(self, topology: Topology, rates: Rates) -> None:
        missing = sorted(set(topology.nic) - set(rates.nic)) if topology.nodes > 1 else []
        if missing:
            raise InputError(f"no payload rate for NIC {missing[0]}: calibrate this topology first")
        self._topology, self._rates = topology, rates
        self._busy: dict[tuple[bool, bool, int], float] = {}

    def through(self, far: bool, sent: Mapping[int, float], received: Mapping[int, float]) -> tuple[float, float]:
        """When the busiest link is through with further bytes, sent and received by rank, and the busiest sender."""
        out, into = ([self._busy.get(key, 0.0) + more for key, more in self._links(far, incoming, size).items()]
                     for incoming, size in ((False, sent), (True, received)))  # fmt: skip
        return max(*out, *into), max(out)

    def add(self, far: bool, sent: Mapping[int, float], received: Mapping[int, float]) -> None:
        """Load the links with further bytes, sent and received by rank; ``far``: on the NICs, else inside a node."""
        for incoming, size in ((False, sent), (True, received)):
            for key, more in self._links(far, incoming, size).items():
                self._busy[key] = self._busy.get(key, 0.0) + more

    def _links(self, far: bool, incoming: bool, size: Mapping[int, float]) -> dict[tuple[bool, bool, int], float]:
        found: dict[tuple[bool, bool, int], float] = {}
        for rank, nbytes in size.items():
            link = self._topology.nic[rank] if far else rank
            rate = self._rates.nic[link] if far else self._rates.port
            key = (far, incoming, link)
            found[key] = found.get(key, 0.0) + (nbytes / rate if rate else 0.0)
        return found


def _check(choice: str) -> None:
    if choice not in REPLICA_CHOICES:
        raise InputError(f"unknown replica choice {choice!r}: valid: {', '.join(REPLICA_CHOICES)}")


class ReplicaSelector:
    """Called by DeepSpeed's ``plan_transfer`` with a ``ReplicaSelectionRequest``; returns the ``source_rank`` to read.

    A ``source_rank`` from the world size on stands for a holder in a further layout: layout * world size + rank; the
    caller prefers the lower layout, within it the lower ``order`` (world; None: no preference), and then, but for
    ``least-loaded`` and ``priced``, the lower rank. itemsize: bytes per element. travels_once: whether a region of so
    many elements crosses to a node once, however many of its ranks want it; by default it does. Raises InputError on an
    unknown choice, or a rank outside the topology.
    """

    def __init__(
        self,
        choice: str,
        topology: Topology,
        rates: Rates,
        *,
        itemsize: int = 2,
        order: Sequence[int] | None = None,
        travels_once: Callable[[int], bool] | None = None,
    ) -> None:
        _check(choice)
        if order is not None and len(order) != topology.world_size:
            raise InputError(f"order has {len(order)} entries, the topology {topology.world_size} ranks: give one each")
        self.choice = choice
        self._topology, self._itemsize = topology, itemsize
        self._order = tuple(order) if order is not None else (0,) * topology.world_size
        self._once = travels_once or (lambda elements: True)
        self._loads = _Loads(topology, rates)
        self._served = [0.0] * topology.world_size
        self._agreed: dict[tuple[Any, ...], int] = {}
        self._asked: dict[tuple[Any, ...], int] = {}

    def __call__(self, request: Any) -> int:
        """The ``source_rank`` of the candidate that serves ``request``."""
        world, node = self._topology.world_size, self._topology.node
        there = int(request.target_rank)
        keys = [int(candidate.source_rank) for candidate in request.candidates]
        if not 0 <= there < world or min(keys) < 0:
            raise InputError(f"rank {there if not 0 <= there < world else min(keys)} is not one of {world} ranks")
        elements = math.prod(request.shape)
        nbytes = float(elements * self._itemsize)
        # The same region of equally laid out tensors looks the same: the n-th time that a rank asks is the n-th tensor.
        region = (node[there], tuple(request.logical_origin), tuple(request.shape), tuple(keys))
        turn = self._asked.get((there, region), 0)
        self._asked[there, region] = turn + 1
        at_home = self.choice != "order" and any(key % world == there for key in keys)
        chosen = None if at_home else self._agreed.get((turn, region))
        again = chosen is not None
        if chosen is None:
            chosen = min(keys, key=lambda key: self._rank(key, there, nbytes))
        here = chosen % world
        far = node[here] != node[there]
        if far:
            self._agreed[turn, region] = chosen
        if again and self._once(elements):  # another rank of its node hands it on
            self._loads.add(False, {}, {there: nbytes})
        elif here != there:
            self._loads.add(far, {here: nbytes}, {there: nbytes})
            self._served[here] += nbytes
        return chosen

    def _rank(self, key: int, there: int, nbytes: float) -> tuple[float, ...]:
        """What the candidates are ordered by, lowest first."""
        world, node = self._topology.world_size, self._topology.node
        layout, here = divmod(key, world)
        distance = _SELF if here == there else _NEAR if node[here] == node[there] else _FAR
        wish, turn = (layout, self._order[here]), float((here - there) % world)
        if self.choice == "priced":
            if distance == _SELF:
                return (-1.0, 0.0, *wish, turn)
            return (*self._loads.through(distance == _FAR, {here: nbytes}, {there: nbytes}), *wish, turn)
        if self.choice == "order":
            return (*wish, here)
        if self.choice == "target":
            return (min(distance, _NEAR), *wish, here)
        if self.choice == "node":
            return (distance, *wish, here)
        return (distance, *wish, self._served[here], turn)


def holder_preference(choice: str, topology: Topology, rates: Rates) -> Preference:
    """The replica choice as ``relayout.holders.choose_holders`` takes it, for one move.

    Holders that it leaves equal share a region, in bands where it is large enough: so ``least-loaded`` is ``node``
    here, and ``priced`` names as many holders as make the busiest link through first. Raises InputError.
    """
    _check(choice)
    if choice == "priced":
        return partial(_priced_levels, _Loads(topology, rates), topology)
    return partial(_levels, choice, topology.node_array)


def rows_by(choice: str, topology: Topology, rates: Rates) -> RowsOf:
    """The replica choice as ``plan_move(..., rows_of=)`` takes it, for one move. Raises InputError."""
    return partial(plan_rows, prefer=holder_preference(choice, topology, rates))


def _distance(node: IntArray, hits: Hits) -> IntArray:
    found: IntArray = np.where(hits.src == hits.dst, _SELF, np.where(node[hits.src] == node[hits.dst], _NEAR, _FAR))
    return found


def _levels(choice: str, node: IntArray, hits: Hits) -> IntArray:
    layouts = int(hits.layout.max(initial=0)) + 1
    distance = _distance(node, hits)
    if choice == "order":
        distance = np.zeros_like(distance)
    elif choice == "target":
        distance = np.minimum(distance, _NEAR)
    found: IntArray = distance * layouts + hits.layout
    return found


def _priced_levels(loads: _Loads, topology: Topology, hits: Hits) -> IntArray:
    """0 the rank itself, 1 and 2 the holders in the node and outside that serve; higher for those that do not.

    Region by region of every node, the largest first: of the holders in the node, and of those outside, the number of
    them among which an even share is through first is found, and the better of the two sets serves. What crosses to a
    node counts once on its NICs, spread over the ranks that want it.
    """
    node = topology.node_array
    level = _distance(node, hits)
    key = hits.region * topology.world_size + hits.dst
    wanted = np.flatnonzero(~np.isin(key, key[level == _SELF]))
    order = wanted[np.lexsort((hits.dst[wanted], node[hits.dst[wanted]], hits.region[wanted], -hits.bytes[wanted]))]
    place = np.stack([hits.region, node[hits.dst]], axis=1)[order]
    for rows in np.split(order, np.flatnonzero((place[1:] != place[:-1]).any(axis=1)) + 1):
        options = [
            _even_share(loads, kind == _FAR, hits.src[rows[level[rows] == kind]], hits.dst[rows], hits.bytes[rows])
            for kind in (_NEAR, _FAR)
            if (level[rows] == kind).any()
        ]
        if options:
            _, far, sent, received = min(options, key=lambda option: option[0])
            loads.add(far, sent, received)
            level[rows[~np.isin(hits.src[rows], list(sent))]] += _PASSED_OVER
    return level


def _even_share(
    loads: _Loads, far: bool, src: IntArray, dst: IntArray, nbytes: IntArray
) -> tuple[float, bool, dict[int, float], dict[int, float]]:
    """The holders of a region among whom an even share is through first: the seconds when the busiest link is, whether
    they are on other nodes, and what each of them sends and each rank receives."""
    holders, takers, size = set(src.tolist()), sorted(set(dst.tolist())), float(nbytes[0])
    received = {rank: size / len(takers) if far else size for rank in takers}
    total = sum(received.values())
    share = total / len(holders)
    early_first = sorted(holders, key=lambda src: (loads.through(far, {src: share}, received)[1], src))
    options = []
    for count in range(len(early_first), 0, -1):
        sent = dict.fromkeys(early_first[:count], total / count)
        options.append((loads.through(far, sent, received)[0], far, sent, received))
    return min(options, key=lambda option: option[0])
