"""Rounds: two live engines hand a training state back and forth, a training step after each move.

``run_rounds(job, context_of, world)`` is called by every rank of the world; rank 0 gets the rows so far after every
move. Each direction is planned once per planner, for all rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from relaymeter.errors import InputError
from relaymeter.harness.jobs import StateJob
from relaymeter.harness.moves import planners_of
from relaymeter.harness.state_config import EngineConfig, RoundsConfig
from relaymeter.harness.state_context import StateContext
from relaymeter.harness.state_emit import leg_text
from relaymeter.harness.state_engines import EngineMaker, train
from relaymeter.harness.state_rows import stamped
from relaymeter.harness.verdict import state_verdict
from relaymeter.harness.world import World
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.digest import DIGEST_VERSION
from relaymeter.relayout.engines import WEIGHTS, engine_storage
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.state_move import StateMoveReport, StateMoveTiming, TrainingStateMove
from relaymeter.state_records import StateRecord

__all__ = ["run_rounds"]

#: How far the second engine's seed is from the first's: its own weights are others in every element.
_OTHER_SEED = 1000


@dataclass(frozen=True, eq=False)
class _End:
    """One of the two engines: None on ranks without it."""

    name: str
    config: EngineConfig
    engine: Any | None
    build_s: float


def run_rounds(job: StateJob, context_of: Callable[[str], StateContext], world: World) -> Iterator[list[StateRecord]]:
    """Do all rounds by every planner. ``context_of(planner)``: this rank's context. Every rank exhausts it.

    Raises InputError where an engine cannot be built or moved, RankLost and MoveTimeout out of what failed.
    """
    scenario = job.scenario
    rounds, training = scenario.rounds, scenario.training
    if rounds is None:
        return
    planners = planners_of(job.planner)
    context = context_of(planners[0])
    geometry = None if scenario.model is None else scenario.model.geometry()
    with _together(job, context, "building the engines"):
        maker = EngineMaker(training, geometry, time_limit_s=job.time_limit_s)
        first = _build(context, maker, rounds.first_name, rounds.first, training.seed)
        train(first.engine, training, training.steps, geometry)
        second = _build(context, maker, rounds.second_name, rounds.second, training.seed + _OTHER_SEED)
    rows: list[StateRecord] = []
    ways = ((first, second), (second, first))
    for planner in planners:
        context = context_of(planner)
        moves: dict[str, TrainingStateMove] = {}
        buffers: dict[str, int] = {}
        for number in range(1, rounds.rounds + 1):
            for source, destination in ways:
                with _together(job, context, f"round {number} of {planner}"):
                    if source.name not in moves:  # the second engine has an optimizer state once it was moved there
                        moves[source.name] = context.plan(source.engine, destination.engine)
                    move = moves[source.name]
                    held = _held(move, source.engine, destination.engine)
                    timing = move.run(prove=True)
                    if not rows:
                        context.flip(destination.engine)
                    report = move.verify()
                    # the plan foresaw what its first run allocates; later ones find it there
                    planned = buffers.setdefault(source.name, move.peak_predicted_bytes - timing.allocated_bytes)
                    predicted = planned + timing.allocated_bytes
                    row = _row(
                        job,
                        world,
                        (source, destination),
                        planner,
                        number,
                        _Shown.of(move, timing, report, held, predicted),
                    )
                    train(destination.engine, training, rounds.steps, geometry)
                context.say(leg_text(row))
                rows.append(row)
                yield rows


@contextmanager
def _together(job: StateJob, context: StateContext, what: str) -> Iterator[None]:
    with guarded(what, rank=context.rank, time_limit_s=job.time_limit_s, heartbeat=context.heartbeat, consequence=""):
        yield


def _build(context: StateContext, maker: EngineMaker, name: str, config: EngineConfig, seed: int) -> _End:
    begin = time.perf_counter()
    engine = maker.build(config, seed)
    build_s = max(Assembly().tell_all(time.perf_counter() - begin))
    context.say(f"{name}: {config.label} built in {build_s:.1f} s")
    return _End(name, config, engine, build_s)


@dataclass(frozen=True)
class _Shown:
    """What a move showed, over all ranks."""

    move: TrainingStateMove
    timing: dict[str, Any]
    plan_s: float
    report: StateMoveReport
    memory: list[dict[str, Any]]
    """By rank, with the names of the record's fields."""

    @classmethod
    def of(
        cls, move: TrainingStateMove, timing: StateMoveTiming, report: StateMoveReport, held: int, predicted: int
    ) -> _Shown:
        """Gather what each rank measured; ``held``: bytes that this rank held before, ``predicted``: most that it was
        to take beside them. Collective."""
        names = ("prepare_s", "move_s", "fields_s", "refresh_s", "total_s")
        memory = {
            "held_bytes": held,
            "held_after_bytes": held + timing.allocated_bytes,
            "peak_bytes": timing.peak_bytes,
            "peak_predicted_bytes": predicted,
        }
        told = Assembly().tell_all([[getattr(timing, name) for name in names], move.plan_s, memory])
        slowest = {name: max(rank[0][number] for rank in told) for number, name in enumerate(names)}
        return cls(move, slowest, max(rank[1] for rank in told), report, [rank[2] for rank in told])


def _held(move: TrainingStateMove, *engines: Any | None) -> int:
    """Bytes of weights, masters and moments that this rank holds in both engines, each storage once."""
    storages: dict[int, int] = {}
    for engine in engines:
        for state in (WEIGHTS, *move.states) if engine is not None else ():
            with suppress(InputError):  # a state that the engine does not have yet
                for part in engine_storage(engine, state).values():
                    storage = part.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _row(job: StateJob, world: World, ends: tuple[_End, _End], planner: str, number: int, shown: _Shown) -> StateRecord:
    training, move, report = job.scenario.training, shown.move, shown.report
    source, destination = ends
    rounds = job.scenario.rounds
    memory = max((shown.memory[rank] for rank in _fewer(rounds)), key=lambda one: one["held_after_bytes"] or 0)
    verdict = state_verdict(
        digests=(report.passed, report.total), oracle=(0, 0), fields=report.fields, continuation_ok=True,
        checkpoint="not asked",
    )  # fmt: skip
    return StateRecord(
        **stamped(job.stamp, job.scenario.name),
        row=None,
        change=f"{source.name} -> {destination.name}",
        leg=number,
        source=source.config.label,
        destination=destination.config.label,
        planner=planner,
        fallback_tensors=len(move.fallbacks),
        ranks=world.world_size,
        nodes=world.topology.nodes,
        model=training.model,
        dtype=training.dtype,
        optimizer=training.optimizer,
        build_s=destination.build_s,
        plan_s=shown.plan_s,
        **shown.timing,
        bytes_total=move.bytes_total,
        bytes_in_rank=move.bytes_in_rank,
        bytes_in_node=move.bytes_in_node,
        bytes_cross_node=move.bytes_cross_node,
        messages=move.messages,
        **memory,
        digest_version=DIGEST_VERSION,
        digest_passed=report.passed,
        digest_total=report.total,
        mismatch=report.mismatch,
        fields=report.fields,
        oracle_passed=0,
        oracle_total=0,
        oracle_mismatch=None,
        continuation="",
        continuation_ok=True,
        checkpoint="not asked",
        verdict=verdict,
        ok=verdict == "ok",
    )


def _fewer(rounds: RoundsConfig | None) -> Sequence[int]:
    """Ranks of the engine that has fewer, whose share of the state is the larger."""
    if rounds is None:
        return ()
    return min(rounds.second.ranks, rounds.first.ranks, key=len)
