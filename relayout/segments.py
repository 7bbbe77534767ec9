"""Segments: strided copies between ranks, as frozen NumPy columns. Pure data, no torch.

A segment copies a box of ``shape`` from the storage of one rank to that of another. It is the only currency between the
planner, the routes, the schedule and the executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DIRECT_MIN_BYTES",
    "FROM_DESTINATION",
    "FROM_SOURCE",
    "PART_ALIGN",
    "RoundLoads",
    "SegmentTable",
    "source_space",
]

IntArray = NDArray[np.int64]

#: ``src_space``: the segment reads the first source layout's storage, or (from stage 2 on) the destination's own on a
#: rank that got it in an earlier stage.
#: Further source layouts of a move follow, see ``source_space``.
FROM_SOURCE = 0
FROM_DESTINATION = 1


def source_space(layout: int) -> int:
    """The ``src_space`` of source layout ``layout`` (0 the first) of a move out of several."""
    return layout + 1 if layout else FROM_SOURCE


#: A segment of at least this many bytes that is one run on both sides travels as a message of its own, without packing.
DIRECT_MIN_BYTES = 65536

#: Parts of a packed message start on multiples of this many bytes.
PART_ALIGN = 16


def _one_run(shape: IntArray, stride: IntArray) -> NDArray[np.bool_]:
    whole: NDArray[np.bool_] = (shape[:, -1] == np.prod(shape, axis=1)) & (stride[:, -1] == 1)
    return whole


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """``n`` segments of at most ``k`` dims. Every column is int64; offsets and strides count elements.

    tensor (n): index into the schedule's tensors. round (n): the exchange in which the segment travels. stage (n): of
    its route, from 1 on. src_rank, dst_rank (n): equal for a copy inside a rank, which never enters a message.
    src_space (n): FROM_SOURCE, FROM_DESTINATION or a further ``source_space``; the target is always the destination's
    storage.
    src_offset, dst_offset (n): first element in the (rank, tensor) storage. shape, src_stride, dst_stride (n, k):
    outermost dim first, unused leading dims have shape 1 and stride 0. Neighbouring dims that are contiguous on both
    sides are merged, so a segment is contiguous on a side exactly when its last dim holds everything and has stride 1
    there.

    Rows are in canonical order, the order in which both ends lay the parts of a message: round, src_rank, dst_rank,
    stage, tensor, then the planner's order.
    """

    tensor: IntArray
    round: IntArray
    stage: IntArray
    src_rank: IntArray
    dst_rank: IntArray
    src_space: IntArray
    src_offset: IntArray
    dst_offset: IntArray
    shape: IntArray
    src_stride: IntArray
    dst_stride: IntArray

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def elements(self) -> IntArray:
        """Elements of each segment (n)."""
        total: IntArray = np.prod(self.shape, axis=1, dtype=np.int64)
        return total

    @property
    def src_contiguous(self) -> NDArray[np.bool_]:
        """Whether the segment is one run in the storage it reads (n)."""
        return _one_run(self.shape, self.src_stride)

    @property
    def dst_contiguous(self) -> NDArray[np.bool_]:
        """Whether the segment is one run in the storage it writes (n)."""
        return _one_run(self.shape, self.dst_stride)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> SegmentTable:
        """The rows selected by an index array, a mask or a slice."""
        return SegmentTable(*(getattr(self, column.name)[rows] for column in fields(self)))

    @staticmethod
    def empty() -> SegmentTable:
        """A table without rows."""
        flat, wide = np.zeros(0, dtype=np.int64), np.zeros((0, 1), dtype=np.int64)
        return SegmentTable(*[flat] * 8, *[wide] * 3)

    @staticmethod
    def concat(tables: Sequence[SegmentTable]) -> SegmentTable:
        """All rows of ``tables`` (at least one, equal ``k``)."""
        return SegmentTable(
            *(np.concatenate([getattr(t, column.name) for t in tables]) for column in fields(SegmentTable))
        )


@dataclass(frozen=True, eq=False)
class RoundLoads:
    """What a schedule asks of the cluster, for pricing: one row per (round, src, dst) that carries anything.

    Columns (n): round, src, dst; bytes on the wire between the two ranks (payload, 16-byte aligned); messages posted;
    pack_bytes and pack_segments copied into send buffers on src; unpack_bytes and unpack_segments copied out on dst;
    pack_runs and unpack_runs, the contiguous runs that those segments are read in on src and written in on dst; copies,
    the strided copies that either end makes of them in flat storages: fewer than segments where what lies evenly spaced
    is joined (``batching``).
    Rows with src == dst are copies inside a rank: bytes is what is copied, messages is 0, packs are 0.
    ``rounds`` counts the exchanges, also where the last ones are empty.
    """

    rounds: int
    round: IntArray
    src: IntArray
    dst: IntArray
    bytes: IntArray
    messages: IntArray
    pack_bytes: IntArray
    pack_segments: IntArray
    unpack_bytes: IntArray
    unpack_segments: IntArray
    pack_runs: IntArray
    unpack_runs: IntArray
    copies: IntArray

    def apart(self) -> RoundLoads:
        """The same where nothing lies so that segments can be joined: as many copies as segments."""
        return replace(self, copies=self.pack_segments)
