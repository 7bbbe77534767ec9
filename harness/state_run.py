"""The jobs of the training-state kinds inside the ranks: every change, one after the other, in one world.

``run_state_job(job, world, say)`` and ``run_offload_job(job, world, say)`` are called by every rank of the joined
world; rank 0 gets the rows, all so far after every change.
"""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from relaymeter.errors import InputError, MoveTimeout, PlanDisagreement, RankLost
from relaymeter.harness.jobs import Fault, OffloadJob, StateJob
from relaymeter.harness.models import Qwen3Geometry
from relaymeter.harness.moves import planners_of
from relaymeter.harness.offload import run_offload
from relaymeter.harness.state_cells import run_change
from relaymeter.harness.state_config import GLOBAL_BATCH, ChangeConfig, EngineConfig, TrainingConfig
from relaymeter.harness.state_context import StateContext
from relaymeter.harness.state_emit import leg_text, offload_text
from relaymeter.harness.state_engines import EngineGroups, EngineMaker, data_parallel, quiet
from relaymeter.harness.state_models import samples
from relaymeter.harness.state_rounds import run_rounds
from relaymeter.harness.state_rows import leg_row, offload_row, refused_row
from relaymeter.harness.world import World, tell_by_store, watching
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.state_records import OffloadRecord, StateRecord

__all__ = ["run_offload_job", "run_state_job"]

Say = Callable[[str], None]
#: A rank that builds an engine on a busy machine may be silent longer than one that moves, in seconds.
_LOST_AFTER_S = 25.0
#: Model families that transformers builds.
_OF_TRANSFORMERS = ("qwen3", "moe")
#: What a rank raises whose peer is gone.
_OF_A_LOST_RANK = (RankLost, MoveTimeout, RuntimeError)
#: After one rank refused a change all others must have, within so many seconds.
_ALIKE_S = 60.0


def run_state_job(job: StateJob, world: World, say: Say) -> Iterator[list[StateRecord]]:
    """Do the whole job. Every rank exhausts it after joining; gives all rows so far after every change (rank 0's only).

    A change that is refused or fails alike on every rank leaves a row that says so, and the next one follows. Raises
    RankLost and MoveTimeout out of what a rank was lost in.
    """
    rows: list[StateRecord] = []
    changes = job.scenario.changes
    _import([job.scenario.training.model, *(change.training.model for change in changes)], world, say)
    with quiet(), watching(world, "training-state", lost_after_s=_LOST_AFTER_S) as heartbeat:
        if job.scenario.rounds is not None:
            yield from run_rounds(
                job, lambda planner: make_context(job, world, heartbeat, planner, job.fault, say), world
            )
            return
        planners = planners_of(job.planner)
        groups = EngineGroups(job.time_limit_s)
        begin = time.monotonic()
        for number, change in enumerate(changes):
            for planner in planners:
                say(f"change {number + 1} of {len(changes)}: {change.name}: {change.engines} ({planner})")
                fault = job.fault if not rows and not number and planner == planners[0] else None
                context = make_context(job, world, heartbeat, planner, fault, say, groups)
                done = _change(job, world, context, change, f"{number}/{planner}")
                if any(row.refused is not None for row in done):
                    groups = EngineGroups(job.time_limit_s)  # a refusal may leave ranks apart in the old ones
                rows += done
                yield rows
        say(f"all changes: {time.monotonic() - begin:.0f} s")


def _import(models: Sequence[str], world: World, say: Say) -> None:
    """Import what builds engines of these families, before anybody listens for heartbeats: it takes seconds."""
    needed = ["deepspeed", *(["transformers"] if set(models) & set(_OF_TRANSFORMERS) else [])]
    say(f"importing {' and '.join(needed)}")
    with quiet():
        for name in needed:
            importlib.import_module(name)


def make_context(
    job: StateJob,
    world: World,
    heartbeat: Heartbeat,
    planner: str,
    fault: Fault | None,
    say: Say,
    groups: EngineGroups | None = None,
) -> StateContext:
    """This rank's context for the moves by one planner. ``groups``: of engines, shared by the changes of a job."""
    known: Literal["classes", "affine"] = "affine" if planner == "affine" else "classes"
    return StateContext(
        rank=world.rank,
        topology=world.topology,
        store=world.store,
        planner=known,
        executor=None if job.executor == "auto" else job.executor,
        bucket_bytes=job.bucket_bytes,
        move_limit_s=job.move_limit_s,
        heartbeat=heartbeat,
        model=job.scenario.model,
        groups=groups,
        fault=fault,
        say=say,
    )


