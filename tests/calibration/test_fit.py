from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaymeter.calibration.curve_fit import fit_curve, held_out, relative_line
from relaymeter.errors import NothingMeasured

SIZES = [1024 * 2**k for k in range(14)]
times = st.lists(st.floats(1e-6, 1.0), min_size=len(SIZES), max_size=len(SIZES))
dear = settings(max_examples=50)  # each example fits a curve


@dear
@given(times, st.lists(st.floats(0, 1e9), min_size=2, max_size=50))
def test_a_curve_rises_whatever_was_measured_and_never_beats_the_peak(
    measured: list[float], wanted: list[float]
) -> None:
    curve = fit_curve(SIZES, measured)
    nbytes = np.sort(np.asarray(wanted))
    seconds = curve.time(nbytes)
    assert np.isfinite(seconds).all() and (seconds > 0).all()
    assert (np.diff(seconds) >= -1e-12 * seconds[:-1]).all()
    assert (seconds * curve.plateau_rate >= nbytes * (1 - 1e-9)).all()


@dear
@given(times, st.integers(0, len(SIZES) - 1))
def test_a_curve_is_continuous_at_every_size(measured: list[float], place: int) -> None:
    curve = fit_curve(SIZES, measured)
    around = curve.time(np.asarray([SIZES[place] * (1 - 1e-9), SIZES[place], SIZES[place] * (1 + 1e-9)]))
    assert np.allclose(around, around[1], rtol=1e-5)


@dear
@given(times, st.floats(1.0, 1e9))
def test_inverse_undoes_time_from_the_first_size_on(measured: list[float], nbytes: float) -> None:
    curve = fit_curve(SIZES, measured)
    if nbytes >= SIZES[0]:
        seconds = float(curve.time(np.asarray([nbytes]))[0])
        again = float(curve.time(np.asarray([curve.inverse(seconds)]))[0])
        assert again == pytest.approx(seconds, rel=1e-5)


def test_a_known_line_is_recovered_and_extrapolated() -> None:
    measured = [1e-3 + size / 48e6 for size in SIZES]
    curve = fit_curve(SIZES, measured)
    assert curve.time(np.asarray([64e6]))[0] == pytest.approx(1e-3 + 64e6 / 48e6, rel=0.01)
    assert curve.plateau_rate == pytest.approx(48e6, rel=0.02)
    errors = held_out(SIZES, measured)
    assert errors.large_max is not None and errors.large_max < 0.05


def test_a_burst_of_small_messages_does_not_raise_the_rate_of_large_ones() -> None:
    measured = [size / (60e6 if size <= 32768 else 48e6) for size in SIZES]
    assert fit_curve(SIZES, measured).plateau_rate == pytest.approx(48e6, rel=1e-5)


@dear
@given(times, st.lists(st.floats(1, 1e9), min_size=2, max_size=8))
def test_messages_that_share_a_port_add_up_by_no_less_than_their_bytes(
    measured: list[float], sizes: list[float]
) -> None:
    curve = fit_curve(SIZES, measured)
    drained = curve.drain(np.sort(np.asarray(sizes)))
    assert (drained >= np.sort(sizes) * (1 - 1e-9)).all() and (np.diff(drained) >= -1e-9 * drained[1:]).all()
    assert np.allclose(curve.fill(drained), np.sort(sizes), rtol=1e-5)
    together = float(curve.fill(drained.sum(keepdims=True))[0])
    assert together >= sum(sizes) * (1 - 1e-4)


def test_the_ramp_of_small_messages_is_paid_by_each_of_them() -> None:
    measured = [1e-5 + size / (1e9 if size >= 262144 else 0.25e9) for size in SIZES]
    curve = fit_curve(SIZES, sorted(measured))
    small, large = (float(curve.drain(np.asarray([float(size)]))[0]) / size for size in (65536, SIZES[-1]))
    assert small > 1.5 and large == pytest.approx(1.0, abs=0.05)


def test_one_size_is_not_a_curve() -> None:
    with pytest.raises(NothingMeasured, match="at least two message sizes"):
        fit_curve([1024], [1e-3])


@given(st.floats(0, 1e-2), st.floats(1e-9, 1e-6))
def test_the_relative_line_is_never_negative(constant: float, slope: float) -> None:
    size = np.asarray(SIZES, dtype=float)
    noise = np.where(np.arange(len(size)) % 2, 1.02, 0.98)
    found = relative_line(np.column_stack([np.ones_like(size), size]), (constant + slope * size) * noise)
    assert (found >= 0).all()
    assert found[1] == pytest.approx(slope, rel=0.1)
