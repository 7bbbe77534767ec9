"""The same change through torch's distributed checkpoint (DCP): saved by one job, loaded by another of any layout.

    timing = save_dcp(engine, folder)               # every rank of the world; None on a rank without the engine
    ...                                             # these processes end, others build an engine of another layout
    timing = load_dcp(other, folder)                # every rank of the other world

What arrives is what ``TrainingStateMove`` moves: masters, every optimizer state of one value per weight, frozen weights
and buffers, each as a tensor of its logical shape of which the ranks write and read chunks (``dcp_planner``), and all
fields. Those are one entry of JSON bytes. Chunks are read without running code from the file (``weights_only``), but
DCP's own ``.metadata`` is a pickle, which can run any code: load no folder of a stranger's.

The folder is the caller's, and one that all ranks reach. Each rank writes one file; when all have, the first writes
``.metadata`` beside its place and renames it. A folder without it holds no checkpoint, whatever else lies in it.
``sync`` makes every file durable (fsync) before that, then the folder's own entries.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from relaymeter.errors import InputError
from relaymeter.harness.paths.dcp_planner import LayoutLoadPlanner, LayoutSavePlanner, local_state
from relaymeter.harness.paths.together import attempt_together, say_error, told_errors
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.engines import MASTER
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.release import filled
from relaymeter.relayout.spare_states import missing_bytes
from relaymeter.relayout.training_fields import write_fields
from relaymeter.relayout.training_match import expected_fields
from relaymeter.relayout.training_state import (
    TrainingState,
    prepare,
    read_together,
    refresh_from_masters,
    refuse_other_model,
    training_storages,
)

__all__ = ["DcpLoadTiming", "DcpSaveTiming", "load_dcp", "load_tensors", "save_dcp", "save_tensors"]

#: Name of the entry of bytes beside the tensors, and the version of what is in it.
_ENTRY = "relaymeter training state"
_VERSION = 1
_METADATA = ".metadata"


@dataclass(frozen=True, kw_only=True)
class DcpSaveTiming:
    """One save on one rank, in seconds and bytes, from the moment when all ranks had come."""

    prepare_s: float
    """Reading the engine's state, and agreeing on it."""
    plan_s: float
    """DCP's plans of all ranks, made, gathered and checked."""
    write_s: float
    """Writing, until all ranks had written and ``.metadata`` was in place."""
    total_s: float
    tensor_bytes: int
    """Of the elements that this rank wrote."""
    file_bytes: int
    """Of what it wrote in all, framing and fields included."""


@dataclass(frozen=True, kw_only=True)
class DcpLoadTiming:
    """One load on one rank, in seconds and bytes, from the moment when all ranks had come."""

    prepare_s: float
    """Reading the engine and the checkpoint's fields, and allocating what the optimizer lacked."""
    plan_s: float
    """Cutting what this rank needs on the borders of the chunks."""
    read_s: float
    """Reading, until all ranks had read."""
    fields_s: float
    """Writing the fields into the engine."""
    refresh_s: float
    """Making the low-precision weights from the masters."""
    total_s: float
    allocated_bytes: int
    """Of optimizer state that the engine lacked."""
    tensor_bytes: int
    """Of the elements that this rank took out of the files."""
    file_bytes: int
    """Of what it read for them: DCP reads the whole of a chunk for each part that it takes out of it."""


def save_dcp(
    engine: Any | None,
    folder: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    sync: bool = True,
) -> DcpSaveTiming:
    """Write the training state of ``engine`` into ``folder``, which is made where it is not there.

    Every rank of ``group`` (default: the world) calls this, with None where it holds no part of the engine, which stays
    as it is. Raises InputError on every rank where the folder holds a checkpoint already or cannot be written, or the
    engine's state cannot be read (offloaded, inside an accumulation window); PlanDisagreement where its ranks differ.
    """
    path, ranks, rank = Path(folder), Assembly(group), _place(group)
    ranks.tell_all(None)  # so that no rank's time counts another's delay
    begin = time.perf_counter()
    attempt_together(lambda: _refuse_taken(path), ranks, "nothing is saved")
    state = read_together(engine, "source", ranks)
    layout = state.joined(state.fields["per_weight"])
    held = attempt_together(lambda: training_storages(engine, layout.specs), ranks, "nothing is saved")
    prepared = time.perf_counter()
    planner = LayoutSavePlanner(layout, rank, {_ENTRY: _pack(state)})
    with _failing_together(f"saving to {path} fails; what lies there is no checkpoint, give an empty folder", group):
        save(
            local_state(layout, held),
            storage_writer=FileSystemWriter(path, sync_files=sync, overwrite=False),
            planner=planner,
            process_group=group,
        )
    if sync:
        attempt_together(lambda: _sync_folder(path) if rank == 0 else None, ranks, f"syncing {path} fails")
    end = time.perf_counter()
    return DcpSaveTiming(
        prepare_s=prepared - begin,
        plan_s=planner.planned - prepared,
        write_s=end - planner.planned,
        total_s=end - begin,
        tensor_bytes=planner.tensor_bytes,
        file_bytes=sum(file.stat().st_size for file in path.glob(f"__{rank}_*")),
    )


