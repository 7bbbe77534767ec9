"""Rows: what the repeats of a case showed, as records. Called by rank 0.

``make_row(context, case, chosen)`` is pure but for the clock that the samples were taken with.
"""

from __future__ import annotations

import numpy as np

from relaymeter.harness.cases import Case
from relaymeter.harness.row_facts import row_facts
from relaymeter.harness.run_context import RunContext
from relaymeter.harness.verdict import row_verdict
from relaymeter.records import MoveRecord, median_interval
from relaymeter.relayout.digest import DIGEST_VERSION

__all__ = ["make_row"]


def make_row(context: RunContext, case: Case, chosen: Case | None) -> MoveRecord:
    """The record of a case after its repeats. ``chosen``: the case of the same plan and executor that runs what the
    policy picked, None without prices."""
    planned, schedule, price = case.planned, case.schedule, case.price
    table = np.stack(case.samples)
    slowest = table[:, :, 0].max(axis=1).tolist()
    digest_s = median_interval(table[:, :, 1].max(axis=1).tolist())[0]
    wire = table[:, :, 3].sum(axis=1)
    wire_bytes = None if np.isnan(wire).any() else int(np.median(wire))
    peak = None if np.isnan(table[:, :, 2]).all() else int(np.nanmax(table[:, :, 2]))
    facts = row_facts(
        stamp=context.job.stamp,
        scenario=context.job.scenario.name,
        planned=planned,
        schedule=schedule,
        schedule_s=case.schedule_s,
        topology=context.topology,
        executor=case.executor,
        route=case.route,
        codes=case.codes,
        price=price,
        profile=context.profile,
        slowest_s=slowest,
    )
    verdict = row_verdict(
        digest_passed=case.passed,
        digest_total=case.total,
        measured_s=facts["measured_s"],
        planned_bytes=schedule.bytes_cross_node,
        wire_bytes=wire_bytes,
    )
    return MoveRecord(
        **facts,
        shaped=context.job.stamp.shaped,
        chosen=chosen is not None and schedule.input_hash == chosen.schedule.input_hash,
        wire_cross_node_bytes=wire_bytes,
        samples_s=tuple(tuple(sample[:, 0].tolist()) for sample in case.samples),
        digest_s=digest_s,
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
