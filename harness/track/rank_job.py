"""The job of ``track run`` inside the ranks: every case of the suite once round in the joined world.

``run_track_job(job, world, say)`` is called by every rank; rank 0 gets the cases as ``records.CaseRecord`` has them,
and what the ranks saw of their world. Cases take turns, in an order that changes, so that what disturbs the machine for
a moment falls on all. What arrived first is proved by digest against the source; later repeats are held against it byte
by byte, which takes less time than the move.
"""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.harness.jobs import TrackFault, TrackJob
from relaymeter.harness.moves import default_executor
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.track.case_plan import schedule
from relaymeter.harness.track.suite import CaseConfig
from relaymeter.harness.world import World, watching
from relaymeter.relayout.digest import LayoutDigest, compare, digest_layout
from relaymeter.relayout.execute import Hooks, Mover
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.transport import control_device

__all__ = ["Slower", "run_track_job"]

_SEED = 20_000
#: The last stretch of a planted wait is spent looking at the clock: the kernel wakes a sleeper this late.
_SPIN_S = 2e-4


def run_track_job(job: TrackJob, world: World, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure every case. Every rank exhausts it; raises what a move raises."""
    suite = job.suite
    wanted = (suite.world.nodes, suite.world.nodes * suite.world.ranks_per_node)
    if (world.topology.nodes, world.world_size) != wanted:
        raise InputError(
            f"suite {suite.name} is measured on {wanted[1]} ranks of {wanted[0]} nodes, this world has "
            f"{world.world_size} of {world.topology.nodes}: start as many, or change [world] of the suite"
        )
    with watching(world, "track") as heartbeat:
        cases = [_Case(case, job, world, heartbeat) for case in suite.cases]
        gc.collect()
        gc.freeze()  # what stays is not looked at again in the middle of a move
        order, rounds = random.Random("track"), suite.warmups + suite.repeats
        plans = min(suite.plan_repeats, suite.repeats)
        for number in range(rounds):
            timed = number - suite.warmups
            for case in order.sample(cases, len(cases)):
                case.once(timed=timed >= 0, last=number == rounds - 1)
            if (timed + 1) * plans // suite.repeats > max(timed, 0) * plans // suite.repeats:
                for case in order.sample(cases, len(cases)):
                    case.plan()
    about = {"backend": world.backend, "device": _device_name(world), "declared": world.declared}
    yield {
        "world": {**about, "wire": world.wire_counter is not None},
        "cases": [case.result() for case in cases],
    }


class _Case:
    """A case on one rank: both ends, its mover, and what was measured of it."""

    def __init__(self, config: CaseConfig, job: TrackJob, world: World, heartbeat: Heartbeat) -> None:
        self.config, self._suite, self._world = config, job.suite, world
        self._executor = default_executor(config.executor, backend=world.backend)
        source, self._destination, self._schedule = schedule(config, job.suite, world.topology)
        held = _filled(source, world)
        self._target = ReplicaStorage(self._destination, world.rank, world.device)
        self._expected = digest_layout(source, world.rank, held)
        self._fault = _fault(job.fault, world)
        hooks = Hooks(
            on_exchange=self._fault.on_exchange if self._fault else None,
            on_receive=self._fault.on_receive if self._fault else None,
        )
        self._mover = Mover(
            self._schedule, world.rank, held, self._target.storages, self._executor,
            time_limit_s=job.move_limit_s, heartbeat=heartbeat, hooks=hooks,
        )  # fmt: skip
        self._mover.agree()
        self._times: list[dict[str, float]] = []
        self._plan_s: list[float] = []
        self._proved: torch.Tensor | None = None
        self._copies = self._passed = self._total = 0
        self._digest = ""

    def once(self, *, timed: bool, last: bool) -> None:
        """Move once, and see whether every bit arrived. Collective."""
        self._target.poison()
        if self._fault is not None:
            self._fault.armed = last
        dist.barrier()
        found = self._mover.run()
        parts = (found.pack_s, found.communicate_s, found.unpack_s)
        differs = self._proved is None or not torch.equal(self._proved, self._target.buffer.view(torch.int64))
        *slowest, unproved = _slowest((sum(parts), *parts, float(differs)))
        if unproved:
            self._prove()
        else:
            self._passed += self._copies
        self._total += self._copies
        if timed:
            names = ("move_s", "pack_s", "communicate_s", "unpack_s")
            self._times.append(dict(zip(names, slowest, strict=True)))

    def plan(self) -> None:
        """Time the planning, from layouts to the schedule, on rank 0 alone while the others wait for the next move:
        what every rank plans is the same, and on fewer cores than ranks they would time each other."""
        if self._world.rank == 0 and "plan_s" in self.config.times:
            begin = time.perf_counter()
            schedule(self.config, self._suite, self._world.topology)
            self._plan_s.append(time.perf_counter() - begin)

    def _prove(self) -> None:
        """Hold what arrived against the source by digest, and keep it where every bit is right. Collective."""
        arrived = digest_layout(self._destination, self._world.rank, self._target.storages, replicas=True)
        report = compare(self._expected, arrived)
        self._copies, self._passed = report.total, self._passed + report.passed
        if not self._digest or not report.ok:
            self._digest = _hex(arrived)
        if report.ok:
            self._proved = self._target.buffer.view(torch.int64).clone()  # whole words compare faster than bytes

    def result(self) -> dict[str, Any]:
        """The case as ``records.CaseRecord.from_dict`` reads it."""
        made, names = self._schedule, self.config.times
        samples = {name: [found[name] for found in self._times] for name in names if name != "plan_s"}
        return {
            "name": self.config.name,
            "exact": {
                "bytes_total": made.bytes_total,
                "bytes_cross_node": made.bytes_cross_node,
                "bytes_in_node": made.bytes_in_node,
                "messages": made.messages(self._executor),
                "segments": len(made.all_segments.tensor),
                "rounds": made.rounds,
                "digest": self._digest,
            },
            "samples": {**samples, **({"plan_s": self._plan_s} if "plan_s" in names else {})},
            "digest_passed": self._passed,
            "digest_total": self._total,
        }


class Slower:
    """A planted fault (tests): the transport takes ``share`` longer, or one bit of what arrives is flipped."""

    def __init__(self, share: float, flips: bool) -> None:
        self._share, self._flips = share, flips
        self.armed = False

    def on_exchange(self, _: int, took_s: float) -> None:
        """After the exchange of a round: go on as if it had taken longer."""
        if not self._share:
            return
        until = time.perf_counter() + self._share * took_s
        while (left := until - time.perf_counter()) > 0:
            if left > _SPIN_S:
                time.sleep(left - _SPIN_S)

    def on_receive(self, _: int, __: int, received: torch.Tensor) -> None:
        """Before what was received is unpacked, in the last repeat."""
        if self._flips and self.armed and received.numel():
            received.view(torch.uint8).view(-1)[0] ^= 1
            self.armed = False


def _fault(fault: TrackFault | None, world: World) -> Slower | None:
    if fault is None:
        return None
    return Slower(fault.share if fault.kind == "slow" else 0.0, fault.kind == "flip")


def _filled(layout: Layout, world: World) -> Mapping[str, torch.Tensor]:
    """This rank's storages of ``layout``: bits that look random, the same in every launch, with every version of torch,
    and on all ranks that hold the same part."""
    made = ReplicaStorage(layout, world.rank)
    stream = np.random.PCG64(_SEED)
    for name, spec in layout.specs.items():
        words = torch.from_numpy(stream.random_raw(-(-spec.nbytes // 8)).view(np.uint8))
        whole = words[: spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        place = layout.placements[name]
        for piece in place.pieces_of(world.rank).tolist():
            shape, steps = place.shape[piece].tolist(), place.stride[piece].tolist()
            storage = made.storages[name]
            target = storage.as_strided(shape, steps, storage.storage_offset() + int(place.offset[piece]))
            box = tuple(slice(lo, lo + size) for lo, size in zip(place.lo[piece].tolist(), shape, strict=True))
            target.copy_(whole[box])
    return {name: storage.to(world.device) for name, storage in made.storages.items()}


def _slowest(values: tuple[float, ...]) -> list[float]:
    """The largest of each value over the ranks. Collective."""
    mine = torch.tensor(values, dtype=torch.float64, device=control_device())
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    found: list[float] = mine.tolist()
    return found


def _hex(found: LayoutDigest) -> str:
    """All copies of all tensors in one text."""
    whole = hashlib.sha256(str(found.version).encode())
    for name in sorted(found.sums):
        for cover in range(len(found.sums[name])):
            whole.update(f"{name} {cover} {found.digest(name, cover):016x}\n".encode())
    return whole.hexdigest()[:16]


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