def load_dcp(
    engine: Any | None, folder: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None
) -> DcpLoadTiming:
    """Bring the training state that ``save_dcp`` wrote into ``engine``, of any ZeRO stage, degree and ranks.

    Every rank of ``group`` (default: the world) calls this, with None where it holds no part of the engine. Afterwards
    the engine holds what a ``TrainingStateMove`` would have left in it. Raises InputError on every rank: where there is
    no checkpoint, it does not fit the engine, or it lacks a tensor or elements of one, or has it in another shape or
    dtype, before the engine is touched; where a file cannot be read, and then the engine is not usable.
    """
    path, ranks, rank = Path(folder), Assembly(group), _place(group)
    ranks.tell_all(None)
    begin = time.perf_counter()
    reader = attempt_together(lambda: _open(path), ranks, "nothing is loaded")
    metadata = reader.read_metadata()
    target = read_together(engine, "destination", ranks)
    source = _saved_state(reader, path, target.master.world_size, group)
    try:
        refuse_other_model(source, target)
        wanted = expected_fields(source.fields, target.fields)
    except InputError as error:
        raise InputError(f"the checkpoint {path} (the source) does not fit the engine: {error}") from error
    layout = target.joined(source.fields["per_weight"])
    planner = LayoutLoadPlanner(layout, rank)
    known = time.perf_counter()
    attempt_together(lambda: planner.plan(metadata), ranks, f"the checkpoint {path} does not fit the engine")
    planned = time.perf_counter()
    allocated = missing_bytes(engine, wanted)

    def storages() -> Mapping[str, Any]:
        if engine is not None:
            prepare(engine, wanted)
        return training_storages(engine, layout.specs)

    into = attempt_together(storages, ranks, "allocating the optimizer's states fails")
    prepared = time.perf_counter()
    with _failing_together(f"reading the checkpoint {path} fails and the engine is not usable", group):
        load(local_state(layout, into), storage_reader=reader, planner=planner, process_group=group)
    arrived = time.perf_counter()
    attempt_together(
        lambda: None if engine is None else write_fields(engine, wanted),
        ranks,
        "writing the fields fails and the engine is not usable",
    )
    written = time.perf_counter()
    if engine is not None:
        refresh_from_masters(engine)
        filled(engine)
    ranks.tell_all(None)
    end = time.perf_counter()
    return DcpLoadTiming(
        prepare_s=(known - begin) + (prepared - planned),
        plan_s=planned - known,
        read_s=arrived - prepared,
        fields_s=written - arrived,
        refresh_s=end - written,
        total_s=end - begin,
        allocated_bytes=allocated,
        tensor_bytes=planner.tensor_bytes,
        file_bytes=planner.file_bytes(metadata),
    )


def save_tensors(
    layout: Layout,
    storages: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    sync: bool = True,
) -> None:
    """Write the tensors of ``layout`` alone, such as an engine's weights. ``storages``: this rank's, by name.

    Every rank of ``group`` calls this, with layouts of its ranks. Raises InputError on every rank as ``save_dcp``.
    """
    path, ranks = Path(folder), Assembly(group)
    attempt_together(lambda: _refuse_taken(path), ranks, "nothing is saved")
    with _failing_together(f"saving to {path} fails; what lies there is no checkpoint, give an empty folder", group):
        save(
            local_state(layout, storages),
            storage_writer=FileSystemWriter(path, sync_files=sync, overwrite=False),
            planner=LayoutSavePlanner(layout, _place(group)),
            process_group=group,
        )


