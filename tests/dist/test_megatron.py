"""Megatron-Core's refit with its real planner and gloo copy service, on CPU tensors, on four ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
from pool import RankPool

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

TP2, TP4, PAIR, ONE = [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[2, 3]], [[0], [1], [2], [3]]
#: Degrees both ways, ranks outside one end, and weights that every rank held whole before.
CASES = [[TP2, TP4], [TP4, TP2], [PAIR, TP4], [TP4, PAIR], [ONE, TP2]]


def test_every_bit_arrives_by_the_real_planner(ranks: Callable[[int], RankPool]) -> None:
    values = ranks(4).call("jobs_megatron:refit", cases=CASES, limit_s=100)
    if isinstance(values[0], str):
        pytest.skip(f"megatron-core cannot be imported here: {values[0]}")
    for rank, value in enumerate(values):
        for (source, end), found in zip(CASES, value, strict=True):
            held = 7 if any(rank in copy for copy in end) else 0
            assert found == {"wrong": [], "right": 2, "fresh": True, "held": held}, (source, end, rank)
