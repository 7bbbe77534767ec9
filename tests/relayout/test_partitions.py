"""ZeRO partitions, plain and over model-parallel shards, against concatenate, pad and split on whole arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import POISON, storages, whole_tensors
from slicing import compare, holds_every_element_once_per_copy, padded, zero3_parts, zero12_parts
from strategies import cuts_over, tensor_specs

from relaymeter.errors import LayoutError
from relaymeter.relayout.cuts import Cut, Padded, Widths
from relaymeter.relayout.geometry import flat_boxes
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.partitions import (
    PartitionSizes,
    check_partition,
    zero3_layout,
    zero12_layout,
    zero12_partitions,
)


def specs_of(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, "int64") for name, shape in shapes.items()}


@st.composite
def sharded(draw):
    """Specs, a mesh of one data-parallel and up to two model-parallel axes, the cuts over the latter, the world."""
    specs = draw(tensor_specs())
    degrees = [draw(st.integers(1, 5)), *draw(st.lists(st.integers(1, 4), max_size=2))]
    world = math.prod(degrees) + draw(st.integers(0, 2))
    mesh = np.array(draw(st.permutations(range(world)))[: math.prod(degrees)]).reshape(degrees)
    cuts = {name: draw(cuts_over(spec, degrees[1:])) for name, spec in specs.items()}
    return specs, mesh, cuts, world


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_flat_ranges_become_few_boxes_in_order(shape, data):
    numel = math.prod(shape)
    borders = data.draw(st.lists(st.tuples(*[st.integers(0, numel)] * 2).map(sorted), max_size=4))
    start, stop = np.array(borders, dtype=np.int64).reshape(-1, 2).T
    row, lo, size = flat_boxes(shape, start, stop)
    full = np.arange(numel).reshape(shape)
    for number, (begin, end) in enumerate(borders):
        mine = np.flatnonzero(row == number)
        held = [full[tuple(slice(a, a + b) for a, b in zip(lo[k], size[k], strict=True))].ravel() for k in mine]
        assert np.concatenate([np.zeros(0, int), *held]).tolist() == list(range(begin, end))
        assert len(mine) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=200, deadline=None)
@given(sharded())
def test_zero3_parts_are_the_flattened_shards_padded_and_split(drawn):
    specs, mesh, cuts, world = drawn
    layout = zero3_layout(specs, mesh, world, cuts=cuts)
    whole = whole_tensors(layout)
    compare(storages(layout, whole), zero3_parts(whole, mesh, cuts))
    for name, spec in specs.items():
        holds_every_element_once_per_copy(spec.shape, layout.placements[name])


@settings(max_examples=200, deadline=None)
@given(sharded(), st.data())
def test_zero12_storages_are_the_tensors_elements_in_each_part_of_the_group(drawn, data):
    specs, mesh, cuts, world = drawn
    order = data.draw(st.permutations(list(specs)))
    border = data.draw(st.integers(0, len(order)))
    groups = [order[:border], order[border:]]
    alignment = data.draw(st.sampled_from([1, 2, 3, 16])) * len(mesh)
    apart = data.draw(st.sampled_from([1, 4]))
    layout = zero12_layout(specs, mesh, world, cuts=cuts, groups=groups, alignment=alignment, tensor_alignment=apart)
    whole = whole_tensors(layout)
    compare(storages(layout, whole), zero12_parts(specs, whole, mesh, cuts, groups, alignment, apart))
    for name, spec in specs.items():
        holds_every_element_once_per_copy(spec.shape, layout.placements[name])
    sizes = zero12_partitions(specs, mesh, world, cuts=cuts, groups=groups, alignment=alignment, tensor_alignment=apart)
    held = dict.fromkeys(range(world), 0)
    for part in sizes:
        assert (part.padded, part.padded % alignment) == (part.part * len(mesh), 0)
        assert sum(part.real) == part.numel <= part.padded < part.numel + alignment + apart * len(order)
        for rank, real in zip(part.ranks, part.real, strict=True):
            held[rank] += real
    assert held == {r: sum(p.storage.get(r, 0) for p in layout.placements.values()) for r in range(world)}


def test_padding_stands_on_several_last_ranks_and_fills_some_of_them():
    place = zero3_layout(specs_of(w=(9,)), range(6), 6).placements["w"]
    assert place.storage == dict.fromkeys(range(6), 2)
    assert place.rank.tolist() == [0, 1, 2, 3, 4]
    assert place.shape[:, 0].tolist() == [2, 2, 2, 2, 1]


def test_the_order_of_ranks_is_the_order_of_parts():
    place = zero3_layout(specs_of(w=(6,)), (5, 0, 3), 6).placements["w"]
    assert dict(zip(place.rank.tolist(), place.lo[:, 0].tolist(), strict=True)) == {5: 0, 0: 2, 3: 4}


def test_a_tensor_whole_on_every_model_parallel_position_gives_a_copy_for_each():
    """Ranks 0, 2 and ranks 1, 3 are the two data-parallel groups of a TP2 x DP2 mesh."""
    layout = zero3_layout(specs_of(w=(6, 4), norm=(5,)), [[0, 1], [2, 3]], 4, cuts={"w": Cut(0), "norm": Cut(None)})
    norm = layout.placements["norm"]
    assert norm.rank.tolist() == [0, 1, 2, 3]
    assert norm.copies.tolist() == [0, 1, 0, 1]
    assert norm.shape[:, 0].tolist() == [3, 3, 2, 2]
    assert norm.storage == dict.fromkeys(range(4), 3)
    w = layout.placements["w"]
    assert w.copies.tolist() == [0] * 8  # one and a half rows of four: two boxes a rank
    assert w.storage == dict.fromkeys(range(4), 6)


def test_shared_key_heads_in_buffers_of_unequal_size_are_cut_until_equal():
    """Both positions store the key and the value head; the parts of the first buffer, cut at 3, part the two, those of
    the second, cut at 4, do not."""
    specs = specs_of(kv=(6, 1), q=(4, 1))
    cuts = {"kv": Cut.qkv_blocks(0, heads=4, kv_heads=1), "q": Cut(0, rule=Widths((1, 3)))}
    mesh = np.array([[0, 1], [2, 3]])
    layout = zero12_layout(specs, mesh, 4, cuts=cuts, alignment=2)
    whole = whole_tensors(layout)
    apart = {name: (cut,) for name, cut in cuts.items()}
    compare(storages(layout, whole), zero12_parts(specs, whole, mesh, apart, [["kv", "q"]], 2))
    place = layout.placements["kv"]
    holds_every_element_once_per_copy((6, 1), place)
    assert place.storage == {0: 3, 2: 1, 1: 4}
    assert place.lo[place.rank == 1, 0].tolist() == [2, 4, 5]


def test_a_position_without_a_tensor_has_no_gap_for_it():
    """Five elements, then a tensor begun at a multiple of four on the first position only: 8 + 2 there, 5 here."""
    specs = specs_of(a=(5,), b=(2,))
    cuts = {"a": Cut(None), "b": Cut.only(0)}
    arguments = {"cuts": cuts, "alignment": 2, "tensor_alignment": 4}
    sizes = zero12_partitions(specs, [[0, 1], [2, 3]], 4, **arguments)
    assert [(s.ranks, s.numel, s.padded, s.real) for s in sizes] == [((0, 2), 7, 10, (5, 2)), ((1, 3), 5, 6, (3, 2))]
    layout = zero12_layout(specs, [[0, 1], [2, 3]], 4, **arguments)
    assert layout.placements["a"].storage == {0: 5, 1: 3, 3: 2}
    assert layout.placements["b"].storage == {2: 2}


def test_vocabulary_padding_is_flattened_with_the_shard_and_belongs_to_nobody():
    """Five rows over TP2 are padded to six; DP2 cuts each flattened shard of 3 x 2 in halves of 3."""
    layout = zero3_layout(specs_of(w=(5, 2)), [[0, 1], [2, 3]], 4, cuts={"w": Cut(0, rule=Padded())})
    held = storages(layout, {"w": np.arange(10).reshape(5, 2)})
    assert held[1, "w"].tolist() == [6, 7, 8]
    assert held[3, "w"].tolist() == [9, POISON, POISON]


@pytest.mark.parametrize("sub_group_size", [1, 7, 100, 10**9])
def test_the_sub_group_size_of_stage_3_changes_no_storage(sub_group_size):
    """Sub-groups lay the parts of their tensors into one flat buffer each: a tensor's part is the same slice of it."""
    specs = specs_of(a=(16, 8), b=(8, 16), c=(16,), d=(8,), e=(3, 3))
    degree = 4
    layout = zero3_layout(specs, range(degree), degree)
    whole = whole_tensors(layout)
    groups, used = [[]], 0
    for name, spec in specs.items():
        if used and used + spec.numel > sub_group_size:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += spec.numel
    assert len(groups) == {1: 5, 7: 5, 100: 5, 10**9: 1}[sub_group_size] or len(groups) > 1
    have = storages(layout, whole)
    for rank in range(degree):
        for group in groups:
            parts = [np.split(padded(whole[name].ravel(), -specs[name].numel % degree), degree)[rank] for name in group]
            buffer, begin = np.concatenate(parts), 0
            for name in group:
                count = layout.placements[name].storage[rank]
                np.testing.assert_array_equal(have[rank, name], buffer[begin : begin + count])
                begin += count
            assert begin == len(buffer)


