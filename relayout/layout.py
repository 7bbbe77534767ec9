"""Layout: for every tensor of a model, which rank holds which part of it and where in that rank's storage.

A part is a *piece*: an axis-aligned box of the logical tensor together with the place of its elements in the rank's
storage for that tensor (element offset and one stride per dim). A contiguous range of the flattened tensor, as ZeRO
partitions are, is several boxes over the same storage (``geometry.flat_range_boxes``). Offsets and strides count
elements of a storage that belongs to one (rank, tensor) pair, so tensors of one shape and one rule share one
``Placement`` object however many there are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError, LayoutError
from relaymeter.relayout.geometry import boxes_overlap_volume, shared_address

__all__ = ["ITEMSIZE", "Layout", "Placement", "TensorSpec", "refuse_cast"]

#: Bytes per element of each dtype a layout may name (torch's spelling without the ``torch.`` prefix).
ITEMSIZE: Mapping[str, int] = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class TensorSpec:
    """A logical tensor: its name, full shape and dtype (torch's spelling, for example ``"bfloat16"``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise LayoutError(f"tensor {self.name}: dtype {self.dtype!r} is not one of {', '.join(ITEMSIZE)}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


def refuse_cast(name: str, leaves: str, arrives: str) -> None:
    """Raise InputError for a cast whose result is not defined for every value: from floating point to integers, or from
    complex numbers. Pure."""
    floating = leaves.startswith(("float", "bfloat"))
    if leaves != arrives and (leaves.startswith("complex") or (floating and arrives.startswith(("int", "uint")))):
        raise InputError(
            f"tensor {name}: no cast from {leaves} to {arrives} is offered, because it is not defined for every value; "
            "cast between floating-point dtypes, or from integers"
        )


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the pieces of one tensor are. Arrays of ``n`` pieces of ``nd`` dims, sorted by rank.

    ``rank`` (n); ``lo``, ``shape`` (n, nd): the box in the logical tensor; ``offset`` (n), ``stride`` (n, nd): its
    first element and strides in the rank's storage, in elements; ``storage`` maps a rank to the elements its storage
    holds, padding included. A scalar tensor has nd = 0. ``copy`` (n) numbers the copies of the tensor from 0 and says
    to which of them a piece belongs (None: all to one); copies may be cut differently, and within one copy equal boxes
    on several ranks are holders of the same part.
    """

    rank: IntArray
    lo: IntArray
    shape: IntArray
    offset: IntArray
    stride: IntArray
    storage: Mapping[int, int]
    copy: IntArray | None = None

    @cached_property
    def copies(self) -> IntArray:
        """The copy that each piece belongs to (n)."""
        return np.zeros(len(self.rank), dtype=np.int64) if self.copy is None else self.copy

    @cached_property
    def signature(self) -> bytes:
        """Equal for two placements exactly when their pieces, copies and storages are equal."""
        digest = hashlib.sha256(repr((self.lo.shape, sorted(self.storage.items()))).encode())
        for array in (self.rank, self.lo, self.shape, self.offset, self.stride, self.copies):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.digest()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold at least one element, ascending."""
        return tuple(int(r) for r in np.unique(self.rank))

    def pieces_of(self, rank: int) -> IntArray:
        """Indices of the pieces that ``rank`` holds."""
        return np.flatnonzero(self.rank == rank)

    @cached_property
    def covers(self) -> tuple[tuple[int, ...], ...]:
        """The pieces split into groups that hold every element at most once, and of a whole layout exactly once.

        Copy by copy: pieces of a copy that hold the same box are dealt out in order of rank; where boxes have unequal
        numbers of holders the shorter ones are dealt again, so that every piece stands in at least one cover.
        """
        copies = self.copies.tolist()
        holders: dict[int, dict[bytes, list[int]]] = {}
        for index, copy in enumerate(copies):
            key = self.lo[index].tobytes() + self.shape[index].tobytes()
            holders.setdefault(copy, {}).setdefault(key, []).append(index)
        found = []
        for copy in sorted(holders):
            boxes = holders[copy].values()
            most = max(len(held) for held in boxes)
            found += [tuple(sorted(held[k % len(held)] for held in boxes)) for k in range(most)]
        return tuple(found)


@dataclass(frozen=True)
class Layout:
    """A whole model's placement over the ranks. ``specs`` and ``placements`` are keyed by tensor name, in model order.

    ``aliases`` maps a tied name to the name whose storage it shares; only the latter moves. A ``partial`` layout may
    leave elements out, as the shards of one lost rank do; every other holds each tensor whole.
    """

    name: str
    world_size: int
    specs: Mapping[str, TensorSpec]
    placements: Mapping[str, Placement]
    aliases: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False

    def storage_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` holds in this layout, padding included."""
        return sum(self.placements[n].storage.get(rank, 0) * s.itemsize for n, s in self.specs.items())

    def check(self) -> None:
        """Raise LayoutError where a tensor is not covered exactly or two parts share a place, naming tensor, rank and
        count. Pure, any rank; a layout that passed once is not looked at again."""
        _ = self._checked

    @cached_property
    def _checked(self) -> bool:
        if set(self.specs) != set(self.placements):
            odd = sorted(set(self.specs) ^ set(self.placements))[0]
            raise LayoutError(f"layout {self.name}: tensor {odd} has no spec or no placement")
        for alias, name in self.aliases.items():
            if name not in self.specs or alias in self.specs:
                why = "which moves itself" if alias in self.specs else f"but there is no {name}"
                raise LayoutError(f"layout {self.name}: {alias} is tied to {name}, {why}")
        seen: set[tuple[tuple[int, ...], bytes]] = set()
        for name, spec in self.specs.items():
            key = (spec.shape, self.placements[name].signature)
            if key not in seen:
                self._check_pieces(spec, self.placements[name])
                self._check_covers(spec, self.placements[name])
                seen.add(key)
        return True

    def _where(self, spec: TensorSpec) -> str:
        return f"layout {self.name}, tensor {spec.name} {list(spec.shape)}"

    def _check_pieces(self, spec: TensorSpec, place: Placement) -> None:
        count, dims = len(place.rank), len(spec.shape)
        if place.lo.shape != (count, dims) or place.shape.shape != (count, dims) or place.stride.shape != (count, dims):
            raise LayoutError(f"{self._where(spec)}: pieces have {place.lo.shape[1]} dims, the tensor has {dims}")
        if place.copies.shape != (count,) or place.offset.shape != (count,):
            raise LayoutError(f"{self._where(spec)}: {count} pieces need as many offsets and copy numbers")
        full = np.asarray(spec.shape, dtype=np.int64)
        last = place.offset + ((place.shape - 1) * place.stride).sum(axis=1)
        have = np.asarray([place.storage.get(r, 0) for r in place.rank.tolist()], dtype=np.int64)
        outside = ((place.lo < 0) | (place.lo + place.shape > full)).any(axis=1)
        for wrong, text in (
            ((place.rank < 0) | (place.rank >= self.world_size), "is outside the world of {world}"),
            ((place.shape <= 0).any(axis=1), "holds an empty piece; leave it out instead"),
            (outside, "holds a piece outside the tensor"),
            ((place.offset < 0) | (last >= have), "needs element {last} of a storage of {have}"),
        ):
            if wrong.any():
                row = int(wrong.argmax())
                said = text.format(world=self.world_size, last=int(last[row]), have=int(have[row]))
                raise LayoutError(f"{self._where(spec)}: rank {int(place.rank[row])} {said}")
        clash = shared_address(place.rank, place.shape, place.offset, place.stride)
        if clash is not None:
            raise LayoutError(f"{self._where(spec)}: two pieces of rank {clash} use the same elements of its storage")

    def _check_covers(self, spec: TensorSpec, place: Placement) -> None:
        numel = np.prod(place.shape, axis=1, dtype=np.int64)
        checked: set[bytes] = set()
        for number, cover in enumerate(place.covers or ((),)):
            chosen = np.asarray(cover, dtype=np.int64)
            boxes = np.column_stack([place.lo[chosen], place.shape[chosen]])
            key = boxes[np.lexsort(boxes.T[::-1])].tobytes() if boxes.shape[1] else bytes(len(boxes))
            if key in checked:
                continue
            checked.add(key)
            held = int(numel[chosen].sum())
            overlap = boxes_overlap_volume(place.lo[chosen], place.shape[chosen])
            missing = spec.numel - (held - overlap)
            ranks = sorted({int(r) for r in place.rank[chosen]})
            shown = str(ranks) if len(ranks) <= 8 else f"{len(ranks)} ranks"
            if overlap:
                raise LayoutError(
                    f"{self._where(spec)}: {overlap} elements of copy {number} are held twice (holders: {shown})"
                )
            if missing and not self.partial:
                raise LayoutError(
                    f"{self._where(spec)}: {missing} of {spec.numel} elements of copy {number} are held by no rank "
                    f"(holders: {shown})"
                )
