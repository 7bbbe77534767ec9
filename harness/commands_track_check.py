"""``track check`` and ``track show``: verdicts upon launches, in every form that a CI reads, and the page of a history.

Neither torch nor a rank in this process: an A/B starts its launches as processes of their own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from relaymeter.errors import EXIT_OK, InputError, NothingMeasured
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import check_targets, write_all
from relaymeter.harness.launch import already_in_world
from relaymeter.harness.options_track import DEFAULT_HISTORY
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.verdicts import Check
from relaymeter.records import check_target, plain, write_text

__all__ = ["check", "show"]

#: Version of the JSON document of a check.
_CHECK_SCHEMA = 1
_SUMMARY = "GITHUB_STEP_SUMMARY"
#: Options that write a file, but for ``--json``.
_FILES = ("junit", "markdown", "action_benchmark", "hud", "otava")


def check(args: argparse.Namespace) -> int:
    """Compare, print, write. Returns the exit code: 6 wrong bits, 3 a regression, 5 no baseline, 4 not decided."""
    _check_outputs(args)
    out = emit.Output(args.json, force=args.force)
    if args.ab is None:
        found, before, after = _against_history(args)
    else:
        found, before, after = _ab(args)
    return _report(args, found, before, after, out)


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse before any work what would not be written after it. Raises InputError."""
    files = {name: getattr(args, name) for name in _FILES}
    named = args.suite if args.ab is not None else None
    check_targets(json=args.json, history=args.history, suite=named, **files)
    for target in filter(None, files.values()):
        check_target(target, force=args.force)
    if args.github and not os.environ.get(_SUMMARY):
        raise InputError(
            f"--github writes to the file that {_SUMMARY} names, which jobs of GitHub Actions have: set it"
        )
    if args.ab is None:
        for option, given in (("--launches", args.launches), ("--fault", args.fault)):
            if given is not None:
                raise InputError(f"{option} is about launches, which --against takes none of: leave it out")


def _against_history(args: argparse.Namespace) -> tuple[Check, list[LaunchRecord], list[LaunchRecord]]:
    """The newest launches of the history beside those of a revision, or beside all before."""
    from relaymeter.harness.track import history, judge

    launches, notes = history.read(args.history or DEFAULT_HISTORY)
    if args.suite is not None:
        name = Path(args.suite).stem if args.suite.endswith(".toml") else args.suite
        launches = [launch for launch in launches if launch.suite == name]
        if not launches:
            raise NothingMeasured(f"history {args.history or DEFAULT_HISTORY} has no launch of suite {name}")
    found = judge.check_history(launches, against=args.against, allow_mismatch=args.allow_mismatch)
    return _noted(found, notes), launches, _after(launches, found)


def _noted(found: Check, notes: Sequence[str]) -> Check:
    return replace(found, notes=(*found.notes, *notes)) if notes else found


def _after(launches: Sequence[LaunchRecord], found: Check) -> list[LaunchRecord]:
    """The launches that the side ``after`` of a check stands for."""

    def about(launch: LaunchRecord) -> tuple[object, ...]:
        return launch.commit, launch.dirty, launch.version, launch.suite, launch.machine_id, launch.config_hash

    return [one for one in launches if about(one) == about(launches[-1])][-found.after.launches :]


