"""The chain is priced from its loads, and chosen where the holders' NICs bind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from relaymeter.calibration.profiles import Profile
from relaymeter.policies.choose import choose
from relaymeter.policies.price import price_loads
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.placements import replicated_layout, zero3_layout
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.routes import CHAIN, DIRECT, RELAY, block_groups
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.topology import Topology

Profiles = Callable[[str], Profile]
BUCKET = 4 << 20


def copies(topology: Topology, holders: int) -> MovePlan:
    """Twelve matrices of 1 MiB of ``holders`` ranks of node 0, wanted whole by all ranks of the other nodes."""
    specs = {f"w{k}": TensorSpec(f"w{k}", (512, 1024), "bfloat16") for k in range(12)}
    world, width = topology.world_size, len(topology.ranks_of(0))
    return plan_move(
        zero3_layout(specs, range(holders), world), replicated_layout(specs, range(width, world), world), topology
    )


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
@pytest.mark.parametrize(("nodes", "width"), [(3, 2), (4, 1), (9, 1)])
def test_a_holder_behind_a_slow_nic_makes_nodes_forward(
    profile_of: Profiles, nodes: int, width: int, executor: str
) -> None:
    """Relay sends as many copies as there are other nodes through the NICs of node 0, a chain one."""
    profile, topology = profile_of("box"), Topology.grid(nodes, width)
    plan = copies(topology, width)
    found = choose(plan, topology, profile, bucket_bytes=BUCKET, executor=executor, thresholds=False)
    prices = {name: price.total_s for name, price in found.candidates.items()}
    assert set(prices) == {"direct", "relay", "spread", "chain"}
    assert found.name == "chain" and (found.route == CHAIN).all()
    assert found.chosen.total_s == prices["chain"] < min(prices["direct"], prices["relay"], prices["spread"])
    bound = lower_bound(plan, topology, profile.nic_rates(topology), profile.port_rate()).seconds
    assert 1 < prices["chain"] / bound < 2.2 and prices["relay"] / bound > 0.9 * (nodes - 1)
    groups = block_groups(plan, topology)
    loads = build_schedule(plan, topology, groups.uniform(CHAIN), BUCKET).loads(executor)
    assert price_loads(loads, topology, profile, executor).total_s == prices["chain"]


def test_a_chain_is_no_candidate_for_one_other_node(profile_of: Profiles) -> None:
    profile = profile_of("box")
    found = choose(copies(profile.topology, 2), profile.topology, profile, bucket_bytes=BUCKET, executor="send-recv")
    assert "chain" not in found.candidates and not any("chain" in row.prices_s for row in found.classes)
    assert np.isin(found.route, [DIRECT, RELAY, 2]).all()
