"""Packing: copies of segments between storages and message buffers, as views made once and copied often.

``gather_copies(table, buffer, held)`` gives the ``Copies`` that fill a send buffer from the storages ``held`` (a
``MoveStorages``); ``.run()`` performs them. Local: no rank talks to another here. Bits are copied as integers of the
element's width, whatever the dtype, except where a cast was asked for: then a row that reads a source is converted
(to nearest, ties to even) as it is packed, and all that follows are the destination's bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.relayout.batching import Places, batched
from relaymeter.relayout.casts import settle_nan
from relaymeter.relayout.copy_kernel import DeviceCopies, available
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.segments import FROM_DESTINATION, PART_ALIGN, SegmentTable, source_space
from relaymeter.relayout.traffic import converted, part_offsets, segment_bytes

__all__ = [
    "Copies",
    "MoveStorages",
    "Storages",
    "check_extents",
    "gather_copies",
    "local_copies",
    "scatter_copies",
]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_RAW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies of ``sources[i]`` into ``targets[i]``: views of equal shape, made once. Of unequal dtypes they convert.

    On a CUDA device, where Triton is there, all that do not convert are one launch (``copy_kernel``), compiled here.
    """

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]

    def __post_init__(self) -> None:
        _ = self._fused  # compiled now, not where time is taken

    def run(self) -> None:
        """Copy everything. On a CUDA device this only enqueues."""
        if self._fused is not None:
            self._fused.run()
        targets, sources = self._one_by_one
        if targets:
            torch._foreach_copy_(targets, sources)
        for target in self._converted:
            settle_nan(target)

    @cached_property
    def _converted(self) -> list[torch.Tensor]:
        pairs = zip(self.targets, self.sources, strict=True)
        return [target for target, source in pairs if target.dtype != source.dtype]

    @cached_property
    def _fused(self) -> DeviceCopies | None:
        if not self.targets or self.targets[0].device.type != "cuda" or not available():
            return None
        pairs = zip(self.targets, self.sources, strict=True)
        alike = [(target, source) for target, source in pairs if target.dtype == source.dtype]
        return DeviceCopies([target for target, _ in alike], [source for _, source in alike])

    @cached_property
    def _one_by_one(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._fused is None:
            return self.targets, self.sources
        pairs = zip(self.targets, self.sources, strict=True)
        return self._converted, [source for target, source in pairs if target.dtype != source.dtype]


class _Memories:
    """Flat memories, each seen as one dtype: tensors over one allocation share a number, so copies may be joined."""

    def __init__(self) -> None:
        self.flat: list[torch.Tensor] = []
        self._number: dict[tuple[int, int, torch.dtype], int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the memory that 1-D ``tensor`` lies in; places in it count from the allocation's start."""
        memory = tensor.untyped_storage()
        key = (memory.data_ptr(), memory.nbytes(), tensor.dtype)
        if key not in self._number:
            self._number[key] = len(self.flat)
            self.flat.append(tensor)
        return self._number[key]

    def views(self, shape: IntArray, places: Places) -> list[torch.Tensor]:
        rows = zip(places.base.tolist(), shape.tolist(), places.stride.tolist(), places.offset.tolist(), strict=True)
        return [self.flat[base].as_strided(size, step, at) for base, size, step, at in rows]


def _copies(shape: IntArray, reads: Places, writes: Places, memories: _Memories) -> Copies:
    shape, reads, writes = batched(shape, reads, writes)
    return Copies(memories.views(shape, writes), memories.views(shape, reads))


class Storages:
    """One rank's storages of one layout by tensor index. The addresses stay the caller's."""

    def __init__(self, specs: Sequence[TensorSpec], held: Mapping[str, torch.Tensor], where: str) -> None:
        """``held`` maps names of ``specs`` to 1-D contiguous tensors; ``where`` names rank and layout in errors.

        Raises InputError on any other tensor.
        """
        self.names = [spec.name for spec in specs]
        self._where = where
        self.tensors: list[torch.Tensor | None] = []
        for spec in specs:
            tensor = held.get(spec.name)
            if tensor is not None:
                if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype != getattr(torch, spec.dtype):
                    raise InputError(
                        f"{self._where}: storage of {spec.name} must be a contiguous 1-D tensor of {spec.dtype}, got "
                        f"shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
                    )
                tensor = tensor.detach()
            self.tensors.append(tensor)
        self.size = np.asarray([-1 if held is None else held.numel() for held in self.tensors], dtype=np.int64)

    def check(self, table: SegmentTable, side: Literal["src", "dst"]) -> None:
        """Raise InputError where a row reads (``side`` "src") or writes ("dst") what is not held."""
        check_extents(table, side, self.size, self.names, self._where)


def check_extents(
    table: SegmentTable, side: Literal["src", "dst"], size: IntArray, names: Sequence[str], where: str
) -> None:
    """Raise InputError where a row reads ("src") or writes ("dst") past the ``size`` elements (-1: no storage) that
    ``where`` holds of a tensor. Both are indexed by tensor."""
    offset, stride = (table.src_offset, table.src_stride) if side == "src" else (table.dst_offset, table.dst_stride)
    last = offset + ((table.shape - 1) * stride).sum(axis=1)
    outside = np.flatnonzero((last >= size[table.tensor]) | (offset < 0))
    if len(outside):
        row = int(outside[0])
        tensor = int(table.tensor[row])
        raise InputError(
            f"{where}: a segment needs element {int(last[row])} of {names[tensor]}, the storage handed in has "
            f"{max(int(size[tensor]), 0)}"
        )


class MoveStorages:
    """One rank's storages of all layouts of a move: of every source in the caller's order, and of the destination."""

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        source_tensors: Sequence[TensorSpec],
        sources: Sequence[Mapping[str, torch.Tensor]],
        destination: Mapping[str, torch.Tensor],
        rank: int,
    ) -> None:
        """``tensors`` are the destination's specs, ``source_tensors`` the same tensors as the sources hold them.

        Raises InputError for a storage of another shape or dtype, and where the destination shares memory with a
        source or with itself: a move in place would read what it has already written.
        """
        self.itemsize = np.asarray([spec.itemsize for spec in tensors], dtype=np.int64)
        self.converts = converted(tensors, source_tensors)
        self._dtypes = [getattr(torch, spec.dtype) for spec in tensors]
        self._where = f"rank {rank}"
        self.memories = _Memories()
        names = ["source"] if len(sources) == 1 else [f"source layout {k}" for k in range(len(sources))]
        self.sources = [
            Storages(source_tensors, held, f"rank {rank}, {name}") for held, name in zip(sources, names, strict=True)
        ]
        self.destination = Storages(tensors, destination, f"rank {rank}, destination")
        every = np.zeros(len(tensors), dtype=np.bool_)
        self._typed = self._numbered(self.destination, ~every)
        self._raw = self._numbered(self.destination, every)
        self._spaces = {FROM_DESTINATION: (self.destination, self._raw)}
        for number, held in enumerate(self.sources):
            self._spaces[source_space(number)] = (held, self._numbered(held, self.converts))
        _refuse_shared_memory(self._where, self.sources, self.destination)

    def converting(self, table: SegmentTable) -> BoolArray:
        """Rows that convert what they read (n)."""
        mask: BoolArray = self.converts[table.tensor] & (table.src_space != FROM_DESTINATION)
        return mask

    def reads(self, table: SegmentTable) -> Places:
        """Where each row reads. Raises InputError where a row reads a layout or an element that is not held."""
        base, offset = np.zeros(len(table), dtype=np.int64), table.src_offset.copy()
        for space in np.unique(table.src_space).tolist():
            if space not in self._spaces:
                last = len(self.sources) - 1
                raise InputError(f"{self._where}: a segment reads source layout {space - 1}, the last one is {last}")
            rows = np.flatnonzero(table.src_space == space)
            held, (number, origin) = self._spaces[space]
            part = table.take(rows)
            held.check(part, "src")
            base[rows] = number[part.tensor]
            offset[rows] += origin[part.tensor]
        return Places(base, offset, table.src_stride)

    def writes(self, table: SegmentTable, *, converting: BoolArray | None = None) -> Places:
        """Where each row writes the destination; rows that are ``converting`` (n) see it in its own dtype, not raw."""
        self.destination.check(table, "dst")
        number, origin = self._raw
        base = number[table.tensor]
        if converting is not None:
            base = np.where(converting, self._typed[0][table.tensor], base)
        return Places(base, table.dst_offset + origin[table.tensor], table.dst_stride)

    def parts(self, table: SegmentTable, buffer: torch.Tensor, *, converting: BoolArray | None = None) -> Places:
        """The parts of the message that ``table`` makes in ``buffer`` (uint8), row-major in the segments' shapes."""
        offsets, total = part_offsets(segment_bytes(table, self.itemsize))
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < total:
            raise InputError(f"a message of {total} bytes needs a uint8 buffer, got {buffer.numel()} of {buffer.dtype}")
        itemsize = self.itemsize[table.tensor]
        base = np.zeros(len(table), dtype=np.int64)
        buffer = buffer[: len(buffer) // PART_ALIGN * PART_ALIGN]
        for size in np.unique(itemsize).tolist():
            base[itemsize == size] = self.memories.number(buffer.view(_RAW[size]))
        if converting is not None:
            for tensor in np.unique(table.tensor[converting]).tolist():
                typed = self.memories.number(buffer.view(self._dtypes[tensor]))
                base[converting & (table.tensor == tensor)] = typed
        stride = np.ones_like(table.shape)
        stride[:, :-1] = np.cumprod(table.shape[:, :0:-1], axis=1)[:, ::-1]
        return Places(base, (offsets + buffer.storage_offset()) // itemsize, stride)

    def read_runs(self, table: SegmentTable) -> list[torch.Tensor]:
        """What rows that are one run in the storage they read are, as bytes (uint8, 1-D)."""
        return self._bytes(table, self.reads(table))

    def written_runs(self, table: SegmentTable) -> list[torch.Tensor]:
        """What rows that are one run in the storage they write are, as bytes (uint8, 1-D)."""
        return self._bytes(table, self.writes(table))

    def _bytes(self, table: SegmentTable, places: Places) -> list[torch.Tensor]:
        ones = np.ones((len(table), 1), dtype=np.int64)
        views = self.memories.views(table.elements[:, None], Places(places.base, places.offset, ones))
        return [view.view(torch.uint8) for view in views]

    def _numbered(self, held: Storages, typed: BoolArray) -> tuple[IntArray, IntArray]:
        """Memory of each tensor's storage, seen as its dtype where ``typed``, raw elsewhere, and its place in there."""
        numbers, origins = np.full(len(typed), -1, dtype=np.int64), np.zeros(len(typed), dtype=np.int64)
        for index, tensor in enumerate(held.tensors):
            if tensor is not None:
                view = tensor if typed[index] else tensor.view(_RAW[tensor.element_size()])
                numbers[index], origins[index] = self.memories.number(view), view.storage_offset()
        return numbers, origins


def _refuse_shared_memory(where: str, sources: Sequence[Storages], destination: Storages) -> None:
    found = [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, held is destination, name)
        for held in (*sources, destination)
        for name, tensor in zip(held.names, held.tensors, strict=True)
        if tensor is not None and tensor.numel()
    ]
    read_end, reader, written_end, writer = 0, "", 0, ""
    for start, stop, written, name in sorted(found):
        if start < written_end or (written and start < read_end):
            other = writer if start < written_end else reader
            raise InputError(
                f"{where}: a move in place is not applicable: the destination writes memory that the storages of "
                f"{other} and {name} share; hand in storages of their own"
            )
        if written:
            written_end, writer = stop, name
        elif stop > read_end:
            read_end, reader = stop, name


def gather_copies(table: SegmentTable, buffer: torch.Tensor, held: MoveStorages) -> Copies:
    """Copies of the rows of ``table`` into the message ``buffer`` (1-D uint8), parts in order on multiples of 16 bytes.

    Each row reads the layout that its ``src_space`` names; a row that converts makes the destination's bits.
    """
    parts = held.parts(table, buffer, converting=held.converting(table))
    return _copies(table.shape, held.reads(table), parts, held.memories)


def scatter_copies(table: SegmentTable, buffer: torch.Tensor, held: MoveStorages) -> Copies:
    """Copies of a received message ``buffer`` (1-D uint8) into the storages that the rows of ``table`` write."""
    return _copies(table.shape, held.parts(table, buffer), held.writes(table), held.memories)


def local_copies(table: SegmentTable, held: MoveStorages) -> Copies:
    """Copies within a rank, storage to storage, of rows whose two ranks are the same."""
    return _copies(table.shape, held.reads(table), held.writes(table, converting=held.converting(table)), held.memories)
