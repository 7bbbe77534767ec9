"""Digest: proof that every bit of a tensor arrived, taken on the shards of any layout without gathering them.

The digest of a tensor is the sum of ``bits(x[i]) * hi[i // 4096] * lo[i % 4096]`` modulo 2^64 over its elements, raw
bits, so that NaN payloads and -0 count. ``lo`` holds 4,096 distinct odd 32-bit numbers and ``hi`` an odd 64-bit mix of
the block number: any changed element of up to 32 bits, and any swap of two different ones inside a block, always
changes the sum. An element of 8 bytes counts as two 32-bit words, so its blocks hold 2,048 elements. The sums per
block, before ``hi``, tell where bits differ.

Use: ``compare(digest_layout(source, ...), digest_layout(destination, ..., replicas=True)).raise_for_mismatch()``. Where
the destination leaves elements out, several layouts serve or a cast was asked for, ``source_digest.expected_digest``
takes the place of the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import DigestMismatch, InputError
from relaymeter.relayout.block_sums import (
    BLOCK_WORDS,
    LOW_WEIGHTS,
    add_boxes,
    block_count,
    block_elements,
    block_sums,
    piece_box,
    tensor_digest,
)
from relaymeter.relayout.device_sums import WordBox
from relaymeter.relayout.geometry import flat_range_boxes, intersect, row_major_strides
from relaymeter.relayout.layout import IntArray, Layout, Placement, TensorSpec

__all__ = [
    "BLOCK_WORDS",
    "DIGEST_VERSION",
    "POISON_BYTE",
    "DigestReport",
    "LayoutDigest",
    "Mismatch",
    "SharedSums",
    "block_count",
    "block_elements",
    "block_sums",
    "compare",
    "digest_layout",
    "stretches",
    "tensor_digest",
]

#: Stands in every record; changes whenever equal bits would get another digest.
DIGEST_VERSION = 1
#: The byte a destination is filled with before a move under test.
POISON_BYTE = 0xA5

_MASK64 = (1 << 64) - 1
#: Bad blocks of one copy whose bits are looked for among the other blocks.
_IDENTIFIED_AT_MOST = 64


@dataclass(frozen=True, eq=False)
class LayoutDigest:
    """Block sums of every tensor of a layout: ``sums[name][cover]`` is an int64 CPU tensor, one per block.

    A cover holds each element at most once: one copy of the tensor, or what a partial layout holds of it. A source has
    one cover per tensor; a destination all of them. Tensors without elements have none. ``expected``: the sums are what
    each cover of ``layout`` must come to, not what was found there.
    """

    layout: Layout
    version: int
    sums: Mapping[str, tuple[torch.Tensor, ...]]
    expected: bool = False

    def digest(self, name: str, cover: int = 0) -> int:
        """Digest of tensor ``name``, 0 to 2^64 - 1."""
        return tensor_digest(self.sums[name][cover])


class SharedSums:
    """Sums that every rank adds to, each its own part, and that all ranks then get whole.

        with SharedSums(counts, device, group) as sums:
            sums.parts[0] += ...
        sums.totals[0]

    ``parts`` are zeros of ``counts`` elements (int64, on ``device``), ``totals`` the sums over all ranks of ``group``,
    on the CPU. Leaving the block is collective: one all-reduce; without a process group the totals are this rank's own.
    An InputError raised on some rank inside the block is raised there, and its like on every other rank.
    """

    def __init__(self, counts: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._flat = torch.zeros(sum(counts) + 1, dtype=torch.int64, device=device)
        self._counts, self._group = [*counts, 1], group
        self.parts = list(torch.split(self._flat, self._counts))[:-1]
        self.totals: list[torch.Tensor] = []

    def __enter__(self) -> SharedSums:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and not issubclass(kind, InputError):
            return
        flat = self._flat
        flat[-1] = int(error is not None)
        if dist.is_initialized():
            if dist.get_backend(self._group) == "nccl":
                flat = flat.cuda()
            dist.all_reduce(flat, group=self._group)
        *self.totals, refused = torch.split(flat.cpu(), self._counts)
        if error is None and int(refused):
            raise InputError(f"{int(refused)} other ranks could not digest what they hold; their errors say why")


def digest_layout(
    layout: Layout,
    rank: int,
    storages: Mapping[str, torch.Tensor],
    *,
    replicas: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LayoutDigest:
    """Digest a layout whose shards lie on many ranks. Collective over ``group``; every rank gets the whole result.

    ``storages`` maps the tensors that ``rank`` holds to its 1-D storages. With ``replicas`` each cover of a tensor is
    digested, otherwise only the first, so that each logical element counts once; of a partial layout a cover is what it
    holds. One all-reduce of 8 bytes per block.
    """
    covers = {
        name: layout.placements[name].covers[: None if replicas else 1] if spec.numel else ()
        for name, spec in layout.specs.items()
    }
    counts = [block_count(spec) for name, spec in layout.specs.items() for _ in covers[name]]
    device = next((storage.device for storage in storages.values()), torch.device("cpu"))
    with SharedSums(counts, device, group) as sums:
        parts = iter(sums.parts)
        boxes: list[WordBox] = []
        for name, spec in layout.specs.items():
            place = layout.placements[name]
            mine = [next(parts) for _ in covers[name]]
            for piece in place.pieces_of(rank).tolist():
                held = [part for part, cover in zip(mine, covers[name], strict=True) if piece in cover]
                if held:
                    if name not in storages:
                        raise InputError(f"tensor {name}: rank {rank} holds a piece of it but handed in no storage")
                    if len(held) == 1:
                        boxes.append(piece_box(held[0], spec, place, piece, storages[name]))
                        continue
                    added = block_sums(spec, place, [piece], storages[name])
                    for part in held:
                        part += added
        add_boxes(boxes)
    found = iter(sums.totals)
    return LayoutDigest(layout, DIGEST_VERSION, {name: tuple(next(found) for _ in covers[name]) for name in covers})


@dataclass(frozen=True)
class Mismatch:
    """Neighbouring blocks of one copy of a tensor that differ: elements ``start`` to ``stop - 1`` of the flat tensor.

    ``ranks`` hold parts of them. ``found`` says what lies there instead, where that is known: another block, zeros, the
    poison pattern of a block that was never written, or one changed element.
    """

    tensor: str
    cover: int
    ranks: tuple[int, ...]
    start: int
    stop: int
    found: str = ""

    def __str__(self) -> str:
        ranks = ", ".join(str(rank) for rank in self.ranks)
        text = f"{self.tensor}, copy {self.cover} (ranks {ranks}), elements [{self.start}, {self.stop})"
        return f"{text}: holds {self.found}" if self.found else text


@dataclass(frozen=True)
class DigestReport:
    """Outcome of ``compare``: how many copies of tensors were checked and passed, and every mismatch."""

    version: int
    passed: int
    total: int
    mismatches: tuple[Mismatch, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every bit arrived."""
        return self.passed == self.total

    def raise_for_mismatch(self) -> None:
        """Raise DigestMismatch naming tensors, copies, ranks and element ranges, unless everything passed."""
        if not self.ok:
            shown = "; ".join(str(mismatch) for mismatch in self.mismatches[:8])
            more = f"; and {len(self.mismatches) - 8} more ranges" if len(self.mismatches) > 8 else ""
            raise DigestMismatch(f"wrong bits in {self.total - self.passed} of {self.total} checks: {shown}{more}")


