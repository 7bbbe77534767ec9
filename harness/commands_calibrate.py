"""``calibrate``: measure the ranks' exchanges and write the profile, or check one that exists.

The parent checks the inputs before a rank starts and writes what rank 0 has fitted, or gives the verdict on what was
measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.table import Table

from relaymeter.calibration.check import DRIFT, CheckResult, SpotResult, check_cluster, limit_text
from relaymeter.calibration.profiles import Profile, differences, from_json
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.calibration.profiles import save as save_profile
from relaymeter.errors import EXIT_GATE_MISSED, EXIT_OK, EXIT_WRONG_BITS, InputError, NothingMeasured
from relaymeter.harness import emit
from relaymeter.harness.calibrate_paths import check_paths, measure_paths, refuse_paths
from relaymeter.harness.commands_ranks import (
    asked_cluster,
    check_targets,
    check_world,
    open_profile,
    shapeable,
    work_together,
)
from relaymeter.harness.commands_simulated import calibrated, first_line, refuse_rank_options, simulated_executors
from relaymeter.harness.config import check as check_config
from relaymeter.harness.jobs import CalibrateJob, CheckJob, ClusterConfig
from relaymeter.harness.launch import already_in_world
from relaymeter.harness.signals import INTERRUPTED
from relaymeter.harness.simulated import load_preset
from relaymeter.harness.simulated_profile import simulated_facts
from relaymeter.policies.price import Pricer
from relaymeter.records import check_target
from relaymeter.relayout.topology import Topology
from relaymeter.units import counted, format_seconds

__all__ = ["calibrate"]

_CALIBRATE_LIMIT_S = 600.0
#: Version of the JSON document of a check.
_CHECK_SCHEMA = 1


def calibrate(args: argparse.Namespace) -> int:
    """Measure and write the profile, or check one. Returns the exit code."""
    refuse_paths(args, already_in_world())
    return _check(args) if args.check is not None else _calibrate(args)


def _calibrate(args: argparse.Namespace) -> int:
    if args.simulate is not None:
        return _calibrate_simulated(args)
    if args.allow_mismatch:
        raise InputError(
            "--allow-mismatch is about a profile that exists: give --check PROFILE with it, or leave it out"
        )
    check_target(args.out, force=args.force)
    check_targets(json=args.json, out=args.out, simulate=args.simulate)
    out = emit.Output(args.json, force=args.force)
    hint = already_in_world()
    cluster = None if hint else shapeable(_several(asked_cluster(args, ClusterConfig(nodes=2, ranks_per_node=2))), out)
    check_world(args, hint)
    if args.paths and cluster is not None:
        check_paths(args, cluster)
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
    if args.paths and cluster is not None:
        code, paths = measure_paths(args, cluster, profile, out)
        if code in (*INTERRUPTED, EXIT_WRONG_BITS):
            return code
        profile = replace(profile, paths=paths)
        if paths is None:
            profile = replace(profile, warnings=(*profile.warnings, "paths were not measured: calibrate again"))
    return _keep(args, profile, out) or code


def _calibrate_simulated(args: argparse.Namespace) -> int:
    """Calibrate a simulated cluster, in this process, and write the profile."""
    refuse_rank_options(args)
    check_target(args.out, force=args.force)
    check_targets(json=args.json, out=args.out, simulate=args.simulate)
    out = emit.Output(args.json, force=args.force)
    cluster = load_preset(args.simulate)
    executors = None if args.executor == "auto" else simulated_executors(cluster, args.executor)
    out.say(first_line(cluster))
    profile = calibrated(cluster, quick=args.quick, budget_s=args.budget, executors=executors)
    return _keep(args, profile, out)


def _keep(args: argparse.Namespace, profile: Profile, out: emit.Output) -> int:
    """Print the profile and write it. Returns the exit code."""
    for table in emit.profile_tables(profile):
        out.table(table)
    passed = sum(gate.passed for gate in profile.gates)
    if passed == len(profile.gates):
        out.say(f"gates: {passed} of {passed} passed")
    save_profile(profile, args.out, force=args.force)
    for warning in profile.warnings:
        if not warning.startswith("gate "):  # the table of gates has those
            out.say(f"warning: {warning}")
    connected = ", ".join(f"{executor} {format_seconds(took)}" for executor, took in profile.connect_s.items())
    if connected:
        out.say(f"first exchange with every peer: {connected} (in no other figure)")
    measured = "measured" if profile.simulated is None else "of simulated time"
    out.say(f"profile: {args.out} ({profile.spent_s:.0f} s {measured}, machine {profile.machine_id})")
    out.say(error_line(profile))
    out.json(profile.to_json())
    return out.exit_code


def error_line(profile: Profile) -> str:
    """How far the prices of each executor were off on matrices that were never fitted."""
    parts = []
    for executor in profile.executors:
        pricer = Pricer(profile, profile.topology, executor)
        stands_on = "1 matrix" if pricer.held_out == 1 else f"{pricer.held_out} matrices"
        if not pricer.held_out:
            stands_on = "no matrices: twice the error on what was fitted"
        parts.append(f"{pricer.error:.1%} ({executor}, {stands_on})")
    return f"prices erred by {', '.join(parts)}"


def _several(cluster: ClusterConfig) -> ClusterConfig:
    if cluster.nodes * cluster.ranks_per_node < 2:
        raise NothingMeasured(
            "--nodes 1 x --ranks-per-node 1 is a world of one rank, which has no link to measure: start at least two "
            "ranks"
        )
    return cluster


def _check(args: argparse.Namespace) -> int:
    """Measure a few cells of the profile again; ``EXIT_GATE_MISSED`` where one has drifted."""
    for option, given in (("--quick", args.quick), ("--budget", args.budget is not None)):
        if given:
            raise InputError(f"{option} does not apply to --check, which takes seconds: leave it out")
    profile = load_profile(args.check)
    if profile.simulated is not None and args.simulate is None:
        raise InputError(
            f"profile {args.check} is of the simulated cluster {profile.simulated}, which has no ranks to check it on: "
            "add --simulate PRESET"
        )
    if args.simulate is None:
        profile, mismatch = open_profile(args.check, args.allow_mismatch, starts_ranks=True)
    executor = None if args.executor == "auto" else args.executor
    if executor is not None and executor not in profile.executors:
        raise InputError(
            f"--executor {executor}: profile {args.check} measured {' and '.join(profile.executors)} only: leave it out"
        )
    check_targets(json=args.json, check=args.check, simulate=args.simulate)
    out = emit.Output(args.json, force=args.force)
    if args.simulate is not None:
        return _check_simulated(args, profile, executor, out)
    hint = already_in_world()
    check_world(args, hint)
    cluster = None if hint else shapeable(_cluster_of(args, profile), out)
    job = CheckJob(
        profile=str(args.check.resolve()),
        executor=executor,
        allow_mismatch=args.allow_mismatch,
        time_limit_s=args.time_limit or _CALIBRATE_LIMIT_S,
        nic_per=args.nic_per if hint else None,
        cluster=cluster,
    )
    code, result = work_together(job, cluster, hint, out)
    if result is None or code != EXIT_OK:
        return code
    return _report(args, profile, CheckResult.from_dict(result), mismatch, out)


def _check_simulated(args: argparse.Namespace, profile: Profile, executor: str | None, out: emit.Output) -> int:
    """Hold a simulated profile against a simulated cluster, in this process."""
    refuse_rank_options(args)
    cluster = load_preset(args.simulate)
    if profile.simulated is None or cluster.topology.node != profile.topology.node:
        what = "of real ranks" if profile.simulated is None else f"of {profile.simulated}, whose nodes are others"
        raise InputError(
            f"profile {args.check} is {what}: it cannot be checked on the simulated cluster {cluster.name}"
        )
    out.say(first_line(cluster))
    found = check_cluster(cluster.instruments(), profile, executor)
    return _report(args, profile, found, differences(profile, simulated_facts(cluster)), out)


def _cluster_of(args: argparse.Namespace, profile: Profile) -> ClusterConfig:
    """The profile's cluster, but for what the command line says. Raises InputError where its ranks are others."""
    known = profile.fingerprint.get("cluster")
    if known is None:
        raise InputError(
            f"profile {args.check} was made in a world that was joined: check it in one (torchrun, deepspeed, srun or "
            "mpirun ... relaymeter calibrate --check)"
        )
    cluster = asked_cluster(args, check_config(ClusterConfig, known, f"profile {args.check}, cluster"))
    node = Topology.grid(cluster.nodes, cluster.ranks_per_node).node
    if node != profile.topology.node:
        raise InputError(
            f"profile {args.check} was made elsewhere (node: profile {list(profile.topology.node)}, here {list(node)}"
            "): leave --nodes and --ranks-per-node out, or calibrate this cluster"
        )
    return cluster


