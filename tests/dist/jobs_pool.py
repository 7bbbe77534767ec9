"""Jobs that try the pool of ranks itself."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from pool import Seat


def total(seat: Seat, add: int) -> int:
    """Sum over the ranks of rank + add."""
    value = torch.tensor([seat.rank + add])
    dist.all_reduce(value)
    return int(value)


def refuse(seat: Seat) -> None:
    raise ValueError(f"rank {seat.rank} refuses")


def misbehave(seat: Seat) -> str:
    """Rank 0 answers, rank 1 dies, rank 2 never answers."""
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if seat.rank == 2:
        time.sleep(600)
    return "fine"
