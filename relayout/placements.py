"""Builders of layouts from metadata: flat ranges, boxes, replicas, tensor-parallel copies; the other builders' names.

``zero3_layout(specs, ranks=(0, 1), world_size=4)`` is how a ZeRO-3 engine over ranks 0 and 1 holds its weights;
``tensor_parallel_layout(specs, cuts, replicas=[(2, 3)], world_size=4)`` is one TP2 copy on ranks 2 and 3. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relaymeter.relayout.combine import join_layouts, rank_bytes, restrict_layout, stage_specs
from relaymeter.relayout.cuts import Cut
from relaymeter.relayout.geometry import flat_boxes
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.meshes import make_placement, mesh_layout, strides_of
from relaymeter.relayout.partitions import zero3_layout, zero12_layout

__all__ = [
    "Cut",
    "flat_placement",
    "join_layouts",
    "mesh_layout",
    "rank_bytes",
    "replicated_layout",
    "restrict_layout",
    "shard_placement",
    "stage_specs",
    "tensor_parallel_layout",
    "zero3_layout",
    "zero12_layout",
]


def flat_placement(
    shape: tuple[int, ...], ranges: Sequence[tuple[int, int, int]], storage: Mapping[int, int]
) -> Placement:
    """Contiguous ranges of the flattened tensor: ``ranges`` holds (rank, start, stop), ``storage`` elements per rank.

    Element ``start`` is the first of the rank's storage; what the storage holds beyond ``stop - start`` is padding.
    Raises ValueError for a range outside the tensor.
    """
    rank, start, stop = np.asarray(ranges, dtype=np.int64).reshape(-1, 3).T
    numel = int(np.prod(shape, dtype=np.int64))
    wrong = np.flatnonzero((start < 0) | (start > stop) | (stop > numel))
    if len(wrong):
        raise ValueError(f"flat range {start[wrong[0]]}..{stop[wrong[0]]} outside a tensor of shape {tuple(shape)}")
    row, lo, size = flat_boxes(shape, start, stop)
    stride = np.broadcast_to(strides_of(np.asarray(shape, dtype=np.int64).reshape(1, -1)), lo.shape)
    return make_placement(rank[row], lo, size, (lo * stride).sum(axis=1) - start[row], stride, storage)


def shard_placement(shape: tuple[int, ...], boxes: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> Placement:
    """One box (lo, shape) per rank, stored contiguously and row-major. An empty one leaves a storage of 0 elements."""
    rank = np.asarray(list(boxes), dtype=np.int64)
    lo, size = (np.asarray([box[k] for box in boxes.values()], dtype=np.int64).reshape(-1, len(shape)) for k in (0, 1))
    count = np.prod(size, axis=1, dtype=np.int64)
    storage = dict(zip(rank.tolist(), count.tolist(), strict=True))
    keep = np.flatnonzero(count)
    zero = np.zeros(len(keep), dtype=np.int64)
    return make_placement(rank[keep], lo[keep], size[keep], zero, strides_of(size[keep]), storage)


def tensor_parallel_layout(
    specs: Mapping[str, TensorSpec],
    cuts: Mapping[str, Cut],
    replicas: Sequence[Sequence[int]],
    world_size: int,
    name: str = "tp",
    aliases: Mapping[str, str] | None = None,
) -> Layout:
    """Tensor-parallel copies: one per entry of ``replicas``, whose ranks hold the shards in order. Copies may be of
    unequal degrees.

    Raises LayoutError where a weight has no cut or a cut does not fit.
    """
    return mesh_layout(specs, cuts, replicas, world_size, name, aliases)


def replicated_layout(
    specs: Mapping[str, TensorSpec],
    ranks: Sequence[int],
    world_size: int,
    name: str = "replicated",
    aliases: Mapping[str, str] | None = None,
) -> Layout:
    """Every tensor whole on each of ``ranks``: data-parallel ranks without ZeRO. Raises LayoutError."""
    return mesh_layout(specs, dict.fromkeys(specs, Cut(None)), [[rank] for rank in ranks], world_size, name, aliases)
