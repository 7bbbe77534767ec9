"""An A/B whose base moved wrong bits. Pure; no torch import.

Wrong bits of the base are no fault of the change, which may well be what mends them: ``right_ones(before)`` is what of
the base counts, and ``told(check, before)`` the check with what to say of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaymeter.harness.track.records import LaunchRecord, metric_of
from relaymeter.harness.track.sides import wrong_bits
from relaymeter.harness.track.verdicts import Check, Row

__all__ = ["right_ones", "told"]

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
    right = {case.name for launch in before for case in launch.cases if case.ok}
    never = {name for name in wrong if name not in right}
    said = [
        f"WRONG BITS ON THE BASE: {name}: {text}: "
        + ("nothing of it counts" if name in never else "those launches do not count")
        for name, text in wrong.items()
    ]
    kept = [
        note for note in check.notes if not (note.partition(":")[0] in never and "there is nothing to hold" in note)
    ]
    rows = tuple(_row(row) if row.case in never else row for row in check.rows)
    return replace(check, rows=rows, notes=(*said, *kept))


def _row(row: Row) -> Row:
    """A row that has no right value of the base. Wrong bits of the change stay what they are."""
    if row.verdict not in ("ok", "no baseline") or row.launches_before:
        return row
    if metric_of(row.metric).better == "equal":
        return replace(row, verdict="ok", text=_UNHELD)
    return replace(row, verdict="inconclusive", text=_UNTIMED)
