"""One change of the matrix on live engines: the moves along its path, and everything that proves them.

    for leg in run_change(context, change): ...             # every rank of the world, with equal arguments

Every engine is built from another seed, so that only a complete move can make it equal to the one before. A leg is
proved by the move's own digests and fields, by an oracle that shares no code with the planner, and the last one by
training on: bit-equal where the last engine is laid out as the first, else within the limit of the dtype.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.harness.paths.universal import UniversalRefused, through_universal
from relaymeter.harness.state_config import ChangeConfig, EngineConfig
from relaymeter.harness.state_context import StateContext
from relaymeter.harness.state_engines import EngineGroups, EngineMaker, train
from relaymeter.harness.state_oracle import (
    GatheredState,
    compare_states,
    gather_state,
    plain_fields,
    share_state,
    state_difference,
)
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.state_move import StateMoveTiming
from relaymeter.units import counted

__all__ = ["CONTINUATION_LIMITS", "LegResult", "run_change"]

#: How far masters of two layouts may be apart after 20 steps, over the largest master. Only rounding differs, so it is
#: the dtype's: of twenty changes of size, stage, degree and optimizer the furthest was at 4e-7 in float32, 1.6e-3 in
#: bfloat16 and 3e-4 in float16, while one step too many or too few moves weights by 1e-2.
CONTINUATION_LIMITS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 2e-3}
#: The same where a rounding can send a token to another expert (0.11 seen): what Adam can move a weight by in 20 steps.
ROUTED_LIMIT = 0.2
#: Between the seeds of a change's engines.
_SEED_STEP = 7919


@dataclass(frozen=True, kw_only=True)
class LegResult:
    """One move of a change; equal on every rank of the world."""

    source: str
    """Label of the engine that the state comes from."""
    destination: str
    planner: str
    plan_s: float
    """Slowest rank."""
    timing: StateMoveTiming
    """Maxima over the ranks."""
    bytes_total: int
    bytes_in_rank: int
    bytes_in_node: int
    bytes_cross_node: int
    messages: int
    fallback_tensors: int
    peak_bytes: int | None
    peak_predicted_bytes: int
    """Of the rank with the largest."""
    digest_passed: int
    digest_total: int
    mismatch: str | None
    """State, parameter and elements of the first wrong bits."""
    fields: tuple[str, ...]
    """Fields that differ after the move."""
    oracle_passed: int
    oracle_total: int
    oracle_mismatch: str | None
    continuation: str = ""
    """How training went on, on the last leg of a change; empty where it was not tried."""
    continuation_ok: bool = True
    checkpoint: str = "not asked"
    """The same move through a universal checkpoint: ``bit-equal``, ``cannot: ...``, ``differs: ...``."""

    @property
    def ok(self) -> bool:
        """Whether everything was checked and nothing differs."""
        checked = 0 < self.digest_total == self.digest_passed and 0 < self.oracle_total == self.oracle_passed
        return checked and not self.fields and self.continuation_ok and not self.checkpoint.startswith("differs")


@dataclass(frozen=True)
class _Live:
    """An engine of the change on this rank: None where this rank is outside it."""

    config: EngineConfig
    group: dist.ProcessGroup | None
    engine: Any | None


def run_change(context: StateContext, change: ChangeConfig) -> Iterator[LegResult]:
    """Make the change and give the result of each of its moves. Every rank of the world calls this alike.

    The engines are destroyed at the end. Raises InputError or PlanDisagreement on every rank where the change is
    refused, RankLost and MoveTimeout as the move does.
    """
    training = change.training
    geometry = None if context.model is None else context.model.geometry()
    groups = EngineGroups() if context.groups is None else context.groups
    maker = EngineMaker(training, geometry, groups)
    lives: list[_Live] = []
    try:
        for number, config in enumerate(change.path):
            engine = maker.build(config, training.seed + _SEED_STEP * number)
            lives.append(_Live(config, maker.groups.group(config.ranks), engine))
            if number == 0:
                context.say(f"  {config.label} built, training {counted(training.steps, 'step')}")
                train(engine, training, training.steps, geometry)
                held = _gathered(change, lives[0])
                continue
            leg, held = _move(context, change, lives[-2], lives[-1], held, first=number == 1)
            if number == len(change.path) - 1:
                leg = _train_on(context, change, maker, lives, leg)
            yield leg
    finally:
        for live in lives:
            if live.engine is not None:
                live.engine.destroy()
        lives.clear()
    if context.groups is None:
        groups.close()
    gc.collect()  # engines refer to themselves


def _gathered(change: ChangeConfig, live: _Live) -> GatheredState | None:
    return gather_state(live.engine, live.config, change.training, live.group)


def _move(
    context: StateContext,
    change: ChangeConfig,
    source: _Live,
    destination: _Live,
    held: GatheredState | None,
    first: bool,
) -> tuple[LegResult, GatheredState | None]:
    """Move, check the digests and fields, and ask the oracle. ``held``: the source's state as gathered before. The
    second value is the destination's."""
    move = context.plan(source.engine, destination.engine, faulty=first)
    timing = move.run(prove=True)
    if first:
        context.flip(destination.engine)
    report = move.verify()
    found = _gathered(change, destination)
    oracle = compare_states(held, found)
    mismatch = oracle.mismatch or _changed(held, _gathered(change, source))
    fields = dict.fromkeys([*report.fields, *_differing_fields(source.engine, destination.engine)])
    facts = Assembly().tell_all([dataclasses.asdict(timing), move.plan_s, move.peak_predicted_bytes])
    largest = _maxima([StateMoveTiming(**row[0]) for row in facts])
    result = LegResult(
        source=source.config.label,
        destination=destination.config.label,
        planner=context.planner,
        plan_s=max(row[1] for row in facts),
        timing=largest,
        bytes_total=move.bytes_total,
        bytes_in_rank=move.bytes_in_rank,
        bytes_in_node=move.bytes_in_node,
        bytes_cross_node=move.bytes_cross_node,
        messages=move.messages,
        fallback_tensors=len(move.fallbacks),
        peak_bytes=largest.peak_bytes,
        peak_predicted_bytes=max(row[2] for row in facts),
        digest_passed=report.passed,
        digest_total=report.total,
        mismatch=report.mismatch,
        fields=tuple(fields),
        oracle_passed=oracle.passed - (mismatch is not None and oracle.ok),
        oracle_total=oracle.total,
        oracle_mismatch=mismatch,
    )
    return result, found


