"""Options of ``relaymeter run``."""

from __future__ import annotations

import argparse

from relaymeter.harness.arguments import (
    Commands,
    add_command,
    add_executor,
    add_output,
    add_planner,
    add_pricing,
    add_ranks,
    add_simulate,
    count,
    fault,
    named,
    profile_or_none,
    seconds,
    typed,
)
from relaymeter.units import parse_bytes

__all__ = ["add_run"]


def add_run(commands: Commands) -> None:
    """Add the command to the command line."""
    run = add_command(
        commands,
        "run",
        "move real weights by every route, or whole training states between live engines, and check every bit",
        "relaymeter run --profile profile.json --scenario smoke --json rows.jsonl\n"
        "  relaymeter run --suite transitions --nic 400mbit\n"
        "  relaymeter run --suite state-matrix --change z3-4-2-4\n"
        "  relaymeter run --scenario dp4-dp2-dp4\n"
        "  relaymeter run --scenario offload\n"
        "  relaymeter run --plan plan.json\n"
        "  relaymeter run --simulate h100-16x8 --scenario qwen3-32b\n"
        "  relaymeter run --scenario transitions --move tp4-tp2x2 --nodes 2 --ranks-per-node 4 --max-extra 2MiB",
    )
    what = run.add_argument_group("what moves (one of these)").add_mutually_exclusive_group(required=True)
    add_pricing(run, what)
    what.add_argument(
        "--suite",
        metavar="NAME|FILE.toml",
        help="scenario with defaults of its own, in one table: transitions (weights by every route) or state-matrix "
        "(training states by every change of engine)",
    )
    what.add_argument(
        "--plan",
        type=named,
        metavar="FILE",
        help="exactly what plan --out wrote: its scenario, planner, executor, routes and buckets",
    )
    run.add_argument(
        "--profile",
        type=profile_or_none,
        metavar="PROFILE|none",
        help="profile that calibrate wrote; without one rows are measured and verified, but not priced, and no route "
        "is chosen",
    )
    add_planner(run, None)
    add_executor(run, "send-recv on gloo, all-to-all on NCCL", default=None)
    run.add_argument(
        "--max-extra",
        type=typed(parse_bytes),
        metavar="SIZE",
        help="bounded memory, for moves from the old replicas within the same ranks: by prediction (storages and "
        "buffers counted) a rank holds at most SIZE more than the larger of its two layouts, and the old replica is "
        "given up as it is read",
    )
    run.add_argument(
        "--repeats",
        type=count,
        metavar="N",
        help="timed repeats of a row (default 5, or the suite's); or rounds of a training state",
    )
    run.add_argument("--move-limit", type=seconds, metavar="SECONDS", help="limit of one move (default 60)")
    run.add_argument(
        "--allow-mismatch", action="store_true", help="use a profile of another machine (stamped on every row)"
    )
    run.add_argument(
        "--plot", type=named, metavar="FILE", help="write the plot of predicted and measured times (png, svg, pdf)"
    )
    run.add_argument(
        "--results", type=named, metavar="DIR", help="also keep rows, profile and plot under DIR/<machine>/"
    )
    run.add_argument("--fault", type=fault, help=argparse.SUPPRESS)
    add_simulate(run, "time the moves on a simulated cluster: no rank starts, nothing moves, no bit is checked")
    add_ranks(run, "as the profile, plan, suite or training state says, else ", 1800)
    add_output(run, "write the rows as JSON Lines")
    run.set_defaults(handler=("commands_run", "run"))
