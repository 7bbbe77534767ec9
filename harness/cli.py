"""Command line: ``relaymeter calibrate | choose | plan | run``. Parses, hands over, turns errors into exit codes.

Importing this imports little, so that an interrupt is heard from the first moment; neither torch nor deepspeed is
imported until a command needs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from relaymeter import __version__
from relaymeter.errors import EXIT_OK, EXIT_USAGE, InputError, RelaymeterError
from relaymeter.units import parse_bytes, parse_rate

__all__ = ["build_parser", "main"]

#: The smallest bucket that the command line takes, in bytes.
_LEAST_BUCKET = 4096

_EXIT_CODES = """exit codes: 0 ok; 2 bad usage, config or input; 3 a gate missed; 4 cannot decide; 5 nothing measured;
6 wrong bits; 7 a rank was lost; 124 time limit; 130 interrupted; 1 a crash"""


class _Parser(argparse.ArgumentParser):
    """One line per error, exit code 2, abbreviations refused."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except RelaymeterError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _nic(text: str) -> float | None:
    return None if text == "none" else float(_typed(parse_rate)(text))


def _grid(text: str) -> tuple[int, int]:
    from relaymeter.relayout.topology import parse_grid

    return parse_grid(text)


def _named(text: str) -> Path:
    """A file or folder by its name."""
    if text in ("", "-"):
        hint = "; --json - prints the JSON on standard output" if text else ""
        raise argparse.ArgumentTypeError(f"{text!r} names no file or folder: give a name{hint}")
    return Path(text)


def _json_target(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' names no file: give a name, or '-' for standard output")
    return text


def _profile(text: str) -> Path | None:
    return None if text == "none" else _named(text)


def _fault(text: str) -> tuple[str, int]:
    kind, _, rank = text.partition(":")
    if kind not in ("flip", "kill", "stop") or not rank.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not flip:RANK, kill:RANK or stop:RANK")
    return kind, int(rank)


def _add_output(parser: argparse.ArgumentParser, what: str) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        type=_json_target,
        metavar="FILE|-",
        help=f"{what} ('-' for standard output; the table then goes to stderr)",
    )
    group.add_argument("--force", action="store_true", help="replace files that exist")


def _add_ranks(parser: argparse.ArgumentParser, like: str, limit_s: int) -> None:
    """``like``: what says how many ranks there are by default, else 2 nodes of 2 ranks, unshaped; may be empty."""
    group = parser.add_argument_group(
        "ranks",
        "started on this machine: in a cluster in a box, or on loopback where the machine makes none (unshaped, nodes\n"
        "only declared). In a world that torchrun, deepspeed, srun or mpirun has made, that world is used.",
    )
    checked = "in a world that was joined only checked: their product is its size"
    group.add_argument("--nodes", type=_count, metavar="N", help=f"nodes (default {like}2); {checked}")
    group.add_argument(
        "--ranks-per-node", type=_count, metavar="N", help=f"ranks on each node (default {like}2); {checked}"
    )
    group.add_argument(
        "--nic",
        type=_nic,
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
        "--time-limit", type=_seconds, metavar="SECONDS", help=f"limit of the whole command (default {limit_s})"
    )


def _add_executor(
    parser: argparse.ArgumentParser, auto: str, *, both: bool = True, default: str | None = "auto"
) -> None:
    from relaymeter.harness.config import EXECUTOR_CHOICES

    choices = EXECUTOR_CHOICES if both else tuple(name for name in EXECUTOR_CHOICES if name != "both")
    side = "; both: one beside the other" if both else ""
    parser.add_argument(
        "--executor", choices=choices, default=default, help=f"exchange of a round (default auto: {auto}{side})"
    )


def _add_planner(parser: argparse.ArgumentParser, default: str | None) -> None:
    from relaymeter.harness.config import PLANNER_CHOICES

    parser.add_argument(
        "--planner",
        choices=PLANNER_CHOICES,
        default=default,
        help="who plans: classes, this package's own (default), affine, DeepSpeed's plan_transfer, which falls back to "
        "classes where it cannot express a move, or both side by side",
    )


