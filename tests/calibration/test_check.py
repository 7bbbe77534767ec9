from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from synthetic import Cluster

from relaymeter.calibration.calibrate import calibrate_cluster
from relaymeter.calibration.cells import Instruments, PackCell, Samples, Wrong
from relaymeter.calibration.check import CheckResult, SpotResult, check_cluster, judge, limit_text, spots
from relaymeter.calibration.profiles import Gate, Profile
from relaymeter.calibration.recorder import Settings
from relaymeter.errors import DigestMismatch, InputError, NothingMeasured
from relaymeter.relayout.topology import Topology

GRID = Topology.grid(2, 2)
SHORT = dataclasses.replace(Settings.short(), replicates=2)


@pytest.fixture
def profile(quick_profile: Profile) -> Profile:
    return quick_profile


def _by_link(found: CheckResult) -> dict[str, set[str]]:
    table: dict[str, set[str]] = {}
    for spot in found.spots:
        table.setdefault(spot.name.split(",")[0], set()).add(spot.verdict)
    return table


def test_the_cells_stand_for_floor_links_several_flows_and_packing(profile: Profile) -> None:
    chosen = spots(profile, "send-recv")
    assert [name.split(",")[0] for name, _ in chosen] == [
        "empty call", "in node", "in node", "across nodes", "across nodes", "dense both ways", "packing",
    ]  # fmt: skip
    for name, cell in chosen:
        assert cell in (profile.pack_cells if isinstance(cell, PackCell) else profile.cells), name
    sizes = [cell.size for name, cell in chosen if "nodes," in name and not isinstance(cell, PackCell)]
    assert sizes[0] < 1 << 20 <= sizes[1]


def test_the_same_cluster_has_not_drifted_and_takes_less_than_five_seconds(profile: Profile) -> None:
    found = check_cluster(Cluster(GRID, seed=7).instruments(), profile)
    assert found.executor == "send-recv" and not found.drifted and found.spent_s < 5
    assert {spot.verdict for spot in found.spots} == {"ok"}
    assert all(abs(spot.drift) < 0.03 and spot.limit == 0.15 for spot in found.spots)
    assert CheckResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    ("now", "drifted"),
    [
        ({"nic_rate": 48e6 / 1.25}, {"across nodes", "dense both ways"}),
        ({"nic_rate": 48e6 * 1.3}, {"across nodes", "dense both ways"}),
        ({"nic_rate": 24e6}, {"across nodes", "dense both ways"}),
        ({"nic_rate": 48e6 / 1.1}, set()),
        ({"port_rate": 0.7e9}, {"in node"}),
        ({"floor_s": 8e-5}, {"empty call"}),
        ({"copy_rate": 1e9}, {"packing"}),
    ],
)
def test_what_changed_by_more_than_the_limit_is_named_after_two_measurements(
    profile: Profile, now: dict[str, Any], drifted: set[str]
) -> None:
    found = check_cluster(Cluster(GRID, **now).instruments(), profile)
    assert {spot.name.split(",")[0] for spot in found.drifted} == drifted
    assert all(spot.measured == 2 for spot in found.drifted)
    assert found.to_dict()["drifted"] == [spot.name for spot in found.drifted]
    assert found.spent_s < 5


