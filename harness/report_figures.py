"""Medians of launches for the tables of ``report``, and what must not enter one: rows whose bits were wrong.

``figure({"launch": [0.5, 0.6]})`` is a median with its interval, ``figure_text`` the cell, ``fault_of(row)`` why a row
is no result. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from relaymeter.compare_records import CompareRecord
from relaymeter.harness.emit import NONE, time_text, time_with_interval
from relaymeter.harness.report_sources import AnyRow
from relaymeter.harness.verdict import judge, judge_states
from relaymeter.records import MoveRecord, median_interval
from relaymeter.state_records import OffloadRecord, StateRecord
from relaymeter.units import counted

__all__ = [
    "WRONG_BITS",
    "Figure",
    "by_launch",
    "fault_lines",
    "fault_of",
    "figure",
    "figure_text",
    "interval_note",
    "interval_notes",
    "is_wrong",
    "launch_of",
    "over",
    "ratio_text",
    "usable",
]

WRONG_BITS = "WRONG BITS"
#: Below this many samples no pair of ranks holds the median with 95 %.
_ENOUGH = 6
#: Below this many launches a ratio has no third digit.
_FEW = 3


@dataclass(frozen=True)
class Figure:
    """A median of launches, or of the repeats of a single one, with its interval."""

    middle: float
    low: float
    high: float
    samples: int
    """What it is the median of: launches, or repeats of the only launch."""
    launches: int


def figure(values: Mapping[Hashable, Sequence[float]]) -> Figure | None:
    """The median over launches of each launch's median; of a single launch that of its repeats. None without values."""
    found = [list(samples) for samples in values.values() if samples]
    if not found:
        return None
    pooled = found[0] if len(found) == 1 else [median_interval(samples)[0] for samples in found]
    return Figure(*median_interval(pooled), samples=len(pooled), launches=len(found))


def by_launch(pairs: Iterable[tuple[AnyRow, float | None]]) -> dict[Hashable, list[float]]:
    """The values of each launch, those that are none left out."""
    found: dict[Hashable, list[float]] = {}
    for row, value in pairs:
        if value is not None:
            found.setdefault(launch_of(row), []).append(value)
    return found


def launch_of(row: AnyRow) -> Hashable:
    """What tells independent launches apart."""
    return (row.launch_id, row.launch) if isinstance(row, CompareRecord) else row.launch_id


def figure_text(found: Figure | None, base: Figure | None = None) -> str:
    """``"17.2 [11.3, 20.7] ms"``, of one sample ``"17.2 ms"``; with a ``base`` the ratio to it beside, which has two
    digits where either is of few launches."""
    if found is None:
        return NONE
    text = time_with_interval(found.middle, found.low, found.high) if found.samples > 1 else time_text(found.middle)
    return text if base is None else f"{text}, {over(found, base)}"


def over(found: Figure | None, base: Figure | None) -> str:
    """The ratio of two medians: of fewer than three launches with two digits, ``"24x"``."""
    if found is None or base is None:
        return NONE
    return ratio_text(found.middle, base.middle, digits=2 if min(found.launches, base.launches) < _FEW else 3)


def ratio_text(value: float | None, base: float | None, *, digits: int = 3) -> str:
    """``"24.2x"``, with ``digits`` 2 ``"24x"``; below 1 always two decimals."""
    if value is None or not base:
        return NONE
    ratio = value / base
    if math.isinf(ratio):
        return "over 1e308x"
    if digits < 3:
        ratio = float(f"{ratio:.{digits}g}")
    places = 2 if ratio < 1 else digits - 1 if ratio < 10 else max(digits - 2, 0) if ratio < 100 else 0
    return f"{ratio:.{places}f}x"


def interval_note(launches: int, repeats: int = 1, what: str = "repeat") -> str:
    """What the times of a table are, in a caption: ``launches`` of ``repeats`` each."""
    samples = launches if launches > 1 else repeats
    if samples < 2:
        return "1 launch: no interval"
    of = f"{launches} launches" if launches > 1 else f"{counted(repeats, what)} in 1 launch"
    if launches > 1 and repeats > 1:
        of += f", each the median of {counted(repeats, what)},"
    known = "95 % interval from order statistics" if samples >= _ENOUGH else "smallest, largest"
    return f"median of {of} [{known}]"


def interval_notes(launches: Iterable[int], repeats: int = 1, what: str = "repeat") -> str:
    """The same of a table whose lines have different numbers of launches."""
    return "; ".join(dict.fromkeys(interval_note(count, repeats, what) for count in sorted({*launches} - {0})))


def usable(row: AnyRow) -> bool:
    """Whether the times of a row may enter a median: its bits arrived, whatever else may be said of it."""
    if is_wrong(row):
        return False
    return row.ok or row.verdict in ("wire bytes differ", "checkpoint differs")


def is_wrong(row: AnyRow) -> bool:
    """Whether bits were wrong, by the row's verdict or by its counts."""
    if row.verdict == "wrong bits" or row.mismatch is not None:
        return True
    if isinstance(row, OffloadRecord):
        return row.equal is False
    if row.verdict in ("failed", "refused", "cannot"):
        return False
    oracle = isinstance(row, StateRecord) and row.oracle_passed != row.oracle_total
    return row.digest_passed != row.digest_total or oracle


def fault_of(row: AnyRow) -> str | None:
    """What is wrong with a row, in one line; None where nothing is, or where it only cannot be done."""
    if isinstance(row, CompareRecord):
        return _compare_fault(row)
    lines = judge([row]).lines if isinstance(row, MoveRecord) else judge_states([row]).lines
    if lines:
        return lines[0]
    if not is_wrong(row):
        return None
    what = row.move if isinstance(row, MoveRecord) else row.change if isinstance(row, StateRecord) else row.state
    return f"WRONG BITS in {what}: its verdict is {row.verdict!r}, its counts say otherwise"


def fault_lines(rows: Iterable[AnyRow], of: Callable[[AnyRow], str | None] = fault_of) -> tuple[str, ...]:
    """What ``of`` says of rows, each text once, with how many rows it is of where those are several."""
    found = Counter(text for row in rows if (text := of(row)) is not None)
    return tuple(text if count == 1 else f"{text} ({count} rows)" for text, count in found.items())


def _compare_fault(row: CompareRecord) -> str | None:
    where = f"{row.change} by {row.path}{f' on {row.storage}' if row.storage else ''}"
    if is_wrong(row):
        wrong = f"{row.digest_total - row.digest_passed} of {row.digest_total} digests differ"
        return f"WRONG BITS in {where}: {wrong}; first: {row.mismatch}"
    if row.cannot is not None or row.ok:
        return None
    return f"{where}: {row.verdict}: {row.failed}"
