"""Megatron-Core's refit: over gloo with the ranks on one device, over NCCL with a device for each."""

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
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]
JOB = Path(__file__).resolve().parent / "job_refit.py"


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 4), ("nccl", 2), ("nccl", 4)])
def test_every_bit_of_the_weights_arrives_by_the_refit(backend: str, ranks: int) -> None:
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"NCCL needs a device for each of {ranks} ranks, here are {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, str(JOB), backend], capture_output=True, text=True, timeout=110, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "wrong: []" in ended.stdout, ended.stdout
    assert f"right: {4 * 2 * ranks}" in ended.stdout, ended.stdout  # changes, moves
