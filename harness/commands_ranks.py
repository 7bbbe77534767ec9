"""``calibrate`` and ``run``: the commands that need ranks. They start them here, or join the world that torchrun made.

The parent checks every input and every file name before a rank starts, hands the job over as a JSON file, reads the
result and gives the verdict. In a world that was joined, each rank does the job and rank 0 does the rest.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import relaymeter
from relaymeter.calibration.fingerprint import machine_facts
from relaymeter.calibration.profiles import Profile, differences, from_json
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.calibration.profiles import save as save_profile
from relaymeter.errors import EXIT_OK, InputError
from relaymeter.harness import emit
from relaymeter.harness.config import CalibrateJob, ClusterConfig, Fault, RunJob, RunStamp, Scenario, check
from relaymeter.harness.launch import ClusterSpec, WorldHint, already_in_world, launch
from relaymeter.harness.moves import plan_scenario, select_moves
from relaymeter.harness.plots import check_plot, plot_rows
from relaymeter.harness.scenario import load_scenario
from relaymeter.harness.verdict import judge, notes
from relaymeter.records import MoveRecord, check_target, dump_json, dump_lines, load_json, write_text
from relaymeter.relayout.topology import Topology

__all__ = ["calibrate", "run"]

_CALIBRATE_LIMIT_S = 600.0
_RUN_LIMIT_S = 1800.0
Job = CalibrateJob | RunJob


def calibrate(args: argparse.Namespace) -> int:
    """Measure and write the profile. Returns the exit code."""
    check_target(args.out, force=args.force)
    _check_targets(json=args.json, out=args.out)
    out = emit.Output(args.json, force=args.force)
    hint = already_in_world()
    cluster = None if hint else _shapeable(_asked(args, None), out)
    _check_world(args, hint)
    job = CalibrateJob(
        executor=args.executor,
        quick=args.quick,
        budget_s=args.budget,
        time_limit_s=args.time_limit or _CALIBRATE_LIMIT_S,
        nic_per=args.nic_per if hint else None,
        cluster=cluster,
    )
    code, result = _work(job, cluster, hint, out)
    if result is None or code != EXIT_OK:
        return code
    profile = from_json(result, "of this calibration")
    save_profile(profile, args.out, force=args.force)
    for table in emit.profile_tables(profile):
        out.table(table)
    for warning in profile.warnings:
        if not warning.startswith("gate "):  # the table of gates has those
            out.say(f"warning: {warning}")
    out.say(f"profile: {args.out} ({profile.spent_s:.0f} s measured, machine {profile.machine_id})")
    out.json(profile.to_json())
    return EXIT_OK


def run(args: argparse.Namespace) -> int:
    """Move, verify, table. Returns the exit code of the verdict."""
    scenario = select_moves(load_scenario(args.scenario), args.move)
    if scenario.source.kind != "zero3":
        raise InputError(
            f"scenario {scenario.name}: run trains its source, so source.kind must be 'zero3'; plan takes any"
        )
    profile, mismatch = open_profile(args.profile, args.allow_mismatch)
    out = emit.Output(args.json, force=args.force)
    if args.plot is not None:
        check_plot(args.plot, force=args.force)
    _check_targets(json=args.json, plot=args.plot, results=args.results)
    hint = already_in_world()
    _check_world(args, hint)
    cluster = None
    if hint is None:
        cluster = _shapeable(_asked(args, profile), out)
        topology = Topology.grid(cluster.nodes, cluster.ranks_per_node, cluster.nic_per)
        plan_scenario(scenario, topology, args.bucket_bytes)  # refuses what does not fit before a rank starts
        if args.fault is not None and args.fault[1] >= topology.world_size:
            raise InputError(f"--fault: rank {args.fault[1]} of {topology.world_size} ranks")
    mismatch += _cluster_mismatch(args, profile, cluster)
    job = RunJob(
        scenario=scenario,
        profile=str(args.profile.resolve()),
        executor=args.executor,
        bucket_bytes=args.bucket_bytes,
        repeats=args.repeats,
        time_limit_s=args.time_limit or _RUN_LIMIT_S,
        move_limit_s=args.move_limit,
        allow_mismatch=args.allow_mismatch,
        nic_per=args.nic_per if hint else None,
        fault=Fault(kind=args.fault[0], rank=args.fault[1]) if args.fault else None,
        stamp=RunStamp(
            utc=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            launch_id=secrets.token_hex(4),
            machine_id=profile.machine_id,
            commit=_commit(),
            mismatch=mismatch,
            shaped=cluster is not None and cluster.shape and cluster.nic_rate_bytes_per_s is not None,
        ),
    )
    code, result = _work(job, cluster, hint, out)
    if result is None:
        return code
    rows = [MoveRecord.from_dict(entry) for entry in result["rows"]]
    verdict = judge(rows, code)
    if code != EXIT_OK:
        done = len({row.move for row in rows})
        out.say(f"stopped after {done} of {len(scenario.moves)} moves: the rows of what had finished follow")
    out.json(dump_lines(rows))
    if args.plot is not None:
        plot_rows(rows, args.plot, force=args.force)
    kept = None if args.results is None else _keep(args.results, rows, profile, job.scenario)
    for line in verdict.lines:
        out.say(line)
    for text in mismatch:
        out.say(f"profile of another machine: {text}")
    out.say(emit.run_headline(rows))
    for table in emit.run_tables(rows):
        out.table(table)
    for text in notes(rows):
        out.say(f"note: {text}")
    if args.plot is not None:
        out.say(f"plot: {args.plot}")
    if kept is not None:
        out.say(f"results: {kept}")
    if verdict.exit_code == EXIT_OK:
        checked = sum(row.digest_total for row in rows)
        out.say(f"every bit arrived: {checked} of {checked} digests equal over {len(rows)} rows")
    return verdict.exit_code


def _check_targets(**targets: Path | str | None) -> None:
    """Refuse two outputs of one name, and results where no folder can be. Raises InputError before any work."""
    seen: dict[Path, str] = {}
    for name, target in targets.items():
        if target is None or target == "-":
            continue
        path = Path(target).absolute()
        if path in seen:
            raise InputError(f"--{seen[path]} and --{name} both name {target}: give each its own file")
        seen[path] = name
    folder = targets.get("results")
    if folder is not None:
        home = Path(folder)
        while not home.exists() and home != home.parent:
            home = home.parent
        if not home.is_dir() or not os.access(home, os.W_OK):
            raise InputError(f"--results {folder}: {home} is no folder that can be written: choose another")


def open_profile(path: Path, allow_mismatch: bool) -> tuple[Profile, tuple[str, ...]]:
    """The profile, and where it differs from this machine (empty unless ``allow_mismatch``). Raises InputError."""
    here = machine_facts()
    profile = load_profile(path, here, allow_mismatch=allow_mismatch)
    return profile, differences(profile, here)


def _asked(args: argparse.Namespace, profile: Profile | None) -> ClusterConfig:
    """The cluster to start: what was asked for, else what the profile was measured on, else 2 x 2 unshaped."""
    known = profile.fingerprint.get("cluster") if profile is not None else None
    base = ClusterConfig.model_validate(known) if known else ClusterConfig(nodes=2, ranks_per_node=2)
    asked = {
        "nodes": args.nodes,
        "ranks_per_node": args.ranks_per_node,
        "nic_per": args.nic_per,
        **({"nic_rate_bytes_per_s": args.nic} if "nic" in args else {}),
    }
    kept = {name: value for name, value in asked.items() if value is not None or name == "nic_rate_bytes_per_s"}
    found = ClusterConfig.model_validate({**base.model_dump(), "shape": True, **kept})
    _spec(found)
    return found


def _spec(cluster: ClusterConfig) -> ClusterSpec:
    return ClusterSpec(**cluster.model_dump())


def _shapeable(cluster: ClusterConfig, out: emit.Output) -> ClusterConfig:
    """The cluster, or, where this machine makes no box, the same nodes on loopback, unshaped, said aloud."""
    from relaymeter.harness.box import capability

    reason = capability()
    if reason is None:
        return cluster
    out.say(f"this machine cannot shape ({reason}): going on unshaped, with nodes only declared")
    return cluster.model_copy(update={"shape": False, "nic_rate_bytes_per_s": None})


def _check_world(args: argparse.Namespace, hint: WorldHint | None) -> None:
    if hint is None:
        return
    if "nic" in args:
        raise InputError(
            f"--nic shapes a cluster in a box, but the world of {hint.launcher} exists already: leave it out"
        )
    if args.nodes and args.ranks_per_node and args.nodes * args.ranks_per_node != hint.world_size:
        raise InputError(
            f"--nodes {args.nodes} x --ranks-per-node {args.ranks_per_node} = {args.nodes * args.ranks_per_node} ranks "
            f"asked, the world of {hint.launcher} has {hint.world_size}: leave both out, or make them agree"
        )


def _cluster_mismatch(args: argparse.Namespace, profile: Profile, cluster: ClusterConfig | None) -> tuple[str, ...]:
    """Where the profile's cluster is another one than ``cluster`` (None: a world that was joined)."""
    known = profile.fingerprint.get("cluster")
    if known == (None if cluster is None else cluster.model_dump()):
        return ()
    measured = None if known is None else check(ClusterConfig, known, f"profile {args.profile}, cluster")
    text = f"cluster: profile {_describe(measured)}, here {_describe(cluster)}"
    if not args.allow_mismatch:
        raise InputError(f"profile {args.profile}: {text}: calibrate this cluster, or add --allow-mismatch")
    return (text,)


