"""``choose`` and ``plan``: planned and priced on metadata, in this process. No ranks, no torch, no GPU.

Both print, for every move, a route per class of blocks, the whole move by every route, and the thresholds; ``plan`` for
any topology, with or without a profile.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.errors import EXIT_OK
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import open_profile
from relaymeter.harness.moves import PlannedMove, default_executor, plan_scenario, select_moves
from relaymeter.harness.scenario import load_scenario
from relaymeter.policies.choose import Choice
from relaymeter.policies.choose import choose as choose_routes
from relaymeter.policies.price import price_loads
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.routes import ROUTES
from relaymeter.relayout.schedule import Schedule
from relaymeter.relayout.topology import Topology

__all__ = ["choose", "plan"]

_SCHEMA = 1


def choose(args: argparse.Namespace) -> int:
    """Price a scenario on the profile's own topology. Returns the exit code."""
    scenario = select_moves(load_scenario(args.scenario), args.move)
    profile, mismatch = open_profile(args.profile, args.allow_mismatch)
    out = emit.Output(args.json, force=args.force)
    return _price(
        args, scenario.name, plan_scenario(scenario, profile.topology, args.bucket_bytes), profile, mismatch, out
    )


def plan(args: argparse.Namespace) -> int:
    """Plan a scenario on any topology, priced where a profile is given. Returns the exit code."""
    scenario = select_moves(load_scenario(args.scenario), args.move)
    nodes, ranks_per_node = args.topology
    topology = Topology.grid(nodes, ranks_per_node, args.nic_per)
    profile = None if args.profile is None else load_profile(args.profile)
    out = emit.Output(args.json, force=args.force)
    return _price(args, scenario.name, plan_scenario(scenario, topology, args.bucket_bytes), profile, (), out)


def _price(
    args: argparse.Namespace,
    scenario: str,
    moves: tuple[PlannedMove, ...],
    profile: Profile | None,
    mismatch: tuple[str, ...],
    out: emit.Output,
) -> int:
    executor = args.executor if args.executor != "auto" or profile is None else profile.executor
    executor = default_executor(executor)
    topology = moves[0].topology
    found = [_document(move, profile, executor) for move in moves]
    document = {
        "schema_version": _SCHEMA,
        "command": args.command,
        "scenario": scenario,
        "topology": topology.to_dict(),
        "executor": executor,
        "profile": None if profile is None else {"machine_id": profile.machine_id, "created_utc": profile.created_utc},
        "profile_mismatch": list(mismatch),
        "moves": found,
    }
    out.say(_headline(scenario, topology, executor, profile))
    for text in mismatch:
        out.say(f"profile of another machine: {text}")
    for move in found:
        out.say()
        out.table(emit.price_table(move))
        out.table(emit.candidate_table(move))
        for line in emit.choice_lines(move):
            out.say(line)
    out.json(document)
    return EXIT_OK


def _headline(scenario: str, topology: Topology, executor: str, profile: Profile | None) -> str:
    ranks = [len(topology.ranks_of(node)) for node in range(topology.nodes)]
    shape = f"{topology.nodes} nodes x {ranks[0]} ranks" if len(set(ranks)) == 1 else f"ranks by node {ranks}"
    text = f"{scenario} on {shape}, {len(set(topology.nic))} NICs, {executor}"
    if profile is None:
        return text + "; no profile, so no prices: give --profile PROFILE"
    if profile.topology != topology:
        return text + f"; priced with a profile of {profile.topology.nodes} nodes, so every price is extrapolated"
    return text


def _document(move: PlannedMove, profile: Profile | None, executor: str) -> dict[str, Any]:
    """Everything that is known of a move before it runs, JSON-ready."""
    choice: Choice | None = None
    if profile is not None:
        choice = choose_routes(
            move.plan, move.topology, profile, bucket_bytes=move.bucket_bytes, executor=executor, groups=move.groups
        )
    routes = [*move.uniform().items(), *([("chosen", choice.route)] if choice is not None else [])]
    schedules = [(name, *move.schedule(codes)) for name, codes in routes]
    picked = schedules[-1][1].input_hash if choice is not None else None
    candidates = []
    for name, schedule, schedule_s in schedules:
        row = _candidate(name, schedule, executor, profile)
        candidates.append({**row, "chosen": schedule.input_hash == picked, "plan_s": move.plan_s + schedule_s})
    bound = None
    if profile is not None:
        bound = lower_bound(move.plan, move.topology, profile.nic_rates(move.topology), profile.port_rate)
    return {
        "move": move.name,
        "bucket_bytes": move.bucket_bytes,
        "bytes_total": schedules[0][1].bytes_total,
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
