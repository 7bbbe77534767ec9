"""Jobs on moves of training state between live engines: repeated runs, planners, routes, refusals, wrong bits.

What is right comes from DeepSpeed's own gathers of whole masters and moments (``jobs_engines.whole_masters``).
"""

from __future__ import annotations

from typing import Any

import torch
from engine_models import INPUTS, Decayed, Stepped, Uneven, Varied, decay_groups, model_of
from jobs_engines import config, engine_over, group_of, refusal, train, whole_masters
from pool import Seat

from relaymeter.relayout.execute import Hooks
from relaymeter.relayout.plain_state import field_differences
from relaymeter.relayout.release import release, released, restore
from relaymeter.relayout.state_move import TrainingStateMove
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.training_fields import read_fields


class Counting(Uneven):
    """With a buffer that each rank may count for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))


class Lazy(Uneven):
    """With a parameter that takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.randn(3))


INPUTS_OF = INPUTS | {"Counting": 5}
STATES = (None, "exp_avg", "exp_avg_sq")


def built(
    seat: Seat,
    stage: int,
    ranks: tuple[int, ...],
    seed: int,
    kind: Any = Uneven,
    *,
    decay: bool = False,
    **settings: Any,
) -> Any:
    """An engine over ``ranks`` with a warm-up scheduler; ``settings`` replace entries of its config."""
    model = model_of(kind, seed) if seat.rank in ranks else None
    entries = config(len(ranks), stage) | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
    groups = {"model_parameters": decay_groups(model)} if decay and model is not None else {}
    return engine_over(ranks, model, entries | settings, **groups)


def step(engine: Any, steps: int = 1, kind: Any = Uneven) -> None:
    if engine is not None:
        train(engine, torch.full((2, INPUTS_OF[kind.__name__]), 0.5, dtype=torch.bfloat16), steps)


def loss(engine: Any) -> float:
    with torch.no_grad():
        return float(engine(torch.full((2, 5), 0.25, dtype=torch.bfloat16)))


def wholes(engine: Any) -> dict[str, torch.Tensor]:
    return {f"{state} {name}": kept for state in STATES for name, kept in whole_masters(engine, state).items()}


def differing(first: Any, second: Any) -> list[str]:
    """Whole masters and moments, gathered by DeepSpeed on ranks that hold both engines, that differ; and the fields."""
    one, other = (None if engine is None else wholes(engine) for engine in (first, second))
    if one is None or other is None:
        return []
    found = [name for name in one if not torch.equal(one[name], other[name])]
    mine, theirs = (read_fields(engine) for engine in (first, second))
    return found + [
        text for key in ("engine", "scheduler", "scaler") for text in field_differences(mine[key], theirs[key])
    ]


def repeats(seat: Seat) -> dict[str, Any]:
    """There and back three times with a step after each move, by two planners and every route over two nodes."""
    found: dict[str, Any] = {}
    topology = Topology.grid(2, 2)
    large, small = built(seat, 3, (0, 1, 2, 3), 1), built(seat, 3, (2, 3), 2)
    step(large, 2)
    plain = (("classes", "relay"), ("affine", "direct"), ("classes", "spread"))
    there = [TrainingStateMove(large, small, topology=topology, planner=p, route=r, bucket_bytes=128) for p, r in plain]
    step(small)  # the destination's own step, which the move has to overwrite
    back = None
    for number, move in enumerate(there):
        move.run(prove=True)
        found[f"there {number}"] = [move.verify().ok, differing(large, small)]
        heard = [None if engine is None else loss(engine) for engine in (large, small)]
        found["heard"] = heard[1] is None or heard[0] == heard[1]  # ZeRO-3 had gathered what was there before
        if number == 1 and large is not None:  # in between the idle engine has no memory
            freed = release(large)
            found["freed"] = [freed > 0, released(large)]
        step(small)
        if number == 1 and large is not None:
            restore(large)
        back = back or TrainingStateMove(small, large, topology=topology, route="chain")
        timing = back.run()
        found[f"back {number}"] = [back.verify().ok, differing(small, large), timing.allocated_bytes]
        step(large)
    found["steps"] = None if large is None else large.global_steps
    found["bytes"] = [move.bytes_total for move in there]
    return found


