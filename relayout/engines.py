"""A live DeepSpeed engine as the source or the destination of a move: its layouts, and the storages behind them.

    layout = weights_layout(engine, world_size)                                     # the engine's ranks together
    layout = share_layout(engine_or_none, world_size, store, key, state="master")   # every rank of the world
    storage = weights_storage(engine)                                               # tensor name -> 1-D view, no copy

Engines of ZeRO stage 0 to 3, with AutoTP or without, over the world or (``subgroup``) over some of its ranks. A *state*
is "weights" (with persistent buffers), "master" (the copies that the optimizer updates) or the name of an optimizer
state of one value per weight ("exp_avg"). Every state goes by the weights' names. After a move into an engine's weights
call ``refresh_weights``; the masters are a state of their own, and the engine's next step makes new weights from them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from relaymeter.errors import InputError, LayoutError, MoveTimeout, PlanDisagreement
from relaymeter.relayout.agreement import agree_on_names
from relaymeter.relayout.engine_layout import build_layout, describe, labels
from relaymeter.relayout.engine_reading import (
    HeldTensor,
    engine_groups,
    engine_ranks,
    engine_tensors,
    master_fragments,
    master_groups,
    optimizer_state,
    refuse_offloaded,
    zero_stage,
)
from relaymeter.relayout.geometry import row_major_strides
from relaymeter.relayout.layout import Layout

__all__ = [
    "MASTER",
    "WEIGHTS",
    "KeyStore",
    "describe_engine",
    "engine_layout",
    "engine_storage",
    "master_layout",
    "master_storage",
    "optimizer_state_layout",
    "optimizer_state_storage",
    "refresh_weights",
    "share_layout",
    "weights_layout",
    "weights_storage",
]

WEIGHTS, MASTER = "weights", "master"


class KeyStore(Protocol):
    """What is needed of a ``torch.distributed`` store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def describe_engine(engine: Any, state: str = WEIGHTS) -> dict[str, Any]:
    """What fixes the layout of one state, as JSON-able data that is equal on all ranks of the engine (``engine_layout``
    compares it). A rank that holds the engine calls this; no communication.

    ``ranks``: global ranks, for each tensor-parallel rank its data-parallel group in the order of the partitions;
    ``grids``: the same for tensors over other ranks, for each expert-parallel rank its data-parallel group;
    ``tensors``: [name, logical shape, dtype, spread, number of its cut, number of its grid] in model order (None: not
    cut, over ``ranks``); ``aliases``: tied name -> name.
    Raises InputError where the engine or the state cannot be read.
    """
    title, ranks = f"zero{zero_stage(engine)} {state}", engine_ranks(engine)
    tensors, aliases = engine_tensors(engine)
    if state == WEIGHTS:
        refuse_offloaded(engine, "lp_params")
        rows = [(held, held.dtype, "parts" if held.partitioned else "whole") for held in tensors]
        return describe(title, ranks, rows, aliases)
    refuse_offloaded(engine, "hp_params" if state == MASTER else "optim_states")
    _refuse_empty_shards(ranks, tensors)
    spread, groups = master_groups(engine)
    dtypes: dict[str, str] = {}
    for group in groups:
        for name, flat in zip(group.names, group.flats, strict=True):
            kept = flat if state == MASTER else optimizer_state(engine, flat, state)
            dtypes[name] = str(kept.dtype).removeprefix("torch.")
    rows = [(held, dtypes[held.name], spread) for held in tensors if held.name in dtypes]
    ties = {alias: name for alias, name in aliases.items() if name in dtypes}
    return describe(title, ranks, rows, ties, groups if spread == "flat" else ())


def _refuse_empty_shards(ranks: tuple[tuple[int, ...], ...], tensors: list[HeldTensor]) -> None:
    """Where a tensor-parallel rank holds nothing of a weight, DeepSpeed leaves the weight out of that rank's groups."""
    for held in tensors:
        for place, width in enumerate(held.cut.widths if held.cut is not None else ()):
            if width == 0 and 0 not in held.shape and not held.ranks:
                raise InputError(
                    f"tensor-parallel rank {place} (ranks {list(ranks[place])}) holds nothing of {held.name} "
                    f"{list(held.shape)}, so its optimizer groups are others: use at most as many tensor-parallel "
                    "ranks as there are key-value heads"
                )


