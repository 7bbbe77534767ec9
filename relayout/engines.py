"""A live DeepSpeed ZeRO-3 engine as the source of a move: its layout, and the storage behind it.

``zero3_layout(engine, world_size)`` and ``zero3_storage(engine)`` on a rank that holds the engine;
``share_layout(engine_or_none, world_size, store, key)`` gives every rank of the world the same layout.

DeepSpeed keeps each weight as ``ds_tensor``, this rank's part of the flattened weight, and leaves a placeholder of no
elements in the parameter itself, so shapes come from ``ds_shape``, never from the parameter. What a part holds beyond
the weight's end is padding with unset bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from relaymeter.errors import InputError, LayoutError, MoveTimeout
from relaymeter.relayout import placements
from relaymeter.relayout.layout import Layout, TensorSpec

__all__ = ["KeyStore", "describe_zero3", "layout_from_description", "share_layout", "zero3_layout", "zero3_storage"]


class KeyStore(Protocol):
    """What is needed of a ``torch.distributed`` store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def _parameters(engine: Any) -> dict[str, Any]:
    """Every weight of the engine once, by the first name it has. Raises InputError where it is not ZeRO-3's."""
    found = dict(engine.module.named_parameters())
    for name, param in found.items():
        if getattr(param, "ds_tensor", None) is None:
            raise InputError(f"parameter {name} is not partitioned: only engines of ZeRO stage 3 can be read")
    return found


def describe_zero3(engine: Any) -> dict[str, Any]:
    """What fixes the engine's layout, as JSON-able data: ``tensors`` [[name, shape, dtype], ...] in model order,
    ``ranks`` (global, in the order of the partitions) and ``aliases`` (tied name -> name), found by parameter identity.

    Called on a rank that holds the engine; no communication. Raises InputError where the parameters are partitioned
    over different groups (expert parallelism).
    """
    found = _parameters(engine)
    first = {id(param): name for name, param in found.items()}
    names = engine.module.named_parameters(remove_duplicate=False)
    ranks: dict[tuple[int, ...], str] = {}
    for name, param in found.items():
        ranks.setdefault(tuple(dist.get_process_group_ranks(param.ds_process_group)), name)
    if len(ranks) > 1:
        (one, name), (other, odd) = list(ranks.items())[:2]
        raise InputError(
            f"{name} is partitioned over ranks {list(one)}, {odd} over {list(other)}: one group per engine is supported"
        )
    return {
        "tensors": [[n, list(p.ds_shape), str(p.ds_tensor.dtype).removeprefix("torch.")] for n, p in found.items()],
        "ranks": list(next(iter(ranks), ())),
        "aliases": {name: first[id(param)] for name, param in names if first[id(param)] != name},
    }


def layout_from_description(description: Mapping[str, Any], world_size: int, name: str = "zero3") -> Layout:
    """The layout that ``describe_zero3`` describes, on any rank. Raises LayoutError."""
    specs = {tensor: TensorSpec(tensor, tuple(shape), dtype) for tensor, shape, dtype in description["tensors"]}
    return placements.zero3_layout(specs, description["ranks"], world_size, name, description["aliases"])


def zero3_layout(engine: Any, world_size: int, name: str = "zero3") -> Layout:
    """The layout of a live engine's weights in a world of ``world_size`` ranks. Ranks that hold the engine."""
    return layout_from_description(describe_zero3(engine), world_size, name)


def zero3_storage(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's storage of every weight: a 1-D view (no copy) of its partition, padding included, by tensor name.

    Persistent parameters are read from their partition too; tied names appear once. The views stay valid while the
    engine keeps its partitions where they are (between steps, but not over an offload). Ranks that hold the engine.
    Raises InputError for a partition that is not in memory or is quantized.
    """
    storage: dict[str, torch.Tensor] = {}
    for name, param in _parameters(engine).items():
        part = param.ds_tensor
        held = int(part.ds_numel)
        if part.numel() != held or getattr(part.status, "name", "AVAILABLE") != "AVAILABLE":
            raise InputError(
                f"parameter {name}: its partition of {held} elements is not in memory ({part.numel()} there): "
                "reload the engine's states first"
            )
        if hasattr(part, "ds_quant_scale"):
            raise InputError(f"parameter {name} is quantized: its storage does not hold its values")
        storage[name] = part.detach().view(-1)
    return storage


def share_layout(
    engine: Any | None, world_size: int, store: KeyStore, key: str, *, time_limit_s: float = 300.0
) -> Layout:
    """The engine's layout on every rank of the world, those without an engine (None) included.

    The engine's first rank puts the description under ``key`` (a new one for every engine) into ``store``; the others
    read it there. No process group takes part. Every rank calls this. Raises MoveTimeout where nothing arrives within
    the limit, LayoutError where this rank's engine differs from the first rank's.
    """
    mine = None if engine is None else describe_zero3(engine)
    if mine is not None and dist.get_rank() == mine["ranks"][0]:
        store.set(key, json.dumps(mine))
    try:
        store.wait([key], timedelta(seconds=time_limit_s))
    except (RuntimeError, ValueError) as error:
        raise MoveTimeout(f"no engine gave its layout ({key}) within {time_limit_s:g} s") from error
    shared = json.loads(store.get(key))
    if mine is not None and mine != shared:
        for here, there in zip(mine["tensors"], shared["tensors"], strict=False):
            if here != there:
                raise LayoutError(f"rank {dist.get_rank()} holds {here}, the engine's first rank {there}")
        raise LayoutError(
            f"rank {dist.get_rank()} holds {len(mine['tensors'])} tensors over ranks {mine['ranks']}, the engine's "
            f"first rank {len(shared['tensors'])} over {shared['ranks']}, or their ties differ"
        )
    return layout_from_description(shared, world_size)
