"""What launches say about a ratio: an exact interval, and a test that holds for a whole run of rows. No torch import.

``compare(pairs)`` gives a ``Finding`` for each ``Pair``. Pure. Everything is over the logarithms of the launches'
medians: the launch is the unit of evidence, its iterations are not.

- Ratio: the median of the ratios of every launch after to every launch before (Hodges and Lehmann 1963): with few
  launches it lies nearer to the truth than the ratio of the two medians, from which it may differ a little.
- Interval (95 %): the exact inversion of the Mann-Whitney test of a shift, around that ratio, and as wide as the noise
  of the test below makes it where that is wider: what the test cannot see, the interval does not exclude. Three
  launches a side never reach 95 % in it, so that three can never decide.
- Test: Student's t with each row's variance drawn towards what all rows of the run have in common (moderated t, Smyth
  2004, doi 10.2202/1544-6115.1027), then Holm's correction over the rows. Why not Mann-Whitney for the test too: with 5
  launches a side its smallest p is 1/126, so that a run of 20 rows can either not be corrected for its 20 tests (2 to 5
  of 100 unchanged runs raise an alarm) or never decide. ``python -m relaymeter.harness.bench --only track`` has the
  rates of both. The rows share their launches, and Holm's correction holds for any dependence between them.
- Where commits of a history differ from their neighbours by more than their launches explain (F test, p < .1), the
  commit is the unit of evidence instead: a day on which everything was slow is one event. With fewer than 4 commits
  nobody can tell how far they differ: 3 % is assumed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from scipy import special

__all__ = [
    "MIN_LAUNCHES",
    "Finding",
    "Pair",
    "Spread",
    "compare",
    "finding",
    "holm",
    "moderate",
    "noise",
    "returns",
    "shift_interval",
    "shift_of",
    "spread_of",
    "t_test",
]

#: Launches that a side needs for a verdict upon times.
MIN_LAUNCHES = 5
#: Smallest variance of a logarithm that is believed: a millionth, what a clock resolves.
_LEAST_VARIANCE = 1e-12
#: With fewer rows the variance that they have in common cannot be told.
_LEAST_ROWS = 4
#: Above this many pairs of launches the ranks of the interval come from the normal approximation.
_MOST_EXACT_PAIRS = 2500
_COMMITS_DIFFER = 0.1
#: With fewer commits the spread between them cannot be told.
_LEAST_COMMITS = 4
#: How far commits are taken to differ (of the logarithm) where they are too few to tell, and to what degree of freedom.
_ASSUMED_SCATTER, _ASSUMED_FREEDOM = 0.03, 100
#: A stretch of at most so many days is a few days of the machine. What stays for longer is a level.
_LONGEST_STRETCH = 3
#: Launches that a stretch needs: a single slow launch is no slow day.
_LEAST_OF_STRETCH = 3
#: A commit was as slow as another one from this share of its slow-down (of the logarithm) on.
_AS_SLOW = 0.75
#: Two-sided p, corrected for all commits before, below which one of them was another day.
_ANOTHER_DAY = 0.05
#: Below this quantile lies all but one tail of an interval of 95 %.
_TAIL = 0.975
#: Degrees of freedom that stand for a known variance.
_MANY = 1e6

Groups = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Pair:
    """The launches of one row: per side the launches' medians, above 0."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    higher_is_better: bool = False


@dataclass(frozen=True)
class Spread:
    """How far launches lie from their commit, and commits from their neighbours: variances of logarithms, both per
    launch, so that they are alike where commits differ by no more than their launches explain."""

    within: float
    within_freedom: int
    between: float = _LEAST_VARIANCE
    between_freedom: int = 0


@dataclass(frozen=True)
class Finding:
    """What the launches of one row say."""

    ratio: float
    """Above 1 is worse, whichever way the metric counts."""
    low: float | None
    """Ends of the 95 % interval of the ratio; None where the launches are too few for one."""
    high: float | None
    alone: float
    """Two-sided p of this row as if it were the only one; 1 where no launch repeats."""
    p_value: float
    """The same, corrected for all rows of the run."""

    def corrected(self, p_value: float) -> Finding:
        """The same with a p that was corrected otherwise."""
        return replace(self, p_value=p_value)

    def beyond(self, at_least: float) -> bool:
        """Whether the ratio passes ``at_least`` either way, and its interval lies on that side of 1."""
        if self.low is None or self.high is None:
            return False
        return (self.ratio > at_least and self.low > 1) or (self.ratio < 1 / at_least and self.high < 1)


@cache
def _rank(before: int, after: int, tail: float) -> int:
    """Which of the ordered differences ends an interval whose tails hold at most ``tail`` each; 0: none does."""
    pairs = before * after
    if not pairs:
        return 0
    if pairs > _MOST_EXACT_PAIRS:
        spread = math.sqrt(pairs * (before + after + 1) / 12)
        return max(0, math.floor(pairs / 2 + statistics.NormalDist().inv_cdf(tail) * spread))
    # why: the number of orders with u inversions is the coefficient of x^u in the Gaussian binomial
    counts = [1] + [0] * pairs
    for step in range(1, min(before, after) + 1):
        top = max(before, after) + step
        for at in range(pairs, top - 1, -1):
            counts[at] -= counts[at - top]
        for at in range(step, pairs + 1):
            counts[at] += counts[at - step]
    most = tail * math.comb(before + after, before)
    found = below = 0
    for count in counts:
        below += count
        if below > most:
            break
        found += 1
    return found


