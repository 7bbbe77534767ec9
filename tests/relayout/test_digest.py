from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaymeter.errors import DigestMismatch, InputError
from relaymeter.relayout.combine import restrict_layout
from relaymeter.relayout.digest import (
    BLOCK_WORDS,
    DIGEST_VERSION,
    POISON_BYTE,
    LayoutDigest,
    block_count,
    block_elements,
    block_sums,
    compare,
    digest_layout,
    tensor_digest,
)
from relaymeter.relayout.geometry import row_major_strides
from relaymeter.relayout.layout import ITEMSIZE, Layout, Placement, TensorSpec
from relaymeter.relayout.placements import Cut, flat_placement, tensor_parallel_layout, zero3_layout

DTYPES = sorted(ITEMSIZE)
SHAPES = [(), (1,), (5,), (4096,), (9000,), (3, 5000), (130, 70), (7, 33, 65), (2, 3, 4, 700), (5000, 1, 3), (1, 4097)]


def random_bits(spec: TensorSpec, seed: int) -> torch.Tensor:
    """A 1-D tensor of random bytes (0 and 1 for bool), which include NaNs and -0 of every kind."""
    random = np.random.default_rng(seed)
    if spec.dtype == "bool":
        return torch.from_numpy(random.integers(0, 2, spec.numel).astype(np.bool_))
    values = torch.empty(spec.numel, dtype=getattr(torch, spec.dtype))
    values.view(torch.uint8).copy_(torch.from_numpy(random.integers(0, 256, spec.nbytes, dtype=np.uint8)))
    return values


def words_of(values: torch.Tensor) -> list[int]:
    """The unsigned words of at most 32 bits that a tensor's digest is made of."""
    width = min(values.element_size(), 4)
    return np.frombuffer(values.view(torch.uint8).numpy().tobytes(), dtype=f"<u{width}").tolist()


def whole(spec: TensorSpec) -> Placement:
    return flat_placement(spec.shape, [(0, 0, spec.numel)], {0: spec.numel})


def digest_of(spec: TensorSpec, values: torch.Tensor) -> int:
    return tensor_digest(block_sums(spec, whole(spec), [0], values))


def weights(count: int) -> list[int]:
    """The first ``count`` values of ``lo``, read off a tensor whose block i is all zeros but for a one at i."""
    spec = TensorSpec("w", (count, BLOCK_WORDS), "int8")
    ones = torch.zeros(count, BLOCK_WORDS, dtype=torch.int8)
    ones.fill_diagonal_(1)
    return block_sums(spec, whole(spec), [0], ones.view(-1)).tolist()


def boxes_of(spec: TensorSpec, random: np.random.Generator) -> Placement:
    """A random grid of boxes, one rank each, stored with dims in random order, at an offset, with gaps and padding."""
    dims = len(spec.shape)
    cuts = []
    for size in spec.shape:
        inner = sorted(random.choice(np.arange(1, size), size=min(size - 1, int(random.integers(0, 3))), replace=False))
        cuts.append(list(itertools.pairwise([0, *map(int, inner), size])))
    lo, shape, offset, stride, storage = [], [], [], [], {}
    for rank, box in enumerate(itertools.product(*cuts)):
        size = [stop - start for start, stop in box]
        order = random.permutation(dims)
        gap = int(random.integers(1, 3))
        steps = [0] * dims
        step = gap
        for dim in reversed(order.tolist()):
            steps[dim] = step
            step *= size[dim]
        lo.append([start for start, _ in box])
        shape.append(size)
        offset.append(int(random.integers(0, 5)))
        stride.append(steps)
        storage[rank] = offset[-1] + math.prod(size) * gap + 3
    table = [np.asarray(column, dtype=np.int64).reshape(len(offset), dims) for column in (lo, shape, stride)]
    return Placement(np.arange(len(offset)), table[0], table[1], np.asarray(offset), table[2], storage)


def scatter(spec: TensorSpec, place: Placement, values: torch.Tensor) -> dict[int, torch.Tensor]:
    """Every rank's storage of ``values`` under ``place``; padding holds other bits."""
    storages = {
        rank: random_bits(TensorSpec(spec.name, (size,), spec.dtype), 99 + rank) for rank, size in place.storage.items()
    }
    for piece, rank in enumerate(place.rank.tolist()):
        shape, lo = place.shape[piece].tolist(), place.lo[piece].tolist()
        steps = row_major_strides(spec.shape)
        start = sum(a * b for a, b in zip(lo, steps, strict=True))
        target = storages[rank].as_strided(shape, place.stride[piece].tolist(), int(place.offset[piece]))
        target.copy_(values.as_strided(shape, steps, start))
    return storages


