"""The real ranks behind the seam: time the very exchanges that moves are made of, and check every byte.

``RankExchange(world).measure(matrix, executor)`` is called by all ranks with equal arguments and returns equal samples
on all of them; ``RankPacking(world).measure(direction, run_bytes, segments)`` does the same for local packing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relaymeter.calibration.cells import QUIET_SAMPLES, Samples, Sampling, Wrong, check_times
from relaymeter.errors import InputError
from relaymeter.relayout.packing import Copies
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import EXECUTORS, exchange_flat, exchange_messages, wait_for

__all__ = ["RankExchange", "RankPacking", "World"]

IntArray = NDArray[np.int64]

#: Tag of the calibration's messages, so that a stray message of a move can never be taken for one of them.
_TAG = 7001
_MIX = 2654435761
_SLOTS = 1 << 14
#: The pattern is one hashed block, repeated with its number added to every byte.
_BLOCK = 1 << 20
#: Every call that moves so many bytes or fewer is checked, of larger ones the warm-ups: reading all that a large call
#: brought takes longer than the call. A long watch over large messages is what a soak is for.
_CHECKED_BYTES = 4 << 20
#: Successive calls go through about this much memory on each side before they come back to the same place.
_RING_BYTES = 64 << 20
_PACK_RING_BYTES = 32 << 20
#: Packing is repeated up to so many bytes in a sample, a copy counted as 64 KiB.
_PACKED_BYTES = 128 << 20
_TURNS = 32


class World(Protocol):
    """What calibration needs to know of the world a rank has joined."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def backend(self) -> str: ...
    @property
    def device(self) -> torch.device: ...


class _Clock:
    """Barrier, local duration, maximum over ranks."""

    def __init__(self, world: World, time_limit_s: float, poll: Callable[[], None] | None) -> None:
        self._poll = poll
        self._device = world.device if world.backend == "nccl" else torch.device("cpu")
        self._sync = world.device.type == "cuda"
        self._world = world
        self._limit_s = time_limit_s

    def meet(self, work: dist.Work | None) -> None:
        """Wait for a collective, at most the time limit: a rank that hangs ends the calibration on all others."""
        wait_for([] if work is None else [work], deadline=time.monotonic() + self._limit_s, poll=self._poll)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of an integer tensor, on the CPU."""
        moved = tensor.to(self._device)
        self.meet(dist.all_reduce(moved, async_op=True))
        return moved.cpu()

    def settle(self) -> None:
        if self._sync:
            torch.cuda.synchronize(self._world.device)

    def time(self, call: Callable[[], None]) -> float:
        """Seconds of ``call`` on this rank, begun together with the others."""
        self.settle()
        self.meet(dist.barrier(async_op=True))
        begin = time.perf_counter()
        call()
        self.settle()
        return time.perf_counter() - begin

    def largest(self, *values: float) -> list[float]:
        """Maximum over ranks of each value."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        self.meet(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True))
        found: list[float] = tensor.tolist()
        return found

    def sample(self, call: Callable[[], None], after: Callable[[], None], moved: float, sampling: Sampling) -> Samples:
        """Repeat ``call`` until ``sampling`` has enough; ``after`` follows each warm-up, and each timed call that moves
        little (outside the timed part)."""
        begin = time.perf_counter()
        times: list[float] = []
        spent = 0.0
        for _ in range(sampling.warmups):
            self.time(call)
            after()
        while not sampling.enough(times, spent, moved * len(times)):
            mine = []
            for _ in range(min(QUIET_SAMPLES, max(1, sampling.maximum - len(times)))):
                mine.append(self.time(call))
                if moved <= _CHECKED_BYTES:
                    after()
            # Several at once: the ranks' agreement takes as long as a small call.
            *longest, spent = self.largest(*mine, time.perf_counter() - begin)
            times += longest
        return Samples(tuple(times), spent)


