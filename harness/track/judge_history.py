"""The verdict upon a commit of a history. Pure; no torch import.

``check_history(launches, against="1a2b3c4" | "history")``.

Against a commit: its launches and those of the judged commit, as they are.

Against the ``history``: the judged commit against what came before it, so that what fails is the commit that made the
change and no later one. Times: its launches against those since the last change before it, by the same change points as
``changes`` gives to the page. Exact metrics: its value against that of the commit before it. A change that began at an
earlier commit is a note (``since 1a2b3c4d5, 2 commits ago``), no verdict; with a ``window`` of N, a change that began
at one of the N newest commits fails for as long as it is among them: for histories with few launches a commit, in which
a change of a time only comes to light some commits later. There the newest commits of the window are judged together.

Times are held against launches of the same machine, exact metrics against those of all, see ``sides.base_of``.
Launches of a changed checkout (dirty) count only as the judged build, those of one session: nothing tells whether two
sessions had the same changes. What was measured before and is not any more is undecided at the commit that dropped it,
or within the window, and a note after that.

A history cannot see what an interleaved A/B sees: a machine that is slower today than on all other days looks like a
change. Where a few commits before were as slow, and the next ones were not, the row is undecided: see
``evidence.returns``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relaymeter.errors import InputError, NothingMeasured
from relaymeter.harness.track.builds import (
    by_setting,
    earlier,
    held_text,
    named,
    named_commits,
    newest_build,
    other_build,
    other_sessions,
)
from relaymeter.harness.track.changes import LATEST_LEVEL, CommitGroup, Segments, commit_groups, cut, series_of
from relaymeter.harness.track.evidence import MIN_LAUNCHES
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.row_texts import headline
from relaymeter.harness.track.row_verdicts import Value
from relaymeter.harness.track.sides import (
    Base,
    Both,
    Key,
    base_of,
    judged,
    pair_up,
    side_of,
    values_of,
    wrong_bits,
)
from relaymeter.harness.track.verdicts import Check, Verdict
from relaymeter.units import counted

__all__ = ["check_history", "named_commits"]

_MOST_NOTES = 5
#: A change is noted while it began at one of so many newest commits.
_NOTED = 10
_MORE = "relaymeter track run adds launches"
#: Verdicts for which another setting of the judged commit is shown instead, the worst first.
_GRAVE: tuple[Verdict, ...] = ("wrong bits", "regression")
_NO_TIMES = "times are not judged, only exact metrics"
#: By index of the commit the values of its launches.
Held = Mapping[int, tuple[float | Value, ...]]


def check_history(
    launches: Sequence[LaunchRecord],
    *,
    against: str,
    commit: str | None = None,
    allow_mismatch: bool = False,
    at_least: float = 1.05,
    window: int = 1,
    exact_only: bool = False,
) -> Check:
    """The verdict upon ``commit``, as ``named_commits`` has it: by default that of the last launch.

    ``against``: another commit, or ``history``: all that occur for the first time before it. ``window``: how many of
    the newest commits fail where a change began at them. ``exact_only``: without times.

    Where the commit was launched in several settings (suite, machine, configuration), each is judged by itself. The
    verdict is that upon the one with most commits before it, or upon another that has wrong bits or a regression where
    that one has none; notes say what the others came to.

    Without a baseline every row says so (exit code 5). Where the baseline has only launches of another machine, times
    are inconclusive (exit code 4), of another configuration or suite everything, unless ``allow_mismatch``. Raises
    NothingMeasured for an empty history, and InputError where ``commit`` or ``against`` names several commits or none,
    or both the same. The parent calls it, no rank.
    """
    if not launches:
        raise NothingMeasured("the history holds no launch: relaymeter track run adds some")
    whole = newest_build(launches) if commit is None else named(commit, launches)
    if whole is None:
        raise InputError(f"the history holds no launch of {commit}: {held_text(launches)}")
    if against == "history":
        before, label = [one for one in earlier(launches, whole) if not one.dirty], ""
        said = f"{whole.label} is the first commit of the history: there is no baseline"
    else:
        group = other_build(against, whole, launches)
        before, label = list(group.launches) if group else [], group.label if group else ""
        said = f"the history holds no launch of {against}: check it out and relaymeter track run; {held_text(launches)}"
    checks = []
    for newest in by_setting(whole, before):
        suite = newest.launches[-1].suite
        old = [one for one in before if label or one.suite == suite]
        base = base_of(old, newest.launches, allowed=allow_mismatch)
        notes = [*base.mismatch.values(), *base.notes, *([_NO_TIMES] if exact_only else [])]
        found = _judged(newest, base, old, label, notes, said, at_least, window, exact_only)
        checks.append(found)
    at = min(range(len(checks)), key=lambda at: _gravity(checks[at]))  # the first of those that are as grave
    notes = [_beside(one, checks[at]) for one in checks if one is not checks[at]]
    if whole.dirty and (others := other_sessions(whole, launches)):
        notes.append(
            f"{whole.label}: launches of {counted(others, 'other session')} with changed files are left out: "
            "nothing tells whether the changes are the same"
        )
    return replace(checks[at], notes=(*checks[at].notes, *notes))


def _gravity(check: Check) -> int:
    verdicts = {row.verdict for row in check.rows}
    return next((at for at, verdict in enumerate(_GRAVE) if verdict in verdicts), len(_GRAVE))


def _beside(check: Check, shown: Check) -> str:
    """What to say of a setting of the same commit whose rows are not shown."""
    one = check.after
    where = f"suite {check.suite}, machine {one.machine_id}, configuration {one.config_hash}"
    how = f"--suite {check.suite} shows it" if check.suite != shown.suite else "in a --history of its own it is shown"
    launches = "1 launch" if one.launches == 1 else f"{one.launches} launches"
    return f"{launches} of {one.label} in another setting ({where}) are judged apart: {headline(check)}: {how}"


def _judged(
    newest: CommitGroup,
    base: Base,
    before: Sequence[LaunchRecord],
    label: str,
    notes: list[str],
    said: str,
    at_least: float,
    window: int,
    exact_only: bool,
) -> Check:
    """The verdict upon launches of one setting. ``label``: of the commit that they are held against; empty: all."""
    right, told = _right_ones(base)
    notes += told if before else [said]
    rows = pair_up(right, newest.launches, exact_only=exact_only)
    if before and not label:
        groups = [*commit_groups(right.exact), newest]
        label = groups[0].label if len(groups) == 2 else f"the {counted(len(groups) - 1, 'commit')} before"
        if not right.exact:
            label = "the commits before"
        rows, told = _over_time(rows, groups, right, at_least, window)
        notes += told
    wrong = wrong_bits(newest.launches, newest.label)
    found = judged(rows, wrong, level=LATEST_LEVEL, at_least=at_least, hint=_MORE)
    return Check(
        suite=newest.launches[-1].suite,
        kind="history",
        before=side_of(base.times or base.exact or before, label) if before else None,
        after=side_of(newest.launches, newest.label),
        rows=found.rows,
        mismatch=tuple(base.mismatch),
        notes=(*notes, *found.notes),
    )


def _right_ones(base: Base) -> tuple[Base, list[str]]:
    """The base without the cases in which bits were wrong: no baseline, and no fault of what is checked."""
    wrong = wrong_bits(base.exact, "the base")

    def kept(launches: Sequence[LaunchRecord]) -> tuple[LaunchRecord, ...]:
        return tuple(replace(launch, cases=tuple(case for case in launch.cases if case.ok)) for launch in launches)

    right = replace(base, times=kept(base.times), exact=kept(base.exact))
    return right, [f"{case}: {text}: left out" for case, text in wrong.items()]


def _over_time(
    rows: Sequence[Both], groups: Sequence[CommitGroup], base: Base, at_least: float, window: int
) -> tuple[list[Both], list[str]]:
    """The rows of the last of ``groups`` against what came before it, and notes of earlier changes."""
    machines = {launch.machine_id for launch in base.times}
    kept = {at: [one for one in group.launches if one.machine_id in machines] for at, group in enumerate(groups)}
    kept[len(groups) - 1] = list(groups[-1].launches) if machines else []
    wanted = {(one.case, one.metric) for one in rows}
    timed: dict[Key, Both] = {}
    notes = []
    for segments in cut(series_of(kept), at_least=at_least):
        both, said = _newest_of(segments, groups, window)
        timed[both.case, both.metric] = both
        notes += said if (both.case, both.metric) in wanted else []
    exact = _by_row({at: values_of(group.launches) for at, group in enumerate(groups)})
    times = _by_row({at: values_of(launches) for at, launches in kept.items()})
    cases = {case.name for launch in groups[-1].launches for case in launch.cases}
    dropped: dict[tuple[str, int], list[str]] = {}
    found = []
    for one in rows:
        key = (one.case, one.metric)
        held, said = one, []
        if one.refused:
            pass
        elif not one.after and (at := _dropped_at((exact if one.exact else times).get(key, {}), groups, kept, one)):
            if len(groups) - 1 - at >= window:
                dropped.setdefault((one.case, at), []).append(one.metric)
                continue
            held = replace(one, since=_since(at, groups))
        elif one.exact:
            held, said = _exact_of(one, exact.get(key, {}), groups, window)
        else:
            held = timed.get(key, one)
        notes += said
        found.append(held)
    for (case, at), metrics in dropped.items():
        if len(groups) - 1 - at <= _NOTED:
            what = f"{case}: {', '.join(metrics)}" if case in cases else case
            notes.append(f"{what} is not measured any more {_since(at, groups)}: not this commit's change")
    if len(notes) > _MOST_NOTES:
        notes = [*notes[:_MOST_NOTES], f"and {len(notes) - _MOST_NOTES} more that changed before"]
    return found, notes


def _by_row(values: Mapping[int, Mapping[Key, Sequence[float | Value]]]) -> Mapping[Key, Held]:
    """The values of every row by commit."""
    found: dict[Key, dict[int, tuple[float | Value, ...]]] = {}
    for at, rows in values.items():
        for key, held in rows.items():
            found.setdefault(key, {})[at] = tuple(held)
    return found


def _dropped_at(
    held: Held, groups: Sequence[CommitGroup], kept: Mapping[int, Sequence[LaunchRecord]], one: Both
) -> int | None:
    """Index of the first commit without a row that the newest one lacks; None where that has it, with no value."""
    newest = len(groups) - 1
    if not held or newest in held:
        return None
    last = max(held)
    return next(at for at in range(last + 1, newest + 1) if at == newest or one.exact or kept[at])


def _since(index: int, groups: Sequence[CommitGroup]) -> str:
    ago = len(groups) - 1 - index
    return f"since {groups[index].label}" + (f" ({counted(ago, 'commit')} ago)" if ago else "")


def _newest_of(segments: Segments, groups: Sequence[CommitGroup], window: int) -> tuple[Both, list[str]]:
    """What of a series is held against what, and notes of changes that are not."""
    series = segments.series
    newest, count = len(groups) - 1, len(series.groups)
    has_newest = series.indexes[-1] == newest
    reported = None
    if segments.cuts and newest - series.indexes[segments.cuts[-1]] < window:
        reported = len(segments.cuts) - 1
    notes = []
    for at, found in enumerate(segments.findings):
        index = series.indexes[segments.cuts[at]]
        if at != reported and newest - index <= _NOTED:
            what = f"{found.ratio:.2f}x slower" if found.ratio > 1 else f"{1 / found.ratio:.2f}x faster"
            notes.append(f"{series.case}: {series.metric} is {what} {_since(index, groups)}: not this commit's change")
    last = count - 1 if has_newest else count
    begin, place = max((cut for cut in segments.cuts if cut < last), default=0), last
    since, p_value = "", segments.latest.p_value if segments.latest else None
    if reported is not None:
        begin, place, _ = segments.bounds(reported)
        since, p_value = _since(series.indexes[place], groups), segments.findings[reported].p_value
    elif has_newest and len(series.groups[-1]) < MIN_LAUNCHES:
        # why: with few launches a commit, those of the window together are what can be judged
        while place - 1 > begin and newest - series.indexes[place - 1] < window:
            place -= 1
        if place < last:
            since, p_value = _since(series.indexes[place], groups), None
    doubt = ""
    if has_newest and (slow := segments.returns(begin, place, count)):
        doubt = (
            f"{slow} of the {counted(place, 'commit')} before were as slow, and the next ones were not: a slow day of "
            "the machine looks the same: add launches on another day, or compare with --ab"
        )
    return (
        Both(
            case=series.case,
            metric=series.metric,
            doubt=doubt,
            before=series.launches(begin, place),
            after=series.launches(place, count) if has_newest else (),
            since=since,
            spread=segments.spread,
            p_value=p_value,
        ),
        notes,
    )


def _exact_of(one: Both, values: Held, groups: Sequence[CommitGroup], window: int) -> tuple[Both, list[str]]:
    """An exact metric of the newest commit against its value at the commit before, or before it changed last where
    that was within the window, and a note of an earlier change."""
    held = [(at, found) for at, found in values.items() if found]
    if len(held) < 2 or not one.after:
        return one, []
    place = len(held) - 1
    while place and set(held[place - 1][1]) == set(held[place][1]):
        place -= 1
    index, newest = held[place][0], len(groups) - 1
    before = replace(one, before=held[-2][1])
    if not place or newest - index > max(_NOTED, window - 1):
        return before, []
    since = _since(index, groups)
    if newest - index < window:
        return replace(one, before=held[place - 1][1], since=since), []
    old, new = held[place - 1][1][-1], held[place][1][-1]
    return before, [f"{one.case}: {one.metric} is {new}, not {old}, {since}: not this commit's change"]
