"""The rollout engine on devices: over gloo with the ranks on one, over NCCL with one for each; graphs outlive moves."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("deepspeed", "transformers")
    ),
]
JOB = Path(__file__).resolve().parent / "job_rollout.py"
STEPS = 3


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 4), ("nccl", 2), ("nccl", 4)])
def test_tokens_are_those_of_a_gathered_copy_and_graphs_outlive_moves(backend: str, ranks: int) -> None:
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"NCCL needs a device for each of {ranks} ranks, here are {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, str(JOB), backend], capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "wrong: []" in ended.stdout, ended.stdout
    degrees = [degree for degree in (1, 2, 4) if degree <= ranks]
    captured = degrees if backend == "nccl" else [1]  # gloo's sums cannot be captured, a replica of one rank has none
    told = f"right: {ranks * STEPS * len(degrees)}, by a graph: {ranks * (STEPS - 1) * len(captured)}"
    assert told in ended.stdout, ended.stdout
