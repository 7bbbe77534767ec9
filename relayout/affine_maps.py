"""Placements as the affine maps of DeepSpeed, both ways: the form in which others describe who holds what.

``to_affine_map(spec, placement)`` gives a ``deepspeed.checkpoint.affine.ParamAffineMap``, ``from_affine_map(map)``
reads one; what travels between processes is the map's own ``to_dict`` and ``from_dict``. DeepSpeed is imported when a
map is made, not before; reading one needs no more than the map.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError, LayoutError
from relaymeter.relayout.geometry import boxes_overlap_volume, flat_range_boxes, intersect, row_major_strides
from relaymeter.relayout.layout import Placement, TensorSpec
from relaymeter.relayout.pieces import Pieces, merge, split_at_neighbours

if TYPE_CHECKING:
    from deepspeed.checkpoint.affine import ParamAffineMap

__all__ = [
    "Shards",
    "cut_evenly",
    "find_shards",
    "from_affine_map",
    "import_affine",
    "make_map",
    "row_major_rows",
    "to_affine_map",
]

IntArray = NDArray[np.int64]

#: The package under which the two modules are imported where DeepSpeed itself is not.
_ALONE = "_relaymeter_deepspeed_affine"
#: Rounds of cutting copies on each other's borders until all their pieces are equal or apart.
_MOST_CUTS = 8


def import_affine(name: str, *, alone: bool = False) -> ModuleType:
    """DeepSpeed's module ``deepspeed.checkpoint.<name>`` (``affine`` or ``affine_transfer``).

    ``alone`` imports it without the rest of DeepSpeed, which takes half a second, looks for an accelerator and prints;
    where DeepSpeed is imported already its own module is used. Raises InputError where DeepSpeed is missing or too old.
    """
    mend = "pip install 'relaymeter[deepspeed]', or leave out --planner affine"
    package = "deepspeed.checkpoint"
    if "deepspeed" not in sys.modules:
        found = importlib.util.find_spec("deepspeed")
        if found is None or found.origin is None:
            raise InputError(f"affine maps need DeepSpeed, which is not installed: {mend}")
        if alone:
            package = _ALONE
            module = ModuleType(package)
            module.__path__ = [str(Path(found.origin).parent / "checkpoint")]
            sys.modules.setdefault(package, module)
    try:
        return importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{name}":
            raise
        version = importlib.metadata.version("deepspeed")
        raise InputError(f"DeepSpeed {version} has no checkpoint.{name}: version 0.19.8 is needed: {mend}") from error


def row_major_rows(shape: IntArray) -> IntArray:
    """Row-major strides of each shape (n, nd)."""
    steps = np.ones_like(shape)
    for axis in range(shape.shape[1] - 2, -1, -1):
        steps[:, axis] = steps[:, axis + 1] * shape[:, axis + 1]
    return steps


@dataclass(frozen=True, eq=False)
class Shards:
    """What each of ``h`` holders holds, read as one row-major tensor that its pieces fill exactly.

    keys (h): the holders, ascending; holder (n): row of the holder of each piece; base (h): first used element of the
    storage; shape, stride (h, nd): the shard tensor; fits (h): whether the pieces fill such a tensor at all.
    """

    keys: IntArray
    holder: IntArray
    base: IntArray
    shape: IntArray
    stride: IntArray
    fits: NDArray[np.bool_]


def find_shards(keys: IntArray, pieces: Pieces) -> Shards:
    """The shard tensor of every holder; ``keys`` (n) says which pieces are of one holder."""
    unique, holder = np.unique(keys, return_inverse=True)
    holder = holder.reshape(-1)
    base = np.full(len(unique), np.iinfo(np.int64).max)
    np.minimum.at(base, holder, pieces.offset)
    shape = np.zeros((len(unique), pieces.lo.shape[1]), dtype=np.int64)
    count = np.bincount(holder, minlength=len(unique))
    single = np.flatnonzero(count[holder] == 1)
    whole = ((pieces.stride == row_major_rows(pieces.shape)) | (pieces.shape == 1)).all(axis=1)[single]
    fits = np.zeros(len(unique), dtype=bool)
    fits[holder[single]] = whole
    shape[holder[single[whole]]] = pieces.shape[single[whole]]
    order = np.argsort(holder, kind="stable")
    first = np.cumsum(count) - count
    for one in np.flatnonzero(count > 1).tolist():
        rows = order[first[one] : first[one] + count[one]]
        found = _filled(pieces.shape[rows], pieces.offset[rows] - base[one], pieces.stride[rows])
        if found is not None:
            fits[one], shape[one] = True, found
    return Shards(unique, holder, base, shape, row_major_rows(shape), fits)


def _filled(shape: IntArray, offset: IntArray, stride: IntArray) -> IntArray | None:
    """Shape of the row-major tensor that the pieces (n, nd) of one storage fill exactly, or None.

    A dim in which no piece is wider than one has no stride that shows; it is first taken as written down, then as
    narrow as can be.
    """
    total = int(np.prod(shape, axis=1, dtype=np.int64).sum())
    for as_written in (True, False):
        steps = _common_strides(shape, stride, as_written)
        if steps is None or not len(steps) or total % steps[0]:
            continue
        full = np.asarray([total // steps[0], *(a // b for a, b in itertools.pairwise(steps))])
        begin, rest = np.zeros_like(shape), offset.copy()
        for axis, step in enumerate(steps):
            begin[:, axis], rest = rest // step, rest % step
        if (begin + shape <= full).all() and not boxes_overlap_volume(begin, shape):
            return full
    return None


def _common_strides(shape: IntArray, stride: IntArray, as_written: bool) -> list[int] | None:
    """Strides that all pieces share, from those dims of theirs that are wider than one; None where there are none."""
    steps: list[int] = []
    for axis in range(shape.shape[1] - 1, -1, -1):
        inner = steps[0] if steps else 1
        seen = np.unique(stride[shape[:, axis] > 1, axis])
        narrow = inner * int(shape[:, axis + 1].max()) if steps else 1
        guess = int(stride[0, axis]) if as_written and steps else narrow
        step = int(seen[0]) if len(seen) else guess
        if len(seen) > 1 or step < inner or step % inner or (not steps and step != 1):
            return None
        steps.insert(0, step)
    return steps


def cut_evenly(pieces: Pieces) -> bool:
    """Whether any two pieces hold the same box or have no element in common."""
    dims = pieces.lo.shape[1]
    boxes = np.unique(np.column_stack([pieces.lo, pieces.shape]), axis=0)
    return not boxes_overlap_volume(boxes[:, :dims], boxes[:, dims:])


def make_map(
    affine: ModuleType, logical: Sequence[int], keys: IntArray, pieces: Pieces, shapes: Mapping[int, Sequence[int]]
) -> ParamAffineMap:
    """The map of evenly cut ``pieces`` of a tensor of shape ``logical``: ``keys`` (n) name the holders, ``shapes`` give
    their shards. Offsets and strides are taken as they stand."""
    _, box = np.unique(np.column_stack([pieces.lo, pieces.shape]), axis=0, return_inverse=True)
    holders: dict[int, set[int]] = {}
    for number, key in zip(box.reshape(-1).tolist(), keys.tolist(), strict=True):
        holders.setdefault(number, set()).add(key)
    steps = row_major_strides(logical)
    begin = (pieces.lo @ np.asarray(steps, dtype=np.int64)).tolist() if steps else [0] * len(pieces)
    held: dict[int, list[Any]] = {key: [] for key in shapes}
    columns = (keys, pieces.shape, pieces.offset, pieces.stride, box.reshape(-1))
    for at, (key, shape, offset, stride, number) in zip(
        begin, zip(*(column.tolist() for column in columns), strict=True), strict=True
    ):
        held[key].append(affine.AffinePiece(shape, at, steps, offset, stride, holders[number]))
    return affine.ParamAffineMap(logical, shapes, held)


def to_affine_map(spec: TensorSpec, placement: Placement) -> ParamAffineMap:
    """Who holds what of a tensor, as a DeepSpeed ``ParamAffineMap`` over the ranks of the layout. Any rank.

    A rank's shard has the tensor's dims where its pieces fill a row-major tensor of them, else it is a run (one dim),
    as a ZeRO partition is that begins inside a row. Copies that are cut differently are cut on each other's borders,
    since a piece of a map has the same holders throughout. Padding behind the last piece is left out: a map counts
    every element of a shard. Raises LayoutError, naming tensor and rank, for padding before or between pieces, and
    InputError without DeepSpeed.
    """
    affine = import_affine("affine")
    pieces = merge((placement,))
    for _ in range(_MOST_CUTS):
        if cut_evenly(pieces):
            break
        pieces = split_at_neighbours(pieces, np.zeros(int(pieces.rank.max(initial=0)) + 1, dtype=np.int64))
    where = f"tensor {spec.name} {list(spec.shape)}"
    if not cut_evenly(pieces):
        raise LayoutError(f"{where}: its copies are cut too differently to give every piece one set of holders")
    shapes: dict[int, tuple[int, ...]] = dict.fromkeys(placement.storage, (0,) * max(1, len(spec.shape)))
    shards = find_shards(pieces.rank, pieces)
    for row, rank in enumerate(shards.keys.tolist()):
        mine = np.flatnonzero(shards.holder == row)
        last = pieces.offset[mine] + ((pieces.shape[mine] - 1) * pieces.stride[mine]).sum(axis=1)
        held, extent = int(pieces.numel[mine].sum()), int(last.max()) + 1
        if held != extent:
            raise LayoutError(
                f"{where}: rank {rank} holds {held} elements in {extent} of its storage; an affine map counts every "
                "element of a shard, so padding may stand only behind the last piece"
            )
        shapes[rank] = tuple(shards.shape[row].tolist()) if shards.fits[row] else (held,)
    return make_map(affine, spec.shape, pieces.rank, pieces, shapes)


def from_affine_map(map_: ParamAffineMap, *, storage: Mapping[int, int] | None = None) -> Placement:
    """The placement that a DeepSpeed ``ParamAffineMap`` describes. Any rank; needs the map alone.

    ``storage`` gives the elements of each rank's storage where it is larger than its shard (padding). Pieces of another
    number of dims than the tensor are cut into boxes of it; pieces held scaled, or that are no boxes of the tensor, are
    refused with LayoutError, naming rank and piece. Copies are numbered only where they are cut differently.
    """
    logical = tuple(int(size) for size in map_.logical_shape)
    sizes = {int(rank): math.prod(shape) for rank, shape in map_.shard_shapes.items()}
    sizes.update(storage or {})
    ranks: list[int] = []
    boxes: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    for rank in sorted(map_.pieces_by_rank):
        for piece in map_.pieces_by_rank[rank]:
            if piece.numel == 0:
                continue
            if piece.scale != 1.0:
                raise LayoutError(f"rank {rank} holds {piece!r} scaled; a relayout moves bits and scales nothing")
            found = _boxes_of(piece, logical)
            if found is None:
                raise LayoutError(f"rank {rank} holds {piece!r}, which is no box of a tensor of shape {list(logical)}")
            ranks += [int(rank)] * len(found[0])
            boxes.append(found)
    nothing = np.zeros((0, len(logical)), dtype=np.int64)
    parts = boxes or [(nothing, nothing, np.zeros(0, dtype=np.int64), nothing)]
    lo, shape, offset, stride = (np.concatenate([part[k] for part in parts]) for k in range(4))
    rank_of = np.asarray(ranks, dtype=np.int64)
    return Placement(rank_of, lo, shape, offset, stride, sizes, _number_copies(rank_of, lo, shape))


def _boxes_of(piece: Any, logical: tuple[int, ...]) -> tuple[IntArray, IntArray, IntArray, IntArray] | None:
    """lo, shape (n, nd), offset (n), stride (n, nd) of the boxes of the tensor that a piece is, or None."""
    steps = row_major_strides(logical)
    wide = [(step, size, dest) for step, size, dest in zip(
        piece.source_strides, piece.shape, piece.dest_strides, strict=True) if size > 1]  # fmt: skip
    axes = [next((a for a, s in enumerate(steps) if s == step and logical[a] > 1), None) for step, _, _ in wide]
    if len(set(axes)) == len(axes) and None not in axes:
        lo, rest = [], piece.source_offset
        for step, extent in zip(steps, logical, strict=True):
            lo.append(rest // step if extent > 1 else 0)
            rest -= lo[-1] * step
        shape, stride = [1] * len(logical), list(steps)
        if len(piece.shape) == len(logical):
            stride = list(piece.dest_strides)
        for axis, (_, size, dest) in zip(axes, wide, strict=True):
            if axis is not None:
                shape[axis], stride[axis] = size, dest
        if rest == 0 and all(a >= 0 and a + n <= full for a, n, full in zip(lo, shape, logical, strict=True)):
            row = [np.asarray([value], dtype=np.int64).reshape(1, len(logical)) for value in (lo, shape, stride)]
            return row[0], row[1], np.asarray([piece.dest_offset], dtype=np.int64), row[2]
    run = [size for _, size, _ in wide]
    tight = list(row_major_strides(run))
    begin, end = piece.source_offset, piece.source_offset + piece.numel
    if [s for s, _, _ in wide] != tight or [d for _, _, d in wide] != tight or begin < 0 or end > math.prod(logical):
        return None
    lows, sizes = flat_range_boxes(logical, begin, end)
    where = np.asarray(steps, dtype=np.int64)
    return lows, sizes, piece.dest_offset + lows @ where - begin, np.broadcast_to(where, lows.shape)


def _number_copies(rank: IntArray, lo: IntArray, shape: IntArray) -> IntArray | None:
    """None where any two pieces are equal or apart; else each rank's pieces go to the first copy they agree with."""
    ia, ib, _, size = intersect(lo, shape, lo, shape)
    uneven = ((lo[ia] != lo[ib]) | (shape[ia] != shape[ib])).any(axis=1) & (np.prod(size, axis=1) > 0)
    if not uneven.any():
        return None
    rivals: dict[int, set[int]] = {}
    for one, other in zip(rank[ia[uneven]].tolist(), rank[ib[uneven]].tolist(), strict=True):
        rivals.setdefault(one, set()).add(other)
    copy: dict[int, int] = {}
    for one in np.unique(rank).tolist():
        taken = {copy[other] for other in rivals.get(one, ()) if other in copy}
        copy[one] = next(number for number in range(len(taken) + 1) if number not in taken)
    return np.asarray([copy[one] for one in rank.tolist()], dtype=np.int64)
