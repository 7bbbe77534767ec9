"""Jobs that move states from one live engine to another and compare what DeepSpeed gathers on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine_models
import jobs_engines as on_engines
import torch
import torch.distributed as dist
from pool import Seat

from relaymeter.relayout import engines
from relaymeter.relayout.digest import compare, digest_layout
from relaymeter.relayout.execute import Mover
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.topology import Topology

WORLD = on_engines.WORLD
Tensors = dict[str, torch.Tensor]
Gather = Callable[[Any, str], Tensors]


def gather(engine: Any, state: str) -> Tensors:
    """A whole state of a data-parallel engine, gathered by DeepSpeed."""
    if state == "weights":
        return on_engines.whole_weights(engine)
    return on_engines.whole_masters(engine, None if state == "master" else state)


def move(
    seat: Seat, source: Any | None, target: Any | None, state: str, key: str, whole: Gather = gather
) -> dict[str, Any]:
    """Move one state from the ranks of ``source`` to those of ``target`` (None: a rank without it)."""

    def share(engine: Any | None, side: str) -> Any:
        store_key = f"{key}/{state}/{side}"
        return engines.share_layout(engine, WORLD, seat.store, store_key, state=state, time_limit_s=60)

    layouts = share(source, "source"), share(target, "target")
    before = None if source is None else whole(source, state)
    first = layouts[0].placements[next(iter(layouts[0].specs))].ranks[0]
    sent = [before]
    dist.broadcast_object_list(sent, src=first)
    stored = [{} if engine is None else engines.engine_storage(engine, state) for engine in (source, target)]
    topology = Topology.grid(2, 2)
    plan = plan_move(*layouts, topology)
    schedule = build_schedule(plan, topology, _direct(plan), bucket_bytes=1 << 16)
    mover = Mover(schedule, seat.rank, stored[0], stored[1], "send-recv", time_limit_s=60)
    mover.poison()
    mover.run()
    report = compare(
        digest_layout(layouts[0], seat.rank, stored[0]), digest_layout(layouts[1], seat.rank, stored[1], replicas=True)
    )
    found: dict[str, Any] = {
        "digests": [report.passed, report.total, report.ok],
        "tensors": len(layouts[1].specs),
        "segments": _segments(plan),
        "real": [_elements(layout) for layout in layouts],
        "different": None,
    }
    if target is not None:
        if state == "weights":
            engines.refresh_weights(target)
        after = whole(target, state)
        wrong = sorted(set(after) ^ set(sent[0]))
        for name in set(after) & set(sent[0]):
            one, other = after[name], sent[0][name]
            same = one.shape == other.shape and one.dtype == other.dtype
            if not same or not torch.equal(on_engines.bits(one), on_engines.bits(other)):
                wrong.append(name)
        found["different"] = wrong
        found["shapes"] = {name: list(value.shape) for name, value in after.items()}
    return found


def _direct(plan: MovePlan) -> Any:
    import numpy as np

    return np.zeros(int(plan.group_start[-1]), dtype=np.int8)


def _elements(layout: Layout) -> list[int]:
    """Elements of all tensors by rank."""
    held = on_engines.held_counts(layout).values()
    return [sum(counts[rank] for counts in held) for rank in range(WORLD)]


def _segments(plan: MovePlan) -> dict[str, int]:
    """Segments of each tensor."""
    counts = dict.fromkeys((spec.name for spec in plan.tensors), 0)
    for found in plan.classes:
        for tensor in found.tensors:
            counts[plan.tensors[int(tensor)].name] = len(found.src_rank)
    return counts


def pair(
    seat: Seat, stages: list[int], ranks: list[list[int]], kind: str, seed: int, groups: str = "", **zero: Any
) -> tuple[Any | None, Any | None]:
    """A trained engine over ``ranks[0]`` and one of other weights over ``ranks[1]``."""
    made = []
    for side in (0, 1):
        members = tuple(ranks[side])
        model = engine_models.model_of(getattr(engine_models, kind), seed + side) if seat.rank in members else None
        settings = on_engines.config(len(members), stages[side], **(zero if side == 0 else {}))
        more = {"model_parameters": getattr(engine_models, groups)(model)} if groups and model is not None else {}
        made.append(on_engines.engine_over(members, model, settings, **more))
        if made[-1] is not None:
            batch = torch.full((2, engine_models.INPUTS[kind]), seat.rank + 1.0, dtype=torch.bfloat16)
            on_engines.train(made[-1], batch)
    return made[0], made[1]


def between(
    seat: Seat,
    stages: list[int],
    ranks: list[list[int]],
    kind: str,
    states: list[str],
    key: str,
    groups: str = "",
    **zero: Any,
) -> dict[str, Any]:
    """States moved from an engine of one stage to one of another; and the target's loss beside the source's."""
    source, target = pair(seat, stages, ranks, kind, 11, groups, **zero)
    found = {state: move(seat, source, target, state, key) for state in states}
    batch = torch.ones((2, engine_models.INPUTS[kind]), dtype=torch.bfloat16)
    for side, engine in (("source", source), ("target", target)):
        if engine is not None:
            with torch.no_grad():
                found[f"{side} loss"] = float(engine(batch))
            found[f"{side} groups"] = {
                "sub-groups": len(getattr(engine.optimizer, "fp16_groups", ())),
                "weight decay": [group["weight_decay"] for group in engine.optimizer.param_groups],
            }
            found[f"{side} tied"] = engine_models.ties(engine.module)
            found[f"{side} parameters"] = {
                name: list(getattr(param, "ds_shape", param.shape)) for name, param in engine.module.named_parameters()
            }
            engine.destroy()
    return found


def across_degrees(seat: Seat, stages: list[int], tensor_parallel: list[bool], key: str) -> dict[str, Any]:
    """A trained ``Block`` on ranks 0 and 1 moved to ranks 2 and 3, where an engine is cut by AutoTP or is not."""
    made = []
    for side, members in enumerate(((0, 1), (2, 3))):
        degree = 2 if tensor_parallel[side] else 1
        settings = on_engines.config(2 // degree, stages[side], bf16=False)
        settings |= engine_models.autotp(2) if degree == 2 else {}
        model = engine_models.model_of(engine_models.Block, 5 + side) if seat.rank in members else None
        made.append(on_engines.engine_over(members, model, settings))
        if made[-1] is not None:
            on_engines.train(made[-1], torch.ones(2, 8))
    states = ("weights", "master", "exp_avg", "exp_avg_sq")
    found = {state: move(seat, *made, state, key, on_engines.whole_block) for state in states}
    for engine in made:
        if engine is not None:
            with torch.no_grad():
                found["loss"] = float(engine(torch.ones(2, 8)))
            engine.destroy()
    return found
