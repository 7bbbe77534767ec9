from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import Cluster

from relaymeter.calibration.patterns import matrix_of, random_matrix
from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.policies.price import Pricer, flow_loads, price_loads
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology

EXECUTORS = ("send-recv", "all-to-all")
GRID = Topology.grid(2, 2)
Profiles = Callable[[str], Profile]

flow = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.integers(1, 1 << 26))
flows = st.lists(flow, min_size=1, max_size=20)


def loads_of(rows: list[tuple[int, int, int, int]], packed: bool = True) -> RoundLoads:
    """Rows (round, src, dst, bytes), merged by pair as a schedule has them; every one in a single segment."""
    merged: dict[tuple[int, int, int], list[int]] = {}
    for number, src, dst, size in rows:
        entry = merged.setdefault((number, src, dst), [0, 0])
        entry[0] += size
        entry[1] += 1
    key = np.asarray(sorted(merged), dtype=np.int64).reshape(-1, 3)
    value = np.asarray([merged[tuple(k)] for k in key.tolist()], dtype=np.int64).reshape(-1, 2)
    away = (key[:, 1] != key[:, 2]).astype(np.int64)
    size, count = value[:, 0], value[:, 1]
    pack = size * away * packed
    return RoundLoads(
        rounds=3,
        round=key[:, 0],
        src=key[:, 1],
        dst=key[:, 2],
        bytes=size,
        messages=away,
        pack_bytes=pack,
        pack_segments=count * away * packed,
        unpack_bytes=pack,
        unpack_segments=count * away * packed,
        pack_runs=count * away * packed,
        unpack_runs=count * away * packed,
        copies=count * away * packed,
    )


@pytest.mark.parametrize("name", ["box", "half duplex", "unshaped"])
@pytest.mark.parametrize("executor", EXECUTORS)
@settings(max_examples=60)
@given(rows=flows, more=st.integers(1, 1 << 24), which=st.integers(0, 19))
def test_more_bytes_never_cost_less(
    profile_of: Profiles, name: str, executor: str, rows: list[tuple[int, int, int, int]], more: int, which: int
) -> None:
    profile = profile_of(name)
    place = which % len(rows)
    number, src, dst, size = rows[place]
    grown = [*rows[:place], (number, src, dst, size + more), *rows[place + 1 :]]
    before = price_loads(loads_of(rows), profile.topology, profile, executor)
    after = price_loads(loads_of(grown), profile.topology, profile, executor)
    assert np.isfinite(before.total_s) and before.total_s > 0
    assert after.total_s >= before.total_s * (1 - 1e-12)
    assert 0 < before.low_s < before.total_s < before.high_s


@pytest.mark.parametrize("name", ["box", "shared box"])
@pytest.mark.parametrize("executor", EXECUTORS)
@settings(max_examples=60)
@given(rows=flows)
def test_no_price_beats_the_rates_that_bounds_are_made_of(
    profile_of: Profiles, name: str, executor: str, rows: list[tuple[int, int, int, int]]
) -> None:
    profile = profile_of(name)
    loads = loads_of(rows)
    price = price_loads(loads, profile.topology, profile, executor)
    node, nic = profile.topology.node_array, profile.topology.nic_array
    far = node[loads.src] != node[loads.dst]
    near = ~far & (loads.src != loads.dst)
    rate = profile.port_rate(executor)
    assert rate is not None
    for end in (loads.src, loads.dst):
        for port, moved in enumerate(np.bincount(nic[end[far]], weights=loads.bytes[far]).tolist()):
            assert price.total_s >= moved / profile.nic_rate(port) * (1 - 1e-12)
        for moved in np.bincount(end[near], weights=loads.bytes[near]).tolist():
            assert price.total_s >= moved / rate * (1 - 1e-12)
    assert price.rounds_s.sum() == pytest.approx(price.total_s)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("size", [64, 1024, 65536, 1 << 20, 1 << 24, 1 << 27])
def test_the_price_is_continuous_in_bytes(profile_of: Profiles, executor: str, size: int) -> None:
    profile = profile_of("half duplex")
    near = [
        price_loads(
            loads_of([(0, 0, 2, size + step), (0, 2, 0, size), (0, 1, 3, 4 * size), (1, 2, 3, size + step)]),
            profile.topology,
            profile,
            executor,
        ).total_s
        for step in (0, 1, 2)
    ]
    assert near[2] - near[0] <= 1e-3 * near[0] + 2 * 2 / 1e6


