"""Megatron-Core's refit of CUDA tensors: ``torchrun --nproc-per-node 4 job_refit.py gloo`` (or nccl).

Rank 0 prints for how many ranks and changes every bit arrived, and what did not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dist"))

from jobs_megatron import moved

from relaymeter.harness.paths.megatron import import_together


def main() -> int:
    backend = sys.argv[1]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    half, whole = world // 2, [list(range(world))]
    halves = [list(range(half)), list(range(half, world))]
    megatron = import_together()
    found = [
        moved(megatron, device, backend, source, end)
        for source, end in ((halves, whole), (whole, halves), (halves[1:], whole), (whole, halves[1:]))
    ]
    every: list[object] = [None] * world
    dist.all_gather_object(every, found)
    if rank == 0:
        values = [value for values in every for value in values]  # type: ignore[attr-defined]
        print("wrong:", [value for value in values if value["wrong"] or not value["fresh"]])
        print("right:", sum(value["right"] for value in values))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
