"""Replica choices, through DeepSpeed's own ``plan_transfer`` and through this package's planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaymeter.errors import InputError
from relaymeter.policies.replicas import REPLICA_CHOICES, Rates, ReplicaSelector, holder_preference, rows_by
from relaymeter.relayout.holders import Hits
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import replicated_layout
from relaymeter.relayout.plan_check import check_plan
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.topology import Topology

GRID = Topology.grid(3, 2)
RATES = Rates({nic: 50e6 for nic in range(6)}, 1e9)


@dataclass(frozen=True)
class Candidate:
    source_rank: int


@dataclass(frozen=True)
class Request:
    target_rank: int
    candidates: tuple[Candidate, ...]
    logical_origin: tuple[int, ...] = (0,)
    shape: tuple[int, ...] = (1 << 20,)


def ask(selector: ReplicaSelector, target: int, *sources: int, origin: int = 0, size: int = 1 << 20) -> int:
    return selector(Request(target, tuple(Candidate(rank) for rank in sources), (origin,), (size,)))


def transfer(selector: Any, sources: Sequence[int], targets: Sequence[int], tensors: int = 1) -> list[tuple[int, int]]:
    """Which rank reads from which, by DeepSpeed's planner: whole copies on ``sources`` and on ``targets``."""
    affine = pytest.importorskip("deepspeed.checkpoint.affine_transfer")
    from relaymeter.relayout.affine import to_affine_map

    found = []
    for number in range(tensors):
        spec = TensorSpec(f"w{number}", (64, 32), "bfloat16")
        have, wanted = (
            replicated_layout({spec.name: spec}, ranks, GRID.world_size).placements[spec.name]
            for ranks in (sources, targets)
        )
        plan = affine.plan_transfer(to_affine_map(spec, wanted), to_affine_map(spec, have), replica_selector=selector)
        assert plan.moved_elements == 64 * 32 * len(targets)
        found += [(segment.source_rank, segment.target_rank) for segment in plan.segments]
    return found


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ("target", {(1, 1), (0, 3), (0, 4)}),
        ("node", {(1, 1), (2, 3), (0, 4)}),
        ("order", {(0, 1), (0, 3), (0, 4)}),
        ("least-loaded", {(1, 1), (2, 3), (0, 4)}),
        ("priced", {(1, 1), (2, 3), (0, 4)}),
    ],
)
def test_plan_transfer_reads_from_the_holders_that_the_choice_names(choice: str, read: set[tuple[int, int]]) -> None:
    """Ranks 0, 1 (node 0) and 2 (node 1) hold it; 1 needs it as well, 3 is beside 2, 4 beside none of them."""
    assert set(transfer(ReplicaSelector(choice, GRID, RATES), (0, 1, 2), (1, 3, 4))) == read


@pytest.mark.parametrize("choice", ["least-loaded", "priced"])
def test_tensors_of_one_move_are_shared_among_their_holders(choice: str) -> None:
    selector = ReplicaSelector(choice, GRID, RATES)
    read = transfer(selector, (0, 1), (4,), tensors=6)
    assert sorted(source for source, _ in read) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("choice", REPLICA_CHOICES)
def test_ranks_of_a_node_read_a_region_of_another_node_from_one_holder(choice: str) -> None:
    read = transfer(ReplicaSelector(choice, GRID, RATES), (0, 1, 2, 3), (4, 5), tensors=5)
    for first, second in zip(read[::2], read[1::2], strict=True):
        assert first[0] == second[0] and (first[1], second[1]) == (4, 5)


def test_the_price_gives_a_slow_nic_its_share_and_no_more() -> None:
    rates = Rates({**RATES.nic, 0: 25e6}, 1e9)
    selector = ReplicaSelector("priced", Topology.grid(6, 1), rates)
    served = [ask(selector, 2 + k % 4, 0, 1, origin=k) for k in range(30)]
    assert served.count(0) == 10 and served.count(1) == 20


def test_the_price_leaves_a_busy_neighbour_for_an_idle_node() -> None:
    """In-node ports are only three times as fast as the NICs: of the regions, one in four comes from another node."""
    selector = ReplicaSelector("priced", GRID, Rates(RATES.nic, 150e6))
    served = [ask(selector, 3, 2, 4, origin=k) for k in range(40)]
    assert served.count(4) == 10
    near = ReplicaSelector("node", GRID, Rates(RATES.nic, 150e6))
    assert {ask(near, 3, 2, 4, origin=k) for k in range(40)} == {2}


