"""Jobs that move whole training states between live engines for public bug reports as small inputs.

What is right is written in the tests, or comes from an engine that never moved, read by DeepSpeed's own gathers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jobs_engines as on_engines
import jobs_engines_ep as on_experts
import torch
import torch.distributed as dist
from engine_models import INPUTS, Decayed, Shared, Stepped, Uneven, model_of
from jobs_engines import config, engine_over, refusal, train
from pool import Seat

from relaymeter.harness.state_models import GroupStep
from relaymeter.relayout import engines
from relaymeter.relayout.state_move import TrainingStateMove

ADAM = ("exp_avg", "exp_avg_sq")
Models = type[torch.nn.Module]


def build(seat: Seat, kind: Models, ranks: tuple[int, ...], stage: int, seed: int, **more: Any) -> Any:
    """An engine of ``kind`` over ``ranks``. ``more``: ``groups(model)``, ``zero`` settings, ``bf16``, options of
    ``initialize``, and entries of the config under ``entries``."""
    model = model_of(kind, seed) if seat.rank in ranks else None
    zero, entries, make = more.pop("zero", {}), more.pop("entries", {}), more.pop("groups", None)
    settings = config(len(ranks), stage, bf16=more.pop("bf16", True), **zero) | entries
    if "optimizer" in more:
        del settings["optimizer"]
    if make is not None and model is not None:
        more["model_parameters"] = make(model)
    return engine_over(ranks, model, settings, **more)


def step(engine: Any, kind: Models, steps: int = 1, *, bf16: bool = True) -> None:
    if engine is not None:
        draw = torch.Generator().manual_seed(int(engine.global_steps))
        batch = torch.randn(2, WIDTHS[kind.__name__], generator=draw)
        train(engine, batch.to(torch.bfloat16 if bf16 else torch.float32), steps)


def prints(engine: Any, keys: tuple[str, ...] = ADAM) -> dict[str, str] | None:
    """Of every whole master and optimizer state, gathered by DeepSpeed: dtype, shape and a hash of its bits."""
    if engine is None:
        return None
    found = {}
    for key in (None, *keys):
        for name, value in on_engines.whole_masters(engine, key).items():
            data = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:12]
            found[f"{key or 'master'} {name}"] = f"{list(value.shape)} {data}"
    return found


def fields(engine: Any) -> dict[str, Any] | None:
    """What the optimizer keeps besides tensors of one value per weight, in its own types."""
    if engine is None:
        return None
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def plain(value: Any) -> Any:
        return f"{value.tolist()} {value.dtype}" if isinstance(value, torch.Tensor) else value

    groups = [{k: plain(v) for k, v in group.items() if k != "params"} for group in base.param_groups]
    kept = [{k: plain(v) for k, v in state.items() if k == "step"} for state in base.state.values()]
    keys = [sorted(state) for state in base.state.values()]
    return {"groups": groups, "steps": kept, "keys": keys, "lr": engine.get_lr(), "global": int(engine.global_steps)}


def moved(source: Any, destination: Any) -> dict[str, Any]:
    """Move, and what the move itself says of it."""
    move = TrainingStateMove(source, destination)
    move.run(prove=True)
    report = move.verify()
    specs = move.schedule.plan.tensors
    return {
        "ok": report.ok,
        "differs": [*map(str, report.mismatches), *report.fields],
        "states": list(move.states),
        "bytes": move.bytes_total,
        "messages": move.messages,
        "shapes": {spec.name: list(spec.shape) for spec in specs},
        "dtypes": {spec.name: spec.dtype for spec in specs},
    }


def real(seat: Seat, engine: Any, key: str) -> list[int]:
    """Elements of masters that each rank of the world holds, padding left out."""
    layout = engines.share_layout(engine, seat.world_size, seat.store, key, state="master", time_limit_s=60)
    held = on_engines.held_counts(layout).values()
    return [sum(counts[rank] for counts in held) for rank in range(seat.world_size)]


def between(
    seat: Seat,
    kind: str,
    ranks: list[list[int]],
    stages: list[int],
    steps: int = 2,
    groups: list[str] | None = None,
    zero: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A trained engine moved into one of other weights; both train one step more."""
    model: Models = MODELS[kind]
    made = []
    for side in (0, 1):
        more: dict[str, Any] = {"zero": dict(zero or {}) if side == 0 else {}}
        if groups:
            more["groups"] = strong if groups[side] == "strong" else weak
        made.append(build(seat, model, tuple(ranks[side]), stages[side], 11 + side, **more))
    step(made[0], model, steps)
    found = moved(*made)
    found |= {"before": prints(made[0]), "after": prints(made[1])}
    found |= {"source": fields(made[0]), "destination": fields(made[1])}
    found["real"] = [real(seat, engine, f"cases/{kind}/{ranks}/{stages}/{side}") for side, engine in enumerate(made)]
    found["flat"] = [padding(engine) for engine in made]
    for side, engine in zip(("source", "destination"), made, strict=True):
        step(engine, model)
        if engine is not None:
            found[f"{side} parameters"] = {
                name: list(getattr(param, "ds_shape", param.shape))
                for name, param in engine.module.named_parameters(remove_duplicate=False)
            }
            params = dict(engine.module.named_parameters(remove_duplicate=False))
            found[f"{side} tied"] = sorted(n for n, p in params.items() if sum(p is q for q in params.values()) > 1)
            engine.destroy()
    return found


