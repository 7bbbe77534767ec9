"""What the commands' options have in common: types of values, and groups of options that several commands take.

``commands.add_parser`` is wrapped by ``add_command(commands, name, summary, example)``; each ``options_*`` module adds
one command to the command line with it. Imports little, so that an interrupt is heard from the first moment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relaymeter.errors import InputError, RelaymeterError
from relaymeter.units import parse_bytes, parse_rate

__all__ = [
    "Commands",
    "add_command",
    "add_executor",
    "add_output",
    "add_planner",
    "add_pricing",
    "add_ranks",
    "add_simulate",
    "bucket",
    "count",
    "fault",
    "grid",
    "json_target",
    "named",
    "nic",
    "preset",
    "profile_or_none",
    "seconds",
    "typed",
]

#: What ``add_subparsers`` returns: the commands of the command line.
Commands = Any
#: The smallest bucket that the command line takes, in bytes.
_LEAST_BUCKET = 4096


def add_command(commands: Commands, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """A command: its one-line ``summary`` (lower case, no full stop) and ``example`` (lines after the first indented by
    two blanks)."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=f"example:\n  {example}"
    )
    return parser


def typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except RelaymeterError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def nic(text: str) -> float | None:
    return None if text == "none" else float(typed(parse_rate)(text))


def grid(text: str) -> tuple[int, int]:
    from relaymeter.relayout.topology import parse_grid

    return parse_grid(text)


def named(text: str) -> Path:
    """A file or folder by its name."""
    if text in ("", "-"):
        hint = "; --json - prints the JSON on standard output" if text else ""
        raise argparse.ArgumentTypeError(f"{text!r} names no file or folder: give a name{hint}")
    return Path(text)


def json_target(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' names no file: give a name, or '-' for standard output")
    return text


def profile_or_none(text: str) -> Path | None:
    return None if text == "none" else named(text)


def fault(text: str) -> tuple[str, int]:
    kind, _, rank = text.partition(":")
    if kind not in ("flip", "kill", "stop") or not rank.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not flip:RANK, kill:RANK or stop:RANK")
    return kind, int(rank)


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        type=json_target,
        metavar="FILE|-",
        help=f"{what} ('-' for standard output; the table then goes to stderr)",
    )
    group.add_argument("--force", action="store_true", help="replace files that exist")


def add_ranks(parser: argparse.ArgumentParser, like: str, limit_s: int | str) -> None:
    """``like``: what says how many ranks there are by default, else 2 nodes of 2 ranks, unshaped; may be empty."""
    group = parser.add_argument_group(
        "ranks",
        "started on this machine: in a cluster in a box, or on loopback where the machine makes none (unshaped, nodes\n"
        "only declared). In a world that torchrun, deepspeed, srun or mpirun has made, that world is used.",
    )
    checked = "in a world that was joined only checked: their product is its size"
    group.add_argument("--nodes", type=count, metavar="N", help=f"nodes (default {like}2); {checked}")
    group.add_argument(
        "--ranks-per-node", type=count, metavar="N", help=f"ranks on each node (default {like}2); {checked}"
    )
    group.add_argument(
        "--nic",
        type=nic,
        default=argparse.SUPPRESS,
        metavar="RATE|none",
        help=f"rate of a NIC each way, such as 400mbit; none: unshaped (default {like}none)",
    )
    group.add_argument(
        "--nic-per",
        choices=("rank", "node"),
        help=f"one NIC for each rank, or one shared by a node's ranks (default {like}rank; "
        "in a world that was joined as the ranks see it)",
    )
    group.add_argument(
        "--time-limit", type=seconds, metavar="SECONDS", help=f"limit of the whole command (default {limit_s})"
    )


def add_simulate(parser: argparse._ActionsContainer, what: str) -> None:
    """``what`` the command does with a simulated cluster (lower case, no full stop)."""
    parser.add_argument(
        "--simulate",
        type=preset,
        metavar="PRESET|FILE.toml",
        help=f"{what}; presets are listed in docs/simulated.md",
    )


def preset(text: str) -> str:
    """A simulated cluster, by the name of a preset or of a file; which exist is asked when it is read."""
    return str(named(text))


def add_executor(
    parser: argparse.ArgumentParser, auto: str, *, both: bool = True, default: str | None = "auto"
) -> None:
    from relaymeter.harness.config import EXECUTOR_CHOICES

    choices = EXECUTOR_CHOICES if both else tuple(name for name in EXECUTOR_CHOICES if name != "both")
    side = "; both: one beside the other" if both else ""
    parser.add_argument(
        "--executor", choices=choices, default=default, help=f"exchange of a round (default auto: {auto}{side})"
    )


def add_planner(parser: argparse.ArgumentParser, default: str | None) -> None:
    from relaymeter.harness.config import PLANNER_CHOICES

    parser.add_argument(
        "--planner",
        choices=PLANNER_CHOICES,
        default=default,
        help="who plans: classes, this package's own (default), affine, DeepSpeed's plan_transfer, which falls back to "
        "classes where it cannot express a move, or both side by side",
    )


def bucket(text: str) -> int:
    """Bytes of a bucket; smaller ones than a page would make rounds without end."""
    size = parse_bytes(text)
    if size < _LEAST_BUCKET:
        raise InputError(f"{text!r} is too small for a bucket: give at least {_LEAST_BUCKET // 1024}KiB")
    return size


def add_pricing(parser: argparse.ArgumentParser, scenario: argparse._MutuallyExclusiveGroup | None = None) -> None:
    """``scenario``: the group of alternatives that ``--scenario`` is one of; None: it is required."""
    options: dict[str, Any] = {"metavar": "NAME|FILE.toml", "help": "shipped scenario or a file"}
    if scenario is None:
        parser.add_argument("--scenario", required=True, **options)
    else:
        scenario.add_argument("--scenario", **options)
    parser.add_argument(
        "--move",
        *(() if scenario is None else ("--change",)),
        dest="move",
        action="append",
        metavar="NAME",
        help=f"only this move {'' if scenario is None else 'or change '}of the scenario (may be repeated; default all)",
    )
    parser.add_argument(
        "--bucket-bytes",
        type=typed(bucket),
        metavar="SIZE",
        help="bytes of a bucket on one rank, such as 8MiB (default: a 24th of the most that a rank sends or receives "
        "in the move, in whole MiB, at least 8MiB and at most 256MiB)",
    )