class RankExchange:
    """Times exchanges of the world group. Every byte received is compared with what its sender was to send.

    Byte k of the message from rank r to rank q is a hash of (k + an offset of the pair and the call's turn), so a
    block that is stale, zero, swapped or another rank's is seen, on every size and pattern: in each call, or in the
    warm-ups where a call moves much. The errors are added up over all ranks. Successive calls read and write other
    memory, as a move does, which touches every byte once.
    """

    def __init__(self, world: World, *, time_limit_s: float = 120.0, poll: Callable[[], None] | None = None) -> None:
        self._world = world
        self._clock = _Clock(world, time_limit_s, poll)
        self._limit_s, self._poll = time_limit_s, poll
        self._pattern = torch.empty(0, dtype=torch.uint8, device=world.device)
        self._ring = torch.empty(0, dtype=torch.uint8, device=world.device)

    def connect(self, executor: str) -> float:
        """Touch every peer once and return the seconds it took (maximum over ranks); kept out of every sample. Raises
        NothingMeasured where that is no time."""
        size = self._world.world_size
        matrix = np.full((size, size), 16, dtype=np.int64)
        once = Sampling(warmups=0, maximum=1)
        samples = self.measure(matrix, executor, sampling=once)
        check_times(samples.times_s, f"first exchange by {executor}")
        return samples.times_s[0]

    def measure(
        self, matrix: IntArray, executor: str, *, messages: int = 1, calls: int = 1, sampling: Sampling | None = None
    ) -> Samples:
        """See ``cells.Measure``. Collective. Raises InputError on a bad matrix or executor, and whatever the transport
        raises when a peer is lost or the time limit of a call passes."""
        size = self._world.world_size
        if matrix.shape != (size, size) or (matrix < 0).any():
            raise InputError(f"a matrix of {size} x {size} byte counts is needed, got {matrix.shape}")
        if executor not in EXECUTORS:
            raise InputError(f"executor {executor!r} is not one of {', '.join(EXECUTORS)}")
        sampling = sampling or Sampling()
        matrix = matrix.copy()
        np.fill_diagonal(matrix, 0)
        exchange = _Exchange(self, matrix, executor, messages, self._limit_s)
        wrong = torch.zeros(size, dtype=torch.int64)

        def call() -> None:
            for _ in range(calls):
                exchange.run()

        def check() -> None:
            wrong.add_(exchange.wrong(calls))

        samples = self._clock.sample(call, check, float(matrix.sum()) * calls, sampling)
        each = tuple(taken / calls for taken in samples.times_s)
        return Samples(each, samples.spent_s, self._gather_wrong(wrong))

    def _gather_wrong(self, wrong: torch.Tensor) -> tuple[Wrong, ...]:
        size = self._world.world_size
        table = torch.zeros(size, size, dtype=torch.int64)
        table[:, self._world.rank] = wrong
        table = self._clock.total(table)
        pairs = torch.nonzero(table).tolist()
        return tuple(Wrong(src, dst, int(table[src, dst])) for src, dst in pairs)

    def slice_for(self, src: int, dst: int, turn: int, stride: int, nbytes: int) -> torch.Tensor:
        """The bytes that ``src`` sends to ``dst`` in a call of this turn (uint8 view), turns ``stride`` bytes apart."""
        slot = (src * self._world.world_size + dst + turn * 4099) % _SLOTS
        begin = 16 * slot + turn * stride
        self._grow(begin + nbytes)
        return self._pattern[begin : begin + nbytes]

    def ring(self, nbytes: int) -> torch.Tensor:
        """Memory to receive into, kept from cell to cell."""
        if len(self._ring) < nbytes:
            self._ring = torch.zeros(nbytes, dtype=torch.uint8, device=self._world.device)
        return self._ring[:nbytes]

    def _grow(self, nbytes: int) -> None:
        if len(self._pattern) >= nbytes:
            return
        nbytes = max(nbytes, _RING_BYTES + 32 * _SLOTS)
        device = self._world.device
        index = torch.arange(_BLOCK, dtype=torch.int64, device=device)
        block = ((index * _MIX) >> 24).bitwise_and_(255).to(torch.uint8)
        shift = torch.arange(-(-nbytes // _BLOCK), device=device).bitwise_and_(255).to(torch.uint8)
        self._pattern = (block[None, :] + shift[:, None]).view(-1)


class _Exchange:
    """The buffers of one matrix on one rank, for as many turns as fit into ``_RING_BYTES`` of memory."""

    def __init__(self, owner: RankExchange, matrix: IntArray, executor: str, messages: int, limit_s: float) -> None:
        world = owner._world
        self._owner, self._rank, self._limit_s, self._poll = owner, world.rank, limit_s, owner._poll
        self._flat = executor == "all-to-all"
        self._out = matrix[world.rank].tolist()
        self._in = matrix[:, world.rank].tolist()
        # Equal on all ranks: sender and receiver must agree on what a turn sends.
        self._stride = int(max(matrix.max(initial=0), 4096))
        most = int(max(matrix.sum(axis=0).max(initial=0), matrix.sum(axis=1).max(initial=0), 4096))
        self._turns = max(2, min(_TURNS, _RING_BYTES // most))
        self._turn = 0
        into = sum(self._in)
        ring = owner.ring(into * self._turns)
        self._received = [ring[turn * into : (turn + 1) * into] for turn in range(self._turns)]
        self._from = [list(torch.split(part, self._in)) for part in self._received]
        self._sends = [
            [owner.slice_for(world.rank, peer, turn, self._stride, count) for peer, count in enumerate(self._out)]
            for turn in range(self._turns)
        ]
        self._packed = [torch.cat(views) for views in self._sends] if self._flat else []
        cut = _cutter(messages)
        self._outgoing = [[(q, part) for q, view in enumerate(views) for part in cut(view)] for views in self._sends]
        self._incoming = [[(r, part) for r, view in enumerate(views) for part in cut(view)] for views in self._from]

    def run(self) -> None:
        """One call, and on to the next turn."""
        deadline, turn = time.monotonic() + self._limit_s, self._turn
        if self._flat:
            exchange_flat(
                self._packed[turn], self._out, self._received[turn], self._in, deadline=deadline, poll=self._poll
            )
        else:
            exchange_messages(self._outgoing[turn], self._incoming[turn], tag=_TAG, deadline=deadline, poll=self._poll)
        self._turn = (turn + 1) % self._turns

    def wrong(self, calls: int) -> torch.Tensor:
        """Bytes that differ, by sender (world), in the last ``calls`` calls; what they received is wiped.

        So what an earlier call left behind cannot pass for new.
        """
        counts = torch.zeros(len(self._in), dtype=torch.int64)
        for back in range(1, min(calls, self._turns) + 1):
            turn = (self._turn - back) % self._turns
            for peer, view in enumerate(self._from[turn]):
                if len(view):
                    wanted = self._owner.slice_for(peer, self._rank, turn, self._stride, len(view))
                    if not _equal(view, wanted):
                        counts[peer] += int(torch.count_nonzero(view != wanted))
            self._received[turn].zero_()
        return counts


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two byte tensors are equal, eight bytes at a time where their places allow."""
    if one.data_ptr() % 8 or other.data_ptr() % 8:
        return torch.equal(one, other)
    whole = len(one) // 8 * 8
    long = torch.equal(one[:whole].view(torch.int64), other[:whole].view(torch.int64))
    return long and torch.equal(one[whole:], other[whole:])


def _cutter(messages: int) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    """Cuts a pair's bytes into so many messages; none where there are no bytes."""
    return lambda view: [part for part in torch.chunk(view, messages) if len(part)] if len(view) else []


class RankPacking:
    """Times gather and scatter on some ranks at once: one, those of a node (which pack together in a move), all."""

    def __init__(self, world: World, *, time_limit_s: float = 120.0, poll: Callable[[], None] | None = None) -> None:
        self._world = world
        self._clock = _Clock(world, time_limit_s, poll)

    def measure(
        self,
        direction: str,
        run_bytes: int,
        runs: int,
        *,
        copies: int = 1,
        ranks: Sequence[int] = (),
        sampling: Sampling | None = None,
    ) -> Samples:
        """See ``cells.MeasurePacking``. Collective. Raises InputError where the runs do not divide into copies."""
        if direction not in ("pack", "unpack") or runs % copies or run_bytes % 2:
            raise InputError(f"{direction} of {runs} runs of {run_bytes} bytes by {copies} copies cannot be measured")
        ranks = ranks or self._world.topology.ranks_of(0)
        once = self._prepare(direction, run_bytes, runs, copies) if self._world.rank in ranks else _nothing
        # Ranks leave a barrier one after the other: what they do at once has to last longer than that takes.
        often = max(1, _PACKED_BYTES // max(run_bytes * runs, copies << 16))

        def call() -> None:
            for _ in range(often):
                once()

        samples = self._clock.sample(call, _nothing, float(run_bytes * runs * len(ranks)), sampling or Sampling())
        return Samples(tuple(taken / often for taken in samples.times_s), samples.spent_s)

    def _prepare(self, direction: str, run_bytes: int, runs: int, copies: int) -> Callable[[], None]:
        """Copies between a storage with a gap after every run and a message, through the very ``Copies`` of a move.

        Successive calls go through other memory, as a move does, which touches every byte once.
        """
        device, width, each = self._world.device, run_bytes // 2, runs // copies
        turns = max(1, min(_TURNS, _PACK_RING_BYTES // (2 * runs * run_bytes)))
        rings: list[Copies] = []
        for _ in range(turns):
            storage = torch.zeros(2 * runs * width, dtype=torch.int16, device=device)
            message = torch.zeros(runs * width, dtype=torch.int16, device=device)
            at = [k * each * width for k in range(copies)]
            apart = [storage.as_strided((each, width), (2 * width, 1), 2 * begin) for begin in at]
            together = [message.as_strided((each, width), (width, 1), begin) for begin in at]
            rings.append(Copies(together, apart) if direction == "pack" else Copies(apart, together))
        turn = itertools.cycle(rings)
        return lambda: next(turn).run()


def _nothing() -> None:
    return None
