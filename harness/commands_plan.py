"""``plan``: planned on metadata for any topology and planner, priced where a profile is given.

With a profile it also says which route wins from which block size and number of nodes on, and with costs of paths in it
which path from which state on; ``--out`` writes what ``run`` can run. No ranks, no torch, no GPU.
"""

from __future__ import annotations

import argparse

from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.harness import emit, emit_paths, emit_plan
from relaymeter.harness.commands_ranks import check_targets
from relaymeter.harness.compare_prices import path_costs_of
from relaymeter.harness.moves import plan_scenario, planners_of, select_moves
from relaymeter.harness.offline import (
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
    """Plan a scenario on any topology. Returns the exit code."""
    check_targets(profile=args.profile, scenario=args.scenario, json=args.json, out=args.out)
    scenario = select_moves(load_scenario(args.scenario), args.move)
    keep_layouts(scenario, json=args.json, out=args.out)
    nodes, ranks_per_node = args.topology
    topology = Topology.grid(nodes, ranks_per_node, args.nic_per)
    profile = None if args.profile is None else load_profile(args.profile)
    out = emit.Output(args.json, force=args.force)
    if args.out is not None:
        check_target(args.out, force=args.force)
    moves = plan_scenario(scenario, topology, args.bucket_bytes, planners=planners_of(args.planner))
    executors = asked_executors(args.executor, profile)
    priced = price_moves(moves, profile, executors)
    name = simulated_of(profile)
    out.say(("" if name is None else f"simulated ({name}): ") + headline(scenario.name, topology, executors, profile))
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
    found = document(args.command, scenario.name, topology, profile, (), executors, priced)
    tables = {"scaling": scaling, "paths": paths}
    out.json({**found, **{name: None if one is None else one.to_dict() for name, one in tables.items()}})
    if args.out is not None:
        routed = tuple(RoutedMove.of(move, priced.choices[number]) for number, move in enumerate(moves))
        made = PlanFile(scenario, topology, args.planner, args.executor, routed, stamp(profile))
        save_plan(made, args.out, force=args.force)
        out.say(f"plan: {args.out} (run it with relaymeter run --plan {args.out})")
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