def _bucket(text: str) -> int:
    """Bytes of a bucket; smaller ones than a page would make rounds without end."""
    size = parse_bytes(text)
    if size < _LEAST_BUCKET:
        raise InputError(f"{text!r} is too small for a bucket: give at least {_LEAST_BUCKET // 1024}KiB")
    return size


def _add_pricing(parser: argparse.ArgumentParser, scenario: argparse._MutuallyExclusiveGroup | None = None) -> None:
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
        type=_typed(_bucket),
        metavar="SIZE",
        help="bytes of a bucket on one rank, such as 8MiB (default: a 24th of the most that a rank sends or receives "
        "in the move, in whole MiB, at least 8MiB and at most 256MiB)",
    )


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Its commands and options are frozen by a test."""
    parser = _Parser(
        prog="relaymeter",
        description="Measure a cluster, price the routes of a move of sharded model state, choose, move, prove it.",
        epilog="example: relaymeter plan --scenario qwen3-32b --topology 16x8\n\n" + _EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"relaymeter {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, summary: str, example: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=f"example:\n  {example}"
        )

    calibrate = add(
        "calibrate",
        "measure what this cluster's exchanges cost and write the profile",
        "relaymeter calibrate --nodes 2 --ranks-per-node 2 --nic 400mbit --out profile.json",
    )
    calibrate.add_argument("--out", required=True, type=_named, metavar="PROFILE", help="file to write the profile to")
    _add_executor(
        calibrate, "both, first and most the backend's own: send-recv on gloo, all-to-all on NCCL", both=False
    )
    calibrate.add_argument("--quick", action="store_true", help="fewer sizes and samples: faster, wider intervals")
    calibrate.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help="measuring time after which only what a price cannot do without is measured (default 60, with --quick 20)",
    )
    _add_ranks(calibrate, "", 600)
    _add_output(calibrate, "also write the profile as JSON here")
    calibrate.set_defaults(handler=("commands_ranks", "calibrate"))

    choose = add(
        "choose",
        "price direct, relay and spread with a profile; print thresholds and a route per block class",
        "relaymeter choose --profile profile.json --scenario demo",
    )
    choose.add_argument("--profile", required=True, type=_named, metavar="PROFILE", help="profile that calibrate wrote")
    _add_pricing(choose)
    _add_executor(choose, "the one that the profile measured first")
    choose.add_argument(
        "--allow-mismatch", action="store_true", help="use a profile of another machine (stamped on the output)"
    )
    _add_output(choose, "write the choice as JSON")
    choose.set_defaults(handler=("commands_offline", "choose"))

    plan = add(
        "plan",
        "plan and price on metadata alone: any number of ranks, no GPU, nothing started",
        "relaymeter plan --scenario qwen3-32b --topology 16x8 --profile profile.json\n"
        "  relaymeter plan --scenario transitions --topology 2x4 --planner both --out plan.json",
    )
    _add_pricing(plan)
    plan.add_argument(
        "--topology",
        required=True,
        type=_typed(_grid),
        metavar="NODESxRANKS",
        help="nodes and ranks per node, such as 16x8",
    )
    plan.add_argument(
        "--nic-per", choices=("rank", "node"), default="rank", help="NICs of the planned cluster (default rank)"
    )
    plan.add_argument("--profile", type=_named, metavar="PROFILE", help="price with this profile, of whatever machine")
    _add_planner(plan, "classes")
    _add_executor(plan, "the one that the profile measured first; without a profile send-recv")
    plan.add_argument(
        "--out",
        type=_named,
        metavar="FILE",
        help="write the plans themselves, with their routes: run --plan FILE runs them",
    )
    _add_output(plan, "write the plan as JSON")
    plan.set_defaults(handler=("commands_offline", "plan"))

    run = add(
        "run",
        "move real weights by every route, or whole training states between live engines, and check every bit",
        "relaymeter run --profile profile.json --scenario smoke --json rows.jsonl\n"
        "  relaymeter run --suite transitions --nic 400mbit\n"
        "  relaymeter run --suite state-matrix --change z3-4-2-4\n"
        "  relaymeter run --scenario dp4-dp2-dp4\n"
        "  relaymeter run --scenario offload\n"
        "  relaymeter run --plan plan.json\n"
        "  relaymeter run --scenario transitions --move tp4-tp2x2 --nodes 2 --ranks-per-node 4 --max-extra 2MiB",
    )
    what = run.add_argument_group("what moves (one of these)").add_mutually_exclusive_group(required=True)
    _add_pricing(run, what)
    what.add_argument(
        "--suite",
        metavar="NAME|FILE.toml",
        help="scenario with defaults of its own, in one table: transitions (weights by every route) or state-matrix "
        "(training states by every change of engine)",
    )
    what.add_argument(
        "--plan",
        type=_named,
        metavar="FILE",
        help="exactly what plan --out wrote: its scenario, planner, executor, routes and buckets",
    )
    run.add_argument(
        "--profile",
        type=_profile,
        metavar="PROFILE|none",
        help="profile that calibrate wrote; without one rows are measured and verified, but not priced, and no route "
        "is chosen",
    )
    _add_planner(run, None)
    _add_executor(run, "send-recv on gloo, all-to-all on NCCL", default=None)
    run.add_argument(
        "--max-extra",
        type=_typed(parse_bytes),
        metavar="SIZE",
        help="bounded memory, for moves from the old replicas within the same ranks: by prediction (storages and "
        "buffers counted) a rank holds at most SIZE more than the larger of its two layouts, and the old replica is "
        "given up as it is read",
    )
    run.add_argument(
        "--repeats",
        type=_count,
        metavar="N",
        help="timed repeats of a row (default 5, or the suite's); or rounds of a training state",
    )
    run.add_argument(
        "--move-limit", type=_seconds, default=60.0, metavar="SECONDS", help="limit of one move (default 60)"
    )
    run.add_argument(
        "--allow-mismatch", action="store_true", help="use a profile of another machine (stamped on every row)"
    )
    run.add_argument(
        "--plot", type=_named, metavar="FILE", help="write the plot of predicted and measured times (png, svg, pdf)"
    )
    run.add_argument(
        "--results", type=_named, metavar="DIR", help="also keep rows, profile and plot under DIR/<machine>/"
    )
    run.add_argument("--fault", type=_fault, help=argparse.SUPPRESS)
    _add_ranks(run, "as the profile, plan, suite or training state says, else ", 1800)
    _add_output(run, "write the rows as JSON Lines")
    run.set_defaults(handler=("commands_run", "run"))
    return parser


def _refuse_unknown_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    from relaymeter.harness.config import nearest

    first = next((text for text in arguments if not text.startswith("-")), None)
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if first is not None and actions and first not in actions[0].choices:
        parser.error(f"unknown command {first!r}: {nearest(first, actions[0].choices)}")


def _speaker() -> str:
    """Who speaks: nothing for one process or rank 0, the rank for the others of a world that was joined."""
    from relaymeter.harness.launch import already_in_world

    hint = already_in_world()
    return f"[rank {hint.rank}] " if hint is not None and hint.rank else ""


def _open_streams() -> None:
    """Open the null device on each standard stream that is closed, so that no file gets its number: what starts ranks
    hands these numbers on."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # a lower number was closed meanwhile
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Called in the parent, or on every rank under torchrun."""
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = build_parser()
        _refuse_unknown_command(parser, arguments)
        parsed = parser.parse_args(arguments)
        module, function = parsed.handler
        handler = getattr(importlib.import_module(f"relaymeter.harness.{module}"), function)
        return int(handler(parsed))
    except RelaymeterError as error:
        print(f"{_speaker()}relaymeter: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("relaymeter: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
