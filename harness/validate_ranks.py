"""Whole moves of a validation on real ranks: storages filled from layouts, real movers, every bit checked every time.

``RankMoves(world, topology, ...)`` is a ``validate_measure.MeasureMoves``; every rank of the world makes one and calls
it alike.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from relaymeter.harness.jobs import Fault
from relaymeter.harness.moves import PlannedMove
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.validate_cases import MoveCase, MoveSpec, Observed
from relaymeter.harness.validate_measure import Repeats, in_turns
from relaymeter.harness.validate_moves import plan_spec
from relaymeter.harness.validate_progress import Progress
from relaymeter.harness.world import World
from relaymeter.relayout.digest import LayoutDigest, compare, digest_layout
from relaymeter.relayout.execute import Hooks, Mover
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.schedule import Schedule
from relaymeter.relayout.source_digest import expected_digest
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import control_device

__all__ = ["RankMoves"]

#: Memory of one rank that moves which are measured in turns may take together, in bytes.
_ROOM_BYTES = 768 << 20
#: Moves of equal blocks, which are copied one by one.
_BLOCKS = ("batch", "mix")


@dataclass(eq=False)
class _Ends:
    """Both ends of a move on this rank, shared by its cases. ``proven``: the destination as its digest was found right,
    against which later moves are compared bit by bit."""

    planned: PlannedMove
    source: ReplicaStorage
    target: ReplicaStorage
    expected: LayoutDigest
    proven: torch.Tensor | None = None
    copies: int = 0
    """Tensor copies that a digest of the destination checks."""


@dataclass(eq=False)
class _Cell:
    """A case, ready to run, and what its checks showed."""

    ends: _Ends
    mover: Mover
    passed: int = 0
    total: int = 0
    mismatch: str | None = None


class RankMoves:
    """Measures moves in chunks that fit into memory, the cases of a chunk in turns."""

    def __init__(
        self,
        world: World,
        topology: Topology,
        *,
        time_limit_s: float,
        heartbeat: Heartbeat | None,
        say: Callable[[str], None],
        fault: Fault | None = None,
    ) -> None:
        """``time_limit_s``: of one move. ``fault``: a bit that a rank flips in the first move (tests)."""
        self._world, self._topology = world, topology
        self._limit_s, self._heartbeat, self._say = time_limit_s, heartbeat, say
        self._begin_s = time.monotonic()
        self._fault = fault if fault is not None and fault.rank == world.rank else None

    def __call__(self, cases: Sequence[MoveCase], repeats: Repeats, progress: Progress) -> list[Observed]:
        """See ``validate_measure.MeasureMoves``. Collective. Raises what a move raises when a rank is lost, and
        PlanDisagreement where the ranks do not make the same moves of the cases."""
        found: dict[int, Observed] = {}
        for chunk in self._chunks(cases):
            base = len(found)

            def part(share: float, at: str = "", base: int = base, size: int = len(chunk)) -> None:
                progress((base + share * size) / max(len(cases), 1))

            found.update(self._measure(chunk, repeats, part))
        return [found[number] for number in range(len(cases))]

    def _chunks(self, cases: Sequence[MoveCase]) -> Iterator[list[tuple[int, MoveCase, PlannedMove, Schedule]]]:
        """Cases with their plans, all cases of a move in one chunk; numbers count ``cases``."""
        grouped: dict[MoveSpec, list[int]] = {}
        for number, case in enumerate(cases):
            grouped.setdefault(case.spec, []).append(number)
        chunk: list[tuple[int, MoveCase, PlannedMove, Schedule]] = []
        held = 0
        for spec, numbers in grouped.items():
            planned = plan_spec(spec, self._topology, cases[numbers[0]].name)
            mine = [(n, cases[n], planned, planned.schedule(cases[n].route_array)[0]) for n in numbers]
            ends = [layout.storage_bytes for layout in (*planned.sources.values(), planned.destination)]
            size = max(ends[0](rank) + 2 * ends[1](rank) for rank in range(self._world.world_size))
            size += sum(int(schedule.peak_bytes(case.executor).max()) for _, case, _, schedule in mine)
            if chunk and held + size > _ROOM_BYTES:
                yield chunk
                chunk, held = [], 0
            chunk, held = [*chunk, *mine], held + size
        if chunk:
            yield chunk

    def _measure(
        self, chunk: Sequence[tuple[int, MoveCase, PlannedMove, Schedule]], repeats: Repeats, progress: Progress
    ) -> dict[int, Observed]:
        ends: dict[MoveSpec, _Ends] = {}
        cells = []
        for _, case, planned, schedule in chunk:
            if case.spec not in ends:
                ends[case.spec] = self._open(planned, case.spec)
            cells.append(self._cell(ends[case.spec], schedule, case.executor))
        for cell in cells:
            cell.mover.agree()
        times = in_turns(len(cells), lambda index: self._once(cells[index]), repeats, progress, self._spent_s)
        return {
            number: Observed(tuple(taken), cell.passed, cell.total, cell.mismatch)
            for (number, *_), cell, taken in zip(chunk, cells, times, strict=True)
        }

    def _open(self, planned: PlannedMove, spec: MoveSpec) -> _Ends:
        """Storages of this rank, the source filled with bits of its own."""
        rank, device = self._world.rank, self._world.device
        (layout,) = planned.sources.values()
        held = [layout, planned.destination]
        if spec.shape in _BLOCKS:
            held = [_backwards(one) for one in held]
        source, target = (ReplicaStorage(one, rank, device) for one in held)
        seed = int.from_bytes(hashlib.sha256(f"{spec} {rank}".encode()).digest()[:7], "big")
        bits = torch.Generator(device="cpu").manual_seed(seed)
        words = torch.randint(-(2**63), 2**63 - 1, (len(source.buffer) // 8,), dtype=torch.int64, generator=bits)
        source.buffer.view(torch.int64).copy_(words)
        expected = expected_digest(layout, planned.destination, rank, source.storages)
        return _Ends(planned, source, target, expected)

    def _cell(self, ends: _Ends, schedule: Schedule, executor: str) -> _Cell:
        hooks, self._fault = (Hooks() if self._fault is None else Hooks(on_receive=_Flip())), None
        mover = Mover(
            schedule,
            self._world.rank,
            ends.source.storages,
            ends.target.storages,
            executor,
            time_limit_s=self._limit_s,
            heartbeat=self._heartbeat,
            hooks=hooks,
        )
        return _Cell(ends, mover)

    def _once(self, cell: _Cell) -> float:
        """One move, checked. Returns its seconds: pack, communicate and unpack, maximum over the ranks."""
        ends = cell.ends
        cell.mover.poison()
        dist.barrier()
        timing = cell.mover.run()
        same = ends.proven is not None and torch.equal(ends.target.buffer, ends.proven)
        took = timing.pack_s + timing.communicate_s + timing.unpack_s
        longest, differ = self._largest(took, 0.0 if same else 1.0)
        if differ:
            self._digest(cell)
        else:
            cell.passed, cell.total = cell.passed + ends.copies, cell.total + ends.copies
        return longest

    def _digest(self, cell: _Cell) -> None:
        """Hold the destination against what it must come to. Collective."""
        ends = cell.ends
        found = digest_layout(ends.planned.destination, self._world.rank, ends.target.storages, replicas=True)
        report = compare(ends.expected, found)
        cell.passed, cell.total = cell.passed + report.passed, cell.total + report.total
        if report.ok:
            ends.copies = report.total
            ends.proven = ends.target.buffer.clone()
        elif cell.mismatch is None:
            cell.mismatch = str(report.mismatches[0])

    def _spent_s(self) -> float:
        """Seconds since this was made, by the slowest rank's clock. Collective."""
        return self._largest(time.monotonic() - self._begin_s)[0]

    def _largest(self, *values: float) -> list[float]:
        """Maximum over the ranks of each value."""
        shared = torch.tensor(values, dtype=torch.float64, device=control_device())
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        found: list[float] = shared.tolist()
        return found


def _backwards(layout: Layout) -> Layout:
    """The same layout with its tensors in the opposite order, for storages that lie so in memory.

    Blocks are sent in the layout's order; lying against it, no two of them can be copied as one, and each costs what a
    price counts for a segment. Tensors of a model, which lie apart, are copied one by one just so.
    """
    specs = dict(reversed(list(layout.specs.items())))
    return Layout(layout.name, layout.world_size, specs, layout.placements, layout.aliases, layout.partial)


class _Flip:
    """Flips one bit of the first message that is not empty."""

    def __init__(self) -> None:
        self._armed = True

    def __call__(self, number: int, peer: int, tensor: torch.Tensor) -> None:
        if self._armed and tensor.numel():
            tensor.view(torch.uint8)[0] ^= 1
            self._armed = False
