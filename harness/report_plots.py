"""Plots of ``report``: phases of every path as stacked bars, ratios to the path in memory, moves by route.

``draw_plots(rows, folder)`` writes PNG files and says what each shows. Offline; needs no display.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaymeter.compare_records import PHASES, CompareRecord, pausing
from relaymeter.harness.emit import NONE
from relaymeter.harness.plots import drawable, drawn, plot_rows
from relaymeter.harness.report_canvas import (
    LABEL,
    LETTER_IN,
    TITLE,
    canvas,
    legend,
    legend_lines,
    panel_width,
    save,
    tidy,
)
from relaymeter.harness.report_compare import BASELINE, PathRows, paths_of, tables_of, without_relaunch
from relaymeter.harness.report_figures import Figure, is_wrong, over
from relaymeter.harness.report_moves import medians
from relaymeter.harness.report_sources import AnyRow, Origin, origin_of
from relaymeter.harness.report_states import STATE_PHASES, changes_of
from relaymeter.harness.report_tables import grouped
from relaymeter.records import MoveRecord
from relaymeter.state_records import StateRecord
from relaymeter.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["draw_plots"]

_INK, _WRONG = "#444444", "#c4472f"
#: Colours of phases; a phase has the same one in every plot.
_COLOURS: Mapping[str, str] = dict(
    zip(
        (*PHASES, "prepare", "fields"),
        ("#b8b8b8", "#3b6ea5", "#6d9bc9", "#2f8f5b", "#d9a441", "#b5762a", "#c4472f", "#e08e7b", "#8a4fa3", "#7cc096",
         "#3aa6a6", "#7a7a7a", "#d9a441", "#2f8f5b"),
        strict=True,
    )
)  # fmt: skip
#: How what is not in the pause is drawn.
_OUTSIDE: Mapping[str, Any] = {"alpha": 0.4, "hatch": "////", "edgecolor": "white", "linewidth": 0}
#: Most letters at the end of a bar.
_SAID = 32
#: Panels of one picture: of more it would be too tall to read.
_MOST_PANELS = 16
#: From so many panels on it is said that they are drawn.
_MANY_PANELS = 8
#: Ratios that an axis can have: further ones are drawn at its ends.
_LEAST_RATIO, _MOST_RATIO = 1e-9, 1e9
#: Plots of moves, each of one scenario in one place.
_MOST_PICTURES = 6


@dataclass(frozen=True)
class _Bar:
    label: str
    phases: Mapping[str, float]
    """Seconds by name: what the bar is made of."""
    said: str
    """What stands at the end of the bar."""
    wrong: bool = False
    outside: frozenset[str] = frozenset()
    """Phases that are not in the pause: drawn lighter."""
    marks: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Ratios by name of the time, each with its text: what a line of ``ratios.png`` is made of."""


#: A title of two lines, and bars.
_Panel = tuple[str, Sequence[_Bar]]


