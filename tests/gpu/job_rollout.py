"""The rollout engine on CUDA devices: ``torchrun --nproc-per-node 4 job_rollout.py gloo`` (or nccl).

A trainer over all ranks (ZeRO-3 over NCCL, ZeRO-1 over gloo), replicas of degree 1, 2 and 4 as far as there are ranks.
Rank 0 prints what is wrong, how many times a rank's tokens were right, and in how many of those a graph captured before
the move gave them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dist"))

os.environ["DS_ACCELERATOR"] = "cuda"  # over gloo too

from rollout_bench import Bench, addresses, ask, greedy

STEPS = 3
#: ZeRO-1 over gloo: ZeRO-3's reduce-scatter of CUDA tensors was not tried there.
STAGE = {"gloo": 1, "nccl": 3}


def compared(bench: Bench, rollout: Any, degree: int, rank: int) -> tuple[list[str], int, int]:
    """After each of some steps: tokens against the gathered copy's, and what stayed."""
    wrong, right, graphed = [], 0, 0
    begun, graph = addresses(rollout), None
    for step in range(STEPS):
        bench.train()
        rollout.sync_weights(step)
        if rollout.replica.graph is not graph:
            wrong.append(f"degree {degree}, step {step}, rank {rank}: another graph")
        tokens = ask(rollout)
        wanted, _, lead = greedy(bench.gathered())
        if tokens != wanted:
            wrong.append(f"degree {degree}, step {step}, rank {rank}: {tokens} for {wanted} (lead {lead:.1e})")
        right += tokens == wanted
        graphed += tokens == wanted and graph is not None
        graph = rollout.replica.graph
    if addresses(rollout) != begun:
        wrong.append(f"degree {degree}, rank {rank}: addresses changed")
    return wrong, right, graphed


def replaced(rollout: Any, degree: int, rank: int, world: int) -> list[str]:
    """A change of replicas that leaves the one of the first ranks as it was: it keeps everything."""
    replica, begun = rollout.replica, addresses(rollout)
    graph, before = replica.graph, ask(rollout)
    cache = replica.decoder.cache.clone()
    rollout.place([list(range(degree)), *([at] for at in range(degree, world))])
    if rank < degree:
        kept = rollout.replica is replica and replica.graph is graph and addresses(rollout) == begun
        if not kept or not torch.equal(cache, replica.decoder.cache):
            return [f"degree {degree}, rank {rank}: a replica that stayed was made anew"]
    after = ask(rollout)
    return [] if after == before else [f"degree {degree}, rank {rank}: {after} for {before} after a change of replicas"]


def main() -> int:
    backend = sys.argv[1]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes its device from it
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    bench = Bench(STAGE[backend], range(world), device=device)
    wrong: list[str] = []
    right = graphed = 0
    for degree in (degree for degree in (1, 2, 4) if degree <= world):
        replicas = [list(range(first, first + degree)) for first in range(0, world, degree)]
        rollout = bench.rollout(replicas)
        found = compared(bench, rollout, degree, rank)
        wrong, right, graphed = wrong + found[0], right + found[1], graphed + found[2]
        wrong += replaced(rollout, degree, rank, world)
        rollout.shutdown()
    every: list[Any] = [None] * world
    dist.all_gather_object(every, (wrong, right, graphed))
    if rank == 0:
        print("wrong:", [text for texts, _, _ in every for text in texts])
        print(f"right: {sum(count for _, count, _ in every)}, by a graph: {sum(count for _, _, count in every)}")
    bench.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
