"""Jobs on engines that give their memory back and take it up again, beside twins that never did."""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from engine_models import Block, Decayed, Varied, autotp, model_of
from jobs_engines import WORLD, bits, config, engine_over, group_of, held_counts, refusal, train
from pool import Seat

from relaymeter.harness.offload import run_offload
from relaymeter.relayout import engines, memory, release

STATES = ("master", "exp_avg", "exp_avg_sq")


def pair_of(
    kind: Callable[[], torch.nn.Module], ranks: int, seat: Seat, settings: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Two engines over the first ranks from one seed; None on other ranks."""
    model = [model_of(kind, 3) if seat.rank < ranks else None for _ in range(2)]
    made = [engine_over(tuple(range(ranks)), one, settings) for one in model]
    return None if made[0] is None else (made[0], made[1])


def everything(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {state: engines.engine_storage(engine, state) for state in ("weights", *STATES)}


def differing(one: Any, other: Any) -> list[str]:
    """Tensors of any state that are not bit-equal in two engines; padding, which holds nothing, does not count."""
    mine, theirs, me = everything(one), everything(other), dist.get_rank()
    found = []
    for state, parts in mine.items():
        counts = held_counts(engines.engine_layout(one, WORLD, state))
        for name, tensor in parts.items():
            real = counts[name][me]
            if not torch.equal(bits(tensor[:real]), bits(theirs[state][name][:real])):
                found.append(f"{state} {name}")
    return found


def refresh(engine: Any) -> None:
    """Weights from masters by DeepSpeed's own functions; stage 0 in fp32 trains its masters themselves."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for param, master in zip(group, masters, strict=True):
                param.data.copy_(master.data)
    engines.refresh_weights(engine)


def storages() -> list[torch.UntypedStorage]:
    """Every storage that a tensor of this process refers to, once."""
    gc.collect()
    found: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage
    return list(found.values())


def twins(
    seat: Seat, stage: int, ranks: int, dtype: str = "bf16", settings: dict[str, Any] | None = None, tp: int = 1
) -> dict[str, Any]:
    """One of two equal engines is released, restored and filled again; what it held, and whether both train alike."""
    kind, width = (Block, 8) if tp > 1 else (Varied, 5)
    entries = config(ranks // tp, stage, bf16=dtype == "bf16") | (settings or {}) | (autotp(tp) if tp > 1 else {})
    if dtype == "fp16":
        entries["fp16"] = {"enabled": True, "initial_scale_power": 4}
    made = pair_of(kind, ranks, seat, entries)
    if made is None:
        return {}
    engine, twin = made
    batch = torch.ones(2, width, dtype=engine.module.tail.weight.dtype if tp == 1 else torch.float32)
    batch *= seat.rank // tp + 1
    for one in made:
        train(one, batch, 2)
    params = list(engine.module.parameters())
    old = [param.data for param in params if param.numel()]  # references that would keep the memory otherwise
    views, attributes = everything(engine), dict(vars(engine))
    kept = {state: {name: tensor.clone() for name, tensor in parts.items()} for state, parts in views.items()}
    hidden = getattr(engine.module, "hidden", torch.zeros(1)).clone()
    held = storages()
    before = sum(storage.nbytes() for storage in held)
    found: dict[str, Any] = {"optimizer": type(engine.optimizer).__name__}
    freed = release.release(engine)
    found["freed"] = [freed, before - sum(storage.nbytes() for storage in held), release.released(engine)]
    found["left"] = left_behind(engine)
    found["refused"] = [
        refusal(attempt)
        for attempt in (
            lambda: engine(batch),
            lambda: engine.backward(batch.sum()),
            engine.step,
            lambda: engine.module(batch),
            lambda: engine.save_checkpoint(tempfile.gettempdir()),
            lambda: engines.weights_storage(engine),
            lambda: engines.master_storage(engine),
            lambda: engines.optimizer_state_storage(engine, "exp_avg"),
            lambda: release.release(engine),
        )
    ]
    release.restore(engine)
    found["hollow"] = [refusal(engine.step), str(release.hollow(engine))]
    release.filled(engine)
    found["attributes"] = sorted(
        name for name in {*attributes, *vars(engine)} if attributes.get(name) is not vars(engine).get(name)
    )
    found["hooks"] = len(engine.module._forward_pre_hooks) - len(twin.module._forward_pre_hooks)
    found["zeros"] = not any(
        tensor.count_nonzero() for parts in everything(engine).values() for tensor in parts.values()
    )
    found["hidden kept"] = torch.equal(hidden, getattr(engine.module, "hidden", torch.zeros(1)))
    refreshed = hasattr(engine.optimizer, "optimizer")  # else the weights are the masters
    for state, parts in views.items():  # views from before the release
        for name, tensor in parts.items():
            if not (refreshed and state == "weights" and name in views["master"]):
                tensor.copy_(kept[state][name])
    if refreshed:
        refresh(engine)
    found["filled"] = differing(engine, twin)
    found["old references"] = stage == 3 or all(
        torch.equal(bits(mine), bits(param)) for mine, param in zip(old, (p for p in params if p.numel()), strict=True)
    )
    for one in made:
        train(one, batch, 3)
    found["trained"] = differing(engine, twin)
    found["steps"] = [engine.global_steps, twin.global_steps]
    masters = engines.master_storage(engine)
    found["moved on"] = any(not torch.equal(bits(kept["master"][name]), bits(masters[name])) for name in masters)
    for one in made:
        one.destroy()
    return found


def left_behind(engine: Any) -> list[str]:
    """Shapes of tensors of 64 bytes and more that the engine's optimizer and parameters still reach."""
    seen: set[int] = set()
    queue: list[Any] = [engine.optimizer, *engine.module.parameters()]
    found = []
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, type(memory)) or type(thing) is type:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            queue += [thing.grad] if thing.is_leaf and thing.grad is not None else []
            queue += list(vars(thing).values())
            if thing.device.type != "meta" and thing.untyped_storage().nbytes() >= 64:
                found.append(f"{type(thing).__name__} {list(thing.shape)}")
        elif isinstance(thing, dict):
            queue += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set):
            queue += list(thing)
        elif type(thing).__module__.startswith(("deepspeed", "torch.optim")) and hasattr(thing, "__dict__"):
            queue += [entry for name, entry in vars(thing).items() if name not in ("module", "engine")]
    return found


