"""Plots of a validation: sizes against the fit, predicted against measured, and price curves that cross at thresholds.

``draw_plots(records, profile, folder)`` writes them and returns their paths. Called by the parent or offline; needs no
display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.costs import CROSS_NODE, IN_NODE, Curve
from relaymeter.calibration.profiles import Profile
from relaymeter.harness.validate_candidates import Side, sides
from relaymeter.harness.validate_figures import executors_of, known_nic_rates
from relaymeter.policies.price import Pricer
from relaymeter.policies.thresholds import BATCH_BLOCKS, batch_loads, batch_seconds, pair_batch
from relaymeter.records import check_target
from relaymeter.relayout.routes import ROUTES
from relaymeter.units import counted, format_bytes, format_rate
from relaymeter.validation_records import KINDS, ValidationRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_plots"]

FloatArray = NDArray[np.float64]

_INK, _FIT, _HELD_OUT = "#444444", "#3b6ea5", "#c4472f"
_KINDS = dict(zip(KINDS, ("#7a7a7a", "#3b6ea5", "#2f8f5b", "#d9a441", "#8a4fa3"), strict=True))
_ROUTE_COLOURS = ("#3b6ea5", "#d9a441", "#2f8f5b", "#8a4fa3", "#c4472f")
_BANDS = ((0.20, "#eeeeee"), (0.08, "#dcdcdc"))
_LINKS = {IN_NODE: "inside a node", CROSS_NODE: "between nodes"}
_SIZE_TICKS = 6
#: Errors beyond this many per cent are drawn at the edge of their panel.
_ERROR_LIMIT = 60.0
_SETTINGS_A_LINE = 4


def draw_plots(
    records: Sequence[ValidationRecord], profile: Profile, folder: Path, *, force: bool = False
) -> tuple[Path, ...]:
    """Draw what ``records`` and ``profile`` allow into ``folder`` as PNG files, each whole or not at all.

    ``sizes-EXECUTOR.png``: time and rate against size, the fit, what it was fitted to, held-out points.
    ``predicted.png``: predicted against measured time of every case. ``thresholds-EXECUTOR.png``: price curves against
    block size, with the measured batches. Raises InputError where a file exists (no ``force``).
    """
    drawn: list[tuple[str, Figure]] = []
    executors = [name for name in executors_of(records, profile) if name in profile.executors]
    named = _named(records, profile)
    for executor in executors:
        mine = [row for row in records if row.executor == executor]
        if any(row.kind == "size" for row in mine):
            drawn.append((f"sizes-{executor}.png", _sizes(mine, profile, executor, named)))
    if records:
        drawn.append(("predicted.png", _predicted(records, executors_of(records, profile), named)))
    for executor in executors:
        found = [one for one in sides(records) if one.executor == executor]
        if found:
            drawn.append((f"thresholds-{executor}.png", _thresholds(found, profile, executor, named)))
    paths = tuple(folder / name for name, _ in drawn)
    for path in paths:
        check_target(path, force=force)
    for path, (_, figure) in zip(paths, drawn, strict=True):
        partial = path.with_name(f".{path.stem}.partial{path.suffix}")
        figure.savefig(partial, dpi=120)
        partial.replace(path)
    return paths


def _named(records: Sequence[ValidationRecord], profile: Profile) -> str:
    """What every title ends with: the world, and the simulated cluster where it is one."""
    topology = profile.topology
    name = next((row.simulated for row in records if row.simulated), None) or profile.simulated
    world = f"{counted(topology.world_size, 'rank')} on {counted(topology.nodes, 'node')}"
    return f"{world}, simulated: {name}" if name else world


def _canvas(columns: int, lines: int, width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(width * columns, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(lines, columns, squeeze=False)


def _tidy(panel: Any, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(x, fontsize=9)
    panel.set_ylabel(y, fontsize=9)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, which="major", color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)


def _size_axis(panel: Any, smallest: float, largest: float) -> None:
    """A logarithmic axis of bytes with ticks at powers of 2 that people can read."""
    powers = np.arange(np.floor(np.log2(smallest)), np.ceil(np.log2(largest)) + 1)
    ticks = powers[:: max(1, len(powers) // _SIZE_TICKS)]
    panel.set_xscale("log", base=2)
    panel.set_xticks(2.0**ticks, [_binary(2.0**tick) for tick in ticks])
    panel.minorticks_off()


def _plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers: 0.1, 1, 10, and more of them where it spans less than two tens."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    narrow = high / low < 100
    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _binary(count: float) -> str:
    for limit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:g} {name}"
    return f"{count:g} B"


def _sizes(records: Sequence[ValidationRecord], profile: Profile, executor: str, named: str) -> Figure:
    """Two lines of panels, time and rate; a column a link class."""
    costs = profile.costs(executor)
    links = [(kind, link.curve) for kind in _LINKS if (link := costs.link(kind)) is not None]
    figure, panels = _canvas(len(links), 2, 6.0, 3.6)
    truth = set(known_nic_rates(records, profile).values())
    for column, (kind, curve) in enumerate(links):
        held = [row for row in records if row.kind == "size" and row.link == kind]
        cells = [cell for cell in profile.cells if cell.pattern == f"{kind} curve" and cell.executor == executor]
        fitted = sorted((cell.size, cell.median_s) for cell in cells)
        time_panel, rate_panel = panels[0][column], panels[1][column]
        _curve_points(time_panel, curve, fitted, held, rate=False)
        _curve_points(rate_panel, curve, fitted, held, rate=True)
        if kind == CROSS_NODE and len(truth) == 1:
            rate = truth.pop()
            rate_panel.axhline(rate / 1e6, color=_INK, linewidth=1, linestyle="--", label="payload of a shaped NIC")
            rate_panel.annotate(
                format_rate(rate), (0.01, rate / 1e6), xycoords=("axes fraction", "data"), fontsize=8, va="bottom"
            )
        ends = [size for size, _ in fitted] + [row.largest_bytes for row in held] + list(curve.bytes)
        for panel in (time_panel, rate_panel):
            _size_axis(panel, min(ends), max(ends))
        time_panel.set_yscale("log")
        _plain_log(time_panel.yaxis)
        _tidy(time_panel, f"one flow {_LINKS[kind]}", "bytes of the message", "time of a call, ms")
        _tidy(rate_panel, f"one flow {_LINKS[kind]}: payload rate", "bytes of the message", "bytes over time, MB/s")
        rate_panel.set_ylim(bottom=0)
        time_panel.legend(fontsize=8, frameon=False)
        rate_panel.legend(fontsize=8, frameon=False, loc="lower right")
    figure.suptitle(f"Sizes that no fit has seen: {executor}, {named}", fontsize=11)
    return figure


def _curve_points(
    panel: Any, curve: Curve, fitted: Sequence[tuple[int, float]], held: Sequence[ValidationRecord], *, rate: bool
) -> None:
    """The fit as a line, the cells behind it, and held-out medians with their intervals: ms, or MB/s."""

    def shown(nbytes: FloatArray, seconds: FloatArray) -> FloatArray:
        return nbytes / seconds / 1e6 if rate else seconds * 1e3

    last = max([curve.bytes[-1], *(row.largest_bytes for row in held)])
    inside = np.geomspace(curve.bytes[0], curve.bytes[-1], 200)
    panel.plot(inside, shown(inside, curve.time(inside)), color=_FIT, linewidth=1.4, label="fit")
    if last > curve.bytes[-1]:
        beyond = np.geomspace(curve.bytes[-1], last, 50)
        panel.plot(beyond, shown(beyond, curve.time(beyond)), color=_FIT, linewidth=1.4, linestyle=":", label="beyond")
    if fitted:
        size, seconds = (np.asarray(column, dtype=np.float64) for column in zip(*fitted, strict=True))
        panel.plot(size, shown(size, seconds), "o", color=_FIT, markersize=4, label="fitted points")
    for alone, marker, label in ((False, "D", "held out, in a series"), (True, "s", "held out, alone")):
        rows = [row for row in held if (row.calls == 1) == alone]
        if rows:
            size = np.asarray([row.largest_bytes for row in rows], dtype=np.float64)
            middle, low, high = (
                shown(size, np.asarray([getattr(row, name) for row in rows]))
                for name in ("measured_s", "measured_low_s", "measured_high_s")
            )
            low, high = np.minimum(low, high), np.maximum(low, high)
            around = [np.maximum(middle - low, 0), np.maximum(high - middle, 0)]
            face = "none" if alone else _HELD_OUT
            panel.errorbar(
                size, middle, yerr=around, fmt=marker, markersize=5, color=_HELD_OUT, markerfacecolor=face, linewidth=1,
                capsize=2, label=label,
            )  # fmt: skip


def _predicted(records: Sequence[ValidationRecord], executors: Sequence[str], named: str) -> Figure:
    """A column per executor: predicted against measured time on one scale, and below it the error; cases by kind, hard
    ones filled, bands of the two bars."""
    figure, panels = _canvas(len(executors), 2, 6.4, 4.8)
    every = [value for row in records for value in (row.predicted_s, row.measured_s)]
    ends = np.asarray([min(every) / 1.5, max(every) * 1.5]) * 1e3
    for place, executor in enumerate(executors):
        upper, lower = panels[0][place], panels[1][place]
        rows = [row for row in records if row.executor == executor]
        for width, colour in _BANDS:
            upper.fill_between(
                ends, ends * (1 - width), ends * (1 + width), color=colour, linewidth=0, label=f"within {width:.0%}"
            )
            lower.axhspan(-100 * width, 100 * width, color=colour, linewidth=0)
        upper.plot(ends, ends, color=_INK, linewidth=0.8)
        lower.axhline(0, color=_INK, linewidth=0.8)
        theirs = [row for row in rows if row.baseline_s and row.hard and row.kind in ("move", "matrix")]
        _cases(upper, lower, theirs, [row.baseline_s or 0.0 for row in theirs], "#999999", "x", "five-line model, hard")
        for kind, colour in _KINDS.items():
            for hard in (False, True):
                some = [row for row in rows if row.kind == kind and bool(row.hard) == hard]
                label = f"{kind}, hard" if hard else kind
                _cases(upper, lower, some, [row.predicted_s for row in some], colour, "o", label, filled=hard)
        for panel in (upper, lower):
            panel.set_xscale("log")
            panel.set_xlim(*ends)
            _plain_log(panel.xaxis)
        upper.set_yscale("log")
        upper.set_ylim(*ends)
        _plain_log(upper.yaxis)
        lower.set_ylim(-_ERROR_LIMIT, _ERROR_LIMIT)
        default = ", the default executor" if any(row.default_executor for row in rows) else ""
        _tidy(upper, f"{executor}{default}: {counted(len(rows), 'case')}", "measured, ms", "predicted, ms")
        _tidy(
            lower, f"error (drawn at the edge beyond {_ERROR_LIMIT:g} %)", "measured, ms", "predicted / measured - 1, %"
        )
    _shared_legend(figure, panels[0], 6)
    figure.suptitle(f"Predicted against measured: {named}", fontsize=11)
    return figure


def _cases(
    upper: Any,
    lower: Any,
    rows: Sequence[ValidationRecord],
    predicted_s: Sequence[float],
    colour: str,
    marker: str,
    label: str,
    *,
    filled: bool = False,
) -> None:
    if not rows:
        return
    measured, predicted = np.asarray([row.measured_s for row in rows]) * 1e3, np.asarray(predicted_s) * 1e3
    style: dict[str, Any] = {
        "color": colour, "markersize": 4.5 if marker == "x" else 5.5, "markeredgewidth": 1.0, "alpha": 0.85,
        "markerfacecolor": colour if filled else "none", "linestyle": "", "marker": marker,
    }  # fmt: skip
    upper.plot(measured, predicted, label=label, **style)
    error = np.clip(100 * (predicted / measured - 1), -_ERROR_LIMIT, _ERROR_LIMIT)
    lower.plot(measured, error, clip_on=False, **style)


def _thresholds(found: Sequence[Side], profile: Profile, executor: str, named: str) -> Figure:
    """A column per setting: time per block by each route, and below it that time over direct's."""
    settings = list(dict.fromkeys(one.setting for one in found))
    columns = min(len(settings), _SETTINGS_A_LINE)
    figure, panels = _canvas(columns, 2 * -(-len(settings) // columns), 4.6, 3.3)
    for panel in panels.ravel().tolist():
        panel.set_visible(False)
    for place, setting in enumerate(settings):
        group = [one for one in found if one.setting == setting]
        upper, lower = (panels[2 * (place // columns) + line][place % columns] for line in (0, 1))
        elements = _block_sizes(group)
        _price_curves(upper, lower, group, elements, profile, executor)
        for panel in (upper, lower):
            panel.set_visible(True)
            panel.set_xscale("log")
            panel.set_xlim(elements[0], elements[-1])
            _limit_band(panel, group[0], float(elements[-1]))
            _plain_log(panel.xaxis)
        upper.set_yscale("log")
        _plain_log(upper.yaxis)
        lower.axhline(1, color=_ROUTE_COLOURS[0], linewidth=1.8)
        one = group[0]
        bucket = "" if one.bucket_bytes is None else f", buckets of {format_bytes(one.bucket_bytes)}"
        limit = "never" if one.limit is None else f"{one.limit} elements"
        title = f"{one.threshold} for {one.fanout} ranks a node: {limit}\n{one.itemsize} bytes an element{bucket}"
        _tidy(upper, title, "elements of a block", "time per block, us")
        _tidy(lower, f"the same over direct's ({one.threshold})", "elements of a block", "time over direct's")
    _shared_legend(figure, panels.ravel().tolist(), 5)
    figure.suptitle(f"Prices of a batch of equal blocks: {executor}, {named}", fontsize=11)
    return figure


def _shared_legend(figure: Figure, panels: Sequence[Any], columns: int) -> None:
    """One legend below all panels; the same label in several of them stands once."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )


def _block_sizes(group: Sequence[Side]) -> NDArray[np.int64]:
    """Elements of blocks that the curves of a setting are drawn at: its batches and its threshold, and some beyond."""
    blocks = [block for side in group for block in (side.elements, side.limit) if block]
    return np.unique(np.geomspace(max(1, min(blocks) / 4), max(blocks) * 4, 60).astype(np.int64))


def _price_curves(
    upper: Any, lower: Any, group: Sequence[Side], elements: NDArray[np.int64], profile: Profile, executor: str
) -> None:
    one = group[0]
    pair, batch = pair_batch(profile.topology, one.fanout, one.bucket_bytes or 1 << 23)
    loads = batch_loads(batch, (elements * one.itemsize).tolist(), executor)
    seconds = batch_seconds(Pricer(profile, pair, executor), loads)
    wanted = ("direct", one.other.route)
    for colour, route, price in zip(_ROUTE_COLOURS, ROUTES, seconds, strict=False):
        width = 1.8 if route in wanted else 0.9
        upper.plot(elements, price / BATCH_BLOCKS * 1e6, color=colour, linewidth=width, label=f"{route}, priced")
        lower.plot(elements, price / seconds[0], color=colour, linewidth=width)
        rows = [(side, row) for side in group for row in (side.direct, side.other) if row.route == route]
        if not rows:
            continue
        at = [side.elements for side, _ in rows]
        count = [max(1, row.bytes_total / (side.elements * one.itemsize * one.fanout)) for side, row in rows]
        _measured(upper, at, [row for _, row in rows], [1e6 / blocks for blocks in count], colour, f"{route}, measured")
        if route != "direct":
            _measured(
                lower, at, [row for _, row in rows], [1 / side.direct.measured_s for side, _ in rows], colour, None
            )


def _measured(
    panel: Any,
    at: Sequence[int],
    rows: Sequence[ValidationRecord],
    scale: Sequence[float],
    colour: str,
    label: str | None,
) -> None:
    middle = np.asarray([row.measured_s for row in rows]) * scale
    low = np.asarray([row.measured_low_s for row in rows]) * scale
    high = np.asarray([row.measured_high_s for row in rows]) * scale
    panel.errorbar(
        at, middle, yerr=[np.maximum(middle - low, 0), np.maximum(high - middle, 0)], fmt="o", color=colour,
        markersize=5, capsize=3, linewidth=1, markeredgecolor="white", markeredgewidth=0.6, label=label,
    )  # fmt: skip


def _limit_band(panel: Any, one: Side, last: float) -> None:
    """The threshold and its interval, which ends at ``last`` where it may be "never"."""
    if one.limit is None:
        return
    panel.axvspan(
        one.low or one.limit, one.high or last, color="#d9a441", alpha=0.25, linewidth=0,
        label="interval of the threshold",
    )  # fmt: skip
    panel.axvline(one.limit, color=_INK, linewidth=1, linestyle="--", label="threshold")
