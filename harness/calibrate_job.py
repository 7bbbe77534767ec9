"""The calibrate and check jobs inside the ranks. ``run_calibrate_job(job, world, say)`` gives the profile on rank 0,
``run_check_job(job, world, say)`` what a spot-check of one found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from relaymeter.calibration.calibrate import fingerprint_of, instruments_of, run_calibration
from relaymeter.calibration.check import check_cluster
from relaymeter.calibration.gather import gather_json
from relaymeter.calibration.profiles import Profile, differences
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.errors import InputError, MoveTimeout, PlanDisagreement, RankLost
from relaymeter.harness.jobs import CalibrateJob, CheckJob
from relaymeter.harness.world import World, watching
from relaymeter.relayout.guard import guarded

__all__ = ["run_calibrate_job", "run_check_job"]

#: Limit of one call, in seconds, whatever the command's.
_CALL_LIMIT_S = 120.0
#: So long a rank may take to say that its time is up, too, before it counts as hung.
_SETTLE_S = 3.0
#: The least time that a job has, however long its ranks took to start.
_LEAST_S = 10.0
#: What a profile may differ in and still be checked: whether it then holds is what the check is for.
_OPEN = ("cluster.", "nic:")


def run_calibrate_job(job: CalibrateJob, world: World, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Calibrate the joined ``world``. Every rank exhausts it; raises what ``run_calibration`` raises, and RankLost
    naming a rank that hangs."""

    def progress(fraction: float, text: str) -> None:
        say(f"calibrate {fraction:4.0%}  {text}")

    with _bounded(world, "calibration", job.time_limit_s) as poll:
        profile = run_calibration(
            world,
            quick=job.quick,
            budget_s=job.budget_s,
            executors=None if job.executor == "auto" else (job.executor,),
            cluster=None if job.cluster is None else job.cluster.model_dump(),
            time_limit_s=_CALL_LIMIT_S,
            progress=progress,
            poll=poll,
        )
    yield profile.to_dict()


def run_check_job(job: CheckJob, world: World, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure a few cells of a profile again. Every rank exhausts it. Raises InputError, on all ranks, where the world
    is not the profile's, and what ``check_cluster`` raises."""

    def progress(fraction: float, text: str) -> None:
        say(f"check {fraction:4.0%}  {text}")

    profile = load_profile(Path(job.profile))
    with _bounded(world, "spot-check", job.time_limit_s) as poll:
        mismatch = _mismatch(job, world, profile)
        executor = job.executor or profile.executor
        instruments, _, _ = instruments_of(world, (executor,), _CALL_LIMIT_S, poll)
        found = check_cluster(instruments, profile, executor, progress=progress)
    yield {**found.to_dict(), "mismatch": list(mismatch)}


def _mismatch(job: CheckJob, world: World, profile: Profile) -> tuple[str, ...]:
    """Where the world differs from the profile's, as rank 0 sees it. Raises InputError where that makes the profile
    another world's, and PlanDisagreement where the ranks read different files."""
    hashes = gather_json(world, profile.sha256)
    odd = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
    if odd:
        raise PlanDisagreement(
            f"ranks {odd} read another profile from {job.profile} than rank 0: give all the same file"
        )
    cluster = None if job.cluster is None else job.cluster.model_dump()
    here = gather_json(world, differences(profile, fingerprint_of(world, cluster)))[0]
    refused = [text for text in here if not text.startswith(_OPEN)]
    other_nodes = world.topology.node != profile.topology.node
    if refused and (other_nodes or not job.allow_mismatch):
        more = "" if other_nodes else ", or add --allow-mismatch to check it all the same"
        raise InputError(
            f"profile {job.profile} was made elsewhere ({'; '.join(refused)}): check it where it was made{more}"
        )
    return tuple(here)


@contextmanager
def _bounded(world: World, what: str, time_limit_s: float) -> Iterator[Callable[[], None]]:
    """A stretch of measuring that ends on every rank before the command's limit. Gives what waits shall call.

    Raises RankLost naming the ranks that are lost, or that hang: they answer but have not noticed the end of the time.
    """
    left_s = max(_LEAST_S, time_limit_s - (time.time() - psutil.Process().create_time()))
    try:
        with (
            watching(world, what) as heartbeat,
            guarded(
                f"the {what}", rank=world.rank, time_limit_s=left_s, heartbeat=heartbeat, consequence=""
            ) as deadline,
        ):

            def poll() -> None:
                heartbeat.poll()
                if time.monotonic() > deadline:
                    raise MoveTimeout(f"the {what} did not end within its time limit of {time_limit_s:g} s")

            yield poll
    except MoveTimeout as error:
        hung = _hung(world, what)
        if not hung:
            raise
        names = ", ".join(map(str, hung))
        raise RankLost(
            f"rank {names} hangs: it answers but takes no part in the {what}, which stopped: look at what that process "
            "does (py-spy dump), and at its node",
            hung,
        ) from error


def _hung(world: World, what: str) -> tuple[int, ...]:
    """Ranks that have not said, soon after this one, that the time is up for them too. Every rank whose time is up
    calls it."""
    keys = {rank: f"relaymeter/{what}/time-is-up/{rank}" for rank in range(world.world_size)}
    deadline = time.monotonic() + _SETTLE_S
    missing = [rank for rank in keys if rank != world.rank]
    with suppress(RuntimeError):  # the store is gone, and with it what it knew
        world.store.set(keys[world.rank], "")
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not world.store.check([keys[rank]])]
            time.sleep(0.05)
        return tuple(missing)
    return ()
