"""Boxes of two classes of blocks for which the prices say that a mix of routes beats every uniform one. Pure.

``mix_cases(profile, expecter, hard, ...)`` searches sizes and shares by price and gives the
best boxes as cases, with what was searched in their notes. Each class is first priced alone by each route; the boxes
for which the sums of those prices promise most are then priced whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.harness.moves import PlannedMove
from relaymeter.harness.validate_cases import Expecter, MoveCase, MoveSpec
from relaymeter.harness.validate_moves import ITEMSIZE, plan_spec
from relaymeter.harness.validate_progress import Progress
from relaymeter.harness.validate_routes import route_cases
from relaymeter.policies.thresholds import possible_fanouts
from relaymeter.relayout.routes import ROUTES

__all__ = ["TINY", "mix_cases"]

#: What is searched: elements and number of the tiny blocks, number of the large ones, seconds that the NICs take for
#: the large ones when relayed (in shares of a move), and buckets into which all bytes are cut.
TINY = ((16, 4096), (64, 4096), (256, 2048), (1024, 2048))
_LARGE = (1, 3, 16)
_SHARES = (0.15, 0.5, 1.5)
_BUCKETS = (1, 6)
_PAGE, _LARGEST_BUCKET = 64 << 10, 256 << 20
#: So many boxes are priced whole for each one that is measured.
_PRICED = 3
_ALIGN = 64
#: Share of the search that pricing the classes alone takes, about.
_ALONE = 0.4


@dataclass(frozen=True, eq=False)
class _Box:
    """Two classes of blocks: the best mix of routes found for them, and what it is predicted to save."""

    spec: MoveSpec
    codes: NDArray[np.int8]
    text: str
    gain: float
    """Share of the best uniform route's time."""


def mix_cases(
    profile: Profile,
    expecter: Expecter,
    hard: Sequence[str],
    *,
    tiny: int,
    most: int,
    room_bytes: int,
    move_s: float,
    progress: Progress,
) -> tuple[list[MoveCase], list[str]]:
    """The ``most`` boxes for which the largest gain is predicted, by every uniform route and the mix, and a note; of
    the first ``tiny`` kinds of tiny blocks.

    No box takes more than about ``room_bytes`` on a rank. The default executor only. Empty where no move between nodes
    has a choice. Pure but for ``progress``.
    """
    topology = expecter.topology
    fanouts = possible_fanouts(topology)
    if topology.nodes < 2 or not fanouts or expecter.pricer.costs.cross_node is None:
        return [], ["mixed routes: no block of this topology has a choice of route"]
    ranked = _promising(expecter, TINY[:tiny], fanouts[-1], move_s, room_bytes, progress)
    boxes = []
    for number, (spec, _) in enumerate(ranked[: _PRICED * most]):
        progress(_ALONE + (1 - _ALONE) * number / (_PRICED * most), f"box {number + 1}, priced whole")
        if (box := _best_mix(expecter, spec)) is not None:
            boxes.append(box)
    boxes.sort(key=lambda box: -box.gain)
    found = sum(box.gain > 0 for box in boxes)
    best = f"the largest predicted gain is {boxes[0].gain:.1%}" if boxes else "none has two routes"
    text = (
        f"searched by price: {len(ranked)} boxes, tiny blocks of {TINY[0][0]} to {TINY[tiny - 1][0]} elements, "
        f"{_LARGE[0]} to {_LARGE[-1]} large ones, {' and '.join(str(b) for b in _BUCKETS)} buckets, "
        f"{fanouts[-1]} destination ranks; of the {len(boxes)} most promising, priced whole, a mix is predicted to "
        f"beat every uniform route in {found}, {best}"
    )
    cases: list[MoveCase] = []
    for number, box in enumerate(boxes[:most], start=1):
        count, tiny_elements, large, large_elements, fanout = box.spec.sizes
        name = f"box {number}: {count} of {tiny_elements} and {large} of {large_elements} elements"
        cases += route_cases(
            "mix",
            plan_spec(box.spec, topology, name),
            box.spec,
            profile,
            expecter,
            hard,
            mixed=box.codes,
            block_elements=large_elements,
            itemsize=ITEMSIZE,
            fanout=fanout,
            note=f"{box.text}, predicted gain {box.gain:.1%}; {text}",
        )
    return cases, [f"mixed routes: {text}"]


def _promising(
    expecter: Expecter,
    kinds: Sequence[tuple[int, int]],
    fanout: int,
    move_s: float,
    room_bytes: int,
    progress: Progress,
) -> list[tuple[MoveSpec, float]]:
    """Every box, with the gain that the prices of its classes alone promise, the largest first."""
    link = expecter.pricer.costs.cross_node
    rate = 1.0 if link is None else link.port_rate
    alone: dict[tuple[int, int, int], dict[str, float]] = {}

    def prices(count: int, elements: int, bucket: int) -> dict[str, float]:
        key = (count, elements, bucket)
        if key not in alone:
            move = plan_spec(MoveSpec("batch", (count, elements, fanout), bucket), expecter.topology)
            alone[key] = {route: _seconds(expecter, move, codes) for route, codes in move.uniform().items()}
        return alone[key]

    found: list[tuple[MoveSpec, float]] = []
    boxes = tuple(product(kinds, _LARGE, _SHARES, _BUCKETS))
    for (elements, count), large, share, buckets in boxes:
        progress(_ALONE * len(found) / len(boxes), "classes alone")
        size = min(share * move_s * rate * fanout, room_bytes) / (large * ITEMSIZE)
        large_elements = max(_ALIGN * elements, int(size) // _ALIGN * _ALIGN)
        total = (count * elements + large * large_elements) * ITEMSIZE
        bucket = min(-(-total // (buckets * _PAGE)) * _PAGE, _LARGEST_BUCKET)
        tiny, big = prices(count, elements, bucket), prices(large, large_elements, bucket)
        uniform = min(tiny[route] + big[route] for route in tiny)
        spec = MoveSpec("mix", (count, elements, large, large_elements, fanout), bucket)
        found.append((spec, 1 - (min(tiny.values()) + min(big.values())) / uniform))
    return sorted(found, key=lambda one: -one[1])


def _best_mix(expecter: Expecter, spec: MoveSpec) -> _Box | None:
    """The best mix of routes of this box beside the uniform ones; None where it has no two routes."""
    move = plan_spec(spec, expecter.topology)
    tiny = move.groups.elements == spec.sizes[1]
    best = min(_seconds(expecter, move, codes) for codes in move.uniform().values())
    found: list[_Box] = []
    for small, big in permutations(move.uniform(), 2):
        codes = np.where(tiny, np.int8(ROUTES.index(small)), np.int8(ROUTES.index(big))).astype(np.int8)
        gain = 1 - _seconds(expecter, move, codes) / best
        found.append(_Box(spec, codes, f"tiny blocks by {small}, large ones by {big}", gain))
    return max(found, key=lambda box: box.gain) if found else None


def _seconds(expecter: Expecter, move: PlannedMove, codes: NDArray[np.int8]) -> float:
    return expecter.price(move.schedule(codes)[0].loads(expecter.executor).apart()).total_s
