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

from relaymeter.errors import LayoutError
from relaymeter.relayout.geometry import boxes_overlap_volume

__all__ = ["ITEMSIZE", "Layout", "Placement", "TensorSpec"]

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


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the pieces of one tensor are. Arrays of ``n`` pieces of ``nd`` dims, sorted by rank.

    ``rank`` (n); ``lo``, ``shape`` (n, nd): the box in the logical tensor; ``offset`` (n), ``stride`` (n, nd): its
    first element and strides in the rank's storage, in elements; ``storage`` maps a rank to the elements its storage
    holds, padding included. A scalar tensor has nd = 0.
    """

    rank: IntArray
    lo: IntArray
    shape: IntArray
    offset: IntArray
    stride: IntArray
    storage: Mapping[int, int]

    @cached_property
    def signature(self) -> bytes:
        """Equal for two placements exactly when their pieces and storages are equal."""
        digest = hashlib.sha256(repr((self.lo.shape, sorted(self.storage.items()))).encode())
        for array in (self.rank, self.lo, self.shape, self.offset, self.stride):
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
        """The holders split into groups of pieces, each of which covers the tensor exactly once: the replicas.

        Pieces that hold the same region are dealt out in order of rank; where regions have unequal numbers of holders
        the shorter ones are dealt again, so that every piece stands in at least one cover.
        """
        holders: dict[bytes, list[int]] = {}
        for index in range(len(self.rank)):
            key = self.lo[index].tobytes() + self.shape[index].tobytes()
            holders.setdefault(key, []).append(index)
        most = max((len(found) for found in holders.values()), default=0)
        return tuple(tuple(sorted(found[k % len(found)] for found in holders.values())) for k in range(most))


@dataclass(frozen=True)
class Layout:
    """A whole model's placement over the ranks. ``specs`` and ``placements`` are keyed by tensor name, in model order.

    ``aliases`` maps a tied name to the name whose storage it shares; only the latter moves.
    """

    name: str
    world_size: int
    specs: Mapping[str, TensorSpec]
    placements: Mapping[str, Placement]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def storage_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` holds in this layout, padding included."""
        return sum(self.placements[n].storage.get(rank, 0) * s.itemsize for n, s in self.specs.items())

    def check(self) -> None:
        """Raise LayoutError where a tensor is not covered exactly, naming tensor, rank and count. Pure, any rank."""
        if set(self.specs) != set(self.placements):
            odd = sorted(set(self.specs) ^ set(self.placements))[0]
            raise LayoutError(f"layout {self.name}: tensor {odd} has no spec or no placement")
        seen: set[tuple[tuple[int, ...], bytes]] = set()
        for name, spec in self.specs.items():
            key = (spec.shape, self.placements[name].signature)
            if key not in seen:
                self._check_tensor(spec, self.placements[name])
                seen.add(key)

    def _check_tensor(self, spec: TensorSpec, place: Placement) -> None:
        where = f"layout {self.name}, tensor {spec.name} {list(spec.shape)}"
        count, dims = len(place.rank), len(spec.shape)
        if place.lo.shape != (count, dims) or place.shape.shape != (count, dims) or place.stride.shape != (count, dims):
            raise LayoutError(f"{where}: pieces have {place.lo.shape[1]} dims, the tensor has {dims}")
        full = np.asarray(spec.shape, dtype=np.int64)
        numel = np.prod(place.shape, axis=1, dtype=np.int64)
        last = place.offset + ((place.shape - 1) * place.stride).sum(axis=1)
        for index in range(count):
            rank = int(place.rank[index])
            if not 0 <= rank < self.world_size:
                raise LayoutError(f"{where}: rank {rank} is outside the world of {self.world_size}")
            if numel[index] <= 0:
                raise LayoutError(f"{where}: rank {rank} holds an empty piece; leave it out instead")
            if (place.lo[index] < 0).any() or (place.lo[index] + place.shape[index] > full).any():
                raise LayoutError(f"{where}: rank {rank} holds a piece outside the tensor")
            have = place.storage.get(rank, 0)
            if place.offset[index] < 0 or last[index] >= have:
                raise LayoutError(f"{where}: rank {rank} needs element {int(last[index])} of a storage of {have}")
        for number, cover in enumerate(place.covers or ((),)):
            chosen = list(cover)
            held = int(numel[chosen].sum())
            overlap = boxes_overlap_volume(place.lo[chosen], place.shape[chosen])
            missing = spec.numel - (held - overlap)
            if overlap:
                raise LayoutError(f"{where}: {overlap} elements of copy {number} are held twice")
            if missing:
                ranks = sorted({int(r) for r in place.rank[chosen]})
                raise LayoutError(
                    f"{where}: {missing} of {spec.numel} elements of copy {number} are held by no rank "
                    f"(holders: {ranks})"
                )
