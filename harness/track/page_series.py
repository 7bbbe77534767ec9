"""What the page of a history draws: its launches by setting, commit, case and metric. Pure.

``settings_of(launches, changes)`` gives one ``Setting`` for each machine, configuration and suite, the newest first:
times of different ones are never in one plot.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from relaymeter.harness.track.changes import Change, CommitGroup, SettingKey, commit_groups, setting_key
from relaymeter.harness.track.records import CaseRecord, LaunchRecord, metric_of

__all__ = ["CaseView", "ExactChange", "ExactView", "MetricView", "Setting", "Spot", "settings_of"]

Exact = tuple[int | str, ...]
#: A commit with its index among all of a history.
Commit = tuple[int, CommitGroup]
#: The same with what its launches measured of one case.
Measured = tuple[int, CommitGroup, list[CaseRecord]]


@dataclass(frozen=True)
class Spot:
    """One metric at one commit."""

    label: str
    date: str
    """Day of the commit, or of its first launch."""
    dirty: bool
    values: tuple[float, ...]
    """Medians of the launches in which every bit arrived, in the metric's unit; may be empty."""
    wrong: int
    """Launches with wrong bits."""

    @property
    def median(self) -> float | None:
        """Of the launches' medians."""
        return statistics.median(self.values) if self.values else None


@dataclass(frozen=True)
class MetricView:
    """One timed metric of one case over the commits, in order."""

    metric: str
    spots: tuple[Spot, ...]
    changes: tuple[tuple[int, Change], ...]
    """With the index in ``spots`` of the first commit after the change."""


@dataclass(frozen=True)
class ExactChange:
    """An exact metric became another at a commit."""

    index: int
    """Which of ``commit_groups(launches)`` the commit is, as of ``Change``."""
    metric: str
    spot: Spot
    before: Exact
    after: Exact

    @property
    def worse(self) -> bool | None:
        """Whether there is more of it now, or less of what a move must have; None of a digest, and where launches of a
        commit differ."""
        numbers = [value for value in (*self.before, *self.after) if isinstance(value, int)]
        if len(self.before) != 1 or len(self.after) != 1 or len(numbers) != 2:
            return None
        return numbers[1] > numbers[0] or not metric_of(self.metric).fewer_is_better


@dataclass(frozen=True)
class ExactView:
    """One exact metric of one case: its value now, and every commit at which it became another one. As in a check,
    launches of a changed checkout and those with wrong bits do not count, but where there are no others."""

    metric: str
    now: Exact
    """More than one where launches of a commit differ."""
    changes: tuple[ExactChange, ...]


@dataclass(frozen=True)
class CaseView:
    """One case."""

    name: str
    metrics: tuple[MetricView, ...]
    exact: tuple[ExactView, ...]
    wrong: int
    """Launches with wrong bits."""


@dataclass(frozen=True)
class Setting:
    """The launches of one suite on one machine in one configuration."""

    suite: str
    machine_id: str
    config_hash: str
    commits: tuple[Spot, ...]
    launches: int
    last: LaunchRecord
    cases: tuple[CaseView, ...]
    left_out: int
    """Older commits that are not shown."""


def settings_of(launches: Sequence[LaunchRecord], changes: Sequence[Change], *, most_spots: int) -> list[Setting]:
    """The settings in ``launches``, the newest first.

    ``changes``: what ``change_points(launches)`` found in the same launches. ``most_spots``: of all commits of all
    metrics of a setting, so many are kept, the newest.
    """
    groups = commit_groups(launches)
    keys = dict.fromkeys(setting_key(launch) for launch in reversed(launches))
    parts: dict[SettingKey, list[Commit]] = {key: [] for key in keys}
    for index, group in enumerate(groups):
        own: dict[SettingKey, list[LaunchRecord]] = {}
        for launch in group.launches:
            own.setdefault(setting_key(launch), []).append(launch)
        for key, kept in own.items():
            parts[key].append((index, replace(group, launches=tuple(kept))))
    owned: dict[SettingKey, list[Change]] = {key: [] for key in keys}
    for change in changes:
        owned.setdefault(change.setting, []).append(change)
    return [_setting(parts[key], owned[key], most_spots) for key in keys]


