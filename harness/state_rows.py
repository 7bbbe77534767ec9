"""Rows of moves of training states: what a leg of a change, or a round, showed, as records. Called by rank 0; pure.

``leg_row(job, world, change, 1, leg)``, ``refused_row(job, world, change, planner, error)``.
"""

from __future__ import annotations

from typing import Any

from relaymeter.errors import InputError, PlanDisagreement
from relaymeter.harness.jobs import OffloadJob, RunStamp, StateJob
from relaymeter.harness.offload import OffloadResult
from relaymeter.harness.state_cells import LegResult
from relaymeter.harness.state_config import ChangeConfig
from relaymeter.harness.verdict import state_verdict
from relaymeter.harness.world import World
from relaymeter.relayout.digest import DIGEST_VERSION
from relaymeter.state_records import OffloadRecord, StateRecord

__all__ = ["leg_row", "offload_row", "refused_row", "stamped"]


def stamped(stamp: RunStamp, scenario: str) -> dict[str, Any]:
    """What rows of every kind say of their launch."""
    return {
        "utc": stamp.utc,
        "machine_id": stamp.machine_id,
        "launch_id": stamp.launch_id,
        "commit": stamp.commit,
        "shaped": stamp.shaped,
        "scenario": scenario,
    }


def _of_change(job: StateJob, world: World, change: ChangeConfig) -> dict[str, Any]:
    training = change.training
    return {
        **stamped(job.stamp, job.scenario.name),
        "row": change.row,
        "change": change.name,
        "ranks": world.world_size,
        "nodes": world.topology.nodes,
        "model": training.model,
        "dtype": training.dtype,
        "optimizer": training.optimizer,
        "digest_version": DIGEST_VERSION,
    }


def leg_row(
    job: StateJob, world: World, change: ChangeConfig, number: int, leg: LegResult, build_s: float | None = None
) -> StateRecord:
    """The record of the ``number``-th move of a change."""
    timing = leg.timing
    verdict = state_verdict(
        digests=(leg.digest_passed, leg.digest_total),
        oracle=(leg.oracle_passed, leg.oracle_total),
        fields=leg.fields,
        continuation_ok=leg.continuation_ok,
        checkpoint=leg.checkpoint,
    )
    return StateRecord(
        **_of_change(job, world, change),
        leg=number,
        source=leg.source,
        destination=leg.destination,
        planner=leg.planner,
        fallback_tensors=leg.fallback_tensors,
        build_s=build_s,
        plan_s=leg.plan_s,
        prepare_s=timing.prepare_s,
        move_s=timing.move_s,
        fields_s=timing.fields_s,
        refresh_s=timing.refresh_s,
        total_s=timing.total_s,
        bytes_total=leg.bytes_total,
        bytes_in_rank=leg.bytes_in_rank,
        bytes_in_node=leg.bytes_in_node,
        bytes_cross_node=leg.bytes_cross_node,
        messages=leg.messages,
        held_bytes=None,
        held_after_bytes=None,
        peak_bytes=leg.peak_bytes,
        peak_predicted_bytes=leg.peak_predicted_bytes,
        digest_passed=leg.digest_passed,
        digest_total=leg.digest_total,
        mismatch=leg.mismatch,
        fields=leg.fields,
        oracle_passed=leg.oracle_passed,
        oracle_total=leg.oracle_total,
        oracle_mismatch=leg.oracle_mismatch,
        continuation=leg.continuation,
        continuation_ok=leg.continuation_ok,
        checkpoint=leg.checkpoint,
        verdict=verdict,
        ok=verdict == "ok",
    )


def refused_row(job: StateJob, world: World, change: ChangeConfig, planner: str, error: Exception) -> StateRecord:
    """The record of a change that was refused or failed, or whose rest did, with the first line of ``error``."""
    refused = isinstance(error, InputError | PlanDisagreement)
    text = (str(error).strip().splitlines() or [""])[0]
    return StateRecord(
        **_of_change(job, world, change),
        leg=0,
        source=change.path[0].label,
        destination=change.path[-1].label,
        planner=planner,
        fallback_tensors=0,
        build_s=None,
        plan_s=None,
        prepare_s=None,
        move_s=None,
        fields_s=None,
        refresh_s=None,
        total_s=None,
        bytes_total=0,
        bytes_in_rank=0,
        bytes_in_node=0,
        bytes_cross_node=0,
        messages=0,
        held_bytes=None,
        held_after_bytes=None,
        peak_bytes=None,
        peak_predicted_bytes=None,
        digest_passed=0,
        digest_total=0,
        mismatch=None,
        fields=(),
        oracle_passed=0,
        oracle_total=0,
        oracle_mismatch=None,
        continuation="",
        continuation_ok=True,
        checkpoint="not asked",
        refused=text if refused else f"{type(error).__name__}: {text}",
        verdict="refused" if refused else "failed",
        ok=False,
    )


def offload_row(job: OffloadJob, result: OffloadResult) -> OffloadRecord:
    """The record of one kind of state, offloaded and reloaded."""
    return OffloadRecord(
        **stamped(job.stamp, job.scenario.name),
        ranks=job.scenario.ranks,
        stage=result.stage,
        way=result.way,
        state=result.state,
        moment=result.moment,
        pinned=result.pinned,
        blocking=result.blocking,
        bytes=result.bytes,
        offload_s=result.offload_s,
        reload_s=result.reload_s,
        allocated_before_bytes=result.allocated_before_bytes,
        allocated_after_bytes=result.allocated_after_bytes,
        allocated_reloaded_bytes=result.allocated_reloaded_bytes,
        host_growth_bytes=result.host_growth_bytes,
        equal=result.equal,
        mismatch=result.mismatch,
        trains=result.trains,
        note=result.note,
        verdict=result.verdict,
        ok=result.verdict not in ("wrong bits", "failed"),
    )
