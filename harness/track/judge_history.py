"""The verdict upon the newest commit of a history. Pure; no torch import.

``check_history(launches, against="1a2b3c4" | "history")``.

Against a commit: its launches and those of the newest commit, as they are.

Against the ``history``: every metric's series is searched for changes (``changes``, level .01). Where the last change
lies among the ``WINDOW`` newest commits, or has so few launches behind it that it may only now have come to light
(twice ``MIN_LAUNCHES``), the newest segment is held against the one before it, and the check fails at that commit. An
older change is what is normal now: it is a note, no verdict, so that nothing fails for ever. A metric without a change
in the window has its newest commit held against its launches since the last change. Exact metrics have the same window.

Launches of a changed checkout (dirty) count only as the newest commit: nothing tells whether two of them are the same.
A history cannot see what an interleaved A/B sees: a machine that is slower today than on all other days looks like a
change, unless the days before differed as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relaymeter.errors import InputError, NothingMeasured
from relaymeter.harness.track.changes import CommitGroup, Segments, commit_groups, commit_key, cut, series_of
from relaymeter.harness.track.evidence import MIN_LAUNCHES
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.sides import (
    Both,
    judged,
    mismatch_of,
    pair_up,
    settings_differ,
    side_of,
    values_of,
    wrong_bits,
)
from relaymeter.harness.track.verdicts import Check
from relaymeter.units import counted

__all__ = ["WINDOW", "check_history"]

#: A change among so many newest commits fails a check of the history.
WINDOW = 5
_LEVEL = 0.02
_MOST_NOTES = 5
_MORE = "relaymeter track run adds launches"


def check_history(
    launches: Sequence[LaunchRecord], *, against: str, allow_mismatch: bool = False, at_least: float = 1.05
) -> Check:
    """The verdict upon the newest commit of a history, the last one to occur first among the launches with the last
    one's machine, configuration and suite.

    ``against``: the beginning of a revision (with ``-dirty`` at the end: of its changed checkout), or ``history``.
    Without a baseline every row says so (exit code 5). Raises NothingMeasured for an empty history, InputError where
    ``against`` names several commits or the newest one itself, and Undecided where the baseline has only launches of
    another machine, configuration or suite and ``allow_mismatch`` is not given. The parent calls it, no rank.
    """
    if not launches:
        raise NothingMeasured("the history holds no launch: relaymeter track run adds some")
    last = launches[-1]
    newest = commit_groups([launch for launch in launches if not settings_differ([launch], [last])])[-1]
    key = commit_key(newest.launches[-1])
    # why: of one commit on another machine nothing is to be learnt for this one
    earlier = [launch for launch in launches if commit_key(launch) != key]
    if against == "history":
        clean = [launch for launch in earlier if not launch.dirty and launch.suite == last.suite]
        base = [launch for launch in clean if not settings_differ([launch], [last])] or clean
        if base:
            return _against_series(base, newest, mismatch_of(base, newest.launches, allowed=allow_mismatch), at_least)
        said = "this is the first commit of the history: there is no baseline"
    else:
        group = _named(against, launches, newest)
        if group:
            base = [launch for launch in group.launches if not settings_differ([launch], [last])]
            base = base or list(group.launches)
            mismatch = mismatch_of(base, newest.launches, allowed=allow_mismatch)
            return _against_commit(base, group.label, newest, mismatch, at_least)
        held = [group.label for group in commit_groups(earlier)]
        said = (
            f"the history holds no launch of {against}: check it out and relaymeter track run"
            f"{'; it holds ' + ', '.join(held[-3:]) if held else ''}"
        )
    found = judged(
        pair_up([], newest.launches), wrong_bits(newest.launches, newest.label),
        level=_LEVEL, at_least=at_least, hint=_MORE,
    )  # fmt: skip
    return Check(
        suite=last.suite, kind="history", before=None, after=side_of(newest.launches, newest.label),
        rows=found.rows, notes=(said, *found.notes),
    )  # fmt: skip


def _named(against: str, launches: Sequence[LaunchRecord], newest: CommitGroup) -> CommitGroup | None:
    """The group that ``against`` names; None: the history holds none."""
    prefix, dirty = against.removesuffix("-dirty").lower(), against.endswith("-dirty")
    found = [
        group
        for group in commit_groups(launches)
        if prefix and group.commit and group.commit.lower().startswith(prefix) and group.dirty == dirty
    ]
    if len(found) > 1:
        raise InputError(f"{against!r} begins {', '.join(group.label for group in found)}: give more of it")
    if found and (found[0].commit, found[0].dirty) == (newest.commit, newest.dirty):
        raise InputError(
            f"{against} is the newest commit of the history itself: name an earlier one, relaymeter track run on "
            "another, or compare checkouts with --ab"
        )
    return found[0] if found else None


def _against_commit(
    base: Sequence[LaunchRecord], label: str, newest: CommitGroup, mismatch: Mapping[str, str], at_least: float
) -> Check:
    right, notes = _right_ones(base)
    found = judged(
        pair_up(right, newest.launches),
        wrong_bits(newest.launches, newest.label),
        level=_LEVEL,
        at_least=at_least,
        hint=_MORE,
    )
    return Check(
        suite=newest.launches[-1].suite,
        kind="history",
        before=side_of(base, label),
        after=side_of(newest.launches, newest.label),
        rows=found.rows,
        mismatch=tuple(mismatch),
        notes=(*mismatch.values(), *notes, *found.notes),
    )


def _right_ones(launches: Sequence[LaunchRecord]) -> tuple[list[LaunchRecord], list[str]]:
    """The launches without the cases in which bits were wrong: no baseline, and no fault of what is checked."""
    wrong = wrong_bits(launches, "the base")
    kept = [replace(launch, cases=tuple(case for case in launch.cases if case.ok)) for launch in launches]
    return kept, [f"{case}: {text}: left out" for case, text in wrong.items()]


def _against_series(
    base: Sequence[LaunchRecord], newest: CommitGroup, mismatch: Mapping[str, str], at_least: float
) -> Check:
    right, notes = _right_ones(base)
    groups = [*commit_groups(right), newest]
    end = len(groups) - 1
    timed: dict[tuple[str, str], Both] = {}
    for segments in cut(series_of({at: group.launches for at, group in enumerate(groups)}), at_least=at_least):
        both, said = _newest_of(segments, groups)
        timed[both.case, both.metric] = both
        notes += said
    rows = [
        timed.get((one.case, one.metric)) or (_exact_of(one, groups) if one.exact else one)
        for one in pair_up(right, newest.launches)
    ]
    found = judged(rows, wrong_bits(newest.launches, newest.label), level=_LEVEL, at_least=at_least, hint=_MORE)
    if len(notes) > _MOST_NOTES:
        notes = [*notes[:_MOST_NOTES], f"and {len(notes) - _MOST_NOTES} more"]
    label = groups[0].label if end == 1 else f"the {counted(end, 'commit')} before"
    return Check(
        suite=newest.launches[-1].suite,
        kind="history",
        before=side_of(base, label),
        after=side_of(newest.launches, newest.label),
        rows=found.rows,
        mismatch=tuple(mismatch),
        notes=(*mismatch.values(), *notes, *found.notes),
    )


def _since(index: int, groups: Sequence[CommitGroup]) -> str:
    ago = len(groups) - 1 - index
    return f"since {groups[index].label}" + (f" ({counted(ago, 'commit')} ago)" if ago else "")


def _newest_of(segments: Segments, groups: Sequence[CommitGroup]) -> tuple[Both, list[str]]:
    """What of a series is held against what, and notes of changes that are not."""
    series = segments.series
    newest, count = len(groups) - 1, len(series.groups)
    start, reported = segments.cuts[-1] if segments.cuts else 0, None
    if segments.cuts:
        behind = len(series.launches(start, count))
        if newest - series.indexes[start] < WINDOW or behind <= 2 * MIN_LAUNCHES:
            reported = len(segments.cuts) - 1
    notes = []
    for at, found in enumerate(segments.findings):
        if at != reported:
            what = f"{found.ratio:.2f}x slower" if found.ratio > 1 else f"{1 / found.ratio:.2f}x faster"
            since = _since(series.indexes[segments.cuts[at]], groups)
            notes.append(f"{series.case}: {series.metric} is {what} {since}: not held against what came before")
    begin, place = start, count - 1
    since, p_value = "", None
    if reported is not None:
        begin, place, _ = segments.bounds(reported)
        since, p_value = _since(series.indexes[place], groups), segments.findings[reported].p_value
    has_newest = series.indexes[-1] == newest
    return (
        Both(
            case=series.case,
            metric=series.metric,
            before=series.launches(begin, place if has_newest else count),
            after=series.launches(place, count) if has_newest else (),
            since=since,
            spread=segments.spread,
            p_value=p_value,
        ),
        notes,
    )


def _exact_of(one: Both, groups: Sequence[CommitGroup]) -> Both:
    """An exact metric of the newest commit against its value before it changed last, or its last one before."""
    held = [
        (at, tuple(values))
        for at, group in enumerate(groups)
        if (values := values_of(group.launches).get((one.case, one.metric)))
    ]
    if len(held) < 2 or not one.after:
        return one
    place = len(held) - 1
    while place and set(held[place - 1][1]) == set(held[-1][1]):
        place -= 1
    if not place or len(groups) - 1 - held[place][0] >= WINDOW:
        return Both(case=one.case, metric=one.metric, before=held[-2][1], after=one.after)
    since = _since(held[place][0], groups)
    return Both(case=one.case, metric=one.metric, before=held[place - 1][1], after=one.after, since=since)