def _report(
    args: argparse.Namespace,
    profile: Profile,
    found: CheckResult,
    mismatch: tuple[str, ...],
    out: emit.Output,
) -> int:
    """The verdict first, then the table. Returns the exit code."""
    noisy = [spot for spot in found.spots if spot.verdict == "noisy"]
    for spot in found.drifted:
        out.say(
            f"drift: {spot.name}: {format_seconds(spot.old_s)} in the profile, {format_seconds(spot.new_s)} now "
            f"({spot.drift:+.1%}, beyond {spot.passed_limit})"
        )
    if found.drifted:
        out.say(
            f"{len(found.drifted)} of {counted(len(found.spots), 'cell')} drifted: {found.drifted_parts}; prices "
            "that rest on these no longer hold here: calibrate again"
        )
    else:
        out.say(f"no drift: {counted(len(found.spots), 'cell')} measured again by {found.executor}")
    if noisy:
        out.say(f"note: too noisy to tell: {', '.join(spot.name for spot in noisy)}; close other programs, check again")
    for text in dict.fromkeys([*mismatch, *found.mismatch]):
        out.say(f"differs from the profile's world: {text}")
    out.table(_table(found))
    out.say(f"checked: {args.check} ({found.spent_s:.1f} s measured, made {profile.created_utc})")
    out.json(_document(profile, found, mismatch))
    return EXIT_GATE_MISSED if found.drifted else out.exit_code