def _ab(args: argparse.Namespace) -> tuple[Check, list[LaunchRecord], list[LaunchRecord]]:
    """Launches of another build and of this one by turns, more of them where they do not decide yet."""
    from relaymeter.harness.track import history, judge
    from relaymeter.harness.track.ab import LaunchPairs, other_side, this_side
    from relaymeter.harness.track.launches import plan_launches
    from relaymeter.harness.track.suite import load_suite, suite_path

    hint = already_in_world()
    if hint is not None:
        raise InputError(
            f"--ab starts launches of its own, but this is a rank of a world of {hint.launcher}: run it outside, or "
            "run track run there and compare by --against"
        )
    named = args.suite or "ci"
    plan_launches(load_suite(named), emit.Output(None, force=False))  # what a launch would refuse
    sides = (other_side(args.ab), this_side())
    notes: list[str] = []
    if args.history is not None and args.history.exists():
        notes += history.read(args.history)[1]

    def keep(record: LaunchRecord) -> None:
        if args.history is not None:
            notes.extend(history.append(args.history, [record]))

    pairs = LaunchPairs(sides, suite_path(named), keep=keep, fault=args.fault)

    asked = args.launches or min(judge.LOOKS)
    while more := judge.next_launches(*pairs.launches, asked):
        pairs.take(len(pairs.launches[0]) + more)
    labels = (sides[0].label, sides[1].label)
    found = judge.check_ab(*pairs.launches, labels=labels, allow_mismatch=args.allow_mismatch)
    return _noted(found, tuple(dict.fromkeys(notes))), *pairs.launches


def _report(
    args: argparse.Namespace,
    found: Check,
    before: Sequence[LaunchRecord],
    after: Sequence[LaunchRecord],
    out: emit.Output,
) -> int:
    """The verdict first, then the table, then the files. Returns the exit code."""
    from relaymeter.harness.track import exports, github, markdown, terminal
    from relaymeter.harness.track.junit import junit

    for line in terminal.lines(found):
        out.say(line)
    for table in terminal.tables(found):
        out.table(table)

    def written(name: str, text: str) -> None:
        write_text(getattr(args, name), text, force=args.force)

    history = before if args.ab is None else [*before, *after]
    failed = write_all(
        args,
        {
            "junit": lambda: written("junit", junit(found)),
            "markdown": lambda: written("markdown", markdown.comment(found)),
            "action_benchmark": lambda: written("action_benchmark", exports.action_benchmark(found)),
            "hud": lambda: written("hud", exports.hud(found, after)),
            "otava": lambda: written("otava", exports.otava_csv(history)),
            "json": lambda: out.json(_document(found, args.warn_only)),
        },
    )
    if args.github:
        failed = _tell_github(github.step_summary(found), github.annotations(found)) or failed
    return found.exit_code(warn_only=args.warn_only) or failed or out.exit_code


def _tell_github(summary: str, annotations: Sequence[str]) -> int:
    """Add to the step's summary, and print the annotations where the runner looks for them."""
    for line in annotations:
        print(line, file=sys.stderr, flush=True)
    try:
        with open(os.environ[_SUMMARY], "a", encoding="utf-8") as stream:
            stream.write(summary)
    except OSError as error:
        print(f"relaymeter: --github: {os.environ[_SUMMARY]}: {error.strerror or error}", file=sys.stderr)
        return InputError.exit_code
    return EXIT_OK


def _document(found: Check, warn_only: bool) -> dict[str, Any]:
    """The check as JSON."""
    rows = [{field.name: plain(getattr(row, field.name)) for field in fields(row)} for row in found.worst_first()]
    sides = {
        name: None if side is None else {field.name: plain(getattr(side, field.name)) for field in fields(side)}
        for name, side in (("before", found.before), ("after", found.after))
    }
    return {
        "schema_version": _CHECK_SCHEMA,
        "command": "track check",
        "suite": found.suite,
        "kind": found.kind,
        **sides,
        "mismatch": list(found.mismatch),
        "notes": list(found.notes),
        "counts": dict(found.counts()),
        "exit_code": found.exit_code(warn_only=warn_only),
        "rows": rows,
    }


def show(args: argparse.Namespace) -> int:
    """Write the page of a history. Returns the exit code."""
    from relaymeter.harness.track import changes, history, page

    check_targets(out=args.out, check=args.history)
    check_target(args.out, force=args.force)
    launches, notes = history.read(args.history)
    if not launches:
        raise NothingMeasured(f"history {args.history} has no launch: relaymeter track run adds some")
    found = changes.change_points(launches)
    write_text(args.out, page.page(launches, found), force=args.force)
    for note in notes:
        print(f"note: {note}")
    print(f"page: {args.out} ({len(launches)} launches, {len(found)} change points)")
    return EXIT_OK
