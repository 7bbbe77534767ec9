from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from relaymeter.calibration.profiles import Profile
from relaymeter.policies.choose import Choice, choose
from relaymeter.policies.fixed import FIXED_MIN_RELAY, FIXED_MIN_SPLIT, fixed_route
from relaymeter.policies.price import Pricer
from relaymeter.policies.thresholds import threshold_route
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.placements import Cut, replicated_layout, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.routes import DIRECT, RELAY, ROUTES, SPREAD, block_groups
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.topology import Topology

Profiles = Callable[[str], Profile]
BUCKET = 4 << 20


def plan(topology: Topology, tensor_parallel: int, rows: int = 1024, layers: int = 6) -> MovePlan:
    """ZeRO-3 on node 0 to replicas of ``tensor_parallel`` ranks on node 1: large weights, and norms of 1,024."""
    specs = {}
    for layer in range(layers):
        specs[f"model.layers.{layer}.up.weight"] = TensorSpec(
            f"model.layers.{layer}.up.weight", (rows, 1024), "bfloat16"
        )
        specs[f"model.layers.{layer}.norm.weight"] = TensorSpec(
            f"model.layers.{layer}.norm.weight", (1024,), "bfloat16"
        )
    cuts = {name: Cut(0, None) if name.endswith("up.weight") else Cut(None, None) for name in specs}
    there = topology.ranks_of(1)
    replicas = [list(there[k : k + tensor_parallel]) for k in range(0, len(there), tensor_parallel)]
    before = zero3_layout(specs, topology.ranks_of(0), topology.world_size)
    after = tensor_parallel_layout(specs, cuts, replicas, topology.world_size, "tp")
    return plan_move(before, after, topology)


def decide(profile: Profile, move: MovePlan, executor: str = "send-recv", topology: Topology | None = None) -> Choice:
    return choose(move, topology or profile.topology, profile, bucket_bytes=BUCKET, executor=executor)


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
@pytest.mark.parametrize("name", ["box", "shared box"])
def test_slow_nics_make_replicas_fetch_each_block_once(profile_of: Profiles, name: str, executor: str) -> None:
    profile = profile_of(name)
    found = decide(profile, plan(profile.topology, 1), executor)
    groups = block_groups(plan(profile.topology, 1), profile.topology)
    large = groups.elements * groups.itemsize > 1 << 18
    assert set(found.route[large & groups.has_choice].tolist()) <= {RELAY, SPREAD}
    assert found.chosen.total_s < 0.6 * found.candidates["direct"].total_s
    assert found.chosen.total_s <= min(price.total_s for price in found.candidates.values()) * (1 + found.error)


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
def test_a_network_as_fast_as_the_node_is_used_direct(profile_of: Profiles, executor: str) -> None:
    profile = profile_of("unshaped")
    found = decide(profile, plan(profile.topology, 1), executor)
    assert found.name == "direct" and (found.route == DIRECT).all()
    assert found.chosen.total_s == found.candidates["direct"].total_s
    largest = max(row.elements for row in found.classes)
    for table in (found.min_relay, found.min_split):
        assert all(limit.elements is None or limit.elements > largest for limit in table.values())


def test_without_a_choice_everything_is_direct(profile_of: Profiles) -> None:
    profile = profile_of("box")
    found = decide(profile, plan(profile.topology, 2))
    rows = {row.label: row for row in found.classes if row.fanout == 1}
    assert rows and all(row.route is None and list(row.prices_s) == ["direct"] for row in rows.values())
    assert found.name in (*ROUTES, "mixed")


def test_prices_are_those_of_the_schedules(profile_of: Profiles) -> None:
    from relaymeter.policies.price import price_loads

    profile = profile_of("box")
    move = plan(profile.topology, 1)
    found = decide(profile, move)
    loads = build_schedule(move, profile.topology, found.route, BUCKET).loads("send-recv")
    again = price_loads(loads, profile.topology, profile, "send-recv")
    assert again.total_s == found.chosen.total_s
    fixed = build_schedule(move, profile.topology, fixed_route(block_groups(move, profile.topology)), BUCKET)
    assert price_loads(fixed.loads("send-recv"), profile.topology, profile, "send-recv").total_s == found.fixed.total_s
    assert found.regret_fixed_s == pytest.approx(found.fixed.total_s - found.chosen.total_s)


