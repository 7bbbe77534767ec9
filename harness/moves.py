"""A move of a scenario, planned and scheduled by every route: what ``choose``, ``plan`` and ``run`` have in common.

``plan_scenario(scenario, topology)`` plans its moves; ``move.schedule(codes)`` makes the schedule of one route array.
Pure, no torch import; the same on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError, LayoutError
from relaymeter.harness.config import Scenario, SourceName, nearest
from relaymeter.harness.scenario import destination_layout, old_ranks, source_layouts
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.routes import ROUTES, BlockGroups, block_groups
from relaymeter.relayout.schedule import DEFAULT_BUCKET_BYTES, Schedule, build_schedule
from relaymeter.relayout.segments import source_space
from relaymeter.relayout.timeline import choose_bucket, predicted_extra_bytes
from relaymeter.relayout.topology import Topology

__all__ = [
    "PLANNERS",
    "Fallback",
    "PlannedMove",
    "bounded_schedule",
    "check_bounded",
    "default_bucket_bytes",
    "default_executor",
    "executors_of",
    "fixed_bounded_schedule",
    "plan_layouts",
    "plan_scenario",
    "planners_of",
    "refuse_unbounded",
    "route_bytes",
    "select_moves",
]

#: The planners, our own first.
PLANNERS = ("classes", "affine")
_EXECUTORS = ("send-recv", "all-to-all")
_LARGEST_BUCKET = 256 << 20
_BUCKETS_WANTED = 24


@dataclass(frozen=True)
class Fallback:
    """Tensors that the affine planner left to our own for one reason; ``labels`` are their names, folded."""

    reason: str
    tensors: int
    labels: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PlannedMove:
    """One move by one planner, before a route is chosen.

    ``sources`` are the layouts it starts from by name, the preferred one first. ``plan_s`` is what layouts, planning
    and grouping took.
    """

    name: str
    planner: str
    sources: Mapping[SourceName, Layout]
    destination: Layout
    plan: MovePlan
    groups: BlockGroups
    topology: Topology
    bucket_bytes: int
    plan_s: float

    def schedule(self, codes: NDArray[np.int8]) -> tuple[Schedule, float]:
        """The schedule of a route array (codes of ``ROUTES``, one per group) and the seconds it took to build."""
        begin = time.perf_counter()
        made = build_schedule(self.plan, self.topology, codes, self.bucket_bytes)
        return made, time.perf_counter() - begin

    def uniform(self) -> dict[str, NDArray[np.int8]]:
        """The route arrays that send every group one way, by name; a route that would only repeat another is left out
        (``BlockGroups.candidates``)."""
        return {name: self.groups.uniform(ROUTES.index(name)) for name in self.groups.candidates}

    @cached_property
    def segments(self) -> int:
        """Strided copies of the direct route, over all tensors."""
        return sum(len(found.src_rank) * len(found.tensors) for found in self.plan.classes)

    @cached_property
    def source_bytes(self) -> Mapping[SourceName, int]:
        """Destination bytes by the source layout that serves them."""
        served = dict.fromkeys(self.sources, 0)
        for name, space in zip(self.sources, (source_space(k) for k in range(len(self.sources))), strict=True):
            for found in self.plan.classes:
                size = np.prod(found.shape, axis=1, dtype=np.int64) * found.itemsize * len(found.tensors)
                served[name] += int(size[found.src_space == space].sum())
        return served

    @cached_property
    def bytes_in_rank(self) -> int:
        """Destination bytes that a rank copies from its own storage, whatever the route."""
        total = 0
        for found in self.plan.classes:
            size = np.prod(found.shape, axis=1, dtype=np.int64) * found.itemsize * len(found.tensors)
            total += int(size[found.src_rank == found.dst_rank].sum())
        return total

    @cached_property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """What the planner could not express, by reason, the most tensors first."""
        found: dict[str, tuple[int, list[str]]] = {}
        for index, one in enumerate(self.plan.classes):
            names = [self.plan.tensors[int(tensor)].name for tensor in one.tensors]
            reason = self.plan.fallbacks.get(names[0], "") if names else ""
            if reason:
                count, labels = found.get(reason, (0, []))
                found[reason] = (count + len(names), [*labels, self.plan.label(index)])
        order = sorted(found.items(), key=lambda item: -item[1][0])
        return tuple(Fallback(reason, count, tuple(dict.fromkeys(labels))) for reason, (count, labels) in order)


def select_moves(scenario: Scenario, names: Sequence[str] | None) -> Scenario:
    """The scenario with only the moves of these names (None: all). Raises InputError on a name it has not."""
    if not names:
        return scenario
    have = [move.name for move in scenario.moves]
    for name in names:
        if name not in have:
            raise InputError(f"scenario {scenario.name} has no move {name!r}: {nearest(name, have)}")
    return scenario.model_copy(update={"moves": tuple(m for m in scenario.moves if m.name in names)})


def planners_of(choice: str) -> tuple[str, ...]:
    """The planners that ``classes``, ``affine`` or ``both`` stands for."""
    return PLANNERS if choice == "both" else (choice,)


def executors_of(choice: str, *, backend: str = "gloo") -> tuple[str, ...]:
    """The executors that ``auto``, ``both`` or a name stands for on a backend, its own first."""
    own = default_executor("auto", backend=backend)
    return (
        tuple(sorted(_EXECUTORS, key=lambda name: name != own))
        if choice == "both"
        else (own if choice == "auto" else choice,)
    )


def default_executor(executor: str, *, backend: str = "gloo") -> str:
    """What ``auto`` stands for on a backend: send-recv on gloo, all-to-all on NCCL."""
    if executor != "auto":
        return executor
    return "all-to-all" if backend == "nccl" else "send-recv"


def default_bucket_bytes(plan: MovePlan) -> int:
    """Bucket for a move: small enough for many rounds to overlap, in whole MiB, never above 256 MiB a pair.

    The most that one rank sends or receives, over 24, but at least ``DEFAULT_BUCKET_BYTES``.
    """
    load = np.zeros((2, plan.topology.world_size))
    for found in plan.classes:
        size = np.prod(found.shape, axis=1, dtype=np.int64) * float(found.itemsize * len(found.tensors))
        size[found.src_rank == found.dst_rank] = 0.0
        load[0] += np.bincount(found.src_rank, weights=size, minlength=load.shape[1])
        load[1] += np.bincount(found.dst_rank, weights=size, minlength=load.shape[1])
    wanted = -(-int(load.max(initial=0.0)) // (_BUCKETS_WANTED << 20)) << 20
    return int(min(max(wanted, DEFAULT_BUCKET_BYTES), _LARGEST_BUCKET))


def plan_layouts(sources: Sequence[Layout], destination: Layout, topology: Topology, planner: str) -> MovePlan:
    """Plan one move with a planner of ``PLANNERS``. Raises LayoutError. Pure; ``affine`` imports DeepSpeed."""
    if planner == "affine":
        from relaymeter.relayout.affine import plan_move_affine

        return plan_move_affine(sources, destination, topology)
    return plan_move(sources, destination, topology)


def plan_scenario(
    scenario: Scenario,
    topology: Topology,
    bucket_bytes: int | None = None,
    source: Layout | None = None,
    planners: Sequence[str] = PLANNERS[:1],
) -> tuple[PlannedMove, ...]:
    """Plan every move of ``scenario`` with every planner, move after move. Raises LayoutError naming the move.

    ``source`` replaces the scenario's own (a live engine's). The planners of a move share its bucket.
    """
    planned: list[PlannedMove] = []
    if "affine" in planners:  # importing is no planning
        from relaymeter.relayout.affine import load_planner

        load_planner()
    for move in scenario.moves:
        begin = time.perf_counter()
        before = source_layouts(scenario, move, topology, source)
        after = destination_layout(scenario, move, topology)
        layouts_s = time.perf_counter() - begin
        size = bucket_bytes
        for planner in planners:
            begin = time.perf_counter()
            try:
                plan = plan_layouts(tuple(before.values()), after, topology, planner)
            except LayoutError as error:
                hint = ""
                if move.from_lost_ranks and move.sources == ("old",):
                    lost = ", ".join(str(rank) for rank in move.from_lost_ranks)
                    hint = f"; from_lost_ranks: no other source holds what rank {lost} has lost: use from = 'both'"
                raise LayoutError(f"scenario {scenario.name}, move {move.name}: {error}{hint}") from error
            groups = block_groups(plan, topology)
            plan_s = layouts_s + time.perf_counter() - begin
            size = size or default_bucket_bytes(plan)
            planned.append(PlannedMove(move.name, planner, before, after, plan, groups, topology, size, plan_s))
    return tuple(planned)


def refuse_unbounded(scenario: Scenario, topology: Topology) -> None:
    """Raise InputError for the first move that cannot give its source up: it may not leave the old replicas' ranks."""
    for move in scenario.moves:
        what = f"--max-extra: scenario {scenario.name}, move {move.name}"
        if move.sources != ("old",):
            raise InputError(
                f"{what} reads from {' and '.join(move.sources)}: only old replicas can be given up, the trainer goes "
                "on with what it holds; pick moves with from = 'old' by --move"
            )
        before = {rank for ranks in old_ranks(scenario, move, topology) for rank in ranks}
        before -= set(move.from_lost_ranks or ())
        layout = destination_layout(scenario, move, topology)
        after = {int(rank) for place in layout.placements.values() for rank in set(place.rank.tolist())}
        if before != after:
            odd = min(before ^ after)
            side = "only the old replicas" if odd in before else "only the new ones"
            raise InputError(f"{what}: rank {odd} belongs to {side}: bounded memory is for moves within the same ranks")