def _agreed(engine: Any, state: str, world_size: int, limit_s: float | None) -> tuple[dict[str, Any], Layout]:
    """Description and layout of one state after all ranks of the engine found that they hold the same, or one refusal
    on all of them. The engine's ranks call this together."""
    refusal: Exception | None = None
    checked, found, layout = False, dict[str, Any](), None
    try:
        found = describe_engine(engine, state)
        layout = build_layout(found, world_size)
        if state != WEIGHTS:
            _check_fragments(engine, found, layout)
        texts = labels(found)
        if texts:
            texts.append(f"description {hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]}")
    except InputError as error:
        refusal, texts = error, [f"rank {dist.get_rank()} refuses: {error}"]
    deadline = None if limit_s is None else time.monotonic() + limit_s
    for group in engine_groups(engine):
        members = dist.get_process_group_ranks(group)
        what = f"{state} (of ranks {members} of the world, counted from 0)"
        try:
            checked = agree_on_names(texts, what, group=group, deadline=deadline)
        except PlanDisagreement as error:  # the ranks of the other groups have to hear of it too
            refusal, texts = refusal or error, [str(error)]
    if refusal is not None:
        raise refusal
    if layout is None or not checked:
        raise InputError(f"the engine holds no {state}: nothing was checked, and there is nothing to move")
    return found, layout


def _check_fragments(engine: Any, description: Mapping[str, Any], layout: Layout) -> None:
    """Raise LayoutError where this rank's masters do not lie where the engine's groups say."""
    me = dist.get_rank()
    live = {fragment.name: fragment for fragment in master_fragments(engine)}
    for name, _, _, _, cut, _ in description["tensors"]:
        place, own = layout.placements[name], live.get(name)
        rows = place.pieces_of(me)
        steps = row_major_strides(layout.specs[name].shape)
        start = int((place.lo[rows] @ steps).min()) if len(rows) and cut is None else -1
        said = (int(place.shape[rows].prod(axis=1).sum()), place.storage.get(me, 0), start)
        keeps = (0, 0, -1) if own is None else (own.count, own.stored, own.start if own.count and cut is None else -1)
        if said != keeps:
            raise LayoutError(
                f"layout {layout.name}, tensor {name}, rank {me}: the engine keeps {keeps[0]} elements ({keeps[1]} "
                f"with padding, from {keeps[2]}), its groups make that {said[0]} ({said[1]}, from {said[2]}): this "
                "DeepSpeed places masters in another way than 0.19.8"
            )


def engine_layout(engine: Any, world_size: int, state: str = WEIGHTS, *, time_limit_s: float | None = None) -> Layout:
    """The layout of one state of a live engine in a world of ``world_size`` ranks. The engine's ranks call this
    together, and compare what they hold first.

    Raises PlanDisagreement on all of them where they differ, with the first differing position and names; InputError
    where the engine or the state cannot be read, or there is nothing in it.
    """
    return _agreed(engine, state, world_size, time_limit_s)[1]


def weights_layout(engine: Any, world_size: int) -> Layout:
    """Weights of any ZeRO stage, and persistent buffers. See ``engine_layout``."""
    return engine_layout(engine, world_size)


def master_layout(engine: Any, world_size: int) -> Layout:
    """The masters: flat partitions of the optimizer's groups (ZeRO-1/2), of each parameter (ZeRO-3), or copies."""
    return engine_layout(engine, world_size, MASTER)


def optimizer_state_layout(engine: Any, world_size: int, state: str) -> Layout:
    """An optimizer state of one value per weight, which lies like the masters: ``"exp_avg"``, ``"exp_avg_sq"``."""
    return engine_layout(engine, world_size, state)


