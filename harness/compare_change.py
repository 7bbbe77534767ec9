"""One change by every path, as ``compare`` and ``calibrate --paths`` make it: worlds, a conversion, rows.

    made = Making(scenario, paths, storages, cluster, stamp, deadline)
    code, rows = make_change(made, change, launch, out)

The parent starts a world that trains the source, makes the change where no new processes are needed and saves the
checkpoints; converts them; and starts a world anew that loads them. No checkpoint stays.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import EXIT_OK
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import describe_cluster, work_together
from relaymeter.harness.compare_config import NO_TRAINING_STATE, CompareChange, CompareScenario
from relaymeter.harness.compare_rows import Told, rows_of
from relaymeter.harness.compare_storage import Storage, Workplace, folder_bytes
from relaymeter.harness.jobs import ClusterConfig, CompareLoad, CompareLoadJob, CompareSaveJob, Fault, RunStamp
from relaymeter.harness.launch import visible_gpus
from relaymeter.harness.models import weight_specs
from relaymeter.harness.paths.refit_changes import unsuited
from relaymeter.harness.signals import INTERRUPTED
from relaymeter.units import format_seconds

__all__ = [
    "MOVE_LIMIT_S",
    "Making",
    "convert",
    "foreseen",
    "loaded_form",
    "loads_of",
    "lost_text",
    "make_change",
    "state_bytes",
    "without_folders",
]

#: Limit of one move, in seconds.
MOVE_LIMIT_S = 120.0
#: A folder of the ranks' own files, as ``JobFolder`` makes it.
_TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/relaymeter-[a-z0-9_]{{8}}/")


@dataclass(frozen=True)
class Making:
    """How changes of a scenario are made, and what of. ``deadline``: of the monotonic clock."""

    scenario: CompareScenario
    paths: tuple[str, ...]
    storages: tuple[Storage, ...]
    cluster: ClusterConfig
    stamp: RunStamp
    deadline: float
    fault: Fault | None = None

    def setting(self, change: CompareChange) -> str:
        """Hash of what the rows of one change depend on, beside machine and commit."""
        told = {
            "training": self.scenario.training.model_dump(mode="json"),
            "model": None if self.scenario.model is None else self.scenario.model.model_dump(mode="json"),
            "change": change.model_dump(mode="json"),
            "paths": self.paths,
            "storages": [[storage.name, str(storage.folder.resolve())] for storage in self.storages],
            "cluster": self.cluster.model_dump(mode="json"),
            "fault": None if self.fault is None else self.fault.model_dump(mode="json"),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def on_gpu(self) -> bool:
        """Whether every rank has a GPU of its own."""
        return len(visible_gpus(os.environ)) >= self.cluster.nodes * self.cluster.ranks_per_node

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least one."""
        return max(1.0, self.deadline - time.monotonic())


def make_change(
    making: Making, change: CompareChange, launch: int, out: emit.Output
) -> tuple[int, list[CompareRecord]]:
    """Make one change of the scenario by every path. Returns the exit code of its worlds and the rows: none where it
    was interrupted. Where no path can make it nothing is started."""
    told = foreseen(making, change)
    if told is not None:
        return EXIT_OK, _rows(making, change, told, launch)
    code, told = _make(making, change, out)
    return code, [] if code in INTERRUPTED else _rows(making, change, told, launch)


def foreseen(making: Making, change: CompareChange) -> Told | None:
    """What would be told of a change that none of the paths can make, as is known beforehand; None where one may."""
    cells: list[dict[str, Any]] = []
    for path in making.paths:
        if path == "universal" and change.destination is None:
            cells += [
                {"path": path, "storage": storage.name, "cannot": NO_TRAINING_STATE} for storage in making.storages
            ]
        elif path != "megatron" or unsuited(change, making.scenario.training) is None:
            return None
    return Told(saved=cells, on_gpu=making.on_gpu)


def state_bytes(scenario: CompareScenario) -> int:
    """About the bytes of weights, masters and moments, for the room that checkpoints need."""
    training = scenario.training
    if scenario.model is not None:
        return 14 * sum(spec.numel for spec in weight_specs(scenario.model.geometry()).values())
    return 14 * (8 * training.layers * training.width**2 + 100 * training.width)


def _make(making: Making, change: CompareChange, out: emit.Output) -> tuple[int, Told]:
    """Make one change by every path. Returns the exit code of the worlds and what they told."""
    one = making.scenario.model_copy(update={"changes": (change,)})
    told = Told()
    with Workplace(making.storages) as places:
        through = {path for path in making.paths if path in ("dcp", "universal")}
        save = CompareSaveJob(
            scenario=one, paths=making.paths, folders={name: str(place) for name, place in places.items()},
            time_limit_s=making.left_s, move_limit_s=MOVE_LIMIT_S, stamp=making.stamp, fault=making.fault,
        )  # fmt: skip
        errors: list[str] = []
        code, found = work_together(save, making.cluster, None, out, on_error=errors.append)
        _first(told, found, code, errors)
        if found is None or code in INTERRUPTED or not through:
            return code, without_folders(told, places)
        saved = {(cell["path"], cell["storage"]) for cell in told.saved if "phases" in cell}
        for name, place in places.items():
            if ("universal", name) in saved:
                out.say(f"  universal: converting on {name}")
                told.converted = {**told.converted, name: convert(place / "universal", making.left_s)}
        loads = loads_of(making.storages, places, saved, told.converted)
        if not loads:
            return code, without_folders(told, places)
        told.written_bytes = {(load.path, load.storage): folder_bytes(loaded_form(load)) for load in loads}
        load = CompareLoadJob(
            scenario=one, loads=loads, digests=found["digests"], launched_at=time.time(), time_limit_s=making.left_s,
            stamp=making.stamp, fault=making.fault if making.paths[0] in through else None,
        )  # fmt: skip
        errors.clear()
        ended, later = work_together(load, making.cluster, None, out, on_error=errors.append)
        if later is not None:
            told.start, told.loaded = later["start"], later["cells"]
        if ended != EXIT_OK:
            told.lost = lost_text("load", ended, errors)
        return code or ended, without_folders(told, places)