class Wide(torch.nn.Module):
    """Four square matrices of a million elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().pow(2).sum()


def resident(seat: Seat, stages: list[int]) -> dict[str, list[int]]:
    """Bytes that the kernel counts less after a release and more after a restore, beside what ``release`` says.

    Engines over ranks 0 and 1; every parameter and partition has another reference that outlives the release.
    """
    found = {}
    for stage in stages:
        model = model_of(Wide, 1) if seat.rank < 2 else None
        engine = engine_over((0, 1), model, config(2, stage))
        if engine is None:
            continue
        train(engine, torch.ones(2, 1024, dtype=torch.bfloat16), 2)
        old = [tensor for parts in everything(engine).values() for tensor in parts.values()]
        old += [param.data for param in engine.module.parameters()]
        readings = [_resident()]
        freed = release.release(engine)
        readings.append(_resident())
        release.restore(engine)
        readings.append(_resident())
        found[str(stage)] = [freed, readings[0] - readings[1], readings[2] - readings[1], len(old)]
        engine.destroy()
    return found


def _resident() -> int:
    gc.collect()
    memory.release_free_pages()
    reading = memory.resident_bytes()
    if reading is None:
        raise RuntimeError("the kernel does not tell the resident memory of this process")
    return reading


def refused(seat: Seat) -> dict[str, str]:
    """What cannot be released or restored, on rank 0 alone; afterwards everything still can."""
    found: dict[str, str] = {}

    def engine_of(stage: int, **settings: Any) -> Any:
        entries = config(1, stage, bf16=False)
        entries |= {name: value for name, value in settings.items() if name != "zero"}
        entries["zero_optimization"] |= settings.get("zero", {})
        return engine_over((0,), model_of(Varied, 1) if seat.rank == 0 else None, entries)

    plain = engine_of(1, gradient_accumulation_steps=2, train_batch_size=4)
    offload = {"offload_optimizer": {"device": "cpu"}}
    configured = engine_of(2, zero=offload, zero_force_ds_cpu_optimizer=False)
    lasting = engine_of(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    waiting = {"stage 0": engine_of(0), "stage 1": engine_of(1), "stage 3": engine_of(3), "BF16_Optimizer": lasting}
    if seat.rank:
        return found
    whole, batch = waiting["stage 0"], torch.ones(2, 5)
    found["restore first"] = refusal(lambda: release.restore(plain))
    found["configured"] = refusal(lambda: release.release(configured))
    train(plain, batch)
    found["window"] = refusal(lambda: release.release(plain))
    train(plain, batch)
    for name, engine in waiting.items():
        engine.backward(engine(batch.to(engine.module.tail.weight.dtype)))
        found[name] = refusal(lambda engine=engine: release.release(engine))
        engine.step()
    plain.offload_states(include=["hp_params"], pin_memory=False)
    found["offloaded"] = refusal(lambda: release.release(plain))
    plain.reload_states()
    whole.module.frozen.data = whole.module.frozen.data.share_memory_()
    found["shared memory"] = refusal(lambda: release.release(whole))
    before = whole.module.layers[0].weight.detach().clone()
    found["nothing changed"] = str(torch.equal(before, whole.module.layers[0].weight))
    kept = plain.module.layers[0].weight.detach().clone()
    release.release(plain)
    found["twice"] = refusal(lambda: release.release(plain))
    later = plain.forward  # wrapped while released, as another tool may do
    plain.forward = functools.partial(later)
    release.restore(plain)
    plain.module.layers[0].weight.data.copy_(kept)
    release.filled(plain)
    found["wrapped in between"] = refusal(lambda: plain(batch))
    return found


def offloads(seat: Seat, stages: list[int], fused: bool = False, repeats: int = 2, **options: Any) -> list[Any]:
    """Rows of a small model over ranks 0 and 1: DeepSpeed's offload of every kind of state, and our release."""

    group = group_of((0, 1))
    if group is None:
        return []

    def engine_of(stage: int) -> Any:
        settings = config(2, stage)
        if fused:
            settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
        return engine_over((0, 1), model_of(Decayed, 3), settings)

    def loss_of(engine: Any) -> torch.Tensor:
        loss: torch.Tensor = engine(torch.full((2, 8), 1.0 + engine.global_steps + seat.rank, dtype=torch.bfloat16))
        return loss

    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage in every offload, of which earlier tests of this process leave much
    try:
        results = list(run_offload(engine_of, loss_of, stages=stages, repeats=repeats, group=group, **options))
    finally:
        gc.unfreeze()
    return [vars(result) | {"verdict": result.verdict, "freed": result.freed_bytes} for result in results]
