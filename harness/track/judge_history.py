"""The verdict upon a commit of a history. Pure; no torch import.

``check_history(launches, against="1a2b3c4" | "history")``.

Against a commit: its launches and those of the judged commit, and no others.

Against the ``history``: the judged commit against what came before it, so that what fails is the commit that made the
change and no later one. Times: its launches against those since the last change before it, by the same change points as
``changes`` gives to the page. Exact metrics: its value against that of the commit before it. A change that began at an
earlier commit is a note (``since 1a2b3c4d5 (2 commits ago)``), no verdict; with a ``window`` of N, a change that began
at one of the N newest commits fails for as long as it is among them: for histories with few launches a commit, in which
a change of a time only comes to light some commits later. Each change in the window is judged against what was before
it, and the newest commits against what was before the window: the worst decides. Where the newest commit has too few
launches by itself, those of the window are judged together, and by themselves where they are slower than the rest. A
commit is named only where it is separated from those beside it, else it is ``among the newest 5 commits``.

Commits are in the order in which they were committed where all launches say so, else in that of the file. What was
launched late, as in a bisection, is said.

Times are held against launches of the same machine, exact metrics against those of all, see ``sides.base_of``.
Launches of a changed checkout (dirty) count only as the judged build, those of one session: nothing tells whether two
sessions had the same changes. What was measured before and is not any more is undecided at the commit that dropped it,
or within the window, and a note after that.

A history cannot see what an interleaved A/B sees: a machine that is slower today than on all other days looks like a
change. Where the commits of a few days before were as slow, and the next ones were not, the row is undecided, until the
slow commits are of more days than that: see ``evidence.returns``.
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
    order_note,
    other_build,
    other_sessions,
)
from relaymeter.harness.track.changes import LATEST_LEVEL, CommitGroup, Segments, commit_groups, cut, series_of
from relaymeter.harness.track.evidence import MIN_LAUNCHES, shift_of, spread_of, t_test
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.row_texts import headline
from relaymeter.harness.track.row_verdicts import SUSPECT, Value
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
from relaymeter.harness.track.wrong_base import right_ones, unheld
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

    ``against``: another commit, or ``history``: all before it. ``window``: how many of
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
        notes += [] if label else order_note(launches, [*old, *newest.launches])
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
    right = replace(base, times=tuple(right_ones(base.times)), exact=tuple(right_ones(base.exact)))
    left_out = [f"{case}: {text}: left out" for case, text in wrong_bits(base.exact, "the base").items()]
    notes += left_out if before else [said]
    rows = pair_up(right, newest.launches, exact_only=exact_only)
    if label:
        rows = [one if one.exact else _of_two_commits(one) for one in rows]
    elif before:
        groups = [*commit_groups(right.exact), newest]
        label = groups[0].label if len(groups) == 2 else f"the {counted(len(groups) - 1, 'commit')} before"
        if not right.exact:
            label = "the commits before"
        rows, told = _over_time(rows, groups, right, at_least, window)
        notes += told
    wrong = wrong_bits(newest.launches, newest.label)
    found = judged(rows, wrong, level=LATEST_LEVEL, at_least=at_least, hint=_MORE)
    check = Check(
        suite=newest.launches[-1].suite,
        kind="history",
        before=side_of(base.times or base.exact or before, label) if before else None,
        after=side_of(newest.launches, newest.label),
        rows=found.rows,
        mismatch=tuple(base.mismatch),
        notes=(*notes, *found.notes),
    )
    return unheld(check, base.times, base.exact)


def _of_two_commits(one: Both) -> Both:
    """A time with the spread that two commits of other days are taken to have."""
    before, after = (tuple(map(float, side)) for side in (one.before, one.after))
    if min((*before, *after), default=0.0) <= 0 or not before or not after:
        return one
    return replace(one, spread=spread_of((before, after), ordered=True))


def _over_time(
    rows: Sequence[Both], groups: Sequence[CommitGroup], base: Base, at_least: float, window: int
) -> tuple[list[Both], list[str]]:
    """The rows of the last of ``groups`` against what came before it, several times where changes within the window are
    judged by themselves, and notes of earlier changes."""
    machines = {launch.machine_id for launch in base.times}
    kept = {at: [one for one in group.launches if one.machine_id in machines] for at, group in enumerate(groups)}
    kept[len(groups) - 1] = list(groups[-1].launches) if machines else []
    wanted = {(one.case, one.metric) for one in rows}
    timed: dict[Key, list[Both]] = {}
    notes = []
    series = cut(series_of(kept), at_least=at_least)
    for segments in series:
        key = segments.series.case, segments.series.metric
        timed[key], said = _timed(segments, groups, window, len(series), at_least)
        notes += said if key in wanted else []
    exact = _by_row({at: values_of(group.launches) for at, group in enumerate(groups)})
    times = _by_row({at: values_of(launches) for at, launches in kept.items()})
    cases = {case.name for launch in groups[-1].launches for case in launch.cases}
    dropped: dict[tuple[str, int], list[str]] = {}
    found = []
    for one in rows:
        key = (one.case, one.metric)
        held, said = [one], []
        if one.refused:
            pass
        elif not one.after and (at := _dropped_at((exact if one.exact else times).get(key, {}), groups, kept, one)):
            if len(groups) - 1 - at >= window:
                dropped.setdefault((one.case, at), []).append(one.metric)
                continue
            held = [replace(one, since=_since(at, groups))]
        elif one.exact:
            held, said = _exact_of(one, exact.get(key, {}), groups, window)
        else:
            held = timed.get(key, held)
        notes += said
        found += held
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


def _begun(segments: Segments, bounds: tuple[int, int, int], groups: Sequence[CommitGroup]) -> str:
    """Since when a change is there: since its commit where this is separated from those beside it, else among how many
    commits it began."""
    indexes, earliest = segments.series.indexes, segments.earliest(*bounds)
    if earliest is None:
        return _since(indexes[bounds[1]], groups)
    return _among(len(groups) - indexes[earliest])


def _among(commits: int) -> str:
    return f"among the newest {counted(commits, 'commit')}"


def _both(
    segments: Segments, before: tuple[int, int], after: tuple[int, int], since: str = "", p_value: float | None = None
) -> Both:
    """What a series measured at two stretches of commits, positions in its groups."""
    series = segments.series
    doubt = ""
    if slow := segments.returns(before, after, after[0]):
        doubt = (
            f"{slow} of the {counted(after[0], 'commit')} before were as slow, and the next ones were not: a slow day "
            "of the machine looks the same: add launches on other days, or compare with --ab"
        )
    return Both(
        case=series.case,
        metric=series.metric,
        doubt=doubt,
        before=series.launches(*before),
        after=series.launches(*after),
        since=since,
        spread=segments.spread,
        p_value=p_value,
    )


def _timed(
    segments: Segments, groups: Sequence[CommitGroup], window: int, rows: int, at_least: float
) -> tuple[list[Both], list[str]]:
    """What of a series is held against what, of which the worst decides, and notes of changes before the window.
    ``rows``: how many series are judged."""
    series, cuts = segments.series, segments.cuts
    newest, count = len(groups) - 1, len(series.groups)
    last, since_last = count - 1, segments.latest.p_value if segments.latest else None
    within = [at for at, place in enumerate(cuts) if newest - series.indexes[place] < window]
    notes = []
    for at, said in enumerate(segments.findings):
        if at not in within and newest - series.indexes[cuts[at]] <= _NOTED:
            what = f"{said.ratio:.2f}x slower" if said.ratio > 1 else f"{1 / said.ratio:.2f}x faster"
            begun = _begun(segments, segments.bounds(at), groups)
            notes.append(f"{series.case}: {series.metric} is {what} {begun}: not this commit's change")
    level = cuts[-1] if cuts else 0
    if series.indexes[-1] != newest:
        return [_both(segments, (level, count), (count, count))], notes
    found = []
    first, place, _ = segments.bounds(within[0]) if within else (0, 0, 0)
    if len(within) > 1:
        at = _lasting(segments, (first, place), within, at_least)
        begun = _begun(segments, segments.bounds(at), groups)
        found.append(_both(segments, (first, place), (level, count), begun))
    end = count
    if window > 1 and len(series.groups[last]) < MIN_LAUNCHES:
        if (apart := _apart(segments, groups, window, rows, at_least)) is not None:
            end = apart
            found.append(_both(segments, (level, end), (end, count), _among(newest + 1 - series.indexes[end])))
        if not within:
            # why: with few launches a commit, those of the window together are what can be judged
            place = next(at for at in range(count) if newest - series.indexes[at] < window)
            place = min(max(place, level + 1), last)
            since = _among(newest + 1 - series.indexes[place]) if place < last else ""
            found.append(_both(segments, (level, place), (place, count), since, since_last if place == last else None))
    elif level < last or not cuts:
        found.append(_both(segments, (level, last), (last, count), "", since_last))
    for at in reversed(within):
        first, place, stop = segments.bounds(at)
        p_value = segments.findings[at].p_value if stop < count or end == count else None
        one = _both(
            segments, (first, place), (place, min(stop, end)), _begun(segments, (first, place, stop), groups), p_value
        )
        # why: a few slow days that are over are no change
        found += [one] if stop == count or not segments.returns((first, place), (place, stop), count) else []
    return found, notes


def _lasting(segments: Segments, before: tuple[int, int], within: Sequence[int], at_least: float) -> int:
    """Number of the cut, one of those ``within``, since which all are slower than ``before``; else the last one."""
    found = within[-1]
    for at in reversed(within):
        _, place, end = segments.bounds(at)
        base, after = segments.series.launches(*before), segments.series.launches(place, end)
        sides = (after, base) if segments.series.higher_is_better else (base, after)
        if shift_of(*sides) <= at_least:
            break
        found = at
    return found


def _apart(segments: Segments, groups: Sequence[CommitGroup], window: int, rows: int, at_least: float) -> int | None:
    """From which position on the newest commits, of fewer launches than decide, are slower than those since the last
    change, beyond the chance of all such places and rows; None where they are not."""
    series, newest = segments.series, len(groups) - 1
    level = segments.cuts[-1] if segments.cuts else 0
    count = len(series.groups)
    places = [
        at
        for at in range(level + 1, count)
        if newest - series.indexes[at] < window and len(series.launches(at, count)) < MIN_LAUNCHES
    ]
    chances = {}
    for at in places:
        pair = series.pair(level, at, count)
        sides = (pair.after, pair.before) if pair.higher_is_better else (pair.before, pair.after)
        if shift_of(*sides) > at_least:
            chances[at] = t_test(pair, *segments.noise)
    likely = [at for at, chance in chances.items() if chance * len(places) * rows < SUSPECT]
    return min(likely, key=chances.__getitem__, default=None)


def _exact_of(one: Both, values: Held, groups: Sequence[CommitGroup], window: int) -> tuple[list[Both], list[str]]:
    """An exact metric of the newest commit against its value before it changed first in the window, and each change in
    the window by itself, or else against the commit before; and a note of an earlier change."""
    held = [(at, found) for at, found in values.items() if found]
    if len(held) < 2 or not one.after:
        return [one], []
    newest = len(groups) - 1
    steps = [at for at in range(1, len(held)) if set(held[at - 1][1]) != set(held[at][1])]
    within = [at for at in steps if newest - held[at][0] < window]
    if within:
        first = within[0]
        found = [replace(one, before=held[first - 1][1], since=_since(held[first][0], groups))]
        for at in reversed(within if len(within) > 1 else []):
            since = _since(held[at][0], groups)
            found.append(replace(one, before=held[at - 1][1], after=held[at][1], since=since))
        return found, []
    before = [replace(one, before=held[-2][1])]
    if not steps or newest - held[steps[-1]][0] > _NOTED:
        return before, []
    index, old, new = held[steps[-1]][0], held[steps[-1] - 1][1][-1], held[steps[-1]][1][-1]
    return before, [f"{one.case}: {one.metric} is {new}, not {old}, {_since(index, groups)}: not this commit's change"]
