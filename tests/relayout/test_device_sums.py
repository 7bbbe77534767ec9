"""Block sums by the tiles of a device: those of the CPU bit for bit, the table read in NumPy and run by the kernel,
which Triton interprets here."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch

from relaymeter.relayout.block_sums import LOW_WEIGHTS, add_boxes, block_count, word_box
from relaymeter.relayout.device_sums import BLOCKS, LINES, TILE_COLUMNS, WRAPS, DeviceSums, WordBox, sum_tiles
from relaymeter.relayout.layout import TensorSpec

DTYPES = ("int8", "bfloat16", "float32", "int64")
SHAPES = (
    [5],
    [9000],
    [70, 130],
    [3, 50, 40],
    [2, 3, 5, 7],
    [6, 4096],
    [40, 1000],
    [2, 3, 700],
    [30, 256],
    [7, 3000],
    [40000],
    [50, 1536],
    [20, 2049],
)


def box_of(
    rng: random.Random, shape: list[int]
) -> tuple[TensorSpec, list[int], list[int], torch.Tensor, int, list[int]]:
    """A random box of a tensor of ``shape``, and a storage in which it lies with gaps."""
    dtype = rng.choice(DTYPES)
    lo = [rng.randrange(size) for size in shape]
    size = [rng.randint(1, whole - low) for whole, low in zip(shape, lo, strict=True)]
    step, stride = 1, []
    for extent in reversed(size):
        stride.insert(0, step)
        step = step * extent + rng.choice([0, 0, 1, 3])
    offset = rng.choice([0, 1, 5])
    count = offset + 1 + sum((extent - 1) * near for extent, near in zip(size, stride, strict=True))
    kind = getattr(torch, dtype)
    storage = torch.randint(-128, 128, (count * kind.itemsize,), dtype=torch.int8).view(kind)
    return TensorSpec("w", tuple(shape), dtype), lo, size, storage, offset, stride


def both(rng: random.Random, shape: list[int]) -> tuple[WordBox, torch.Tensor]:
    """A box over sums of zeros, and what the CPU makes of it."""
    spec, *where = box_of(rng, shape)
    expected, out = (torch.zeros(block_count(spec), dtype=torch.int64) for _ in range(2))
    add_boxes([word_box(expected, spec, *where)])
    return word_box(out, spec, *where), expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_hold_every_word_once_in_its_block(shape: list[int]) -> None:
    for seed in range(3):
        spec, *where = box_of(random.Random(seed), shape)
        box = word_box(torch.zeros(block_count(spec), dtype=torch.int64), spec, *where)
        width = box.words.element_size()
        told = []
        for tile in sum_tiles(box.dims, box.start, box.offset * width, width, 0).tolist():
            row = dict(zip(TILE_COLUMNS, tile, strict=True))
            kind = row["kind"]
            assert kind % 16 == width and 0 <= row["phase"] < 4096
            if kind & BLOCKS:
                assert (row["phase"], row["run"]) == (0, 4096)
            for line in range(row["rows"]):
                within = (row["phase"] + line * row["far"]) % 4096
                if kind & LINES:
                    assert within == row["phase"] and row["phase"] + row["run"] <= 4096
                if kind & WRAPS:
                    assert within + row["run"] <= 8192
                for unit in range(row["run"]):
                    word = row["out"] // 8 * 4096 + row["phase"] + line * row["far"] + unit
                    told.append((word, (row["address"] + line * row["near"]) // width + unit))
        grid = np.stack(np.indices([size for size, _, _ in box.dims] or [1]).reshape(max(len(box.dims), 1), -1), axis=1)
        far, near = ([dim[k] for dim in box.dims] or [0] for k in (1, 2))
        expected = zip((box.start + grid @ far).tolist(), (box.offset + grid @ near).tolist(), strict=True)
        assert len(told) == len(set(told)) and set(told) == set(expected)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")
def test_the_kernel_sums_what_the_cpu_sums_and_adds_to_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rng = random.Random(3)
    made = [both(rng, shape) for shape in SHAPES]
    plan = DeviceSums([box for box, _ in made], LOW_WEIGHTS)
    plan.run()
    for box, expected in made:
        assert torch.equal(box.out, expected)
    plan.run()
    for box, expected in made:
        assert torch.equal(box.out, 2 * expected)
    assert plan.nbytes > 0


def test_no_boxes_are_no_launch() -> None:
    DeviceSums([], LOW_WEIGHTS).run()
