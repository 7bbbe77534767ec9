"""A check on the terminal: ``lines(check)``, the verdict first, then ``tables(check)``, the worst rows first. Pure.

``shown(text)`` is any text of several lines as a terminal may show it; ``errors_shown()`` makes errors of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.table import Table
from rich.text import Text

from relaymeter.errors import RelaymeterError
from relaymeter.harness.emit import simple_table
from relaymeter.harness.track.row_texts import (
    RATIO,
    headline,
    launches_text,
    ratio_text,
    remark,
    sides_text,
    stamps,
    values_text,
    visible,
)
from relaymeter.harness.track.verdicts import Check, Row
from relaymeter.units import counted

__all__ = ["errors_shown", "lines", "shown", "tables"]

_STYLES = {
    "wrong bits": "bold white on red",
    "regression": "bold red",
    "no baseline": "yellow",
    "inconclusive": "yellow",
    "improvement": "green",
    "ok": "",
}
#: Together 118 characters with the names and metrics of the suite ci, so that a row is one line of a log.
_COLUMNS = (
    ("verdict", "whole"), ("case", "left"), ("metric", "whole"), ("before", "right"), ("after", "right"),
    ("ratio [95 %]", "right"), ("launches", "right"),
)  # fmt: skip
#: Metrics that are named of rows with the same reason.
_NAMED = 3
_REMARKS = (("case", "left"), ("metric", "left"), ("what the columns above do not say", "left"))


def tables(check: Check) -> list[Table]:
    """One table of all rows, a mismatch in its title, and one of what its columns do not say, where anything. Rows
    without a baseline are in neither: ``lines`` counts them."""
    rows = [row for row in check.worst_first() if row.verdict != "no baseline"]
    if not rows:
        return []
    table = simple_table("", _COLUMNS, caption=f"{RATIO}; launches: before+after where they differ")
    table.title = Text("\n".join([*stamps(check), sides_text(check)]))
    for row in rows:
        before, after = values_text(row)
        # why: Text, because a plain cell would take "[red]" in a name for markup.
        cells = (visible(row.case), row.metric, before, after, ratio_text(row), launches_text(row))
        table.add_row(Text(row.verdict, style=_STYLES[row.verdict]), *map(Text, cells))
    remarks = _remarks(rows)
    if not remarks:
        return [table]
    told = simple_table("", _REMARKS)
    for entry in remarks:
        told.add_row(*map(Text, entry))
    return [table, told]


def _remarks(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Case, metric and remark of every row that has one. Undecided rows with the same reason, which is what their text
    begins with, stand in one line."""
    alike: dict[str, list[Row]] = {}
    for row in rows:
        alike.setdefault(row.text.split(": ")[0] if row.verdict == "inconclusive" else "", []).append(row)
    found, told = [], set()
    for row in rows:
        text = remark(row)
        reason = row.text.split(": ")[0]
        same = alike.get(reason, []) if row.verdict == "inconclusive" else []
        if len(same) > 1:
            if reason not in told:
                told.add(reason)
                hints = dict.fromkeys(one.text.rpartition(": ")[2] for one in same)
                said = f"{reason}: {next(iter(hints))}" if len(hints) == 1 and reason not in hints else reason
                metrics = list(dict.fromkeys(one.metric for one in same))
                shown = ", ".join(metrics if len(metrics) <= _NAMED else [*metrics[: _NAMED - 1], "..."])
                found.append((counted(len(same), "row"), shown, visible(said)))
        elif text:
            found.append((visible(row.case), row.metric, text))
    return found


def lines(check: Check) -> list[str]:
    """The verdict with the counts, any mismatch, what to do about a missing baseline, and the notes, one a line."""
    found = [headline(check), *stamps(check)]
    if not check.rows:
        found.append(sides_text(check))
    if check.before is None:
        cases = len({row.case for row in check.rows})
        held = f"{sides_text(check)}: {counted(len(check.rows), 'metric')} of {counted(cases, 'case')}" if cases else ""
        found += [held] if held else []
        found.append("no baseline to compare with: this is no pass")
        found.append("next: relaymeter track run at another commit, or with another version, and check again")
        found.append("a history that is not to be committed belongs into .gitignore: .relaymeter/")
    return found + [f"note: {visible(note)}" for note in check.notes]


def shown(text: str) -> str:
    """``text`` with its lines as they are, and escapes for all else that a terminal could take for a command."""
    return "\n".join(map(visible, text.split("\n")))


@contextmanager
def errors_shown() -> Iterator[None]:
    """What an error of the block says, as ``shown`` has it: names in it come from options, histories, other builds."""
    try:
        yield
    except RelaymeterError as error:
        error.args = (shown(str(error)), *error.args[1:])
        raise
