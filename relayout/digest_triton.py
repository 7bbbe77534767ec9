"""The Triton kernel of ``device_sums``. Importing this needs Triton; TRITON_INTERPRET=1 runs it on the CPU."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["sum_tiles"]


@triton.jit
def _products(words, weights, mask, place, dtype: tl.constexpr):
    """Each word times its weight, both of at most 32 bits, in 64."""
    value = tl.load(words.to(tl.pointer_type(dtype)), mask=mask, other=0).to(tl.uint32).to(tl.uint64)
    weight = tl.load(weights + place, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (value * weight).to(tl.int64)


@triton.jit
def _run(tile, weights, UNITS: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr):
    """Part of one run that lies in one block."""
    words, phase, run = tl.load(tile), tl.load(tile + 3).to(tl.int32), tl.load(tile + 4).to(tl.int32)
    total = tl.zeros((UNITS,), dtype=tl.int64)
    for begin in range(0, run, UNITS):
        lane = begin + tl.arange(0, UNITS)
        total += _products(words + lane.to(tl.int64) * width, weights, lane < run, phase + lane, dtype)
    tl.atomic_add(tl.load(tile + 2).to(tl.pointer_type(tl.int64)), tl.sum(total, 0), sem="relaxed")


@triton.jit
def _rows(tile, weights, UNITS: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr):
    """Rows of short runs, in some neighbouring blocks."""
    words, out = tl.load(tile), tl.load(tile + 2).to(tl.pointer_type(tl.int64))
    phase, run, rows = tl.load(tile + 3), tl.load(tile + 4).to(tl.int32), tl.load(tile + 5).to(tl.int32)
    far, near = tl.load(tile + 6), tl.load(tile + 7)
    blocks = ((phase + (rows - 1) * far + run - 1) // 4096 + 1).to(tl.int32)
    by_run = 1.0 / run.to(tl.float32)
    for begin in range(0, run * rows, UNITS):
        # exact: lanes and divisors are below 2^22, and the half keeps the quotient clear of the next whole number
        lane = begin + tl.arange(0, UNITS)
        row = ((lane.to(tl.float32) + 0.5) * by_run).to(tl.int32)
        unit = lane - row * run
        place = (phase + row * far + unit).to(tl.int32)
        found = _products(words + row * near + unit.to(tl.int64) * width, weights, row < rows, place % 4096, dtype)
        for block in range(blocks):
            part = tl.sum(tl.where(place // 4096 == block, found, 0), 0)
            tl.atomic_add(out + block, part, sem="relaxed")


@triton.jit
def sum_tiles(tiles, weights, count, UNITS: tl.constexpr):
    """Program p adds tile p of ``tiles`` (count, columns), see ``device_sums.TILE_COLUMNS``, to its block sums."""
    program = tl.program_id(0)
    if program < count:
        tile = tiles + program.to(tl.int64) * 8
        kind = tl.load(tile + 1).to(tl.int32)
        if kind == 2 + 16:
            _run(tile, weights, UNITS, 2, tl.uint16)
        elif kind == 4 + 16:
            _run(tile, weights, UNITS, 4, tl.uint32)
        elif kind == 1 + 16:
            _run(tile, weights, UNITS, 1, tl.uint8)
        elif kind == 2:
            _rows(tile, weights, UNITS, 2, tl.uint16)
        elif kind == 4:
            _rows(tile, weights, UNITS, 4, tl.uint32)
        else:
            _rows(tile, weights, UNITS, 1, tl.uint8)