def digest_all(layout: Layout, storages: Mapping[str, Mapping[int, torch.Tensor]], replicas: bool) -> LayoutDigest:
    """``digest_layout`` over ranks of one process: the parts of all ranks added up."""
    parts = []
    for rank in range(layout.world_size):
        mine = {name: held[rank] for name, held in storages.items() if rank in held}
        parts.append(digest_layout(layout, rank, mine, replicas=replicas))
    sums = {
        name: tuple(torch.stack(list(same)).sum(0) for same in zip(*(p.sums[name] for p in parts), strict=True))
        for name in layout.specs
    }
    return LayoutDigest(layout, DIGEST_VERSION, sums)


def test_block_sums_follow_the_definition() -> None:
    spec = TensorSpec("w", (9000,), "int32")
    values = random_bits(spec, 1)
    low = weights(BLOCK_WORDS)
    words = words_of(values)
    sums = block_sums(spec, whole(spec), [0], values)
    assert len(sums) == block_count(spec) == 3
    for block in range(3):
        part = words[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        expected = sum(word * low[index] for index, word in enumerate(part)) % 2**64
        assert int(sums[block]) % 2**64 == expected


def test_weights_are_distinct_odd_and_of_32_bits() -> None:
    low = weights(BLOCK_WORDS)
    assert len(set(low)) == BLOCK_WORDS
    assert all(value % 2 == 1 and 0 < value < 2**32 for value in low)
    high = [tensor_digest(torch.eye(512, dtype=torch.int64)[block]) for block in range(512)]
    assert len(set(high)) == 512
    assert all(value % 2 == 1 for value in high)


def test_digest_version_1_is_frozen() -> None:
    values = torch.arange(10_000, dtype=torch.int32)
    assert DIGEST_VERSION == 1
    assert digest_of(TensorSpec("w", (100, 100), "int32"), values) == 0xD1122E9BF3B9DA96
    assert digest_of(TensorSpec("w", (10_000,), "bfloat16"), values.bfloat16()) == 0xFAB2DEED541B253A
    assert digest_of(TensorSpec("w", (10_000,), "float64"), values.double()) == 0xCC06C500781DCB00


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(DTYPES), shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32 - 1))
def test_digest_does_not_depend_on_the_layout(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    spec = TensorSpec("w", shape, dtype)
    values = random_bits(spec, seed)
    expected = block_sums(spec, whole(spec), [0], values)
    borders = sorted({0, spec.numel, *random.integers(0, spec.numel + 1, 3).tolist()})
    ranges = [(rank, start, stop) for rank, (start, stop) in enumerate(itertools.pairwise(borders))]
    flat = flat_placement(shape, ranges, {rank: stop - start + 2 for rank, start, stop in ranges})
    for place in (flat, boxes_of(spec, random)):
        storages = scatter(spec, place, values)
        parts = [block_sums(spec, place, place.pieces_of(r).tolist(), storages[r]) for r in place.ranks]
        assert torch.equal(torch.stack(parts).sum(0), expected)


@settings(max_examples=80, deadline=None)
@given(dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_any_single_flip_changes_the_digest(dtype: str, seed: int, data: st.DataObject) -> None:
    spec = TensorSpec("w", (9001,), dtype)
    values = random_bits(spec, seed)
    before = digest_of(spec, values)
    index = data.draw(st.integers(0, spec.nbytes - 1))
    bit = data.draw(st.integers(0, 7)) if dtype != "bool" else 0
    values.view(torch.uint8)[index] ^= 1 << bit
    assert digest_of(spec, values) != before


@settings(max_examples=80, deadline=None)
@given(dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_any_swap_of_different_elements_changes_the_digest(dtype: str, seed: int, data: st.DataObject) -> None:
    spec = TensorSpec("w", (9001,), dtype)
    values = random_bits(spec, seed)
    raw = values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[spec.itemsize])
    first, second = data.draw(st.integers(0, 9000)), data.draw(st.integers(0, 9000))
    before = digest_of(spec, values)
    differ = bool(raw[first] != raw[second])
    raw[[first, second]] = raw[[second, first]]
    assert (digest_of(spec, values) != before) == differ


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_nan_payloads_and_signed_zero_count(dtype: str) -> None:
    spec = TensorSpec("w", (3,), dtype)
    kind = getattr(torch, dtype)
    raw = {2: torch.int16, 4: torch.int32, 8: torch.int64}[spec.itemsize]
    quiet = torch.tensor([1.0, float("nan"), 0.0], dtype=kind)
    other = quiet.clone()
    other.view(raw)[1] ^= 1
    negative = torch.tensor([1.0, float("nan"), -0.0], dtype=kind)
    assert other.isnan()[1]
    assert len({digest_of(spec, values) for values in (quiet, other, negative)}) == 3


def two_layouts(dtype: str = "bfloat16") -> tuple[Layout, Layout, dict[str, torch.Tensor]]:
    """ZeRO-3 over ranks 0 and 1, and two TP2 copies on ranks 0-1 and 2-3, of three tensors."""
    specs = {
        "up": TensorSpec("up", (96, 100), dtype),
        "down": TensorSpec("down", (100, 96), dtype),
        "empty": TensorSpec("empty", (0, 8), dtype),
        "norm": TensorSpec("norm", (100,), dtype),
    }
    cuts = {"up": Cut(0), "down": Cut(1), "norm": Cut(None), "empty": Cut(0)}
    source = zero3_layout(specs, (0, 1), 4)
    destination = tensor_parallel_layout(specs, cuts, [(0, 1), (2, 3)], 4)
    return source, destination, {name: random_bits(spec, 7 + len(name)) for name, spec in specs.items()}


def spread(layout: Layout, values: Mapping[str, torch.Tensor]) -> dict[str, dict[int, torch.Tensor]]:
    return {name: scatter(spec, layout.placements[name], values[name]) for name, spec in layout.specs.items()}


def test_every_replica_is_checked_and_equal_bits_pass() -> None:
    source, destination, values = two_layouts()
    report = compare(
        digest_all(source, spread(source, values), False), digest_all(destination, spread(destination, values), True)
    )
    assert (report.passed, report.total, report.ok) == (8, 8, True)  # norm lies on four ranks, the others in two copies
    report.raise_for_mismatch()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_flip_is_named_with_tensor_copy_rank_and_range(dtype: str) -> None:
    source, destination, values = two_layouts(dtype)
    held = spread(destination, values)
    held["down"][3].view(torch.uint8)[-1] ^= 4
    report = compare(digest_all(source, spread(source, values), False), digest_all(destination, held, True))
    (found,) = report.mismatches
    step = block_elements(source.specs["down"])
    assert (report.passed, report.total) == (7, 8)
    assert (found.tensor, found.cover, found.start, found.stop) == ("down", 1, 9600 // step * step, 9600)
    assert 3 in found.ranks
    assert set(found.ranks) <= {2, 3}
    with pytest.raises(DigestMismatch, match=r"1 of 8 checks: down, copy 1 \(ranks 2, 3\), elements \["):
        report.raise_for_mismatch()


def test_what_a_bad_block_holds_is_told() -> None:
    specs = {"a": TensorSpec("a", (4 * BLOCK_WORDS,), "float32"), "b": TensorSpec("b", (2 * BLOCK_WORDS,), "float32")}
    layout = zero3_layout(specs, (0,), 1)
    values = {name: random_bits(spec, 5) for name, spec in specs.items()}
    values["b"] = random_bits(specs["b"], 6)
    wrong = {name: held.clone() for name, held in values.items()}
    rows = wrong["a"].view(-1, BLOCK_WORDS)
    rows[0] = values["b"][BLOCK_WORDS:]
    rows[1:3].view(torch.uint8).fill_(POISON_BYTE)
    rows[3] = 0
    wrong["b"].view(torch.int32)[0] ^= 1
    report = compare(
        digest_all(layout, {n: {0: v} for n, v in values.items()}, False),
        digest_all(layout, {n: {0: v} for n, v in wrong.items()}, True),
    )
    told = [(m.tensor, m.start // BLOCK_WORDS, m.stop // BLOCK_WORDS, m.found) for m in report.mismatches]
    assert told == [
        ("a", 0, 1, "the bits of b, elements [4096, 8192)"),
        ("a", 1, 3, "the poison pattern: never written"),
        ("a", 3, 4, "zeros"),
        ("b", 0, 1, "one changed element, 0"),
    ]


@settings(max_examples=80, deadline=None)
@given(dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_one_changed_element_is_named(dtype: str, seed: int, data: st.DataObject) -> None:
    spec = TensorSpec("w", (9001,), dtype)
    layout = zero3_layout({"w": spec}, (0,), 1)
    values = random_bits(spec, seed)
    wrong = values.clone()
    index = data.draw(st.integers(0, 9000))
    raw = wrong.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[spec.itemsize])
    low = raw[index : index + 1].view(torch.uint8)[:4]  # of 8-byte elements, one half
    before = low.clone()
    low.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, len(low), dtype=np.uint8)))
    low[0] = before[0] ^ 1
    report = compare(digest_all(layout, {"w": {0: values}}, False), digest_all(layout, {"w": {0: wrong}}, True))
    (found,) = report.mismatches
    assert found.start <= index < found.stop
    assert found.found == f"one changed element, {index}"


def test_storage_and_layouts_that_do_not_fit_are_refused() -> None:
    source, destination, values = two_layouts()
    with pytest.raises(InputError, match=r"rank 0 needs a 1-D storage of 4800 elements of 2 bytes, got \[7\] of 2"):
        digest_layout(source, 0, {"up": torch.zeros(7, dtype=torch.bfloat16)})
    with pytest.raises(InputError, match="up: rank 0 holds a piece of it but handed in no storage"):
        digest_layout(source, 0, {})
    other = zero3_layout({"odd": TensorSpec("odd", (1,), "int8")}, (0,), 1)
    odd = digest_all(other, {"odd": {0: torch.zeros(1, dtype=torch.int8)}}, False)
    with pytest.raises(InputError, match="one of layouts"):
        compare(odd, digest_all(destination, spread(destination, values), True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_of_a_partial_layout_what_it_holds_is_summed_and_named(dtype: str) -> None:
    _, destination, values = two_layouts(dtype)
    part = restrict_layout(destination, [3], name="lost rank")
    held = spread(part, values)
    found = digest_all(part, held, True)
    assert {name: len(sums) for name, sums in found.sums.items()} == {"up": 1, "down": 1, "empty": 0, "norm": 1}
    for name, box in (("up", np.s_[48:]), ("down", np.s_[:, 48:])):
        spec = part.specs[name]
        rest = torch.zeros_like(values[name])
        rest.view(spec.shape)[box] = values[name].view(spec.shape)[box]
        assert torch.equal(found.sums[name][0], block_sums(spec, whole(spec), [0], rest))
    expected = LayoutDigest(part, DIGEST_VERSION, found.sums, expected=True)
    held["down"][3].view(torch.uint8).fill_(POISON_BYTE)
    held["up"][3].view(torch.uint8)[0] ^= 1
    report = compare(expected, digest_all(part, held, True))
    assert (report.passed, report.total) == (1, 3)
    stop = 4096 + block_elements(part.specs["up"])
    assert [str(mismatch) for mismatch in report.mismatches] == [
        f"up, copy 0 (ranks 3), elements [4096, {stop}): holds one changed element, 4800",
        "down, copy 0 (ranks 3), elements [0, 9600): holds the poison pattern: never written",
    ]


def test_sums_of_other_elements_or_dtypes_are_not_compared() -> None:
    source, destination, values = two_layouts()
    part = restrict_layout(destination, [0, 1, 2], names=list(values))
    parts = digest_all(part, spread(part, values), True)
    every = digest_all(source, spread(source, values), False)
    with pytest.raises(InputError, match="layout tp holds tensor up in part: compare it with expected_digest"):
        compare(every, parts)
    with pytest.raises(InputError, match="layout tp holds tensor up in part: compare it with expected_digest"):
        compare(parts, every)
    wide, _, more = two_layouts("float32")
    with pytest.raises(InputError, match="tensor up arrives in another dtype: compare it with expected_digest"):
        compare(digest_all(wide, spread(wide, more), False), every)


def test_a_large_column_shard_is_digested_in_parts() -> None:
    spec = TensorSpec("w", (700, 3, 500), "bfloat16")
    values = random_bits(spec, 3)
    columns = [(0, 130), (130, 500)]
    total = torch.zeros(block_count(spec), dtype=torch.int64)
    for start, stop in columns:
        shard = values.view(spec.shape)[:, :, start:stop].contiguous().view(-1)
        width = stop - start
        place = Placement(
            np.zeros(1, dtype=np.int64), np.array([[0, 0, start]]), np.array([[700, 3, width]]),
            np.zeros(1, dtype=np.int64), np.array([[3 * width, width, 1]]), {0: len(shard)},
        )  # fmt: skip
        total += block_sums(spec, place, [0], shard)
    assert torch.equal(total, block_sums(spec, whole(spec), [0], values))