def _medians(cases: Iterable[CaseRecord], metric: str) -> tuple[float, ...]:
    found = (case.median(metric) for case in cases if case.ok)
    return tuple(value for value in found if value is not None and value > 0)


def _setting(part: Sequence[Commit], changes: Sequence[Change], most_spots: int) -> Setting:
    every = [launch for _, group in part for launch in group.launches]
    last = every[-1]
    names = dict.fromkeys(case.name for launch in reversed(every) for case in launch.cases)
    cases: dict[str, list[CaseRecord]] = {name: [] for name in names}
    for case in (case for launch in every for case in launch.cases):
        cases[case.name].append(case)
    metrics = {name: _timed(cases[name]) for name in names}
    plots = sum(map(len, metrics.values()))
    kept = part[-max(20, most_spots // max(1, plots)) :]
    drawn: dict[str, list[Measured]] = {name: [] for name in names}
    for index, group in kept:
        own: dict[str, list[CaseRecord]] = {}
        for case in (case for launch in group.launches for case in launch.cases):
            own.setdefault(case.name, []).append(case)
        for name, measured in own.items():
            drawn[name].append((index, group, measured))
    found: dict[tuple[str, str], dict[int, Change]] = {}
    for change in changes:
        found.setdefault((change.case, change.metric), {})[change.index] = change
    return Setting(
        suite=last.suite,
        machine_id=last.machine_id,
        config_hash=last.config_hash,
        commits=tuple(_spot(group, (), 0) for _, group in kept),
        launches=len(every),
        last=last,
        cases=tuple(_case(name, metrics[name], drawn[name], found) for name in names),
        left_out=len(part) - len(kept),
    )


def _timed(cases: Iterable[CaseRecord]) -> tuple[str, ...]:
    """Timed metrics of a case, the whole move first."""
    found = dict.fromkeys(metric for case in cases for metric in case.samples)
    return tuple(sorted(found, key=lambda metric: metric != "move_s"))


def _case(
    name: str,
    metrics: Sequence[str],
    groups: Sequence[Measured],
    changes: Mapping[tuple[str, str], Mapping[int, Change]],
) -> CaseView:
    wrong = [sum(not case.ok for case in cases) for _, _, cases in groups]
    views = []
    for metric in metrics:
        spots = tuple(
            _spot(group, _medians(cases, metric), count) for (_, group, cases), count in zip(groups, wrong, strict=True)
        )
        own = changes.get((name, metric), {})
        at = [(place, own[index]) for place, (index, _, _) in enumerate(groups) if index in own]
        if any(spot.values for spot in spots):
            views.append(MetricView(metric, spots, tuple(at)))
    exact = dict.fromkeys(metric for _, _, cases in groups for case in cases for metric in case.exact)
    return CaseView(name, tuple(views), tuple(_exact(metric, groups) for metric in exact), sum(wrong))


def _exact(metric: str, groups: Sequence[Measured]) -> ExactView:
    now: Exact = ()
    shown: Exact = ()
    changes = []
    for index, group, cases in groups:
        taken = [case for case in cases if metric in case.exact]
        shown = _values(metric, taken) or shown
        values = () if group.dirty else _values(metric, [case for case in taken if case.ok])
        if values and now and set(values) != set(now):
            changes.append(ExactChange(index, metric, _spot(group, (), 0), now, values))
        now = values or now
    return ExactView(metric, now or shown, tuple(changes))


def _values(metric: str, cases: Iterable[CaseRecord]) -> Exact:
    return tuple(dict.fromkeys(case.exact[metric] for case in cases))


def _spot(group: CommitGroup, values: tuple[float, ...], wrong: int) -> Spot:
    first = group.launches[0]
    return Spot(group.label, (first.commit_utc or first.utc)[:10], group.dirty, values, wrong)
