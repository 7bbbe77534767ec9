from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_choose import plan

from relaymeter.calibration.profiles import ExecutorProfile, Profile
from relaymeter.errors import InputError
from relaymeter.policies import thresholds
from relaymeter.policies.price import Pricer
from relaymeter.policies.thresholds import (
    BATCH_BLOCKS,
    Batch,
    Threshold,
    batch_loads,
    batch_seconds,
    find_thresholds,
    possible_fanouts,
    threshold_route,
)
from relaymeter.relayout.routes import DIRECT, RELAY, SPREAD, block_groups
from relaymeter.relayout.topology import Topology

Profiles = Callable[[str], Profile]


def find(profile: Profile, *fanouts: int, executor: str = "send-recv", itemsize: int = 2):  # type: ignore[no-untyped-def]
    return find_thresholds(
        profile, profile.topology, executor, fanouts=fanouts, bucket_bytes=8 << 20, itemsize=itemsize
    )


def with_segment_cost(profile: Profile, segment_s: float) -> Profile:
    """The same cluster with slower packing of segments, in the fit and in every replicate."""
    found = profile.executors["send-recv"]

    def slower(costs):  # type: ignore[no-untyped-def]
        return replace(
            costs,
            pack=replace(costs.pack, segment_s=segment_s),
            unpack=replace(costs.unpack, segment_s=segment_s),
        )

    changed = ExecutorProfile(slower(found.costs), tuple(map(slower, found.replicates)), found.intervals)
    return replace(profile, executors={"send-recv": changed})


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
def test_slow_nics_relay_from_small_blocks_on(profile_of: Profiles, executor: str) -> None:
    relay, split = find(profile_of("box"), 2, executor=executor)
    for limit in (relay[2], split[2]):
        assert limit.elements is not None and limit.elements < 65_536 // 16
        assert limit.low is not None and limit.high is not None
        assert limit.low <= limit.elements <= limit.high


def test_an_unshaped_network_never_relays(profile_of: Profiles) -> None:
    relay, split = find(profile_of("unshaped"), 2)
    for limit in (relay[2], split[2]):
        assert limit.elements is None and limit.high is None
        assert limit.to_dict() == {"elements": None, "low": limit.low, "high": None}


@pytest.mark.parametrize(
    ("gains", "place"),
    [
        ((0.5, 0.5, -0.1, 0.01, 0.02), None),  # what it gains beyond the last losing size is within the error
        ((0.5, 0.5, -0.1, 0.01, 0.04), 2),
        ((0.01, 0.01, 0.01, 0.01, 0.01), None),
        ((0.01, 0.01, 0.01, 0.01, 0.04), 0),
        ((0.5, 0.5, 0.5, 0.5, -0.1), None),
        ((-0.1, -0.1, 0.5, 0.5, 0.5), 1),
    ],
)
def test_a_threshold_stands_on_what_is_gained_above_it(gains: tuple[float, ...], place: int | None) -> None:
    sizes = len(thresholds._SIZES)
    direct = np.ones(sizes)
    other = direct - np.concatenate([gains, np.full(sizes - len(gains), gains[-1])])
    found = thresholds._crossing(direct, other, 0.03)
    if place is None:
        assert found == float("inf")
    else:
        assert thresholds._SIZES[place] <= found < thresholds._SIZES[place + 1]


def test_the_rule_with_other_constants_goes_by_the_ranks_a_node(profile_of: Profiles) -> None:
    topology = profile_of("gpus").topology
    groups = block_groups(plan(topology, 2), topology)
    assert set(groups.fanout.tolist()) == {2, 4}
    relay = {2: Threshold(2, 1, 1, 1), 4: Threshold(4, None, None, None)}
    split = {2: Threshold(2, 4096, 1, None), 4: Threshold(4, 1, 1, 1)}
    codes = threshold_route(groups, relay, split)
    assert set(codes[groups.fanout == 4].tolist()) == {SPREAD}
    large = groups.elements >= 4096
    assert set(codes[(groups.fanout == 2) & large].tolist()) == {SPREAD}
    assert set(codes[(groups.fanout == 2) & ~large].tolist()) <= {RELAY}
    assert (threshold_route(groups, {}, {}) == DIRECT).all()


