from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaymeter.calibration.links import alike, classify_ratio, join, link_classes, link_warnings, with_nics
from relaymeter.calibration.patterns import cross_pairs, in_node_pairs, matrix_of, random_matrix, turn
from relaymeter.relayout.topology import Topology


def test_two_rates_give_two_classes() -> None:
    topology = Topology.grid(2, 2)
    rates = {(r, q): 1e9 if r // 2 == q // 2 else 48e6 for r, q in itertools.permutations(range(4), 2)}
    slow, fast = link_classes(rates, topology)
    assert (slow.in_node, slow.cross_node, fast.in_node, fast.cross_node) == (0, 8, 4, 0)
    assert link_warnings((slow, fast)) == []


def test_data_that_disagree_with_the_topology_are_reported() -> None:
    topology = Topology.grid(2, 2)
    one = link_classes({pair: 1e9 for pair in itertools.permutations(range(4), 2)}, topology)
    assert "one rate" in link_warnings(one)[0]
    odd = {(0, 2): 48e6, (1, 3): 12e6}
    assert "2 classes (12, 48 MB/s)" in link_warnings(link_classes(odd, topology))[0]


@pytest.mark.parametrize(
    ("ratio", "control", "shared"),
    [(0.5, 1.0, True), (0.98, 1.0, False), (0.7, 1.0, None), (0.5, 0.55, None), (0.5, 0.76, True), (0.9, 0.6, False)],
)
def test_the_verdict_on_two_flows(ratio: float, control: float, shared: bool | None) -> None:
    assert classify_ratio(0, 1, ratio, control).shared is shared


@given(st.integers(1, 16), st.integers(1, 6), st.integers(0, 1000))
def test_ranks_that_share_a_nic_are_joined_with_few_tests(ranks: int, nics: int, seed: int) -> None:
    nic = [(rank * 7 + seed) % nics for rank in range(ranks)]
    tests = []

    def same(one: int, two: int) -> bool:
        tests.append((one, two))
        return nic[one] == nic[two]

    groups = join(range(ranks), same)
    assert sorted(rank for group in groups for rank in group) == list(range(ranks))
    assert all(len({nic[rank] for rank in group}) == 1 for group in groups)
    assert len(groups) == len(set(nic)) and len(tests) <= ranks * nics


def test_nodes_declared_alike_must_be_found_alike() -> None:
    assert alike(Topology.grid(2, 2), {0: [[0, 1]], 1: [[2, 3]]})
    assert not alike(Topology.grid(2, 2), {0: [[0, 1]], 1: [[2], [3]]})
    mixed = Topology(node=(0, 0, 1, 1), nic=(0, 0, 1, 2))
    assert alike(mixed, {0: [[0, 1]], 1: [[2], [3]]})


def test_nics_found_on_one_node_stand_for_nodes_like_it() -> None:
    hint = Topology.grid(3, 2)
    assert with_nics(hint, {0: [[0, 1]]}).nic == (0, 0, 1, 1, 2, 2)
    assert with_nics(hint, {0: [[0], [1]], 1: [[2], [3]], 2: [[4], [5]]}) is hint
    assert with_nics(Topology.grid(2, 2, "node"), {0: [[0], [1]]}).nic == (0, 1, 2, 3)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(4, 32))
def test_sampled_pairs_are_of_their_kind_and_not_too_many(nodes: int, ranks: int, most: int) -> None:
    topology = Topology.grid(nodes, ranks)
    for pairs, crosses in ((in_node_pairs(topology, most), False), (cross_pairs(topology, most), True)):
        assert len(pairs) <= most and len(set(pairs)) == len(pairs)
        assert all((topology.node[r] != topology.node[q]) is crosses and r != q for r, q in pairs)
    if nodes > 1:
        assert cross_pairs(topology, most)


def test_turn_gives_every_rank_one_peer_to_send_to_and_another_to_receive_from() -> None:
    flows = turn(Topology.grid(2, 4), 0, 1, 100)
    assert sorted(src for src, _, _ in flows) == sorted(dst for _, dst, _ in flows) == list(range(8))
    assert not {(r, q) for r, q, _ in flows} & {(q, r) for r, q, _ in flows}
    assert turn(Topology.grid(2, 1), 0, 1, 100) == []


@given(st.integers(0, 10_000))
def test_random_matrices_send_nothing_to_oneself(seed: int) -> None:
    import numpy as np

    topology = Topology.grid(2, 3)
    flows = random_matrix(topology, np.random.default_rng(seed), 1 << 20, 1 << 24)
    matrix = matrix_of(flows, 6)
    assert matrix.trace() == 0 and (matrix % 16 == 0).all()
    assert int(matrix.sum()) == sum(flow[2] for flow in flows)
