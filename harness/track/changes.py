"""Change points of a history: at which commit a timed metric moved, and by how much. No torch import.

``change_points(launches)`` gives them by case and metric; ``commit_groups(launches)`` the commits themselves. Pure.

A series is one metric's launches, commit by commit. It is cut where that lowers the squared distance of the launches'
logarithms from their segment's mean by more than a cut costs (optimal partitioning, Jackson et al. 2005, exact by
dynamic programming over the commits). Then the weakest cut is taken back, and its segments joined, until every cut left
is a change by itself: 5 launches or more on both sides, a ratio beyond ``at_least``, its interval on one side of 1, and
p below ``CHANGE_LEVEL`` after correction for all places and rows where one was looked for. Commits that scatter by more
than their launches explain are held against that scatter, see ``evidence``.

A cut has its place only so far as the launches beside it tell: ``Segments.earliest`` is the first commit at which the
change may have begun as well.

The newest commit has no place that was looked for: it is also held, by itself, against the launches since the last
change before it, at ``LATEST_LEVEL`` after correction over the rows. Where they differ, that is a change too, so that
the page of a history shows what its check says.

Otava (E-divisive) tests its cuts by permutations of single points; ``ruptures`` (PyPI) finds cuts, with no test, in
points of equal weight. Here a point is a commit with some launches, the variance is known from within the commits, and
a result must repeat: thirty lines on NumPy do it, so that neither is a dependency.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np

from relaymeter.harness.track.evidence import (
    MIN_LAUNCHES,
    Finding,
    Pair,
    Spread,
    compare,
    finding,
    noise,
    returns,
    spread_of,
    t_test,
)
from relaymeter.harness.track.records import LaunchRecord, metric_of

__all__ = [
    "CHANGE_LEVEL",
    "LATEST_LEVEL",
    "Change",
    "CommitGroup",
    "Segments",
    "Series",
    "SettingKey",
    "build_key",
    "change_points",
    "commit_groups",
    "commit_key",
    "committed_at",
    "cut",
    "series_of",
    "setting_key",
    "short_name",
]

#: Below this corrected two-sided p a cut is a change.
CHANGE_LEVEL = 0.01
#: Below this two-sided p, corrected over the rows, the newest commit differs from those since the last change.
LATEST_LEVEL = 0.02

#: How many times likelier than another place a cut has to be for that one to be excluded: twice its logarithm.
_EXCLUDED = 2 * math.log(20)

#: Suite, machine and configuration: what launches of one series share.
SettingKey = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class CommitGroup:
    """The launches of one commit; those of a changed checkout stand apart from those of the commit itself, and those of
    each session in it from each other: the files may have been changed in between."""

    label: str
    """Short name for people: ``1a2b3c4d5``, ``1a2b3c4d5-dirty``; the version outside a checkout."""
    commit: str | None
    dirty: bool
    launches: tuple[LaunchRecord, ...]
    """In the order of the file."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of one timed metric in one suite, machine and configuration."""

    setting: SettingKey
    case: str
    metric: str
    """Name of a ``records.Metric``."""
    index: int
    """Which of ``commit_groups(launches)`` is the first after the change, from 0."""
    commit: str | None
    """Full revision of that group."""
    label: str
    """Short name of that group."""
    before: float
    """Median of the launches' medians between the change before this one and this one, in the metric's unit."""
    after: float
    """The same from this change to the next."""
    ratio: float
    """Above 1 is worse, whichever way the metric counts."""
    p_value: float
    """Of the launches on both sides, corrected for the number of places where a change was looked for, or of rows
    where that is the newest commit."""


@dataclass(frozen=True)
class Series:
    """One timed metric of one case: the medians of its launches, commit by commit."""

    case: str
    metric: str
    indexes: tuple[int, ...]
    """Of the commits that have it, among all groups."""
    groups: tuple[tuple[float, ...], ...]
    """Per such commit the launches' medians, above 0."""
    days: tuple[frozenset[str], ...]
    """Per such commit the days on which it was launched, in UTC. Where all launches are of one day, its sessions
    instead."""

    @property
    def higher_is_better(self) -> bool:
        """Whether the metric is a rate."""
        return metric_of(self.metric).better == "higher"

    def launches(self, first: int, end: int) -> tuple[float, ...]:
        """The launches of the commits at ``first`` up to ``end``, positions in ``groups``."""
        return tuple(value for group in self.groups[first:end] for value in group)

    def pair(self, first: int, cut: int, end: int) -> Pair:
        """The launches on both sides of ``cut``."""
        return Pair(self.launches(first, cut), self.launches(cut, end), self.higher_is_better)


