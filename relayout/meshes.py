"""Meshes: tensors cut along several axes at once over ranks in an N-dimensional mesh. Pure NumPy.

``mesh_layout(specs, {"w": (Cut(0), Cut(1))}, [[[0, 1], [2, 3]]], 4)`` cuts ``w`` in rows over the first axis of a 2 x 2
mesh and in columns over the second. Every rank stores its shard contiguously and row-major.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import LayoutError
from relaymeter.relayout.cuts import Blocks, Cut, Intervals, Only, count_out, nest
from relaymeter.relayout.geometry import intersect
from relaymeter.relayout.layout import IntArray, Layout, Placement, TensorSpec

__all__ = [
    "Cuts",
    "RankMesh",
    "Shards",
    "build_layout",
    "cut_key",
    "cut_over_mesh",
    "cuts_of",
    "deal_blocks",
    "equal_or_disjoint",
    "make_placement",
    "mesh_layout",
    "mesh_of",
    "strides_of",
]

#: A cut per axis of the mesh, or one cut for a mesh of one axis. ``Cut(None)`` alone: whole on every rank of any mesh.
Cuts = Cut | Sequence[Cut]
#: Ranks in a mesh: nested sequences or an array, one level per axis.
RankMesh = Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]] | NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shards:
    """One tensor cut over the p positions of a mesh (row-major): n pieces of nd dims, sorted by position.

    ``storage`` (p, nd): shape of each position's shard, padding included. ``held`` (p): whether the position has a
    shard at all. ``position`` (n); ``lo``, ``at``, ``shape`` (n, nd): a box of the tensor and where it lies in the
    shard.
    """

    storage: IntArray
    held: NDArray[np.bool_]
    position: IntArray
    lo: IntArray
    at: IntArray
    shape: IntArray

    @property
    def numel(self) -> IntArray:
        """Elements of each position's shard, padding included (p)."""
        count: IntArray = np.prod(self.storage, axis=1, dtype=np.int64) * self.held
        return count

    @cached_property
    def storage_shapes(self) -> tuple[IntArray, IntArray]:
        """The distinct shapes of shards (k, nd), and which of them each position has (p)."""
        shapes, kind = np.unique(self.storage, axis=0, return_inverse=True)
        return shapes, kind.reshape(-1).astype(np.int64)

    @cached_property
    def copies(self) -> IntArray | None:
        """For each position, how many before it hold the same shard: the number of its copy (p). None where shards have
        unequal numbers of holders or overlap in part, so that positions do not fall into whole copies."""
        positions, dims = self.storage.shape
        copy = np.zeros(positions, dtype=np.int64)
        table = np.column_stack([self.lo, self.at, self.shape])
        begin = np.searchsorted(self.position, np.arange(positions + 1)).tolist()
        seen: dict[bytes, int] = {}
        for position in range(positions):
            if begin[position] < begin[position + 1]:
                key = table[begin[position] : begin[position + 1]].tobytes()
                copy[position] = seen.get(key, 0)
                seen[key] = int(copy[position]) + 1
        first = np.flatnonzero(copy[self.position] == 0)
        boxes = np.unique(np.column_stack([self.lo, self.shape]), axis=0)
        held = np.prod(self.shape[first], axis=1, dtype=np.int64).sum()
        apart = np.prod(boxes[:, dims:], axis=1, dtype=np.int64).sum()
        return copy if len(set(seen.values())) < 2 and held == apart else None


def mesh_of(ranks: RankMesh, world_size: int, name: str) -> IntArray:
    """Ranks in a mesh as an array. Raises LayoutError for an empty or ragged mesh, a rank out of range or twice."""
    try:
        mesh = np.asarray(ranks)
    except ValueError as error:
        raise LayoutError(f"layout {name}: ranks {ranks} are no mesh: its rows differ in length") from error
    if mesh.ndim == 0 or mesh.size == 0:
        raise LayoutError(f"layout {name}: a mesh of shape {list(mesh.shape)} has no ranks; give at least one")
    if mesh.dtype.kind not in "iu":
        raise LayoutError(f"layout {name}: ranks {ranks} are no whole numbers")
    mesh = mesh.astype(np.int64)
    flat = np.sort(mesh, axis=None)
    if flat[0] < 0 or flat[-1] >= world_size:
        wrong = int(flat[0] if flat[0] < 0 else flat[-1])
        raise LayoutError(f"layout {name}: rank {wrong} is outside the world of {world_size}")
    twice = flat[1:][flat[1:] == flat[:-1]]
    if len(twice):
        raise LayoutError(f"layout {name}: rank {int(twice[0])} stands twice in a mesh; name every rank once")
    return mesh


