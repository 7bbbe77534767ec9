"""Flat ranges, boxes, tensor-parallel copies and replicas; layouts of many tensors over many ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import POISON, storages, whole_tensors
from slicing import holds_every_element_once_per_copy
from strategies import layouts, moves, moves_from_several, tensor_specs

from relaymeter.errors import LayoutError
from relaymeter.relayout.cuts import Cut
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import (
    flat_placement,
    mesh_layout,
    rank_bytes,
    replicated_layout,
    shard_placement,
    tensor_parallel_layout,
    zero3_layout,
)


def specs_of(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, "int64") for name, shape in shapes.items()}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.data())
def test_flat_ranges_lie_at_the_start_of_their_storage(shape, data):
    numel = math.prod(shape)
    borders = sorted(data.draw(st.lists(st.integers(0, numel), max_size=3)))
    ranges = [(rank, a, b) for rank, (a, b) in enumerate(zip([0, *borders], [*borders, numel], strict=True))]
    ranges.reverse()
    place = flat_placement(shape, ranges, {rank: b - a + rank for rank, a, b in ranges})
    layout = Layout("flat", len(ranges), specs_of(w=shape), {"w": place})
    layout.check()
    whole = whole_tensors(layout)
    for (rank, _), held in storages(layout, whole).items():
        _, a, b = next(r for r in ranges if r[0] == rank)
        assert held.tolist() == whole["w"].ravel()[a:b].tolist() + [POISON] * rank


def test_a_flat_range_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"flat range 3\.\.9 outside a tensor of shape \(2, 4\)"):
        flat_placement((2, 4), [(0, 0, 3), (1, 3, 9)], {0: 3, 1: 6})


def test_boxes_are_stored_row_major():
    place = shard_placement(
        (4, 6), {1: ((0, 2), (4, 3)), 0: ((0, 0), (4, 2)), 2: ((0, 5), (4, 1)), 3: ((0, 6), (4, 0))}
    )
    assert place.rank.tolist() == [0, 1, 2]
    assert place.lo.tolist() == [[0, 0], [0, 2], [0, 5]]
    assert place.stride.tolist() == [[2, 1], [3, 1], [1, 1]]
    assert place.storage == {0: 8, 1: 12, 2: 4, 3: 0}


def test_replicas_hold_everything_in_a_copy_each():
    layout = replicated_layout(specs_of(w=(3, 2), s=()), (4, 1), 5)
    assert layout.placements["w"].copies.tolist() == [1, 0]
    assert [p.storage for p in layout.placements.values()] == [{4: 6, 1: 6}, {4: 1, 1: 1}]


def test_copies_of_unequal_tensor_parallel_degree_stand_in_one_layout():
    place = tensor_parallel_layout(specs_of(w=(4, 2)), {"w": Cut(0)}, [(0,), (1, 2)], 3).placements["w"]
    assert place.copies.tolist() == [0, 1, 1]
    assert place.covers == ((0,), (1, 2))
    assert place.storage == {0: 8, 1: 4, 2: 4}


@settings(max_examples=150, deadline=None)
@given(tensor_specs(), st.integers(1, 9), st.data())
def test_every_copy_of_every_layout_holds_each_element_once(specs, world, data):
    layout = data.draw(layouts(specs, world))
    layout.check()
    for name, spec in specs.items():
        holds_every_element_once_per_copy(spec.shape, layout.placements[name])


@settings(max_examples=60, deadline=None)
@given(moves(), moves_from_several())
def test_drawn_destinations_may_be_partial_and_sources_hold_everything(move, several):
    source, destination, topology = move
    assert not source.partial and source.world_size == destination.world_size == topology.world_size
    assert set(destination.specs) <= set(source.specs)
    destination.check()
    sources, _, _ = several
    held = {n: np.zeros(s.shape, dtype=bool) for n, s in sources[-1].specs.items()}
    for layout in sources:
        layout.check()
        for name, place in layout.placements.items():
            for lo, size in zip(place.lo, place.shape, strict=True):
                held[name][tuple(slice(a, a + b) for a, b in zip(lo, size, strict=True))] = True
    assert all(mask.all() for mask in held.values())


def test_70000_tensors_over_1024_ranks_share_a_few_placements():
    """Experts over 64 groups of 16 ranks: a placement for each group and shape, and one for what all ranks hold."""
    specs, cuts = {}, {}
    homes = [Cut.only(index) for index in range(64)]
    for layer in range(61):
        for expert in range(384):
            for kind, shape, cut in (
                ("up", (2048, 7168), Cut(0)),
                ("gate", (2048, 7168), Cut(0)),
                ("down", (7168, 2048), Cut(1)),
            ):
                name = f"layers.{layer}.experts.{expert}.{kind}.weight"
                specs[name] = TensorSpec(name, shape, "bfloat16")
                cuts[name] = (homes[expert // 6], cut)
        name = f"layers.{layer}.norm.weight"
        specs[name], cuts[name] = TensorSpec(name, (7168,), "bfloat16"), Cut(None)
    mesh = np.arange(1024).reshape(64, 16)
    tensor_parallel = mesh_layout(specs, cuts, [mesh], 1024)
    sharded = zero3_layout(specs, mesh.T, 1024, cuts={n: c if isinstance(c, Cut) else (c[0],) for n, c in cuts.items()})
    held = rank_bytes(tensor_parallel), rank_bytes(sharded)
    experts = 61 * 6 * 3 * 2048 * 7168 * 2 // 16
    assert set(held[0].tolist()) == {experts + 61 * 7168 * 2}
    assert set(held[1].tolist()) == {experts + 61 * 7168 * 2 // 16}
    for layout in (tensor_parallel, sharded):
        assert len({id(place) for place in layout.placements.values()}) == 64 * 2 + 1


def test_a_weight_without_a_cut_is_refused():
    with pytest.raises(LayoutError, match=r"layout tp: tensor b has no cut \(and 0 more\)"):
        tensor_parallel_layout(specs_of(a=(2,), b=(2,)), {"a": Cut(0)}, [(0,)], 1)
