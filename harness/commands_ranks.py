"""What the commands that need ranks share: ranks are started here, or those that torchrun made do the job.

The parent checks every input and every file name before a rank starts, hands the job over as a JSON file, reads the
result and gives the verdict. In a world that was joined, each rank does the job and rank 0 does the rest.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relaymeter.calibration.fingerprint import environment_facts, machine_facts
from relaymeter.calibration.profiles import Profile, differences
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.errors import EXIT_OK, EXIT_RANK_LOST, EXIT_TIME_LIMIT, EXIT_USAGE, InputError, RelaymeterError
from relaymeter.harness import emit
from relaymeter.harness.job_folder import JobFolder
from relaymeter.harness.jobs import ClusterConfig, Job, dump
from relaymeter.harness.launch import ClusterSpec, LaunchResult, WorldHint, launch, visible_gpus
from relaymeter.records import dump_json, load_json, write_text
from relaymeter.units import counted

__all__ = [
    "asked_cluster",
    "check_results",
    "check_targets",
    "check_world",
    "cluster_for",
    "describe_cluster",
    "first_error",
    "is_shaped",
    "open_profile",
    "shapeable",
    "work_together",
    "write_all",
]


#: Options that name a file which is read, and those of them that may name something shipped instead.
_READ = ("profile", "check", "plan", "scenario", "suite", "simulate")
_SHIPPED = ("scenario", "suite", "simulate")
#: The line of a traceback that says what was raised.
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
_OURS = "relaymeter: "


def check_targets(**targets: Path | str | None) -> None:
    """Refuse two outputs of one name, and an output that would replace a file which is read, whatever links lead there.

    Keywords are options with their values: ``check_targets(json=args.json, profile=args.profile)``. Raises InputError
    before any work.
    """
    seen: dict[str, str] = {}
    for name, target in sorted(targets.items(), key=lambda item: item[0] not in _READ):
        if target is None or target == "-" or (name in _SHIPPED and not str(target).endswith(".toml")):
            continue
        try:
            path = os.path.realpath(target)
        except (OSError, ValueError):  # no name of a file: refused where it is opened
            continue
        other = seen.get(path)
        if other is not None and name not in _READ:
            if other in _READ:
                raise InputError(f"--{name} {target} would replace the file that --{other} reads: choose another name")
            raise InputError(f"--{other} and --{name} both name {target}: give each its own file")
        seen[path] = name


def check_results(root: Path, machine_id: str) -> None:
    """Refuse ``--results`` where ``root/machine_id`` is no folder and cannot become one: a file in the way, a place
    where nothing can be made. Raises InputError before any work; leaves nothing behind."""
    home = root / machine_id
    try:
        while not os.path.lexists(home) and home != home.parent:
            home = home.parent
        if not home.is_dir():
            raise InputError(f"--results {root}: {home} is no folder that can be written: choose another")
        os.rmdir(tempfile.mkdtemp(dir=home, prefix=".relaymeter-"))  # rights alone do not say it, as in /proc
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"--results {root}: {home} is no folder that can be written ({text}): choose another"
        ) from error


def write_all(args: argparse.Namespace, writers: Mapping[str, Callable[[], None]]) -> int:
    """Call the writer of each option that was given, whatever became of the others; an error is one line on standard
    error. Returns an exit code."""
    code = EXIT_OK
    for name, write in writers.items():
        if getattr(args, name) is None:
            continue
        try:
            write()
        except (OSError, RelaymeterError) as error:
            text = str(error)
            if isinstance(error, OSError):
                text = f"{error.strerror or error}: {error.filename or getattr(args, name)}"
            print(f"relaymeter: --{name} was not written: {text}", file=sys.stderr)
            code = EXIT_USAGE
    return code


def is_shaped(cluster: ClusterConfig | None) -> bool:
    """Whether the kernel holds the rates of this cluster's NICs; None: a world that was joined."""
    return cluster is not None and cluster.shape and cluster.nic_rate_bytes_per_s is not None


def open_profile(path: Path, allow_mismatch: bool, *, starts_ranks: bool = False) -> tuple[Profile, tuple[str, ...]]:
    """The profile, and where it differs from this machine (empty unless ``allow_mismatch``), and, where the command
    ``starts_ranks``, from the transports' settings that they will have. A simulated one belongs to no machine and
    differs from none: whoever starts ranks refuses it. Raises InputError."""
    here = {**machine_facts(), **({"environment": environment_facts()} if starts_ranks else {})}
    profile = load_profile(path)
    if profile.simulated is not None:
        return profile, ()
    differ = differences(profile, here)
    if differ and not allow_mismatch:
        load_profile(path, here)  # says where it differs, and what to do
    return profile, differ


def asked_cluster(args: argparse.Namespace, base: ClusterConfig) -> ClusterConfig:
    """The cluster to start: what was asked for, and what was not from ``base``. Raises InputError."""
    asked = {
        "nodes": args.nodes,
        "ranks_per_node": args.ranks_per_node,
        "nic_per": args.nic_per,
        **({"nic_rate_bytes_per_s": args.nic} if "nic" in args else {}),
    }
    kept = {name: value for name, value in asked.items() if value is not None or name == "nic_rate_bytes_per_s"}
    if asked.get("nic_rate_bytes_per_s") is not None:
        try:
            ClusterSpec(nodes=1, ranks_per_node=1, nic_rate_bytes_per_s=args.nic)
        except InputError as error:
            raise InputError(f"--nic: {error}") from error
    found = ClusterConfig.model_validate({**base.model_dump(), "shape": True, **kept})
    _spec(found)
    return found


