"""Moves on CUDA tensors, one process per rank: ``torchrun --nproc-per-node 4 job_moves.py gloo`` (or nccl).

Every case by every route and executor against gather-and-slice, and by digest; rank 0 prints how many were right.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dist"))

from jobs_execute_moves import CUTS, Case, as_arriving, cut_out, different_bits, some_specs, whole_values

from relaymeter.relayout.digest import compare, digest_layout
from relaymeter.relayout.execute import Mover
from relaymeter.relayout.placements import tensor_parallel_layout, zero3_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import ROUTES
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.source_digest import expected_digest
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import EXECUTORS


def cases(world: int) -> dict[str, Case]:
    specs, masters = some_specs(), some_specs(up="float32", down="float32", norm="float32")
    casts = {"up": "bfloat16", "down": "float8_e5m2", "norm": "float64"}
    arriving = {name: dataclasses.replace(spec, dtype=casts.get(name, spec.dtype)) for name, spec in masters.items()}
    trainer = zero3_layout(specs, range(world), world, "trainer")
    whole, halves = ([range(world)], [range(r, r + world // 2) for r in range(0, world, world // 2)])
    one, two = (tensor_parallel_layout(specs, CUTS, replicas, world) for replicas in (whole, halves))
    return {
        "trainer to one replica": Case([trainer], one),
        "trainer to two replicas": Case([trainer], two),
        "replica to trainer": Case([one], trainer),
        "degree changes": Case([two], one),
        "half a trainer to a replica": Case([zero3_layout(specs, range(world // 2), world, "half")], two),
        "casts": Case(
            [zero3_layout(masters, range(world), world)], tensor_parallel_layout(arriving, CUTS, whole, world), casts
        ),
    }


def main() -> int:
    backend = sys.argv[1]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    right, wrong = 0, []
    for name, case in cases(world).items():
        values = whole_values({n: spec for layout in case.sources for n, spec in layout.specs.items()}, 7)
        held = [{n: t.to(device) for n, t in cut_out(layout, rank, values, 0xA5).items()} for layout in case.sources]
        wanted = cut_out(case.destination, rank, as_arriving(case, values), 0xA5)
        for nodes in sorted({1, 2, world}):
            topology = Topology.grid(nodes, world // nodes)
            plan = plan_move(case.sources, case.destination, topology, cast=case.cast)
            for code, route in enumerate(ROUTES):
                codes = np.full(int(plan.group_start[-1]), code, dtype=np.int8)
                for executor in EXECUTORS:
                    made = {n: torch.zeros_like(t, device=device) for n, t in wanted.items()}
                    expected = expected_digest(case.sources, case.destination, rank, held)
                    schedule = build_schedule(plan, topology, codes, 100_000)
                    mover = Mover(schedule, rank, held, made, executor, time_limit_s=60)
                    mover.poison()
                    mover.run()
                    report = compare(expected, digest_layout(case.destination, rank, made, replicas=True))
                    bad = different_bits(wanted, {n: t.cpu() for n, t in made.items()})
                    if bad or not report.ok:
                        wrong.append(f"{name}, {nodes} nodes, {route}, {executor}, rank {rank}: {bad or report}")
                    right += not bad and report.ok
    every: list[object] = [None] * world
    dist.all_gather_object(every, wrong)
    if rank == 0:
        print("wrong:", [text for texts in every for text in texts])  # type: ignore[attr-defined]
        print("right:", right)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