def padding(engine: Any) -> list[int]:
    """Elements of this rank's first flat master, and those of them that are padding, by DeepSpeed's own count."""
    optimizer = getattr(engine, "optimizer", None)
    if not hasattr(optimizer, "groups_padding") or not hasattr(optimizer, "single_partition_of_fp32_groups"):
        return []
    return [optimizer.single_partition_of_fp32_groups[0].numel(), int(optimizer.groups_padding[0])]


def strong(model: torch.nn.Module) -> list[dict[str, Any]]:
    return _two_groups(model, (0.1, 0.0), (0.02, 0.005))


def weak(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The groups of ``strong`` with other values, which a move has to replace."""
    return _two_groups(model, (0.3, 0.2), (0.5, 0.6))


def _two_groups(model: torch.nn.Module, decay: tuple[float, float], lr: tuple[float, float]) -> list[dict[str, Any]]:
    params = list(model.parameters())
    halves = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    return [{"params": p, "weight_decay": d, "lr": r} for p, d, r in zip(halves, decay, lr, strict=True)]


class Five(torch.nn.Module):
    """Five elements, fewer than four ranks align to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a).float().pow(2).sum()


class Single(torch.nn.Module):
    """A linear layer of one weight and one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).float().pow(2).sum()


class Tall(torch.nn.Module):
    """An embedding of many rows and few columns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(502, 21)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.table.weight.sum(dim=0) * x[0]).float().pow(2).sum()


class Narrow(torch.nn.Module):
    """A norm of 8, a column linear 8 -> 16 and a row linear 16 -> 8 with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))).float().pow(2).sum()


MODELS: dict[str, Models] = {kind.__name__: kind for kind in (Decayed, Shared, Stepped, Tall, Uneven)}
WIDTHS = INPUTS | {"Five": 5, "Single": 1, "Tall": 21, "Narrow": 8}


def emptied(seat: Seat) -> dict[str, Any]:
    """Five elements over four ranks (2, 2, 1 and none), there and back; then rank 1's part emptied by hand."""
    settings = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100}}
    made = [build(seat, Five, ranks, 1, 3 + at, entries=settings) for at, ranks in enumerate(((0, 1, 2, 3), (1, 2)))]
    step(made[0], Five, 2)
    found = {"there": moved(*made), "back": moved(made[1], made[0])}
    found["after"] = [prints(engine) for engine in made]
    found["real"] = [real(seat, engine, f"cases/emptied/{side}") for side, engine in enumerate(made)]
    if seat.rank == 1:
        flats = made[0].optimizer.single_partition_of_fp32_groups
        flats[0].data = flats[0].data[:0]
    found["refused"] = refusal(lambda: TrainingStateMove(made[0], made[1]))
    return found


class HalfMomentum(torch.optim.Optimizer):
    """SGD whose momentum is kept in bf16 beside fp32 weights."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(param, dtype=torch.bfloat16)
                    state["momentum"].mul_(0.9).add_(param.grad.to(torch.bfloat16))
                    param.add_(state["momentum"].float(), alpha=-group["lr"])


def own_types(seat: Seat, stages: list[int]) -> dict[str, Any]:
    """A master of 1 + 2^-10, which bf16 cannot hold, beside a bf16 weight, and a bf16 momentum; then a step more."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    made = [
        build(seat, Uneven, ranks, stage, 5 + at, optimizer=HalfMomentum)
        for at, (ranks, stage) in enumerate(zip(((0, 1), (0, 1, 2, 3)), stages, strict=True))
    ]
    step(made[0], Uneven, 2)
    if made[0] is not None:
        weight = made[0].module.b.weight
        safe_set_full_fp32_param(weight, torch.full((2, 7), 1 + 2.0**-10))
        with deepspeed.zero.GatheredParameters([weight] if stages[0] == 3 else [], modifier_rank=0):
            weight.data.fill_(1.0)
    found = moved(*made)
    for side, engine in zip(("source", "destination"), made, strict=True):
        if engine is not None:
            state = next(iter(engine.optimizer.optimizer.state.values()))
            master = on_engines.whole_masters(engine)["b.weight"]
            found[side] = {
                "prints": prints(engine, ("momentum",)),
                "kept": {key: str(value.dtype) for key, value in state.items()},
                "master": [str(master.dtype), sorted(set(master.flatten().tolist()))],
                "weight": str(on_engines.whole_weights(engine)["b.weight"].dtype),
            }
        step(engine, Uneven)
    if made[1] is not None:
        found["next"] = {str(s["momentum"].dtype) for s in made[1].optimizer.optimizer.state.values()} == {
            "torch.bfloat16"
        }
    return found


