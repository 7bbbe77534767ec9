"""Cases of a move: every planner, executor and route, moved in turns, checked and measured on one rank.

``make_cases(context, planned, ...)`` compiles them; ``repeat_cases(...)`` warms up and repeats. Every rank calls both.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.harness.jobs import Fault
from relaymeter.harness.moves import PlannedMove, bounded_schedule, fixed_bounded_schedule
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.run_context import FloatArray, RunContext
from relaymeter.harness.sources import Sources
from relaymeter.policies.choose import choose
from relaymeter.policies.price import Price, price_loads
from relaymeter.relayout.bounded import BoundedMover, OwnedStorages
from relaymeter.relayout.digest import LayoutDigest, compare, digest_layout
from relaymeter.relayout.execute import Hooks, Mover, MoveTiming
from relaymeter.relayout.memory import release_free_pages
from relaymeter.relayout.schedule import Schedule
from relaymeter.relayout.timeline import predicted_extra_bytes
from relaymeter.relayout.transport import control_device

__all__ = ["CHOSEN", "Case", "make_cases", "repeat_cases"]

#: The route of a case that runs what the policy picked.
CHOSEN = "chosen"
_NOT_A_NUMBER = float("nan")


@dataclass
class _Trigger:
    """A fault on this rank: armed before one move, it goes off once, in the middle of it."""

    fault: Fault | None
    rounds: int
    armed: bool = False

    def hooks(self) -> Hooks:
        return Hooks(on_round=self._on_round, on_receive=self._on_receive) if self.fault else Hooks()

    def _on_round(self, number: int) -> None:
        if self.armed and self.fault and self.fault.kind != "flip" and number >= self.rounds // 2:
            os.kill(os.getpid(), signal.SIGKILL if self.fault.kind == "kill" else signal.SIGSTOP)

    def _on_receive(self, number: int, _: int, tensor: torch.Tensor) -> None:
        if self.armed and self.fault and self.fault.kind == "flip" and number >= self.rounds // 2 and tensor.numel():
            tensor[0] ^= 1
            self.armed = False


class _Kept:
    """A move that leaves its source alone: compiled once, it reads and writes the same storages every time."""

    def __init__(self, context: RunContext, schedule: Schedule, executor: str, ends: _Ends, hooks: Hooks) -> None:
        self._mover = Mover(
            schedule,
            context.world.rank,
            tuple(ends.sources.storages(name) for name in ends.planned.sources),
            ends.target,
            executor,
            time_limit_s=context.job.move_limit_s,
            heartbeat=context.heartbeat,
            hooks=hooks,
        )
        self.storages: Mapping[str, torch.Tensor] = ends.target
        self.peak_predicted_bytes = int(schedule.peak_bytes(executor).max())

    def agree(self) -> None:
        self._mover.agree()

    def prepare(self) -> None:
        self._mover.poison()

    def run(self) -> MoveTiming:
        return self._mover.run()

    def clear(self) -> None:
        """Nothing to do: the storages stay."""


class _GivenUp:
    """A move in bounded memory: it gives its source up, so each time the old replica is filled again before."""

    def __init__(self, context: RunContext, schedule: Schedule, executor: str, ends: _Ends, hooks: Hooks) -> None:
        self._context, self._schedule, self._executor = context, schedule, executor
        self._ends, self._hooks = ends, hooks
        self._mover: BoundedMover | None = None
        self.storages: Mapping[str, torch.Tensor] = {}
        layouts, after = tuple(ends.planned.sources.values()), ends.planned.destination
        self.peak_predicted_bytes = max(
            predicted_extra_bytes(schedule, rank, layouts, after, executor) for rank in range(after.world_size)
        )

    def agree(self) -> None:
        """Nothing yet: there is a source to agree on only when the move is prepared."""

    def prepare(self) -> None:
        planned, context = self._ends.planned, self._context
        self._mover = BoundedMover(
            self._schedule,
            context.world.rank,
            tuple(planned.sources.values()),
            [OwnedStorages(self._ends.sources.give_up_old())],
            planned.destination,
            self._executor,
            max_extra_bytes=context.job.max_extra_bytes,
            device=context.world.device,
            time_limit_s=context.job.move_limit_s,
            heartbeat=context.heartbeat,
            hooks=self._hooks,
        )
        self._mover.agree()
        release_free_pages()  # what was freed before would take in what the move allocates, and hide its peak

    def run(self) -> MoveTiming:
        if self._mover is None:
            raise InputError("a bounded move runs once each time it is prepared")
        timing = self._mover.run()
        self.storages = self._mover.take()
        return timing

    def clear(self) -> None:
        """Let go of what has arrived: the next move brings its own."""
        self._mover, self.storages = None, {}


@dataclass(frozen=True, eq=False)
class _Ends:
    """Both ends of a case on this rank."""

    planned: PlannedMove
    sources: Sources
    target: Mapping[str, torch.Tensor]
    """Storages of the destination; empty for a move that makes its own."""


@dataclass
class Case:
    """One move by one planner, executor and route on this rank, and what its repeats showed."""

    planned: PlannedMove
    executor: str
    route: str
    schedule: Schedule
    codes: NDArray[np.int8]
    schedule_s: float
    price: Price | None
    """None where the profile, if there is one, has no prices for the executor."""
    move: _Kept | _GivenUp
    trigger: _Trigger
    samples: list[FloatArray] = field(default_factory=list)
    """Per repeat: (world, 4) seconds, digest seconds, peak bytes, wire bytes; not-a-number where not measured."""
    passed: int = 0
    total: int = 0
    mismatch: str | None = None


def make_cases(
    context: RunContext,
    moves: Sequence[PlannedMove],
    sources: Sources,
    fault: Fault | None,
) -> list[Case]:
    """The cases of one move, given by its planners' plans: executor by executor, route by route. Collective.

    Those that keep their source write one destination in turns.
    """
    cases = []
    bounded = context.job.max_extra_bytes is not None
    target = None if bounded else ReplicaStorage(moves[0].destination, context.world.rank, context.world.device)
    mine = fault if fault is not None and fault.rank == context.world.rank else None
    for planned in moves:
        ends = _Ends(planned, sources, {} if target is None else target.storages)
        for executor in context.executors:
            for route, codes in _routes(context, planned, executor):
                schedule, schedule_s = _schedule(context, planned, route, codes, executor)
                trigger = _Trigger(mine, schedule.rounds)
                kind = _Kept if target is not None else _GivenUp
                move = kind(context, schedule, executor, ends, trigger.hooks())
                price = _price(context, schedule, executor)
                cases.append(Case(planned, executor, route, schedule, codes, schedule_s, price, move, trigger))
    return cases


def _schedule(
    context: RunContext, planned: PlannedMove, route: str, codes: NDArray[np.int8], executor: str
) -> tuple[Schedule, float]:
    """The schedule and the seconds it took: the plan's bucket, or in bounded memory the largest that fits."""
    limit = context.job.max_extra_bytes
    if limit is None:
        return planned.schedule(codes)
    begin = context.now()
    if context.plan is not None or context.job.bucket_bytes is not None:
        whose = "--plan" if context.plan is not None else "--bucket-bytes"
        found = fixed_bounded_schedule(planned, route, codes, executor, limit, whose)
    else:
        found = bounded_schedule(planned, route, codes, executor, limit)
    return found, context.now() - begin


