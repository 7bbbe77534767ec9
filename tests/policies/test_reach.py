"""Which limits of what was measured a price passes, and what missed gates mean for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from relaymeter.calibration.profiles import Gate, Profile
from relaymeter.policies.price import Pricer, flow_loads
from relaymeter.policies.reach import gates_note, limits_passed, shape_text
from relaymeter.relayout.topology import Topology

Profiles = Callable[[str], Profile]


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
def test_the_limit_that_was_passed_is_named_where_a_price_is_extrapolated(profile_of: Profiles, executor: str) -> None:
    profile = profile_of("box")
    costs = profile.costs(executor)
    assert costs.cross_node is not None and costs.in_node is not None
    most = max(costs.cross_node.curve.largest, costs.in_node.curve.largest)
    for flow, where in (((0, 2), "between nodes"), ((0, 1), "inside nodes")):
        for nbytes, passed in ((1 << 16, False), (4 * most, True)):
            loads = flow_loads([(*flow, nbytes)])
            price = Pricer(profile, profile.topology, executor).price(loads)
            found = limits_passed(loads, profile.topology, profile, executor)
            assert price.extrapolated == bool(found) == passed
            if passed:
                assert found[0].startswith("loads of ") and f" {where}, measured to " in found[0]


def test_a_load_is_told_in_the_bytes_that_the_price_is_made_of(profile_of: Profiles) -> None:
    """Two flows of 40 MB out of one NIC are a load of 80 MB; of another topology nothing was measured."""
    profile = profile_of("box")
    (found,) = limits_passed(
        flow_loads([(0, 2, 40_000_000), (0, 3, 40_000_000)]), profile.topology, profile, "send-recv"
    )
    load = float(found.split()[2])
    assert load == pytest.approx(80, rel=0.06) and found.split()[3] == "MB"
    (other,) = limits_passed(flow_loads([(0, 2, 1000)]), Topology.grid(3, 2), profile, "send-recv")
    assert other == "another topology than the measured 2 nodes x 2 ranks, 4 NICs"
    assert shape_text(Topology(node=(0, 0, 1), nic=(0, 1, 2))) == "ranks by node [2, 1]"


def test_missed_gates_are_counted_and_the_worst_is_named(profile_of: Profiles) -> None:
    profile = profile_of("box")
    gates = (Gate("a", 0.1, 0.2), Gate("b", 0.3, 0.2), Gate("c", 0.5, 0.1), Gate("d", None, 0.1))
    assert gates_note(replace(profile, gates=gates)) == (
        "this profile missed 3 of 4 gates (worst: c: 0.5, limit 0.1): prices and thresholds are rough"
    )
    assert gates_note(replace(profile, gates=gates[:1])) is None
    assert gates_note(replace(profile, gates=gates[3:])) == (
        "this profile missed 1 of 1 gate (worst: d: not measured): prices and thresholds are rough"
    )
