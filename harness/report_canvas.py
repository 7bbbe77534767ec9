"""Pictures of ``report`` with a panel a change: where panels lie, their axes and legend. Laid out by counting letters:
measuring every text, as matplotlib's own layouts do, takes several times as long as drawing.

``canvas([["in-memory"], ["dcp", "gather"]], legend_lines=1)`` gives a figure and its panels. Offline; needs no display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["LABEL", "LETTER_IN", "TITLE", "canvas", "legend", "legend_lines", "panel_width", "save", "tidy"]

#: Width of a letter of the small texts (8 points), and of a title's, in inches.
LETTER_IN, _TITLE_LETTER_IN = 0.068, 0.077
#: Most letters of a line of a label, and of a title.
LABEL, TITLE = 36, 80
_WIDTH_IN, _RIGHT_IN = 6.4, 0.2
#: Above the axes of a panel, its title of two lines; below them numbers and what they are.
_ABOVE_IN, _BELOW_IN = 0.5, 0.52
#: Title of the picture at its top, and a line of the legend at its foot.
_HEAD_IN, _LEGEND_IN, _FOOT_IN = 0.45, 0.2, 0.15
_COLUMNS = 2
_LEGEND_COLUMNS = 6
_DPI = 120


def canvas(labels: Sequence[Sequence[str]], lines: int, bar_in: float = 0.42) -> tuple[Canvas, list[Any]]:
    """A figure with a panel for each of ``labels``, the names of its bars, each bar ``bar_in`` inches high; two panels
    beside each other. ``lines``: of the legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewCanvas

    rows = [labels[at : at + _COLUMNS] for at in range(0, len(labels), _COLUMNS)]
    tall = [bar_in * max(len(one) for one in row) for row in rows]
    width = _WIDTH_IN * min(_COLUMNS, len(labels))
    height = _HEAD_IN + sum(tall) + len(rows) * (_ABOVE_IN + _BELOW_IN) + lines * _LEGEND_IN + _FOOT_IN
    figure = NewCanvas(figsize=(width, height))
    FigureCanvasAgg(figure)
    left, top, panels = _left(labels), height - _HEAD_IN, []
    for row, inches in zip(rows, tall, strict=True):
        top -= _ABOVE_IN + inches
        for column in range(len(row)):
            place = (_WIDTH_IN * column + left, top, panel_width(labels), inches)
            panel = figure.add_axes(
                (place[0] / width, place[1] / height, place[2] / width, place[3] / height), autoscale_on=False
            )
            panel.set_ylim(inches / bar_in - 0.4, -0.6)
            panels.append(panel)
        top -= _BELOW_IN
    return figure, panels


def _left(labels: Sequence[Sequence[str]]) -> float:
    """Inches left of the axes of every panel, for the longest label."""
    lines = (line for one in labels for label in one for line in label.split("\n"))
    return 0.2 + LETTER_IN * max((len(line) for line in lines), default=0)


def panel_width(labels: Sequence[Sequence[str]]) -> float:
    """Width of the axes of every panel, in inches."""
    return _WIDTH_IN - _left(labels) - _RIGHT_IN


def tidy(panel: Any, title: str, labels: Sequence[str], x: str) -> None:
    """Names of the bars, a title of at most two lines, what the numbers below are."""
    panel.set_yticks(range(len(labels)), labels)
    panel.set_title(title, fontsize=9, x=_title_at(panel, title), y=1, pad=5)
    panel.set_xlabel(x, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, axis="x", which="major", color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)


def _title_at(panel: Any, title: str) -> float:
    """Where the middle of a title is, in widths of the axes: over them, a long one further left."""
    width = panel.figure.get_figwidth()
    box = panel.get_position()
    left, wide = box.x0 * width % _WIDTH_IN, box.width * width
    half = _TITLE_LETTER_IN * max(map(len, title.split("\n"))) / 2
    return float((min(left + wide / 2, _WIDTH_IN - half) - left) / wide)


def legend_lines(names: int, columns: int = _LEGEND_COLUMNS) -> int:
    """How many lines a legend of so many names has."""
    return -(-names // columns)


def legend(figure: Canvas, title: str, handles: Mapping[str, Any], columns: int = _LEGEND_COLUMNS) -> None:
    """The title of the whole, and one legend below all panels."""
    height = figure.get_figheight()
    figure.suptitle(title, fontsize=11, y=1 - 0.12 / height)
    figure.legend([*handles.values()], [*handles], loc="lower center", bbox_to_anchor=(0.5, 0.02 / height),
                  ncols=columns, fontsize=8, frameon=False, borderaxespad=0.2)  # fmt: skip


def save(figure: Canvas, path: Path) -> None:
    """Write the picture."""
    figure.savefig(path, dpi=_DPI)
