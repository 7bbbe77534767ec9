"""Planner: two layouts of the same tensors -> the segments that carry one into the other.

``plan_move(source, destination, topology)`` plans once per *class* (tensors of equal shape, dtype and placements) and
keeps the class with the list of its tensors; a class's offsets count from each tensor's own storage, so instantiating
it for another tensor changes nothing but the tensor's index. Pure NumPy; every rank gets the same plan.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import LayoutError
from relaymeter.relayout.geometry import intersect, row_major_strides, split_boxes
from relaymeter.relayout.layout import IntArray, Layout, Placement, TensorSpec
from relaymeter.relayout.topology import Topology

__all__ = ["ClassPlan", "MovePlan", "plan_move"]


@dataclass(frozen=True, eq=False)
class ClassPlan:
    """The direct plan of one class: segments (n) grouped by what one holder sends to the ranks of one node.

    Segment columns: src_rank, dst_rank (n); lo, shape (n, nd): the region in the logical tensor; src_offset,
    src_stride, dst_offset, dst_stride: the same region in the two storages. A *group* is one region list that one
    holder sends to ``fanout`` ranks of one node; its segments stand together, destination rank by destination rank
    (ascending), each with ``segments`` segments in the same order. Group columns (g): group (its id in the class), src,
    node, fanout, segments, start (first segment), elements (of the region list, once), region (two hash words of it).
    """

    tensors: IntArray
    itemsize: int
    src_rank: IntArray
    dst_rank: IntArray
    lo: IntArray
    shape: IntArray
    src_offset: IntArray
    src_stride: IntArray
    dst_offset: IntArray
    dst_stride: IntArray
    group: IntArray
    group_src: IntArray
    group_node: IntArray
    fanout: IntArray
    segments: IntArray
    start: IntArray
    elements: IntArray
    region: NDArray[np.uint64]

    @cached_property
    def group_of_segment(self) -> IntArray:
        """Row of the group columns that each segment belongs to (n)."""
        return np.repeat(np.arange(len(self.group)), self.fanout * self.segments)

    def members(self, row: int) -> IntArray:
        """Destination ranks of a group, ascending."""
        begin = int(self.start[row])
        return self.dst_rank[begin + np.arange(int(self.fanout[row])) * int(self.segments[row])]

    def cut(self, parts: int, part: int) -> ClassPlan:
        """The plan of band ``part`` of every region cut in ``parts``; groups that have nothing in it are left out."""
        if parts == 1:
            return self
        begin, size = split_boxes(self.shape, parts, part)
        keep = (size > 0).all(axis=1)
        count = np.bincount(self.group_of_segment[keep], minlength=len(self.group))
        rows = np.flatnonzero(count)
        segments = count[rows] // self.fanout[rows]
        start = np.concatenate([[0], np.cumsum(count[rows])[:-1]]).astype(np.int64)
        numel = np.prod(size[keep], axis=1, dtype=np.int64)
        total = np.bincount(self.group_of_segment[keep], weights=numel, minlength=len(self.group))[rows]
        return ClassPlan(
            tensors=self.tensors,
            itemsize=self.itemsize,
            src_rank=self.src_rank[keep],
            dst_rank=self.dst_rank[keep],
            lo=(self.lo + begin)[keep],
            shape=size[keep],
            src_offset=(self.src_offset + (begin * self.src_stride).sum(axis=1))[keep],
            src_stride=self.src_stride[keep],
            dst_offset=(self.dst_offset + (begin * self.dst_stride).sum(axis=1))[keep],
            dst_stride=self.dst_stride[keep],
            group=self.group[rows],
            group_src=self.group_src[rows],
            group_node=self.group_node[rows],
            fanout=self.fanout[rows],
            segments=segments,
            start=start,
            elements=(total / self.fanout[rows]).astype(np.int64),
            region=self.region[rows],
        )


@dataclass(frozen=True, eq=False)
class MovePlan:
    """A whole move, planned direct: the tensors in order, their classes, and the hash of what was planned from."""

    tensors: tuple[TensorSpec, ...]
    classes: tuple[ClassPlan, ...]
    topology: Topology
    input_hash: bytes

    @cached_property
    def group_start(self) -> IntArray:
        """First global group id of each class, and the total last (classes + 1)."""
        return np.concatenate([[0], np.cumsum([len(c.group) for c in self.classes])]).astype(np.int64)

    def label(self, index: int) -> str:
        """Names of a class's tensors, layer numbers as ``*``: ``model.layers.*.mlp.{gate_proj, up_proj}.weight``."""
        names = (re.sub(r"\.\d+(?=\.)", ".*", self.tensors[int(t)].name) for t in self.classes[index].tensors)
        return ", ".join(_fold(list(dict.fromkeys(names))))