def prepared(seat: Seat) -> dict[str, Any]:
    """A move prepared while the source trains on: what is there stays, and ``run`` carries what was trained since."""
    first, second = built(seat, 3, (0, 1, 2, 3), 1), built(seat, 1, (1, 2), 2)
    step(first, 2)
    move = TrainingStateMove(first, second)
    before = None if second is None else {name: kept.clone() for name, kept in whole_masters(second, None).items()}
    allocated = move.prepare()
    found: dict[str, Any] = {"allocated": allocated, "again": move.prepare()}
    after = None if second is None else whole_masters(second, None)
    found["untouched"] = before is None or all(torch.equal(before[name], after[name]) for name in before)
    step(first)
    timing = move.run(prove=True)
    found["carried"] = [move.verify().ok, differing(first, second), timing.allocated_bytes]
    step(first)
    next_move = move.prepare()
    found["later"] = [move.verify().ok, next_move, move.run().allocated_bytes]
    third = built(seat, 2, (0, 3), 4)
    onwards = TrainingStateMove(second, third)
    found["fresh"] = onwards.prepare()
    step(third)  # as if nothing were prepared
    onwards.run()
    found["trained between"] = [onwards.verify().ok, differing(second, third)]
    if second is not None:
        second.backward(second(torch.full((2, 5), 0.5, dtype=torch.bfloat16)))
    found["refused"] = refusal(move.prepare)
    return found


def wrong_bits(seat: Seat) -> dict[str, Any]:
    """One bit of one received message flipped: what the check says, and what the next one says."""
    first, second = built(seat, 2, (0, 1), 1), built(seat, 3, (2, 3), 2)
    step(first, 2)
    flips = [1]

    def flip(number: int, peer: int, message: torch.Tensor) -> None:
        if flips and seat.rank == 3 and message.numel():
            flips.pop()
            message.view(torch.uint8)[5] ^= 16

    move = TrainingStateMove(first, second, hooks=Hooks(on_receive=flip))
    move.run(prove=True)
    report = move.verify()
    said = refusal(report.raise_for_mismatch)
    move.run(prove=True)
    again = move.verify()
    if second is not None:
        second.global_steps += 1
        second.optimizer.param_groups[0]["lr"] = 7.0
    fields = move.verify()
    return {
        "passed": [report.passed, report.total, len(report.mismatches)],
        "mismatch": report.mismatch,
        "said": said,
        "again": [again.ok, again.passed, again.total],
        "fields": fields.fields,
        "fields said": refusal(fields.raise_for_mismatch),
    }


