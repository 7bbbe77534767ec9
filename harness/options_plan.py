"""Options of ``relaymeter plan``."""

from __future__ import annotations

from relaymeter.harness.arguments import (
    Commands,
    add_command,
    add_executor,
    add_output,
    add_planner,
    add_pricing,
    grid,
    named,
    typed,
)

__all__ = ["add_plan"]


def add_plan(commands: Commands) -> None:
    """Add the command to the command line."""
    plan = add_command(
        commands,
        "plan",
        "plan and price on metadata alone: any number of ranks, no GPU, nothing started",
        "relaymeter plan --scenario qwen3-32b --topology 16x8 --profile profile.json\n"
        "  relaymeter plan --scenario transitions --topology 2x4 --planner both --out plan.json",
    )
    add_pricing(plan)
    plan.add_argument(
        "--topology",
        required=True,
        type=typed(grid),
        metavar="NODESxRANKS",
        help="nodes and ranks per node, such as 16x8",
    )
    plan.add_argument(
        "--nic-per", choices=("rank", "node"), default="rank", help="NICs of the planned cluster (default rank)"
    )
    plan.add_argument(
        "--profile",
        type=named,
        metavar="PROFILE",
        help="price with this profile, of whatever machine; one of calibrate --paths also says which path wins",
    )
    add_planner(plan, "classes")
    add_executor(plan, "the one that the profile measured first; without a profile send-recv")
    plan.add_argument(
        "--out",
        type=named,
        metavar="FILE",
        help="write the plans themselves, with their routes: run --plan FILE runs them",
    )
    add_output(plan, "write the plan as JSON")
    plan.set_defaults(handler=("commands_plan", "plan"))
