"""Block sums: the arithmetic of the digest on the shards of one tensor. What the sums mean stands in ``digest``.

``block_sums(spec, placement, pieces, storage)`` is what some pieces of one rank add to the sums of a tensor, one for
every 4,096 words of it; ``add_boxes`` adds any boxes of any tensors. Local, on the storages' device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from relaymeter.errors import InputError
from relaymeter.relayout.copy_kernel import available
from relaymeter.relayout.device_sums import DeviceSums, WordBox
from relaymeter.relayout.geometry import row_major_strides
from relaymeter.relayout.layout import Placement, TensorSpec

__all__ = [
    "BLOCK_WORDS",
    "LOW_WEIGHTS",
    "add_boxes",
    "block_count",
    "block_elements",
    "block_sums",
    "piece_box",
    "tensor_digest",
    "word_box",
]

#: Words (elements, or halves of 8-byte elements) of one block.
BLOCK_WORDS = 4096

#: (size, stride in the flattened tensor, stride in the storage) of one dim of a box, in words.
_Dim = tuple[int, int, int]
_MASK64 = (1 << 64) - 1
#: Elements that one step works on at a time: its temporaries stay in a core's cache.
_CHUNK = 32 * BLOCK_WORDS
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


#: ``lo``, the weights within a block (int64).
LOW_WEIGHTS = _low_weights()
#: ``lo`` twice over: a run that starts anywhere in a block reads its weights as one slice.
_LO_TWICE = torch.cat([LOW_WEIGHTS, LOW_WEIGHTS])
#: Halves of ``lo`` as doubles: elements of up to 16 bits are summed exactly in 53 bits (16 + 16 + 12 bits needed).
_LO_HALVES = torch.stack([(LOW_WEIGHTS & 0xFFFF).double(), (LOW_WEIGHTS >> 16).double()], dim=1)


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
            target += torch.mv(part.long(), LOW_WEIGHTS)
        else:
            target += (part.long() * LOW_WEIGHTS.to(part.device)).sum(1)


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


def word_box(
    out: torch.Tensor,
    spec: TensorSpec,
    lo: Sequence[int],
    shape: Sequence[int],
    storage: torch.Tensor,
    offset: int,
    stride: Sequence[int],
) -> WordBox:
    """The elements of the box (``lo``, ``shape``) of the logical tensor in words, to be added to block sums ``out``.

    They lie in the 1-D ``storage`` from element ``offset`` on, ``stride`` elements apart in each dim.
    """
    lo, shape, stored = list(lo), list(shape), list(stride)
    logical = list(row_major_strides(spec.shape))
    if spec.itemsize == 8:
        logical, stored, offset = [2 * s for s in logical], [2 * s for s in stored], 2 * offset
        lo, shape, logical, stored = [*lo, 0], [*shape, 2], [*logical, 1], [*stored, 1]
    start = sum(at * step for at, step in zip(lo, logical, strict=True))
    return WordBox(out, _words(storage), tuple(_merged(shape, logical, stored)), start, offset)


def add_boxes(boxes: Sequence[WordBox]) -> None:
    """Add every box to its sums. Those of a CUDA device are one launch, where Triton is there."""
    fused = [box for box in boxes if box.words.device.type == "cuda" and available()]
    if fused:
        DeviceSums(fused, LOW_WEIGHTS).run()
    for box in boxes:
        if not fused or box.words.device.type != "cuda":
            _add(box)


def _add(box: WordBox) -> None:
    out, words, dims, start, offset = box.out, box.words, list(box.dims), box.start, box.offset
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


def piece_box(out: torch.Tensor, spec: TensorSpec, placement: Placement, piece: int, storage: torch.Tensor) -> WordBox:
    """What one piece of a rank adds to the block sums ``out`` of ``spec``.

    ``storage`` is that rank's 1-D storage of the tensor, of ``spec``'s dtype or raw bits of the same width. Raises
    InputError where storage and placement do not fit.
    """
    have, wanted = storage.numel(), placement.storage.get(int(placement.rank[piece]), 0)
    if storage.dim() != 1 or storage.element_size() != spec.itemsize or have < wanted:
        raise InputError(
            f"tensor {spec.name}: rank {int(placement.rank[piece])} needs a 1-D storage of {wanted} elements of "
            f"{spec.itemsize} bytes, got {list(storage.shape)} of {storage.element_size()}"
        )
    box = (placement.lo[piece].tolist(), placement.shape[piece].tolist())
    return word_box(out, spec, *box, storage, int(placement.offset[piece]), placement.stride[piece].tolist())


def block_sums(spec: TensorSpec, placement: Placement, pieces: Sequence[int], storage: torch.Tensor) -> torch.Tensor:
    """What ``pieces`` of one rank add to the block sums of ``spec``: int64, one per block, modulo 2^64. Local.

    ``storage``, and errors, as ``piece_box``.
    """
    out = torch.zeros(block_count(spec), dtype=torch.int64, device=storage.device)
    add_boxes([piece_box(out, spec, placement, piece, storage) for piece in pieces])
    return out