@dataclass(frozen=True)
class Segments:
    """A series and where it changed."""

    series: Series
    spread: Spread
    noise: tuple[float, float]
    """Variance of a launch's logarithm and its degrees of freedom, as ``evidence.noise`` has them."""
    cuts: tuple[int, ...]
    """Positions in ``series.groups`` of the first commit after each change."""
    findings: tuple[Finding, ...]
    """Of each cut."""
    latest: Finding | None = None
    """Of the newest commit of all series against the launches since the last change before it; None where this one
    has not enough launches of both."""

    def bounds(self, at: int) -> tuple[int, int, int]:
        """Where the segment before cut number ``at`` begins, the cut, and where the segment after it ends."""
        ends = (0, *self.cuts, len(self.series.groups))
        return ends[at], ends[at + 1], ends[at + 2]

    def returns(self, before: tuple[int, int], after: tuple[int, int], end: int) -> int:
        """How many commits up to ``end`` were as slow as those of ``after``, against those of ``before``, and came
        back: see ``evidence.returns``."""
        series = self.series
        return returns(
            series.groups[:end],
            series.launches(*before),
            series.launches(*after),
            *self.noise,
            days=series.days[:end],
            own_days=len(frozenset().union(*series.days[slice(*after)])),
            higher_is_better=series.higher_is_better,
        )

    def earliest(self, first: int, place: int, end: int) -> int | None:
        """The first position at which the series from ``first`` to ``end`` may as well be cut as at ``place``; None
        where this is the only one, so that its commit can be named."""
        logs = [np.log(group) for group in self.series.groups[first:end]]
        counts = np.cumsum([len(group) for group in logs])
        sums = np.cumsum([float(group.sum()) for group in logs])
        left, right = counts[:-1], counts[-1] - counts[:-1]
        apart = (sums[:-1] / left - (sums[-1] - sums[:-1]) / right) ** 2 * left * right / counts[-1]
        alike = np.flatnonzero(apart > apart[place - first - 1] - _EXCLUDED * self.noise[0]) + first + 1
        return int(alike[0]) if len(alike) > 1 else None


def short_name(commit: str | None, dirty: bool, version: str) -> str:
    """What people read of a commit: ``1a2b3c4d5``, ``1a2b3c4d5-dirty``; the version outside a checkout."""
    return (commit[:9] if commit else f"version {version}") + ("-dirty" if dirty else "")


def commit_key(launch: LaunchRecord) -> tuple[str | None, bool, str]:
    """What names a commit: the revision, whether files differed from it; outside a checkout the version."""
    return launch.commit, launch.dirty, "" if launch.commit else launch.version


def build_key(launch: LaunchRecord) -> tuple[str | None, bool, str, str]:
    """What the launches of one build share: the commit, and with changed files the session, as nothing tells whether
    two sessions had the same ones."""
    return *commit_key(launch), launch.session_id if launch.dirty else ""


def setting_key(launch: LaunchRecord) -> SettingKey:
    """What launches have to share for their times to be compared."""
    return launch.suite, launch.machine_id, launch.config_hash


def commit_groups(launches: Sequence[LaunchRecord]) -> list[CommitGroup]:
    """The launches by build, in the order in which each was committed; where that is not known of all, in the order in
    which each first occurs."""
    found: dict[tuple[str | None, bool, str, str], list[LaunchRecord]] = {}
    for launch in launches:
        found.setdefault(build_key(launch), []).append(launch)
    groups = [
        CommitGroup(label=short_name(commit, dirty, version), commit=commit, dirty=dirty, launches=tuple(group))
        for (commit, dirty, version, _), group in found.items()
    ]
    known = [time for time in map(committed_at, groups) if time is not None]
    if len(known) < len(groups):
        return groups
    return [group for _, group in sorted(zip(known, groups, strict=True), key=lambda pair: pair[0])]


def committed_at(group: CommitGroup) -> datetime | None:
    """When a build was committed, None where its launches do not say."""
    found = group.launches[0].commit_utc
    return datetime.fromisoformat(found.replace("Z", "+00:00")) if found else None


