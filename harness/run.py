"""The run job inside the ranks: train the source, then move by every case of every move, checked and measured.

``run_job(job, world, say)`` is called by every rank of the joined world; rank 0 gets the rows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.errors import InputError, MoveTimeout, RankLost
from relaymeter.harness.cases import CHOSEN, Case, make_cases, repeat_cases
from relaymeter.harness.jobs import Fault, RunJob
from relaymeter.harness.moves import (
    PlannedMove,
    check_bounded,
    executors_of,
    plan_scenario,
    planners_of,
    refuse_unbounded,
)
from relaymeter.harness.plan_file import PlanFile, load_plan
from relaymeter.harness.rows import make_row
from relaymeter.harness.run_context import RunContext
from relaymeter.harness.scenario import source_ranks
from relaymeter.harness.sources import Sources
from relaymeter.harness.trainer import build_trainer, state_digest, train_steps
from relaymeter.harness.world import World, watching
from relaymeter.records import MoveRecord
from relaymeter.relayout.engines import share_layout
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.subgroup import make_group
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import wait_for
from relaymeter.units import counted

__all__ = ["run_job"]

Say = Callable[[str], None]
#: A rank that imports and trains on a busy machine may be silent longer than one that moves, in seconds.
_PREPARE_LOST_S = 20.0
#: Up to so many weights the source's whole state is digested before each move, to show it unchanged after a failure.
_STATE_ELEMENTS = 500_000_000


def run_job(job: RunJob, world: World, say: Say) -> Iterator[list[MoveRecord]]:
    """Do the whole job. Every rank exhausts it after joining; gives all rows so far after every move (rank 0's only).

    Raises InputError where the world is not the profile's or the plan's, RankLost and MoveTimeout out of a move that
    failed.
    """
    profile = None if job.profile is None else load_profile(Path(job.profile))
    plan = None if job.plan is None else load_plan(Path(job.plan))
    topology = _topology(job, world, profile)
    try:
        if job.max_extra_bytes is not None:
            refuse_unbounded(job.scenario, topology)
        planned = _plan(job, topology, plan, None)  # refuses what does not fit before anything is trained
        if job.max_extra_bytes is not None:
            _check_bounded(job, world, planned, plan)
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
        context = RunContext(job, world, topology, profile, plan, heartbeat, say)
        sources = Sources(context, engine, layout)
        planned = _plan(job, topology, plan, layout)
        for number, (_, moves) in enumerate(itertools.groupby(planned, key=lambda move: move.name)):
            if number:
                sources.train()
            rows += _move(context, sources, list(moves), job.fault if number == 0 else None)
            yield rows


def _plan(job: RunJob, topology: Topology, plan: PlanFile | None, trainer: Layout | None) -> tuple[PlannedMove, ...]:
    """The moves by every planner, planned here or read from the plan; ``trainer``: the live engine's layout, if any."""
    if plan is not None:
        return plan.planned(topology, trainer)
    whole = trainer is not None or job.max_extra_bytes is not None
    planners = planners_of(job.planner if whole else "classes")
    return plan_scenario(job.scenario, topology, job.bucket_bytes, trainer, planners)


def _check_bounded(job: RunJob, world: World, planned: Sequence[PlannedMove], plan: PlanFile | None) -> None:
    """Refuse what memory is not enough for, alike on every rank. Routes that a profile chooses come later."""

    def chosen(move: PlannedMove, executor: str) -> NDArray[np.int8] | None:
        return None if plan is None else plan.chosen(move.name, move.planner, executor)

    executors = executors_of(job.executor if plan is None else plan.executor, backend=world.backend)
    whose = "--plan" if plan is not None else None if job.bucket_bytes is None else "--bucket-bytes"
    check_bounded(planned, executors, chosen, job.max_extra_bytes or 0, whose)


def _move(context: RunContext, sources: Sources, moves: Sequence[PlannedMove], fault: Fault | None) -> list[MoveRecord]:
    """Run one move, given by its planners' plans, by every case. Every rank calls it; rank 0 gets the rows."""
    small = sum(spec.numel for spec in moves[0].destination.specs.values()) <= _STATE_ELEMENTS
    before = state_digest(sources.engine) if (fault or small) and sources.engine is not None else None
    try:
        sources.open(moves[0])
        cases = make_cases(context, moves, sources, fault)
        _say_how_long(context, cases)
        for case in cases:
            case.move.agree()
        repeat_cases(context, cases, sources.expected(), fault)
    except (RankLost, MoveTimeout) as error:
        _check_source(context, sources, before, getattr(error, "ranks", ()))
        raise
    if context.world.rank:
        return []
    chosen = {(case.planned.planner, case.executor): case for case in cases if case.route == CHOSEN}
    return [make_row(context, case, chosen.get((case.planned.planner, case.executor))) for case in cases]


def _say_how_long(context: RunContext, cases: Sequence[Case]) -> None:
    repeats = context.job.repeats
    prices = [case.price.total_s for case in cases if case.price is not None]
    text = f"{cases[0].planned.name}: {counted(len(cases), 'row')}, {counted(repeats, 'repeat')} and a warm-up"
    if len(prices) == len(cases):
        text += f": about {sum(prices) * (repeats + 1):.0f} s of moves"
    context.say(text)


def _check_source(context: RunContext, sources: Sources, before: str | None, lost: tuple[int, ...]) -> None:
    """After a failed move: the trainer, whose process group is its own, still holds its state and still trains."""
    if sources.engine is None:
        return
    scenario = context.job.scenario
    if before is not None:
        same = "bit-equal to before the move" if state_digest(sources.engine) == before else "CHANGED"
        _tell(f"source engine: state {same}")
    if set(lost) & set(source_ranks(scenario, context.world.topology)):
        _tell("source engine: one of its own ranks was lost, it cannot train on")
        return
    losses = train_steps(sources.engine, scenario.model.geometry(), steps=1, seed=scenario.source.seed)
    _tell(f"source engine: trained one more step (loss {losses[0]:.4f})")


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


def _topology(job: RunJob, world: World, profile: Profile | None) -> Topology:
    """The world's nodes with the NICs as calibration found them; its own view without a profile of this world."""
    here = world.topology
    if profile is None:
        return here
    measured = profile.topology
    if here.node == measured.node:
        return measured
    if not job.allow_mismatch:
        raise InputError(
            f"profile {job.profile} was measured on nodes {list(measured.node)} of the ranks, this world has "
            f"{list(here.node)}: calibrate it, or add --allow-mismatch"
        )
    return here


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
