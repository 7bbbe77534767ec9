"""The lower bound counts a region once for the node that serves it, however many nodes want it."""

from __future__ import annotations

import pytest

from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.placements import Cut, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.topology import Topology

TOPOLOGY = Topology.grid(3, 1)
SPECS = {f"w{i}": TensorSpec(f"w{i}", (512, 256), "bfloat16") for i in range(4)}
NBYTES = sum(spec.nbytes for spec in SPECS.values())


def one_to_two_nodes() -> MovePlan:
    """ZeRO-3 on node 0 to a whole copy on each of nodes 1 and 2."""
    copies = tensor_parallel_layout(SPECS, dict.fromkeys(SPECS, Cut(0)), [(1,), (2,)], 3)
    return plan_move(zero3_layout(SPECS, (0,), 3), copies, TOPOLOGY)


@pytest.mark.parametrize(
    ("send_rate", "seconds", "bound_by"),
    [
        (1.5e6, NBYTES / 1e6, "node 1 receive"),
        (1e6, NBYTES / 1e6, "node 1 receive"),
        (0.5e6, NBYTES / 0.5e6, "node 0 send"),
    ],
)
def test_a_region_for_two_nodes_is_sent_once_in_the_bound(send_rate: float, seconds: float, bound_by: str) -> None:
    found = lower_bound(one_to_two_nodes(), TOPOLOGY, {0: send_rate, 1: 1e6, 2: 1e6}, None)
    assert found.seconds == pytest.approx(seconds)
    assert found.bound_by == bound_by
