"""Options of ``relaymeter validate``."""

from __future__ import annotations

import argparse

from relaymeter.harness.arguments import Commands, add_command, add_output, add_ranks, add_simulate, fault, named

__all__ = ["add_validate"]


def add_validate(commands: Commands) -> None:
    """Add the command to the command line."""
    validate = add_command(
        commands,
        "validate",
        "hold a profile's prices against exchanges and moves that were never fitted, in one report",
        "relaymeter validate --profile profile.json --results results",
    )
    validate.add_argument(
        "--profile", required=True, type=named, metavar="PROFILE", help="profile that calibrate wrote of these ranks"
    )
    add_simulate(validate, "measure on a simulated cluster, which the profile must be of, instead of ranks")
    validate.add_argument(
        "--quick",
        action="store_true",
        help="fewer and smaller cases, fewer repeats, moves by the default executor only: four ranks take about 2.5 "
        "minutes instead of 7",
    )
    validate.add_argument(
        "--results", type=named, metavar="DIR", help="also keep report, rows, profile and plots under DIR/<machine>/"
    )
    validate.add_argument("--fault", type=fault, help=argparse.SUPPRESS)
    add_ranks(validate, "as the profile says, else ", 1200)
    add_output(validate, "write the rows as JSON Lines")
    validate.set_defaults(handler=("commands_validate", "validate"))
