"""Device sums: the block sums of many boxes of many tensors in one pass by Triton, bit for bit those of ``block_sums``.

    plan = DeviceSums(boxes, device)        # once: cuts every box into tiles that lie in few blocks
    plan.run()                              # adds what the storages hold now to the sums of each box

A box is ``WordBox``; ``block_sums.word_box`` makes it. Local, enqueued on the current stream.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["TILE_COLUMNS", "DeviceSums", "WordBox", "sum_tiles"]

IntArray = NDArray[np.int64]

#: Words of one block of the digest (``block_sums.BLOCK_WORDS``).
_BLOCK = 4096
#: A run of fewer words than this is taken together with its neighbours; one of fewer than ``_SHORT`` is summed together
#: with those that lie in the same block, a longer one by itself.
_LONG, _SHORT = _BLOCK, 64
#: Rows of neighbouring runs that a program takes, words that it takes of each at a time, and at most; of a single row.
_ROWS, _LANES, _LINE, _LONE = 4, 128, 1024, 256
#: Places in their blocks at which neighbouring runs may begin for those of each place to be taken together.
_PLACES = 16
#: Whole blocks of a run that one program takes.
_GROUP = 2
#: Blocks that a tile of short runs reaches over at most, beyond its first.
_REACH = 2
#: Runs whose address in bytes, place in their block and length in words are multiples of this are marked.
_ALIGNED = 16
#: Columns of the tiles: address of the first word; the kind; address of the first block's sum; place of the first word
#: in that block; words of a run; rows; words of the flattened tensor from row to row, bytes of the storage from row to
#: row. The kind is the width of a word in bytes; ``BLOCKS`` more for ``_GROUP`` whole blocks that follow one another, a
#: row each; ``LINES`` for rows of which each lies at the same place of its block; ``WRAPS`` for rows at any place, of
#: one block or two; ``ALIGNED`` more where all of these is aligned.
TILE_COLUMNS = ("address", "kind", "out", "phase", "run", "rows", "far", "near")
ALIGNED, BLOCKS, LINES, WRAPS = 16, 32, 64, 128
#: Words that a program takes at a time of other tiles than lines.
_UNITS = 1024
#: Warps of a program, of lines and of others.
_LINE_WARPS, _WARPS = 1, 4


@dataclass(frozen=True, eq=False)
class WordBox:
    """A box of words of at most 32 bits: ``dims`` as (size, words in the flattened tensor, words in the storage) from
    one to the next, outermost first; ``start``, its first word in the flattened tensor; ``words``, 1-D unsigned, with
    ``offset``, its first word there; ``out``, the tensor's block sums (int64)."""

    out: torch.Tensor
    words: torch.Tensor
    dims: tuple[tuple[int, int, int], ...]
    start: int
    offset: int


