"""The Triton kernel of ``copy_kernel``. Importing this needs Triton; TRITON_INTERPRET=1 runs it on the CPU."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_tiles"]


@triton.jit
def _run(tile, left, UNITS: tl.constexpr, align: tl.constexpr, dtype: tl.constexpr):
    """Part of one run; the compiler is told how it is aligned, so that a lane may move several units at once."""
    read, write = tl.multiple_of(tl.load(tile), align), tl.multiple_of(tl.load(tile + 1), align)
    source, target = read.to(tl.pointer_type(dtype)), write.to(tl.pointer_type(dtype))
    count = tl.minimum(left, tl.load(tile + 6).to(tl.int32))
    if align == 16:
        count = tl.multiple_of(count, 2)
    for begin in range(0, count, UNITS):
        lane = begin + tl.arange(0, UNITS)
        tl.store(target + lane, tl.load(source + lane, mask=lane < count), mask=lane < count)


@triton.jit
def _shifted(tile, left, UNITS: tl.constexpr, width: tl.constexpr):
    """Part of one run whose two sides are aligned to less than 8 bytes: whole words are written, each made of the two
    that hold its bytes; what is left at either end goes byte by byte."""
    read, write = tl.load(tile), tl.load(tile + 1)
    count = tl.minimum(left, tl.load(tile + 6).to(tl.int32)) * width
    head = tl.minimum(((8 - write % 8) % 8).to(tl.int32), count)
    words = (count - head) // 8
    done = head + words * 8
    byte = tl.arange(0, 8)
    near, far = read.to(tl.pointer_type(tl.int8)), write.to(tl.pointer_type(tl.int8))
    tl.store(far + byte, tl.load(near + byte, mask=byte < head), mask=byte < head)
    rest = done + byte
    tl.store(far + rest, tl.load(near + rest, mask=rest < count), mask=rest < count)
    first = read + head
    beyond = first % 8
    shift = (beyond * 8).to(tl.uint64)
    source = tl.multiple_of(first - beyond, 8).to(tl.pointer_type(tl.uint64))
    target = tl.multiple_of(write + head, 8).to(tl.pointer_type(tl.uint64))
    for begin in range(0, words, UNITS):
        lane = begin + tl.arange(0, UNITS)
        mask = lane < words
        low = tl.load(source + lane, mask=mask, other=0)
        high = tl.load(source + lane + 1, mask=mask & (beyond > 0), other=0)
        tl.store(target + lane, (low >> shift) | (high << ((64 - shift) % 64)), mask=mask)


@triton.jit
def _box(tile, left, UNITS: tl.constexpr, width: tl.constexpr, PAIR: tl.constexpr, dtype: tl.constexpr):
    """Short runs, as rows of planes. ``PAIR`` 2: all is aligned to two units, which a lane moves at once."""
    read, write = tl.load(tile), tl.load(tile + 1)
    rows, planes = tl.load(tile + 4).to(tl.int32), tl.load(tile + 5).to(tl.int32)
    run, lines = tl.load(tile + 6).to(tl.int32) // PAIR, tl.load(tile + 7).to(tl.int32)
    read_row, read_plane = tl.load(tile + 8), tl.load(tile + 9)
    write_row, write_plane = tl.load(tile + 10), tl.load(tile + 11)
    if PAIR == 2:
        read, write = tl.multiple_of(read, 16), tl.multiple_of(write, 16)
        read_row, read_plane = tl.multiple_of(read_row, 16), tl.multiple_of(read_plane, 16)
        write_row, write_plane = tl.multiple_of(write_row, 16), tl.multiple_of(write_plane, 16)
    by_run, by_line = 1.0 / run.to(tl.float32), 1.0 / lines.to(tl.float32)
    for begin in range(0, run * lines * planes, UNITS // PAIR):
        # exact: lanes and divisors are below 2^22, and the half keeps the quotient clear of the next whole number
        lane = begin + tl.arange(0, UNITS // PAIR)
        line = ((lane.to(tl.float32) + 0.5) * by_run).to(tl.int32)
        unit = (lane - line * run) * PAIR
        plane = ((line.to(tl.float32) + 0.5) * by_line).to(tl.int32)
        line = line - plane * lines
        mask = (unit < left) & (line < rows) & (plane < planes)
        near = read + (line * read_row + plane * read_plane + unit * width)
        far = write + (line * write_row + plane * write_plane + unit * width)
        if PAIR == 2:
            two = tl.arange(0, 2)[None, :]
            source = near.to(tl.pointer_type(dtype))[:, None] + two
            target = far.to(tl.pointer_type(dtype))[:, None] + two
            tl.store(target, tl.load(source, mask=mask[:, None]), mask=mask[:, None])
        else:
            tl.store(far.to(tl.pointer_type(dtype)), tl.load(near.to(tl.pointer_type(dtype)), mask=mask), mask=mask)


# why: whether a count is 1 or divides by 16 would be another kernel, compiled where time is taken
@triton.jit(do_not_specialize=["count"])
def copy_tiles(tiles, count, UNITS: tl.constexpr):
    """Program p copies tile p of ``tiles`` (count, columns), see ``copy_tiles.TILE_COLUMNS``, ``UNITS`` at a time."""
    program = tl.program_id(0)
    if program < count:
        tile = tiles + program.to(tl.int64) * 12
        kind, left = tl.load(tile + 2).to(tl.int32), tl.load(tile + 3).to(tl.int32)
        if kind == 8 + 16 + 32:
            _run(tile, left, UNITS, 16, tl.int64)
        elif kind == 8 + 16:
            _run(tile, left, UNITS, 8, tl.int64)
        elif kind == 4 + 16:
            _shifted(tile, left, UNITS, 4)
        elif kind == 2 + 16:
            _shifted(tile, left, UNITS, 2)
        elif kind == 1 + 16:
            _shifted(tile, left, UNITS, 1)
        elif kind == 8 + 32:
            _box(tile, left, UNITS, 8, 2, tl.int64)
        elif kind == 8:
            _box(tile, left, UNITS, 8, 1, tl.int64)
        elif kind == 4:
            _box(tile, left, UNITS, 4, 1, tl.int32)
        elif kind == 2:
            _box(tile, left, UNITS, 2, 1, tl.int16)
        else:
            _box(tile, left, UNITS, 1, 1, tl.int8)
