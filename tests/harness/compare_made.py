"""Cells and rows of a comparison that nobody ran, for the tests of ``compare``."""

from __future__ import annotations

from typing import Any

from relaymeter.compare_records import PATHS, CompareRecord
from relaymeter.harness.compare_config import CompareScenario
from relaymeter.harness.compare_rows import Told, rows_of
from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.scenario import load_any

__all__ = ["LOADED", "SAVED", "STAMP", "TOLD", "made", "scenario"]

STAMP = RunStamp(utc="2026-11-30T00:00:00Z", launch_id="ab", machine_id="m", commit="c")


SAVED: list[dict[str, Any]] = [
    {"path": "in-memory", "storage": None, "phases": {"build": 2.0, "plan": 0.25, "move": 0.5, "refresh": 0.25,
     "digest": 9.0}, "digest_passed": 6, "digest_total": 6, "mismatch": None},
    {"path": "universal", "storage": "disk", "phases": {"save": 1.0}},
    {"path": "dcp", "storage": "disk", "phases": {"save": 0.5}},
]  # fmt: skip


LOADED: list[dict[str, Any]] = [
    {"path": path, "storage": "disk", "cache": cache, "phases": {"build": 2.0, "load": load, "digest": 9.0},
     "digest_passed": 6, "digest_total": 6, "mismatch": None}
    for path, load in (("universal", 3.0), ("dcp", 1.0)) for cache in ("warm", "cold")
]  # fmt: skip


TOLD = Told(
    saved=SAVED, loaded=LOADED, start={"relaunch": 4.0, "import": 8.0}, state_bytes=100,
    converted={"disk": {"convert_s": 5.0, "import_s": 1.5}}, written_bytes={("dcp", "disk"): 120},
)  # fmt: skip


def scenario() -> CompareScenario:
    found = load_any("rfc-small")
    assert isinstance(found, CompareScenario)
    return found


def made(told: Told, paths: tuple[str, ...] = PATHS, change: int = 0) -> list[CompareRecord]:
    return rows_of(
        scenario(), scenario().changes[change], told, stamp=STAMP, launch=1, nodes=1, paths=paths,
        storages={"disk": "ext4"}, caches={"disk": ("warm", "cold")},
    )  # fmt: skip
