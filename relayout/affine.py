"""The other planner: the same moves planned by DeepSpeed's ``plan_transfer``, tensor class by tensor class.

``plan_move_affine(source, destination, topology)`` gives a plan like ``planner.plan_move``. What ``plan_transfer`` does
not express is planned by ours, and the plan's ``fallbacks`` say of which tensors and why. Needs the optional extra
``deepspeed``; ``to_affine_map`` and ``from_affine_map`` exchange placements with DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import LayoutError
from relaymeter.relayout.affine_maps import (
    Shards,
    cut_evenly,
    find_shards,
    from_affine_map,
    import_affine,
    make_map,
    to_affine_map,
)
from relaymeter.relayout.geometry import intersect
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.pieces import Pieces, flatten, merge, split_at_neighbours
from relaymeter.relayout.planner import MovePlan, Rows, plan_move, plan_rows
from relaymeter.relayout.topology import Topology

__all__ = ["LIMITS", "affine_rows", "from_affine_map", "load_planner", "plan_move_affine", "to_affine_map"]

IntArray = NDArray[np.int64]

#: Why ``plan_transfer`` cannot plan a tensor, by a short name. A budget of its own that it runs into comes on top.
LIMITS: Mapping[str, str] = {
    "uneven holders": "its holders cut it differently; plan_transfer wants every holder of an element to hold one box",
    "partial source": "the sources leave elements of it out; plan_transfer wants sources that hold the whole tensor",
    "partial destination": "the destination leaves elements of it out; plan_transfer wants one that holds the whole "
    "tensor",
    "held twice": "a rank holds an element of it twice; plan_transfer wants every element at most once on a rank",
    "ragged range": "a rank holds a flat range of it that begins or ends inside a row, where the other side is cut in "
    "boxes; plan_transfer takes boxes only",
    "padding": "a rank's storage of it has unused elements inside; plan_transfer wants pieces that fill their shard",
    "strides": "a rank's storage of it is not row-major; plan_transfer takes row-major shards only",
    "several boxes": "a rank stores several boxes of it that form no row-major tensor; plan_transfer takes one shard a "
    "rank",
}


def load_planner() -> None:
    """Import DeepSpeed's planner, which the first plan does otherwise. Raises InputError where it is missing."""
    for name in ("affine", "affine_transfer"):
        import_affine(name, alone=True)


def plan_move_affine(
    source: Layout | Sequence[Layout],
    destination: Layout,
    topology: Topology,
    *,
    cast: Mapping[str, str] | None = None,
) -> MovePlan:
    """``planner.plan_move`` with ``plan_transfer`` as the planner of every tensor class that it can express.

    Raises InputError without DeepSpeed, LayoutError as ``plan_move``. The same on every rank.
    """
    import_affine("affine_transfer", alone=True)
    return plan_move(source, destination, topology, cast=cast, planner="affine", rows_of=affine_rows)


def affine_rows(
    spec: TensorSpec, sources: tuple[Placement, ...], destination: Placement, topology: Topology
) -> tuple[Rows, str]:
    """Rows of one tensor class by ``plan_transfer``, or by ours and the sentence that says why (a ``RowsOf``).

    Where all pieces are ranges of the flattened tensor the tensor is planned as one dim, else in its own dims. Several
    holders are preferred in the order: the destination rank itself, its node, the order of the sources, the least
    loaded; ranks of one node get a region of another node from one holder. Raises InputError without DeepSpeed.
    """
    src = merge(sources)
    dst = replace(merge((destination,)), layout=destination.copies)
    if not len(dst):
        return plan_rows(spec, sources, destination, topology)[0], ""
    flat_src, flat_dst = flatten(src, spec.shape), flatten(dst, spec.shape)
    logical: tuple[int, ...] = spec.shape
    if flat_src is not None and flat_dst is not None:
        src, dst, logical = flat_src, flat_dst, (spec.numel,)
    targets = _targets(split_at_neighbours(dst, topology.node_array))
    keys = src.layout * topology.world_size + src.rank
    shards = find_shards(keys, src)
    aims = [(target, find_shards(target.rank, target)) for target in targets]
    limit = _limit(logical, [(keys, src, shards), *((t.rank, t, s) for t, s in aims)])
    if limit:
        reason = LIMITS[limit]
    else:
        rows, reason = _transfer(spec, logical, keys, src, shards, aims, topology)
        if rows is not None:
            return rows, ""
    return plan_rows(spec, sources, destination, topology)[0], reason


