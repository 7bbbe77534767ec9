"""Storages of one rank as a layout lists them: ``new_storages(layout, rank)`` allocates one tensor for each weight,
``shard_view(layout, rank, name, storage)`` is a weight's shard in its own shape."""

from __future__ import annotations

import torch

from relaymeter.errors import LayoutError
from relaymeter.relayout.layout import Layout

__all__ = ["new_storages", "shard_view"]


def new_storages(layout: Layout, rank: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """A 1-D tensor of zeros, by name, for each tensor that ``rank`` holds a part of: of as many elements as the layout
    says, padding included. What the rank holds nothing of is left out. Local."""
    return {
        name: torch.zeros(place.storage[rank], dtype=getattr(torch, layout.specs[name].dtype), device=device)
        for name, place in layout.placements.items()
        if place.storage.get(rank)
    }


def shard_view(layout: Layout, rank: int, name: str, storage: torch.Tensor) -> torch.Tensor:
    """What ``rank`` holds of weight ``name``, in its own shape, over its 1-D ``storage``. Local. Raises LayoutError
    where that is not one box."""
    place = layout.placements[name]
    pieces = place.pieces_of(rank)
    if len(pieces) != 1:
        raise LayoutError(f"rank {rank} holds {len(pieces)} pieces of {name}: one box has a shape, others not")
    piece = int(pieces[0])
    begin = storage.storage_offset() + int(place.offset[piece])
    return storage.as_strided(tuple(place.shape[piece].tolist()), tuple(place.stride[piece].tolist()), begin)
