"""Storages of one rank as a layout lists them: ``new_storages(layout, rank)`` allocates one tensor for each weight."""

from __future__ import annotations

import torch

from relaymeter.relayout.layout import Layout

__all__ = ["new_storages"]


def new_storages(layout: Layout, rank: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """A 1-D tensor of zeros, by name, for each tensor that ``rank`` holds a part of: of as many elements as the layout
    says, padding included. What the rank holds nothing of is left out. Local."""
    return {
        name: torch.zeros(place.storage[rank], dtype=getattr(torch, layout.specs[name].dtype), device=device)
        for name, place in layout.placements.items()
        if place.storage.get(rank)
    }
