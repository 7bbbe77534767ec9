"""Execution: run a schedule round by round, pack, exchange, unpack, and fail on every rank or on none.

``Mover(schedule, rank, source, destination, executor).run()`` on every rank of the group moves everything once and may
be repeated. The destination counts as valid only after its digest was compared. The source is never written; a move
that gives the source up as it goes, to spare memory, is ``bounded.BoundedMover``.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from relaymeter.errors import DigestMismatch, InputError, PlanDisagreement
from relaymeter.relayout.agreement import agree_on_move, expected_messages
from relaymeter.relayout.digest import DIGEST_VERSION, POISON_BYTE
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.memory import PeakMemory
from relaymeter.relayout.messages import Round, compile_round
from relaymeter.relayout.packing import MoveStorages
from relaymeter.relayout.segments import DIRECT_MIN_BYTES
from relaymeter.relayout.traffic import RunnableSchedule, Traffic
from relaymeter.relayout.transport import (
    EXECUTORS,
    MAX_MESSAGE_BYTES,
    Waiter,
    connect_all,
    control_device,
    exchange_flat,
    exchange_messages,
    wait_for,
)

__all__ = ["Hooks", "MoveTiming", "Mover", "RoundRunner", "poison"]


@dataclass(frozen=True)
class Hooks:
    """Faults for tests: called before each round, after its exchange with the seconds that took (a wait there counts as
    communication), and for each received message before it is unpacked."""

    on_round: Callable[[int], None] | None = None
    on_exchange: Callable[[int, float], None] | None = None
    on_receive: Callable[[int, int, torch.Tensor], None] | None = None


@dataclass(frozen=True)
class MoveTiming:
    """One move on one rank, in seconds and bytes.

    ``total_s`` is from the first round to the end of the last; ``communicate_s`` holds the copies within the rank too,
    which run beside the exchange. ``peak_bytes`` is what the move held beyond the two layouts at its peak, buffers
    included (None where unknown); ``sent_bytes`` and ``received_bytes`` what the transport says that it carried.
    """

    pack_s: float
    communicate_s: float
    unpack_s: float
    total_s: float
    peak_bytes: int | None
    sent_bytes: int
    received_bytes: int


def poison(storages: Mapping[str, torch.Tensor]) -> None:
    """Fill every byte of ``storages`` with ``digest.POISON_BYTE``, so that what a move leaves out cannot look right."""
    for storage in storages.values():
        if storage.numel():
            storage.detach().view(torch.uint8).fill_(POISON_BYTE)


class RoundRunner(ABC):
    """One rank's part of a move, run round by round: what all kinds of movers have in common.

    A subclass makes the rounds: ``_step`` gives the views of one, and ``_finished`` hears that one has ended.
    """

    _consequence = "and the destination is not usable"

    def __init__(
        self,
        schedule: RunnableSchedule,
        rank: int,
        executor: str,
        *,
        group: dist.ProcessGroup | None = None,
        time_limit_s: float = 120.0,
        heartbeat: Heartbeat | None = None,
        hooks: Hooks | None = None,
        message_cap_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        if executor not in EXECUTORS:
            raise InputError(f"executor {executor!r} is not one of {', '.join(EXECUTORS)}")
        me = dist.get_rank(group)
        if me != rank:
            who = f"is rank {me} of the group" if me >= 0 else "is no member of the group"
            raise InputError(f"a mover of rank {rank} was asked for, but this process {who}: each member makes its own")
        self._rank, self._executor, self._group = rank, executor, group
        self._world = dist.get_world_size(group)
        self._limit_s, self._heartbeat, self._hooks = time_limit_s, heartbeat, hooks or Hooks()
        self._cap = message_cap_bytes
        self._waiter = Waiter()
        self._schedule = schedule
        self._traffic = Traffic(schedule, rank, self._world, executor)
        self._device = control_device(group)
        self._refusal = ""
        largest = self._traffic.most_packed_bytes
        if executor == "all-to-all" and largest > self._cap:
            self._refusal = (
                f"{largest} bytes with one rank in one all-to-all are more than the {self._cap} of one message: "
                "choose a smaller bucket_bytes"
            )
        self._agreed = False
        self._broken = False

    @abstractmethod
    def _step(self, number: int) -> Round: ...

    @abstractmethod
    def _finished(self, number: int) -> None: ...

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the message buffers that this rank needs."""
        return self._traffic.buffer_bytes

    def agree(self) -> None:
        """Raise PlanDisagreement on every rank unless all are about to run the same move. Collective, needed once."""
        self._refuse_if_broken()
        with self._guard("the agreement before the move", "and nothing was moved") as deadline:
            agree_on_move(
                self._hash(),
                expected_messages(
                    self._traffic.table, self._traffic.itemsize, self._rank, self._traffic.rounds, self._world
                ),
                refusal=self._refusal,
                group=self._group,
                deadline=deadline,
                poll=self._poll,
            )
            connect_all(self._group, deadline=deadline, poll=self._poll)
        self._agreed = True

    def run(self) -> MoveTiming:
        """Move everything once. Collective over the group; agrees first where ``agree`` was not called.

        Raises, on every rank and within the time limit, RankLost naming who stopped the move or MoveTimeout; the
        destination is not usable then, and neither is the group. DigestMismatch: the transport carried other bytes than
        were planned.
        """
        self._refuse_if_broken()
        if not self._agreed:
            self.agree()
        pack_s = communicate_s = unpack_s = 0.0
        sent = received = 0
        with self._guard("the move", self._consequence) as deadline, PeakMemory(self._device) as peak:
            self._meet(deadline)
            begin = self._now()
            for number in range(self._traffic.rounds):
                start, packed, arrived, moved = self._round(number, deadline)
                self._finished(number)
                pack_s += packed - start
                communicate_s += arrived - packed
                unpack_s += self._now() - arrived
                sent, received = sent + moved[0], received + moved[1]
            total_s = self._now() - begin
            self._meet(deadline)
        return MoveTiming(
            pack_s=pack_s,
            communicate_s=communicate_s,
            unpack_s=unpack_s,
            total_s=total_s,
            peak_bytes=self._peak(peak),
            sent_bytes=sent,
            received_bytes=received,
        )

    def _round(self, number: int, deadline: float) -> tuple[float, float, float, tuple[int, int]]:
        """One round: when it began, had packed and had all messages, and the bytes it sent and received."""
        if self._hooks.on_round is not None:
            self._hooks.on_round(number)
        start = self._now()
        step = self._step(number)
        step.pack.run()
        packed = self._now()
        moved = self._exchange(step, number, deadline)
        arrived = self._now()
        if self._hooks.on_exchange is not None:
            self._hooks.on_exchange(number, arrived - packed)
            arrived = self._now()
        if self._hooks.on_receive is not None:
            for peer, tensor in step.receives:
                self._hooks.on_receive(number, peer, tensor)
        step.unpack.run()
        return start, packed, arrived, moved

    def _peak(self, peak: PeakMemory) -> int | None:
        return None if peak.bytes is None else peak.bytes + self.buffer_bytes

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _hash(self) -> bytes:
        casts = [
            f"{arrives.name} {leaves.dtype} {arrives.dtype}"
            for arrives, leaves in zip(self._schedule.tensors, self._schedule.source_tensors, strict=True)
            if arrives.dtype != leaves.dtype
        ]
        head = f"{type(self).__name__} {self._executor} {DIRECT_MIN_BYTES} {DIGEST_VERSION} {self._cap} {casts}"
        return hashlib.sha256(head.encode() + self._schedule.input_hash).digest()

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise InputError("an earlier move over this group failed: start the ranks again before the next one")

    @contextlib.contextmanager
    def _guard(self, what: str, consequence: str) -> Iterator[float]:
        try:
            with guarded(
                what,
                rank=self._rank,
                time_limit_s=self._limit_s,
                heartbeat=self._heartbeat,
                group=self._group,
                consequence=consequence,
            ) as deadline:
                yield deadline
        except PlanDisagreement:
            raise
        except BaseException:
            self._broken = True
            raise

    @property
    def _poll(self) -> Callable[[], None] | None:
        return None if self._heartbeat is None else self._heartbeat.poll

    def _exchange(self, step: Round, number: int, deadline: float) -> tuple[int, int]:
        """One round's messages, and beside them its copies within the rank. Returns bytes sent and received."""
        group, poll, flat, waiter = self._group, self._poll, step.flat, self._waiter
        if flat is None:
            moved = exchange_messages(
                step.sends,
                step.receives,
                tag=number,
                group=group,
                deadline=deadline,
                poll=poll,
                cap=self._cap,
                waiter=waiter,
                meanwhile=step.local.run,
            )
        else:
            moved = exchange_flat(
                flat.send,
                flat.send_splits,
                flat.receive,
                flat.receive_splits,
                group=group,
                deadline=deadline,
                poll=poll,
                waiter=waiter,
                meanwhile=step.local.run,
            )
        if moved != (step.sent_bytes, step.received_bytes):
            raise DigestMismatch(
                f"round {number}: the transport carried {moved[0]} of {step.sent_bytes} bytes from rank {self._rank} "
                f"and {moved[1]} of {step.received_bytes} to it"
            )
        return moved

    def _meet(self, deadline: float) -> None:
        """Wait for every rank: before, so that no rank's time counts another's delay; after, so that a rank that is
        through with its own messages still learns that the move failed elsewhere."""
        work = dist.all_reduce(torch.zeros(1, device=control_device(self._group)), group=self._group, async_op=True)
        wait_for(
            [work] if work is not None else [],
            group=self._group,
            deadline=deadline,
            poll=self._poll,
            waiter=self._waiter,
        )


