"""One planned move by every route that makes a difference, and by the chosen one, as cases with their prices. Pure.

``route_cases("move", planned, spec, profile, expecter, hard)`` leaves out a route that loads the cluster exactly as an
earlier one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.harness.moves import PlannedMove
from relaymeter.harness.validate_cases import APART, MIXED, Expecter, MoveCase, MoveSpec
from relaymeter.policies.choose import choose
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.schedule import Schedule
from relaymeter.relayout.segments import RoundLoads

__all__ = ["load_key", "route_cases"]


def load_key(loads: RoundLoads) -> bytes:
    """Equal for two schedules exactly when they ask the same of the cluster, round by round."""
    columns = (loads.round, loads.src, loads.dst, loads.bytes, loads.messages, loads.pack_bytes, loads.pack_segments)
    more = (loads.unpack_bytes, loads.unpack_segments, loads.pack_runs, loads.unpack_runs, loads.copies)
    used = int(loads.round.max(initial=-1)) + 1  # rounds at the end in which nothing moves make no difference
    return b"".join([str(used).encode(), *(column.tobytes() for column in (*columns, *more))])


def route_cases(
    kind: str,
    move: PlannedMove,
    spec: MoveSpec,
    profile: Profile,
    expecter: Expecter,
    hard: Sequence[str],
    *,
    mixed: NDArray[np.int8] | None = None,
    **more: Any,
) -> list[MoveCase]:
    """The cases of ``move`` by one executor: each uniform route, and the chosen one where it is a mix of them.

    ``mixed``: a mix to measure instead, unless the choice is predicted to be faster. ``more``: further fields of the
    cases. Raises InputError where the profile lacks a kind of link. Pure.
    """
    executor = expecter.executor
    found = choose(
        move.plan, move.topology, profile, bucket_bytes=move.bucket_bytes, executor=executor, groups=move.groups,
        thresholds=False, joined=kind not in APART,
    )  # fmt: skip

    known: dict[bytes, tuple[Schedule, RoundLoads]] = {}

    def made(codes: NDArray[np.int8]) -> tuple[Schedule, RoundLoads]:
        """Schedule and loads of a route array, made once for all with which every group travels alike."""
        key = move.groups.effective(codes).tobytes()
        if key not in known:
            schedule, _ = move.schedule(codes)
            loads = schedule.loads(executor)
            known[key] = schedule, loads.apart() if kind in APART else loads
        return known[key]

    picked = load_key(made(found.route)[1])
    routes = {**move.uniform(), **({} if mixed is None else {MIXED: mixed})}
    if mixed is None or expecter.price(made(mixed)[1]).total_s >= found.chosen.total_s:
        routes[MIXED] = found.route  # left out below where it is a uniform route
    bound = lower_bound(move.plan, move.topology, profile.nic_rates(move.topology), profile.port_rate()).seconds
    cases: dict[bytes, MoveCase] = {}
    for route, codes in routes.items():
        schedule, loads = made(codes)
        key = load_key(loads)
        if key in cases:
            continue
        cases[key] = MoveCase(
            kind=kind,
            name=move.name,
            spec=spec,
            executor=executor,
            route=route,
            codes=tuple(codes.tolist()),
            chosen=key == picked,
            hard=tuple(dict.fromkeys(hard)),
            bytes_total=schedule.bytes_total,
            bound_s=bound,
            expected=expecter.expect(loads),
            **more,
        )
    return list(cases.values())
