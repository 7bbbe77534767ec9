"""Sync: a live trainer's weights into copies of them, step after step, in a few lines of a training loop.

    sync = relaymeter.Sync(engine_or_none, destination)      # every rank of the world, once
    for step in range(steps):
        train(engine_or_none)
        sync(step)                                           # every rank, after the optimizer's step

``destination`` is a layout, what makes one of the trainer's, or another live engine. It is planned once and moved at
every call; a trainer or engine that lies otherwise than planned is refused with what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.engine_layout import build_layout
from relaymeter.relayout.engines import weights_storage
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.storages import new_storages, shard_view
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import control_device
from relaymeter.relayout.weight_sync import RouteChoice, SyncOptions, SyncTiming, WeightSync, changes_of, described

__all__ = ["Sync"]

Destination = Layout | Callable[[Layout], Layout]


class Sync:
    """Every rank of the world makes one, with the same settings, and calls it together with all others.

    ``trainer_layout`` and ``layout`` are the two layouts, ``schedule`` what moves, ``storages`` this rank's 1-D tensors
    of the destination by name, which keep their addresses; ``last`` the timing of the last call, None before.
    """

    def __init__(
        self,
        trainer: Any | None,
        destination: Destination | Any | None,
        *,
        casts: Mapping[str, str] | None = None,
        options: SyncOptions | None = None,
        policy: RouteChoice | None = None,
        topology: Topology | None = None,
        device: torch.device | str | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """Read the trainer, plan, and allocate this rank's part of a layout; nothing moves yet. Collective.

        ``trainer``: a DeepSpeed engine of any ZeRO stage and tensor-parallel degree, None on ranks outside it.
        ``destination``: a ``Layout``; or a function that makes one of the trainer's, which has its names, shapes and
        dtypes (``specs``); or a live engine, None on ranks outside it, whose low-precision weights are overwritten.
        ``casts``: weights that arrive in another dtype, by name. ``policy``: what ``relaymeter.load_policy`` gives; it
        chooses routes in place of ``options``. ``topology``: of the world, by default one node. ``device``: of what is
        allocated, by default the current GPU with NCCL, else the CPU.

        Raises on every rank InputError and LayoutError where trainer and destination do not fit or the ranks give
        different kinds of destinations, PlanDisagreement where they give different ones.
        """
        self._rank = dist.get_rank()
        self._device = control_device() if device is None else torch.device(device)
        self._casts = dict(casts or {})
        self._options = options or SyncOptions()
        self._sync = WeightSync(trainer, self._options, topology, policy=policy, heartbeat=heartbeat)
        self.storages: Mapping[str, torch.Tensor] = {}
        self.last: SyncTiming | None = None
        self._place(destination)

    @property
    def trainer_layout(self) -> Layout:
        return self._sync.layout

    @property
    def layout(self) -> Layout:
        return self._sync.destination

    @property
    def schedule(self) -> Any:
        return self._sync.schedule

    def weight(self, name: str) -> torch.Tensor:
        """This rank's shard of ``name`` (a tied name too) in its own shape, over its storage. Local. Raises InputError
        where it holds nothing of it, LayoutError where that is no single box."""
        name = self.layout.aliases.get(name, name)
        if name not in self.storages:
            raise InputError(f"rank {self._rank} holds nothing of weight {name}: Sync.storages has what it holds")
        return shard_view(self.layout, self._rank, name, self.storages[name])

    def __call__(self, step: int = 0) -> SyncTiming:
        """Move the trainer's weights as they are now. Collective; ``step`` has to be the same on every rank.

        The first move and every ``options.verify_every``-th are checked by digest. Raises InputError on every rank, and
        moves nothing, where trainer or destination lie otherwise than planned (``replan`` makes a new plan), or where
        the ranks are at different steps; DigestMismatch, RankLost and MoveTimeout as ``Mover.run``: the destination is
        not usable then.
        """
        if self._engines:
            with self._sync.together("the check of the destination") as ranks:
                found = self._describe(ranks)
                if found != self._described:
                    raise InputError(
                        f"the destination's layout is not the planned one any more: "
                        f"{changes_of(self._described, found)}; replan() makes a new plan"
                    )
                self._hold(ranks)
        self._sync.prepare(self.storages, step)
        self.last = self._sync.run()
        return self.last

    def replan(self, trainer: Any | None = None, destination: Destination | Any | None = None) -> None:
        """Read the trainer anew and plan again. Collective. What is None on every rank stays as it was; storages of a
        layout stay where its sizes did. Raises as the constructor."""
        with self._sync.together("planning anew") as ranks:
            given = ranks.numbers([int(trainer is not None), int(destination is not None)]).sum(axis=0).tolist()
        if given[0]:
            self._sync.trainer = trainer
        self._sync.read()
        self._place(destination if given[1] else self._destination)

    def _place(self, destination: Destination | Any | None) -> None:
        layouts = isinstance(destination, Layout) or (callable(destination) and not hasattr(destination, "module"))
        with self._sync.together("reading the destination") as ranks:
            kinds = ranks.numbers([int(layouts), int(destination is not None and not layouts)])
            with_layout = int(kinds[:, 0].sum())
            if 0 < with_layout < len(kinds):
                raise InputError(
                    f"{with_layout} of {len(kinds)} ranks give a layout as destination, the others an engine or None: "
                    "give a layout on every rank, or an engine on those that hold it"
                )
            self._destination, self._engines = destination, not with_layout
            if self._engines:
                self._described = self._describe(ranks)
                layout = build_layout(self._described, dist.get_world_size())
            else:
                layout = ranks.attempt(lambda: self._made(destination))
            ranks.attempt(lambda: self._sync.plan(layout, self._casts))
            if self._engines:
                self._hold(ranks)
            else:
                self._allocate(ranks)

    def _made(self, destination: Any) -> Layout:
        made = destination if isinstance(destination, Layout) else destination(self.trainer_layout)
        if not isinstance(made, Layout):
            raise InputError(f"the destination is a function that gives {type(made).__name__}, not a Layout")
        return made

    def _allocate(self, ranks: Assembly) -> None:
        """Storages of the layout; those that are there stay where they are of the right sizes."""
        places, specs = self.layout.placements, self.layout.specs
        wanted = {
            name: (place.storage[self._rank], specs[name].dtype)
            for name, place in places.items()
            if place.storage.get(self._rank)
        }
        held = {name: (len(line), str(line.dtype).removeprefix("torch.")) for name, line in self.storages.items()}
        if held != wanted:
            self.storages = ranks.attempt(lambda: new_storages(self.layout, self._rank, self._device))
        else:
            ranks.refuse(None)

    def _hold(self, ranks: Assembly) -> None:
        engine = self._destination
        self.storages = ranks.attempt(lambda: {} if engine is None else weights_storage(engine))

    def _describe(self, ranks: Assembly) -> dict[str, Any]:
        none = "no rank gave a destination: a layout on every rank, or an engine on those that hold it"
        return described(self._destination, "the destination's weights", none, ranks)
