"""Plots of a run: predicted against measured time of every route, with the lower bound.

``plot_rows(rows, Path("run.png"))`` draws one panel per move. Called by rank 0 or the parent; needs no display.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from relaymeter.errors import InputError
from relaymeter.records import MoveRecord, check_target
from relaymeter.units import counted, format_seconds

__all__ = ["PLOT_FORMATS", "check_plot", "drawable", "drawn", "plot_rows"]

#: Endings that a plot's file may have.
PLOT_FORMATS = (".png", ".svg", ".pdf")

_PANELS_A_LINE = 5
#: Seconds that an axis can have: further ones are drawn at its ends.
_LEAST_S, _MOST_S = 1e-12, 1e12
#: Most letters of a row's name.
_NAME = 40
_MEASURED, _PREDICTED, _BOUND = "#3b6ea5", "#d9a441", "#444444"


def drawn(text: str, most: int = 80) -> str:
    """``text`` as a plot can have it: on one line, control characters and what the font has no letter for as escapes
    (``\\r``, ``\\u4e2d``), cut after ``most`` letters."""
    known = _letters()
    plain = "".join(
        one if one.isprintable() and ord(one) in known else one.encode("unicode_escape").decode() for one in text
    )
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."


def drawable(seconds: float) -> float:
    """``seconds`` within what an axis can have; 0 stays 0."""
    return min(max(seconds, _LEAST_S), _MOST_S) if seconds > 0 else 0.0


@cache
def _letters() -> Collection[int]:
    """Code points that the font of plots has letters for."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def check_plot(path: Path, *, force: bool = False) -> None:
    """Refuse a plot's file name before anything is measured. Raises InputError."""
    if path.suffix.lower() not in PLOT_FORMATS:
        raise InputError(f"plot {path}: the name must end in one of {', '.join(PLOT_FORMATS)}")
    check_target(path, force=force)


def plot_rows(rows: Sequence[MoveRecord], path: Path, *, force: bool = False) -> None:
    """Draw ``rows`` into ``path``, a panel per move: a measured and a predicted bar per row with intervals, a line
    at the bound; without prices the measured bars alone.

    Raises InputError where the file exists (no ``force``) or has another ending.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_plot(path, force=force)
    moves = list(dict.fromkeys(row.move for row in rows))
    columns = max(1, min(len(moves), _PANELS_A_LINE))
    tall = max(1, -(-len(moves) // columns))
    kinds = [kind for kind in ("planner", "executor") if len({getattr(row, kind) for row in rows}) > 1]
    figure = Figure(figsize=(1.2 + 4.2 * columns, 4.2 * tall), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(tall, columns, squeeze=False).ravel().tolist()
    for panel in panels[len(moves) :]:
        panel.set_visible(False)
    for panel, move in zip(panels, moves, strict=False):
        found = [row for row in rows if row.move == move]
        _bars(panel, found, -0.2, _MEASURED, "measured", ("measured_s", "measured_low_s", "measured_high_s"))
        _bars(panel, found, 0.2, _PREDICTED, "predicted", ("predicted_s", "predicted_low_s", "predicted_high_s"))
        bound = found[0]
        names = [drawn(", ".join([*(getattr(row, kind) for kind in kinds), row.route]), _NAME) for row in found]
        panel.set_xticks(range(len(found)), names)
        if kinds:
            panel.tick_params(axis="x", rotation=90, labelsize=7)
        lines = [f"{bound.scenario}, move {move}: {counted(bound.ranks, 'rank')} on {counted(bound.nodes, 'node')}"]
        if bound.bound_s is not None:
            panel.axhline(drawable(bound.bound_s), color=_BOUND, linestyle="--", linewidth=1, label="lower bound")
            lines.append(f"bound {format_seconds(bound.bound_s)} ({bound.bound_by})")
        if bound.simulated is not None:
            lines[0] = f"simulated ({bound.simulated}): {lines[0]}"
        panel.set_title("\n".join(map(drawn, lines)), fontsize=9)
        panel.set_ylabel("seconds")
        panel.margins(y=0.2)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        figure.savefig(partial, dpi=130)
        partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}: choose another place") from error
    finally:
        partial.unlink(missing_ok=True)


def _bars(
    panel: object, rows: Sequence[MoveRecord], shift: float, colour: str, label: str, names: tuple[str, str, str]
) -> None:
    every = [[getattr(row, name) for name in names] for row in rows]
    values = [[None if one is None else drawable(one) for one in found] for found in every]
    if all(middle is None for middle, _, _ in values):
        return
    height = [middle or 0.0 for middle, _, _ in values]
    below = [max(m - low, 0.0) if m is not None and low is not None else 0.0 for m, low, _ in values]
    above = [max(high - m, 0.0) if m is not None and high is not None else 0.0 for m, _, high in values]
    at = [place + shift for place in range(len(rows))]
    bars = panel.bar(  # type: ignore[attr-defined]
        at, height, width=0.38, color=colour, label=label, yerr=[below, above], ecolor=_BOUND, capsize=3
    )
    size, texts = 7 if len(rows) <= 6 else 5, [f"{found[0]:.3g}" if found[0] else "" for found in every]
    panel.bar_label(bars, labels=texts, padding=3, fontsize=size)  # type: ignore[attr-defined]
