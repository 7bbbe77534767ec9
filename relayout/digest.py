"""Digest: proof that every bit of a tensor arrived, taken on the shards of any layout without gathering them.

The digest of a tensor is the sum of ``bits(x[i]) * hi[i // 4096] * lo[i % 4096]`` modulo 2^64 over its elements, raw
bits, so that NaN payloads and -0 count. ``lo`` holds 4,096 distinct odd 32-bit numbers and ``hi`` an odd 64-bit mix of
the block number: any changed element of up to 32 bits, and any swap of two different ones inside a block, always
changes the sum. An element of 8 bytes counts as two 32-bit words, so its blocks hold 2,048 elements. The sums per
block, before ``hi``, tell where bits differ.

Use: ``compare(digest_layout(source, ...), digest_layout(destination, ..., replicas=True)).raise_for_mismatch()``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import DigestMismatch, InputError
from relaymeter.relayout.geometry import flat_range_boxes, intersect, row_major_strides
from relaymeter.relayout.layout import Layout, Placement, TensorSpec

__all__ = [
    "BLOCK_WORDS",
    "DIGEST_VERSION",
    "POISON_BYTE",
    "DigestReport",
    "LayoutDigest",
    "Mismatch",
    "block_count",
    "block_elements",
    "block_sums",
    "compare",
    "digest_layout",
    "tensor_digest",
]

#: Stands in every record; changes whenever equal bits would get another digest.
DIGEST_VERSION = 1
#: Words (elements, or halves of 8-byte elements) of one block.
BLOCK_WORDS = 4096
#: The byte a destination is filled with before a move under test.
POISON_BYTE = 0xA5

#: (size, stride in the flattened tensor, stride in the storage) of one dim of a box, in words.
_Dim = tuple[int, int, int]
_MASK64 = (1 << 64) - 1
#: Elements that one step works on at a time: its temporaries stay in a core's cache.
_CHUNK = 32 * BLOCK_WORDS
#: Bad blocks of one copy whose bits are looked for among the other blocks.
_IDENTIFIED_AT_MOST = 64
#: A box is dense where its elements are at least one in so many of those between its first and its last one.
_DENSE = 8
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def _mix(numbers: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), on uint64 modulo 2^64."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _low_weights() -> torch.Tensor:
    """``lo``: a bijection of 31-bit numbers applied to 0..4095, doubled plus one, so distinct, odd and below 2^32."""
    keep = np.uint64((1 << 31) - 1)
    numbers = np.arange(BLOCK_WORDS, dtype=np.uint64)
    for factor in (0x5BD1E995, 0x2C1B3C6D, 0x297A2D39):
        numbers = (numbers * np.uint64(factor) + np.uint64(0x1F83D9AB)) & keep
        numbers ^= numbers >> np.uint64(15)
    return torch.from_numpy((numbers * np.uint64(2) + np.uint64(1)).astype(np.int64))


_LO = _low_weights()
#: ``lo`` twice over: a run that starts anywhere in a block reads its weights as one slice.
_LO_TWICE = torch.cat([_LO, _LO])
#: Halves of ``lo`` as doubles: elements of up to 16 bits are summed exactly in 53 bits (16 + 16 + 12 bits needed).
_LO_HALVES = torch.stack([(_LO & 0xFFFF).double(), (_LO >> 16).double()], dim=1)


def block_elements(spec: TensorSpec) -> int:
    """Elements that one block of ``spec`` holds: 4,096, or 2,048 of 8 bytes."""
    return BLOCK_WORDS // 2 if spec.itemsize == 8 else BLOCK_WORDS


def block_count(spec: TensorSpec) -> int:
    """Blocks of ``spec``: its elements over ``block_elements``, rounded up."""
    return -(-spec.numel // block_elements(spec))


def tensor_digest(sums: torch.Tensor) -> int:
    """The digest, 0 to 2^64 - 1, of a tensor whose complete block sums are ``sums`` (int64, one per block)."""
    high = _mix(np.arange(len(sums), dtype=np.uint64)) | np.uint64(1)
    return int((sums.cpu().numpy().view(np.uint64) * high).sum(dtype=np.uint64))


def _words(storage: torch.Tensor) -> torch.Tensor:
    """The bits of a 1-D tensor as unsigned words of at most 32 bits."""
    return storage.view(_UNSIGNED[min(storage.element_size(), 4)])


def _add_blocks(out: torch.Tensor, words: torch.Tensor, first: int) -> None:
    """Add complete blocks, contiguous words from block ``first`` on, to the block sums ``out``."""
    rows = words.view(-1, BLOCK_WORDS)
    step = _CHUNK // BLOCK_WORDS
    for row in range(0, len(rows), step):
        part = rows[row : row + step]
        target = out[first + row : first + row + len(part)]
        if part.element_size() <= 2:
            halves = (part.double() @ _LO_HALVES.to(part.device)).long()
            target += halves[:, 0] + (halves[:, 1] << 16)
        elif part.device.type == "cpu":
            target += torch.mv(part.long(), _LO)
        else:
            target += (part.long() * _LO.to(part.device)).sum(1)


def _add_run(out: torch.Tensor, words: torch.Tensor, start: int) -> None:
    """Add a contiguous run of words that begins at word ``start`` of the flattened tensor to the block sums ``out``."""
    head = min(-start % BLOCK_WORDS, len(words))
    whole = (len(words) - head) // BLOCK_WORDS * BLOCK_WORDS
    tail = len(words) - head - whole
    if head:
        _add_image(out, words, [(head, 1, 1)], start, 0)
    if whole:
        _add_blocks(out, words[head : head + whole], (start + head) // BLOCK_WORDS)
    if tail:
        _add_image(out, words, [(tail, 1, 1)], start + head + whole, head + whole)


def _add_image(out: torch.Tensor, words: torch.Tensor, dims: list[_Dim], start: int, offset: int) -> None:
    """Add a dense box to the block sums ``out``: copied to its place among zeros, which add nothing."""
    base = start // BLOCK_WORDS
    end = start + 1 + sum((size - 1) * far for size, far, _ in dims)
    image = torch.zeros((-(-end // BLOCK_WORDS) - base) * BLOCK_WORDS, dtype=words.dtype, device=words.device)
    sizes = [size for size, _, _ in dims]
    there = image.as_strided(sizes, [far for _, far, _ in dims], start - base * BLOCK_WORDS)
    there.copy_(words.as_strided(sizes, [near for _, _, near in dims], words.storage_offset() + offset))
    _add_blocks(out, image, base)


def _add_rows(out: torch.Tensor, words: torch.Tensor, dims: list[_Dim], start: int, offset: int) -> None:
    """Add a sparse box, its last dim running along the flattened tensor, to ``out``, all rows at once."""
    view = words.as_strided(
        [size for size, _, _ in dims], [near for _, _, near in dims], words.storage_offset() + offset
    )
    first = torch.full((1,), start, dtype=torch.int64, device=words.device)
    for size, far, _ in dims[:-1]:
        first = (first[:, None] + far * torch.arange(size, device=words.device)).view(-1)
    every = view.reshape(-1, dims[-1][0])
    for column in range(0, every.shape[1], BLOCK_WORDS):
        rows = every[:, column : column + BLOCK_WORDS]
        length = rows.shape[1]
        block, phase = (first + column) // BLOCK_WORDS, (first + column) % BLOCK_WORDS
        products = rows.long().mul_(_LO_TWICE.to(rows.device).unfold(0, length, 1)[phase])
        out.index_add_(0, block, products.sum(1))
        split = torch.nonzero(phase + length > BLOCK_WORDS).view(-1)
        if len(split):  # these rows end in the next block: move what lies there
            within = torch.arange(length, device=rows.device)
            beyond = (products[split] * (within >= (BLOCK_WORDS - phase[split])[:, None])).sum(1)
            out.index_add_(0, block[split], -beyond)
            out.index_add_(0, block[split] + 1, beyond)


def _merged(shape: Sequence[int], logical: Sequence[int], stored: Sequence[int]) -> list[_Dim]:
    """Dims of a box as (size, logical stride, storage stride), without those of size 1, neighbours joined where both
    sides run on."""
    dims: list[_Dim] = []
    for size, far, near in zip(shape, logical, stored, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * far and dims[-1][2] == size * near:
            dims[-1] = (dims[-1][0] * size, far, near)
        else:
            dims.append((size, far, near))
    return dims


def _boxes_within(dims: list[_Dim], limit: int, start: int, offset: int) -> Iterator[tuple[list[_Dim], int, int]]:
    """Cut a box along its outer dims into parts of at most ``limit`` elements: (dims, first word, storage offset)."""
    elements = math.prod(size for size, _, _ in dims)
    if elements <= limit:
        yield dims, start, offset
        return
    (size, far, near), rest = dims[0], dims[1:]
    inner = elements // size
    step = max(1, limit // inner)
    for begin in range(0, size, step):
        count = min(step, size - begin)
        part = rest if count == 1 else [(count, far, near), *rest]
        yield from _boxes_within(part, limit, start + begin * far, offset + begin * near)


def _add_piece(out: torch.Tensor, spec: TensorSpec, place: Placement, piece: int, storage: torch.Tensor) -> None:
    """Add one piece of ``place``, read from its rank's ``storage``, to the block sums ``out``."""
    lo, shape = place.lo[piece].tolist(), place.shape[piece].tolist()
    logical = list(row_major_strides(spec.shape))
    stored, offset = place.stride[piece].tolist(), int(place.offset[piece])
    words = _words(storage)
    if spec.itemsize == 8:
        logical, stored, offset = [2 * s for s in logical], [2 * s for s in stored], 2 * offset
        lo, shape, logical, stored = [*lo, 0], [*shape, 2], [*logical, 1], [*stored, 1]
    start = sum(at * step for at, step in zip(lo, logical, strict=True))
    dims = _merged(shape, logical, stored)
    if not dims or (len(dims) == 1 and dims[0][1:] == (1, 1)):
        count = dims[0][0] if dims else 1
        _add_run(out, words[offset : offset + count], start)
        return
    elements = math.prod(size for size, _, _ in dims)
    span = 1 + sum((size - 1) * far for size, far, _ in dims)
    dense = span <= _DENSE * elements
    if dims[-1][1] != 1:
        dims.append((1, 1, 1))
    limit = max(1, _CHUNK * elements // span) if dense else _CHUNK
    for part, begin, at in _boxes_within(dims, limit, start, offset):
        (_add_image if dense else _add_rows)(out, words, part or [(1, 1, 1)], begin, at)


def block_sums(spec: TensorSpec, placement: Placement, pieces: Sequence[int], storage: torch.Tensor) -> torch.Tensor:
    """What ``pieces`` of one rank add to the block sums of ``spec``: int64, one per block, modulo 2^64.

    ``storage`` is that rank's 1-D storage of the tensor, of ``spec``'s dtype or raw bits of the same width. Local.
    Raises InputError where storage and placement do not fit.
    """
    out = torch.zeros(block_count(spec), dtype=torch.int64, device=storage.device)
    for piece in pieces:
        have, wanted = storage.numel(), placement.storage.get(int(placement.rank[piece]), 0)
        if storage.dim() != 1 or storage.element_size() != spec.itemsize or have < wanted:
            raise InputError(
                f"tensor {spec.name}: rank {int(placement.rank[piece])} needs a 1-D storage of {wanted} elements of "
                f"{spec.itemsize} bytes, got {list(storage.shape)} of {storage.element_size()}"
            )
        _add_piece(out, spec, placement, int(piece), storage)
    return out


@dataclass(frozen=True, eq=False)
class LayoutDigest:
    """Complete block sums of every tensor of a layout: ``sums[name][cover]`` is an int64 CPU tensor, one per block.

    A source has one cover per tensor; a destination one per replica. Tensors without elements have none.
    """

    layout: Layout
    version: int
    sums: Mapping[str, tuple[torch.Tensor, ...]]

    def digest(self, name: str, cover: int = 0) -> int:
        """Digest of tensor ``name``, 0 to 2^64 - 1."""
        return tensor_digest(self.sums[name][cover])


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
    digested, otherwise only the first, so that each logical element counts once. One all-reduce of 8 bytes per block.
    """
    covers: dict[str, int] = {}
    starts: dict[str, int] = {}
    total = 0
    for name, spec in layout.specs.items():
        count = len(layout.placements[name].covers) if spec.numel else 0
        covers[name] = count if replicas else min(count, 1)
        starts[name] = total
        total += covers[name] * block_count(spec)
    device = next((storage.device for storage in storages.values()), torch.device("cpu"))
    flat = torch.zeros(total, dtype=torch.int64, device=device)
    views = {
        name: tuple(flat[starts[name] + k * block_count(spec) :][: block_count(spec)] for k in range(covers[name]))
        for name, spec in layout.specs.items()
    }
    for name, spec in layout.specs.items():
        place = layout.placements[name]
        for piece in place.pieces_of(rank).tolist():
            held = [view for view, cover in zip(views[name], place.covers, strict=False) if piece in cover]
            if held:
                if name not in storages:
                    raise InputError(f"tensor {name}: rank {rank} holds a piece of it but handed in no storage")
                sums = block_sums(spec, place, [piece], storages[name])
                for view in held:
                    view += sums
    if dist.is_initialized():
        if dist.get_backend(group) == "nccl":
            flat = flat.cuda()
        dist.all_reduce(flat, group=group)
    flat = flat.cpu()
    sums_of = {
        name: tuple(flat[starts[name] + k * block_count(spec) :][: block_count(spec)] for k in range(covers[name]))
        for name, spec in layout.specs.items()
    }
    return LayoutDigest(layout, DIGEST_VERSION, sums_of)


@dataclass(frozen=True)
class Mismatch:
    """Neighbouring blocks of one copy of a tensor that differ: elements ``start`` to ``stop - 1`` of the flat tensor.

    ``ranks`` hold parts of them. ``found`` says what lies there instead, where that is known: another block, zeros, or
    the poison pattern of a block that was never written.
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

    Raises InputError where the two do not name the same tensors or digest versions.
    """
    if source.version != destination.version:
        raise InputError(f"digest version {source.version} cannot be compared with {destination.version}")
    if set(source.sums) != set(destination.sums):
        odd = sorted(set(source.sums) ^ set(destination.sums))[0]
        raise InputError(f"tensor {odd} is in one of layouts {source.layout.name}, {destination.layout.name} only")
    passed = total = 0
    mismatches: list[Mismatch] = []
    for name, copies in destination.sums.items():
        for cover, sums in enumerate(copies):
            total += 1
            bad = torch.nonzero(sums != source.sums[name][0]).view(-1).tolist()
            passed += not bad
            mismatches += _describe(source, destination, name, cover, bad)
    return DigestReport(source.version, passed, total, tuple(mismatches))


def _identify(source: LayoutDigest, spec: TensorSpec, block: int, value: int) -> str:
    """What a bad block of ``spec`` with block sum ``value`` holds, where that can be told; else an empty text."""
    if value == 0:
        return "zeros"
    step = block_elements(spec)
    held = min(step, spec.numel - block * step) * (2 if spec.itemsize == 8 else 1)
    word = int.from_bytes(bytes([POISON_BYTE]) * min(spec.itemsize, 4), "little")
    if (value - word * int(_LO[:held].sum())) & _MASK64 == 0:
        return "the poison pattern: never written"
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


def _describe(
    source: LayoutDigest, destination: LayoutDigest, name: str, cover: int, bad: Sequence[int]
) -> list[Mismatch]:
    """One Mismatch for each stretch of neighbouring bad blocks that hold the same kind of wrong bits."""
    spec = destination.layout.specs[name]
    step = block_elements(spec)
    sums = destination.sums[name][cover]
    stretches: list[tuple[int, int, str]] = []
    for number, block in enumerate(bad):
        found = _identify(source, spec, block, int(sums[block])) if number < _IDENTIFIED_AT_MOST else ""
        if stretches and stretches[-1][1] == block and found == stretches[-1][2]:
            stretches[-1] = (stretches[-1][0], block + 1, found)
        else:
            stretches.append((block, block + 1, found))
    place = destination.layout.placements[name]
    pieces = np.asarray(place.covers[cover], dtype=np.int64)
    mismatches = []
    for first, last, found in stretches:
        start, stop = first * step, min(last * step, spec.numel)
        lo, shape = flat_range_boxes(spec.shape, start, stop)
        touched = pieces[np.unique(intersect(place.lo[pieces], place.shape[pieces], lo, shape)[0])]
        ranks = tuple(sorted({int(rank) for rank in place.rank[touched]}))
        mismatches.append(Mismatch(name, cover, ranks, start, stop, found))
    return mismatches
