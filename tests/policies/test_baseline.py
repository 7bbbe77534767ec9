"""The five-line model on loads whose times are sums done by hand."""

from __future__ import annotations

import pytest

from relaymeter.errors import InputError
from relaymeter.policies.baseline import five_line_seconds
from relaymeter.policies.price import flow_loads
from relaymeter.relayout.topology import Topology


def test_the_fullest_nic_of_either_direction_binds() -> None:
    topology = Topology.grid(2, 2)
    rates = {0: 100.0, 1: 100.0, 2: 50.0, 3: 100.0}
    loads = flow_loads([(0, 2, 200), (1, 2, 300), (0, 1, 4000)])
    # NIC 2 receives 500 bytes at 50 a second; rank 0 sends 4000 inside its node at 1000 a second.
    assert five_line_seconds(loads, topology, rates, 1000.0, 0.5) == pytest.approx(10.5)
    assert five_line_seconds(loads, topology, rates, 200.0, 0.5) == pytest.approx(20.5)
    assert five_line_seconds(loads, topology, rates, None, 0.0) == pytest.approx(10.0)


def test_ranks_of_one_nic_share_it_and_copies_within_a_rank_are_free() -> None:
    shared = Topology.grid(2, 2, "node")
    loads = flow_loads([(0, 2, 300), (1, 3, 300), (1, 1, 10**9)])
    assert five_line_seconds(loads, shared, {0: 100.0, 1: 200.0}, 1e3, 0.0) == pytest.approx(6.0)


def test_a_nic_without_a_rate_is_named() -> None:
    with pytest.raises(InputError, match="NIC 1"):
        five_line_seconds(flow_loads([(0, 1, 8)]), Topology.grid(2, 1), {0: 1.0}, None, 0.0)
