"""The time curve of one lone flow: isotonic medians, averaged over sizes where that predicts better, and their error.

``fit_curve(sizes, seconds)`` gives a ``costs.Curve``; ``held_out(sizes, seconds)`` says how far to trust it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import isotonic_regression
from sklearn.linear_model import LinearRegression

from relaymeter.calibration.costs import Curve
from relaymeter.errors import NothingMeasured

__all__ = ["HeldOut", "best_width", "fit_curve", "held_out", "relative_line"]

FloatArray = NDArray[np.float64]

#: Octaves over which neighbouring sizes may be averaged, and by how much less it must err than not to.
_WIDTHS = (0.6, 1.0)
_WIDER = 0.01


def relative_line(features: FloatArray, seconds: FloatArray) -> FloatArray:
    """Non-negative coefficients of ``features`` (n, k) for ``seconds`` (n), errors weighted relative to the seconds."""
    model = LinearRegression(positive=True, fit_intercept=False)
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    model.fit(features / scale, seconds, sample_weight=1.0 / seconds**2)
    found: FloatArray = np.asarray(model.coef_, dtype=np.float64) / scale
    return found


def fit_curve(sizes: Sequence[int], seconds: Sequence[float], width: float | None = None) -> Curve:
    """Isotonic curve through the median ``seconds`` at ``sizes`` (ascending, at least two), with a line for its tail.

    ``width``: octaves of sizes over which neighbours are averaged first (0: none; None: ``best_width``). The tail is
    the slope of a relative-weighted non-negative line over the upper sizes. No size is faster than the large ones
    (``Curve.plateau_rate``), so that no price is below bytes over that rate. Raises NothingMeasured on fewer than two
    sizes.
    """
    if len(sizes) < 2:
        raise NothingMeasured(
            f"a curve needs at least two message sizes, {len(sizes)} was measured: give more time (--budget) or memory"
        )
    size = np.asarray(sizes, dtype=np.float64)
    time = np.asarray(seconds, dtype=np.float64)
    rising = _rising(size, time, best_width(sizes, seconds) if width is None else width)
    upper = size >= size[-1] / 16
    line = relative_line(np.column_stack([np.ones(int(upper.sum())), size[upper]]), rising[upper])
    peak = float((size / rising).max())
    curve = Curve(tuple(int(s) for s in sizes), tuple(rising.tolist()), max(float(line[1]), 1.0 / peak))
    return replace(curve, drained=tuple(_drained(size, rising, curve.plateau_rate).tolist()))


def _drained(size: FloatArray, seconds: FloatArray, rate: float) -> FloatArray:
    """``Curve.drained``: what each size takes beyond the latency (of the smallest) at ``rate``, in bytes; at least its
    bytes, and per byte never more for a larger size."""
    beyond = (seconds - seconds[0]) * rate / size
    share = np.exp(isotonic_regression(np.log(np.maximum(beyond, 1.0)), increasing=False))
    for place in range(1, len(size)):  # a larger message never drains sooner
        share[place] = max(share[place], share[place - 1] * size[place - 1] / size[place] * (1 + 1e-6))
    found: FloatArray = share * size
    return found


def _rising(size: FloatArray, time: FloatArray, width: float) -> FloatArray:
    """Strictly rising seconds at the sizes, none of them faster than the large ones."""
    log_time = isotonic_regression(_smooth(np.log2(size), np.log(time), width))
    rising = np.exp(np.maximum.accumulate(log_time + 1e-7 * np.arange(len(size))))
    # A rate limiter may let a small message through at once, but not a second one.
    found: FloatArray = np.maximum(rising, size / float((size / rising)[2 * size >= size[-1]].max()))
    return found


def best_width(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Octaves over which the times of neighbouring sizes are averaged: what predicts each inner size best from the
    others (median relative error), a wider one only where it is better by more than ``_WIDER`` than none at all."""
    errors = {width: float(np.median(_left_out(sizes, seconds, width) or [0.0])) for width in (0.0, *_WIDTHS)}
    best = min(errors, key=lambda width: errors[width])
    return best if errors[best] < errors[0.0] - _WIDER else 0.0


def _smooth(log_size: FloatArray, log_time: FloatArray, width: float) -> FloatArray:
    """Local straight lines over the logarithms, neighbours weighted by a Gaussian of ``width`` octaves; 0: as is."""
    if not width:
        return log_time
    found = np.empty_like(log_time)
    for place, at in enumerate(log_size):
        weight = np.exp(-(((log_size - at) / width) ** 2) / 2)
        offset = log_size - at
        mean, centre = np.average(offset, weights=weight), np.average(log_time, weights=weight)
        spread = float((weight * (offset - mean) ** 2).sum())
        slope = float((weight * (offset - mean) * (log_time - centre)).sum()) / spread if spread else 0.0
        found[place] = centre - slope * mean
    return found


def _left_out(sizes: Sequence[int], seconds: Sequence[float], width: float) -> list[float]:
    """Relative errors at the inner sizes when each is left out of its curve in turn."""
    size, time = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    errors = []
    for skip in range(1, len(size) - 1):
        others = np.delete(size, skip)
        rising = _rising(others, np.delete(time, skip), width)
        guess = float(np.exp(np.interp(np.log(size[skip]), np.log(others), np.log(rising))))
        errors.append(abs(guess / float(time[skip]) - 1))
    return errors


@dataclass(frozen=True)
class HeldOut:
    """Relative errors at inner sizes when each is left out of its curve in turn, split at 1 MiB."""

    small_median: float | None
    small_max: float | None
    large_median: float | None
    large_max: float | None


def held_out(sizes: Sequence[int], seconds: Sequence[float]) -> HeldOut:
    """Leave-one-size-out errors of the curve, inner sizes only."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for size, error in zip(sizes[1:-1], _left_out(sizes, seconds, best_width(sizes, seconds)), strict=True):
        errors[size >= 1 << 20].append(error)
    small, large = errors[False], errors[True]
    return HeldOut(
        float(np.median(small)) if small else None,
        max(small) if small else None,
        float(np.median(large)) if large else None,
        max(large) if large else None,
    )
