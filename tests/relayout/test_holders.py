"""Who serves a region: several layouts, copies cut differently, shares of equal holders, one rank's own plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import execute, storages, whole_tensors
from strategies import moves

from relaymeter.errors import InputError, LayoutError
from relaymeter.relayout.agreement import expected_messages
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.placements import Cut, shard_placement, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.routes import DIRECT, RELAY, ROUTES, SPREAD, block_groups
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.segments import SegmentTable
from relaymeter.relayout.topology import Topology

SPECS = {f"w{i}": TensorSpec(f"w{i}", (512, 256), "bfloat16") for i in range(4)}
ROWS = dict.fromkeys(SPECS, Cut(0))
COLUMNS = dict.fromkeys(SPECS, Cut(1))


def without(layout: Layout, ranks: set[int]) -> Layout:
    """What is left of a layout when ``ranks`` are lost."""

    def left(place: Placement) -> Placement:
        keep = np.asarray([rank not in ranks for rank in place.rank.tolist()], dtype=bool)
        columns = (place.rank, place.lo, place.shape, place.offset, place.stride)
        rank, lo, shape, offset, stride = (column[keep] for column in columns)
        storage = {rank: size for rank, size in place.storage.items() if rank not in ranks}
        return Placement(rank, lo, shape, offset, stride, storage, place.copies[keep])

    places = {name: left(place) for name, place in layout.placements.items()}
    return replace(layout, name=f"{layout.name} without {sorted(ranks)}", placements=places, partial=True)


def beside(one: Layout, two: Layout) -> Layout:
    """Two layouts on different ranks as the copies of one."""

    def joined(a: Placement, b: Placement) -> Placement:
        columns = [(getattr(a, c), getattr(b, c)) for c in ("rank", "lo", "shape", "offset", "stride")]
        copy = np.concatenate([a.copies, b.copies + a.copies.max(initial=-1) + 1])
        rank, lo, shape, offset, stride = (np.concatenate(pair) for pair in columns)
        return Placement(rank, lo, shape, offset, stride, {**a.storage, **b.storage}, copy)

    places = {name: joined(place, two.placements[name]) for name, place in one.placements.items()}
    return replace(one, name="beside", placements=places)


def scheduled(plan: MovePlan, code: int, bucket_bytes: int = 1 << 20) -> Schedule:
    return build_schedule(plan, plan.topology, block_groups(plan, plan.topology).uniform(code), bucket_bytes)


@settings(max_examples=120, deadline=None)
@given(moves(), st.data())
def test_any_two_sources_fill_the_destination_or_are_refused(move, data):
    source, destination, topology = move
    ranks = st.sets(st.integers(0, topology.world_size - 1), max_size=2)
    sources = [without(source, data.draw(ranks)), without(destination, data.draw(ranks))]
    if data.draw(st.booleans()):
        sources.reverse()
    whole = whole_tensors(source)
    held = [storages(layout, whole) for layout in sources]
    covered = {
        name: np.zeros(spec.shape, dtype=bool) for name, spec in source.specs.items()
    }  # element by element, what any source holds
    for layout in sources:
        for name, place in layout.placements.items():
            for lo, shape in zip(place.lo.tolist(), place.shape.tolist(), strict=True):
                covered[name][tuple(slice(a, a + n) for a, n in zip(lo, shape, strict=True))] = True
    short = any(
        not covered[name][tuple(slice(a, a + n) for a, n in zip(lo, shape, strict=True))].all()
        for name, place in destination.placements.items()
        for lo, shape in zip(place.lo.tolist(), place.shape.tolist(), strict=True)
    )
    if short:
        with pytest.raises(LayoutError, match="the source offers"):
            plan_move(sources, destination, topology)
        return
    plan = plan_move(sources, destination, topology)
    code, bucket_bytes = data.draw(st.sampled_from(range(len(ROUTES)))), data.draw(st.sampled_from([64, 1 << 20]))
    schedule = scheduled(plan, code, bucket_bytes)
    moved = storages(destination, None)
    execute(schedule, held, moved)
    for key, expected in storages(destination, whole).items():
        np.testing.assert_array_equal(moved[key], expected, err_msg=str(key))


@settings(max_examples=60, deadline=None)
@given(moves(), st.sampled_from(range(3)))
def test_a_rank_that_plans_its_own_rows_finds_those_of_the_whole_plan(move, code):
    source, destination, topology = move
    whole = scheduled(plan_move(source, destination, topology), code, 1 << 30)
    for rank in range(topology.world_size):
        own = scheduled(plan_move(source, destination, topology, rank=rank), code, 1 << 30)
        assert own.input_hash == scheduled(plan_move(source, destination, topology, rank=0), code, 1 << 30).input_hash
        if code == RELAY:
            continue  # which member is the hub is chosen otherwise
        one, two = own.segments_for(rank), whole.segments_for(rank)
        assert len(one) == len(two)
        rows = (table_rows(table) for table in (one, two))
        np.testing.assert_array_equal(*(found[np.lexsort(found.T)] for found in rows))


def table_rows(table: SegmentTable) -> NDArray[np.int64]:
    """The columns of segments that say what is copied (n, 8)."""
    columns = (table.tensor, table.stage, table.src_rank, table.dst_rank, table.src_space, table.src_offset)
    return np.column_stack([*columns, table.dst_offset, table.elements])


@settings(max_examples=40, deadline=None)
@given(moves(), st.sampled_from(range(3)), st.sampled_from([64, 300, 1 << 20]))
def test_ranks_that_plan_their_own_rows_agree_on_every_message(move, code, bucket_bytes):
    source, destination, topology = move
    world = topology.world_size
    expected = []
    for rank in range(world):
        schedule = scheduled(plan_move(source, destination, topology, rank=rank), code, bucket_bytes)
        itemsize = np.asarray([spec.itemsize for spec in schedule.tensors], dtype=np.int64)
        table = schedule.segments_for(rank)
        expected.append(expected_messages(table, itemsize, rank, schedule.rounds, world))
    for one in range(world):
        for two in range(world):
            np.testing.assert_array_equal(expected[one][0, two], expected[two][1, one], err_msg=f"{one} to {two}")


def test_an_own_plan_has_no_rows_of_another_rank():
    topology = Topology.grid(2, 2)
    source, copies = zero3_layout(SPECS, (0, 1), 4), tensor_parallel_layout(SPECS, ROWS, [(2, 3)], 4)
    schedule = scheduled(plan_move(source, copies, topology, rank=1), DIRECT)
    with pytest.raises(InputError, match="the rows of rank 1, not of rank 2"):
        schedule.segments_for(2)


def test_equal_holders_of_another_node_share_the_sending():
    """Four whole copies on node 0 to four on node 1: every NIC of node 0 sends a quarter."""
    topology = Topology.grid(2, 4)
    specs = {"w": TensorSpec("w", (1024, 1024), "bfloat16")}
    old, new = (
        tensor_parallel_layout(specs, {"w": Cut(0)}, [(r,) for r in ranks], 8) for ranks in (range(4), range(4, 8))
    )
    plan = plan_move(old, new, topology)
    table = scheduled(plan, RELAY).all_segments
    far = table.src_rank < 4
    sent = np.bincount(table.src_rank[far], weights=table.elements[far], minlength=8)
    assert sent[:4].tolist() == [1024 * 256] * 4
    table = scheduled(plan, DIRECT).all_segments
    assert np.bincount(table.src_rank, weights=table.elements, minlength=8)[:4].tolist() == [1024 * 1024] * 4


def test_small_regions_are_not_cut_but_go_round_the_holders():
    topology = Topology.grid(2, 4)
    specs = {f"w{i}": TensorSpec(f"w{i}", (8 + i,), "bfloat16") for i in range(40)}
    old, new = (
        tensor_parallel_layout(specs, dict.fromkeys(specs, Cut(None)), [(r,) for r in ranks], 8)
        for ranks in (range(4), range(4, 8))
    )
    table = scheduled(plan_move(old, new, topology), RELAY).all_segments
    first = table.stage == 1
    assert first.sum() == 40  # one holder for the four ranks of the node, so that one fetch serves them
    assert np.bincount(table.src_rank[first], minlength=4).min() >= 3


def test_the_callers_order_decides_between_far_layouts_and_the_own_node_comes_first():
    topology = Topology.grid(3, 1)
    one, two, three = (tensor_parallel_layout(SPECS, ROWS, [(r,)], 3, f"on {r}") for r in range(3))
    for order, expected in (([one, two], {0}), ([two, one], {1}), ([one, two, three], {2}), ([three, one], {2})):
        found = plan_move(order, three, topology).classes[0]
        assert set(found.src_rank.tolist()) == expected


def test_a_far_layout_serves_only_what_the_near_one_lacks():
    """The old TP2 copy on node 1 has lost rank 3: its half comes from the trainer on node 0, the rest stays in node."""
    topology = Topology.grid(2, 2)
    trainer = zero3_layout(SPECS, (0, 1), 4)
    old = without(tensor_parallel_layout(SPECS, ROWS, [(2, 3)], 4), {3})
    new = tensor_parallel_layout(SPECS, COLUMNS, [(2, 3)], 4)
    schedule = scheduled(plan_move([old, trainer], new, topology), DIRECT)
    assert schedule.bytes_cross_node == sum(spec.nbytes for spec in SPECS.values()) // 2
    assert set(schedule.all_segments.src_space.tolist()) == {0, 2}


def test_a_lost_rank_is_refilled_from_the_survivors():
    topology = Topology.grid(2, 2)
    whole = tensor_parallel_layout(SPECS, ROWS, [(0, 1), (2, 3)], 4)
    lost = without(whole, {0, 1, 2})
    schedule = scheduled(plan_move(without(whole, {3}), lost, topology), DIRECT)
    assert set(schedule.all_segments.dst_rank.tolist()) == {3} == {int(r) for r in lost.placements["w0"].rank}
    assert set(schedule.all_segments.src_rank.tolist()) == {1}
    assert schedule.bytes_total == sum(spec.nbytes for spec in SPECS.values()) // 2


@pytest.mark.parametrize("cuts", [ROWS, COLUMNS])
def test_copies_cut_differently_on_one_node_fetch_what_they_share_once(cuts):
    """A whole copy on rank 3 beside two halves on ranks 4 and 5: relay and spread send each byte to the node once."""
    topology = Topology.grid(2, 3)
    source = zero3_layout(SPECS, (0, 1, 2), 6)
    new = beside(tensor_parallel_layout(SPECS, cuts, [(3,)], 6), tensor_parallel_layout(SPECS, cuts, [(4, 5)], 6))
    plan = plan_move(source, new, topology)
    once = sum(spec.nbytes for spec in SPECS.values())
    sent = [scheduled(plan, code).bytes_cross_node for code in range(len(ROUTES))]
    assert sent == [2 * once, *[once] * (len(ROUTES) - 1)]
    bound = lower_bound(plan, topology, dict.fromkeys(range(6), 1e6), None)
    assert bound.seconds == pytest.approx(once / 3e6)


def test_the_bound_counts_overlapping_regions_once():
    """Boxes too many to be cut on each other's borders still count each element once."""
    topology = Topology.grid(2, 2)
    specs = {"w": TensorSpec("w", (600, 600), "int8")}
    source = zero3_layout(specs, (0,), 4)
    stripes = shard_placement((600, 600), {2: ((0, 0), (600, 600))})
    rows = [(3, row * 2, 2) for row in range(300)]
    lo = np.asarray([[at, 0] for _, at, _ in rows])
    size = np.asarray([[n, 600] for _, _, n in rows])
    fine = Placement(
        np.full(300, 3), lo, size, np.arange(300) * 1201, np.broadcast_to([600, 1], (300, 2)).copy(), {3: 300 * 1201}
    )
    new = beside(Layout("a", 4, specs, {"w": stripes}), Layout("b", 4, specs, {"w": fine}))
    plan = plan_move(source, new, topology)
    bound = lower_bound(plan, topology, dict.fromkeys(range(4), 1.0), None)
    assert bound.seconds == 600 * 600 / 2


