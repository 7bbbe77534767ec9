"""``compare`` in worlds that a launcher made, on several machines: the same command twice, with a folder in between.

``joined(making, work, hint, nic_per, out)`` is called by every rank's process. The first command trains, makes the
change in memory and by gathering, saves the checkpoints into the folder and converts; the second, in new processes,
loads them, and its rank 0 has the rows.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import EXIT_OK, InputError
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import work_together
from relaymeter.harness.compare_change import (
    MOVE_LIMIT_S,
    Making,
    convert,
    foreseen,
    loaded_form,
    loads_of,
    lost_text,
    make_change,
    without_folders,
)
from relaymeter.harness.compare_config import CompareScenario
from relaymeter.harness.compare_rows import Told, rows_of
from relaymeter.harness.compare_storage import Storage, folder_bytes
from relaymeter.harness.jobs import CompareLoadJob, CompareSaveJob
from relaymeter.harness.launch import WorldHint
from relaymeter.harness.page_cache import file_system
from relaymeter.records import dump_json, load_json, write_text
from relaymeter.units import counted

__all__ = ["joined", "joined_world", "work_storage"]

#: What rows call the folder between the two commands.
_STORAGE = "work"
_TOLD = "told.json"


def work_storage(work: Path) -> Storage:
    """The folder as a storage. Raises InputError where it is no folder."""
    if not work.is_dir():
        raise InputError(f"--work {work} is no folder: make it first, where every node reaches it")
    return Storage(_STORAGE, work, file_system(work))


def joined(
    making: Making, hint: WorldHint, nic_per: Literal["rank", "node"] | None, out: emit.Output
) -> tuple[int, list[CompareRecord] | None]:
    """Do this command's part. Returns its exit code and, on rank 0 of the second command, the rows.

    ``making`` has one change and one storage, of ``work_storage``. Raises InputError where that holds the first half of
    another comparison.
    """
    scenario, storage = making.scenario, making.storages[0]
    kept = storage.folder / _TOLD
    if foreseen(making, scenario.changes[0]) is not None:
        code, rows = make_change(making, scenario.changes[0], 1, out)
        cluster = f"a world of {counted(hint.world_size, 'rank')} that was joined"
        return code, None if hint.rank else [replace(row, cluster=cluster) for row in rows]
    if kept.exists():
        return _second(making, kept, hint, nic_per, out)
    save = CompareSaveJob(
        scenario=scenario, paths=making.paths, folders={storage.name: str(storage.folder)},
        time_limit_s=making.left_s, move_limit_s=MOVE_LIMIT_S, nic_per=nic_per, stamp=making.stamp, fault=making.fault,
    )  # fmt: skip
    code, found = work_together(save, None, hint, out)
    if hint.rank == 0 and found is not None and code == EXIT_OK:
        converted: dict[str, Any] = {}
        if any(cell["path"] == "universal" and "phases" in cell for cell in found["cells"]):
            out.say("  universal: converting")
            converted = convert(storage.folder / "universal", making.left_s)
        write_text(kept, dump_json({**found, "converted": converted, "of": _identity(scenario)}))
        out.say("now run the same command once more: new processes load what lies in " + str(storage.folder))
    return code, None


def _second(
    making: Making, kept: Path, hint: WorldHint, nic_per: Literal["rank", "node"] | None, out: emit.Output
) -> tuple[int, list[CompareRecord] | None]:
    scenario, storage = making.scenario, making.storages[0]
    told = load_json(kept, "what the first command told")
    if told["of"] != _identity(scenario):
        raise InputError(
            f"--work {storage.folder} holds the first half of another change or training: give an empty folder"
        )
    saved = {(cell["path"], cell["storage"]) for cell in told["cells"] if "phases" in cell}
    converted = {storage.name: told["converted"]} if told["converted"] else {}
    loads = loads_of((storage,), {storage.name: storage.folder}, saved, converted)
    load = CompareLoadJob(
        scenario=scenario, loads=loads, digests=told["digests"], launched_at=_started(),
        time_limit_s=making.left_s, nic_per=nic_per, stamp=making.stamp,
    )  # fmt: skip
    errors: list[str] = []
    code, later = work_together(load, None, hint, out, on_error=errors.append)
    if hint.rank:
        return code, None
    found = later or {"start": {}, "cells": []}
    written = {(str(one.path), storage.name): folder_bytes(loaded_form(one)) for one in loads}
    if code == EXIT_OK:
        for path in ("dcp", "universal"):
            shutil.rmtree(storage.folder / path, ignore_errors=True)
        kept.unlink()
    whole = Told(
        saved=told["cells"], converted=converted,
        start=found["start"], loaded=found["cells"], state_bytes=told["state_bytes"], on_gpu=told["on_gpu"],
        written_bytes=written,
        lost="" if code == EXIT_OK else lost_text("load", code, errors),
    )  # fmt: skip
    facts = without_folders(whole, {storage.name: storage.folder})
    rows = rows_of(
        scenario, scenario.changes[0], facts, stamp=making.stamp, launch=1, nodes=told["nodes"], paths=making.paths,
        storages={storage.name: storage.filesystem}, caches={storage.name: storage.caches},
        cluster=joined_world(told["nodes"]), setting=making.setting(scenario.changes[0]),
    )  # fmt: skip
    return code, rows


def joined_world(nodes: int) -> str:
    """What rows call the cluster of a world that a launcher made. Pure."""
    return f"a world of {counted(nodes, 'node')} that was joined"


def _identity(scenario: CompareScenario) -> dict[str, Any]:
    return scenario.model_dump(mode="json", include={"name", "model", "training", "changes"})


def _started() -> float:
    """When this process's launcher began on its machine, seconds since 1970: torchrun's agent is this one's parent."""
    own = psutil.Process()
    return float((own.parent() or own).create_time())
