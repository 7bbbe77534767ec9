"""Whole training states as DeepSpeed and plain collectives give them: an oracle that shares no code with the planner.

    source = gather_state(engine, config, training, group)          # the engine's ranks; every tensor whole on each
    report = compare_states(source, destination)                    # every rank of the world, None on ranks without

Masters and optimizer states come from ``deepspeed.utils.safe_get_full_fp32_param`` and
``safe_get_full_optimizer_state``, weights from ``deepspeed.zero.GatheredParameters``: whole over the data-parallel
ranks. One plain all_gather over the engine then brings every rank's part to every rank, and parts are joined along the
dim that AutoTP or AutoEP is known to cut. Values are compared bit for bit, copies with each other too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.harness.state_config import EngineConfig, TrainingConfig
from relaymeter.harness.state_engines import quiet
from relaymeter.harness.state_models import cut_dims
from relaymeter.relayout.transport import control_device

__all__ = [
    "FullStates",
    "GatheredState",
    "OracleReport",
    "compare_states",
    "gather_state",
    "plain_fields",
    "share_state",
    "state_difference",
]

Tensors = dict[str, torch.Tensor]
#: States of one value per weight that each optimizer keeps.
_MOMENTS = {"SGD": ("momentum_buffer",)}
_ADAM = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class GatheredState:
    """A whole training state: ``"<state> <parameter>"`` -> tensor, on the host; how many ranks hold a whole copy of
    each, and where copies differ, a text for each tensor."""

    whole: Tensors
    copies: Mapping[str, int]
    torn: tuple[str, ...]

    def differences(self, other: GatheredState, *, buffers: bool = True) -> Iterator[str]:
        """Where the tensors of ``other`` are not this state's, bit for bit; a text for each."""
        for name, mine in self.whole.items():
            if buffers or not name.startswith("buffer "):
                text = _first_difference(name, mine, other.whole[name])
                if text:
                    yield text
        yield from other.torn


@dataclass(frozen=True)
class OracleReport:
    """Copies of tensors compared and equal; the first that is not, or None."""

    passed: int
    total: int
    mismatch: str | None

    @property
    def ok(self) -> bool:
        """Whether something was compared and all of it is equal."""
        return 0 < self.total == self.passed


def gather_state(
    engine: Any | None, config: EngineConfig, training: TrainingConfig, group: dist.ProcessGroup | None
) -> GatheredState | None:
    """Every master, optimizer state, weight and buffer of ``engine``, whole. None on a rank without it.

    ``group``: the engine's ranks, which call this together; others may call it and return at once.
    """
    if engine is None or group is None:
        return None
    with quiet():
        every = _from_all(_of_data_parallel(engine, training), group)
    degree = config.tensor_parallel * config.expert_parallel
    whole: Tensors = {}
    copies: dict[str, int] = {}
    torn: list[str] = []
    for name, mine in every[0].items():
        dim = cut_dims(training, name.split(" ", 1)[1]) if degree > 1 else None
        parts = [values[name] for values in every]
        width = 1 if dim is None else degree
        rows = [parts[at : at + width] for at in range(0, len(parts), width)]
        joined = [row[0] if dim is None else torch.cat(row, dim) for row in rows]
        whole[name], copies[name] = joined[0], len(rows)
        for at, other in enumerate(joined[1:], 1):
            if not _same(joined[0], other):
                first, second = (list(config.ranks[place * width :][:width]) for place in (0, at))
                torn.append(f"{name} {list(mine.shape)} on ranks {second} differs from its copy on ranks {first}")
                break
    return GatheredState(whole, copies, tuple(torn))


class FullStates:
    """What an engine's data-parallel ranks hold together, tensor by tensor, as DeepSpeed gathers it.

    Every rank of the engine makes one and asks for the same tensors in the same order. ``states``: ``master``, and the
    optimizer's states of one value per weight once it has made a step.
    """

    def __init__(self, engine: Any, training: TrainingConfig) -> None:
        self._engine = engine
        self._params = dict(engine.module.named_parameters())
        self.states: tuple[str, ...] = ("master",)
        if int(engine.global_steps) > int(engine.skipped_steps):
            self.states += _MOMENTS.get(training.optimizer, _ADAM)
            _link_all(engine.optimizer)
        self._whole_masters = _stage_0(engine) if int(engine.zero_optimization_stage()) == 0 else None

    def state(self, state: str, name: str) -> torch.Tensor:
        """One of ``states`` of the parameter ``name``, whole but for tensor or expert parallelism, fp32."""
        kept = None if state == "master" else state
        return _state_of(self._engine, name, self._params[name], kept, self._whole_masters)

    def weight(self, name: str) -> torch.Tensor:
        """A copy of the parameter or buffer ``name``, whole in the same sense."""
        import deepspeed

        param = self._params[name] if name in self._params else self._engine.module.get_buffer(name)
        with deepspeed.zero.GatheredParameters([param] if hasattr(param, "ds_id") else []):
            found: torch.Tensor = param.data.detach().clone()
        return found


