"""Candidates held against each other, by hand on small made-up records: regret, order, thresholds, mixes."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from validate_rows_by_hand import batch, figures, make_report, mix, move, of, profile, row, value

from relaymeter.harness.validate_candidates import Side, contests, kendall_tau, mixes, ordered_pairs, settled, sides
from relaymeter.validation_records import ValidationRecord

# Candidates


def test_regret_is_the_chosen_over_the_best_measured() -> None:
    rows = [
        *move("a", {"direct": (0.2, 0.20), "relay": (0.1, 0.11), "spread": (0.1, 0.10)}, "relay"),  # 10 %
        *move("b", {"direct": (0.2, 0.20), "relay": (0.1, 0.30)}, "direct"),  # 0
        *move("c", {"direct": (0.2, 0.20), "relay": (0.1, 0.204)}, "relay"),  # 2 %
        *move("alone", {"direct": (0.2, 0.20)}, "direct"),
    ]
    assert [case.regret for case in contests(rows)] == [pytest.approx(0.1), 0, pytest.approx(0.02), None]
    found = of(figures(rows, profile()), "regret")
    assert found.count == 3
    assert value(found, "median") == pytest.approx(0.02) and value(found, "max") == pytest.approx(0.10)


@pytest.mark.parametrize(
    ("regrets", "status"),
    [((0.0, 0.0199, 0.0999), "met"), ((0.0, 0.0201, 0.0999), "missed"), ((0.0, 0.0199, 0.1001), "missed")],
)
def test_regret_is_held_to_two_and_ten_per_cent(regrets: tuple[float, ...], status: str) -> None:
    rows = [
        one
        for k, regret in enumerate(regrets)
        for one in move(str(k), {"direct": (0.1, 0.1 * (1 + regret)), "relay": (0.1, 0.1)}, "direct")
    ]
    assert of(figures(rows, profile()), "regret").status == status


def test_the_same_routes_run_twice_are_one_candidate() -> None:
    rows = move("a", {"direct": (0.1, 0.10), "relay": (0.2, 0.2)}, "direct")
    rows += [row("move", 0.1, 0.12, name="a", route="mixed", chosen=True)]
    assert contests(rows)[0].regret == 0
    assert ordered_pairs(contests(rows)) == (1, 1)  # the faster one stands for both
    alone = rows[::2]
    assert [one.route for one in alone] == ["direct", "mixed"]
    (case,) = contests(alone)
    assert [one.route for one in case.candidates] == ["direct"] and case.regret is None
    every = figures(alone, profile())
    assert of(every, "regret").count == of(every, "order move").count == 0
    assert of(every, "order move").statistics["tau"] is None
    assert next(bar.value for bar in of(every, "moves").bars if bar.statistic == "cells") == 1


def test_only_pairs_measured_apart_are_ordered() -> None:
    rows = [
        *move("a", {"direct": (0.30, 0.30), "relay": (0.20, 0.20), "spread": (0.10, 0.201)}, "spread"),
        # relay and spread overlap; direct is slower than both, as predicted
        *move("b", {"direct": (0.10, 0.30), "relay": (0.20, 0.20)}, "direct"),  # the wrong way
        *move("c", {"direct": (0.10, 0.30), "relay": (0.10, 0.20)}, "direct"),  # no order predicted
    ]
    assert ordered_pairs(contests(rows)) == (2, 4)
    found = of(figures(rows, profile()), "order move")
    assert found.count == 4 and value(found, "share") == 0.5 and found.status == "missed"
    assert found.note == "2 of 4"


def test_pairs_of_which_none_was_measured_apart_are_undecided() -> None:
    rows = move("a", {"direct": (0.1, 0.1), "relay": (0.2, 0.1001), "spread": (0.3, 0.1002)}, "direct")
    found = of(figures(rows, profile()), "order move")
    assert (found.status, found.passed, found.count, found.note) == ("undecided", False, 3, "0 of 3 measured apart")


def test_nineteen_of_twenty_pairs_suffice() -> None:
    times = {"direct": (0.2, 0.2), "relay": (0.1, 0.1)}
    rows = [one for k in range(19) for one in move(str(k), times, "relay")]
    wrong = move("wrong", {"direct": (0.2, 0.1), "relay": (0.1, 0.2)}, "relay")
    assert of(figures([*rows, *wrong], profile()), "order move").status == "met"
    assert of(figures([*rows[2:], *wrong], profile()), "order move").status == "missed"


def test_candidates_of_other_executors_and_launches_are_no_rivals() -> None:
    rows = move("a", {"direct": (0.2, 0.2), "relay": (0.1, 0.1)}, "relay")
    rows += move("a", {"direct": (0.2, 0.02)}, "direct", launch_id="later")
    rows += move("a", {"direct": (0.2, 0.02)}, "direct", executor="all-to-all", default_executor=False)
    assert [case.regret for case in contests(rows)] == [0, None, None]


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=12))
def test_kendall_tau_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    agree = one_tied = two_tied = total = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        total += 1
        one_tied += a == c
        two_tied += b == d
        agree += 0 if a == c or b == d else 1 if (a < c) == (b < d) else -1
    found = kendall_tau(*zip(*pairs, strict=True))
    if total in (one_tied, two_tied):
        assert found is None
    else:
        assert found == pytest.approx(agree / math.sqrt((total - one_tied) * (total - two_tied)))


# Thresholds


def decided(rows: list[ValidationRecord]) -> tuple[int, int]:
    """Settings with both sides decided, and all."""
    found, total = settled(sides(rows))
    return len(found), total


def test_each_side_of_a_threshold_is_won_by_the_predicted_route() -> None:
    rows = [
        *batch("min_relay", 25, 0.10, 0.20),
        *batch("min_relay", 100, 0.10, 0.12),
        *batch("min_relay", 400, 0.20, 0.10),
        *batch("min_split", 25, 0.20, 0.10),  # wrong
        *batch("min_split", 400, 0.10, 0.1005),  # undecided
    ]
    found = [(one.threshold, one.elements, one.side, one.verdict) for one in sides(rows)]
    assert found == [
        ("min_relay", 25, "below", "right"),
        ("min_relay", 100, "at", "not judged"),
        ("min_relay", 400, "above", "right"),
        ("min_split", 25, "below", "wrong"),
        ("min_split", 400, "above", "undecided"),
    ]
    assert decided(rows) == (1, 2)
    every = figures(rows, profile())
    assert of(every, "min_relay").status == "met" and of(every, "min_relay").count == 2
    assert of(every, "min_split").status == "missed"
    assert of(every, "min_split").note == "right 0 below, 0 above; 1 wrong, 1 undecided"
    assert of(every, "settled").status == "met" and of(every, "settled").note == "1 of 2 settings of send-recv"
    assert sides(rows)[0].gain == pytest.approx(-1.0)


def test_a_threshold_with_one_side_decided_is_not_settled() -> None:
    rows = [*batch("min_relay", 25, 0.10, 0.1005), *batch("min_relay", 400, 0.20, 0.10)]
    every = figures(rows, profile())
    assert of(every, "min_relay").status == "met"
    assert of(every, "settled").status == "none here" and of(every, "settled").passed


def test_a_wrong_batch_unsettles_a_setting_and_a_bucket_is_a_setting() -> None:
    good = [*batch("min_relay", 25, 0.1, 0.2), *batch("min_relay", 400, 0.2, 0.1)]
    wrong = batch("min_relay", 800, 0.1, 0.2)
    other = batch("min_relay", 800, 0.1, 0.2, bucket_bytes=1 << 21)
    assert decided([*good, *wrong]) == (0, 1)
    assert decided([*good, *other]) == (1, 2)


def test_nothing_decided_at_a_threshold_is_undecided_and_does_not_pass() -> None:
    rows = batch("min_relay", 25, 0.1, 0.1)
    report = make_report(rows, profile())
    found = of(report.figures, "min_relay")
    assert found.count == 1 and found.status == "undecided" and not found.passed and report.exit_code == 3
    assert "undecided: min_relay: the predicted side wins: right 0 below, 0 above; 0 wrong, 1 undecided" in report.lines
    wrong = [*rows, *batch("min_relay", 400, 0.1, 0.2)]
    assert of(figures(wrong, profile()), "min_relay").status == "missed"


@pytest.mark.parametrize(
    ("elements", "side"),
    [(70, "below"), (71, "at"), (76, "at"), (130, "at"), (135, "at"), (141, "at"), (142, "above")],
)
def test_blocks_within_the_root_of_two_of_a_threshold_of_100_stand_at_it(elements: int, side: str) -> None:
    (found,) = sides(batch("min_relay", elements, 0.2, 0.1))
    assert found.side == side


def test_a_setting_of_the_other_executor_that_is_decided_is_named() -> None:
    other = {"executor": "all-to-all", "default_executor": False}
    rows = batch("min_relay", 25, 0.1, 0.1)
    rows += [*batch("min_relay", 25, 0.1, 0.2, **other), *batch("min_relay", 400, 0.2, 0.1, **other)]
    report = make_report(rows, profile())
    found = of(report.figures, "settled")
    assert found.status == "none here" and found.statistics["settings"] == 0
    text = "0 of 1 settings of send-recv; 1 of 1 of all-to-all (min_relay x2, buckets of 1.05 MB, T = 100)"
    assert found.note == text and f"thresholds with both sides decided: {text}" in report.lines
    assert of(report.figures, "settled", "all-to-all").note == "1 of 1 settings of all-to-all"


def test_below_a_threshold_that_is_never_direct_wins_at_every_size() -> None:
    never = {"threshold_elements": None, "threshold_low": None, "threshold_high": None}
    rows = [*batch("min_split", 8, 0.1, 0.2, **never), *batch("min_split", 1 << 20, 0.2, 0.1, **never)]
    assert [(one.side, one.verdict) for one in sides(rows)] == [("below", "right"), ("below", "wrong")]


def test_batches_without_their_rival_are_left_out() -> None:
    assert sides(batch("min_relay", 25, 0.1, 0.2)[:1]) == ()


def test_a_side_says_its_setting() -> None:
    one = sides(batch("min_relay", 25, 0.1, 0.2))[0]
    assert isinstance(one, Side) and one.setting == ("min_relay", "send-recv", 2, 2, 1 << 20, 100)
    assert one.gain == pytest.approx(-1.0)


# Mixes


def test_a_mix_wins_only_beyond_the_intervals_of_every_uniform_route() -> None:
    clear = mix({"direct": 0.2, "relay": 0.12, "mixed": 0.10})
    assert [one.wins for one in mixes(clear)] == [True]
    assert mixes(clear)[0].gain == pytest.approx(1 - 0.10 / 0.12)
    near = mix({"direct": 0.2, "relay": 0.101, "mixed": 0.10})
    assert [one.wins for one in mixes(near)] == [False]
    assert [one.wins for one in mixes(mix({"direct": 0.2, "mixed": 0.1}))] == [False]  # not every uniform choice
    assert of(figures(clear, profile()), "mix").status == "met"
    assert of(figures(near, profile()), "mix").status == "missed"


def test_no_such_box_is_an_answer_where_the_search_is_described() -> None:
    near = mix({"direct": 0.2, "relay": 0.101, "mixed": 0.10}, note="64 pairs of sizes priced")
    found = of(figures(near, profile()), "mix")
    assert found.status == "none here" and found.passed
    assert found.note == "no such box found: 0 of 1 measured mixes win; 64 pairs of sizes priced"
    assert of(figures(move("a", {"direct": (1, 1)}, "direct"), profile()), "mix").status == "not measured"
