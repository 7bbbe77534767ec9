"""``choose`` and ``plan``: planned and priced on metadata, in this process. No ranks, no torch, no GPU.

Both print, for every move, what its plan carries, a route per class of blocks, the whole move by every route, and the
thresholds; ``plan`` for any topology and planner, with or without a profile, and ``--out`` writes what ``run`` can run.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from typing import Any

from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.harness import emit, emit_plan
from relaymeter.harness.commands_ranks import check_targets, open_profile
from relaymeter.harness.moves import PlannedMove, executors_of, plan_scenario, planners_of, select_moves
from relaymeter.harness.plan_file import PlanFile, RoutedMove, save_plan
from relaymeter.harness.scenario import load_scenario
from relaymeter.policies.choose import Choice
from relaymeter.policies.choose import choose as choose_routes
from relaymeter.policies.price import price_loads
from relaymeter.records import check_target
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.routes import ROUTES
from relaymeter.relayout.schedule import Schedule
from relaymeter.relayout.topology import Topology
from relaymeter.units import counted

__all__ = ["choose", "plan"]

#: Version of the JSON document.
_SCHEMA = 2


def choose(args: argparse.Namespace) -> int:
    """Price a scenario on the profile's own topology. Returns the exit code."""
    scenario = select_moves(load_scenario(args.scenario), args.move)
    profile, mismatch = open_profile(args.profile, args.allow_mismatch)
    out = emit.Output(args.json, force=args.force)
    _price(args, scenario.name, plan_scenario(scenario, profile.topology, args.bucket_bytes), profile, mismatch, out)
    return out.exit_code


def plan(args: argparse.Namespace) -> int:
    """Plan a scenario on any topology, priced where a profile is given. Returns the exit code."""
    scenario = select_moves(load_scenario(args.scenario), args.move)
    nodes, ranks_per_node = args.topology
    topology = Topology.grid(nodes, ranks_per_node, args.nic_per)
    profile = None if args.profile is None else load_profile(args.profile)
    out = emit.Output(args.json, force=args.force)
    if args.out is not None:
        check_targets(json=args.json, out=args.out)
        check_target(args.out, force=args.force)
    moves = plan_scenario(scenario, topology, args.bucket_bytes, planners=planners_of(args.planner))
    choices = _price(args, scenario.name, moves, profile, (), out)
    if args.out is not None:
        routed = tuple(RoutedMove.of(move, choices[number]) for number, move in enumerate(moves))
        document = PlanFile(scenario, topology, args.planner, args.executor, routed, _stamp(profile))
        save_plan(document, args.out, force=args.force)
        out.say(f"plan: {args.out} (run it with relaymeter run --plan {args.out})")
    return out.exit_code


def _price(
    args: argparse.Namespace,
    scenario: str,
    moves: tuple[PlannedMove, ...],
    profile: Profile | None,
    mismatch: tuple[str, ...],
    out: emit.Output,
) -> list[dict[str, Choice]]:
    """Print and write everything; the choices of each move, by executor."""
    if args.executor == "auto" and profile is not None:
        executors: tuple[str, ...] = (profile.executor,)
    else:
        executors = executors_of(args.executor)
    topology = moves[0].topology
    choices: list[dict[str, Choice]] = []
    found = []
    for move in moves:
        choices.append({})
        for executor in executors:
            if profile is not None and executor in profile.executors:
                choices[-1][executor] = choose_routes(
                    move.plan, topology, profile, bucket_bytes=move.bucket_bytes, executor=executor, groups=move.groups
                )
            found.append(_document(move, profile, executor, choices[-1].get(executor)))
    out.say(_headline(scenario, topology, executors, profile))
    for text in mismatch:
        out.say(f"profile of another machine: {text}")
    for executor in executors:
        if profile is not None and executor not in profile.executors:
            out.say(f"note: {emit.unpriced(executor, profile)}")
    for _, entries in itertools.groupby(found, key=lambda entry: entry["move"]):
        _print(list(entries), out)
    document = {
        "schema_version": _SCHEMA,
        "command": args.command,
        "scenario": scenario,
        "topology": topology.to_dict(),
        "planners": list(dict.fromkeys(move.planner for move in moves)),
        "executors": list(executors),
        "profile": _stamp(profile),
        "profile_mismatch": list(mismatch),
        "moves": found,
    }
    out.json(document)
    return choices


def _print(entries: list[dict[str, Any]], out: emit.Output) -> None:
    """The tables of one move: by planner what the plan carries, by planner and executor the routes."""
    out.say()
    planned: dict[str, dict[str, Any]] = {}
    for entry in entries:
        planned.setdefault(entry["planner"], entry)
    out.table(emit_plan.plan_table(list(planned.values())))
    for entry in planned.values():
        for line in emit_plan.fallback_lines(entry):
            out.say(line)
    for number, entry in enumerate(entries):
        if not number or entry["choice"] is not None:  # without prices the classes of all entries look alike
            out.table(emit_plan.price_table(entry, full_name=len(entries) > 1))
    out.table(emit_plan.candidate_table(entries))
    for entry in entries:
        for line in emit_plan.choice_lines(entry, full_name=len(entries) > 1):
            out.say(line)