class Mover(RoundRunner):
    """One rank's part of a move, compiled once: message lists, views and buffers. Every rank of the group makes one."""

    def __init__(
        self,
        schedule: RunnableSchedule,
        rank: int,
        source: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]],
        destination: Mapping[str, torch.Tensor],
        executor: str,
        *,
        group: dist.ProcessGroup | None = None,
        time_limit_s: float = 120.0,
        heartbeat: Heartbeat | None = None,
        hooks: Hooks | None = None,
        message_cap_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """``source`` and ``destination`` map tensor names to this rank's 1-D storages, whose addresses must stay.

        ``source`` is one such mapping, or one for each source layout of the move, in the order in which they were
        planned. ``rank`` is the rank in ``group``. Raises InputError on an unknown executor. Storages that do not fit,
        or that share memory with the destination's, are this rank's refusal, which ``agree`` raises on every rank.
        """
        super().__init__(
            schedule,
            rank,
            executor,
            group=group,
            time_limit_s=time_limit_s,
            heartbeat=heartbeat,
            hooks=hooks,
            message_cap_bytes=message_cap_bytes,
        )
        sources = [source] if isinstance(source, Mapping) else list(source)
        self._destination = destination
        held = [tensor for storages in (*sources, destination) for tensor in storages.values()]
        if held:
            self._device = held[0].device
        self._rounds: list[Round] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        try:
            storages = MoveStorages(schedule.tensors, schedule.source_tensors, sources, destination, rank)
            # zeros, so that all pages are resident before the first move is timed
            buffer = torch.zeros(self._traffic.buffer_bytes, dtype=torch.uint8, device=self._device)
            self._rounds = [compile_round(self._traffic, number, storages, buffer) for number in range(schedule.rounds)]
            self._buffer = buffer
        except InputError as error:  # raising here would leave the other ranks waiting in agree
            self._refusal = str(error)

    def poison(self) -> None:
        """Fill this rank's destination storages and message buffers with the poison pattern, before a move under test.

        The buffers too: a message that never came must not be unpacked from what the move before left there. Local.
        """
        poison(self._destination)
        self._buffer.fill_(POISON_BYTE)

    def _step(self, number: int) -> Round:
        return self._rounds[number]

    def _finished(self, number: int) -> None:
        """Nothing to do: every view stays."""
