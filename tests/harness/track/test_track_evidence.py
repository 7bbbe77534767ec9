"""Intervals and tests over launches: right values from elsewhere, and the properties that verdicts rest on."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from relaymeter.harness.track.evidence import (
    Pair,
    Spread,
    compare,
    holm,
    moderate,
    noise,
    returns,
    shift_interval,
    spread_of,
)

times = st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=12)


def test_no_interval_of_three_launches_a_side_reaches_95_percent() -> None:
    assert shift_interval([1.0, 1.01, 1.02], [9.0, 9.1, 9.2]) is None
    assert shift_interval([1.0, 1.01, 1.02, 1.03], [9.0, 9.1, 9.2, 9.3]) is not None
    assert shift_interval([], [1.0]) is None


def test_the_interval_of_five_launches_a_side_ends_at_the_third_shift_from_both_ends() -> None:
    before, after = [1.0, 2.0, 4.0, 8.0, 16.0], [32.0, 64.0, 128.0, 256.0, 512.0]
    # shifts are 2^1 (once), 2^2 (twice), ... ; P(U <= 2) = 4/252 = .016 <= .025 < P(U <= 3) = 7/252
    assert shift_interval(before, after) == pytest.approx((2.0**2, 2.0**8))


@pytest.mark.parametrize(("before", "after"), [(4, 4), (5, 5), (5, 8), (12, 12), (3, 40)])
def test_the_interval_is_the_inversion_of_scipys_exact_test(before: int, after: int) -> None:
    rng = np.random.default_rng(before * 100 + after)
    old, new = np.exp(rng.normal(size=before)), np.exp(rng.normal(size=after))
    found = shift_interval(old.tolist(), new.tolist())
    assert found is not None
    for end, inward in zip(found, (1, -1), strict=True):
        just = {side: end * math.exp(side * inward * 1e-9) for side in (-1, 1)}
        p = {side: stats.mannwhitneyu(new / ratio, old, method="exact").pvalue for side, ratio in just.items()}
        assert p[-1] <= 0.05 < p[1]


def test_large_sides_have_the_ends_of_the_normal_approximation() -> None:
    rng = np.random.default_rng(1)
    old, new = np.exp(rng.normal(size=60)), np.exp(rng.normal(size=60) + 1)
    low, high = shift_interval(old.tolist(), new.tolist()) or (0, 0)
    assert stats.mannwhitneyu(new / low, old).pvalue == pytest.approx(0.05, abs=0.002)
    assert stats.mannwhitneyu(new / high, old).pvalue == pytest.approx(0.05, abs=0.002)


def test_a_single_row_is_students_t_test_of_logarithms() -> None:
    rng = np.random.default_rng(2)
    old, new = np.exp(rng.normal(size=7) * 0.03), np.exp(rng.normal(size=5) * 0.03 + 0.05)
    (found,) = compare([Pair(tuple(old), tuple(new))])
    assert found.alone == pytest.approx(stats.ttest_ind(np.log(new), np.log(old)).pvalue)
    assert found.p_value == found.alone
    assert found.ratio == pytest.approx(np.median([late / early for late in new for early in old]))


def test_holms_correction_has_its_textbook_values() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_rows_that_are_alike_are_held_against_one_variance_and_unlike_ones_against_their_own() -> None:
    rng = np.random.default_rng(3)
    alike = [float(value) for value in rng.chisquare(8, size=200) / 8]
    (variance, freedom), *_ = moderate(alike, [8] * 200)
    assert freedom > 100
    assert variance == pytest.approx(1.0, abs=0.1)
    unlike = [value * 10.0 ** (at % 7) for at, value in enumerate(alike)]
    found = moderate(unlike, [8] * 200)
    assert all(8 < degrees < 9 for _, degrees in found)
    assert all(value < wide < value + 3 for (wide, _), value in zip(found, unlike, strict=True) if value < 1)
    assert all(value / 2 < wide < value * 2 for (wide, _), value in zip(found, unlike, strict=True) if value > 10)


def test_moderation_has_the_values_of_smyths_formulas() -> None:
    # the prior's degrees by bisection of Smyth's equation instead of Newton's steps
    variances, degrees = [1.0, 2.0, 4.0, 8.0, 16.0], 4
    logs = [math.log(value) - special.digamma(2) + math.log(2) for value in variances]
    excess = np.var(logs, ddof=1) - special.polygamma(1, 2)
    low, high = 1e-3, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if special.polygamma(1, middle) > excess else (low, middle)
    prior = math.exp(np.mean(logs) + special.digamma(low) - math.log(low))
    right = [(2 * low * prior + degrees * value) / (2 * low + degrees) for value in variances]
    found = moderate(variances, [degrees] * 5)
    assert [value for value, _ in found] == pytest.approx(right)
    assert found[0][1] == pytest.approx(2 * low + degrees)


def test_fewer_than_four_rows_and_rows_without_repeats_are_left_alone() -> None:
    assert moderate([1.0, 9.0, 4.0], [8, 8, 8]) == [(1.0, 8.0), (9.0, 8.0), (4.0, 8.0)]
    assert moderate([1.0, 1.0, 1.0, 1.0, 5.0], [8, 8, 8, 8, 0])[-1] == (5.0, 0.0)


def test_launches_that_repeat_to_the_last_bit_decide_and_do_not_crash() -> None:
    same = Pair((1.0,) * 5, (1.0,) * 5)
    slower = Pair((1.0,) * 5, (1.1,) * 5)
    for rows in (1, 20):
        found = compare([slower, *[same] * (rows - 1)])
        assert found[0].p_value < 1e-6
        assert (found[0].low, found[0].high) == pytest.approx((1.1, 1.1), rel=1e-5)
        assert all(one.p_value == 1 and one.ratio == 1 for one in found[1:])


def test_one_launch_a_side_says_nothing() -> None:
    (found,) = compare([Pair((1.0,), (2.0,))])
    assert (found.p_value, found.low, found.high) == (1.0, None, None)
    assert not found.beyond(1.05)


def test_commits_that_differ_by_more_than_their_launches_are_the_unit_of_evidence() -> None:
    rng = np.random.default_rng(4)
    quiet = [tuple(np.exp(rng.normal(size=5) * 0.01)) for _ in range(30)]
    days = [tuple(np.array(group) * math.exp(rng.normal() * 0.1)) for group in quiet]
    (alike, many), (apart, few) = (noise([spread_of(groups, ordered=True)])[0] for groups in (quiet, days))
    assert alike == pytest.approx(1e-4, rel=0.3)
    assert many == 120
    assert apart == pytest.approx(5 * 0.01, rel=0.7)
    assert few == 7


def test_the_spread_between_commits_is_not_told_of_three_nor_moved_by_a_change() -> None:
    rng = np.random.default_rng(5)
    groups = [np.exp(rng.normal(size=5) * 0.02) for _ in range(40)]
    stepped = [group * (1.5 if at >= 20 else 1.0) for at, group in enumerate(groups)]
    alone = spread_of(groups[:3])
    few = spread_of(groups[:3], ordered=True)
    assert few.between == pytest.approx(alone.within + 5 * 0.03**2), "3 % is assumed"
    assert spread_of([group[:1] for group in groups[:3]], ordered=True).between_freedom == 0
    assert spread_of(groups[:1], ordered=True).between_freedom == 0
    assert spread_of(stepped, ordered=True).between < 3 * spread_of(groups, ordered=True).between
    assert isinstance(spread_of(groups), Spread)


@settings(max_examples=60, deadline=None)
@given(before=times, after=times)
def test_turning_the_sides_round_turns_the_ratio_round_and_keeps_the_p(before: list[float], after: list[float]) -> None:
    (there,) = compare([Pair(tuple(before), tuple(after))])
    (back,) = compare([Pair(tuple(after), tuple(before))])
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.alone == pytest.approx(back.alone)
    assert there.low is not None and there.high is not None and back.low is not None and back.high is not None
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))
    assert there.low <= there.ratio <= there.high


@settings(max_examples=60, deadline=None)
@given(before=times, after=times)
def test_a_rate_is_judged_as_the_time_it_stands_for(before: list[float], after: list[float]) -> None:
    (as_time,) = compare([Pair(tuple(before), tuple(after))])
    (as_rate,) = compare([Pair(tuple(1 / x for x in before), tuple(1 / x for x in after), higher_is_better=True)])
    assert as_rate.alone == pytest.approx(as_time.alone, abs=1e-9)
    assert as_rate.ratio == pytest.approx(as_time.ratio)


def test_the_interval_is_as_wide_as_the_noise_of_the_test_makes_it() -> None:
    pair = Pair((0.99, 1.0, 1.0, 1.0, 1.01), (1.19, 1.2, 1.2, 1.2, 1.21))
    days = Spread(within=1e-4, within_freedom=20, between=5 * 0.05**2, between_freedom=3)
    (found,) = compare([pair], [days])
    reach = math.exp(stats.t.ppf(0.975, 3) * math.sqrt(5 * 0.05**2 * 2 / 5))
    assert (found.ratio, found.low, found.high) == pytest.approx((1.2, 1.2 / reach, 1.2 * reach), rel=1e-3)
    assert found.p_value > 0.05 and found.low is not None and found.low < 1
    (rate,) = compare([Pair(pair.after, pair.before, higher_is_better=True)], [days])
    assert (rate.low, rate.high) == pytest.approx((found.low, found.high))


def test_the_exact_interval_holds_its_promise_over_every_split_of_ten_values() -> None:
    values = np.exp(np.arange(10) * 0.1)
    missed = 0
    for chosen in combinations(range(10), 5):
        old, new = values[list(chosen)], np.delete(values, chosen)
        low, high = shift_interval(old.tolist(), new.tolist()) or (0, 0)
        missed += not low <= 1 <= high
    assert missed / math.comb(10, 5) <= 0.05


@pytest.mark.parametrize(
    ("levels", "after", "found"),
    [
        ([10, 12, 10, 10, 12, 12, 10], 12, 3),
        ([10, 12, 10, 10, 12, 12, 12, 12, 10], 12, 1),  # four are a level
        ([12, 10, 10], 12, 0),  # nobody saw it begin
        ([10, 10, 12], 12, 0),  # it has not come back
        ([10, 10.4, 10, 12, 10], 13, 0),  # less slow, and no more than chance
        ([10, 12, 10], 9, 0),  # faster is no alarm
        ([[10] * 5, [12] * 2, [10] * 5], 12, 0),  # two slow launches are no day
        ([[10] * 5, [12] * 2, [12], [10] * 5], 12, 2),
        ([], 12, 0),
    ],
)
def test_days_as_slow_as_the_newest_count_where_they_were_few_and_came_back(
    levels: list[float | list[float]], after: float, found: int
) -> None:
    groups = [level if isinstance(level, list) else [level] * 5 for level in levels]
    base = [10.0] * 5 if levels else []
    assert returns(groups, base, [after] * 5, 0.02**2, 20) == found
    turned = [[1 / level for level in group] for group in groups]
    rates = returns(turned, [1 / value for value in base], [1 / after] * 5, 0.02**2, 20, higher_is_better=True)
    assert rates == found


def test_days_are_counted_and_not_the_commits_launched_on_them() -> None:
    def found(days: list[str], own_days: int = 1) -> int:
        groups = [[10.0] * 5, *[[12.0] * 5] * 5, [10.0] * 5]
        named = [{"a"}, *({day} for day in days), {"z"}]
        return returns(groups, [10.0] * 5, [12.0] * 5, 0.02**2, 20, days=named, own_days=own_days)

    assert found(list("bbbbb")) == found(list("bbccd")) == 5
    assert found(list("bbcde")) == 0, "four days are a level"
    assert (found(list("bbbbb"), 3), found(list("bbbbb"), 4)) == (5, 0), "and so are four that are judged"