def cuts_of(cuts: Cuts, axes: int, spec: TensorSpec) -> tuple[Cut, ...]:
    """One cut per axis. Raises LayoutError where their number does not fit the mesh."""
    given = (cuts,) if isinstance(cuts, Cut) else tuple(cuts)
    if given == (Cut(None),):
        return given * axes
    if len(given) != axes:
        raise LayoutError(
            f"tensor {spec.name} {list(spec.shape)}: {len(given)} cuts for a mesh of {axes} axes; give one per axis, "
            "Cut(None) where the tensor is not cut"
        )
    return given


def cut_over_mesh(spec: TensorSpec, degrees: Sequence[int], cuts: Sequence[Cut]) -> Shards:
    """Cut ``spec`` over a mesh of ``degrees``, one cut per axis. Cuts of different dims multiply; cuts of one dim nest,
    a later axis cutting the storage that the earlier one leaves. Raises LayoutError naming tensor and dim."""
    positions = int(np.prod(np.asarray(degrees, dtype=np.int64)))
    places = np.indices(tuple(degrees)).reshape(len(degrees), positions).astype(np.int64)
    held = np.ones(positions, dtype=bool)
    tables: dict[int, tuple[IntArray, Intervals]] = {}
    where = f"tensor {spec.name} {list(spec.shape)}"
    for axis, (cut, degree) in enumerate(zip(cuts, degrees, strict=True)):
        if isinstance(cut.rule, Only):
            try:
                held &= np.isin(places[axis], cut.rule.held(degree))
            except LayoutError as error:
                raise LayoutError(f"{where}, axis {axis}: {error}") from None
        if cut.dim is None:
            continue
        if not 0 <= cut.dim < len(spec.shape):
            raise LayoutError(f"{where}: cut along dim {cut.dim}, which it does not have")
        try:
            if cut.dim in tables:
                index, outer = tables[cut.dim]
                tables[cut.dim] = (index * degree + places[axis], nest(outer, cut, degree))
            else:
                tables[cut.dim] = (places[axis], cut.intervals(spec.shape[cut.dim], degree))
        except LayoutError as error:
            raise LayoutError(f"{where}, dim {cut.dim}: {error}") from None
    return _multiply(spec.shape, held, tables)


def _multiply(
    shape: tuple[int, ...], held: NDArray[np.bool_], tables: Mapping[int, tuple[IntArray, Intervals]]
) -> Shards:
    """Every position's pieces: the product of its intervals along every dim."""
    dims, positions = len(shape), len(held)
    storage = np.empty((positions, dims), dtype=np.int64)
    counts, begins = np.empty((positions, dims), dtype=np.int64), np.zeros((positions, dims), dtype=np.int64)
    for dim, extent in enumerate(shape):
        if dim in tables:
            index, found = tables[dim]
            per_index = np.bincount(found.index, minlength=found.degree)
            storage[:, dim], counts[:, dim] = found.width[index], per_index[index]
            begins[:, dim] = (np.cumsum(per_index) - per_index)[index]
        else:
            storage[:, dim], counts[:, dim] = extent, extent > 0
    position, step = count_out(np.prod(counts, axis=1, dtype=np.int64) * held)
    columns = np.empty((3, len(position), dims), dtype=np.int64)
    for dim in range(dims - 1, -1, -1):
        step, inner = np.divmod(step, np.maximum(counts[position, dim], 1))
        if dim in tables:
            row, found = begins[position, dim] + inner, tables[dim][1]
            columns[:, :, dim] = found.lo[row], found.at[row], found.size[row]
        else:
            columns[0, :, dim], columns[1, :, dim], columns[2, :, dim] = 0, 0, shape[dim]
    return Shards(storage, held, position, columns[0], columns[1], columns[2])


