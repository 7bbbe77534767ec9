"""Destination storages of inference replicas: one flat buffer per rank, a view per weight, written in place.

``ReplicaStorage(layout, rank, device)`` allocates once; addresses never change afterwards, so CUDA graphs captured over
the views stay valid across moves. Each rank makes its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relaymeter.errors import LayoutError
from relaymeter.relayout.digest import POISON_BYTE
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.storages import shard_view

__all__ = ["ReplicaStorage"]

#: Weights start on multiples of this many bytes of the buffer.
_ALIGN = 256


class ReplicaStorage:
    """What ``rank`` holds of ``layout``. ``storages`` maps every weight it has a part of to a 1-D tensor."""

    def __init__(self, layout: Layout, rank: int, device: torch.device | str = "cpu") -> None:
        self._layout = layout
        self._rank = rank
        starts: dict[str, tuple[int, int]] = {}
        end = 0
        for name, spec in layout.specs.items():
            size = layout.placements[name].storage.get(rank, 0) * spec.itemsize
            if size:
                starts[name] = (end, size)
                end += -(-size // _ALIGN) * _ALIGN
        self.buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self.storages: Mapping[str, torch.Tensor] = {
            name: self.buffer[start : start + size].view(getattr(torch, layout.specs[name].dtype))
            for name, (start, size) in starts.items()
        }

    def poison(self) -> None:
        """Fill the buffer with the poison pattern, so that what a move leaves out cannot look right."""
        self.buffer.fill_(POISON_BYTE)

    def weight(self, name: str) -> torch.Tensor:
        """The shard of ``name`` (a tied name too) in its own shape, over the buffer. Raises LayoutError without one."""
        name = self._layout.aliases.get(name, name)
        if name not in self.storages:
            raise LayoutError(f"rank {self._rank} holds 0 pieces of {name}: one box has a shape, others not")
        return shard_view(self._layout, self._rank, name, self.storages[name])
