"""``run``: move real weights, check every bit, and table predicted against measured.

The parent settles what moves (a scenario, a suite or a plan), on which ranks and with which prices, and refuses what
does not fit before a rank starts; the ranks do the job (``run.run_job``), and the parent gives the verdict on their
rows. In a world that was joined, each rank does the job and rank 0 does the rest. Scenarios of the other kinds go to
``commands_state``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile, machine_id_of
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.calibration.profiles import save as save_profile
from relaymeter.errors import EXIT_OK, EXIT_RANK_LOST, EXIT_WRONG_BITS, InputError
from relaymeter.harness import emit, emit_run
from relaymeter.harness.commands_ranks import (
    asked_cluster,
    check_results,
    check_targets,
    check_world,
    describe_cluster,
    is_shaped,
    open_profile,
    shapeable,
    work_together,
    write_all,
)
from relaymeter.harness.commands_simulated import (
    first_line,
    lines_of_progress,
    refuse_rank_options,
    simulated_executors,
)
from relaymeter.harness.commands_state import MOVE_LIMIT_S, run_state
from relaymeter.harness.compare_config import CompareScenario
from relaymeter.harness.config import ExecutorChoice, PlannerChoice, Scenario, SuiteConfig, check
from relaymeter.harness.jobs import ClusterConfig, Fault, RunJob, RunStamp
from relaymeter.harness.launch import already_in_world
from relaymeter.harness.moves import (
    PlannedMove,
    check_bounded,
    executors_of,
    plan_scenario,
    planners_of,
    refuse_unbounded,
    select_moves,
)
from relaymeter.harness.offline import keep_layouts
from relaymeter.harness.plan_file import PlanFile, load_plan
from relaymeter.harness.plots import check_plot, plot_rows
from relaymeter.harness.results import keep_results, machine_id, make_stamp, named_files
from relaymeter.harness.scenario import load_any, load_suite
from relaymeter.harness.simulated import load_preset
from relaymeter.harness.simulated_profile import check_profile, simulated_facts
from relaymeter.harness.simulated_run import SimulatedRun, simulated_rows
from relaymeter.harness.verdict import judge, notes
from relaymeter.policies.choose import choose
from relaymeter.records import MoveRecord, dump_lines
from relaymeter.relayout.topology import Topology
from relaymeter.units import counted, format_bytes

__all__ = ["run"]

_LIMIT_S = 1800.0


@dataclass(frozen=True)
class _Asked:
    """What moves and how: from the command line, completed by a suite or a plan."""

    scenario: Scenario
    planner: PlannerChoice
    executor: ExecutorChoice
    repeats: int
    bucket_bytes: int | None
    """None: by the move's size, or as the plan has it."""
    cluster: ClusterConfig
    """What to start where neither the command line nor a profile says."""
    plan: PlanFile | None
    files: Mapping[str, str]
    """Contents of the TOML files that the command names, for its results (``results.named_files``)."""


def run(args: argparse.Namespace) -> int:
    """Move, verify, table: what the kind of the scenario says. Returns the exit code of the verdict."""
    weights = _run_weights if args.simulate is None else _run_simulated
    if args.plan is not None:
        return weights(args, _planned(args))
    scenario = load_any(args.scenario) if args.suite is None else load_suite(args.suite)
    if isinstance(scenario, CompareScenario):
        raise InputError(
            f"scenario {args.scenario} is of kind {scenario.kind!r}: relaymeter compare --scenario {args.scenario}"
        )
    return weights(args, _asked(args, scenario)) if isinstance(scenario, Scenario) else run_state(args, scenario)


