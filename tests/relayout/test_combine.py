"""Layouts joined and taken apart: copies, stages, ties, the part of some ranks, sizes per rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import storages, whole_tensors
from strategies import layouts, tensor_specs

from relaymeter.errors import LayoutError
from relaymeter.relayout.combine import (
    check_storage,
    join_layouts,
    rank_bytes,
    renumber_layout,
    restrict_layout,
    stage_specs,
)
from relaymeter.relayout.cuts import Cut
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.partitions import zero3_layout
from relaymeter.relayout.placements import replicated_layout, tensor_parallel_layout


def specs_of(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, "int64") for name, shape in shapes.items()}


@settings(max_examples=120, deadline=None)
@given(tensor_specs(), st.integers(1, 8), st.data())
def test_a_join_holds_the_storages_of_all_its_layouts(specs, world, data):
    border = data.draw(st.integers(0, world))
    halves = [data.draw(layouts(specs, size, "half")) for size in (border, world - border) if size]
    moved = [_shifted(half, start, world) for half, start in zip(halves, (0, border) if border else (0,), strict=False)]
    joined = join_layouts(moved, "both")
    whole = whole_tensors(joined)
    want = {}
    for half in moved:
        want |= storages(half, whole)
    have = storages(joined, whole)
    assert have.keys() == want.keys()
    for key in want:
        np.testing.assert_array_equal(have[key], want[key])
    for name in specs:
        copies = [sorted(set(half.placements[name].copies.tolist())) for half in moved]
        numbers = [n + sum(len(c) for c in copies[:k]) for k, found in enumerate(copies) for n in found]
        assert sorted(set(joined.placements[name].copies.tolist())) == numbers


def _shifted(layout, start, world):
    """The same layout on ranks that begin at ``start`` of a larger world."""
    places = {
        name: replace(p, rank=p.rank + start, storage={r + start: n for r, n in p.storage.items()})
        for name, p in layout.placements.items()
    }
    return replace(layout, world_size=world, placements=places, name=f"from {start}")


@settings(max_examples=120, deadline=None)
@given(tensor_specs(), st.integers(1, 8), st.data())
def test_a_restriction_holds_the_storages_of_its_ranks_and_tensors(specs, world, data):
    layout = data.draw(layouts(specs, world))
    ranks = data.draw(st.lists(st.integers(0, world - 1), unique=True))
    names = data.draw(st.lists(st.sampled_from(list(specs)), unique=True))
    part = restrict_layout(layout, ranks, names)
    whole = whole_tensors(layout)
    want = {key: held for key, held in storages(layout, whole).items() if key[0] in ranks and key[1] in names}
    have = storages(part, whole)
    assert have.keys() == want.keys()
    for key in want:
        np.testing.assert_array_equal(have[key], want[key])
    assert part.partial and list(part.specs) == [n for n in layout.specs if n in {key[1] for key in want}]
    part.check()


def test_a_restriction_to_names_alone_is_whole():
    layout = zero3_layout(specs_of(a=(4,), b=(4,)), (0, 1), 2)
    part = restrict_layout(layout, names=["b"], name="b only")
    assert (list(part.specs), part.partial, part.name) == (["b"], False, "b only")
    assert part.placements["b"] is layout.placements["b"]


def test_what_a_restriction_leaves_of_the_copies_is_numbered_from_0():
    layout = tensor_parallel_layout(specs_of(w=(4,)), {"w": Cut(0)}, [(0, 1), (2, 3)], 4)
    assert restrict_layout(layout, [2]).placements["w"].copies.tolist() == [0]
    assert restrict_layout(layout, [1, 2]).placements["w"].copies.tolist() == [0, 1]


def test_a_tied_name_is_kept_with_the_tensor_it_shares():
    layout = replicated_layout(specs_of(embed=(4,), norm=(2,)), (0, 1), 2, aliases={"head": "embed"})
    assert restrict_layout(layout, names=["head"]).aliases == {"head": "embed"}
    assert list(restrict_layout(layout, names=["head"]).specs) == ["embed"]
    assert restrict_layout(layout, names=["norm"]).aliases == {}


def test_stages_hold_disjoint_tensors_and_a_tied_one_in_a_copy_each():
    specs = specs_of(embed=(64, 8), up=(8, 8), down=(8, 8))
    first, last = stage_specs(specs, [("embed", "up"), ("down", "embed")])
    assert (list(first), list(last)) == (["embed", "up"], ["embed", "down"])
    joined = join_layouts(
        [zero3_layout(first, (0, 1), 3, "stage 0"), replicated_layout(last, (2,), 3, "stage 1")], "pipeline"
    )
    assert list(joined.specs) == ["embed", "up", "down"]
    assert {n: sorted(p.storage.items()) for n, p in joined.placements.items()} == {
        "embed": [(0, 256), (1, 256), (2, 512)],
        "up": [(0, 32), (1, 32)],
        "down": [(2, 64)],
    }
    assert joined.placements["embed"].copies.tolist() == [0, 0, 1]


def test_a_tensor_held_under_a_tied_name_joins_the_one_it_is_tied_to():
    first = replicated_layout(specs_of(embed=(4, 2)), (0,), 2, "stage 0")
    last = replicated_layout(specs_of(head=(4, 2), norm=(2,)), (1,), 2, "stage 1")
    joined = join_layouts([first, last], "pipeline", aliases={"head": "embed"})
    assert list(joined.specs) == ["embed", "norm"]
    assert joined.aliases == {"head": "embed"}
    assert joined.placements["embed"].storage == {0: 8, 1: 8}
    turned = join_layouts([last, first], "pipeline", aliases={"head": "embed"})
    assert turned.specs["embed"] == TensorSpec("embed", (4, 2), "int64")


def test_a_join_with_a_part_of_a_layout_is_partial():
    one = zero3_layout(specs_of(w=(4,)), (0, 1), 3)
    joined = join_layouts([restrict_layout(one, [0]), replicated_layout(specs_of(w=(4,)), (2,), 3)])
    assert joined.partial
    assert joined.placements["w"].copies.tolist() == [0, 1]
    assert not join_layouts([one, replicated_layout(specs_of(w=(4,)), (2,), 3)]).partial


def test_joined_tensors_of_one_pair_of_placements_share_a_placement():
    specs = specs_of(a=(8, 4), b=(8, 4))
    halves = [zero3_layout(specs, ranks, 4) for ranks in ((0, 1), (2, 3))]
    places = join_layouts(halves).placements
    assert places["a"] is places["b"]
    assert join_layouts(halves[:1]).placements["a"] is halves[0].placements["a"]


def test_layouts_that_contradict_each_other_are_not_joined():
    one = replicated_layout(specs_of(w=(4, 4)), (0, 1), 4, "one")
    cases = [
        ([], "nothing to join"),
        (
            [one, replicated_layout(specs_of(w=(4, 4)), (1, 2), 4, "two")],
            "w is on rank 1 in layout one and in layout two",
        ),
        (
            [one, replicated_layout(specs_of(w=(2, 8)), (2,), 4, "two")],
            r"w is int64 \[4, 4\], as w in layout two it is",
        ),
        ([one, replicated_layout(specs_of(w=(4, 4)), (2,), 5, "two")], r"layouts of \[4, 5\] ranks"),
        (
            [
                replicated_layout(specs_of(a=(1,), b=(1,)), (0,), 4, aliases={"head": "a"}),
                replicated_layout(specs_of(b=(1,)), (1,), 4, aliases={"head": "b"}),
            ],
            "head is tied to a and to b",
        ),
        (
            [
                replicated_layout(specs_of(a=(1,)), (0,), 4, "one", {"head": "a"}),
                replicated_layout(specs_of(head=(1,)), (1,), 4, "two"),
            ],
            "head is tied to a in one layout and a tensor of its own in layout two; give aliases={'head': 'a'} if",
        ),
    ]
    for parts, message in cases:
        with pytest.raises(LayoutError, match=message):
            join_layouts(parts)


def test_stages_and_restrictions_name_what_is_not_there():
    specs = specs_of(a=(1,), b=(1,))
    with pytest.raises(LayoutError, match=r"tensor b is on none of 1 stages \(and 0 more\)"):
        stage_specs(specs, [["a"]])
    with pytest.raises(LayoutError, match="stage 1 names c, which is no tensor"):
        stage_specs(specs, [["a", "b"], ["c"]])
    layout = replicated_layout(specs, (0,), 2)
    with pytest.raises(LayoutError, match="rank 2 is outside the world of 2"):
        restrict_layout(layout, [2])
    with pytest.raises(LayoutError, match="there is no tensor c to keep"):
        restrict_layout(layout, names=["c"])


@settings(max_examples=80, deadline=None)
@given(tensor_specs(), st.integers(1, 8), st.data())
def test_bytes_per_rank_count_every_storage(specs, world, data):
    layout = data.draw(layouts(specs, world))
    want = np.zeros(world, dtype=np.int64)
    for (rank, _), held in storages(layout, None).items():
        want[rank] += 8 * len(held)
    assert rank_bytes(layout).tolist() == want.tolist() == [layout.storage_bytes(rank) for rank in range(world)]


def test_storages_of_the_wrong_size_are_refused_naming_rank_and_tensor():
    layout = tensor_parallel_layout(specs_of(w=(6, 2), norm=(2,)), {"w": Cut(0), "norm": Cut(None)}, [(0, 1)], 3)
    check_storage(layout, {0: {"w": 6, "norm": 2}, 1: {"w": 6, "norm": 2}, 2: {}})
    for held, message in (
        ({0: {"w": 12, "norm": 2}}, r"layout tp, tensor w \[6, 2\]: rank 0 holds 12 elements, the layout gives it 6"),
        ({1: {"w": 6}}, r"tensor norm \[2\]: rank 1 holds 0 elements, the layout gives it 2"),
        ({2: {"w": 6}}, "rank 2 holds 6 elements, the layout gives it 0"),
    ):
        with pytest.raises(LayoutError, match=message):
            check_storage(layout, held)


def test_a_layout_renumbered_for_a_group_holds_the_same_pieces_there() -> None:
    specs = {"a": TensorSpec("a", (7, 3), "float32"), "b": TensorSpec("b", (5,), "bfloat16")}
    layout = zero3_layout(specs, (5, 2), 6)
    found = renumber_layout(layout, (2, 3, 5))
    assert found.world_size == 3
    found.check()
    for name, place in layout.placements.items():
        for old, new in ((2, 0), (5, 2)):
            here, there = place.pieces_of(old), found.placements[name].pieces_of(new)
            for column in ("lo", "shape", "offset", "stride"):
                assert (getattr(place, column)[here] == getattr(found.placements[name], column)[there]).all()
            assert found.placements[name].storage[new] == place.storage[old]
    with pytest.raises(LayoutError, match=r"tensor a: rank 5 holds a part of it, but the group is ranks \[0, 2\]"):
        renumber_layout(layout, (0, 2))