def _maxima(every: Sequence[StateMoveTiming]) -> StateMoveTiming:
    """Of each field the largest value of all ranks; None where one rank has none."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(StateMoveTiming):
        column = [getattr(timing, field.name) for timing in every]
        values[field.name] = None if None in column else max(column)
    return StateMoveTiming(**values)


def _changed(before: GatheredState | None, after: GatheredState | None) -> str | None:
    """The first tensor of the source that the move itself changed. Collective over the world."""
    text = None
    if before is not None and after is not None:
        text = next(before.differences(after), None)
    return next((f"the source itself changed: {told}" for told in Assembly().tell_all(text) if told), None)


def _differing_fields(one: Any | None, other: Any | None) -> list[str]:
    """Counters, learning rates, steps, scheduler and loss scale that differ between two engines. Collective."""
    told = Assembly().tell_all([None if engine is None else plain_fields(engine) for engine in (one, other)])
    first = next(row[0] for row in told if row[0] is not None)
    return [
        f"{key}: {first[key]} in the source, {row[1][key]} in the destination (rank {rank})"
        for rank, row in enumerate(told)
        if row[1] is not None
        for key in first
        if first[key] != row[1][key]
    ]


def _train_on(
    context: StateContext, change: ChangeConfig, maker: EngineMaker, lives: list[_Live], leg: LegResult
) -> LegResult:
    """``leg``, the change's last, with what came of training on, and of the same move through a checkpoint."""
    first, last = lives[0], lives[-1]
    if change.checkpoint:
        context.say("  the last move once more, through a universal checkpoint")
    again, checkpoint = _through_checkpoint(change, maker, lives) if change.checkpoint else (None, leg.checkpoint)
    note = ""
    if again is not None:
        lives.append(again)
        note = _part_steps(again.engine)
        wrong = _unlike(_after(change, last), _after(change, again))
        lost = _differing_fields(last.engine, again.engine)
        checkpoint = f"differs: {wrong[0]}" if wrong else f"bit-equal{note}"
        if lost and not wrong:  # the move's own fields were held against the source's before
            checkpoint = f"cannot: tensors are bit-equal, but DeepSpeed restores other fields: {lost[0]}"
    steps = change.continuation
    if not steps:
        return dataclasses.replace(leg, checkpoint=checkpoint)
    context.say(f"  training on, {counted(steps, 'step')}")
    ends = [
        _after(change, live, train(live.engine, change.training, steps, maker.geometry))
        for live in (first, last, again)
        if live is not None
    ]
    if change.returns:
        wrong = _unlike(ends[0], ends[1], buffers=True) or _differing_fields(first.engine, last.engine)
        text = f"differs within {steps} steps: {wrong[0]}" if wrong else f"bit-equal, {steps} steps"
    else:
        wrong, text = _bounded(change, ends[0], ends[1])
    if checkpoint.startswith("bit-equal"):
        later = _unlike(ends[1], ends[2])
        checkpoint = f"differs: within {steps} steps {later[0]}" if later else checkpoint
    return dataclasses.replace(leg, continuation=text, continuation_ok=not wrong, checkpoint=checkpoint)


