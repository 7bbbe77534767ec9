"""Rows: what the repeats of a case showed, as records. Called by rank 0.

``make_row(context, case, chosen)`` is pure but for the clock that the samples were taken with.
"""

from __future__ import annotations

import numpy as np

from relaymeter.harness.cases import Case
from relaymeter.harness.moves import route_bytes
from relaymeter.harness.run_context import RunContext
from relaymeter.harness.verdict import row_verdict
from relaymeter.records import MoveRecord, median_interval
from relaymeter.relayout.bounds import Bound, lower_bound
from relaymeter.relayout.digest import DIGEST_VERSION

__all__ = ["make_row"]


def make_row(context: RunContext, case: Case, chosen: Case | None) -> MoveRecord:
    """The record of a case after its repeats. ``chosen``: the case of the same plan and executor that runs what the
    policy picked, None without prices."""
    planned, schedule, price = case.planned, case.schedule, case.price
    table = np.stack(case.samples)
    slowest = table[:, :, 0].max(axis=1).tolist()
    measured, low, high = median_interval(slowest)
    digest_s = median_interval(table[:, :, 1].max(axis=1).tolist())[0]
    wire = table[:, :, 3].sum(axis=1)
    wire_bytes = None if np.isnan(wire).any() else int(np.median(wire))
    peak = None if np.isnan(table[:, :, 2]).all() else int(np.nanmax(table[:, :, 2]))
    bound = _bound(context, case)
    verdict = row_verdict(
        digest_passed=case.passed,
        digest_total=case.total,
        measured_s=measured,
        planned_bytes=schedule.bytes_cross_node,
        wire_bytes=wire_bytes,
    )
    stamp = context.job.stamp
    return MoveRecord(
        utc=stamp.utc,
        machine_id=stamp.machine_id,
        launch_id=stamp.launch_id,
        commit=stamp.commit,
        profile_mismatch=stamp.mismatch,
        shaped=stamp.shaped,
        scenario=context.job.scenario.name,
        move=planned.name,
        route=case.route,
        chosen=chosen is not None and schedule.input_hash == chosen.schedule.input_hash,
        route_bytes=route_bytes(planned.groups, case.codes),
        source_bytes={name: count for name, count in planned.source_bytes.items()},
        planner=planned.planner,
        fallback_tensors=sum(found.tensors for found in planned.fallbacks),
        executor=case.executor,
        ranks=context.world.world_size,
        nodes=context.topology.nodes,
        bucket_bytes=schedule.bucket_bytes,
        rounds=schedule.rounds,
        bytes_total=schedule.bytes_total,
        bytes_in_rank=planned.bytes_in_rank,
        bytes_in_node=schedule.bytes_in_node,
        bytes_cross_node=schedule.bytes_cross_node,
        wire_cross_node_bytes=wire_bytes,
        messages=schedule.messages(case.executor),
        plan_s=planned.plan_s + case.schedule_s,
        predicted_s=None if price is None else price.total_s,
        predicted_low_s=None if price is None else price.low_s,
        predicted_high_s=None if price is None else price.high_s,
        measured_s=measured,
        measured_low_s=low,
        measured_high_s=high,
        error=None if price is None else price.total_s / measured - 1,
        samples_s=tuple(tuple(sample[:, 0].tolist()) for sample in case.samples),
        digest_s=digest_s,
        bound_s=None if bound is None else bound.seconds,
        bound_by=None if bound is None else bound.bound_by,
        peak_bytes=peak,
        peak_predicted_bytes=case.move.peak_predicted_bytes,
        max_extra_bytes=context.job.max_extra_bytes,
        digest_version=DIGEST_VERSION,
        digest_passed=case.passed,
        digest_total=case.total,
        mismatch=case.mismatch,
        verdict=verdict,
        ok=verdict == "ok",
    )


def _bound(context: RunContext, case: Case) -> Bound | None:
    if context.profile is None:
        return None
    rates = context.profile.nic_rates(context.topology)
    return lower_bound(case.planned.plan, context.topology, rates, context.profile.port_rate())
