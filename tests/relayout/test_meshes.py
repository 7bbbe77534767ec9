"""Tensors cut over meshes, against plain slicing of whole arrays."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import storages, whole_tensors
from slicing import compare, holds_every_element_once_per_copy, shards
from strategies import cuts_over, loose_rules, tensor_specs

from relaymeter.errors import LayoutError
from relaymeter.relayout.cuts import Blocks, Cut, Padded
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.meshes import equal_or_disjoint, mesh_layout


def specs_of(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, "int64") for name, shape in shapes.items()}


@settings(max_examples=250, deadline=None)
@given(tensor_specs(), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_every_rank_stores_what_slicing_axis_after_axis_gives(specs, degrees, data):
    cuts = {name: data.draw(cuts_over(spec, degrees)) for name, spec in specs.items()}
    world = math.prod(degrees) + data.draw(st.integers(0, 2))
    mesh = np.array(data.draw(st.permutations(range(world)))[: math.prod(degrees)]).reshape(degrees)
    layout = mesh_layout(specs, cuts, [mesh], world)
    whole = whole_tensors(layout)
    compare(storages(layout, whole), shards(whole, mesh, cuts))
    for name, spec in specs.items():
        holds_every_element_once_per_copy(spec.shape, layout.placements[name])


@settings(max_examples=80, deadline=None)
@given(tensor_specs(), st.lists(st.integers(1, 4), min_size=2, max_size=3), st.data())
def test_copies_of_unequal_degrees_stand_side_by_side(specs, degrees, data):
    cuts = {
        name: (Cut(dim, rule=data.draw(loose_rules()) if dim is not None else None),)
        for name, spec in specs.items()
        for dim in [data.draw(st.sampled_from([None, *range(len(spec.shape))]))]
    }
    borders = np.cumsum([0, *degrees])
    meshes = [np.arange(a, b) for a, b in itertools.pairwise(borders)]
    layout = mesh_layout(specs, cuts, meshes, int(borders[-1]))
    whole = whole_tensors(layout)
    want = {}
    for mesh in meshes:
        want |= shards(whole, mesh, cuts)
    compare(storages(layout, whole), want)
    for name, spec in specs.items():
        place = layout.placements[name]
        holds_every_element_once_per_copy(spec.shape, place)
        for number, mesh in enumerate(meshes):
            assert (place.copies[np.isin(place.rank, mesh)] == number).all()


def test_cuts_of_two_dims_multiply():
    layout = mesh_layout(specs_of(w=(4, 6)), {"w": (Cut(0), Cut(1))}, [[[0, 1, 2], [3, 4, 5]]], 6)
    place = layout.placements["w"]
    assert place.lo.tolist() == [[0, 0], [0, 2], [0, 4], [2, 0], [2, 2], [2, 4]]
    assert place.shape.tolist() == [[2, 2]] * 6
    assert place.storage == dict.fromkeys(range(6), 4)


def test_cuts_of_one_dim_nest_in_the_order_of_the_axes():
    """Rows 0..7 in halves by blocks of 3 (5 + 3: the short block last), each half in two."""
    cuts = {"w": (Cut(0, rule=Blocks(3)), Cut(0))}
    layout = mesh_layout(specs_of(w=(8,)), cuts, [[[0, 1], [2, 3]]], 4)
    assert layout.placements["w"].lo[:, 0].tolist() == [0, 1, 3, 5]
    turned = mesh_layout(specs_of(w=(8,)), {"w": (Cut(0), Cut(0, rule=Blocks(3)))}, [[[0, 2], [1, 3]]], 4)
    assert turned.placements["w"].lo[:, 0].tolist() == [0, 4, 3, 7]


def test_a_nested_cut_cuts_the_padding_too():
    cuts = {"w": (Cut(0, rule=Padded(2)), Cut(0))}
    layout = mesh_layout(specs_of(w=(5,)), cuts, [[[0, 1], [2, 3]]], 4)
    place = layout.placements["w"]
    assert (place.rank.tolist(), place.lo[:, 0].tolist(), place.shape[:, 0].tolist()) == (
        [0, 1, 2],
        [0, 2, 4],
        [2, 2, 1],
    )
    assert place.storage == {0: 2, 1: 2, 2: 2, 3: 2}


def test_ranks_along_an_uncut_axis_hold_the_same_part_of_one_copy():
    place = mesh_layout(specs_of(w=(4,)), {"w": (Cut(None), Cut(0))}, [[[0, 1], [2, 3]]], 4).placements["w"]
    assert place.lo[:, 0].tolist() == [0, 2, 0, 2]
    assert place.copies.tolist() == [0, 0, 0, 0]
    assert place.covers == ((0, 1), (2, 3))


def test_a_rank_whose_shard_is_empty_has_a_storage_of_no_elements():
    place = mesh_layout(specs_of(w=(3, 8)), {"w": Cut(0)}, [[0, 1, 2, 3]], 4).placements["w"]
    assert place.storage == {0: 0, 1: 8, 2: 8, 3: 8}
    assert place.rank.tolist() == [1, 2, 3]
    empty = mesh_layout(specs_of(w=(0, 8)), {"w": Cut(0)}, [[0, 1]], 2).placements["w"]
    assert (len(empty.rank), empty.storage) == (0, {0: 0, 1: 0})


def test_a_tensor_of_only_some_indices_is_nowhere_else():
    specs = specs_of(**{f"experts.{e}.w": (4, 2) for e in range(4)})
    cuts = {f"experts.{e}.w": (Cut.only(e // 2), Cut(0)) for e in range(4)}
    layout = mesh_layout(specs, cuts, [[[0, 1], [2, 3]]], 4)
    assert [layout.placements[n].storage for n in specs] == [{0: 4, 1: 4}] * 2 + [{2: 4, 3: 4}] * 2
    assert layout.placements["experts.0.w"] is layout.placements["experts.1.w"]


def test_tensors_of_one_shape_and_rule_share_a_placement():
    specs = specs_of(a=(8, 4), b=(8, 4), c=(8, 4), d=(4, 8))
    cuts = {"a": Cut(0), "b": Cut(0, None), "c": Cut(0, 8), "d": Cut(0)}
    places = mesh_layout(specs, cuts, [(0, 1)], 2).placements
    assert places["a"] is places["b"]
    assert places["a"] is not places["c"] and places["a"] is not places["d"]


@pytest.mark.parametrize(
    ("cuts", "replicas", "message"),
    [
        ({}, [(0, 1)], r"layout mesh: tensor w has no cut \(and 0 more\)"),
        ({"w": Cut(2)}, [(0, 1)], r"tensor w \[6, 4\]: cut along dim 2, which it does not have"),
        ({"w": Cut(0, 4)}, [(0, 1)], r"tensor w \[6, 4\], dim 0: 6 is no multiple of 4 units"),
        ({"w": Cut(0)}, [(0, 1), (1, 2)], r"layout mesh: a rank stands in two replicas: \[0, 1, 1, 2\]"),
        ({"w": Cut(0)}, [(0, 0)], "layout mesh: rank 0 stands twice in a mesh"),
        ({"w": Cut(0)}, [(0, 4)], "layout mesh: rank 4 is outside the world of 4"),
        ({"w": Cut(0)}, [(-1, 0)], "layout mesh: rank -1 is outside the world of 4"),
        ({"w": Cut(0)}, [()], r"layout mesh: a mesh of shape \[0\] has no ranks"),
        ({"w": Cut(0)}, [[[0, 1], [2]]], "are no mesh: its rows differ in length"),
        ({"w": Cut(0)}, [(0.0, 1.0)], "are no whole numbers"),
        ({"w": Cut(0)}, [3], r"a mesh of shape \[\] has no ranks"),
        ({"w": Cut(0)}, [[[0, 1], [2, 3]]], r"tensor w \[6, 4\]: 1 cuts for a mesh of 2 axes"),
        ({"w": (Cut.only(2), Cut(0))}, [[[0, 1], [2, 3]]], r"axis 0: index 2 is to hold .* give some of 0\.\.1"),
        ({"w": Cut(0)}, [], r"tensor w \[6, 4\]: 24 of 24 elements of copy 0 are held by no rank"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_tensor_and_numbers(cuts, replicas, message):
    with pytest.raises(LayoutError, match=message):
        mesh_layout(specs_of(w=(6, 4)), cuts, replicas, 4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 5)] * 2, *[st.integers(1, 4)] * 2), min_size=1, max_size=6))
def test_pieces_are_cut_until_they_are_equal_or_disjoint(rows):
    table = np.array(rows, dtype=np.int64)
    lo, shape = table[:, :2], table[:, 2:]
    stride = np.array([[16, 1]] * len(rows))
    offset = 100 * np.arange(len(rows))
    rank = np.arange(len(rows))
    found = equal_or_disjoint(rank, lo, shape, offset, stride)

    def cells(rank, lo, shape, offset, stride):
        seen = {}
        for k in range(len(rank)):
            for inner in np.ndindex(*shape[k]):
                key = (int(rank[k]), *(int(a + b) for a, b in zip(lo[k], inner, strict=True)))
                assert key not in seen
                seen[key] = int(offset[k] + (np.array(inner) * stride[k]).sum())
        return seen

    assert cells(*found) == cells(rank, lo, shape, offset, stride)
    sets = [
        {tuple(int(v) for v in found[1][k] + np.array(i)) for i in np.ndindex(*found[2][k])}
        for k in range(len(found[0]))
    ]
    assert all(one == two or not one & two for one in sets for two in sets)
