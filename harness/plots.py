"""Plots of a run: predicted against measured time of every route, with the lower bound.

``plot_rows(rows, Path("run.png"))`` draws one panel per move. Called by rank 0 or the parent; needs no display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relaymeter.errors import InputError
from relaymeter.records import MoveRecord, check_target
from relaymeter.units import format_seconds

__all__ = ["PLOT_FORMATS", "check_plot", "plot_rows"]

#: Endings that a plot's file may have.
PLOT_FORMATS = (".png", ".svg", ".pdf")

_MEASURED, _PREDICTED, _BOUND = "#3b6ea5", "#d9a441", "#444444"


def check_plot(path: Path, *, force: bool = False) -> None:
    """Refuse a plot's file name before anything is measured. Raises InputError."""
    if path.suffix.lower() not in PLOT_FORMATS:
        raise InputError(f"plot {path}: the name must end in one of {', '.join(PLOT_FORMATS)}")
    check_target(path, force=force)


def plot_rows(rows: Sequence[MoveRecord], path: Path, *, force: bool = False) -> None:
    """Draw ``rows`` into ``path``: a measured and a predicted bar per route with their intervals, a line at the bound.

    Raises InputError where the file exists (no ``force``) or has another ending.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_plot(path, force=force)
    moves = list(dict.fromkeys(row.move for row in rows))
    figure = Figure(figsize=(1.2 + 4.2 * max(1, len(moves)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(1, len(moves)), squeeze=False)[0]
    for panel, move in zip(panels, moves, strict=False):
        found = [row for row in rows if row.move == move]
        _bars(panel, found, -0.2, _MEASURED, "measured", ("measured_s", "measured_low_s", "measured_high_s"))
        _bars(panel, found, 0.2, _PREDICTED, "predicted", ("predicted_s", "predicted_low_s", "predicted_high_s"))
        bound = found[0]
        panel.axhline(bound.bound_s, color=_BOUND, linestyle="--", linewidth=1, label="lower bound")
        panel.set_xticks(range(len(found)), [row.route for row in found])
        title = f"{bound.scenario}, move {move}: {bound.ranks} ranks on {bound.nodes} nodes"
        panel.set_title(f"{title}\nbound {format_seconds(bound.bound_s)} ({bound.bound_by})", fontsize=9)
        panel.set_ylabel("seconds")
        panel.margins(y=0.2)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    figure.savefig(partial, dpi=130)
    partial.replace(path)


def _bars(
    panel: object, rows: Sequence[MoveRecord], shift: float, colour: str, label: str, names: tuple[str, str, str]
) -> None:
    values = [[getattr(row, name) for name in names] for row in rows]
    height = [middle or 0.0 for middle, _, _ in values]
    below = [(m - low) if m is not None and low is not None else 0.0 for m, low, _ in values]
    above = [(high - m) if m is not None and high is not None else 0.0 for m, _, high in values]
    at = [place + shift for place in range(len(rows))]
    bars = panel.bar(  # type: ignore[attr-defined]
        at, height, width=0.38, color=colour, label=label, yerr=[below, above], ecolor=_BOUND, capsize=3
    )
    panel.bar_label(bars, labels=[f"{h:.3g}" if h else "" for h in height], padding=3, fontsize=7)  # type: ignore[attr-defined]
