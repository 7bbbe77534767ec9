"""The fields of training state: all of it that is not one value per weight, read from a live engine and written back.

    found = read_fields(source_engine)                              # JSON-able, equal on all ranks of the engine
    write_fields(destination_engine, training_match.expected_fields(found, read_fields(destination_engine)))

Fields are the engine's counters, the parameter groups' (lr, initial_lr, betas, weight_decay, a step kept there), the
optimizer state that is not one value per weight (``step``), the lr scheduler's and the loss scaler's. Reading and
writing are local; the ranks of one engine hold the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from relaymeter.errors import InputError
from relaymeter.relayout.engine_reading import master_groups
from relaymeter.relayout.plain_state import decode, encode

__all__ = [
    "COUNTERS",
    "base_optimizer",
    "read_fields",
    "state_tensors",
    "write_fields",
]

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
#: Entries of a parameter group that say what the group is, not how it is trained.
_IDENTITY = ("params", "param_names", "name", "moe")
#: Host copies that DeepSpeed's offload leaves among the optimizer's states: no state of their own.
_HOST_COPY = "_offload_buffer"
#: What a ZeRO or fp16 optimizer keeps of loss scaling beside its scaler.
_SCALING_FLAGS = ("dynamic_loss_scale", "custom_loss_scaler", "external_loss_scale", "overflow")


def base_optimizer(engine: Any) -> Any:
    """The optimizer that steps: the one inside DeepSpeed's, or the engine's own."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _homes(engine: Any) -> Iterator[tuple[int, tuple[str, ...], torch.Tensor]]:
    """Each tensor that the optimizer keeps state by: the number of its parameter group, the names in it, the tensor."""
    number_of = getattr(engine.optimizer, "sub_group_to_group_id", None)
    for number, group in enumerate(master_groups(engine)[1]):
        at = number if number_of is None else int(number_of[number])
        together: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, flat in zip(group.names, group.flats, strict=True):
            together.setdefault(id(flat), (flat, []))[1].append(name)
        for flat, names in together.values():
            yield at, tuple(names), flat


def state_tensors(engine: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Each tensor that the optimizer keeps state by, and that state (empty before the first step)."""
    state = base_optimizer(engine).state
    for _, _, flat in _homes(engine):
        yield flat, state.get(flat, {})


def _per_weight(flat: torch.Tensor, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape and flat.dim() > 0


def read_fields(engine: Any) -> dict[str, Any]:
    """Every field, as JSON-able data. A rank that holds the engine calls this; no communication.

    ``shaped``: whether state has the parameters' shapes, not flat ones; ``homes``: names that share one tensor of
    state; ``per_weight``: state -> name -> dtype, of what moves by a layout; ``per_parameter``: name -> state -> value,
    of what does not. Raises InputError where something of it cannot be carried, naming the place.
    """
    base = base_optimizer(engine)
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(base.param_groups):
        kept = {key: value for key, value in group.items() if key not in _IDENTITY}
        fields = {str(key): encode(value, f"parameter group {number}, {key}") for key, value in kept.items()}
        groups.append({"names": [], "fields": fields})
    homes: list[list[str]] = []
    per_weight: dict[str, dict[str, str]] = {}
    per_parameter: dict[str, dict[str, Any]] = {}
    for number, names, flat in _homes(engine):
        groups[number]["names"] += names
        homes.append(list(names))
        state = base.state.get(flat, {})
        for key, value in state.items():
            if str(key).endswith(_HOST_COPY):
                continue
            moves = _per_weight(flat, value)
            told = None if moves else _encode_state(key, value, names)
            for name in names:
                if moves:
                    per_weight.setdefault(key, {})[name] = str(value.dtype).removeprefix("torch.")
                else:
                    per_parameter.setdefault(name, {})[key] = told
    return {
        "engine": {name: int(getattr(engine, name)) for name in COUNTERS},
        "accumulation": int(engine.gradient_accumulation_steps()),
        "optimizer": _type_name(base),
        "groups": groups,
        "homes": homes,
        "per_weight": per_weight,
        "per_parameter": per_parameter,
        "scheduler": _read_scheduler(engine),
        "scaler": _read_scaler(engine.optimizer),
        "autocast": _read_autocast(engine),
        "shaped": any(flat.dim() != 1 for _, _, flat in _homes(engine)),
    }


def _encode_state(key: str, value: Any, names: tuple[str, ...]) -> Any:
    place = f"optimizer state {key} of {names[0] if names else 'no parameter'}"
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        raise InputError(
            f"{place} is a tensor {list(value.shape)}, neither one value per weight nor a single one: its shape hangs "
            "on how the engine keeps the parameter, so it cannot be carried to another"
        )
    return encode(value, place)


def _read_scheduler(engine: Any) -> dict[str, Any] | None:
    scheduler = engine.lr_scheduler
    if scheduler is None:
        return None
    if not hasattr(scheduler, "state_dict"):
        raise InputError(f"the lr scheduler, a {_type_name(scheduler)}, has no state_dict: it cannot be carried")
    state = dict(scheduler.state_dict())
    return {
        "type": _type_name(scheduler),
        "state": encode(state, "lr scheduler"),
        "settings": _settings(scheduler, state),
    }


def _settings(scheduler: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler's state_dict leaves out of the schedule itself, as DeepSpeed's do: plain public attributes."""
    found = {}
    for key, value in vars(scheduler).items():
        if key not in state and not key.startswith("_"):
            with contextlib.suppress(InputError):
                found[key] = encode(value, key)
    return found


def _autocast_scaler(engine: Any) -> Any | None:
    """torch's GradScaler, where DeepSpeed trains under torch.autocast in fp16."""
    inside = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return inside or getattr(engine, "torch_autocast_z0_gradscaler", None)


def _read_autocast(engine: Any) -> Any | None:
    scaler = _autocast_scaler(engine)
    return None if scaler is None else encode(dict(scaler.state_dict()), "autocast gradient scaler")


def _scaler(optimizer: Any) -> Any | None:
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _read_scaler(optimizer: Any) -> dict[str, Any] | None:
    scaler = _scaler(optimizer)
    if scaler is None:
        return None
    fields = {key: encode(value, f"loss scaler, {key}") for key, value in vars(scaler).items()}
    flags = {key: encode(getattr(optimizer, key), f"optimizer, {key}") for key in _flags(optimizer)}
    dynamic = bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))
    return {"type": _type_name(scaler), "dynamic": dynamic, "fields": fields, "flags": flags}


