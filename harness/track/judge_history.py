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
Launches of a changed checkout (dirty) count only as the judged commit: nothing tells whether two of them are the same.
A history cannot see what an interleaved A/B sees: a machine that is slower today than on all other days looks like a
change, unless the days before differed as much.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from relaymeter.errors import InputError, NothingMeasured
from relaymeter.harness.track.changes import (
    LATEST_LEVEL,
    CommitGroup,
    Segments,
    commit_groups,
    commit_key,
    cut,
    series_of,
)
from relaymeter.harness.track.evidence import MIN_LAUNCHES
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.sides import (
    Base,
    Both,
    base_of,
    judged,
    pair_up,
    settings_differ,
    side_of,
    values_of,
    wrong_bits,
)
from relaymeter.harness.track.verdicts import Check
from relaymeter.units import counted

__all__ = ["check_history", "named_commits"]

_MOST_NOTES = 5
#: A change is noted while it began at one of so many newest commits.
_NOTED = 10
_MORE = "relaymeter track run adds launches"
_NO_TIMES = "times are not judged, only exact metrics"
_WHOLE = re.compile(r"[0-9a-f]{40}(-dirty)?")


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
    """The verdict upon ``commit``, as ``named_commits`` has it: by default that of the last launch. Its launches are
    those with the machine, configuration and suite of the last of them.

    ``against``: another commit, or ``history``: all that occur for the first time before it. ``window``: how many of
    the newest commits fail where a change began at them. ``exact_only``: without times.

    Without a baseline every row says so (exit code 5). Where the baseline has only launches of another machine, times
    are inconclusive (exit code 4), of another configuration or suite everything, unless ``allow_mismatch``. Raises
    NothingMeasured for an empty history, and InputError where ``commit`` or ``against`` names several commits or none,
    or both the same. The parent calls it, no rank.
    """
    if not launches:
        raise NothingMeasured("the history holds no launch: relaymeter track run adds some")
    whole = _last(launches) if commit is None else _named(commit, launches)
    if whole is None:
        raise InputError(f"the history holds no launch of {commit}: {_held(launches)}")
    last = whole.launches[-1]
    newest = replace(whole, launches=tuple(one for one in whole.launches if not settings_differ([one], [last])))
    if against == "history":
        label, said = "", f"{newest.label} is the first commit of the history: there is no baseline"
        before = [one for one in _before(launches, last) if not one.dirty and one.suite == last.suite]
    else:
        group = _named(against, launches)
        if group is None and not _WHOLE.fullmatch(against.lower()):
            raise InputError(f"the history holds no launch of {against}: {_held(launches)}")
        if group is not None and commit_key(group.launches[-1]) == commit_key(last):
            raise InputError(
                f"{against} is the newest commit of the history itself, or the one that is judged: name an earlier "
                "one, judge another with --commit, or compare checkouts with --ab"
            )
        before = list(group.launches) if group else []
        label = group.label if group else ""
        said = f"the history holds no launch of {against}: check it out and relaymeter track run; {_held(launches)}"
    base = base_of(before, newest.launches, allowed=allow_mismatch)
    notes = [*base.mismatch.values(), *base.notes, *([_NO_TIMES] if exact_only else [])]
    if len(newest.launches) < len(whole.launches):
        left = len(whole.launches) - len(newest.launches)
        notes.append(f"launches of {newest.label} with another machine or configuration are left out: {left}")
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
        suite=last.suite,
        kind="history",
        before=side_of(base.times or base.exact or before, label) if before else None,
        after=side_of(newest.launches, newest.label),
        rows=found.rows,
        mismatch=tuple(base.mismatch),
        notes=(*notes, *found.notes),
    )


def named_commits(text: str, launches: Sequence[LaunchRecord]) -> list[CommitGroup]:
    """The commits that ``text`` may mean: the beginning of a revision (with ``-dirty`` at the end: of its changed
    checkout), or, of launches outside a checkout, the version."""
    prefix, dirty = text.removesuffix("-dirty").lower(), text.endswith("-dirty")
    return [
        group
        for group in commit_groups(launches)
        if (group.commit and prefix and group.commit.lower().startswith(prefix) and group.dirty == dirty)
        or (group.commit is None and text in (group.label, group.launches[-1].version))
    ]


def _named(text: str, launches: Sequence[LaunchRecord]) -> CommitGroup | None:
    found = named_commits(text, launches)
    if len(found) > 1:
        raise InputError(f"{text!r} begins {', '.join(group.label for group in found)}: give more of it")
    return found[0] if found else None


def _held(launches: Sequence[LaunchRecord]) -> str:
    labels = [group.label for group in commit_groups(launches)]
    return f"it holds {', '.join(labels[-3:])}" + (f" and {len(labels) - 3} older" if len(labels) > 3 else "")


def _last(launches: Sequence[LaunchRecord]) -> CommitGroup:
    key = commit_key(launches[-1])
    return next(group for group in commit_groups(launches) if commit_key(group.launches[0]) == key)


def _before(launches: Sequence[LaunchRecord], last: LaunchRecord) -> list[LaunchRecord]:
    """The launches of commits that occur for the first time before that of ``last``."""
    keys = [commit_key(group.launches[0]) for group in commit_groups(launches)]
    earlier = set(keys[: keys.index(commit_key(last))])
    return [launch for launch in launches if commit_key(launch) in earlier]


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
    timed: dict[tuple[str, str], Both] = {}
    notes = []
    for segments in cut(series_of(kept), at_least=at_least):
        both, said = _newest_of(segments, groups, window)
        timed[both.case, both.metric] = both
        notes += said if (both.case, both.metric) in wanted else []
    found = []
    for one in rows:
        if one.exact and not one.refused:
            held, said = _exact_of(one, groups, window)
            notes += said
        else:
            held = one if one.refused else timed.get((one.case, one.metric), one)
        found.append(held)
    if len(notes) > _MOST_NOTES:
        notes = [*notes[:_MOST_NOTES], f"and {len(notes) - _MOST_NOTES} more that changed before"]
    return found, notes


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
    return (
        Both(
            case=series.case,
            metric=series.metric,
            before=series.launches(begin, place),
            after=series.launches(place, count) if has_newest else (),
            since=since,
            spread=segments.spread,
            p_value=p_value,
        ),
        notes,
    )


def _exact_of(one: Both, groups: Sequence[CommitGroup], window: int) -> tuple[Both, list[str]]:
    """An exact metric of the newest commit against its value at the commit before, or before it changed last where
    that was within the window, and a note of an earlier change."""
    held = [
        (at, tuple(values))
        for at, group in enumerate(groups)
        if (values := values_of(group.launches).get((one.case, one.metric)))
    ]
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
