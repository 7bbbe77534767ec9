"""Boxes, flat ranges and strides: pure integers and NumPy, no torch.

``flat_range_boxes((4, 6), 3, 15)`` cuts elements 3..14 of a flattened 4 x 6 tensor into boxes; ``intersect`` finds the
overlaps of two families of boxes by a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "boxes_overlap_volume",
    "flat_boxes",
    "flat_range_boxes",
    "intersect",
    "merge_dims",
    "row_major_strides",
    "shared_address",
    "split_axis",
    "split_boxes",
    "subtract_boxes",
    "sum_by",
    "union_volumes",
]

IntArray = NDArray[np.int64]
#: Pairs that one step of ``intersect`` expands at a time, which bounds its memory.
_PAIRS_AT_ONCE = 1 << 22
#: Bands of an extent of at least ``_ALIGNED_FROM`` per band begin on multiples of ``_BAND_ALIGN`` elements.
_BAND_ALIGN = 64
_ALIGNED_FROM = 4096


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor of ``shape``."""
    strides, step = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= int(shape[axis])
    return tuple(strides)


def flat_boxes(shape: Sequence[int], start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Ranges ``start`` .. ``stop - 1`` (m) of a flattened tensor as n boxes: (range (n), lo, shape (n, nd)).

    At most ``2 * nd - 1`` boxes a range, in ascending flat order. The ranges lie inside the tensor.
    """
    dims = len(shape)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(dims)]
    columns: list[tuple[IntArray, IntArray, int]] = []  # begin and end of a box in flat order, and the axis it spans
    here = start
    for axis in range(dims - 1, 0, -1):
        above, step = max(steps[axis - 1], 1), max(steps[axis], 1)
        end = np.maximum(np.minimum(-(-here // above) * above, stop // step * step), here)
        columns.append((here, end, axis))
        here = end
    for axis in range(dims):
        step = max(steps[axis], 1)
        end = np.maximum(stop // step * step, here)
        columns.append((here, end, axis))
        here = end
    if not dims:
        columns.append((start, stop, 0))
    begin = np.stack([column[0] for column in columns], axis=1)
    size = np.stack([column[1] for column in columns], axis=1) - begin
    row, which = np.nonzero(size)
    axis_of = np.asarray([column[2] for column in columns], dtype=np.int64)[which]
    first, count = begin[row, which], size[row, which]
    lo, box = np.empty((len(row), dims), dtype=np.int64), np.empty((len(row), dims), dtype=np.int64)
    for axis in range(dims):
        step, extent = max(steps[axis], 1), max(shape[axis], 1)
        lo[:, axis] = first // step % extent
        box[:, axis] = np.where(axis < axis_of, 1, np.where(axis == axis_of, count // step, extent))
    return row.astype(np.int64), lo, box


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[IntArray, IntArray]:
    """Elements ``start``..``stop - 1`` of the flattened tensor as at most ``2 * nd - 1`` boxes in ascending flat order.

    Returns (lo, shape), each (n, nd); an empty range gives n = 0. Raises ValueError outside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"flat range {start}..{stop} outside a tensor of shape {tuple(shape)}")
    _, lo, size = flat_boxes(shape, np.asarray([start], dtype=np.int64), np.asarray([stop], dtype=np.int64))
    return lo, size


def sum_by(index: IntArray, values: IntArray, length: int) -> IntArray:
    """Sums of whole numbers (n) by index, exact beyond 2^53; (length)."""
    total = np.zeros(length, dtype=np.int64)
    np.add.at(total, index, values)
    return total


