"""``plan``: planned on metadata for any topology and planner, priced where a profile is given.

A move is one of a scenario, or of a model that the user names (``harness/inputs``). With a profile it also says which
route wins from which block size and number of nodes on, and with costs of paths in it which path from which state on;
``--out`` writes what ``run`` can run. No ranks, no torch, no GPU.
"""

from __future__ import annotations

import argparse
import os

from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.errors import InputError
from relaymeter.harness import emit, emit_paths, emit_plan
from relaymeter.harness.commands_ranks import check_targets
from relaymeter.harness.compare_prices import path_costs_of
from relaymeter.harness.inputs.one_rank import one_rank_view
from relaymeter.harness.inputs.plan_model import MOST_SEGMENTS, ModelMove, lay_out
from relaymeter.harness.moves import plan_scenario, planners_of, select_moves
from relaymeter.harness.offline import (
    DOCUMENT_SCHEMA,
    asked_executors,
    document,
    headline,
    keep_layouts,
    price_moves,
    print_moves,
    simulated_of,
    stamp,
)
from relaymeter.harness.plan_file import PlanFile, RoutedMove, save_plan
from relaymeter.harness.scenario import load_scenario
from relaymeter.policies.path_scaling import PathScaling, find_path_scaling
from relaymeter.policies.scaling import find_scaling
from relaymeter.records import check_target
from relaymeter.relayout.topology import Topology

__all__ = ["plan"]


def plan(args: argparse.Namespace) -> int:
    """Plan a scenario, or a model of the user's, on any topology. Returns the exit code."""
    _check_options(args)
    check_targets(profile=args.profile, scenario=args.scenario, json=args.json, out=args.out)
    nodes, ranks_per_node = args.topology
    topology = Topology.grid(nodes, ranks_per_node, args.nic_per)
    scenario, model = None, None
    if args.model is None:
        scenario = select_moves(load_scenario(args.scenario), args.move)
        keep_layouts(scenario, json=args.json, out=args.out)
    profile = None if args.profile is None else load_profile(args.profile)
    out = emit.Output(args.json, force=args.force)
    if args.out is not None:
        check_target(args.out, force=args.force)
    executors, planners = asked_executors(args.executor, profile), planners_of(args.planner)
    if scenario is not None:
        name = scenario.name
        moves = plan_scenario(scenario, topology, args.bucket_bytes, planners=planners)
    else:
        model = lay_out(args.model, args.source, args.to, args.from_ranks, topology)
        name = model.model.name
        if model.segments > MOST_SEGMENTS:
            return _one_rank(args, model, topology, profile, executors, out)
        moves = model.planned(topology, planners, args.bucket_bytes)
    priced = price_moves(moves, profile, executors)
    simulated = simulated_of(profile)
    out.say(("" if simulated is None else f"simulated ({simulated}): ") + headline(name, topology, executors, profile))
    for line in () if model is None else model.lines():
        out.say(line)
    print_moves(priced.entries, profile, (), executors, out)
    scaling = None
    if profile is not None and nodes > 1 and profile.topology.nodes > 1 and executors[0] in profile.executors:
        bucket = max(move.bucket_bytes for move in moves)
        scaling = find_scaling(profile, nodes, ranks_per_node, args.nic_per, executors[0], bucket_bytes=bucket)
        out.say()
        out.table(emit_plan.scaling_table(scaling))
        for line in emit_plan.scaling_lines(scaling):
            out.say(line)
    paths = _paths(args, profile, executors[0], out)
    found = document(args.command, name, topology, profile, (), executors, priced)
    tables = {"scaling": scaling, "paths": paths}
    found |= {} if model is None else {"inputs": model.to_dict()}
    out.json({**found, **{name: None if one is None else one.to_dict() for name, one in tables.items()}})
    if args.out is not None and scenario is not None:
        routed = tuple(RoutedMove.of(move, priced.choices[number]) for number, move in enumerate(moves))
        made = PlanFile(scenario, topology, args.planner, args.executor, routed, stamp(profile))
        save_plan(made, args.out, force=args.force)
        out.say(f"plan: {args.out} (run it with relaymeter run --plan {args.out})")
    return out.exit_code


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not go with ``--model``, or with ``--scenario``. Raises InputError."""
    if args.model is None:
        alone = {"--from": args.source, "--to": args.to, "--from-ranks": args.from_ranks}
        given = next((option for option, value in alone.items() if value is not None), None)
        if given is not None:
            raise InputError(f"{given} goes with --model: a scenario says itself where its moves begin and end")
        return
    for option, value, example in (("--from", args.source, "ds_train.json"), ("--to", args.to, "tp=4,replicas=2")):
        if value is None:
            raise InputError(f"--model needs {option}: for example {option} {example}")
    for option, value, why in (
        ("--move", args.move, "it has one move"),
        ("--out", args.out, "run --plan runs moves of scenarios only"),
    ):
        if value is not None:
            raise InputError(f"{option} does not go with --model: {why}")
    for option, read in (("--from", args.source), ("--model", args.model)):
        if args.json not in (None, "-") and os.path.realpath(args.json) == os.path.realpath(read):
            raise InputError(f"--json {args.json} would replace the file that {option} reads: choose another name")


def _one_rank(
    args: argparse.Namespace,
    model: ModelMove,
    topology: Topology,
    profile: Profile | None,
    executors: tuple[str, ...],
    out: emit.Output,
) -> int:
    """Loads of all ranks and the plan of the busiest one, of a move that is too large to plan for all."""
    if args.planner != "classes":
        raise InputError(
            f"--planner {args.planner}: a plan of all ranks would hold about {model.segments:,} segments, and only "
            "classes plans for one rank: leave it out, or give a smaller --topology"
        )
    view = one_rank_view(model, topology, executors[0], profile, args.bucket_bytes)
    simulated = simulated_of(profile)
    said = headline(model.model.name, topology, executors[:1], profile).partition(";")[0]
    out.say(("" if simulated is None else f"simulated ({simulated}): ") + said)
    for line in model.lines():
        out.say(line)
    out.say(
        f"a plan of all ranks would hold about {model.segments:,} segments: loads of all ranks follow, and the plan of "
        "the busiest one"
    )
    out.say()
    for table in view.tables():
        out.table(table)
    for line in view.lines():
        out.say(line)
    out.json(
        {
            "schema_version": DOCUMENT_SCHEMA,
            "command": args.command,
            "scenario": model.model.name,
            "simulated": simulated,
            "topology": topology.to_dict(),
            "executors": list(executors[:1]),
            "profile": stamp(profile),
            "inputs": model.to_dict(),
            "one_rank": view.to_dict(),
        }
    )
    return out.exit_code


def _paths(args: argparse.Namespace, profile: Profile | None, executor: str, out: emit.Output) -> PathScaling | None:
    """Print which path wins, where the profile has costs of paths; None where it has none, or nothing to price."""
    costs = None if profile is None else path_costs_of(profile)
    if costs is None and profile is not None and profile.simulated is None:
        out.say("the profile has no costs of checkpoint paths: calibrate with --paths for those too")
    if profile is None or costs is None or executor not in profile.executors:
        return None
    nodes, ranks_per_node = args.topology
    found = find_path_scaling(profile, costs, nodes, ranks_per_node, args.nic_per, executor)
    if not found.cells:
        return None
    out.say()
    out.table(emit_paths.path_table(found))
    for line in emit_paths.path_lines(found):
        out.say(line)
    return found
