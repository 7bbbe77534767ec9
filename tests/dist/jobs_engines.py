"""Jobs on live DeepSpeed engines: their layouts and storages against what DeepSpeed itself gathers.

What is right comes from DeepSpeed (``GatheredParameters``, ``safe_get_full_fp32_param``) or from the model before it
became an engine, never from the code under test. ``_KEPT`` holds what a later job of the same process needs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from engine_models import Block, Decayed, Letters, Mixed, Varied, autotp, decay_groups, model_of
from pool import Seat

from relaymeter.errors import RelaymeterError
from relaymeter.relayout import engines, own_groups, subgroup
from relaymeter.relayout.cuts import Cut, Widths
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.meshes import mesh_layout
from relaymeter.relayout.partitions import zero3_layout, zero12_layout

_KEPT: dict[str, Any] = {}
WORLD = 4
Tensors = dict[str, torch.Tensor]


def config(ranks: int, stage: int, *, bf16: bool = True, **zero: Any) -> dict[str, Any]:
    """Adam on torch's own implementation. ``zero``: ZeRO settings."""
    kept = {"stage3_param_persistence_threshold": 10} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2 * ranks,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, **kept, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
        **({"bf16": {"enabled": True}} if bf16 else {}),
    }


def group_of(ranks: tuple[int, ...]) -> Any:
    """The process group of ``ranks``, made once by all ranks of the world; None outside it."""
    key = f"group {ranks}"
    if key not in _KEPT:
        _KEPT[key] = subgroup.make_group(ranks, time_limit_s=60)
    return _KEPT[key]


def engine_over(ranks: tuple[int, ...], model: torch.nn.Module | None, settings: Mapping[str, Any], **more: Any) -> Any:
    """An engine over ``ranks``; None on other ranks. Every rank calls this."""
    group = group_of(ranks)
    degree = settings.get("tensor_parallel", {}).get("autotp_size", 1)
    if degree > 1:
        key = f"grid {ranks} {degree}"
        _KEPT[key] = _KEPT[key] if key in _KEPT else own_groups.make_grid(ranks, degree, time_limit_s=60)
        more["grid"] = _KEPT[key]
    if group is None or model is None:
        return None
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # DeepSpeed would compile Muon, unused here, for seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subgroup.install()
        return subgroup.initialize_over(group, model, settings, **more)


def train(engine: Any, batch: torch.Tensor, steps: int = 1) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            engine.backward(engine(batch))
            engine.step()


def refusal(attempt: Callable[[], Any]) -> str:
    """Type and text of the error that ``attempt`` ends in."""
    try:
        attempt()
    except RelaymeterError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def whole_weights(engine: Any) -> Tensors:
    """Every weight and persistent buffer, gathered by DeepSpeed."""
    import deepspeed

    module = engine.module
    params = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters([p for p in params.values() if hasattr(p, "ds_id")]):
        found = {name: param.data.detach().clone() for name, param in params.items()}
    kept = {key for key, value in module.state_dict().items() if value is not None}
    return found | {name: buffer.clone() for name, buffer in module.named_buffers() if name in kept}


