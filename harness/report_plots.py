"""Plots of ``report``: phases of every path as stacked bars, ratios to the path in memory, moves by route.

``draw_plots(rows, folder)`` writes PNG files and says what each shows. Offline; needs no display.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaymeter.compare_records import PHASES, CompareRecord, pausing
from relaymeter.harness.emit import NONE
from relaymeter.harness.plots import plot_rows
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
#: Width of a letter at the end of a bar, over that of a panel.
_LETTER = 0.0145
_PANELS_A_LINE = 2
#: Panels of one picture: further ones would be too small to read.
_MOST_PANELS = 40
#: Plots of moves, each of one scenario in one place.
_MOST_MOVES = 6


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


def draw_plots(rows: Sequence[AnyRow], folder: Path) -> dict[str, str]:
    """Draw what ``rows`` allow: ``phases.png`` and ``ratios.png`` of paths, ``state-phases.png`` of training states,
    ``moves.png``, ``moves-2.png``, ... of moves of weights. Returns the names with what each shows."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar in a name begins no formula
        return _draw_plots(rows, folder)


def _draw_plots(rows: Sequence[AnyRow], folder: Path) -> dict[str, str]:
    compared = [row for row in rows if isinstance(row, CompareRecord)]
    states = [row for row in rows if isinstance(row, StateRecord)]
    moves = [row for row in rows if isinstance(row, MoveRecord)]
    drawn: dict[str, str] = {}
    if compared:
        panels = [(_title(name, origin), _path_bars(mine)) for (origin, name), mine in tables_of(compared).items()]
        _save(
            _stacked(panels, PHASES, "Phases of every path, without the digest; at the end the total"),
            folder / "phases.png",
        )
        drawn["phases.png"] = "phases of every path but the digest, medians; lighter: not in the pause"
        ratios = {key: paths_of(mine) for key, mine in tables_of(compared).items()}
        ratios = {
            key: paths
            for key, paths in ratios.items()
            if _base(paths) is not None and any(path.used and path.label != BASELINE for path in paths)
        }
        if ratios:
            _save(_ratios(ratios), folder / "ratios.png")
            drawn["ratios.png"] = "time of every path over the path in memory"
    if states:
        found = _state_panels(states)
        if any(bars for _, bars in found):
            _save(_stacked(found, STATE_PHASES, "Phases of moves of training states"), folder / "state-phases.png")
            drawn["state-phases.png"] = "phases of moves of training states, medians"
    for number, shown in enumerate(_places(moves)[:_MOST_MOVES], start=1):
        name = "moves.png" if number == 1 else f"moves-{number}.png"
        plot_rows(shown, folder / name)
        drawn[name] = f"measured time of every move of {shown[0].scenario}, {origin_of(shown[0]).text}"
    return drawn


def _places(moves: Sequence[MoveRecord]) -> list[list[MoveRecord]]:
    """The moves of each scenario, place and world: in one plot they would share panels."""
    timed = [row for row in moves if row.measured_s is not None]
    found = grouped(timed, lambda row: (row.scenario, origin_of(row), row.ranks, row.nodes))
    return [shown for own in found.values() if (shown := medians(own))]


def _title(name: str, origin: Origin) -> str:
    simulated = f"simulated: {origin.simulated}, " if origin.simulated else ""
    return f"{name}\n{simulated}commit {origin.commit} on {origin.machine_id}"


def _path_bars(rows: Sequence[CompareRecord]) -> list[_Bar]:
    bars = []
    for path in paths_of(rows):
        found = {name: path.figure(_phase(name)) for name in PHASES}
        phases = {name: one.middle for name, one in found.items() if one is not None and name != "digest"}
        label = path.label + (f"\n{path.on}" if path.on != NONE else "")
        wrong = any(is_wrong(row) for row in path.rows)
        total = path.figure(lambda row: row.total_s)
        pause = path.figure(lambda row: row.pause_s)
        said = "wrong bits" if wrong else path.rows[0].verdict
        if total is not None:
            shorter = pause is not None and pause.middle < total.middle
            said = format_seconds(total.middle) + (
                f", pause {format_seconds(pause.middle)}" if pause and shorter else ""
            )
        bars.append(_Bar(label, phases, said, wrong and total is None, frozenset(phases) - {*pausing(phases)}))
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
            label = change.first.change + (f", {change.first.planner}" if several else "")
            wrong = any(is_wrong(row) for row in change.rows)
            total = change.phase("total")
            said = "wrong bits" if wrong else change.first.verdict
            if total is not None:
                said = format_seconds(total.middle) + (" and the plan" if "plan" in phases else "")
            bars.append(_Bar(label, phases, said, wrong))
        panels.append((_title(f"{scenario}{f', {kind}' if kind else ''}", origin), bars))
    return panels