def compare(source: LayoutDigest, destination: LayoutDigest) -> DigestReport:
    """Hold every copy at the destination against the source. Pure: the same report on every rank that has the sums.

    ``source`` is the digest of a layout that holds every tensor whole, or an expected one (``expected_digest``). Raises
    InputError where the two do not name the same tensors, digest versions or elements.
    """
    if source.version != destination.version:
        raise InputError(f"digest version {source.version} cannot be compared with {destination.version}")
    if set(source.sums) != set(destination.sums):
        odd = sorted(set(source.sums) ^ set(destination.sums))[0]
        raise InputError(f"tensor {odd} is in one of layouts {source.layout.name}, {destination.layout.name} only")
    passed = total = 0
    mismatches: list[Mismatch] = []
    for name, copies in destination.sums.items():
        if copies and not source.expected:
            _need_whole(source.layout, destination.layout, name)
        for cover, sums in enumerate(copies):
            total += 1
            wanted = source.sums[name][cover if source.expected else 0]
            bad = torch.nonzero(sums != wanted).view(-1).tolist()
            passed += not bad
            mismatches += _describe(source, destination, name, cover, bad)
    return DigestReport(source.version, passed, total, tuple(mismatches))


def _need_whole(source: Layout, destination: Layout, name: str) -> None:
    spec = destination.specs[name]
    if source.specs[name].dtype != spec.dtype:
        raise InputError(f"tensor {name} arrives in another dtype: compare it with expected_digest of the sources")
    for layout in (source, destination):
        place = layout.placements[name]
        if layout.partial and any(
            int(np.prod(place.shape[list(cover)], axis=1).sum()) != spec.numel for cover in place.covers
        ):
            raise InputError(
                f"layout {layout.name} holds tensor {name} in part: compare it with expected_digest of the sources"
            )


