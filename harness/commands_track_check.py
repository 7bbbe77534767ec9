"""``track check`` and ``track show``: verdicts upon launches, in every form that a CI reads, and the page of a history.

Neither torch nor a rank in this process: an A/B starts its launches as processes of their own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaymeter.errors import EXIT_OK, InputError, NothingMeasured
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import check_targets, write_all
from relaymeter.harness.commands_track_ab import Compared, compare_builds
from relaymeter.harness.options_track import DEFAULT_HISTORY
from relaymeter.harness.signals import INTERRUPTED, EndingSignal, held_signals
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.row_texts import visible
from relaymeter.harness.track.targets import check_history, check_summary
from relaymeter.harness.track.terminal import errors_shown
from relaymeter.harness.track.verdicts import Check
from relaymeter.records import check_target, plain, write_text
from relaymeter.units import counted

if TYPE_CHECKING:
    from relaymeter.harness.track.changes import CommitGroup

__all__ = ["check", "show"]

#: Version of the JSON document of a check.
_CHECK_SCHEMA = 1
_SUMMARY = "GITHUB_STEP_SUMMARY"
#: Options that write a file, but for ``--json``.
_FILES = ("junit", "markdown", "action_benchmark", "hud", "otava")


@errors_shown()
def check(args: argparse.Namespace) -> int:
    """Compare, print, write. Returns the exit code: 6 wrong bits, 3 a regression, 5 no baseline, 4 not decided; that of
    whatever ended the launches early, but for wrong bits."""
    _check_outputs(args)
    out = emit.Output(args.json, force=args.force)
    if args.ab is None:
        return _report(args, _against_history(args), out)
    compared = compare_builds(args)
    if compared.ended not in INTERRUPTED:
        return _report(args, compared, out)
    code = compared.ended
    with suppress(KeyboardInterrupt, EndingSignal), held_signals():  # a second signal costs no report
        code = _report(args, compared, out)
    return code


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse before any work what would not be written after it, and options of the other comparison. Raises
    InputError."""
    files = {name: getattr(args, name) for name in _FILES}
    summary = os.environ.get(_SUMMARY) if args.github else None
    history = args.history or DEFAULT_HISTORY  # the default one too must not be replaced
    check_targets(json=args.json, history=history, suite=args.suite, github=summary, **files)
    for target in filter(None, files.values()):
        check_target(target, force=args.force)
    if args.github and not os.environ.get(_SUMMARY):
        raise InputError(
            f"--github writes to the file that {_SUMMARY} names, which jobs of GitHub Actions have: set it"
        )
    if summary:
        check_summary(summary)
    if args.ab is not None and args.history is not None:
        check_history(args.history)
    of_launches = {"--launches": args.launches, "--time-limit": args.time_limit, "--fault": args.fault}
    of_history = {"--commit": args.commit, "--window": args.window}
    for option, given in (of_launches if args.ab is None else of_history).items():
        if given is not None and args.ab is None:
            raise InputError(f"{option} is about launches, which --against takes none of: leave it out")
        if given is not None:
            raise InputError(f"{option} is about a history, which --ab does not judge: leave it out")
    if args.window is not None and args.against != "history":
        raise InputError("--window is about the commits before: it takes --against history")


def _against_history(args: argparse.Namespace) -> Compared:
    """A commit of the history beside another, or beside all before. The commit is chosen first, whatever suites and
    cases it has: what it lacks of those that were asked for is undecided."""
    from relaymeter.harness.track import history, judge
    from relaymeter.harness.track.asked import Asked
    from relaymeter.harness.track.builds import named
    from relaymeter.harness.track.changes import commit_key

    path = args.history or DEFAULT_HISTORY
    whole, notes = history.read(path)
    if not whole:
        raise NothingMeasured(f"history {path} has no launch: relaymeter track run adds some")
    asked = Asked(None if args.suite is None else _suite_name(args.suite), tuple(dict.fromkeys(args.case or ())))
    asked.refuse_unknown(whole, str(path))
    commit, said = _commit(args.commit, whole)
    group = _judged_group(commit, whole)
    asked.refuse_missing(whole, group)
    against = args.against if args.against == "history" else _resolved(args.against, whole)
    base = None if against == "history" else named(against, whole)
    launches = asked.launches(whole, base)
    if commit is None and commit_key(launches[-1]) != commit_key(group.launches[0]):
        commit = _name_of(group)
    found = judge.check_history(
        launches,
        against=against,
        commit=commit,
        allow_mismatch=args.allow_mismatch,
        window=args.window or 1,
        exact_only=args.exact_only,
    )
    found = asked.told(found, whole, group)
    lacking = [] if base is None else asked.missing_in(whole, base).values()
    found = replace(found, notes=(*said, *lacking, *found.notes, *notes))
    return Compared(found, launches, _judged_ones(launches, commit, found))


def _judged_group(commit: str | None, whole: Sequence[LaunchRecord]) -> CommitGroup:
    """The commit of that name; None: that of the last launch. Raises InputError where the history has none."""
    from relaymeter.harness.track.builds import held_text, named, newest_build

    group = newest_build(whole) if commit is None else named(commit, whole)
    if group is None:
        raise InputError(f"the history holds no launch of {commit}: {held_text(whole)}")
    return group


def _name_of(group: CommitGroup) -> str:
    """The name by which a history finds this commit."""
    return group.label if group.commit is None else group.commit + ("-dirty" if group.dirty else "")


def _suite_name(text: str) -> str:
    """The name under which a history has the suite ``text``: that which the file gives itself, where there is one."""
    from relaymeter.harness.track.suite import load_suite

    if text.endswith(".toml") or "/" in text:
        return load_suite(text).name if Path(text).exists() else Path(text).stem
    return text


