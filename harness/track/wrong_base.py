"""A check whose base moved wrong bits. Pure; no torch import.

Wrong bits of the base are no fault of the change, which may well be what mends them: ``right_ones(before)`` is what of
the base counts, and ``told(check, before)`` the A/B with what to say of the rest; ``unheld(check, times, exact)`` of
any check only the rows that have no right value of the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaymeter.harness.track.records import LaunchRecord, metric_of
from relaymeter.harness.track.sides import wrong_bits
from relaymeter.harness.track.verdicts import Check, Row

__all__ = ["right_ones", "told", "unheld"]

_UNTIMED = "the base's bits were wrong in every launch: its times do not count"
_UNHELD = "the base's bits were wrong in every launch: there is nothing to hold it against"


def right_ones(before: Sequence[LaunchRecord]) -> list[LaunchRecord]:
    """The launches, each without the cases in which its bits were wrong."""
    return [replace(launch, cases=tuple(case for case in launch.cases if case.ok)) for launch in before]


def told(check: Check, before: Sequence[LaunchRecord]) -> Check:
    """The check of ``right_ones(before)``, with a note for each case in which the base was wrong, first of all. Of a
    case that was never right a time is undecided, and an exact metric is the change's own."""
    wrong = wrong_bits(before, "the base")
    if not wrong:
        return check
    never = _never(before)
    said = [
        f"WRONG BITS ON THE BASE: {name}: {text}: "
        + ("nothing of it counts" if name in never else "those launches do not count")
        for name, text in wrong.items()
    ]
    check = unheld(check, before, before)
    return replace(check, notes=(*said, *check.notes))


def unheld(check: Check, times: Sequence[LaunchRecord], exact: Sequence[LaunchRecord]) -> Check:
    """The check of ``right_ones`` of the base, of which ``times`` and ``exact`` are what its times and its exact
    metrics are held against. Of a case that was never right in them a time is undecided, and an exact metric is the
    change's own."""
    never = {False: _never(times), True: _never(exact)}
    unsaid = never[False] | never[True]
    kept = tuple(
        note for note in check.notes if not (note.partition(":")[0] in unsaid and "there is nothing to hold" in note)
    )
    rows = tuple(_row(row) if row.case in never[metric_of(row.metric).better == "equal"] else row for row in check.rows)
    return replace(check, rows=rows, notes=kept)


def _never(before: Sequence[LaunchRecord]) -> set[str]:
    """The cases of which no launch had the right bits."""
    cases = [case for launch in before for case in launch.cases]
    return {case.name for case in cases} - {case.name for case in cases if case.ok}


def _row(row: Row) -> Row:
    """A row that has no right value of the base. Wrong bits of the change stay what they are."""
    if row.verdict not in ("ok", "no baseline") or row.launches_before:
        return row
    if metric_of(row.metric).better == "equal":
        return replace(row, verdict="ok", text=_UNHELD)
    return replace(row, verdict="inconclusive", text=_UNTIMED)
