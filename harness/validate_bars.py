"""Bars and figures of a validation as frozen data: what was computed, what it is held to, and whether it keeps to it.

``figure("sizes", "held-out sizes", "send-recv", True, 12, [Bar("median", 0.03, 0.05)]).status`` is ``"met"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relaymeter.records import plain

__all__ = [
    "MET",
    "MISSED",
    "NONE_HERE",
    "NOT_MEASURED",
    "NO_MEANING",
    "UNDECIDED",
    "Bar",
    "Figure",
    "figure",
    "without_meaning",
]

MET, MISSED = "met", "missed"
NOT_MEASURED = "not measured"
#: Cases stand behind the figure, and the measured intervals of all of them overlap. Never passes.
UNDECIDED = "undecided"
#: The figure has no meaning here: no NIC is shaped, nothing moves on a simulated cluster.
NO_MEANING = "does not apply"
#: The bar asks for one box among all, and it is not this one.
NONE_HERE = "none here"


@dataclass(frozen=True)
class Bar:
    """What a statistic of a figure has to keep to: at most ``limit``, or at least where ``least``."""

    statistic: str
    value: float | None
    """None: not measured, which never keeps to it."""
    limit: float
    least: bool = False
    number: bool = False
    """Whether it counts things; a share otherwise."""

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.least else self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of one executor. ``judged`` ones decide the exit code."""

    key: str
    title: str
    executor: str
    judged: bool
    count: int
    """Cases behind it."""
    hard: int | None = None
    """Cases that something makes hard; None where that is not asked."""
    statistics: Mapping[str, float | None] = field(default_factory=dict)
    bars: tuple[Bar, ...]
    status: str
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether it keeps the exit code at 0: its bars are met, or they have no meaning here. What was not measured,
        or not decided, never passes."""
        return self.status in (MET, NO_MEANING, NONE_HERE)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        bars = [{**bar.__dict__, "met": bar.met} for bar in self.bars]
        return {
            name: plain(bars if name == "bars" else value) for name, value in {**self.__dict__, "bars": bars}.items()
        }


def figure(
    key: str,
    title: str,
    executor: str,
    judged: bool,
    count: int,
    bars: Sequence[Bar] = (),
    *,
    hard: int | None = None,
    statistics: Mapping[str, float | None] | None = None,
    otherwise: str = MISSED,
    note: str = "",
    why_none: str = "",
) -> Figure:
    """A figure with its status: without a case not measured, or none here where ``why_none`` says why; with cases met
    where all its bars are, else ``otherwise``."""
    status = MET if all(bar.met for bar in bars) else otherwise
    if not count:
        status, note = (NONE_HERE, why_none) if why_none else (NOT_MEASURED, "")
    return Figure(
        key=key, title=title, executor=executor, judged=judged, count=count, hard=hard, statistics=statistics or {},
        bars=tuple(bars), status=status, note=note,
    )  # fmt: skip


def without_meaning(found: Figure, why: str) -> Figure:
    """The figure where it has no meaning, and why."""
    return Figure(**{**found.__dict__, "status": NO_MEANING, "note": why})
