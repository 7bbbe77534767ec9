"""The first world of ``compare`` on a rank: the source is trained, what needs no new processes is done, then saved.

``run_save_job(job, world, say)`` is called by every rank of the joined world; rank 0 gets, after every path, a dict of
the ``cells`` so far (see ``harness.compare_rows``) and the ``digests`` of the source.
"""

from __future__ import annotations

import importlib
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import InputError, MoveTimeout, RankLost
from relaymeter.harness.compare_config import NO_TRAINING_STATE, CompareChange
from relaymeter.harness.compare_ends import Clock, Destination, Ends, check_digests, engine_digests, imported_models
from relaymeter.harness.compare_storage import folder_bytes
from relaymeter.harness.jobs import CompareSaveJob, Fault
from relaymeter.harness.paths.dcp import save_dcp, save_tensors
from relaymeter.harness.paths.gather_state import gather_training_state, gather_weights
from relaymeter.harness.paths.megatron import Model, Refit, import_together, weight_bytes
from relaymeter.harness.paths.refit_changes import copies_of, unsuited
from relaymeter.harness.paths.together import PathCannot, say_error
from relaymeter.harness.paths.universal import UniversalRefused, save_universal
from relaymeter.harness.state_engines import quiet
from relaymeter.harness.state_models import cut_dims
from relaymeter.harness.world import World, tell_by_store, watching
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.engines import weights_storage
from relaymeter.relayout.execute import Mover
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import DIRECT
from relaymeter.relayout.schedule import DEFAULT_BUCKET_BYTES, build_schedule
from relaymeter.relayout.state_move import TrainingStateMove
from relaymeter.relayout.training_state import read_together
from relaymeter.units import format_bytes, format_seconds

__all__ = ["as_lack_of_room", "import_all", "proof", "run_save_job", "strike", "taken"]

Say = Callable[[str], None]
Cell = dict[str, Any]
#: A rank that builds an engine on a busy machine may be silent longer than one that moves, in seconds.
_LOST_AFTER_S = 25.0
#: With less room than this left after a failure, the storage is taken to be full, in bytes.
_LEAST_ROOM = 1 << 20
#: After one rank is done with a path all others must be, within so many seconds.
_ALIKE_S = 120.0


def run_save_job(job: CompareSaveJob, world: World, say: Say) -> Iterator[dict[str, Any]]:
    """Do the whole job. Every rank exhausts it after joining; gives all that is known so far after every path.

    A path that fails alike on every rank leaves a cell that says so, and the next one follows. Raises RankLost and
    MoveTimeout out of what a rank was lost in.
    """
    change = job.scenario.changes[0]
    training = job.scenario.training
    import_all(training.model, world)
    with (
        quiet(),
        watching(world, "compare", lost_after_s=_LOST_AFTER_S) as heartbeat,
        guarded("the comparison", rank=world.rank, time_limit_s=job.time_limit_s, heartbeat=heartbeat, consequence=""),
    ):
        say(f"{change.name}: {change.source.label} built, training")
        ends = Ends(job.scenario, change, world, job.time_limit_s)
        source = ends.source()
        copies = engine_digests(source)
        torn = next((name for name, every in copies.items() if len(set(every)) > 1), None)
        if torn is not None:
            raise InputError(
                f"{torn}: the copies in {change.source.label} differ, so that nothing can be proved by them"
            )
        digests = {name: every[0] for name, every in copies.items() if every}
        result: dict[str, Any] = {
            "nodes": world.topology.nodes,
            "on_gpu": world.backend == "nccl",
            "digests": digests,
            "state_bytes": _state_bytes(source, weights_only=change.destination is None),
            "cells": [],
        }
        cells: list[Cell] = result["cells"]
        for path, make in (("in-memory", _in_memory), ("gather", _gather)):
            if path not in job.paths:
                continue
            say(f"  {path}")

            fault = job.fault if path == job.paths[0] else None
            once = partial(make, job, world, heartbeat, ends, change, source)
            work = partial(_proved, once, digests, change, fault)
            cells.append({"path": path, "storage": None, **taken(world, path, work)})
            yield result
        if "megatron" in job.paths and unsuited(change, training) is None:  # else its row says why
            say("  megatron")
            fault = job.fault if job.paths[0] == "megatron" else None
            work = partial(_refit, job, world, change, source, digests, fault)
            cells.append({"path": "megatron", "storage": None, **taken(world, "megatron", work)})
            yield result
        for storage, folder in job.folders.items():
            for path in ("dcp", "universal"):
                if path in job.paths:
                    say(f"  {path}: saving to {storage}")
                    save = partial(_save, path, change, source, str(Path(folder) / path))
                    cells.append({"path": path, "storage": storage, **taken(world, f"{path} on {storage}", save)})
                    yield result
        yield result


