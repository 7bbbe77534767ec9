"""Options of ``relaymeter calibrate``."""

from __future__ import annotations

from relaymeter.harness.arguments import (
    Commands,
    add_command,
    add_executor,
    add_output,
    add_ranks,
    add_simulate,
    named,
    seconds,
)
from relaymeter.harness.options_compare import storage

__all__ = ["add_calibrate"]


def add_calibrate(commands: Commands) -> None:
    """Add the command to the command line."""
    calibrate = add_command(
        commands,
        "calibrate",
        "measure what this cluster's exchanges cost and write the profile, or check one that exists",
        "relaymeter calibrate --nodes 2 --ranks-per-node 2 --nic 400mbit --out profile.json\n"
        "  relaymeter calibrate --nodes 2 --ranks-per-node 2 --paths --out profile.json  # checkpoints too\n"
        "  relaymeter calibrate --check profile.json\n"
        "  relaymeter calibrate --simulate h100-16x8 --out simulated.json",
    )
    which = calibrate.add_mutually_exclusive_group(required=True)
    which.add_argument("--out", type=named, metavar="PROFILE", help="file to write the profile to")
    which.add_argument(
        "--check",
        type=named,
        metavar="PROFILE",
        help="measure a few of this profile's cells again, in under 5 s of measuring, on its own cluster (or what the "
        "options of ranks say): exit code 3 where one drifted beyond -13%% / +15%%",
    )
    calibrate.add_argument(
        "--allow-mismatch", action="store_true", help="with --check: also a profile made by other versions or elsewhere"
    )
    add_executor(calibrate, "both, first and most the backend's own: send-recv on gloo, all-to-all on NCCL", both=False)
    calibrate.add_argument("--quick", action="store_true", help="fewer sizes and samples: faster, wider intervals")
    calibrate.add_argument(
        "--budget",
        type=seconds,
        metavar="SECONDS",
        help="measuring time after which only what a price cannot do without is measured (default 60, with --quick 12)",
    )
    calibrate.add_argument(
        "--paths",
        action="store_true",
        help="then also measure what the same change costs by gathering and through checkpoints (disk, conversion, "
        "relaunch), on three small training states: about two minutes more with four ranks on two cores; "
        "needs relaymeter[deepspeed]",
    )
    calibrate.add_argument(
        "--storage",
        type=storage,
        action="append",
        metavar="NAME=DIR",
        help="with --paths: where checkpoints are written; may be given again (default disk=<the temporary folder> and "
        "tmpfs=/dev/shm, as far as they are that)",
    )
    add_simulate(calibrate, "calibrate a simulated cluster, in this process, instead of ranks")
    add_ranks(calibrate, "", 600)
    add_output(calibrate, "also write the profile, or what the check found, as JSON here")
    calibrate.set_defaults(handler=("commands_calibrate", "calibrate"))
