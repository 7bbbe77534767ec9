"""The verdict upon one row: a time or rate by its launches, an exact metric by equality. Pure; no torch import.

``timed_row(...)`` and ``exact_row(...)`` give a ``verdicts.Row`` with its whole wording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from relaymeter.harness.track.evidence import MIN_LAUNCHES, Finding
from relaymeter.harness.track.records import metric_of
from relaymeter.harness.track.verdicts import Row, Verdict
from relaymeter.units import counted

__all__ = ["MISSED_SLOWDOWN", "SUSPECT", "Exact", "Timed", "bare_row", "exact_row", "timed_row"]

#: A row that does not exclude a slow-down of this ratio cannot be called ok.
MISSED_SLOWDOWN = 1.25
#: A slow-down with a corrected p below this one, though above the level, is not called ok either.
SUSPECT = 0.1

Value = int | str


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One timed row: its launches' medians on both sides, both at least one, and what they say."""

    case: str
    metric: str
    before: float
    """Median of the launches, in the metric's unit."""
    after: float
    launches: tuple[int, int]
    finding: Finding
    since: str = ""
    """Of a change in a history: ``since 1a2b3c4d5 (2 commits ago)``, or ``among the newest 5 commits``."""
    doubt: str = ""
    """Why a slow-down of it need not be a change."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """One exact row: its value in every launch of both sides."""

    case: str
    metric: str
    before: Sequence[Value]
    after: Sequence[Value]
    since: str = ""


def bare_row(
    case: str, metric: str, verdict: Verdict, text: str, *,
    before: float | Value | None = None, after: float | Value | None = None, launches: tuple[int, int] = (0, 0),
) -> Row:  # fmt: skip
    """A row without a ratio. Pure."""
    return Row(
        case=case, metric=metric, verdict=verdict, before=before, after=after, ratio=None, ratio_low=None,
        ratio_high=None, p_value=None, launches_before=launches[0], launches_after=launches[1], text=text,
    )  # fmt: skip


def timed_row(row: Timed, *, level: float, at_least: float, rows: int, hint: str) -> Row:
    """The verdict upon a time or rate.

    ``level``: the corrected two-sided p below which a change counts. ``rows``: how many the correction was for.
    ``hint``: how to take more launches, for people.
    """
    verdict, text = _judge(row, level=level, at_least=at_least, rows=rows, hint=hint)
    return Row(
        case=row.case,
        metric=row.metric,
        verdict=verdict,
        before=row.before,
        after=row.after,
        ratio=row.finding.ratio,
        ratio_low=row.finding.low,
        ratio_high=row.finding.high,
        p_value=row.finding.p_value,
        launches_before=row.launches[0],
        launches_after=row.launches[1],
        text=text,
    )


def _judge(row: Timed, *, level: float, at_least: float, rows: int, hint: str) -> tuple[Verdict, str]:
    found = row.finding
    fewest = min(row.launches)
    if fewest < MIN_LAUNCHES:
        return "inconclusive", (
            f"{counted(fewest, 'launch').replace('launchs', 'launches')} on a side can never decide, {MIN_LAUNCHES} "
            f"are needed: {_change_text(row)} so far"
        )
    if row.doubt and found.p_value < SUSPECT and found.ratio > at_least:
        return "inconclusive", f"{_whole_text(row)}: {row.doubt}"
    if found.p_value < level and found.beyond(at_least):
        return ("regression" if found.ratio > 1 else "improvement"), _whole_text(row)
    if found.p_value < SUSPECT and found.ratio > at_least:
        chance = max(1, round(100 * found.p_value))
        return "inconclusive", (
            f"{_whole_text(row)}: not beyond chance, which shows as much somewhere among {counted(rows, 'row')} in "
            f"{chance} of 100 unchanged runs: {hint}"
        )
    plain = f"{_times(found.ratio)}{_interval(found.low, found.high)}, {_launches(row.launches)}"
    if found.high is None or found.high >= MISSED_SLOWDOWN:
        limit = "any slow-down" if found.high is None else f"a slow-down of {_times(found.high)}"
        return "inconclusive", f"{limit} is not excluded: {plain}: {hint}"
    return "ok", f"no change shown: {plain}"


def _times(ratio: float) -> str:
    if ratio < 2:
        return f"{ratio:.2f}x"
    return f"{ratio:.3g}x" if ratio < 100 else f"{ratio:.0f}x"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f", 95 % {_times(low)[:-1]}-{_times(high)[:-1]}"


def _launches(counts: tuple[int, int]) -> str:
    if counts[0] == counts[1]:
        return "1 launch" if counts[0] == 1 else f"{counts[0]} launches"
    return f"{counts[0]} and {counts[1]} launches"


def _change_text(row: Timed) -> str:
    """``1.34x slower``; from twice on with the change of the value, which is not the ratio: ``2.3x slower, +130%``."""
    ratio = row.finding.ratio
    words = f"{_times(ratio)} slower" if ratio >= 1 else f"{_times(1 / ratio)} faster"
    value = 1 / ratio if metric_of(row.metric).better == "higher" else ratio
    return words + (f", {100 * (value - 1):+.0f}%" if max(ratio, 1 / ratio) >= 2 else "")


def _whole_text(row: Timed) -> str:
    found = row.finding
    ends: tuple[float | None, float | None] = (found.low, found.high)
    if found.ratio < 1 and found.low and found.high:
        ends = (1 / found.high, 1 / found.low)
    since = f" {row.since}" if row.since else ""
    return f"{_change_text(row)}{since}{_interval(*ends)}, {_launches(row.launches)}"


def exact_row(row: Exact) -> Row:
    """The verdict upon an exact metric. Digests that differ, between the sides or within the new one, are wrong bits;
    counts that do are a regression, or where the new side has fewer an improvement, but for what a move must have
    (``Metric.fewer_is_better``). A base that differs within itself is no measure: the row is inconclusive."""
    before, after = list(dict.fromkeys(row.before)), list(dict.fromkeys(row.after))
    counts = (len(row.before), len(row.after))
    verdict, text = _judge_exact(row, before, after, counts)
    return bare_row(row.case, row.metric, verdict, text, before=before[0], after=after[-1], launches=counts)


def _judge_exact(row: Exact, before: list[Value], after: list[Value], counts: tuple[int, int]) -> tuple[Verdict, str]:
    since = f" {row.since}" if row.since else ""
    if row.metric == "digest":
        if len(after) > 1:
            return "wrong bits", f"the launches of the new side differ: {_few(after)}{since}"
        if len(before) > 1:
            return "inconclusive", f"the launches of the base differ, though this repeats exactly: {_few(before)}"
        if before != after:
            return "wrong bits", f"the digest differs: {_few([*before, *after])}{since}"
        return "ok", f"equal, {_launches(counts)}"
    if len(before) > 1:
        return "inconclusive", f"the launches of the base differ, though this repeats exactly: {_few(before)}"
    if len(after) > 1:
        return (
            "regression",
            f"the launches differ, though this repeats exactly: {_few(after)}, before {before[0]}{since}",
        )
    if before == after:
        return "ok", f"equal, {_launches(counts)}"
    old, new = before[0], after[0]
    if not isinstance(old, int) or not isinstance(new, int):
        return "regression", f"differs: {old} and {new}{since}"
    metric = metric_of(row.metric)
    unit = metric.unit
    share = f", {100 * (new / old - 1):+.3g}%" if old else ""
    better = new < old and metric.fewer_is_better
    verdict: Literal["regression", "improvement"] = "improvement" if better else "regression"
    return verdict, f"{abs(new - old):,}{unit and ' ' + unit} {'more' if new > old else 'fewer'}{share}{since}"


def _few(values: Sequence[Value]) -> str:
    shown = [str(value) for value in values[:3]]
    return ", ".join(shown) + (f" and {len(values) - 3} more" if len(values) > 3 else "")
