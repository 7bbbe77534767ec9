"""The rollout engine on devices: over gloo with the ranks on one, over NCCL with one for each; graphs outlive moves."""

from __future__ import annotations

import importlib.util

import pytest
from devices import launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("deepspeed", "transformers")
    ),
]
STEPS = 3


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 4), ("nccl", 2), ("nccl", 4)])
def test_tokens_are_those_of_a_gathered_copy_and_graphs_outlive_moves(backend: str, ranks: int) -> None:
    printed = launched("job_rollout.py", backend, ranks, limit_s=180)
    degrees = [degree for degree in (1, 2, 4) if degree <= ranks]
    captured = degrees if backend == "nccl" else [1]  # gloo's sums cannot be captured, a replica of one rank has none
    told = f"right: {ranks * STEPS * len(degrees)}, by a graph: {ranks * (STEPS - 1) * len(captured)}"
    assert told in printed, printed
