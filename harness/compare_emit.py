"""The table of ``compare``: a table for each change, a line for each path, storage and page cache.

``comparison_tables(rows)``, ``comparison_lines(rows)``. Called by the parent. Times are medians over the launches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.table import Table

from relaymeter.compare_records import PHASES, CompareRecord
from relaymeter.harness.compare_prices import error_text
from relaymeter.harness.emit import NONE, simple_table, size_text, time_text
from relaymeter.harness.report_figures import by_launch, figure, over

__all__ = ["comparison_lines", "comparison_tables", "row_text"]

_IN_MEMORY = "in-memory"
#: Phases that share a column: none of them is on the same path.
_COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plan", ("plan",)),
    ("move, gather\nor save", ("move", "gather", "save")),
    ("slice or\nconvert", ("slice", "convert")),
    ("relaunch", ("relaunch",)),
    ("imports", ("import",)),
    ("build", ("build",)),
    ("load", ("load",)),
    ("refresh", ("refresh",)),
)


def comparison_tables(rows: Sequence[CompareRecord]) -> list[Table]:
    """One table per change, in the order of the rows."""
    tables = []
    for change in dict.fromkeys(row.change for row in rows):
        mine = [row for row in rows if row.change == change]
        first = mine[0]
        launches = len({row.launch for row in mine})
        priced = any(row.predicted_pause_s is not None for row in mine)
        size = f", {size_text(first.state_bytes)} of state" if first.state_bytes else ""
        table = simple_table(
            f"{change}: {first.source} -> {first.destination}{size}",
            [("path", "whole"), ("checkpoint on", "whole"), *((name, "right") for name, _ in _COLUMNS),
             ("pause", "right"), *([("priced", "right"), ("error", "right")] if priced else []), ("ratio", "right"),
             ("state\nonly", "right"), ("ratio", "right"),
             ("digests\nequal", "right")],
            caption="pause: how long training stands still; state only: without relaunch, imports and build; "
            "ratio: over the move in memory; "
            + ("priced: by the profile's costs of paths; " if priced else "")
            + _launches(launches),
        )  # fmt: skip
        base = [row for row in mine if row.path == _IN_MEMORY and row.ok]
        for rows_of_line in _lines(mine):
            table.add_row(*_cells(rows_of_line, base, priced))
        tables.append(table)
    return tables


def _launches(number: int) -> str:
    return "1 launch" if number == 1 else f"medians of {number} launches"


def _lines(rows: Sequence[CompareRecord]) -> list[list[CompareRecord]]:
    found: dict[tuple[str, str | None, str | None], list[CompareRecord]] = {}
    for row in rows:
        found.setdefault((row.path, row.storage, row.cache), []).append(row)
    return list(found.values())


def _cells(rows: Sequence[CompareRecord], base: Sequence[CompareRecord], priced: bool) -> list[str]:
    first = rows[0]
    place = NONE if first.storage is None else first.storage + (f", {first.cache}" if first.cache else "")
    right = [row for row in rows if row.pause_s is not None and row.digest_passed == row.digest_total]
    timed = right or [row for row in rows if row.pause_s is not None]  # launches with wrong bits are in no median
    if not timed:
        return [first.path, place, first.verdict, *[""] * (len(_COLUMNS) + (6 if priced else 4))]

    def median(read: Callable[[CompareRecord], float | None]) -> float | None:
        values = [value for value in map(read, timed) if value is not None]
        return statistics.median(values) if values else None

    def column(names: Sequence[str]) -> str:
        return time_text(median(lambda row: next((row.phases[name] for name in names if name in row.phases), None)))

    def ratio(read: Callable[[CompareRecord], float | None]) -> str:
        ours, theirs = (figure(by_launch((row, read(row)) for row in rows)) for rows in (base, timed))
        return NONE if first.moves_part else over(theirs, ours)

    passed, total = sum(row.digest_passed for row in rows), sum(row.digest_total for row in rows)
    pause, predicted = median(lambda row: row.pause_s), median(lambda row: row.predicted_pause_s)
    return [
        first.path, place, *(column(names) for _, names in _COLUMNS), time_text(pause),
        *([time_text(predicted), error_text(predicted, pause)] if priced else []), ratio(lambda row: row.pause_s),
        time_text(median(lambda row: row.transfer_s)), ratio(lambda row: row.transfer_s),
        f"{passed}/{total}" + ("" if passed == total else " WRONG" + _of(rows)),
    ]  # fmt: skip


def _of(rows: Sequence[CompareRecord]) -> str:
    """In how many of several launches bits were wrong: `` in 2 of 6``."""
    wrong = sum(row.digest_passed < row.digest_total for row in rows)
    return f" in {wrong} of {len(rows)}" if len(rows) > 1 else ""


def comparison_lines(rows: Sequence[CompareRecord]) -> list[str]:
    """What the tables have no column for: what cannot be done and why, what failed, what a path leaves out."""
    lines: dict[str, None] = {}
    for row in rows:
        for text in (row.cannot, row.failed):
            if text is not None:
                lines[f"{row.change}, {row.path}: {row.verdict}: {text}"] = None
    for row in rows:
        if row.note is not None:
            lines[f"{row.path}: {row.note}"] = None
    return list(lines)


def row_text(row: CompareRecord) -> str:
    """One line of progress about a row."""
    place = "" if row.storage is None else f" ({row.storage}{f', {row.cache}' if row.cache else ''})"
    if row.pause_s is None:
        return f"  {row.path}{place}: {row.verdict}: {row.cannot or row.failed}"
    shown = {name: seconds for name, seconds in row.phases.items() if name in PHASES and name != "digest"}
    text = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in shown.items())
    return f"  {row.path}{place}: {text}; {row.digest_passed}/{row.digest_total} digests" + ("" if row.ok else " WRONG")