def _targets(dst: Pieces) -> list[Pieces]:
    """The destination as one target; as one for each of its copies (``layout``) where these are cut differently."""
    copies = np.unique(dst.layout)
    if len(copies) < 2 or (cut_evenly(dst) and not _held_twice(dst.rank, dst)):
        return [dst]
    return [dst.take(dst.layout == copy) for copy in copies.tolist()]


def _boxes(pieces: Pieces) -> IntArray:
    return np.column_stack([pieces.lo, pieces.shape])


def _held_twice(keys: IntArray, pieces: Pieces) -> bool:
    rows = np.column_stack([keys, _boxes(pieces)])
    return len(np.unique(rows, axis=0)) < len(rows)


def _held(pieces: Pieces) -> int:
    """Elements of evenly cut pieces, each counted once."""
    dims = pieces.lo.shape[1]
    return int(np.prod(np.unique(_boxes(pieces), axis=0)[:, dims:], axis=1, dtype=np.int64).sum())


def _limit(logical: Sequence[int], sides: Sequence[tuple[IntArray, Pieces, Shards]]) -> str:
    """The name of the limit of ``plan_transfer`` that a move passes (a key of ``LIMITS``), or ""."""
    for number, (holders, pieces, _) in enumerate(sides):
        if not cut_evenly(pieces):
            return "uneven holders"
        if _held_twice(holders, pieces):
            return "held twice"
        if _held(pieces) != math.prod(logical):
            return "partial destination" if number else "partial source"
    for _, pieces, shards in sides:
        if not shards.fits.all():
            return _why_no_shard(pieces.take(shards.holder == int(shards.fits.argmin())), logical)
    return ""


def _why_no_shard(mine: Pieces, logical: Sequence[int]) -> str:
    """Which limit keeps the pieces of one holder from filling a row-major shard."""
    wide = mine.shape > 1
    outer = np.minimum.accumulate(np.where(wide, mine.stride, np.iinfo(np.int64).max), axis=1)[:, :-1]
    if (outer < np.where(wide, mine.stride, 0)[:, 1:]).any():
        return "strides"
    last = mine.offset + ((mine.shape - 1) * mine.stride).sum(axis=1)
    if int(last.max()) + 1 - int(mine.offset.min()) != int(mine.numel.sum()):
        return "padding"
    return "several boxes" if flatten(mine, logical) is None else "ragged range"


class _Selector:
    """Which holder serves a region: called by ``plan_transfer`` with the candidates, gives the key of one."""

    def __init__(self, topology: Topology) -> None:
        self.node = topology.node
        self.world = topology.world_size
        self.load = [0] * topology.world_size
        self.agreed: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}

    def __call__(self, request: Any) -> int:
        there = request.target_rank
        home = self.node[there]
        keys = [candidate.source_rank for candidate in request.candidates]
        levels = [self._level(key, there) for key in keys]
        best = min(levels)
        equal = [key for key, level in zip(keys, levels, strict=True) if level == best]
        region = (home, request.logical_origin, request.shape)
        far = best[0] == 2
        if far and region in self.agreed:
            chosen = self.agreed[region]
        else:
            chosen = min(equal, key=lambda key: (self.load[key % self.world], (key - there) % self.world))
        if far:
            self.agreed[region] = chosen
        count = 1
        for size in request.shape:
            count *= size
        self.load[chosen % self.world] += 0 if best[0] == 0 else count
        return int(chosen)

    def _level(self, key: int, there: int) -> tuple[int, int]:
        layout, here = divmod(key, self.world)
        return 0 if here == there else 1 if self.node[here] == self.node[there] else 2, layout