def _table(found: CheckResult) -> Table:
    table = emit.simple_table(
        f"spot-check by {found.executor}",
        [
            ("cell", "left"),
            ("profile", "right"),
            ("now", "right"),
            ("drift", "right"),
            ("limit", "right"),
            ("verdict", "left"),
        ],
        caption=f"median of a call and its interval; limit: {limit_text(DRIFT)}, or the error where calibration missed "
        "its own gate",
    )
    for spot in found.spots:
        then = emit.time_with_interval(spot.old_s, spot.old_low_s, spot.old_high_s)
        now = emit.time_with_interval(spot.new_s, spot.new_low_s, spot.new_high_s)
        table.add_row(spot.name, then, now, f"{spot.drift:+.1%}", limit_text(spot.limit), _verdict(spot))
    return table


def _verdict(spot: SpotResult) -> str:
    return spot.verdict if spot.measured == 1 else f"{spot.verdict} (measured twice)"


def _document(profile: Profile, found: CheckResult, mismatch: tuple[str, ...]) -> Mapping[str, Any]:
    return {
        "schema_version": _CHECK_SCHEMA,
        "command": "calibrate --check",
        "simulated": profile.simulated,
        "profile": {
            "machine_id": profile.machine_id, "created_utc": profile.created_utc, "sha256": profile.sha256,
        },
        **found.to_dict(),
        "mismatch": list(dict.fromkeys([*mismatch, *found.mismatch])),
    }  # fmt: skip
