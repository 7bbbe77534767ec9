"""Jobs on engines over different ranks, side by side and one after another."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import jobs_subgroup
import torch
from engine_models import Block, Decayed, autotp, model_of
from jobs_checkpoint import different, held, quiet
from jobs_engines import config, engine_over, group_of, refusal
from pool import Seat

from relaymeter.errors import RelaymeterError
from relaymeter.relayout import subgroup
from relaymeter.relayout.state_move import TrainingStateMove

#: Stage, ranks and tensor-parallel degree of engines that share a world of four.
TOGETHER: tuple[tuple[int, tuple[int, ...], int], ...] = (
    (3, (0, 1, 2, 3), 1),
    (2, (1, 2), 1),
    (1, (0, 3), 1),
    (1, (0, 1, 2, 3), 2),
    (0, (2, 3), 1),
)
STEPS = 3


def build(seat: Seat, number: int) -> Any:
    stage, ranks, degree = TOGETHER[number]
    kind = Decayed if degree == 1 else Block
    entries = config(len(ranks) // degree, stage) | {"gradient_clipping": 1.0}
    entries |= autotp(degree) if degree > 1 else {}
    return engine_over(ranks, model_of(kind, number) if seat.rank in ranks else None, entries)


def step(seat: Seat, engine: Any, number: int, at: int) -> float:
    """One training step on the batch of this engine, rank and step; the loss."""
    _, ranks, degree = TOGETHER[number]
    draw = torch.Generator().manual_seed(1000 * number + 10 * at + ranks.index(seat.rank) // degree)
    batch = torch.randn(2, 8, generator=draw).bfloat16()

    def one() -> float:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return float(quiet(one))


def in_turns(seat: Seat) -> dict[str, Any]:
    """Each engine trains alone in the world; then all of them live together and take turns."""
    alone: dict[int, Any] = {}
    for number in range(len(TOGETHER)):
        engine = build(seat, number)
        if engine is not None:
            losses = [step(seat, engine, number, at) for at in range(STEPS)]
            alone[number] = losses, held(engine, Decayed if TOGETHER[number][2] == 1 else Block, ("exp_avg",))
            engine.destroy()
    engines = [build(seat, number) for number in range(len(TOGETHER))]
    losses_of: dict[int, list[float]] = {number: [] for number in alone}
    for at in range(STEPS):
        for number, engine in enumerate(engines):
            if engine is not None:
                losses_of[number].append(step(seat, engine, number, at))
    found = {}
    for number, (losses, kept) in alone.items():
        kind = Decayed if TOGETHER[number][2] == 1 else Block
        now = held(engines[number], kind, ("exp_avg",))
        found[str(number)] = {
            "losses": losses_of[number] == losses and len(set(losses)) == STEPS,
            "different": different(kept, now),
            "compared": len(now),
        }
    return found


def one_after_another(seat: Seat) -> dict[str, Any]:
    """Engines of every stage, each over other ranks than the one before, against torch; all of them stay alive."""
    found: dict[str, Any] = {}
    made: list[Any] = []
    for stage, ranks in (
        (3, (0, 1)),
        (1, (1, 2)),
        (2, (0, 3)),
        (0, (2, 3)),
        (3, (0, 1, 2, 3)),
        (2, (3,)),
        (1, (0, 1, 2)),
    ):
        group = group_of(ranks)
        if group is None:
            continue
        subgroup.install()
        model, reference = jobs_subgroup.twins(10 + stage)
        settings = jobs_subgroup.config(len(ranks), stage=stage) | {"gradient_clipping": 1e9}
        engine = quiet(lambda g=group, m=model, s=settings: subgroup.initialize_over(g, m, s))
        made.append((f"{stage} {list(ranks)}", engine, reference, list(ranks)))
    for again in ("first", "again"):
        for name, engine, reference, members in made:
            equal, largest = quiet(
                lambda e=engine, r=reference, m=members: jobs_subgroup.train_against_torch(e, r, m, seat.rank)
            )
            found[f"{again} {name}"] = largest if len(members) > 2 else equal
    return found


def waiting(seat: Seat, folder: str) -> dict[str, Any]:
    """Engines over ranks 1 and 2 are built, train, save and load while ranks 0 and 3 wait in the store."""
    group = group_of((1, 2))
    key = f"waiting {folder}"
    if group is None:
        seat.store.wait([f"{key} 1", f"{key} 2"], timedelta(seconds=80))
        return {}
    found = {}
    for stage in range(4):
        engines = [engine_over((1, 2), model_of(Decayed, seed), config(2, stage)) for seed in (1, 2)]
        for _ in range(2):
            quiet(lambda e=engines[0]: (e.backward(e(torch.ones(2, 8).bfloat16())), e.step()))
        path = str(Path(folder, str(stage)))
        quiet(lambda e=engines[0], p=path: e.save_checkpoint(p))
        quiet(lambda e=engines[1], p=path: e.load_checkpoint(p))
        found[str(stage)] = different(*(held(engine, Decayed, ()) for engine in engines))
    seat.store.set(f"{key} {seat.rank}", "done")
    return found


def moves_in_one_group(seat: Seat) -> dict[str, Any]:
    """Groups [0, 3] and [1, 2]. In one a training state moves, in the other an engine trains. Then wrong uses."""
    groups = {ranks: group_of(ranks) for ranks in ((0, 3), (1, 2), (0,))}
    broken = subgroup.make_group([1, 2], time_limit_s=60)
    first = seat.rank in (0, 3)
    source = engine_over((0, 3), model_of(Decayed, 1) if first else None, config(2, 3))
    target = engine_over((0,), model_of(Decayed, 2) if seat.rank == 0 else None, config(1, 1))
    other = engine_over((1, 2), None if first else model_of(Decayed, 3), config(2, 2))
    batch = torch.ones(2, 8).bfloat16() * (seat.rank + 1)
    begin, found = time.monotonic(), dict[str, Any]()
    if first:
        quiet(lambda: (source.backward(source(batch)), source.step()))
        move = TrainingStateMove(source, target, group=groups[0, 3], time_limit_s=30)
        move.run(prove=True)
        report = move.verify()
        found["arrived"] = report.ok and report.total > 0
        whole = held(source, Decayed, ("exp_avg",))
        if target is not None:
            found["different"] = different(whole, held(target, Decayed, ("exp_avg",)))
        seat.store.set(f"moved {seat.rank}", "yes")
    else:
        quiet(lambda: (other.backward(other(batch)), other.step()))
        found["trained"] = other.global_steps
        seat.store.wait(["moved 0", "moved 3"], timedelta(seconds=60))
    found["seconds"] = time.monotonic() - begin
    strange = groups[1, 2] if first else groups[0, 3]
    found["not a member"] = refusal(lambda: subgroup.initialize_over(strange, model_of(Decayed, 1), config(2, 3)))
    if seat.rank == 1:  # rank 2, the other member, never comes
        begin = time.monotonic()
        try:
            TrainingStateMove(other, None, group=broken, time_limit_s=3)
            found["alone"] = "no error"
        except RelaymeterError as error:
            found["alone"] = type(error).__name__
        found["alone_s"] = time.monotonic() - begin
    return found


def group_of_one(seat: Seat) -> dict[str, Any]:
    """World 2: an engine over rank 0 trains and saves nothing of the other; then both ranks meet in a barrier."""
    import torch.distributed as dist

    group = group_of((0,))
    found: dict[str, Any] = {}
    if group is not None:
        engine = engine_over((0,), model_of(Decayed, 1), config(1, 3))
        quiet(lambda: (engine.backward(engine(torch.ones(2, 8).bfloat16())), engine.step()))
        found["steps"] = engine.global_steps
    dist.barrier()
    return found


def evaluation(seat: Seat) -> dict[str, Any]:
    """A ZeRO-3 engine over ranks 1 and 2 whose model runs its layers in another order when it evaluates."""
    group = group_of((1, 2))
    if group is None:
        return {}

    class Switching(jobs_subgroup.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.order = "abc" if self.training else "acb"
            return super().forward(x)

    torch.manual_seed(5)
    model, reference = Switching(), jobs_subgroup.Stack()
    reference.load_state_dict(model.state_dict())
    subgroup.install()
    engine = quiet(lambda: subgroup.initialize_over(group, model, jobs_subgroup.config(2)))
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        equal, _ = quiet(lambda: jobs_subgroup.train_against_torch(engine, reference, [1, 2], seat.rank))
        found.setdefault("equal", []).append(equal)
        engine.eval()
        batch = torch.full((2, jobs_subgroup.WIDTH), float(seat.rank))
        loss = quiet(lambda b=batch: float(engine(b).detach()))
        reference.order = "acb"
        found["losses"].append(loss == float(reference(batch).detach()))
        reference.order = "abc"
        engine.train()
    return found


def linear_of_its_own(seat: Seat) -> dict[str, bool]:
    """Where torch's own linear is in place: ZeRO-3 replaces it, other engines compute with it."""
    plain = torch._C._nn.linear
    seen: dict[str, bool] = {}

    def note(name: str) -> Any:
        def look(*_: Any) -> None:
            seen[name] = torch.nn.functional.linear is plain

        return look

    engines = {}
    for number in (0, 3):
        engines[number] = build(seat, number)
        seen[f"after building {number}"] = torch.nn.functional.linear is plain
    for number, engine in engines.items():
        engine.module.register_forward_pre_hook(note(f"in the forward pass of {number}"))
        step(seat, engine, number, 0)
    seen["afterwards"] = torch.nn.functional.linear is plain
    return seen
