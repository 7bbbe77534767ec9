"""Planners of torch's distributed checkpoint (DCP) over layouts: what a rank holds of a tensor are chunks of it.

    planner = LayoutSavePlanner(layout, rank, {"notes": data})
    dcp.save(local_state(layout, held), storage_writer=writer, planner=planner, process_group=group)

    planner = LayoutLoadPlanner(layout, rank)                           # of any other layout of the same tensors
    dcp.load(local_state(layout, into), storage_reader=reader, planner=planner, process_group=group)

Every tensor is written by its logical shape, each element once however many ranks hold it. What a rank loads is cut on
the borders of the chunks in the files, and each part copied into its place in the rank's storage; DCP's file reader
reads the whole of a chunk for each part that it takes out of it. Layouts are those of the ranks of ``process_group``.
DCP calls ``set_up_planner``, ``create_local_plan``, ``finish_plan`` and everything after them on every rank,
``create_global_plan`` on its first.
"""

from __future__ import annotations

import io
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from relaymeter.errors import InputError
from relaymeter.relayout.layout import IntArray, Layout, Placement, TensorSpec

__all__ = ["LayoutLoadPlanner", "LayoutSavePlanner", "chosen_pieces", "local_state", "piece_view"]


def local_state(layout: Layout, storages: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state dict of one rank for these planners: every tensor of ``layout``, the rank's 1-D storage or, where it
    holds nothing, none. Equal keys on all ranks."""
    return {name: storages.get(name) for name in layout.specs}


def chosen_pieces(layout: Layout) -> dict[str, IntArray]:
    """For each tensor the pieces that are written: every element once. Pure, the same on every rank.

    Of several copies, largest tensors first, that one is written after which the most loaded of its holders has least
    to write.
    """
    load = np.zeros(layout.world_size)
    known: dict[bytes, list[tuple[IntArray, IntArray, IntArray]]] = {}
    found: dict[str, IntArray] = {}
    for spec in sorted(layout.specs.values(), key=lambda spec: -spec.nbytes):
        place = layout.placements[spec.name]
        if place.signature not in known:
            known[place.signature] = [_shares(place, cover) for cover in place.covers]
        copies = known[place.signature]
        if not copies:
            found[spec.name] = np.zeros(0, dtype=np.int64)
            continue
        peaks = [(load[ranks] + elements * spec.itemsize).max() for _, ranks, elements in copies]
        found[spec.name], ranks, elements = copies[int(np.argmin(peaks))]
        load[ranks] += elements * spec.itemsize
    return found


def _shares(place: Placement, cover: tuple[int, ...]) -> tuple[IntArray, IntArray, IntArray]:
    """The pieces of a cover, the ranks that hold them and the elements on each."""
    rows = np.asarray(cover, dtype=np.int64)
    numel = place.shape[rows].prod(axis=1, dtype=np.int64)
    ranks, which = np.unique(place.rank[rows], return_inverse=True)
    return rows, ranks, np.bincount(which.reshape(-1), weights=numel).astype(np.int64)


def _chunk(place: Placement, row: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(place.lo[row].tolist()), torch.Size(place.shape[row].tolist()))


def piece_view(storage: torch.Tensor, place: Placement, row: int) -> torch.Tensor:
    """Piece ``row`` as it lies in the rank's storage."""
    begin = storage.storage_offset() + int(place.offset[row])
    return storage.detach().as_strided(place.shape[row].tolist(), place.stride[row].tolist(), begin)


def _dtype(spec: TensorSpec) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.dtype)
    return found