def _describe(cluster: ClusterConfig | None) -> str:
    if cluster is None:
        return "a world that was joined"
    rate = cluster.nic_rate_bytes_per_s
    speed = "unshaped" if rate is None else f"{rate * 8 / 1e6:g} Mbit/s"
    kind = "" if cluster.shape else " on loopback"
    return f"{cluster.nodes} x {cluster.ranks_per_node} ranks{kind}, a NIC per {cluster.nic_per}, {speed}"


def _commit() -> str | None:
    """Revision of the checkout this package runs from, with ``-dirty`` where files differ; None outside a checkout."""
    root = Path(relaymeter.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return found.stdout.strip() or None
    return None


def _work(
    job: Job, cluster: ClusterConfig | None, hint: WorldHint | None, out: emit.Output
) -> tuple[int, Mapping[str, Any] | None]:
    """Do the job and return its exit code and what rank 0 kept of the result (None: nothing, or on another rank)."""
    if cluster is None:
        from relaymeter.harness.worker import work

        kept: list[Mapping[str, Any]] = []
        code = work(job, out.say, kept.append, joined=True)
        return code, kept[-1] if kept else None
    folder = Path(tempfile.mkdtemp(prefix="relaymeter-"))
    job_path, result_path = folder / "job.json", folder / "result.json"
    write_text(job_path, dump_json(job.model_dump(mode="json")))
    path = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # ninja stands beside python
    )
    result = launch(
        [str(job_path), str(result_path)],
        _spec(cluster),
        time_limit_s=job.time_limit_s,
        log_dir=folder,
        env={"PATH": path, "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")},
    )
    code = result.exit_code
    if result.interrupted:
        out.say("interrupted: all ranks have been ended")
    found = load_json(result_path, "result") if result_path.exists() else None
    if code == EXIT_OK and found is None:
        raise InputError(f"the ranks ended well but rank 0 left no result; logs in {folder}")
    if code == EXIT_OK or result.interrupted:
        shutil.rmtree(folder, ignore_errors=True)
    return code, found


def _keep(root: Path, rows: list[MoveRecord], profile: Profile, scenario: Scenario) -> Path:
    """Write ``<root>/<machine>/<UTC>_<commit>_<suite>/`` with rows, profile, plot and how they were made."""
    first = rows[0]
    stamp = first.utc.replace("-", "").replace(":", "")
    folder = root / first.machine_id / f"{stamp}_{first.commit or 'unknown'}_run-{scenario.name}"
    folder.mkdir(parents=True)
    write_text(folder / "rows.jsonl", dump_lines(rows))
    save_profile(profile, folder / "profile.json")
    plot_rows(rows, folder / "run.png")
    command = shlex.join(["relaymeter", *sys.argv[1:]])
    lines = [command, *(f"{key}: {value}" for key, value in sorted(profile.fingerprint.items()))]
    write_text(folder / "how.txt", "\n".join(lines) + "\n")
    return folder