def shift_of(before: Sequence[float], after: Sequence[float]) -> float:
    """The ratio of ``after`` to ``before`` (values above 0, at least one each): the median of all pairs."""
    return math.exp(float(np.median(_shifts(before, after))))


def _shifts(before: Sequence[float], after: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.sort((np.log(after)[:, None] - np.log(before)[None, :]).ravel())


def shift_interval(
    before: Sequence[float], after: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Interval of the ratio of ``after`` to ``before`` (values above 0) by the exact Mann-Whitney test, wider where
    values are equal. None where no interval of these launches reaches ``confidence``."""
    rank = _rank(len(before), len(after), (1 - confidence) / 2)
    if not rank:
        return None
    shifts = _shifts(before, after)
    return math.exp(shifts[rank - 1]), math.exp(shifts[-rank])


def spread_of(groups: Groups, *, ordered: bool = False) -> Spread:
    """The spread of launches (values above 0) in ``groups``, each of one commit or side.

    ``ordered``: neighbours follow each other in time, so that the spread between commits is told too, by the median
    square of the steps from one to the next, which a few true changes hardly move.
    """
    logs = [[math.log(value) for value in group] for group in groups]
    means = [statistics.fmean(group) for group in logs]
    inner = sum(len(group) - 1 for group in logs)
    within = sum((value - mean) ** 2 for group, mean in zip(logs, means, strict=True) for value in group)
    spread = Spread(max(within / inner, _LEAST_VARIANCE) if inner else _LEAST_VARIANCE, inner)
    if not ordered:
        return spread
    if len(logs) < _LEAST_COMMITS:
        if not inner or len(logs) < 2:
            return spread
        each = len(logs) / sum(1 / len(group) for group in logs)
        return Spread(spread.within, inner, spread.within + each * _ASSUMED_SCATTER**2, _ASSUMED_FREEDOM)
    steps = [
        (second - first) ** 2 / (1 / len(one) + 1 / len(other))
        for first, second, one, other in zip(means, means[1:], logs, logs[1:], strict=False)
    ]
    # why: 0.455 is the median of a squared normal of variance 1; a median of n squares of steps that share their ends
    # tells as much of a variance as n / 4 free squares
    between = max(statistics.median(steps) / 0.455, _LEAST_VARIANCE)
    return Spread(spread.within, inner, between, max(1, len(steps) // 4))


def _inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = ``value`` > 0, by Newton's steps on its reciprocal, which is nearly straight."""
    found = 0.5 + 1 / value
    for _ in range(50):
        slope = float(special.polygamma(2, found))
        trigamma = float(special.polygamma(1, found))
        step = trigamma * (1 - trigamma / value) / slope
        found += step
        if -step < 1e-8 * found:
            break
    return found


def moderate(variances: Sequence[float], freedoms: Sequence[int]) -> list[tuple[float, float]]:
    """Per row its variance, drawn towards the one in common, and the degrees of freedom that this one has.

    The fewer degrees a row has and the more alike the rows are, the further it is drawn. A row without any keeps none.
    """
    own = list(zip(variances, freedoms, strict=True))
    told = [(variance, freedom) for variance, freedom in own if freedom]
    if len(told) < _LEAST_ROWS:
        return [(variance, float(freedom)) for variance, freedom in own]
    halves = np.array([freedom / 2 for _, freedom in told])
    values = np.array([variance for variance, _ in told])
    # why: a row that repeats to the last bit says nothing of the others, and its logarithm would drown theirs
    values = np.maximum(values, 1e-5 * np.median(values))
    logs = np.log(values) - special.digamma(halves) + np.log(halves)
    excess = float(np.var(logs, ddof=1) - np.mean(special.polygamma(1, halves)))
    prior, freedom = math.exp(float(np.mean(logs))), _MANY
    if excess > 1e-6:
        half = _inverse_trigamma(excess)
        prior, freedom = prior * math.exp(float(special.digamma(half)) - math.log(half)), min(2 * half, _MANY)
    return [
        ((freedom * prior + degrees * variance) / (freedom + degrees), freedom + degrees)
        if degrees
        else (variance, 0.0)
        for variance, degrees in own
    ]


def noise(spreads: Sequence[Spread]) -> list[tuple[float, float]]:
    """Per row the variance of a launch's logarithm that a shift is held against, and its degrees of freedom: that
    within commits, or that between them where it is the larger beyond chance. Both are moderated over the rows."""
    inner = moderate([spread.within for spread in spreads], [spread.within_freedom for spread in spreads])
    outer = moderate([spread.between for spread in spreads], [spread.between_freedom for spread in spreads])
    found = []
    for (variance, freedom), (larger, degrees) in zip(inner, outer, strict=True):
        differ = bool(degrees and freedom) and float(special.fdtrc(degrees, freedom, larger / variance))
        found.append(
            (larger, degrees) if degrees and (not freedom or differ < _COMMITS_DIFFER) else (variance, freedom)
        )
    return found


def returns(
    earlier: Groups,
    base: Sequence[float],
    after: Sequence[float],
    variance: float,
    freedom: float,
    *,
    days: Sequence[Collection[str]] | None = None,
    own_days: int = 1,
    higher_is_better: bool = False,
) -> int:
    """How many of the ``earlier`` commits (launches, above 0, in order) were as slow as ``after``, in stretches of a
    few days that began at the level of ``base`` and came back to it. Such a history says that a machine has slow
    days: that ``after`` is slow is then no sign of a change. 0 where it is not slower than ``base``, or one is empty.

    As slow: by three quarters of the slow-down at least, and beyond chance or as far beyond it as ``after`` is, for the
    ``variance`` of a launch's logarithm with ``freedom`` degrees. What began before the history, or lasted longer, is a
    level, which may come again. So is ``after`` where its launches are of more days than that: 0.

    ``days``: of each earlier commit those on which it was launched; None: each on a day of its own. ``own_days``: on
    how many ``after`` was.
    """
    if not base or not after or not freedom or own_days > _LONGEST_STRETCH:
        return 0
    sign = -1 if higher_is_better else 1
    low, high = (sign * statistics.median(map(math.log, side)) for side in (base, after))
    if high <= low:
        return 0

    def chance(group: Sequence[float]) -> tuple[float, float]:
        step = sign * statistics.fmean(map(math.log, group)) - low
        return step, 2 * float(special.stdtr(freedom, -step / math.sqrt(variance * (1 / len(group) + 1 / len(base)))))

    _, own = chance(after)
    steps = [chance(group) for group in earlier]
    limit = max(own, _ANOTHER_DAY / max(1, len(steps)))
    slow = [step > _AS_SLOW * (high - low) and p_value <= limit for step, p_value in steps]
    found = 0
    whole = False
    stretch: list[int] = []
    for at, now in enumerate(slow):
        if now:
            stretch.append(at)
            continue
        lasted = len({day for one in stretch for day in (days[one] if days else (str(one),))})
        launches = sum(len(earlier[one]) for one in stretch)
        if whole and lasted <= _LONGEST_STRETCH and launches >= _LEAST_OF_STRETCH:
            found += len(stretch)
        whole, stretch = True, []
    return found


def t_test(pair: Pair, variance: float, freedom: float) -> float:
    """Two-sided p of a shift between the sides' means of logarithms; 1 without degrees of freedom."""
    if not freedom:
        return 1.0
    shift = statistics.fmean(map(math.log, pair.after)) - statistics.fmean(map(math.log, pair.before))
    score = abs(shift) / math.sqrt(variance * (1 / len(pair.before) + 1 / len(pair.after)))
    return min(1.0, 2 * float(special.stdtr(freedom, -score)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p corrected so that the chance of any false one among all is held (Holm 1979), whatever their dependence."""
    found = [1.0] * len(p_values)
    worst = 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for at, row in enumerate(order):
        worst = max(worst, min(1.0, p_values[row] * (len(order) - at)))
        found[row] = worst
    return found


def compare(pairs: Sequence[Pair], spreads: Sequence[Spread] | None = None) -> list[Finding]:
    """What the launches say of every row of one run. Every side of a pair has at least one launch.

    ``spreads``: of every row, where more is known of it than its two sides tell.
    """
    if spreads is None:
        spreads = [spread_of((pair.before, pair.after)) for pair in pairs]
    noises = noise(spreads)
    alone = [t_test(pair, *own) for pair, own in zip(pairs, noises, strict=True)]
    rows = zip(pairs, noises, alone, holm(alone), strict=True)
    return [finding(pair, own, p, corrected) for pair, own, p, corrected in rows]


def finding(pair: Pair, own: tuple[float, float], alone: float, corrected: float) -> Finding:
    """The ratio of a pair and its interval beside the p values of its row. ``own``: its noise, as ``noise`` has it; the
    interval is at least as wide as that of the test which this noise is for, so that the two do not gainsay each
    other."""
    sides = (pair.after, pair.before) if pair.higher_is_better else (pair.before, pair.after)
    ratio, ends, (variance, freedom) = shift_of(*sides), shift_interval(*sides), own
    if ends is None or not freedom:
        return Finding(ratio=ratio, low=None, high=None, alone=alone, p_value=corrected)
    wide = math.sqrt(variance * (1 / len(pair.before) + 1 / len(pair.after)))
    # why: an interval without end says no more than one of a millionfold
    reach = math.exp(min(float(special.stdtrit(freedom, _TAIL)) * wide, math.log(1e6)))
    low, high = min(ends[0], ratio / reach), max(ends[1], ratio * reach)
    return Finding(ratio=ratio, low=low, high=high, alone=alone, p_value=corrected)
