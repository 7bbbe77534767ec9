from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaymeter.calibration.cells import Cell, PackCell, Sampling


@pytest.mark.parametrize(
    ("times", "spent", "moved", "stops"),
    [
        ([1.0], 0.1, 0, False),
        ([1.0, 1.0], 9.0, 0, False),  # two samples have no spread to judge
        ([1.0, 1.01, 1.0], 0.1, 0, True),  # quiet
        ([1.0, 1.2, 1.0], 0.1, 0, False),
        ([1.0, 1.06, 1.0], 0.7, 0, True),  # time is up
        ([1.0, 1.2, 1.0], 0.7, 0, False),  # time is up, but two more samples tell the modes apart
        ([1.0, 1.2, 1.0, 1.2, 1.0], 0.7, 0, True),
        ([1.0, 1.2, 1.0], 1.9, 0, True),
        ([1.0, 1.2, 1.0], 0.1, 2e9, True),  # volume is up
        ([1.0, 1.2] + [1.1] * 9, 0.1, 0, True),  # narrow interval
        ([1.0, 2.0] * 6, 0.1, 0, False),
        ([1.0, 2.0] * 20, 0.1, 0, True),  # as many as there may be
        ([0.0, 0.0, 0.0], 0.1, 0, True),  # a clock that stands still, and other times that are none
        ([0.0, 0.0, 1.0], 0.1, 0, True),
        ([-1.0, -1.0, -1.2], 0.1, 0, True),
        ([1.0, float("nan"), 1.2], 0.1, 0, True),
        ([1.0, float("inf"), 1.2], 0.1, 0, True),
    ],
)
def test_when_a_cell_has_enough(times: list[float], spent: float, moved: float, stops: bool) -> None:
    assert Sampling(volume_bytes=1e9).enough(times, spent, moved) is stops


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=40), st.integers(0, 2**31))
def test_a_bootstrap_replicate_draws_from_the_samples(samples: list[float], seed: int) -> None:
    cell = Cell("pair", "send-recv", ((0, 1, 64),), tuple(samples))
    drawn = cell.resampled(np.random.default_rng(seed))
    assert len(drawn.samples_s) == len(samples) and set(drawn.samples_s) <= set(samples)
    assert (drawn.flows, drawn.pattern) == (cell.flows, cell.pattern)


def test_cells_survive_json() -> None:
    cell = Cell("two flows", "all-to-all", ((0, 2, 64), (1, 3, 128)), (0.25, 0.5), messages=3, calls=2)
    assert Cell.from_dict(cell.to_dict()) == cell and cell.size == 128
    pack = PackCell("pack", 64, 16, 2, 4, (1e-5, 2e-5), (1, 1))
    assert PackCell.from_dict(pack.to_dict()) == pack