def _proved(
    make: Callable[[Clock], Destination], digests: Mapping[str, int], change: CompareChange, fault: Fault | None
) -> Cell:
    """Make the change and hold what arrived against the source."""
    clock = Clock()
    made = make(clock)
    try:
        strike(fault, made)
        return proof(digests, made, change, clock)
    finally:
        made.close()


def proof(
    digests: Mapping[str, int], made: Destination, change: CompareChange, clock: Clock, *, weights_only: bool = False
) -> Cell:
    """The cell of a destination that the state has reached; ``weights_only``: nothing else of it was to. Collective
    over the world."""
    with clock.phase("digest"):
        found = made.digests()
    weights_only = weights_only or change.destination is None
    passed, total, mismatch = check_digests(digests, found, weights_only=weights_only)
    return {"phases": clock.slowest(), "digest_passed": passed, "digest_total": total, "mismatch": mismatch}


def import_all(model: str, world: World) -> None:
    """Import what builds engines, before anybody listens for heartbeats: it takes seconds."""
    with quiet():
        for name in imported_models(model):
            importlib.import_module(name)


def taken(world: World, what: str, path: Callable[[], Cell]) -> Cell:
    """What ``path`` gives, or why it cannot, or what failed, the same on every rank. Every rank of the world calls it,
    once for each ``what``.

    A refusal of DeepSpeed's checkpoints is a ``cannot``; any other error a failure. Raises RankLost and MoveTimeout,
    this one also where a rank failed alone, in the middle of what the others are still in.
    """
    found: Cell = {}
    mine = ""
    try:
        found = path()
    except (RankLost, MoveTimeout):
        raise
    except (PathCannot, UniversalRefused) as error:
        mine = f"cannot {error}"
    except Exception as error:
        mine = f"failed {say_error(error)}"
        if not isinstance(error, InputError):
            traceback.print_exception(error)
    ends = [text.split(" ", 1) for text in tell_by_store(world, what, mine, _ALIKE_S) if text]
    worst = max(ends, default=None)  # "failed" before "cannot"
    return found if worst is None else {worst[0]: worst[1]}


def as_lack_of_room(error: Exception, folder: Path) -> Exception:
    """``error``, or where the storage is full an OSError that says so: that is no limit of a path."""
    free = shutil.disk_usage(folder).free
    if free >= max(folder_bytes(folder), _LEAST_ROOM):
        return error
    return OSError(f"{format_bytes(free)} are left on the storage: {error}")


def strike(fault: Fault | None, made: Destination) -> None:
    """Flip a bit of what arrived, on the rank that the fault names."""
    if fault is not None and fault.kind == "flip" and fault.rank == dist.get_rank():
        kept = made.first_storage()
        if kept is not None:
            kept.view(torch.uint8)[0] ^= 1


def _in_memory(
    job: CompareSaveJob,
    world: World,
    heartbeat: Heartbeat,
    ends: Ends,
    change: CompareChange,
    source: Any,
    clock: Clock,
) -> Destination:
    """The destination after a move in memory."""
    with clock.phase("build"):
        made = ends.destination()
    if made.layout is None:
        with clock.phase("plan"):
            move = TrainingStateMove(
                source, made.engine, topology=world.topology, time_limit_s=job.move_limit_s, heartbeat=heartbeat
            )
            move.prepare()
        timing = move.run()
        clock.seconds["move"] = timing.prepare_s + timing.move_s + timing.fields_s
        clock.seconds["refresh"] = timing.refresh_s
        return made
    executor = "all-to-all" if world.backend == "nccl" else "send-recv"
    with clock.phase("plan"):
        held = {} if source is None else weights_storage(source)
        layout = read_together(source, "source", Assembly()).weights
        plan = plan_move(layout, made.layout, world.topology)
        codes = np.full(int(plan.group_start[-1]), DIRECT, dtype=np.int8)
        schedule = build_schedule(plan, world.topology, codes, DEFAULT_BUCKET_BYTES)
        mover = Mover(
            schedule, world.rank, held, made.storages or {}, executor,
            time_limit_s=job.move_limit_s, heartbeat=heartbeat,
        )  # fmt: skip
        mover.agree()
    with clock.phase("move"):
        mover.run()
    return made