def _commit(asked: str | None, whole: Sequence[LaunchRecord]) -> tuple[str | None, list[str]]:
    """The commit to judge and what to say of it: what was asked for, else this checkout's where the history holds it,
    else None: that of the last launch."""
    from relaymeter import __version__
    from relaymeter.harness.track.changes import commit_key, short_name
    from relaymeter.harness.track.launches import checkout

    if asked is not None:
        return _resolved(asked, whole), []
    here = checkout()
    key = (here.commit, here.dirty, "" if here.commit else __version__)
    own = short_name(here.commit, here.dirty, __version__)
    last = short_name(whole[-1].commit, whole[-1].dirty, whole[-1].version)
    if key not in {commit_key(launch) for launch in whole}:
        whose = "this checkout's" if here.commit else "the one that runs here"
        return None, [
            f"{last} is judged, which is that of the last launch: the history holds no launch of {own}, {whose} "
            "(--commit names another)"
        ]
    said = []
    if commit_key(whole[-1]) != key:
        said = [f"{own} is judged, which is this checkout's; the last launch is of {last} (--commit names another)"]
    return (own if here.commit is None else here.commit + ("-dirty" if here.dirty else "")), said


def _resolved(text: str, launches: Sequence[LaunchRecord]) -> str:
    """``text`` where the history knows it, else the revision that git means by it."""
    from relaymeter.harness.track.builds import named_commits
    from relaymeter.harness.track.launches import revision

    if named_commits(text, launches):
        return text
    found = revision(text.removesuffix("-dirty"))
    return text if found is None else found + ("-dirty" if text.endswith("-dirty") else "")


def _judged_ones(launches: Sequence[LaunchRecord], commit: str | None, found: Check) -> list[LaunchRecord]:
    """The launches that the judged side of a check stands for: of the judged build those of its setting."""
    from relaymeter.harness.track.builds import named, newest_build

    build = newest_build(launches) if commit is None else named(commit, launches)
    side = found.after
    setting = (found.suite, side.machine_id, side.config_hash)
    return [one for one in build.launches if (one.suite, one.machine_id, one.config_hash) == setting] if build else []


def _report(args: argparse.Namespace, compared: Compared, out: emit.Output) -> int:
    """The verdict first, then the table, then the files. Returns the exit code."""
    from relaymeter.harness.track import exports, github, markdown, terminal
    from relaymeter.harness.track.junit import junit

    found = compared.check
    code = compared.exit_code(found.exit_code(warn_only=args.warn_only, undecided_ok=args.undecided_ok))
    strict = compared.exit_code(found.exit_code(warn_only=False))
    if strict != code:
        asked = " ".join(
            name for name in ("--warn-only", "--undecided-ok") if getattr(args, name[2:].replace("-", "_"))
        )
        found = replace(found, notes=(f"exit code {code} in place of {strict}: {asked}", *found.notes))
    for line in terminal.lines(found):
        out.say(line)
    for table in terminal.tables(found):
        out.table(table)

    def written(name: str, text: str) -> None:
        write_text(getattr(args, name), text, force=args.force)

    judged = compared.after[-1] if compared.after else None
    # why: what was not judged, of short launches, is no point of a series
    told = exports.untimed if args.exact_only else list
    failed = write_all(
        args,
        {
            "junit": lambda: written("junit", junit(found)),
            "markdown": lambda: written("markdown", markdown.comment(found)),
            "action_benchmark": lambda: written("action_benchmark", exports.action_benchmark(found)),
            "hud": lambda: written("hud", exports.hud(found, told(compared.after))),
            "otava": lambda: written("otava", exports.otava_csv(told(compared.launches), judged, found.mismatch)),
            "json": lambda: out.json(_document(found, code)),
        },
    )
    if args.github:
        for line in github.annotations(found):
            print(line, file=sys.stderr, flush=True)
        failed = _add_summary(lambda held: github.step_summary(found, held=held)) or failed
    return code or failed or out.exit_code


def _add_summary(summary_beside: Callable[[int], str]) -> int:
    """Add to the step's summary what fits beside the bytes that it holds already."""
    try:
        with open(os.environ[_SUMMARY], "a", encoding="utf-8") as stream:
            held = os.fstat(stream.fileno()).st_size
            summary = summary_beside(held)
            if not summary:
                text = f"it holds {held} bytes already, and GitHub drops one of more than 1 MiB: nothing was added"
                print(f"relaymeter: --github: {visible(os.environ[_SUMMARY])}: {text}", file=sys.stderr)
                return InputError.exit_code
            stream.write(summary)
    except OSError as error:
        print(f"relaymeter: --github: {visible(os.environ[_SUMMARY])}: {error.strerror or error}", file=sys.stderr)
        return InputError.exit_code
    return EXIT_OK


def _document(found: Check, code: int) -> dict[str, Any]:
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
        "exit_code": code,
        "rows": rows,
    }


@errors_shown()
def show(args: argparse.Namespace) -> int:
    """Write the page of a history. Returns the exit code."""
    from relaymeter.harness.track import changes, history, page

    path = args.history or DEFAULT_HISTORY
    check_targets(out=args.out, history=path)
    check_target(args.out, force=args.force)
    launches, notes = history.read(path)
    if not launches:
        raise NothingMeasured(f"history {path} has no launch: relaymeter track run adds some")
    found = changes.change_points(launches)
    write_text(args.out, page.page(launches, found), force=args.force)
    for note in notes:
        print(f"note: {visible(note)}")
    places = len({(change.case, change.index) for change in found})
    print(f"page: {visible(str(args.out))} ({len(launches)} launches, {counted(places, 'change')} of a case's times)")
    return EXIT_OK