def lost_text(what: str, code: int, errors: Sequence[str]) -> str:
    """Why cells are missing: how the ranks that ``what`` ended, and what the first of them said of it. Pure."""
    said = next((error for error in errors if error), "")
    return f"the ranks that {what} ended with exit code {code}{f': {said}' if said else ''}"


def without_folders(told: Told, places: Mapping[str, Path]) -> Told:
    """``told`` with reasons that name files of a checkpoint by their place in it, as the checkpoints, which lie in
    ``places`` by storage, do not stay; folders for temporary files have no names at all. Pure."""

    def cleaned(text: str) -> str:
        for place in {name for path in places.values() for name in (str(path), os.path.realpath(path))}:
            for form in (f"{place}/universal", f"{place}/dcp"):
                text = text.replace(f"{form}/", "").replace(f"the checkpoint {form}", "the checkpoint")
                text = text.replace(form, "the checkpoint")
            text = text.replace(f"{place}/", "").replace(place, "the storage")
        return _TEMPORARY.sub("", text)

    def cell(found: Mapping[str, Any]) -> dict[str, Any]:
        return {key: cleaned(value) if key in ("cannot", "failed") else value for key, value in found.items()}

    return replace(
        told,
        saved=[cell(one) for one in told.saved],
        loaded=[cell(one) for one in told.loaded],
        converted={name: cell(one) for name, one in told.converted.items()},
        lost=cleaned(told.lost),
    )


def _first(told: Told, found: Mapping[str, Any] | None, code: int, errors: Sequence[str]) -> None:
    """Note what the first world told."""
    if found is not None:
        told.saved, told.state_bytes, told.on_gpu = found["cells"], found["state_bytes"], found["on_gpu"]
    if code != EXIT_OK:
        told.lost = lost_text("train", code, errors)


def loaded_form(load: CompareLoad) -> Path:
    """The folder of the checkpoint in the form that is loaded."""
    from relaymeter.harness.paths.universal import universal_folder

    return universal_folder(load.folder) if load.path == "universal" else Path(load.folder)


def loads_of(
    storages: Sequence[Storage],
    places: Mapping[str, Path],
    saved: Collection[tuple[Any, Any]],
    converted: Mapping[str, Mapping[str, Any]],
) -> tuple[CompareLoad, ...]:
    """Every checkpoint that can be loaded, warm before cold, since a load warms the page cache again. ``saved``: paths
    and storages of the saves that ended well; ``places`` and ``converted`` by storage. Pure."""
    found = []
    for storage in storages:
        for path in ("dcp", "universal"):
            ready = (path, storage.name) in saved
            if path == "universal":
                ready = ready and "convert_s" in converted.get(storage.name, {})
            if ready:
                place = str(places[storage.name] / path)
                found += [
                    CompareLoad(path=path, storage=storage.name, cache=cache, folder=place) for cache in storage.caches
                ]
    return tuple(found)


def convert(folder: Path, limit_s: float) -> dict[str, Any]:
    """Convert in a process of its own, which is ended with this one."""
    command = [
        sys.executable, "-m", "relaymeter.harness.enter", "--parent", str(os.getpid()), "--",
        sys.executable, "-m", "relaymeter.harness.compare_convert", str(folder),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )  # fmt: skip
    try:
        told, said = process.communicate(timeout=limit_s)
    except BaseException as error:
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            return {"failed": f"the conversion did not end within {format_seconds(limit_s)}"}
        raise
    lines = [line for line in said.split("\n") if line.strip()]
    if process.returncode == 1 and lines:
        return {"cannot": f"converting fails: {lines[-1]}"}
    if process.returncode == 3 and lines:
        return {"failed": f"converting fails: {lines[-1]}"}
    with suppress(json.JSONDecodeError, IndexError):
        if process.returncode == 0:
            found: dict[str, Any] = json.loads(told.strip().split("\n")[-1])
            return found
    return {"failed": f"the converter ended with exit code {process.returncode}: {lines[-1] if lines else 'silent'}"}


def _end(process: subprocess.Popen[str]) -> None:
    from relaymeter.harness.processes import end_offspring

    end_offspring(process.pid)
    process.kill()
    process.communicate()


def _rows(making: Making, change: CompareChange, told: Told, launch: int) -> list[CompareRecord]:
    return rows_of(
        making.scenario, change, told, stamp=making.stamp, launch=launch, nodes=making.cluster.nodes,
        paths=making.paths,
        storages={storage.name: storage.filesystem for storage in making.storages},
        caches={storage.name: storage.caches for storage in making.storages},
        cluster=describe_cluster(making.cluster), setting=making.setting(change),
    )  # fmt: skip