def test_a_destination_that_folds_on_itself_is_refused():
    topology = Topology.grid(1, 2)
    specs = {"w": TensorSpec("w", (4, 4), "int8")}
    one = np.zeros(1, dtype=np.int64)
    box = np.asarray([[4, 4]]), one, np.asarray([[1, 1]])
    folded = Layout("folded", 2, specs, {"w": Placement(one + 1, np.zeros((1, 2), dtype=np.int64), *box, {1: 7})})
    with pytest.raises(LayoutError, match=r"tensor w \[4, 4\]: strides \[1, 1\] of rank 1"):
        plan_move(zero3_layout(specs, (0,), 2), folded, topology)


def test_two_pieces_on_one_place_are_refused():
    specs = {"w": TensorSpec("w", (4, 4), "int8")}
    lo, shape = np.asarray([[0, 0], [2, 0]]), np.asarray([[2, 4], [2, 4]])
    for offset, stride, clash in (([0, 8], [4, 1], False), ([0, 4], [4, 1], True), ([0, 1], [8, 1], True)):
        strides = np.asarray([stride, stride])
        place = Placement(np.zeros(2, dtype=np.int64), lo, shape, np.asarray(offset), strides, {0: 32})
        layout = Layout("l", 1, specs, {"w": place})
        if clash:
            with pytest.raises(LayoutError, match="two pieces of rank 0 use the same elements"):
                layout.check()
        else:
            layout.check()


