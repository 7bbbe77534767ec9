"""What every row of a timed move says, on real ranks and on a simulated cluster. No torch import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.moves import PlannedMove, route_bytes
from relaymeter.policies.price import Price
from relaymeter.records import median_interval
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.schedule import Schedule
from relaymeter.relayout.topology import Topology

__all__ = ["row_facts"]


def row_facts(
    *,
    stamp: RunStamp,
    scenario: str,
    planned: PlannedMove,
    schedule: Schedule,
    schedule_s: float,
    topology: Topology,
    executor: str,
    route: str,
    codes: NDArray[np.int8],
    price: Price | None,
    profile: Profile | None,
    slowest_s: Sequence[float],
) -> dict[str, Any]:
    """Fields of a ``MoveRecord``: the stamp, the move and its schedule, the predicted and the measured time, the bound.

    ``slowest_s``: seconds of the slowest rank, per repeat. ``profile``: None gives no bound. Pure.
    """
    measured, low, high = median_interval(slowest_s)
    bound = None
    if profile is not None:
        bound = lower_bound(planned.plan, topology, profile.nic_rates(topology), profile.port_rate())
    return {
        "utc": stamp.utc,
        "machine_id": stamp.machine_id,
        "launch_id": stamp.launch_id,
        "commit": stamp.commit,
        "profile_mismatch": stamp.mismatch,
        "scenario": scenario,
        "move": planned.name,
        "route": route,
        "route_bytes": route_bytes(planned.groups, codes),
        "source_bytes": dict(planned.source_bytes),
        "planner": planned.planner,
        "fallback_tensors": sum(found.tensors for found in planned.fallbacks),
        "executor": executor,
        "ranks": topology.world_size,
        "nodes": topology.nodes,
        "bucket_bytes": schedule.bucket_bytes,
        "rounds": schedule.rounds,
        "bytes_total": schedule.bytes_total,
        "bytes_in_rank": planned.bytes_in_rank,
        "bytes_in_node": schedule.bytes_in_node,
        "bytes_cross_node": schedule.bytes_cross_node,
        "messages": schedule.messages(executor),
        "plan_s": planned.plan_s + schedule_s,
        "predicted_s": None if price is None else price.total_s,
        "predicted_low_s": None if price is None else price.low_s,
        "predicted_high_s": None if price is None else price.high_s,
        "measured_s": measured,
        "measured_low_s": low,
        "measured_high_s": high,
        "error": None if price is None else price.total_s / measured - 1,
        "bound_s": None if bound is None else bound.seconds,
        "bound_by": None if bound is None else bound.bound_by,
    }
