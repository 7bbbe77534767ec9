"""Plan files: what ``plan --out`` writes and ``run --plan`` runs, as one JSON file that only this tool writes.

``save_plan(PlanFile(...), path)`` writes it whole; ``load_plan(path)`` refuses one that was edited; ``found.planned(
topology, trainer)`` holds its plans against the layouts that are really there. Any process, no torch import.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter import __version__
from relaymeter.errors import InputError
from relaymeter.harness.config import EXECUTOR_CHOICES, PLANNER_CHOICES, ExecutorChoice, PlannerChoice, Scenario, check
from relaymeter.harness.moves import PLANNERS, PlannedMove
from relaymeter.harness.scenario import destination_layout, source_layouts
from relaymeter.policies.choose import Choice
from relaymeter.records import dump_json, load_json, write_text
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.plan_json import check_plan, plan_from_dict, plan_to_dict
from relaymeter.relayout.planner import MovePlan
from relaymeter.relayout.routes import ROUTES, block_groups
from relaymeter.relayout.topology import Topology

__all__ = ["PLAN_SCHEMA", "PlanFile", "RoutedMove", "load_plan", "save_plan"]

#: Version of the plan file. A reader refuses another one.
PLAN_SCHEMA = 1

Codes = NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class RoutedMove:
    """One move by one planner: its plan, bucket, and the routes that a profile chose, by executor (none without one).

    ``schedules`` are the hashes of the schedules of every route, by route and for a chosen one also executor.
    """

    name: str
    planner: str
    bucket_bytes: int
    plan: MovePlan
    chosen: Mapping[str, Codes]
    schedules: Mapping[str, str]

    @classmethod
    def of(cls, move: PlannedMove, choices: Mapping[str, Choice]) -> RoutedMove:
        """The planned move with the routes that were chosen for it, by executor."""
        chosen = {executor: choice.route for executor, choice in choices.items()}
        return cls(move.name, move.planner, move.bucket_bytes, move.plan, chosen, _schedule_hashes(move, chosen))

    def to_dict(self) -> dict[str, Any]:
        return {
            "move": self.name,
            "planner": self.planner,
            "bucket_bytes": self.bucket_bytes,
            "chosen": {executor: codes.tolist() for executor, codes in self.chosen.items()},
            "schedules": dict(self.schedules),
            "plan": plan_to_dict(self.plan),
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> RoutedMove:
        """The move that ``to_dict`` wrote. Raises InputError naming the entry that is none."""
        if not isinstance(entry, Mapping):
            raise InputError(f"{_cut(entry)} is no object")
        checks: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
            ("move", lambda value: isinstance(value, str), "no name"),
            ("planner", lambda value: isinstance(value, str) and value in PLANNERS, "no planner"),
            ("bucket_bytes", lambda value: type(value) is int and 0 < value < 2**63, "no size in bytes"),
            ("chosen", _are_routes, f"no object with lists of route codes (0 to {len(ROUTES) - 1}) by executor"),
            ("schedules", _are_hashes, "no object with hashes by route"),
            ("plan", lambda value: isinstance(value, Mapping), "no plan"),
        )
        for key, valid, what in checks:
            if not valid(entry.get(key)):
                raise InputError(f"{key} {_cut(entry.get(key))} is {what}")
        return cls(
            name=entry["move"],
            planner=entry["planner"],
            bucket_bytes=entry["bucket_bytes"],
            plan=plan_from_dict(entry["plan"]),
            chosen={executor: np.asarray(codes, dtype=np.int8) for executor, codes in entry["chosen"].items()},
            schedules=entry["schedules"],
        )


@dataclass(frozen=True, eq=False)
class PlanFile:
    """Everything that a run needs: scenario, topology, what ``--planner`` and ``--executor`` were, and every move."""

    scenario: Scenario
    topology: Topology
    planner: PlannerChoice
    executor: ExecutorChoice
    moves: tuple[RoutedMove, ...]
    profile: Mapping[str, Any] | None
    """Machine and time of the profile that chose the routes; None: none were chosen."""

    def planned(self, topology: Topology, trainer: Layout | None = None) -> tuple[PlannedMove, ...]:
        """The moves, held against ``topology`` and the layouts as they are (``trainer``: the live engine's).

        Raises InputError naming what differs from the file. Pure; the same on every rank.
        """
        for name, here, planned in (
            ("nodes of the ranks", topology.node, self.topology.node),
            ("NICs of the ranks", topology.nic, self.topology.nic),
        ):
            if here != planned:
                raise InputError(
                    f"the plan was made for another topology: {name} {_short(planned)} in the plan, {_short(here)} "
                    "here: plan it again with --topology, or start that many ranks"
                )
        found = []
        moves = {move.name: move for move in self.scenario.moves}
        for routed in self.moves:
            begin = time.perf_counter()
            move = moves[routed.name]
            sources = source_layouts(self.scenario, move, topology, trainer)
            destination = destination_layout(self.scenario, move, topology)
            check_plan(routed.plan, tuple(sources.values()), destination, topology)
            groups = block_groups(routed.plan, topology)
            for executor, codes in routed.chosen.items():
                if len(codes) != len(groups):
                    raise InputError(
                        f"move {routed.name} ({routed.planner}): {len(codes)} routes chosen for {executor}, the plan "
                        f"has {len(groups)} groups of blocks: plan it again"
                    )
            planned_move = PlannedMove(
                name=routed.name,
                planner=routed.planner,
                sources=sources,
                destination=destination,
                plan=routed.plan,
                groups=groups,
                topology=topology,
                bucket_bytes=routed.bucket_bytes,
                plan_s=time.perf_counter() - begin,
            )
            if _schedule_hashes(planned_move, routed.chosen) != dict(routed.schedules):
                raise InputError(
                    f"move {routed.name} ({routed.planner}): this version cuts the plan into other rounds than the one "
                    "that wrote it: plan it again"
                )
            found.append(planned_move)
        return tuple(found)

    def chosen(self, name: str, planner: str, executor: str) -> Codes | None:
        """The route array that was chosen for a move, or None."""
        for move in self.moves:
            if (move.name, move.planner) == (name, planner):
                return move.chosen.get(executor)
        return None

    def _content(self) -> dict[str, Any]:
        return {
            "schema_version": PLAN_SCHEMA,
            "relaymeter": __version__,
            "scenario": self.scenario.model_dump(mode="json", by_alias=True),
            "topology": self.topology.to_dict(),
            "planner": self.planner,
            "executor": self.executor,
            "profile": self.profile,
            "moves": [move.to_dict() for move in self.moves],
        }

    def to_json(self) -> str:
        """The file's text: strict JSON, one move a line."""
        content = self._content()
        lines = [f'  "{key}": {_member(value)}' for key, value in content.items()]
        return "{\n" + ",\n".join([*lines, f'  "sha256": "{_hash(content)}"']) + "\n}\n"


def save_plan(found: PlanFile, path: Path, *, force: bool = False) -> None:
    """Write the plan whole, or not at all. Raises InputError where the file exists and ``force`` is not given."""
    write_text(path, found.to_json(), force=force)


def load_plan(path: Path) -> PlanFile:
    """Read a plan. Raises InputError: missing or malformed file, another schema, edited."""
    entry = load_json(path, "plan")
    if not isinstance(entry, dict) or not {"sha256", "moves", "scenario", "topology"} <= set(entry):
        raise InputError(f"{path} is no plan: make one with relaymeter plan --out FILE")
    if entry.get("schema_version") != PLAN_SCHEMA:
        raise InputError(
            f"plan {path} has schema_version {entry.get('schema_version')!r}, this version reads {PLAN_SCHEMA}: plan "
            "again"
        )
    content = {key: value for key, value in entry.items() if key != "sha256"}
    if _hash(content) != entry["sha256"]:
        raise InputError(f"plan {path} was edited after it was written (its sha256 differs): plan again")
    try:
        if entry["planner"] not in PLANNER_CHOICES or entry["executor"] not in EXECUTOR_CHOICES:
            raise ValueError(f"planner {entry['planner']!r}, executor {entry['executor']!r}")
        return PlanFile(
            scenario=check(Scenario, entry["scenario"], f"plan {path}, scenario"),
            topology=Topology.from_dict(entry["topology"]),
            planner=entry["planner"],
            executor=entry["executor"],
            moves=_moves(entry["moves"], [move["name"] for move in entry["scenario"]["moves"]], f"plan {path}"),
            profile=entry["profile"],
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"plan {path} is incomplete ({type(error).__name__}: {error}): plan again") from error


def _moves(entries: Any, names: Sequence[str], where: str) -> tuple[RoutedMove, ...]:
    """The moves of a plan file. Raises InputError naming the entry: malformed, of no move of the scenario, or twice."""
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{where}, moves: {_cut(entries)} is no list of moves: plan again")
    found: dict[tuple[str, str], RoutedMove] = {}
    for number, entry in enumerate(entries):
        try:
            move = RoutedMove.from_dict(entry)
            if move.name not in names or (move.name, move.planner) in found:
                odd = "there twice" if move.name in names else "no move of its scenario"
                raise InputError(f"{move.name!r} by {move.planner} is {odd}")
        except InputError as error:
            raise InputError(f"{where}, moves[{number}]: {error}: plan again") from error
        found[move.name, move.planner] = move
    return tuple(found.values())


def _are_routes(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        name in EXECUTOR_CHOICES
        and isinstance(codes, list)
        and all(type(c) is int and 0 <= c < len(ROUTES) for c in codes)
        for name, codes in value.items()
    )


def _are_hashes(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(found, str) for found in value.values())


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _schedule_hashes(move: PlannedMove, chosen: Mapping[str, Codes]) -> dict[str, str]:
    routes = {**move.uniform(), **{f"chosen {executor}": codes for executor, codes in chosen.items()}}
    return {route: move.schedule(codes)[0].input_hash.hex() for route, codes in routes.items()}


def _member(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join("    " + dump_json(entry, indent=None).rstrip() for entry in value) + "\n  ]"
    return dump_json(value, indent=None).rstrip()


def _hash(content: Mapping[str, Any]) -> str:
    plain = json.loads(dump_json(content, indent=None))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _short(values: tuple[int, ...]) -> str:
    text = ", ".join(str(value) for value in values[:16])
    return f"[{text}, ... {len(values)} ranks]" if len(values) > 16 else f"[{text}]"
