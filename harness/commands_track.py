"""``track run``: launch a suite some times, each in fresh processes, and add every launch to the history.

A launch is added as soon as it has ended, so that what was measured stays whatever ends the command.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from relaymeter.errors import EXIT_OK, EXIT_TIME_LIMIT, EXIT_WRONG_BITS, InputError
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import check_targets
from relaymeter.harness.jobs import TrackFault
from relaymeter.harness.options_track import DEFAULT_HISTORY
from relaymeter.harness.signals import EndingSignal, exit_code
from relaymeter.harness.track.changes import short_name
from relaymeter.harness.track.launches import LaunchPlan, plan_launches
from relaymeter.harness.track.records import CaseRecord, LaunchRecord
from relaymeter.harness.track.row_texts import visible
from relaymeter.harness.track.suite import load_suite, select_cases
from relaymeter.harness.track.terminal import errors_shown
from relaymeter.records import dump_json

__all__ = ["run"]

Keep = Callable[[LaunchRecord], None]

_TIMES = ("move", "pack", "communicate", "unpack", "plan")
_LAUNCHES = 5
_LIMIT_S = 600.0


@errors_shown()
def run(args: argparse.Namespace) -> int:
    """Launch, keep, and show what was measured. Returns the exit code: 6 where bytes were wrong, whatever ended it."""
    from relaymeter.harness.track import history

    named = args.suite or "ci"
    target = args.history or DEFAULT_HISTORY
    check_targets(json=args.json, suite=named, history=target)
    suite = select_cases(load_suite(named), args.case)
    out = emit.Output(args.json, force=args.force)
    fault = None if args.fault is None else TrackFault(kind=args.fault[0], share=args.fault[1])
    plan = plan_launches(suite, out, fault=fault)
    if plan.hint is not None and (args.launches or 1) > 1:
        raise InputError(
            f"--launches {args.launches}: a world of {plan.hint.launcher} is one launch: start it as often, or leave "
            "--launches out"
        )
    launches = args.launches or (1 if plan.hint else _LAUNCHES)
    if plan.hint is None or plan.hint.rank == 0:
        _check_history(target)
    taken: list[LaunchRecord] = []
    notes: list[str] = []

    def keep(record: LaunchRecord) -> None:
        notes.extend(history.append(target, [record]))
        taken.append(record)

    try:
        code = _measure(plan, launches, args.time_limit or _LIMIT_S, keep)
    except (KeyboardInterrupt, EndingSignal) as stop:
        what = signal.Signals(exit_code(stop) - 128).name
        kept = f"{len(taken)} of {launches} launches were measured, they are in {visible(str(target))}"
        print(f"{what}: {kept}", file=sys.stderr)
        if plan.hint is not None or not taken:
            raise
        code = exit_code(stop)
    if plan.hint is not None and plan.hint.rank:
        return code
    for note in dict.fromkeys(notes):
        out.say(f"note: {visible(note)}")
    return _report(plan, taken, launches, target, code, out)


def _check_history(path: Path) -> None:
    """Refuse before any work what could not be appended to. Raises InputError, Undecided."""
    from relaymeter.harness.track import history, targets

    targets.check_history(path)
    if path.exists():
        history.read(path)


def _measure(plan: LaunchPlan, launches: int, limit_s: float, keep: Keep) -> int:
    """Every launch, one after the other, until one fails. Returns its exit code."""
    began = time.monotonic()
    for number in range(1, launches + 1):
        left_s = limit_s - (time.monotonic() - began)
        if left_s <= 0:
            print(f"time limit: {number - 1} of {launches} launches were measured", file=sys.stderr, flush=True)
            return EXIT_TIME_LIMIT
        code, record = plan.measure(number, left_s)
        if record is not None:
            keep(record)
        if code != EXIT_OK:
            return code
        if plan.hint is None:
            spent = time.monotonic() - began
            left = spent / number * (launches - number)
            print(f"launch {number} of {launches}: {spent:.0f} s, about {left:.0f} s left", file=sys.stderr, flush=True)
    return EXIT_OK


def _report(
    plan: LaunchPlan, taken: Sequence[LaunchRecord], launches: int, target: Path, code: int, out: emit.Output
) -> int:
    """Wrong bits first, then the table. Returns the exit code."""
    wrong = sorted({case.name for record in taken for case in record.cases if not case.ok})
    if wrong:
        out.say(f"WRONG BITS: {', '.join(wrong)}: what arrived is not what was sent")
    if taken:
        out.table(_table(taken))
        where = short_name(taken[0].commit, taken[0].dirty, taken[0].version)
        out.say(
            f"suite {plan.suite.name}: {len(taken)} {'launch' if len(taken) == 1 else 'launches'} of {where}, "
            f"machine {plan.machine_id}, added to {visible(str(target))}"
        )
        out.json("".join(dump_json(record.to_dict(), indent=None) for record in taken))
    if len(taken) < launches and code != EXIT_OK:
        out.say(f"{len(taken)} of {launches} launches were measured (exit code {code})")
    if wrong:
        return EXIT_WRONG_BITS
    return code if code != EXIT_OK else out.exit_code


def _table(taken: Sequence[LaunchRecord]) -> Table:
    """A row for each case: medians of the launches' medians, the range of the move's, and what is exact."""
    table = emit.simple_table(
        "medians of the launches' medians, slowest rank; move: with the range over the launches",
        [("case", "left"), *((name, "right") for name in _TIMES), ("across nodes", "right"), ("in node", "right"),
         ("messages", "right"), ("segments", "right"), ("rounds", "right"), ("digests", "right")],
    )  # fmt: skip
    for at, case in enumerate(taken[-1].cases):
        mine = [record.cases[at] for record in taken]
        passed = f"{sum(one.digest_passed for one in mine)}/{sum(one.digest_total for one in mine)}"
        table.add_row(
            case.name, *(_time(mine, f"{name}_s", ranged=name == _TIMES[0]) for name in _TIMES),
            *(emit.size_text(int(case.exact[name])) for name in ("bytes_cross_node", "bytes_in_node")),
            *(str(case.exact[name]) for name in ("messages", "segments", "rounds")), passed,
        )  # fmt: skip
    return table


def _time(cases: Sequence[CaseRecord], metric: str, *, ranged: bool) -> str:
    """The median of the launches' medians, and how far they range."""
    found = [value for case in cases if (value := case.median(metric)) is not None]
    if not found or not ranged:
        return emit.time_text(statistics.median(found) if found else None)
    return emit.time_with_interval(statistics.median(found), min(found), max(found))