def bounded_schedule(
    move: PlannedMove, route: str, codes: NDArray[np.int8], executor: str, max_extra_bytes: int
) -> Schedule:
    """The schedule of the largest bucket with which no rank is predicted to hold over ``max_extra_bytes`` beyond its
    larger layout, the source being given up. ``route`` names ``codes`` in errors. Raises InputError where none fits,
    with what the sizes that are tried need. Pure."""
    try:
        return _build(move, codes, _fitting_bucket(move, codes, executor, max_extra_bytes))
    except InputError as error:
        raise InputError(f"{_case(move, route, executor)}: {error}") from error


def fixed_bounded_schedule(
    move: PlannedMove, route: str, codes: NDArray[np.int8], executor: str, max_extra_bytes: int, whose: str
) -> Schedule:
    """The schedule of the move's own bucket, which ``whose`` has set (``"--plan"``). Raises InputError where a rank
    would hold over ``max_extra_bytes`` beyond its larger layout, with the nearest settings that fit. Pure."""
    made = _build(move, codes, move.bucket_bytes)
    layouts = tuple(move.sources.values())
    extra = [
        predicted_extra_bytes(made, rank, layouts, move.destination, executor)
        for rank in range(move.topology.world_size)
    ]
    if max(extra) <= max_extra_bytes:
        return made
    hint = f"set --max-extra {max(extra)} or more"
    with suppress(InputError):
        fits = _fitting_bucket(move, codes, executor, max_extra_bytes)
        hint += f", or {'plan again with ' if whose == '--plan' else ''}--bucket-bytes {fits}"
    raise InputError(
        f"{_case(move, route, executor)}: rank {extra.index(max(extra))} needs {max(extra)} bytes beyond its larger "
        f"layout with the buckets of {move.bucket_bytes} bytes that {whose} gives, but --max-extra allows "
        f"{max_extra_bytes}: {hint}"
    )


