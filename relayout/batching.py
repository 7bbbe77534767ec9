"""Batching: many copies of equal boxes whose places advance by one constant step become one copy of a higher rank.

``batched(shape, source, target)`` is a search through integer columns, no torch. Two thousand runs of 128 bytes that
lie 512 bytes apart become one strided copy, a hundred times faster than as many small ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Places", "batched"]

IntArray = NDArray[np.int64]
#: Fewer copies than this are left as they are.
_BATCH_FROM = 4
#: How often steps of steps are looked for: heads within rows within layers.
_PASSES = 3


@dataclass(frozen=True, eq=False)
class Places:
    """Where copies read or write: base (n) numbers a flat memory; offset (n), stride (n, k) count its elements."""

    base: IntArray
    offset: IntArray
    stride: IntArray

    def take(self, rows: IntArray) -> Places:
        """The places of the rows given by an index array."""
        return Places(self.base[rows], self.offset[rows], self.stride[rows])


def batched(shape: IntArray, source: Places, target: Places) -> tuple[IntArray, Places, Places]:
    """Fewer copies that do the same as those of ``shape`` (n, k) from ``source`` to ``target``, in any order.

    Returns columns like the ones given, of m <= n rows and up to three dims more.
    """
    for _ in range(_PASSES):
        before = len(shape)
        if before < _BATCH_FROM:
            break
        shape, source, target = _join(shape, source, target)
        if len(shape) == before:
            break
    return shape, source, target


def _join(shape: IntArray, source: Places, target: Places) -> tuple[IntArray, Places, Places]:
    """One new outermost dim: rows alike in all but their offsets, which advance by one step on each side."""
    alike = np.column_stack([source.base, target.base, shape, source.stride, target.stride])
    order = np.lexsort((target.offset, source.offset, *alike.T))
    shape, source, target, alike = shape[order], source.take(order), target.take(order), alike[order]
    same = (alike[1:] == alike[:-1]).all(axis=1)
    steps = np.column_stack([np.diff(source.offset), np.diff(target.offset)])
    # a target may be written once only, and torch knows no negative strides
    joins = same & (steps[:, 0] >= 0) & (steps[:, 1] > 0)
    head = _heads(joins, steps)
    if len(head) == len(shape):
        return shape, source, target
    count = np.diff(np.append(head, len(shape)))
    grown = count > 1
    step = np.zeros((len(head), 2), dtype=np.int64)
    step[grown] = steps[head[grown]]
    return (
        np.column_stack([count, shape[head]]),
        Places(source.base[head], source.offset[head], np.column_stack([step[:, 0], source.stride[head]])),
        Places(target.base[head], target.offset[head], np.column_stack([step[:, 1], target.stride[head]])),
    )


def _heads(joins: NDArray[np.bool_], steps: IntArray) -> IntArray:
    """First rows of the runs of rows with equal steps (n - 1, 2) between them; ``joins`` (n - 1) allows a step.

    A row between two unequal steps goes to the longer run, of two equally long ones to that of the smaller step: of
    runs with gaps between them, as heads within layers, each then has the same length.
    """
    rows = len(joins) + 1
    fresh = np.ones(len(joins), dtype=bool)
    fresh[1:] = ~(joins[1:] & joins[:-1] & (steps[1:] == steps[:-1]).all(axis=1))
    number = np.cumsum(fresh) - 1
    length = np.where(joins, np.bincount(number)[number], 0)
    before, after = np.full(rows, -1, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
    before[1:], after[:-1] = np.where(joins, number, -1), np.where(joins, number, -1)
    longer = length[1:] - length[:-1]
    size = steps.sum(axis=1)
    run = np.where(before >= 0, before, after)
    onwards = (after[1:-1] >= 0) & ((longer > 0) | ((longer == 0) & (size[1:] < size[:-1])))
    run[1:-1] = np.where(onwards, after[1:-1], run[1:-1])
    starts = np.ones(rows, dtype=bool)
    starts[1:] = (run[1:] != run[:-1]) | (run[1:] < 0)
    return np.flatnonzero(starts)
