"""Megatron-Core's refit: the weights of one tensor-parallel model into another, by ``megatron.core.resharding``.

    megatron = import_together()                                # every rank of the world
    refit = Refit(megatron, Model(layout, copies, held), wanted, dims, service="nccl", device=device)
    refit.plan()
    refit.move()                                                # as often as wanted; refit.layout, refit.storages
    refit.close()

The refit reads a model by its parameters: their names and shapes, how each is cut (``tensor_model_parallel``,
``partition_dim``, ``partition_stride``), and the module's process groups. So the source here is a module whose
parameters are the very weights of an engine, and the destination one of fresh storages, cut by its own degree; neither
computes. Weights alone are moved: the refit knows no masters and no optimizer states.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.harness.paths.dcp_planner import piece_view
from relaymeter.harness.paths.refit_changes import Copies, unsuited_shapes
from relaymeter.harness.paths.together import PathCannot, say_error
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.state_engines import quiet
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.placements import Cut, tensor_parallel_layout

__all__ = ["Model", "Refit", "import_refit", "import_together", "weight_bytes"]

_REFIT = "megatron.core.resharding"


def weight_bytes(layout: Layout) -> int:
    """Bytes of the weights of a layout, each element once. Pure."""
    return sum(spec.numel * spec.itemsize for spec in layout.specs.values())


def import_refit() -> Any:
    """The module of the refit, in seconds. Raises PathCannot where this process cannot have it, and says why."""
    if not torch.cuda.is_available():
        raise PathCannot("Megatron-Core's refit needs CUDA, its gloo copy service too")
    try:
        with quiet():
            return importlib.import_module(_REFIT)
    except ModuleNotFoundError as error:
        if error.name in ("megatron", "megatron.core"):
            raise PathCannot("megatron-core is not installed: pip install 'relaymeter[peers]'") from error
        if error.name == _REFIT:
            have = _version()
            raise PathCannot(f"megatron-core {have} is too old: {_REFIT} is in 0.16 and later ones") from error
        raise PathCannot(f"megatron-core cannot be imported: {error}") from error
    except Exception as error:
        raise PathCannot(f"megatron-core cannot be imported: {say_error(error)}") from error


def import_together() -> Any:
    """``import_refit`` on every rank of the world, or the same PathCannot on all. Collective."""
    found, reason = None, ""
    try:
        found = import_refit()
    except PathCannot as error:
        reason = str(error)
    reasons = [text for text in Assembly().tell_all(reason) if text]
    if reasons:
        raise PathCannot("; ".join(dict.fromkeys(reasons)))
    return found


def _version() -> str:
    return str(getattr(importlib.import_module("megatron.core"), "__version__", "of an unknown version"))


@dataclass(frozen=True, eq=False)
class Model:
    """One end of a refit on this rank: copies of the same weights, each cut over its ranks."""

    layout: Layout
    copies: Copies
    storages: Mapping[str, torch.Tensor]
    """This rank's 1-D storages of ``layout``; none on a rank outside the copies."""


