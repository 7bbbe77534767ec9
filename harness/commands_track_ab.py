"""``track check --ab``: launches of two builds by turns, for as long as they do not decide, and what came of them.

``compare_builds(args)`` gives a ``Compared``. Whatever ends the launches early (the time limit, a launch that failed,
Ctrl-C, SIGTERM), what was measured of both sides until then is judged and reported.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from relaymeter.errors import EXIT_GATE_MISSED, EXIT_OK, EXIT_TIME_LIMIT, EXIT_WRONG_BITS, InputError
from relaymeter.harness import emit
from relaymeter.harness.launch import already_in_world
from relaymeter.harness.signals import EndingSignal, exit_code
from relaymeter.harness.track.ab import LaunchFailed, LaunchPairs, OutOfTime
from relaymeter.harness.track.ab_sides import other_side, refuse_other_suite, same_code, this_side, versions_differ
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.row_texts import visible
from relaymeter.harness.track.terminal import shown
from relaymeter.harness.track.verdicts import Check
from relaymeter.harness.track.wrong_base import right_ones, told

__all__ = ["Compared", "compare_builds", "take_pairs"]

#: Names of times that are still undecided, told while launches go on.
_MOST_NAMES = 3


@dataclass(frozen=True)
class Compared:
    """A check and the launches behind it."""

    check: Check
    launches: Sequence[LaunchRecord]
    """Of both sides, or of the whole history."""
    after: Sequence[LaunchRecord]
    """Of the side that is judged."""
    ended: int = EXIT_OK
    """Exit code of what ended the launches before as many as were asked for were taken."""

    def exit_code(self, judged: int) -> int:
        """That of the command, where the check's own is ``judged``. Whatever ended the launches gives way to wrong
        bits, the time limit also to a regression."""
        stronger = {EXIT_WRONG_BITS} | ({EXIT_GATE_MISSED} if self.ended == EXIT_TIME_LIMIT else set())
        if self.ended == EXIT_OK or judged in stronger:
            return judged
        return self.ended


def compare_builds(args: argparse.Namespace) -> Compared:
    """Launch the build that ``--ab`` names and this one, and judge. Raises InputError, Undecided, and whatever ended
    the launches where one side has none."""
    from relaymeter.harness.track import history, judge
    from relaymeter.harness.track.launches import plan_launches
    from relaymeter.harness.track.suite import config_hash, exact_toml, load_suite, select_cases, suite_path

    hint = already_in_world()
    if hint is not None:
        raise InputError(
            f"--ab starts launches of its own, but this is a rank of a world of {hint.launcher}: run it outside, or "
            "run track run there and compare by --against"
        )
    named = "ci" if args.suite is None else args.suite
    suite = load_suite(named)
    plan_launches(select_cases(suite, args.case), emit.Output(None, force=False))  # what a launch would refuse
    sides = (other_side(args.ab), this_side())
    notes: list[str] = []
    if args.history is not None and args.history.exists():
        notes += history.read(args.history)[1]

    def keep(record: LaunchRecord) -> None:
        if args.history is not None:
            notes.extend(history.append(args.history, [record]))

    asked = args.launches or (1 if args.exact_only else min(judge.LOOKS))
    exact_only = args.exact_only or asked == 1
    with tempfile.TemporaryDirectory(prefix="relaymeter-suite-") as folder:
        file = suite_path(named)
        if args.exact_only:
            file = Path(folder) / "suite.toml"
            file.write_text(exact_toml(suite), encoding="utf-8")
        own_hash = config_hash(select_cases(load_suite(str(file)), args.case), {})
        refuse_other_suite(sides[0], file, args.case or (), own_hash, allowed=args.allow_mismatch)
        pairs = LaunchPairs(
            sides, file, keep=keep, cases=args.case or (), time_limit_s=args.time_limit, fault=args.fault
        )
        ended, said = take_pairs(pairs, asked, exact_only=exact_only, kept_in=args.history)
    before, after = pairs.launches
    found = judge.check_ab(
        right_ones(before),
        after,
        labels=(sides[0].label, sides[1].label),
        allow_mismatch=args.allow_mismatch,
        one_machine=True,
        exact_only=exact_only,
    )
    found = told(found, before)
    same = same_code(*sides) if args.fault is None else None
    notes = [*said, *([same] if same else []), *versions_differ(*sides), *found.notes, *dict.fromkeys(notes)]
    return Compared(replace(found, notes=tuple(notes)), [*before, *after], after, ended)


def take_pairs(
    pairs: LaunchPairs, asked: int, *, exact_only: bool, kept_in: Path | None = None
) -> tuple[int, list[str]]:
    """Launch both sides ``asked`` times, then on where that does not decide. Returns the exit code of what ended it
    before ``asked`` (0: nothing did) and what to say of that. Raises it where one side has no launch. ``kept_in``: the
    history that has every launch, for people."""
    from relaymeter.harness.track import judge

    try:
        while more := judge.next_launches(
            right_ones(pairs.launches[0]), pairs.launches[1], asked, exact_only=exact_only
        ):
            taken = min(map(len, pairs.launches))
            if taken >= asked:
                _tell_why(pairs, taken, more)
            pairs.take(taken + more)
        return EXIT_OK, []
    except (LaunchFailed, OutOfTime, KeyboardInterrupt, EndingSignal) as stop:
        before, after = map(len, pairs.launches)
        kept = f"{before} launches before and {after} after were measured"
        kept += f", kept in {visible(str(kept_in))}" if kept_in else ""
        if isinstance(stop, KeyboardInterrupt | EndingSignal):
            code = exit_code(stop)
            what = f"interrupted by {signal.Signals(code - 128).name}"
            print(f"relaymeter: {what}: {kept}", file=sys.stderr, flush=True)
        else:
            code, what = stop.exit_code, str(stop).partition("\n")[0].removesuffix(":")
            if code == EXIT_TIME_LIMIT and pairs.limit_s is not None:
                what = f"the time limit of {pairs.limit_s:g} s; a larger --time-limit takes the rest"
            if before and after:
                print(f"relaymeter: {shown(str(stop))}", file=sys.stderr, flush=True)
        if not (before and after):
            raise
        if code == EXIT_TIME_LIMIT and min(before, after) >= asked:
            return EXIT_OK, [f"the time limit ended it after {before} and {after} launches"]
        return code, [f"ended early ({what}): judged by {before} and {after} launches of {asked} a side"]


def _tell_why(pairs: LaunchPairs, taken: int, more: int) -> None:
    """Why more launches are taken than were asked for."""
    from relaymeter.harness.track import judge

    found = judge.unsettled(right_ones(pairs.launches[0]), pairs.launches[1])
    names = [f"{visible(case)} {metric}" for case, metric in found]
    some = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")
    print(
        f"{taken} launches a side leave {some} undecided: {more} more a side, {max(judge.LOOKS)} at most",
        file=sys.stderr,
        flush=True,
    )
