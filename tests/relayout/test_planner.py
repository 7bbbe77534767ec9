"""Planner, routes and schedule against gather-and-slice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import execute, storages, whole_tensors
from strategies import moves

from relaymeter.errors import InputError, LayoutError
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import Cut, flat_placement, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import DIRECT, RELAY, ROUTES, SPREAD, block_groups
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.segments import FROM_DESTINATION
from relaymeter.relayout.topology import Topology

BF16 = "bfloat16"


def specs_of(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, BF16) for name, shape in shapes.items()}


def trainer_to_copies(
    shape: tuple[int, ...] = (64, 32), layers: int = 6, bucket_bytes: int = 1 << 20
) -> dict[int, Schedule]:
    """ZeRO-3 on node 0 of a 2 x 2 cluster to two whole copies on node 1, by each route."""
    topology = Topology.grid(2, 2)
    specs = specs_of(**{f"w{i}": shape for i in range(layers)})
    source = zero3_layout(specs, (0, 1), 4)
    copies = tensor_parallel_layout(specs, dict.fromkeys(specs, Cut(0)), [(2,), (3,)], 4)
    plan = plan_move(source, copies, topology)
    groups = block_groups(plan, topology)
    return {code: build_schedule(plan, topology, groups.uniform(code), bucket_bytes) for code in range(len(ROUTES))}


@settings(max_examples=150, deadline=None)
@given(moves(), st.data())
def test_any_move_by_any_mix_of_routes_equals_gather_and_slice(move, data):
    source, destination, topology = move
    plan = plan_move(source, destination, topology)
    groups = block_groups(plan, topology)
    route = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(groups), max_size=len(groups))), dtype=np.int8)
    schedule = build_schedule(plan, topology, route, data.draw(st.sampled_from([8, 100, 1 << 20])))
    whole = whole_tensors(source)
    moved = storages(destination, None)
    execute(schedule, storages(source, whole), moved)
    for key, expected in storages(destination, whole).items():
        np.testing.assert_array_equal(moved[key], expected, err_msg=str(key))


@settings(max_examples=60, deadline=None)
@given(moves(), st.sampled_from(range(3)))
def test_loads_and_rank_tables_agree_with_the_segments(move, code):
    source, destination, topology = move
    plan = plan_move(source, destination, topology)
    schedule = build_schedule(plan, topology, block_groups(plan, topology).uniform(code), 200)
    table = schedule.all_segments
    nbytes = table.elements * 8
    far = topology.node_array[table.src_rank] != topology.node_array[table.dst_rank]
    local = table.src_rank == table.dst_rank
    assert int(nbytes[far].sum()) == schedule.bytes_cross_node
    assert int(nbytes[~far & ~local].sum()) == schedule.bytes_in_node
    loads = schedule.loads("all-to-all")
    assert int(loads.bytes.sum()) == int(np.where(local, nbytes, -(-nbytes // 16) * 16).sum())
    assert (loads.round < max(schedule.rounds, 1)).all()
    rows = sum(len(schedule.segments_for(rank)) for rank in range(topology.world_size))
    assert rows == 2 * len(table) - int(local.sum())


def test_relay_and_spread_halve_the_bytes_across_nodes():
    schedules = trainer_to_copies()
    direct = schedules[DIRECT].bytes_cross_node
    assert direct == 2 * 6 * 64 * 32 * 2
    assert schedules[RELAY].bytes_cross_node == schedules[SPREAD].bytes_cross_node == direct // 2
    assert schedules[RELAY].bytes_in_node == schedules[SPREAD].bytes_in_node == direct // 2


def test_hubs_share_the_bytes_over_the_nics_in_every_round():
    schedule = trainer_to_copies(layers=12, bucket_bytes=8192)[RELAY]
    table = schedule.all_segments
    assert schedule.buckets > 3
    for number in range(schedule.buckets):
        first = (table.round == number) & (table.stage == 1)
        received = np.bincount(table.dst_rank[first], weights=table.elements[first], minlength=4)
        assert received[2] == received[3] > 0


def test_stage_two_follows_stage_one_by_one_round_and_reads_the_destination():
    schedule = trainer_to_copies(bucket_bytes=8192)[SPREAD]
    table = schedule.all_segments
    assert schedule.rounds == schedule.buckets + 1
    for stage in (1, 2):
        mine = table.take(table.stage == stage)
        assert set(mine.round.tolist()) == set(range(stage - 1, schedule.buckets + stage - 1))
        assert set(mine.src_space.tolist()) == {FROM_DESTINATION if stage == 2 else 0}


def test_a_tensor_larger_than_the_bucket_is_cut():
    topology = Topology.grid(2, 1)
    specs = specs_of(embed=(1000, 64))
    plan = plan_move(
        zero3_layout(specs, (0,), 2), tensor_parallel_layout(specs, {"embed": Cut(0)}, [(1,)], 2), topology
    )
    schedule = build_schedule(plan, topology, block_groups(plan, topology).uniform(DIRECT), 10_000)
    per_round = np.bincount(schedule.all_segments.round, weights=schedule.all_segments.elements * 2)
    assert schedule.buckets == 13 and per_round.max() <= 10_000 and per_round.sum() == 128_000


def test_more_than_2_to_the_31_elements_keep_exact_offsets():
    topology = Topology.grid(2, 2)
    specs = specs_of(big=(46341, 46341))
    plan = plan_move(
        zero3_layout(specs, (0, 1), 4), tensor_parallel_layout(specs, {"big": Cut(1)}, [(2, 3)], 4), topology
    )
    schedule = build_schedule(plan, topology, block_groups(plan, topology).uniform(DIRECT), 64 << 20)
    table = schedule.all_segments
    assert int(table.elements.sum()) == 2_147_488_281
    last = table.src_offset + ((table.shape - 1) * table.src_stride).sum(axis=1)
    assert int(last.max()) == 1_073_744_141 - 1


def test_equal_tensors_are_planned_once():
    schedule = trainer_to_copies(layers=40)[DIRECT]
    assert len(schedule.plan.classes) == 1 and len(schedule.plan.classes[0].tensors) == 40


def test_the_lower_bound_does_not_depend_on_the_route_and_names_what_binds():
    plan = trainer_to_copies()[DIRECT].plan
    bound = lower_bound(plan, Topology.grid(2, 2), dict.fromkeys(range(4), 1000.0), 1e9)
    assert bound.seconds == pytest.approx(6 * 64 * 32 * 2 / 2000)
    assert bound.bound_by == "node 1 receive"


def test_a_holder_on_the_own_node_is_preferred():
    topology = Topology.grid(2, 2)
    specs = specs_of(w=(8, 8))
    both = tensor_parallel_layout(specs, {"w": Cut(None)}, [(0,), (2,)], 4, "old")
    plan = plan_move(both, tensor_parallel_layout(specs, {"w": Cut(None)}, [(0,), (3,)], 4, "new"), topology)
    found = plan.classes[0]
    assert sorted(zip(found.src_rank.tolist(), found.dst_rank.tolist(), strict=True)) == [(0, 0), (2, 3)]


def test_a_layout_that_does_not_cover_a_tensor_is_refused_with_tensor_and_count():
    specs = specs_of(w=(256, 256))
    place = flat_placement((256, 256), [(0, 0, 16384), (1, 16384, 32768)], {0: 16384, 1: 16384})
    half = Layout("half", 2, specs, {"w": place})
    with pytest.raises(
        LayoutError, match=r"tensor w \[256, 256\]: 32768 of 65536 elements of copy 0 are held by no rank"
    ):
        plan_move(half, half, Topology.grid(1, 2))


def test_layouts_that_contradict_each_other_are_refused():
    topology = Topology.grid(1, 2)
    one, two = specs_of(w=(4, 4)), {"w": TensorSpec("w", (4, 4), "float32")}
    with pytest.raises(LayoutError, match=r"tensor w leaves as bfloat16 and arrives as float32: name the cast"):
        plan_move(zero3_layout(one, (0,), 2), zero3_layout(two, (1,), 2), topology)
    with pytest.raises(LayoutError, match="tensor other is in the destination layout but not in layout zero3"):
        plan_move(zero3_layout(one, (0,), 2), zero3_layout(specs_of(other=(4,)), (1,), 2), topology)


def test_a_route_array_of_the_wrong_length_or_code_is_refused():
    schedule = trainer_to_copies()[DIRECT]
    for bad in (np.zeros(1, dtype=np.int8), np.full(2, 9, dtype=np.int8)):
        with pytest.raises(InputError, match="a route array of 2 codes from 0 to 3"):
            build_schedule(schedule.plan, schedule.topology, bad)


def test_tensors_that_swap_sides_share_their_rounds():
    """Stage 0 on node 0 and stage 1 on node 1 change places: both directions are busy in every round."""
    topology = Topology.grid(2, 1)
    specs = specs_of(**{f"w{i}": (64, 32) for i in range(24)})

    def stages(first: int) -> Layout:
        whole = [
            tensor_parallel_layout(specs, dict.fromkeys(specs, Cut(0)), [(rank,)], 2) for rank in (first, 1 - first)
        ]
        places = {name: whole[index >= 12].placements[name] for index, name in enumerate(specs)}
        return Layout(f"stages from {first}", 2, specs, places)

    plan = plan_move(stages(0), stages(1), topology)
    schedule = build_schedule(plan, topology, block_groups(plan, topology).uniform(DIRECT), 3 * 4096)
    assert schedule.rounds == 4
    sent = np.zeros((4, 2))
    np.add.at(sent, (schedule.all_segments.round, schedule.all_segments.src_rank), 4096)
    assert sent.tolist() == [[3 * 4096] * 2] * 4


def test_no_band_of_a_large_tensor_passes_the_bucket():
    topology = Topology.grid(2, 1)
    for elements, bucket_bytes in ((1 << 24, 1 << 20), (1 << 24, 1_000_000), (1 << 21, 4099)):
        specs = {"w": TensorSpec("w", (elements,), "float32")}
        source, copy = zero3_layout(specs, (0,), 2), tensor_parallel_layout(specs, {"w": Cut(0)}, [(1,)], 2)
        plan = plan_move(source, copy, topology)
        schedule = build_schedule(plan, topology, block_groups(plan, topology).uniform(DIRECT), bucket_bytes)
        table = schedule.all_segments
        assert np.bincount(table.round, weights=table.elements * 4).max() <= bucket_bytes


def test_a_conversion_is_packed_in_the_loads():
    topology = Topology.grid(1, 2)
    wide, narrow = ({"w": TensorSpec("w", (512, 512), dtype)} for dtype in ("float32", "bfloat16"))
    source = zero3_layout(wide, (0,), 2)
    plan = plan_move(source, zero3_layout(narrow, (1,), 2), topology, cast={"w": "bfloat16"})
    loads = build_schedule(plan, topology, block_groups(plan, topology).uniform(DIRECT)).loads("send-recv")
    assert loads.pack_bytes.tolist() == loads.unpack_bytes.tolist() == [512 * 512 * 2]
    plan = plan_move(source, zero3_layout(wide, (1,), 2), topology)
    loads = build_schedule(plan, topology, block_groups(plan, topology).uniform(DIRECT)).loads("send-recv")
    assert loads.pack_bytes.tolist() == [0] and loads.messages.tolist() == [1]
