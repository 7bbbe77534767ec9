"""The verdict of a check: of an interleaved A/B, or of the newest commit of a history. Pure; no torch import.

``check_ab(before, after, labels=...)``, ``check_history(launches, against="1a2b3c4" | "history")`` (whose rules
``judge_history`` has); ``next_launches(before, after, asked)`` says how many more launches an A/B should take,
``unsettled(before, after)`` why.

**Times.** A change counts with ``evidence.MIN_LAUNCHES`` launches a side, a ratio beyond ``at_least`` (1.05), a 95 %
interval on one side of 1, and a p, corrected for all timed rows of the run, below the level. Without that correction a
run of 20 rows raises an alarm in 2 to 5 of 100 unchanged runs, though each row does in 0.3 at most.

**Looking again.** An A/B looks at 5 launches a side, and where a row is unsettled again at 8 and at 12. Every look is
one more chance of a false alarm, so that the later ones have a smaller level: .02, .005 and .01 of both directions, by
the levels at most .0175 of an alarm in an unchanged run. Drawn 2,000 times each with 20 rows (drift 3 and 5 %, rows
alike or not, tied to each other or not, normal or with Student's t of 4 degrees): 0.9 to 1.8 in 100. A history is
looked at once, at .02.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaymeter.errors import NothingMeasured
from relaymeter.harness.track.evidence import MIN_LAUNCHES
from relaymeter.harness.track.judge_history import check_history
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.row_verdicts import MISSED_SLOWDOWN
from relaymeter.harness.track.sides import Base, Judged, base_of, judged, pair_up, side_of, wrong_bits
from relaymeter.harness.track.verdicts import Check, Side

__all__ = ["LOOKS", "check_ab", "check_history", "level_of", "next_launches", "unsettled"]

#: Launches a side at which an A/B is looked at, and the level of each look.
LOOKS = {5: 0.02, 8: 0.005, 12: 0.01}
#: A row that looks so alone, before any correction, is worth more launches.
_WORTH_MORE = 0.05


def level_of(launches: int) -> float:
    """The level of an A/B of so many launches a side, whichever looks came before."""
    return LOOKS[max((look for look in LOOKS if look <= launches), default=min(LOOKS))]


def check_ab(
    before: Sequence[LaunchRecord],
    after: Sequence[LaunchRecord],
    *,
    labels: tuple[str, str],
    allow_mismatch: bool = False,
    at_least: float = 1.05,
    one_machine: bool = False,
    exact_only: bool = False,
) -> Check:
    """The verdict upon an interleaved A/B. ``labels``: what people call the base and the new side. ``at_least``: the
    smallest ratio that counts.

    Where the sides differ in configuration, suite or schema nothing is compared, and where they differ in machine no
    time: such rows are inconclusive, unless ``allow_mismatch``. ``one_machine``: one machine launched both, so that
    what its id holds besides (versions of torch and NCCL) is what is compared. ``exact_only``: without times.

    Raises NothingMeasured where the new side has no launch. The parent calls it, no rank.
    """
    if not after:
        raise NothingMeasured(f"{labels[1]} has no launch: nothing was measured")
    base = base_of(before, after, allowed=allow_mismatch, one_machine=one_machine)
    found = _judged_ab(base, after, at_least, exact_only, wrong_bits(before, "the base"))
    said = ("times are not judged, only exact metrics (times need 5 launches a side)",) if exact_only else ()
    return Check(
        suite=after[-1].suite,
        kind="ab",
        before=_side(before, labels[0]) if before else None,
        after=_side(after, labels[1]),
        rows=found.rows,
        mismatch=tuple(base.mismatch),
        notes=(*base.mismatch.values(), *base.notes, *said, *found.notes),
    )


def _side(launches: Sequence[LaunchRecord], label: str) -> Side:
    """One side with a label that says, outside a checkout, which version it is."""
    side = side_of(launches, label)
    version = "" if launches[-1].commit else f", version {side.version}"
    return replace(side, label=label + version)


def _judged_ab(
    base: Base, after: Sequence[LaunchRecord], at_least: float, exact_only: bool, wrong_before: dict[str, str]
) -> Judged:
    fewest = min(len(base.exact), len(after))
    more = next((look for look in LOOKS if look > fewest), 2 * fewest)
    return judged(
        pair_up(base, after, exact_only=exact_only),
        {**wrong_before, **wrong_bits(after, "the new side")},
        level=level_of(fewest),
        at_least=at_least,
        hint=f"take more (--launches {more})",
    )


def next_launches(
    before: Sequence[LaunchRecord],
    after: Sequence[LaunchRecord],
    asked: int,
    *,
    at_least: float = 1.05,
    exact_only: bool = False,
) -> int:
    """How many more pairs of launches an A/B should take; 0: enough.

    First as many as were ``asked`` for. Then, from 5 on, up to the next look (8, 12) while some time looks slower than
    ``at_least`` by itself (p < .05), or does not exclude a slow-down of 25 %, and no row is decided for the worse yet.
    The levels of ``level_of`` pay for the looks. Fewer asked for than 5 are not added to: they were asked for; nor are
    those of a check of exact metrics alone.
    """
    taken = min(len(before), len(after))
    if taken < asked:
        return asked - taken
    look = next((look for look in LOOKS if look > taken), None)
    if taken < MIN_LAUNCHES or look is None or exact_only:
        return 0
    return look - taken if unsettled(before, after, at_least=at_least) else 0


def unsettled(
    before: Sequence[LaunchRecord], after: Sequence[LaunchRecord], *, at_least: float = 1.05
) -> list[tuple[str, str]]:
    """Case and metric of every time for which more launches are worth while; none where a row is decided for the worse
    already."""
    base = Base(tuple(before), tuple(before))
    found = _judged_ab(base, after, at_least, False, wrong_bits(before, "the base"))
    if any(row.verdict in ("wrong bits", "regression", "no baseline") for row in found.rows):
        return []
    return [
        key
        for key, what in zip(found.tested, found.findings, strict=True)
        if (what.alone < _WORTH_MORE and what.ratio > at_least) or what.high is None or what.high >= MISSED_SLOWDOWN
    ]