def test_groups_default_to_one_per_dtype():
    specs = {**specs_of(a=(3,), c=(3,)), "b": TensorSpec("b", (5,), "float32")}
    sizes = zero12_partitions(specs, (0, 1), 2)
    assert [(s.names, s.numel, s.padded, s.part, s.real) for s in sizes] == [
        (("a", "c"), 6, 8, 4, (4, 2)),
        (("b",), 5, 8, 4, (4, 1)),
    ]
    layout = zero12_layout(specs, (0, 1), 2)
    assert [p.storage for p in layout.placements.values()] == [{0: 3}, {0: 1, 1: 2}, {0: 4, 1: 1}]


def test_tensors_on_one_rank_at_any_offset_share_a_placement():
    specs = specs_of(**{f"w{k}": (4, 4) for k in range(8)})
    places = list(zero12_layout(specs, (0, 1), 2).placements.values())
    assert all(place is places[0] for place in places[:4]) and all(place is places[4] for place in places[4:])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"groups": [["a"]]}, r"tensor b is in no group \(and 0 more\)"),
        ({"groups": [["a"], ["b", "a"]]}, "a stands in group 0 and in group 1"),
        ({"groups": [["a", "x"]]}, "group 0 names x, which is no tensor"),
        ({"groups": [["a", "b"]]}, r"group 0 mixes int64 \(a\) and float32 \(b\)"),
        ({"alignment": 3}, "alignment 3 is no multiple of the data-parallel degree 2"),
        ({"alignment": 0}, "alignment 0 is no multiple"),
        ({"tensor_alignment": 0}, "tensors aligned to 0 elements"),
        ({"cuts": {"a": Cut(0)}, "ranks": [[0], [1]]}, "tensor b has no cut"),
    ],
)
def test_groups_that_contradict_themselves_are_refused(keywords, message):
    specs = {**specs_of(a=(4,)), "b": TensorSpec("b", (4,), "float32")}
    arguments = {"ranks": (0, 1), **keywords}
    with pytest.raises(LayoutError, match=message):
        zero12_layout(specs, arguments.pop("ranks"), 2, **arguments)


SIZES = PartitionSizes(("w",), (4, 5, 6, 7), 5, 8, 2, (2, 2, 1, 0))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            {4: 2, 5: 0, 6: 1},
            "rank 5 holds 0 of the 2 elements due from 2 on; a part may be empty only where it begins",
        ),
        ({4: 2, 5: 2, 6: 2, 7: 0}, "rank 6 holds 2 elements from 4 on, 1 more than its 1 real ones"),
        ({4: 2, 5: 2, 6: 1, 7: 2}, "rank 7 holds 2 elements from 6 on, 2 more than its 0 real ones"),
        ({4: 1, 5: 2, 6: 1}, "tensor w, 5 elements padded to 8: rank 4 holds 1 of the 2 elements"),
        ({4: 2, 5: 2, 6: 1, 8: 2}, r"rank 8 has a part, but the group is ranks \[4, 5, 6, 7\]"),
    ],
)
def test_a_part_of_the_wrong_size_is_refused_naming_the_rank(held, message):
    check_partition(SIZES, {4: 2, 5: 2, 6: 1, 7: 0})
    check_partition(SIZES, {4: 2, 5: 2, 6: 1})
    with pytest.raises(LayoutError, match=message):
        check_partition(SIZES, held)
