"""Jobs that give their source up as they move, and measure what they hold."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jobs_execute import Storage
from jobs_execute_moves import cut_out, different_bits, whole_values
from pool import Seat

from relaymeter.errors import RelaymeterError
from relaymeter.relayout.bounded import BoundedMover, OwnedStorages
from relaymeter.relayout.digest import compare, digest_layout
from relaymeter.relayout.execute import Hooks
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.memory import release_free_pages
from relaymeter.relayout.partitions import zero3_layout
from relaymeter.relayout.placements import Cut, tensor_parallel_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.source_digest import expected_digest
from relaymeter.relayout.timeline import predicted_extra_bytes
from relaymeter.relayout.topology import Topology

WORLD = 2


def layouts(weights: int, rows: int, columns: int, world: int = WORLD) -> tuple[Layout, Layout]:
    """``weights`` bf16 matrices, and a vector held whole everywhere: ZeRO-3 partitions, then column shards."""
    specs = {f"w{k}": TensorSpec(f"w{k}", (rows, columns), "bfloat16") for k in range(weights)}
    specs["norm"] = TensorSpec("norm", (1001,), "float32")
    cuts = {name: Cut(None if name == "norm" else 1) for name in specs}
    ranks = range(world)
    return zero3_layout(specs, ranks, world, "trainer"), tensor_parallel_layout(specs, cuts, [ranks], world, "replica")


def schedule_of(source: Layout, destination: Layout, bucket_bytes: int) -> Schedule:
    topology = Topology.grid(1, source.world_size, "rank")
    plan = plan_move(source, destination, topology)
    return build_schedule(plan, topology, np.zeros(int(plan.group_start[-1]), dtype=np.int8), bucket_bytes)


def mover_of(
    seat: Seat, source: Layout, destination: Layout, held: OwnedStorages, bucket_bytes: int, executor: str, **more: Any
) -> BoundedMover:
    schedule = schedule_of(source, destination, bucket_bytes)
    return BoundedMover(schedule, seat.rank, [source], [held], destination, executor, time_limit_s=40, **more)


def bounded(seat: Seat, weights: int, rows: int, columns: int, bucket_bytes: int, executor: str) -> dict[str, Any]:
    """Move with bounded memory. Bits by gather-and-slice and by digest, bytes held by count and by the kernel."""
    source, destination = layouts(weights, rows, columns)
    values = whole_values(source.specs, 5)
    right = cut_out(destination, seat.rank, values, 0xA5)
    storages = cut_out(source, seat.rank, values, 0xA5)
    del values
    expected = expected_digest(source, destination, seat.rank, storages)
    said: list[str] = []
    held = OwnedStorages(storages)
    mover = mover_of(seat, source, destination, held, bucket_bytes, executor, say=said.append)
    gc.collect()
    release_free_pages()
    timing = mover.run()
    made = mover.take()
    report = compare(expected, digest_layout(destination, seat.rank, made, replicas=True))
    schedule = schedule_of(source, destination, bucket_bytes)
    return {
        "wrong": different_bits(right, made),
        "names": sorted(made) == sorted(right),
        "passed": [report.passed, report.total],
        "source left": held.nbytes,
        "emptied": not storages,
        "predicted": predicted_extra_bytes(schedule, seat.rank, source, destination, executor),
        "counted": mover.held_bytes - max(source.storage_bytes(seat.rank), destination.storage_bytes(seat.rank)),
        "measured": timing.peak_bytes,
        "rounds": schedule.rounds,
        "old": source.storage_bytes(seat.rank),
        "new": destination.storage_bytes(seat.rank),
        "buffers": mover.buffer_bytes,
        "said": said,
        "again": _error(mover.run),
    }


def refusals(seat: Seat) -> dict[str, Any]:
    """Movers that may not start: what each says on every rank, and whether the source was kept."""
    source, destination = layouts(4, 64, 64)
    values = whole_values(source.specs, 5)
    found: dict[str, Any] = {}

    def attempt(what: str, storages: Storage, keep: Sequence[torch.Tensor] = (), **more: Any) -> None:
        before = sum(tensor.nbytes for tensor in storages.values())
        held = OwnedStorages(storages)
        mover = mover_of(seat, source, destination, held, 4096, "send-recv", **more)
        found[what] = [_error(mover.run), held.nbytes == before, _error(mover.take), len(keep) >= 0]

    def cut() -> Storage:
        return cut_out(source, seat.rank, values, 0)

    attempt("too little", cut(), max_extra_bytes=100)
    mine = cut()
    attempt("referred to", mine, keep=[mine["w1"]] if seat.rank == 1 else [])
    mine = cut()
    if seat.rank == 0:
        flat = torch.zeros(2 * mine["w2"].numel(), dtype=torch.bfloat16)
        mine["w2"] = flat[: mine["w2"].numel()]
        del flat
    attempt("a view", mine)
    mine = cut()
    if seat.rank == 1:
        mine["w3"] = torch.zeros(7, dtype=torch.bfloat16)
    attempt("too short", mine)
    return found


def failure(seat: Seat) -> dict[str, Any]:
    """Rank 1 fails in the middle of a bounded move."""
    source, destination = layouts(4, 64, 64)

    def on_round(number: int) -> None:
        if seat.rank == 1 and number == 2:
            raise ValueError("no such luck")

    held = OwnedStorages(cut_out(source, seat.rank, whole_values(source.specs, 5), 0))
    mover = mover_of(
        seat, source, destination, held, 2048, "send-recv", group=dist.new_group(), hooks=Hooks(on_round=on_round)
    )  # fmt: skip
    mover.agree()
    found = {"run": _error(mover.run), "take": _error(mover.take), "again": _error(mover.run)}
    return found


def _error(call: Any) -> str:
    try:
        call()
    except (RelaymeterError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