def test_a_cast_is_made_only_where_it_is_named():
    topology = Topology.grid(1, 2)
    wide, narrow = ({"w": TensorSpec("w", (4, 4), dtype)} for dtype in ("float32", "bfloat16"))
    source, copy = zero3_layout(wide, (0,), 2), zero3_layout(narrow, (1,), 2)
    with pytest.raises(LayoutError, match="tensor w leaves as float32 and arrives as bfloat16: name the cast"):
        plan_move(source, copy, topology)
    with pytest.raises(LayoutError, match="cast names tensor v, which does not move"):
        plan_move(source, copy, topology, cast={"v": "bfloat16"})
    with pytest.raises(LayoutError, match="cast to float16, but layout zero3 has it as bfloat16"):
        plan_move(source, copy, topology, cast={"w": "float16"})
    plan = plan_move(source, copy, topology, cast={"w": "bfloat16"})
    assert scheduled(plan, DIRECT).bytes_in_node == 32
    assert plan.source_tensors[0].dtype == "float32" and plan.tensors[0].dtype == "bfloat16"


def test_spread_splits_a_group_over_its_members():
    topology = Topology.grid(2, 2)
    plan = plan_move(zero3_layout(SPECS, (0,), 4), tensor_parallel_layout(SPECS, ROWS, [(2,), (3,)], 4), topology)
    table = scheduled(plan, SPREAD).all_segments
    first = table.stage == 1
    half = sum(spec.numel for spec in SPECS.values()) // 2
    assert np.bincount(table.dst_rank[first], weights=table.elements[first])[2:].tolist() == [half, half]


