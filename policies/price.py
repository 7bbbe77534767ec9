"""The price of a schedule: seconds predicted from its round loads and a profile's costs. Pure NumPy, no torch import.

``price_loads(schedule.loads(executor), topology, profile, executor)`` prices one schedule; a ``Pricer`` prices many.

A schedule begins once (``start_s``). Per round and rank: pack, then communicate, then unpack. Communication is the
call's floor, plus the longer of in-node and cross-node traffic, plus the part of the shorter one that does not overlap
(or, if that is more, the latency plus the wait for cores that busy ranks share), each of them as its curve has it less
the floor; copies within the rank run beside it. The traffic of a link class takes as long as a lone flow of *effective
bytes*, the largest over the pair (with the duplex of the executor), the rank's port (fan-in, fan-out, turn), the NIC in
both directions, the node and, by the number of busy ports, the whole cluster, plus the messages beyond the first.
Rounds follow each other as they are executed, without a barrier: a rank begins a round when it and its peers are ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.cells import Cell
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE, ExecutorCosts, LinkCosts, PackCosts
from relaymeter.calibration.patterns import Flow
from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.policies.traffic import Traffic, grouped
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology

__all__ = ["ERROR_FLOOR", "Price", "Pricer", "RoundTerms", "flow_loads", "price_loads"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

#: No prediction is taken to be better than this share, however well the validation went.
ERROR_FLOOR = 0.03


@dataclass(frozen=True, eq=False)
class Price:
    """Predicted seconds of a whole schedule.

    low_s, high_s: within the error of the prices on the profile's uneven matrices. rounds_s (rounds): what each round
    adds. breakdown: the slowest rank's seconds summed over the rounds, by part (``pack_s``, ``in_node_s``,
    ``cross_node_s``, ``unpack_s``; the two kinds of traffic as if alone). extrapolated: a load lies beyond the measured
    sizes, or the topology is not the measured one.
    """

    total_s: float
    low_s: float
    high_s: float
    rounds_s: FloatArray
    breakdown: Mapping[str, float]
    extrapolated: bool


@dataclass(frozen=True, eq=False)
class RoundTerms:
    """Seconds per round and rank (rounds, world): pack, communicate, unpack, and the two kinds of traffic alone."""

    pack: FloatArray
    communicate: FloatArray
    unpack: FloatArray
    in_node: FloatArray
    cross_node: FloatArray
    extrapolated: bool


def price_loads(loads: RoundLoads, topology: Topology, profile: Profile, executor: str) -> Price:
    """Price one schedule. Pure; any process. Raises InputError where the profile lacks the executor or a link class."""
    return Pricer(profile, topology, executor).price(loads)


def flow_loads(flows: list[Flow]) -> RoundLoads:
    """A single round of flows (src, dst, bytes), one message each, nothing packed: what a calibration cell moves."""
    src, dst, size = (np.asarray([flow[k] for flow in flows], dtype=np.int64) for k in range(3))
    none = np.zeros(len(flows), dtype=np.int64)
    return RoundLoads(1, none, src, dst, size, none + 1, none, none, none, none, none, none, none)


class Pricer:
    """Prices schedules of one topology with one profile and executor.

    ``costs`` replaces the profile's fit (a bootstrap replicate). A topology other than the measured one takes the usual
    port throughout and is marked extrapolated.
    """

    def __init__(self, profile: Profile, topology: Topology, executor: str, costs: ExecutorCosts | None = None) -> None:
        self.profile = profile
        self.topology = topology
        self.executor = executor
        self.costs = profile.costs(executor) if costs is None else costs
        self._measured = topology == profile.topology
        self._fitted = costs is None

    @cached_property
    def error(self) -> float:
        """Relative error of the prices: the median over the profile's uneven matrices, at least ``ERROR_FLOOR``."""
        return max(ERROR_FLOOR, float(np.median(self.matrix_errors)))

    @cached_property
    def spread(self) -> float:
        """Relative half-width of a price's interval: nine tenths of the uneven matrices lie within it."""
        return max(self.error, float(np.quantile(self.matrix_errors, 0.9)))

    @cached_property
    def matrix_errors(self) -> FloatArray:
        """Absolute relative errors of this model on the uneven matrices that calibration measured and never fitted.

        Where it had no time for them: on the fitted patterns of several flows, doubled.
        """
        mine = [cell for cell in self.profile.cells if cell.executor == self.executor]
        uneven = [self._cell_error(cell) for cell in mine if cell.pattern == "uneven"]
        if uneven:
            return np.asarray(uneven, dtype=np.float64)
        fitted = [2 * self._cell_error(cell) for cell in mine if len(cell.flows) > 1]
        return np.asarray(fitted or [2 * ERROR_FLOOR], dtype=np.float64)

    @cached_property
    def held_out(self) -> int:
        """Uneven matrices behind ``matrix_errors``; 0 where it stands on fitted patterns."""
        return sum(cell.pattern == "uneven" and cell.executor == self.executor for cell in self.profile.cells)

    def _cell_error(self, cell: Cell) -> float:
        own = self if self._measured and self._fitted else Pricer(self.profile, self.profile.topology, self.executor)
        loads = flow_loads(list(cell.flows))
        return abs(float(own._ends(loads, own.terms(loads), cell.calls > 1)[-1]) / cell.median_s - 1)

    def price(self, loads: RoundLoads, *, in_series: bool = False) -> Price:
        """Price ``loads``; ``in_series``: as one of many calls back to back, not one begun after a pause. Raises
        InputError where a link class was not measured."""
        terms = self.terms(loads)
        ends = self._ends(loads, terms, in_series)
        total = float(ends[-1]) if len(ends) else 0.0
        rounds = np.diff(np.concatenate([[0.0], ends]))
        width = self.spread * (1 if self._measured and not terms.extrapolated else 2)
        parts = {
            "pack_s": float(terms.pack.max(axis=1).sum()),
            "in_node_s": float(terms.in_node.max(axis=1).sum()),
            "cross_node_s": float(terms.cross_node.max(axis=1).sum()),
            "unpack_s": float(terms.unpack.max(axis=1).sum()),
        }
        return Price(
            total_s=total,
            low_s=total / (1 + width),
            high_s=total * (1 + width),
            rounds_s=rounds,
            breakdown=parts,
            extrapolated=terms.extrapolated or not self._measured,
        )

    def terms(self, loads: RoundLoads) -> RoundTerms:
        """Seconds of every round on every rank, before they are put one after the other."""
        costs, world, node = self.costs, self.topology.world_size, self.topology.node_array
        shape = (loads.rounds, world)
        moved = loads.bytes > 0
        local = (loads.src == loads.dst) & moved
        far = (node[loads.src] != node[loads.dst]) & moved
        near = moved & ~local & ~far
        seconds: dict[str, FloatArray] = {}
        extrapolated = False
        for kind, rows in ((IN_NODE, near), (CROSS_NODE, far)):
            seconds[kind] = np.zeros(shape)
            if rows.any():
                traffic = Traffic(self._link(kind), kind, self.topology, self._measured, loads, rows)
                seconds[kind] = traffic.seconds
                extrapolated |= traffic.extrapolated
        floor = costs.floor_s
        busy_near, busy_far = seconds[IN_NODE] > 0, seconds[CROSS_NODE] > 0
        near_s = np.where(busy_near, np.maximum(seconds[IN_NODE] - floor, 0.0), 0.0)
        once = local.astype(np.int64)
        within = self._packing(costs.unpack, loads, loads.dst, loads.bytes * once, once, once)
        if costs.in_node is not None and costs.in_node.crowd:
            # Exchanges inside nodes share cores or memory with each other, and so with copies within a rank.
            near_s, within = near_s + within, np.zeros(shape)
        far_s = np.where(busy_far, np.maximum(seconds[CROSS_NODE] - floor, 0.0), 0.0)
        communicate = np.maximum(near_s, far_s) + (1 - costs.overlap) * np.minimum(near_s, far_s)
        # Waiting for cores hides behind wires.
        busy = busy_near | busy_far
        others = np.maximum(busy.sum(axis=1, keepdims=True) - 2, 0) / max(world - 2, 1)
        waits = np.maximum(
            np.where(busy_near, self._latency(IN_NODE), 0), np.where(busy_far, self._latency(CROSS_NODE), 0)
        )
        communicate = np.maximum(communicate, np.where(busy, waits + others * costs.busy_s, 0.0))
        # Every rank takes part in an all-to-all; with send-recv a rank without a message makes no call.
        present = np.ones(shape, dtype=bool) if self.executor == "all-to-all" else busy
        communicate = communicate + np.where(present, floor, 0.0)
        communicate = np.maximum(communicate, within)
        pack = self._packing(costs.pack, loads, loads.src, loads.pack_bytes, loads.copies, loads.pack_runs)
        unpack = self._packing(costs.unpack, loads, loads.dst, loads.unpack_bytes, loads.copies, loads.unpack_runs)
        return RoundTerms(pack, communicate, unpack, near_s, far_s, extrapolated)

    def _latency(self, kind: str) -> float:
        """Seconds of the smallest message, less the floor."""
        link = self.costs.link(kind)
        return 0.0 if link is None else max(0.0, link.curve.seconds[0] - self.costs.floor_s)

    def _link(self, kind: str) -> LinkCosts:
        link = self.costs.link(kind)
        if link is None:
            where = "inside a node" if kind == IN_NODE else "between nodes"
            raise InputError(
                f"the move sends bytes {where}, but the profile has no such link: calibrate a cluster with one"
            )
        return link

    def _packing(
        self,
        costs: PackCosts,
        loads: RoundLoads,
        rank: IntArray,
        nbytes: IntArray,
        segments: IntArray,
        runs: IntArray,
    ) -> FloatArray:
        """Seconds of each rank's copies in each round; ranks that pack at once wait for memory or cores they share."""
        shape, cells = (loads.rounds, self.topology.world_size), loads.rounds * self.topology.world_size
        key = loads.round * self.topology.world_size + rank
        count = np.bincount(key, weights=segments, minlength=cells)
        moved = np.bincount(key, weights=nbytes, minlength=cells)
        inner = np.bincount(key, weights=runs, minlength=cells)
        begun = count * costs.segment_s + inner * costs.run_s + np.where(count > 0, costs.call_s, 0.0)
        started: FloatArray = np.asarray(begun, dtype=np.float64).reshape(shape)
        carried: FloatArray = np.asarray(moved * costs.byte_s, dtype=np.float64).reshape(shape)
        waiting = self._crowded(started, costs.node_copy_lanes, costs.world_copy_lanes)
        return waiting + self._crowded(carried, costs.node_lanes, costs.world_lanes)

    def _crowded(self, seconds: FloatArray, node_lanes: float | None, world_lanes: float | None) -> FloatArray:
        """Seconds (rounds, world) of what each rank would do alone, where only so many ranks work at full speed."""
        found = seconds
        if node_lanes is not None:
            node = self.topology.node_array
            found = np.maximum(found, grouped(seconds, node, self.topology.nodes)[:, node] / node_lanes)
        if world_lanes is not None:
            found = np.maximum(found, seconds.sum(axis=1, keepdims=True) / world_lanes)
        return np.where(seconds > 0, found, 0.0)

    def _ends(self, loads: RoundLoads, terms: RoundTerms, in_series: bool) -> FloatArray:
        """When the last rank is through with each round (rounds), rounds following each other without a barrier."""
        clock = np.zeros(self.topology.world_size)
        ends = np.zeros(loads.rounds)
        used = np.flatnonzero((loads.src != loads.dst) & (loads.bytes > 0))
        used = used[np.argsort(loads.round[used], kind="stable")]
        edge = np.searchsorted(loads.round[used], np.arange(loads.rounds + 1))
        src, dst = loads.src[used], loads.dst[used]
        together = self.executor == "all-to-all"
        for number in range(loads.rounds):
            ready = clock + terms.pack[number]
            if together:
                start = np.full_like(ready, ready.max())
            else:
                ours, theirs = src[edge[number] : edge[number + 1]], dst[edge[number] : edge[number + 1]]
                start = ready.copy()
                np.maximum.at(start, theirs, ready[ours])
                np.maximum.at(start, ours, ready[theirs])
            clock = start + terms.communicate[number] + terms.unpack[number]
            ends[number] = clock.max()
        ends = np.maximum.accumulate(ends)
        return ends if in_series or not ends.any() else ends + self.costs.start_s