def steps_kept(seat: Seat, optimizer: str, stages: list[int]) -> dict[str, Any]:
    """Three steps, a move to other ranks and stage and on to the first layout, and one step beside the first engine."""
    more: dict[str, Any] = {"optimizer": GroupStep} if optimizer == "group" else {}
    ranks = ((0, 1), (2, 3), (0, 1))
    made = [build(seat, Uneven, ranks[at], stages[at], 5 + at, **more) for at in range(3)]
    step(made[0], Uneven, 3)
    found: dict[str, Any] = {"ok": [moved(*made[:2])["differs"], moved(*made[1:])["differs"]]}
    found["moved"] = [fields(engine) for engine in made]
    for engine in made:
        step(engine, Uneven)
    found["stepped"] = [fields(engine) for engine in made]
    found["prints"] = [prints(engine) for engine in made]
    return found


def lr_kept(seat: Seat) -> dict[str, Any]:
    """One weight and one bias in the second of three groups, the others empty; gradients are left in place."""

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        return [{"params": []}, {"params": list(model.parameters()), "lr": 0.05}, {"params": []}]

    more: dict[str, Any] = {
        "groups": groups,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.9),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    }
    made = [build(seat, Single, ranks, stage, seed, **more) for ranks, stage, seed in (((0, 1), 2, 1), ((2, 3), 1, 2))]
    step(made[0], Single)
    if made[0] is not None:
        for param in made[0].module.parameters():
            param.grad = torch.ones_like(param)
    found = moved(*made)
    found["prints"], found["fields"] = [prints(e) for e in made], [fields(e) for e in made]
    for engine in made:
        if engine is not None:
            engine.module.zero_grad(set_to_none=True)
        step(engine, Single)
    found["next"] = [None if engine is None else engine.get_lr() for engine in made]
    return found


def scale_history(seat: Seat) -> dict[str, Any]:
    """fp16 from a scale of 2^10 with a window of 4: the first step overflows; moved after the third; three more."""
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 4, "hysteresis": 1}
    entries = {"fp16": fp16, "bf16": {"enabled": False}}
    made = [
        build(seat, Uneven, ranks, stage, seed, entries=entries)
        for ranks, stage, seed in (((0, 1), 3, 1), ((1, 2, 3), 1, 2))
    ]
    found: dict[str, Any] = {}

    def advance(engine: Any, scale: float = 1.0) -> None:
        if engine is not None:
            train(engine, torch.full((2, 5), 0.5 * scale, dtype=torch.float16))

    def history(name: str) -> None:
        found[name] = [
            None if e is None else {**vars(e.optimizer.loss_scaler), "dtype": "", "skipped": e.skipped_steps}
            for e in made
        ]

    advance(made[0], float("inf"))
    history("overflowed")
    advance(made[0])
    advance(made[0])
    found["differs"] = moved(*made)["differs"]
    history("moved")
    for name in ("first", "second", "third"):
        for engine in made:
            advance(engine)
        history(name)
    return found


def shards(seat: Seat, degree: int) -> dict[str, Any]:
    """ZeRO-1 with Adam: four steps at TP 2, moved to ``degree``, four more beside the engine that never moved."""
    patterns = [
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ]

    def engine(degree: int, seed: int) -> Any:
        cuts = {"use_default_specs": False, "layer_specs": patterns}
        entries = {"tensor_parallel": {"autotp_size": degree, "partition_config": cuts}} if degree > 1 else {}
        kind = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "adam_w_mode": False}}}
        ranks = tuple(range(degree))
        batch = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2}
        return build(seat, Narrow, ranks, 1, seed, bf16=False, entries=entries | kind | batch)

    made = [engine(2, 1), engine(degree, 2)]
    step(made[0], Narrow, 4, bf16=False)
    found: dict[str, Any] = {"differs": moved(*made)["differs"]}
    losses: list[list[float]] = [[], []]
    for at in range(4):
        batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 + at))
        for side, one in enumerate(made):
            if one is not None:
                loss = one(batch)
                losses[side].append(float(loss))
                one.backward(loss)
                one.step()
    found["losses"], found["fields"] = losses, [fields(one) for one in made]
    found["shapes"] = [
        None if one is None else {n: list(p.shape) for n, p in one.module.named_parameters()} for one in made
    ]
    for name, key in (("master", None), *((key, key) for key in ADAM)):
        found[name] = [_joined(one, key) for one in made]
    return found


