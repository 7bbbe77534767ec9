"""What the routes offer which groups, and the chain: stages, order of the nodes, hubs, loads, bytes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import execute, storages, whole_tensors
from strategies import loose_rules, tensor_specs

from relaymeter.errors import InputError
from relaymeter.relayout.combine import join_layouts, restrict_layout
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import Cut, replicated_layout, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.plan_check import check_plan
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.routes import CHAIN, DIRECT, RELAY, ROUTES, SPREAD, block_groups, route_of
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.segments import DIRECT_MIN_BYTES, FROM_DESTINATION, FROM_SOURCE, PART_ALIGN
from relaymeter.relayout.topology import Topology


def specs_of(count: int, shape: tuple[int, ...] = (64, 32), dtype: str = "int64") -> dict[str, TensorSpec]:
    return {f"w{k}": TensorSpec(f"w{k}", shape, dtype) for k in range(count)}


def scheduled(plan: MovePlan, code: int, bucket_bytes: int = 1 << 20) -> Schedule:
    return build_schedule(plan, plan.topology, block_groups(plan, plan.topology).uniform(code), bucket_bytes)


def copies_plan(nodes: int, width: int, count: int, holders: int = 1, shape: tuple[int, ...] = (64, 32)) -> MovePlan:
    """``count`` tensors of the first ``holders`` ranks of node 0, wanted whole by all ranks of the other nodes."""
    topology, specs = Topology.grid(nodes, width), specs_of(count, shape)
    world = topology.world_size
    source = zero3_layout(specs, range(holders), world)
    return plan_move(source, replicated_layout(specs, range(width, world), world), topology)


@st.composite
def wide_moves(draw: st.DrawFn, most: int = 2) -> tuple[Layout, Layout, Topology]:
    """Copies cut alike on some of two to five nodes, out of a source on any ranks; ``most`` such sets of copies."""
    topology = Topology.grid(draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.sampled_from(["rank", "node"])))
    world, specs = topology.world_size, draw(tensor_specs())
    holders = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=3, unique=True))
    source = zero3_layout(specs, holders, world, "from")
    parts = []
    for number in range(draw(st.integers(1, most))):
        degree = draw(st.integers(1, len(topology.ranks_of(0))))
        dims = {n: draw(st.sampled_from([None, *range(len(spec.shape))])) for n, spec in specs.items()}
        cuts = {n: Cut(dim, rule=draw(loose_rules()) if dim is not None else None) for n, dim in dims.items()}
        homes = draw(st.lists(st.sampled_from(range(topology.nodes)), min_size=1, unique=True))
        replicas = [draw(st.permutations(topology.ranks_of(node)))[:degree] for node in homes]
        parts.append(tensor_parallel_layout(specs, cuts, replicas, world, f"to{number}"))
    held = [{rank for place in part.placements.values() for rank in place.storage} for part in parts]
    apart = len(parts) == 2 and not held[0] & held[1]
    return source, join_layouts(parts, "to") if apart else parts[0], topology


@settings(max_examples=40, deadline=None)
@given(wide_moves(), st.data())
def test_any_mix_of_routes_brings_every_element(move, data):
    source, destination, topology = move
    plan = plan_move(source, destination, topology)
    check_plan(plan, source, destination, topology)
    groups = block_groups(plan, topology)
    uniform = data.draw(st.booleans())
    codes = groups.uniform(CHAIN)
    if not uniform:
        drawn = st.lists(
            st.sampled_from([CHAIN, CHAIN, DIRECT, RELAY, SPREAD]), min_size=len(groups), max_size=len(groups)
        )
        codes = np.asarray(data.draw(drawn), dtype=np.int8)
    schedule = build_schedule(plan, topology, codes, data.draw(st.sampled_from([64, 700, 1 << 20])))
    whole = whole_tensors(source)
    held, moved = storages(source, whole), storages(destination, None)
    execute(schedule, held, moved)
    for key, expected in storages(destination, whole).items():
        np.testing.assert_array_equal(moved[key], expected, err_msg=str(key))
    assert schedule.all_segments.round.max(initial=0) < schedule.rounds
    if uniform:
        assert schedule.bytes_cross_node == scheduled(plan, RELAY).bytes_cross_node
        check_loads(schedule, "send-recv")
        check_loads(schedule, "all-to-all")


@settings(max_examples=40, deadline=None)
@given(wide_moves(most=1), st.sampled_from([64, 700, 1 << 20]))
def test_a_holder_sends_each_element_to_other_nodes_once_and_a_node_gets_it_once(move, bucket_bytes):
    source, destination, topology = move
    plan = plan_move(source, destination, topology)
    node, names = topology.node, [spec.name for spec in plan.tensors]
    table = scheduled(plan, CHAIN, bucket_bytes).all_segments
    read = {key: np.zeros_like(values) for key, values in storages(source, None).items()}
    got: dict[tuple[int, int], int] = defaultdict(int)
    for row in range(len(table)):
        src, dst, tensor = int(table.src_rank[row]), int(table.dst_rank[row]), int(table.tensor[row])
        if node[src] == node[dst]:
            continue
        got[node[dst], tensor] += int(table.elements[row])
        if table.src_space[row] == FROM_SOURCE:
            places = table.src_offset[row] + sum(
                np.arange(size).reshape([-1 if at == dim else 1 for at in range(table.shape.shape[1])]) * step
                for dim, (size, step) in enumerate(zip(table.shape[row], table.src_stride[row], strict=True))
            )
            np.add.at(read[src, names[tensor]], np.asarray(places).reshape(-1), 1)
    assert max((int(times.max(initial=0)) for times in read.values()), default=0) <= 1
    wanted: dict[tuple[int, int], int] = defaultdict(int)
    relayed = scheduled(plan, RELAY, 1 << 30).all_segments
    for src, dst, tensor, count in zip(
        relayed.src_rank.tolist(), relayed.dst_rank.tolist(), relayed.tensor.tolist(), relayed.elements.tolist(),
        strict=True,
    ):  # fmt: skip
        if node[src] != node[dst]:
            wanted[node[dst], tensor] += count
    assert got == wanted


def check_loads(schedule: Schedule, executor: str) -> None:
    """The loads against a sum over the segments, one by one."""
    table, size = schedule.all_segments, {index: spec.itemsize for index, spec in enumerate(schedule.tensors)}
    sums: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for row in range(len(table)):
        nbytes = int(table.elements[row]) * size[int(table.tensor[row])]
        key = (int(table.round[row]), int(table.src_rank[row]), int(table.dst_rank[row]))
        padded = -(-nbytes // PART_ALIGN) * PART_ALIGN
        whole = table.src_contiguous[row] and table.dst_contiguous[row] and nbytes >= DIRECT_MIN_BYTES
        if key[1] == key[2]:
            sums[key][0] += nbytes
        elif whole and executor == "send-recv":
            sums[key][:2] = [sums[key][0] + nbytes, sums[key][1] + 1]
        else:
            steps = [sum(np.indices(table.shape[row])[k] * stride[row][k] for k in range(table.shape.shape[1]))
                     for stride in (table.src_stride, table.dst_stride)]  # fmt: skip
            runs = [1 + int((np.diff(where.reshape(-1)) != 1).sum()) for where in steps]
            added = [padded, 0, 1, *runs]
            sums[key] = [before + more for before, more in zip(sums[key], added, strict=True)]
    loads = schedule.loads(executor)
    found = {
        (a, b, c): [size, messages - (segments > 0), segments, *runs]
        for a, b, c, size, messages, segments, *runs in zip(
            *(getattr(loads, name).tolist() for name in ("round", "src", "dst", "bytes", "messages", "pack_segments")),
            *(getattr(loads, name).tolist() for name in ("pack_runs", "unpack_runs")),
            strict=True,
        )
    }
    assert found == dict(sums)


def test_a_block_goes_from_node_to_node_and_inside_each_as_it_passes():
    """One tensor of rank 0 for the two ranks of nodes 1 to 3: stage by stage, in the order 1, 2, 3 or another turn."""
    schedule = scheduled(copies_plan(4, 2, 1), CHAIN)
    table, node = schedule.all_segments, Topology.grid(4, 2).node_array
    assert schedule.rounds == 4 and schedule.buckets == 1
    across = node[table.src_rank] != node[table.dst_rank]
    assert table.stage[across].tolist() == [1, 2, 3] == (table.round[across] + 1).tolist()
    hops = list(zip(table.src_rank[across].tolist(), table.dst_rank[across].tolist(), strict=True))
    assert [hop[0] for hop in hops] == [0, hops[0][1], hops[1][1]]
    assert sorted(node[[hop[1] for hop in hops]].tolist()) == [1, 2, 3]
    assert table.src_space[across].tolist() == [FROM_SOURCE, FROM_DESTINATION, FROM_DESTINATION]
    near = {int(src): (int(stage), int(dst)) for src, stage, dst in
            zip(table.src_rank[~across], table.stage[~across], table.dst_rank[~across], strict=True)}  # fmt: skip
    assert near == {hub: (stage, hub ^ 1) for stage, (_, hub) in enumerate(hops, start=2)}


@pytest.mark.parametrize(("nodes", "tensors"), [(3, 1), (6, 1), (6, 2), (4, 5), (7, 6)])
def test_a_node_forwards_one_bucket_while_it_receives_the_next(nodes: int, tensors: int) -> None:
    """``tensors`` fill a bucket; once all stages run, each round brings every node as much as a bucket holds."""
    size, others = 64 * 32 * 8, nodes - 1
    plan = copies_plan(nodes, 1, 12 * tensors)
    schedule = scheduled(plan, CHAIN, tensors * others * size)
    assert (schedule.buckets, schedule.rounds) == (12, 12 + others - 1)
    loads = schedule.loads("send-recv")
    for number in range(others - 1, 12):
        mine = loads.round == number
        for side, home in ((loads.src, 0), (loads.dst, None)):
            carried = np.bincount(side[mine], weights=loads.bytes[mine], minlength=nodes)
            assert carried.sum() == others * tensors * size
            assert home is None or carried[home] == tensors * size
            assert carried.max() <= tensors * size, number
    direct = scheduled(plan, DIRECT).loads("send-recv")
    assert np.bincount(direct.src, weights=direct.bytes, minlength=nodes)[0] == others * 12 * tensors * size


@pytest.mark.parametrize(("nodes", "count", "holders"), [(4, 30, 1), (4, 1, 3), (5, 8, 2), (9, 16, 1)])
def test_no_node_is_first_or_last_of_all_chains_of_a_bucket(nodes: int, count: int, holders: int) -> None:
    schedule = scheduled(copies_plan(nodes, 3, count, holders, (60, 10)), CHAIN, 1 << 30)
    table, node = schedule.all_segments, Topology.grid(nodes, 3).node_array
    forwards = (node[table.src_rank] != node[table.dst_rank]) & (table.stage > 1)
    sent = np.bincount(node[table.src_rank[forwards]], weights=table.elements[forwards], minlength=nodes)[1:]
    assert sent.sum() == 600 * count * (nodes - 2)
    assert sent.max() == sent.min(), sent


def test_tensors_of_several_classes_in_one_bucket_go_different_ways():
    topology = Topology.grid(4, 1)
    specs = {f"w{k}": TensorSpec(f"w{k}", (60, 10 + k), "int64") for k in range(3)}
    plan = plan_move(zero3_layout(specs, (0,), 4), replicated_layout(specs, (1, 2, 3), 4), topology)
    table = scheduled(plan, CHAIN).all_segments
    assert sorted(table.dst_rank[table.src_rank == 0].tolist()) == [1, 2, 3]


@pytest.mark.parametrize("per", ["rank", "node"])
@pytest.mark.parametrize("tensors", [1, 3, 5, 12])
def test_hubs_of_a_chain_share_what_each_round_brings(per: str, tensors: int) -> None:
    """``tensors`` fill a bucket. In each round the ranks of a node take as many blocks as each other, or one more."""
    topology, specs = Topology.grid(3, 4, per), specs_of(10 * tensors)
    plan = plan_move(zero3_layout(specs, (0,), 12), replicated_layout(specs, range(4, 12), 12), topology)
    schedule = scheduled(plan, CHAIN, 8 * tensors * 64 * 32 * 8)
    assert schedule.buckets == 10
    table, node = schedule.all_segments, topology.node_array
    across = np.flatnonzero(node[table.src_rank] != node[table.dst_rank])
    got = np.zeros((schedule.rounds, 12))
    np.add.at(got, (table.round[across], table.dst_rank[across]), 1)
    for number in range(schedule.rounds):
        for ranks in ((4, 5, 6, 7), (8, 9, 10, 11)):
            assert np.ptp(got[number, ranks]) <= 1, number
    assert got.sum() == 20 * tensors


def test_offers_say_per_route_which_groups_it_carries_in_a_way_of_its_own():
    """Rank 0 holds one tensor for its own node, one for one rank of node 1 and 2 each, one for all of node 1."""
    topology, world = Topology.grid(3, 2), 6
    specs = specs_of(3)
    homes = ((1,), (2, 4), (2, 3))
    parts = [replicated_layout({f"w{k}": specs[f"w{k}"]}, ranks, world, f"on {ranks}") for k, ranks in enumerate(homes)]
    plan = plan_move(zero3_layout(specs, (0,), world), join_layouts(parts, "to"), topology)
    groups = block_groups(plan, topology)
    by_node = {
        (int(c), int(n)): groups.offers[:, k].tolist()
        for k, (c, n) in enumerate(zip(groups.plan_class, groups.node, strict=True))
    }
    near, pair, both = [True, False, False, False], [True, False, False, True], [True, True, True, False]
    assert by_node == {(0, 0): near, (1, 1): pair, (1, 2): pair, (2, 1): both}
    assert {kind.label: kind.routes for kind in groups.classes} == {
        "w0": ("direct",), "w1": ("direct", "chain"), "w2": ("direct", "relay", "spread"),
    }  # fmt: skip
    assert groups.has_choice.tolist() == [kind != near for kind in (by_node[k] for k in sorted(by_node))]
    assert [groups.effective(groups.uniform(code)).tolist() for code in (RELAY, CHAIN)] == [[0, 0, 0, 1], [0, 3, 3, 1]]
    assert groups.candidates == ROUTES
    schedule = build_schedule(plan, topology, groups.uniform(CHAIN))
    assert schedule.rounds == 2 + (schedule.buckets - 1)


def test_groups_with_and_without_a_partner_are_classes_of_their_own():
    """Two halves of one tensor for ranks 2 and 3; rank 4 wants the first of them too."""
    topology, specs = Topology.grid(3, 2), specs_of(1)
    halves = tensor_parallel_layout(specs, {"w0": Cut(0)}, [(2, 3), (4, 5)], 6)
    plan = plan_move(zero3_layout(specs, (0,), 6), restrict_layout(halves, [2, 3, 4]), topology)
    groups = block_groups(plan, topology)
    assert sorted((kind.elements, kind.routes, kind.groups) for kind in groups.classes) == [
        (1024, ("direct",), 1), (1024, ("direct", "chain"), 2),
    ]  # fmt: skip


def test_where_one_node_wants_it_a_chain_is_a_relay_and_is_no_candidate():
    plan = copies_plan(2, 3, 4)
    groups = block_groups(plan, plan.topology)
    assert groups.candidates == tuple(name for name in ROUTES if name != "chain")
    chain, relay = scheduled(plan, CHAIN), scheduled(plan, RELAY)
    assert chain.input_hash == relay.input_hash and chain.rounds == relay.rounds


def test_a_group_whose_partners_go_another_way_is_relayed():
    plan = copies_plan(3, 2, 1)
    groups = block_groups(plan, plan.topology)
    codes = np.asarray([CHAIN, DIRECT], dtype=np.int8)
    assert groups.effective(codes).tolist() == [RELAY, DIRECT]
    one, two = (build_schedule(plan, plan.topology, given) for given in (codes, groups.effective(codes)))
    assert one.input_hash == two.input_hash


def test_a_rank_that_holds_a_region_twice_is_in_two_chains():
    """Rank 2 has two copies, rank 4 two, rank 6 one: two chains, of three nodes and of two."""
    topology, specs = Topology.grid(4, 2), specs_of(1)
    parts = [replicated_layout(specs, [rank], 8, f"copy {k}") for k, rank in enumerate((2, 4, 6))]
    place = parts[0].placements["w0"]
    twice = []
    for rank in (2, 2, 4, 4, 6):
        seen = sum(1 for other, _ in twice if other == rank)
        twice.append((rank, seen * 2048))
    column = np.asarray(twice)
    several = type(place)(
        column[:, 0], np.repeat(place.lo, 5, axis=0), np.repeat(place.shape, 5, axis=0), column[:, 1],
        np.repeat(place.stride, 5, axis=0), {2: 4096, 4: 4096, 6: 2048}, np.arange(5),
    )  # fmt: skip
    copies = Layout("copies", 8, specs, {"w0": several})
    source = zero3_layout(specs, (0,), 8)
    plan = plan_move(source, copies, topology)
    schedule = scheduled(plan, CHAIN)
    whole, moved = whole_tensors(source), storages(copies, None)
    execute(schedule, storages(source, whole), moved)
    for key, expected in storages(copies, whole).items():
        np.testing.assert_array_equal(moved[key], expected)
    table = schedule.all_segments
    assert np.bincount(table.src_rank, minlength=8)[0] == 2 and len(table) == 5


def test_a_plan_of_one_ranks_own_rows_refuses_a_chain_by_name():
    topology, specs = Topology.grid(3, 2), specs_of(2)
    source, copies = zero3_layout(specs, (0,), 6), replicated_layout(specs, range(2, 6), 6)
    plan = plan_move(source, copies, topology, rank=2)
    groups = block_groups(plan, topology)
    assert "chain" not in groups.candidates and not groups.offers[CHAIN].any()
    with pytest.raises(InputError, match=r"route chain hangs on what the other nodes want, .* of rank 2 only"):
        build_schedule(plan, topology, groups.uniform(CHAIN))


def test_every_route_falls_back_to_one_that_stands_before_it():
    for code, name in enumerate(ROUTES):
        assert route_of(code).name == name and ROUTES.index(route_of(code).otherwise) <= code


@pytest.mark.parametrize(
    ("order", "copies"),
    [("aaaaaa", 1), ("abababab", 2), ("abcabcabc", 3), ("aabaab", 3), ("a", 1), ("aba", 2)],
)
def test_tensors_that_follow_each_other_evenly_are_joined_into_one_copy(order: str, copies: int) -> None:
    """Each letter is a class (a shape): its tensors become one copy for every constant step between them."""
    specs = {f"w{k}": TensorSpec(f"w{k}", (8, 4 + ord(kind) - 97), "int64") for k, kind in enumerate(order)}
    plan = plan_move(zero3_layout(specs, (0,), 2), replicated_layout(specs, (1,), 2), Topology.grid(2, 1))
    loads = scheduled(plan, DIRECT, 1 << 30).loads("all-to-all")
    assert loads.pack_segments.tolist() == [len(order)] and loads.copies.tolist() == [copies]
    assert loads.apart().copies.tolist() == [len(order)]
