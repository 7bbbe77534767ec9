from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from synthetic import Cluster

from relaymeter.calibration.calibrate import calibrate_cluster
from relaymeter.calibration.cells import Wrong
from relaymeter.calibration.patterns import matrix_of
from relaymeter.calibration.recorder import Settings
from relaymeter.errors import DigestMismatch, NothingMeasured
from relaymeter.policies.price import Pricer, flow_loads
from relaymeter.relayout.topology import Topology

GRID = Topology.grid(2, 2)
FULL = Settings(replicates=2)
SHORT = dataclasses.replace(Settings.short(), replicates=2)


def test_one_nic_per_rank_is_recovered() -> None:
    profile = calibrate_cluster(Cluster(GRID).instruments(), GRID, settings=FULL)
    assert profile.topology == GRID
    assert all(profile.nic_rate(nic) == pytest.approx(48e6, rel=0.03) for nic in range(4))
    assert profile.port_rate() == pytest.approx(1e9, rel=0.03)
    for name in ("send-recv", "all-to-all"):
        costs = profile.costs(name)
        assert costs.overlap > 0.9
        assert costs.pack.segment_s == pytest.approx(4e-6, rel=0.03)
        assert costs.unpack.byte_s == pytest.approx(1 / 3e9, rel=0.03)
        assert costs.cross_node is not None and costs.cross_node.two_way < 0.1
        assert (Pricer(profile, GRID, name).matrix_errors < 0.03).all()
    assert costs.floor_s == pytest.approx(5e-5, rel=0.05)
    assert profile.costs("send-recv").in_node.message_s == pytest.approx(2e-5, rel=0.1)  # type: ignore[union-attr]


def test_a_nic_shared_by_a_node_is_found_against_the_launchers_word() -> None:
    shared = Topology.grid(2, 2, "node")
    profile = calibrate_cluster(Cluster(shared).instruments(), GRID, settings=FULL)
    assert profile.topology == shared
    assert any("NICs: the launcher says 2 + 2" in text for text in profile.warnings)
    assert profile.nic_rate(0) == pytest.approx(48e6, rel=0.03)
    assert all(found.shared for found in profile.sharing)


def test_separate_nics_are_found_against_the_launchers_word() -> None:
    profile = calibrate_cluster(Cluster(GRID).instruments(), Topology.grid(2, 2, "node"), settings=FULL)
    assert profile.topology == GRID


