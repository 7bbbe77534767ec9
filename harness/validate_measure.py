"""Measuring the cases of a validation, in turns: what real ranks and a simulated cluster have in common. No torch.

``measure_flows(cases, measure)`` goes through calibration's seam; ``in_turns(count, once)`` repeats whole moves. Every
decision rests on samples that are equal on all ranks, so that all ranks make the same calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relaymeter.calibration.cells import Measure, Sampling
from relaymeter.calibration.patterns import matrix_of
from relaymeter.harness.validate_cases import FlowCase, MoveCase, Observed
from relaymeter.harness.validate_progress import Progress
from relaymeter.records import median_interval
from relaymeter.relayout.topology import Topology

__all__ = ["MeasureMoves", "Repeats", "in_turns", "measure_flows", "settled"]

_SEED = "relaymeter validate"
#: A median whose interval reaches less than this share of it to either side, on average, is settled.
_SETTLED = 0.03
#: Moves of at most so many seconds are cheap to repeat, and scatter more.
_SHORT_S = 0.03
#: Share of the budget that exchanges may take before only the least of them is measured.
_FLOWS_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """How often a case is measured: ``least`` times in turns with others, then up to ``most`` until it is settled."""

    least: int = 7
    most: int = 13
    passes: int = 3
    """Turns that exchanges are measured in, three samples or four each."""
    late: int = 21
    """Moves of at most ``_SHORT_S`` that are not settled are measured so often, over the budget too."""
    more: int = 2
    """Further turns for exchanges that are not settled."""
    budget_s: float = 280.0
    """Measuring time after which only the least is still measured."""

    @classmethod
    def short(cls) -> Repeats:
        """``--quick``."""
        return cls(least=5, most=7, passes=2, late=9, more=0, budget_s=100.0)


class MeasureMoves(Protocol):
    """Whole moves behind a seam. Collective: every rank calls it with equal arguments and gets equal results."""

    def __call__(self, cases: Sequence[MoveCase], repeats: Repeats, progress: Progress) -> list[Observed]:
        """Measure every case, in turns with its neighbours, and check the bits."""


def settled(times_s: Sequence[float]) -> bool:
    """Whether the interval of the median is narrow."""
    median, low, high = median_interval(times_s)
    return (high - low) / 2 <= _SETTLED * median


@dataclass
class _Tally:
    times_s: list[float] = field(default_factory=list)
    passed: int = 0
    total: int = 0
    mismatch: str | None = None


def measure_flows(
    cases: Sequence[FlowCase], measure: Measure, topology: Topology, repeats: Repeats, progress: Progress
) -> list[Observed]:
    """Measure exchanges pass by pass, in an order shuffled anew each time and alike on all ranks. Collective."""
    tallies = [_Tally() for _ in cases]
    order = random.Random(_SEED)
    rounds, spent_s = repeats.passes + repeats.more, 0.0
    for number in range(rounds):
        if number >= repeats.passes and spent_s > _FLOWS_SHARE * repeats.budget_s:
            break
        wanted = [k for k in range(len(cases)) if number < repeats.passes or not settled(tallies[k].times_s)]
        for done, index in enumerate(order.sample(wanted, len(wanted))):
            progress((number + done / len(wanted)) / rounds)
            spent_s += _measure_flow(cases[index], tallies[index], measure, topology)
    return [Observed(tuple(found.times_s), found.passed, found.total, found.mismatch) for found in tallies]


def _measure_flow(case: FlowCase, tally: _Tally, measure: Measure, topology: Topology) -> float:
    """Measure once more; gives the wall time."""
    matrix = matrix_of(case.flows, topology.world_size)
    sampling = Sampling(warmups=1, maximum=4)
    samples = measure(matrix, case.executor, calls=case.calls, sampling=sampling)
    calls = (len(samples.times_s) + sampling.warmups) * case.calls
    tally.times_s += samples.times_s
    tally.total += calls
    if not samples.wrong:
        tally.passed += calls
    elif tally.mismatch is None:
        first, wrong = samples.wrong[0], sum(found.bytes for found in samples.wrong)
        tally.mismatch = (
            f"{wrong} bytes arrived wrong over {calls} calls, {first.bytes} of them from rank {first.src} to rank "
            f"{first.dst}"
        )
    return samples.spent_s


def in_turns(
    count: int,
    once: Callable[[int], float],
    repeats: Repeats,
    progress: Progress,
    spent_s: Callable[[], float] = lambda: 0.0,
) -> list[list[float]]:
    """Seconds of ``count`` cases by number: ``once(number)`` in shuffled turns, the first of which warms up and is
    dropped; after ``repeats.least`` turns only those that are not settled go on, to ``repeats.most`` (short ones to
    three times as many), while ``spent_s()``, which is asked before each of those turns, is within the budget.
    Collective."""
    times: list[list[float]] = [[] for _ in range(count)]
    order = random.Random(_SEED)

    def goes_on(number: int, turn: int, late: bool) -> bool:
        if turn <= repeats.least:
            return True
        short = median_interval(times[number])[0] <= _SHORT_S
        most = repeats.late if late else 3 * repeats.most
        return turn <= (most if short else 0 if late else repeats.most) and not settled(times[number])

    for turn in range(3 * repeats.most + 1):
        late = turn > repeats.least and spent_s() > repeats.budget_s
        wanted = [k for k in range(count) if goes_on(k, turn, late)]
        if not wanted:
            break
        for done, index in enumerate(order.sample(wanted, len(wanted))):
            progress(min(1.0, (turn + done / len(wanted)) / (repeats.most + 1)))
            took = once(index)
            if turn:
                times[index].append(took)
    return times
