"""Options of ``relaymeter plan``."""

from __future__ import annotations

from relaymeter.harness.arguments import (
    Commands,
    add_command,
    add_executor,
    add_output,
    add_planner,
    bucket,
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
        "  relaymeter plan --scenario transitions --topology 2x4 --planner both --out plan.json\n"
        "  relaymeter plan --model models/qwen3-8b --from ds_train.json --to tp=4,replicas=2 --topology 4x8\n"
        "  relaymeter plan --model config.json --from ds.json --to tp=8,ep=16,nodes=second-half --topology 16x8",
    )
    what = plan.add_mutually_exclusive_group(required=True)
    what.add_argument("--scenario", metavar="NAME|FILE.toml", help="shipped scenario or a file")
    what.add_argument(
        "--model",
        type=named,
        metavar="DIR|FILE",
        help="a Hugging Face model: its folder, config.json, .safetensors file or index; only headers are read",
    )
    plan.add_argument(
        "--from",
        dest="source",
        type=named,
        metavar="DS_CONFIG",
        help="with --model: the DeepSpeed config (JSON) of the trainer that holds it, such as ds_train.json",
    )
    plan.add_argument(
        "--from-ranks",
        metavar="N|FIRST-LAST",
        help="with --model: the trainer's ranks, such as 16 (the first 16) or 16-31 (default: all of the topology)",
    )
    plan.add_argument(
        "--to",
        metavar="tp=N[,...]",
        help="with --model: copies of tp ranks, as many as replicas=N (default: as fit), on nodes=all, first-half, "
        "second-half, 2 or 0-3 (default all); ep=N: routed experts whole over N ranks. "
        "Such as tp=4,replicas=2 or tp=8,ep=16,nodes=second-half",
    )
    plan.add_argument(
        "--move",
        action="append",
        metavar="NAME",
        help="only this move of the scenario (may be repeated; default all)",
    )
    plan.add_argument(
        "--bucket-bytes",
        type=typed(bucket),
        metavar="SIZE",
        help="bytes of a bucket on one rank, such as 8MiB (default: a 24th of the most that a rank sends or receives "
        "in the move, in whole MiB, at least 8MiB and at most 256MiB)",
    )
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