def load_tensors(
    layout: Layout,
    storages: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read the tensors of ``layout``, of any cut, into this rank's ``storages``. Every rank of ``group`` calls this.

    Raises InputError on every rank as ``load_dcp``; where a file cannot be read the storages are not usable.
    """
    path, ranks = Path(folder), Assembly(group)
    reader = attempt_together(lambda: _open(path), ranks, "nothing is loaded")
    planner = LayoutLoadPlanner(layout, _place(group))
    metadata = reader.read_metadata()
    attempt_together(lambda: planner.plan(metadata), ranks, f"the checkpoint {path} does not fit the layout")
    with _failing_together(f"reading the checkpoint {path} fails and the tensors are not usable", group):
        load(local_state(layout, storages), storage_reader=reader, planner=planner, process_group=group)


class _Reader(FileSystemReader):
    """Reads ``.metadata`` once, for both loads."""

    _kept: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._kept is None:
            self._kept = super().read_metadata(*args, **kwargs)
        return self._kept


def _place(group: dist.ProcessGroup | None) -> int:
    place = dist.get_rank(group)
    if place < 0:
        raise InputError(
            f"rank {dist.get_rank()} is not in the group of the checkpoint: let its members alone call this"
        )
    return place


def _refuse_taken(path: Path) -> None:
    if (path / _METADATA).exists():
        raise InputError(f"{path} holds a checkpoint already: give another folder, or remove this one")


def _open(path: Path) -> _Reader:
    """A reader that has read the metadata."""
    if not (path / _METADATA).is_file():
        what = "no such folder" if not path.exists() else f"no {_METADATA} in it, which is written last"
        raise InputError(f"{path} holds no whole checkpoint ({what}): save it again (save_dcp), on every rank")
    reader = _Reader(path)
    try:
        reader.read_metadata()
    except Exception as error:
        raise InputError(
            f"{path / _METADATA} cannot be read ({say_error(error)}): save the checkpoint again (save_dcp)"
        ) from error
    return reader


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _failing_together(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """What DCP raises on every rank as one InputError: ``what``, and each text with the ranks that had it."""
    try:
        yield
    except CheckpointException as failed:
        errors = {rank: error for rank, (error, _) in failed.failures.items()}
        texts = {rank: say_error(error) for rank, error in errors.items() if isinstance(error, Exception)}
        if len(texts) < len(errors):  # an interrupt, not an error
            raise
        raise InputError(f"{what}: {told_errors(texts, group)}") from failed


def _pack(state: TrainingState) -> bytes:
    """All but the tensors: which there are, and the fields."""

    def specs(layout: Layout) -> dict[str, Any]:
        return {name: [list(spec.shape), spec.dtype] for name, spec in layout.specs.items()}

    told = {
        "version": _VERSION,
        "weights": specs(state.weights),
        MASTER: specs(state.master),
        "aliases": dict(state.weights.aliases),
        "fields": state.fields,
    }
    return json.dumps(told).encode()


def _saved_state(reader: _Reader, path: Path, world_size: int, group: dist.ProcessGroup | None) -> TrainingState:
    """The other side of ``_pack``: layouts of tensors that no rank holds. Collective."""
    planner = LayoutLoadPlanner(Layout("no tensors", world_size, {}, {}), dist.get_rank(group))
    with _failing_together(f"the checkpoint {path} cannot be used", group):
        load({_ENTRY: None}, storage_reader=reader, planner=planner, process_group=group)
    told = json.loads(planner.entries[_ENTRY])
    if told["version"] != _VERSION:
        raise InputError(
            f"the checkpoint {path} is of version {told['version']}, this relaymeter reads version {_VERSION}: load it "
            "with the one that saved it"
        )

    def layout(rows: Mapping[str, Any], aliases: Mapping[str, str]) -> Layout:
        specs = {name: TensorSpec(name, tuple(shape), dtype) for name, (shape, dtype) in rows.items()}
        return Layout(f"checkpoint {path}", world_size, specs, {}, dict(aliases))

    return TrainingState(layout(told["weights"], told["aliases"]), layout(told[MASTER], {}), told["fields"])