class LayoutSavePlanner(DefaultSavePlanner):
    """Writes the tensors of a layout, and ``entries``: bytes that the first rank writes by their name."""

    def __init__(self, layout: Layout, rank: int, entries: Mapping[str, bytes] | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._layout, self._rank, self._entries = layout, rank, dict(entries or {})
        self._rows: dict[MetadataIndex, int] = {}
        self.planned = 0.0
        """``time.perf_counter()`` when all ranks had planned, and writing began."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        chosen_of = chosen_pieces(self._layout)
        for name, spec in self._layout.specs.items():  # in this order, so that reads of a file go forward
            place, chosen = self._layout.placements[name], chosen_of[name]
            properties, size = TensorProperties(dtype=_dtype(spec)), torch.Size(spec.shape)
            for row in chosen[place.rank[chosen] == self._rank].tolist():
                chunk = _chunk(place, row)
                index = MetadataIndex(name, chunk.offsets)
                self._rows[index] = row
                data = TensorWriteData(chunk=chunk, properties=properties, size=size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        for name, content in self._entries.items() if self._rank == 0 else ():
            told = BytesIOWriteData(len(content))
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=told))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for name, spec in self._layout.specs.items():
            if not spec.numel:  # no rank writes a chunk of it, yet it belongs to the checkpoint
                empty = TensorStorageMetadata(TensorProperties(dtype=_dtype(spec)), torch.Size(spec.shape), [])
                metadata.state_dict_metadata[name] = empty
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.plan, self.planned = new_plan, time.perf_counter()
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._entries[name])
        return piece_view(self.state_dict[name], self._layout.placements[name], self._rows[write_item.index])

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the elements that this rank writes."""
        return sum(
            int(self._layout.placements[index.fqn].shape[row].prod()) * self._layout.specs[index.fqn].itemsize
            for index, row in self._rows.items()
        )


class LayoutLoadPlanner(DefaultLoadPlanner):
    """Reads the tensors of a layout into this rank's storages. Keys of the state dict that the layout does not have
    are entries of bytes, and come to ``entries``."""

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._layout, self._rank = layout, rank
        self._items: list[ReadItem] | None = None
        self.entries: dict[str, bytes] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def plan(self, metadata: Metadata) -> list[ReadItem]:
        """What this rank reads of the tensors; nothing is read yet. Pure but for keeping it for ``create_local_plan``.

        Raises InputError where the checkpoint lacks a tensor of the layout or holds it in another shape or dtype, or
        lacks elements of it that this rank needs.
        """
        self._items = []
        for name, spec in self._layout.specs.items():
            saved = metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata):
                what = "no such tensor" if saved is None else "an entry of bytes of that name"
                raise InputError(f"{name} {list(spec.shape)} is wanted, but the checkpoint has {what}")
            kept = list(saved.size), str(saved.properties.dtype).removeprefix("torch.")
            if kept != (list(spec.shape), spec.dtype):
                raise InputError(
                    f"{name} is {kept[1]} {kept[0]} in the checkpoint, {spec.dtype} {list(spec.shape)} is wanted"
                )
            self._items += self._reads(name, saved)
        return self._items

    def _reads(self, name: str, saved: TensorStorageMetadata) -> list[ReadItem]:
        place = self._layout.placements[name]
        chunks = [_chunk(place, row) for row in place.pieces_of(self._rank).tolist()]
        items = create_read_items_for_chunk_list(name, saved, chunks)
        filled: dict[int, int] = defaultdict(int)
        for item in items:
            filled[_number(item)] += item.lengths.numel()
        for number, chunk in enumerate(chunks):
            wanted, have = chunk.sizes.numel(), filled[number]
            if have != wanted:
                raise InputError(
                    f"{name} {list(saved.size)}: of the {wanted} elements wanted from {list(chunk.offsets)} on, shape "
                    f"{list(chunk.sizes)}, the checkpoint's chunks hold {have}"
                )
        return items

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise InputError("the checkpoint has no metadata")
        items = list(self.plan(self.metadata) if self._items is None else self._items)
        for name in self.state_dict:
            if name not in self._layout.specs:
                if not isinstance(self.metadata.state_dict_metadata.get(name), BytesStorageMetadata):
                    raise InputError(f"it has no entry {name!r}: it was not written by relaymeter's save_dcp")
                index, none, one = MetadataIndex(name), torch.Size((0,)), torch.Size((0,))
                items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, one))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.entries[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        name = read_item.dest_index.fqn
        place = self._layout.placements[name]
        row = int(place.pieces_of(self._rank)[_number(read_item)])
        view = piece_view(self.state_dict[name], place, row)
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, begin, length)
        return view

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the elements that this rank takes out of the files."""
        items = self._items or ()
        return sum(item.lengths.numel() * self._layout.specs[item.dest_index.fqn].itemsize for item in items)

    def file_bytes(self, metadata: Metadata) -> int:
        """Bytes that this rank reads for them: the whole of a chunk for each part of it."""
        return sum(metadata.storage_data[item.storage_index].length for item in self._items or ())


def _number(item: ReadItem) -> int:
    """Which of the rank's pieces of the tensor an item fills a part of."""
    if item.dest_index.index is None:
        raise InputError(f"torch {torch.__version__} plans reads of {item.dest_index.fqn} without the piece's number")
    return item.dest_index.index