def test_survivors_that_lack_a_part_are_refused_however_often_they_hold_the_rest():
    """Ranks 0 and 2 hold the same half; the other half is lost with ranks 1 and 3."""
    specs = {"w": TensorSpec("w", (4,), "float32")}
    source = without(tensor_parallel_layout(specs, {"w": Cut(0)}, [(0, 1), (2, 3)], 5), {1, 3})
    whole = tensor_parallel_layout(specs, {"w": Cut(0)}, [(4,)], 5)
    for rank in (None, *range(5)):
        with pytest.raises(LayoutError, match="rank 4 needs 4 elements, the source offers 2"):
            plan_move(source, whole, Topology.grid(5, 1), rank=rank)


def test_sources_whose_overlap_makes_up_the_count_are_refused():
    """[0, 2) twice and [1, 3): six elements offered for [0, 4), and the last one missing."""
    specs = {"w": TensorSpec("w", (4,), "float32")}
    one = Layout("one", 4, specs, {"w": shard_placement((4,), {0: ((0,), (2,)), 1: ((0,), (2,))})}, partial=True)
    two = Layout("two", 4, specs, {"w": shard_placement((4,), {2: ((1,), (2,))})}, partial=True)
    whole = tensor_parallel_layout(specs, {"w": Cut(0)}, [(3,)], 4)
    for rank in (None, 3):
        with pytest.raises(LayoutError, match="rank 3 needs 4 elements, the source offers 3"):
            plan_move([one, two], whole, Topology.grid(4, 1), rank=rank)