def _run_weights(args: argparse.Namespace, asked: _Asked) -> int:
    scenario = asked.scenario
    if scenario.source.kind != "zero3":
        raise InputError(
            f"scenario {scenario.name}: run trains its source, so source.kind must be 'zero3'; plan takes any"
        )
    profile: Profile | None = None
    mismatch: tuple[str, ...] = ()
    if args.profile is None and args.allow_mismatch:
        raise InputError("--allow-mismatch is about a profile: give --profile PROFILE with it, or leave it out")
    if args.profile is not None:
        profile, mismatch = open_profile(args.profile, args.allow_mismatch, starts_ranks=True)
        if profile.simulated is not None:
            raise InputError(
                f"profile {args.profile} is of the simulated cluster {profile.simulated}, whose rates no real rank "
                f"has: add --simulate {profile.simulated}, or calibrate these ranks"
            )
    out = emit.Output(args.json, force=args.force)
    if args.plot is not None:
        check_plot(args.plot, force=args.force)
    _check_targets(args, asked.scenario)
    machine = machine_id() if profile is None else profile.machine_id
    if args.results is not None:
        check_results(args.results, machine)
    hint = already_in_world()
    check_world(args, hint)
    cluster = None
    if hint is None:
        cluster = asked_cluster(args, _base_cluster(asked, profile))
        topology = Topology.grid(cluster.nodes, cluster.ranks_per_node, cluster.nic_per)
        if profile is not None and profile.topology.node == topology.node:
            topology = profile.topology  # the NICs as measured, as the ranks take them
        _check_moves(args, asked, topology, profile)
        if args.fault is not None and args.fault[1] >= topology.world_size:
            raise InputError(f"--fault: rank {args.fault[1]} of {topology.world_size} ranks")
        cluster = shapeable(cluster, out)
    if profile is not None:
        mismatch += _cluster_mismatch(args, profile, cluster)
    if hint is None or hint.rank == 0:
        _say_first(args, asked, profile, out)
    job = RunJob(
        scenario=scenario,
        profile=None if profile is None else str(args.profile.resolve()),
        plan=None if args.plan is None else str(args.plan.resolve()),
        planner=asked.planner,
        executor=asked.executor,
        bucket_bytes=asked.bucket_bytes,
        repeats=asked.repeats,
        time_limit_s=args.time_limit or _LIMIT_S,
        move_limit_s=args.move_limit or MOVE_LIMIT_S,
        max_extra_bytes=args.max_extra,
        allow_mismatch=args.allow_mismatch,
        nic_per=args.nic_per if hint else None,
        fault=Fault(kind=args.fault[0], rank=args.fault[1]) if args.fault else None,
        stamp=make_stamp(machine, shaped=is_shaped(cluster), mismatch=mismatch),
    )
    code, result = work_together(job, cluster, hint, out)
    if result is None:
        return code
    rows = [MoveRecord.from_dict(entry) for entry in result["rows"]]
    return _report(args, rows, code, profile, asked, job.stamp, out)


def _run_simulated(args: argparse.Namespace, asked: _Asked) -> int:
    """Time the moves on a simulated cluster, in this process."""
    refuse_rank_options(args)
    cluster = load_preset(args.simulate)
    profile = None if args.profile is None else load_profile(args.profile)
    if profile is not None:
        check_profile(cluster, profile, args.profile, asked=args.simulate)
    out = emit.Output(args.json, force=args.force)
    if args.plot is not None:
        check_plot(args.plot, force=args.force)
    _check_targets(args, asked.scenario)
    machine = machine_id_of(simulated_facts(cluster))
    if args.results is not None:
        check_results(args.results, machine)
    executors = simulated_executors(cluster, asked.executor)
    if asked.plan is not None:
        moves = asked.plan.planned(cluster.topology)
    else:
        planners = planners_of(asked.planner)
        moves = plan_scenario(asked.scenario, cluster.topology, asked.bucket_bytes, planners=planners)
    out.say(f"{first_line(cluster)}; nothing moves, no bit is checked")
    stamp = make_stamp(machine, shaped=False)
    made = SimulatedRun(
        cluster=cluster, scenario=asked.scenario.name, executors=executors, repeats=asked.repeats, stamp=stamp,
        profile=profile, plan=asked.plan,
    )  # fmt: skip
    rows = simulated_rows(made, moves, lines_of_progress("run"))
    return _report(args, rows, EXIT_OK, profile, asked, stamp, out, simulated_facts(cluster))


def _check_targets(args: argparse.Namespace, scenario: Scenario) -> None:
    """Raise InputError where an output has the name of another, or of a file that is read."""
    check_targets(
        json=args.json, plot=args.plot, results=args.results, profile=args.profile, plan=args.plan,
        scenario=args.scenario, suite=args.suite, simulate=args.simulate,
    )  # fmt: skip
    keep_layouts(scenario, json=args.json, plot=args.plot)


