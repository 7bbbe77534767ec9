"""Spot-check: a few of a profile's own cells measured again, in seconds, to see whether its prices still hold.

``check_cluster(instruments, profile)`` runs on every rank with equal arguments; all decisions rest on samples that are
equal on all ranks, so all ranks make the same calls. No torch import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from relaymeter.calibration.cells import Cell, Instruments, PackCell, Samples, Sampling, check_times
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE
from relaymeter.calibration.patterns import matrix_of
from relaymeter.calibration.profiles import Profile
from relaymeter.errors import DigestMismatch, InputError, NothingMeasured
from relaymeter.records import median_interval
from relaymeter.relayout.topology import Topology
from relaymeter.units import format_bytes

__all__ = ["DRIFT", "CheckResult", "SpotResult", "check_cluster", "judge", "limit_text", "spots"]

#: A median that differs by more than this ratio, either way, has drifted: from -13 % / +15 % on.
DRIFT = 0.15
#: However much a calibration scattered, twice as slow (or fast) is drift.
_WIDEST = 1.0
#: Seconds of measuring in all, and of one cell: rough cells take up to three times as long.
_BUDGET_S = 5.0
_CELL_S = 0.15
#: The large size of a curve is the largest that takes at most this long; the small one the first of at least so many
#: bytes, which still shows the latency.
_LARGE_S = 0.06
#: A cell that takes at least this long is steady: three samples are enough, and two when it is measured once more.
_STEADY_S = 0.02
_SMALL_BYTES = 64 << 10
_MIB = 1 << 20
#: Patterns of several flows at once, the most telling first.
_SEVERAL = ("dense both ways", "dense", "rails", "in_node all pairs everywhere", "in_node all pairs", "in_node two-way")

Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class SpotResult:
    """One cell, then and now: median seconds of a call with its interval, and what follows."""

    name: str
    bytes: int
    """Of the largest flow; packing: in all."""
    old_s: float
    old_low_s: float
    old_high_s: float
    new_s: float
    new_low_s: float
    new_high_s: float
    drift: float
    """``new_s / old_s - 1``."""
    limit: float
    """Drift is more than this, as a ratio either way: 0.15, or more where the calibration missed its own gate."""
    measured: int
    """How often it was measured now: once, or again before it counts as drift."""
    verdict: str
    """``ok``, ``drift``, or ``noisy``: farther off than the limit, but within the scatter of the samples."""

    @property
    def part(self) -> str:
        """What a price takes from this cell: ``the empty call``, ``traffic inside nodes``, ``traffic between nodes`` or
        ``packing``."""
        kinds = (("empty", "the empty call"), ("packing", "packing"), ("in node", "traffic inside nodes"))
        return next((part for begin, part in kinds if self.name.startswith(begin)), "traffic between nodes")

    @property
    def passed_limit(self) -> str:
        """The side of the limit that the drift lies beyond, as ``"-13%"``."""
        return limit_text(self.limit).split(" / ")[self.drift > 0]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def limit_text(limit: float) -> str:
    """A limit that is a ratio either way, as the drifts that it allows: ``"-13% / +15%"`` of 0.15."""
    return f"{1 / (1 + limit) - 1:.0%} / {limit:+.0%}"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """A whole spot-check. ``mismatch``: where the world differs from the profile's in what is not refused."""

    executor: str
    spots: tuple[SpotResult, ...]
    spent_s: float
    mismatch: tuple[str, ...] = ()

    @property
    def drifted(self) -> tuple[SpotResult, ...]:
        """The cells that have drifted."""
        return tuple(spot for spot in self.spots if spot.verdict == "drift")

    @property
    def drifted_parts(self) -> str:
        """What has drifted and which way, as ``"packing got faster, traffic between nodes got slower"``."""
        ways: dict[str, set[str]] = {}
        for spot in self.drifted:
            ways.setdefault(spot.part, set()).add("slower" if spot.drift > 0 else "faster")
        return ", ".join(f"{part} got {' and '.join(sorted(found))}" for part, found in ways.items())

    def to_dict(self) -> dict[str, Any]:
        return {
            "executor": self.executor,
            "spent_s": self.spent_s,
            "mismatch": list(self.mismatch),
            "drifted": [spot.name for spot in self.drifted],
            "cells": [spot.to_dict() for spot in self.spots],
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> CheckResult:
        names = [field.name for field in fields(SpotResult)]
        found = tuple(SpotResult(**{name: one[name] for name in names}) for one in entry["cells"])
        return cls(executor=entry["executor"], spots=found, spent_s=entry["spent_s"], mismatch=tuple(entry["mismatch"]))


def spots(profile: Profile, executor: str) -> tuple[tuple[str, Cell | PackCell], ...]:
    """Named cells of the profile that stand for it: the floor, each link at two sizes, several flows at once, packing.

    Pure. Raises NothingMeasured where the profile has no cells of ``executor``.
    """
    mine = [cell for cell in profile.cells if cell.executor == executor]
    found: list[tuple[str, Cell | PackCell]] = []
    empty = [cell for cell in mine if cell.pattern == "empty"]
    if empty:
        found.append(("empty call", max(empty, key=lambda cell: cell.calls)))
    for kind, name in ((IN_NODE, "in node"), (CROSS_NODE, "across nodes")):
        curve = sorted((cell for cell in mine if cell.pattern == f"{kind} curve"), key=lambda cell: cell.size)
        found += [(f"{name}, {format_bytes(cell.size)}", cell) for cell in _two(curve)]
    several = [cell for pattern in _SEVERAL for cell in mine if cell.pattern == pattern]
    if several:
        found.append((f"{several[0].pattern.replace('_', ' ')}, {len(several[0].flows)} flows", several[0]))
    if not found:
        raise NothingMeasured(f"the profile holds no cells of {executor} to measure again: calibrate again")
    return (*found, *_packing(profile))


def _two(curve: Sequence[Cell]) -> Iterator[Cell]:
    if not curve:
        return
    large = max((cell for cell in curve if cell.median_s <= _LARGE_S), key=lambda cell: cell.size, default=curve[0])
    small = next((cell for cell in curve if cell.size >= _SMALL_BYTES), curve[0])
    if small.size < large.size:
        yield small
    yield large


def _packing(profile: Profile) -> Iterator[tuple[str, PackCell]]:
    """Packing of many runs on the fewest ranks that it was measured on."""
    cells = [cell for cell in profile.pack_cells if cell.direction == "pack" and cell.median_s <= _LARGE_S]
    if cells:
        cell = max(cells, key=lambda c: (-c.ranks, c.run_bytes * c.runs, c.runs))
        yield f"packing, {cell.runs} runs of {format_bytes(cell.run_bytes)}", cell


def judge(name: str, nbytes: int, old: Sequence[float], new: Sequence[float], limit: float = DRIFT) -> SpotResult:
    """Hold samples against those of the profile, in seconds. Pure.

    Drift: the medians differ by more than ``limit`` as a ratio either way, and their distribution-free 95 % intervals
    do not meet. Raises NothingMeasured where samples are no times.
    """
    check_times(old, f"spot-check, {name}, in the profile")
    check_times(new, f"spot-check, {name}")
    then, now = median_interval(old), median_interval(new)
    far = max(now[0] / then[0], then[0] / now[0]) > 1 + limit
    apart = now[1] > then[2] or now[2] < then[1]
    return SpotResult(
        name=name, bytes=nbytes, limit=limit, measured=1, drift=now[0] / then[0] - 1,
        old_s=then[0], old_low_s=then[1], old_high_s=then[2], new_s=now[0], new_low_s=now[1], new_high_s=now[2],
        verdict=("drift" if apart else "noisy") if far else "ok",
    )  # fmt: skip


def check_cluster(
    instruments: Instruments,
    profile: Profile,
    executor: str | None = None,
    *,
    budget_s: float = _BUDGET_S,
    progress: Progress | None = None,
) -> CheckResult:
    """Measure the ``spots`` of ``profile`` again. Every rank calls it with equal arguments; equal results on all.

    ``executor``: the profile's default one. What is off is measured once more before it counts as drift, within
    ``budget_s`` seconds of measuring. Raises InputError on an executor that the profile has not, DigestMismatch on a
    wrong byte, and what the instruments raise.
    """
    executor = executor or profile.executor
    if executor not in profile.executors:
        raise InputError(
            f"the profile measured {', '.join(profile.executors)} only, not {executor}: leave --executor out"
        )
    say = progress or _nothing
    bench = _Bench(instruments, profile, executor, budget_s)
    found: list[SpotResult] = []
    chosen = [(name, cell) for name, cell in spots(profile, executor) if bench.can(cell)]
    for number, (name, cell) in enumerate(chosen):
        say(number / len(chosen), name)
        found.append(bench.measure(name, cell, _CELL_S, first=True))
    again = [number for number, spot in enumerate(found) if spot.verdict != "ok"]
    for number in again:
        name, cell = chosen[number]
        say(1.0, f"{name}, once more")
        found[number] = _both(found[number], bench.measure(name, cell, bench.left_s / (4 * len(again)), first=False))
    say(1.0, "checked")
    return CheckResult(executor=executor, spots=tuple(found), spent_s=bench.spent_s)


def _both(first: SpotResult, second: SpotResult) -> SpotResult:
    """What two measurements say: the one nearer to the profile, and drift only where both do."""
    nearer = min(first, second, key=lambda spot: max(spot.new_s / spot.old_s, spot.old_s / spot.new_s))
    verdicts = {first.verdict, second.verdict}
    verdict = "ok" if "ok" in verdicts else "noisy" if "noisy" in verdicts else "drift"
    return replace(nearer, measured=2, verdict=verdict)


class _Bench:
    """Measures cells again as they were measured, and holds them against the profile."""

    def __init__(self, instruments: Instruments, profile: Profile, executor: str, budget_s: float) -> None:
        self._instruments, self._profile, self._executor, self._budget_s = instruments, profile, executor, budget_s
        self.spent_s = 0.0

    @property
    def left_s(self) -> float:
        return max(0.0, self._budget_s - self.spent_s)

    def can(self, cell: Cell | PackCell) -> bool:
        """Whether memory here allows the cell, and the instruments have what it takes."""
        if isinstance(cell, PackCell):
            return self._instruments.packing is not None
        return cell.size <= self._instruments.largest_bytes

    def measure(self, name: str, cell: Cell | PackCell, seconds: float, *, first: bool) -> SpotResult:
        steady = cell.median_s >= _STEADY_S
        sampling = Sampling(warmups=1, seconds=seconds, maximum=2 + first if steady else 40)
        if isinstance(cell, PackCell):
            samples, nbytes = self._pack(cell, sampling), cell.run_bytes * cell.runs
        else:
            matrix = matrix_of(cell.flows, self._profile.topology.world_size)
            samples = self._instruments.exchange(
                matrix, self._executor, messages=cell.messages, calls=cell.calls, sampling=sampling
            )
            nbytes = cell.size
        self.spent_s += samples.spent_s
        if samples.wrong:
            bad = samples.wrong[0]
            raise DigestMismatch(
                f"spot-check, {name}: {bad.bytes} bytes from rank {bad.src} to rank {bad.dst} arrived wrong; a link "
                "that alters data has no rate: check the transport first"
            )
        limit = DRIFT if isinstance(cell, PackCell) else _limit(self._profile, cell)
        return judge(name, nbytes, cell.samples_s, samples.times_s, limit)

    def _pack(self, cell: PackCell, sampling: Sampling) -> Samples:
        packing = self._instruments.packing
        if packing is None:
            raise NothingMeasured("packing cannot be measured here")
        ranks = _packers(self._profile.topology, cell.ranks)
        return packing(cell.direction, cell.run_bytes, cell.runs, copies=cell.copies, ranks=ranks, sampling=sampling)


def _packers(topology: Topology, count: int) -> tuple[int, ...]:
    """The ranks that packed together in calibration: one, those of the first node that has several, or all."""
    nodes = [topology.ranks_of(node) for node in range(topology.nodes)]
    home = next((ranks for ranks in nodes if len(ranks) > 1), nodes[0])
    return home[:count] if count <= len(home) else tuple(range(topology.world_size))[:count]


def _limit(profile: Profile, cell: Cell) -> float:
    """Limit of drift: where the calibration missed its own gate for the cell's links and sizes (below 1 MiB, or from
    there on), its largest error there: what it could not tell itself cannot be told to have drifted."""
    node = profile.topology.node
    kinds = {IN_NODE if node[src] == node[dst] else CROSS_NODE for src, dst, _ in cell.flows} or {IN_NODE, CROSS_NODE}
    sizes = "below 1 MiB" if cell.size < _MIB else "of 1 MiB and more"
    names = {f"{cell.executor} {kind}: held-out sizes {sizes}, largest error" for kind in kinds}
    errors = [gate.value for gate in profile.gates if gate.name in names and gate.value is not None and not gate.passed]
    return max([DRIFT, *(min(error, _WIDEST) for error in errors)])


def _nothing(fraction: float, text: str) -> None:
    return None
