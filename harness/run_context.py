"""What the moves of a run job have in common on one rank: the job, the world, the prices, and guarded collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.harness.jobs import RunJob
from relaymeter.harness.moves import executors_of
from relaymeter.harness.plan_file import PlanFile
from relaymeter.harness.world import World
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import control_device

__all__ = ["RunContext"]

Say = Callable[[str], None]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RunContext:
    """One rank's view of a job in its world. ``profile`` None: nothing is priced; ``plan`` None: planned here."""

    job: RunJob
    world: World
    topology: Topology
    profile: Profile | None
    plan: PlanFile | None
    heartbeat: Heartbeat
    say: Say

    @property
    def executors(self) -> tuple[str, ...]:
        """The executors that the moves run by."""
        choice = self.job.executor if self.plan is None else self.plan.executor
        return executors_of(choice, backend=self.world.backend)

    def priced(self, executor: str) -> Profile | None:
        """The profile where it has prices for ``executor``, else None."""
        return self.profile if self.profile is not None and executor in self.profile.executors else None

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Collectives outside a move: they too end on every rank, naming who was lost."""
        with guarded(what, rank=self.world.rank, time_limit_s=self.job.move_limit_s, heartbeat=self.heartbeat):
            yield

    def gather(self, values: Sequence[float]) -> FloatArray:
        """The ``values`` of every rank (world, len(values)), on every rank. Collective."""
        mine = torch.tensor(values, dtype=torch.float64, device=control_device())
        every = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        dist.all_gather(every, mine)
        found: FloatArray = torch.stack(every).cpu().numpy()
        return found

    def now(self) -> float:
        """Seconds of a clock that waits for the device."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter()
