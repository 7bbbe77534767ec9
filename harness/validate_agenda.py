"""The agenda of a validation: every case, drawn up from a profile, sized to the cluster by its prices. Pure NumPy.

``make_agenda(profile, topology, hard=())`` is called by one rank, or by the parent for a simulated cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from relaymeter.calibration.profiles import Profile
from relaymeter.harness.moves import PlannedMove
from relaymeter.harness.validate_batches import BUCKETS, batch_cases
from relaymeter.harness.validate_cases import Agenda, Expecter, FlowCase, MoveCase, MoveSpec
from relaymeter.harness.validate_flows import flow_cases
from relaymeter.harness.validate_mixes import TINY, mix_cases
from relaymeter.harness.validate_moves import Shape, plan_spec, shapes_for
from relaymeter.harness.validate_progress import Clock
from relaymeter.harness.validate_routes import route_cases
from relaymeter.policies.price import Price
from relaymeter.relayout.topology import Topology

__all__ = ["FEW_RANKS", "Extent", "make_agenda"]

#: In larger worlds, whose schedules take long to price, less is looked at.
FEW_RANKS = 32

#: Scale at which a move is priced first, and the largest of moves of many tiny tensors.
_FIRST_SCALE = 8
_LARGEST_SCALE = 1 << 20
_LARGEST_SMALL = 12
#: Share of a move that is bound inside a node which its crossing part takes.
_CROSSING_SHARE = 0.4
_PAGE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How far a validation goes. ``Extent.short()`` is the short form."""

    call_s: float = 0.1
    """About what the largest flow of a matrix takes alone."""
    largest_s: float = 0.3
    """No held-out size takes longer than this."""
    move_s: float = 0.15
    """A whole move is scaled to take about this long when direct, by the default executor."""
    batch_s: float = 0.8
    """No batch takes longer than this when direct."""
    room_bytes: int = 64 << 20
    """Most that the destination of one batch or mix may hold on one rank."""
    move_room_bytes: int = 64 << 20
    """The same of a whole move."""
    settings: int = 2
    """Bucket sizes at which the blocks of each threshold and fanout are measured."""
    buckets: tuple[int, ...] = BUCKETS
    """Bucket sizes at which thresholds are looked for, in bytes."""
    tiny: int = len(TINY)
    """Kinds of tiny blocks among which boxes of mixed routes are searched."""
    mixes: int = 3
    """Boxes of two classes of blocks that are measured, of those that were searched."""
    others: bool = True
    """Whether moves and batches are measured by the executors that are no default, too; exchanges always are."""

    @classmethod
    def short(cls) -> Extent:
        """``--quick``."""
        return cls(
            call_s=0.05, largest_s=0.15, move_s=0.08, batch_s=0.4, settings=1, buckets=BUCKETS[:2], tiny=2, mixes=1,
            others=False,
        )  # fmt: skip