def test_the_rule_with_the_thresholds_found_is_priced_beside_todays(profile_of: Profiles) -> None:
    profile = profile_of("box")
    move = plan(profile.topology, 1)
    found = decide(profile, move)
    groups = block_groups(move, profile.topology)
    codes = threshold_route(groups, found.min_relay, found.min_split)
    loads = build_schedule(move, profile.topology, codes, BUCKET).loads("send-recv")
    assert found.found is not None and not found.extrapolated and found.beyond == ()
    assert found.found.total_s == Pricer(profile, profile.topology, "send-recv").price(loads).total_s
    larger = decide(profile, plan(Topology.grid(3, 2), 1), topology=Topology.grid(3, 2))
    assert larger.extrapolated and "the measured 2 nodes x 2 ranks, 4 NICs" in larger.beyond[0]


def test_every_class_has_a_row_with_prices_above_its_bound(profile_of: Profiles) -> None:
    profile = profile_of("box")
    move = plan(profile.topology, 1)
    found = decide(profile, move)
    assert len(found.classes) == len(block_groups(move, profile.topology).classes)
    for row in found.classes:
        assert row.route in ROUTES and set(row.prices_s) <= set(ROUTES) and "direct" in row.prices_s
        assert all(price >= row.bound_s * 0.97 for price in row.prices_s.values())
        assert row.to_dict()["label"] == row.label
    norm = next(row for row in found.classes if "norm" in row.label)
    assert norm.label == "model.layers.*.norm.weight" and norm.tensors == 6


def test_a_choice_is_the_same_each_time_and_never_worse_than_its_error_allows(profile_of: Profiles) -> None:
    profile = profile_of("gpus")
    move = plan(profile.topology, 2, rows=4096)
    one, two = decide(profile, move), decide(profile, move)
    assert np.array_equal(one.route, two.route) and one.chosen.total_s == two.chosen.total_s
    best = min([*(price.total_s for price in one.candidates.values()), one.fixed.total_s])
    assert one.chosen.total_s <= best / (1 - one.error)


def test_the_constants_of_today() -> None:
    assert (FIXED_MIN_RELAY, FIXED_MIN_SPLIT) == (65_536, 65_536)
    topology = Topology.grid(2, 2)
    groups = block_groups(plan(topology, 1), topology)
    codes = fixed_route(groups)
    assert set(codes[groups.elements >= 65_536].tolist()) == {SPREAD}
    assert set(codes[groups.elements < 65_536].tolist()) == {DIRECT}


def test_many_classes_each_too_small_to_tell_are_chosen_together(profile_of: Profiles) -> None:
    """200 classes that go direct alone, as a second stage is a round more, and by relay where they share rounds."""
    profile = profile_of("gpus")
    topology = profile.topology
    specs = {f"w{k}": TensorSpec(f"w{k}", (24_576 + 16 * k,), "bfloat16") for k in range(200)}
    source = zero3_layout(specs, topology.ranks_of(0), topology.world_size)
    target = replicated_layout(specs, topology.ranks_of(1), topology.world_size)
    move = plan_move(source, target, topology)
    found = choose(move, topology, profile, bucket_bytes=BUCKET, executor="send-recv")
    direct = found.candidates["direct"]
    assert found.cheapest is not None and found.cheapest.total_s == direct.total_s > found.chosen.total_s
    assert all(min(row.prices_s, key=lambda name: row.prices_s[name]) == "direct" for row in found.classes)
    assert found.name == "relay" and found.chosen.total_s == found.candidates["relay"].total_s
    assert found.chosen.total_s < found.candidates["direct"].total_s * (1 - found.error)
