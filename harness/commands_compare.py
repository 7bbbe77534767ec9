"""``compare``: the same change of the same state in memory, by gathering, and through checkpoints, side by side.

``compare_change`` makes one change; here every change and launch is, rows are kept after each, priced where a profile
is given, tabled and judged.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from relaymeter.calibration.fingerprint import machine_facts
from relaymeter.compare_records import CompareRecord
from relaymeter.errors import EXIT_OK, EXIT_TIME_LIMIT, EXIT_USAGE, EXIT_WRONG_BITS, InputError
from relaymeter.harness import compare_emit, emit
from relaymeter.harness.commands_ranks import (
    check_results,
    check_targets,
    check_world,
    cluster_for,
    is_shaped,
    shapeable,
    write_all,
)
from relaymeter.harness.compare_change import Making, make_change, state_bytes
from relaymeter.harness.compare_config import CompareScenario
from relaymeter.harness.compare_joined import joined, work_storage
from relaymeter.harness.compare_journal import finished_rows, keep_rows
from relaymeter.harness.compare_prices import open_path_costs, price_lines, with_prices
from relaymeter.harness.compare_storage import Storage, check_room, find_storages
from relaymeter.harness.config import nearest
from relaymeter.harness.jobs import ClusterConfig, Fault
from relaymeter.harness.launch import WorldHint, already_in_world
from relaymeter.harness.results import keep_results, machine_id, make_stamp, named_files
from relaymeter.harness.scenario import load_any
from relaymeter.harness.signals import INTERRUPTED, EndingSignal, exit_code, held_signals
from relaymeter.harness.verdict import judge_comparison
from relaymeter.policies.path_costs import PathCosts
from relaymeter.records import check_target, dump_lines
from relaymeter.units import counted, format_bytes, format_seconds

__all__ = ["compare"]

_LIMIT_S = 1800.0


def compare(args: argparse.Namespace) -> int:
    """Make the comparison, table it and give the verdict. Returns its exit code."""
    begin = time.monotonic()
    scenario = _selected(args)
    files = named_files(scenario=args.scenario)
    out = emit.Output(args.json, force=args.force)
    check_targets(
        json=args.json, results=args.results, journal=args.journal, scenario=args.scenario, profile=args.profile
    )
    if args.results is not None:
        check_results(args.results, machine_id())
    hint = already_in_world()
    storages = _storages(args, scenario, hint)
    check_room(storages, state_bytes(scenario))
    cluster = ClusterConfig(nodes=1, ranks_per_node=hint.world_size) if hint else _cluster(args, scenario, out)
    costs = None if args.profile is None else open_path_costs(args.profile, None if hint else cluster)
    making = Making(
        scenario, args.paths, storages, cluster, make_stamp(machine_id(), shaped=hint is None and is_shaped(cluster)),
        begin + (args.time_limit or _LIMIT_S), Fault(kind=args.fault[0], rank=args.fault[1]) if args.fault else None,
    )  # fmt: skip
    if hint is not None:
        check_world(args, hint)
        ended, found = joined(making, hint, args.nic_per, out)
        return ended if found is None else _report(args, making, costs, _priced(found, costs), ended, begin, files, out)
    if args.journal is not None:
        check_target(args.journal, force=True)
    kept, others = finished_rows(args.journal, making, args.launches)
    if others:
        out.say(
            f"{counted(len(others), 'row')} of other changes or launches stay in {args.journal}, and are not tabled"
        )
    rows = _priced(kept, costs)
    try:
        code = _make_all(args, making, costs, rows, out)
    except (KeyboardInterrupt, EndingSignal) as stop:  # while no ranks run
        code = exit_code(stop)
    return _report(args, making, costs, rows, code, begin, files, out)


def _make_all(
    args: argparse.Namespace, making: Making, costs: PathCosts | None, rows: list[CompareRecord], out: emit.Output
) -> int:
    """Make every change that ``rows`` lack in every launch, and add to them as each has ended. Returns an exit code."""
    code = EXIT_OK
    for launch in range(1, args.launches + 1):
        for change in making.scenario.changes:
            if any(row.change == change.name and row.launch == launch for row in rows):
                out.say(f"{change.name}, launch {launch}: in {args.journal} already")
                continue
            if time.monotonic() >= making.deadline:
                code = code or EXIT_TIME_LIMIT
                continue
            number = f" (launch {launch} of {args.launches})" if args.launches > 1 else ""
            out.say(f"{change.name}: {change.source.label} -> {change.end.label}{number}")
            ended, made = make_change(making, change, launch, out)
            if ended in INTERRUPTED:
                return ended
            code = code or ended
            made = _priced(made, costs)
            with held_signals():
                rows += made
                _keep_journal(args.journal, made, making)
            for row in made:
                out.say(compare_emit.row_text(row))
    return code


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


def _storages(args: argparse.Namespace, scenario: CompareScenario, hint: WorldHint | None) -> tuple[Storage, ...]:
    """Where checkpoints lie. Raises InputError where that, or a launcher's world, does not go with the options."""
    if hint is None:
        if args.work is not None:
            raise InputError("--work is for the ranks of a launcher: leave it out, or start this with torchrun")
        return find_storages(args.storage)
    again = f"in the world of {hint.launcher}, whose ranks compare cannot start anew,"
    if args.work is None:
        raise InputError(
            f"{again} one change is compared by two commands: give --work DIR, which all nodes reach, and run it twice"
        )
    for name in ("storage", "journal"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name} does not apply {again} checkpoints lie in --work: leave it out")
    if args.launches > 1:
        raise InputError(f"--launches {args.launches} does not apply {again} run both commands again for each launch")
    if len(scenario.changes) > 1:
        names = ", ".join(change.name for change in scenario.changes)
        raise InputError(f"{again} one change is compared at a time: give one --change of {names}")
    if hint.world_size < scenario.changes[0].world:
        raise InputError(
            f"change {scenario.changes[0].name} needs {counted(scenario.changes[0].world, 'rank')}, the world of "
            f"{hint.launcher} has {hint.world_size}"
        )
    return (work_storage(args.work),)


