"""``compare``: the same change of the same state in memory, by gathering, and through checkpoints, side by side.

For every change the parent starts a world that trains the source, makes the change where no new processes are needed
and saves the checkpoints; converts them; and starts a world anew that loads them. Rows are kept after every change, and
no checkpoint stays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import EXIT_OK, EXIT_TIME_LIMIT, EXIT_USAGE, EXIT_WRONG_BITS, InputError
from relaymeter.harness import compare_emit, emit
from relaymeter.harness.commands_ranks import (
    asked_cluster,
    check_results,
    check_targets,
    is_shaped,
    shapeable,
    work_together,
    write_all,
)
from relaymeter.harness.compare_config import CompareChange, CompareScenario
from relaymeter.harness.compare_rows import Told, rows_of
from relaymeter.harness.compare_storage import Storage, Workplace, check_room, find_storages, folder_bytes
from relaymeter.harness.config import nearest
from relaymeter.harness.jobs import ClusterConfig, CompareLoad, CompareLoadJob, CompareSaveJob, Fault, RunStamp
from relaymeter.harness.launch import already_in_world
from relaymeter.harness.models import weight_specs
from relaymeter.harness.results import keep_results, machine_id, make_stamp
from relaymeter.harness.scenario import load_any
from relaymeter.harness.verdict import judge_comparison
from relaymeter.records import dump_lines, write_text
from relaymeter.row_files import read_rows
from relaymeter.units import counted, format_bytes, format_seconds

__all__ = ["compare"]

_LIMIT_S = 1800.0
_MOVE_LIMIT_S = 120.0
#: Exit codes of a world that was interrupted: 128 and the signal's number.
_INTERRUPTED = (130, 143)


@dataclass(frozen=True)
class _Asked:
    """What is compared and how."""

    scenario: CompareScenario
    paths: tuple[str, ...]
    storages: tuple[Storage, ...]
    cluster: ClusterConfig
    stamp: RunStamp
    deadline: float
    fault: Fault | None

    @property
    def left_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())


def compare(args: argparse.Namespace) -> int:
    """Make the comparison, table it and give the verdict. Returns its exit code."""
    begin = time.monotonic()
    scenario = _selected(args)
    out = emit.Output(args.json, force=args.force)
    check_targets(json=args.json, results=args.results, journal=args.journal, scenario=args.scenario)
    if args.results is not None:
        check_results(args.results, machine_id())
    hint = already_in_world()
    if hint is not None:
        raise InputError(
            f"compare starts its ranks anew for every checkpoint, so it does not join the world of {hint.launcher}: "
            "start it as a plain command"
        )
    cluster = _cluster(args, scenario, out)
    storages = find_storages(args.storage)
    check_room(storages, _state_bytes(scenario))
    asked = _Asked(
        scenario, args.paths, storages, cluster, make_stamp(machine_id(), shaped=is_shaped(cluster)),
        begin + (args.time_limit or _LIMIT_S), Fault(kind=args.fault[0], rank=args.fault[1]) if args.fault else None,
    )  # fmt: skip
    rows = _journalled(args.journal, asked)
    code = EXIT_OK
    for launch in range(1, args.launches + 1):
        for change in scenario.changes:
            if any(row.change == change.name and row.launch == launch for row in rows):
                out.say(f"{change.name}, launch {launch}: in {args.journal} already")
                continue
            if time.monotonic() >= asked.deadline:
                code = EXIT_TIME_LIMIT
                break
            number = f" (launch {launch} of {args.launches})" if args.launches > 1 else ""
            out.say(f"{change.name}: {change.source.label} -> {change.end.label}{number}")
            ended, told = _make(asked, change, out)
            if ended in _INTERRUPTED:
                return _report(args, asked, rows, ended, begin, out)
            code = code or ended
            made = _rows(asked, change, told, launch)
            for row in made:
                out.say(compare_emit.row_text(row))
            rows += made
            if args.journal is not None:
                write_text(args.journal, dump_lines(rows), force=True)
    return _report(args, asked, rows, code, begin, out)


def _selected(args: argparse.Namespace) -> CompareScenario:
    """The scenario with the changes of ``--change``. Raises InputError on others."""
    scenario = load_any(args.scenario)
    if not isinstance(scenario, CompareScenario):
        raise InputError(
            f"scenario {args.scenario} is of kind {scenario.kind!r}: compare takes those of kind 'compare', such as "
            "rfc-small"
        )
    names = [change.name for change in scenario.changes]
    for name in args.change or ():
        if name not in names:
            raise InputError(f"scenario {scenario.name} has no change {name!r}: {nearest(name, names)}")
    if not args.change:
        return scenario
    return scenario.model_copy(update={"changes": tuple(c for c in scenario.changes if c.name in args.change)})


def _cluster(args: argparse.Namespace, scenario: CompareScenario, out: emit.Output) -> ClusterConfig:
    """The ranks to start: one node on loopback, or what the command line says. Raises InputError on too few."""
    needed = max(change.world for change in scenario.changes)
    base = ClusterConfig(nodes=1, ranks_per_node=needed)
    if args.nodes and not args.ranks_per_node:
        base = ClusterConfig(nodes=1, ranks_per_node=-(-needed // args.nodes))
    found = asked_cluster(args, base)
    if found.nodes * found.ranks_per_node < needed:
        raise InputError(
            f"scenario {scenario.name} needs {counted(needed, 'rank')}, --nodes {found.nodes} x --ranks-per-node "
            f"{found.ranks_per_node} are {found.nodes * found.ranks_per_node}: give more, or leave both out"
        )
    if args.fault is not None and args.fault[1] >= found.nodes * found.ranks_per_node:
        raise InputError(f"--fault: rank {args.fault[1]} of {found.nodes * found.ranks_per_node} ranks")
    if found.nic_rate_bytes_per_s is None and found.nodes == 1:
        return found.model_copy(update={"shape": False})
    return shapeable(found, out)


def _state_bytes(scenario: CompareScenario) -> int:
    """About the bytes of weights, masters and moments, for the room that checkpoints need."""
    training = scenario.training
    if scenario.model is not None:
        return 14 * sum(spec.numel for spec in weight_specs(scenario.model.geometry()).values())
    return 14 * (8 * training.layers * training.width**2 + 100 * training.width)


def _journalled(journal: Path | None, asked: _Asked) -> list[CompareRecord]:
    """Rows of an earlier run of the same comparison. Raises InputError where they are of another one."""
    if journal is None or not journal.exists():
        return []
    rows = []
    for row in read_rows(journal):
        if not isinstance(row, CompareRecord):
            raise InputError(f"--journal {journal} holds rows of other commands: give another file")
        for key, now in (("scenario", asked.scenario.name), ("machine_id", asked.stamp.machine_id),
                         ("commit", asked.stamp.commit)):  # fmt: skip
            if getattr(row, key) != now:
                raise InputError(
                    f"--journal {journal} holds rows of {key} {getattr(row, key)}, this is {now}: give another file"
                )
        rows.append(row)
    return rows


def _make(asked: _Asked, change: CompareChange, out: emit.Output) -> tuple[int, Told]:
    """Make one change by every path. Returns the exit code of the worlds and what they told."""
    one = asked.scenario.model_copy(update={"changes": (change,)})
    told = Told()
    with Workplace(asked.storages) as places:
        through = {path for path in asked.paths if path in ("dcp", "universal")}
        save = CompareSaveJob(
            scenario=one, paths=asked.paths, folders={name: str(place) for name, place in places.items()},
            time_limit_s=asked.left_s, move_limit_s=_MOVE_LIMIT_S, stamp=asked.stamp, fault=asked.fault,
        )  # fmt: skip
        code, found = work_together(save, asked.cluster, None, out)
        _first(told, found, code)
        if found is None or code in _INTERRUPTED or not through:
            return code, told
        saved = {(cell["path"], cell["storage"]) for cell in told.saved if "phases" in cell}
        for name, place in places.items():
            if ("universal", name) in saved:
                out.say(f"  universal: converting on {name}")
                told.converted = {**told.converted, name: _convert(place / "universal", asked.left_s)}
        loads = _loads(asked, places, saved, told)
        if not loads:
            return code, told
        told.written_bytes = {
            (load.path, load.storage): folder_bytes(_loaded_form(Path(load.folder), load.path)) for load in loads
        }
        load = CompareLoadJob(
            scenario=one, loads=loads, digests=found["digests"], launched_at=time.time(), time_limit_s=asked.left_s,
            stamp=asked.stamp, fault=asked.fault if asked.paths[0] in through else None,
        )  # fmt: skip
        ended, later = work_together(load, asked.cluster, None, out)
        if later is not None:
            told.start, told.loaded = later["start"], later["cells"]
        if ended != EXIT_OK:
            told.lost = f"the ranks that load ended with exit code {ended}"
        return code or ended, told


def _first(told: Told, found: Mapping[str, Any] | None, code: int) -> None:
    """Note what the first world told."""
    if found is not None:
        told.saved, told.state_bytes = found["cells"], found["state_bytes"]
    if code != EXIT_OK:
        told.lost = f"the ranks that train ended with exit code {code}"


def _loaded_form(folder: Path, path: str) -> Path:
    from relaymeter.harness.paths.universal import universal_folder

    return universal_folder(folder) if path == "universal" else folder


def _loads(
    asked: _Asked, places: Mapping[str, Path], saved: set[tuple[Any, Any]], told: Told
) -> tuple[CompareLoad, ...]:
    """Every checkpoint that can be loaded, warm before cold, since a load warms the page cache again."""
    found = []
    for storage in asked.storages:
        for path in ("dcp", "universal"):
            ready = (path, storage.name) in saved
            if path == "universal":
                ready = ready and "convert_s" in told.converted.get(storage.name, {})
            if ready:
                place = str(places[storage.name] / path)
                found += [
                    CompareLoad(path=path, storage=storage.name, cache=cache, folder=place) for cache in storage.caches
                ]
    return tuple(found)


def _convert(folder: Path, limit_s: float) -> dict[str, Any]:
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
    lines = [line for line in said.splitlines() if line.strip()]
    if process.returncode == 1 and lines:
        return {"cannot": f"converting fails: {lines[-1]}"}
    with suppress(json.JSONDecodeError, IndexError):
        if process.returncode == 0:
            found: dict[str, Any] = json.loads(told.splitlines()[-1])
            return found
    return {"failed": f"the converter ended with exit code {process.returncode}: {lines[-1] if lines else 'silent'}"}


def _end(process: subprocess.Popen[str]) -> None:
    from relaymeter.harness.processes import end_offspring

    end_offspring(process.pid)
    process.kill()
    process.communicate()


def _rows(asked: _Asked, change: CompareChange, told: Told, launch: int) -> list[CompareRecord]:
    return rows_of(
        asked.scenario, change, told, stamp=asked.stamp, launch=launch, nodes=asked.cluster.nodes, paths=asked.paths,
        storages={storage.name: storage.filesystem for storage in asked.storages},
        caches={storage.name: storage.caches for storage in asked.storages},
    )  # fmt: skip


def _report(
    args: argparse.Namespace, asked: _Asked, rows: Sequence[CompareRecord], code: int, begin: float, out: emit.Output
) -> int:
    """The verdict first, then the tables and files. Returns the exit code."""
    if code in _INTERRUPTED:
        kept = f"; the rows so far are in {args.journal}" if args.journal is not None and rows else ""
        out.say(f"interrupted{kept}")
        return code
    verdict = judge_comparison(rows, code)
    for line in verdict.lines:
        out.say(line)
    for table in compare_emit.comparison_tables(rows):
        out.table(table)
    for line in compare_emit.comparison_lines(rows):
        out.say(line)
    size = max((row.state_bytes for row in rows), default=0)
    passed, total = sum(row.digest_passed for row in rows), sum(row.digest_total for row in rows)
    out.say(
        f"{counted(len({row.change for row in rows}), 'change')}, up to {format_bytes(size)} of state, {passed} of "
        f"{total} digests equal, {format_seconds(time.monotonic() - begin)} in all"
    )

    def keep() -> None:
        where = keep_results(
            args.results, rows, asked.stamp, asked.scenario.name, suite=f"compare-{asked.scenario.name}"
        )
        out.say(f"results: {where}")

    failed = write_all(args, {"json": lambda: out.json(dump_lines(rows)), **({"results": keep} if rows else {})})
    failed = failed or out.exit_code
    return verdict.exit_code if failed == EXIT_OK or verdict.exit_code == EXIT_WRONG_BITS else EXIT_USAGE