def _price(context: RunContext, schedule: Schedule, executor: str) -> Price | None:
    profile = context.priced(executor)
    return None if profile is None else price_loads(schedule.loads(executor), context.topology, profile, executor)


def _routes(context: RunContext, planned: PlannedMove, executor: str) -> list[tuple[str, NDArray[np.int8]]]:
    """Route arrays by name: the uniform ones, and the chosen one where there are prices, or where the plan has it."""
    routes = [*planned.uniform().items()]
    if context.plan is not None:
        codes = context.plan.chosen(planned.name, planned.planner, executor)
        return routes if codes is None else [*routes, (CHOSEN, codes)]
    profile = context.priced(executor)
    if profile is None:
        return routes
    mine = torch.zeros(len(planned.groups), dtype=torch.int8)
    if context.world.rank == 0:  # the others get the codes, so that all run what one has chosen
        found = choose(
            planned.plan, planned.topology, profile, bucket_bytes=planned.bucket_bytes, executor=executor,
            groups=planned.groups,
        )  # fmt: skip
        mine = torch.from_numpy(np.ascontiguousarray(found.route, dtype=np.int8))
    on_wire = mine.to(control_device())
    with context.together("handing out the chosen routes"):
        dist.broadcast(on_wire, src=0)
    return [*routes, (CHOSEN, on_wire.cpu().numpy())]


def repeat_cases(
    context: RunContext, cases: Sequence[Case], expected: LayoutDigest, fault: Fault | None = None
) -> None:
    """Repeats outside, cases inside in an order shuffled alike on all ranks; repeat 0 warms up. Collective.

    Raises RankLost and MoveTimeout out of a move that failed, InputError where a bit to flip never came.
    """
    name, repeats = cases[0].planned.name, context.job.repeats
    order = random.Random(f"{context.job.scenario.name} {name}")
    for repeat in range(repeats + 1):
        context.say(f"{name}: " + (f"repeat {repeat} of {repeats}" if repeat else "warm-up"))
        for number, case in enumerate(order.sample(list(cases), len(cases))):
            case.move.prepare()
            case.trigger.armed = repeat == repeats and number == 0
            sample = _once(context, case, expected)
            case.move.clear()
            if repeat:
                case.samples.append(sample)
    _refuse_no_flip(context, cases, fault)


def _refuse_no_flip(context: RunContext, cases: Sequence[Case], fault: Fault | None) -> None:
    """Raise InputError on every rank where a bit was to be flipped and none was. Collective if there is a fault."""
    if fault is None or fault.kind != "flip":
        return
    with context.together("the end of the repeats"):
        waiting = context.gather([float(any(case.trigger.fault and case.trigger.armed for case in cases))])
    if waiting.any():
        raise InputError(
            f"--fault flip:{fault.rank}: rank {fault.rank} received nothing late in move {cases[0].planned.name}, so "
            "no bit was flipped: name a rank that receives"
        )


def _once(context: RunContext, case: Case, expected: LayoutDigest) -> FloatArray:
    """One move by one case, checked. Returns (world, 4), the same on every rank."""
    world = context.world
    wire_before = world.wire_bytes()
    with context.together("the start of a move"):
        dist.barrier()
    timing = case.move.run()
    with context.together("the end of a move"):
        dist.barrier()  # what was sent has arrived, so it has been counted
    wire_after = world.wire_bytes()
    begin = context.now()
    with context.together("the digest of the destination"):
        found = digest_layout(case.planned.destination, world.rank, case.move.storages, replicas=True)
        report = compare(expected, found)
        digest_s = context.now() - begin
        case.passed += report.passed
        case.total += report.total
        if not report.ok and case.mismatch is None:
            case.mismatch = str(report.mismatches[0])
        wire = None if wire_before is None or wire_after is None else wire_after - wire_before
        values = (timing.pack_s + timing.communicate_s + timing.unpack_s, digest_s, timing.peak_bytes, wire)
        return context.gather([_NOT_A_NUMBER if value is None else float(value) for value in values])
