"""Options of ``relaymeter calibrate``."""

from __future__ import annotations

from relaymeter.harness.arguments import Commands, add_command, add_executor, add_output, add_ranks, named, seconds

__all__ = ["add_calibrate"]


def add_calibrate(commands: Commands) -> None:
    """Add the command to the command line."""
    calibrate = add_command(
        commands,
        "calibrate",
        "measure what this cluster's exchanges cost and write the profile",
        "relaymeter calibrate --nodes 2 --ranks-per-node 2 --nic 400mbit --out profile.json",
    )
    calibrate.add_argument("--out", required=True, type=named, metavar="PROFILE", help="file to write the profile to")
    add_executor(calibrate, "both, first and most the backend's own: send-recv on gloo, all-to-all on NCCL", both=False)
    calibrate.add_argument("--quick", action="store_true", help="fewer sizes and samples: faster, wider intervals")
    calibrate.add_argument(
        "--budget",
        type=seconds,
        metavar="SECONDS",
        help="measuring time after which only what a price cannot do without is measured (default 60, with --quick 20)",
    )
    add_ranks(calibrate, "", 600)
    add_output(calibrate, "also write the profile as JSON here")
    calibrate.set_defaults(handler=("commands_calibrate", "calibrate"))
