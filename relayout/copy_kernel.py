"""Copy kernel: all strided copies of a bucket in one Triton launch, whatever their dtypes, shapes and alignment.

``DeviceCopies(targets, sources).run()`` copies views of equal shape and element size that lie on one CUDA device; the
tables are made and the kernel is compiled when it is constructed. ``available()`` says whether Triton is there.
``compile_on(device)`` compiles it beforehand.
Triton (triton-lang) comes with torch's CUDA builds; without it ``packing.Copies`` does the same by torch's own copies.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from relaymeter.relayout.copy_tiles import tile_copies

__all__ = ["DeviceCopies", "available", "compile_on"]

#: Units that a program moves at a time, and its warps.
_UNITS, _WARPS = 1024, 4


@functools.cache
def available() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def compile_on(device: torch.device) -> None:
    """Compile the kernel for a CUDA ``device``, where Triton is there: seconds, once for a process, that no first move
    then has. Elsewhere nothing happens."""
    if device.type == "cuda" and available():
        one, other = torch.zeros(2, 64, dtype=torch.uint8, device=device)
        DeviceCopies([one], [other]).run()


class DeviceCopies:
    """Copies of ``sources[i]`` into ``targets[i]``, whose addresses must stay. Bits are copied, whatever the dtype."""

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Views of equal shapes and element sizes, none overlapping another's target. All on one device."""
        most = max((target.dim() for target in targets), default=0)

        def padded(values: Sequence[int], fill: int) -> list[int]:
            return [fill] * (most - len(values)) + list(values)

        count = len(targets)
        itemsize = np.asarray([target.element_size() for target in targets], dtype=np.int64)
        shape = np.asarray([padded(target.shape, 1) for target in targets], dtype=np.int64).reshape(count, most)
        strides = [
            np.asarray([padded(view.stride(), 0) for view in views], dtype=np.int64).reshape(count, most)
            * itemsize[:, None]
            for views in (sources, targets)
        ]
        places = [np.asarray([view.data_ptr() for view in views], dtype=np.int64) for views in (sources, targets)]
        found = tile_copies(places[0], places[1], shape, strides[0], strides[1], itemsize)
        self.nbytes = found.nbytes
        self._kept = (list(targets), list(sources))  # what the addresses stand for must not be freed
        self._count = len(found.tiles)
        if self._count:
            device = targets[0].device
            self._tiles = torch.from_numpy(found.tiles).to(device)
            self._launch(0)

    def run(self) -> None:
        """Enqueue the copies on the current stream of their device."""
        if self._count:
            self._launch(self._count)

    def _launch(self, tiles: int) -> None:
        """``tiles`` 0 compiles only: one program that finds nothing to do."""
        device = self._tiles.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            _kernel()[(max(1, tiles),)](self._tiles, tiles, UNITS=_UNITS, num_warps=_WARPS)


@functools.cache
def _kernel() -> Any:
    from relaymeter.relayout.copy_triton import copy_tiles

    return copy_tiles
