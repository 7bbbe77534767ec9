"""Options of ``relaymeter choose``."""

from __future__ import annotations

from relaymeter.harness.arguments import Commands, add_command, add_executor, add_output, add_pricing, named

__all__ = ["add_choose"]


def add_choose(commands: Commands) -> None:
    """Add the command to the command line."""
    choose = add_command(
        commands,
        "choose",
        "price direct, relay and spread with a profile; print thresholds and a route per block class",
        "relaymeter choose --profile profile.json --scenario demo",
    )
    choose.add_argument("--profile", required=True, type=named, metavar="PROFILE", help="profile that calibrate wrote")
    add_pricing(choose)
    add_executor(choose, "the one that the profile measured first")
    choose.add_argument(
        "--allow-mismatch", action="store_true", help="use a profile of another machine (stamped on the output)"
    )
    add_output(choose, "write the choice as JSON")
    choose.set_defaults(handler=("commands_offline", "choose"))
