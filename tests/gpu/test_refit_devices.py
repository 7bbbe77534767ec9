"""Megatron-Core's refit: over gloo with the ranks on one device, over NCCL with a device for each."""

from __future__ import annotations

import importlib.util

import pytest
from devices import launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 4), ("nccl", 2), ("nccl", 4)])
def test_every_bit_of_the_weights_arrives_by_the_refit(backend: str, ranks: int) -> None:
    printed = launched("job_refit.py", backend, ranks)
    assert f"right: {4 * 2 * ranks}" in printed, printed  # changes, moves