def check_bounded(
    moves: Sequence[PlannedMove],
    executors: Sequence[str],
    chosen: Callable[[PlannedMove, str], NDArray[np.int8] | None],
    max_extra_bytes: int,
    whose: str | None,
) -> None:
    """Raise InputError for the first move, executor and route that cannot be kept within ``max_extra_bytes``.

    ``chosen`` gives the chosen routes of a move and executor, if any; ``whose``: who has set the buckets, None: nobody.
    Pure: from metadata alone, before anything is trained.
    """
    for move in moves:
        for executor in executors:
            picked = chosen(move, executor)
            for route, codes in (move.uniform() | ({} if picked is None else {"chosen": picked})).items():
                if whose is None:
                    bounded_schedule(move, route, codes, executor, max_extra_bytes)
                else:
                    fixed_bounded_schedule(move, route, codes, executor, max_extra_bytes, whose)


def _build(move: PlannedMove, codes: NDArray[np.int8], bucket_bytes: int) -> Schedule:
    return build_schedule(move.plan, move.topology, codes, bucket_bytes)


def _fitting_bucket(move: PlannedMove, codes: NDArray[np.int8], executor: str, max_extra_bytes: int) -> int:
    layouts = tuple(move.sources.values())
    found = choose_bucket(partial(_build, move, codes), layouts, move.destination, executor, max_extra_bytes)
    return found.bucket_bytes


def _case(move: PlannedMove, route: str, executor: str) -> str:
    return f"--max-extra: move {move.name} by {route} ({move.planner}, {executor})"


def route_bytes(groups: BlockGroups, codes: NDArray[np.int8]) -> Mapping[str, int]:
    """Destination bytes by the route that really carries them, which may be another than was asked for."""
    carried = groups.effective(codes)
    size = groups.elements * groups.itemsize * groups.fanout * groups.count
    return {name: int(size[carried == code].sum()) for code, name in enumerate(ROUTES)}