def engine_storage(engine: Any, state: str = WEIGHTS) -> dict[str, torch.Tensor]:
    """This rank's storage of every tensor of one state: a 1-D view (no copy), by tensor name, as its layout says.

    The views stay valid while the engine keeps its tensors where they are: between steps, but not over an offload. A
    rank that holds the engine calls this; no communication. Raises InputError where a part is not in memory, is
    quantized or not contiguous.
    """
    if state != WEIGHTS:
        parts = {}
        for part in master_fragments(engine):
            kept = part.flat if state == MASTER else optimizer_state(engine, part.flat, state)
            parts[part.name] = _line(part.name, kept).narrow(0, part.offset, part.stored)
        return parts
    refuse_offloaded(engine, "lp_params")
    return {held.name: _weight_line(held) for held in engine_tensors(engine)[0]}


def weights_storage(engine: Any) -> dict[str, torch.Tensor]:
    """Storages of ``weights_layout``. Persistent ZeRO-3 parameters are read from their partition too."""
    return engine_storage(engine)


def master_storage(engine: Any) -> dict[str, torch.Tensor]:
    """Storages of ``master_layout``; a tensor of which this rank holds nothing is left out."""
    return engine_storage(engine, MASTER)


def optimizer_state_storage(engine: Any, state: str) -> dict[str, torch.Tensor]:
    """Storages of ``optimizer_state_layout``."""
    return engine_storage(engine, state)


def _weight_line(held: HeldTensor) -> torch.Tensor:
    if not held.partitioned:
        return _line(held.name, held.tensor)
    part = held.tensor.ds_tensor
    stored = int(part.ds_numel)
    status = getattr(part.status, "name", "AVAILABLE")
    if part.numel() != stored or status != "AVAILABLE":
        raise InputError(
            f"parameter {held.name}: its partition of {stored} elements is not in memory ({part.numel()} elements, "
            f"{status}): reload the engine's states first"
        )
    if hasattr(part, "ds_quant_scale"):
        raise InputError(f"parameter {held.name} is quantized: its storage does not hold its values")
    return _line(held.name, part)


def _line(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise InputError(
            f"{name} {list(tensor.shape)} has strides {list(tensor.stride())}: make it contiguous before the engine "
            "is built"
        )
    return tensor.detach().view(-1)


def refresh_weights(engine: Any) -> None:
    """Let the engine see what a move wrote into its weights' storages, before it computes with them.

    ZeRO-3 keeps gathered copies of persistent and of just used parameters: they are dropped, the next forward pass
    gathers them anew. Local; every rank of the engine calls this. Other stages compute with the storages themselves.
    """
    if zero_stage(engine) < 3:
        return
    for param in engine.module.parameters():
        if param.ds_status.name == "AVAILABLE":
            param.partition()
        if getattr(param, "ds_secondary_tensor", None) is not None:
            param.ds_secondary_tensor = None


def share_layout(
    engine: Any | None,
    world_size: int,
    store: KeyStore,
    key: str,
    *,
    state: str = WEIGHTS,
    time_limit_s: float = 300.0,
) -> Layout:
    """The layout of one state of an engine on every rank of the world, those without an engine (None) included.

    The engine's ranks compare what they hold; its first rank then puts the description, or the refusal, under ``key``
    (a new one for every engine and state) into ``store``, and the others read it there. Every rank calls this. Raises
    on all of them what ``engine_layout`` raises (on ranks without the engine a refusal is a PlanDisagreement), and
    MoveTimeout where nothing arrives within the limit.
    """
    if engine is not None:
        try:
            found, layout = _agreed(engine, state, world_size, time_limit_s)
        except (InputError, PlanDisagreement) as error:
            store.set(key, json.dumps({"refused": str(error)}))
            raise
        if dist.get_rank() == found["ranks"][0][0]:
            store.set(key, json.dumps(found))
        return layout
    try:
        store.wait([key], timedelta(seconds=time_limit_s))
    except (RuntimeError, ValueError) as error:
        raise MoveTimeout(f"no engine gave its layout ({key}) within {time_limit_s:g} s") from error
    shared = json.loads(store.get(key))
    if "refused" in shared:
        raise PlanDisagreement(f"the engine's ranks cannot give its {state} ({key}): {shared['refused']}")
    return build_layout(shared, world_size)
