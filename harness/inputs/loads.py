"""Bytes that a move brings to and takes from every rank, from the two layouts alone: no plan, any number of ranks.

``rank_loads(source, destination, topology)``; ``segments_of(source, destination)`` says about how many copies a plan of
all ranks would hold. Classes of equal placements are looked at once. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.geometry import intersect
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.pieces import Pieces, flatten, merge
from relaymeter.relayout.topology import Topology

__all__ = ["RankLoads", "rank_loads", "segments_of"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankLoads:
    """Bytes by rank (world), moved direct: ``into`` place; of these from the rank itself, from its node, from other
    nodes; and what it sends to other nodes, where holders share evenly what is asked of them."""

    into: FloatArray
    in_rank: FloatArray
    in_node: FloatArray
    from_nodes: FloatArray
    to_nodes: FloatArray


def _classes(source: Layout, destination: Layout) -> Iterator[tuple[TensorSpec, int, Placement, Placement]]:
    """A tensor of each class, the tensors of the class, and its placements."""
    members: dict[tuple[object, ...], list[str]] = {}
    for name, spec in destination.specs.items():
        places = source.placements[name].signature, destination.placements[name].signature
        members.setdefault((spec.shape, spec.dtype, *places), []).append(name)
    for names in members.values():
        spec = destination.specs[names[0]]
        yield spec, len(names), source.placements[names[0]], destination.placements[names[0]]


def rank_loads(source: Layout, destination: Layout, topology: Topology) -> RankLoads:
    """The loads of all ranks. What arrives is exact; what leaves a rank is in proportion to what it holds."""
    world, node = topology.world_size, topology.node_array
    total = np.zeros((5, world))
    for spec, count, before, after in _classes(source, destination):
        src, dst = merge((before,)), merge((after,))
        flat_src, flat_dst = flatten(src, spec.shape), flatten(dst, spec.shape)
        if flat_src is not None and flat_dst is not None:
            src, dst = flat_src, flat_dst
        need = np.bincount(dst.rank, weights=dst.numel, minlength=world)
        in_rank = np.minimum(_at_hand(src, dst, np.arange(world), world), need)
        in_node = np.minimum(_at_hand(src, dst, node, world), need) - in_rank
        away = need - in_rank - in_node
        held = np.bincount(src.rank, weights=src.numel, minlength=world)
        sent = away.sum() * held / max(held.sum(), 1.0)
        total += np.stack([need, in_rank, in_node, away, sent]) * float(count * spec.itemsize)
    return RankLoads(*total)


def _at_hand(src: Pieces, dst: Pieces, home: IntArray, world: int) -> FloatArray:
    """Elements of each rank's pieces that its own ``home`` holds; boxes that several of a home hold count once."""
    here, there = home[src.rank], home[dst.rank]
    if not np.intersect1d(here, there).size:
        return np.zeros(world)
    dims = src.lo.shape[1]
    boxes = np.unique(np.column_stack([here, src.lo, src.shape]), axis=0)
    boxes = boxes[np.isin(boxes[:, 0], there)]
    one, two = np.ones((len(boxes), 1), dtype=np.int64), np.ones((len(dst), 1), dtype=np.int64)
    _, row, _, size = intersect(
        boxes[:, : 1 + dims],
        np.column_stack([one, boxes[:, 1 + dims :]]),
        np.column_stack([there, dst.lo]),
        np.column_stack([two, dst.shape]),
    )
    return np.bincount(dst.rank[row], weights=np.prod(size, axis=1, dtype=np.float64), minlength=world).astype(float)


def segments_of(source: Layout, destination: Layout) -> int:
    """About the copies that a plan of all ranks holds, over all tensors: what it costs in memory and time."""
    total = 0
    for spec, count, before, after in _classes(source, destination):
        src, dst = merge((before,)), merge((after,))
        boxes = np.unique(np.column_stack([src.lo, src.shape]), axis=0)
        runs = flatten(src, spec.shape) is not None and flatten(dst, spec.shape) is not None
        copies = max(1.0, float(dst.numel.sum()) / max(spec.numel, 1))
        each = len(dst) / copies
        total += int(count * copies * (len(boxes) + each if runs else len(boxes) * max(each, 1.0)))
    return total
