"""``run`` on scenarios of training states: changes, rounds and offloads, each with a table of its own.

The parent refuses what does not fit before a rank starts, starts one world for all changes of a world size, keeps the
rows after every change, and gives the verdict on them. In a world that was joined, each rank does the job and rank 0
does the rest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from relaymeter.errors import EXIT_OK, EXIT_RANK_LOST, EXIT_USAGE, EXIT_WRONG_BITS, InputError
from relaymeter.harness import emit, state_emit
from relaymeter.harness.commands_ranks import (
    check_results,
    check_targets,
    check_world,
    cluster_for,
    is_shaped,
    shapeable,
    work_together,
    write_all,
)
from relaymeter.harness.config import PlannerChoice, nearest
from relaymeter.harness.jobs import ClusterConfig, Fault, Job, OffloadJob, RunStamp, StateJob
from relaymeter.harness.launch import WorldHint, already_in_world
from relaymeter.harness.moves import planners_of
from relaymeter.harness.results import keep_results, machine_id, make_stamp, named_files
from relaymeter.harness.state_config import OffloadScenario, StateScenario
from relaymeter.harness.verdict import Verdict, judge_states
from relaymeter.records import dump_lines
from relaymeter.state_records import OffloadRecord, StateRecord
from relaymeter.units import counted

__all__ = ["MOVE_LIMIT_S", "run_state"]

_LIMIT_S = 1800.0
#: Limit of one move where ``run`` is not told another, in seconds.
MOVE_LIMIT_S = 60.0
StateRow = StateRecord | OffloadRecord
#: Options of ``run`` that only moves of weights have, with their values where they are not given.
_WEIGHTS_ONLY = {"profile": None, "simulate": None, "max_extra": None, "plot": None, "allow_mismatch": False}


def run_state(args: argparse.Namespace, scenario: StateScenario | OffloadScenario) -> int:
    """Do what the scenario says, table it and give the verdict. Returns its exit code."""
    scenario = _selected(args, scenario)
    _refuse_options(args, scenario)
    out = emit.Output(args.json, force=args.force)
    check_targets(json=args.json, results=args.results, scenario=args.scenario, suite=args.suite)
    if args.results is not None:
        check_results(args.results, machine_id())
    hint = already_in_world()
    check_world(args, hint)
    begin = time.monotonic()
    files = named_files(scenario=args.scenario, suite=args.suite)
    worlds = _worlds(args, scenario, hint, out)
    stamp = make_stamp(machine_id(), shaped=is_shaped(worlds[0][1]))
    rows: list[StateRow] = []
    code = EXIT_OK
    for part, cluster in worlds:
        limit_s = (args.time_limit or _LIMIT_S) - (time.monotonic() - begin)
        job = _job(args, part, stamp, max(1.0, limit_s), hint)
        code, result = work_together(job, cluster, hint, out)
        if result is not None:
            rows += _rows(result)
        if code != EXIT_OK:
            break
    if hint is not None and hint.rank:
        return code
    return _report(args, scenario, rows, code, time.monotonic() - begin, stamp, files, out)


def _selected(args: argparse.Namespace, scenario: StateScenario | OffloadScenario) -> StateScenario | OffloadScenario:
    """The scenario with the changes of ``--change``, and the rounds of ``--repeats``. Raises InputError on others."""
    changes = scenario.changes if isinstance(scenario, StateScenario) else ()
    if args.move:
        have = [change.name for change in changes]
        if not have:
            raise InputError(f"scenario {scenario.name} has no changes to select: leave --change and --move out")
        for name in args.move:
            if name not in have:
                raise InputError(f"scenario {scenario.name} has no change {name!r}: {nearest(name, have)}")
        kept = tuple(change for change in changes if change.name in args.move)
        return scenario.model_copy(update={"changes": kept})
    rounds = scenario.rounds if isinstance(scenario, StateScenario) else None
    if rounds is not None and args.repeats is not None:
        return scenario.model_copy(update={"rounds": rounds.model_copy(update={"rounds": args.repeats})})
    return scenario


def _refuse_options(args: argparse.Namespace, scenario: StateScenario | OffloadScenario) -> None:
    """Raise InputError for an option that the scenario's kind has no use for."""
    unused = dict(_WEIGHTS_ONLY)
    if isinstance(scenario, OffloadScenario):
        unused |= {"planner": None, "executor": None, "bucket_bytes": None, "repeats": None, "fault": None}
    elif scenario.rounds is None:
        unused["repeats"] = None
    for name, absent in unused.items():
        if getattr(args, name) != absent:
            raise InputError(
                f"--{name.replace('_', '-')} does not apply to scenario {scenario.name} of kind {scenario.kind!r}: "
                "leave it out"
            )
    if args.executor == "both":
        raise InputError(f"--executor both: scenario {scenario.name} runs by one executor: name it, or leave it out")


