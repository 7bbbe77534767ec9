"""Strided copies as tiles: the same bytes as by torch's copies, the table read in NumPy and run by the kernel, which
Triton interprets here."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest
import torch

from relaymeter.relayout import copy_kernel
from relaymeter.relayout.copy_tiles import TILE_BYTES, TILE_COLUMNS, CopyTiles, tile_copies

DTYPES = (torch.int8, torch.bfloat16, torch.float32, torch.int64)


def view(rng: random.Random, dtype: torch.dtype, shape: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A strided view of ``shape``, and the 1-D tensor that it lies in."""
    step, strides = rng.choice([1, 1, 1, 2]), []
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size + rng.choice([0, 1, 3, 8])
    offset = rng.choice([0, 1, 2, 8])
    count = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = torch.randint(-128, 128, (count * dtype.itemsize,), dtype=torch.int8).view(dtype)
    return flat.as_strided(shape, strides, offset), flat


def copies(seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Targets, the memory of each, and sources: of any dtype, up to 5 dims, any alignment."""
    rng, found = random.Random(seed), []
    for _ in range(rng.randint(1, 4)):
        dtype, dims = rng.choice(DTYPES), rng.randint(1, 5)
        shape = [rng.choice([1, 2, 3, 5, 8]) for _ in range(dims)]
        if dims <= 2:
            shape[-1] = rng.choice([1, 7, 64, 129, 2049, 5000])
        (target, flat), (source, _) = view(rng, dtype, shape), view(rng, dtype, shape)
        found.append((target, flat, source))
    return found


def wanted(made: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    found = []
    for target, flat, source in made:
        copy = flat.clone()
        raw = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        there = copy.view(raw).as_strided(target.shape, target.stride(), target.storage_offset())
        there.copy_(source.view(raw))
        found.append(copy.view(torch.int8))
    return found


def table(read: Any, write: Any, shape: Any, reads: Any, writes: Any, itemsize: Any, **options: Any) -> CopyTiles:
    columns = [np.asarray(column, dtype=np.int64) for column in (read, write, shape, reads, writes, itemsize)]
    return tile_copies(*columns, **options)


def units(found: CopyTiles) -> np.ndarray:
    """(read, write, bytes) of every unit that the tiles copy, as the kernel does."""
    rows = []
    for tile in found.tiles.tolist():
        entry = dict(zip(TILE_COLUMNS, tile, strict=True))
        width, single = entry["kind"] & 15, entry["kind"] & 16
        most = entry["tile_run"] if single else entry["tile_run"] * entry["tile_rows"] * entry["planes"]
        for lane in range(most):
            line, unit = (0, lane) if single else divmod(lane, entry["tile_run"])
            plane, line = (0, line) if single else divmod(line, entry["tile_rows"])
            if unit < entry["run"] and line < entry["rows"] and plane < entry["planes"]:
                near = entry["read"] + unit * width + line * entry["read_row"] + plane * entry["read_plane"]
                far = entry["write"] + unit * width + line * entry["write_row"] + plane * entry["write_plane"]
                rows.append((near, far, width))
    return np.asarray(rows).reshape(-1, 3)


@pytest.mark.parametrize("seed", range(12))
def test_tiles_copy_every_byte_once(seed: int) -> None:
    rng = random.Random(seed)
    shape = [[rng.choice([1, 2, 3, 7, 16]) for _ in range(rng.choice([3, 5]))]]
    itemsize = rng.choice([1, 2, 4, 8])
    sides = []
    for _ in range(2):
        step, strides = itemsize, []
        for size in reversed(shape[0]):
            strides.insert(0, step)
            step = step * size + itemsize * rng.choice([0, 0, 1, 8])
        sides.append([strides])
    read, write = itemsize * rng.randrange(9), itemsize * rng.randrange(9)
    found = units(table([read], [write], shape, *sides, [itemsize], tile_bytes=64))
    places = np.stack(np.unravel_index(np.arange(np.prod(shape)), shape[0]), axis=1)
    pairs = {
        (read + int(place @ sides[0][0]) + byte, write + int(place @ sides[1][0]) + byte)
        for place in places for byte in range(itemsize)
    }  # fmt: skip
    told = [(near + byte, far + byte) for near, far, width in found.tolist() for byte in range(width)]
    assert len(told) == len(set(told)) and set(told) == pairs
    assert all(near % width == far % width == 0 for near, far, width in found.tolist())


def test_aligned_runs_move_by_eight_bytes_and_are_marked() -> None:
    # one run of 40,000 bytes; one that begins at 8; one that begins at 2; rows of 128 bytes, 512 apart
    found = table(
        [0, 8, 2, 0], [0, 0, 0, 16], [[1, 40000], [1, 40000], [1, 40000], [2000, 128]],
        [[0, 1], [0, 1], [0, 1], [512, 1]], [[0, 1], [0, 1], [0, 1], [128, 1]], [1, 1, 1, 1],
    )  # fmt: skip
    kinds, counts = np.unique(found.tiles[:, 2], return_counts=True)
    assert dict(zip(kinds.tolist(), counts.tolist(), strict=True)) == {
        8 + 16 + 32: 3, 8 + 16: 3, 2 + 16: 3, 8 + 32: -(-2000 * 128 // TILE_BYTES),
    }  # fmt: skip
    assert found.nbytes == 3 * 40000 + 2000 * 128


def test_copies_without_elements_make_no_tiles() -> None:
    assert len(table([0], [0], [[0, 4]], [[4, 1]], [[4, 1]], [1]).tiles) == 0
    empty = np.zeros((0, 3))
    assert len(table([], [], empty, empty, empty, []).tiles) == 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")
@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_copies_what_torch_copies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    made = copies(seed)
    expected = wanted(made)
    kernel = copy_kernel.DeviceCopies([target for target, _, _ in made], [source for _, _, source in made])
    kernel.run()
    for (_, flat, _), bits in zip(made, expected, strict=True):
        assert torch.equal(flat.view(torch.int8), bits)
    assert kernel.nbytes == sum(target.numel() * target.element_size() for target, _, _ in made)