def _planned(args: argparse.Namespace) -> _Asked:
    """What a plan asks for. Raises InputError where the plan settles already what an option says again."""
    for option in ("move", "bucket_bytes", "planner", "executor"):
        if getattr(args, option) is not None:
            name = option.replace("_", "-")
            raise InputError(f"--plan {args.plan} settles --{name} already: leave it out, or plan it again")
    plan = load_plan(args.plan)
    nodes = plan.topology.nodes
    cluster = ClusterConfig(
        nodes=nodes,
        ranks_per_node=plan.topology.world_size // nodes,
        nic_per="node" if len(set(plan.topology.nic)) < plan.topology.world_size else "rank",
    )
    repeats = args.repeats or SuiteConfig().repeats
    return _Asked(plan.scenario, plan.planner, plan.executor, repeats, None, cluster, plan, _files(args))


def _asked(args: argparse.Namespace, scenario: Scenario) -> _Asked:
    """What the command line asks for, completed by the suite."""
    suite = scenario.suite if args.suite is not None and scenario.suite is not None else SuiteConfig()
    return _Asked(
        scenario=select_moves(scenario, args.move),
        planner=args.planner or suite.planner,
        executor=args.executor or suite.executor,
        repeats=args.repeats or suite.repeats,
        bucket_bytes=args.bucket_bytes or suite.bucket_bytes,
        cluster=ClusterConfig(nodes=suite.nodes, ranks_per_node=suite.ranks_per_node),
        plan=None,
        files=_files(args),
    )


def _files(args: argparse.Namespace) -> dict[str, str]:
    return named_files(scenario=args.scenario, suite=args.suite, simulate=args.simulate)


def _base_cluster(asked: _Asked, profile: Profile | None) -> ClusterConfig:
    """The cluster to start where the command line does not say: that of the profile, with the plan's ranks."""
    known = profile.fingerprint.get("cluster") if profile is not None else None
    if not known:
        return asked.cluster
    base = ClusterConfig.model_validate(known)
    if asked.plan is None:
        return base
    return base.model_copy(update={name: getattr(asked.cluster, name) for name in ("nodes", "ranks_per_node")})


def _check_moves(args: argparse.Namespace, asked: _Asked, topology: Topology, profile: Profile | None) -> None:
    """Refuse, before a rank starts, what does not fit the topology, or what cannot be moved in bounded memory."""
    plan, limit = asked.plan, args.max_extra
    if limit is not None:
        refuse_unbounded(asked.scenario, topology)
    if plan is not None:
        moves = plan.planned(topology)
    else:
        planners = planners_of(asked.planner if limit is not None else "classes")
        moves = plan_scenario(asked.scenario, topology, asked.bucket_bytes, planners=planners)
    if limit is None:
        return

    def chosen(move: PlannedMove, executor: str) -> NDArray[np.int8] | None:
        if plan is not None:
            return plan.chosen(move.name, move.planner, executor)
        if profile is None or executor not in profile.executors:
            return None
        found = choose(
            move.plan, topology, profile, bucket_bytes=move.bucket_bytes, executor=executor, groups=move.groups
        )
        return found.route

    whose = None
    if plan is not None:
        whose = "--plan"
    elif asked.bucket_bytes is not None:
        whose = "the suite" if args.bucket_bytes is None else "--bucket-bytes"
    check_bounded(moves, executors_of(asked.executor), chosen, limit, whose)


def _say_first(args: argparse.Namespace, asked: _Asked, profile: Profile | None, out: emit.Output) -> None:
    """What a reader should know before the ranks start."""
    if profile is None:
        out.say(
            "no profile: rows are measured and verified, not priced, and no route is chosen (relaymeter calibrate "
            "makes a profile)"
        )
    elif asked.executor != "auto":
        for executor in executors_of(asked.executor):
            if executor not in profile.executors:
                out.say(f"note: {emit.unpriced(executor, profile)}")
    if args.max_extra is not None:
        out.say(
            "bounded memory: the old replica is given up as it is read, so that a rank is predicted to hold at most "
            f"{format_bytes(args.max_extra)} beyond the larger of its two layouts (storages and buffers); should a "
            "move fail, neither the old nor the new replica is usable (the trainer is)"
        )


