"""Timeline: what a bounded move holds in every round, known from the schedule and the layouts before it starts.

In a bounded move a tensor's source storage is released once the last round that reads it has passed, and its
destination storage is allocated just before the first round that writes it. ``predicted_extra_bytes(schedule, rank,
...)`` is the most that a rank then holds beyond its larger layout; ``choose_bucket(...)`` finds the largest bucket size
with which no rank exceeds a limit. Pure NumPy, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.segments import FROM_DESTINATION, source_space
from relaymeter.relayout.traffic import RunnableSchedule, Traffic

__all__ = [
    "LARGEST_BUCKET_BYTES",
    "SMALLEST_BUCKET_BYTES",
    "BucketChoice",
    "Timeline",
    "choose_bucket",
    "predicted_extra_bytes",
]

IntArray = NDArray[np.int64]

#: Bucket sizes that ``choose_bucket`` tries: every power of two from the largest down to the smallest.
LARGEST_BUCKET_BYTES = 64 << 20
SMALLEST_BUCKET_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class Timeline:
    """When one rank releases and allocates in a bounded move, and what it holds.

    ``last_read`` (layouts, tensors): the round after which a source storage is released, -1 for one that no round of
    this rank reads. ``first_write`` (tensors): the round before which a destination storage is allocated, the number of
    rounds for one that no round writes (it is allocated at the end). ``held_bytes`` (rounds): source, destination and
    message buffers in each round. ``old_bytes``, ``new_bytes``: the rank's source layouts and its destination layout.
    """

    last_read: IntArray
    first_write: IntArray
    held_bytes: IntArray
    old_bytes: int
    new_bytes: int

    @property
    def extra_bytes(self) -> int:
        """The most that the rank holds beyond the larger of what it holds before and after."""
        return max(0, int(self.held_bytes.max(initial=0)) - max(self.old_bytes, self.new_bytes))

    @staticmethod
    def of(traffic: Traffic, tensors: Sequence[str], sources: Sequence[Layout], destination: Layout) -> Timeline:
        """The timeline of the rank of ``traffic``, whose rows count ``tensors`` by index.

        Source tensors that do not move are kept, and count as held throughout.
        """
        table, rank, rounds = traffic.table, traffic.rank, traffic.rounds
        last_read = np.full((len(sources), len(tensors)), -1, dtype=np.int64)
        reads = (table.src_rank == rank) & (table.src_space != FROM_DESTINATION)
        for number in range(len(sources)):
            rows = reads & (table.src_space == source_space(number))
            np.maximum.at(last_read[number], table.tensor[rows], table.round[rows])
        first_write = np.full(len(tensors), rounds, dtype=np.int64)
        writes = table.dst_rank == rank
        np.minimum.at(first_write, table.tensor[writes], table.round[writes])
        held = np.full(rounds, traffic.buffer_bytes, dtype=np.int64)
        for number, layout in enumerate(sources):
            size = _sizes(layout, tensors, rank)
            released = np.bincount(last_read[number] + 1, weights=size, minlength=rounds + 1).astype(np.int64)
            held += layout.storage_bytes(rank) - np.cumsum(released)[:rounds]
        size = _sizes(destination, tensors, rank)
        allocated = np.bincount(first_write, weights=size, minlength=rounds + 1).astype(np.int64)
        held += np.cumsum(allocated)[:rounds]
        return Timeline(
            last_read=last_read,
            first_write=first_write,
            held_bytes=held,
            old_bytes=sum(layout.storage_bytes(rank) for layout in sources),
            new_bytes=destination.storage_bytes(rank),
        )


def _sizes(layout: Layout, tensors: Sequence[str], rank: int) -> IntArray:
    """Bytes of the storage of each tensor on ``rank``."""
    found = [
        layout.placements[name].storage.get(rank, 0) * layout.specs[name].itemsize if name in layout.specs else 0
        for name in tensors
    ]
    return np.asarray(found, dtype=np.int64)


def predicted_extra_bytes(
    schedule: RunnableSchedule, rank: int, sources: Layout | Sequence[Layout], destination: Layout, executor: str
) -> int:
    """The most that ``rank`` holds, over the rounds of a bounded move, beyond the larger of its two layouts.

    Held are the source storages that are still to be read, the destination storages allocated so far and the message
    buffers; ``sources`` are the layouts that the schedule was planned from.
    """
    layouts = [sources] if isinstance(sources, Layout) else list(sources)
    traffic = Traffic(schedule, rank, destination.world_size, executor)
    return Timeline.of(traffic, [spec.name for spec in schedule.tensors], layouts, destination).extra_bytes


@dataclass(frozen=True, eq=False)
class BucketChoice:
    """The schedule of the largest bucket size that fits, and the extra bytes of each rank with it (world)."""

    bucket_bytes: int
    schedule: RunnableSchedule
    extra_bytes: tuple[int, ...]


def choose_bucket(
    build: Callable[[int], RunnableSchedule],
    sources: Layout | Sequence[Layout],
    destination: Layout,
    executor: str,
    max_extra_bytes: int,
    *,
    largest: int = LARGEST_BUCKET_BYTES,
    smallest: int = SMALLEST_BUCKET_BYTES,
) -> BucketChoice:
    """The largest bucket size, halving ``largest`` down to ``smallest``, that keeps every rank within the limit.

    ``build`` makes the schedule for a bucket size; it must hold the rows of all ranks. Raises InputError where none
    fits, naming the rank, what it needs with the smallest buckets that are tried, and a limit that one
    of them keeps. Pure.
    """
    least: tuple[int, int] | None = None
    bucket = largest
    while True:
        schedule = build(bucket)
        extra = tuple(
            predicted_extra_bytes(schedule, rank, sources, destination, executor)
            for rank in range(destination.world_size)
        )
        if max(extra) <= max_extra_bytes:
            return BucketChoice(bucket, schedule, extra)
        least = min((max(extra), bucket), least or (max(extra), bucket))
        if bucket // 2 < smallest:
            break
        bucket //= 2
    rank = extra.index(max(extra))
    raise InputError(
        f"rank {rank} needs {max(extra)} bytes beyond its larger layout with buckets of {bucket} bytes, the smallest "
        f"that are tried, but --max-extra allows {max_extra_bytes}: set --max-extra "
        f"{least[0]} (bucket_bytes {least[1]}) or more, or leave it out to keep the source"
    )
