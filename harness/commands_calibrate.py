"""``calibrate``: measure the ranks' exchanges and write the profile.

The parent checks the inputs before a rank starts and writes what rank 0 has fitted.
"""

from __future__ import annotations

import argparse

from relaymeter.calibration.profiles import from_json
from relaymeter.calibration.profiles import save as save_profile
from relaymeter.errors import EXIT_OK
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import asked_cluster, check_targets, check_world, shapeable, work_together
from relaymeter.harness.jobs import CalibrateJob, ClusterConfig
from relaymeter.harness.launch import already_in_world
from relaymeter.records import check_target

__all__ = ["calibrate"]

_CALIBRATE_LIMIT_S = 600.0


def calibrate(args: argparse.Namespace) -> int:
    """Measure and write the profile. Returns the exit code."""
    check_target(args.out, force=args.force)
    check_targets(json=args.json, out=args.out)
    out = emit.Output(args.json, force=args.force)
    hint = already_in_world()
    cluster = None if hint else shapeable(asked_cluster(args, ClusterConfig(nodes=2, ranks_per_node=2)), out)
    check_world(args, hint)
    job = CalibrateJob(
        executor=args.executor,
        quick=args.quick,
        budget_s=args.budget,
        time_limit_s=args.time_limit or _CALIBRATE_LIMIT_S,
        nic_per=args.nic_per if hint else None,
        cluster=cluster,
    )
    code, result = work_together(job, cluster, hint, out)
    if result is None or code != EXIT_OK:
        return code
    profile = from_json(result, "of this calibration")
    for table in emit.profile_tables(profile):
        out.table(table)
    save_profile(profile, args.out, force=args.force)
    for warning in profile.warnings:
        if not warning.startswith("gate "):  # the table of gates has those
            out.say(f"warning: {warning}")
    out.say(f"profile: {args.out} ({profile.spent_s:.0f} s measured, machine {profile.machine_id})")
    out.json(profile.to_json())
    return out.exit_code
