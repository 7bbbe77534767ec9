"""Copy tiles: strided copies of any shape and alignment, cut into equal pieces of work for one launch on a device.

``tile_copies(read, write, shape, read_stride, write_stride, itemsize)`` gives the table that ``copy_kernel`` runs.
Pure NumPy; addresses and strides count bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["TILE_BYTES", "TILE_COLUMNS", "CopyTiles", "tile_copies"]

IntArray = NDArray[np.int64]

#: Bytes that one tile copies at most: one program of the kernel.
TILE_BYTES = 16384
#: The widest unit, in bytes: what one lane of a device moves.
_WIDEST = 8
#: Copies that are aligned to this are marked: their lanes may move two units at once.
_ALIGNED = 16
#: Units of a tile at most, however narrow.
_MOST_UNITS = 8192
#: Dims of a box beside its run; a copy of more is cut into several.
_OUTER = 3
#: Columns of ``CopyTiles.tiles``.
TILE_COLUMNS = (
    *("read", "write", "kind", "run", "rows", "planes", "tile_run", "tile_rows"),
    *("read_row", "read_plane", "write_row", "write_plane"),
)


@dataclass(frozen=True, eq=False)
class CopyTiles:
    """``tiles`` (m, columns) int64, see ``TILE_COLUMNS``: addresses; ``kind``, the width of a unit in bytes, 16 more
    where the tile is part of one run, 32 more where the copy is aligned to 16 bytes; how many units of the run,
    rows and planes are left from there on, how many of the run and rows the tile takes; strides. Addresses and strides
    are in bytes. ``nbytes`` is what is copied."""

    tiles: IntArray
    nbytes: int


def tile_copies(
    read: IntArray,
    write: IntArray,
    shape: IntArray,
    read_stride: IntArray,
    write_stride: IntArray,
    itemsize: IntArray,
    tile_bytes: int = TILE_BYTES,
) -> CopyTiles:
    """Tiles of the copies of boxes ``shape`` (n, k) elements of ``itemsize`` (n) bytes.

    ``read``, ``write`` (n): addresses of their first elements; ``read_stride``, ``write_stride`` (n, k): bytes between
    neighbours in each dim, outermost first. Copies without elements are left out. A copy moves by the widest unit, up
    to 8 bytes, that its addresses, strides and runs are multiples of.
    """
    keep = (shape > 0).all(axis=1)
    read, write, shape, itemsize = read[keep], write[keep], shape[keep], itemsize[keep]
    read_stride, write_stride = read_stride[keep], write_stride[keep]
    nbytes = int((np.prod(shape, axis=1, dtype=np.int64) * itemsize).sum())
    # bytes are the innermost dim of every copy; merging makes the runs
    ones = np.ones((len(shape), 1), dtype=np.int64)
    dims = np.concatenate([shape, itemsize[:, None]], axis=1)
    reads = np.concatenate([read_stride, ones], axis=1)
    writes = np.concatenate([write_stride, ones], axis=1)
    dims, reads, writes = _merged(dims, reads, writes)
    read, write, dims, reads, writes = _cut(read, write, dims, reads, writes)
    outside = np.where(dims[:, :-1] > 1, reads[:, :-1] | writes[:, :-1], 0)
    starts = np.bitwise_or.reduce(np.column_stack([read, write, outside]), axis=1)
    every = starts | dims[:, -1]
    width = np.minimum(every & -every, _WIDEST)
    most = np.minimum(tile_bytes // width, _MOST_UNITS)
    run, rows, planes, outer = dims[:, 3] // width, dims[:, 2], dims[:, 1], dims[:, 0]
    tile_run = np.minimum(run, most)
    tile_rows = np.minimum(rows, most // tile_run)
    whole = (tile_run == run) & (tile_rows == rows)
    tile_planes = np.where(whole, np.minimum(planes, most // (tile_run * tile_rows)), 1)
    single = 2 * run > most
    tile_rows, tile_planes = np.where(single, 1, tile_rows), np.where(single, 1, tile_planes)
    kind = width + 16 * single + 32 * ((width == _WIDEST) & (every % _ALIGNED == 0))
    grids = [-(-size // tile) for size, tile in ((run, tile_run), (rows, tile_rows), (planes, tile_planes))]
    count = grids[0] * grids[1] * grids[2] * outer
    box = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
    number, at_run = np.divmod(number, grids[0][box])
    number, at_row = np.divmod(number, grids[1][box])
    at_outer, at_plane = np.divmod(number, grids[2][box])
    at_run, at_row, at_plane = at_run * tile_run[box], at_row * tile_rows[box], at_plane * tile_planes[box]
    first = [
        place[box]
        + at_run * width[box]
        + at_row * stride[box, 2]
        + at_plane * stride[box, 1]
        + at_outer * stride[box, 0]
        for place, stride in ((read, reads), (write, writes))
    ]
    left_planes = np.minimum(planes[box] - at_plane, tile_planes[box])
    left = [run[box] - at_run, rows[box] - at_row, left_planes]
    strides = [side[box, dim] for side in (reads, writes) for dim in (2, 1)]
    tiles = np.column_stack([*first, kind[box], *left, tile_run[box], tile_rows[box], *strides])
    return CopyTiles(tiles.astype(np.int64), nbytes)


def _merged(dims: IntArray, reads: IntArray, writes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The same boxes, neighbouring dims joined where both sides run on, dims of one element gone: they end up in the
    leading columns, with stride 0."""
    out = [np.ones_like(dims), np.zeros_like(reads), np.zeros_like(writes)]
    at = np.full(len(dims), dims.shape[1] - 1)
    row = np.arange(len(dims))
    for part, column in zip(out, (dims, reads, writes), strict=True):
        part[:, -1] = column[:, -1]
    for dim in range(dims.shape[1] - 2, -1, -1):
        size, near, far = dims[:, dim], reads[:, dim], writes[:, dim]
        there = out[0][row, at]
        joins = (near == out[1][row, at] * there) & (far == out[2][row, at] * there)
        out[0][row, at] *= np.where(joins & (size > 1), size, 1)
        at -= ~joins & (size > 1)
        new = np.flatnonzero(~joins & (size > 1))
        for part, column in zip(out, (size, near, far), strict=True):
            part[new, at[new]] = column[new]
    return out[0], out[1], out[2]


def _cut(
    read: IntArray, write: IntArray, dims: IntArray, reads: IntArray, writes: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Boxes of exactly ``_OUTER`` dims and a run: those of more are cut along their outermost dim."""
    short = _OUTER + 1 - dims.shape[1]
    if short > 0:
        pad = ((0, 0), (short, 0))
        dims = np.pad(dims, pad, constant_values=1)
        return read, write, dims, np.pad(reads, pad), np.pad(writes, pad)
    while dims.shape[1] > _OUTER + 1:
        count = dims[:, 0]
        box = np.repeat(np.arange(len(dims)), count)
        number = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
        read, write = read[box] + number * reads[box, 0], write[box] + number * writes[box, 0]
        dims, reads, writes = dims[box, 1:], reads[box, 1:], writes[box, 1:]
    return read, write, dims, reads, writes
