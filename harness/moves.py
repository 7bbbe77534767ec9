"""A move of a scenario, planned and scheduled by every route: what ``choose``, ``plan`` and ``run`` have in common.

``plan_scenario(scenario, topology)`` plans its moves; ``move.schedule(codes)`` makes the schedule of one route array.
Pure, no torch import; the same on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.harness.config import Scenario, nearest
from relaymeter.harness.scenario import destination_layout, source_layout
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.routes import ROUTES, BlockGroups, block_groups
from relaymeter.relayout.schedule import DEFAULT_BUCKET_BYTES, Schedule, build_schedule
from relaymeter.relayout.topology import Topology

__all__ = ["PlannedMove", "default_bucket_bytes", "default_executor", "plan_scenario", "route_bytes", "select_moves"]

_LARGEST_BUCKET = 256 << 20
_BUCKETS_WANTED = 24


@dataclass(frozen=True, eq=False)
class PlannedMove:
    """One move before a route is chosen. ``plan_s`` is what layouts, planning and grouping took."""

    name: str
    source: Layout
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
        """The route arrays that send every group one way, by name."""
        return {name: self.groups.uniform(code) for code, name in enumerate(ROUTES)}


def select_moves(scenario: Scenario, names: Sequence[str] | None) -> Scenario:
    """The scenario with only the moves of these names (None: all). Raises InputError on a name it has not."""
    if not names:
        return scenario
    have = [move.name for move in scenario.moves]
    for name in names:
        if name not in have:
            raise InputError(f"scenario {scenario.name} has no move {name!r}: {nearest(name, have)}")
    return scenario.model_copy(update={"moves": tuple(m for m in scenario.moves if m.name in names)})


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


def plan_scenario(
    scenario: Scenario, topology: Topology, bucket_bytes: int | None = None, source: Layout | None = None
) -> tuple[PlannedMove, ...]:
    """Plan every move of ``scenario``. ``source`` replaces the scenario's own (a live engine's). Raises LayoutError."""
    begin = time.perf_counter()
    before = source_layout(scenario, topology) if source is None else source
    source_s = time.perf_counter() - begin
    planned = []
    for move in scenario.moves:
        begin = time.perf_counter()
        after = destination_layout(scenario, move, topology)
        plan = plan_move(before, after, topology)
        groups = block_groups(plan, topology)
        plan_s = source_s + time.perf_counter() - begin
        size = bucket_bytes or default_bucket_bytes(plan)
        planned.append(PlannedMove(move.name, before, after, plan, groups, topology, size, plan_s))
    return tuple(planned)


def route_bytes(groups: BlockGroups, codes: NDArray[np.int8]) -> Mapping[str, int]:
    """Destination bytes by the route that carries them; groups without a choice count as direct."""
    carried = np.where(groups.has_choice, codes, 0)
    size = groups.elements * groups.itemsize * groups.fanout * groups.count
    return {name: int(size[carried == code].sum()) for code, name in enumerate(ROUTES)}
