"""Jobs on checkpoints: of engines over some of the ranks, and changes through DeepSpeed's universal checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine_models import Block, Decayed, Varied, autotp, decay_groups, model_of
from jobs_engines import bits, config, engine_over, refusal, train, whole_block, whole_masters, whole_weights
from pool import Seat

from relaymeter.harness.compare_ends import check_digests, engine_digests
from relaymeter.harness.paths.universal import through_universal

WIDTHS = {Varied: 5, Block: 8, Decayed: 8}
ADAM = ("exp_avg", "exp_avg_sq")


def settings(ranks: list[int], stage: int, degree: int, dtype: str, **more: Any) -> dict[str, Any]:
    entries = config(len(ranks) // degree, stage, bf16=dtype == "bfloat16") | {"gradient_clipping": 1.0}
    if dtype == "float16":
        entries["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    return entries | (autotp(degree) if degree > 1 else {}) | more


def batches(kind: type[torch.nn.Module], dtype: str, place: int, steps: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(place)
    return [torch.randn(2, WIDTHS[kind], generator=draw).to(getattr(torch, dtype)) for _ in range(steps)]


def trained(engine: Any, kind: type[torch.nn.Module], dtype: str, place: int, steps: int = 3) -> Any:
    for batch in batches(kind, dtype, place, steps):
        train(engine, batch)
    return engine


def held(engine: Any, kind: type[torch.nn.Module], states: tuple[str, ...] = ADAM) -> dict[str, torch.Tensor]:
    """Weights, masters and moments, whole, as DeepSpeed gathers them."""
    found = {}
    for state in ("weights", "master", *states):
        if kind is Block:
            whole = whole_block(engine, state)
        else:
            whole = (
                whole_weights(engine)
                if state == "weights"
                else whole_masters(engine, {"master": None}.get(state, state))
            )
        found |= {f"{state} {name}": bits(value).clone() for name, value in whole.items()}
    return found


def local(engine: Any, kind: type[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Weights and masters, whole, and this rank's own optimizer state: DeepSpeed gathers none after a plain load."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    kept = {
        f"{number} {key}": value for number, state in enumerate(base.state.values()) for key, value in state.items()
    }
    return held(engine, kind, ()) | {name: bits(value).clone() for name, value in kept.items() if name[-4:] != "step"}


def different(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    return [n for n in {**one, **other} if n not in one or n not in other or not torch.equal(one[n], other[n])]


def counters(engine: Any) -> dict[str, Any]:
    """What a checkpoint keeps besides tensors, as JSON."""
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    scaler = getattr(optimizer, "loss_scaler", None)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in base.param_groups]
    found = {name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")}
    found["steps"] = sorted({float(state["step"]) for state in base.state.values() if "step" in state})
    found["groups"] = json.loads(json.dumps(groups, default=float))
    found["scheduler"] = None if engine.lr_scheduler is None else repr(engine.lr_scheduler.state_dict())
    found["scaler"] = None if scaler is None else repr(sorted(vars(scaler).items()))
    return found


def quiet(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def subset(seat: Seat, stage: int, ranks: list[int], degree: int, dtype: str, folder: str) -> dict[str, Any]:
    """An engine over ``ranks`` saves, another one of the same layout loads; the other ranks do nothing meanwhile."""
    import deepspeed.runtime.engine as namespace

    kind: type[torch.nn.Module] = Varied if degree == 1 else Block
    mine = seat.rank in ranks
    entries = settings(ranks, stage, degree, dtype)
    one = engine_over(tuple(ranks), model_of(kind, 1) if mine else None, entries)
    two = engine_over(tuple(ranks), model_of(kind, 2) if mine else None, entries)
    if one is None or two is None:
        return {}
    place = ranks.index(seat.rank) // degree
    comm = namespace.dist
    trained(one, kind, dtype, place)
    want, fields = local(one, kind), counters(one)
    quiet(lambda: one.save_checkpoint(folder, tag="kept", client_state={"mark": stage}))
    files = sorted(path.name for path in Path(folder, "kept").iterdir())
    latest = Path(folder, "latest").read_text()
    after = different(want, local(one, kind))
    _, client = quiet(lambda: two.load_checkpoint(folder))
    loaded = different(want, local(two, kind))
    same_fields = counters(two) == fields
    for engine in (one, two):
        trained(engine, kind, dtype, place + 7, 2)
    return {
        "different": loaded,
        "compared": len(want),
        "saving changed": after,
        "counters": same_fields,
        "steps": fields["global_steps"],
        "goes on": different(local(one, kind), local(two, kind)),
        "mark": client["mark"],
        "files": files,
        "latest": latest,
        "module as before": namespace.dist is comm,
        "rank as before": one.global_rank == two.global_rank == seat.rank,
    }


def by_one_rank(seat: Seat, folder: str) -> dict[str, Any]:
    """What only one rank of an engine over ranks 1 and 2 writes, its tag check, and an error while it saves."""
    import deepspeed.runtime.engine as namespace

    mine = seat.rank in (1, 2)
    more = {"checkpoint": {"tag_validation": "FAIL"}}
    entries = settings([1, 2], 3, 1, "bfloat16", **more)
    entries["zero_optimization"] |= {"stage3_gather_16bit_weights_on_model_save": True}
    engine = engine_over((1, 2), model_of(Varied, 1) if mine else None, entries)
    if engine is None:
        return {}
    comm, found = namespace.dist, dict[str, Any]()
    found["equal tags"] = quiet(lambda: engine.save_checkpoint(folder, tag="one"))
    try:
        quiet(lambda: engine.save_checkpoint(folder, tag=f"of rank {seat.rank}"))
        found["other tags"] = "no error"
    except AssertionError as error:
        found["other tags"] = str(error)
    state = torch.load(next(Path(folder, "one").glob("zero_pp_rank_0_*model_states.pt")), weights_only=False)
    found["tied"] = dict(state["shared_params"])
    found["scripts"] = sorted(path.name for path in Path(folder).glob("*.py"))
    found["consolidated"] = quiet(lambda: engine.save_16bit_model(folder, "whole.bin"))
    want = {name: bits(value) for name, value in whole_weights(engine).items()}
    whole = torch.load(Path(folder, "whole.bin"))
    found["whole"] = different({name: bits(whole[name]) for name in want if name in whole}, want)
    Path(folder, "a file").touch()
    try:
        quiet(lambda: engine.save_checkpoint(folder, tag="a file/tag"))
        found["no folder"] = "no error"
    except (OSError, RuntimeError) as error:
        found["no folder"] = type(error).__name__
    found["as before"] = namespace.dist is comm and engine.global_rank == seat.rank
    engine._config.zero_config.pipeline_loading_checkpoint = True
    found["one after the other"] = refusal(lambda: engine.load_checkpoint(folder))
    engine.checkpoint_engine.is_decoupled = lambda: True
    found["decoupled"] = refusal(lambda: engine.save_checkpoint(folder))
    return found


def whole_world(seat: Seat, folder: str) -> dict[str, Any]:
    """An engine over all ranks, made by plain ``deepspeed.initialize`` after the others, saves and loads."""
    import deepspeed

    entries = settings([0, 1, 2, 3], 3, 1, "bfloat16")
    made = []
    for seed in (1, 2):
        model = model_of(Decayed, seed)
        made.append(
            quiet(lambda m=model: deepspeed.initialize(model=m, config=entries, model_parameters=m.parameters())[0])
        )
    trained(made[0], Decayed, "bfloat16", seat.rank)
    quiet(lambda: made[0].save_checkpoint(folder))
    quiet(lambda: made[1].load_checkpoint(folder))
    return {
        "different": different(held(made[0], Decayed), held(made[1], Decayed)),
        "counters": counters(made[0]) == counters(made[1]),
        "latest": Path(folder, "latest").read_text(),
        "followed": "save_checkpoint" in vars(made[0]),
        "files": len(list(Path(folder, "global_step3").glob("*_states.pt"))),
    }


@contextlib.contextmanager
def states_in_an_order_of(rank: int) -> Iterator[None]:
    """DeepSpeed enters the states that it loads in the order of a set: here in another one on every other rank."""
    import deepspeed.runtime.base_optimizer as loader

    enter = loader.map_to_flat_opt_states

    def ordered(flat: Any, params: Any, state: Any, keys: set[str]) -> None:
        enter(flat, params, state, sorted(keys, reverse=rank % 2 == 1))

    with mock.patch.object(loader, "map_to_flat_opt_states", ordered):
        yield


def universal(
    seat: Seat,
    source: list[Any],
    destination: list[Any],
    folder: str,
    dtype: str = "float32",
    optimizer: str = "AdamW",
    groups: bool = False,
) -> dict[str, Any]:
    """``source`` and ``destination``: stage, ranks, tensor-parallel degree. What arrives through a checkpoint, where
    the destination was built with other values; or what the refusal says."""
    parallel = source[2] > 1 or destination[2] > 1
    kind: type[torch.nn.Module] = Block if parallel else Decayed
    params = {"lr": 0.01, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.01, "torch_adam": True}
    warmup = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10}
    more = {
        "optimizer": {"type": optimizer, "params": params},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }

    def build(place: list[Any], seed: int, extra: Mapping[str, Any]) -> Any:
        stage, ranks, degree = place
        model = model_of(kind, seed) if seat.rank in ranks else None
        options = {"model_parameters": decay_groups(model)} if groups and model is not None else {}
        entries = settings(ranks, stage, degree, dtype, **more) | dict(extra)
        return engine_over(tuple(ranks), model, entries, **options)

    engine, found = build(source, 1, {}), dict[str, Any]()
    if engine is not None:
        trained(engine, kind, dtype, source[1].index(seat.rank) // source[2])
    arrived: list[Any] = []
    with states_in_an_order_of(seat.rank):
        text = refusal(
            lambda: arrived.append(through_universal(engine, lambda extra: build(destination, 2, extra), folder))
        )
    other = arrived[0] if arrived else None
    found["refused"] = text
    if text == "no error":
        wanted = {name: copies[0] for name, copies in engine_digests(engine).items()}
        found["digests"] = check_digests(wanted, engine_digests(other), weights_only=False)
    names = "weights", "master", *ADAM
    for side, one in (("source", engine), ("destination", other)):
        if one is not None and text == "no error":
            path = Path(folder, f"{side} {seat.rank}")
            torch.save({"held": held(one, kind), "counters": counters(one)}, path)
    seat.store.set(f"{folder} {seat.rank}", "written")
    seat.store.wait([f"{folder} {rank}" for rank in range(seat.world_size)])
    found["left"] = [name for name in os.listdir(folder) if name.startswith("universal")]
    if text == "no error" and other is not None:
        one = torch.load(Path(folder, f"source {source[1][0]}"), weights_only=False)
        two = torch.load(Path(folder, f"destination {seat.rank}"), weights_only=False)
        found["different"] = different(one["held"], two["held"])
        found["compared"] = {name: sum(key.startswith(f"{name} ") for key in two["held"]) for name in names}
        found["fields"] = [name for name in one["counters"] if one["counters"][name] != two["counters"][name]]
        found["micro steps"] = other.micro_steps
    return found


def universal_misused(seat: Seat, folder: str) -> dict[str, Any]:
    """No source; no such folder; a destination that one rank cannot build, or that was built without the entry."""
    source = engine_over((0, 1), model_of(Decayed, 1) if seat.rank < 2 else None, settings([0, 1], 1, 1, "float32"))
    if source is not None:
        trained(source, Decayed, "float32", seat.rank)

    def failing(extra: Mapping[str, Any]) -> Any:
        if seat.rank == 2:
            raise ValueError("no memory")
        return None

    def plain(extra: Mapping[str, Any]) -> Any:
        entries = settings([0, 1], 1, 1, "float32")
        return engine_over((0, 1), model_of(Decayed, 2) if seat.rank < 2 else None, entries)

    found = {
        "no source": refusal(lambda: through_universal(None, plain, folder)),
        "no folder": refusal(lambda: through_universal(source, plain, f"{folder}/none")),
        "not built": refusal(lambda: through_universal(source, failing, folder)),
        "no entry": refusal(lambda: through_universal(source, plain, folder)),
    }
    torch.distributed.barrier()
    return found | {"left": os.listdir(folder)}
