"""The tables of ``report`` as data, and which rows share one: ``make_sections(sources)``.

A section is what one scenario of one kind gave; rows of two origins (machine, commit, shaping, simulated cluster) or of
two worlds stand in tables of their own and are never averaged. Pure: records to tables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from relaymeter.harness.emit import NONE
from relaymeter.harness.report_sources import AnyRow, Origin, origin_of

__all__ = ["Cell", "ReportTable", "Section", "cells", "grouped", "rows_by_origin", "titled"]

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Cell:
    """A text, with the notes that belong to it."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportTable:
    """A table with its title above and its captions below."""

    title: str
    columns: tuple[tuple[str, str], ...]
    """Names, and ``"left"`` or ``"right"``."""
    rows: tuple[tuple[Cell, ...], ...]
    captions: tuple[str, ...] = ()
    """What holds for all of it; the first says where and how often it was measured."""
    folded: bool = False
    """Whether a reader opens it to see it."""

    def without_empty(self) -> ReportTable:
        """The table without columns in which no row has anything."""
        kept = [at for at in range(len(self.columns)) if any(row[at].text != NONE for row in self.rows)]
        rows = tuple(tuple(row[at] for at in kept) for row in self.rows)
        return ReportTable(self.title, tuple(self.columns[at] for at in kept), rows, self.captions, self.folded)


@dataclass(frozen=True)
class Section:
    """What one scenario of one kind gave."""

    title: str
    lines: tuple[str, ...]
    """What a reader should take away."""
    tables: tuple[ReportTable, ...]
    missing: tuple[str, ...] = ()
    """What was not run."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "title": self.title,
            "lines": list(self.lines),
            "not_run": list(self.missing),
            "tables": [
                {
                    "title": table.title,
                    "columns": [name for name, _ in table.columns],
                    "rows": [[cell.text for cell in row] for row in table.rows],
                    "notes": [note for row in table.rows for cell in row for note in cell.notes],
                    "captions": list(table.captions),
                }
                for table in self.tables
            ],
        }


def cells(*texts: str | Cell) -> tuple[Cell, ...]:
    """A line of a table."""
    return tuple(text if isinstance(text, Cell) else Cell(text) for text in texts)


def grouped(rows: Iterable[_Row], key: Callable[[_Row], Hashable]) -> dict[Any, list[_Row]]:
    """Rows by ``key``, in the order in which keys first occur."""
    found: dict[Any, list[_Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def rows_by_origin(rows: Sequence[AnyRow]) -> Mapping[Origin, Sequence[AnyRow]]:
    """Rows by where they were measured."""
    return grouped(rows, origin_of)


def titled(name: str, origin: Origin, several: bool) -> str:
    """A title that says ``simulated`` and, where there are ``several`` origins, which it is."""
    text = f"{name} (simulated: {origin.simulated})" if origin.simulated else name
    shaped = ", shaped" if origin.shaped else ""
    return f"{text}, commit {origin.commit} on {origin.machine_id}{shaped}" if several else text
