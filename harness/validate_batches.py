"""Batches of equal blocks below, at and above the thresholds, at bucket sizes where both sides can be measured. Pure.

``batch_cases(profile, expecter, hard, ...)`` gives the cases of one executor and what was left out, as sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from relaymeter.calibration.profiles import Profile
from relaymeter.harness.validate_cases import Expecter, MoveCase, MoveSpec, Threshold
from relaymeter.harness.validate_moves import ITEMSIZE, plan_spec
from relaymeter.harness.validate_progress import Progress
from relaymeter.harness.validate_routes import route_cases
from relaymeter.policies.thresholds import BATCH_BLOCKS, find_thresholds, possible_fanouts
from relaymeter.relayout.routes import DIRECT, RELAY, SPREAD
from relaymeter.units import format_bytes

__all__ = ["BUCKETS", "batch_cases"]

#: Bucket sizes at which thresholds are looked for, in bytes: packed in few rounds, and in many.
BUCKETS = (8 << 20, 1 << 20, 256 << 10, 64 << 10)
#: Blocks below and above a threshold are so many times smaller and larger.
_APART = 4
#: The smallest block that is measured, in elements, and its name at the threshold.
_LEAST_ELEMENTS = 8
_PLACES = (("T/4", 1 / _APART), ("T", 1.0), ("4T", float(_APART)))
_ROUTE_OF = {"min_relay": RELAY, "min_split": SPREAD}


@dataclass(frozen=True)
class _Setting:
    """A threshold at one bucket size, and the batches that can be measured there.

    ``blocks``: name of the place and elements of a block. ``both``: whether there are batches on both sides; ``clear``:
    the predicted gain, as a share, of the side that is predicted to win by less.
    """

    threshold: Threshold
    bucket_bytes: int
    blocks: tuple[tuple[str, int], ...]
    both: bool
    clear: float


class _Priced:
    """Predicted seconds of batches on one topology by one executor, each priced once."""

    def __init__(self, expecter: Expecter) -> None:
        self._expecter = expecter
        self._known: dict[tuple[int, int, int, int], float] = {}

    def seconds(self, fanout: int, elements: int, bucket: int, code: int) -> float:
        """Of a batch of blocks of ``elements``, by the route of ``code``."""
        key = (fanout, elements, bucket, code)
        if key not in self._known:
            spec = MoveSpec("batch", (BATCH_BLOCKS, elements, fanout), bucket)
            move = plan_spec(spec, self._expecter.topology)
            loads = move.schedule(move.groups.uniform(code))[0].loads(self._expecter.executor).apart()
            self._known[key] = self._expecter.price(loads).total_s
        return self._known[key]


def batch_cases(
    profile: Profile,
    expecter: Expecter,
    hard: Sequence[str],
    *,
    buckets: Sequence[int],
    settings: int,
    batch_s: float,
    room_bytes: int,
    progress: Progress,
) -> tuple[list[MoveCase], list[str]]:
    """Cases of batches of ``thresholds.BATCH_BLOCKS`` equal blocks, by every route, and notes.

    ``buckets``: sizes in bytes that are tried; ``settings``: how many are taken for each threshold and fanout, those
    with clear sides first. A batch takes at most ``batch_s`` seconds when direct, and ``room_bytes`` on a rank. Empty
    on a single node, and where no node has two ranks. Pure but for ``progress``.
    """
    cases: list[MoveCase] = []
    notes: list[str] = []
    topology = expecter.topology
    if topology.nodes < 2:
        return cases, notes
    fanouts, priced = possible_fanouts(topology), _Priced(expecter)
    thresholds = cache(partial(_thresholds, profile, expecter))
    taken = tuple(dict.fromkeys((*fanouts[:1], *fanouts[-1:])))
    for number, (fanout, kind) in enumerate(product(taken, _ROUTE_OF)):
        progress(number / (len(taken) * len(_ROUTE_OF)), f"{kind}, {fanout} destination ranks")
        asked = [(bucket, thresholds(fanout, bucket)[kind]) for bucket in buckets]
        found = [
            setting
            for bucket, threshold in asked
            if (setting := _setting(priced, threshold, bucket, batch_s, room_bytes)) is not None
        ]
        found.sort(key=lambda setting: (-setting.both, -setting.clear))
        if not found or not found[0].both:
            notes.append(_why(expecter.executor, kind, fanout, asked))
        for setting in _apart(found)[:settings]:
            cases += _cases(profile, expecter, setting, hard)
    return cases, notes


def _thresholds(profile: Profile, expecter: Expecter, fanout: int, bucket: int) -> dict[str, Threshold]:
    pair = find_thresholds(
        profile, expecter.topology, expecter.executor, fanouts=(fanout,), bucket_bytes=bucket, itemsize=ITEMSIZE
    )
    return {
        kind: Threshold(kind, fanout, found[fanout].elements, found[fanout].low, found[fanout].high)
        for kind, found in zip(_ROUTE_OF, pair, strict=True)
    }


def _setting(priced: _Priced, threshold: Threshold, bucket: int, batch_s: float, room_bytes: int) -> _Setting | None:
    """What can be measured at this bucket size: blocks neither too small nor too many bytes in all. None: nothing."""
    if threshold.elements is None:
        elements = _largest(priced, threshold, bucket, batch_s, room_bytes)
        loss = -_gain(priced, threshold, elements, bucket)[0]
        return _Setting(threshold, bucket, (("large blocks", elements),), False, loss)
    blocks: list[tuple[str, int]] = []
    clear = []
    for text, share in _PLACES:
        elements = round(threshold.elements * share)
        if elements < _LEAST_ELEMENTS or not _fits(elements, room_bytes):
            continue
        gain, direct_s = _gain(priced, threshold, elements, bucket)
        if direct_s <= batch_s:
            blocks.append((text, elements))
            clear += [] if share == 1 else [gain if share > 1 else -gain]
    return _Setting(threshold, bucket, tuple(blocks), len(clear) == 2, min(clear)) if clear else None


def _apart(found: Sequence[_Setting]) -> list[_Setting]:
    """The settings, without those of a bucket that gives the same threshold as a clearer one: nothing is cut there."""
    return list({setting.threshold.elements: setting for setting in reversed(found)}.values())[::-1]


def _fits(elements: int, room_bytes: int) -> bool:
    return BATCH_BLOCKS * elements * ITEMSIZE <= room_bytes


def _gain(priced: _Priced, threshold: Threshold, elements: int, bucket: int) -> tuple[float, float]:
    """Share of direct's predicted time that the threshold's route saves, and that time."""
    direct, other = (
        priced.seconds(threshold.fanout, elements, bucket, code) for code in (DIRECT, _ROUTE_OF[threshold.kind])
    )
    return 1 - other / direct, direct


def _why(executor: str, kind: str, fanout: int, asked: Sequence[tuple[int, Threshold]]) -> str:
    values = ", ".join(
        f"{'never' if threshold.elements is None else threshold.elements} with buckets of {format_bytes(bucket)}"
        for bucket, threshold in asked
    )
    return (
        f"{executor} {kind}, {fanout} destination ranks: no bucket size has blocks of T/4 and of 4T elements inside "
        f"the range that can be measured (T = {values}); what lies inside is measured"
    )


def _cases(profile: Profile, expecter: Expecter, setting: _Setting, hard: Sequence[str]) -> list[MoveCase]:
    threshold, bucket = setting.threshold, setting.bucket_bytes
    cases: list[MoveCase] = []
    for text, elements in setting.blocks:
        spec = MoveSpec("batch", (BATCH_BLOCKS, elements, threshold.fanout), bucket)
        name = f"{threshold.kind} x{threshold.fanout}, buckets of {format_bytes(bucket)}, {text}"
        cases += route_cases(
            "batch",
            plan_spec(spec, expecter.topology, name),
            spec,
            profile,
            expecter,
            hard,
            block_elements=elements,
            itemsize=ITEMSIZE,
            fanout=threshold.fanout,
            threshold=threshold,
        )
    return cases


def _largest(priced: _Priced, threshold: Threshold, bucket: int, batch_s: float, room_bytes: int) -> int:
    """The largest blocks, by a power of four, of which a batch can be measured."""
    elements = _LEAST_ELEMENTS
    while (
        _fits(elements * _APART, room_bytes)
        and priced.seconds(threshold.fanout, elements, bucket, DIRECT) <= batch_s / _APART
    ):
        elements *= _APART
    return elements