def refusals(seat: Seat) -> dict[str, str]:
    """What does not fit, as every rank hears of it, before anything moved."""
    found = {}
    first = built(seat, 3, (0, 1), 1)
    step(first, 2)
    before = None if first is None else wholes(first)

    def tell(name: str, destination: Any, source: Any = first) -> None:
        found[name] = refusal(lambda: TrainingStateMove(source, destination))
        if destination is not None and destination is not source:
            destination.destroy()

    tell("same engine", first)
    tell("no destination", None)
    tell("other model", built(seat, 2, (1, 2), 3, Decayed))
    tell("other optimizer", built(seat, 2, (1, 2), 3, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    tell("no scheduler", built(seat, 2, (1, 2), 3, scheduler={}))
    tell("other dtype", built(seat, 0, (1, 2), 3, bf16={"enabled": False}, fp16={"enabled": True}))
    groups = built(seat, 3, (0, 1), 1, Decayed, decay=True)
    step(groups, 1, Decayed)
    tell("other groups", built(seat, 2, (1, 2), 3, Decayed), groups)
    accumulating = {"gradient_accumulation_steps": 2, "train_batch_size": 8}
    window = built(seat, 3, (0, 1), 1, **accumulating)
    step(window)
    tell("inside a window", built(seat, 2, (1, 2), 3, **accumulating), window)
    step(window)
    own = {"managed_gradient_accumulation": False, **accumulating}
    unmanaged = built(seat, 0, (0, 1), 1, **own)
    if unmanaged is not None:  # the caller says when a window ends; nothing else tells of it once gradients are cleared
        unmanaged.backward(unmanaged(torch.full((2, 5), 0.5, dtype=torch.bfloat16)))
        for param in unmanaged.module.parameters():
            param.grad = None
    tell("inside the caller's window", built(seat, 2, (1, 2), 3, **accumulating), unmanaged)
    fresh = built(seat, 2, (1, 2), 3)
    move = TrainingStateMove(window, fresh)
    found["window over"] = refusal(move.run)
    batch = torch.full((2, 5), 0.5, dtype=torch.bfloat16)
    if fresh is not None:
        fresh.backward(fresh(batch))
    found["gradients wait"] = refusal(move.run)
    summing = built(seat, 1, (0, 1), 1, data_types={"grad_accum_dtype": "fp32"})
    if summing is not None:
        summing.backward(summing(batch))
        found["optimizer"] = type(summing.optimizer).__name__
    tell("sums wait", built(seat, 1, (1, 2), 3, data_types={"grad_accum_dtype": "fp32"}), summing)
    ready = built(seat, 2, (1, 2), 3)
    move = TrainingStateMove(first, ready)
    found["too early"] = refusal(move.verify)
    if ready is not None:
        release(ready)
    found["released"] = refusal(move.run)
    if ready is not None:
        restore(ready)
    move.run()
    found["still in order"] = refusal(lambda: move.verify().raise_for_mismatch())
    uneven = built(seat, 1, (0, 1), 4, Counting)
    step(uneven, 1, Counting)
    if uneven is not None:
        uneven.module.seen += seat.rank
    move = TrainingStateMove(uneven, built(seat, 3, (1, 2), 5, Counting))
    found["own buffers"] = refusal(lambda: move.run(prove=True))
    if uneven is not None:
        uneven.module.seen.zero_()
    found["broadcast"] = refusal(lambda: move.run(prove=True))
    if seat.rank == 1:
        first.optimizer.param_groups[0]["lr"] = 0.5
    tell("ranks differ", built(seat, 2, (1, 2), 3))
    after = None if first is None else wholes(first)
    found["source"] = str(before is None or all(torch.equal(before[name], after[name]) for name in before))
    return found


def kinds(seat: Seat) -> dict[str, Any]:
    """Ties, empty and frozen parameters, buffers, and an engine that has not stepped yet."""
    found: dict[str, Any] = {}
    for name, kind, steps in (("varied", Varied, 2), ("stepped", Stepped, 1), ("unstepped", Varied, 0)):
        first = built(seat, 2, (0, 1, 2), 1, kind)
        second = built(seat, 3 if kind is Varied else 1, (0, 1), 2, kind)
        step(first, steps, kind)
        step(second, 1, kind)
        move = TrainingStateMove(first, second)
        timing = move.run(prove=True)
        report = move.verify()
        found[name] = [report.passed == report.total > 0, report.fields, move.states, timing.allocated_bytes]
        for key in STATES if steps else STATES[:1]:
            one, other = (None if engine is None else whole_masters(engine, key) for engine in (first, second))
            if one is not None and other is not None:
                found[name] += [n for n in one if not torch.equal(one[n], other[n])]
        if first is not None and second is not None:
            held = [dict(engine.module.named_parameters()) for engine in (first, second)]
            found[name] += [n for n, p in held[1].items() if tuple(getattr(p, "ds_shape", p.shape)) != held[0][n].shape]
            found[name].append(len(second.optimizer.optimizer.state))
    return found


def alone(seat: Seat) -> Any:
    """Engines over ranks 1, 2 and over ranks 2, 3: rank 0 holds neither and takes no part in the move."""
    first, second = built(seat, 3, (1, 2), 1), built(seat, 1, (2, 3), 2)
    group = group_of((1, 2, 3))
    step(first, 2)
    if seat.rank == 0:
        return None
    move = TrainingStateMove(first, second, group=group)
    move.run(prove=True)
    report = move.verify()
    few = group_of((1, 2)) if seat.rank < 3 else None
    short = refusal(lambda: TrainingStateMove(first, None, group=few)) if few is not None else "not called"
    return [report.ok, report.total, differing(first, second), short]


def leftovers(seat: Seat) -> dict[str, Any]:
    """What the destination had and the source has not: states, entries of groups, scaling flags, moments of a parameter
    that has none in the source."""
    found: dict[str, Any] = {}
    plain = {"bf16": {"enabled": False}}
    first, second = built(seat, 0, (0, 1), 1, Lazy, **plain), built(seat, 1, (2, 3), 2, Lazy, **plain)
    for engine in (first, second):
        if engine is not None:
            train(engine, torch.full((2, 5), 0.5), 2)
    if second is not None:
        base = second.optimizer.optimizer
        (flat,) = base.state
        base.state[flat]["extra"] = torch.tensor(1.0)
        base.state[flat]["exp_avg"] += 1.0
        base.param_groups[0]["extra"] = 1
        second.optimizer.external_loss_scale = 5.0
    move = TrainingStateMove(first, second)
    move.run(prove=True)
    report = move.verify()
    found["ok"] = [report.ok, list(report.fields), report.passed == report.total]
    if second is not None:
        moments = whole_masters(second, "exp_avg")  # as DeepSpeed links them
        found["unused"] = moments["unused"].tolist()
        found["left"] = ["extra" in base.state[flat], "extra" in base.param_groups[0]]
        found["used"] = bool(moments["a.weight"].abs().sum() > 0) and bool((moments["a.weight"] < 0.9).all())
    third, fourth = built(seat, 1, (0, 1), 1, bf16={"enabled": False}, fp16={"enabled": True}), None
    fourth = built(seat, 2, (2, 3), 2, bf16={"enabled": False}, fp16={"enabled": True})
    if fourth is not None:
        fourth.optimizer.external_loss_scale, fourth.optimizer.custom_loss_scaler = 5.0, True
    move = TrainingStateMove(third, fourth)
    move.run()
    found["flags"] = list(move.verify().fields)
    if fourth is not None:
        found["scale"] = [fourth.optimizer.external_loss_scale, fourth.optimizer.custom_loss_scaler]
    return found


def scheduled(seat: Seat) -> dict[str, Any]:
    """Two groups in another order on the other side, and a warm-up of another length: rates after two more steps."""
    found: dict[str, Any] = {}
    kinds = {"lambda": {"scheduler": {}}, "warm-up": {}}
    for name, settings in kinds.items():
        engines = []
        for number, ranks in enumerate(((0, 1), (2, 3))):
            model = model_of(Decayed, number) if seat.rank in ranks else None
            entries = config(2, 1) | {
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9 + 41 * number}}
            }
            more = {}
            if model is not None:
                groups = [group | {"lr": rate} for group, rate in zip(decay_groups(model), (0.1, 0.01), strict=True)]
                more["model_parameters"] = groups[:: -1 if number else 1]
                if name == "lambda":
                    more["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, halved)
            engines.append(engine_over(ranks, model, entries | settings, **more))
        step(engines[0], 1, Decayed)
        move = TrainingStateMove(*engines)
        move.run(prove=True)
        found[name] = list(move.verify().fields)
        for engine in engines:
            step(engine, 2, Decayed)
            if engine is not None:
                by_decay = {group["weight_decay"]: group["lr"] for group in engine.optimizer.param_groups}
                found[f"{name} rates"] = [by_decay[0.1], by_decay[0.0]]
    return found


def halved(step_number: int) -> float:
    return float(0.5**step_number)
