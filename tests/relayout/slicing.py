"""What a framework keeps on each rank, by plain NumPy on whole arrays: reshape, split, concatenate, pad. Shares no code
with the builders of layouts; what nothing fills is ``POISON``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from oracle import POISON

from relaymeter.relayout.cuts import Blocks, Cut, Even, Fused, FusedHeads, Listed, Only, Padded, Units, Widths
from relaymeter.relayout.layout import TensorSpec

Array = NDArray[np.int64]


def padded(array: Array, rows: int) -> Array:
    """``array`` with ``rows`` rows of poison after its own."""
    return np.concatenate([array, np.full((rows, *array.shape[1:]), POISON, dtype=np.int64)])


def share_of_heads(heads: Sequence[Array], degree: int, index: int) -> list[Array]:
    """The heads of one rank: an even run of them, or the one that several ranks share."""
    if len(heads) >= degree:
        return list(heads[index * len(heads) // degree : (index + 1) * len(heads) // degree])
    return [heads[index // (degree // len(heads))]]


def fused_heads(rule: FusedHeads, whole: Array, degree: int, index: int) -> Array:
    """The whole weight taken apart into heads, the rank's heads put together in the order of its storage."""
    heads, groups = rule.heads, rule.kv_heads
    per_group = heads // groups
    width = len(whole) // (heads + 2 * groups)
    each = [whole[k * width : (k + 1) * width] for k in range(heads + 2 * groups)]
    if rule.logical == "blocks":
        queries, keys, values = each[:heads], each[heads : heads + groups], each[heads + groups :]
        family = [(queries[g * per_group : (g + 1) * per_group], keys[g], values[g]) for g in range(groups)]
    else:
        family = [
            (block[:per_group], block[per_group], block[per_group + 1])
            for g in range(groups)
            for block in [each[g * (per_group + 2) : (g + 1) * (per_group + 2)]]
        ]
    if groups >= degree:
        mine = family[index * groups // degree : (index + 1) * groups // degree]
    else:
        sharers = degree // groups
        queries, key, value = family[index // sharers]
        mine = [(share_of_heads(queries, sharers, index % sharers), key, value)]
    if rule.stored == "groups":
        kept = [head for queries, key, value in mine for head in (*queries, key, value)]
    else:
        kept = [head for queries, _, _ in mine for head in queries]
        kept += [key for _, key, _ in mine] + [value for _, _, value in mine]
    return np.concatenate(kept)


def cut_rows(rule: object, whole: Array, degree: int, index: int) -> Array:
    """What ``index`` of ``degree`` keeps of the rows of ``whole`` under one rule."""
    rows = len(whole)
    if rule is None or isinstance(rule, Even):
        return whole[index * rows // degree : (index + 1) * rows // degree]
    if isinstance(rule, Units):
        return np.concatenate(
            [whole[:0], *share_of_heads(np.split(whole, rule.count) if rows else [whole], degree, index)]
        )
    if isinstance(rule, Blocks):
        widths = block_widths(rule, rows, degree)
        return whole[sum(widths[:index]) : sum(widths[: index + 1])]
    if isinstance(rule, Widths):
        return whole[sum(rule.widths[:index]) : sum(rule.widths[: index + 1])]
    if isinstance(rule, Padded):
        unit = rule.multiple * degree
        full = padded(whole, -rows % unit)
        return np.split(full, degree)[index]
    if isinstance(rule, Fused):
        borders = np.cumsum([size for size, _ in rule.parts])[:-1]
        parts = np.split(whole, borders) if rule.parts else []
        return np.concatenate(
            [whole[:0]]
            + [cut_rows(inner, part, degree, index) for (_, inner), part in zip(rule.parts, parts, strict=True)]
        )
    if isinstance(rule, FusedHeads):
        return fused_heads(rule, whole, degree, index)
    if isinstance(rule, Listed):
        units = np.split(whole, rule.units or rows)
        return np.concatenate([whole[:0], *(units[u] for u in rule.placement[index])])
    raise TypeError(rule)


def block_widths(rule: Blocks, rows: int, degree: int) -> list[int]:
    """Dealt block by block: an even deal, then the spare ones from the last rank down."""
    blocks = [min(rule.size, rows - k) for k in range(0, rows, rule.size)]
    counts = [len(blocks) // degree] * degree
    spare = len(blocks) % degree
    for k in range(spare):
        counts[(degree - 1 - rule.turn - k * degree // spare) % degree] += 1
    widths = []
    for count in counts:
        widths.append(sum(blocks[:count]))
        blocks = blocks[count:]
    return widths


def local_shard(whole: Array, degrees: Sequence[int], cuts: Sequence[Cut], place: Sequence[int]) -> Array | None:
    """The array that the rank at ``place`` in the mesh keeps, axis after axis; None where it keeps none."""
    local = whole
    for degree, cut, index in zip(degrees, cuts, place, strict=True):
        if isinstance(cut.rule, Only):
            if index not in cut.rule.indices:
                return None
        elif cut.dim is not None:
            rule = cut.rule if cut.units is None else Units(cut.units)
            rows = np.moveaxis(local, cut.dim, 0)
            local = np.moveaxis(cut_rows(rule, rows, degree, index), 0, cut.dim)
    return local


def shards(whole: Mapping[str, Array], mesh: Array, cuts: Mapping[str, Sequence[Cut]]) -> dict[tuple[int, str], Array]:
    """Every rank's array of every tensor in one copy cut over ``mesh``."""
    found = {}
    for name, array in whole.items():
        for place in np.ndindex(mesh.shape):
            local = local_shard(array, mesh.shape, cuts[name], place)
            if local is not None:
                found[int(mesh[place]), name] = local
    return found


def zero3_parts(
    whole: Mapping[str, Array], mesh: Array, cuts: Mapping[str, Sequence[Cut]]
) -> dict[tuple[int, str], Array]:
    """Every rank's part of every tensor: the shard flattened, padded, split over the first axis of ``mesh``."""
    found = {}
    for name, array in whole.items():
        for place in np.ndindex(mesh.shape[1:]):
            local = local_shard(array, mesh.shape[1:], cuts[name], place)
            if local is not None:
                flat = padded(local.ravel(), -local.size % len(mesh))
                for rank, part in zip(mesh[(slice(None), *place)].tolist(), np.split(flat, len(mesh)), strict=True):
                    found[rank, name] = part
    return found


def zero12_parts(
    specs: Mapping[str, TensorSpec],
    whole: Mapping[str, Array],
    mesh: Array,
    cuts: Mapping[str, Sequence[Cut]],
    groups: Sequence[Sequence[str]],
    alignment: int,
    tensor_alignment: int = 1,
) -> dict[tuple[int, str], Array]:
    """Every rank's elements of every tensor: labels travel through concatenate, pad and split beside the values."""
    found = {}
    number = {name: k for k, name in enumerate(specs)}
    for group in groups:
        for place in np.ndindex(mesh.shape[1:]):
            values, labels = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
            for name in group:
                local = local_shard(whole[name], mesh.shape[1:], cuts[name], place)
                if local is not None:
                    gap = -len(values) % tensor_alignment
                    values = np.concatenate([padded(values, gap), local.ravel()])
                    labels = np.concatenate(
                        [labels, np.full(gap, -1, dtype=np.int64), np.full(local.size, number[name], dtype=np.int64)]
                    )
            gap = -len(values) % alignment
            parts = np.split(padded(values, gap), len(mesh))
            tags = np.split(np.concatenate([labels, np.full(gap, -1, dtype=np.int64)]), len(mesh))
            for rank, part, tag in zip(mesh[(slice(None), *place)].tolist(), parts, tags, strict=True):
                for name in group:
                    if (tag == number[name]).any():
                        found[rank, name] = part[tag == number[name]]
    return found


def compare(have: Mapping[tuple[int, str], Array], want: Mapping[tuple[int, str], Array]) -> None:
    """Storage by storage: the same (rank, tensor) pairs, the same elements in the same places."""
    assert set(have) == set(want), sorted(set(have) ^ set(want))
    for key, array in want.items():
        np.testing.assert_array_equal(have[key], array.ravel(), err_msg=str(key))


def holds_every_element_once_per_copy(shape: Sequence[int], place: object) -> None:
    """Counts, element by element, how many distinct boxes of each copy hold it."""
    numbers = place.copies.tolist()  # type: ignore[attr-defined]
    assert sorted(set(numbers)) == list(range(len(set(numbers))))
    for copy in set(numbers):
        rows = [k for k, number in enumerate(numbers) if number == copy]
        boxes = {(tuple(place.lo[k]), tuple(place.shape[k])) for k in rows}  # type: ignore[attr-defined]
        count = np.zeros(shape, dtype=np.int64)
        for lo, size in boxes:
            count[tuple(slice(a, a + b) for a, b in zip(lo, size, strict=True))] += 1
        assert math.prod(shape) == int(count.sum()) and (count == 1).all()