def _of_data_parallel(engine: Any, training: TrainingConfig) -> Tensors:
    """What this rank's data-parallel ranks hold together, as DeepSpeed gathers it."""
    found: Tensors = {}
    full = FullStates(engine, training)
    for name, param in engine.module.named_parameters():
        if param.requires_grad and getattr(param, "ds_numel", param.numel()):
            for state in full.states:
                found[f"{state} {name}"] = full.state(state, name).detach().clone()
        found[f"weight {name}"] = full.weight(name)
    kept = set(engine.module.state_dict())
    for name, buffer in engine.module.named_buffers():
        if name in kept:
            found[f"buffer {name}"] = buffer.detach().clone()
    return found


def _link_all(optimizer: Any) -> None:
    """Below ZeRO-3, DeepSpeed 0.19.8 links parameters to their optimizer states after the first group's first step,
    when the other groups have no state yet, and never again: ``safe_get_full_optimizer_state`` fails for those."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for params, flat in zip(
        getattr(optimizer, "bit16_groups", ()), getattr(optimizer, "single_partition_of_fp32_groups", ()), strict=True
    ):
        linked = [param._hp_mapping.optim_fragment for param in params if param._hp_mapping is not None]
        if not all(linked):
            lazy_init_hp_params_optimizer_state(params, flat, optimizer.optimizer.state)


def _state_of(
    engine: Any, name: str, param: Any, state: str | None, whole_masters: Mapping[str, tuple[Any, Any]] | None
) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: torch.Tensor
    if whole_masters is None:
        found = safe_get_full_fp32_param(param) if state is None else safe_get_full_optimizer_state(param, state)
        return found
    master, kept = whole_masters[name]
    if state is None:
        found = master.reshape(param.shape)
        return found
    # A parameter that never had a gradient has no state here; with ZeRO it shares a flat tensor and has zeros.
    return kept[state].reshape(param.shape) if state in kept else torch.zeros_like(param, dtype=torch.float32)


def _stage_0(engine: Any) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
    """Without ZeRO, of which ``safe_get_full_*`` know nothing: each trained parameter's master and optimizer state."""
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    names = {id(param): name for name, param in engine.module.named_parameters()}
    found: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {}
    flats = getattr(optimizer, "fp32_groups_flat", None)
    for number, params in enumerate(getattr(optimizer, "fp16_groups", ())):
        if flats is not None:
            sizes = [param.numel() for param in params]
            masters = flats[number].detach()[: sum(sizes)].split(sizes)
            states = {key: value for key, value in base.state.get(flats[number], {}).items() if _is_line(value)}
            pieces = {key: value[: sum(sizes)].split(sizes) for key, value in states.items()}
            kept = [{key: split[place] for key, split in pieces.items()} for place in range(len(params))]
        else:
            masters = tuple(optimizer.fp32_groups[number])
            kept = [base.state.get(master, {}) for master in masters]
        for param, master, own in zip(params, masters, kept, strict=True):
            found[names[id(param)]] = (master, own)
    for name, param in engine.module.named_parameters() if not found else ():
        found[name] = (param, base.state.get(param, {}))
    return found