class Refit:
    """A refit between two models. Every rank of the world makes one and calls its methods in the same order."""

    def __init__(
        self,
        megatron: Any,
        source: Model,
        copies: Copies,
        dims: Mapping[str, int | None],
        *,
        service: str,
        device: torch.device,
        time_limit_s: float | None = None,
    ) -> None:
        """``megatron``: what ``import_together`` gave. ``copies``: those of the destination. ``dims``: the dim along
        which a weight is cut, None for one that every rank holds whole. ``service``: the refit's way of copying,
        ``nccl`` or ``gloo``. Weights that are not on ``device`` yet are copied to it.

        Raises PathCannot, on all ranks, where the refit cannot cut the weights so.
        """
        specs = source.layout.specs
        reason = unsuited_shapes(specs, dims, (len(source.copies[0]), len(copies[0])))
        places = source.layout.placements.items()
        odd = next((name for name, place in places if len({*place.rank.tolist()}) < len(place.rank)), None)
        if reason is None and odd is not None:
            reason = f"{odd}: a rank holds several pieces of it, and Megatron-Core's refit takes one"
        if reason is not None:
            raise PathCannot(reason)
        self._megatron, self._service_name, self._device = megatron, service, device
        self._limit = None if time_limit_s is None else timedelta(seconds=time_limit_s)
        self._made: list[dist.ProcessGroup] = []
        self._service: Any = None
        self._plan: Any = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
        rank, cuts = dist.get_rank(), {name: Cut(dims[name]) for name in specs}
        self.layout = tensor_parallel_layout(specs, cuts, copies, dist.get_world_size(), name="refit")
        self._kept = ReplicaStorage(self.layout, rank, device)
        self._kept.poison()
        held = {name: kept.to(device) for name, kept in source.storages.items()}
        self._source = self._module(Model(source.layout, source.copies, held), dims)
        self._target = self._module(Model(self.layout, copies, self._kept.storages), dims)

    @property
    def storages(self) -> Mapping[str, torch.Tensor]:
        """This rank's storages of ``layout``, where the weights arrive."""
        return self._kept.storages

    @property
    def told(self) -> str:
        """What moves the weights, in words."""
        through = "between GPUs" if self._service_name == "nccl" else "through the host's memory"
        return f"megatron-core {_version()}, {self._service_name} copy service {through}"

    def poison(self) -> None:
        """Overwrite the destination, so that only another move can make it right."""
        self._kept.poison()
        self._settle()

    def plan(self) -> None:
        """Let the refit plan, from what every rank says of its parameters, and make its copy service. Collective."""
        self._settle()
        found = self._megatron
        plan_of = getattr(found, "build_local_reshard_plan", None) or found.build_centralized_reshard_plan
        self._plan = plan_of(self._source, self._target, num_experts=None)
        self._service = found.get_or_create_service(self._service_name)

    def move(self) -> None:
        """Move the weights, to the end of the last copy, as ``swap_model_weights`` does with its plan kept.
        Collective."""
        self._megatron.execute_reshard_plan(self._plan, self._source, self._target, service=self._service)
        self._settle()

    def _settle(self) -> None:
        """Wait for the device: the refit copies on streams of its own, which wait for no other."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Give up groups and the copy service. Every rank calls this."""
        self._megatron.clear_service_cache()
        for group in (getattr(self._service, "gloo_pg", None), *self._made):
            if group is not None:
                dist.destroy_process_group(group)
        self._made.clear()
        self._service = self._plan = None

    def _module(self, model: Model, dims: Mapping[str, int | None]) -> torch.nn.Module:
        """A module as the refit reads it. A rank outside the copies has one without parameters, as 0.16 wants it."""
        rank, module = dist.get_rank(), torch.nn.Module()
        for name in model.layout.specs:
            place = model.layout.placements[name]
            rows = place.pieces_of(rank).tolist()
            if not rows:
                continue
            param: Any = torch.nn.Parameter(piece_view(model.storages[name], place, rows[0]), requires_grad=False)
            dim = dims[name]
            param.tensor_model_parallel = dim is not None
            param.partition_dim = -1 if dim is None else dim
            param.partition_stride = 1
            _hang(module, name, param)
        told: Any = module
        told.config = SimpleNamespace(num_moe_experts=None)
        told.pg_collection = self._groups(model.copies)
        return module

    def _groups(self, copies: Copies) -> Any:
        """Megatron-Core's collection of this rank's groups: its copy's, and that of the same shard of every copy."""
        collection = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection
        found = []
        for rows in (copies, tuple(zip(*copies, strict=True))):
            mine: dist.ProcessGroup | None = None
            for ranks in rows:
                group = dist.new_group(list(ranks), timeout=self._limit)
                if dist.get_rank() in ranks:
                    mine = group
                    self._made.append(group)
            found.append(mine or dist.group.WORLD)
        tensor, data = found
        return collection(tp=tensor, dp=data, pp=None, ep=None, expt_tp=None)


def _hang(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> None:
    """Register ``param`` under its dotted name."""
    *path, last = name.split(".")
    for part in path:
        child = dict(module.named_children()).get(part)
        if child is None:
            child = torch.nn.Module()
            module.add_module(part, child)
        module = child
    module.register_parameter(last, param)