@pytest.mark.parametrize("nics", [1, 2, 4])
def test_nics_of_larger_nodes(nics: int) -> None:
    nic = tuple(node * nics + rank * nics // 4 for node in range(3) for rank in range(4))
    truth = Topology(node=tuple(node for node in range(3) for _ in range(4)), nic=nic)
    profile = calibrate_cluster(Cluster(truth).instruments(), Topology.grid(3, 4), executors=("send-recv",))
    assert profile.topology.nic == truth.nic


def test_a_slow_nic_is_seen_in_its_own_rate() -> None:
    profile = calibrate_cluster(Cluster(GRID, slow_nics={3: 24e6}).instruments(), GRID, settings=FULL)
    assert [profile.nic_rate(nic) for nic in range(4)] == pytest.approx([48e6, 48e6, 48e6, 24e6], rel=0.04)


def test_half_duplex_pairs_are_found_for_the_executor_that_has_them() -> None:
    profile = calibrate_cluster(Cluster(GRID, half_duplex={"all-to-all": True}).instruments(), GRID, settings=FULL)
    there, here = profile.costs("all-to-all").cross_node, profile.costs("send-recv").cross_node
    assert there is not None and there.two_way == pytest.approx(1.0, abs=0.1)
    assert here is not None and here.two_way < 0.1


def test_several_flows_that_fill_a_nic_where_one_does_not() -> None:
    cluster = Cluster(Topology.grid(2, 4), nic_rate=50e9, port_rate=300e9, flow_rate=30e9, cross_latency_s=2e-5)
    profile = calibrate_cluster(cluster.instruments(), cluster.topology, executors=("all-to-all",), settings=FULL)
    assert profile.nic_rate(0) == pytest.approx(50e9, rel=0.05)
    link = profile.costs("all-to-all").cross_node
    assert link is not None and link.curve.plateau_rate == pytest.approx(30e9, rel=0.05)


def test_a_nic_carries_as_much_under_an_executor_whose_lone_flow_does_not_fill_it() -> None:
    cluster = Cluster(GRID, nic_rate=1e9, flow_rates={"send-recv": 0.4e9}, cross_latency_s=2e-5)
    profile = calibrate_cluster(cluster.instruments(), GRID, settings=FULL)
    two_flows, one_flow = (profile.nic_rate(0, executor) for executor in ("send-recv", "all-to-all"))
    assert (two_flows, one_flow) == pytest.approx((0.8e9, 1e9), rel=0.05)
    assert profile.nic_rate(0) == max(two_flows, one_flow)


def test_a_node_that_limits_its_nics_is_not_taken_for_a_crowded_cluster() -> None:
    topology = Topology.grid(2, 4)
    cluster = Cluster(topology, nic_rate=1e9, node_rate=2.5e9, cross_latency_s=2e-5)
    profile = calibrate_cluster(cluster.instruments(), topology, executors=("send-recv",), settings=FULL)
    link = profile.costs("send-recv").cross_node
    assert link is not None and link.node == pytest.approx(4 / 2.5, rel=0.05)
    assert all(factor < 1.05 for factor in link.crowd.values())


def test_peers_that_answer_hold_up_what_is_sent_to_them() -> None:
    cluster = Cluster(GRID, exchange=0.8)
    profile = calibrate_cluster(cluster.instruments(), GRID, executors=("send-recv",), settings=FULL)
    link = profile.costs("send-recv").cross_node
    assert link is not None and link.exchange == pytest.approx(0.8, abs=0.05)
    assert link.two_way == link.turn == 0
    pricer = Pricer(profile, GRID, "send-recv")
    one, two = [(0, 2, 8 << 20)], [(0, 2, 4 << 20), (0, 3, 4 << 20)]
    pair, several = (
        pricer.price(flow_loads([*flows, *((q, r, size) for r, q, size in flows)])).total_s for flows in (one, two)
    )
    assert pair == pytest.approx((8 << 20) / 48e6, rel=0.03)
    assert several == pytest.approx(1.8 * (8 << 20) / 48e6, rel=0.03)


def test_what_a_lone_call_takes_beyond_one_of_a_series() -> None:
    cluster = Cluster(GRID, isolated_s=3e-4, noise=0.01)
    profile = calibrate_cluster(cluster.instruments(), GRID, executors=("send-recv",), settings=FULL)
    costs = profile.costs("send-recv")
    assert costs.start_s == pytest.approx(3e-4, rel=0.2)
    assert costs.in_node is not None and costs.in_node.curve.seconds[0] == pytest.approx(1.5e-4, rel=0.1)


def test_ranks_that_wait_for_cores_they_share() -> None:
    cluster = Cluster(GRID, busy_s=1e-3)
    profile = calibrate_cluster(cluster.instruments(), GRID, executors=("send-recv",), settings=FULL)
    assert profile.costs("send-recv").busy_s == pytest.approx(1e-3, rel=0.05)
    small, large = ([(rank, (rank + 2) % 4, size) for rank in range(4)] for size in (16, 4 << 20))
    pricer = Pricer(profile, GRID, "send-recv")
    for flows in (small, large):  # the wait hides behind wires
        wanted = cluster.seconds(matrix_of(flows, 4).astype(float), "send-recv")
        assert pricer.price(flow_loads(flows), in_series=True).total_s == pytest.approx(wanted, rel=0.05)


def test_a_machine_that_limits_everything_is_not_taken_for_a_shared_nic() -> None:
    cluster = Cluster(GRID, nic_rate=1e9, machine_rate=1.2e9, cross_latency_s=1e-4, noise=0.01)
    profile = calibrate_cluster(cluster.instruments(), GRID, settings=FULL)
    assert profile.topology == GRID
    assert any("one rate" in text for text in profile.warnings)
    link = profile.costs("send-recv").cross_node
    assert link is not None and dict(link.crowd) == {
        1: 1.0,
        2: pytest.approx(2 / 1.2, rel=0.05),
        4: pytest.approx(4 / 1.2, rel=0.05),
    }


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (1, 4), (2, 1), (4, 1), (5, 3)])
def test_any_shape_of_world(nodes: int, ranks: int) -> None:
    topology = Topology.grid(nodes, ranks)
    profile = calibrate_cluster(Cluster(topology).instruments(), topology, settings=SHORT)
    costs = profile.costs("send-recv")
    assert (costs.in_node is None) == (ranks == 1) and (costs.cross_node is None) == (nodes == 1)
    assert profile.topology == topology
    assert bool(profile.nic_rates(topology)) == (nodes > 1)