def test_thresholds_rise_with_the_cost_of_a_segment(profile_of: Profiles) -> None:
    limits = []
    for segment_s in (1e-6, 1e-5, 1e-4):
        _, split = find(with_segment_cost(profile_of("box"), segment_s), 2)
        limits.append(split[2].elements or 1 << 40)
    assert limits[0] < limits[1] < limits[2]


def test_thresholds_count_elements(profile_of: Profiles) -> None:
    profile = with_segment_cost(profile_of("box"), 1e-5)
    (_, two), (_, four) = find(profile, 2, itemsize=2), find(profile, 2, itemsize=4)
    assert two[2].elements is not None and four[2].elements is not None
    assert two[2].elements == pytest.approx(2 * four[2].elements, rel=0.02)


def test_the_predicted_side_wins_below_and_above_the_threshold(profile_of: Profiles) -> None:
    profile = with_segment_cost(profile_of("box"), 2e-5)
    _, split = find(profile, 2)
    limit = split[2].elements
    assert limit is not None
    batch = Batch((0, 1), (2, 3), 8 << 20)
    sizes = [limit * 2 // 4 // 16 * 16, limit * 2 * 4 // 16 * 16]
    seconds = batch_seconds(Pricer(profile, profile.topology, "send-recv"), batch_loads(batch, sizes, "send-recv"))
    assert seconds[0, 0] < seconds[2, 0] and seconds[2, 1] < seconds[0, 1]


def test_more_destination_ranks_relay_earlier(profile_of: Profiles) -> None:
    relay, _ = find(profile_of("gpus"), 2, 4)
    assert relay[2].elements is not None and relay[4].elements is not None
    assert relay[4].elements < relay[2].elements


@given(
    st.sampled_from([(2, 2), (4, 2), (2, 4), (8, 8)]),
    st.integers(4, 28),
    st.sampled_from([1 << 20, 8 << 20, 256 << 20]),
)
def test_batches_keep_their_bytes_on_every_route(shape: tuple[int, int], power: int, bucket: int) -> None:
    sources, ranks = shape
    batch = Batch(tuple(range(sources)), tuple(range(sources, sources + ranks)), bucket)
    size = 1 << power
    found = batch_loads(batch, [size], "all-to-all")
    blocks, piece, buckets = batch.cut(size)
    assert blocks * piece * int(found.buckets[0]) >= BATCH_BLOCKS * size
    assert blocks * piece * (int(buckets) - 1) <= BATCH_BLOCKS * size
    loads = found.loads
    into = [np.bincount(loads.dst[loads.round == k], weights=loads.bytes[loads.round == k]).sum() for k in range(7)]
    distinct = blocks * piece
    assert into[0] == pytest.approx(distinct * ranks)
    assert into[1] == pytest.approx(distinct) and into[3] == pytest.approx(distinct * (ranks - 1))
    assert into[2] == pytest.approx(into[1] + into[3])
    if piece % (16 * ranks) == 0:
        assert into[4] == pytest.approx(distinct) and into[6] == pytest.approx(distinct * (ranks - 1))


def test_fanouts_of_a_topology() -> None:
    assert possible_fanouts(Topology.grid(2, 2)) == (2,)
    assert possible_fanouts(Topology.grid(16, 8)) == (2, 4, 8)
    assert possible_fanouts(Topology.grid(2, 6)) == (2, 4, 6)
    assert possible_fanouts(Topology.grid(4, 1)) == ()


def test_a_single_node_has_no_thresholds_and_too_many_ranks_are_refused(profile_of: Profiles) -> None:
    profile = profile_of("box")
    assert find_thresholds(profile, Topology.grid(1, 4), "send-recv", fanouts=(2,), bucket_bytes=1 << 20) == ({}, {})
    with pytest.raises(InputError, match="3 destination ranks"):
        find(profile, 3)
