"""Moves planned and priced on metadata, in this process: what ``choose`` and ``plan`` have in common.

``price_moves(moves, profile, executors)`` gives the entries of their JSON document and the choices behind them, and
``print_moves(entries, out)`` the tables. No ranks, no torch, no GPU.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.harness import emit, emit_plan
from relaymeter.harness.config import Scenario
from relaymeter.harness.moves import PlannedMove, executors_of
from relaymeter.policies.choose import Choice
from relaymeter.policies.choose import choose as choose_routes
from relaymeter.policies.price import price_loads
from relaymeter.policies.reach import gates_note, shape_text
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.schedule import Schedule
from relaymeter.relayout.topology import Topology
from relaymeter.units import counted

__all__ = [
    "DOCUMENT_SCHEMA",
    "PricedMoves",
    "asked_executors",
    "document",
    "headline",
    "keep_layouts",
    "price_moves",
    "print_moves",
    "simulated_of",
    "stamp",
]

#: Version of the JSON document.
DOCUMENT_SCHEMA = 3


@dataclass(frozen=True, eq=False)
class PricedMoves:
    """entries: one for each move, planner and executor, JSON-ready. choices: of each planned move, by executor."""

    entries: tuple[dict[str, Any], ...]
    choices: tuple[Mapping[str, Choice], ...]


def asked_executors(choice: str, profile: Profile | None) -> tuple[str, ...]:
    """The executors that ``--executor`` stands for, the default first: with a profile the one that it measured first,
    which ``auto`` stands for."""
    if profile is None:
        return executors_of(choice)
    if choice == "auto":
        return (profile.executor,)
    return tuple(sorted(executors_of(choice), key=lambda name: name != profile.executor))


def keep_layouts(scenario: Scenario, **targets: Path | str | None) -> None:
    """Refuse an output, by option, that would replace a layout file of the scenario. Raises InputError."""
    named = (scenario.source.layout, *(move.layout for move in scenario.moves))
    read = {os.path.realpath(layout) for layout in named if layout is not None}
    for option, target in targets.items():
        if target is not None and target != "-" and os.path.realpath(target) in read:
            raise InputError(
                f"--{option} {target} would replace the layout file that {scenario.name} reads: choose another name"
            )


#: A uniform route of a move: name, codes, schedule, and the seconds that it took to build.
_Built = tuple[str, NDArray[np.int8], Schedule, float]


def price_moves(moves: Sequence[PlannedMove], profile: Profile | None, executors: Sequence[str]) -> PricedMoves:
    """Choose and price every move by every executor that the profile has measured."""
    choices: list[dict[str, Choice]] = []
    entries = []
    for move in moves:
        choices.append({})
        uniform = [(name, codes, *move.schedule(codes)) for name, codes in move.uniform().items()]
        for executor in executors:
            if profile is not None and executor in profile.executors:
                choices[-1][executor] = choose_routes(
                    move.plan, move.topology, profile,
                    bucket_bytes=move.bucket_bytes, executor=executor, groups=move.groups,
                    built=[(codes, schedule) for _, codes, schedule, _ in uniform],
                )  # fmt: skip
            entries.append(_entry(move, profile, executor, choices[-1].get(executor), uniform))
    return PricedMoves(tuple(entries), tuple(choices))


def document(
    command: str,
    scenario: str,
    topology: Topology,
    profile: Profile | None,
    mismatch: Sequence[str],
    executors: Sequence[str],
    priced: PricedMoves,
) -> dict[str, Any]:
    """The JSON document of ``command``."""
    return {
        "schema_version": DOCUMENT_SCHEMA,
        "command": command,
        "scenario": scenario,
        "simulated": simulated_of(profile),
        "topology": topology.to_dict(),
        "planners": list(dict.fromkeys(entry["planner"] for entry in priced.entries)),
        "executors": list(executors),
        "profile": stamp(profile),
        "profile_note": None if profile is None else gates_note(profile),
        "profile_mismatch": list(mismatch),
        "moves": list(priced.entries),
    }


def print_moves(
    entries: Sequence[dict[str, Any]],
    profile: Profile | None,
    mismatch: Sequence[str],
    executors: Sequence[str],
    out: emit.Output,
) -> None:
    """What there is to know of the profile, then the tables of every move."""
    for text in mismatch:
        out.say(f"profile of another machine: {text}")
    note = None if profile is None else gates_note(profile)
    if note is not None:
        out.say(f"note: {note}")
    for executor in executors:
        if profile is not None and executor not in profile.executors:
            out.say(f"note: {emit.unpriced(executor, profile)}")
    for _, found in itertools.groupby(entries, key=lambda entry: entry["move"]):
        _print(list(found), out)


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


def stamp(profile: Profile | None) -> dict[str, Any] | None:
    """Which profile it was, JSON-ready."""
    return None if profile is None else {"machine_id": profile.machine_id, "created_utc": profile.created_utc}


def simulated_of(profile: Profile | None) -> str | None:
    """The simulated cluster that the profile was made on; None for a measured one, or without a profile."""
    found = None if profile is None else profile.fingerprint.get("simulated")
    return None if found is None else str(found)


def headline(scenario: str, topology: Topology, executors: Sequence[str], profile: Profile | None) -> str:
    """What was planned, and what it was priced with."""
    text = f"{scenario} on {shape_text(topology)}, {counted(len(set(topology.nic)), 'NIC')}, {' and '.join(executors)}"
    if profile is None:
        return text + "; no profile, so no prices: give --profile PROFILE"
    if profile.topology != topology:
        nodes = counted(profile.topology.nodes, "node")
        return text + f"; priced with a profile of {nodes}, so every price is extrapolated"
    return text


def _entry(
    move: PlannedMove, profile: Profile | None, executor: str, choice: Choice | None, uniform: Sequence[_Built]
) -> dict[str, Any]:
    """Everything that is known of a move before it runs, JSON-ready. ``choice`` None: the executor is not priced."""
    schedules = [(name, schedule, seconds) for name, _, schedule, seconds in uniform]
    if choice is not None:
        schedules.append(("chosen", *move.schedule(choice.route)))
    picked = schedules[-1][1].input_hash if choice is not None else None
    candidates = []
    for name, schedule, schedule_s in schedules:
        row = _candidate(name, schedule, executor, None if choice is None else profile)
        candidates.append({**row, "chosen": schedule.input_hash == picked, "plan_s": move.plan_s + schedule_s})
    bound = None
    if profile is not None:
        bound = lower_bound(move.plan, move.topology, profile.nic_rates(move.topology), profile.port_rate())
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
        "beyond": None if choice is None else list(choice.beyond),
        "chosen_s": None if choice is None else choice.chosen.total_s,
        "fixed_constants_s": None if choice is None else choice.fixed.total_s,
        "found_constants_s": None if choice is None or choice.found is None else choice.found.total_s,
        "cheapest_alone_s": None if choice is None or choice.cheapest is None else choice.cheapest.total_s,
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
    return [
        {"label": kind.label, "tensors": kind.tensors, "blocks": kind.groups, "bytes": kind.bytes,
         "elements": kind.elements, "itemsize": kind.itemsize, "fanout": kind.fanout, "route": None,
         "prices_s": dict.fromkeys(kind.routes), "bound_s": None}
        for kind in move.groups.classes
    ]  # fmt: skip


def _thresholds(choice: Choice | None) -> dict[str, dict[str, Any]]:
    found = {"min_relay": choice.min_relay, "min_split": choice.min_split} if choice is not None else {}
    return {name: {str(fanout): one.to_dict() for fanout, one in by.items()} for name, by in found.items()}