def test_a_large_cluster_is_sampled_not_swept() -> None:
    topology = Topology.grid(16, 8)
    cluster = Cluster(topology, nic_rate=50e9, port_rate=300e9, cross_latency_s=2e-5, near_latency_s=1e-5)
    settings = dataclasses.replace(SHORT, matrices=0)
    profile = calibrate_cluster(cluster.instruments(), topology, executors=("all-to-all",), settings=settings)
    assert profile.topology == topology and cluster.calls < 300


@pytest.mark.parametrize(("settings", "limit"), [(FULL, 75.0), (SHORT, 25.0)])
def test_the_box_is_calibrated_within_its_budget(settings: Settings, limit: float) -> None:
    profile = calibrate_cluster(Cluster(GRID, noise=0.05).instruments(), GRID, settings=settings)
    assert profile.spent_s < limit
    assert not any("budget" in text for text in profile.warnings)


def test_a_spent_budget_says_what_was_left_out_and_still_prices() -> None:
    profile = calibrate_cluster(Cluster(GRID).instruments(), GRID, settings=Settings(budget_s=1.0, replicates=2))
    assert any("the budget of 1 s was spent before" in text for text in profile.warnings)
    assert profile.nic_rate(0) == pytest.approx(48e6, rel=0.03)


def test_a_world_of_one_rank_measures_nothing() -> None:
    with pytest.raises(NothingMeasured, match="world of one rank"):
        calibrate_cluster(Cluster(Topology.grid(1, 1)).instruments(), Topology.grid(1, 1), settings=FULL)


def test_a_link_that_alters_bytes_has_no_rate() -> None:
    cluster = Cluster(GRID, wrong=(Wrong(0, 2, 7), Wrong(1, 3, 5)))
    with pytest.raises(DigestMismatch, match=r"12 bytes arrived wrong, 7 of them from rank 0 to rank 2"):
        calibrate_cluster(cluster.instruments(), GRID, settings=FULL)


def test_one_message_size_only_is_no_calibration() -> None:
    instruments = dataclasses.replace(Cluster(GRID).instruments(), largest_bytes=2048)
    with pytest.raises(NothingMeasured, match="two message sizes"):
        calibrate_cluster(instruments, GRID)


def test_progress_never_goes_back() -> None:
    seen: list[tuple[float, str]] = []

    def note(fraction: float, text: str) -> None:
        seen.append((fraction, text))

    calibrate_cluster(Cluster(GRID, noise=0.1).instruments(), GRID, settings=SHORT, progress=note)
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and all(text for _, text in seen)
    again = [text for _, text in seen if text.startswith("epoch")]
    assert again[0] == "epoch 2, in another order" and len(again) <= 12


def test_the_declared_rate_is_held_against_the_measured_one() -> None:
    facts: dict[str, Any] = {"cluster": {"nic_rate_bytes_per_s": 40e6}}
    profile = calibrate_cluster(Cluster(GRID).instruments(), GRID, fingerprint=facts, settings=FULL)
    gate = next(gate for gate in profile.gates if gate.name.startswith("payload rate"))
    assert not gate.passed and gate.value == pytest.approx(1.2, rel=0.03)
    assert any("gate missed: payload rate" in text for text in profile.warnings)