def _candidates(lo_a: IntArray, hi_a: IntArray, lo_b: IntArray, hi_b: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """For intervals on one axis: b ordered by lo, and for each a the range [first, last) there that may overlap."""
    order = np.argsort(lo_b, kind="stable")
    reach = np.maximum.accumulate(hi_b[order]) if len(order) else hi_b
    first = np.searchsorted(reach, lo_a, side="right")
    last = np.searchsorted(lo_b[order], hi_a, side="left")
    return order, first, np.maximum(first, last)


def intersect(
    lo_a: IntArray, shape_a: IntArray, lo_b: IntArray, shape_b: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Every overlapping pair of a box of family a (n, nd) and one of family b (m, nd).

    Returns (index in a, index in b, lo, shape) of the overlaps, sorted by (a, b). A sweep along the axis that leaves
    the fewest candidates: never all pairs unless all overlap there.
    """
    dims = lo_a.shape[1]
    if dims == 0:
        pair = np.indices((len(lo_a), len(lo_b))).reshape(2, -1).astype(np.int64)
        empty = np.zeros((pair.shape[1], 0), dtype=np.int64)
        return pair[0], pair[1], empty, empty
    hi_a, hi_b = lo_a + shape_a, lo_b + shape_b
    best: tuple[IntArray, IntArray, IntArray] | None = None
    for axis in range(dims):
        found = _candidates(lo_a[:, axis], hi_a[:, axis], lo_b[:, axis], hi_b[:, axis])
        if best is None or (found[2] - found[1]).sum() < (best[2] - best[1]).sum():
            best = found
    if best is None:
        raise ValueError("no axis to sweep")
    order, first, last = best
    count = last - first
    ends = np.cumsum(count)
    parts: list[tuple[IntArray, IntArray]] = []
    begin = 0
    while begin < len(count):
        done = int(ends[begin - 1]) if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS_AT_ONCE, side="right")))
        ia = np.repeat(np.arange(begin, stop), count[begin:stop])
        step = np.arange(len(ia)) - np.repeat(ends[begin:stop] - count[begin:stop] - done, count[begin:stop])
        ib = order[first[ia] + step]
        keep = ((lo_a[ia] < hi_b[ib]) & (lo_b[ib] < hi_a[ia])).all(axis=1)
        parts.append((ia[keep], ib[keep]))
        begin = stop
    ia = np.concatenate([p[0] for p in parts]) if parts else np.zeros(0, dtype=np.int64)
    ib = np.concatenate([p[1] for p in parts]) if parts else np.zeros(0, dtype=np.int64)
    sort = np.lexsort((ib, ia))
    ia, ib = ia[sort], ib[sort]
    lo = np.maximum(lo_a[ia], lo_b[ib])
    return ia, ib, lo, np.minimum(hi_a[ia], hi_b[ib]) - lo


def boxes_overlap_volume(lo: IntArray, shape: IntArray) -> int:
    """Elements that two boxes of one family share, summed over all pairs; 0 exactly when the boxes are disjoint."""
    ia, ib, _, size = intersect(lo, shape, lo, shape)
    return int(np.prod(size[ia < ib], axis=1, dtype=np.int64).sum())


def shared_address(rank: IntArray, shape: IntArray, offset: IntArray, stride: IntArray) -> int | None:
    """The first rank two of whose pieces use one element of its storage, or None. Pieces are (n), (n, nd).

    Ranges of addresses that do not overlap settle most; equal descending strides are read as coordinates of one block
    and compared as boxes; what is left is marked element by element.
    """
    last = offset + ((shape - 1) * stride).sum(axis=1)
    order = np.lexsort((offset, rank))
    rank_of, begin, end = rank[order], offset[order], last[order]
    tight = (rank_of[1:] == rank_of[:-1]) & (begin[1:] <= end[:-1])  # intervals sorted: a neighbour overlaps first
    for doubtful in np.unique(rank_of[1:][tight]).tolist():
        rows = np.flatnonzero(rank == doubtful)
        coordinates = _storage_coordinates(shape[rows], offset[rows], stride[rows])
        if coordinates is not None:
            if boxes_overlap_volume(coordinates, shape[rows]):
                return int(doubtful)
            continue
        marks = np.zeros(int(last[rows].max()) + 1, dtype=bool)
        for row in rows.tolist():
            steps = stride[row] * marks.itemsize
            view = np.lib.stride_tricks.as_strided(marks[int(offset[row]) :], shape[row].tolist(), steps.tolist())
            if view.any():
                return int(doubtful)
            view[...] = True
    return None


def _storage_coordinates(shape: IntArray, offset: IntArray, stride: IntArray) -> IntArray | None:
    """Where each piece begins in the block that equal, descending strides describe; None where there is no such."""
    steps = stride[0]
    uneven = (stride != steps).any() or (steps <= 0).any()
    if uneven or (steps[1:] > steps[:-1]).any() or (steps[:-1] % steps[1:]).any():
        return None
    found = np.zeros_like(stride)
    rest = offset.copy()
    for axis, step in enumerate(steps.tolist()):
        found[:, axis], rest = rest // step, rest % step
    fits = found[:, 1:] + shape[:, 1:] <= steps[:-1] // steps[1:]
    return found if fits.all() and not rest.any() else None


def split_axis(shape: IntArray, parts: int) -> IntArray:
    """Axis along which to cut each box (n, nd) in ``parts``: the first long enough to cut evenly, else the longest."""
    long_enough = shape >= 16 * parts
    axis: IntArray = np.where(long_enough.any(axis=1), long_enough.argmax(axis=1), shape.argmax(axis=1))
    return axis.astype(np.int64)


def split_boxes(shape: IntArray, parts: int, part: int) -> tuple[IntArray, IntArray]:
    """Band ``part`` of each box (n, nd) cut in ``parts`` nearly equal ones. Returns (start, shape) relative to the box.

    Bands of boxes shorter than ``parts`` may have a shape with a zero.
    """
    start = np.zeros_like(shape)
    size = shape.copy()
    if parts > 1 and shape.shape[1]:
        rows = np.arange(len(shape))
        axis = split_axis(shape, parts)
        extent = shape[rows, axis]
        step = np.where(extent >= _ALIGNED_FROM * parts, _BAND_ALIGN, 1)
        begin = part * extent // parts // step * step
        end = np.where(part + 1 == parts, extent, (part + 1) * extent // parts // step * step)
        start[rows, axis] = begin
        size[rows, axis] = end - begin
    elif parts > 1 and part:
        size = np.zeros_like(shape)
    return start, size


def subtract_boxes(
    lo: IntArray, shape: IntArray, cut_lo: IntArray, cut_shape: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """What is left of each box (n, nd) without the part of it (n, nd) that is given: disjoint boxes.

    Returns (index of the box, lo, shape) of the at most ``2 * nd`` rests of each.
    """
    rest_lo, rest_shape = lo.copy(), shape.copy()
    found: list[tuple[IntArray, IntArray, IntArray]] = []
    for axis in range(lo.shape[1]):
        end, cut_end = rest_lo[:, axis] + rest_shape[:, axis], cut_lo[:, axis] + cut_shape[:, axis]
        for begin, extent in ((rest_lo[:, axis], cut_lo[:, axis] - rest_lo[:, axis]), (cut_end, end - cut_end)):
            rows = np.flatnonzero(extent > 0)
            part_lo, part_shape = rest_lo[rows], rest_shape[rows]
            part_lo[:, axis], part_shape[:, axis] = begin[rows], extent[rows]
            found.append((rows, part_lo, part_shape))
        rest_lo[:, axis], rest_shape[:, axis] = cut_lo[:, axis], cut_shape[:, axis]
    rows = np.concatenate([part[0] for part in found]) if found else np.zeros(0, dtype=np.int64)
    if not found:
        return rows, lo[:0], shape[:0]
    return rows, np.concatenate([part[1] for part in found]), np.concatenate([part[2] for part in found])


def union_volumes(owner: IntArray, lo: IntArray, shape: IntArray, owners: int) -> NDArray[np.float64]:
    """Elements in the union of each owner's boxes (n, nd); ``owner`` (n) is from 0 to ``owners - 1``."""
    dims = lo.shape[1]
    boxes = np.column_stack([owner, lo, shape])
    boxes = boxes[np.lexsort(boxes.T[::-1])]
    boxes = boxes[np.concatenate([[True], (boxes[1:] != boxes[:-1]).any(axis=1)])] if len(boxes) else boxes
    owner, lo, shape = boxes[:, 0], boxes[:, 1 : dims + 1], boxes[:, dims + 1 :]
    numel = np.prod(shape, axis=1, dtype=np.float64)
    volume = np.bincount(owner, weights=numel, minlength=owners).astype(np.float64)
    if not dims:
        return volume
    ones = np.ones((len(boxes), 1), dtype=np.int64)
    apart = np.column_stack([owner, lo]), np.column_stack([ones, shape])
    one, two, _, _ = intersect(*apart, *apart)
    for tangled in np.unique(owner[one[one != two]]).tolist():
        volume[tangled] = _union_volume(lo[owner == tangled], shape[owner == tangled])
    return volume


def _union_volume(lo: IntArray, shape: IntArray) -> float:
    """Elements in the union of boxes that overlap unevenly: each adds what the ones before it left open."""
    done_lo, done_shape = lo[:0], shape[:0]
    for row in range(len(lo)):
        new_lo, new_shape = lo[row : row + 1], shape[row : row + 1]
        for other in range(len(done_lo)):
            begin = np.maximum(new_lo, done_lo[other])
            extent = np.minimum(new_lo + new_shape, done_lo[other] + done_shape[other]) - begin
            meets = (extent > 0).all(axis=1)
            _, rest_lo, rest_shape = subtract_boxes(new_lo[meets], new_shape[meets], begin[meets], extent[meets])
            new_lo = np.concatenate([new_lo[~meets], rest_lo])
            new_shape = np.concatenate([new_shape[~meets], rest_shape])
        done_lo, done_shape = np.concatenate([done_lo, new_lo]), np.concatenate([done_shape, new_shape])
    return float(np.prod(done_shape, axis=1, dtype=np.float64).sum())


def merge_dims(shape: IntArray, src_stride: IntArray, dst_stride: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Fewest dims that describe the same copies: dims of size 1 dropped, neighbours contiguous on both sides merged.

    Arrays are (n, nd) in and (n, k) out, k >= 1 the most dims any row needs; unused leading dims: shape 1, stride 0.
    """
    rows, dims = shape.shape
    width = max(dims, 1)
    out_shape = np.ones((rows, width), dtype=np.int64)
    out_src, out_dst = np.zeros((rows, width), dtype=np.int64), np.zeros((rows, width), dtype=np.int64)
    out_src[:, -1] = out_dst[:, -1] = 1
    at = np.full(rows, width, dtype=np.int64)
    for axis in range(dims - 1, -1, -1):
        size, src, dst = shape[:, axis], src_stride[:, axis], dst_stride[:, axis]
        live = np.flatnonzero(size != 1)
        here = at[live]
        fresh = here == width
        inner = np.minimum(here, width - 1)
        joins = (
            ~fresh
            & (src[live] == out_shape[live, inner] * out_src[live, inner])
            & (dst[live] == out_shape[live, inner] * out_dst[live, inner])
        )
        joined = live[joins]
        out_shape[joined, at[joined]] *= size[joined]
        opened = live[~joins]
        at[opened] -= 1
        out_shape[opened, at[opened]] = size[opened]
        out_src[opened, at[opened]] = src[opened]
        out_dst[opened, at[opened]] = dst[opened]
    first = min(int(at.min()) if rows else width - 1, width - 1)
    return out_shape[:, first:], out_src[:, first:], out_dst[:, first:]
