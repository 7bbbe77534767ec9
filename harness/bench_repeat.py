"""What the ranks of a benchmark have in common: candidates repeated by turns, every result checked bit by bit.

``bench = Bench(world, heartbeat, say, job)``; ``bench.repeat([bench.move(...), ...])`` on every rank of the world gives
what every rank measured. The jobs themselves are in ``bench_ranks.py``.
"""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.harness.bench_report import Say
from relaymeter.harness.moves import default_bucket_bytes
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.world import World
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.digest import LayoutDigest, compare, digest_layout
from relaymeter.relayout.execute import Mover, MoveTiming
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.memory import PeakMemory, release_free_pages
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import ROUTES, block_groups
from relaymeter.relayout.schedule import Schedule, build_schedule

__all__ = ["MOVE_LIMIT_S", "Bench", "Candidate", "sample", "settle_memory"]

MOVE_LIMIT_S = 120.0
#: Names of what ``Candidate.once`` gives of every rank, in order.
_COLUMNS = ("seconds", "pack_s", "communicate_s", "unpack_s", "peak_bytes")


@dataclass
class Candidate:
    """Something that is repeated: ``once`` does it and gives ``_COLUMNS`` of this rank; ``check`` looks at the bits."""

    entry: dict[str, Any]
    """What it is, for the result: same on every rank."""
    prepare: Callable[[], None]
    once: Callable[[], Sequence[float]]
    check: Callable[[], None]
    samples: list[list[list[float]]] = field(default_factory=list)
    """Per repeat and rank, ``_COLUMNS``."""


class Bench:
    """What the candidates of a job have in common on one rank."""

    def __init__(self, world: World, heartbeat: Heartbeat, say: Say, job: Mapping[str, Any]) -> None:
        self.world, self.heartbeat, self.say, self.repeats = world, heartbeat, say, int(job["repeats"])
        self.payload_bytes_per_s: float | None = job.get("payload_bytes_per_s")

    def storages(self, layout: Layout) -> dict[str, torch.Tensor]:
        """This rank's storages of ``layout``: random bits, equal on all ranks that hold the same part; resident."""
        made = ReplicaStorage(layout, self.world.rank)
        generator = torch.Generator().manual_seed(1000)
        for name, spec in layout.specs.items():
            dtype = getattr(torch, spec.dtype)
            whole = torch.empty(spec.nbytes, dtype=torch.uint8).random_(0, 256, generator=generator).view(dtype)
            place = layout.placements[name]
            for piece in place.pieces_of(self.world.rank).tolist():
                shape, storage = place.shape[piece].tolist(), made.storages[name]
                steps = place.stride[piece].tolist()
                target = storage.as_strided(shape, steps, storage.storage_offset() + int(place.offset[piece]))
                box = [slice(lo, lo + size) for lo, size in zip(place.lo[piece].tolist(), shape, strict=True)]
                target.copy_(whole.view(spec.shape)[box])
        return dict(made.storages)

    def move(
        self, source: Layout, destination: Layout, held: Mapping[str, torch.Tensor], target: ReplicaStorage,
        expected: LayoutDigest, entry: Mapping[str, Any], *, route: str, executor: str,
    ) -> Candidate:  # fmt: skip
        """A move by one route and executor."""
        schedule, bound = self.schedule(source, destination, route)
        rank = self.world.rank
        settle_memory()
        with PeakMemory() as compiling:
            mover = Mover(
                schedule, rank, held, target.storages, executor, time_limit_s=MOVE_LIMIT_S, heartbeat=self.heartbeat
            )
            mover.agree()

        about = {
            **entry, "route": route, "executor": executor, "bound_s": bound, "bucket_bytes": schedule.bucket_bytes,
            "rounds": schedule.rounds, "messages": schedule.messages(executor),
            "bytes_cross_node": schedule.bytes_cross_node, "bytes_in_node": schedule.bytes_in_node,
            "predicted_bytes": schedule.peak_bytes(executor).tolist(), "buffer_bytes": self.of_all(mover.buffer_bytes),
            "compiling_bytes": self.of_all(float(compiling.bytes or 0)),
            "source_bytes": [source.storage_bytes(r) for r in range(self.world.world_size)],
            "destination_bytes": [destination.storage_bytes(r) for r in range(self.world.world_size)],
        }  # fmt: skip
        check = functools.partial(self.check, expected, destination, target.storages)
        return Candidate(about, target.poison, lambda: sample(mover.run()), check)

    def schedule(
        self, source: Layout, destination: Layout, route: str, bucket_bytes: int | None = None
    ) -> tuple[Schedule, float | None]:
        """One route for all groups, and the lower bound by the payload rate of the box's NICs (None: unshaped).

        ``bucket_bytes``: the bucket that ``run`` would take by default.
        """
        topology, rate = self.world.topology, self.payload_bytes_per_s
        plan = plan_move(source, destination, topology)
        codes = np.full(int(plan.group_start[-1]), ROUTES.index(route), dtype=np.int8)
        schedule = build_schedule(plan, topology, codes, bucket_bytes or default_bucket_bytes(plan))
        if rate is None:
            return schedule, None
        return schedule, lower_bound(plan, topology, dict.fromkeys(topology.nic, rate), None).seconds

    def routes(self, source: Layout, destination: Layout) -> tuple[str, ...]:
        """The routes by which the move differs."""
        topology = self.world.topology
        return block_groups(plan_move(source, destination, topology), topology).candidates

    def check(self, expected: LayoutDigest, layout: Layout, storages: Mapping[str, torch.Tensor]) -> None:
        """Raise DigestMismatch, on every rank, unless all of ``layout`` is as the source. Collective."""
        found = digest_layout(layout, self.world.rank, storages, replicas=True)
        compare(expected, found).raise_for_mismatch()

    def of_all(self, value: float) -> list[float]:
        """``value`` of every rank. Collective."""
        return [row[0] for row in self.gather([value])]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """``values`` of every rank, by rank. Collective."""
        mine = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        dist.all_gather(every, mine)
        found: list[list[float]] = torch.stack(every).tolist()
        return found

    def repeat(self, candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
        """Every candidate once to warm up, then ``repeats`` times, by turns in an order that changes, alike on all
        ranks; what each found is checked every time. Returns their entries with the samples."""
        order = random.Random("bench")
        for repeat in range(self.repeats + 1):
            if len(candidates) > 1:
                self.say(f"repeat {repeat} of {self.repeats}" if repeat else f"warm-up of {len(candidates)} candidates")
            for candidate in order.sample(list(candidates), len(candidates)):
                candidate.prepare()
                dist.barrier()
                found = self.gather(candidate.once())
                candidate.check()
                if repeat:
                    candidate.samples.append(found)
        return [{**c.entry, **_columns(c.samples)} for c in candidates]


def settle_memory() -> None:
    """Hand back to the kernel what earlier moves left, so that what is taken next is seen as taken."""
    gc.collect()
    release_free_pages()


def sample(timing: MoveTiming) -> Sequence[float]:
    """``_COLUMNS`` of a move."""
    parts = (timing.pack_s, timing.communicate_s, timing.unpack_s)
    return (sum(parts), *parts, float("nan") if timing.peak_bytes is None else float(timing.peak_bytes))


def _columns(samples: list[list[list[float]]]) -> dict[str, list[list[float]]]:
    """By column: per repeat, one value per rank."""
    return {name: [[row[at] for row in found] for found in samples] for at, name in enumerate(_COLUMNS)}
