"""Jobs on devices: torchrun starts the ranks, over gloo on one device or over NCCL with a device for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

__all__ = ["launched"]


def launched(job: str, backend: str, ranks: int, limit_s: float = 110) -> str:
    """What ``job``, a script beside this file, printed on its ranks, none of which found anything wrong. Skips where
    NCCL lacks devices."""
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"NCCL needs a device for each of {ranks} ranks, here are {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ended = subprocess.run(
        [*command, str(Path(__file__).with_name(job)), backend],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "wrong: []" in ended.stdout, ended.stdout
    return ended.stdout
