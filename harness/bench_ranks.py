"""The ranks' part of the benchmarks: moves and their peers, repeated by turns, every result checked bit by bit.

``python -m relaymeter.harness.bench_ranks JOB.json RESULT.json`` runs once per rank; rank 0 writes what all ranks
measured. Jobs: ``shaped`` (moves and two-way moves across nodes), ``local`` (a move beside gather-then-slice and one
even exchange), ``memory`` (buffers and peaks of every route).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.errors import EXIT_CRASH, EXIT_OK, DigestMismatch, RelaymeterError
from relaymeter.harness.bench_repeat import MOVE_LIMIT_S, Bench, Candidate, sample, settle_memory
from relaymeter.harness.bench_report import Say
from relaymeter.harness.models import Qwen3Geometry, tensor_parallel_cuts, weight_specs
from relaymeter.harness.paths.gather import GatherThenSlice
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.world import World, join, watching
from relaymeter.records import dump_json, load_json, write_text
from relaymeter.relayout.bounded import BoundedMover, OwnedStorages
from relaymeter.relayout.digest import digest_layout
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import Cut, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.timeline import predicted_extra_bytes
from relaymeter.relayout.transport import EXECUTORS

__all__ = ["FLOOR", "GATHERS", "WAYS", "main"]

_JOIN_LIMIT_S = 120.0
#: The bucket of the move in bounded memory: it holds a few of them.
_BOUNDED_BUCKET_BYTES = 1 << 20
#: The peers of a move inside one machine, each with the bytes of partitions that share a collective.
GATHERS = {"gather each": 0, "gather 8 MiB": 2 << 20}
FLOOR = "even exchange"
#: Exchanges between the nodes, see ``_exchange_layouts``.
WAYS = ("one way", "two ways", "stages swapped")
#: Tensors of an exchange, one way.
_TENSORS = 8


def _shaped(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """Trainer on node 0, copies on node 1, by every route and executor; one-way and two-way moves between the nodes."""
    geometry, world = Qwen3Geometry(**job["geometry"]), bench.world
    specs, cuts = weight_specs(geometry), tensor_parallel_cuts(geometry)
    first, second = world.topology.ranks_of(0), world.topology.ranks_of(1)
    source = zero3_layout(specs, first, world.world_size)
    held = bench.storages(source)
    expected = digest_layout(source, world.rank, held)
    candidates = []
    for degree in (2, 1):
        replicas = [second[at : at + degree] for at in range(0, len(second), degree)]
        destination = tensor_parallel_layout(specs, cuts, replicas, world.world_size)
        target = ReplicaStorage(destination, world.rank)
        entry = {"move": f"ZeRO-3 x2 -> TP{degree} x {len(replicas)}"}
        for route in ("direct",) if degree == 2 else bench.routes(source, destination):
            for executor in EXECUTORS:
                candidates.append(
                    bench.move(source, destination, held, target, expected, entry, route=route, executor=executor)
                )
    for ways in WAYS:
        source, destination = _exchange_layouts(first, second, ways, job["exchange_bytes"], world.world_size)
        held = bench.storages(source)
        expected = digest_layout(source, world.rank, held)
        target = ReplicaStorage(destination, world.rank)
        for executor in EXECUTORS:
            candidates.append(
                bench.move(
                    source, destination, held, target, expected, {"move": ways}, route="direct", executor=executor
                )
            )
    return {"cases": bench.repeat(candidates)}


def _exchange_layouts(
    first: Sequence[int], second: Sequence[int], ways: str, nbytes: int, world_size: int
) -> tuple[Layout, Layout]:
    """``nbytes`` from each of the ranks ``first`` to one of ``second``, and unless ``ways`` is "one way" as many back.

    "two ways": every tensor goes both ways, as between two tensor-parallel copies. "stages swapped": the first tensors
    go there, the last ones back, as between two pipeline stages that change places.
    """
    there, back = (tuple(first), tuple(second)), (tuple(second), tuple(first))
    both = (there[0] + back[0], there[1] + back[1])
    sides = {"one way": [there] * _TENSORS, "two ways": [both] * _TENSORS}.get(
        ways, [there] * _TENSORS + [back] * _TENSORS
    )
    width = nbytes // _TENSORS // 2
    specs = {
        f"tensor.{k}": TensorSpec(f"tensor.{k}", (len(ranks), width), "bfloat16") for k, (ranks, _) in enumerate(sides)
    }
    layouts = []
    for side in (0, 1):
        placements = {
            name: tensor_parallel_layout({name: spec}, {name: Cut(0)}, [ranks[side]], world_size).placements[name]
            for (name, spec), ranks in zip(specs.items(), sides, strict=True)
        }
        layouts.append(Layout(ways, world_size, specs, placements))
    return layouts[0], layouts[1]


def _local(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """ZeRO-3 over all ranks into one tensor-parallel copy over the same ranks, beside its peers.

    Once with the ranks in the same order, where much of what a rank needs it holds already, and once with the order of
    the copy's ranks turned by one, where nothing does.
    """
    geometry, world = Qwen3Geometry(**job["geometry"]), bench.world
    specs, cuts, ranks = weight_specs(geometry), tensor_parallel_cuts(geometry), list(range(world.world_size))
    source = zero3_layout(specs, ranks, world.world_size)
    held = bench.storages(source)
    expected = digest_layout(source, world.rank, held)
    candidates = []
    for order, replica in (("same", ranks), ("turned", [*ranks[1:], ranks[0]])):
        destination = tensor_parallel_layout(specs, cuts, [replica], world.world_size)
        target = ReplicaStorage(destination, world.rank)
        check = functools.partial(bench.check, expected, destination, target.storages)
        about = {"move": "move", "order": order}
        moves = [
            bench.move(source, destination, held, target, expected, about, route="direct", executor=executor)
            for executor in EXECUTORS
        ]
        candidates += moves
        for name, together in GATHERS.items():
            peer = GatherThenSlice(source, destination, world.rank, held, target.storages, together_bytes=together)
            received = bench.of_all(peer.received_bytes)
            entry = {"move": name, "order": order, "received_bytes": received, "collectives": peer.collectives}
            candidates.append(Candidate(entry, target.poison, functools.partial(_stopwatch, peer.run), check))
        moved = moves[0].entry["bytes_in_node"] + moves[0].entry["bytes_cross_node"]
        candidates.append(_even_exchange(world, order, max(1, moved // (world.world_size * (world.world_size - 1)))))
    return {"cases": bench.repeat(candidates)}


def _stopwatch(work: Callable[[], None]) -> Sequence[float]:
    begin = time.perf_counter()
    work()
    took = time.perf_counter() - begin
    return (took, 0.0, took, 0.0, float("nan"))


def _even_exchange(world: World, order: str, each: int) -> Candidate:
    """One ``all_to_all_single`` of ``each`` bytes between every two ranks: what bytes alone cost here."""
    splits = [0 if peer == world.rank else each for peer in range(world.world_size)]
    send = torch.empty(sum(splits), dtype=torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(5))
    receive = torch.zeros(sum(splits), dtype=torch.uint8)

    def run() -> None:
        dist.all_to_all_single(receive, send, splits, splits)

    def check() -> None:
        # every rank sends the same bytes: what came from rank r is what r has at this rank's place
        parts = torch.split(receive, [each] * (world.world_size - 1))
        peers = [peer for peer in range(world.world_size) if peer != world.rank]
        for peer, part in zip(peers, parts, strict=True):
            at = each * (world.rank - (world.rank > peer))
            if not torch.equal(part, send[at : at + each]):
                raise DigestMismatch(f"even exchange: rank {world.rank} got wrong bytes from rank {peer}")

    def wipe() -> None:
        receive.zero_()

    entry = {"move": FLOOR, "order": order, "bytes_each": each}
    return Candidate(entry, wipe, functools.partial(_stopwatch, run), check)


def _memory(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """Every route and executor of the same moves as ``shaped``, one at a time: what each rank holds at its peak."""
    geometry, world = Qwen3Geometry(**job["geometry"]), bench.world
    specs, cuts = weight_specs(geometry), tensor_parallel_cuts(geometry)
    second = world.topology.ranks_of(1)
    source = zero3_layout(specs, world.topology.ranks_of(0), world.world_size)
    held = bench.storages(source)
    expected = digest_layout(source, world.rank, held)
    found = []
    for degree in (2, 1):
        replicas = [second[at : at + degree] for at in range(0, len(second), degree)]
        destination = tensor_parallel_layout(specs, cuts, replicas, world.world_size)
        target = ReplicaStorage(destination, world.rank)
        target.poison()  # all pages resident
        for route in bench.routes(source, destination):
            for executor in EXECUTORS:
                entry = {"move": f"ZeRO-3 x2 -> TP{degree} x {len(replicas)}"}
                bench.say(f"{entry['move']}, {route}, {executor}")
                found += bench.repeat(
                    [bench.move(source, destination, held, target, expected, entry, route=route, executor=executor)]
                )
    return {"cases": found, "bounded": [_bounded(bench, geometry, executor) for executor in EXECUTORS]}


def _bounded(bench: Bench, geometry: Qwen3Geometry, executor: str) -> dict[str, Any]:
    """One copy over all ranks becomes copies of two ranks, the source given up as it is read: what is held at most."""
    specs, cuts, world = weight_specs(geometry), tensor_parallel_cuts(geometry), bench.world
    ranks = range(world.world_size)
    source = tensor_parallel_layout(specs, cuts, [ranks], world.world_size, "old")
    pairs = [ranks[at : at + 2] for at in range(0, len(ranks), 2)]
    destination = tensor_parallel_layout(specs, cuts, pairs, world.world_size, "new")
    schedule = bench.schedule(source, destination, "direct", _BOUNDED_BUCKET_BYTES)[0]
    held = bench.storages(source)
    expected = digest_layout(source, world.rank, held)
    now: list[BoundedMover] = []

    def prepare() -> None:
        now.clear()
        owned = OwnedStorages({name: storage.clone() for name, storage in held.items()})
        mover = BoundedMover(
            schedule, world.rank, [source], [owned], destination, executor, time_limit_s=MOVE_LIMIT_S,
            heartbeat=bench.heartbeat,
        )  # fmt: skip
        mover.agree()
        now.append(mover)
        settle_memory()

    def check() -> None:
        bench.check(expected, destination, now[0].take())

    bench.say(f"bounded memory, {executor}")
    entry = {
        "move": f"TP{len(ranks)} -> TP2 x {len(pairs)}", "executor": executor, "bucket_bytes": schedule.bucket_bytes,
        "source_bytes": [source.storage_bytes(rank) for rank in ranks],
        "destination_bytes": [destination.storage_bytes(rank) for rank in ranks],
        "predicted_bytes": [predicted_extra_bytes(schedule, r, [source], destination, executor) for r in ranks],
        "buffer_bytes": schedule.peak_bytes(executor).tolist(),
    }  # fmt: skip
    return bench.repeat([Candidate(entry, prepare, lambda: sample(now[0].run()), check)])[0]


_JOBS: Mapping[str, Callable[[Bench, Mapping[str, Any]], dict[str, Any]]] = {
    "shaped": _shaped,
    "local": _local,
    "memory": _memory,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the world, do the job, and on rank 0 write the result. Every rank; returns its exit code."""
    job_path, result_path = (Path(text) for text in (sys.argv[1:] if arguments is None else arguments))
    job = load_json(job_path, "job")
    world: World | None = None
    try:
        world = join(_JOIN_LIMIT_S)
        tell: Say = functools.partial(print, f"  {job['part']}:", flush=True)
        with watching(world, "bench") as heartbeat:
            bench = Bench(world, heartbeat, tell if world.rank == 0 else _nothing, job)
            found = _JOBS[job["part"]](bench, job)
        if world.rank == 0:
            nodes = dataclasses.asdict(world.topology)
            write_text(result_path, dump_json({"topology": nodes, "wire": world.wire_source, **found}))
        return EXIT_OK
    except RelaymeterError as error:
        print(f"relaymeter: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return EXIT_CRASH
    finally:
        if world is not None:
            world.close()


def _nothing(_: str) -> None:
    return None


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a process group with a dead member may hold threads that an ordinary exit would wait for
