"""``choose``: a route for every class of blocks, thresholds, and what keeping today's constants costs.

Prices a scenario on the profile's own topology, prints it, and writes the policy that ``relaymeter.load_policy`` reads.
No ranks, no torch, no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime, timezone

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.harness import emit, emit_plan
from relaymeter.harness.commands_ranks import check_targets, open_profile
from relaymeter.harness.commands_simulated import calibrated, refuse_rank_options, simulated_executors
from relaymeter.harness.moves import PlannedMove, plan_scenario, select_moves
from relaymeter.harness.offline import (
    PricedMoves,
    asked_executors,
    document,
    headline,
    keep_layouts,
    price_moves,
    print_moves,
    simulated_of,
)
from relaymeter.harness.scenario import load_scenario
from relaymeter.harness.simulated import load_preset
from relaymeter.policies.policy import Policy, make_policy
from relaymeter.policies.policy_file import policies_text, save_policies
from relaymeter.policies.policy_python import python_text
from relaymeter.records import check_target

__all__ = ["choose"]


def choose(args: argparse.Namespace) -> int:
    """Price a scenario on the profile's own topology. Returns the exit code."""
    printed = args.format != "text"
    if printed and args.json == "-":
        raise InputError(f"--format {args.format} and --json - both want standard output: give --json a file")
    check_targets(profile=args.profile, simulate=args.simulate, scenario=args.scenario, json=args.json, out=args.out)
    scenario = select_moves(load_scenario(args.scenario), args.move)
    keep_layouts(scenario, json=args.json, out=args.out)
    aside = emit.Output("-" if printed else args.json, force=args.force)  # tables leave standard output to the policy
    out = emit.Output(args.json, force=args.force) if printed else aside
    if args.out is not None:
        check_target(args.out, force=args.force)
    profile, mismatch = _open(args)
    moves = plan_scenario(scenario, profile.topology, args.bucket_bytes)
    executors = asked_executors(args.executor, profile)
    priced = price_moves(moves, profile, executors)
    regret = emit_plan.regret_of(priced.entries)
    for line in emit_plan.regret_lines(scenario.name, regret, simulated_of(profile)):
        aside.say(line)
    aside.say(headline(scenario.name, profile.topology, executors, profile))
    print_moves(priced.entries, profile, mismatch, executors, aside)
    if args.out is not None or printed:
        policies = _policies(scenario.name, profile, mismatch, executors, moves, priced)
        if args.out is not None:
            save_policies(policies, args.out, force=args.force)
            aside.say(f'policy: {args.out} (relaymeter.load_policy("{args.out}") reads it)')
        if printed:
            aside.json(policies_text(policies) if args.format == "json" else python_text(policies))
    found = document(args.command, scenario.name, profile.topology, profile, mismatch, executors, priced)
    if args.json is not None:
        out.json({**found, "regret": regret})
    return max(out.exit_code, aside.exit_code)


def _open(args: argparse.Namespace) -> tuple[Profile, tuple[str, ...]]:
    """The profile, and where it differs from this machine; a simulated one belongs to none. Raises InputError."""
    if args.simulate is None:
        return open_profile(args.profile, args.allow_mismatch)
    refuse_rank_options(args)
    cluster = load_preset(args.simulate)
    return calibrated(cluster, executors=simulated_executors(cluster, args.executor)), ()


def _policies(
    scenario: str,
    profile: Profile,
    mismatch: Sequence[str],
    executors: Sequence[str],
    moves: Sequence[PlannedMove],
    priced: PricedMoves,
) -> list[Policy]:
    """One policy for each executor that has prices. Raises InputError where none has."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    have = [executor for executor in executors if executor in profile.executors]
    if not have:
        raise InputError(f"no policy: {emit.unpriced(executors[0], profile)}")
    return [
        make_policy(
            scenario, profile,
            {move.name: choices[executor] for move, choices in zip(moves, priced.choices, strict=True)},
            executor=executor, created_utc=now, mismatch=mismatch,
        )
        for executor in have
    ]  # fmt: skip
