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
def _blocks(tile, weights, UNITS: tl.constexpr, GROUP: tl.constexpr, align: tl.constexpr, dtype: tl.constexpr):
    """Whole blocks that follow one another."""
    words = tl.multiple_of(tl.load(tile), align).to(tl.pointer_type(dtype))
    out = tl.load(tile + 2).to(tl.pointer_type(tl.int64))
    for block in tl.static_range(GROUP):
        total = tl.zeros((UNITS,), dtype=tl.int64)
        for begin in tl.static_range(0, 4096, UNITS):
            lane = begin + tl.arange(0, UNITS)
            value = tl.load(words + (block * 4096 + lane)).to(tl.uint32).to(tl.uint64)
            weight = tl.load(weights + lane).to(tl.uint32, bitcast=True).to(tl.uint64)
            total += (value * weight).to(tl.int64)
        tl.atomic_add(out + block, tl.sum(total, 0), sem="relaxed")


@triton.jit
def _lines(tile, weights, LANES: tl.constexpr, ROWS: tl.constexpr, align: tl.constexpr, dtype: tl.constexpr):
    """Rows of which each lies at one place of one block: they have their weights in common."""
    words, out = tl.load(tile), tl.load(tile + 2).to(tl.pointer_type(tl.int64))
    phase, run, rows = tl.load(tile + 3).to(tl.int32), tl.load(tile + 4).to(tl.int32), tl.load(tile + 5).to(tl.int32)
    blocks, near = tl.load(tile + 6) // 4096, tl.load(tile + 7)
    if align == 16:
        words, near = tl.multiple_of(words, 16), tl.multiple_of(near, 16)
        phase, run = tl.multiple_of(phase, 16), tl.multiple_of(run, 16)
    row = tl.arange(0, ROWS)
    source = (words + row * near).to(tl.pointer_type(dtype))[:, None]
    total = tl.zeros((ROWS, LANES), dtype=tl.int64)
    for begin in range(0, run, LANES):
        unit = begin + tl.arange(0, LANES)
        weight = tl.load(weights + (phase + unit), mask=unit < run, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        mask = (row < rows)[:, None] & (unit < run)[None, :]
        value = tl.load(source + unit[None, :], mask=mask, other=0).to(tl.uint32).to(tl.uint64)
        total += (value * weight[None, :]).to(tl.int64)
    tl.atomic_add(out + row * blocks, tl.sum(total, 1), mask=row < rows, sem="relaxed")


@triton.jit
def _wraps(
    tile, weights, LANES: tl.constexpr, ROWS: tl.constexpr, align: tl.constexpr, width: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Rows of less than a block, each summed by itself, at any place of one block or of two."""
    words, out = tl.load(tile), tl.load(tile + 2).to(tl.pointer_type(tl.int64))
    phase, run, rows = tl.load(tile + 3), tl.load(tile + 4).to(tl.int32), tl.load(tile + 5).to(tl.int32)
    far, near = tl.load(tile + 6), tl.load(tile + 7)
    if align == 16:
        words, near = tl.multiple_of(words, 16), tl.multiple_of(near, 16)
        phase, run, far = tl.multiple_of(phase, 16), tl.multiple_of(run, 16), tl.multiple_of(far, 16)
    row = tl.arange(0, ROWS)
    first = phase + row * far
    at = (first % 4096).to(tl.int32)
    address = words + row * near
    total = tl.zeros((ROWS, LANES), dtype=tl.int64)
    before = tl.zeros((ROWS, LANES), dtype=tl.int64)
    for begin in range(0, run, LANES):
        unit = begin + tl.arange(0, LANES)
        place = at[:, None] + unit[None, :]
        mask = (row < rows)[:, None] & (unit < run)[None, :]
        there = address[:, None] + unit[None, :] * width
        found = _products(there.to(tl.pointer_type(dtype)), weights + place % 4096, mask)
        before += tl.where(place < 4096, found, 0)
        total += found
    into, part = out + first // 4096, tl.sum(before, 1)
    tl.atomic_add(into, part, mask=row < rows, sem="relaxed")
    tl.atomic_add(into + 1, tl.sum(total, 1) - part, mask=(row < rows) & (at + run > 4096), sem="relaxed")


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


# why: whether a count is 1 or divides by 16 would be another kernel, compiled where time is taken
@triton.jit(do_not_specialize=["count"])
def sum_tiles(
    tiles, weights, count, UNITS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr,
    ALIGN: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program p adds tile p of ``tiles`` (count, columns), see ``device_sums.TILE_COLUMNS``, to its block sums. All are
    of one kind: what is compiled for one needs fewer registers than what serves all. ``FORM`` is the kind's bits of
    ``BLOCKS``, ``LINES`` and ``WRAPS``."""
    dtype: tl.constexpr = tl.uint8 if WIDTH == 1 else (tl.uint16 if WIDTH == 2 else tl.uint32)
    program = tl.program_id(0)
    if program < count:
        tile = tiles + program.to(tl.int64) * 8
        if FORM == 32:
            _blocks(tile, weights, UNITS, GROUP, ALIGN, dtype)
        elif FORM == 64:
            _lines(tile, weights, LANES, ROWS, ALIGN, dtype)
        elif FORM == 128:
            _wraps(tile, weights, LANES, ROWS, ALIGN, WIDTH, dtype)
        else:
            _rows(tile, weights, UNITS, WIDTH, dtype)
