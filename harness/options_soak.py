"""Options of ``relaymeter soak``."""

from __future__ import annotations

import argparse

from relaymeter.harness.arguments import Commands, add_command, add_executor, add_output, add_ranks, seconds, typed
from relaymeter.units import parse_bytes

__all__ = ["add_soak"]

_DAMAGES = ("swap", "flip", "stale", "zeros", "kill", "stop")


def add_soak(commands: Commands) -> None:
    """Add the command to the command line."""
    soak = add_command(
        commands,
        "soak",
        "exchange messages that describe themselves for a time or a volume, and check every byte that arrives",
        "relaymeter soak --seconds 60\n  torchrun ... -m relaymeter soak --bytes 100TB --message 1GiB --json s.jsonl",
    )
    soak.add_argument(
        "--seconds", type=seconds, metavar="SECONDS", help="end after about so long (default 60, with --bytes no end)"
    )
    soak.add_argument(
        "--bytes",
        type=typed(parse_bytes),
        metavar="SIZE",
        help="end when all ranks together have sent so much, such as 10TB; with --seconds too, whichever comes first",
    )
    soak.add_argument(
        "--message",
        type=typed(parse_bytes),
        metavar="SIZE",
        help="largest message from one rank to another, up to 16GiB (default 256MiB with NCCL, else 4MiB); sent in one "
        "piece, also beyond the 256MiB at which moves cut theirs",
    )
    add_executor(soak, "send-recv on gloo, all-to-all on NCCL")
    soak.add_argument(
        "--fault",
        type=_damage,
        metavar="KIND:RANK",
        help="damage one message on purpose as RANK receives it, to see it found: swap (two blocks), flip (a bit), "
        "stale (a block of the call before), zeros (a block); or kill or stop that rank",
    )
    add_ranks(soak, "", "a week, or --seconds and 5 minutes")
    add_output(soak, "write summary, ranks and runs of wrong bytes as JSON Lines")
    soak.set_defaults(handler=("commands_soak", "soak"))


def _damage(text: str) -> tuple[str, int]:
    kind, _, rank = text.partition(":")
    if kind not in _DAMAGES or not rank.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_DAMAGES)} with :RANK")
    return kind, int(rank)
