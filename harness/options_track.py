"""Options of ``relaymeter track`` and its own commands: ``run``, ``check`` and ``show``."""

from __future__ import annotations

import argparse
from pathlib import Path

from relaymeter.harness.arguments import Commands, add_command, add_output, count, named, seconds

__all__ = ["DEFAULT_HISTORY", "add_track"]

#: Where launches are kept, unless told otherwise: in the folder of the command.
DEFAULT_HISTORY = Path(".relaymeter/track.jsonl")


def add_track(commands: Commands) -> None:
    """Add the command to the command line."""
    track = add_command(
        commands,
        "track",
        "measure a suite of moves over the commits of a project, and say what a change made slower, larger or wrong",
        "relaymeter track run --suite ci\n"
        "  relaymeter track check --against history\n"
        "  relaymeter track check --ab ../base --github\n"
        "  relaymeter track show --history .relaymeter/track.jsonl --out track.html",
    )
    actions = track.add_subparsers(dest="action", metavar="run|check|show", required=True)
    _add_run(actions)
    _add_check(actions)
    _add_show(actions)


def _add_run(actions: Commands) -> None:
    run = add_command(
        actions,
        "run",
        "launch the suite, each time in fresh processes, and add what they measured to the history",
        "relaymeter track run --suite ci --launches 8",
    )
    _add_suite(run)
    run.add_argument(
        "--launches",
        type=count,
        metavar="N",
        help="independent launches (default 5; in a world that torchrun or the like has made: 1)",
    )
    run.add_argument(
        "--case",
        type=_text,
        action="append",
        metavar="NAME",
        help="only this case of the suite (may be repeated; default all)",
    )
    _add_history(run, f"file to add the launches to, made where it is missing (default {DEFAULT_HISTORY})")
    run.add_argument("--time-limit", type=seconds, metavar="SECONDS", help="limit of the whole command (default 600)")
    run.add_argument("--fault", type=_fault, help=argparse.SUPPRESS)
    add_output(run, "write the launches as JSON Lines")
    run.set_defaults(handler=("commands_track", "run"))


def _add_check(actions: Commands) -> None:
    check = add_command(
        actions,
        "check",
        "compare: exact metrics by equality, times by medians of independent launches",
        "relaymeter track check --against history\n"
        "  relaymeter track check --ab ../base --suite ci --junit track.xml --github",
    )
    which = check.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--against",
        type=_text,
        metavar="REVISION|history",
        help="compare a commit of the history with this revision (any that git knows, or a prefix; outside a "
        "checkout a version), or with all before",
    )
    which.add_argument(
        "--ab",
        type=_text,
        metavar="FOLDER|PYTHON",
        help="launch another checkout, or a python with another version installed, and this one by turns, and compare",
    )
    _add_suite(check)
    check.add_argument(
        "--launches",
        type=count,
        metavar="N",
        help="with --ab: launches of each side (default 5; from 5 on more, up to 12, where those do not decide; 1: "
        "only exact metrics are judged)",
    )
    check.add_argument(
        "--commit",
        type=_text,
        metavar="REVISION",
        help="with --against: the commit to judge (default that of this checkout where the history holds it, else that "
        "of the last launch)",
    )
    check.add_argument(
        "--window",
        type=count,
        metavar="N",
        help="with --against history: fail while a change began at one of the N newest commits (default 1, the judged "
        "one; older changes are notes)",
    )
    check.add_argument(
        "--case",
        type=_text,
        action="append",
        metavar="NAME",
        help="only this case of the suite (may be repeated; default all)",
    )
    check.add_argument(
        "--exact-only",
        action="store_true",
        help="bytes, messages, segments, rounds and digests alone, no times; with --ab one short launch a side will do",
    )
    _add_history(check, f"the history (default {DEFAULT_HISTORY}); with --ab: also add the launches to it")
    check.add_argument(
        "--allow-mismatch",
        action="store_true",
        help="compare launches of another machine, suite or start of the ranks too (stamped on every output)",
    )
    check.add_argument("--warn-only", action="store_true", help="exit code 0 also where something got slower or larger")
    check.add_argument(
        "--undecided-ok", action="store_true", help="exit code 0 also where times could not be decided (still shown)"
    )
    check.add_argument(
        "--time-limit",
        type=seconds,
        metavar="SECONDS",
        help="with --ab: limit of all launches together; what was measured until then is judged (default none)",
    )
    check.add_argument("--fault", help=argparse.SUPPRESS)
    group = check.add_argument_group("reports")
    group.add_argument("--junit", type=named, metavar="FILE", help="write JUnit XML")
    group.add_argument(
        "--github",
        action="store_true",
        help="in a job of GitHub Actions: add the table to the step's summary, and print annotations",
    )
    group.add_argument("--markdown", type=named, metavar="FILE", help="write a Markdown comment")
    group.add_argument(
        "--action-benchmark", type=named, metavar="FILE", help="write JSON for github-action-benchmark (customSmaller)"
    )
    group.add_argument(
        "--hud", type=named, metavar="FILE", help="write JSON of PyTorch's benchmark database, version 3"
    )
    group.add_argument("--otava", type=named, metavar="FILE", help="write CSV that Apache Otava reads")
    add_output(check, "write the rows as JSON")
    check.set_defaults(handler=("commands_track_check", "check"))


def _add_show(actions: Commands) -> None:
    show = add_command(
        actions,
        "show",
        "draw the history as one HTML page that needs no network",
        "relaymeter track show --out track.html",
    )
    _add_history(show, f"the history (default {DEFAULT_HISTORY})")
    show.add_argument("--out", type=named, required=True, metavar="FILE.html", help="page to write")
    show.add_argument("--force", action="store_true", help="replace the page where it exists")
    show.set_defaults(handler=("commands_track_check", "show"))


def _add_suite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite",
        type=_text,
        metavar="NAME|FILE.toml",
        help="shipped suite or a file (default ci; of check --against: the judged commit's with the longest history)",
    )


def _add_history(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--history", type=named, metavar="FILE", help=what)


def _text(text: str) -> str:
    """An empty one is a variable that a script has not set."""
    if not text:
        raise argparse.ArgumentTypeError("'' names nothing: give a name, or leave the option out")
    return text


def _fault(text: str) -> tuple[str, float]:
    kind, _, share = text.partition("=")
    if text == "flip":
        return kind, 0.0
    try:
        if kind == "slow" and 0 < float(share) <= 100:
            return kind, float(share)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not slow=SHARE or flip")
