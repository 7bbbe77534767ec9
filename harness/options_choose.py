"""Options of ``relaymeter choose``."""

from __future__ import annotations

from relaymeter.harness.arguments import (
    Commands,
    add_command,
    add_executor,
    add_output,
    add_pricing,
    add_simulate,
    named,
)

__all__ = ["add_choose"]


def add_choose(commands: Commands) -> None:
    """Add the command to the command line."""
    choose = add_command(
        commands,
        "choose",
        "price every route with a profile; print the regret of today's constants, thresholds, a route per block class",
        "relaymeter choose --profile profile.json --scenario demo --out policy.json\n"
        "  relaymeter choose --profile profile.json --scenario demo --format python\n"
        "  relaymeter choose --simulate h100-16x8 --scenario qwen3-32b",
    )
    prices = choose.add_mutually_exclusive_group(required=True)
    prices.add_argument("--profile", type=named, metavar="PROFILE", help="profile that calibrate wrote")
    add_simulate(prices, "calibrate a simulated cluster first, in this process, and choose for it")
    add_pricing(choose)
    add_executor(choose, "the one that the profile measured first")
    choose.add_argument(
        "--allow-mismatch", action="store_true", help="use a profile of another machine (stamped on the output)"
    )
    choose.add_argument(
        "--out",
        type=named,
        metavar="FILE",
        help="write the policy as JSON: routes by block class, thresholds; relaymeter.load_policy reads it",
    )
    choose.add_argument(
        "--format",
        choices=("text", "json", "python"),
        default="text",
        help="what standard output gets: text, the tables (default); json, the policy; python, min_relay and min_split "
        "to paste where they are set; the tables then go to stderr",
    )
    add_output(choose, "write the prices as JSON")
    choose.set_defaults(handler=("commands_choose", "choose"))