def _fold(names: list[str]) -> list[str]:
    """Names that differ in one dotted part only are written as one, with the differing parts in braces."""
    folded: dict[tuple[int, tuple[str, ...], int], list[str]] = {}
    for name in names:
        parts = name.split(".")
        homes = [(len(parts), (*parts[:at], *parts[at + 1 :]), at) for at in range(len(parts))]
        home = next((h for h in homes if h in folded), None) or max(
            homes, key=lambda h: sum(h[1] == (*p[: h[2]], *p[h[2] + 1 :]) for p in (n.split(".") for n in names))
        )
        folded.setdefault(home, []).append(parts[home[2]])
    return [
        ".".join([*rest[:at], found[0] if len(found) == 1 else "{" + ", ".join(found) + "}", *rest[at:]])
        for (_, rest, at), found in folded.items()
    ]


def plan_move(source: Layout, destination: Layout, topology: Topology) -> MovePlan:
    """Plan the move of every tensor of ``destination`` out of ``source``.

    Holders are preferred in this order: the destination rank itself, its node, then by turns. Raises LayoutError where
    the layouts contradict each other or a region has no holder, naming the tensor. Pure; the same on every rank.
    """
    if source.world_size != destination.world_size or source.world_size != topology.world_size:
        raise LayoutError(
            f"layouts and topology disagree on the world: source {source.world_size}, destination "
            f"{destination.world_size}, topology {topology.world_size} ranks"
        )
    source.check()
    digest = hashlib.sha256(repr((source.world_size, topology.node, topology.nic)).encode())
    tensors = tuple(destination.specs.values())
    classes: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(tensors):
        have = source.specs.get(spec.name)
        if have is None:
            raise LayoutError(f"tensor {spec.name} is in layout {destination.name} but not in layout {source.name}")
        if have.shape != spec.shape or have.dtype != spec.dtype:
            raise LayoutError(
                f"tensor {spec.name}: {source.name} has {have.dtype} {list(have.shape)}, {destination.name} has "
                f"{spec.dtype} {list(spec.shape)}"
            )
        one, two = source.placements[spec.name], destination.placements[spec.name]
        digest.update(repr((spec.name, spec.shape, spec.dtype)).encode() + one.signature + two.signature)
        classes.setdefault((spec.shape, spec.dtype, one.signature, two.signature), []).append(index)
    plans = tuple(
        _plan_class(tensors, rows, source.placements, destination.placements, topology) for rows in classes.values()
    )
    return MovePlan(tensors, plans, topology, digest.digest())


def _plan_class(
    tensors: tuple[TensorSpec, ...],
    rows: list[int],
    source: Mapping[str, Placement],
    destination: Mapping[str, Placement],
    topology: Topology,
) -> ClassPlan:
    spec = tensors[rows[0]]
    src, dst = source[spec.name], destination[spec.name]
    ia, ib, lo, size = intersect(src.lo, src.shape, dst.lo, dst.shape)
    if len(src.covers) > 1:
        keep = _choose_holders(src.rank[ia], dst.rank[ib], ib, lo, size, topology)
        ia, ib, lo, size = ia[keep], ib[keep], lo[keep], size[keep]
    volume = np.bincount(ib, weights=np.prod(size, axis=1, dtype=np.int64), minlength=len(dst.rank))
    wanted = np.prod(dst.shape, axis=1, dtype=np.int64)
    if (volume != wanted).any():
        bad = int(np.flatnonzero(volume != wanted)[0])
        raise LayoutError(
            f"tensor {spec.name}: rank {int(dst.rank[bad])} needs {int(wanted[bad])} elements, the source offers "
            f"{int(volume[bad])}"
        )
    flat = lo @ np.asarray(row_major_strides(spec.shape), dtype=np.int64)
    src_rank, dst_rank = src.rank[ia], dst.rank[ib]
    order, columns, region = _group(src_rank, dst_rank, flat, lo, size, topology)
    ia, ib, lo, size = ia[order], ib[order], lo[order], size[order]
    return ClassPlan(
        tensors=np.asarray(rows, dtype=np.int64),
        itemsize=spec.itemsize,
        src_rank=src_rank[order],
        dst_rank=dst_rank[order],
        lo=lo,
        shape=size,
        src_offset=src.offset[ia] + ((lo - src.lo[ia]) * src.stride[ia]).sum(axis=1),
        src_stride=src.stride[ia],
        dst_offset=dst.offset[ib] + ((lo - dst.lo[ib]) * dst.stride[ib]).sum(axis=1),
        dst_stride=dst.stride[ib],
        group=columns[0],
        group_src=columns[1],
        group_node=columns[2],
        fanout=columns[3],
        segments=columns[4],
        start=columns[5],
        elements=columns[6],
        region=region,
    )


