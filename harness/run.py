"""The run job inside the ranks: train the source, move by every route, check every bit, measure, and make the rows.

``run_job(job, world, say)`` is called by every rank of the joined world; rank 0 gets the rows.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.errors import InputError, MoveTimeout, RankLost
from relaymeter.harness.config import Fault, RunJob
from relaymeter.harness.moves import PlannedMove, default_executor, plan_scenario, route_bytes
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.scenario import source_ranks
from relaymeter.harness.trainer import build_trainer, state_digest, train_steps
from relaymeter.harness.verdict import row_verdict
from relaymeter.harness.world import World, watching
from relaymeter.policies.choose import choose
from relaymeter.policies.price import Price, price_loads
from relaymeter.records import MoveRecord, median_interval
from relaymeter.relayout.bounds import Bound, lower_bound
from relaymeter.relayout.digest import DIGEST_VERSION, LayoutDigest, compare, digest_layout
from relaymeter.relayout.engines import share_layout, zero3_storage
from relaymeter.relayout.execute import Hooks, Mover
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.schedule import Schedule
from relaymeter.relayout.subgroup import make_group
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import control_device, wait_for

__all__ = ["run_job"]

Say = Callable[[str], None]
FloatArray = NDArray[np.float64]
_CHOSEN = "chosen"
#: A rank that imports and trains on a busy machine may be silent longer than one that moves, in seconds.
_PREPARE_LOST_S = 20.0
#: Up to so many weights the source's whole state is digested before each move, to show it unchanged after a failure.
_STATE_ELEMENTS = 500_000_000


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


@dataclass
class _Case:
    """One route of one move on this rank, and what its repeats showed."""

    route: str
    schedule: Schedule
    codes: NDArray[np.int8]
    plan_s: float
    mover: Mover
    trigger: _Trigger
    samples: list[FloatArray] = field(default_factory=list)
    """Per repeat: (world, 4) seconds, digest seconds, peak bytes, wire bytes; not-a-number where not measured."""
    passed: int = 0
    total: int = 0
    mismatch: str | None = None


class _Run:
    """What the moves of a job have in common on one rank."""

    def __init__(
        self, job: RunJob, world: World, profile: Profile, heartbeat: Heartbeat, engine: Any | None, say: Say
    ) -> None:
        self.job, self.world, self.profile, self.heartbeat, self.say = job, world, profile, heartbeat, say
        self.engine = engine
        self.executor = default_executor(job.executor, backend=world.backend)
        self.geometry = job.scenario.model.geometry()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Collectives outside a move: they too end on every rank, naming who was lost."""
        with guarded(what, rank=self.world.rank, time_limit_s=self.job.move_limit_s, heartbeat=self.heartbeat):
            yield

    def train(self) -> None:
        """One more step, so that the source changes between moves. Every rank may call it; the trainer's do it."""
        if self.engine is not None:
            train_steps(self.engine, self.geometry, steps=1, seed=self.job.scenario.source.seed)

    def move(self, planned: PlannedMove, fault: Fault | None) -> list[MoveRecord]:
        """Run one move by every route. Every rank calls it; rank 0 gets the rows."""
        source = zero3_storage(self.engine) if self.engine is not None else {}
        target = ReplicaStorage(planned.destination, self.world.rank, self.world.device)
        cases = [self._case(planned, name, codes, source, target, fault) for name, codes in self._routes(planned)]
        seconds = sum(self._price(planned, case).total_s for case in cases) * (self.job.repeats + 1)
        repeats = f"{self.job.repeats} repeats and a warm-up"
        self.say(f"{planned.name}: {len(cases)} routes, {repeats}: about {seconds:.0f} s of moves")
        for case in cases:
            case.mover.agree()
        with self.together("the digest of the source"):
            expected = digest_layout(planned.source, self.world.rank, source)
        small = sum(spec.numel for spec in planned.source.specs.values()) <= _STATE_ELEMENTS
        before = state_digest(self.engine) if (fault or small) and self.engine is not None else None
        try:
            self._repeat(planned, cases, target, expected)
        except (RankLost, MoveTimeout) as error:
            self._check_source(before, getattr(error, "ranks", ()))
            raise
        return [self._row(planned, case, cases) for case in cases] if self.world.rank == 0 else []

    def _routes(self, planned: PlannedMove) -> list[tuple[str, NDArray[np.int8]]]:
        """Route arrays by name. Rank 0 chooses; the others get the codes."""
        codes = torch.zeros(len(planned.groups), dtype=torch.int8)
        if self.world.rank == 0:
            found = choose(
                planned.plan, planned.topology, self.profile, bucket_bytes=planned.bucket_bytes, executor=self.executor
            )
            codes = torch.from_numpy(np.ascontiguousarray(found.route, dtype=np.int8))
        on_wire = codes.to(control_device())
        with self.together("handing out the chosen routes"):
            dist.broadcast(on_wire, src=0)
        return [*planned.uniform().items(), (_CHOSEN, on_wire.cpu().numpy())]

    def _case(
        self,
        planned: PlannedMove,
        route: str,
        codes: NDArray[np.int8],
        source: Mapping[str, torch.Tensor],
        target: ReplicaStorage,
        fault: Fault | None,
    ) -> _Case:
        schedule, schedule_s = planned.schedule(codes)
        mine = fault if fault is not None and fault.rank == self.world.rank else None
        trigger = _Trigger(mine, schedule.rounds)
        mover = Mover(
            schedule,
            self.world.rank,
            source,
            target.storages,
            self.executor,
            time_limit_s=self.job.move_limit_s,
            heartbeat=self.heartbeat,
            hooks=trigger.hooks(),
        )
        return _Case(route, schedule, codes, planned.plan_s + schedule_s, mover, trigger)

    def _repeat(self, planned: PlannedMove, cases: list[_Case], target: ReplicaStorage, expected: LayoutDigest) -> None:
        """Repeats outside, routes inside in an order shuffled alike on all ranks; repeat 0 warms up."""
        order = random.Random(f"{self.job.scenario.name} {planned.name}")
        for repeat in range(self.job.repeats + 1):
            self.say(f"{planned.name}: " + (f"repeat {repeat} of {self.job.repeats}" if repeat else "warm-up"))
            for number, case in enumerate(order.sample(cases, len(cases))):
                case.trigger.armed = repeat == self.job.repeats and number == 0
                sample = self._once(planned, case, target, expected)
                if repeat:
                    case.samples.append(sample)

    def _once(self, planned: PlannedMove, case: _Case, target: ReplicaStorage, expected: LayoutDigest) -> FloatArray:
        """One move by one route, checked. Returns (world, 4), the same on every rank."""
        target.poison()
        wire_before = self.world.wire_bytes()
        with self.together("the start of a move"):
            dist.barrier()
        timing = case.mover.run()
        with self.together("the end of a move"):
            dist.barrier()  # what was sent has arrived, so it has been counted
        wire_after = self.world.wire_bytes()
        begin = _now(self.world.device)
        with self.together("the digest of the destination"):
            found = digest_layout(planned.destination, self.world.rank, target.storages, replicas=True)
            report = compare(expected, found)
            digest_s = _now(self.world.device) - begin
            case.passed += report.passed
            case.total += report.total
            if not report.ok and case.mismatch is None:
                case.mismatch = str(report.mismatches[0])
            wire = None if wire_before is None or wire_after is None else wire_after - wire_before
            values = (timing.pack_s + timing.communicate_s + timing.unpack_s, digest_s, timing.peak_bytes, wire)
            return self._gather([float("nan") if value is None else float(value) for value in values])

    def _gather(self, values: list[float]) -> FloatArray:
        mine = torch.tensor(values, dtype=torch.float64, device=control_device())
        every = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        dist.all_gather(every, mine)
        found: FloatArray = torch.stack(every).cpu().numpy()
        return found

    def _check_source(self, before: str | None, lost: tuple[int, ...]) -> None:
        """After a failed move: the trainer, whose process group is its own, still holds its state and still trains."""
        if self.engine is None:
            return
        if before is not None:
            same = "bit-equal to before the move" if state_digest(self.engine) == before else "CHANGED"
            _tell(f"source engine: state {same}")
        ranks = source_ranks(self.job.scenario, self.world.topology)
        if set(lost) & set(ranks):
            _tell("source engine: one of its own ranks was lost, it cannot train on")
            return
        losses = train_steps(self.engine, self.geometry, steps=1, seed=self.job.scenario.source.seed)
        _tell(f"source engine: trained one more step (loss {losses[0]:.4f})")

    def _row(self, planned: PlannedMove, case: _Case, cases: list[_Case]) -> MoveRecord:
        world, schedule = self.world, case.schedule
        table = np.stack(case.samples)
        slowest = table[:, :, 0].max(axis=1).tolist()
        measured, low, high = median_interval(slowest)
        digest_s = median_interval(table[:, :, 1].max(axis=1).tolist())[0]
        wire = table[:, :, 3].sum(axis=1)
        wire_bytes = None if np.isnan(wire).any() else int(np.median(wire))
        peak = None if np.isnan(table[:, :, 2]).all() else int(np.nanmax(table[:, :, 2]))
        price = self._price(planned, case)
        bound = self._bound(planned)
        verdict = row_verdict(
            digest_passed=case.passed,
            digest_total=case.total,
            measured_s=measured,
            planned_bytes=schedule.bytes_cross_node,
            wire_bytes=wire_bytes,
        )
        stamp = self.job.stamp
        return MoveRecord(
            utc=stamp.utc,
            machine_id=stamp.machine_id,
            launch_id=stamp.launch_id,
            commit=stamp.commit,
            profile_mismatch=stamp.mismatch,
            shaped=stamp.shaped,
            scenario=self.job.scenario.name,
            move=planned.name,
            route=case.route,
            chosen=schedule.input_hash == cases[-1].schedule.input_hash,
            route_bytes=route_bytes(planned.groups, case.codes),
            planner="classes",
            executor=self.executor,
            ranks=world.world_size,
            nodes=world.topology.nodes,
            bucket_bytes=planned.bucket_bytes,
            rounds=schedule.rounds,
            bytes_total=schedule.bytes_total,
            bytes_in_node=schedule.bytes_in_node,
            bytes_cross_node=schedule.bytes_cross_node,
            wire_cross_node_bytes=wire_bytes,
            messages=schedule.messages(self.executor),
            plan_s=case.plan_s,
            predicted_s=price.total_s,
            predicted_low_s=price.low_s,
            predicted_high_s=price.high_s,
            measured_s=measured,
            measured_low_s=low,
            measured_high_s=high,
            error=price.total_s / measured - 1,
            samples_s=tuple(tuple(sample[:, 0].tolist()) for sample in case.samples),
            digest_s=digest_s,
            bound_s=bound.seconds,
            bound_by=bound.bound_by,
            peak_bytes=peak,
            peak_predicted_bytes=int(schedule.peak_bytes(self.executor).max()),
            digest_version=DIGEST_VERSION,
            digest_passed=case.passed,
            digest_total=case.total,
            mismatch=case.mismatch,
            verdict=verdict,
            ok=verdict == "ok",
        )

    def _price(self, planned: PlannedMove, case: _Case) -> Price:
        return price_loads(case.schedule.loads(self.executor), planned.topology, self.profile, self.executor)

    def _bound(self, planned: PlannedMove) -> Bound:
        rates = self.profile.nic_rates(planned.topology)
        return lower_bound(planned.plan, planned.topology, rates, self.profile.port_rate)


