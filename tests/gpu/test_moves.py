"""Moves of CUDA tensors: over gloo with the ranks on one device, over NCCL with a device for each."""

from __future__ import annotations

import pytest
from devices import launched

from relaymeter.relayout.routes import ROUTES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 4), ("nccl", 2), ("nccl", 4)])
def test_every_bit_arrives_on_devices(backend: str, ranks: int) -> None:
    printed = launched("job_moves.py", backend, ranks)
    moves = 6 * len({1, 2, ranks}) * len(ROUTES) * 2  # cases, numbers of nodes, routes, executors
    assert f"right: {moves}" in printed