def _transfer(
    spec: TensorSpec,
    logical: tuple[int, ...],
    keys: IntArray,
    src: Pieces,
    shards: Shards,
    aims: Sequence[tuple[Pieces, Shards]],
    topology: Topology,
) -> tuple[Rows | None, str]:
    """Rows of all targets by ``plan_transfer``; or None and why it stopped."""
    affine = import_affine("affine", alone=True)
    transfer = import_affine("affine_transfer", alone=True)
    have = _map(affine, logical, keys, src, shards)
    selector = _Selector(topology)
    limits = transfer.PlanBudget(max_merge_passes=0)  # merged segments may run over the border of a piece, or of a row
    found: list[Rows] = []
    for target, aim in aims:
        wanted = _map(affine, logical, target.rank, target, aim)
        try:
            plan = transfer.plan_transfer(wanted, have, limits, replica_selector=selector)
        except transfer.AffineTransferError as error:
            if isinstance(error, transfer.UnsupportedLayoutError):
                return None, f"plan_transfer does not express it: {error}"
            if type(error) is transfer.AffineTransferError:
                return None, f"it passes a budget of plan_transfer: {error}"
            raise LayoutError(f"tensor {spec.name} {list(spec.shape)}: plan_transfer refuses it: {error}") from error
        found.append(_rows(plan.segments, src, shards, target, aim, topology.world_size))
    return Rows(*(np.concatenate([getattr(rows, name) for rows in found]) for name in Rows.__dataclass_fields__)), ""


def _map(affine: ModuleType, logical: Sequence[int], keys: IntArray, pieces: Pieces, shards: Shards) -> Any:
    """The map of pieces over their shards: every holder's storage counted from its first used element."""
    inside = replace(pieces, offset=pieces.offset - shards.base[shards.holder], stride=shards.stride[shards.holder])
    shapes = dict(zip(shards.keys.tolist(), shards.shape.tolist(), strict=True))
    return make_map(affine, logical, keys, inside, shapes)


def _coordinates(offset: IntArray, stride: IntArray) -> IntArray:
    """Coordinates (n, nd) of storage offsets (n) in row-major tensors of strides (n, nd)."""
    found = np.zeros_like(stride)
    for axis in range(stride.shape[1]):
        found[:, axis], offset = offset // stride[:, axis], offset % stride[:, axis]
    return found


def _rows(segments: Sequence[Any], src: Pieces, shards: Shards, target: Pieces, aim: Shards, world: int) -> Rows:
    """The unmerged segments of a transfer plan as rows. A segment says where it lies in two shards and not where in the
    tensor: that follows from the target's piece in which it lies."""
    dims = target.lo.shape[1]
    table = np.asarray(
        [(s.source_rank, s.source_offset, s.target_rank, s.target_offset, *s.shape) for s in segments], dtype=np.int64
    ).reshape(len(segments), 4 + dims)
    giver, taker, shape = (
        np.searchsorted(shards.keys, table[:, 0]),
        np.searchsorted(aim.keys, table[:, 2]),
        table[:, 4:],
    )
    begin = _coordinates(table[:, 3], aim.stride[taker])
    piece_begin = _coordinates(target.offset - aim.base[aim.holder], aim.stride[aim.holder])
    row, piece, _, _ = intersect(
        np.column_stack([taker, begin]),
        np.column_stack([np.ones_like(taker), shape]),
        np.column_stack([aim.holder, piece_begin]),
        np.column_stack([np.ones_like(aim.holder), target.shape]),
    )
    lo = target.lo[piece] + begin[row] - piece_begin[piece]
    first = np.zeros(len(shards.keys), dtype=np.int64)
    first[shards.holder] = np.arange(len(src))
    return Rows(
        src_rank=shards.keys[giver] % world,
        dst_rank=target.rank[piece],
        src_space=src.space[first[giver]],
        lo=lo,
        shape=shape,
        src_offset=shards.base[giver] + table[:, 1],
        src_stride=shards.stride[giver],
        dst_offset=target.address(piece, lo),
        dst_stride=target.stride[piece],
    )
