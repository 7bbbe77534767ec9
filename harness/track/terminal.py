"""A check on the terminal: ``tables(check)``, the worst rows first, then ``lines(check)``. Pure."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from relaymeter.harness.emit import NONE, simple_table
from relaymeter.harness.track.row_texts import headline, ratio_text, sides_text, stamps, values_text, visible
from relaymeter.harness.track.verdicts import Check, Row

__all__ = ["lines", "tables"]

_STYLES = {
    "wrong bits": "bold white on red",
    "regression": "bold red",
    "no baseline": "yellow",
    "inconclusive": "yellow",
    "improvement": "green",
    "ok": "",
}
_COLUMNS = (
    ("verdict", "whole"), ("case", "left"), ("metric", "whole"), ("before", "right"), ("after", "right"),
    ("ratio [95 %]", "right"), ("p", "right"), ("launches", "right"), ("what was found", "left"),
)  # fmt: skip


def tables(check: Check) -> list[Table]:
    """One table of all rows; none where nothing was compared. A mismatch stands in its title."""
    if not check.rows:
        return []
    table = simple_table(
        "", _COLUMNS, caption="a ratio above 1 is worse, whichever way the metric counts; p by launches, not iterations"
    )
    table.title = Text("\n".join([*stamps(check), sides_text(check)]))
    for row in check.worst_first():
        before, after = values_text(row)
        # why: Text, because a plain cell would take "[red]" in a name for markup.
        cells = (visible(row.case), row.metric, before, after, ratio_text(row), _p_text(row), _launches(row),
                 visible(row.text))  # fmt: skip
        table.add_row(Text(row.verdict, style=_STYLES[row.verdict]), *map(Text, cells))
    return [table]


def lines(check: Check) -> list[str]:
    """The verdict, any mismatch, the counts and the notes, one a line."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in check.counts().items())
    found = [headline(check), *stamps(check)]
    if not check.rows:
        found.append(sides_text(check))
    if check.before is None:
        found.append("no baseline to compare with: measure one and check again; this is no pass")
    if counts:
        found.append(f"rows: {counts}")
    return found + [f"note: {visible(note)}" for note in check.notes]


def _p_text(row: Row) -> str:
    if row.p_value is None or row.p_value != row.p_value:
        return NONE
    return "<0.0001" if row.p_value < 1e-4 else f"{row.p_value:.2g}"


def _launches(row: Row) -> str:
    """``8``, or where the sides differ ``8+6``."""
    if row.launches_before == row.launches_after:
        return str(row.launches_after)
    return f"{row.launches_before}+{row.launches_after}"