def _choose_holders(
    src_rank: IntArray, dst_rank: IntArray, piece: IntArray, lo: IntArray, size: IntArray, topology: Topology
) -> IntArray:
    """Of the hits that offer one region to one destination piece, the row of the preferred holder (ascending rows)."""
    node = topology.node_array
    distance = np.where(src_rank == dst_rank, 0, np.where(node[src_rank] == node[dst_rank], 1, 2))
    turn = (src_rank - dst_rank) % topology.world_size
    keys = [turn, distance, *size.T[::-1], *lo.T[::-1], piece]
    order = np.lexsort(keys)
    region = np.column_stack([piece, lo, size])[order]
    first = np.concatenate([[True], (region[1:] != region[:-1]).any(axis=1)])
    return np.sort(order[first])


_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)


def _region_words(rows: IntArray) -> NDArray[np.uint64]:
    """Two 64-bit hash words for each row of integers (n, c) -> (n, 2)."""
    words = np.broadcast_to(_MIX, (len(rows), 2)).copy()
    for column in rows.T.astype(np.uint64):
        words = (words ^ column[:, None]) * np.uint64(0xFF51AFD7ED558CCD) + _MIX
        words ^= words >> np.uint64(29)
    return words


def _group(
    src_rank: IntArray, dst_rank: IntArray, flat: IntArray, lo: IntArray, size: IntArray, topology: Topology
) -> tuple[IntArray, tuple[IntArray, ...], NDArray[np.uint64]]:
    """Order of the segments by (group, destination, flat position), the group columns of ClassPlan, and ``region``."""
    order = np.lexsort((flat, dst_rank, src_rank))
    src, dst = src_rank[order], dst_rank[order]
    edge = (
        np.flatnonzero(np.concatenate([[True], (src[1:] != src[:-1]) | (dst[1:] != dst[:-1])])) if len(src) else order
    )
    count = np.diff(np.append(edge, len(src)))
    words = _region_words(np.column_stack([lo, size]))[order]
    block_words = np.add.reduceat(words, edge, axis=0) if len(edge) else words
    node = topology.node_array[dst[edge]]
    numel = np.prod(size, axis=1, dtype=np.int64)[order]
    volume = np.add.reduceat(numel, edge) if len(edge) else numel
    key = np.column_stack([src[edge], node, count, volume, block_words.view(np.int64)])
    unique, group = np.unique(key, axis=0, return_inverse=True)
    group = group.reshape(-1)
    position = np.lexsort((dst[edge], group))
    lengths = count[position]
    begin = np.cumsum(lengths) - lengths
    inner = np.arange(len(src)) - np.repeat(begin, lengths)
    final = order[np.repeat(edge[position], lengths) + inner]
    fanout = np.bincount(group, minlength=len(unique)).astype(np.int64)
    sizes = fanout * unique[:, 2]
    start = (np.cumsum(sizes) - sizes).astype(np.int64)
    numbers = np.arange(len(unique), dtype=np.int64)
    columns = (numbers, unique[:, 0], unique[:, 1], fanout, unique[:, 2], start, unique[:, 3])
    return final, columns, np.ascontiguousarray(unique[:, 4:6]).view(np.uint64)
