"""What a schedule asks of the cluster, round by round: bytes, messages, and what is packed, for every pair of ranks.

``round_loads(units, plan, world, rounds, executor)`` adds up the transfers of a schedule's parts. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.planner import ClassPlan, MovePlan
from relaymeter.relayout.segments import DIRECT_MIN_BYTES, FROM_DESTINATION, PART_ALIGN, RoundLoads
from relaymeter.relayout.transfers import Transfers

__all__ = ["LoadUnit", "round_loads"]

IntArray = NDArray[np.int64]

#: Columns that are added up: those of ``_transfer_stats``, and the joined copies.
_STATS = 9


class LoadUnit(Protocol):
    """A part of a schedule: the same transfers for ``tensor`` (u) in ``bucket`` (u, ascending)."""

    @property
    def plan(self) -> ClassPlan: ...
    @property
    def tensor(self) -> IntArray: ...
    @property
    def bucket(self) -> IntArray: ...
    @property
    def tables(self) -> tuple[Transfers, ...]: ...
    def active(self, table: Transfers) -> NDArray[np.bool_]:
        """Which rows of ``table`` happen for which tensor (u, rows)."""


def round_loads(units: Sequence[LoadUnit], plan: MovePlan, world: int, rounds: int, executor: str) -> RoundLoads:
    """The loads of ``units``, the parts of a schedule of ``rounds`` rounds over ``world`` ranks. Pure."""
    keys: list[IntArray] = []
    values: list[NDArray[np.float64]] = []
    for unit in units:
        buckets, place = np.unique(unit.bucket, return_inverse=True)
        for table in unit.tables:
            stats = _transfer_stats(table, unit.plan.itemsize, executor, plan.converts(unit.plan))
            pair = ((table.stage - 1) * world + table.src_rank) * world + table.dst_rank
            pairs, where = np.unique(pair, return_inverse=True)
            shown, alike = _alike(table)
            active = unit.active(table.take(shown))
            first = np.flatnonzero(np.diff(unit.bucket, prepend=-1))  # a unit's buckets ascend
            times = np.add.reduceat(active, first, axis=0, dtype=np.float64)[:, alike]
            joined = _copies(unit.tensor, place, active)[:, alike] * (stats[3] > 0)
            for slot, bucket in enumerate(buckets.tolist()):
                weight = times[slot]
                total = [np.bincount(where, weights=weight * column, minlength=len(pairs)) for column in stats]
                total.append(np.bincount(where, weights=joined[slot], minlength=len(pairs)))
                number = bucket + pairs // (world * world)
                keys.append(number * world * world + pairs % (world * world))
                values.append(np.column_stack(total) if len(pairs) else np.zeros((0, _STATS)))
    key = np.concatenate(keys) if keys else np.zeros(0, dtype=np.int64)
    unique, inverse = np.unique(key, return_inverse=True)
    table_of = np.concatenate(values) if values else np.zeros((0, _STATS))
    sums = [np.bincount(inverse, weights=table_of[:, c], minlength=len(unique)).astype(np.int64) for c in range(_STATS)]
    used = sums[0] > 0
    unique, sums = unique[used], [column[used] for column in sums]
    total_bytes, own, pack_bytes, pack_segments, unpack_bytes, unpack_segments, pack_runs, unpack_runs, copies = sums
    src, dst = unique // world % world, unique % world
    packed = (pack_segments + unpack_segments > 0) & (src != dst)
    return RoundLoads(
        rounds=rounds,
        round=unique // (world * world),
        src=src,
        dst=dst,
        bytes=total_bytes,
        messages=own + packed,
        pack_bytes=pack_bytes,
        pack_segments=pack_segments,
        unpack_bytes=unpack_bytes,
        unpack_segments=unpack_segments,
        pack_runs=pack_runs,
        unpack_runs=unpack_runs,
        copies=copies,
    )


def _alike(table: Transfers) -> tuple[IntArray, IntArray]:
    """Rows that stand for all of ``table``, and for each row which of them happens for the same tensors as it does."""
    if not (table.hub >= 0).any() and not (table.prior_hub >= 0).any():
        return np.zeros(min(len(table.hub), 1), dtype=np.int64), np.zeros(len(table.hub), dtype=np.int64)
    keys = np.stack([table.group, table.hub, table.prior_group, table.prior_hub])
    order = np.lexsort(keys)
    keys = keys[:, order]
    new = np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)])
    alike = np.empty(len(order), dtype=np.int64)
    alike[order] = np.cumsum(new) - 1
    return order[new], alike


def _copies(tensors: IntArray, place: IntArray, active: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Copies (buckets, rows) that rows which happen for the ``active`` (u, rows) of ``tensors`` (u) take in each
    bucket; ``place`` (u): the bucket that each tensor is in, ascending.

    Tensors of one class that follow each other at a constant step lie evenly spaced in a flat storage and become one
    copy; another step begins another.
    """
    found = np.zeros((int(place.max(initial=-1)) + 1, active.shape[1]))
    before, step, copies = (np.zeros(active.shape[1], dtype=np.int64) for _ in range(3))
    bucket = -1
    for number, tensor in enumerate(tensors.tolist()):
        if place[number] != bucket:
            bucket = int(place[number])
            copies = np.zeros_like(copies)
        here = active[number]
        ahead = tensor - before
        fresh = here & ((copies == 0) | ((step != 0) & (ahead != step)))
        step = np.where(fresh, 0, np.where(here, ahead, step))  # a copy's second tensor sets its step
        before = np.where(here, tensor, before)
        copies = copies + fresh
        found[bucket] = copies
    return found


def _transfer_stats(table: Transfers, itemsize: int, executor: str, converts: bool) -> list[NDArray[np.float64]]:
    """Per row: bytes on the wire, messages of its own, pack bytes, pack segments, unpack bytes, unpack segments, and
    the contiguous runs that are packed and unpacked (``_STATS`` columns).

    A row that is one run on both sides is a message of its own, unless it has to be converted on the way (a cast).
    """
    size = np.prod(table.shape, axis=1, dtype=np.int64)
    nbytes = size * itemsize
    whole = (table.shape[:, -1] == size) & (table.src_stride[:, -1] == 1) & (table.dst_stride[:, -1] == 1)
    local = table.src_rank == table.dst_rank
    whole &= (table.src_space == FROM_DESTINATION) | (not converts)
    own = whole & (nbytes >= DIRECT_MIN_BYTES) & ~local if executor == "send-recv" else np.zeros(len(size), dtype=bool)
    padded = -(-nbytes // PART_ALIGN) * PART_ALIGN
    packed = ~own & ~local
    pack = np.where(packed, padded, 0)
    wire = np.where(packed, padded, nbytes)
    runs = [
        np.where(packed, size // _run_elements(table.shape, stride), 0)
        for stride in (table.src_stride, table.dst_stride)
    ]
    return [column.astype(np.float64) for column in (wire, own, pack, packed, pack, packed, *runs)]


def _run_elements(shape: IntArray, stride: IntArray) -> IntArray:
    """Elements (n) that lie side by side in a storage, read in row-major order of the segment."""
    run, open_ = np.ones(len(shape), dtype=np.int64), np.ones(len(shape), dtype=bool)
    for dim in range(shape.shape[1] - 1, -1, -1):
        open_ &= (shape[:, dim] == 1) | (stride[:, dim] == run)
        run = np.where(open_, run * shape[:, dim], run)
    return np.maximum(run, 1)