def test_a_rank_that_needs_a_region_twice_gets_both_by_every_route():
    """Rank 2 holds the tensor in two places and rank 3 in one, each as two halves by columns."""
    topology = Topology.grid(2, 2)
    specs = {"w": TensorSpec("w", (4, 4), "int64")}
    lo, shape = np.asarray([[0, 0], [0, 2]] * 3), np.asarray([[4, 2]] * 6)
    offset, stride = np.asarray([0, 2, 16, 18, 0, 2]), np.asarray([[4, 1]] * 6)
    place = Placement(
        np.asarray([2, 2, 2, 2, 3, 3]), lo, shape, offset, stride, {2: 32, 3: 16}, np.asarray([0, 0, 1, 1, 2, 2])
    )
    source, copies = zero3_layout(specs, (0,), 4), Layout("copies", 4, specs, {"w": place})
    plan = plan_move(source, copies, topology)
    whole = whole_tensors(source)
    for code in range(len(ROUTES)):
        moved = storages(copies, None)
        execute(scheduled(plan, code), storages(source, whole), moved)
        for key, expected in storages(copies, whole).items():
            np.testing.assert_array_equal(moved[key], expected, err_msg=f"{ROUTES[code]} {key}")


def test_own_plans_of_copies_on_another_node_agree():
    """Two TP2 copies on node 0 to a whole one on node 1: rank 0 and rank 2 do not both send their half."""
    specs = {"w": TensorSpec("w", (4,), "float32")}
    source = tensor_parallel_layout(specs, {"w": Cut(0)}, [(0, 1), (2, 3)], 8)
    whole = tensor_parallel_layout(specs, {"w": Cut(0)}, [(4,)], 8)
    topology = Topology.grid(2, 4)
    every = scheduled(plan_move(source, whole, topology), DIRECT).all_segments
    sent = {rank: scheduled(plan_move(source, whole, topology, rank=rank), DIRECT) for rank in range(5)}
    assert sum(len(sent[rank].segments_for(rank)) for rank in range(4)) == len(every) == 2
    assert len(sent[4].segments_for(4)) == 2


def test_own_plans_of_unevenly_cut_sources_hold_what_a_rank_sends():
    topology = Topology.grid(3, 2)
    one, two = zero3_layout(SPECS, (0, 1, 2), 6), tensor_parallel_layout(SPECS, COLUMNS, [(2, 3)], 6)
    new = tensor_parallel_layout(SPECS, ROWS, [(4, 5)], 6)
    whole = scheduled(plan_move([one, two], new, topology), DIRECT, 1 << 30)
    for rank in range(6):
        own = scheduled(plan_move([one, two], new, topology, rank=rank), DIRECT, 1 << 30)
        assert table_rows(own.segments_for(rank)).tolist() == table_rows(whole.segments_for(rank)).tolist()