def test_flows_share_a_nic_fairly_however_large_they_are(profile_of: Profiles) -> None:
    profile = profile_of("eight GPUs")
    per_byte = []
    for size in (1 << 34, 1 << 40, 1 << 44):
        flows = [(0, 4, size), (0, 5, size // 2), (1, 5, size // 4), (1, 4, size // 2)]
        per_byte.append(price_loads(flow_loads(flows), profile.topology, profile, "send-recv").total_s / size)
    assert per_byte == pytest.approx([per_byte[0]] * 3, rel=0.01)


def test_a_shared_nic_is_priced_once_and_separate_ones_side_by_side(profile_of: Profiles) -> None:
    size = 8 << 20
    both = loads_of([(0, 0, 2, size), (0, 1, 3, size)], packed=False)
    apart = price_loads(both, Topology.grid(2, 2), profile_of("box"), "send-recv")
    shared = price_loads(both, Topology.grid(2, 2, "node"), profile_of("shared box"), "send-recv")
    assert apart.total_s == pytest.approx(size / 48e6, rel=0.03)
    assert shared.total_s == pytest.approx(2 * size / 48e6, rel=0.03)


def test_half_duplex_pairs_pay_for_both_directions(profile_of: Profiles) -> None:
    size = 8 << 20
    both = loads_of([(0, 0, 2, size), (0, 2, 0, size)], packed=False)
    full = price_loads(both, Topology.grid(2, 2), profile_of("box"), "all-to-all")
    half = price_loads(both, Topology.grid(2, 2), profile_of("half duplex"), "all-to-all")
    assert full.total_s == pytest.approx(size / 48e6, rel=0.03)
    assert half.total_s == pytest.approx(2 * size / 48e6, rel=0.05)


def test_stages_that_overlap_cost_the_longer_one(profile_of: Profiles) -> None:
    profile = profile_of("box")
    cross, near = (0, 0, 2, 4 << 20), (0, 3, 2, 16 << 20)
    alone = price_loads(loads_of([cross], packed=False), profile.topology, profile, "send-recv").total_s
    both = price_loads(loads_of([cross, near], packed=False), profile.topology, profile, "send-recv").total_s
    assert both == pytest.approx(alone, rel=0.05)


def test_rounds_add_up_and_the_breakdown_names_the_parts(profile_of: Profiles) -> None:
    profile = profile_of("box")
    one = [(0, 0, 2, 4 << 20)]
    three = [(number, 0, 2, 4 << 20) for number in range(3)]
    first = price_loads(loads_of(one), profile.topology, profile, "send-recv")
    whole = price_loads(loads_of(three), profile.topology, profile, "send-recv")
    assert whole.rounds_s.sum() == pytest.approx(whole.total_s)
    assert 2.5 * first.total_s < whole.total_s <= 3 * first.total_s
    assert whole.breakdown["cross_node_s"] == pytest.approx(3 * (4 << 20) / 48e6, rel=0.05)
    assert whole.breakdown["pack_s"] > 0 and whole.breakdown["in_node_s"] == 0


def test_a_rank_unpacks_while_its_peer_packs(profile_of: Profiles) -> None:
    """Sender and receiver work on different rounds, so packing and unpacking do not add up over the rounds."""
    profile = profile_of("unshaped")
    costs = profile.costs("send-recv")
    slow = replace(costs, pack=replace(costs.pack, byte_s=1e-8), unpack=replace(costs.unpack, byte_s=1e-8))
    pricer = Pricer(profile, profile.topology, "send-recv", slow)
    size = 1 << 24
    loads = loads_of([(number, 0, 2, size) for number in range(3)])
    terms = pricer.terms(loads)
    serial = float((terms.pack + terms.communicate + terms.unpack).max(axis=1).sum() + terms.unpack.max(axis=1).sum())
    assert pricer.price(loads).total_s < serial


@pytest.mark.parametrize("name", ["box", "shared box", "half duplex", "gpus"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_uneven_matrices_that_were_never_fitted(
    profile_of: Profiles, truth_of: Callable[[str], Cluster], name: str, executor: str
) -> None:
    profile, truth = profile_of(name), truth_of(name)
    pricer = Pricer(profile, profile.topology, executor)
    rng = np.random.default_rng(7)
    errors = []
    for _ in range(12):
        found = random_matrix(profile.topology, rng, 4 << 20 if name != "gpus" else 64 << 20, 64 << 20)
        if found:
            matrix = matrix_of(found, profile.topology.world_size)
            predicted = float(pricer.terms(flow_loads(found)).communicate.max())
            errors.append(abs(predicted / truth.seconds(matrix, executor) - 1))
    assert np.median(errors) <= 0.08 and np.quantile(errors, 0.9) <= 0.2


def test_runs_are_priced_and_copies_within_a_rank_run_beside_its_exchange(profile_of: Profiles) -> None:
    profile = profile_of("box")
    costs = profile.costs("send-recv")
    narrow, wide = (loads_of([(0, 0, 2, 1 << 20)]) for _ in range(2))
    narrow = replace(narrow, pack_runs=narrow.pack_runs * 4096)
    price = {name: price_loads(of, GRID, profile, "send-recv").total_s for name, of in (("n", narrow), ("w", wide))}
    assert price["n"] - price["w"] == pytest.approx(4095 * costs.pack.run_s)
    assert costs.pack.run_s == pytest.approx(5e-9, rel=0.5)
    alone = price_loads(loads_of([(0, 1, 1, 64 << 20)]), GRID, profile, "send-recv").total_s
    sent = price_loads(loads_of([(0, 1, 2, 8 << 20)]), GRID, profile, "send-recv").total_s
    both = price_loads(loads_of([(0, 1, 2, 8 << 20), (0, 1, 1, 64 << 20)]), GRID, profile, "send-recv").total_s
    assert alone == pytest.approx((64 << 20) / 3e9, rel=0.05) and alone < sent == pytest.approx(both)


def test_many_ranks_and_rounds_are_priced_fast(profile_of: Profiles) -> None:
    topology = Topology.grid(16, 8)
    rng = np.random.default_rng(3)
    rounds, rows = 1000, 300_000
    number = np.sort(rng.integers(0, rounds, rows))
    src, dst = rng.integers(0, 128, rows), rng.integers(0, 128, rows)
    size = rng.integers(1, 1 << 20, rows)
    one = np.ones(rows, dtype=np.int64)
    loads = RoundLoads(rounds, number, src, dst, size, one, size, one, size, one, one, one, one)
    pricer = Pricer(profile_of("gpus"), topology, "send-recv")
    pricer.price(loads)
    best = min(_seconds(lambda: pricer.price(loads)) for _ in range(3))
    assert best < 0.6  # 0.12 s on a quiet core
    assert pricer.price(loads).extrapolated


def _seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def test_an_empty_schedule_costs_nothing_and_unmeasured_links_are_refused(profile_of: Profiles) -> None:
    profile = profile_of("box")
    nothing = price_loads(loads_of([]), profile.topology, profile, "send-recv")
    assert nothing.total_s == 0
    costs = replace(profile.costs("send-recv"), cross_node=None)
    with pytest.raises(InputError, match="between nodes"):
        Pricer(profile, profile.topology, "send-recv", costs).price(loads_of([(0, 0, 2, 64)]))
    with pytest.raises(InputError, match="no executor 'ring'"):
        price_loads(loads_of([]), profile.topology, profile, "ring")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_interval_is_twice_as_wide_beyond_what_was_measured(profile_of: Profiles, executor: str) -> None:
    profile = profile_of("box")
    measured = loads_of([(0, 0, 2, 4 << 20)])
    inside = price_loads(measured, profile.topology, profile, executor)
    elsewhere = price_loads(measured, Topology.grid(2, 2, "node"), profile, executor)
    huge = price_loads(loads_of([(0, 0, 2, 1 << 40)]), profile.topology, profile, executor)
    width = inside.high_s / inside.total_s - 1
    assert not inside.extrapolated
    for beyond in (elsewhere, huge):
        assert beyond.extrapolated
        assert beyond.high_s / beyond.total_s - 1 == pytest.approx(2 * width)
        assert beyond.total_s / beyond.low_s - 1 == pytest.approx(2 * width)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_copies_within_a_rank_cost_their_bytes(profile_of: Profiles, executor: str) -> None:
    profile = profile_of("box")
    byte_s = profile.costs(executor).unpack.byte_s
    small, large = (
        price_loads(loads_of([(0, 1, 1, size)]), profile.topology, profile, executor).total_s
        for size in (1 << 26, 1 << 30)
    )
    assert byte_s > 0 and small > 0
    assert large - small == pytest.approx(((1 << 30) - (1 << 26)) * byte_s)


@pytest.mark.parametrize("middle", [(1, 0, 1, 1 << 20), (1, 1, 0, 1 << 20)], ids=["as sender", "as receiver"])
def test_a_rank_waits_for_a_busy_peer_before_it_goes_on(
    profile_of: Profiles, middle: tuple[int, int, int, int]
) -> None:
    """Rank 1 is busy with rank 2; rank 0 exchanges with rank 1 next and only then with rank 3: nothing overlaps."""
    profile = profile_of("box")
    chain = [(0, 1, 2, 16 << 20), middle, (2, 0, 3, 16 << 20)]
    alone = [
        price_loads(loads_of([row], packed=False), profile.topology, profile, "send-recv").total_s for row in chain
    ]
    whole = price_loads(loads_of(chain, packed=False), profile.topology, profile, "send-recv")
    assert np.cumsum(whole.rounds_s) == pytest.approx(np.cumsum(alone), rel=1e-6)
