"""What a benchmark found: figures, each beside its peer and its bar, as tables for people and JSON for programs.

``figures_table("planning", figures)`` prints them, ``missed(figures)`` says which bars were missed. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich import box
from rich.table import Table

from relaymeter.units import format_bytes, format_seconds

__all__ = [
    "Figure",
    "Found",
    "PartFailed",
    "Say",
    "figures_table",
    "missed",
    "pair_text",
    "plain_table",
    "report_dict",
    "unit_text",
]

#: Version of the JSON that ``report_dict`` gives.
_SCHEMA_VERSION = 1
Unit = Literal["ratio", "s", "bytes"]
#: Progress for people, a line at a time.
Say = Callable[[str], None]


class PartFailed(Exception):
    """A part of the benchmarks did not end: ``exit_code`` is the launch's, or says that bits were wrong."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure. ``value`` is what is held against ``bar``: a ratio within one run where there is a peer."""

    part: str
    name: str
    value: float | None
    """None where it was not measured, which counts as a missed bar where there is one."""
    unit: Unit
    bar: float | None = None
    """The target; None for a figure that only informs."""
    at_least: bool = False
    """Whether the value should reach the bar; otherwise it should not pass it."""
    ours: str = ""
    """What was measured of the system, for people."""
    peer: str = ""
    """What it is held against, for people: a peer's time in the same run, a bound, a prediction."""
    note: str = ""
    samples: Mapping[str, Any] = field(default_factory=dict)
    """Raw numbers behind the value, the unit in each name."""

    @property
    def missed(self) -> bool:
        """Whether there is a bar and the value is on its wrong side."""
        if self.bar is None:
            return False
        if self.value is None or math.isnan(self.value):
            return True
        return self.value < self.bar if self.at_least else self.value > self.bar

    @property
    def target(self) -> str:
        """The bar for people: ``<= 1.1``."""
        return "-" if self.bar is None else f"{'>=' if self.at_least else '<='} {unit_text(self.bar, self.unit)}"


#: What a part of the benchmarks gives: its figures, and tables of their details.
Found = tuple[list[Figure], list[Table]]


def unit_text(value: float | None, unit: Unit) -> str:
    """A value for people: ``12.3``, ``4.1 ms``, ``3.2 GB``."""
    if value is None:
        return "-"
    if unit == "s":
        return format_seconds(value)
    return format_bytes(value) if unit == "bytes" else f"{value:.4g}"


def pair_text(what: str, seconds: float) -> str:
    """A peer and its time: ``"plan_transfer 84.1 ms"``."""
    return f"{what} {format_seconds(seconds)}"


def plain_table(title: str, columns: Sequence[tuple[str, str]], caption: str | None = None) -> Table:
    """A table without rows; ``columns`` are (heading, "left" or "right")."""
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
        pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold", no_wrap=justify == "right")  # type: ignore[arg-type]
    return table


def figures_table(title: str, figures: Sequence[Figure]) -> Table:
    """Figures in rows: what was measured, its peer, the value, its target and whether it was met."""
    notes = list(dict.fromkeys(figure.note for figure in figures if figure.note))
    table = plain_table(
        title,
        [("figure", "left"), ("measured", "right"), ("beside", "left"), ("value", "right"), ("target", "right"),
         ("", "left")],
        caption="; ".join(notes) or None,
    )  # fmt: skip
    for figure in figures:
        verdict = "" if figure.bar is None else "MISSED" if figure.missed else "ok"
        value = unit_text(figure.value, figure.unit) + (" x" if figure.unit == "ratio" and figure.at_least else "")
        table.add_row(figure.name, figure.ours or "-", figure.peer or "-", value, figure.target, verdict)
    return table


def missed(figures: Sequence[Figure]) -> list[str]:
    """A line for each missed bar: ``"planning: TP4 -> TP2: 8.1, target >= 10"``."""
    return [f"{f.part}: {f.name}: {unit_text(f.value, f.unit)}, target {f.target}" for f in figures if f.missed]


def report_dict(figures: Sequence[Figure], head: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document: ``head`` (when, where, how), then every figure with its bar, verdict and raw samples."""
    rows = [{**asdict(figure), "missed": figure.missed} for figure in figures]
    return {"schema_version": _SCHEMA_VERSION, **head, "figures": rows}