def test_the_price_counts_a_nic_that_ranks_share_once() -> None:
    shared = Topology(node=(0, 0, 1, 2), nic=(0, 0, 1, 2))
    selector = ReplicaSelector("priced", shared, Rates({0: 50e6, 1: 50e6, 2: 50e6}, 1e9))
    served = [ask(selector, 3, 0, 1, 2, origin=k, size=1 << 16) for k in range(30)]
    # All arrive through NIC 2; of those that leave, half leave through the NIC of ranks 0 and 1, half through rank 2's.
    assert served.count(2) == 15


@pytest.mark.parametrize(("once", "served"), [(True, 0), (False, 1)])
def test_what_is_relayed_loads_a_nic_once_and_what_goes_direct_for_every_rank(once: bool, served: int) -> None:
    selector = ReplicaSelector("priced", GRID, RATES, travels_once=lambda elements: once)
    assert [ask(selector, rank, 0) for rank in (3, 2)] == [0, 0]  # one region, crossing once or twice
    ask(selector, 4, 1, origin=1, size=3 << 19)  # one and a half regions
    assert ask(selector, 5, 0, 1, origin=2, size=64) == served


def test_a_further_layout_is_asked_last_and_the_callers_order_before_the_rank() -> None:
    world = GRID.world_size
    assert ask(ReplicaSelector("node", GRID, RATES), 5, 1, world + 0) == 1
    assert ask(ReplicaSelector("order", GRID, RATES), 0, world + 0, 3) == 3
    wish = [1, 1, 0, 1, 1, 1]
    assert ask(ReplicaSelector("order", GRID, RATES, order=wish), 5, 0, 1, 2) == 2
    assert ask(ReplicaSelector("target", GRID, RATES, order=wish), 5, 0, 1, 2) == 2
    assert ask(ReplicaSelector("order", GRID, RATES, order=wish), 0, 0, 2) == 2


def test_what_is_no_choice_no_rank_and_no_rate_is_refused() -> None:
    with pytest.raises(InputError, match="unknown replica choice 'nearest': valid: target, node, order"):
        ReplicaSelector("nearest", GRID, RATES)
    with pytest.raises(InputError, match="unknown replica choice"):
        holder_preference("nearest", GRID, RATES)
    with pytest.raises(InputError, match="order has 2 entries, the topology 6 ranks"):
        ReplicaSelector("order", GRID, RATES, order=[0, 1])
    with pytest.raises(InputError, match="no payload rate for NIC 5"):
        ReplicaSelector("priced", GRID, replace(RATES, nic={nic: 1e6 for nic in range(5)}))
    with pytest.raises(InputError, match="rank 6 is not one of 6 ranks"):
        ask(ReplicaSelector("node", GRID, RATES), 6, 0, 1)


def layouts(topology: Topology, sources: Sequence[int], targets: Sequence[int], tensors: int = 3) -> list[Layout]:
    specs = {f"w{k}": TensorSpec(f"w{k}", (512 + 64 * k, 512), "bfloat16") for k in range(tensors)}
    return [replicated_layout(specs, ranks, topology.world_size) for ranks in (sources, targets)]


def planned(choice: str, topology: Topology, rates: Rates, have: Layout, wanted: Layout) -> MovePlan:
    plan = plan_move(have, wanted, topology, rows_of=rows_by(choice, topology, rates))
    check_plan(plan, (have,), wanted, topology)  # fills every destination, each element once
    return plan


def sent(plan: MovePlan, world: int) -> np.ndarray:
    """Bytes by pair (world, world)."""
    found = np.zeros((world, world))
    for one in plan.classes:
        size = np.prod(one.shape, axis=1) * one.itemsize * len(one.tensors)
        np.add.at(found, (one.src_rank, one.dst_rank), size)
    return found


@settings(max_examples=50)
@given(
    st.sampled_from(REPLICA_CHOICES),
    st.sets(st.integers(0, 5), min_size=1).map(sorted),
    st.sets(st.integers(0, 5), min_size=1).map(sorted),
)
def test_every_choice_makes_a_plan_that_fills_its_destination(
    choice: str, sources: list[int], targets: list[int]
) -> None:
    have, wanted = layouts(GRID, sources, targets, tensors=2)
    flows = sent(planned(choice, GRID, RATES, have, wanted), 6)
    assert set(np.flatnonzero(flows.sum(axis=1)).tolist()) <= set(sources)
    if choice != "order":  # what a rank has it does not fetch
        at_home = [rank for rank in targets if rank in sources]
        assert all(flows[rank, rank] == flows[:, rank].sum() for rank in at_home)
    if choice in ("node", "least-loaded"):
        node = GRID.node_array
        for rank in set(targets) - set(sources):
            near = [src for src in sources if node[src] == node[rank]]
            assert not near or flows[near, rank].sum() == flows[:, rank].sum()