def _worlds(
    args: argparse.Namespace, scenario: StateScenario | OffloadScenario, hint: WorldHint | None, out: emit.Output
) -> list[tuple[StateScenario | OffloadScenario, ClusterConfig | None]]:
    """The parts of the scenario, each with the cluster to start for it, or None in a world that was joined.

    Raises InputError where a part needs more ranks than there are, or a world of another size.
    """
    parts = _parts(scenario)
    found: list[tuple[StateScenario | OffloadScenario, ClusterConfig | None]] = []
    for own, part in parts:
        needed = own or (part.world if isinstance(part, StateScenario) else part.ranks)
        where = f"scenario {scenario.name}"
        if own is not None and isinstance(part, StateScenario):
            where = f"change {part.changes[0].name}"
        cluster = None
        if hint is None:
            cluster = _cluster(args, needed)
        have = hint.world_size if cluster is None and hint is not None else _size(cluster)
        if have < needed or (own is not None and have != own):
            exactly = "exactly " if own is not None else ""
            raise InputError(f"{where} needs {exactly}{counted(needed, 'rank')}, there are {have}: {_advice(own)}")
        _check_fault(args, part, have)
        found.append((part, cluster if cluster is None or not cluster.shape else shapeable(cluster, out)))
    return found


def _check_fault(args: argparse.Namespace, part: StateScenario | OffloadScenario, ranks: int) -> None:
    """Raise InputError where the fault's rank is not there, or holds nothing that could be flipped."""
    if args.fault is None or not isinstance(part, StateScenario):
        return
    kind, rank = args.fault
    if rank >= ranks:
        raise InputError(f"--fault: rank {rank} of {ranks} ranks")
    target = part.changes[0].path[1] if part.rounds is None else part.rounds.second
    if kind == "flip" and rank not in target.ranks:
        raise InputError(
            f"--fault flip:{rank}: the first move ends in {target.label}, of which rank {rank} has no part"
        )


def _advice(own: int | None) -> str:
    if own is not None:
        return "select other changes with --change, or leave --nodes and --ranks-per-node out"
    return "give --nodes and --ranks-per-node whose product is at least that, or leave both out"


def _parts(
    scenario: StateScenario | OffloadScenario,
) -> list[tuple[int | None, StateScenario | OffloadScenario]]:
    """The scenario by the worlds that its changes ask for, the shared one (None) first."""
    if isinstance(scenario, OffloadScenario) or not scenario.changes:
        return [(None, scenario)]
    sizes = sorted({change.world for change in scenario.changes}, key=lambda size: size or 0)
    return [
        (size, scenario.model_copy(update={"changes": tuple(c for c in scenario.changes if c.world == size)}))
        for size in sizes
    ]


def _cluster(args: argparse.Namespace, needed: int) -> ClusterConfig:
    """One node with the ranks that are needed, or what the command line says; on loopback where nothing is shaped."""
    found = cluster_for(args, needed, f"scenario {args.scenario or args.suite}")
    unshaped = found.nic_rate_bytes_per_s is None and found.nodes == 1
    return found.model_copy(update={"shape": False}) if unshaped else found


def _size(cluster: ClusterConfig | None) -> int:
    return 0 if cluster is None else cluster.nodes * cluster.ranks_per_node