def _change(job: StateJob, world: World, context: StateContext, change: ChangeConfig, key: str) -> list[StateRecord]:
    """One change by one planner. Every rank calls it; rank 0 gets the rows, the others those of a refusal only."""
    rows: list[StateRecord] = []
    refusal: Exception | None = None
    with guarded(
        f"change {change.name}",
        rank=world.rank,
        time_limit_s=job.time_limit_s,
        heartbeat=context.heartbeat,
        consequence="",
    ):
        begin = time.perf_counter()
        try:
            for number, leg in enumerate(run_change(context, change), 1):
                rows.append(leg_row(job, world, change, number, leg))
                context.say(leg_text(rows[-1]))
        except Exception as error:
            if isinstance(error, _OF_A_LOST_RANK) and not isinstance(error, NotImplementedError):
                raise
            refusal = error  # DeepSpeed refuses by whatever it raises; where all ranks do, the next change goes on
        _check_alike(world, key, refusal, f"change {change.name}")
    if refusal is not None:
        if not isinstance(refusal, InputError | PlanDisagreement):
            traceback.print_exception(refusal)
        rows.append(refused_row(job, world, change, context.planner, refusal))
        context.say(leg_text(rows[-1]))
    context.say(f"  {time.perf_counter() - begin:.1f} s")
    return rows


def _check_alike(world: World, key: str, refusal: Exception | None, what: str) -> None:
    """Wait for every rank at the end of ``what``. Raises MoveTimeout where some were refused and others do not end."""
    mine = "" if refusal is None else f"rank {world.rank}: {refusal}"
    refused = [end for end in tell_by_store(world, f"{what} ({key})", mine, _ALIKE_S) if end]
    if refused and len(refused) < world.world_size:
        raise InputError(f"{what} was refused by {len(refused)} of {world.world_size} ranks only: {refused[0]}")


def _loss(engine: Any, training: TrainingConfig, geometry: Qwen3Geometry) -> torch.Tensor:
    """The loss of this rank's share of the batch of the engine's next step."""
    batch = samples(training, GLOBAL_BATCH, training.seed * 1_000_003 + int(engine.global_steps), geometry)
    _, place, places = data_parallel(engine)
    size = GLOBAL_BATCH // places
    mine = {key: value[place * size : (place + 1) * size].to(engine.device) for key, value in batch.items()}
    loss: torch.Tensor = engine(**mine).loss
    return loss


def run_offload_job(job: OffloadJob, world: World, say: Say) -> Iterator[list[OffloadRecord]]:
    """Offload and reload every kind of state of an engine of each stage. Every rank exhausts it after joining; gives
    all rows so far after every kind (rank 0's only)."""
    scenario = job.scenario
    training = TrainingConfig(model="qwen3", optimizer=scenario.optimizer, steps=scenario.steps, seed=scenario.seed)
    geometry = scenario.model.geometry()
    ranks = tuple(range(scenario.ranks))
    rows: list[OffloadRecord] = []
    _import([training.model], world, say)
    with (
        quiet(),
        watching(world, "offload", lost_after_s=_LOST_AFTER_S) as heartbeat,
        guarded("the offload", rank=world.rank, time_limit_s=job.time_limit_s, heartbeat=heartbeat, consequence=""),
    ):
        maker = EngineMaker(training, geometry, time_limit_s=job.time_limit_s)
        group = maker.group(ranks)
        if group is not None:
            results = run_offload(
                lambda stage: maker.build(EngineConfig(stage=stage, ranks=ranks), scenario.seed),
                lambda engine: _loss(engine, training, geometry),
                stages=scenario.stages,
                states=scenario.states,
                pinned=scenario.pinned,
                blocking=scenario.blocking,
                between=scenario.between,
                steps=scenario.steps,
                repeats=scenario.repeats,
                group=group,
            )
            for result in results:
                rows.append(offload_row(job, result))
                say(offload_text(rows[-1]))
                yield rows
        _check_alike(world, "offload", None, "the offload")
