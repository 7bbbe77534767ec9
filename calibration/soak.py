"""Soak: the bare collective, over and over, with messages that describe themselves, and every byte looked at.

On every rank of a world: ``for progress in soak(world, SoakSettings(seconds=60)): ...``. No move, no plan, no packing:
where bytes arrive wrong here, the fault is below this package. Messages are made and checked on the device; what a call
received stays in place until the next one, so that memory which was never written shows the labels of an earlier call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relaymeter.calibration.label_tensors import LabelTensors
from relaymeter.calibration.labels import MOST_RANKS, UNIT_BYTES, Message
from relaymeter.calibration.measure import World
from relaymeter.calibration.soak_plan import SHAPES, SoakSettings, SoakSize, call_matrix, plan_hash, settle_size
from relaymeter.calibration.wrong_bytes import WrongRun, find_runs
from relaymeter.errors import InputError, NothingMeasured
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.transport import EXECUTORS, default_executor, exchange_flat, exchange_messages, wait_for

__all__ = ["RankTotals", "SoakProgress", "Tamper", "soak"]

#: Tag of the soak's messages.
_TAG = 7002
#: Runs that one rank tells of one call.
_TOLD_RUNS = 64
#: An exchange slower than this is given more time, in bytes per second.
_SLOWEST_RATE = 4e6
#: Share of the free memory that the buffers of all ranks of a node may take.
_MEMORY_SHARE = 0.5


class Tamper(Protocol):
    """Alters what a rank received (tests). ``received``: by sender, in the receive buffer."""

    def before(self, call: int, buffer: torch.Tensor) -> None: ...
    def after(self, call: int, buffer: torch.Tensor, received: Sequence[torch.Tensor]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RankTotals:
    """What one rank has received, and the seconds it spent."""

    rank: int
    calls: int = 0
    messages: int = 0
    received_bytes: int = 0
    largest_message_bytes: int = 0
    wrong_messages: int = 0
    wrong_bytes: int = 0
    make_s: float = 0.0
    exchange_s: float = 0.0
    check_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SoakProgress:
    """After a call, the same on every rank but for ``own``; ``ranks`` only at the end."""

    calls: int
    messages: int
    total_bytes: int
    """Sent by all ranks together."""
    elapsed_s: float
    size: SoakSize
    executors: tuple[str, ...]
    wrong_messages: int
    wrong_bytes: int
    new_runs: tuple[WrongRun, ...]
    """Of this call, of all ranks; at most 64 a rank."""
    own: RankTotals
    ranks: tuple[RankTotals, ...] = ()
    """Of every rank, after the last call."""
    finished: bool = False


def soak(
    world: World,
    settings: SoakSettings,
    *,
    deadline: float | None = None,
    poll: Callable[[], None] | None = None,
    tamper: Tamper | None = None,
) -> Iterator[SoakProgress]:
    """Exchange and check until the time or the volume is reached; gives the state after every call.

    Every rank of ``world`` exhausts it. Wrong bytes end nothing: they are told and the soak goes on. ``deadline``
    (``time.monotonic()``) and ``poll`` are those of the waits. Raises NothingMeasured in a world of one rank;
    InputError, on all ranks alike, for sizes that do not fit; what the transport raises where a rank is lost or the
    time passes.
    """
    if world.world_size < 2:
        raise NothingMeasured("a soak needs two ranks: in a world of one nothing is sent")
    if world.world_size > MOST_RANKS:
        raise InputError(f"a soak labels at most {MOST_RANKS} ranks, the world has {world.world_size}")
    yield from _Soak(world, settings, deadline, poll, tamper).run()


@dataclass
class _Wrong:
    """What a call left wrong on this rank."""

    messages: int = 0
    bytes: int = 0
    runs: list[WrongRun] = field(default_factory=list)


class _Soak:
    """Buffers and totals of one rank."""

    def __init__(
        self,
        world: World,
        settings: SoakSettings,
        deadline: float | None,
        poll: Callable[[], None] | None,
        tamper: Tamper | None,
    ) -> None:
        self._world, self._settings, self._tamper = world, settings, tamper
        self._deadline, self._poll = deadline, poll
        self._assembly = Assembly(None, deadline, poll)
        own = default_executor(world.backend)
        both = tuple(sorted(EXECUTORS, key=lambda name: name != own))
        named = {"auto": (own,), "both": both}.get(settings.executor, (settings.executor,))
        self._executors: tuple[str, ...] = named
        self._size = self._agree()
        self._labels = LabelTensors(world.device)
        nbytes = self._size.message_bytes * self._size.peers
        self._send = torch.empty(nbytes, dtype=torch.uint8, device=world.device)
        self._receive = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
        self._totals = RankTotals(rank=world.rank)
        self._call = 0

    def _agree(self) -> SoakSize:
        """The sizes that fit the rank with the least memory. Refuses ranks that would expect different messages."""
        memory = min(self._assembly.tell_all(_free_bytes(self._world)))
        size = settle_size(self._settings, self._world.backend, self._world.world_size, memory)
        hashes = self._assembly.tell_all(plan_hash(size, self._world.world_size))
        odd = next((rank for rank, found in enumerate(hashes) if found != hashes[0]), None)
        if odd is not None:
            raise InputError(f"ranks 0 and {odd} draw different message sizes: give both the same version of NumPy")
        return size

    def run(self) -> Iterator[SoakProgress]:
        began = time.monotonic()
        moved = messages = wrong_messages = wrong_bytes = 0
        ended = False
        while not ended:
            matrix = self._matrix(moved)
            executor = self._executors[self._call // len(SHAPES) % len(self._executors)]
            wrong = self._exchange(matrix, executor)
            moved, messages = moved + int(matrix.sum()), messages + int(np.count_nonzero(matrix))
            clock_us = int((time.monotonic() - began) * 1e6) if self._world.rank == 0 else 0
            now_messages, now_bytes, elapsed_us = self._sum([wrong.messages, wrong.bytes, clock_us])
            new: list[WrongRun] = []
            if now_messages:
                told = self._assembly.tell_all([run.to_dict() for run in wrong.runs[:_TOLD_RUNS]])
                new = [WrongRun(**run) for runs in told for run in runs]
            self._call += 1
            wrong_messages, wrong_bytes = wrong_messages + now_messages, wrong_bytes + now_bytes
            ended = self._enough(elapsed_us / 1e6, moved)
            yield SoakProgress(
                calls=self._call,
                messages=messages,
                total_bytes=moved,
                elapsed_s=elapsed_us / 1e6,
                size=self._size,
                executors=self._executors,
                wrong_messages=wrong_messages,
                wrong_bytes=wrong_bytes,
                new_runs=tuple(new),
                own=self._totals,
                ranks=self._all_totals() if ended else (),
                finished=ended,
            )

    def _matrix(self, moved: int) -> NDArray[np.int64]:
        """The next call's; its messages are smaller where little is left of the volume."""
        message, peers = self._size.message_bytes, self._size.peers
        if self._settings.total_bytes is not None:
            left = -(-(self._settings.total_bytes - moved) // (peers * self._world.world_size))
            message = min(message, -(-left // UNIT_BYTES) * UNIT_BYTES)
        return call_matrix(self._call, world_size=self._world.world_size, message_bytes=message, peers=peers)

    def _enough(self, elapsed_s: float, moved: int) -> bool:
        """Whether the volume is reached, or the end of the time is nearer than that of another call would be."""
        settings = self._settings
        timed = settings.seconds is not None and elapsed_s + elapsed_s / self._call / 2 >= settings.seconds
        return timed or (settings.total_bytes is not None and moved >= settings.total_bytes)

    def _exchange(self, matrix: NDArray[np.int64], executor: str) -> _Wrong:
        """One call: make, exchange, check."""
        rank, call, totals = self._world.rank, self._call, self._totals
        out, into = matrix[rank].tolist(), matrix[:, rank].tolist()
        send, receive = self._send[: sum(out)], self._receive[: sum(into)]
        sends, receives = torch.split(send, out), torch.split(receive, into)
        begin = self._now()
        for peer, part in enumerate(sends):
            self._labels.write(Message(rank, peer, call), part)
        if self._tamper is not None:
            self._tamper.before(call, receive)
        made = self._now()
        limit_s = max(self._settings.call_limit_s, max(sum(out), sum(into)) / _SLOWEST_RATE)
        deadline = min(self._deadline or float("inf"), time.monotonic() + limit_s)
        if executor == "all-to-all":
            exchange_flat(send, out, receive, into, deadline=deadline, poll=self._poll)
        else:
            largest = max(self._size.message_bytes, UNIT_BYTES)  # one message each, of any size
            outgoing, incoming = list(enumerate(sends)), list(enumerate(receives))
            exchange_messages(outgoing, incoming, tag=_TAG, deadline=deadline, poll=self._poll, cap=largest)
        exchanged = self._now()
        if self._tamper is not None:
            self._tamper.after(call, receive, receives)
        wrong = _Wrong()
        for peer, part in enumerate(receives):
            self._check(Message(peer, rank, call), part, executor, wrong)
        checked = self._now()
        self._totals = replace(
            totals,
            calls=totals.calls + 1,
            messages=totals.messages + sum(count > 0 for count in into),
            received_bytes=totals.received_bytes + sum(into),
            largest_message_bytes=max(totals.largest_message_bytes, *into),
            wrong_messages=totals.wrong_messages + wrong.messages,
            wrong_bytes=totals.wrong_bytes + wrong.bytes,
            make_s=totals.make_s + made - begin,
            exchange_s=totals.exchange_s + exchanged - made,
            check_s=totals.check_s + checked - exchanged,
        )
        return wrong

    def _check(self, message: Message, part: torch.Tensor, executor: str, wrong: _Wrong) -> None:
        """Add what is wrong in ``part`` (uint8) to ``wrong``."""
        count, units, words = self._labels.compare(message, part)
        if not count:
            return
        wrong.messages += 1
        wrong.bytes += count
        wrong.runs += find_runs(
            message, units, words, self._world.world_size, message_bytes=part.numel(), executor=executor
        )

    def _all_totals(self) -> tuple[RankTotals, ...]:
        return tuple(RankTotals(**entry) for entry in self._assembly.tell_all(asdict(self._totals)))

    def _sum(self, values: list[int]) -> list[int]:
        """Sum over ranks of each value."""
        device = self._world.device if self._world.backend == "nccl" else torch.device("cpu")
        tensor = torch.tensor(values, dtype=torch.int64, device=device)
        work = dist.all_reduce(tensor, async_op=True)
        wait_for([work] if work is not None else [], deadline=self._deadline, poll=self._poll)
        found: list[int] = tensor.tolist()
        return found

    def _now(self) -> float:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()


def _free_bytes(world: World) -> int:
    """Memory that this rank may take for its buffers."""
    if world.device.type == "cuda":
        return int(torch.cuda.mem_get_info(world.device)[0] * _MEMORY_SHARE)
    # ranks that look like several nodes may still share one host's memory
    return int(psutil.virtual_memory().available * _MEMORY_SHARE / world.world_size)
