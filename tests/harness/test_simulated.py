"""The simulated cluster: its times are those of a hand calculation, and calibration finds its rates and NICs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relaymeter.calibration.calibrate import calibrate_cluster
from relaymeter.calibration.cells import Sampling
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE
from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.recorder import Settings
from relaymeter.errors import InputError
from relaymeter.harness.simulated import SimulatedCluster, load_preset
from relaymeter.harness.simulated_config import ClusterModel, load_spec, shipped_presets
from relaymeter.relayout.segments import RoundLoads

MIB = 1 << 20


def _model(**changes: Any) -> ClusterModel:
    """2 nodes x 4 ranks whose every exchange can be calculated by hand."""
    base: dict[str, Any] = {
        "name": "tiny", "about": "for tests", "nodes": 2, "ranks_per_node": 4, "nics_per_node": 4, "resolution": 0.0,
        "rates": {"port": 400.0 * MIB, "nic": 100.0 * MIB},
        "executors": {"send-recv": {"floor_s": 0.01}, "all-to-all": {"floor_s": 0.01, "together": True}},
        "packing": {"call_s": 0.5, "segment_s": 0.25, "rate": 10.0 * MIB},
    }  # fmt: skip
    return ClusterModel.model_validate({**base, **changes})


def _seconds(
    model: ClusterModel, *flows: tuple[int, int, int], executor: str = "send-recv", messages: int = 1
) -> float:
    """Seconds of one exchange of flows (src, dst, MiB), the empty call taken off."""
    cluster = SimulatedCluster(model)
    size = cluster.topology.world_size
    matrix = np.zeros((size, size), dtype=np.int64)
    for src, dst, mib in flows:
        matrix[src, dst] = mib * MIB
    once = Sampling(warmups=0, maximum=1)
    found = cluster.measure(matrix, executor, messages=messages, calls=2, sampling=once)
    return found.times_s[0] - 0.01


@pytest.mark.parametrize(
    ("changes", "flows", "seconds"),
    [
        ({}, [(0, 4, 100)], 1.0),  # one NIC
        ({}, [(0, 1, 100)], 0.25),  # a port
        ({}, [(0, 4, 100), (1, 5, 100)], 1.0),  # two NICs
        ({"nics_per_node": 2}, [(0, 4, 100), (1, 5, 100)], 2.0),  # that share one
        ({"nics_per_node": 2}, [(0, 4, 100), (2, 6, 100)], 1.0),
        ({}, [(0, 4, 100), (4, 0, 100)], 1.0),  # full duplex
        ({}, [(0, 4, 100), (1, 4, 100), (2, 4, 100), (3, 4, 100)], 4.0),  # into one NIC
        ({"incast": 0.4}, [(0, 4, 100), (1, 4, 100)], 2.5),
        ({"incast": 0.4}, [(0, 4, 100), (0, 5, 100)], 2.0),  # out of one NIC: no incast
        ({}, [(0, 4, 100), (0, 1, 100)], 1.0),  # both classes at once overlap
        ({"rates": {"port": 400.0 * MIB, "nic": 100.0 * MIB, "pcie": 50.0 * MIB}}, [(0, 4, 100)], 2.0),
        ({"rates": {"port": 400.0 * MIB, "nic": 100.0 * MIB, "switch": 150.0 * MIB}}, [(0, 4, 75), (1, 5, 75)], 1.0),
        ({"rates": {"port": 400.0 * MIB, "nic": 100.0 * MIB, "node": 50.0 * MIB}}, [(0, 4, 50), (1, 5, 50)], 2.0),
        ({"rates": {"port": 400.0 * MIB, "nic": 100.0 * MIB, "rank": 100.0 * MIB}}, [(0, 1, 50), (1, 0, 50)], 1.0),
        ({"rates": {"port": 400.0 * MIB, "nic": 100.0 * MIB, "machine": 200.0 * MIB}}, [(0, 1, 50), (2, 3, 150)], 1.0),
        ({"stragglers": {"nics": {"4": 2.0}}}, [(0, 4, 100)], 2.0),
        ({"stragglers": {"ranks": {"1": 2.0}}}, [(0, 1, 100)], 0.5 + 0.01),  # its own call is slower too
        # One rank to four of another node: through its own NIC, or, by its node's ports, through all four.
        ({}, [(0, 4, 100), (0, 5, 100), (0, 6, 100), (0, 7, 100)], 4.0),
        ({"pxn": True}, [(0, 4, 100), (0, 5, 100), (0, 6, 100), (0, 7, 100)], 1.0),
        ({"pxn": True}, [(0, 4, 100), (1, 4, 100)], 2.0),  # only the sending side is spread
        # Through the NIC of rank 1, over a port that carries another flow.
        ({"pxn": True, "rates": {"port": 150.0 * MIB, "nic": 100.0 * MIB}}, [(0, 5, 75), (0, 2, 75)], 1.0),
    ],
)  # fmt: skip
def test_an_exchange_takes_what_hand_calculation_says(
    changes: dict[str, Any], flows: list[tuple[int, int, int]], seconds: float
) -> None:
    assert _seconds(_model(**changes), *flows) == pytest.approx(seconds, rel=1e-6)


def test_executors_differ_in_duplex_latency_messages_caps_and_ramps() -> None:
    far = {"half_duplex": 1.0, "latency_s": 0.2, "flow": 50.0 * MIB}
    model = _model(executors={
        "send-recv": {"floor_s": 0.01, "message_s": 0.1},
        "all-to-all": {"floor_s": 0.01, "cross_node": far},
    })  # fmt: skip
    assert _seconds(model, (0, 4, 100), executor="all-to-all") == pytest.approx(2.2)
    assert _seconds(model, (0, 4, 100), (4, 0, 100), executor="all-to-all") == pytest.approx(4.2)
    assert _seconds(model, (0, 4, 100), messages=3) == pytest.approx(1.2)
    assert _seconds(model, (0, 4, 10), (1, 4, 10), (2, 4, 10)) == pytest.approx(0.5)  # three messages to one rank
    half = _model(executors={"send-recv": {"floor_s": 0.01, "cross_node": {"ramp": [[MIB, 0.25], [16 * MIB, 1.0]]}}})
    assert _seconds(half, (0, 4, 1)) == pytest.approx(0.04)
    assert _seconds(half, (0, 4, 4)) == pytest.approx(0.08)  # half way, in both logarithms
    assert _seconds(half, (0, 4, 100)) == pytest.approx(1.0)


def _loads(rounds: int, *rows: tuple[int, int, int, int]) -> RoundLoads:
    """Rows of (round, src, dst, MiB), each one packed and unpacked segment of a tenth of its bytes."""
    number, src, dst, mib = np.asarray(rows, dtype=np.int64).T
    away = (src != dst).astype(np.int64)
    return RoundLoads(
        rounds, number, src, dst, mib * MIB, away, away * mib * MIB // 10, away, away * mib * MIB // 10, *[away] * 4
    )


def test_rounds_of_a_move_follow_each_other_without_a_barrier() -> None:
    """Ranks 0 and 4 exchange slowly in round 0; 1 and 5 go on to round 1 meanwhile, unless all have to be there."""
    cluster = SimulatedCluster(_model())
    loads = _loads(2, (0, 0, 4, 400), (0, 1, 5, 100), (1, 1, 5, 100), (1, 6, 2, 100))
    copies = {400: 0.75 + 4.0, 100: 0.75 + 1.0}  # of a tenth of the bytes at 10 MiB/s
    slow = copies[400] + 0.01 + 4.0 + copies[400]
    fast = copies[100] + 0.01 + 1.0 + copies[100]
    assert cluster.move_s(loads, "send-recv") == pytest.approx(max(slow, 2 * fast))
    # Together: every exchange begins when the last rank has packed, and the rank that is through last packs next.
    first = copies[400] + 0.01
    ready = max(first + 1.0 + copies[100] + copies[100], first + 4.0 + copies[400])
    assert cluster.move_s(loads, "all-to-all") == pytest.approx(ready + 0.01 + 1.0 + copies[100])


def test_copies_within_a_rank_run_beside_its_exchange_and_crowding_ranks_copy_slower() -> None:
    packing = {"segment_s": 0.0, "rate": 10.0 * MIB, "lanes": 2.0}
    cluster = SimulatedCluster(_model(packing={"segment_s": 0.0, "rate": 10.0 * MIB}))
    beside = _loads(1, (0, 0, 4, 100), (0, 0, 0, 5))
    assert cluster.move_s(beside, "send-recv") == pytest.approx(1.0 + 0.01 + 1.0 + 1.0)
    assert cluster.move_s(_loads(1, (0, 3, 3, 50)), "send-recv") == pytest.approx(5.0)
    crowded = SimulatedCluster(_model(packing=packing))
    four = _loads(1, *((0, rank, rank + 4, 100) for rank in range(4)))
    assert crowded.move_s(four, "send-recv") == pytest.approx(2 * (cluster.move_s(four, "send-recv") - 1.01) + 1.01)
    seen = [len(crowded.packing("pack", 10 * MIB, 1, ranks=ranks).times_s) for ranks in ((0,), (0, 1, 2))]
    assert min(seen) >= 3
    took = [crowded.packing("pack", 10 * MIB, 1, ranks=range(n)).times_s[0] for n in (1, 2, 3, 8)]
    assert took == pytest.approx([1.0, 1.0, 1.5, 4.0])


def test_an_empty_move_takes_no_time() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert SimulatedCluster(_model()).move_times(RoundLoads(0, *[none] * 12), "send-recv", 2) == (0.0, 0.0)


def test_times_depend_on_the_seed_and_the_order_of_calls_alone() -> None:
    def times(seed: int) -> tuple[float, ...]:
        cluster = SimulatedCluster(_model(noise=0.05, tail_share=0.2, tail=2.0, seed=seed))
        matrix = np.zeros((8, 8), dtype=np.int64)
        matrix[0, 4] = MIB
        found = [
            cluster.measure(matrix, "send-recv").times_s,
            cluster.move_times(_loads(1, (0, 0, 4, 1)), "send-recv", 5),
        ]
        return found[0] + found[1]

    assert times(3) == times(3) != times(4)
    assert len(set(times(3))) == len(times(3))
    disturbed = SimulatedCluster(_model(tail_share=0.2, tail=2.0)).move_times(_loads(1, (0, 0, 4, 1)), "send-recv", 400)
    slow = [taken for taken in disturbed if taken > 1.5 * min(disturbed)]
    assert 0.15 < len(slow) / 400 < 0.25 and max(disturbed) == pytest.approx(2 * min(disturbed))


def test_bad_calls_are_refused_by_name() -> None:
    cluster = SimulatedCluster(_model(executors={"send-recv": {"floor_s": 0.01}}))
    with pytest.raises(InputError, match="tiny has no executor 'all-to-all', only send-recv"):
        cluster.measure(np.zeros((8, 8), dtype=np.int64), "all-to-all")
    with pytest.raises(InputError, match="8 x 8 byte counts is needed"):
        cluster.measure(np.zeros((2, 2), dtype=np.int64), "send-recv")
    with pytest.raises(InputError, match="pack, unpack"):
        cluster.packing("copy", 16, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('like = "h100-2x8"\nnics_per_node = 3', "ranks_per_node 8 % nics_per_node 3 = 2, not 0"),
        ('like = "h100-2x8"\nnics = 3', "unknown key 'nics'"),
        ('like = "h100-2x8"\nnodes = 100000', "nodes 100000 x ranks_per_node 8"),
        ('like = "h100-2x8"\n[stragglers.nics]\n99 = 2.0', "no NIC 99, they are numbered 0 to 15"),
        ('like = "h100-2x8"\n[executors.send-recv.in_node]\nramp = [[1024, 0.1], [2048, 0.9]]', "take no longer"),
        ('like = "mine.toml"', "key 'like' = 'mine.toml'"),
        ('about = "x"', "key 'nodes' is missing"),
    ],
)
def test_a_file_that_makes_no_cluster_is_refused_with_the_key(
    text: str, told: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_spec("mine.toml")
    assert told in str(refused.value) and "mine.toml" in str(refused.value)


def test_shipped_presets_name_their_sources_and_are_what_their_names_say() -> None:
    assert {"h100-2x8", "h100-16x8", "h100-128x8", "box-rank-nics", "box-node-nic"} <= set(shipped_presets())
    for name in shipped_presets():
        model = load_spec(name)
        assert model.name == name and model.sources and set(model.executors) == {"send-recv", "all-to-all"}
        if name.startswith("h100-"):
            assert name.startswith(f"h100-{model.nodes}x{model.ranks_per_node}")
            assert SimulatedCluster(model).executors[0] == "all-to-all"
    with pytest.raises(InputError, match="unknown preset 'h100-2x4': did you mean 'h100-2x8'"):
        load_preset("h100-2x4")


@pytest.fixture(scope="module", params=["box-rank-nics", "box-node-nic", "h100-4x8-shared-nics"])
def calibrated(request: pytest.FixtureRequest) -> tuple[SimulatedCluster, Profile]:
    cluster = load_preset(request.param)
    settings = replace(Settings.short(), replicates=1)
    own = cluster.executors[:1]
    return cluster, calibrate_cluster(cluster.instruments(), cluster.declared, executors=own, settings=settings)


def test_calibration_finds_the_rates_and_the_shared_nics(calibrated: tuple[SimulatedCluster, Profile]) -> None:
    cluster, profile = calibrated
    truth, executor = cluster.truth, profile.executor
    costs = profile.costs(executor)
    assert profile.topology == cluster.topology  # told a NIC for every rank
    assert costs.floor_s == pytest.approx(truth["floor_s"][executor], rel=0.03)
    assert costs.pack.segment_s == pytest.approx(truth["segment_s"], rel=0.05)
    model = next(found for name, found in cluster.model.executors.items() if name == executor)
    for kind, link in ((IN_NODE, model.in_node), (CROSS_NODE, model.cross_node)):
        found = costs.link(kind)
        assert found is not None
        # What a message of the largest measured size makes of the rate, latency and all.
        size, rate = found.curve.largest, truth[f"{kind}_flow_bytes_per_s"][executor]
        expected = size / (size / rate + model.floor_s + model.isolated_s + link.latency_s)
        assert found.curve.plateau_rate == pytest.approx(expected, rel=0.03)
    assert costs.cross_node is not None
    assert costs.cross_node.port_rate == pytest.approx(truth["nic_bytes_per_s"], rel=0.03)
    assert not [text for text in profile.warnings if text.startswith(("links:", "hints"))]