def _canvas(heights: Sequence[int], width: float, columns: int, bar: float = 0.42) -> tuple[Canvas, list[Any]]:
    """A figure with a panel for each of ``heights``, its number of bars, each ``bar`` inches high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewCanvas

    columns = min(columns, len(heights))
    lines = -(-len(heights) // columns)
    tall = [max(heights[columns * line : columns * (line + 1)]) for line in range(lines)]
    inches = [1.3 + bar * bars for bars in tall]
    figure = NewCanvas(figsize=(width * columns, sum(inches) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    found = figure.subplots(lines, columns, squeeze=False, gridspec_kw={"height_ratios": inches})
    panels = found.ravel().tolist()
    for place, panel in enumerate(panels):
        panel.set_visible(place < len(heights))
        panel.set_ylim(tall[place // columns] - 0.4, -0.6)
    return figure, panels


def _tidy(panel: Any, title: str, labels: Sequence[str], x: str) -> None:
    panel.set_yticks(range(len(labels)), labels)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(x, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, axis="x", which="major", color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)


def _stacked(panels: Sequence[tuple[str, Sequence[_Bar]]], phases: Sequence[str], title: str) -> Canvas:
    """A panel a change: a bar a path, its phases one after the other on a linear axis, the total at its end; what is
    not in the pause is lighter."""
    from matplotlib.patches import Patch

    panels = [panel for panel in panels if panel[1]][:_MOST_PANELS]
    figure, axes = _canvas([len(bars) for _, bars in panels], 6.4, _PANELS_A_LINE)
    for panel, (name, bars) in zip(axes, panels, strict=False):
        longest = max((sum(bar.phases.values()) for bar in bars), default=0.0) or 1.0
        scale, unit = (1e3, "milliseconds") if longest < 1 else (1.0, "seconds")
        for place, bar in enumerate(bars):
            left = 0.0
            for phase in phases:
                seconds = bar.phases.get(phase, 0.0)
                if seconds:
                    panel.barh(
                        place, seconds * scale, left=left * scale, height=0.62, facecolor=_COLOURS[phase],
                        **(_OUTSIDE if phase in bar.outside else {}),
                    )  # fmt: skip
                    left += seconds
            panel.text(
                (left + 0.01 * longest) * scale, place, bar.said, va="center", fontsize=8,
                color=_WRONG if bar.wrong else _INK,
            )  # fmt: skip
        ends = [sum(bar.phases.values()) / (0.97 - _LETTER * len(bar.said)) for bar in bars]
        panel.set_xlim(0, max([longest, *ends]) * scale)
        _tidy(panel, name, [bar.label for bar in bars], f"{unit}, slowest rank")
    every = [bar for _, bars in panels for bar in bars]
    handles = {name: Patch(color=_COLOURS[name]) for name in phases if any(name in bar.phases for bar in every)}
    if any(bar.outside for bar in every):
        handles["lighter: not in pause"] = Patch(facecolor=_INK, **_OUTSIDE)
    _legend(figure, handles)
    figure.suptitle(title, fontsize=11)
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


def _ratios(tables: Mapping[tuple[Origin, str], Sequence[PathRows]]) -> Canvas:
    """A panel a change: each other path's pause, state only and total over those of the path in memory, on a
    logarithmic axis, each with its number."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    every = {
        key: [path for path in paths if path.used and path.label != BASELINE and not path.part]
        for key, paths in tables.items()
    }
    shown = [(key, paths) for key, paths in every.items() if paths][:_MOST_PANELS]
    figure, axes = _canvas([len(paths) for _, paths in shown], 6.4, _PANELS_A_LINE, bar=0.72)
    handles: dict[str, Any] = {}
    for panel, ((origin, name), paths) in zip(axes, shown, strict=False):
        base = _base(tables[origin, name])
        seen = [1.0]
        for line, (label, colour, marker, of) in enumerate(_RATIOS):
            against = None if base is None else base.figure(of)
            alone = marker == "D"
            good = []
            for place, path in enumerate(paths):
                found = path.figure(of)
                ratio = _over(found, against)
                if ratio is None or (alone and not _restarts(path)):  # what another marker says
                    continue
                good.append((place + 0.17 * (line - 2), ratio))
                panel.annotate(
                    over(found, against), good[-1][::-1], xytext=(7, 0), textcoords="offset points", fontsize=7,
                    va="center", color=_INK,
                )  # fmt: skip
            (handles[label],) = panel.plot(
                [ratio for _, ratio in good], [at for at, _ in good], linestyle="", marker=marker, color=colour,
                markerfacecolor="none" if alone else colour, markersize=5,
            )  # fmt: skip
            seen += [ratio for _, ratio in good]
        panel.set_xscale("log")
        panel.set_xlim(min(seen) / 1.6, max(seen) * 2.2)
        panel.axvline(1, color=_INK, linewidth=1, linestyle="--")
        wide = max(seen) / min(seen) > 30
        panel.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        labels = [path.label + (f"\n{path.on}" if path.on != NONE else "") for path in paths]
        _tidy(panel, _title(name, origin), labels, f"time over that of {BASELINE}, log scale")
    _legend(figure, handles, columns=3)
    figure.suptitle(f"Time of every path over that of {BASELINE}, the dashed line", fontsize=11)
    return figure


def _restarts(path: PathRows) -> bool:
    return any(row.relaunch_s is not None for row in path.used)


def _over(found: Figure | None, base: Figure | None) -> float | None:
    return None if found is None or base is None or not base.middle or found.middle <= 0 else found.middle / base.middle


def _legend(figure: Canvas, handles: Mapping[str, Any], columns: int = 6) -> None:
    """One legend below all panels."""
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _save(figure: Canvas, path: Path) -> None:
    figure.savefig(path, dpi=120)