def _cluster(args: argparse.Namespace, scenario: CompareScenario, out: emit.Output) -> ClusterConfig:
    """The ranks to start: one node on loopback, or what the command line says. Raises InputError on too few."""
    widest = max(scenario.changes, key=lambda change: change.world)
    needed = widest.world
    found = cluster_for(args, needed, f"scenario {args.scenario}, change {widest.name}")
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


def _keep_journal(journal: Path | None, made: Sequence[CompareRecord], making: Making) -> None:
    """Add to the journal; where that fails, say so and go on: tables and files still come at the end."""
    try:
        if journal is not None:
            keep_rows(journal, made, making)
    except (OSError, InputError) as error:
        print(f"relaymeter: --journal {journal} was not written: {error}", file=sys.stderr)


def _priced(rows: list[CompareRecord], costs: PathCosts | None) -> list[CompareRecord]:
    return rows if costs is None else with_prices(rows, costs)


def _facts(making: Making) -> dict[str, Any]:
    """What a reader has to know of the machine and what ran on it."""
    found = machine_facts() | {"python": platform.python_version()}
    if already_in_world() is None:  # the ranks of a launcher may have other GPUs than this process sees
        found["backend"], found["device"] = ("nccl", "cuda") if making.on_gpu else ("gloo", "cpu")
    with suppress(PackageNotFoundError):
        found["deepspeed"] = version("deepspeed")
    return found


def _left(args: argparse.Namespace, making: Making, rows: Sequence[CompareRecord]) -> list[str]:
    """Changes and launches without a row, by name."""
    have = {(row.change, row.launch) for row in rows}
    several = args.launches > 1
    return [
        f"{change.name} (launch {launch})" if several else change.name
        for launch in range(1, args.launches + 1)
        for change in making.scenario.changes
        if (change.name, launch) not in have
    ]


def _report(
    args: argparse.Namespace,
    making: Making,
    costs: PathCosts | None,
    rows: Sequence[CompareRecord],
    code: int,
    begin: float,
    files: Mapping[str, str],
    out: emit.Output,
) -> int:
    """The verdict first, then the tables and files. Returns the exit code."""
    if code in INTERRUPTED:
        on = "with --journal FILE it can go on"
        if args.journal is not None:
            force = " with --force, which keeps the journal," if args.json not in (None, "-") and rows else ""
            on = f"the same command{force} goes on after them"
        out.say(f"interrupted: {counted(len({(r.change, r.launch) for r in rows}), 'change')} had ended; {on}")
        if not rows:
            return code
    verdict = judge_comparison(rows, code)
    for line in verdict.lines:
        out.say(line)
    left = _left(args, making, rows)
    if left:
        on = "with --journal FILE it could go on" if args.journal is None else "the same command goes on with them"
        why = "interrupted" if code in INTERRUPTED else "time limit"
        out.say(f"not run ({why}): {', '.join(left)}; {on}")
    for table in compare_emit.comparison_tables(rows):
        out.table(table)
    for line in compare_emit.comparison_lines(rows):
        out.say(line)
    size = max((row.state_bytes for row in rows), default=0)
    passed, total = sum(row.digest_passed for row in rows), sum(row.digest_total for row in rows)
    out.say(
        f"{counted(len({row.change for row in rows}), 'change')}"
        f"{f', up to {format_bytes(size)} of state' if size else ''}, {passed} of "
        f"{total} digests equal, {format_seconds(time.monotonic() - begin)} in all"
    )
    for line in price_lines(rows, costs) if costs is not None else ():
        out.say(line)

    def keep() -> None:
        where = keep_results(
            args.results, rows, making.stamp, making.scenario.name, _facts(making),
            suite=f"compare-{making.scenario.name}", files=files,
        )  # fmt: skip
        out.say(f"results: {where}")

    failed = write_all(args, {"json": lambda: out.json(dump_lines(rows)), **({"results": keep} if rows else {})})
    failed = failed or out.exit_code
    if code in INTERRUPTED and verdict.exit_code != EXIT_WRONG_BITS:
        return code
    return verdict.exit_code if failed == EXIT_OK or verdict.exit_code == EXIT_WRONG_BITS else EXIT_USAGE
