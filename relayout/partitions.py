"""ZeRO partitions: flattened tensors (stage 3) or flattened groups of tensors (stages 1 and 2), cut over data-parallel
ranks, of whole tensors or of every model-parallel shard. Pure NumPy.

``zero3_layout(specs, (0, 1), 4)``; ``zero12_layout(specs, [[0, 1], [2, 3]], 4, cuts=cuts)`` with two data-parallel
ranks and tensor parallelism of two. Ranks form a mesh whose first axis is the data-parallel one; the axes after it are
model-parallel, with a cut per axis for every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relaymeter.errors import LayoutError
from relaymeter.relayout.cuts import Cut, count_out
from relaymeter.relayout.geometry import flat_boxes, intersect
from relaymeter.relayout.layout import IntArray, Layout, Placement, TensorSpec
from relaymeter.relayout.meshes import (
    Cuts,
    RankMesh,
    Shards,
    build_layout,
    cut_key,
    cut_over_mesh,
    cuts_of,
    equal_or_disjoint,
    make_placement,
    mesh_of,
    strides_of,
)

__all__ = ["PartitionSizes", "check_partition", "zero3_layout", "zero12_layout", "zero12_partitions"]


@dataclass(frozen=True)
class PartitionSizes:
    """One flat buffer cut over the ranks of a data-parallel group.

    ``numel`` elements of the tensors ``names`` lie in a buffer padded to ``padded`` and cut in parts of ``part``, one
    per rank of ``ranks`` in order; ``real`` counts the elements of tensors in each part, the rest is padding.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    numel: int
    padded: int
    part: int
    real: tuple[int, ...]


def _flat_placement(
    spec: TensorSpec,
    shards: Shards,
    position: IntArray,
    rank: IntArray,
    start: IntArray,
    stop: IntArray,
    storage: Mapping[int, int],
) -> Placement:
    """Ranges (m) of flattened shards, one per (position, rank); a rank's storage begins at ``start``. Ranges that end
    where they begin or before are empty."""
    dims = len(spec.shape)
    shapes, kind = shards.storage_shapes
    rows, lows, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros((0, dims), dtype=np.int64)], []
    sizes.append(lows[0])
    for number, shape in enumerate(shapes.tolist()):
        mine = np.flatnonzero((kind[position] == number) & (stop > start))
        row, low, size = flat_boxes(shape, start[mine], stop[mine])
        rows.append(mine[row])
        lows.append(low)
        sizes.append(size)
    row, at, box = np.concatenate(rows), np.concatenate(lows), np.concatenate(sizes)
    home = position[row]
    low = at
    if len(shards.position) == len(shards.held) and (shards.shape == shards.storage[shards.position]).all():
        low = at + shards.lo[home]
    else:
        there = np.column_stack([shards.position, shards.at])
        span = np.column_stack([np.ones_like(shards.position), shards.shape])
        a, b, both, size = intersect(
            np.column_stack([home, at]), np.column_stack([np.ones_like(home), box]), there, span
        )
        row, home, at, box = row[a], home[a], both[:, 1:], size[:, 1:]
        low = at - shards.at[b] + shards.lo[b]
    stride = strides_of(shards.storage)[home]
    columns = (rank[row], low, box, (at * stride).sum(axis=1) - start[row], stride)
    copy = shards.copies
    if copy is not None:
        return make_placement(*columns, storage, copy[home])
    return make_placement(*equal_or_disjoint(*columns), storage)


def _shards(spec: TensorSpec, mesh: IntArray, cuts: Mapping[str, Cuts] | None, name: str) -> Shards:
    degrees = mesh.shape[1:]
    if cuts is not None and spec.name not in cuts:
        raise LayoutError(f"layout {name}: tensor {spec.name} has no cut")
    if not degrees:
        return cut_over_mesh(spec, (), ())
    return cut_over_mesh(spec, degrees, cuts_of(Cut(None) if cuts is None else cuts[spec.name], len(degrees), spec))