def _stamp(profile: Profile | None) -> dict[str, Any] | None:
    return None if profile is None else {"machine_id": profile.machine_id, "created_utc": profile.created_utc}


def _headline(scenario: str, topology: Topology, executors: tuple[str, ...], profile: Profile | None) -> str:
    ranks = [len(topology.ranks_of(node)) for node in range(topology.nodes)]
    shape = (
        f"{counted(topology.nodes, 'node')} x {counted(ranks[0], 'rank')}"
        if len(set(ranks)) == 1
        else f"ranks by node {ranks}"
    )
    text = f"{scenario} on {shape}, {counted(len(set(topology.nic)), 'NIC')}, {' and '.join(executors)}"
    if profile is None:
        return text + "; no profile, so no prices: give --profile PROFILE"
    if profile.topology != topology:
        nodes = counted(profile.topology.nodes, "node")
        return text + f"; priced with a profile of {nodes}, so every price is extrapolated"
    return text


def _document(move: PlannedMove, profile: Profile | None, executor: str, choice: Choice | None) -> dict[str, Any]:
    """Everything that is known of a move before it runs, JSON-ready. ``choice`` None: the executor is not priced."""
    routes = [*move.uniform().items(), *([("chosen", choice.route)] if choice is not None else [])]
    schedules = [(name, *move.schedule(codes)) for name, codes in routes]
    picked = schedules[-1][1].input_hash if choice is not None else None
    candidates = []
    for name, schedule, schedule_s in schedules:
        row = _candidate(name, schedule, executor, None if choice is None else profile)
        candidates.append({**row, "chosen": schedule.input_hash == picked, "plan_s": move.plan_s + schedule_s})
    bound = None
    if profile is not None:
        bound = lower_bound(move.plan, move.topology, profile.nic_rates(move.topology), profile.port_rate)
    return {
        "move": move.name,
        "planner": move.planner,
        "executor": executor,
        "bucket_bytes": move.bucket_bytes,
        "tensors": len(move.plan.tensors),
        "segments": move.segments,
        "bytes_total": schedules[0][1].bytes_total,
        "bytes_in_rank": move.bytes_in_rank,
        "source_bytes": dict(move.source_bytes),
        "fallbacks": [
            {"reason": one.reason, "tensors": one.tensors, "labels": list(one.labels)} for one in move.fallbacks
        ],
        "bound_s": None if bound is None else bound.seconds,
        "bound_by": None if bound is None else bound.bound_by,
        "classes": _classes(move, choice),
        "candidates": candidates,
        "thresholds": _thresholds(choice),
        "choice": None if choice is None else choice.name,
        "price_error": None if choice is None else choice.error,
        "price_error_matrices": None if choice is None else choice.error_matrices,
        "extrapolated": None if choice is None else choice.extrapolated,
        "fixed_constants_s": None if choice is None else choice.fixed.total_s,
        "regret_fixed_s": None if choice is None else choice.regret_fixed_s,
    }


def _candidate(name: str, schedule: Schedule, executor: str, profile: Profile | None) -> dict[str, Any]:
    price = None
    if profile is not None:
        price = price_loads(schedule.loads(executor), schedule.topology, profile, executor)
    return {
        "route": name,
        "predicted_s": None if price is None else price.total_s,
        "predicted_low_s": None if price is None else price.low_s,
        "predicted_high_s": None if price is None else price.high_s,
        "extrapolated": None if price is None else price.extrapolated,
        "bytes_cross_node": schedule.bytes_cross_node,
        "bytes_in_node": schedule.bytes_in_node,
        "messages": schedule.messages(executor),
        "rounds": schedule.rounds,
        "peak_predicted_bytes": int(schedule.peak_bytes(executor).max()),
    }


def _classes(move: PlannedMove, choice: Choice | None) -> list[Mapping[str, Any]]:
    if choice is not None:
        return [row.to_dict() for row in choice.classes]
    nothing = {"route": None, **{f"price_{route}_s": None for route in ROUTES}, "bound_s": None}
    return [
        {"label": kind.label, "tensors": kind.tensors, "blocks": kind.groups, "bytes": kind.bytes,
         "elements": kind.elements, "itemsize": kind.itemsize, "fanout": kind.fanout, **nothing}
        for kind in move.groups.classes
    ]  # fmt: skip


def _thresholds(choice: Choice | None) -> dict[str, dict[str, Any]]:
    found = {"min_relay": choice.min_relay, "min_split": choice.min_split} if choice is not None else {}
    return {name: {str(fanout): one.to_dict() for fanout, one in by.items()} for name, by in found.items()}
