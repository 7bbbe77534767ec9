"""Options of ``relaymeter compare``."""

from __future__ import annotations

import argparse

from relaymeter.compare_records import PATHS
from relaymeter.harness.arguments import Commands, add_command, add_output, add_ranks, count, fault, named

__all__ = ["add_compare", "storage"]


def _paths(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in PATHS:
            raise argparse.ArgumentTypeError(f"{name!r} is no path: give some of {', '.join(PATHS)}, with commas")
    return names


def storage(text: str) -> tuple[str, str]:
    """``NAME=DIR`` of ``--storage``. Raises ArgumentTypeError."""
    name, equals, folder = text.partition("=")
    if not name or not equals or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR, such as disk=/var/tmp")
    return name, folder


def add_compare(commands: Commands) -> None:
    """Add the command to the command line."""
    compare = add_command(
        commands,
        "compare",
        "make the same change of the same state in memory, by gathering and through checkpoints, and table the times",
        "relaymeter compare --scenario rfc-small --storage disk=/var/tmp --storage tmpfs=/dev/shm --results results",
    )
    compare.add_argument(
        "--scenario",
        default="rfc-small",
        metavar="NAME|FILE",
        help="scenario of kind compare: a shipped one or a TOML file (default rfc-small)",
    )
    compare.add_argument(
        "--change", action="append", metavar="NAME", help="only this change of the scenario; may be given again"
    )
    compare.add_argument(
        "--paths",
        type=_paths,
        default=PATHS,
        metavar="PATH,...",
        help=f"paths to take, of {', '.join(PATHS)} (default all)",
    )
    compare.add_argument(
        "--storage",
        type=storage,
        action="append",
        metavar="NAME=DIR",
        help="where checkpoints are written; may be given again (default disk=<the temporary folder> and "
        "tmpfs=/dev/shm, as far as they are that)",
    )
    compare.add_argument(
        "--profile",
        type=named,
        metavar="PROFILE",
        help="also price every row with this profile, made here by calibrate --paths, and say how far off that is",
    )
    compare.add_argument(
        "--launches", type=count, default=1, metavar="N", help="independent launches of every change (default 1)"
    )
    compare.add_argument(
        "--journal",
        type=named,
        metavar="FILE",
        help="keep the rows of every finished change in FILE, and leave out what it holds already: after an "
        "interruption the same command goes on",
    )
    compare.add_argument(
        "--work",
        type=named,
        metavar="DIR",
        help="in a world that torchrun or another launcher has made: an empty folder that all nodes reach; the command "
        "runs twice, with one --change, and the second time loads in new processes what the first saved there",
    )
    compare.add_argument(
        "--results", type=named, metavar="DIR", help="also keep rows and how they were made under DIR/<machine>/"
    )
    compare.add_argument("--fault", type=fault, help=argparse.SUPPRESS)
    add_ranks(compare, "one node with the ranks of the scenario, else ", 1800)
    add_output(compare, "write the rows as JSON Lines")
    compare.set_defaults(handler=("commands_compare", "compare"))