def series_of(groups: Mapping[int, Sequence[LaunchRecord]]) -> list[Series]:
    """Every timed metric of every case in launches by index of their commit. Launches in which bits were wrong, or a
    median that is not above 0, are left out."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    days: dict[tuple[str, str], dict[int, set[str]]] = {}
    dates = {launch.utc[:10] for launches in groups.values() for launch in launches}
    for index, launches in groups.items():
        for launch in launches:
            for case in launch.cases:
                for metric in case.samples if case.ok else ():
                    value = case.median(metric)
                    if value is not None and value > 0:
                        key = case.name, metric
                        found.setdefault(key, {}).setdefault(index, []).append(value)
                        # why: within one day, nothing but the commits and their sessions is there to be counted
                        day = launch.utc[:10] if len(dates) > 1 else f"{index} {launch.session_id}"
                        days.setdefault(key, {}).setdefault(index, set()).add(day)
    return [
        Series(*key, tuple(commits), tuple(map(tuple, commits.values())), tuple(map(frozenset, days[key].values())))
        for key, commits in found.items()
    ]


def cut(series: Sequence[Series], *, at_least: float) -> list[Segments]:
    """Where each series changed, the newest commit included. The rows of one suite go in together: the correction is
    for all of them."""
    spreads = [spread_of(one.groups, ordered=True) for one in series]
    places = sum(len(one.groups) - 1 for one in series)
    found = []
    for one, spread, (variance, freedom) in zip(series, spreads, noise(spreads), strict=True):
        cuts = _partition(one.groups, variance) if freedom else []
        while True:
            ends = [0, *cuts, len(one.groups)]
            pairs = [one.pair(*bounds) for bounds in zip(ends, ends[1:], ends[2:], strict=False)]
            alone = [t_test(pair, variance, freedom) for pair in pairs]
            findings = [
                finding(pair, (variance, freedom), p, min(1.0, p * places))
                for pair, p in zip(pairs, alone, strict=True)
            ]
            weak = [at for at, pair in enumerate(pairs) if not _holds(pair, findings[at], at_least)]
            if not weak:
                break
            del cuts[max(weak, key=lambda at: alone[at])]
        found.append(Segments(one, spread, (variance, freedom), tuple(cuts), tuple(findings)))
    return _with_latest(found, at_least)


def _with_latest(found: Sequence[Segments], at_least: float) -> list[Segments]:
    """The same with what is said of the newest commit, and a cut before it where it differs and is no slow day."""
    newest = max((one.series.indexes[-1] for one in found), default=-1)
    pairs: dict[int, Pair] = {}
    begins: dict[int, int] = {}
    for at, one in enumerate(found):
        last = len(one.series.groups) - 1
        begin = max((place for place in one.cuts if place < last), default=0)
        pair = one.series.pair(begin, last, last + 1)
        if one.series.indexes[-1] == newest and min(len(pair.before), len(pair.after)) >= MIN_LAUNCHES:
            pairs[at], begins[at] = pair, begin
    whole = list(found)
    said = compare(list(pairs.values()), [found[at].spread for at in pairs])
    for at, latest in zip(pairs, said, strict=True):
        one, last = found[at], len(found[at].series.groups) - 1
        if last in one.cuts:
            latest = one.findings[-1]
            if one.returns((begins[at], last), (last, last + 1), last):
                one = replace(one, cuts=one.cuts[:-1], findings=one.findings[:-1])
            whole[at] = replace(one, latest=latest)
        elif latest.p_value < LATEST_LEVEL and latest.beyond(at_least):
            if not one.returns((begins[at], last), (last, last + 1), last):
                one = replace(one, cuts=(*one.cuts, last), findings=(*one.findings, latest))
            whole[at] = replace(one, latest=latest)
        else:
            whole[at] = replace(one, latest=latest)
    return whole


def _holds(pair: Pair, found: Finding, at_least: float) -> bool:
    if min(len(pair.before), len(pair.after)) < MIN_LAUNCHES or found.p_value >= CHANGE_LEVEL:
        return False
    return found.beyond(at_least)


def _partition(groups: Sequence[Sequence[float]], variance: float) -> list[int]:
    """Cuts that minimise squared distances over ``variance`` plus a cost for each cut."""
    logs = [np.log(group) for group in groups]
    counts = np.cumsum([0, *(len(group) for group in logs)])
    # why: sums about the overall mean, so that squares do not cancel
    centre = float(np.concatenate(logs).mean())
    sums = np.cumsum([0.0, *(float((group - centre).sum()) for group in logs)])
    # why: a change is paid for with its size and its place; too low a cost only leaves more cuts to be tested
    cost = 2 * math.log(counts[-1]) * variance
    best, last = np.zeros(len(logs) + 1), np.zeros(len(logs) + 1, dtype=np.int64)
    best[0] = -cost
    for end in range(1, len(logs) + 1):
        # why: the sum of squares is the same for every partition, so that only what means explain counts
        totals = best[:end] + cost - (sums[end] - sums[:end]) ** 2 / (counts[end] - counts[:end])
        last[end] = int(np.argmin(totals))
        best[end] = totals[last[end]]
    cuts, end = [], int(last[-1])
    while end:
        cuts.append(end)
        end = int(last[end])
    return cuts[::-1]


def change_points(launches: Sequence[LaunchRecord], *, at_least: float = 1.05) -> list[Change]:
    """Every change in a history, by case, metric and commit.

    Launches of different machines, configurations or suites are held apart. Those of a changed checkout (dirty) are
    left out: nothing tells whether two of them are the same. ``Change.index`` counts ``commit_groups(launches)``.
    """
    groups = commit_groups(launches)
    settings: dict[SettingKey, dict[int, list[LaunchRecord]]] = {}
    for index, group in enumerate(groups):
        for launch in () if group.dirty else group.launches:
            settings.setdefault(setting_key(launch), {}).setdefault(index, []).append(launch)
    changes = []
    for key, kept in settings.items():
        for segments in cut(series_of(kept), at_least=at_least):
            changes += [_change(key, segments, at, groups) for at in range(len(segments.cuts))]
    return sorted(changes, key=lambda change: (change.case, change.metric, change.index))


def _change(key: SettingKey, segments: Segments, at: int, groups: Sequence[CommitGroup]) -> Change:
    series = segments.series
    first, place, end = segments.bounds(at)
    index = series.indexes[place]
    return Change(
        setting=key,
        case=series.case,
        metric=series.metric,
        index=index,
        commit=groups[index].commit,
        label=groups[index].label,
        before=statistics.median(series.launches(first, place)),
        after=statistics.median(series.launches(place, end)),
        ratio=segments.findings[at].ratio,
        p_value=segments.findings[at].p_value,
    )
