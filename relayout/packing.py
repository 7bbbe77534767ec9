"""Packing: copies of segments between storages and message buffers, as views made once and copied often.

``gather_copies(table, buffer, source)`` gives the ``Copies`` that fill a send buffer; ``.run()`` performs them. Local:
no rank talks to another here. Bits are copied as integers of the element's width, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.segments import FROM_DESTINATION, PART_ALIGN, SegmentTable

__all__ = [
    "Copies",
    "Storages",
    "gather_copies",
    "local_copies",
    "part_offsets",
    "read_views",
    "scatter_copies",
    "segment_bytes",
]

IntArray = NDArray[np.int64]
_RAW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies of ``sources[i]`` into ``targets[i]``: views of equal shape, made once."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]

    def run(self) -> None:
        """Copy everything. On a CUDA device this only enqueues."""
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


class Storages:
    """One rank's storages of one layout by tensor index, seen as raw integers. The addresses stay the caller's."""

    def __init__(self, specs: Sequence[TensorSpec], held: Mapping[str, torch.Tensor], rank: int, layout: str) -> None:
        """``held`` maps names of ``specs`` to 1-D contiguous tensors. Raises InputError on any other tensor."""
        self.itemsize = np.asarray([spec.itemsize for spec in specs], dtype=np.int64)
        self._names = [spec.name for spec in specs]
        self._where = f"rank {rank}, {layout}"
        self._raw: list[torch.Tensor | None] = []
        for spec in specs:
            tensor = held.get(spec.name)
            if tensor is None:
                self._raw.append(None)
                continue
            if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.element_size() != spec.itemsize:
                raise InputError(
                    f"{self._where}: storage of {spec.name} must be a contiguous 1-D tensor of {spec.itemsize}-byte "
                    f"elements, got shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
                )
            self._raw.append(tensor.detach().view(_RAW[spec.itemsize]))

    def views(self, table: SegmentTable, side: str) -> list[torch.Tensor]:
        """A strided view for each row, of what it reads (``side`` "src") or writes ("dst").

        Raises InputError where a row names a tensor that is not held or runs past the end of its storage.
        """
        offset, stride = (table.src_offset, table.src_stride) if side == "src" else (table.dst_offset, table.dst_stride)
        last = offset + ((table.shape - 1) * stride).sum(axis=1)
        size = np.asarray([-1 if raw is None else raw.numel() for raw in self._raw], dtype=np.int64)
        outside = np.flatnonzero((last >= size[table.tensor]) | (offset < 0))
        if len(outside):
            row = int(outside[0])
            tensor = int(table.tensor[row])
            raise InputError(
                f"{self._where}: a segment needs element {int(last[row])} of {self._names[tensor]}, the storage handed "
                f"in has {max(int(size[tensor]), 0)}"
            )
        rows = zip(table.tensor.tolist(), table.shape.tolist(), stride.tolist(), offset.tolist(), strict=True)
        cut = ((self._raw[tensor], shape, step, at) for tensor, shape, step, at in rows)
        return [r.as_strided(shape, step, r.storage_offset() + at) for r, shape, step, at in cut if r is not None]


def segment_bytes(table: SegmentTable, itemsize: IntArray) -> IntArray:
    """Bytes of each segment (n). ``itemsize`` is indexed by tensor."""
    return table.elements * itemsize[table.tensor]


def part_offsets(nbytes: IntArray) -> tuple[IntArray, int]:
    """Where parts of ``nbytes`` (n) begin in a message, each on a multiple of PART_ALIGN, and the message's bytes."""
    padded = -(-nbytes // PART_ALIGN) * PART_ALIGN
    ends = np.cumsum(padded)
    return ends - padded, int(ends[-1]) if len(ends) else 0


def _parts(table: SegmentTable, itemsize: IntArray, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The parts of the message that ``table`` makes, as views of ``buffer`` (uint8) in the shape of the segments."""
    nbytes = segment_bytes(table, itemsize)
    offsets, total = part_offsets(nbytes)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < total:
        raise InputError(f"a message of {total} bytes needs a uint8 buffer, got {buffer.numel()} of {buffer.dtype}")
    shapes, sizes = table.shape.tolist(), itemsize[table.tensor].tolist()
    rows = zip(offsets.tolist(), nbytes.tolist(), shapes, sizes, strict=True)
    return [buffer[at : at + count].view(_RAW[size]).view(shape) for at, count, shape, size in rows]


def read_views(table: SegmentTable, source: Storages, destination: Storages | None = None) -> list[torch.Tensor]:
    """What each row reads: from ``destination`` where its src_space is FROM_DESTINATION, else from ``source``."""
    if destination is None:
        return source.views(table, "src")
    second = table.src_space == FROM_DESTINATION
    views: list[torch.Tensor | None] = [None] * len(table)
    for mask, storages in ((~second, source), (second, destination)):
        for row, view in zip(np.flatnonzero(mask).tolist(), storages.views(table.take(mask), "src"), strict=True):
            views[row] = view
    return [view for view in views if view is not None]


def gather_copies(
    table: SegmentTable, buffer: torch.Tensor, source: Storages, destination: Storages | None = None
) -> Copies:
    """Copies of the rows of ``table`` into the message ``buffer`` (1-D uint8), parts in order on multiples of 16 bytes.

    Rows with src_space FROM_DESTINATION read ``destination``, the others ``source``.
    """
    return Copies(_parts(table, source.itemsize, buffer), read_views(table, source, destination))


def scatter_copies(table: SegmentTable, buffer: torch.Tensor, destination: Storages) -> Copies:
    """Copies of a received message ``buffer`` (1-D uint8) into the storages that the rows of ``table`` write."""
    return Copies(destination.views(table, "dst"), _parts(table, destination.itemsize, buffer))


def local_copies(table: SegmentTable, source: Storages, destination: Storages) -> Copies:
    """Copies within a rank, storage to storage, of rows whose two ranks are the same."""
    return Copies(destination.views(table, "dst"), read_views(table, source, destination))