def test_the_default_of_the_planner_is_the_choice_by_node() -> None:
    have, wanted = layouts(GRID, (0, 1, 2), (1, 3, 4, 5))
    usual = sent(plan_move(have, wanted, GRID), 6)
    assert (usual == sent(planned("node", GRID, RATES, have, wanted), 6)).all()


def test_the_planner_by_price_leaves_out_a_nic_that_would_hold_the_others_up() -> None:
    topology = Topology.grid(4, 1)
    have, wanted = layouts(topology, (0, 1, 2), (3,))
    slow = Rates({0: 50e6, 1: 1e6, 2: 50e6, 3: 200e6}, None)
    flows = sent(planned("priced", topology, slow, have, wanted), 4)
    assert flows[1, 3] == 0 and flows[0, 3] == pytest.approx(flows[2, 3], rel=0.05)
    even = sent(planned("priced", topology, Rates(dict.fromkeys(range(4), 50e6), None), have, wanted), 4)
    assert even[:3, 3] == pytest.approx(even[:3, 3].mean(), rel=0.05)


def test_levels_of_one_region_by_hand() -> None:
    """Ranks 0 and 2 hold what 3 (beside 2) and 4 want: 2 serves 3, and both serve 4 unless 2's NIC is slow."""
    columns = [[0, 2, 0, 2], [0] * 4, [3, 3, 4, 4], [7] * 4, [1 << 20] * 4]
    hits = Hits(*(np.asarray(column) for column in columns))
    assert holder_preference("priced", GRID, RATES)(hits).tolist() == [5, 1, 2, 2]
    slow = Rates({**RATES.nic, 2: 1e6, 4: 100e6}, 1e9)
    assert holder_preference("priced", GRID, slow)(hits).tolist() == [5, 1, 2, 5]
    assert holder_preference("target", GRID, RATES)(hits).tolist() == [1, 1, 1, 1]
    assert holder_preference("order", GRID, RATES)(hits).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("other", "levels"), [(10e6, [2, 2, 5]), (20e6, [2, 2, 2])])
def test_holders_that_share_a_nic_are_no_faster_together(other: float, levels: list[int]) -> None:
    """Ranks 0 and 1 have one NIC of 50 MB/s. A third of 1 MiB takes rank 2's NIC longer than all of it takes theirs at
    10 MB/s, and less long than that at 20 MB/s."""
    topology = Topology(node=(0, 0, 1, 2), nic=(0, 0, 1, 2))
    hits = Hits(*(np.asarray(column) for column in ([0, 1, 2], [0] * 3, [3] * 3, [0] * 3, [1 << 20] * 3)))
    assert holder_preference("priced", topology, Rates({0: 50e6, 1: other, 2: 1e9}, 1e9))(hits).tolist() == levels


def test_regions_of_one_move_and_classes_after_each_other_load_the_links_together() -> None:
    """Rank 0 alone holds region 0, ranks 0 and 2 region 1: rank 0 is busy with the first, also one class later."""
    topology = Topology.grid(4, 1)
    rates = Rates(dict.fromkeys(range(4), 50e6), None)
    one = Hits(
        *(np.asarray(column) for column in ([0, 0, 2], [0] * 3, [3, 1, 1], [0, 1, 1], [4 << 20, 1 << 20, 1 << 20]))
    )
    prefer = holder_preference("priced", topology, rates)
    assert prefer(one).tolist() == [2, 5, 2]
    two = Hits(*(np.asarray(column) for column in ([0, 2], [0] * 2, [1] * 2, [0] * 2, [1 << 20] * 2)))
    assert prefer(two).tolist() == [5, 2]
    assert holder_preference("priced", topology, rates)(two).tolist() == [2, 2]


def test_small_regions_go_to_ranks_of_one_node_from_one_holder_elsewhere_and_in_turn_from_near_ones() -> None:
    specs = {f"w{k}": TensorSpec(f"w{k}", (8 + k,), "bfloat16") for k in range(12)}
    topology = Topology.grid(2, 4)
    have, wanted = (replicated_layout(specs, ranks, topology.world_size) for ranks in ((0, 1), (2, 3, 4, 5)))
    for choice in ("node", "priced"):
        plan = planned(choice, topology, Rates(dict.fromkeys(range(8), 50e6), 1e9), have, wanted)
        served: dict[int, list[int]] = {}
        for one in plan.classes:
            for src, dst in sorted(zip(one.src_rank.tolist(), one.dst_rank.tolist(), strict=True)):
                served.setdefault(dst, []).append(src)
        assert served[4] == served[5] and set(served[4]) == {0, 1}
        assert served[2] != served[3]