def _part_steps(engine: Any | None) -> str:
    """Give each state of an engine that was loaded from a universal checkpoint a step of its own, and say where some
    had one together: then DeepSpeed 0.19.8 under ZeRO-3 counts a step for each of its groups. Collective."""
    states = [] if engine is None else list(getattr(engine.optimizer, "optimizer", engine.optimizer).state.values())
    steps = [state["step"] for state in states if isinstance(state.get("step"), torch.Tensor)]
    shared = len({step.data_ptr() for step in steps}) < len(steps)
    for state in states if shared else ():
        state["step"] = state["step"].clone()
    return " (steps that groups shared were parted)" if any(Assembly().tell_all(shared)) else ""


@dataclass(frozen=True)
class _End:
    """Losses on the way and the state at the end; nothing on a rank without the engine."""

    losses: list[float]
    state: GatheredState | None


def _after(change: ChangeConfig, live: _Live, losses: Sequence[float] = ()) -> _End:
    return _End(list(losses), _gathered(change, live))


def _unlike(one: _End, other: _End, *, buffers: bool = False) -> list[str]:
    """Where two engines of one layout differ, in losses or in bits. Collective over the world."""
    found: list[str] = []
    if one.state is not None and other.state is not None:
        pairs = zip(one.losses, other.losses, strict=True)
        found += [f"loss of step {at}: {a!r} and {b!r}" for at, (a, b) in enumerate(pairs, 1) if a != b][:1]
        found += list(one.state.differences(other.state, buffers=buffers))[:1]
    return [text for told in Assembly().tell_all(found) for text in told]


def _bounded(change: ChangeConfig, one: _End, other: _End) -> tuple[list[str], str]:
    """What is beyond the limit, and how far the masters of two layouts are apart. Collective over the world."""
    apart, where = state_difference(share_state(one.state), share_state(other.state))
    limit, why = _limit(change)
    good = apart <= limit
    text = f"{apart:.1e} of the largest master, limit {limit:g} ({why}), {change.continuation} steps"
    return ([] if good else [where]), f"{'within' if good else f'{where} is beyond'}: {text}"


def _limit(change: ChangeConfig) -> tuple[float, str]:
    """How far masters of two layouts may come apart, and why they do."""
    training = change.training
    if training.model == "moe" and training.dtype != "float32":
        return ROUTED_LIMIT, "other order of summation, which sends some tokens to other experts"
    return CONTINUATION_LIMITS[training.dtype], "other order of summation"


def _through_checkpoint(change: ChangeConfig, maker: EngineMaker, lives: Sequence[_Live]) -> tuple[_Live | None, str]:
    """The last engine once more, from a checkpoint of the one before it, and what became of that. What a universal
    checkpoint leaves out (frozen weights, buffers) comes with the seed of the first engine."""
    source, config = lives[-2], lives[-1].config

    def build(extra: Mapping[str, Any]) -> Any | None:
        return maker.build(config, change.training.seed, settings=extra)

    with tempfile.TemporaryDirectory(prefix="universal-") as own:
        folder = next(path for path in Assembly().tell_all(own))
        try:
            engine = through_universal(source.engine, build, folder)
        except UniversalRefused as error:
            return None, f"cannot: {error}"
        finally:
            Assembly().tell_all(None)  # nobody takes the folder away before all have read it
    return _Live(config, maker.groups.group(config.ranks), engine), "bit-equal"
