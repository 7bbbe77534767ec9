"""Gather-and-slice on NumPy arrays: what a move must give, sharing no code with planner, routes or schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from relaymeter.relayout.layout import Layout
from relaymeter.relayout.schedule import Schedule

Storages = dict[tuple[int, str], NDArray[np.int64]]
POISON = -77


def whole_tensors(layout: Layout, seed: int = 0) -> dict[str, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    return {n: rng.integers(0, 1 << 40, size=s.shape, dtype=np.int64) for n, s in layout.specs.items()}


def storages(layout: Layout, whole: Mapping[str, NDArray[np.int64]] | None) -> Storages:
    """Each rank's storage cut out of the whole tensors piece by piece and element by element; None: poison only."""
    out: Storages = {}
    for name, place in layout.placements.items():
        for rank, count in place.storage.items():
            out[rank, name] = np.full(count, POISON, dtype=np.int64)
        if whole is None:
            continue
        for k, rank in enumerate(place.rank.tolist()):
            shape = place.shape[k].tolist()
            for flat in range(math.prod(shape)):
                inner = np.unravel_index(flat, shape) if shape else ()
                at = int(place.offset[k]) + sum(int(i) * int(s) for i, s in zip(inner, place.stride[k], strict=True))
                box = tuple(int(i) + int(low) for i, low in zip(inner, place.lo[k], strict=True))
                out[rank, name][at] = whole[name][box]
    return out


def execute(schedule: Schedule, source: Storages | list[Storages], destination: Storages) -> None:
    """Runs all segments round by round; all reads of a round happen before its writes, as across real ranks.

    ``source`` is one set of storages for each source layout.
    """
    first, *others = [source] if isinstance(source, dict) else source
    spaces = [first, destination, *others]
    table = schedule.all_segments
    names = [spec.name for spec in schedule.plan.tensors]

    def view(store: NDArray[np.int64], offset: int, shape: list[int], stride: list[int]) -> NDArray[np.int64]:
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if not 0 <= last < len(store):
            raise IndexError(f"segment ends at {last} of {len(store)}")
        return as_strided(store[offset:], shape=shape, strides=[8 * s for s in stride])

    for number in range(schedule.rounds):
        writes = []
        for row in np.flatnonzero(table.round == number).tolist():
            name = names[int(table.tensor[row])]
            shape = table.shape[row].tolist()
            space = spaces[int(table.src_space[row])]
            read = view(
                space[int(table.src_rank[row]), name], int(table.src_offset[row]), shape, table.src_stride[row].tolist()
            )
            write = destination[int(table.dst_rank[row]), name]
            writes.append((view(write, int(table.dst_offset[row]), shape, table.dst_stride[row].tolist()), read.copy()))
        for target, value in writes:
            target[...] = value
