"""Sources of a run's moves on one rank: the live trainer, and old replicas that a real move from it has filled.

``Sources(context, engine, layout)`` on every rank; ``sources.open(planned)`` before a move, then
``sources.storages(name)`` to read from and ``sources.expected()``, what the destination has to hold in the end.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from relaymeter.errors import DigestMismatch, InputError
from relaymeter.harness.moves import PlannedMove
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.run_context import RunContext
from relaymeter.harness.trainer import train_steps
from relaymeter.relayout.digest import LayoutDigest, compare, digest_layout
from relaymeter.relayout.engines import weights_storage
from relaymeter.relayout.execute import Mover
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import DIRECT, block_groups
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.source_digest import expected_digest

__all__ = ["Sources"]


class Sources:
    """The trainer of a job, and the old replicas of the move that is open. Every rank of the world has one."""

    def __init__(self, context: RunContext, engine: Any | None, layout: Layout) -> None:
        """``engine``: the trainer's on its ranks, None on the others; ``layout``: where it holds the weights."""
        self.engine = engine
        self._context = context
        self._layout = layout
        self._trainer: Mapping[str, torch.Tensor] = weights_storage(engine) if engine is not None else {}
        self._planned: PlannedMove | None = None
        self._old: _OldReplica | None = None
        self._kept: ReplicaStorage | None = None

    def train(self) -> None:
        """One more step, so that the source changes between moves. Every rank may call it; the trainer's do it."""
        if self.engine is not None:
            scenario = self._context.job.scenario
            train_steps(self.engine, scenario.model.geometry(), steps=1, seed=scenario.source.seed)

    def open(self, planned: PlannedMove) -> None:
        """Make what ``planned`` starts from: old replicas, where it has them, filled from the trainer. Collective.

        Old replicas that the moves give up are filled before each of them instead, see ``give_up_old``.
        """
        context = self._context
        self._trainer = weights_storage(self.engine) if self.engine is not None else {}
        self._planned = planned
        layout = planned.sources.get("old")
        self._old = self._kept = None
        if layout is not None:
            self._old = _OldReplica(context, self._layout, self._trainer, layout)
            if context.job.max_extra_bytes is None:
                context.say(f"{planned.name}: filling the old replicas from the trainer")
                self._kept = ReplicaStorage(layout, context.world.rank, context.world.device)
                self._old.fill(self._kept.storages)

    def storages(self, name: str) -> Mapping[str, torch.Tensor]:
        """This rank's storages of the source ``name`` (``trainer`` or ``old``) of the move that is open."""
        if name == "trainer":
            return self._trainer
        return self._kept.storages if self._kept is not None else {}

    def give_up_old(self) -> dict[str, torch.Tensor]:
        """This rank's storages of the old replicas, made and filled anew, for a move to consume. Collective.

        Nothing here refers to them afterwards.
        """
        if self._old is None:
            raise InputError("no move out of old replicas is open: open one first")
        made = self._old.make()
        self._old.fill(made)
        gc.collect()  # the mover that filled them holds views until it is gone
        return made

    def expected(self) -> LayoutDigest:
        """What the destination of the move that is open must hold, read from its sources. Collective.

        Of old replicas that are still to be filled it is read from the trainer. Raises DigestMismatch on every rank
        where two copies in the sources differ.
        """
        if self._planned is None:
            raise InputError("no move is open: open one first")
        layouts = dict(self._planned.sources)
        storages = {name: self.storages(name) for name in layouts}
        if self._context.job.max_extra_bytes is not None:
            layouts, storages = {"trainer": self._layout}, {"trainer": self._trainer}
        rank = self._context.world.rank
        with self._context.together("the digest of the source"):
            return expected_digest(tuple(layouts.values()), self._planned.destination, rank, tuple(storages.values()))


class _OldReplica:
    """Old replicas on one rank, and the move that fills them."""

    def __init__(
        self, context: RunContext, trainer: Layout, storages: Mapping[str, torch.Tensor], layout: Layout
    ) -> None:
        self._context, self._layout, self._trainer = context, layout, storages
        plan = plan_move(trainer, layout, context.topology)
        codes = block_groups(plan, context.topology).uniform(DIRECT)
        self._schedule = build_schedule(plan, context.topology, codes)
        with context.together("the digest of the trainer"):
            self._expected = expected_digest(trainer, layout, context.world.rank, storages)

    def make(self) -> dict[str, torch.Tensor]:
        """Empty storages of this rank by tensor name, each in memory of its own."""
        rank, device = self._context.world.rank, self._context.world.device
        sizes = {name: place.storage.get(rank, 0) for name, place in self._layout.placements.items()}
        return {
            name: torch.zeros(size, dtype=getattr(torch, self._layout.specs[name].dtype), device=device)
            for name, size in sizes.items()
            if size
        }

    def fill(self, storages: Mapping[str, torch.Tensor]) -> None:
        """Move the trainer's weights into ``storages``, and check every bit. Collective.

        Raises DigestMismatch on every rank.
        """
        context = self._context
        mover = Mover(
            self._schedule,
            context.world.rank,
            self._trainer,
            storages,
            context.executors[0],
            time_limit_s=context.job.move_limit_s,
            heartbeat=context.heartbeat,
        )
        mover.poison()
        mover.run()
        with context.together("the digest of the old replicas"):
            found = digest_layout(self._layout, context.world.rank, storages, replicas=True)
            report = compare(self._expected, found)
        if not report.ok:
            raise DigestMismatch(f"filling the old replicas of layout {self._layout.name}: {report.mismatches[0]}")
