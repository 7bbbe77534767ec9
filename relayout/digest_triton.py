"""The Triton kernel of ``device_sums``. Importing this needs Triton; TRITON_INTERPRET=1 runs it on the CPU."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["sum_tiles"]


@triton.jit
def _products(words, weights, mask):
    """Each word times its weight, both of at most 32 bits, in 64."""
    value = tl.load(words, mask=mask, other=0).to(tl.uint32).to(tl.uint64)
    weight = tl.load(weights, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (value * weight).to(tl.int64)


@triton.jit
def _run(tile, weights, UNITS: tl.constexpr, align: tl.constexpr, dtype: tl.constexpr):
    """Part of one run that lies in one block; the compiler is told how it is aligned, so that a lane may read several
    words at once."""
    words = tl.multiple_of(tl.load(tile), align).to(tl.pointer_type(dtype))
    phase, run = tl.load(tile + 3).to(tl.int32), tl.load(tile + 4).to(tl.int32)
    if align == 16:
        phase, run = tl.multiple_of(phase, 16), tl.multiple_of(run, 16)
    total = tl.zeros((UNITS,), dtype=tl.int64)
    for begin in range(0, run, UNITS):
        lane = begin + tl.arange(0, UNITS)
        total += _products(words + lane, weights + (phase + lane), lane < run)
    tl.atomic_add(tl.load(tile + 2).to(tl.pointer_type(tl.int64)), tl.sum(total, 0), sem="relaxed")


@triton.jit
def _block(tile, weights, UNITS: tl.constexpr, dtype: tl.constexpr):
    """A whole block, aligned."""
    words = tl.multiple_of(tl.load(tile), 16).to(tl.pointer_type(dtype))
    total = tl.zeros((UNITS,), dtype=tl.int64)
    for begin in tl.static_range(0, 4096, UNITS):
        lane = begin + tl.arange(0, UNITS)
        value = tl.load(words + lane).to(tl.uint32).to(tl.uint64)
        total += (value * tl.load(weights + lane).to(tl.uint32, bitcast=True).to(tl.uint64)).to(tl.int64)
    tl.atomic_add(tl.load(tile + 2).to(tl.pointer_type(tl.int64)), tl.sum(total, 0), sem="relaxed")


@triton.jit
def _rows(tile, weights, UNITS: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr):
    """Rows of short runs, in some neighbouring blocks."""
    words, out = tl.load(tile), tl.load(tile + 2).to(tl.pointer_type(tl.int64))
    phase, run, rows = tl.load(tile + 3), tl.load(tile + 4).to(tl.int32), tl.load(tile + 5).to(tl.int32)
    far, near = tl.load(tile + 6), tl.load(tile + 7)
    blocks = ((phase + (rows - 1) * far + run - 1) // 4096 + 1).to(tl.int32)
    by_run = 1.0 / run.to(tl.float32)
    if blocks == 1:
        total = tl.zeros((UNITS,), dtype=tl.int64)
        for begin in range(0, run * rows, UNITS):
            lane = begin + tl.arange(0, UNITS)
            row = ((lane.to(tl.float32) + 0.5) * by_run).to(tl.int32)
            unit = lane - row * run
            place = phase.to(tl.int32) + row * far.to(tl.int32) + unit
            address = words + row * near + unit * width
            total += _products(address.to(tl.pointer_type(dtype)), weights + place, row < rows)
        tl.atomic_add(out, tl.sum(total, 0), sem="relaxed")
    else:
        for begin in range(0, run * rows, UNITS):
            # exact: lanes and divisors are below 2^22, and the half keeps the quotient clear of the next whole number
            lane = begin + tl.arange(0, UNITS)
            row = ((lane.to(tl.float32) + 0.5) * by_run).to(tl.int32)
            unit = lane - row * run
            place = (phase + row * far + unit).to(tl.int32)
            address = words + row * near + unit * width
            found = _products(address.to(tl.pointer_type(dtype)), weights + place % 4096, row < rows)
            for block in range(blocks):
                part = tl.sum(tl.where(place // 4096 == block, found, 0), 0)
                tl.atomic_add(out + block, part, sem="relaxed")


@triton.jit
def sum_tiles(tiles, weights, count, UNITS: tl.constexpr, KIND: tl.constexpr):
    """Program p adds tile p of ``tiles`` (count, columns), see ``device_sums.TILE_COLUMNS``, to its block sums. All are
    of one kind: what is compiled for one needs fewer registers than what serves all."""
    program = tl.program_id(0)
    if program < count:
        tile = tiles + program.to(tl.int64) * 8
        if KIND == 2 + 16 + 32 + 64:
            _block(tile, weights, UNITS, tl.uint16)
        elif KIND == 4 + 16 + 32 + 64:
            _block(tile, weights, UNITS, tl.uint32)
        elif KIND == 1 + 16 + 32 + 64:
            _block(tile, weights, UNITS, tl.uint8)
        elif KIND == 2 + 16 + 32:
            _run(tile, weights, UNITS, 16, tl.uint16)
        elif KIND == 4 + 16 + 32:
            _run(tile, weights, UNITS, 16, tl.uint32)
        elif KIND == 1 + 16 + 32:
            _run(tile, weights, UNITS, 16, tl.uint8)
        elif KIND == 2 + 16:
            _run(tile, weights, UNITS, 2, tl.uint16)
        elif KIND == 4 + 16:
            _run(tile, weights, UNITS, 4, tl.uint32)
        elif KIND == 1 + 16:
            _run(tile, weights, UNITS, 1, tl.uint8)
        elif KIND == 2:
            _rows(tile, weights, UNITS, 2, tl.uint16)
        elif KIND == 4:
            _rows(tile, weights, UNITS, 4, tl.uint32)
        else:
            _rows(tile, weights, UNITS, 1, tl.uint8)
