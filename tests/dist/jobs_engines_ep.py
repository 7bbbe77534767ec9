"""Jobs on live AutoEP engines of a tiny Qwen3-MoE: layouts and storages against gathers that use no planner code.

What is right comes from ``whole``: plain all-gathers of weights, masters and moments over the groups that DeepSpeed
keeps for each of them, then of the experts over their expert-parallel group.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import jobs_engine_moves as on_moves
import jobs_engines as on_engines
import torch
import torch.distributed as dist
from pool import Seat

from relaymeter.relayout import engines, own_groups, subgroup

_KEPT: dict[str, Any] = {}
WORLD = 4
Tensors = dict[str, torch.Tensor]


def tiny_model(seed: int, experts: int = 4, layers: int = 2) -> torch.nn.Module:
    """A Qwen3-MoE of odd widths, in which a token takes 2 experts of 55 elements in each of three tensors."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=11,
        intermediate_size=24,
        moe_intermediate_size=5,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config)


def config(ranks: int, stage: int, expert_parallel: int, *, bf16: bool = True, **settings: Any) -> dict[str, Any]:
    found = on_engines.config(ranks, stage, bf16=bf16) | settings
    return found | {
        "expert_parallel": {
            "enabled": True,
            "autoep_size": expert_parallel,
            "preset_model": "qwen3_moe",
            "use_grouped_mm": False,
        }
    }


def engine_over(ranks: tuple[int, ...], model: torch.nn.Module | None, settings: dict[str, Any], **more: Any) -> Any:
    """An AutoEP engine over ``ranks`` with groups made before; None on other ranks. Every rank calls this."""
    group, size = on_engines.group_of(ranks), settings["expert_parallel"]["autoep_size"]
    key = f"grid {ranks} {size}"
    if key not in _KEPT:
        _KEPT[key] = own_groups.make_grid(ranks, expert_parallel=size, time_limit_s=60)
    if group is None or model is None:
        return None
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subgroup.install()
        return subgroup.initialize_over(group, model, settings, grid=_KEPT[key], **more)


def batch(seat: Seat) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + seat.rank)
    return torch.randint(0, 32, (2, 8), generator=generator)


def loss_of(engine: Any, tokens: torch.Tensor) -> Any:
    return engine(input_ids=tokens, labels=tokens).loss


def train(engine: Any, tokens: torch.Tensor, steps: int = 1) -> list[float]:
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    return losses