def _joined(engine: Any, key: str | None) -> dict[str, list[float]] | None:
    """Whole masters or moments of a ``Narrow``, its shards gathered over the tensor-parallel ranks."""
    if engine is None:
        return None
    found = on_engines.whole_masters(engine, key)
    group = next((m.mp_group for m in engine.module.modules() if getattr(m, "is_tp_parallel", False)), None)
    for name, mine in found.items() if group is not None else ():
        dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
        if dim is not None:
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine.contiguous(), group=group)
            found[name] = torch.cat(parts, dim)
    return {name: value.flatten().tolist() for name, value in found.items()}


def link(engine: Any) -> None:
    """Let DeepSpeed find the states of every optimizer group below ZeRO-3: it looks for them once, after the first
    group's first step, when the experts' group has none yet."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    optimizer = getattr(engine, "optimizer", None)
    if optimizer is not None:
        for params, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(params, flat, optimizer.optimizer.state)


def experts(seat: Seat) -> dict[str, Any]:
    """60 experts, master and first moment of expert e filled with e, at EP 1 on rank 0, at EP 2, at EP 1 again."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    made = []
    for leg, (ranks, degree) in enumerate((((0, 1), 1), ((2, 3), 2), ((0, 1), 1))):
        model = on_experts.tiny_model(leg, experts=60, layers=1) if seat.rank in ranks else None
        made.append(on_experts.engine_over(ranks, model, on_experts.config(2, 1, degree)))
    found: dict[str, Any] = {}
    if made[0] is not None:
        on_experts.train(made[0], on_experts.batch(seat))
        link(made[0])
        for name, param in made[0].module.named_parameters():
            if ".experts." in name:
                value = torch.arange(60.0).view(-1, 1, 1).expand(param.shape).contiguous()
                safe_set_full_fp32_param(param, value)
                safe_set_full_optimizer_state(param, value, "exp_avg")
                param.data.copy_(value)
    found["differs"] = [moved(*made[:2])["differs"], moved(*made[1:])["differs"]]
    for leg, engine in enumerate(made):
        link(engine)
        for name, param in engine.module.named_parameters() if engine is not None else ():
            if ".experts." in name:
                values = (safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg"), param)
                held = [[sorted(set(row.flatten().tolist())) for row in value.float()] for value in values]
                found[f"{leg} {name.rpartition('.')[2]}"] = held
    return found


def refused(seat: Seat) -> dict[str, str]:
    """What cannot move: each refusal as every rank hears of it, and whether the source is as it was."""
    found = {}
    source = build(seat, Uneven, (0, 1), 2, 1)
    step(source, Uneven, 2)
    before = prints(source)

    def tell(name: str, one: Any, other: Any) -> None:
        found[name] = refusal(lambda: TrainingStateMove(one, other))

    def adapted(ranks: tuple[int, ...], rows: int = 2) -> Any:
        model = model_of(Uneven, 2) if seat.rank in ranks else None
        if model is not None:
            model.a.lora_a = torch.nn.Parameter(torch.zeros(rows, 5))
            model.a.lora_b = torch.nn.Parameter(torch.zeros(7, rows))
        return engine_over(ranks, model, config(len(ranks), 2))

    lora = adapted((2, 3))
    tell("adapters there", source, lora)
    tell("adapters here", lora, source)
    tell("other shape", lora, adapted((0, 1), rows=3))
    aside = {"offload_optimizer": {"device": "cpu"}}
    plain = {"zero_force_ds_cpu_optimizer": False}
    tell("optimizer on host", source, build(seat, Uneven, (2, 3), 2, 2, zero=aside, entries=plain))
    aside = {"offload_param": {"device": "cpu"}}
    tell("parameters on host", build(seat, Uneven, (2, 3), 3, 2, zero=aside, entries=plain), source)
    disk = build(seat, Uneven, (2, 3), 3, 2)
    if disk is not None:  # an engine that is really on NVMe needs libaio
        from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

        kept = DeepSpeedZeroOffloadOptimizerConfig(device="nvme", nvme_path="/nowhere")
        disk._config.zero_config.offload_optimizer = kept
    tell("NVMe", source, disk)
    away = build(seat, Uneven, (2, 3), 3, 2)
    if away is not None:
        away.optimizer.offloaded_states.update(["optim_states"])
    tell("offloaded", source, away)
    found["source as it was"] = str(before == prints(source))
    return found
