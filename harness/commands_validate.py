"""``validate``: measure what was never fitted, on ranks or a simulated cluster, and hold what was predicted against it.

The parent checks profile, ranks and file names before a rank starts; the ranks do the job (``validate_job``), and the
parent makes the report of their rows, whose exit code is the command's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from relaymeter.calibration.profiles import Profile
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.calibration.profiles import save as save_profile
from relaymeter.errors import EXIT_OK, EXIT_WRONG_BITS, InputError
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import (
    asked_cluster,
    check_results,
    check_targets,
    check_world,
    describe_cluster,
    is_shaped,
    open_profile,
    shapeable,
    work_together,
    write_all,
)
from relaymeter.harness.commands_simulated import first_line, refuse_rank_options
from relaymeter.harness.config import check
from relaymeter.harness.jobs import ClusterConfig, Fault, RunStamp, ValidateJob
from relaymeter.harness.launch import WorldHint, already_in_world
from relaymeter.harness.results import keep_results, make_stamp, named_files
from relaymeter.harness.validate_report import Report, make_report
from relaymeter.records import dump_json, dump_lines, write_text
from relaymeter.validation_records import ValidationRecord

__all__ = ["validate"]

_LIMIT_S = 1200.0


def validate(args: argparse.Namespace) -> int:
    """Measure and report. Returns the exit code: 6 wrong bits, 3 a bar missed, 0 all met."""
    check_targets(json=args.json, profile=args.profile, simulate=_file(args.simulate))
    out = emit.Output(args.json, force=args.force)
    return _simulated(args, out) if args.simulate is not None else _measured(args, out)


def _file(simulate: str | None) -> str | None:
    """The file that ``--simulate`` names, which is read; None for a preset, or where it is not given."""
    return simulate if simulate is not None and simulate.endswith(".toml") else None


def _measured(args: argparse.Namespace, out: emit.Output) -> int:
    profile, _ = open_profile(args.profile, False, starts_ranks=True)
    if profile.simulated is not None:
        raise InputError(
            f"profile {args.profile} is of the simulated cluster {profile.simulated}: add --simulate "
            f"{profile.simulated}, or calibrate these ranks"
        )
    if args.results is not None:
        check_results(args.results, profile.machine_id)
    hint = already_in_world()
    check_world(args, hint)
    cluster = _cluster(args, profile, hint, out)
    if args.fault is not None and (args.fault[0] != "flip" or args.fault[1] >= profile.topology.world_size):
        raise InputError(f"--fault {args.fault[0]}:{args.fault[1]}: give flip and one of the profile's ranks")
    job = ValidateJob(
        profile=str(args.profile.resolve()),
        quick=args.quick,
        unshaped=cluster is not None and not is_shaped(cluster),
        time_limit_s=args.time_limit or _LIMIT_S,
        nic_per=args.nic_per if hint else None,
        stamp=make_stamp(profile.machine_id, shaped=is_shaped(cluster)),
        fault=None if args.fault is None else Fault(kind=args.fault[0], rank=args.fault[1]),
    )
    code, result = work_together(job, cluster, hint, out)
    if result is None:
        return code
    rows = [ValidationRecord.from_dict(entry) for entry in result["rows"]]
    if code != EXIT_OK:
        out.say("stopped: the figures of what had been measured follow")
    return _report(args, rows, code, profile, job.stamp, out, result["notes"])


def _cluster(
    args: argparse.Namespace, profile: Profile, hint: WorldHint | None, out: emit.Output
) -> ClusterConfig | None:
    """The ranks to start: those that the profile was measured on (None: a world that was joined). Raises InputError
    where other ones are asked for, or this machine makes other ones."""
    known = profile.fingerprint.get("cluster")
    measured = None if known is None else check(ClusterConfig, known, f"profile {args.profile}, cluster")
    cluster = None
    if hint is None:
        cluster = shapeable(asked_cluster(args, measured or ClusterConfig(nodes=2, ranks_per_node=2)), out)
    if cluster != measured:
        raise InputError(
            f"profile {args.profile} was measured on {describe_cluster(measured)}, this would be "
            f"{describe_cluster(cluster)}: calibrate these ranks, or leave the options of the ranks out"
        )
    return cluster


def _simulated(args: argparse.Namespace, out: emit.Output) -> int:
    from relaymeter.harness.simulated import load_preset
    from relaymeter.harness.simulated_profile import check_profile
    from relaymeter.harness.validate_run import validate_simulated

    refuse_rank_options(args)
    cluster = load_preset(args.simulate)
    profile = load_profile(args.profile)
    check_profile(cluster, profile, args.profile, asked=args.simulate)
    if args.results is not None:
        check_results(args.results, profile.machine_id)
    out.say(first_line(cluster))
    stamp = make_stamp(profile.machine_id, shaped=False)
    files = named_files(simulate=args.simulate)
    rows, agenda = validate_simulated(cluster, profile, stamp, quick=args.quick, say=out.say)
    return _report(args, rows, EXIT_OK, profile, stamp, out, agenda.notes, cluster.nic_rates, files)


def _report(
    args: argparse.Namespace,
    rows: Sequence[ValidationRecord],
    code: int,
    profile: Profile,
    stamp: RunStamp,
    out: emit.Output,
    notes: Sequence[str],
    nic_rates: Mapping[int, float] | None = None,
    files: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Lines, tables and files. ``notes``: what was left out and why, and what was searched. ``nic_rates``: the true
    payload rate of each NIC, where it is known. ``files``: what else is kept, by name. Returns the exit code: of the
    ranks where they failed, else of the figures."""
    try:
        report = make_report(rows, profile, nic_rates=nic_rates, notes=notes)
    except InputError:  # rows that no figure can be made of are kept for whoever looks into them
        write_all(args, {"json": lambda: out.json(dump_lines(rows))})
        raise
    for line in report.lines:
        out.say(line)
    for table in report.tables:
        out.table(table)

    def keep() -> None:
        out.say(f"results: {_keep(args.results, rows, profile, stamp, report, files)}")

    failed = write_all(args, {"json": lambda: out.json(dump_lines(rows)), "results": keep}) or out.exit_code
    if EXIT_WRONG_BITS in (code, report.exit_code):
        return EXIT_WRONG_BITS
    return code or failed or report.exit_code


def _keep(
    root: Path,
    rows: Sequence[ValidationRecord],
    profile: Profile,
    stamp: RunStamp,
    report: Report,
    files: Mapping[str, str],
) -> Path:
    """Keep rows, profile, plots and report in a folder of their own; ``report.json`` for programs."""
    from relaymeter.harness.validate_plots import draw_plots

    def more(folder: Path) -> None:
        save_profile(profile, folder / "profile.json")
        plots = draw_plots(rows, profile, folder)
        write_text(folder / "report.md", report.to_markdown([path.name for path in plots]))
        write_text(folder / "report.json", dump_json(report.to_dict()))

    return keep_results(root, rows, stamp, "validate", profile.fingerprint, suite="validate", files=files, more=more)
