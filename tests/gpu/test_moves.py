"""Moves of CUDA tensors: over gloo with the ranks on one device, over NCCL with a device for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relaymeter.relayout.routes import ROUTES

pytestmark = pytest.mark.gpu
JOB = Path(__file__).resolve().parent / "job_moves.py"


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 4), ("nccl", 2), ("nccl", 4)])
def test_every_bit_arrives_on_devices(backend: str, ranks: int) -> None:
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"NCCL needs a device for each of {ranks} ranks, here are {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, str(JOB), backend], capture_output=True, text=True, timeout=110, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "wrong: []" in ended.stdout, ended.stdout
    moves = 6 * len({1, 2, ranks}) * len(ROUTES) * 2  # cases, numbers of nodes, routes, executors
    assert f"right: {moves}" in ended.stdout
