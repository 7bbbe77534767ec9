"""Rows of ``compare`` out of what its worlds told: cells of paths, conversions and loads. Pure.

A *cell* is what a rank world says of one path: ``path``, ``storage``, and either ``phases`` (seconds by name) with
``digest_passed``, ``digest_total`` and ``mismatch`` where something arrived (and a ``note`` where a reader has to know
more), or ``cannot`` or ``failed`` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relaymeter.compare_records import PHASES, CompareRecord, pausing
from relaymeter.harness.compare_config import CompareChange, CompareScenario
from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.paths.refit_changes import unsuited
from relaymeter.relayout.digest import DIGEST_VERSION

__all__ = ["Told", "rows_of"]

Cell = Mapping[str, Any]
#: Phases that move nothing: the start of new processes, and the destination itself.
_START = ("relaunch", "import", "build")
_NOTES = {
    "universal": "frozen weights, buffers and micro_steps stay behind",
    "gather": "every rank holds each tensor whole while it is cut",
}


@dataclass
class Told:
    """Everything that one change in one launch told."""

    saved: Sequence[Cell] = ()
    """Cells of the first world, of paths and of saves."""
    converted: Mapping[str, Cell] = field(default_factory=dict)
    """By storage: ``import_s`` and ``convert_s``, or ``cannot`` or ``failed``."""
    start: Mapping[str, float] = field(default_factory=dict)
    """Seconds until the second world had met: ``relaunch`` and ``import``."""
    loaded: Sequence[Cell] = ()
    """Cells of the second world."""
    state_bytes: int = 0
    written_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By path and storage: bytes of the checkpoint in the form that is loaded."""
    on_gpu: bool = False
    """Whether the ranks exchanged what lies on GPUs, over NCCL."""
    lost: str = ""
    """Why cells are missing, where a world ended badly."""


def rows_of(
    scenario: CompareScenario,
    change: CompareChange,
    told: Told,
    *,
    stamp: RunStamp,
    launch: int,
    nodes: int,
    paths: Sequence[str],
    storages: Mapping[str, str],
    caches: Mapping[str, Sequence[str | None]],
    cluster: str = "",
    setting: str = "",
) -> list[CompareRecord]:
    """A row for every path, over every storage and page cache where it writes a checkpoint.

    ``storages``: file system by name; ``caches``: what the page cache is made to be before a load, by storage.
    """
    rows: list[tuple[str, str | None, Cell]] = []
    for path in paths:
        if path in ("dcp", "universal"):
            for storage in storages:
                cells = [_through_storage(told, path, storage, cache) for cache in caches[storage]]
                rows += [(path, storage, cell) for cell in cells]
        elif path == "megatron" and (reason := unsuited(change, scenario.training)) is not None:
            rows.append((path, None, {"cannot": reason}))
        else:
            found = next((cell for cell in told.saved if cell["path"] == path), None)
            rows.append((path, None, dict(found or {"failed": told.lost or "not reached"})))
    common: dict[str, Any] = {
        "utc": stamp.utc,
        "machine_id": stamp.machine_id,
        "launch_id": stamp.launch_id,
        "commit": stamp.commit,
        "shaped": stamp.shaped,
        "scenario": scenario.name,
        "change": change.name,
        "source": change.source.label,
        "destination": change.end.label,
        "launch": launch,
        "cluster": cluster,
        "setting": setting,
        "ranks": change.world,
        "nodes": nodes,
        "model": scenario.training.model,
        "dtype": scenario.training.dtype,
        "optimizer": scenario.training.optimizer,
        "state_bytes": told.state_bytes,
        "digest_version": DIGEST_VERSION,
    }
    return [
        CompareRecord(
            **common,
            path=path,
            storage=storage,
            filesystem=None if storage is None else storages[storage],
            written_bytes=told.written_bytes.get((path, storage or "")),
            **_facts(path, cell),
        )
        for path, storage, cell in rows
    ]


def _through_storage(told: Told, path: str, storage: str, cache: str | None) -> dict[str, Any]:
    """The cell of a checkpoint: what was saved, converted, started and loaded, joined; the first that went wrong."""

    def found(cells: Sequence[Cell], **wanted: Any) -> Cell | None:
        return next((cell for cell in cells if all(cell.get(key) == value for key, value in wanted.items())), None)

    missing: Cell = {"failed": told.lost or "not reached"}
    saved = found(told.saved, path=path, storage=storage) or missing
    steps = [saved]
    if path == "universal":
        steps.append(told.converted.get(storage, missing))
    steps.append(found(told.loaded, path=path, storage=storage, cache=cache) or missing)
    for step in steps:
        if "cannot" in step or "failed" in step:
            key = "cannot" if "cannot" in step else "failed"
            return {key: step[key], "cache": cache}
    phases = dict(saved["phases"])
    imports = told.start.get("import", 0.0)
    if path == "universal":
        phases["convert"] = steps[1]["convert_s"]
        imports += steps[1]["import_s"]
    return {**steps[-1], "cache": cache, "phases": {**phases, **told.start, "import": imports, **steps[-1]["phases"]}}


def _facts(path: str, cell: Cell) -> dict[str, Any]:
    """Fields of a row from its cell: seconds, sums of them, proof and verdict."""
    found: dict[str, Any] = {"cache": cell.get("cache"), "digest_passed": 0, "digest_total": 0}
    for key in ("cannot", "failed"):
        if key in cell:
            return {**found, key: cell[key], "verdict": key, "ok": False}
    phases: Mapping[str, float] = cell["phases"]
    found |= {f"{name}_s": phases.get(name) for name in PHASES}
    timed = {name: seconds for name, seconds in phases.items() if name != "digest"}
    passed, total = cell["digest_passed"], cell["digest_total"]
    good = 0 < total == passed
    return found | {
        "pause_s": sum(phases[name] for name in pausing(phases)),
        "transfer_s": sum(phases[name] for name in pausing(phases) if name not in _START),
        "total_s": sum(timed.values()),
        "digest_passed": passed,
        "digest_total": total,
        "mismatch": cell["mismatch"],
        "note": cell.get("note", _NOTES.get(path)),
        "verdict": "ok" if good else "wrong bits",
        "ok": good,
    }