def make_agenda(
    profile: Profile,
    topology: Topology,
    extent: Extent | None = None,
    *,
    hard: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> Agenda:
    """All cases of a validation on ``topology``. ``hard``: what makes every case of this cluster hard to predict.

    Raises InputError where the profile has no costs for a kind of link that the topology has. Pure but for ``say``.
    """
    extent, say = extent or Extent(), say or _nothing
    flows: list[FlowCase] = []
    moves: list[MoveCase] = []
    notes: list[str] = []
    expecters = {executor: Expecter(profile, topology, executor) for executor in profile.executors}
    for executor in expecters:
        flows += flow_cases(profile, topology, executor, hard, call_s=extent.call_s, largest_s=extent.largest_s)
    say(f"{len(flows)} sizes and uneven matrices drawn")
    executors = list(expecters) if extent.others else list(expecters)[:1]
    clock, shapes = Clock(say, "plan"), shapes_for(topology)
    progress = clock.part("whole moves", 0.0, 0.6)
    steps = len(shapes) * (1 + len(executors))
    planned: list[tuple[Shape, PlannedMove, MoveSpec]] = []
    for name, shape in shapes.items():
        progress(len(planned) / steps, name)
        planned.append((shape, *_scaled(name, shape, topology, expecters[profile.executor], extent)))
    for number, (executor, (shape, move, spec)) in enumerate(product(executors, planned), start=len(planned)):
        progress(number / steps, f"{move.name}, {executor}")
        moves += route_cases("move", move, spec, profile, expecters[executor], (*shape.hard, *hard))
    say(f"{len(moves)} whole moves planned and priced")
    for number, executor in enumerate(executors):
        settings = extent.settings if number == 0 else 1
        brief = number > 0 and topology.world_size > FEW_RANKS
        share = 0.25 / len(executors)
        batches, texts = batch_cases(
            profile,
            expecters[executor],
            hard,
            buckets=extent.buckets[: 2 if brief else None],
            settings=settings,
            batch_s=extent.batch_s,
            room_bytes=extent.room_bytes,
            progress=clock.part(f"batches by {executor}", 0.6 + number * share, 0.6 + (number + 1) * share),
        )
        moves, notes = [*moves, *batches], [*notes, *texts]
        say(f"{len(batches)} batches at the thresholds of {executor}")
    mixes, texts = mix_cases(
        profile,
        expecters[profile.executor],
        hard,
        tiny=extent.tiny,
        most=extent.mixes,
        move_s=extent.move_s,
        room_bytes=extent.room_bytes,
        progress=clock.part("mixes of routes", 0.85, 1.0),
    )
    say(f"{len(mixes)} cases of mixed routes")
    return Agenda(tuple(flows), tuple(_unique([*moves, *mixes])), tuple([*notes, *texts]))


def _nothing(_: str) -> None:
    return None


def _unique(moves: Sequence[MoveCase]) -> list[MoveCase]:
    """Each case once: two thresholds may lead to the same batch only under names of their own."""
    return list({(case.kind, case.name, case.executor, case.route): case for case in moves}.values())


def _scaled(
    name: str, shape: Shape, topology: Topology, expecter: Expecter, extent: Extent
) -> tuple[PlannedMove, MoveSpec]:
    """The move of this shape whose direct route is predicted to take about ``extent.move_s``, within memory."""
    sizes = (_FIRST_SCALE,) * shape.parts
    for _ in range(2):
        move = plan_spec(MoveSpec(name, sizes, 0), topology, name)
        sizes = _rescaled(sizes, move, _direct(move, expecter), extent)
        if name == "many-small":
            sizes = (min(sizes[0], _LARGEST_SMALL),)
    move = plan_spec(MoveSpec(name, sizes, 0), topology, name)
    if shape.buckets is not None:
        bucket = -(-_most_bytes(move) // (shape.buckets * _PAGE)) * _PAGE
        move = replace(move, bucket_bytes=int(min(bucket, move.bucket_bytes)))
    return move, MoveSpec(name, sizes, move.bucket_bytes)


def _direct(move: PlannedMove, expecter: Expecter) -> Price:
    schedule, _ = move.schedule(move.groups.uniform(0))
    return expecter.price(schedule.loads(expecter.executor))


def _most_bytes(move: PlannedMove) -> int:
    """The most that one rank sends or receives when direct."""
    schedule, _ = move.schedule(move.groups.uniform(0))
    loads = schedule.loads("send-recv")
    away = loads.src != loads.dst
    ends = (np.bincount(end[away], weights=loads.bytes[away]) for end in (loads.src, loads.dst))
    return max(1, int(max(end.max(initial=0) for end in ends)))


def _rescaled(sizes: tuple[int, ...], move: PlannedMove, price: Price, extent: Extent) -> tuple[int, ...]:
    held = max(move.destination.storage_bytes(rank) for rank in range(move.topology.world_size))
    wanted = [extent.move_s / max(price.total_s, 1e-9)]
    if len(sizes) == 2:
        parts = price.breakdown
        wanted = [
            _CROSSING_SHARE * extent.move_s / max(parts["cross_node_s"], 1e-9),
            extent.move_s / max(parts["in_node_s"], 1e-9),
        ]
    room = extent.move_room_bytes / max(held, 1)
    factors = [min(factor, room) for factor in wanted]
    return tuple(
        int(np.clip(round(size * factor), 1, _LARGEST_SCALE)) for size, factor in zip(sizes, factors, strict=True)
    )
