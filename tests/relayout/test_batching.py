from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from relaymeter.relayout.batching import Places, batched

IntArray = NDArray[np.int64]


def places(offset: IntArray, stride: IntArray, base: IntArray | None = None) -> Places:
    return Places(np.zeros(len(offset), dtype=np.int64) if base is None else base, offset, stride)


def copied(shape: IntArray, source: Places, target: Places) -> list[tuple[int, int, int, int]]:
    """(source base, source element, target base, target element) of every element copied, in order."""
    found = []
    for row in range(len(shape)):
        for flat in range(math.prod(shape[row].tolist())):
            inner = np.asarray(np.unravel_index(flat, shape[row].tolist()))
            found.append(
                (
                    int(source.base[row]), int(source.offset[row] + (inner * source.stride[row]).sum()),
                    int(target.base[row]), int(target.offset[row] + (inner * target.stride[row]).sum()),
                )
            )  # fmt: skip
    return sorted(found)


def runs(offsets: IntArray, length: int) -> tuple[IntArray, Places, Places]:
    """Runs of ``length`` elements at ``offsets``, laid one after the other at the target."""
    count = len(offsets)
    ones = np.ones((count, 1), dtype=np.int64)
    return ones * length, places(offsets, ones), places(np.arange(count) * length, ones)


GRID = {
    "one step": (np.arange(2000) * 32, 1),
    "heads within layers": ((np.arange(28)[:, None] * 10_000 + np.arange(16) * 100).reshape(-1), 1),
    "pairs": ((np.arange(28)[:, None] * 10_000 + np.arange(2) * 100).reshape(-1), 1),
    "three levels": (
        (np.arange(5)[:, None, None] * 100_000 + np.arange(7)[:, None] * 1000 + np.arange(3) * 100).reshape(-1), 1,
    ),
    "two stretches": (np.concatenate([np.arange(50) * 32, 7 + np.arange(40) * 48 + 10_000]), 2),
    "the same run to many": (np.zeros(9, dtype=np.int64), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", GRID)
def test_regular_runs_become_few_copies(name: str) -> None:
    offsets, most = GRID[name]
    shape, source, target = runs(offsets, 8)
    found = batched(shape, source, target)
    assert len(found[0]) <= most
    assert copied(*found) == copied(shape, source, target)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_copies_are_kept_element_by_element(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 24))
    step = data.draw(st.sampled_from([6, 7]))
    columns = [
        np.asarray(data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype=np.int64)
        for low, high in ((0, 30), (1, 2), (1, 2), (0, 1))
    ]
    shape = np.column_stack([columns[1], columns[2]])
    stride = np.column_stack([np.full(count, 2), np.ones(count, dtype=np.int64)]).astype(np.int64)
    order = np.asarray(data.draw(st.permutations(range(count))), dtype=np.int64)
    source, target = places(columns[0] * step, stride, columns[3]), places(order * step, stride)
    found = batched(shape, source, target)
    assert len(found[0]) <= count
    assert copied(*found) == copied(shape, source, target)
    assert (found[1].stride >= 0).all()
    assert ((found[2].stride > 0) | (found[0] == 1)).all()