def _report(
    args: argparse.Namespace,
    rows: list[MoveRecord],
    code: int,
    profile: Profile | None,
    asked: _Asked,
    stamp: RunStamp,
    out: emit.Output,
    facts: Mapping[str, Any] | None = None,
) -> int:
    """Everything that follows from the rows, the verdict first. Returns its exit code, or, where the verdict is not
    that bits were wrong or a rank was lost, that of a file that could not be written."""
    verdict = judge(rows, code)
    if code != EXIT_OK:
        done = len({row.move for row in rows})
        of = counted(len(asked.scenario.moves), "move")
        out.say(f"stopped after {done} of {of}: the rows of what had finished follow")
    for line in verdict.lines:
        out.say(line)
    for text in stamp.mismatch:
        out.say(f"profile of another machine: {text}")
    if rows:
        out.say(emit_run.run_headline(rows, suite=args.suite is not None))
    for table in [emit_run.suite_table(rows)] if args.suite is not None and rows else emit_run.run_tables(rows):
        out.table(table)
    for text in [*(emit_run.fastest_lines(rows) if args.suite is not None else ()), *emit_run.planner_lines(rows)]:
        out.say(text)
    for text in notes(rows):
        out.say(f"note: {text}")
    if verdict.exit_code == EXIT_OK and rows[0].simulated is None:
        checked = sum(row.digest_total for row in rows)
        out.say(f"every bit arrived: {checked} of {counted(checked, 'digest')} equal over {counted(len(rows), 'row')}")
    if out.exit_code != EXIT_OK:
        for line in verdict.lines:
            print(f"relaymeter: {line}", file=sys.stderr)
    failed = _write(args, rows, profile, asked, stamp, out, facts) or out.exit_code
    return verdict.exit_code if failed == EXIT_OK or verdict.exit_code in (EXIT_WRONG_BITS, EXIT_RANK_LOST) else failed


def _write(
    args: argparse.Namespace,
    rows: list[MoveRecord],
    profile: Profile | None,
    asked: _Asked,
    stamp: RunStamp,
    out: emit.Output,
    facts: Mapping[str, Any] | None,
) -> int:
    """Write what was asked for, each whatever became of the others. Returns an exit code."""

    def plot() -> None:
        plot_rows(rows, args.plot, force=args.force)
        out.say(f"plot: {args.plot}")

    def keep() -> None:
        out.say(f"results: {_keep(args.results, rows, profile, asked, stamp, facts)}")

    return write_all(args, {"json": lambda: out.json(dump_lines(rows)), "plot": plot, "results": keep})


def _cluster_mismatch(args: argparse.Namespace, profile: Profile, cluster: ClusterConfig | None) -> tuple[str, ...]:
    """Where the profile's cluster is another one than ``cluster`` (None: a world that was joined)."""
    known = profile.fingerprint.get("cluster")
    if known == (None if cluster is None else cluster.model_dump()):
        return ()
    measured = None if known is None else check(ClusterConfig, known, f"profile {args.profile}, cluster")
    text = f"cluster: profile {describe_cluster(measured)}, here {describe_cluster(cluster)}"
    if not args.allow_mismatch:
        raise InputError(f"profile {args.profile}: {text}: calibrate this cluster, or add --allow-mismatch")
    return (text,)


def _keep(
    root: Path,
    rows: list[MoveRecord],
    profile: Profile | None,
    asked: _Asked,
    stamp: RunStamp,
    facts: Mapping[str, Any] | None,
) -> Path:
    """Keep rows, profile (if any), plot, named files and how they were made in a folder of their own. ``facts``: of the
    machine, where there is no profile."""

    def more(folder: Path) -> None:
        if profile is not None:
            save_profile(profile, folder / "profile.json")
        plot_rows(rows, folder / "run.png")

    known = facts if profile is None else profile.fingerprint
    return keep_results(root, rows, stamp, asked.scenario.name, known, files=asked.files, more=more)
