"""Jobs for ZeRO-3 engines over a subset of the ranks. ``_KEPT`` holds what a later job of the same process needs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pool import Seat

from relaymeter.errors import RelaymeterError
from relaymeter.relayout import engines, own_groups, subgroup
from relaymeter.relayout.rank_order import check_order

_KEPT: dict[str, Any] = {}
WIDTH = 48


class Stack(torch.nn.Module):
    """Equal layers, named by one letter each and run in the order of ``order``."""

    def __init__(self, names: str = "abc", order: str | None = None) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(WIDTH, WIDTH))
        self.order = order or names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = torch.tanh(getattr(self, name)(x))
        return x.float().pow(2).sum()


class Tied(torch.nn.Module):
    """Layer 1 uses layer 2's weight; some weights have an odd number of elements; layer 0 is tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 7), torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)])
        self.layers[1].weight = self.layers[2].weight
        self.tail = torch.nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.tail(x).float().pow(2).sum()


def config(ranks: int, **zero: Any) -> dict[str, Any]:
    """Plain SGD without clipping, so that weights show the scale of the averaged gradient. ``zero``: ZeRO settings."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2 * ranks,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 100_000,
            **zero,
        },
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_allow_untested_optimizer": True,
    }


def train_against_torch(engine: Any, reference: torch.nn.Module, members: list[int], rank: int) -> tuple[bool, float]:
    """Train both three steps on the same batches: whether the weights have equal bits, and their largest difference."""
    from deepspeed.utils import safe_get_full_fp32_param

    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(7)
    place = members.index(rank)
    for _ in range(3):
        batch = torch.randn(2 * len(members), WIDTH, generator=draw)
        engine.backward(engine(batch[2 * place : 2 * place + 2]))
        engine.step()
        optimizer.zero_grad()
        losses = [reference(batch[2 * k : 2 * k + 2]) for k in range(len(members))]
        (sum(losses) / len(members)).backward()
        optimizer.step()
    params = [param for _, param in engine.module.named_parameters()]
    mine = params if engine.zero_optimization_stage() == 0 else [safe_get_full_fp32_param(param) for param in params]
    pairs = [(one.detach(), other.detach()) for one, other in zip(mine, reference.parameters(), strict=True)]
    equal = all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs)
    return equal, max(float((one - other).abs().max()) for one, other in pairs)


def twins(seed: int, names: str = "abc") -> tuple[Stack, Stack]:
    """Two models of equal weights."""
    torch.manual_seed(seed)
    model, reference = Stack(names), Stack(names)
    reference.load_state_dict(model.state_dict())
    return model, reference


def refusal(attempt: Callable[[], Any]) -> str:
    """Type and text of the error that ``attempt`` ends in."""
    try:
        attempt()
    except RelaymeterError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def patched_functions() -> dict[str, Any]:
    return {f"{getattr(owner, '__name__', owner)}.{name}": vars(owner)[name] for owner, name, _ in subgroup._sites()}


def groups_state() -> dict[str, int]:
    from deepspeed.utils import groups

    return {name: id(value) for name, value in vars(groups).items() if not callable(value) and name[:2] != "__"}


def pair(seat: Seat) -> Any:
    """The group of ranks 1 and 2, made once; None on rank 0."""
    if "pair" not in _KEPT:
        _KEPT["pair"] = subgroup.make_group([1, 2], time_limit_s=60)
    return _KEPT["pair"]


def proof(seat: Seat) -> dict[str, Any]:
    """Three SGD steps on ranks 1 and 2 while rank 0, without DeepSpeed, waits in the store."""
    group = pair(seat)
    if group is None:
        seat.store.wait(["proof/1", "proof/2"], timedelta(seconds=80))
        return {"deepspeed": "deepspeed" in sys.modules}
    import deepspeed  # noqa: F401

    before, state = patched_functions(), groups_state()
    model, reference = twins(0)
    start = {name: value.clone() for name, value in reference.state_dict().items()}
    with subgroup.subgroup_engines() as scoping:
        replaced = [name for name, function in patched_functions().items() if function is not before[name]]
        engine = subgroup.initialize_over(group, model, config(2))
        groups_kept = groups_state() == state
        equal, largest = train_against_torch(engine, reference, [1, 2], seat.rank)
    _KEPT["engine"], _KEPT["reference"] = engine, reference
    seat.store.set(f"proof/{seat.rank}", "done")
    return {
        "equal": equal,
        "largest": largest,
        "moved": min(float((start[n] - v).abs().max()) for n, v in reference.state_dict().items()),
        "counts": dict(scoping.counts),
        "groups_kept": groups_kept,
        "replaced_all": sorted(replaced) == sorted(before),
        "originals": patched_functions() == before,
        "dtype": str(next(engine.module.parameters()).dtype),
    }


def other_stages(seat: Seat) -> dict[str, Any]:
    """Engines below ZeRO-3 on ranks 1 and 2, which clip gradients and train while rank 0 does nothing."""
    group = pair(seat)
    found: dict[str, Any] = {}
    for stage in (0, 1, 2) if group is not None else ():
        with subgroup.subgroup_engines():
            model, reference = twins(20 + stage)
            settings = config(2, stage=stage) | {"gradient_clipping": 1e9}
            engine = subgroup.initialize_over(group, model, settings)
            found[str(stage)] = train_against_torch(engine, reference, [1, 2], seat.rank)
    return found


def alone(seat: Seat) -> dict[str, Any]:
    """An engine over one rank of three."""
    group = subgroup.make_group([2], time_limit_s=60)
    if group is None:
        return {}
    with subgroup.subgroup_engines():
        model, reference = twins(4)
        engine = subgroup.initialize_over(group, model, config(1))
        equal, _ = train_against_torch(engine, reference, [2], seat.rank)
    return {"equal": equal, "ranks": engines.describe_engine(engine)["ranks"]}


def everyone(seat: Seat) -> dict[str, Any]:
    """An engine over all three ranks, made by plain ``deepspeed.initialize`` after the one on ranks 1 and 2."""
    import deepspeed

    model, reference = twins(1)
    with subgroup.subgroup_engines() as scoping:
        engine, *_ = deepspeed.initialize(model=model, config=config(3), model_parameters=model.parameters())
        _, largest = train_against_torch(engine, reference, [0, 1, 2], seat.rank)
        first_id = int(next(engine.module.parameters()).ds_id)
        counts = dict(scoping.counts)
        older = None
        if seat.rank > 0:
            older, _ = train_against_torch(_KEPT["engine"], _KEPT["reference"], [1, 2], seat.rank)
    return {"largest": largest, "first_id": first_id, "counts": counts, "older": older}


def gathers(seat: Seat) -> dict[str, Any]:
    """Coalesced gathers in safe mode: one that agrees, and one in which the two ranks name different parameters."""
    if seat.rank == 0:
        return {}
    engine = _KEPT["engine"]
    weights = dict(engine.module.named_parameters())
    one, two = weights["a.weight"], weights["b.weight" if seat.rank == 1 else "c.weight"]
    with subgroup.subgroup_engines() as scoping:
        text = refusal(lambda: one.all_gather_coalesced([one, two], safe_mode=True))
        untouched = all(param.ds_status.name == "NOT_AVAILABLE" for param in weights.values())
        chosen = [weights["c.bias"], one, weights["b.weight"]]
        one.all_gather_coalesced(chosen, safe_mode=True).wait()
        expected = dict(_KEPT["reference"].named_parameters())
        right = all(torch.equal(p.data, expected[n]) for n, p in weights.items() if any(p is q for q in chosen))
        for param in chosen:
            param.partition()
        counts = dict(scoping.counts)
    return {"text": text, "untouched": untouched, "right": right, "counts": counts}


def gradients(seat: Seat) -> dict[str, Any]:
    """``enable_sanity_checks``: equal buckets pass, buckets in different orders are refused."""
    group = pair(seat)
    if group is None:
        return {}
    with subgroup.subgroup_engines() as scoping:
        model, reference = twins(2)
        engine = subgroup.initialize_over(group, model, config(2, enable_sanity_checks=True))
        equal, _ = train_against_torch(engine, reference, [1, 2], seat.rank)
        counts = dict(scoping.counts)
        odd = Stack(order="abc" if seat.rank == 1 else "acb")
        engine = subgroup.initialize_over(group, odd, config(2, enable_sanity_checks=True))
        loss = engine(torch.ones(2, WIDTH))
        text = refusal(lambda: engine.backward(loss))
    return {"equal": equal, "counts": counts, "text": text}


def orders(seat: Seat) -> dict[str, Any]:
    """Rank 1 runs a, b, c; rank 2 runs a, c, b, or lacks c, or has nothing to compare."""
    group = pair(seat)
    if group is None:
        return {}
    second = seat.rank == 2
    found: dict[str, Any] = {}
    with subgroup.subgroup_engines():
        engine = subgroup.initialize_over(group, Stack(order="acb" if second else "abc"), config(2))
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
        found["run"] = refusal(lambda: engine(torch.ones(2, WIDTH)))
        lacking = Stack("ab" if second else "abc")
        found["lacking"] = refusal(lambda: subgroup.initialize_over(group, lacking, config(2)))

    def compare(here: str, there: str) -> Any:
        names = there if second else here
        try:
            return check_order("trace", [ord(name) for name in names], names, group)
        except RelaymeterError as error:
            return str(error)

    found["empty"] = compare("", "")
    found["half empty"] = compare("abc", "")
    found["shorter"] = compare("abc", "ab")
    found["equal"] = compare("abc", "abc")
    return found


def refused(seat: Seat) -> dict[str, str]:
    """Wrong uses, none of which may wait for another rank."""
    import deepspeed.runtime.zero.stage3 as stage3

    group, model = pair(seat), Stack()
    found = {
        "no such rank": refusal(lambda: subgroup.make_group([1, 3])),
        "no rank": refusal(lambda: subgroup.make_group([])),
        "outside": refusal(lambda: subgroup.initialize_over(None, model, config(2))),
    }
    if group is not None:
        found["not installed"] = refusal(lambda: subgroup.initialize_over(group, model, config(2)))
        found["stage"] = refusal(lambda: subgroup.initialize_over(group, model, config(2, stage=4)))
        expert_parallel = config(2) | {"expert_parallel": {"enabled": True}}
        found["world only"] = refusal(lambda: subgroup.initialize_over(group, model, expert_parallel))
        tensor_parallel = config(2) | {"tensor_parallel": {"autotp_size": 2}}
        found["no grid"] = refusal(lambda: subgroup.initialize_over(group, model, tensor_parallel))
        found["crooked"] = refusal(lambda: own_groups.make_grid([1, 2], 2))
    kind = stage3.DeepSpeedZeroOptimizer_Stage3
    method = kind._setup_for_real_optimizer
    del kind._setup_for_real_optimizer
    try:
        found["other version"] = refusal(subgroup.install)
        found["left alone"] = str(
            not any(hasattr(f, subgroup._MARK) for f in (stage3.assert_ints_same_as_other_ranks,))
        )
    finally:
        kind._setup_for_real_optimizer = method
    return found


def storage(seat: Seat) -> dict[str, Any]:
    """Layout and storage of a trained bf16 engine with ties, padding and persistent parameters, against metadata."""
    group = pair(seat)
    engine = None
    with contextlib.ExitStack() as stack:
        if group is not None:
            stack.enter_context(subgroup.subgroup_engines())
            torch.manual_seed(3)
            settings = config(2, stage3_param_persistence_threshold=10) | {"bf16": {"enabled": True}}
            engine = subgroup.initialize_over(group, Tied(), settings)
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 5, dtype=torch.bfloat16)))
                engine.step()
        layout = engines.share_layout(engine, seat.world_size, seat.store, "layout/tied", time_limit_s=60)
        found: dict[str, Any] = {
            "specs": [[spec.name, list(spec.shape), spec.dtype] for spec in layout.specs.values()],
            "aliases": dict(layout.aliases),
            "storage": {name: dict(place.storage) for name, place in layout.placements.items()},
            "ranks": {name: list(place.ranks) for name, place in layout.placements.items()},
        }
        if engine is not None:
            found |= _rebuilt(engine, group, layout)
        with describing_odd(engine if seat.rank == 2 else None):
            found["differing"] = refusal(lambda: engines.share_layout(engine, 3, seat.store, "layout/odd"))
        found["late"] = (
            "" if engine else refusal(lambda: engines.share_layout(None, 3, seat.store, "x", time_limit_s=0.2))
        )
    return found


def _rebuilt(engine: Any, group: Any, layout: Any) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param

    parts = engines.weights_storage(engine)
    params = dict(engine.module.named_parameters())
    rank = dist.get_rank()
    right = {}
    for name, part in parts.items():
        rows = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(rows, part, group=group)
        whole = torch.cat(rows)[: layout.specs[name].numel].view(layout.specs[name].shape)
        right[name] = torch.equal(whole, safe_get_full_fp32_param(params[name]).to(torch.bfloat16))
    return {
        "sizes": all(
            part.dim() == 1 and part.numel() == layout.placements[n].storage[rank] for n, part in parts.items()
        ),
        "in place": all(part.data_ptr() == params[n].ds_tensor.data_ptr() for n, part in parts.items()),
        "right": right,
        "persistent": [name for name, param in params.items() if param.ds_persist],
        "placeholders": [list(param.shape) for param in params.values() if not param.ds_persist],
    }


@contextlib.contextmanager
def describing_odd(engine: Any | None) -> Iterator[None]:
    """The engine's first weight says another shape meanwhile."""
    weights = [] if engine is None else [next(engine.module.parameters())]
    shapes = [param.ds_shape for param in weights]
    for param in weights:
        param.ds_shape = torch.Size([35])
    try:
        yield
    finally:
        for param, shape in zip(weights, shapes, strict=True):
            param.ds_shape = shape


def upstream(seat: Seat) -> dict[str, Any]:
    """A DeepSpeed whose checks already take a group, made of this one: its barriers are its own affair."""
    if seat.rank == 0:
        return {}
    from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, utils

    before, check = subgroup.checks_take_group(), utils.assert_ints_same_as_other_ranks
    kind = stage3.DeepSpeedZeroOptimizer_Stage3
    utils.assert_ints_same_as_other_ranks = lambda ints, group=None: check(ints)
    try:
        with subgroup.subgroup_engines():
            return {
                "before": before,
                "after": subgroup.checks_take_group(),
                "barriers replaced": hasattr(kind._setup_for_real_optimizer, subgroup._MARK),
                "checked": hasattr(partitioned_param_coordinator.assert_ints_same_as_other_ranks, subgroup._MARK),
            }
    finally:
        utils.assert_ints_same_as_other_ranks = check
