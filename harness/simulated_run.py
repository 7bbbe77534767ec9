"""Moves timed on a simulated cluster: the rows of ``run --simulate``. No rank starts, nothing moves, no torch import.

``simulated_rows(cluster, moves, profile, ...)`` gives rows like those of real ranks, but for what only real ones have:
digests, bytes counted by the kernel, memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.moves import PlannedMove
from relaymeter.harness.plan_file import PlanFile
from relaymeter.harness.row_facts import row_facts
from relaymeter.harness.simulated import SimulatedCluster
from relaymeter.harness.verdict import SIMULATED
from relaymeter.policies.choose import choose
from relaymeter.policies.price import price_loads
from relaymeter.records import MoveRecord
from relaymeter.relayout.schedule import Schedule

__all__ = ["SimulatedRun", "simulated_rows"]

Codes = NDArray[np.int8]
_CHOSEN = "chosen"


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """What the rows of a simulated run have in common. ``profile``: None for rows without prices; ``plan``: the plan
    whose routes are the chosen ones, if there is one."""

    cluster: SimulatedCluster
    scenario: str
    executors: tuple[str, ...]
    repeats: int
    stamp: RunStamp
    profile: Profile | None = None
    plan: PlanFile | None = None


def simulated_rows(
    run: SimulatedRun, moves: Sequence[PlannedMove], progress: Callable[[float, str], None]
) -> list[MoveRecord]:
    """One row for each of ``moves`` (planned for the cluster's topology), executor and route; the chosen one last.

    Raises InputError where the cluster lacks an executor.
    """
    rows = []
    for number, move in enumerate(moves):
        for executor in run.executors:
            progress(number / len(moves), f"{move.name} by {executor}")
            rows += _rows(run, move, executor)
    return rows


def _rows(run: SimulatedRun, move: PlannedMove, executor: str) -> list[MoveRecord]:
    """The chosen route is timed first, so that others know whether they are the same; schedules of large worlds are
    large, so only one is held at a time."""
    times: dict[bytes, tuple[float, ...]] = {}

    def row(route: str, codes: Codes, chosen: bytes | None) -> tuple[MoveRecord, bytes]:
        schedule, schedule_s = move.schedule(codes)
        same = schedule.input_hash
        if same not in times:
            times[same] = run.cluster.move_times(schedule.loads(executor), executor, run.repeats)
        picked = chosen == same or route == _CHOSEN
        return _row(run, move, executor, route, codes, schedule, schedule_s, times[same], picked), same

    codes = _chosen(run, move, executor)
    last, chosen = (None, None) if codes is None else row(_CHOSEN, codes, None)
    rows = [row(name, uniform, chosen)[0] for name, uniform in move.uniform().items()]
    return rows if last is None else [*rows, last]


def _priced(run: SimulatedRun, executor: str) -> Profile | None:
    return run.profile if run.profile is not None and executor in run.profile.executors else None


def _chosen(run: SimulatedRun, move: PlannedMove, executor: str) -> Codes | None:
    """The route array that the plan has, or that the prices choose; None without either."""
    if run.plan is not None:
        return run.plan.chosen(move.name, move.planner, executor)
    profile = _priced(run, executor)
    if profile is None:
        return None
    found = choose(
        move.plan, move.topology, profile,
        bucket_bytes=move.bucket_bytes, executor=executor, groups=move.groups, thresholds=False,
    )  # fmt: skip
    return found.route


def _row(
    run: SimulatedRun,
    move: PlannedMove,
    executor: str,
    route: str,
    codes: Codes,
    schedule: Schedule,
    schedule_s: float,
    times: tuple[float, ...],
    chosen: bool,
) -> MoveRecord:
    profile, stamp = _priced(run, executor), run.stamp
    price = None
    if profile is not None:
        price = price_loads(schedule.loads(executor), move.topology, profile, executor)
    facts = row_facts(
        stamp=stamp,
        scenario=run.scenario,
        planned=move,
        schedule=schedule,
        schedule_s=schedule_s,
        topology=move.topology,
        executor=executor,
        route=route,
        codes=codes,
        price=price,
        profile=profile,
        slowest_s=times,
    )
    return MoveRecord(
        **facts,
        shaped=False,
        simulated=run.cluster.name,
        chosen=chosen,
        wire_cross_node_bytes=None,
        samples_s=tuple((taken,) for taken in times),
        digest_s=None,
        peak_bytes=None,
        peak_predicted_bytes=int(schedule.peak_bytes(executor).max()),
        max_extra_bytes=None,
        digest_version=0,
        digest_passed=0,
        digest_total=0,
        verdict=SIMULATED,
        ok=True,
    )
