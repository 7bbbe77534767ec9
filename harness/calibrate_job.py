"""The calibrate job inside the ranks. ``run_calibrate_job(job, world, say)`` gives the profile on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from relaymeter.calibration.calibrate import run_calibration
from relaymeter.harness.jobs import CalibrateJob
from relaymeter.harness.world import World, watching
from relaymeter.relayout.guard import guarded

__all__ = ["run_calibrate_job"]


def run_calibrate_job(job: CalibrateJob, world: World, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Calibrate the joined ``world``. Every rank exhausts it; raises what ``run_calibration`` raises."""

    def progress(fraction: float, text: str) -> None:
        say(f"calibrate {fraction:4.0%}  {text}")

    with (
        watching(world, "calibrate") as heartbeat,
        guarded("the calibration", rank=world.rank, time_limit_s=job.time_limit_s, heartbeat=heartbeat, consequence=""),
    ):
        profile = run_calibration(
            world,
            quick=job.quick,
            budget_s=job.budget_s,
            executors=None if job.executor == "auto" else (job.executor,),
            cluster=None if job.cluster is None else job.cluster.model_dump(),
            progress=progress,
            poll=heartbeat.poll,
        )
    yield profile.to_dict()
