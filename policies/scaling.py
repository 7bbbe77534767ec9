"""Scaling: which route wins for which block size on how many nodes, by the prices of a profile. No torch import.

``find_scaling(profile, nodes, ranks_per_node, nic_per, executor, bucket_bytes=...)`` prices the same batch of equal
blocks on 2, 3, 4, 8, ... nodes by every route, whatever routes there are, through real schedules.

The batch: blocks held whole by the ranks of one node in turn, each wanted by every rank of every other node. On more
nodes than the profile was measured on every price is extrapolated; a winner whose lead lies inside the doubled error is
too close to call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.policies.price import Price, Pricer
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.placements import replicated_layout, zero3_layout
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.routes import ROUTES, block_groups
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.topology import Topology

__all__ = ["SCALING_BLOCK_BYTES", "Scaling", "ScalingCell", "find_scaling", "node_counts"]

#: Sizes of the blocks that are priced, in bytes.
SCALING_BLOCK_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25)
#: A batch is as many blocks of each holder as make so many bytes, within these limits, in about so many buckets: the
#: larger the bucket, the fewer schedules' rows, and a second stage is hidden all the same.
_BATCH_BYTES = 8 << 20
_FEWEST, _MOST, _BUCKETS = 8, 32, 8
#: Destination ranks beyond which a number of nodes is left out.
_MOST_RANKS = 1024


@dataclass(frozen=True)
class ScalingCell:
    """One block size on one number of nodes. prices: by route; one that would only repeat another is left out."""

    nodes: int
    block_bytes: int
    blocks: int
    prices: Mapping[str, Price]
    error: float
    """Share by which the fastest route has to lead: the error of the prices, doubled where they are extrapolated."""

    @property
    def ranked(self) -> tuple[str, ...]:
        """The routes, the fastest first."""
        return tuple(sorted(self.prices, key=lambda name: self.prices[name].total_s))

    @property
    def winner(self) -> str | None:
        """The fastest route; None where another is within the error: too close to call."""
        first, *others = self.ranked
        if others and self.prices[others[0]].total_s <= self.prices[first].total_s * (1 + self.error):
            return None
        return first

    @property
    def close(self) -> tuple[str, ...]:
        """The routes within the error of the fastest, itself included, the fastest first."""
        limit = self.prices[self.ranked[0]].total_s * (1 + self.error)
        return tuple(name for name in self.ranked if self.prices[name].total_s <= limit)

    def to_dict(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "block_bytes": self.block_bytes,
            "blocks": self.blocks,
            "winner": self.winner,
            "close": list(self.close),
            "error": self.error,
            "extrapolated": any(price.extrapolated for price in self.prices.values()),
            "prices": {
                name: {
                    "predicted_s": price.total_s,
                    "predicted_low_s": price.low_s,
                    "predicted_high_s": price.high_s,
                }
                for name, price in self.prices.items()
            },
        }


@dataclass(frozen=True)
class Scaling:
    """Cells by number of nodes and block size, ``ranks_per_node`` ranks on each."""

    ranks_per_node: int
    executor: str
    bucket_bytes: int
    measured_nodes: int
    cells: tuple[ScalingCell, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({cell.nodes for cell in self.cells}))

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return tuple(sorted({cell.block_bytes for cell in self.cells}))

    def cell(self, nodes: int, block_bytes: int) -> ScalingCell:
        return next(one for one in self.cells if (one.nodes, one.block_bytes) == (nodes, block_bytes))

    def wins_from(self, route: str) -> tuple[tuple[int, int], ...]:
        """From which (nodes, block bytes) on ``route`` wins in every cell of more nodes and larger blocks: the corners,
        the fewest nodes first. Empty where it does not win to the end."""
        return self._corners(lambda one: one.winner == route)

    def _corners(self, holds: Callable[[ScalingCell], bool]) -> tuple[tuple[int, int], ...]:
        corners: list[tuple[int, int]] = []
        for nodes in self.nodes:
            for size in self.block_bytes:
                if all(holds(one) for one in self.cells if one.nodes >= nodes and one.block_bytes >= size):
                    if not corners or size < corners[-1][1]:
                        corners.append((nodes, size))
                    break
        return tuple(corners)

    def loses_from(self, route: str) -> tuple[tuple[int, int], ...]:
        """From which (nodes, block bytes) on another route is faster than ``route`` by more than the error: as
        ``wins_from``."""
        return self._corners(lambda one: route not in one.close)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks_per_node": self.ranks_per_node,
            "executor": self.executor,
            "bucket_bytes": self.bucket_bytes,
            "measured_nodes": self.measured_nodes,
            "wins_from": {route: _corner_rows(self.wins_from(route)) for route in ROUTES},
            "loses_from": {route: _corner_rows(self.loses_from(route)) for route in ROUTES},
            "cells": [cell.to_dict() for cell in self.cells],
        }


def _corner_rows(corners: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
    return [{"nodes": nodes, "block_bytes": size} for nodes, size in corners]


def node_counts(most: int) -> tuple[int, ...]:
    """2, 3 and the powers of two up to ``most``, and ``most``."""
    return tuple(sorted({n for n in (2, 3, *(2**k for k in range(2, 17)), most) if 2 <= n <= most}))


def find_scaling(
    profile: Profile,
    nodes: int,
    ranks_per_node: int,
    nic_per: Literal["rank", "node"],
    executor: str,
    *,
    bucket_bytes: int,
    sizes: Sequence[int] = SCALING_BLOCK_BYTES,
) -> Scaling:
    """Price the batch on every number of ``node_counts(nodes)`` by every route. Pure; any process.

    Numbers of nodes whose schedules would be too large are left out, the largest first. Raises InputError on a single
    node, or where the profile lacks the executor or a kind of link.
    """
    if nodes < 2:
        raise InputError("scaling needs at least 2 nodes: one node has nothing to relay")
    cells: list[ScalingCell] = []
    for count in node_counts(nodes):
        if count > 3 and count * ranks_per_node > _MOST_RANKS:
            break
        topology = Topology.grid(count, ranks_per_node, nic_per)
        pricer = Pricer(profile, topology, executor)
        error = pricer.error * (1 if topology == profile.topology else 2)
        for size in sizes:
            each = min(max(_BATCH_BYTES // size, _FEWEST), _MOST)
            sent = each * size * (count - 1) * ranks_per_node
            bucket = max(bucket_bytes, -(-sent // _BUCKETS))
            prices = _prices(_batch(topology, size, each), topology, pricer, executor, bucket)
            cells.append(ScalingCell(count, size, each * ranks_per_node, prices, error))
    return Scaling(ranks_per_node, executor, bucket_bytes, profile.topology.nodes, tuple(cells))


def _batch(topology: Topology, size: int, each: int) -> MovePlan:
    """The plan of ``each`` blocks of ``size`` bytes of every rank of node 0, to all ranks of the other nodes."""
    givers = topology.ranks_of(0)
    names = [f"{k}" for k in range(each)]
    specs = {name: TensorSpec(name, (len(givers) * size // 2,), "bfloat16") for name in names}
    whole = [rank for rank in range(topology.world_size) if topology.node[rank] != 0]
    source = zero3_layout(specs, givers, topology.world_size)
    return plan_move(source, replicated_layout(specs, whole, topology.world_size), topology)


def _prices(plan: MovePlan, topology: Topology, pricer: Pricer, executor: str, bucket_bytes: int) -> dict[str, Price]:
    """The price of every route that would not only repeat another one."""
    groups = block_groups(plan, topology)
    schedules = {
        name: build_schedule(plan, topology, groups.uniform(ROUTES.index(name)), bucket_bytes)
        for name in groups.candidates
    }
    return {name: pricer.price(schedule.loads(executor)) for name, schedule in schedules.items()}