def sum_tiles(dims: Sequence[tuple[int, int, int]], start: int, address: int, width: int, out: int) -> IntArray:
    """Tiles (n, columns) of one box whose first word lies at ``address``, its sums from address ``out`` on. Pure."""
    outer, run = list(dims), 1
    if outer and outer[-1][1:] == (1, 1):
        run = outer.pop()[0]
    rows = outer.pop() if run < _LONG and outer else None
    first, place = np.full(1, start, dtype=np.int64), np.full(1, address, dtype=np.int64)
    for size, far, near in outer:
        steps = np.arange(size, dtype=np.int64)
        first = (first[:, None] + far * steps).reshape(-1)
        place = (place[:, None] + near * width * steps).reshape(-1)
    if rows is None:
        return _runs(first, place, run, width, out)
    size, far, near = rows
    places = _BLOCK // math.gcd(far, _BLOCK)  # row and row + places begin at the same place of their blocks
    if run >= _SHORT and places <= _PLACES and size > places:
        return _lines(first, place, run, (size, far, near * width), places, width, out)
    if run >= _SHORT:
        kind, take = width + WRAPS, _ROWS
        begin = np.arange(0, size, take, dtype=np.int64)
    elif far and _BLOCK % far == 0 and start % far + run <= far:  # rows end where blocks do: take whole blocks of them
        kind, take = width, _BLOCK // far
        begin = np.arange(-(start // far % take), size, take, dtype=np.int64).clip(min=0)
    else:
        kind, take = width, max(1, min(size, _BLOCK // run, 1 + _REACH * _BLOCK // max(far, 1)))
        begin = np.arange(0, size, take, dtype=np.int64)
    count = np.tile(np.diff(begin, append=size), len(first))
    first = (first[:, None] + far * begin).reshape(-1)
    place = (place[:, None] + near * width * begin).reshape(-1)
    return _table(place, kind, out, first, run, count, far, near * width)


def _table(
    address: IntArray, kind: IntArray | int, out: int, first: IntArray, run: IntArray | int, rows: IntArray | int,
    far: IntArray | int, near: IntArray | int,
) -> IntArray:  # fmt: skip
    """Tiles whose first words are ``first`` of the flattened tensor; ``ALIGNED`` is told of those with runs apart."""
    block, phase = np.divmod(first, _BLOCK)
    one = np.ones_like(first)
    every = np.column_stack([address, one * kind, out + 8 * block, phase, one * run, one * rows, one * far, one * near])
    whole = (every[:, 0] | every[:, 3] | every[:, 4] | every[:, 6] | every[:, 7]) % _ALIGNED == 0
    every[:, 1] += ALIGNED * (whole & (every[:, 1] >= ALIGNED))
    return every


def _lines(
    first: IntArray, place: IntArray, run: int, rows: tuple[int, int, int], places: int, width: int, out: int
) -> IntArray:
    """Rows (number, words, bytes from one to the next) at ``places`` places of their blocks, those of one place
    together; what reaches into the next block is rows of its own."""
    size, far, near = rows
    which = np.arange(places)
    begin = (first[:, None] + far * which).reshape(-1)
    address = (place[:, None] + near * which).reshape(-1)
    count = np.tile((size - which + places - 1) // places, len(first))
    here = np.minimum(run, _BLOCK - begin % _BLOCK)
    begin, address = np.concatenate([begin, begin + here]), np.concatenate([address, address + here * width])
    words, count = np.concatenate([here, run - here]), np.tile(count, 2)
    return _rows_of_lines(begin, address, words, count, (places * far, places * near), width, out)


def _rows_of_lines(
    first: IntArray, place: IntArray, words: IntArray, rows: IntArray, steps: tuple[int, int], width: int, out: int
) -> IntArray:
    """``rows`` rows of ``words`` words each, cut into tiles; ``steps``: words and bytes from row to row."""
    most = np.where(rows == 1, _LONE, _LINE)
    down, along = -(-rows // _ROWS), -(-words // most)
    tiles = down * along
    row = np.repeat(np.arange(len(first)), tiles)
    number = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    at, column = np.divmod(number, np.maximum(along, 1)[row])
    at, column = at * _ROWS, column * most[row]
    return _table(
        place[row] + at * steps[1] + column * width, width + LINES, out, first[row] + at * steps[0] + column,
        np.minimum(most[row], words[row] - column), np.minimum(_ROWS, rows[row] - at), *steps,
    )  # fmt: skip


def _runs(first: IntArray, place: IntArray, run: int, width: int, out: int) -> IntArray:
    """Runs of ``run`` words, cut where a block begins or ends; whole blocks some at a time."""
    head = np.minimum(-first % _BLOCK, run)
    whole = (run - head) // _BLOCK
    groups = whole // _GROUP
    singles = head + groups * _GROUP * _BLOCK
    ends = head + whole * _BLOCK
    row = np.repeat(np.arange(len(first)), groups)
    at = head[row] + (np.arange(len(row)) - np.repeat(np.cumsum(groups) - groups, groups)) * _GROUP * _BLOCK
    apart = (_BLOCK, _BLOCK * width)
    middle = _table(place[row] + at * width, width + BLOCKS, out, first[row] + at, _BLOCK, _GROUP, *apart)
    begin, words = np.concatenate([0 * head, singles, ends]), np.concatenate([head, 0 * head + _BLOCK, run - ends])
    rows = np.concatenate([0 * head + 1, whole - groups * _GROUP, 0 * head + 1])
    first, place = np.tile(first, 3) + begin, np.tile(place, 3) + begin * width
    return np.concatenate([middle, _rows_of_lines(first, place, words, rows, apart, width, out)])


class DeviceSums:
    """The tiles of ``boxes``, which lie on one device; whoever keeps this keeps the storages' addresses."""

    def __init__(self, boxes: Sequence[WordBox], low_weights: torch.Tensor) -> None:
        """``low_weights``: ``block_sums.LOW_WEIGHTS``."""
        tables = []
        for box in boxes:
            if math.prod(size for size, _, _ in box.dims):
                width = box.words.element_size()
                address = box.words.data_ptr() + box.offset * width
                tables.append(sum_tiles(box.dims, box.start, address, width, box.out.data_ptr()))
        self._kept = list(boxes)
        self.nbytes = sum(math.prod(size for size, _, _ in box.dims) * box.words.element_size() for box in boxes)
        self._tiles: dict[int, torch.Tensor] = {}
        if tables:
            device = boxes[0].words.device
            self._weights = _device_weights(device, low_weights)
            every = np.concatenate(tables)
            for kind in np.unique(every[:, 1]).tolist():
                self._tiles[kind] = torch.from_numpy(every[every[:, 1] == kind]).to(device)
                self._launch(kind, 0)

    def run(self) -> None:
        """Add every box to its sums, by a launch for each kind of tiles. On a CUDA device this only enqueues."""
        for kind, tiles in self._tiles.items():
            self._launch(kind, len(tiles))

    def _launch(self, kind: int, count: int) -> None:
        """``count`` 0 compiles only: one program that finds nothing to do."""
        device = self._weights.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            width, form = kind % ALIGNED, kind & (BLOCKS | LINES | WRAPS)
            _kernel()[(max(1, count),)](
                self._tiles[kind], self._weights, count, UNITS=_UNITS, GROUP=_GROUP, WIDTH=width, FORM=form,
                ALIGN=_ALIGNED if kind & ALIGNED else width, LANES=_LANES, ROWS=_ROWS,
                num_warps=_LINE_WARPS if form & LINES else _WARPS,
            )  # fmt: skip


@functools.cache
def _device_weights(device: torch.device, low_weights: torch.Tensor) -> torch.Tensor:
    """``lo`` as 32-bit words on ``device``."""
    return low_weights.to(torch.uint32).view(torch.int32).to(device)


@functools.cache
def _kernel() -> Any:
    from relaymeter.relayout.digest_triton import sum_tiles as kernel

    return kernel
