"""Change points: at the right commit, only where there are any, and kept apart where launches do not compare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from track_launches import case, commit_launches, launch, side

from relaymeter.harness.track.changes import Change, change_points, commit_groups
from relaymeter.harness.track.records import LaunchRecord


def drawn(bases: list[float], seed: int, *, count: int = 5, day: float = 0.0) -> list[LaunchRecord]:
    """Commits with launches that drift by 3 %, and by ``day`` from commit to commit."""
    rng = np.random.default_rng(seed)
    found = []
    for at, base in enumerate(bases):
        today = base * np.exp(rng.normal() * day)
        for number in range(1, count + 1):
            value = float(today * np.exp(rng.normal() * 0.03))
            one = launch(case(samples={"move_s": [value]}), number=number)
            found.append(replace(one, commit=f"{at:02x}" * 20))
    return found


def where(changes: list[Change]) -> list[int]:
    return [change.index for change in changes]


@pytest.mark.parametrize("at", [1, 4, 9, 11])
def test_a_jump_is_found_at_its_commit_with_both_levels(at: int) -> None:
    (change,) = change_points(commit_launches([0.01] * at + [0.012] * (12 - at)))
    assert (change.case, change.metric, change.index) == ("tp2", "move_s", at)
    assert change.commit == f"{at:02x}" * 20
    assert change.label == (f"{at:02x}" * 20)[:9]
    assert (change.before, change.after, change.ratio) == pytest.approx((0.01, 0.012, 1.2))
    assert change.p_value < 0.01


def test_a_jump_and_its_way_back_are_two_changes_and_a_rate_counts_the_other_way_round() -> None:
    up_and_down = commit_launches([0.01] * 6 + [0.013] * 3 + [0.01] * 6)
    assert where(change_points(up_and_down)) == [6, 9]
    rates = [
        replace(one, cases=tuple(replace(c, samples={"moved_bytes_per_s": c.samples["move_s"]}) for c in one.cases))
        for one in up_and_down
    ]
    assert [change.ratio > 1 for change in change_points(rates)] == [False, True]


def test_drift_alone_is_no_change_and_small_changes_do_not_count() -> None:
    assert [where(change_points(drawn([0.01] * 20, seed))) for seed in range(20)] == [[]] * 20
    assert change_points(commit_launches([0.01] * 10 + [0.0104] * 10)) == []


def test_a_ten_percent_jump_is_found_under_drift_at_its_place() -> None:
    found = [where(change_points(drawn([0.01] * 10 + [0.011] * 10, seed))) for seed in range(20)]
    # in a few the commits scatter by chance as if days differed, which a single row cannot tell apart
    assert found.count([10]) >= 18
    assert found.count([10]) + found.count([]) == 20


def test_days_that_all_differ_are_no_changes_though_each_is_steady() -> None:
    found = [where(change_points(drawn([0.01] * 24, seed, day=0.1))) for seed in range(20)]
    assert sum(map(len, found)) <= 1


def test_one_launch_a_commit_is_enough_once_there_are_five_behind_the_change() -> None:
    steady = [0.01, 0.0101, 0.0099, 0.01, 0.0102, 0.0098]
    history = commit_launches([*steady, *steady, *(2 * value for value in steady)], 1)
    assert where(change_points(history)) == [12]
    assert change_points(history[:16]) == []


def test_machines_configurations_and_suites_are_held_apart() -> None:
    history = commit_launches([0.01] * 8)
    for field in ("machine_id", "config_hash", "suite"):
        mixed = [replace(one, **{field: "other"}) if at >= 20 else one for at, one in enumerate(history)]
        slower = commit_launches([0.01] * 4 + [0.02] * 4)
        mixed = [replace(one, cases=other.cases) for one, other in zip(mixed, slower, strict=True)]
        assert change_points(mixed) == []


def test_a_change_says_on_which_machine_it_is() -> None:
    slower = commit_launches([0.01] * 4 + [0.013] * 4)
    steady = [replace(one, machine_id="steady") for one in commit_launches([0.013] * 8)]
    (change,) = change_points([one for pair in zip(slower, steady, strict=True) for one in pair])
    assert change.setting == ("ci", "machine-1", "config-1")


def test_a_newest_commit_that_is_slow_as_single_days_before_were_is_no_change() -> None:
    days = [0.01] * 6 + [0.012] + [0.01] * 6 + [0.012] + [0.01] * 4
    assert 18 not in where(change_points(commit_launches([*days, 0.012])))
    assert 18 in where(change_points(commit_launches([*days, 0.013])))


def test_dirty_launches_stand_apart_and_are_no_part_of_a_series() -> None:
    history = commit_launches([0.01] * 6)
    dirty = [replace(one, commit="05" * 20, dirty=True) for one in side(0.02)]
    groups = commit_groups([*history, *dirty])
    assert [group.label for group in groups[-2:]] == ["050505050", "050505050-dirty"]
    assert change_points([*history, *dirty]) == []
    again = [replace(one, session_id="later") for one in dirty]
    groups = commit_groups([*history, *dirty, *again])
    assert [(group.label, len(group.launches)) for group in groups[-2:]] == [("050505050-dirty", 5)] * 2


def test_a_commit_measured_again_later_stays_in_its_place() -> None:
    history = commit_launches([0.01, 0.01, 0.012])
    again = [*history, *history[:5]]
    groups = commit_groups(again)
    assert [len(group.launches) for group in groups] == [10, 5, 5]
    assert where(change_points(again)) == [2]


def test_moves_that_lost_bits_are_no_evidence() -> None:
    history = commit_launches([0.01] * 4 + [0.02] * 4)
    lost = [
        replace(one, cases=tuple(replace(c, digest_passed=7) for c in one.cases)) if at >= 20 else one
        for at, one in enumerate(history)
    ]
    assert change_points(lost) == []


def test_outside_a_checkout_the_version_is_the_commit() -> None:
    history = [replace(one, commit=None, version=one.commit or "") for one in commit_launches([0.01] * 4 + [0.02] * 4)]
    (change,) = change_points(history)
    assert (change.index, change.commit) == (4, None)
    assert change.label.startswith("version 0404")


def test_nothing_and_a_single_commit_have_no_changes() -> None:
    assert change_points([]) == []
    assert change_points(side(0.01)) == []
    assert commit_groups([]) == []
