"""A class of tensors planned once: the copies that move one of them, grouped by what one holder sends to one node.

``group_rows(rows, ...)`` makes a ``ClassPlan`` of the ``Rows`` that a planner chose; ``label_names`` names a class.
Pure NumPy; every rank gets the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.geometry import split_boxes, sum_by
from relaymeter.relayout.holders import mix
from relaymeter.relayout.topology import Topology

__all__ = ["ClassPlan", "Rows", "group_rows", "label_names", "occurrences"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """The copies that move one tensor, each from one holder to one destination rank (n).

    src_rank, dst_rank; src_space: whose storage is read, see ``segments``; lo, shape (n, nd): the region in the logical
    tensor, or in the flattened one (nd = 1 whatever the tensor's dims) where all its pieces are runs of that;
    src_offset, src_stride (n, nd), dst_offset, dst_stride (n, nd): the region in the two storages, in elements.
    """

    src_rank: IntArray
    dst_rank: IntArray
    src_space: IntArray
    lo: IntArray
    shape: IntArray
    src_offset: IntArray
    src_stride: IntArray
    dst_offset: IntArray
    dst_stride: IntArray

    def __len__(self) -> int:
        return len(self.src_rank)


@dataclass(frozen=True, eq=False)
class ClassPlan:
    """The direct plan of one class: segments (n) grouped by what one holder sends to the ranks of one node.

    Segment columns as in ``Rows``. A *group* is all that one holder sends to the same ``fanout`` ranks of one node; its
    segments stand together, destination rank by destination rank (ascending), each with ``segments`` segments in the
    same order. Group columns (g): group (its id in the class), group_src, group_node, fanout, segments, start (first
    segment), elements (of the regions, once). ``load`` (2 * world) estimates the bytes that one tensor of the class
    makes each rank send, then receive, where the plan holds only one rank's rows; else None.
    """

    tensors: IntArray
    itemsize: int
    src_rank: IntArray
    dst_rank: IntArray
    src_space: IntArray
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
    load: NDArray[np.float64] | None = None

    @cached_property
    def group_of_segment(self) -> IntArray:
        """Row of the group columns that each segment belongs to (n)."""
        return np.repeat(np.arange(len(self.group)), self.fanout * self.segments)

    def members(self, row: int) -> IntArray:
        """Destination ranks of a group, ascending."""
        begin = int(self.start[row])
        return self.dst_rank[begin + np.arange(int(self.fanout[row])) * int(self.segments[row])]

    def only(self, rows: IntArray) -> ClassPlan:
        """The plan of these groups alone (ascending), numbered anew."""
        keep = np.isin(self.group_of_segment, rows)
        count = (self.fanout * self.segments)[rows]
        return replace(
            self,
            **{column.name: getattr(self, column.name)[keep] for column in fields(Rows)},
            group=np.arange(len(rows), dtype=np.int64),
            group_src=self.group_src[rows],
            group_node=self.group_node[rows],
            fanout=self.fanout[rows],
            segments=self.segments[rows],
            start=np.cumsum(count) - count,
            elements=self.elements[rows],
        )

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
        total = sum_by(self.group_of_segment[keep], numel, len(self.group))[rows]
        return ClassPlan(
            tensors=self.tensors,
            itemsize=self.itemsize,
            src_rank=self.src_rank[keep],
            dst_rank=self.dst_rank[keep],
            src_space=self.src_space[keep],
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
            elements=total // self.fanout[rows],
            load=None if self.load is None else self.load / parts,
        )


def occurrences(rows: IntArray) -> IntArray:
    """How many equal rows (n, c) stand directly before each."""
    fresh = np.ones(len(rows), dtype=bool)
    fresh[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    head = np.flatnonzero(fresh)
    return np.arange(len(rows)) - np.repeat(head, np.diff(np.append(head, len(rows))))


def group_rows(
    tensors: Sequence[int],
    itemsize: int,
    rows: Rows,
    steps: IntArray,
    topology: Topology,
    load: NDArray[np.float64] | None = None,
) -> ClassPlan:
    """The plan of the tensors numbered ``tensors`` out of the rows of one of them.

    ``steps`` (nd) are the strides that put regions in order. Group ids follow from what a group is, so that two ranks
    that see different rows of the class order those they share alike.
    """
    count = len(rows)
    numel = np.prod(rows.shape, axis=1, dtype=np.int64)
    home = topology.node_array[rows.dst_rank]
    flat = rows.lo @ steps if len(steps) else np.zeros(count, dtype=np.int64)
    word = mix(rows.lo, rows.shape, rows.src_space)
    order = np.lexsort((rows.dst_offset, rows.dst_rank, word, home, rows.src_rank))
    again = occurrences(np.column_stack([rows.src_rank, home, word.view(np.int64), rows.dst_rank])[order])
    if again.any():  # a rank that needs a region twice is twice a member, once in each of two groups
        word[order] = mix(word[order].view(np.int64), again)
        order = np.lexsort((rows.dst_rank, word, home, rows.src_rank))
    src, node, words = rows.src_rank[order], home[order], word[order]
    fresh = np.ones(count, dtype=bool)
    fresh[1:] = (src[1:] != src[:-1]) | (node[1:] != node[:-1]) | (words[1:] != words[:-1])
    head = np.flatnonzero(fresh)
    fanout = np.diff(np.append(head, count))
    sets = np.add.reduceat(mix(rows.dst_rank[order]), head) if count else word
    by_group = np.lexsort((sets, node[head], src[head]))
    src_of, node_of, set_of = src[head][by_group], node[head][by_group], sets[by_group]
    edge = np.ones(len(head), dtype=bool)
    edge[1:] = (src_of[1:] != src_of[:-1]) | (node_of[1:] != node_of[:-1]) | (set_of[1:] != set_of[:-1])
    group_of_run = np.zeros(len(head), dtype=np.int64)
    group_of_run[by_group] = np.cumsum(edge) - 1
    group = np.zeros(count, dtype=np.int64)
    group[order] = np.repeat(group_of_run, fanout)
    final = np.lexsort((word, flat, rows.dst_rank, group))
    first = by_group[edge]
    members = fanout[first]
    total = sum_by(group, numel, len(first))
    sizes = np.bincount(group, minlength=len(first))
    return ClassPlan(
        tensors=np.asarray(tensors, dtype=np.int64),
        itemsize=itemsize,
        src_rank=rows.src_rank[final],
        dst_rank=rows.dst_rank[final],
        src_space=rows.src_space[final],
        lo=rows.lo[final],
        shape=rows.shape[final],
        src_offset=rows.src_offset[final],
        src_stride=rows.src_stride[final],
        dst_offset=rows.dst_offset[final],
        dst_stride=rows.dst_stride[final],
        group=np.arange(len(first), dtype=np.int64),
        group_src=src[head][first],
        group_node=node[head][first],
        fanout=members,
        segments=sizes // np.maximum(members, 1),
        start=np.cumsum(sizes) - sizes,
        elements=total // np.maximum(members, 1),
        load=load,
    )


def label_names(names: Sequence[str]) -> str:
    """Names of alike tensors in one line, layer numbers as ``*``: ``layers.*.mlp.{gate_proj, up_proj}.weight``."""
    return ", ".join(_fold(list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))))


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
