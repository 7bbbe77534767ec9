"""Pieces of one tensor on one side of a move, as the planner works on them: layouts merged, flattened, cut to fit.

``merge(placements)`` puts the pieces of several source layouts into one table; ``flatten(pieces, shape)`` turns pieces
that are runs of the flattened tensor into one-dimensional ones; ``split_at_neighbours`` cuts overlapping destination
pieces of one node on each other's borders, so that what two ranks both need is one region. Pure NumPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.geometry import intersect, row_major_strides
from relaymeter.relayout.layout import Placement
from relaymeter.relayout.segments import source_space

__all__ = ["Pieces", "flatten", "merge", "split_at_neighbours"]

IntArray = NDArray[np.int64]
#: A piece is cut on its neighbours' borders into at most so many parts; beyond, it is left whole.
_MOST_CELLS = 256
_MOST_PASSES = 4


@dataclass(frozen=True, eq=False)
class Pieces:
    """``n`` pieces: rank, space (whose storage, see ``segments``), layout (position in the caller's order), lo and
    shape (n, nd) in the logical tensor, offset and stride (n, nd) in the storage."""

    rank: IntArray
    space: IntArray
    layout: IntArray
    lo: IntArray
    shape: IntArray
    offset: IntArray
    stride: IntArray

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Pieces:
        return Pieces(*(getattr(self, column.name)[rows] for column in fields(self)))

    @property
    def numel(self) -> IntArray:
        """Elements of each piece (n)."""
        total: IntArray = np.prod(self.shape, axis=1, dtype=np.int64)
        return total

    def address(self, rows: IntArray, lo: IntArray) -> IntArray:
        """Storage offset of the logical coordinate ``lo`` (m, nd) in piece ``rows`` (m)."""
        found: IntArray = self.offset[rows] + ((lo - self.lo[rows]) * self.stride[rows]).sum(axis=1)
        return found


def merge(placements: Sequence[Placement]) -> Pieces:
    """The pieces of ``placements`` (one per source layout, in the caller's order) in one table."""
    parts = []
    for number, place in enumerate(placements):
        ones = np.ones(len(place.rank), dtype=np.int64)
        columns = (place.rank, ones * source_space(number), ones * number, place.lo, place.shape, place.offset)
        parts.append((*columns, place.stride))
    return Pieces(*(np.concatenate([part[k] for part in parts]) for k in range(7)))


def flatten(pieces: Pieces, shape: Sequence[int]) -> Pieces | None:
    """The same pieces as ranges of the flattened tensor (nd = 1), neighbours joined; None where one is no such range.

    A piece qualifies when it is one run in row-major order, both in the tensor and in its storage.
    """
    dims = len(shape)
    steps = np.asarray(row_major_strides(shape), dtype=np.int64)
    if dims:
        full = np.asarray(shape, dtype=np.int64)
        wide = pieces.shape > 1
        first = np.where(wide.any(axis=1), wide.argmax(axis=1), dims)
        inner = np.arange(dims)[None, :] > first[:, None]
        if not ((pieces.shape == full) | ~inner).all() or not ((pieces.stride == steps) | ~wide).all():
            return None
    begin = pieces.lo @ steps if dims else np.zeros(len(pieces), dtype=np.int64)
    count = pieces.numel
    order = np.lexsort((begin, pieces.rank, pieces.layout))
    rank, layout, lo, size, at = (column[order] for column in (pieces.rank, pieces.layout, begin, count, pieces.offset))
    joins = np.zeros(len(order), dtype=bool)
    joins[1:] = (
        (rank[1:] == rank[:-1])
        & (layout[1:] == layout[:-1])
        & (lo[1:] == lo[:-1] + size[:-1])
        & (at[1:] == at[:-1] + size[:-1])
    )
    head = np.flatnonzero(~joins)
    total = np.add.reduceat(size, head) if len(head) else size
    return Pieces(
        rank=rank[head],
        space=pieces.space[order][head],
        layout=layout[head],
        lo=lo[head, None],
        shape=total[:, None],
        offset=at[head],
        stride=np.ones((len(head), 1), dtype=np.int64),
    )


def split_at_neighbours(pieces: Pieces, node: IntArray) -> Pieces:
    """Pieces cut on the borders of the unequal pieces of the same node (of each rank: ``node``) that overlap them.

    What the ranks of one node need in common then consists of equal regions, so that it can be fetched once. Parts may
    have new neighbours to be cut at: a few times over is enough for all but the most tangled pieces.
    """
    for _ in range(_MOST_PASSES):
        cut = _split_once(pieces, node)
        if len(cut) == len(pieces):
            break
        pieces = cut
    return pieces


def _split_once(pieces: Pieces, node: IntArray) -> Pieces:
    home = node[pieces.rank][:, None]
    boxes = np.column_stack([home, pieces.lo, pieces.shape])
    unique, which = np.unique(boxes, axis=0, return_inverse=True)
    which = which.reshape(-1)
    dims = pieces.lo.shape[1]
    if len(unique) < 2 or not dims:
        return pieces
    lo = unique[:, : dims + 1]
    size = np.column_stack([np.ones(len(unique), dtype=np.int64), unique[:, dims + 1 :]])
    one, two, _, _ = intersect(lo, size, lo, size)
    uneven = one != two
    if not uneven.any():
        return pieces
    cells: dict[int, list[tuple[list[int], list[int]]]] = {}
    for box in np.unique(one[uneven]).tolist():
        others = two[uneven & (one == box)]
        begin, end = lo[box, 1:], lo[box, 1:] + size[box, 1:]
        borders = []
        for axis in range(dims):
            cuts = np.concatenate([lo[others, axis + 1], lo[others, axis + 1] + size[others, axis + 1]])
            inside = cuts[(cuts > begin[axis]) & (cuts < end[axis])]
            borders.append(np.unique(np.concatenate([[begin[axis], end[axis]], inside])).tolist())
        if np.prod([len(b) - 1 for b in borders]) > _MOST_CELLS:
            continue
        corners = itertools.product(*(list(itertools.pairwise(b)) for b in borders))
        cells[box] = [([a for a, _ in cell], [b - a for a, b in cell]) for cell in corners]
    rows, new_lo, new_size = [], [], []
    for row, box in enumerate(which.tolist()):
        for begin_of, size_of in cells.get(box) or [(pieces.lo[row].tolist(), pieces.shape[row].tolist())]:
            rows.append(row)
            new_lo.append(begin_of)
            new_size.append(size_of)
    index = np.asarray(rows, dtype=np.int64)
    found = pieces.take(index)
    cut_lo = np.asarray(new_lo, dtype=np.int64).reshape(-1, dims)
    return Pieces(
        rank=found.rank,
        space=found.space,
        layout=found.layout,
        lo=cut_lo,
        shape=np.asarray(new_size, dtype=np.int64).reshape(-1, dims),
        offset=pieces.address(index, cut_lo),
        stride=found.stride,
    )