def cluster_for(args: argparse.Namespace, needed: int, whose: str) -> ClusterConfig:
    """One node with the ranks that are ``needed``, or what the command line says. ``whose`` needs them, for errors.
    Raises InputError."""
    base = ClusterConfig(nodes=1, ranks_per_node=-(-needed // args.nodes) if args.nodes else needed)
    if not args.ranks_per_node:
        try:
            _spec(base)
        except InputError as error:
            raise InputError(
                f"{whose} needs {counted(needed, 'rank')}, which one machine does not start: {error}"
            ) from error
    return asked_cluster(args, base)


def _spec(cluster: ClusterConfig) -> ClusterSpec:
    return ClusterSpec(**cluster.model_dump())


def shapeable(cluster: ClusterConfig, out: emit.Output) -> ClusterConfig:
    """The cluster, or, where this machine makes no box, the same nodes on loopback, unshaped, said aloud. Nor are ranks
    with a GPU each put into network namespaces where nothing has to be shaped: NCCL's own connections inside a node
    would not pass them."""
    from relaymeter.harness.box import capability

    ranks = cluster.nodes * cluster.ranks_per_node
    if cluster.nic_rate_bytes_per_s is None and len(visible_gpus(os.environ)) >= ranks:
        out.say("a GPU for each rank and no --nic: ranks run on loopback, with nodes only declared")
        return cluster.model_copy(update={"shape": False})
    reason = capability()
    if reason is None:
        return cluster
    out.say(f"this machine cannot shape ({reason}): going on unshaped, with nodes only declared")
    return cluster.model_copy(update={"shape": False, "nic_rate_bytes_per_s": None})


def check_world(args: argparse.Namespace, hint: WorldHint | None) -> None:
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


def describe_cluster(cluster: ClusterConfig | None) -> str:
    if cluster is None:
        return "a world that was joined"
    rate = cluster.nic_rate_bytes_per_s
    speed = "unshaped" if rate is None else f"{rate * 8 / 1e6:g} Mbit/s"
    kind = "" if cluster.shape else " on loopback"
    return f"{cluster.nodes} x {cluster.ranks_per_node} ranks{kind}, a NIC per {cluster.nic_per}, {speed}"


def first_error(result: LaunchResult) -> str:
    """What went wrong in a launch, in one line: the error of the rank that failed of itself, not of those that only
    lost it. Empty where no rank failed."""
    if result.frozen:
        return f"rank {', '.join(map(str, result.frozen))} was frozen"
    own = [end for end in result.ranks if end.rank in result.tails and not end.ended_by_launcher]
    if not own:
        return "the time limit ended them" if result.timed_out else ""
    followed = (EXIT_RANK_LOST, EXIT_TIME_LIMIT)
    first = min(own, key=lambda end: (end.signal is None and end.verdict in followed, end.rank))
    how = first.describe().partition(" after ")[0]
    text = how if first.signal is not None else _error_line(result.tails[first.rank]) or how
    alike = all(result.tails.get(end.rank) == result.tails[first.rank] for end in result.ranks)
    return text if alike and first.signal is None else f"rank {first.rank}: {text}"


def _error_line(tail: str) -> str:
    """The last error that the last lines of a log tell: this package's own, or the first line of an exception."""
    lines = [line.rstrip() for line in tail.split("\n")]
    for line in reversed(lines):
        if line.startswith(_OURS):
            return line.removeprefix(_OURS)
        if _RAISED.match(line):
            return line
    return next((line for line in reversed(lines) if line), "")


def work_together(
    job: Job,
    cluster: ClusterConfig | None,
    hint: WorldHint | None,
    out: emit.Output,
    *,
    on_error: Callable[[str], None] | None = None,
) -> tuple[int, Mapping[str, Any] | None]:
    """Do the job and return its exit code and what rank 0 kept of the result (None: nothing, or on another rank).
    ``on_error`` gets what went wrong in one line, which is on standard error in full."""
    if cluster is None:
        from relaymeter.harness.worker import work

        kept: list[Mapping[str, Any]] = []
        code = work(job, out.say, kept.append, joined=True, on_error=on_error)
        return code, kept[-1] if kept else None
    path = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # ninja stands beside python
    )
    with JobFolder() as place:
        job_path, result_path = place.folder / "job.json", place.folder / "result.json"
        write_text(job_path, dump_json(dump(job)))
        result = launch(
            [str(job_path), str(result_path)],
            _spec(cluster),
            time_limit_s=job.time_limit_s,
            log_dir=place.folder,
            env={
                "PATH": path,
                "TMPDIR": str(place.scratch),  # a rank that is killed leaves its temporary files here
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            },
        )
        code = result.exit_code
        if result.interrupted:
            out.say("interrupted: all ranks have been ended")
        found = load_json(result_path, "result") if result_path.exists() else None
        if code != EXIT_OK and on_error is not None:
            on_error(first_error(result))
        if code == EXIT_OK and found is None:
            raise InputError(f"the ranks ended well but rank 0 left no result; logs in {place.folder}")
        place.done = code == EXIT_OK or result.interrupted
    return code, found
