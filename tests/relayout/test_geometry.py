"""Boxes, flat ranges and the merging of dims against element-by-element enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaymeter.relayout.geometry import (
    boxes_overlap_volume,
    flat_range_boxes,
    intersect,
    merge_dims,
    row_major_strides,
    split_boxes,
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(shapes, st.data())
def test_a_flat_range_is_cut_into_few_boxes_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    lo, size = flat_range_boxes(shape, start, stop)
    full = np.arange(numel).reshape(shape)
    found = [
        full[tuple(slice(a, a + b) for a, b in zip(p, s, strict=True))].ravel() for p, s in zip(lo, size, strict=True)
    ]
    assert np.concatenate([np.zeros(0, int), *found]).tolist() == list(range(start, stop))
    assert len(lo) <= max(1, 2 * len(shape) - 1)


def test_a_flat_range_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"flat range 3\.\.9 outside a tensor of shape \(2, 4\)"):
        flat_range_boxes((2, 4), 3, 9)


boxes = st.lists(st.tuples(*[st.integers(0, 6)] * 2, *[st.integers(1, 4)] * 2), max_size=12).map(
    lambda rows: (
        np.array([r[:2] for r in rows], dtype=np.int64).reshape(-1, 2),
        np.array([r[2:] for r in rows], dtype=np.int64).reshape(-1, 2),
    )
)


@settings(max_examples=200, deadline=None)
@given(boxes, boxes)
def test_the_sweep_finds_every_overlap_once(one, two):
    ia, ib, lo, size = intersect(*one, *two)
    cells = {}
    for a, b, low, shape in zip(ia.tolist(), ib.tolist(), lo, size, strict=True):
        assert (a, b) not in cells
        cells[a, b] = math.prod(shape.tolist())
        assert (low >= one[0][a]).all() and (low >= two[0][b]).all()
    for a in range(len(one[0])):
        for b in range(len(two[0])):
            high = np.minimum(one[0][a] + one[1][a], two[0][b] + two[1][b]) - np.maximum(one[0][a], two[0][b])
            volume = int(np.prod(high)) if (high > 0).all() else 0
            assert cells.get((a, b), 0) == volume


def test_overlap_volume_is_zero_only_for_disjoint_boxes():
    lo = np.array([[0, 0], [2, 0], [1, 1]])
    assert boxes_overlap_volume(lo[:2], np.array([[2, 4], [2, 4]])) == 0
    assert boxes_overlap_volume(lo, np.array([[2, 4], [2, 4], [2, 2]])) == 4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 5))
def test_bands_tile_a_box(shape, parts):
    box = np.array([shape], dtype=np.int64)
    cells = np.zeros(shape, dtype=int)
    for part in range(parts):
        start, size = split_boxes(box, parts, part)
        cells[tuple(slice(a, a + b) for a, b in zip(start[0], size[0], strict=True))] += 1
    assert (cells == 1).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_merged_dims_describe_the_same_copies(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    src = np.array(row_major_strides(shape))
    dst = np.zeros(len(shape), dtype=np.int64)
    step = 1
    for axis in order:
        dst[axis], step = step, step * shape[axis]
    one = np.array([shape], dtype=np.int64)
    merged = merge_dims(one, src[None], dst[None])

    def pairs(size, a, b):
        grid = np.indices(size).reshape(len(size), -1).T
        return sorted(zip((grid @ a).tolist(), (grid @ b).tolist(), strict=True))

    assert pairs(shape, src, dst) == pairs(merged[0][0].tolist(), merged[1][0], merged[2][0])
    if list(order) == list(range(len(shape)))[::-1]:
        assert merged[0].shape[1] == 1
