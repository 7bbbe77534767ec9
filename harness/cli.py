"""Command line: ``relaymeter COMMAND ...``, one ``options_*`` module a command. Parses, hands over, makes exit codes.

Importing this imports little, so that an interrupt is heard from the first moment; neither torch nor deepspeed is
imported until a command needs it.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from relaymeter import __version__
from relaymeter.errors import EXIT_OK, EXIT_USAGE, RelaymeterError
from relaymeter.harness.options_calibrate import add_calibrate
from relaymeter.harness.options_choose import add_choose
from relaymeter.harness.options_compare import add_compare
from relaymeter.harness.options_doctor import add_doctor
from relaymeter.harness.options_plan import add_plan
from relaymeter.harness.options_report import add_report
from relaymeter.harness.options_run import add_run
from relaymeter.harness.options_soak import add_soak
from relaymeter.harness.options_track import add_track
from relaymeter.harness.options_validate import add_validate
from relaymeter.harness.signals import EndingSignal, ending_signals, exit_code

__all__ = ["build_parser", "main"]

#: The commands, in the order of ``--help``.
_COMMANDS = (
    *(add_calibrate, add_choose, add_compare, add_doctor, add_plan),
    *(add_report, add_run, add_soak, add_track, add_validate),
)
_EXIT_CODES = """exit codes: 0 ok; 2 bad usage, config or input; 3 a gate missed; 4 cannot decide; 5 nothing measured;
6 wrong bits; 7 a rank was lost; 124 time limit; 130 interrupted; 1 a crash"""


class _Parser(argparse.ArgumentParser):
    """One line per error, exit code 2, abbreviations refused."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Options that a command does not know are its own error, so that it names its own help."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += ", which does not begin with '-'"
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Its commands and options are frozen by a test."""
    parser = _Parser(
        prog="relaymeter",
        description="Measure a cluster, price the routes of a move of sharded model state, choose, move, prove it.",
        epilog="example: relaymeter plan --scenario qwen3-32b --topology 16x8\n\n" + _EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"relaymeter {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for add in _COMMANDS:
        add(commands)
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

    try:
        hint = already_in_world()
    except RelaymeterError:  # which may be what is said
        return ""
    return f"[rank {hint.rank}] " if hint is not None and hint.rank else ""


def _joins_a_world() -> bool:
    """Whether this process is a rank that a launcher has started. Its SIGTERM has to end it at once, whatever call it
    waits in, so the signal stays as it is."""
    from relaymeter.harness.launch import already_in_world

    try:
        return already_in_world() is not None
    except RelaymeterError:  # said by the commands that need ranks
        return False


def _open_streams() -> None:
    """Open the null device on each standard stream that is closed, so that no file gets its number: what starts ranks
    hands these numbers on. Text that a stream's encoding does not have is printed as its escapes."""
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _without_local_rank(arguments: list[str]) -> list[str]:
    """Without the ``--local_rank=N`` that DeepSpeed's launcher puts before a rank's own; LOCAL_RANK says it too."""
    told = bool(arguments) and re.fullmatch(r"--local[-_]rank=\d+", arguments[0]) is not None
    return arguments[1:] if told and "RANK" in os.environ else arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Called in the parent, or on every rank under torchrun."""
    _open_streams()
    arguments = _without_local_rank(list(sys.argv[1:] if argv is None else argv))
    try:
        parser = build_parser()
        _refuse_unknown_command(parser, arguments)
        parsed = parser.parse_args(arguments)
        module, function = parsed.handler
        with nullcontext() if _joins_a_world() else ending_signals():
            handler = getattr(importlib.import_module(f"relaymeter.harness.{module}"), function)
            return int(handler(parsed))
    except RelaymeterError as error:
        print(f"{_speaker()}relaymeter: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, EndingSignal) as stop:
        print("relaymeter: interrupted", file=sys.stderr)
        return exit_code(stop)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
