"""Traffic: what one rank packs, sends and receives in each round of a move. Pure NumPy, no torch.

``Traffic(schedule, rank, world_size, "send-recv")`` derives every message from the rows alone, so that both ends come
to the same and buffers are known before any storage is.

Under send-recv a segment that is one run on both sides, has at least DIRECT_MIN_BYTES and is not converted is a message
of its own, straight from storage into storage; all others of a pair and round are parts of one packed message, sent
after those. Under all-to-all everything is packed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.relayout.layout import TensorSpec, refuse_cast
from relaymeter.relayout.segments import DIRECT_MIN_BYTES, FROM_DESTINATION, PART_ALIGN, SegmentTable

__all__ = ["RunnableSchedule", "Traffic", "Way", "converted", "part_offsets", "segment_bytes"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class RunnableSchedule(Protocol):
    """What a mover needs of a schedule: ``tensors`` as they arrive, ``source_tensors`` the same as they leave."""

    @property
    def tensors(self) -> Sequence[TensorSpec]: ...
    @property
    def source_tensors(self) -> Sequence[TensorSpec]: ...
    @property
    def rounds(self) -> int: ...
    @property
    def input_hash(self) -> bytes: ...
    def segments_for(self, rank: int) -> SegmentTable: ...


def segment_bytes(table: SegmentTable, itemsize: IntArray) -> IntArray:
    """Bytes of each segment (n). ``itemsize`` is indexed by tensor."""
    return table.elements * itemsize[table.tensor]


def part_offsets(nbytes: IntArray) -> tuple[IntArray, int]:
    """Where parts of ``nbytes`` (n) begin in a message, each on a multiple of PART_ALIGN, and the message's bytes."""
    padded = -(-nbytes // PART_ALIGN) * PART_ALIGN
    ends = np.cumsum(padded)
    return ends - padded, int(ends[-1]) if len(ends) else 0


def converted(tensors: Sequence[TensorSpec], source_tensors: Sequence[TensorSpec]) -> BoolArray:
    """Which ``tensors``, as they arrive, have another dtype than the same ``source_tensors``, as they leave (n).

    Raises InputError where the lists do not name the same tensors, and for a cast that ``refuse_cast`` refuses.
    """
    if [spec.name for spec in tensors] != [spec.name for spec in source_tensors]:
        raise InputError("the tensors that leave and those that arrive must have the same names in the same order")
    found = np.zeros(len(tensors), dtype=np.bool_)
    for index, (arrives, leaves) in enumerate(zip(tensors, source_tensors, strict=True)):
        if arrives.dtype != leaves.dtype:
            refuse_cast(arrives.name, leaves.dtype, arrives.dtype)
            found[index] = True
    return found


@dataclass(frozen=True, eq=False)
class Way:
    """What a rank sends, or what it receives, in one round: rows that are ``direct`` messages and rows that are
    ``packed``, each by peer and, with one peer, in the table's order.

    ``direct_peer``: the peer of each direct row. ``borders`` (world_size + 1): where the packed message of each rank
    begins in the buffer, in bytes.
    """

    direct: SegmentTable
    direct_peer: list[int]
    packed: SegmentTable
    borders: list[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all packed messages."""
        return self.borders[-1]

    @property
    def splits(self) -> list[int]:
        """Bytes of the packed message of each rank."""
        return [end - begin for begin, end in itertools.pairwise(self.borders)]


class Traffic:
    """What ``rank`` of ``world_size`` ranks moves in each round: ``sends``, ``receives`` and ``local`` rows."""

    def __init__(self, schedule: RunnableSchedule, rank: int, world_size: int, executor: str) -> None:
        """Raises InputError on rows that are not in order of their rounds and on a cast that is not offered."""
        self.rank, self.world_size, self.rounds, self.executor = rank, world_size, schedule.rounds, executor
        self.table = table = schedule.segments_for(rank)
        self.itemsize = np.asarray([spec.itemsize for spec in schedule.tensors], dtype=np.int64)
        self.converts = converted(schedule.tensors, schedule.source_tensors)
        ends = np.concatenate([[0], table.round, [self.rounds - 1]])
        if len(table) and bool((np.diff(ends) < 0).any()):
            raise InputError(f"rank {rank}: rows of {self.rounds} rounds must be in order of their rounds")
        here = np.flatnonzero((table.src_rank == rank) & (table.dst_rank == rank))
        self._here, self._out, self._back = self._by_round(here), self._side("src"), self._side("dst")

    def sends(self, number: int) -> Way:
        """What the rank sends in round ``number``."""
        return self._way(self._out, number)

    def receives(self, number: int) -> Way:
        """What the rank receives in round ``number``."""
        return self._way(self._back, number)

    def local(self, number: int) -> SegmentTable:
        """The rows of round ``number`` within the rank."""
        return self.table.take(self._here.of(number))

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of the packed messages, sent and received, of the fullest round."""
        return int((self._out.borders[:, -1] + self._back.borders[:, -1]).max(initial=0))

    @cached_property
    def most_packed_bytes(self) -> int:
        """Bytes of the largest packed message."""
        return max(int(np.diff(side.borders, axis=1).max(initial=0)) for side in (self._out, self._back))

    def _by_round(self, rows: IntArray) -> _Rows:
        return _Rows(rows, np.searchsorted(self.table.round[rows], np.arange(self.rounds + 1)).tolist())

    def _side(self, side: Literal["src", "dst"]) -> _Side:
        table = self.table
        mine, peer = (table.src_rank, table.dst_rank) if side == "src" else (table.dst_rank, table.src_rank)
        rows = np.flatnonzero((mine == self.rank) & (peer != self.rank))
        rows = rows[np.lexsort((peer[rows], table.round[rows]))]
        apart = self._direct(table.take(rows))
        packed = rows[~apart]
        padded = -(-segment_bytes(table.take(packed), self.itemsize) // PART_ALIGN) * PART_ALIGN
        key = table.round[packed] * self.world_size + peer[packed]
        # sums of whole numbers below 2^53 are exact as floats
        sizes = np.bincount(key, weights=padded, minlength=self.rounds * self.world_size).astype(np.int64)
        borders = np.zeros((self.rounds, self.world_size + 1), dtype=np.int64)
        np.cumsum(sizes.reshape(self.rounds, self.world_size), axis=1, out=borders[:, 1:])
        return _Side(peer, self._by_round(rows[apart]), self._by_round(packed), borders)

    def _way(self, side: _Side, number: int) -> Way:
        direct, packed = side.direct.of(number), side.packed.of(number)
        return Way(
            self.table.take(direct), side.peer[direct].tolist(), self.table.take(packed), side.borders[number].tolist()
        )

    def _direct(self, rows: SegmentTable) -> BoolArray:
        """Rows that are messages of their own: the same on both ends."""
        if self.executor != "send-recv":
            return np.zeros(len(rows), dtype=np.bool_)
        large = segment_bytes(rows, self.itemsize) >= DIRECT_MIN_BYTES
        raw = ~self.converts[rows.tensor] | (rows.src_space == FROM_DESTINATION)
        found: BoolArray = rows.src_contiguous & rows.dst_contiguous & large & raw
        return found


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a table in order of their rounds; those of round k are ``rows[borders[k] : borders[k + 1]]``."""

    rows: IntArray
    borders: list[int]

    def of(self, number: int) -> IntArray:
        return self.rows[self.borders[number] : self.borders[number + 1]]


@dataclass(frozen=True, eq=False)
class _Side:
    """All rounds of one way: the peer of each row of the table, rows by kind, and the borders of Way (rounds, ...)."""

    peer: IntArray
    direct: _Rows
    packed: _Rows
    borders: IntArray