def joined(mine: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """``mine`` of every rank of the group, in its order."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine.contiguous(), group=group)
    return found


def whole(engine: Any, state: str) -> Tensors:
    """One state of an AutoEP engine, every tensor whole. The engine's ranks call this together."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    flats = engine.optimizer
    found: Tensors = {}

    def kept(flat: torch.Tensor) -> torch.Tensor:
        inner = getattr(flats, "optimizer", flats)
        return flat.detach() if state == "master" else inner.state[flat][state]

    if state == "weights":
        for name, param in engine.module.named_parameters():
            parts = joined(param.ds_tensor.data, param.ds_process_group) if hasattr(param, "ds_id") else [param.data]
            shape = param.ds_shape if hasattr(param, "ds_id") else param.shape
            found[name] = torch.cat([part.view(-1) for part in parts])[: shape.numel()].view(shape)
    elif engine.zero_optimization_stage() == 3:
        for params, flat in zip(flats.fp16_groups, flats.fp32_partitioned_groups_flat, strict=True):
            for param, part in zip(params, kept(flat).split([p.ds_tensor.ds_numel for p in params]), strict=True):
                line = torch.cat(joined(part, param.ds_process_group))
                found[names[id(param)]] = line[: param.ds_numel].view(param.ds_shape)
    elif engine.zero_optimization_stage() > 0:
        bf16 = hasattr(flats, "bf16_groups")
        groups = flats.bf16_groups if bf16 else flats.round_robin_bit16_groups
        partitions = flats.fp32_groups_flat_partition if bf16 else flats.single_partition_of_fp32_groups
        for params, flat, group in zip(groups, partitions, flats.real_dp_process_group, strict=True):
            line = torch.cat(joined(kept(flat), group))
            for param, part in zip(
                params, line.split([p.numel() for p in params] + [_rest(params, line)]), strict=False
            ):
                found[names[id(param)]] = part.view(param.shape)
    else:
        masters = [group["params"] for group in flats.param_groups]
        for params, copies in zip(getattr(flats, "fp16_groups", masters), masters, strict=True):
            found |= {names[id(param)]: kept(copy) for param, copy in zip(params, copies, strict=True)}
    for layer in (module for module in engine.module.modules() if hasattr(module, "ep_group")):
        for param in layer.experts.parameters():
            name = names[id(param)]
            found[name] = torch.cat(joined(found[name], layer.ep_group))
    return {name: value.clone() for name, value in found.items()}


def _rest(params: list[Any], line: torch.Tensor) -> int:
    return line.numel() - sum(param.numel() for param in params)


def states(seat: Seat, cases: dict[str, list[Any]]) -> dict[str, Any]:
    """All states of engines after two steps, on every rank of the world. ``cases``: stage, degree, ranks, bf16,
    number of experts, settings."""
    found: dict[str, Any] = {}
    for key, (stage, size, ranks, bf16, experts, settings) in cases.items():
        members = tuple(ranks)
        model = tiny_model(3, experts) if seat.rank in members else None
        engine = engine_over(members, model, config(len(members), stage, size, bf16=bf16, **settings))
        one: dict[str, Any] = {"losses": [] if engine is None else train(engine, batch(seat), 2)}
        gathered: dict[str, Tensors] = {}
        for state in ("weights", *on_engines.STATES):
            store_key = f"expert states/{key}/{state}"
            layout = engines.share_layout(engine, WORLD, seat.store, store_key, state=state, time_limit_s=60)
            one[state] = {
                "specs": [[spec.name, list(spec.shape), spec.dtype] for spec in layout.specs.values()],
                "held": on_engines.held_counts(layout),
            }
            if engine is not None:
                gathered[state] = whole(engine, state)
                storage = engines.engine_storage(engine, state)
                one[state]["sum"] = {n: float(value.double().abs().sum()) for n, value in gathered[state].items()}
                one[state]["wrong"] = on_engines.wrong_pieces(layout, storage, gathered[state], seat.rank)
        if engine is not None:
            one["optimizer"] = type(engine.optimizer).__name__
            one["groups"] = [group["name"] for group in engine.optimizer.param_groups]
            one["masters differ"] = [
                name
                for name, master in gathered["master"].items()
                if not torch.equal(master.to(gathered["weights"][name].dtype), gathered["weights"][name])
            ]
            one["unmoved"] = [name for name, value in gathered["exp_avg"].items() if not value.any()]
            engine.destroy()
        found[key] = one
    return found


def side_by_side(seat: Seat) -> dict[str, Any]:
    """Losses of EP2 and EP4 engines that train in turn, one of them over a part of the world, and of each alone."""
    every = (0, 1, 2, 3)
    kinds = {"ZeRO-2 EP2": (every, 2, 2), "ZeRO-3 EP4": (every, 3, 4), "ZeRO-3 EP2": ((0, 1), 3, 2)}
    kinds |= {"ZeRO-1 EP2": ((2, 3), 1, 2)}

    def made(name: str) -> Any:
        ranks, stage, size = kinds[name]
        model = tiny_model(len(name) + size) if seat.rank in ranks else None
        return engine_over(ranks, model, config(len(ranks), stage, size))

    found: dict[str, Any] = {}
    tokens = batch(seat)
    for name in kinds:
        engine = made(name)
        if engine is not None:
            found[name] = {"alone": train(engine, tokens, 4), "together": []}
            engine.destroy()
    together = {name: made(name) for name in kinds}
    for _ in range(4):
        for name, engine in together.items():
            if engine is not None:
                found[name]["together"] += train(engine, tokens)
    found["own groups"] = own_made(seat)
    return found


def own_made(seat: Seat) -> list[Any]:
    """Ranks of an engine for which DeepSpeed made the groups of experts itself."""
    group = on_engines.group_of((0, 1, 2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = subgroup.initialize_over(group, tiny_model(5), config(4, 2, 2))
    train(engine, batch(seat))
    described = engines.describe_engine(engine)
    return [described["ranks"], described["grids"]]


def move_states(seat: Seat, sides: list[list[Any]], key: str) -> dict[str, Any]:
    """Every state of a trained engine moved into one of another seed. ``sides``: stage, degree, ranks of each."""
    made = []
    for number, (stage, size, ranks) in enumerate(sides):
        model = tiny_model(7 + number) if seat.rank in ranks else None
        made.append(engine_over(tuple(ranks), model, config(len(ranks), stage, size, bf16=False)))
        if made[-1] is not None:
            train(made[-1], batch(seat), 2)
    order = ("master", "exp_avg", "exp_avg_sq", "weights")
    found = {state: on_moves.move(seat, *made, state, f"experts/{key}", whole) for state in order}
    tokens = torch.arange(16).view(2, 8)
    for side, engine in enumerate(made):
        if engine is not None:
            with torch.no_grad():
                found[f"loss {side}"] = float(loss_of(engine, tokens))
    return found


def sixty_experts(seat: Seat) -> dict[str, Any]:
    """Expert e holds the value e; its weights move from EP1 to EP2 over two ranks and into another EP1 engine."""
    made = []
    for number, size in enumerate((1, 2, 1)):
        model = tiny_model(11 + number, experts=60, layers=1) if seat.rank < 2 else None
        if model is not None and number == 0:
            with torch.no_grad():
                for param in model.parameters():
                    if param.dim() == 3:
                        param.copy_(torch.arange(60.0).view(-1, 1, 1).expand_as(param))
        made.append(engine_over((0, 1), model, config(2, 2, size)))
    found: dict[str, Any] = {}
    for leg in (0, 1):
        moved = on_moves.move(seat, made[leg], made[leg + 1], "weights", f"sixty/{leg}", whole)
        found[f"leg {leg}"] = [moved["digests"], moved["different"]]
    for number, engine in enumerate(made):
        if engine is not None:
            experts = engine.module.model.layers[0].mlp.experts
            found[f"experts {number}"] = [
                [sorted(set(expert.flatten().tolist())) for expert in param] for param in experts.parameters()
            ]
    return found


def refused(seat: Seat) -> dict[str, str]:
    """What cannot be built or read, on every rank of the world."""
    found = {}
    for name, ranks, size in (("odd number", [0, 1, 2], 2), ("three", [0, 1, 2], 3), ("uneven", [0, 1, 2, 4], 2)):
        found[name] = on_engines.refusal(lambda r=ranks, s=size: own_groups._check_grid(r, 1, s))
    found["both degrees"] = on_engines.refusal(lambda: own_groups.make_grid([0, 1, 2, 3], 2, expert_parallel=2))
    part, every = on_engines.group_of((0, 1)), on_engines.group_of((0, 1, 2, 3))
    settings, model = config(2, 1, 2), torch.nn.Linear(2, 2)
    subgroup.install()
    if part is not None:
        found["no grid"] = on_engines.refusal(lambda: subgroup.initialize_over(part, model, settings))
    grid = _KEPT["grid (0, 1, 2, 3) 4"]
    found["other grid"] = on_engines.refusal(lambda: subgroup.initialize_over(every, model, settings, grid=grid))
    tensor = settings | {"tensor_parallel": {"autotp_size": 2}}
    found["with AutoTP"] = on_engines.refusal(lambda: subgroup.initialize_over(every, model, tensor))
    engine = engine_over((0, 1, 2, 3), tiny_model(1), config(4, 1, 2))
    layer = engine.module.model.layers[1].mlp
    layer.folding_group_handles = object()
    found["folded"] = on_engines.refusal(lambda: engines.describe_engine(engine))
    layer.folding_group_handles = None
    layer.experts.w1.data = layer.experts.w1.data[:1].clone()
    found["replaced"] = on_engines.refusal(lambda: engines.describe_engine(engine))
    del layer.experts.w1.ds_autoep_uc_meta
    found["does not say which"] = on_engines.refusal(lambda: engines.describe_engine(engine))
    engine.module = torch.nn.Linear(2, 2)
    found["own MoE layers"] = on_engines.refusal(lambda: engines.describe_engine(engine))
    return found