def _flags(optimizer: Any) -> list[str]:
    """The flags that are the optimizer's own values, not computed ones."""
    return [key for key in _SCALING_FLAGS if key in vars(optimizer)]


def write_fields(engine: Any, wanted: Mapping[str, Any]) -> None:
    """Give the engine the fields that ``expected_fields`` made. A rank that holds the engine calls this; local.

    States of one value per weight have their place already (``training_state.prepare``).
    """
    base = base_optimizer(engine)
    device = engine.device
    for group, told in zip(base.param_groups, wanted["groups"], strict=True):
        for key in [key for key in group if key not in _IDENTITY and key not in told["fields"]]:
            del group[key]
        for key, value in told["fields"].items():
            _put(group, key, decode(value, device))
    for _, names, flat in _homes(engine):
        fields = wanted["per_parameter"].get(names[0], {}) if names else {}
        weights = [key for key, held in wanted["per_weight"].items() if names and names[0] in held]
        if not fields and not weights:
            base.state.pop(flat, None)
            continue
        state = base.state[flat]
        for key in [key for key in state if key not in fields and key not in weights]:
            if not str(key).endswith(_HOST_COPY):
                del state[key]
        for key, value in fields.items():
            _put(state, key, decode(value, device))
    for name, value in wanted["engine"].items():
        setattr(engine, name, value)
    if wanted["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(decode(wanted["scheduler"]["state"], device))
        for key, value in wanted["scheduler"]["settings"].items():
            setattr(engine.lr_scheduler, key, decode(value, device))
    if wanted["autocast"] is not None:
        scaler = _autocast_scaler(engine)
        if scaler is not None:
            scaler.load_state_dict(decode(wanted["autocast"], device))
    if wanted["scaler"] is not None:
        scaler = _scaler(engine.optimizer)
        for key, value in wanted["scaler"]["fields"].items():
            setattr(scaler, key, decode(value, device))
        for key, value in wanted["scaler"]["flags"].items():
            setattr(engine.optimizer, key, decode(value, device))


def _put(held: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry; a tensor of the same kind keeps its place, so that whoever refers to it sees the new value."""
    old: Any = held.get(key)
    tensors = isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor)
    if tensors and (old.shape, old.dtype, old.device) == (value.shape, value.dtype, value.device):
        old.detach().copy_(value)
    else:
        held[key] = value
