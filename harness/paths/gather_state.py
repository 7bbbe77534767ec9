"""Gather, then slice, for whole training states: every tensor whole on every rank, then each rank's shard cut out.

    times = gather_training_state(source, destination, config, training)        # every rank of the world
    times = gather_weights(source, config, training, layout, storages)

As trainers do it with DeepSpeed's own calls, tensor by tensor over the data-parallel ranks:
``safe_get_full_fp32_param`` and ``safe_get_full_optimizer_state`` (masters and moments), ``GatheredParameters``
(weights). Tensor-parallel parts are gathered and joined; ranks outside the source get each tensor from its first rank.
Only what lies where, and the fields, come from this package.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.harness.paths.dcp_planner import piece_view
from relaymeter.harness.paths.together import PathCannot
from relaymeter.harness.state_config import EngineConfig, TrainingConfig
from relaymeter.harness.state_models import cut_dims
from relaymeter.harness.state_oracle import FullStates
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.training_fields import write_fields
from relaymeter.relayout.training_match import expected_fields
from relaymeter.relayout.training_state import (
    FROZEN,
    prepare,
    read_together,
    refresh_from_masters,
    refuse_other_model,
    training_storages,
)
from relaymeter.relayout.transport import control_device

__all__ = ["GatherTimes", "gather_training_state", "gather_weights"]


@dataclass
class GatherTimes:
    """Seconds on this rank."""

    plan_s: float = 0.0
    """Reading both ends, and allocating the optimizer states that the destination lacks."""
    gather_s: float = 0.0
    slice_s: float = 0.0
    """Cutting and copying, and the fields."""
    refresh_s: float = 0.0


@dataclass(frozen=True)
class _Source:
    """The engine that is gathered from, as this rank sees it."""

    config: EngineConfig
    training: TrainingConfig
    tensor_group: dist.ProcessGroup | None
    """The ranks that share each layer with this one."""

    def whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: torch.Tensor | None) -> torch.Tensor:
        """The tensor of ``shape`` on every rank; ``part``: this data-parallel group's of it, None outside the engine.
        Collective over the world."""
        empty = torch.empty(shape if part is None else (), dtype=dtype, device=control_device())
        found = empty if part is None else self._joined(name, part).contiguous()
        if len(self.config.ranks) < dist.get_world_size():
            dist.broadcast(found, self.config.ranks[0])
        return found

    def _joined(self, name: str, part: torch.Tensor) -> torch.Tensor:
        degree = self.config.tensor_parallel
        dim = cut_dims(self.training, name) if degree > 1 else None
        if dim is None:
            return part
        parts = [torch.empty_like(part) for _ in range(degree)]
        dist.all_gather(parts, part.contiguous(), group=self.tensor_group)
        return torch.cat(parts, dim)


def gather_training_state(
    source: Any | None,
    destination: Any | None,
    config: EngineConfig,
    training: TrainingConfig,
    tensor_group: dist.ProcessGroup | None = None,
) -> GatherTimes:
    """Masters and moments of ``source`` (an engine of ``config``) into ``destination``, whole tensor by whole tensor,
    then the fields and the low-precision weights. Every rank of the world calls this, None where it has no engine.

    ``tensor_group``: this rank's tensor-parallel group in the source, where that has one.

    Raises InputError on every rank where the engines do not fit, PathCannot where the model has frozen weights or
    buffers, or the source shares its experts, for which this path has no call.
    """
    _refuse_experts(config)
    ranks, times = Assembly(), GatherTimes()
    ranks.refuse(None)  # so that no rank's time counts another's delay
    begin = time.perf_counter()
    state, target = read_together(source, "source", ranks), read_together(destination, "destination", ranks)
    refuse_other_model(state, target)
    wanted = expected_fields(state.fields, target.fields)
    layout = target.joined(state.fields["per_weight"])
    if any(name.startswith(f"{FROZEN} ") for name in layout.specs):
        raise PathCannot("the calls that gather a training state leave frozen weights and buffers behind")
    full = None if source is None else FullStates(source, training)
    if destination is not None:
        prepare(destination, wanted)
    into = training_storages(destination, layout.specs)
    ranks.refuse(None)
    times.plan_s = time.perf_counter() - begin
    end = _Source(config, training, tensor_group)
    for name, spec in layout.specs.items():
        kind, param = name.split(" ", 1)
        begin = time.perf_counter()
        part = None if full is None else full.state(kind, param).detach()
        whole = end.whole(param, spec.shape, getattr(torch, spec.dtype), part)
        gathered = time.perf_counter()
        _slice(layout, dist.get_rank(), name, whole, into)
        times.gather_s += gathered - begin
        times.slice_s += time.perf_counter() - gathered
    begin = time.perf_counter()
    if destination is not None:
        write_fields(destination, wanted)
    written = time.perf_counter()
    if destination is not None:
        refresh_from_masters(destination)
    ranks.refuse(None)
    times.slice_s += written - begin
    times.refresh_s = time.perf_counter() - written
    return times


def gather_weights(
    source: Any | None,
    config: EngineConfig,
    training: TrainingConfig,
    layout: Layout,
    storages: Mapping[str, torch.Tensor],
    tensor_group: dist.ProcessGroup | None = None,
) -> GatherTimes:
    """The weights of ``source`` into this rank's ``storages`` of ``layout``. Every rank of the world calls this."""
    _refuse_experts(config)
    times = GatherTimes()
    Assembly().tell_all(None)
    full = None if source is None else FullStates(source, training)
    end = _Source(config, training, tensor_group)
    for name, spec in layout.specs.items():
        begin = time.perf_counter()
        part = None if full is None else full.weight(name)
        whole = end.whole(name, spec.shape, getattr(torch, spec.dtype), part)
        gathered = time.perf_counter()
        _slice(layout, dist.get_rank(), name, whole, storages)
        times.gather_s += gathered - begin
        times.slice_s += time.perf_counter() - gathered
    Assembly().tell_all(None)
    return times


def _refuse_experts(config: EngineConfig) -> None:
    if config.expert_parallel > 1:
        raise PathCannot(f"{config.label}: DeepSpeed's calls gather a rank's own experts only")


def _slice(layout: Layout, rank: int, name: str, whole: torch.Tensor, storages: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's boxes of the whole tensor into its storage."""
    place = layout.placements[name]
    for row in place.pieces_of(rank).tolist():
        box = whole
        for dim, (begin, size) in enumerate(zip(place.lo[row].tolist(), place.shape[row].tolist(), strict=True)):
            box = box.narrow(dim, begin, size)
        piece_view(storages[name], place, row).copy_(box)