def _job(
    args: argparse.Namespace,
    scenario: StateScenario | OffloadScenario,
    stamp: RunStamp,
    limit_s: float,
    hint: WorldHint | None,
) -> Job:
    common: dict[str, Any] = {
        "time_limit_s": limit_s,
        "move_limit_s": args.move_limit or MOVE_LIMIT_S,
        "nic_per": args.nic_per if hint else None,
        "stamp": stamp,
    }
    if isinstance(scenario, OffloadScenario):
        return OffloadJob(scenario=scenario, **common)
    return StateJob(
        scenario=scenario,
        planner=_planner(args, scenario),
        executor=args.executor or "auto",
        bucket_bytes=args.bucket_bytes,
        fault=Fault(kind=args.fault[0], rank=args.fault[1]) if args.fault else None,
        **common,
    )


def _planner(args: argparse.Namespace, scenario: StateScenario) -> PlannerChoice:
    if args.planner is not None:
        chosen: PlannerChoice = args.planner
        return chosen
    if scenario.rounds is not None:
        return scenario.rounds.planner
    return scenario.suite.planner if args.suite is not None and scenario.suite is not None else "classes"


def _rows(result: Mapping[str, Any]) -> list[StateRow]:
    return [
        StateRecord.from_dict(entry) if entry["kind"] == "training-state" else OffloadRecord.from_dict(entry)
        for entry in result["rows"]
    ]


def _report(
    args: argparse.Namespace,
    scenario: StateScenario | OffloadScenario,
    rows: Sequence[StateRow],
    code: int,
    seconds: float,
    stamp: RunStamp,
    files: Mapping[str, str],
    out: emit.Output,
) -> int:
    """Everything that follows from the rows, the verdict first. Returns its exit code, or, where the verdict is not
    that bits were wrong or a rank was lost, that of a file that could not be written."""
    suite = scenario.suite if isinstance(scenario, StateScenario) and args.suite is not None else None
    whole = suite is not None and not args.move
    verdict = judge_states(rows, code, seconds=seconds, bound_s=suite.bound_s if suite is not None and whole else None)
    if code != EXIT_OK:
        out.say(f"stopped after {_done(args, scenario, rows)}: the rows of what had finished follow")
    for line in verdict.lines:
        out.say(line)
    _tables(rows, seconds, out)
    if out.exit_code != EXIT_OK:
        for line in verdict.lines:
            print(f"relaymeter: {line}", file=sys.stderr)
    return _write(args, scenario, rows, stamp, files, verdict, out)


def _tables(rows: Sequence[StateRow], seconds: float, out: emit.Output) -> None:
    moved = [row for row in rows if isinstance(row, StateRecord)]
    changes, rounds = ([row for row in moved if (row.row is None) == is_round] for is_round in (False, True))
    offloads = [row for row in rows if isinstance(row, OffloadRecord)]
    if moved:
        out.say(state_emit.state_headline(moved))
    if changes:
        for table in state_emit.change_tables(changes):
            out.table(table)
        for line in state_emit.checkpoint_lines(changes):
            out.say(line)
        out.say(state_emit.total_line(changes, seconds))
    if rounds:
        out.table(state_emit.rounds_table(rounds))
        for line in state_emit.rounds_lines(rounds):
            out.say(line)
    if offloads:
        out.table(state_emit.offload_table(offloads))
        for line in state_emit.offload_lines(offloads):
            out.say(line)


def _done(args: argparse.Namespace, scenario: StateScenario | OffloadScenario, rows: Sequence[StateRow]) -> str:
    if isinstance(scenario, StateScenario) and scenario.changes:
        done = {(row.change, row.planner) for row in rows if isinstance(row, StateRecord)}
        planners = len(planners_of(_planner(args, scenario)))
        by = " by each planner" if planners > 1 else ""
        return f"{len(done)} of {counted(planners * len(scenario.changes), 'change')}{by}"
    return counted(len(rows), "row")


def _write(
    args: argparse.Namespace,
    scenario: StateScenario | OffloadScenario,
    rows: Sequence[StateRow],
    stamp: RunStamp,
    files: Mapping[str, str],
    verdict: Verdict,
    out: emit.Output,
) -> int:
    def keep() -> None:
        out.say(f"results: {keep_results(args.results, rows, stamp, scenario.name, files=files)}")

    failed = write_all(args, {"json": lambda: out.json(dump_lines(rows)), **({"results": keep} if rows else {})})
    failed = failed or out.exit_code
    kept = failed == EXIT_OK or verdict.exit_code in (EXIT_WRONG_BITS, EXIT_RANK_LOST)
    return verdict.exit_code if kept else EXIT_USAGE