def run_job(job: RunJob, world: World, say: Say) -> Iterator[list[MoveRecord]]:
    """Do the whole job. Every rank exhausts it after joining; gives all rows so far after every move (rank 0's only).

    Raises InputError where the world is not the profile's, RankLost and MoveTimeout out of a move that failed.
    """
    profile = load_profile(Path(job.profile))
    topology = _topology(job, world, profile)
    try:
        plan_scenario(job.scenario, topology, job.bucket_bytes)  # refuses what does not fit before anything is trained
    except InputError as error:
        ranks_of = [len(topology.ranks_of(node)) for node in range(topology.nodes)]
        raise InputError(f"{error} (this world: {topology.nodes} node(s) of {ranks_of} ranks)") from error
    source = job.scenario.source
    ranks = source_ranks(job.scenario, world.topology)
    say(f"training the source: ZeRO-3 over ranks {ranks[0]} to {ranks[-1]}, {source.steps} steps")
    with watching(world, "prepare", lost_after_s=_PREPARE_LOST_S) as heartbeat:
        engine, layout = _prepare(job, world, ranks, heartbeat)
    rows: list[MoveRecord] = []
    with watching(world, "move") as heartbeat:
        run = _Run(job, world, profile, heartbeat, engine, say)
        for number, planned in enumerate(plan_scenario(job.scenario, topology, job.bucket_bytes, layout)):
            if number:
                run.train()
            rows += run.move(planned, job.fault if number == 0 else None)
            yield rows


