"""Drawings of the page: ``plot(view)`` is one metric over the commits as inline SVG, ``sparkline(view)`` a small one.

Pure. The drawing is whole without a script: every commit has a ``<title>`` with its numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise

from relaymeter.harness.track.changes import Change
from relaymeter.harness.track.page_series import MetricView, Spot
from relaymeter.harness.track.row_texts import shortened, value_text, visible
from relaymeter.units import counted

__all__ = ["change_text", "plot", "sparkline", "spot_text"]

_WIDTH, _HEIGHT = 560.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 14.0, 22.0, 172.0
_SPARK_WIDTH, _SPARK_HEIGHT = 132.0, 28.0
#: Pixels between labels of commits.
_LABEL_WIDTH = 92.0
#: Pixels that the label of a change takes.
_CHANGE_WIDTH = 96.0
#: An axis spans at least so much of the middle value, so that noise does not fill it.
_LEAST_SPAN = 0.2


def change_text(change: Change) -> str:
    """``1.34x slower``; of a rate the same, as a lower rate is slower."""
    worse = change.ratio >= 1
    return f"{change.ratio if worse else 1 / change.ratio:.2f}x {'slower' if worse else 'faster'}"


def spot_text(metric: str, spot: Spot) -> str:
    """``1a2b3c4d5 2026-11-30: 17.2 ms, 8 launches 16.9 ms to 17.9 ms``."""
    text = f"{visible(spot.label)} {visible(spot.date)}: "
    if spot.median is None:
        text += "no time"
    else:
        low, high = value_text(metric, min(spot.values)), value_text(metric, max(spot.values))
        count = len(spot.values)
        text += f"{value_text(metric, spot.median)}, " + (
            f"{count} launches {low} to {high}" if count > 1 else "1 launch"
        )
    return text + (f", WRONG BITS in {spot.wrong}" if spot.wrong else "")


def plot(view: MetricView) -> str:
    """The SVG of one metric: every launch a point, the commits' medians a line, the level between two changes a bar,
    each change a dashed line with its ratio. Points far beyond the others are drawn at the edge, as triangles."""
    spots = view.spots
    low, high = _range([spot.values for spot in spots])
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(spots))

    def x_of(place: float) -> float:
        return _LEFT + (place + 0.5) * step

    def y_of(value: float) -> float:
        return _BOTTOM - (min(max(value, low), high) - low) / (high - low) * (_BOTTOM - _TOP)

    about = f"{view.metric} over {counted(len(spots), 'commit')}" + "".join(
        f"; {change_text(one)} at {one.label}" for _, one in view.changes
    )
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{_safe(about)}">',
        *_axes(view, [(tick, y_of(tick)) for tick in _ticks(low, high)], step),
        *_levels(view, x_of, y_of),
    ]
    inside, beyond = "", ""
    for place, spot in enumerate(spots):
        for value in spot.values:
            x = x_of(place)
            if low <= value <= high:
                inside += f"M{x:.4g} {y_of(value):.4g}h0"
            else:
                beyond += f"M{x:.4g} {_TOP - 7:.4g}l3 5h-6z" if value > high else f"M{x:.4g} {_BOTTOM + 7:.4g}l3 -5h-6z"
    medians = [(place, spot.median) for place, spot in enumerate(spots) if spot.median is not None]
    line = "".join(
        f"{'L' if number else 'M'}{x_of(place):.4g} {y_of(value):.4g}" for number, (place, value) in enumerate(medians)
    )
    dots = "".join(f"M{x_of(place):.4g} {y_of(value):.4g}h0" for place, value in medians if not spots[place].dirty)
    hollow = "".join(
        f'<circle cx="{x_of(place):.4g}" cy="{y_of(value):.4g}" r="3"/>'
        for place, value in medians
        if spots[place].dirty
    )
    wrong = "".join(
        f"M{x_of(place) - 4:.4g} {_BOTTOM - 8:.4g}l8 8m0 -8l-8 8" for place, spot in enumerate(spots) if spot.wrong
    )
    for name, path in (("launches", inside), ("line", line), ("medians", dots), ("beyond", beyond), ("wrong", wrong)):
        if path:
            parts.append(f'<path class="{name}" d="{path}"/>')
    if hollow:
        parts.append(f'<g class="dirty">{hollow}</g>')
    parts.append(f'<path class="cursor" d="M0 {_TOP:.4g}V{_BOTTOM:.4g}"/><g class="hits" stroke-width="{step:.4g}">')
    for place, spot in enumerate(spots):
        title = _safe(spot_text(view.metric, spot))
        parts.append(f'<path d="M{x_of(place):.4g} {_TOP:.4g}V{_BOTTOM:.4g}"><title>{title}</title></path>')
    return "".join(parts) + "</g></svg>"


def sparkline(view: MetricView) -> str:
    """The medians alone, small, for the overview."""
    low, high = _range([spot.values for spot in view.spots])
    medians = [(place, spot.median) for place, spot in enumerate(view.spots) if spot.median is not None]
    step = (_SPARK_WIDTH - 6) / max(1, len(view.spots) - 1)

    def at(place: int, value: float) -> str:
        share = (min(max(value, low), high) - low) / (high - low)
        return f"{3 + place * step:.4g} {_SPARK_HEIGHT - 3 - share * (_SPARK_HEIGHT - 6):.4g}"

    line = "".join(f"{'L' if number else 'M'}{at(*median)}" for number, median in enumerate(medians))
    end = f'<path class="medians" d="M{at(*medians[-1])}h0"/>' if medians else ""
    return (
        f'<svg class="spark" viewBox="0 0 {_SPARK_WIDTH:.0f} {_SPARK_HEIGHT:.0f}" aria-hidden="true">'
        f'<path class="line" d="{line}"/>{end}</svg>'
    )


def _safe(text: str) -> str:
    return escape(visible(text), quote=True)


def _range(values: Sequence[tuple[float, ...]]) -> tuple[float, float]:
    """Ends of the axis: every commit's median and all but the outermost fiftieth of the launches at each end."""
    medians = [statistics.median(group) for group in values if group]
    every = sorted(value for group in values for value in group)
    if not every:
        return 0.0, 1.0
    cut = max(1, len(every) // 50) if len(every) >= 20 else 0
    low, high = min(*medians, every[cut]), max(*medians, every[-1 - cut])
    least = _LEAST_SPAN * statistics.median(medians)
    grow = max(0.0, least - (high - low)) / 2 + 0.06 * max(high - low, least)
    return max(0.0, low - grow), high + grow


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round values between the ends: multiples of the largest round step that gives three."""
    top = math.floor(math.log10(high - low))
    for exponent, factor in ((top, 5), (top, 2), (top, 1), (top - 1, 5), (top - 1, 2), (top - 1, 1)):
        step = factor * 10.0**exponent
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first >= 2:
            return [number * step for number in range(first, last + 1)]
    return []


def _axes(view: MetricView, ticks: Sequence[tuple[float, float]], step: float) -> Iterator[str]:
    """Lines and labels of the values, labels of some commits."""
    yield '<g class="axis">'
    lines = "".join(f"M{_LEFT:.4g} {y:.4g}H{_WIDTH - _RIGHT:.4g}" for _, y in ticks)
    yield f'<path class="grid" d="{lines}"/>'
    for tick, y in ticks:
        label = "0" if tick == 0 else value_text(view.metric, float(tick))
        yield f'<text x="{_LEFT - 7:.4g}" y="{y + 3.5:.4g}" text-anchor="end">{_safe(label)}</text>'
    count = max(1, int((_WIDTH - _LEFT - _RIGHT) // _LABEL_WIDTH))
    last = len(view.spots) - 1
    places = sorted({round(number * last / max(1, count - 1)) for number in range(count)})
    if len(view.spots) <= count:
        places = list(range(len(view.spots)))
    for place in places:
        x = min(max(_LEFT + (place + 0.5) * step, _LEFT + 26), _WIDTH - 34)
        label = shortened(visible(view.spots[place].label), 11)
        yield f'<text x="{x:.4g}" y="{_BOTTOM + 19:.4g}" text-anchor="middle">{_safe(label)}</text>'
    yield "</g>"


def _levels(view: MetricView, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> Iterator[str]:
    """The median of each stretch between changes, and the changes."""
    ends = [0, *(place for place, _ in view.changes), len(view.spots)]
    path = ""
    for first, end in pairwise(ends):
        values = [value for spot in view.spots[first:end] for value in spot.values]
        if values:
            y = y_of(statistics.median(values))
            path += f"M{x_of(first - 0.5):.4g} {y:.4g}H{x_of(end - 0.5):.4g}"
    if view.changes:
        yield f'<path class="level" d="{path}"/>'
    free = 0.0
    for place, change in view.changes:
        x = x_of(place - 0.5)
        kind, sign = ("worse", "\u25b2") if change.ratio >= 1 else ("better", "\u25bc")
        text = f"{sign} {change_text(change)}"
        right = x < _WIDTH - _CHANGE_WIDTH
        label = ""
        if (x if right else x - _CHANGE_WIDTH) >= free:
            anchor, at = ("start", x + 4) if right else ("end", x - 4)
            label = f'<text x="{at:.4g}" y="{_TOP - 7:.4g}" text-anchor="{anchor}">{text}</text>'
            free = x + (_CHANGE_WIDTH if right else 0)
        title = f"<title>{_safe(f'{text} from {change.label}')}</title>"
        yield f'<g class="{kind}">{title}<path d="M{x:.4g} {_TOP - 16:.4g}V{_BOTTOM:.4g}"/>{label}</g>'