def test_far_ranks_are_loaded_in_the_order_of_the_sources():
    """The first source sends all; the second, as whole, nothing: so buckets close by what rank 0 sends."""
    topology = Topology.grid(8, 1)
    specs = {f"w{i}": TensorSpec(f"w{i}", (64, 64), "float32") for i in range(32)}
    cuts = dict.fromkeys(specs, Cut(0))
    first = tensor_parallel_layout(specs, cuts, [(0,)], 8)
    second = tensor_parallel_layout(specs, cuts, [(1,), (2,), (3,)], 8)
    new = tensor_parallel_layout(specs, cuts, [(4,), (5,), (6,), (7,)], 8)
    own = scheduled(plan_move([first, second], new, topology, rank=0), DIRECT, 1 << 17)
    table = own.segments_for(0)
    assert np.bincount(table.round, weights=table.elements * 4).max() <= 1 << 17


def test_groups_of_different_ranks_with_one_sum_stay_apart():
    """Ranks 4 and 7 want one half, 5 and 6 the other: two groups, though their numbers add up to the same."""
    topology = Topology.grid(2, 4)
    specs = {"w": TensorSpec("w", (8,), "int64")}
    boxes = {4: ((0,), (4,)), 7: ((0,), (4,)), 5: ((4,), (4,)), 6: ((4,), (4,))}
    copies = Layout("copies", 8, specs, {"w": shard_placement((8,), boxes)})
    source = zero3_layout(specs, (0,), 8)
    plan = plan_move(source, copies, topology)
    groups = block_groups(plan, topology)
    assert sorted(groups.fanout.tolist()) == [2, 2]
    assert scheduled(plan, RELAY).bytes_cross_node == 64


def test_hubs_of_an_own_plan_take_turns():
    topology = Topology.grid(2, 2)
    specs = {f"w{i}": TensorSpec(f"w{i}", (64, 64), "float32") for i in range(8)}
    cuts = dict.fromkeys(specs, Cut(0))
    source, copies = zero3_layout(specs, (0, 1), 4), tensor_parallel_layout(specs, cuts, [(2,), (3,)], 4)
    table = scheduled(plan_move(source, copies, topology, rank=0), RELAY).segments_for(0)
    assert np.bincount(table.dst_rank, minlength=4)[2:].tolist() == [4, 4]


def test_what_two_uneven_pieces_share_is_cut_on_every_border():
    """Three overlapping pieces in a chain: each element that crosses crosses once by relay."""
    topology = Topology.grid(2, 3)
    specs = {"w": TensorSpec("w", (6, 6), "int64")}
    boxes = {3: ((0, 0), (6, 4)), 4: ((0, 2), (4, 4)), 5: ((2, 0), (4, 6))}
    place = replace(shard_placement((6, 6), boxes), copy=np.arange(3))
    copies = Layout("copies", 6, specs, {"w": place}, partial=True)
    plan = plan_move(zero3_layout(specs, (0,), 6), copies, topology)
    assert scheduled(plan, RELAY).bytes_cross_node == 36 * 8


def test_wrong_ranks_casts_and_buckets_are_refused():
    topology = Topology.grid(1, 2)
    wide, narrow = ({"w": TensorSpec("w", (4, 4), dtype)} for dtype in ("float32", "int32"))
    source, copy = zero3_layout(wide, (0,), 2), zero3_layout(wide, (1,), 2)
    for rank in (-1, 2):
        with pytest.raises(InputError, match=f"rank {rank} of 2 ranks"):
            plan_move(source, copy, topology, rank=rank)
    with pytest.raises(LayoutError, match="cast to 'float99', which is not one of"):
        plan_move(source, copy, topology, cast={"w": "float99"})
    with pytest.raises(InputError, match="no cast from float32 to int32 is offered"):
        plan_move(source, zero3_layout(narrow, (1,), 2), topology, cast={"w": "int32"})
    with pytest.raises(InputError, match=r"bucket of 1\.5 bytes: give a whole number"):
        build_schedule(plan_move(source, copy, topology), topology, np.zeros(1, dtype=np.int8), 1.5)
