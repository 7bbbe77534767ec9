"""The policy object and its file: what was chosen comes back, and what was not chosen goes by the thresholds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_choose import decide, plan

import relaymeter
from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.policies.choose import choose
from relaymeter.policies.policy import Policy, make_policy
from relaymeter.policies.policy_file import load_policy, policies_text, save_policies
from relaymeter.policies.replicas import Rates
from relaymeter.policies.thresholds import Threshold
from relaymeter.relayout.routes import ROUTES, block_groups
from relaymeter.relayout.topology import Topology

Profiles = Callable[[str], Profile]
GRID = Topology.grid(2, 2)
NOW = "2026-01-02T03:04:05+00:00"
MOVES = {"tp1": 1, "tp2": 2}


_MADE: dict[tuple[str, str], Policy] = {}


def policy_of(profile: Profile, *executors: str) -> list[Policy]:
    """Policies of two moves; each is made once for a profile and executor."""
    for executor in executors or ("send-recv",):
        if (profile.sha256, executor) not in _MADE:
            _MADE[profile.sha256, executor] = make_policy(
                "two moves", profile,
                {name: decide(profile, plan(profile.topology, degree), executor) for name, degree in MOVES.items()},
                executor=executor, created_utc=NOW,
            )  # fmt: skip
    return [_MADE[profile.sha256, executor] for executor in executors or ("send-recv",)]


def by_hand(**changes: Any) -> Policy:
    """Thresholds of 1,000 and 4,000 elements of 2 bytes for 2 ranks, 300 and never for 4; no class is known."""
    relay = {2: Threshold(2, 1000, 900, 1100), 4: Threshold(4, 300, 200, 400)}
    split = {2: Threshold(2, 4000, 3000, None), 4: Threshold(4, None, 70_000, None)}
    usual = Policy(
        scenario="by hand", executor="send-recv", topology=Topology.grid(2, 4), rates=Rates({}, None), moves=(),
        itemsize=2, bucket_bytes=1 << 20, relay=relay, split=split, error=0.03, error_matrices=6, extrapolated=False,
        profile={"sha256": "ab" * 32, "machine_id": "m", "created_utc": NOW}, profile_mismatch=(), simulated=None,
        created_utc=NOW,
    )  # fmt: skip
    return replace(usual, **changes)


@pytest.mark.parametrize("name", ["box", "gpus"])
def test_a_plan_that_was_priced_gets_the_routes_that_were_chosen(profile_of: Profiles, name: str) -> None:
    profile = profile_of(name)
    (policy,) = policy_of(profile)
    for move, degree in MOVES.items():
        made = plan(profile.topology, degree)
        groups = block_groups(made, profile.topology)
        assert np.array_equal(policy.routes(groups, move=move), decide(profile, made).route)
        for row in next(one for one in policy.moves if one.name == move).classes:
            if row.route is not None:
                block = (row.elements, row.itemsize, row.fanout)
                assert policy.route(*block, label=row.label, move=move) == row.route
    assert policy.chosen_s == pytest.approx(sum(move.chosen_s for move in policy.moves))
    assert policy.fixed_constants_s - policy.chosen_s == pytest.approx(sum(m.regret_fixed_s for m in policy.moves))


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_other_blocks_go_by_the_thresholds(elements: int, itemsize: int, fanout: int) -> None:
    nbytes = elements * itemsize
    expected = "direct"
    if fanout >= 4:
        expected = "relay" if nbytes >= 600 else "direct"
    elif fanout >= 2:
        expected = "spread" if nbytes >= 8000 else "relay" if nbytes >= 2000 else "direct"
    assert by_hand().route(elements, itemsize, fanout) == expected


def test_thresholds_of_a_fanout_that_was_not_priced_are_those_of_the_next_smaller_one() -> None:
    policy = by_hand()
    assert [policy.min_relay(fanout) for fanout in (1, 2, 3, 4, 8)] == [None, 1000, 1000, 300, 300]
    assert [policy.min_split(fanout) for fanout in (1, 2, 3, 4, 8)] == [None, 4000, 4000, None, None]
    assert [policy.min_relay(2, itemsize) for itemsize in (1, 2, 4, 3)] == [2000, 1000, 500, 667]
    assert policy.priced_fanouts == (2, 4)
    assert [policy.nearest_fanout(fanout) for fanout in (1, 2, 3, 4, 8)] == [None, 2, 2, 4, 4]
    for block in ((-1, 2, 2), (8, 0, 2), (8, 2, 0)):
        with pytest.raises(InputError, match="give at least 0, 1, 1"):
            policy.route(*block)


def test_a_class_of_equal_blocks_goes_by_the_route_that_carries_most_of_their_bytes(profile_of: Profiles) -> None:
    (policy,) = policy_of(profile_of("box"))
    row = next(row for row in policy.moves[0].classes if row.route is not None)
    block = (row.elements, row.itemsize, row.fanout)
    few, many = (
        replace(row, label=f"w{size}", route=route, bytes=size) for size, route in ((1, "direct"), (9, "spread"))
    )
    mixed = replace(policy, moves=(replace(policy.moves[0], classes=(few, many)),))
    assert mixed.route(*block) == "spread" and mixed.route(*block, label="w1") == "direct"
    assert mixed.route(*block, label="another") == "spread"
    assert mixed.route(*block, label="w1", move="another") == "direct"
    assert mixed.route(*block, label="another", move=mixed.moves[0].name) == "spread"


def test_a_policy_file_gives_back_what_was_written(profile_of: Profiles, tmp_path: Path) -> None:
    policies = policy_of(profile_of("box"), "send-recv", "all-to-all")
    path = tmp_path / "policy.json"
    save_policies(policies, path)
    assert relaymeter.load_policy(path) == policies[0] and isinstance(policies[0], relaymeter.Policy)
    assert load_policy(str(path), "all-to-all") == policies[1]
    document = json.loads(path.read_text())
    assert document["profile"]["sha256"] == profile_of("box").sha256 and document["simulated"] is None
    assert set(document["executors"]["send-recv"]["min_relay"]) == {"2"}
    assert all(set(row["prices_s"]) <= set(ROUTES) for row in document["executors"]["send-recv"]["moves"][0]["classes"])
    with pytest.raises(InputError, match="exists"):
        save_policies(policies, path)
    with pytest.raises(InputError, match="no executor 'ring', only send-recv, all-to-all"):
        load_policy(path, "ring")


def test_what_is_no_intact_policy_is_refused(tmp_path: Path) -> None:
    text = policies_text([by_hand()])
    path = tmp_path / "policy.json"
    for changed, message in (
        (text.replace('"elements": 1000', '"elements": 1'), "was edited after it was written"),
        (text.replace('"schema_version": 2', '"schema_version": 9'), "schema_version 9, this version reads 2"),
        (text.replace('"port_bytes_per_s": null', '"port_bytes_per_s": 1e999'), r"rates.port_bytes_per_s: 1e999 is no"),
        (text.replace('"kind": "policy"', '"kind": "profile"'), "is no policy: make one with relaymeter choose --out"),
        ("[]", "is no policy"),
        ("{", "is not valid JSON"),
    ):
        path.write_text(changed)
        with pytest.raises(InputError, match=message):
            load_policy(path)
    with pytest.raises(InputError, match="cannot read policy"):
        load_policy(tmp_path / "none.json")


def test_a_file_keeps_its_default_executor_and_an_edit_of_their_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    save_policies([by_hand(executor="all-to-all"), by_hand(executor="send-recv")], path)
    assert load_policy(path).executor == "all-to-all"
    document = json.loads(path.read_text())
    document["executors"] = dict(reversed(document["executors"].items()))
    path.write_text(json.dumps(document))
    for executor in (None, "send-recv"):
        with pytest.raises(InputError, match=r"edited after it was written .the order of executors"):
            load_policy(path, executor)


def test_an_unknown_route_in_a_file_is_named(profile_of: Profiles, tmp_path: Path) -> None:
    (policy,) = policy_of(profile_of("box"))
    move = policy.moves[0]
    odd = replace(policy, moves=(replace(move, classes=(replace(move.classes[0], route="detour"),)),))
    path = tmp_path / "policy.json"
    save_policies([odd], path)
    with pytest.raises(InputError, match="route 'detour' is not one of direct, relay"):
        load_policy(path)


def test_a_selector_of_the_policy_charges_a_direct_block_for_every_rank(profile_of: Profiles) -> None:
    (policy,) = policy_of(profile_of("box"))
    assert policy.replica_selector is not policy.replica_selector
    assert policy.replica_selector.choice == "priced" and policy.selector("node").choice == "node"
    with pytest.raises(InputError, match="unknown replica choice"):
        policy.selector("best")


def test_without_a_move_or_its_thresholds_there_is_no_policy(profile_of: Profiles) -> None:
    bare = choose(plan(GRID, 1), GRID, profile_of("box"), bucket_bytes=1 << 22, executor="send-recv", thresholds=False)
    with pytest.raises(InputError, match="without thresholds"):
        make_policy("bare", profile_of("box"), {"tp1": bare}, executor="send-recv", created_utc=NOW)
    with pytest.raises(InputError, match="at least one move"):
        make_policy("nothing", profile_of("box"), {}, executor="send-recv", created_utc=NOW)


def test_loading_a_policy_imports_no_torch(tmp_path: Path) -> None:
    save_policies([by_hand()], tmp_path / "policy.json")
    script = (
        "import sys, relaymeter\nbefore = [n for n in sys.modules if n.startswith('relaymeter.')]\n"
        "policy = relaymeter.load_policy(sys.argv[1])\n"
        "heavy = sorted({'torch', 'deepspeed'} & set(sys.modules))\n"
        "print(before, policy.min_relay(2), heavy, 'Policy' in dir(relaymeter))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "policy.json")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[] 1000 [] True"
    with pytest.raises(AttributeError, match="no attribute 'load_polici'"):
        _ = relaymeter.load_polici  # type: ignore[attr-defined]
