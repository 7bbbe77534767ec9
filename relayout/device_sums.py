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
#: A run of fewer words than this is taken together with its neighbours.
_LONG = 512
#: Blocks that a tile of short runs reaches over at most, beyond its first.
_REACH = 2
#: Runs whose address in bytes, place in their block and length in words are multiples of this are marked.
_ALIGNED = 16
#: Columns of the tiles: address of the first word; its width in bytes, 16 more for one run, 32 more for an aligned one,
#: 64 more for a whole block; address of the first block's sum; place of the first word in that block; words of a run;
#: rows; words of the flattened tensor from row to row, bytes of the storage from row to row.
TILE_COLUMNS = ("address", "kind", "out", "phase", "run", "rows", "far", "near")
#: Words that a program takes at a time, and its warps.
_UNITS, _WARPS = 1024, 4


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
    if far and _BLOCK % far == 0 and start % far + run <= far:  # rows end where blocks do: take whole blocks of them
        take = _BLOCK // far
        begin = np.arange(-(start // far % take), size, take, dtype=np.int64).clip(min=0)
    else:
        take = max(1, min(size, _BLOCK // run, 1 + _REACH * _BLOCK // max(far, 1)))
        begin = np.arange(0, size, take, dtype=np.int64)
    count = np.tile(np.diff(begin, append=size), len(first))
    first = (first[:, None] + far * begin).reshape(-1)
    place = (place[:, None] + near * width * begin).reshape(-1)
    block, phase = np.divmod(first, _BLOCK)
    one = np.ones_like(first)
    return np.column_stack(
        [place, one * width, out + 8 * block, phase, one * run, count, one * far, one * near * width]
    )


def _runs(first: IntArray, place: IntArray, run: int, width: int, out: int) -> IntArray:
    """Runs of ``run`` words, cut where a block ends."""
    block = first // _BLOCK
    count = (first + run - 1) // _BLOCK - block + 1
    row = np.repeat(np.arange(len(first)), count)
    number = block[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    begin = np.maximum(first[row], number * _BLOCK)
    end = np.minimum(first[row] + run, (number + 1) * _BLOCK)
    address, phase = place[row] + (begin - first[row]) * width, begin - number * _BLOCK
    aligned = (address % _ALIGNED == 0) & (phase % _ALIGNED == 0) & ((end - begin) % _ALIGNED == 0)
    kind, none = width + 16 + 32 * aligned + 64 * (aligned & (end - begin == _BLOCK)), np.zeros_like(begin)
    return np.column_stack([address, kind, out + 8 * number, phase, end - begin, none + 1, none, none])


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
            _kernel()[(max(1, count),)](
                self._tiles[kind], self._weights, count, UNITS=_UNITS, KIND=kind, num_warps=_WARPS
            )


@functools.cache
def _device_weights(device: torch.device, low_weights: torch.Tensor) -> torch.Tensor:
    """``lo`` as 32-bit words on ``device``."""
    return low_weights.to(torch.uint32).view(torch.int32).to(device)


@functools.cache
def _kernel() -> Any:
    from relaymeter.relayout.digest_triton import sum_tiles as kernel

    return kernel
