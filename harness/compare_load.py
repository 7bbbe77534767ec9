"""The second world of ``compare`` on a rank: started anew, it builds destinations and loads the checkpoints.

``run_load_job(job, world, say)`` is called by every rank of the joined world; rank 0 gets, after every load, a dict of
the ``cells`` so far (see ``harness.compare_rows``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from relaymeter.errors import InputError
from relaymeter.harness.compare_config import CompareChange
from relaymeter.harness.compare_ends import Clock, Destination, Ends
from relaymeter.harness.compare_ranks import import_all, proof, strike, taken
from relaymeter.harness.jobs import CompareLoad, CompareLoadJob, Fault
from relaymeter.harness.page_cache import drop
from relaymeter.harness.paths.dcp import load_dcp, load_tensors
from relaymeter.harness.paths.universal import UNIVERSAL, load_universal
from relaymeter.harness.state_engines import quiet
from relaymeter.harness.world import World, watching
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.guard import guarded

__all__ = ["run_load_job"]

Cell = dict[str, Any]
_LOST_AFTER_S = 25.0
_FROZEN = "frozen "


def run_load_job(job: CompareLoadJob, world: World, say: Any) -> Iterator[dict[str, Any]]:
    """Do the whole job. Every rank exhausts it after joining; gives all that is known so far after every load.

    A load that fails alike on every rank leaves a cell that says so. Raises RankLost and MoveTimeout out of what a rank
    was lost in.
    """
    change = job.scenario.changes[0]
    joined_at = time.time()
    begin = time.perf_counter()
    import_all(job.scenario.training.model, world)
    import_s = time.perf_counter() - begin
    with (
        quiet(),
        watching(world, "compare", lost_after_s=_LOST_AFTER_S) as heartbeat,
        guarded("the loads", rank=world.rank, time_limit_s=job.time_limit_s, heartbeat=heartbeat, consequence=""),
    ):
        # the age of a process covers interpreter and imports; what is left of the time since the start is the launch
        relaunch_s = max(0.0, joined_at - job.launched_at - world.start_s)
        told = Assembly().tell_all([relaunch_s, world.start_s + import_s])
        start = {"relaunch": max(one for one, _ in told), "import": max(two for _, two in told)}
        ends = Ends(job.scenario, change, world, job.time_limit_s)
        _warm(job, ends)
        result: dict[str, Any] = {"start": start, "cells": []}
        yield result
        for number, load in enumerate(job.loads):
            cached = "" if load.cache is None else f", {load.cache} page cache"
            say(f"  {load.path}: loading from {load.storage}{cached}")
            fault = job.fault if number == 0 else None
            where = f"{load.path} from {load.storage} ({load.cache})"
            cell = taken(world, where, partial(_load, job, load, ends, change, world, fault))
            result["cells"].append({"path": load.path, "storage": load.storage, "cache": load.cache, **cell})
            yield result


def _load(
    job: CompareLoadJob, load: CompareLoad, ends: Ends, change: CompareChange, world: World, fault: Fault | None
) -> Cell:
    """Build a destination, load into it and hold it against the source."""
    clock = Clock()
    with clock.phase("build"):
        made = ends.destination(UNIVERSAL if load.path == "universal" else None)
    try:
        if load.cache == "cold" and world.local_rank == 0:
            drop(Path(load.folder))
        with clock.phase("load"):
            _bring(load, made)
        strike(fault, made)
        cell = proof(job.digests, made, change, clock)
        return _left_behind(job, load, cell, made) or cell
    finally:
        made.close()


def _bring(load: CompareLoad, made: Destination) -> None:
    if load.path == "universal":
        load_universal(made.engine, load.folder)
    elif made.layout is not None:
        load_tensors(made.layout, made.storages or {}, load.folder)
    else:
        load_dcp(made.engine, load.folder)


def _warm(job: CompareLoadJob, ends: Ends) -> None:
    """Build and load once by each path, untimed: what only the first of a process takes (in the other world the source
    was first) would stand in whichever row is made first. What fails here fails again where it is timed."""
    for load in {load.path: load for load in reversed(job.loads)}.values():
        made = ends.destination(UNIVERSAL if load.path == "universal" else None)
        try:
            with suppress(InputError):
                _bring(load, made)
        finally:
            made.close()


def _left_behind(job: CompareLoadJob, load: CompareLoad, cell: Cell, made: Destination) -> Cell | None:
    """A universal checkpoint has no frozen weights and buffers: where nothing else is wrong, it cannot make this
    change. Collective over the world."""
    if load.path != "universal" or cell["digest_passed"] == cell["digest_total"]:
        return None
    frozen = {name.removeprefix(_FROZEN) for name in job.digests if name.startswith(_FROZEN)}
    wrong = [name for name, copies in made.digests().items() if any(copy != job.digests.get(name) for copy in copies)]
    if not wrong or any(name.split(" ", 1)[1] not in frozen for name in wrong):
        return None
    return {"cannot": f"a universal checkpoint leaves frozen weights and buffers behind: {', '.join(sorted(frozen))}"}