def draw_plots(rows: Sequence[AnyRow], folder: Path, say: Callable[[str], None] = lambda text: None) -> dict[str, str]:
    """Draw what ``rows`` allow: ``phases.png`` and ``ratios.png`` of paths, ``state-phases.png`` of training states,
    ``moves.png``, ``moves-2.png``, ... of moves of weights. Returns the names with what each shows. ``say`` is told
    before many panels are drawn, and what is not drawn."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar in a name begins no formula
        return _draw_plots(rows, _Pictures(folder, say))


@dataclass
class _Pictures:
    """What was drawn into a folder."""

    folder: Path
    say: Callable[[str], None]
    drawn: dict[str, str] = field(default_factory=dict)
    """What each picture shows, by name."""

    def panels(
        self, name: str, what: str, panels: Sequence[_Panel], draw: Callable[[Sequence[_Panel]], Canvas]
    ) -> None:
        """Draw the first of ``panels``, what is left out said."""
        left = len(panels) - _MOST_PANELS
        if left > 0:
            what += f"; the first {_MOST_PANELS} of {len(panels)} panels: the others are in the tables alone"
        if len(panels) > _MANY_PANELS:
            self.say(f"drawing {name}: {what if left > 0 else f'{len(panels)} panels'}")
        figure = draw(panels[:_MOST_PANELS])
        if left > 0:
            figure.text(
                0.01, 1 - 0.25 / figure.get_figheight(), f"{left} panels are not drawn", fontsize=9, color=_WRONG
            )
        save(figure, self.folder / name)
        self.drawn[name] = what


def _draw_plots(rows: Sequence[AnyRow], pictures: _Pictures) -> dict[str, str]:
    compared = [row for row in rows if isinstance(row, CompareRecord)]
    states = [row for row in rows if isinstance(row, StateRecord)]
    tables = {key: paths_of(mine) for key, mine in tables_of(compared).items()}
    if tables:
        pictures.panels(
            "phases.png", "phases of every path but the digest, medians; lighter: not in the pause",
            [(_title(name, origin), _path_bars(paths)) for (origin, name), paths in tables.items()],
            lambda some: _stacked(some, PHASES, "Phases of every path, without the digest; at the end the total"),
        )  # fmt: skip
    ratios = [
        (_title(name, origin), found) for (origin, name), paths in tables.items() if (found := _ratio_bars(paths))
    ]
    if ratios:
        pictures.panels("ratios.png", "time of every path over the path in memory", ratios, _ratios)
    panels = [panel for panel in _state_panels(states) if panel[1]]
    if panels:
        pictures.panels(
            "state-phases.png", "phases of moves of training states, medians", panels,
            lambda some: _stacked(some, STATE_PHASES, "Phases of moves of training states"),
        )  # fmt: skip
    _draw_moves([row for row in rows if isinstance(row, MoveRecord)], pictures)
    return pictures.drawn


def _draw_moves(rows: Sequence[MoveRecord], pictures: _Pictures) -> None:
    places = _places(rows)
    if len(places) > _MOST_PICTURES:
        first = f"the first {_MOST_PICTURES} of {len(places)} places and scenarios"
        pictures.say(f"drawing the moves of {first}: the others are in the tables alone")
    for number, mine in enumerate(places[:_MOST_PICTURES], start=1):
        name = "moves.png" if number == 1 else f"moves-{number}.png"
        moves = list(dict.fromkeys(row.move for row in mine))
        what = f"measured time of every move of {mine[0].scenario}, {origin_of(mine[0]).text}"
        if len(moves) > _MOST_PANELS:
            what += f"; the first {_MOST_PANELS} of {len(moves)} moves: the others are in the tables alone"
            pictures.say(f"drawing {name}: {what}")
        some = moves[:_MOST_PANELS]
        plot_rows([row for row in mine if row.move in some], pictures.folder / name)
        pictures.drawn[name] = what


def _places(moves: Sequence[MoveRecord]) -> list[list[MoveRecord]]:
    """The moves of each scenario, place and world: in one plot they would share panels."""
    timed = [row for row in moves if row.measured_s is not None]
    found = grouped(timed, lambda row: (row.scenario, origin_of(row), row.ranks, row.nodes))
    return [shown for own in found.values() if (shown := medians(own))]


def _title(name: str, origin: Origin) -> str:
    simulated = f"simulated: {origin.simulated}, " if origin.simulated else ""
    return drawn(name, TITLE) + "\n" + drawn(f"{simulated}commit {origin.commit} on {origin.machine_id}", TITLE)


def _label(path: PathRows) -> str:
    return drawn(path.label, LABEL) + ("\n" + drawn(path.on, LABEL) if path.on != NONE else "")


def _path_bars(paths: Sequence[PathRows]) -> list[_Bar]:
    bars = []
    for path in paths:
        found = {name: path.figure(_phase(name)) for name in PHASES}
        phases = {name: one.middle for name, one in found.items() if one is not None and name != "digest"}
        wrong = any(is_wrong(row) for row in path.rows)
        total = path.figure(lambda row: row.total_s)
        pause = path.figure(lambda row: row.pause_s)
        said = "wrong bits" if wrong else path.rows[0].verdict
        if total is not None:
            shorter = pause is not None and pause.middle < total.middle
            said = format_seconds(total.middle) + (
                f", pause {format_seconds(pause.middle)}" if pause and shorter else ""
            )
        outside = frozenset(phases) - {*pausing(phases)}
        bars.append(_Bar(_label(path), phases, said, wrong and total is None, outside))
    return bars


def _phase(name: str) -> Callable[[CompareRecord], float | None]:
    return lambda row: row.phases.get(name)


def _state_panels(rows: Sequence[StateRecord]) -> list[tuple[str, list[_Bar]]]:
    panels = []
    for (origin, scenario, kind), mine in grouped(rows, lambda row: (origin_of(row), row.scenario, row.row)).items():
        several = len({row.planner for row in mine}) > 1
        bars = []
        for change in changes_of(mine):
            found = {name: change.phase(name) for name in STATE_PHASES}
            phases = {name: one.middle for name, one in found.items() if one is not None}
            label = drawn(change.first.change + (f", {change.first.planner}" if several else ""), LABEL)
            wrong = any(is_wrong(row) for row in change.rows)
            total = change.phase("total")
            said = "wrong bits" if wrong else change.first.verdict
            if total is not None:
                said = format_seconds(total.middle) + (" and the plan" if "plan" in phases else "")
            bars.append(_Bar(label, phases, said, wrong))
        panels.append((_title(f"{scenario}{f', {kind}' if kind else ''}", origin), bars))
    return panels


def _stacked(panels: Sequence[_Panel], phases: Sequence[str], title: str) -> Canvas:
    """A panel a change: a bar a path, its phases one after the other on a linear axis, the total at its end; what is
    not in the pause is lighter."""
    from matplotlib.patches import Patch, Rectangle

    every = [bar for _, bars in panels for bar in bars]
    handles = {name: Patch(color=_COLOURS[name]) for name in phases if any(name in bar.phases for bar in every)}
    if any(bar.outside for bar in every):
        handles["lighter: not in pause"] = Patch(facecolor=_INK, **_OUTSIDE)
    labels = [[bar.label for bar in bars] for _, bars in panels]
    figure, axes = canvas(labels, legend_lines(len(handles)))
    letter = LETTER_IN / panel_width(labels)
    for panel, (name, bars) in zip(axes, panels, strict=True):
        ends = [sum(drawable(seconds) for seconds in bar.phases.values()) for bar in bars]
        longest = max(ends, default=0.0) or 1.0
        scale, unit = (1e3, "milliseconds") if longest < 1 else (1.0, "seconds")
        said = [drawn(bar.said, _SAID) for bar in bars]
        room = [end / max(0.97 - letter * len(text), 0.2) for end, text in zip(ends, said, strict=True)]
        panel.set_xlim(0, max(longest, *room) * scale)
        for place, bar in enumerate(bars):
            left = 0.0
            for phase in phases:
                seconds = drawable(bar.phases.get(phase, 0.0)) * scale
                if seconds:
                    look = _OUTSIDE if phase in bar.outside else {}
                    panel.add_patch(Rectangle((left, place - 0.31), seconds, 0.62, facecolor=_COLOURS[phase], **look))
                    left += seconds
            panel.text(
                left + 0.01 * longest * scale, place, said[place], va="center", fontsize=8,
                color=_WRONG if bar.wrong else _INK,
            )  # fmt: skip
        tidy(panel, name, [bar.label for bar in bars], f"{unit}, slowest rank")
    legend(figure, title, handles)
    return figure


def _base(paths: Sequence[PathRows]) -> PathRows | None:
    return next((path for path in paths if path.label == BASELINE and path.used), None)


_RATIOS: tuple[tuple[str, str, str, Callable[[CompareRecord], float | None]], ...] = (
    ("pause", "#3b6ea5", "o", lambda row: row.pause_s),
    ("pause without relaunch and imports", "#3b6ea5", "D", lambda row: without_relaunch(row, row.pause_s)),
    ("state only", "#2f8f5b", "s", lambda row: row.transfer_s),
    ("total", "#d9a441", "o", lambda row: row.total_s),
    ("total without relaunch and imports", "#d9a441", "D", lambda row: without_relaunch(row, row.total_s)),
)


def _ratio_bars(paths: Sequence[PathRows]) -> list[_Bar]:
    """Of each path but the one in memory, its times over those of that one; none without it."""
    base = _base(paths)
    bars = []
    for path in paths:
        if base is None or not path.used or path.label == BASELINE or path.part:
            continue
        marks = {}
        for label, _, marker, of in _RATIOS:
            found, against = path.figure(of), base.figure(of)
            ratio = _over(found, against)
            if ratio is not None and (marker != "D" or _restarts(path)):  # else it says what another marker says
                marks[label] = (ratio, drawn(over(found, against)))
        bars.append(_Bar(_label(path), {}, "", marks=marks))
    return bars


def _ratios(panels: Sequence[_Panel]) -> Canvas:
    """A panel a change: each other path's pause, state only and total over those of the path in memory, on a
    logarithmic axis, each with its number."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    columns = 3
    labels = [[bar.label for bar in bars] for _, bars in panels]
    figure, axes = canvas(labels, legend_lines(len(_RATIOS), columns), bar_in=0.72)
    handles: dict[str, Any] = {}
    for panel, (name, bars) in zip(axes, panels, strict=True):
        seen = [1.0, *(ratio for bar in bars for ratio, _ in bar.marks.values())]
        wide = max(seen) / min(seen) > 30
        panel.set_xscale("log")
        panel.set_xlim(min(seen) / 1.6, max(seen) * 2.2)
        panel.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.axvline(1, color=_INK, linewidth=1, linestyle="--")
        for line, (label, colour, marker, _) in enumerate(_RATIOS):
            good = [
                (bar.marks[label], place + 0.17 * (line - 2)) for place, bar in enumerate(bars) if label in bar.marks
            ]
            (handles[label],) = panel.plot(
                [ratio for (ratio, _), _ in good], [at for _, at in good], linestyle="", marker=marker, color=colour,
                markerfacecolor="none" if marker == "D" else colour, markersize=5,
            )  # fmt: skip
            for (ratio, text), at in good:
                panel.annotate(text, (ratio, at), xytext=(7, 0), textcoords="offset points", fontsize=7, va="center",
                               color=_INK)  # fmt: skip
        tidy(panel, name, [bar.label for bar in bars], f"time over that of {BASELINE}, log scale")
    legend(figure, f"Time of every path over that of {BASELINE}, the dashed line", handles, columns)
    return figure


def _restarts(path: PathRows) -> bool:
    return any(row.relaunch_s is not None for row in path.used)


def _over(found: Figure | None, base: Figure | None) -> float | None:
    """The ratio within what an axis can have."""
    if found is None or base is None or not base.middle or found.middle <= 0:
        return None
    return min(max(found.middle / base.middle, _LEAST_RATIO), _MOST_RATIO)