def whole_masters(engine: Any, key: str | None = None) -> Tensors:
    """Every trained weight's master, or its optimizer state ``key``, gathered by DeepSpeed."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: Tensors = {}
    if engine.zero_optimization_stage() == 0:  # these are kept whole; a state dict numbers them in their order
        kept = engine.optimizer.state_dict()
        trained = [name for name, param in engine.module.named_parameters() if param.requires_grad and param.numel()]
        if key is not None:
            table = kept.get("optimizer_state_dict", kept)["state"]
            return {name: table[number][key].clone() for number, name in enumerate(trained)}
        groups = kept.get("fp32_groups") or [[param for _, param in engine.module.named_parameters() if param.numel()]]
        masters = [param for group in groups for param in group if param.requires_grad]
        return {name: master.detach().clone() for name, master in zip(trained, masters, strict=True)}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and getattr(param, "ds_numel", param.numel()):
            found[name] = safe_get_full_optimizer_state(param, key) if key else safe_get_full_fp32_param(param)
    return {name: value.detach().clone() for name, value in found.items()}


def wrong_pieces(layout: Layout, storage: Tensors, whole: Tensors, rank: int) -> list[str]:
    """What differs between ``storage`` read as ``layout`` says and ``whole``: names, or nothing."""
    wrong = [f"{name} is missing" for name in layout.specs if name not in whole]
    wrong += [f"{name} is too much" for name in whole if name not in layout.specs]
    for name, spec in layout.specs.items():
        place, held = layout.placements[name], storage.get(name)
        if held is not None and (held.dim() != 1 or str(held.dtype) != f"torch.{spec.dtype}"):
            wrong.append(f"{name} is stored as {held.dtype} {list(held.shape)}")
        if (0 if held is None else held.numel()) != place.storage.get(rank, 0):
            wrong.append(f"{name} is stored in {None if held is None else held.numel()} elements")
        if tuple(whole[name].shape) != spec.shape:
            wrong.append(f"{name} is {list(whole[name].shape)}")
        for row in place.pieces_of(rank).tolist():
            lo, size = place.lo[row].tolist(), place.shape[row].tolist()
            want = whole[name][tuple(slice(a, a + n) for a, n in zip(lo, size, strict=True))]
            at = held.storage_offset() + int(place.offset[row])
            have = held.as_strided(size, place.stride[row].tolist(), at)
            if not torch.equal(bits(have), bits(want)):
                wrong.append(f"{name} differs at {lo}")
    return wrong


def held_counts(layout: Layout) -> dict[str, dict[int, int]]:
    """Real elements of every tensor by rank."""
    return {
        name: {
            rank: int(sum(place.shape[row].prod() for row in place.pieces_of(rank)))
            for rank in range(layout.world_size)
        }
        for name, place in layout.placements.items()
    }


STATES = ("master", "exp_avg", "exp_avg_sq")


def states(
    seat: Seat, stage: int, ranks: list[int], bf16: bool = True, settings: dict[str, Any] | None = None, key: str = ""
) -> dict[str, Any]:
    """All states of one engine over ``ranks`` after a step, on every rank of the world, against DeepSpeed's gathers."""
    members = tuple(ranks)
    model = model_of(Varied, 3) if seat.rank in members else None
    entries = config(len(members), stage, bf16=bf16) | (settings or {})
    engine = engine_over(members, model, entries)
    dtype = torch.bfloat16 if bf16 else torch.float32
    if engine is not None:
        train(engine, torch.ones(2, 5, dtype=dtype) * (seat.rank + 1), 2)
    found: dict[str, Any] = {}
    for state in ("weights", *STATES):
        layout = engines.share_layout(engine, WORLD, seat.store, f"states/{key}/{state}", state=state, time_limit_s=60)
        found[state] = {"specs": [[s.name, list(s.shape), s.dtype] for s in layout.specs.values()]}
        found[state]["aliases"] = dict(layout.aliases)
        found[state]["ranks"] = sorted({rank for place in layout.placements.values() for rank in place.ranks})
        found[state]["held"] = held_counts(layout)
        if engine is not None:
            reading = None if state == "master" else state
            whole = whole_weights(engine) if state == "weights" else whole_masters(engine, reading)
            found[state]["wrong"] = wrong_pieces(layout, engines.engine_storage(engine, state), whole, seat.rank)
    if engine is not None:
        found["optimizer"] = type(engine.optimizer).__name__
        engine.destroy()
    return found


def whole_block(engine: Any, state: str) -> Tensors:
    """A state of a ``Block``, its shards gathered over data-parallel ranks by DeepSpeed and joined here."""
    reading = None if state == "master" else state
    found = whole_weights(engine) if state == "weights" else whole_masters(engine, reading)
    start = model_of(Block, 5).state_dict()
    group = next((m.mp_group for m in engine.module.modules() if getattr(m, "is_tp_parallel", False)), None)
    for name, mine in found.items() if group is not None else ():
        shards: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(shards, mine, group=group)
        if name.startswith("fused"):  # the parts of 8, 12 and 4 rows are cut one by one
            parts = [shard.split([4, 6, 2]) for shard in shards]
            found[name] = torch.cat([part[k] for k in range(3) for part in parts])
        elif mine.shape != start[name].shape:
            found[name] = torch.cat(shards, dim=0 if name.startswith("up") else 1)
    return found


