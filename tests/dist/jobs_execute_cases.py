"""Jobs of the cases that a mover or its transport meets: small inputs after public bug reports."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jobs_execute import HandSchedule, Segment, Storage, attempt, bits
from jobs_execute_moves import cut_out, different_bits, whole_values
from numpy.typing import NDArray
from pool import Seat

from relaymeter.errors import RelaymeterError
from relaymeter.relayout.digest import compare, digest_layout
from relaymeter.relayout.execute import Hooks, Mover
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.memory import release_free_pages, resident_bytes
from relaymeter.relayout.partitions import zero3_layout
from relaymeter.relayout.placements import Cut, replicated_layout, shard_placement, tensor_parallel_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.source_digest import expected_digest
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import exchange_flat, exchange_messages

IntArray = NDArray[np.int64]


def schedule_of(source: Layout, destination: Layout, bucket_bytes: int = 8 << 20, **more: Any) -> Schedule:
    topology = Topology.grid(1, source.world_size, "rank")
    plan = plan_move(source, destination, topology, **more)
    return build_schedule(plan, topology, np.zeros(int(plan.group_start[-1]), dtype=np.int8), bucket_bytes)


def specs_of(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, dtype) for name, (shape, dtype) in shapes.items()}


def _counts(world: int, largest: int) -> IntArray:
    """Values that each rank sends to each other: uneven, some pairs none, one pair ``largest``."""
    random = np.random.default_rng(30)
    counts = random.integers(0, largest // 20, (world, world)) * random.integers(0, 2, (world, world))
    counts[7 % world, 3 % world] = largest
    return counts.astype(np.int64)


def _values(src: int, dst: int, count: int) -> torch.Tensor:
    return torch.arange(count) + ((src * 1000 + dst) << 32)


def uneven(seat: Seat, largest: int) -> dict[str, Any]:
    """int64 values, unevenly many per pair: counts exchanged first, then the values in both kinds of exchange."""
    me, counts = seat.rank, _counts(seat.world_size, largest)
    told = torch.zeros(seat.world_size, dtype=torch.int64)
    dist.all_to_all_single(told, torch.from_numpy(counts[me].copy()))
    sent = [_values(me, dst, int(counts[me, dst])).view(torch.uint8) for dst in range(seat.world_size)]
    wanted = [_values(src, me, int(count)).view(torch.uint8) for src, count in enumerate(told.tolist())]
    found: dict[str, Any] = {"counts agree": told.tolist() == counts[:, me].tolist()}
    received = [torch.zeros_like(values) for values in wanted]
    others = [rank for rank in range(seat.world_size) if rank != me]
    moved = exchange_messages(
        [(rank, sent[rank]) for rank in others], [(rank, received[rank]) for rank in others], tag=1
    )
    found["messages"] = [list(moved), [r for r in others if not torch.equal(received[r], wanted[r])]]
    flat = torch.zeros(sum(len(values) for values in wanted), dtype=torch.uint8)
    moved = exchange_flat(torch.cat(sent), [len(v) for v in sent], flat, [len(v) for v in wanted])
    pieces = torch.split(flat, [len(values) for values in wanted])
    found["flat"] = [list(moved), [r for r, got in enumerate(pieces) if not torch.equal(got, wanted[r])]]
    found["right"] = [8 * int(counts[me].sum()), 8 * int(counts[:, me].sum())]
    found["own"] = 8 * int(counts[me, me])
    return found


def uneven_wrong(seat: Seat, largest: int, missing: int, executor: str) -> dict[str, Any]:
    """The same exchange as a move, in which rank 3 expects ``missing`` values too few of the largest pair."""
    counts = _counts(seat.world_size, largest)
    if seat.rank == 3:
        counts[7, 3] -= missing
    spec = TensorSpec("w", (largest,), "int64")
    rows = [
        Segment(0, src, dst, [int(counts[src, dst])], [1], [1])
        for src in range(seat.world_size)
        for dst in range(seat.world_size)
        if src != dst and counts[src, dst]
    ]
    target = torch.full((largest,), -1)
    mover = Mover(
        HandSchedule((spec,), tuple(rows), 1), seat.rank, {"w": torch.zeros(largest, dtype=torch.int64)}, {"w": target},
        executor, time_limit_s=60,
    )  # fmt: skip
    return attempt(mover) | {"untouched": bool((target == -1).all())}


def groups(seat: Seat) -> dict[str, Any]:
    """Groups [0, 3] and [1, 2]; a move in the first only. Then wrong uses of them."""
    both = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    mine, place = both[seat.rank in (1, 2)], int(seat.rank in (2, 3))
    spec = TensorSpec("w", (100_000,), "float32")
    schedule = HandSchedule((spec,), (Segment(0, 0, 1, [100_000], [1], [1]),), 1)
    source, target = {"w": torch.arange(100_000.0)}, {"w": torch.zeros(100_000)}
    found: dict[str, Any] = {}
    begin = time.monotonic()
    if seat.rank in (0, 3):
        Mover(schedule, place, source, target, "send-recv", group=mine, time_limit_s=20).run()
        found["arrived"] = torch.equal(target["w"], source["w"])
    found["seconds"] = time.monotonic() - begin
    dist.barrier()
    try:  # the others' group
        Mover(schedule, 0, source, target, "send-recv", group=both[seat.rank not in (1, 2)])
    except RelaymeterError as error:
        found["not a member"] = f"{type(error).__name__}: {error}"
    try:
        Mover(schedule, 1 - place, source, target, "send-recv", group=mine)
    except RelaymeterError as error:
        found["wrong rank"] = f"{type(error).__name__}: {error}"
    dist.barrier()
    if seat.rank == 1:  # rank 2, the other member, never comes
        begin = time.monotonic()
        found["alone"] = attempt(Mover(schedule, 0, source, target, "send-recv", group=mine, time_limit_s=3))["error"]
        found["alone_s"] = time.monotonic() - begin
    dist.barrier()
    return found


def group_of_one(seat: Seat) -> dict[str, Any]:
    """World 2, group [0]: rank 0 moves within itself, then both ranks meet."""
    alone = dist.new_group([0])
    found: dict[str, Any] = {}
    if seat.rank == 0:
        schedule = HandSchedule((TensorSpec("w", (8,), "int8"),), (Segment(0, 0, 0, [8], [1], [1]),), 1)
        target = {"w": torch.zeros(8, dtype=torch.int8)}
        Mover(schedule, 0, {"w": torch.arange(8).to(torch.int8)}, target, "all-to-all", group=alone).run()
        found["moved"] = target["w"].tolist()
    dist.barrier()
    return found


def corrupted(seat: Seat, repeats: Sequence[int], executor: str, kind: str) -> list[Any]:
    """1 MiB of float32 moves from rank 0 to rank 1 ten times; what arrives is damaged in some ``repeats``."""
    specs = specs_of({"w": ((262_144,), "float32"), "small": ((10,), "bfloat16")})
    source = replicated_layout(specs, [0], seat.world_size, "source")
    target = replicated_layout(specs, [1], seat.world_size, "target")
    now = 0

    def on_receive(_: int, __: int, tensor: torch.Tensor) -> None:
        if now in repeats and tensor.numel() >= 1 << 20:
            if kind == "flip":
                tensor[524_288] ^= 0x10
            else:
                tensor[524_288:524_292].view(torch.float32).fill_(float("nan"))

    values = {name: torch.randn(spec.numel).to(getattr(torch, spec.dtype)) for name, spec in specs.items()}
    held = values if seat.rank == 0 else {}
    made = {name: torch.zeros_like(value) for name, value in values.items()} if seat.rank == 1 else {}
    hooks = Hooks(on_receive=on_receive)
    mover = Mover(schedule_of(source, target), seat.rank, held, made, executor, hooks=hooks, time_limit_s=30)
    found: list[Any] = []
    while now < 10:
        for value in held.values():
            value += 1
        expected = expected_digest(source, target, seat.rank, held)
        mover.poison()
        mover.run()
        try:
            compare(expected, digest_layout(target, seat.rank, made, replicas=True)).raise_for_mismatch()
            found.append("")
        except RelaymeterError as error:
            found.append(f"{type(error).__name__}: {error}")
        now += 1
    return found


def buckets(seat: Seat, bucket_bytes: Sequence[int], executor: str) -> dict[str, Any]:
    """25 tensors of mixed shapes and types, ZeRO-3 over all ranks to tensor-parallel pairs, in buckets of all sizes."""
    kinds = ["bfloat16", "float32", "int8", "int64", "bool", "float16", "float8_e4m3fn"]
    random = np.random.default_rng(38)
    shapes = {
        f"t{k}": (tuple(random.integers(1, 60, random.integers(1, 4)).tolist()), kinds[k % len(kinds)])
        for k in range(25)
    }
    specs = specs_of(shapes)
    cuts = {name: Cut(int(random.integers(0, len(spec.shape)))) for name, spec in specs.items()}
    source = zero3_layout(specs, range(4), 4)
    target = tensor_parallel_layout(specs, cuts, [(0, 1), (2, 3)], 4)
    values = whole_values(specs, 38)
    held, right = (cut_out(layout, seat.rank, values, 0) for layout in (source, target))
    found: dict[str, Any] = {}
    for size in bucket_bytes:
        made = {name: torch.empty_like(storage) for name, storage in right.items()}
        mover = Mover(schedule_of(source, target, size), seat.rank, held, made, executor, time_limit_s=30)
        mover.poison()
        mover.run()
        found[str(size)] = {
            "wrong": different_bits(right, made),
            "rounds": schedule_of(source, target, size).rounds,
            "buffers": mover.buffer_bytes,
        }
    return found


def oversize(seat: Seat, bucket_bytes: int) -> dict[str, Any]:
    """A tensor of 1.2 MiB through buckets of ``bucket_bytes``, from rank 0 to rank 1."""
    specs = specs_of({"embedding": ((1200, 512), "bfloat16")})
    source = replicated_layout(specs, [0], seat.world_size, "source")
    target = replicated_layout(specs, [1], seat.world_size, "target")
    values = whole_values(specs, 39)
    held, right = (cut_out(layout, seat.rank, values, 0) for layout in (source, target))
    made = {name: torch.zeros_like(storage) for name, storage in right.items()}
    schedule = schedule_of(source, target, bucket_bytes)
    mover = Mover(schedule, seat.rank, held, made, "send-recv", time_limit_s=30)
    timing = mover.run()
    return {"wrong": different_bits(right, made), "rounds": schedule.rounds, "sent": timing.sent_bytes}


def shards(seat: Seat, repeats: int, executor: str) -> list[dict[str, Any]]:
    """64 MiB of float32 on rank 0 in 8 shards, of which ranks 1 and 2 receive one each, again and again."""
    spec = TensorSpec("w", (8, 2 << 20), "float32")
    whole = {0: ((0, 0), spec.shape)}
    parts = {rank: ((rank, 0), (1, 2 << 20)) for rank in (1, 2)}
    source = Layout("whole", 3, {"w": spec}, {"w": shard_placement(spec.shape, whole)})
    target = Layout("shards", 3, {"w": spec}, {"w": shard_placement(spec.shape, parts)}, partial=True)
    held = {"w": torch.arange(16 << 20, dtype=torch.float32)} if seat.rank == 0 else {}
    found = []
    for _ in range(repeats):
        gc.collect()  # what earlier jobs of this process left behind is not to go while the move is measured
        release_free_pages()
        before = resident_bytes()
        made = {"w": torch.zeros(2 << 20)} if seat.rank else {}
        mover = Mover(schedule_of(source, target), seat.rank, held, made, executor, time_limit_s=30)
        timing = mover.run()
        buffers = mover.buffer_bytes
        right = all(
            bool((value == torch.arange(seat.rank << 21, (seat.rank + 1) << 21)).all()) for value in made.values()
        )
        del mover
        gc.collect()
        release_free_pages()
        found.append(
            {
                "grown": None if before is None else (resident_bytes() or 0) - before,
                "storage": [value.untyped_storage().nbytes() for value in made.values()],
                "peak": timing.peak_bytes,
                "buffers": buffers,
                "right": right,
            }
        )
        del made
    return found


def far(seat: Seat, executor: str) -> dict[str, Any]:
    """Elements past 2^31 of an int8 tensor move from rank 0 to rank 1, at equally large offsets of both storages.

    The storages are as large as that, but only the pages that take part are ever touched.
    """
    count, start = (1 << 31) + (1 << 20), (1 << 31) - 1000
    spec = TensorSpec("w", (count,), "int8")

    def place(rank: int) -> Placement:
        def column(*values: int) -> IntArray:
            return np.asarray(values, dtype=np.int64)

        lo = np.asarray([[start], [start + 500_001]], dtype=np.int64)
        shape = np.asarray([[300_000], [count - start - 500_001]], dtype=np.int64)
        return Placement(column(rank, rank), lo, shape, lo[:, 0], np.ones((2, 1), dtype=np.int64), {rank: count})

    source, target = (
        Layout(name, 2, {"w": spec}, {"w": place(rank)}, partial=True) for name, rank in (("source", 0), ("target", 1))
    )
    storage = torch.empty(count, dtype=torch.int8)
    ranges = [(start, start + 300_000), (start + 500_001, count)]
    for begin, end in ranges:
        storage[begin:end] = 0 if seat.rank else (torch.arange(begin, end) % 127).to(torch.int8)
    held, made = ({"w": storage}, {}) if seat.rank == 0 else ({}, {"w": storage})
    schedule = schedule_of(source, target, 70_000)
    table = schedule.all_segments
    expected = expected_digest(source, target, seat.rank, held)
    mover = Mover(schedule, seat.rank, held, made, executor, time_limit_s=30)
    mover.run()
    report = compare(expected, digest_layout(target, seat.rank, made, replicas=True))
    good = [torch.equal(storage[b:e], (torch.arange(b, e) % 127).to(torch.int8)) for b, e in ranges]
    if seat.rank == 1:
        storage[count - 1] ^= 1
    wrong = compare(expected, digest_layout(target, seat.rank, made, replicas=True))
    return {
        "right": all(good),
        "passed": [report.passed, report.total],
        "found": [str(mismatch) for mismatch in wrong.mismatches],
        "last offset": int((table.dst_offset + table.shape[:, -1]).max()),
        "largest": int(table.src_offset.max()),
    }


def masters(seat: Seat, cast: Mapping[str, str]) -> dict[str, Any]:
    """A bf16 weight, its fp32 master and a bf16 momentum, from 2 ZeRO-3 ranks to 4; a cast only where it is named."""
    shapes = {"weight": ((7, 9), "bfloat16"), "master": ((7, 9), "float32"), "momentum": ((7, 9), "bfloat16")}
    specs = specs_of(shapes)
    arriving = {name: dataclasses.replace(spec, dtype=cast.get(name, spec.dtype)) for name, spec in specs.items()}
    source, target = zero3_layout(specs, (0, 1), 4, "two"), zero3_layout(arriving, range(4), 4, "four")
    values = {name: torch.full((63,), 1 + 2**-10, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
    held = cut_out(source, seat.rank, values, 0)
    made = {
        name: torch.zeros(place.storage[seat.rank], dtype=getattr(torch, arriving[name].dtype))
        for name, place in target.placements.items()
    }
    expected = expected_digest(source, target, seat.rank, held)
    Mover(schedule_of(source, target, cast=cast), seat.rank, held, made, "send-recv", time_limit_s=20).run()
    report = compare(expected, digest_layout(target, seat.rank, made, replicas=True))
    real = {name: made[name][: min(16, 63 - 16 * seat.rank)] for name in made}
    return {
        "ok": report.ok,
        **{name: [str(value.dtype), sorted(set(value.double().tolist()))] for name, value in real.items()},
    }


def empty(seat: Seat) -> dict[str, Any]:
    """Sizes 8, 0 and 24, and a weight of shape (0, 8) last, from two ZeRO-3 ranks to two replicas and back."""
    shapes = {"a": ((8,), "float32"), "none": ((0,), "float32"), "b": ((24,), "float32"), "last": ((0, 8), "float32")}
    specs = specs_of(shapes)
    trainer = zero3_layout(specs, (0, 1), 4, "trainer")
    replicas = tensor_parallel_layout(specs, dict.fromkeys(specs, Cut(0)), [(2,), (3,)], 4)
    values = whole_values(specs, 3)
    found: dict[str, Any] = {}
    for source, target in ((trainer, replicas), (replicas, trainer)):
        held, right = (cut_out(layout, seat.rank, values, 0) for layout in (source, target))
        made = {name: torch.zeros_like(storage) for name, storage in right.items()}
        schedule = schedule_of(source, target)
        expected = expected_digest(source, target, seat.rank, held)
        timing = Mover(schedule, seat.rank, held, made, "send-recv", time_limit_s=20).run()
        report = compare(expected, digest_layout(target, seat.rank, made, replicas=True))
        table = schedule.all_segments
        found[f"{source.name} to {target.name}"] = {
            "wrong": different_bits(right, made),
            "passed": [report.passed, report.total],
            "shapes": {name: list(spec.shape) for name, spec in target.specs.items()},
            "moved": sorted({schedule.tensors[index].name for index in table.tensor.tolist()}),
            "bytes": [target.storage_bytes(rank) for rank in range(4)],
            "sent": timing.sent_bytes,
        }
    return found


def half_held(seat: Seat) -> dict[str, Any]:
    """The layout says that rank 0 holds 512 rows; the storage handed in has the 256 of one expert shard."""
    specs = specs_of({"experts": ((512, 8), "bfloat16")})
    source = replicated_layout(specs, [0], seat.world_size, "source")
    target = replicated_layout(specs, [1], seat.world_size, "target")
    held: Storage = {"experts": bits(256 * 8, "bfloat16", 1)} if seat.rank == 0 else {}
    made = {"experts": torch.full((512 * 8,), 5.0, dtype=torch.bfloat16)} if seat.rank == 1 else {}
    found = attempt(Mover(schedule_of(source, target), seat.rank, held, made, "send-recv", time_limit_s=20))
    try:
        expected_digest(source, target, seat.rank, held)
    except RelaymeterError as error:
        found["digest"] = str(error)
    return found | {"untouched": all(bool((value == 5).all()) for value in made.values())}