def _prepare(job: RunJob, world: World, ranks: Sequence[int], heartbeat: Heartbeat) -> tuple[Any | None, Layout]:
    """Train the source and hand its layout to every rank; ends on all ranks, naming who was lost."""
    source = job.scenario.source
    common: dict[str, Any] = {
        "rank": world.rank, "time_limit_s": job.time_limit_s, "heartbeat": heartbeat, "consequence": "",
    }  # fmt: skip

    def meet(deadline: float) -> None:
        work = dist.barrier(async_op=True)
        wait_for([work] if work is not None else [], deadline=deadline, poll=heartbeat.poll)

    with guarded("the start of the run", **common):
        group = make_group(ranks)
    with guarded("training the source", group=group, **common):
        engine = build_trainer(job.scenario.model.geometry(), group, steps=source.steps, seed=source.seed)
    with guarded("training the source", **common) as deadline:
        meet(deadline)
    layout = share_layout(engine, world.world_size, world.store, "relaymeter/source", time_limit_s=job.time_limit_s)
    with guarded("the start of the run", **common) as deadline:
        meet(deadline)
    return engine, layout


def _topology(job: RunJob, world: World, profile: Profile) -> Topology:
    """The world's nodes with the NICs as calibration found them; its own view where the profile is of another world."""
    here, measured = world.topology, profile.topology
    if here.node == measured.node:
        return measured
    if not job.allow_mismatch:
        raise InputError(
            f"profile {job.profile} was measured on nodes {list(measured.node)} of the ranks, this world has "
            f"{list(here.node)}: calibrate it, or add --allow-mismatch"
        )
    return here


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