def tensor_parallel(seat: Seat, stage: int, ranks: list[int], key: str) -> dict[str, Any]:
    """An AutoTP engine of degree 2: weights against the model it was made of, its other states against gathers."""
    members = tuple(ranks)
    model = model_of(Block, 5)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    settings = config(len(members) // 2, stage, bf16=False) | autotp(2)
    engine = engine_over(members, model if seat.rank in members else None, settings)
    found: dict[str, Any] = {}
    for state in ("weights", *STATES):
        if state == "exp_avg" and engine is not None:
            train(engine, torch.ones(2, 8) * (seat.rank // 2 + 1))
        layout = engines.share_layout(engine, WORLD, seat.store, f"{key}/{state}", state=state, time_limit_s=60)
        found[state] = {"held": held_counts(layout), "shapes": {n: list(s.shape) for n, s in layout.specs.items()}}
        if engine is not None:
            whole = start if state == "weights" else whole_block(engine, state)
            found[state]["wrong"] = wrong_pieces(layout, engines.engine_storage(engine, state), whole, seat.rank)
            if state == "master":
                found["masters are the weights"] = all(torch.equal(whole[name], start[name]) for name in whole)
    if engine is not None:
        engine.destroy()
    return found


def signatures(one: Layout, other: Layout) -> list[str]:
    """Tensors of which the layouts say something different, and what else differs."""
    wrong = [] if list(one.specs.items()) == list(other.specs.items()) else ["specs"]
    wrong += [] if dict(one.aliases) == dict(other.aliases) else ["aliases"]
    places = other.placements
    return wrong + [n for n, p in one.placements.items() if n not in places or p.signature != places[n].signature]


def metadata(seat: Seat) -> dict[str, Any]:
    """Layouts of live engines beside those that the builders make of names, shapes and numbers typed in here."""
    found = {}
    two, every = (0, 1), (0, 1, 2, 3)
    shapes = {"one.weight": (16, 8), "one.bias": (16,), "two.weight": (8, 16), "two.bias": (8,)}
    masters = {name: TensorSpec(name, shape, "float32") for name, shape in shapes.items()}
    groups = [["one.weight", "two.weight"], ["one.bias", "two.bias"]]
    for name, ranks, stage, zero, want in (
        ("ZeRO-1", two, 1, {}, zero12_layout(masters, two, WORLD, groups=groups)),
        ("ZeRO-2", every, 2, {}, zero12_layout(masters, every, WORLD, groups=groups)),
        (
            "aligned",
            two,
            2,
            {"parameter_alignment": True},
            zero12_layout(masters, two, WORLD, groups=groups, tensor_alignment=8),
        ),
        ("round robin", two, 2, {"round_robin_gradients": True}, zero12_layout(masters, two, WORLD, groups=groups)),
        ("ZeRO-3", two, 3, {"sub_group_size": 100}, zero3_layout(masters, two, WORLD)),
        ("ZeRO-3 on four", every, 3, {"sub_group_size": 50}, zero3_layout(masters, every, WORLD)),
    ):
        model = model_of(Decayed, 1) if seat.rank in ranks else None
        more = {} if model is None else {"model_parameters": decay_groups(model)}
        engine = engine_over(ranks, model, config(len(ranks), stage, **zero), **more)
        if engine is not None:
            found[name] = signatures(engines.master_layout(engine, WORLD), want)
            engine.destroy()
    split = Cut(0, rule=Widths((8, 7)))
    fused = Cut.fused(0, (8, None), (12, None), (4, None))
    cuts = {
        "norm.weight": Cut(None),
        "norm.bias": Cut(None),
        "up.weight": split,
        "up.bias": split,
        "down.weight": Cut(1, rule=Widths((8, 7))),
        "down.bias": Cut(None),
        "fused.weight": fused,
        "fused.bias": fused,
        "outs.0.weight": Cut(1),
        "outs.1.weight": Cut(1),
        "outs.2.weight": Cut(1),
    }
    block = {n: TensorSpec(n, tuple(p.shape), "float32") for n, p in model_of(Block, 1).named_parameters()}
    scale = TensorSpec("scale", (), "float32")
    mesh = [[0, 1], [2, 3]]
    for stage in range(4):
        engine = engine_over(every, model_of(Block, 1), config(2, stage, bf16=False) | autotp(2))
        weights = zero3_layout(block, mesh, WORLD, cuts=cuts) if stage == 3 else mesh_layout(block, cuts, mesh, WORLD)
        buffers = mesh_layout({"scale": scale}, {"scale": Cut(None)}, mesh, WORLD)
        want = replace(
            weights,
            specs={**weights.specs, "scale": scale},
            placements={**weights.placements, **buffers.placements},
        )
        found[f"AutoTP weights {stage}"] = signatures(engines.weights_layout(engine, WORLD), want)
        want = zero12_layout(block, mesh, WORLD, cuts=cuts) if stage in (1, 2) else weights
        found[f"AutoTP masters {stage}"] = signatures(engines.master_layout(engine, WORLD), want)
        engine.destroy()
    return found


def rearranged(seat: Seat) -> dict[str, Any]:
    """ZeRO-2 that spreads its flat groups in other ways: its states beside those of a plain twin, which DeepSpeed
    gathers. (Of a round-robin engine it gathers wrong ones.)"""
    found = {}
    batch = torch.full((2, 5), seat.rank + 1.0)
    plain = {"bf16": False}
    for name, zero in {
        "round robin": {"round_robin_gradients": True},
        "aligned": {"parameter_alignment": True},
        "both": {"round_robin_gradients": True, "parameter_alignment": True},
    }.items():
        made = []
        for extra in (zero, {}):
            model = model_of(Varied, 3) if seat.rank < 3 else None
            settings = config(3, 2, **plain, **extra) | {"gradient_clipping": 0.0}
            made.append(engine_over((0, 1, 2), model, settings))
            if made[-1] is not None:
                train(made[-1], batch, 2)
        if made[0] is None:
            continue
        for state in ("weights", *STATES):
            layout = engines.engine_layout(made[0], WORLD, state)
            reading = None if state == "master" else state
            whole = whole_weights(made[1]) if state == "weights" else whole_masters(made[1], reading)
            found[f"{name} {state}"] = wrong_pieces(layout, engines.engine_storage(made[0], state), whole, seat.rank)
    return found


def orders(seat: Seat) -> dict[str, str]:
    """Rank 0 follows a, b, c; rank 1 follows a, c, b, or lacks c, or both follow nothing. Ranks 2 and 3 wait."""
    found = {}
    second = seat.rank == 1

    def share(engine: Any, name: str, state: str = "weights") -> None:
        key = f"orders/{name}"
        found[name] = refusal(
            lambda: engines.share_layout(engine, WORLD, seat.store, key, state=state, time_limit_s=60)
        )

    def made(zero: dict[str, Any] | None = None, **more: Any) -> Any:
        model = model_of(Letters, 1) if seat.rank < 2 else None
        options = {name: choose(model) for name, choose in more.items()} if model is not None else {}
        return engine_over((0, 1), model, config(2, 1, **(zero or {})), **options)

    engine = made()
    share(engine, "equal")
    if second:
        engine.module._modules["b"] = engine.module._modules.pop("b")
    share(engine, "other order")
    if second:
        del engine.module._modules["b"]
    share(engine, "lacks b")
    if engine is not None:
        engine.module._modules.clear()
    share(engine, "both empty")
    engine = made(model_parameters=lambda model: list(model.parameters())[:: -1 if second else 1])
    share(engine, "equal names")
    share(engine, "groups in other order", "master")
    if second:
        engine.optimizer.offloaded_states.add("hp_params")
    share(engine, "one rank refuses", "master")
    share(made({"parameter_alignment": second}), "other alignment", "master")
    return found


def refused(seat: Seat) -> dict[str, str]:
    """What an engine over rank 0 alone cannot give."""
    found: dict[str, str] = {}

    def engine_of(kind: Callable[[], torch.nn.Module], stage: int, **settings: Any) -> Any:
        return engine_over((0,), model_of(kind, 1) if seat.rank == 0 else None, config(1, stage) | settings)

    engine = engine_of(Letters, 1)
    bare = engine_of(Letters, 3, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    if engine is None:
        return found
    found["no step yet"] = refusal(lambda: engines.optimizer_state_layout(engine, WORLD, "exp_avg"))
    train(engine, torch.ones(1, 3, dtype=torch.bfloat16))
    found["no such state"] = refusal(lambda: engines.optimizer_state_layout(engine, WORLD, "momentum"))
    found["not by weight"] = refusal(lambda: engines.optimizer_state_layout(engine, WORLD, "step"))
    engine.optimizer.offloaded_states.update(["lp_params", "optim_states"])
    found["offloaded weights"] = refusal(lambda: engines.weights_storage(engine))
    found["offloaded state"] = refusal(lambda: engines.optimizer_state_layout(engine, WORLD, "exp_avg"))
    found["masters still there"] = refusal(lambda: engines.master_layout(engine, WORLD))
    engine.optimizer.round_robin_bit16_meta[0][2] = torch.zeros(8, device="meta")
    found["placed otherwise"] = refusal(lambda: engines.master_layout(engine, WORLD))
    bare.optimizer = None
    found["no optimizer"] = refusal(lambda: engines.master_layout(bare, WORLD))
    part = bare.module.a.weight.ds_tensor
    part.status = SimpleNamespace(name="NOT_AVAILABLE")
    found["partition away"] = refusal(lambda: engines.weights_storage(bare))
    crooked = engine_of(Letters, 0)
    crooked.module.b.weight.data = crooked.module.b.weight.data.t()
    found["not contiguous"] = refusal(lambda: engines.weights_storage(crooked))
    return found


def mixed(seat: Seat) -> dict[str, Any]:
    """Weights and masters of engines over ranks 0 and 1 that train weights of two dtypes, a group each."""
    found: dict[str, Any] = {}
    for stage in (0, 2):
        model = model_of(Mixed, 2) if seat.rank < 2 else None
        start = {} if model is None else {name: param.detach().clone() for name, param in model.named_parameters()}
        more = {}
        if model is not None:
            params = list(model.parameters())
            kinds = [[p for p in params if p.dtype == dtype] for dtype in (torch.float32, torch.bfloat16)]
            more["model_parameters"] = [{"params": group} for group in kinds]
        engine = engine_over((0, 1), model, config(2, stage, bf16=False), **more)
        if engine is None:
            continue
        for state in ("weights", "master"):
            layout = engines.engine_layout(engine, WORLD, state)
            whole = {name: value.float() if (state, stage) == ("master", 2) else value for name, value in start.items()}
            storage = engines.engine_storage(engine, state)
            found[f"{stage} {state}"] = wrong_pieces(layout, storage, whole, seat.rank)
            found[f"{stage} {state} dtypes"] = {name: spec.dtype for name, spec in layout.specs.items()}
        engine.destroy()
    return found


def placeholder(seat: Seat, rows: int, columns: int) -> dict[str, Any]:
    """A large weight under ZeRO-3 on one rank and on two: what the layout says, and what the parameter itself is."""
    found: dict[str, Any] = {}
    for name, ranks in (("DP 1", (3,)), ("DP 2", (2, 3))):
        model = None
        if seat.rank in ranks:
            model = torch.nn.utils.skip_init(torch.nn.Embedding, rows, columns, dtype=torch.bfloat16)
        settings = config(len(ranks), 3)
        del settings["optimizer"]
        engine = engine_over(ranks, model, settings)
        layout = engines.share_layout(engine, WORLD, seat.store, f"placeholder/{name}", time_limit_s=60)
        found[name] = {
            "shape": list(layout.specs["weight"].shape),
            "numel": layout.specs["weight"].numel,
            "ranks": list(layout.placements["weight"].ranks),
        }
        if engine is not None:
            found[name]["local"] = list(engine.module.weight.shape)
            found[name]["storage"] = engines.weights_storage(engine)["weight"].numel()
            engine.destroy()
    return found