def strides_of(shape: IntArray) -> IntArray:
    """Row-major element strides of shapes (n, nd)."""
    strides = np.ones_like(shape)
    if shape.shape[1] > 1:
        strides[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return strides


def make_placement(
    rank: IntArray,
    lo: IntArray,
    shape: IntArray,
    offset: IntArray,
    stride: IntArray,
    storage: Mapping[int, int],
    copy: IntArray | None = None,
) -> Placement:
    """Pieces in any order as a placement: by rank, then place in the storage. Copy numbers that are all 0 are left
    out."""
    order = np.lexsort((offset, rank))
    copies = copy[order] if copy is not None and copy.any() else None
    return Placement(rank[order], lo[order], shape[order], offset[order], stride[order], dict(storage), copies)


def _mesh_pieces(shards: Shards, mesh: IntArray) -> tuple[tuple[IntArray, ...], dict[int, int]]:
    ranks = mesh.reshape(-1)
    stride = strides_of(shards.storage)[shards.position]
    columns = (ranks[shards.position], shards.lo, shards.shape, (shards.at * stride).sum(axis=1), stride)
    held = np.flatnonzero(shards.held)
    return columns, dict(zip(ranks[held].tolist(), shards.numel[held].tolist(), strict=True))


def mesh_layout(
    specs: Mapping[str, TensorSpec],
    cuts: Mapping[str, Cuts],
    replicas: Sequence[RankMesh],
    world_size: int,
    name: str = "mesh",
    aliases: Mapping[str, str] | None = None,
) -> Layout:
    """Copies of the tensors, one per mesh of ``replicas``; meshes may differ in size (TP1 beside TP2), not in axes.

    Ranks along an axis that a tensor is not cut over hold the same part of one copy. Raises LayoutError naming the
    tensor where a cut is missing or does not fit, or a rank stands in two meshes. Pure, any rank.
    """
    missing = [tensor for tensor in specs if tensor not in cuts]
    if missing:
        raise LayoutError(f"layout {name}: tensor {missing[0]} has no cut (and {len(missing) - 1} more)")
    meshes = [mesh_of(ranks, world_size, name) for ranks in replicas]
    every = np.concatenate([mesh.reshape(-1) for mesh in meshes]) if meshes else np.zeros(0, dtype=np.int64)
    if len(np.unique(every)) != len(every):
        raise LayoutError(f"layout {name}: a rank stands in two replicas: {sorted(every.tolist())}")

    def place(spec: TensorSpec) -> Placement:
        parts: list[tuple[IntArray, ...]] = []
        storage: dict[int, int] = {}
        for number, mesh in enumerate(meshes):
            columns, held = _mesh_pieces(
                cut_over_mesh(spec, mesh.shape, cuts_of(cuts[spec.name], mesh.ndim, spec)), mesh
            )
            parts.append((*columns, np.full(len(columns[0]), number, dtype=np.int64)))
            storage.update(held)
        if not parts:
            flat, wide = np.zeros(0, dtype=np.int64), np.zeros((0, len(spec.shape)), dtype=np.int64)
            return Placement(flat, wide, wide, flat, wide, {})
        rank, lo, shape, offset, stride, copy = (np.concatenate([part[k] for part in parts]) for k in range(6))
        return make_placement(rank, lo, shape, offset, stride, storage, copy)

    return build_layout(name, world_size, specs, lambda spec: cut_key(spec, cuts[spec.name]), place, aliases)


def deal_blocks(specs: Mapping[str, TensorSpec], dims: Mapping[str, int], block: int, degree: int) -> dict[str, Cut]:
    """Cuts in blocks of ``block`` along ``dims[tensor]`` for ``degree`` ranks, one per tensor of ``dims``.

    Tensor by tensor, the largest first, the spare blocks go where they keep the bytes of the fullest rank lowest; it
    never holds more than with ``Blocks(block)`` for all. Raises LayoutError.
    """
    held, alike = np.zeros(degree, dtype=np.int64), np.zeros(degree, dtype=np.int64)
    widths: dict[int, IntArray] = {}
    found: dict[str, Cut] = {}
    for tensor in sorted(dims, key=lambda name: -specs[name].nbytes):
        spec, dim = specs[tensor], dims[tensor]
        if not 0 <= dim < len(spec.shape):
            raise LayoutError(f"tensor {tensor} {list(spec.shape)}: cut along dim {dim}, which it does not have")
        extent = spec.shape[dim]
        if extent not in widths:
            widths[extent] = np.stack([Blocks(block, turn).intervals(extent, degree).width for turn in range(degree)])
        choices = held + widths[extent] * (spec.nbytes // max(extent, 1))
        turn = int(choices.max(axis=1).argmin())
        alike = alike + choices[0] - held
        held = choices[turn]
        found[tensor] = Cut(dim, rule=Blocks(block, turn))
    if alike.max(initial=0) <= held.max(initial=0):
        return {tensor: Cut(dim, rule=Blocks(block)) for tensor, dim in dims.items()}
    return {tensor: found[tensor] for tensor in dims}


def cut_key(spec: TensorSpec, cuts: Cuts) -> Hashable:
    """Equal for tensors whose shards are equal on every mesh."""
    return spec.shape, cuts if isinstance(cuts, Cut) else tuple(cuts)


def build_layout(
    name: str,
    world_size: int,
    specs: Mapping[str, TensorSpec],
    key: Callable[[TensorSpec], Hashable],
    place: Callable[[TensorSpec], Placement],
    aliases: Mapping[str, str] | None,
) -> Layout:
    """A checked layout in which tensors of equal ``key`` share one placement."""
    made: dict[Hashable, Placement] = {}
    placements: dict[str, Placement] = {}
    for tensor, spec in specs.items():
        kind = key(spec)
        found = made.get(kind)
        if found is None:
            found = made[kind] = place(spec)
        placements[tensor] = found
    layout = Layout(name, world_size, dict(specs), placements, dict(aliases or {}))
    layout.check()
    return layout


def equal_or_disjoint(
    rank: IntArray, lo: IntArray, shape: IntArray, offset: IntArray, stride: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Pieces cut until any two of them hold the same box or share no element: same columns, more rows."""
    dims = lo.shape[1]
    while True:
        boxes, box = np.unique(np.column_stack([lo, shape]), axis=0, return_inverse=True)
        dim, border = _border_inside(boxes[:, :dims], boxes[:, dims:])
        dim, border = dim[box.reshape(-1)], border[box.reshape(-1)]
        rows = np.flatnonzero(dim >= 0)
        if not len(rows):
            return rank, lo, shape, offset, stride
        head = border[rows] - lo[rows, dim[rows]]
        tail, rest = lo[rows], shape[rows]
        tail[np.arange(len(rows)), dim[rows]] += head
        rest[np.arange(len(rows)), dim[rows]] -= head
        first = shape.copy()
        first[rows, dim[rows]] = head
        offset = np.concatenate([offset, offset[rows] + head * stride[rows, dim[rows]]])
        rank, stride = np.concatenate([rank, rank[rows]]), np.concatenate([stride, stride[rows]])
        lo, shape = np.concatenate([lo, tail]), np.concatenate([first, rest])


def _border_inside(lo: IntArray, shape: IntArray) -> tuple[IntArray, IntArray]:
    """A border of another box inside each of k distinct boxes (k, nd): its dim (k), -1 for none, and its place (k)."""
    a, b, _, _ = intersect(lo, shape, lo, shape)
    begin, end = lo, lo + shape
    starts = (begin[b] > begin[a]) & (begin[b] < end[a])
    ends = (end[b] > begin[a]) & (end[b] < end[a])
    found = starts | ends
    box, row = np.unique(a[found.any(axis=1)], return_index=True)
    row = np.flatnonzero(found.any(axis=1))[row]
    dim, border = np.full(len(lo), -1, dtype=np.int64), np.zeros(len(lo), dtype=np.int64)
    dim[box] = found[row].argmax(axis=1)
    border[box] = np.where(starts, begin[b], end[b])[row, dim[box]]
    return dim, border