def zero3_layout(
    specs: Mapping[str, TensorSpec],
    ranks: RankMesh,
    world_size: int,
    name: str = "zero3",
    aliases: Mapping[str, str] | None = None,
    *,
    cuts: Mapping[str, Cuts] | None = None,
) -> Layout:
    """The tensors of a ZeRO-3 engine: each rank's shard of each tensor flattened, padded to a multiple of the
    data-parallel degree and cut evenly over it. A part is the storage of its rank, padding included.

    ``ranks`` is a data-parallel group, or a mesh whose first axis is data-parallel and whose other axes are
    model-parallel, with ``cuts`` over them (none: whole on every one). A tensor that is whole on several
    model-parallel positions gives a copy per position. The sub-group size of the optimizer changes nothing here: it
    only says which parts lie in one flat buffer. Raises LayoutError naming tensor, dim and numbers. Pure, any rank.
    """
    mesh = mesh_of(ranks, world_size, name)
    degree = len(mesh)
    group = mesh.reshape(degree, -1)

    def place(spec: TensorSpec) -> Placement:
        shards = _shards(spec, mesh, cuts, name)
        numel = shards.numel
        part = -(-numel // degree)
        position, index = count_out(np.where(shards.held, degree, 0))
        start = index * part[position]
        stop = np.minimum(start + part[position], numel[position])
        rank = group[index, position]
        storage = dict(zip(rank.tolist(), part[position].tolist(), strict=True))
        return _flat_placement(spec, shards, position, rank, start, stop, storage)

    def key(spec: TensorSpec) -> object:
        return cut_key(spec, cuts[spec.name]) if cuts is not None and spec.name in cuts else spec.shape

    return build_layout(name, world_size, specs, key, place, aliases)


@dataclass(frozen=True, eq=False)
class _Group:
    """A flattened optimizer group of t tensors over p model-parallel positions, each with its own flat buffer.

    ``kind`` (t): which shards a tensor has; ``numel``, ``start`` (t, p): its elements and its place in each buffer;
    ``padded``, ``part`` (p): the buffers' elements and those of one data-parallel part.
    """

    names: tuple[str, ...]
    kind: IntArray
    numel: IntArray
    start: IntArray
    padded: IntArray
    part: IntArray


def _group_names(
    specs: Mapping[str, TensorSpec], groups: Sequence[Sequence[str]] | None, name: str
) -> list[tuple[str, ...]]:
    if groups is None:
        by_dtype: dict[str, list[str]] = {}
        for tensor, spec in specs.items():
            by_dtype.setdefault(spec.dtype, []).append(tensor)
        return [tuple(names) for names in by_dtype.values()]
    home: dict[str, int] = {}
    for number, group in enumerate(groups):
        for tensor in group:
            if tensor not in specs:
                raise LayoutError(f"layout {name}: group {number} names {tensor}, which is no tensor of the layout")
            if tensor in home:
                raise LayoutError(f"layout {name}: {tensor} stands in group {home[tensor]} and in group {number}")
            if specs[tensor].dtype != specs[group[0]].dtype:
                raise LayoutError(
                    f"layout {name}: group {number} mixes {specs[group[0]].dtype} ({group[0]}) and "
                    f"{specs[tensor].dtype} ({tensor}); a flat buffer has one dtype, make a group of each"
                )
            home[tensor] = number
    missing = [tensor for tensor in specs if tensor not in home]
    if missing:
        raise LayoutError(f"layout {name}: tensor {missing[0]} is in no group (and {len(missing) - 1} more)")
    return [tuple(group) for group in groups]


def _flatten_groups(
    specs: Mapping[str, TensorSpec],
    mesh: IntArray,
    cuts: Mapping[str, Cuts] | None,
    groups: Sequence[Sequence[str]] | None,
    alignment: int | None,
    tensor_alignment: int,
    name: str,
) -> tuple[list[_Group], list[Shards]]:
    degree = len(mesh)
    align = 2 * degree if alignment is None else alignment
    if align < 1 or align % degree:
        raise LayoutError(
            f"layout {name}: alignment {align} is no multiple of the data-parallel degree {degree}, so that the parts "
            f"would differ; give a multiple of {degree}"
        )
    if tensor_alignment < 1:
        raise LayoutError(f"layout {name}: tensors aligned to {tensor_alignment} elements; give at least 1")
    kinds: dict[object, int] = {}
    shards: list[Shards] = []
    found: list[_Group] = []
    for names in _group_names(specs, groups, name):
        kind = []
        for tensor in names:
            spec = specs[tensor]
            key = spec.shape if cuts is None or tensor not in cuts else cut_key(spec, cuts[tensor])
            if key not in kinds:
                kinds[key] = len(shards)
                shards.append(_shards(spec, mesh, cuts, name))
            kind.append(kinds[key])
        of = np.asarray(kind, dtype=np.int64)
        sizes = np.stack([s.numel for s in shards]) if shards else np.zeros((0, mesh.size // degree), dtype=np.int64)
        numel = sizes[of]
        room = -(-numel // tensor_alignment) * tensor_alignment
        start = np.cumsum(room, axis=0) - room
        there = np.stack([s.held for s in shards])[of] if len(of) else np.zeros_like(numel, dtype=bool)
        used = np.where(there, start + numel, 0).max(axis=0, initial=0)
        padded = -(-used // align) * align
        found.append(_Group(names, of, numel, start, padded, padded // degree))
    return found, shards


def zero12_partitions(
    specs: Mapping[str, TensorSpec],
    ranks: RankMesh,
    world_size: int,
    *,
    cuts: Mapping[str, Cuts] | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    alignment: int | None = None,
    tensor_alignment: int = 1,
    name: str = "zero12",
) -> tuple[PartitionSizes, ...]:
    """The sizes behind ``zero12_layout`` (same arguments): group by group, one entry per model-parallel position."""
    mesh = mesh_of(ranks, world_size, name)
    degree = len(mesh)
    line = mesh.reshape(degree, -1)
    sizes = []
    for group in _flatten_groups(specs, mesh, cuts, groups, alignment, tensor_alignment, name)[0]:
        for position in range(line.shape[1]):
            part, start = int(group.part[position]), group.start[:, position]
            stop = start + group.numel[:, position]
            border = np.arange(degree + 1, dtype=np.int64)[:, None] * part
            below = np.clip(border, start, stop) - start  # (degree + 1, t): elements of a tensor before a border
            sizes.append(
                PartitionSizes(
                    group.names,
                    tuple(line[:, position].tolist()),
                    int(group.numel[:, position].sum()),
                    int(group.padded[position]),
                    part,
                    tuple(np.diff(below.sum(axis=1)).tolist()),
                )
            )
    return tuple(sizes)


def zero12_layout(
    specs: Mapping[str, TensorSpec],
    ranks: RankMesh,
    world_size: int,
    name: str = "zero12",
    aliases: Mapping[str, str] | None = None,
    *,
    cuts: Mapping[str, Cuts] | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    alignment: int | None = None,
    tensor_alignment: int = 1,
) -> Layout:
    """Flat group partitions of a ZeRO-1 or ZeRO-2 engine: what a rank's optimizer holds of every tensor.

    The tensors of a group are flattened in the order given, each begun at a multiple of ``tensor_alignment`` elements,
    padded at the end to a multiple of ``alignment`` (default twice the data-parallel degree) and cut evenly. The
    storage of a (rank, tensor) is exactly the elements of that tensor in the rank's part: padding belongs to nobody,
    and a rank without any has no storage for it. ``ranks`` and ``cuts`` as for ``zero3_layout``: each data-parallel
    group partitions its own shards. ``groups``: names, each in one group of one dtype; None: a group per dtype.
    Raises LayoutError naming tensor, group and numbers. Pure, any rank.
    """
    mesh = mesh_of(ranks, world_size, name)
    line = mesh.reshape(len(mesh), -1)
    made: dict[tuple[int, bytes], Placement] = {}
    placements: dict[str, Placement] = {}
    found, shards = _flatten_groups(specs, mesh, cuts, groups, alignment, tensor_alignment, name)
    for group in found:
        part = np.maximum(group.part, 1)
        first = group.start // part
        last = np.maximum(group.start + group.numel - 1, group.start) // part
        crosses = last > first
        phase = np.where(crosses, group.start - first * part, 0)
        keys = np.stack([np.where(group.numel > 0, first, 0), phase, np.where(crosses, part, 0)], axis=1)
        for row, tensor in enumerate(group.names):
            kind = (int(group.kind[row]), keys[row].tobytes())
            if kind not in made:
                of = shards[kind[0]]
                position, step = count_out(np.where(group.numel[row] > 0, last[row] - first[row] + 1, 0))
                border = (first[row, position] + step) * part[position] - group.start[row, position]
                begin = np.maximum(border, 0)
                end = np.minimum(border + part[position], group.numel[row, position])
                rank = line[first[row, position] + step, position]
                storage = dict(zip(rank.tolist(), (end - begin).tolist(), strict=True))
                made[kind] = _flat_placement(specs[tensor], of, position, rank, begin, end, storage)
            placements[tensor] = made[kind]
    layout = Layout(
        name, world_size, dict(specs), {tensor: placements[tensor] for tensor in specs}, dict(aliases or {})
    )
    layout.check()
    return layout


def check_partition(sizes: PartitionSizes, held: Mapping[int, int]) -> None:
    """Compare what ranks say they hold of a flat buffer with what they should: ``held`` maps a rank to its elements,
    padding not counted. Raises LayoutError naming the first rank that differs; a part may be empty only where it begins
    at or past the real end. Pure, any rank."""
    what = f"flat buffer of {len(sizes.names)} tensors" if len(sizes.names) != 1 else f"tensor {sizes.names[0]}"
    for index, (rank, real) in enumerate(zip(sizes.ranks, sizes.real, strict=True)):
        have, begin = held.get(rank, 0), index * sizes.part
        if have == real:
            continue
        place = f"{what}, {sizes.numel} elements padded to {sizes.padded}: rank {rank}"
        if have > real:
            raise LayoutError(
                f"{place} holds {have} elements from {begin} on, {have - real} more than its {real} real ones: do not "
                "count padding"
            )
        raise LayoutError(
            f"{place} holds {have} of the {real} elements due from {begin} on; a part may be empty only where it "
            "begins at or past the real end: read its shard again"
        )
    strangers = sorted(set(held) - set(sizes.ranks))
    if strangers:
        raise LayoutError(f"{what}: rank {strangers[0]} has a part, but the group is ranks {list(sizes.ranks)}")
