"""What a check says of every metric of every case, and of the whole. No torch import.

``Check(...)`` holds the rows; ``check.exit_code(warn_only=False)`` is what the command answers with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from relaymeter.errors import (
    EXIT_GATE_MISSED,
    EXIT_NOTHING_MEASURED,
    EXIT_OK,
    EXIT_UNDECIDED,
    EXIT_WRONG_BITS,
)
from relaymeter.harness.track.records import metric_of

__all__ = ["Check", "Row", "Side", "Verdict", "severity"]

#: From the worst down: the order of rows in every output.
Verdict = Literal["wrong bits", "regression", "no baseline", "inconclusive", "improvement", "ok"]
_ORDER: tuple[Verdict, ...] = ("wrong bits", "regression", "no baseline", "inconclusive", "improvement", "ok")
_EXITS = {
    "wrong bits": EXIT_WRONG_BITS,
    "regression": EXIT_GATE_MISSED,
    "no baseline": EXIT_NOTHING_MEASURED,
    "inconclusive": EXIT_UNDECIDED,
    "improvement": EXIT_OK,
    "ok": EXIT_OK,
}


def severity(verdict: Verdict) -> int:
    """0 of the worst verdict, more of a better one. Pure."""
    return _ORDER.index(verdict)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison: what was measured, and where."""

    label: str
    """Short name for people: a revision, a folder, a version."""
    commit: str | None
    version: str
    machine_id: str
    config_hash: str
    launches: int
    dirty: bool = False
    """Whether files differed from the commit."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The verdict upon one metric of one case."""

    case: str
    metric: str
    """Name of a ``records.Metric``."""
    verdict: Verdict
    before: float | int | str | None
    """Median of the launches' medians on the base's side, in the metric's unit; of an exact metric its value."""
    after: float | int | str | None
    ratio: float | None
    """Above 1 is worse, whichever way the metric counts: 1.34 is 1.34 times slower. None of exact metrics."""
    ratio_low: float | None
    """Ends of the 95 % interval of the ratio."""
    ratio_high: float | None
    p_value: float | None
    launches_before: int
    launches_after: int
    text: str
    """The whole in words: ``1.34x slower, 95 % 1.22-1.47, 8 launches``; where inconclusive, why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A whole check."""

    suite: str
    kind: Literal["ab", "history"]
    before: Side | None
    """None where there is no baseline."""
    after: Side
    rows: tuple[Row, ...]
    mismatch: tuple[str, ...] = ()
    """In what the sides differ (``machine_id``, ``config_hash``, ``schema_version``), let through by
    ``--allow-mismatch``; stamped on every output."""
    notes: tuple[str, ...] = ()
    """What the reader has to know besides: a torn line set aside, launches left out, why times were refused, what
    changed at an earlier commit."""

    def worst_first(self) -> tuple[Row, ...]:
        """The rows, the worst verdict first and the largest ratio first among equals."""
        return tuple(
            sorted(self.rows, key=lambda row: (severity(row.verdict), -(row.ratio or 1.0), row.case, row.metric))
        )

    def counts(self) -> Mapping[Verdict, int]:
        """How many rows have each verdict, the worst first; verdicts without any are left out."""
        found = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in _ORDER}
        return {verdict: count for verdict, count in found.items() if count}

    def exit_code(self, *, warn_only: bool, undecided_ok: bool = False) -> int:
        """6 wrong bits, 3 a regression, 5 no baseline or no rows, 4 a row could not be decided, else 0.

        ``warn_only`` makes 0 of 3, never of another. ``undecided_ok`` makes 0 of 4 where all that could not be decided
        are times: an exact metric that is missing, or that nothing may be held against, is still a 4.
        """
        if not self.rows:
            return EXIT_NOTHING_MEASURED
        for row in self.worst_first():
            code = _EXITS[row.verdict]
            passes = code == EXIT_GATE_MISSED and warn_only
            passes |= code == EXIT_UNDECIDED and undecided_ok and metric_of(row.metric).better != "equal"
            if code != EXIT_OK and not passes:
                return code
        return EXIT_OK