def _is_line(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _from_all(mine: Tensors, group: dist.ProcessGroup) -> list[Tensors]:
    """Every rank's tensors, on the host: one all_gather of bytes. All ranks hold the same names and shapes."""
    device = control_device(group)
    data = torch.cat([_bytes(value) for value in mine.values()]).to(device)
    every = [torch.empty_like(data) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, data, group=group)
    return [_parted(one.cpu(), mine) for one in every]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _parted(data: torch.Tensor, like: Mapping[str, torch.Tensor]) -> Tensors:
    found, at = {}, 0
    for name, value in like.items():
        size = value.numel() * value.element_size()
        found[name] = data[at : at + size].clone().view(value.dtype).reshape(value.shape)
        at += size
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def compare_states(source: GatheredState | None, destination: GatheredState | None) -> OracleReport:
    """Every copy of every tensor of the destination beside the source's, bit for bit. Collective over the world.

    The source's first rank broadcasts its whole tensors; the destination's first rank broadcasts the finding.
    """
    device = control_device()
    known = _broadcast_state(source, device)
    finding = b"" if destination is None else json.dumps(_finding(known, destination)).encode()
    passed, total, mismatch = json.loads(_broadcast(finding or None, device).numpy().tobytes())
    return OracleReport(passed, total, mismatch)


def _finding(known: Mapping[str, torch.Tensor], destination: GatheredState) -> list[Any]:
    wrong = [*(f"{name} is missing in the destination" for name in known if name not in destination.whole)]
    wrong += [f"{name} is not in the source" for name in destination.whole if name not in known]
    total = sum(destination.copies.values()) + len(wrong)
    passed = 0
    for name in [name for name in destination.whole if name in known]:
        text = _first_difference(name, known[name], destination.whole[name])
        passed += 0 if text else destination.copies[name]
        wrong += [text] if text else []
    torn = {text.split(" [", 1)[0] for text in destination.torn}
    passed -= sum(name in torn and _same(known[name], destination.whole[name]) for name in destination.whole)
    return [passed, total, next(iter([*wrong, *destination.torn]), None)]


def _first_difference(name: str, wanted: torch.Tensor, found: torch.Tensor) -> str | None:
    if wanted.dtype != found.dtype or wanted.shape != found.shape:
        there, here = (f"{value.dtype} {list(value.shape)}" for value in (wanted, found))
        return f"{name}: {there} in the source, {here} in the destination"
    size = wanted.element_size()
    if not wanted.numel():
        return None
    rows = (_bytes(wanted).view(-1, size) != _bytes(found).view(-1, size)).any(dim=1).nonzero()
    if not len(rows):
        return None
    at = int(rows[0])
    place = [int(index) for index in torch.unravel_index(torch.tensor(at), wanted.shape)] if wanted.dim() else []
    values = [value.reshape(-1)[at].item() for value in (wanted, found)]
    return f"{name} {list(wanted.shape)}: {len(rows)} elements differ, first {place}: {values[0]!r}, not {values[1]!r}"


def share_state(state: GatheredState | None) -> GatheredState:
    """The state of the lowest rank that has one, on every rank. Collective over the world."""
    whole = _broadcast_state(state, control_device())
    return GatheredState(whole, dict.fromkeys(whole, 1), ())


def _broadcast_state(state: GatheredState | None, device: torch.device) -> Tensors:
    header = None
    if state is not None:
        rows = [[n, list(v.shape), str(v.dtype).removeprefix("torch.")] for n, v in state.whole.items()]
        header = json.dumps(rows).encode()
    listed = json.loads(_broadcast(header, device).numpy().tobytes())
    content = b"" if state is None else torch.cat([_bytes(v) for v in state.whole.values()]).numpy().tobytes()
    data = _broadcast(content or None, device)
    like = {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, shape, dtype in listed}
    return _parted(data, like)


def _broadcast(content: bytes | None, device: torch.device) -> torch.Tensor:
    """The bytes of the lowest rank that has some, on every rank of the world."""
    size = torch.tensor([0 if content is None else len(content)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    root = next(rank for rank, found in enumerate(sizes) if int(found))
    data = torch.empty(int(sizes[root]), dtype=torch.uint8, device=device)
    if dist.get_rank() == root and content is not None:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, src=root)
    return data.cpu()


def state_difference(one: GatheredState, other: GatheredState) -> tuple[float, str]:
    """The largest difference of masters over the largest master, and the parameter where it is. Pure."""
    names = [name for name in one.whole if name.startswith("master ")]
    top = max((float(one.whole[name].abs().max()) for name in names), default=0.0)
    worst, where = 0.0, ""
    for name in names:
        apart = float((one.whole[name].double() - other.whole[name].double()).abs().max())
        if apart > worst or not math.isfinite(apart):
            worst, where = apart, name
    return (worst / top if top else worst), where


def plain_fields(engine: Any) -> dict[str, Any]:
    """Counters, learning rates, steps, scheduler and loss scale of an engine, read from its public attributes: what a
    move has to carry besides tensors and what does not depend on the layout. Local."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    names = ("lr", "initial_lr", "betas", "weight_decay", "momentum", "step")
    groups = [[_plain(group[key]) if key in group else None for key in names] for group in base.param_groups]
    steps = {float(state["step"]) for state in base.state.values() if "step" in state}
    scales = vars(scaler) if getattr(scaler, "dynamic", False) else {}  # another has no history
    return {
        "counters": [int(engine.global_steps), int(engine.skipped_steps), int(engine.global_samples)],
        "groups": groups,
        "steps": sorted(steps),
        "scheduler": None if engine.lr_scheduler is None else repr(engine.lr_scheduler.state_dict()),
        "scaler": {key: value for key, value in scales.items() if isinstance(value, bool | int | float)},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(entry) for entry in value] if isinstance(value, Sequence) else value
