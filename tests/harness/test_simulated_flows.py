"""Flows share resources max-min fairly, and end when hand calculation says so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaymeter.harness.simulated_flows import FlowNetwork, Flows, fair_rates

RESOURCES = 6


@st.composite
def networks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Paths (n, 3) over resources 1..6 (0 stands for none), capacities and caps."""
    count = draw(st.integers(1, 12))
    path = st.lists(st.integers(0, RESOURCES), min_size=3, max_size=3).filter(any)
    use = np.asarray([sorted(set(draw(path)) - {0}) + [0] * 3 for _ in range(count)], dtype=object)
    rows = np.asarray([list(row)[:3] for row in use], dtype=np.int64)
    capacity = np.asarray([np.inf, *(draw(st.sampled_from([1.0, 2.0, 3.0, 7.0, 50.0])) for _ in range(RESOURCES))])
    cap = np.asarray([draw(st.sampled_from([0.5, 1.0, 4.0, np.inf])) for _ in range(count)])
    return rows, capacity, cap


@settings(deadline=None, max_examples=60)
@given(networks())
def test_every_flow_is_at_its_cap_or_has_a_full_resource_on_which_no_flow_is_faster(
    network: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """A feasible allocation is max-min fair exactly if every flow has such a bottleneck."""
    use, capacity, cap = network
    rate = fair_rates(use, capacity, cap)
    carried = np.zeros(len(capacity))
    fastest = np.zeros(len(capacity))
    for flow, path in enumerate(use.tolist()):
        for resource in set(path) - {0}:
            carried[resource] += rate[flow]
            fastest[resource] = max(fastest[resource], rate[flow])
    assert (carried[1:] <= capacity[1:] * (1 + 1e-9)).all()
    assert (rate <= cap * (1 + 1e-12)).all() and (rate > 0).all()
    for flow, path in enumerate(use.tolist()):
        tight = [
            resource
            for resource in set(path) - {0}
            if carried[resource] >= capacity[resource] * (1 - 1e-6) and rate[flow] >= fastest[resource] * (1 - 1e-6)
        ]
        assert tight or rate[flow] >= cap[flow] * (1 - 1e-9), (flow, rate, carried)


def _flows(paths: list[list[int]], sizes: list[float]) -> Flows:
    return Flows(np.asarray(paths), np.full(len(paths), np.inf), np.asarray(sizes, dtype=float), np.zeros(0))


CAPACITY = np.asarray([np.inf, 1.0, 1.0])


@pytest.mark.parametrize(
    ("paths", "sizes", "starts", "ends"),
    [
        ([[1, 0], [1, 0]], [1, 3], [0, 0], [2, 4]),  # half each, then the longer one alone
        ([[1, 0], [1, 0]], [2, 2], [0, 1], [3, 4]),  # one begins while the other is under way
        ([[1, 0], [2, 0]], [2, 3], [0, 0.5], [2, 3.5]),  # nothing shared
        ([[1, 2], [1, 0], [2, 0]], [1, 1, 1], [0, 0, 0], [2, 2, 2]),
        ([[1, 2], [1, 0], [1, 0]], [1, 1, 5], [0, 0, 20], [2, 2, 25]),  # a gap in which nothing moves
    ],
)
@pytest.mark.parametrize("resolution", [0.0, 0.005])
def test_flows_end_when_hand_calculation_says(
    paths: list[list[int]], sizes: list[float], starts: list[float], ends: list[float], resolution: float
) -> None:
    found = FlowNetwork(CAPACITY, resolution=resolution).run(
        _flows(paths, sizes), [(at, flow) for flow, at in enumerate(starts)]
    )
    assert found.tolist() == pytest.approx(ends, rel=2 * resolution + 1e-9)


def test_flows_that_others_start_by_ending_follow_them() -> None:
    """A relay: the second flow starts half a second after the first has ended."""
    flows = _flows([[1, 0], [2, 0]], [2, 3])
    found = FlowNetwork(CAPACITY).run(
        flows, [(1.0, 0)], lambda done, at: [(float(at[0]) + 0.5, 1)] if 0 in done.tolist() else []
    )
    assert found.tolist() == pytest.approx([3.0, 6.5])
    never = FlowNetwork(CAPACITY).run(flows, [(1.0, 0)])
    assert np.isnan(never[1])


def test_a_resource_with_incast_carries_less_where_flows_meet() -> None:
    network = FlowNetwork(CAPACITY, np.asarray([0.0, 0.3, 0.0]))
    use, cap, extra = np.asarray([[1]] * 3), np.full(3, np.inf), np.zeros(0)
    assert network.rates(use[:1], cap[:1], extra).sum() == pytest.approx(1.0)
    assert network.rates(use[:2], cap[:2], extra).sum() == pytest.approx(0.85)
    assert network.rates(use, cap, extra).sum() == pytest.approx(0.8)


def test_flows_that_share_nothing_end_exactly_whatever_the_resolution() -> None:
    rng = np.random.default_rng(7)
    start, size = rng.uniform(0, 2, 20), rng.uniform(50, 100, 20)
    flows = Flows(np.arange(1, 21)[:, None], np.full(20, np.inf), size, np.zeros(0))
    network = FlowNetwork(np.concatenate([[np.inf], np.ones(20)]), resolution=0.01)
    found = network.run(flows, list(zip(start.tolist(), range(20), strict=True)))
    assert found.tolist() == pytest.approx((start + size).tolist())


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_the_resolution_moves_the_end_of_all_by_about_as_much(seed: int) -> None:
    rng = np.random.default_rng(seed)
    use = np.column_stack([rng.integers(1, 9, 60), rng.integers(9, 17, 60)])
    capacity = np.concatenate([[np.inf], rng.uniform(1, 2, 16)])
    flows = Flows(use, np.full(60, np.inf), rng.uniform(1, 10, 60), np.zeros(0))
    starts = [(float(at), flow) for flow, at in enumerate(rng.uniform(0, 3, 60))]
    exact, quick = (FlowNetwork(capacity, resolution=share).run(flows, starts) for share in (0.0, 0.005))
    assert quick.max() == pytest.approx(exact.max(), rel=0.03)
