from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from synthetic import Cluster

from relaymeter.calibration.calibrate import calibrate_cluster
from relaymeter.calibration.cells import Cell, Instruments, Samples
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE, Curve, ExecutorCosts
from relaymeter.calibration.profiles import Profile, from_json
from relaymeter.calibration.recorder import Findings, Settings
from relaymeter.calibration.sanity import memory_warnings, refuse_single_sizes, unsound
from relaymeter.errors import InputError, NothingMeasured
from relaymeter.relayout.topology import Topology

GRID = Topology.grid(2, 2)
SHORT = dataclasses.replace(Settings.short(), replicates=2)


@pytest.fixture
def profile(quick_profile: Profile) -> Profile:
    return quick_profile


@pytest.fixture
def costs(profile: Profile) -> ExecutorCosts:
    return profile.costs("send-recv")


def _findings(*sizes: int, kind: str = CROSS_NODE) -> Findings:
    cells = [Cell(f"{kind} curve", "send-recv", ((0, 2, size),), (0.5,)) for size in sizes]
    return Findings(GRID, cells=cells)


def test_costs_of_a_calibration_are_sound(profile: Profile) -> None:
    for found in profile.executors.values():
        assert [unsound(one) for one in (found.costs, *found.replicates)] == [()] * 3
    alone = calibrate_cluster(Cluster(Topology.grid(2, 1)).instruments(), Topology.grid(2, 1), settings=SHORT)
    assert alone.costs("send-recv").in_node is None and unsound(alone.costs("send-recv")) == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("nan"), "is nan"), (float("inf"), "is inf"), (-1.0, "is -1"), (None, "is null"), ("1", "is '1'"),
     (True, "is True")],
)  # fmt: skip
def test_a_figure_that_is_no_number_is_named(costs: ExecutorCosts, value: Any, text: str) -> None:
    link = costs.cross_node
    assert link is not None
    curve = dataclasses.replace(link.curve, tail_s_per_byte=value)
    port = dataclasses.replace(link, ports_out={3: value})
    seconds = Curve(link.curve.bytes, (*link.curve.seconds[:-1], value), 1e-9)
    last = len(link.curve.seconds) - 1
    assert unsound(dataclasses.replace(costs, floor_s=value)) == (f"floor_s {text}",)
    assert unsound(dataclasses.replace(costs, pack=dataclasses.replace(costs.pack, byte_s=value))) == (
        f"pack.byte_s {text}",
    )
    for changed, name in (
        (dataclasses.replace(link, curve=curve), "curve.tail_s_per_byte"),
        (port, "ports_out.3"),
        (dataclasses.replace(link, curve=seconds), f"curve.seconds[{last}]"),
    ):
        assert unsound(dataclasses.replace(costs, cross_node=changed)) == (f"cross_node.{name} {text}",)


def test_a_profile_with_a_figure_that_is_no_number_is_refused_though_intact(profile: Profile) -> None:
    found = profile.executors["send-recv"]
    broken = dataclasses.replace(found, costs=dataclasses.replace(found.costs, floor_s=float("nan")))
    written = dataclasses.replace(profile, executors={**profile.executors, "send-recv": broken}).to_dict()
    with pytest.raises(InputError, match=r"p\.json: executors\.send-recv: floor_s is null, of which no price"):
        from_json(written, "p.json")
    replicate = dataclasses.replace(found.replicates[0], overlap=-2.0)
    worse = dataclasses.replace(found, replicates=(replicate, *found.replicates[1:]))
    written = dataclasses.replace(profile, executors={"send-recv": worse}).to_dict()
    with pytest.raises(InputError, match="overlap is -2"):
        from_json(written, "p.json")


@pytest.mark.parametrize("times", [(float("nan"),) * 3, (0.0, 1e-3, 1e-3), (-1e-3,), ()])
def test_a_clock_that_stands_still_gives_no_price(times: tuple[float, ...]) -> None:
    cluster = Cluster(GRID)

    def measure(matrix: Any, executor: str, **options: Any) -> Samples:
        return Samples(times, 0.1) if matrix.any() else cluster.measure(matrix, executor, **options)

    with pytest.raises(NothingMeasured, match="by the clock, of which no price can be made"):
        calibrate_cluster(Instruments(measure, cluster.packing), GRID, settings=SHORT)


def test_a_single_message_size_is_no_rate_and_says_which_link() -> None:
    with pytest.raises(
        NothingMeasured, match=r"between nodes was measured with one message size only \(1\.02 kB in 500"
    ):
        refuse_single_sizes(_findings(1024), ("send-recv",))
    refuse_single_sizes(_findings(1024, 4096), ("send-recv",))
    refuse_single_sizes(_findings(1024), ("all-to-all",))
    with pytest.raises(NothingMeasured, match="inside a node was measured with one message size only"):
        calibrate_cluster(dataclasses.replace(Cluster(GRID).instruments(), largest_bytes=2048), GRID, settings=SHORT)
    with pytest.raises(NothingMeasured, match="between nodes was measured with one message size only"):
        calibrate_cluster(Cluster(GRID, cross_latency_s=3.0).instruments(), GRID, settings=SHORT)


def test_a_curve_that_memory_ended_says_so() -> None:
    assert memory_warnings(_findings(1 << 20, 4 << 20), 1 << 28) == []
    assert memory_warnings(_findings(1 << 20, 4 << 20), 1 << 25) == []  # flat long before
    (text,) = memory_warnings(_findings(1 << 20, 4 << 20), 7 << 20, rank=3)
    assert "messages between nodes were measured up to 4.19 MB on all ranks alike" in text
    assert "free memory of rank 3, the least of any, allows at most 7.34 MB" in text and "extrapolated" in text
    (text,) = memory_warnings(_findings(1 << 20, kind=IN_NODE), 1 << 20)
    assert "messages inside a node" in text
    small = dataclasses.replace(Cluster(GRID).instruments(), largest_bytes=1 << 20)
    profile = calibrate_cluster(small, GRID, settings=SHORT)
    assert sum(text.startswith("memory: ") for text in profile.warnings) == 2
    assert max(cell.size for cell in profile.cells if cell.pattern.endswith("curve")) == 11 << 16