def test_a_cell_that_is_slow_once_is_measured_again_and_has_not_drifted(profile: Profile) -> None:
    cluster = Cluster(GRID)
    seen: set[bytes] = set()

    def measure(matrix: Any, executor: str, **options: Any) -> Samples:
        found = cluster.measure(matrix, executor, **options)
        key = matrix.tobytes()
        factor = 1.0 if key in seen else 2.0
        seen.add(key)
        return Samples(tuple(factor * taken for taken in found.times_s), found.spent_s)

    found = check_cluster(Instruments(measure, cluster.packing), profile)
    assert not found.drifted
    assert [spot.measured for spot in found.spots] == [2, 2, 2, 2, 2, 2, 1]
    assert all(abs(spot.drift) < 0.03 for spot in found.spots)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([1.0, 1.01, 1.02], [1.1, 1.12, 1.14], "ok"),
        ([1.0, 1.01, 1.02], [1.2, 1.21, 1.22], "drift"),
        ([1.2, 1.21, 1.22], [1.0, 1.01, 1.02], "drift"),
        ([1.0, 1.01, 1.3], [1.2, 1.21, 1.22], "noisy"),
        ([1.0, 1.01, 1.02], [1.0, 1.5, 2.0], "noisy"),
        ([1.16], [1.0], "drift"),
        ([1.14], [1.0], "ok"),
    ],
)
def test_drift_needs_medians_and_intervals_apart(old: list[float], new: list[float], verdict: str) -> None:
    found = judge("cell", 64, old, new)
    assert found.verdict == verdict
    assert found.drift == pytest.approx(sorted(new)[len(new) // 2] / sorted(old)[len(old) // 2] - 1)
    assert found.old_low_s <= found.old_s <= found.old_high_s and found.new_low_s <= found.new_s <= found.new_high_s


def test_a_limit_is_a_ratio_either_way_and_is_printed_as_the_drifts_that_it_allows() -> None:
    assert limit_text(0.15) == "-13% / +15%" and limit_text(1.0) == "-50% / +100%"
    slower, faster = judge("across nodes, 1 MB", 64, [1.0], [1.16]), judge("packing, 4 runs", 64, [1.16], [1.0])
    assert (slower.passed_limit, faster.passed_limit) == ("+15%", "-13%")
    found = CheckResult(executor="send-recv", spent_s=1.0, spots=(slower, faster, judge("empty call", 0, [1.0], [2.0])))
    assert found.drifted_parts == ("traffic between nodes got slower, packing got faster, the empty call got slower")


@pytest.mark.parametrize("times", [[], [0.0, 0.0, 0.0], [-1e-3, 1e-3], [float("nan")], [1e-3, float("inf")]])
def test_samples_that_are_no_times_are_refused_on_either_side(times: list[float]) -> None:
    with pytest.raises(NothingMeasured, match=r"spot-check, cell: calls took .* look at the machine's clock"):
        judge("cell", 64, [1.0, 1.0], times)
    with pytest.raises(NothingMeasured, match="spot-check, cell, in the profile: calls took"):
        judge("cell", 64, times, [1.0, 1.0])


def test_what_a_calibration_could_not_tell_itself_is_no_drift_for_that_link_and_size_alone(profile: Profile) -> None:
    name = "send-recv cross_node: held-out sizes of 1 MiB and more, largest error"
    gates = tuple(Gate(g.name, 0.4, g.limit) if g.name == name else g for g in profile.gates)
    rough = dataclasses.replace(profile, gates=gates)
    found = check_cluster(Cluster(GRID, nic_rate=48e6 / 1.3, port_rate=1e9 / 1.3).instruments(), rough)
    limits = {spot.name: spot.limit for spot in found.spots}
    assert sorted(limits.values()) == pytest.approx([0.15] * 6 + [0.4])  # the flows of the dense cell are below 1 MiB
    drifted = {spot.name for spot in found.drifted}
    assert not any(limits[name] == 0.4 for name in drifted) and any(name.startswith("in node") for name in drifted)
    far = check_cluster(Cluster(GRID, nic_rate=12e6).instruments(), dataclasses.replace(profile, gates=(
        Gate(name, 9.0, 0.15),
    )))  # fmt: skip
    assert any(spot.limit == 1.0 and spot.verdict == "drift" for spot in far.spots)


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 1), (3, 4)])
def test_any_shape_of_world(nodes: int, ranks: int) -> None:
    topology = Topology.grid(nodes, ranks)
    made = calibrate_cluster(Cluster(topology).instruments(), topology, executors=("send-recv",), settings=SHORT)
    links = _by_link(check_cluster(Cluster(topology, seed=3).instruments(), made))
    assert ("in node" in links) == (ranks > 1) and ("across nodes" in links) == (nodes > 1)
    assert set.union(*links.values()) == {"ok"}


def test_the_second_executor_can_be_asked_for_and_others_are_refused(profile: Profile) -> None:
    same, slower = Cluster(GRID), Cluster(GRID, nic_rate=30e6)

    def measure(matrix: Any, executor: str, **options: Any) -> Samples:
        return (slower if executor == "all-to-all" else same).measure(matrix, executor, **options)

    instruments = Instruments(measure, same.packing)
    assert not check_cluster(instruments, profile).drifted
    assert check_cluster(instruments, profile, "all-to-all").drifted
    with pytest.raises(InputError, match="measured send-recv, all-to-all only, not ring"):
        check_cluster(instruments, profile, "ring")
    with pytest.raises(NothingMeasured, match="no cells of send-recv"):
        spots(dataclasses.replace(profile, cells=()), "send-recv")


def test_cells_that_memory_no_longer_holds_are_left_out(profile: Profile) -> None:
    small = dataclasses.replace(Cluster(GRID).instruments(), largest_bytes=1 << 18, packing=None)
    found = check_cluster(small, profile)
    assert not found.drifted
    assert 0 < len(found.spots) < len(spots(profile, "send-recv")) - 1
    assert all(spot.bytes <= 1 << 18 for spot in found.spots)


def test_a_wrong_byte_is_worse_than_any_drift(profile: Profile) -> None:
    with pytest.raises(DigestMismatch, match="9 bytes from rank 1 to rank 3 arrived wrong"):
        check_cluster(Cluster(GRID, wrong=(Wrong(1, 3, 9),)).instruments(), profile)


def test_progress_never_goes_back(profile: Profile) -> None:
    seen: list[tuple[float, str]] = []
    check_cluster(Cluster(GRID, nic_rate=24e6).instruments(), profile, progress=lambda *step: seen.append(step))
    assert [step[0] for step in seen] == sorted(step[0] for step in seen) and seen[-1][0] == 1.0
    assert any("once more" in text for _, text in seen)


def test_a_result_carries_every_field_of_its_cells(profile: Profile) -> None:
    entry = check_cluster(Cluster(GRID).instruments(), profile).to_dict()
    assert all(set(cell) == {field.name for field in dataclasses.fields(SpotResult)} for cell in entry["cells"])