def stretches(spec: TensorSpec, bad: Sequence[int], labels: Sequence[str] = ()) -> list[tuple[int, int, str]]:
    """Neighbouring ``bad`` blocks (ascending) as ranges [start, stop) of elements, with their label where they agree.

    ``labels`` name the first blocks; those without one have an empty label.
    """
    found: list[tuple[int, int, str]] = []
    for number, block in enumerate(bad):
        label = labels[number] if number < len(labels) else ""
        if found and found[-1][1] == block and label == found[-1][2]:
            found[-1] = (found[-1][0], block + 1, label)
        else:
            found.append((block, block + 1, label))
    step = block_elements(spec)
    return [(first * step, min(last * step, spec.numel), label) for first, last, label in found]


def _identify(source: LayoutDigest, spec: TensorSpec, value: int, weight: int) -> str:
    """What a bad block of ``spec`` with block sum ``value`` holds, where that can be told; else an empty text.

    ``weight`` is the sum of the weights of the block's elements.
    """
    if value == 0:
        return "zeros"
    word = int.from_bytes(bytes([POISON_BYTE]) * min(spec.itemsize, 4), "little")
    if (value - word * weight) & _MASK64 == 0:
        return "the poison pattern: never written"
    step = block_elements(spec)
    places: list[tuple[str, int]] = []
    for name, other in source.layout.specs.items():
        if other.itemsize == spec.itemsize and source.sums[name]:
            hits = torch.nonzero(source.sums[name][0] == value).view(-1).tolist()
            places += [(name, hit) for hit in hits]
    if not places:
        return ""
    name, hit = places[0]
    text = f"the bits of {name}, elements [{hit * step}, {min((hit + 1) * step, source.layout.specs[name].numel)})"
    return text if len(places) == 1 else f"{text} or of one of {len(places) - 1} equal blocks"


def _one_element(spec: TensorSpec, block: int, difference: int) -> str:
    """Which element of ``block`` it is, where one that changed explains the ``difference`` of the sums; else "".

    That is the product of the element's change, of at most 32 bits, and its weight, so the weight divides it. Other
    damage passes for it once in a million blocks or less.
    """
    low = LOW_WEIGHTS.numpy().astype(np.uint64)
    hits: list[int] = []
    for value in (difference & _MASK64, -difference & _MASK64):
        change, rest = np.divmod(np.uint64(value), low)
        hits += np.flatnonzero((rest == 0) & (change < 1 << 8 * min(spec.itemsize, 4))).tolist()
    if len(hits) != 1:
        return ""
    return f"one changed element, {block * block_elements(spec) + hits[0] // (2 if spec.itemsize == 8 else 1)}"


def _describe(
    source: LayoutDigest, destination: LayoutDigest, name: str, cover: int, bad: Sequence[int]
) -> list[Mismatch]:
    """One Mismatch for each stretch of neighbouring bad blocks that hold the same kind of wrong bits."""
    spec = destination.layout.specs[name]
    sums = destination.sums[name][cover]
    place = destination.layout.placements[name]
    pieces = np.asarray(place.covers[cover], dtype=np.int64)
    wanted = source.sums[name][cover if source.expected else 0]
    labels = [
        _identify(source, spec, int(sums[block]), _weight(spec, place, pieces, block))
        or _one_element(spec, block, int(sums[block]) - int(wanted[block]))
        for block in bad[:_IDENTIFIED_AT_MOST]
    ]
    mismatches = []
    for start, stop, found in stretches(spec, bad, labels):
        lo, shape = flat_range_boxes(spec.shape, start, stop)
        touched = pieces[np.unique(intersect(place.lo[pieces], place.shape[pieces], lo, shape)[0])]
        ranks = tuple(sorted({int(rank) for rank in place.rank[touched]}))
        mismatches.append(Mismatch(name, cover, ranks, start, stop, found))
    return mismatches


def _weight(spec: TensorSpec, place: Placement, pieces: IntArray, block: int) -> int:
    """The weights of the elements of ``block`` that ``pieces`` hold, added up."""
    step = block_elements(spec)
    start, stop = block * step, min((block + 1) * step, spec.numel)
    _, _, lo, shape = intersect(place.lo[pieces], place.shape[pieces], *flat_range_boxes(spec.shape, start, stop))
    held = np.zeros(step, dtype=np.bool_)
    strides = row_major_strides(spec.shape)
    for low, size in zip(lo.tolist(), shape.tolist(), strict=True):
        flat = np.full(1, sum(at * stride for at, stride in zip(low, strides, strict=True)) - start, dtype=np.int64)
        for extent, stride in zip(size, strides, strict=True):
            flat = (flat[:, None] + stride * np.arange(extent)).reshape(-1)
        held[flat] = True
    return int(LOW_WEIGHTS.view(step, -1).sum(dim=1)[torch.from_numpy(held)].sum())
