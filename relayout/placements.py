"""Builders of layouts from metadata: ZeRO-3 partitions, tensor-parallel shards, replicas.

``zero3_layout(specs, ranks=(0, 1), world_size=4)`` is how a ZeRO-3 engine over ranks 0 and 1 holds its weights;
``tensor_parallel_layout(specs, cuts, replicas=[(2, 3)], world_size=4)`` is one TP2 copy on ranks 2 and 3. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relaymeter.errors import LayoutError
from relaymeter.relayout.geometry import flat_range_boxes, row_major_strides
from relaymeter.relayout.layout import IntArray, Layout, Placement, TensorSpec

__all__ = ["Cut", "flat_placement", "shard_placement", "tensor_parallel_layout", "zero3_layout"]


@dataclass(frozen=True)
class Cut:
    """How a weight is cut over the ranks of a tensor-parallel replica.

    ``dim`` is the dim that is cut, None for a copy on every rank. ``units`` is the number of equal indivisible blocks
    along it (attention heads); with fewer units than ranks each block is held by several ranks (GQA). None: any element
    may be a border; widths then differ by at most one.
    """

    dim: int | None
    units: int | None = None


_Part = tuple[IntArray, IntArray, IntArray, IntArray]


def _placement(ranks: list[int], parts: list[_Part], dims: int, storage: Mapping[int, int]) -> Placement:
    if not parts:
        flat, wide = np.zeros(0, dtype=np.int64), np.zeros((0, dims), dtype=np.int64)
        return Placement(flat, wide, wide, flat, wide, dict(storage))
    lo, shape, offset, stride = (np.concatenate([part[k] for part in parts]) for k in range(4))
    return Placement(np.asarray(ranks, dtype=np.int64), lo, shape, offset, stride, dict(storage))


def flat_placement(
    shape: tuple[int, ...], ranges: Sequence[tuple[int, int, int]], storage: Mapping[int, int]
) -> Placement:
    """Contiguous ranges of the flattened tensor: ``ranges`` holds (rank, start, stop), ``storage`` elements per rank.

    Element ``start`` is the first of the rank's storage; what the storage holds beyond ``stop - start`` is padding.
    """
    steps = np.asarray(row_major_strides(shape), dtype=np.int64)
    ranks: list[int] = []
    parts: list[_Part] = []
    for rank, start, stop in sorted(ranges):
        lo, size = flat_range_boxes(shape, start, stop)
        ranks += [rank] * len(lo)
        parts.append((lo, size, lo @ steps - start, np.broadcast_to(steps, lo.shape)))
    return _placement(ranks, parts, len(shape), storage)


def shard_placement(shape: tuple[int, ...], boxes: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> Placement:
    """One box (lo, shape) per rank, stored contiguously and row-major."""
    ranks: list[int] = []
    parts: list[_Part] = []
    storage: dict[int, int] = {}
    for rank in sorted(boxes):
        lo, size = (np.asarray([v], dtype=np.int64).reshape(1, len(shape)) for v in boxes[rank])
        count = int(np.prod(size))
        if count:
            strides = np.asarray([row_major_strides(size[0].tolist())], dtype=np.int64).reshape(1, len(shape))
            ranks.append(rank)
            parts.append((lo, size, np.zeros(1, dtype=np.int64), strides))
            storage[rank] = count
    return _placement(ranks, parts, len(shape), storage)


def zero3_layout(
    specs: Mapping[str, TensorSpec],
    ranks: Sequence[int],
    world_size: int,
    name: str = "zero3",
    aliases: Mapping[str, str] | None = None,
) -> Layout:
    """The weights of a ZeRO-3 engine over ``ranks``: each tensor flattened, padded to a multiple and cut evenly."""

    def place(shape: tuple[int, ...]) -> Placement:
        numel = int(np.prod(shape, dtype=np.int64))
        part = -(-numel // len(ranks))
        ranges = [(r, k * part, min((k + 1) * part, numel)) for k, r in enumerate(ranks) if k * part < numel]
        return flat_placement(shape, ranges, dict.fromkeys(ranks, part))

    return _build(name, world_size, specs, lambda spec: spec.shape, lambda spec: place(spec.shape), aliases)


def _cut_box(shape: tuple[int, ...], cut: Cut, degree: int, index: int, name: str) -> tuple[list[int], list[int]]:
    lo, size = [0] * len(shape), list(shape)
    if cut.dim is None or degree == 1:
        return lo, size
    if not 0 <= cut.dim < len(shape):
        raise LayoutError(f"tensor {name} {list(shape)}: cut along dim {cut.dim}, which it does not have")
    extent = shape[cut.dim]
    units = extent if cut.units is None else cut.units
    if extent == 0:
        return lo, size
    if units < 1 or extent % units:
        raise LayoutError(f"tensor {name} {list(shape)}: dim {cut.dim} of {extent} is no multiple of {units} units")
    width = extent // units
    if cut.units is not None and units < degree:
        if degree % units:
            raise LayoutError(f"tensor {name}: {units} units over {degree} ranks: neither is a multiple of the other")
        begin, end = index * units // degree, index * units // degree + 1
    else:
        begin, end = index * units // degree, (index + 1) * units // degree
    lo[cut.dim], size[cut.dim] = begin * width, (end - begin) * width
    return lo, size


def tensor_parallel_layout(
    specs: Mapping[str, TensorSpec],
    cuts: Mapping[str, Cut],
    replicas: Sequence[Sequence[int]],
    world_size: int,
    name: str = "tp",
    aliases: Mapping[str, str] | None = None,
) -> Layout:
    """Tensor-parallel copies: one per entry of ``replicas``, whose ranks hold the shards in order.

    Raises LayoutError where a weight has no cut or a cut does not fit.
    """
    missing = [tensor for tensor in specs if tensor not in cuts]
    if missing:
        raise LayoutError(f"layout {name}: tensor {missing[0]} has no cut (and {len(missing) - 1} more)")
    twice = [rank for ranks in replicas for rank in ranks]
    if len(set(twice)) != len(twice):
        raise LayoutError(f"layout {name}: a rank stands in two replicas: {sorted(twice)}")

    def place(spec: TensorSpec) -> Placement:
        boxes = {
            rank: _cut_box(spec.shape, cuts[spec.name], len(ranks), index, spec.name)
            for ranks in replicas
            for index, rank in enumerate(ranks)
        }
        return shard_placement(spec.shape, boxes)

    return _build(name, world_size, specs, lambda spec: (spec.shape, cuts[spec.name]), place, aliases)


def _build(
    name: str,
    world_size: int,
    specs: Mapping[str, TensorSpec],
    key: Callable[[TensorSpec], object],
    place: Callable[[TensorSpec], Placement],
    aliases: Mapping[str, str] | None,
) -> Layout:
    made: dict[object, Placement] = {}
    for spec in specs.values():
        if key(spec) not in made:
            made[key(spec)] = place(spec)
    placements = {tensor: made[key(spec)] for tensor, spec in specs.items()}
    layout = Layout(name, world_size, dict(specs), placements, dict(aliases or {}))
    layout.check()
    return layout
