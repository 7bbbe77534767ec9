"""Transfers: the segments of one route before tensor and round are known, and what a route has to say of itself.

A route is a subclass of ``Route`` in a file of its own (``route_direct.py`` is the shortest), entered in ``routes.py``.
It turns groups of blocks into transfers of stage 1, 2, ..., with ``TransferBuilder``; rounds, loads, prices and memory
follow from those. Pure NumPy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.classplan import ClassPlan
from relaymeter.relayout.geometry import merge_dims, split_boxes
from relaymeter.relayout.segments import FROM_DESTINATION

__all__ = ["BoolArray", "IntArray", "Route", "TransferBuilder", "Transfers", "regions", "regions_by_fanout"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Transfers:
    """Segments of one route for all groups of a plan class, before tensor and round are known.

    Columns (n): group (row in the class plan), hub (the member slot that must be the group's hub for the row to happen,
    -1 always), prior_group and prior_hub (the same of the group on the node that the row comes from; -1, -1: it comes
    from no hub of another group), stage, and the segment columns of SegmentTable with merged dims (n, k).
    """

    group: IntArray
    hub: IntArray
    prior_group: IntArray
    prior_hub: IntArray
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


class TransferBuilder:
    """Collects rows of raw dims and merges the dims once at the end."""

    def __init__(self, plan: ClassPlan) -> None:
        self.plan = plan
        self._rows: list[list[IntArray]] = []

    def add(
        self,
        group: IntArray,
        stage: IntArray | int,
        src: IntArray | None,
        dst: IntArray,
        *,
        hub: int = -1,
        band: tuple[int, int] = (1, 0),
        prior: tuple[IntArray, int] | None = None,
    ) -> None:
        """Rows (n) that read the source storage (``src`` None) or the destination storage of segment ``src`` (n).

        ``src`` and ``dst`` are segment indices of the same region for two members; ``band`` is (parts, part).
        ``hub``: the slot of the group's hub with which the rows happen, -1 whoever is. ``prior``: the groups (n) whose
        hub the rows come from, and its slot.
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
        before, before_hub = (-ones, -1) if prior is None else prior
        columns = [group, ones * hub, before, ones * before_hub, ones * stage, rank, plan.dst_rank[dst], space]
        keep = (size > 0).all(axis=1)
        self._rows.append([c[keep] for c in [*columns, offset, target, size, stride, plan.dst_stride[dst]]])

    def build(self) -> Transfers:
        dims = self.plan.shape.shape[1]
        if not self._rows:
            empty, wide = np.zeros(0, dtype=np.int64), np.zeros((0, dims), dtype=np.int64)
            self._rows.append([empty] * 10 + [wide] * 3)
        merged = [np.concatenate([row[k] for row in self._rows]) for k in range(13)]
        group, hub, prior_group, prior_hub, stage, src_rank, dst_rank, space, src_offset, dst_offset, *raw = merged
        shape, src_stride, dst_stride = merge_dims(*raw)
        return Transfers(
            group, hub, prior_group, prior_hub, stage, src_rank, dst_rank, space, src_offset, dst_offset, shape,
            src_stride, dst_stride,
        )  # fmt: skip


def regions_by_fanout(plan: ClassPlan, rows: BoolArray) -> Iterator[tuple[IntArray, IntArray]]:
    """The regions of the groups where ``rows`` (g) is true, those of one fanout at a time.

    Gives the group of each region (s), and its segment for each member (s, fanout).
    """
    for fanout in np.unique(plan.fanout[rows]).tolist():
        groups = np.flatnonzero(rows & (plan.fanout == fanout))
        group, base = regions(plan, groups)
        slots: IntArray = np.arange(fanout, dtype=np.int64)
        yield group, base[:, None] + slots[None, :] * plan.segments[group][:, None]


def regions(plan: ClassPlan, groups: IntArray) -> tuple[IntArray, IntArray]:
    """The group of each region of ``groups`` (rows of the plan), and its segment for the first member (s)."""
    each = plan.segments[groups]
    group = np.repeat(groups, each)
    inner = np.arange(len(group)) - np.repeat(np.cumsum(each) - each, each)
    return group, plan.start[group] + inner


class Route(ABC):
    """A way to bring groups of blocks to their ranks. Has no state; all of it follows from the plan.

    ``rows`` (g) are the groups of a plan class that travel so. ``turn`` counts variants of the route that spread the
    work (of a chain: the order of the nodes); the tensors of a bucket take them in turn.
    """

    name: str
    otherwise: str = "direct"
    """The route of groups that are sent this way where it has nothing of its own to offer them."""
    whole_plan: bool = False
    """It depends on what other nodes want, so that a rank cannot plan its own rows alone."""
    hubs: bool = False
    """The groups have hubs, which the schedule chooses."""

    @abstractmethod
    def applies(self, plan: ClassPlan, crosses: BoolArray, asked: BoolArray) -> BoolArray:
        """Which of the groups ``asked`` (g) it carries in a way of its own; ``crosses`` (g): from another node."""

    @abstractmethod
    def stages(self, plan: ClassPlan, rows: BoolArray, turn: int) -> int:
        """Stages, at most: how many rounds a bucket takes. At least one group travels so."""

    @abstractmethod
    def add(self, build: TransferBuilder, rows: BoolArray, turn: int) -> None:
        """Add the transfers of the groups ``rows``."""

    def turns(self, plan: ClassPlan, rows: BoolArray) -> int:
        """Variants of the route that the tensors of a bucket take in turn."""
        return 1

    def arrives(self, plan: ClassPlan, rows: BoolArray, turn: int) -> IntArray:
        """The stage (g) in which a group reaches its node, 1 for one that comes straight from the holder."""
        return np.ones(len(plan.group), dtype=np.int64)