def _gather(
    job: CompareSaveJob,
    world: World,
    heartbeat: Heartbeat,
    ends: Ends,
    change: CompareChange,
    source: Any,
    clock: Clock,
) -> Destination:
    """The destination after every tensor was gathered whole and cut."""
    with clock.phase("build"):
        made = ends.destination()
    training, group = job.scenario.training, ends.tensor_group()
    if made.layout is None:
        times = gather_training_state(source, made.engine, change.source, training, group)
    else:
        times = gather_weights(source, change.source, training, made.layout, made.storages or {}, group)
    phases = {name.removesuffix("_s"): seconds for name, seconds in asdict(times).items() if seconds}
    for name in ("plan", "gather", "slice", "refresh") if made.layout is None else ("gather", "slice"):
        clock.seconds[name] = phases.get(name, 0.0)
    return made


def _refit(
    job: CompareSaveJob,
    world: World,
    change: CompareChange,
    source: Any,
    digests: Mapping[str, int],
    fault: Fault | None,
) -> Cell:
    """The weights alone, moved by Megatron-Core's refit into a model cut as the destination. The second move counts:
    the first also connects ranks."""
    megatron = import_together()
    layout = read_together(source, "source", Assembly()).weights
    over_nccl = world.backend == "nccl"
    device = world.device if over_nccl else torch.device("cuda", world.local_rank % torch.cuda.device_count())
    clock = Clock()
    with clock.phase("build"):
        refit = Refit(
            megatron,
            Model(layout, copies_of(change.source), {} if source is None else weights_storage(source)),
            copies_of(change.end),
            {name: cut_dims(job.scenario.training, name) for name in layout.specs},
            service="nccl" if over_nccl else "gloo",
            device=device,
            time_limit_s=job.time_limit_s,
        )
    try:
        with clock.phase("plan"):
            refit.plan()
        with clock.phase("first"):
            refit.move()
        refit.poison()
        with clock.phase("move"):
            refit.move()
        made = Destination(None, refit.layout, refit.storages)
        strike(fault, made)
        cell = proof(digests, made, change, clock, weights_only=True)
    finally:
        refit.close()
    first_s = cell["phases"].pop("first")
    note = (
        f"weights alone, {format_bytes(weight_bytes(layout))}: masters and moments are not moved; {refit.told}; the "
        f"second move is timed, the first took {format_seconds(first_s)}"
    )
    if not over_nccl:
        note += "; the engines are on the CPU here, and their weights were copied to a GPU before"
    return {**cell, "note": note}


def _save(path: str, change: CompareChange, source: Any, folder: str) -> Cell:
    """Write one checkpoint, into the page cache."""
    clock = Clock()
    Path(folder).mkdir(exist_ok=True)
    weights_only = change.destination is None
    if path == "universal":
        if weights_only:
            raise UniversalRefused(NO_TRAINING_STATE)
        try:
            with clock.phase("save"):
                save_universal(source, folder)
        except UniversalRefused as error:
            raise as_lack_of_room(error, Path(folder)) from error
    elif weights_only:
        layout = read_together(source, "source", Assembly()).weights
        with clock.phase("save"):
            save_tensors(layout, {} if source is None else weights_storage(source), folder, sync=False)
    else:
        with clock.phase("save"):
            save_dcp(source, folder, sync=False)
    return {"phases": clock.slowest()}


def _state_bytes(source: Any, *, weights_only: bool) -> int:
    """Bytes of what changes its layout, each element once. Collective."""
    state = read_together(source, "source", Assembly())
    layouts: Sequence[Any] = [state.weights] if weights_only else [state.joined(state.fields["per_weight"])]
    return sum(spec.numel * spec.itemsize for layout in layouts for spec in layout.specs.values())
