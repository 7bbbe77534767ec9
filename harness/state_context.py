"""What the changes of a training-state job have in common on one rank: the world, the planner, limits, faults.

``StateContext.of(world, ...)`` in a run, or by its fields in a test; ``run_change(context, change)`` takes it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from relaymeter.errors import InputError
from relaymeter.harness.config import ModelConfig
from relaymeter.harness.jobs import Fault
from relaymeter.harness.state_engines import EngineGroups
from relaymeter.relayout.engines import MASTER, KeyStore, engine_storage
from relaymeter.relayout.execute import Hooks
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.schedule import DEFAULT_BUCKET_BYTES
from relaymeter.relayout.state_move import TrainingStateMove
from relaymeter.relayout.topology import Topology

__all__ = ["StateContext", "flip_moment"]


#: States of one value per weight that optimizers have.
_MOMENTS = ("exp_avg", "momentum_buffer")


def _nothing(_: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class StateContext:
    """One rank's view of a job of the training-state kinds."""

    rank: int
    topology: Topology
    store: KeyStore
    """The store of the world, for keys of one's own."""
    planner: Literal["classes", "affine"] = "classes"
    """Who plans every move of this context."""
    executor: str | None = None
    """Executor of the rounds; None: by the world's backend."""
    bucket_bytes: int | None = None
    """Bytes of a bucket on one rank; None: by the move's size."""
    move_limit_s: float = 120.0
    """Limit of one move."""
    heartbeat: Heartbeat | None = None
    model: ModelConfig | None = None
    """Geometry for the model family ``qwen3``."""
    groups: EngineGroups | None = None
    """Process groups shared by all changes of a job; None: each change makes its own."""
    fault: Fault | None = None
    """A fault to put into the first move."""
    say: Callable[[str], None] = field(default=_nothing)
    """Takes lines for people; silent but on rank 0."""

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return self.topology.world_size

    def hooks(self) -> Hooks:
        """Hooks for the move that the fault belongs to: ``kill`` and ``stop`` strike this rank before a round."""
        fault = self.fault
        if fault is None or fault.kind == "flip" or fault.rank != self.rank:
            return Hooks()
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP

        def strike(_: int) -> None:
            os.kill(os.getpid(), number)

        return Hooks(on_round=strike)

    def plan(self, source: Any | None, destination: Any | None, *, faulty: bool = True) -> TrainingStateMove:
        """The move from one engine into another, by this context's planner, executor and limits. Collective over the
        world; ``faulty``: whether the job's fault strikes in it."""
        return TrainingStateMove(
            source,
            destination,
            topology=self.topology,
            planner=self.planner,
            executor=self.executor,
            bucket_bytes=self.bucket_bytes or DEFAULT_BUCKET_BYTES,
            time_limit_s=self.move_limit_s,
            heartbeat=self.heartbeat,
            hooks=self.hooks() if faulty else None,
        )

    def flip(self, engine: Any | None) -> str | None:
        """After the move that the fault belongs to: flip one bit where it says so. Returns what was flipped.

        Any rank may call it, with the destination's engine or None.
        """
        mine = self.fault is not None and self.fault.kind == "flip" and self.fault.rank == self.rank
        return flip_moment(engine) if mine and engine is not None else None


def flip_moment(engine: Any) -> str | None:
    """Flip the lowest bit of the first element of a moment that this rank holds; of a master without moments.

    Local. Returns state and parameter (``"exp_avg layers.0.weight"``), None where this rank holds nothing.
    """
    for state in (*_MOMENTS, MASTER):
        with suppress(InputError):
            for name, stored in engine_storage(engine, state).items():
                if stored.numel():
                    stored.view(torch.uint8)[0] ^= 1
                    return f"{state} {name}"
    return None
