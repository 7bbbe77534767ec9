"""Which path wins for which state on how many nodes, by a profile's prices. No torch import.

``find_path_scaling(profile, costs, nodes, ranks_per_node, nic_per, executor)`` prices the same change
of a training state, ZeRO-3 over all ranks to half of them, by every path on 1, 2, 3, 4, 8, ... nodes. In memory it is a
real schedule of the direct route priced by the network model, what the measured move took beyond such a price (making
room, fields; each rank for its own part) and the refresh by its line; the other paths are lines (``path_costs``).
Gathering is left out on other numbers of nodes than measured, as its collectives cross the network in
ways that no line knows. On several nodes a checkpoint in a node's memory is no way to the others, and what one node
wrote is not in the page cache of another: storages in memory are left out there, and pages count as cold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.policies.path_costs import PathCosts, PathFit, PathPrice
from relaymeter.policies.price import Price, Pricer
from relaymeter.policies.scaling import node_counts
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.partitions import zero3_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import DIRECT, block_groups
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology

__all__ = ["STATE_BYTES", "PathCell", "PathScaling", "find_path_scaling"]

IntArray = NDArray[np.int64]

#: Bytes of the training states that are priced.
STATE_BYTES = (10**9, 10**10, 10**11, 10**12)
#: The state that is planned, in tensors of equal size and about so many buckets; larger ones are it times a factor.
_PLANNED_BYTES, _TENSORS, _BUCKETS = 10**9, 8, 8
#: Ranks beyond which a number of nodes is left out.
_MOST_RANKS = 1024
#: File systems that live in the memory of one node.
_ONE_NODE = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True)
class PathCell:
    """One state on one number of nodes. prices: of every path over the storage where it is fastest, the fastest path
    first."""

    nodes: int
    state_bytes: int
    prices: tuple[PathPrice, ...]

    @property
    def close(self) -> tuple[PathPrice, ...]:
        """The paths whose intervals reach into that of the fastest, itself included."""
        return tuple(price for price in self.prices if price.low_s <= self.prices[0].high_s)

    @property
    def winner(self) -> str | None:
        """The fastest path; None where another is too close to call."""
        return self.prices[0].path if len(self.close) == 1 else None

    def price(self, path: str) -> PathPrice | None:
        """The price of ``path``; None where it has none here."""
        return next((price for price in self.prices if price.path == path), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "state_bytes": self.state_bytes,
            "winner": self.winner,
            "close": [price.path for price in self.close],
            "extrapolated": any(price.extrapolated for price in self.prices),
            "prices": [price.to_dict() for price in self.prices],
        }


@dataclass(frozen=True)
class PathScaling:
    """Cells by number of nodes and size of the state, ``ranks_per_node`` ranks on each."""

    ranks_per_node: int
    executor: str
    costs: PathCosts
    cells: tuple[PathCell, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({cell.nodes for cell in self.cells}))

    @property
    def state_bytes(self) -> tuple[int, ...]:
        return tuple(sorted({cell.state_bytes for cell in self.cells}))

    def cell(self, nodes: int, state_bytes: int) -> PathCell:
        return next(one for one in self.cells if (one.nodes, one.state_bytes) == (nodes, state_bytes))

    def wins_from(self, path: str, nodes: int) -> int | None:
        """The smallest state from which on ``path`` wins on so many nodes, up to the largest; None: it does not."""
        found = None
        for size in reversed(self.state_bytes):
            if self.cell(nodes, size).winner != path:
                break
            found = size
        return found

    def to_dict(self) -> dict[str, Any]:
        paths = list(dict.fromkeys(price.path for cell in self.cells for price in cell.prices))
        return {
            "ranks_per_node": self.ranks_per_node,
            "executor": self.executor,
            "error": self.costs.error,
            "growing_error": self.costs.growing_error,
            "held_out": self.costs.held_out,
            "measured": {
                "source": self.costs.source,
                "destination": self.costs.destination,
                "ranks": self.costs.ranks,
                "nodes": self.costs.nodes,
                "state_bytes": list(self.costs.state_bytes),
            },
            "wins_from": {path: {str(nodes): self.wins_from(path, nodes) for nodes in self.nodes} for path in paths},
            "cells": [cell.to_dict() for cell in self.cells],
        }


def find_path_scaling(
    profile: Profile,
    costs: PathCosts,
    nodes: int,
    ranks_per_node: int,
    nic_per: Literal["rank", "node"],
    executor: str,
    *,
    sizes: Sequence[int] = STATE_BYTES,
) -> PathScaling:
    """Price the change on 1 and every number of ``node_counts(nodes)``. Pure; any process.

    A number of nodes is left out where it has more ranks than are planned for here, or a single one, or where its moves
    go over a kind of link that the profile did not measure.
    """
    cells: list[PathCell] = []
    measured = _Moves(Pricer(profile, profile.topology, executor), costs.ranks)
    for count in (1, *node_counts(nodes)):
        topology = Topology.grid(count, ranks_per_node, nic_per)
        if topology.world_size < 2 or (count > 3 and topology.world_size > _MOST_RANKS):
            continue
        moves = _Moves(Pricer(profile, topology, executor), topology.world_size)
        try:
            moves.price(min(sizes))
        except InputError:  # a kind of link that was not measured
            continue
        for size in sizes:
            prices = [
                costs.price(fit.path, fit.storage, fit.cache, size, topology.world_size, count)
                if fit.path != "in-memory"
                else _in_memory(costs, fit, size, moves, measured)
                for fit in costs.fits
                if _offered(fit, costs, count)
            ]
            best: dict[str, PathPrice] = {}
            for price in sorted(prices, key=lambda one: one.pause_s):
                best.setdefault(price.path, price)
            if best:
                cells.append(PathCell(count, size, tuple(best.values())))
    return PathScaling(ranks_per_node, executor, costs, tuple(cells))


def _offered(fit: PathFit, costs: PathCosts, nodes: int) -> bool:
    """Whether a path can be priced on so many nodes: a checkpoint must be one that all of them can read."""
    if fit.path == "gather":
        return nodes == costs.nodes
    return nodes == 1 or (fit.filesystem not in _ONE_NODE and fit.cache != "warm")


class _Moves:
    """Prices of moving a ZeRO-3 state from the first ``ranks`` of a topology to the first half of those."""

    def __init__(self, pricer: Pricer, ranks: int) -> None:
        self.pricer, self.ranks = pricer, ranks
        topology = pricer.topology
        numel = _PLANNED_BYTES // 4 // _TENSORS
        specs = {name: TensorSpec(name, (numel,), "float32") for name in map(str, range(_TENSORS))}
        source, half = (
            zero3_layout(specs, tuple(range(count)), topology.world_size, name=name)
            for name, count in (("all", ranks), ("half", max(1, ranks // 2)))
        )
        plan = plan_move(source, half, topology)
        arriving = _PLANNED_BYTES // max(1, ranks // 2)  # at each rank that holds the state afterwards
        codes = block_groups(plan, topology).uniform(DIRECT)
        self._loads = build_schedule(plan, topology, codes, -(-arriving // _BUCKETS)).loads(pricer.executor)

    def price(self, size: int) -> Price:
        """The price of a state of ``size`` bytes. Raises InputError where a kind of link was not measured."""
        return self.pricer.price(_scaled(self._loads, size / _PLANNED_BYTES))


def _in_memory(costs: PathCosts, fit: PathFit, size: int, moves: _Moves, measured: _Moves) -> PathPrice:
    """The price in memory: the exchange by the network model, what the measured move took beyond that, the rest by
    lines."""
    topology = moves.pricer.topology
    line = costs.price(fit.path, fit.storage, fit.cache, size, topology.world_size, topology.nodes)
    network = moves.price(size)
    beyond = max(0.0, line.phases["move"] - measured.price(size).total_s) * costs.ranks / topology.world_size
    return costs.price_of(
        fit,
        {**line.phases, "move": network.total_s + beyond},
        size,
        extrapolated=line.extrapolated or network.extrapolated or topology != moves.pricer.profile.topology,
        network_spread=max(moves.pricer.spread, costs.spread_of(fit.path)),
    )


def _scaled(loads: RoundLoads, factor: float) -> RoundLoads:
    """The same messages and copies with ``factor`` times the bytes."""

    def times(column: IntArray) -> IntArray:
        found: IntArray = np.rint(column * factor).astype(np.int64)
        return found

    return replace(
        loads, bytes=times(loads.bytes), pack_bytes=times(loads.pack_bytes), unpack_bytes=times(loads.unpack_bytes)
    )
