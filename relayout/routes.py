"""Routes: direct, relay and spread as stages of segments, and the groups of blocks among which they are chosen.

A group is what one holder sends to the same ``fanout`` destination ranks of one node. Each route turns a group into
transfers of stage one and two: *direct* sends it to each rank; *relay* sends it once, to a hub among them, which copies
it to the others; *spread* gives each of them a band and has them exchange the bands. A further route is one more
function in ``_ROUTE_TRANSFERS``; its price follows from its transfers. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.geometry import merge_dims, split_boxes
from relaymeter.relayout.planner import ClassPlan, MovePlan
from relaymeter.relayout.segments import FROM_DESTINATION
from relaymeter.relayout.topology import Topology

__all__ = ["DIRECT", "RELAY", "ROUTES", "SPREAD", "BlockClass", "BlockGroups", "Transfers", "block_groups", "transfers"]

IntArray = NDArray[np.int64]

ROUTES = ("direct", "relay", "spread")
DIRECT, RELAY, SPREAD = range(3)


@dataclass(frozen=True)
class BlockClass:
    """Blocks among which the choice is one: those of one plan class with equal elements and fanout.

    ``groups`` and ``bytes`` count all tensors of the class; ``bytes`` is what travels when each block is sent once.
    """

    label: str
    elements: int
    itemsize: int
    fanout: int
    tensors: int
    groups: int
    bytes: int
    has_choice: bool


@dataclass(frozen=True, eq=False)
class BlockGroups:
    """One row per group of one plan class; it stands for ``count`` groups, one in each tensor of the class.

    Columns (g): plan_class, src, node (of the destinations), elements (of the region), itemsize, fanout, segments,
    count, crosses (the holder is on another node), class_index into ``classes``. Only a group that crosses and has
    fanout >= 2 has a choice of route.
    """

    plan_class: IntArray
    src: IntArray
    node: IntArray
    elements: IntArray
    itemsize: IntArray
    fanout: IntArray
    segments: IntArray
    count: IntArray
    crosses: NDArray[np.bool_]
    class_index: IntArray
    classes: tuple[BlockClass, ...]

    def __len__(self) -> int:
        return len(self.src)

    @property
    def has_choice(self) -> NDArray[np.bool_]:
        return self.crosses & (self.fanout >= 2)

    def uniform(self, code: int) -> NDArray[np.int8]:
        """The route array that sends every group by ``code`` (those without a choice go direct whatever it says)."""
        return np.full(len(self), code, dtype=np.int8)

    def by_threshold(self, min_relay: int | None, min_split: int | None) -> NDArray[np.int8]:
        """The route array of two thresholds in elements of a block; None means never. Spread outranks relay."""
        route = self.uniform(DIRECT)
        if min_relay is not None:
            route[self.elements >= min_relay] = RELAY
        if min_split is not None:
            route[self.elements >= min_split] = SPREAD
        return route


def block_groups(plan: MovePlan, topology: Topology) -> BlockGroups:
    """The groups of a plan, class after class, in the order that ``build_schedule`` expects for its route array."""
    node = topology.node_array
    parts: list[list[NDArray[np.int64]]] = []
    for index, found in enumerate(plan.classes):
        ones = np.ones(len(found.group), dtype=np.int64)
        columns = [ones * index, found.group_src, found.group_node, found.elements, ones * found.itemsize]
        parts.append([*columns, found.fanout, found.segments, ones * len(found.tensors)])
    merged = [np.concatenate([p[k] for p in parts] or [np.zeros(0, np.int64)]) for k in range(8)]
    plan_class, src, home, elements, itemsize, fanout, segments, count = merged
    crosses = node[src] != home
    key = np.column_stack([plan_class, elements, fanout, crosses])
    unique, class_index = np.unique(key, axis=0, return_inverse=True)
    class_index = class_index.reshape(-1)
    classes = []
    for row, (which, size, ranks, far) in enumerate(unique.tolist()):
        found = plan.classes[which]
        groups = int((class_index == row).sum()) * len(found.tensors)
        classes.append(
            BlockClass(
                label=plan.label(which),
                elements=size,
                itemsize=found.itemsize,
                fanout=ranks,
                tensors=len(found.tensors),
                groups=groups,
                bytes=groups * size * found.itemsize,
                has_choice=bool(far) and ranks >= 2,
            )
        )
    return BlockGroups(
        plan_class, src, home, elements, itemsize, fanout, segments, count, crosses, class_index, tuple(classes)
    )


@dataclass(frozen=True, eq=False)
class Transfers:
    """Segments of one route for all groups of a plan class, before tensor and round are known.

    Columns (n): group (row in the class plan), hub (the member slot that must be the group's hub for the row to happen,
    -1 always), stage, and the segment columns of SegmentTable with merged dims (n, k).
    """

    group: IntArray
    hub: IntArray
    stage: IntArray
    src_rank: IntArray
    dst_rank: IntArray
    src_space: IntArray
    src_offset: IntArray
    dst_offset: IntArray
    shape: IntArray
    src_stride: IntArray
    dst_stride: IntArray

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Transfers:
        return Transfers(*(getattr(self, column.name)[rows] for column in fields(self)))


class _Builder:
    """Collects rows of raw dims and merges the dims once at the end."""

    def __init__(self, plan: ClassPlan) -> None:
        self.plan = plan
        self.rows: list[list[NDArray[np.int64]]] = []

    def add(
        self, group: IntArray, hub: int, stage: int, src: IntArray | None, dst: IntArray, band: tuple[int, int]
    ) -> None:
        """Rows that read the source storage (``src`` None) or the destination storage of segment ``src``.

        ``src`` and ``dst`` are segment indices of the same region for two members; ``band`` is (parts, part).
        """
        plan = self.plan
        begin, size = split_boxes(plan.shape[dst], *band)
        if src is None:
            rank, offset, stride = plan.src_rank[dst], plan.src_offset[dst], plan.src_stride[dst]
        else:
            rank, offset, stride = plan.dst_rank[src], plan.dst_offset[src], plan.dst_stride[src]
        offset = offset + (begin * stride).sum(axis=1)
        target = plan.dst_offset[dst] + (begin * plan.dst_stride[dst]).sum(axis=1)
        ones = np.ones(len(dst), dtype=np.int64)
        space = plan.src_space[dst] if src is None else ones * FROM_DESTINATION
        columns = [group, ones * hub, ones * stage, rank, plan.dst_rank[dst], space, offset, target]
        keep = (size > 0).all(axis=1)
        self.rows.append([c[keep] for c in [*columns, size, stride, plan.dst_stride[dst]]])

    def build(self) -> Transfers:
        dims = self.plan.shape.shape[1]
        if not self.rows:
            empty, wide = np.zeros(0, dtype=np.int64), np.zeros((0, dims), dtype=np.int64)
            self.rows.append([empty] * 8 + [wide] * 3)
        merged = [np.concatenate([row[k] for row in self.rows]) for k in range(11)]
        group, hub, stage, src_rank, dst_rank, space, src_offset, dst_offset, *raw = merged
        shape, src_stride, dst_stride = merge_dims(*raw)
        return Transfers(
            group, hub, stage, src_rank, dst_rank, space, src_offset, dst_offset, shape, src_stride, dst_stride
        )


def _by_fanout(plan: ClassPlan, fanout: int) -> tuple[IntArray, IntArray]:
    """For the groups of one fanout: group row per region (s) and segment index per region and member (s, fanout)."""
    rows = np.flatnonzero(plan.fanout == fanout)
    each = plan.segments[rows]
    group = np.repeat(rows, each)
    inner = np.arange(len(group)) - np.repeat(np.cumsum(each) - each, each)
    base = plan.start[group] + inner
    return group, base[:, None] + np.arange(fanout)[None, :] * plan.segments[group][:, None]


def _direct(build: _Builder, group: IntArray, index: IntArray) -> None:
    for slot in range(index.shape[1]):
        build.add(group, -1, 1, None, index[:, slot], (1, 0))


def _relay(build: _Builder, group: IntArray, index: IntArray) -> None:
    for hub in range(index.shape[1]):
        build.add(group, hub, 1, None, index[:, hub], (1, 0))
        for slot in range(index.shape[1]):
            if slot != hub:
                build.add(group, hub, 2, index[:, hub], index[:, slot], (1, 0))


def _spread(build: _Builder, group: IntArray, index: IntArray) -> None:
    ranks = index.shape[1]
    for band in range(ranks):
        build.add(group, -1, 1, None, index[:, band], (ranks, band))
        for slot in range(ranks):
            if slot != band:
                build.add(group, -1, 2, index[:, band], index[:, slot], (ranks, band))


_ROUTE_TRANSFERS: dict[int, Callable[[_Builder, IntArray, IntArray], None]] = {
    DIRECT: _direct,
    RELAY: _relay,
    SPREAD: _spread,
}


def transfers(plan: ClassPlan, code: int, rows: NDArray[np.bool_]) -> Transfers:
    """Transfers of route ``code`` for the groups where ``rows`` (g) is true."""
    build = _Builder(plan)
    for fanout in np.unique(plan.fanout[rows]).tolist():
        group, index = _by_fanout(plan, fanout)
        keep = rows[group]
        _ROUTE_TRANSFERS[code](build, group[keep], index[keep])
    return build.build()
