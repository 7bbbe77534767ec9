"""Execution: run a schedule round by round, pack, exchange, unpack, and fail on every rank or on none.

``Mover(schedule, rank, source, destination, executor).run()`` on every rank of the group moves everything once and may
be repeated. The destination counts as valid only after its digest was compared. The source is never written.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import InputError, PlanDisagreement
from relaymeter.relayout.agreement import agree_on_move, expected_messages
from relaymeter.relayout.digest import DIGEST_VERSION, POISON_BYTE
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.memory import PeakMemory
from relaymeter.relayout.messages import Round, compile_rounds
from relaymeter.relayout.packing import Storages
from relaymeter.relayout.segments import DIRECT_MIN_BYTES, SegmentTable
from relaymeter.relayout.transport import (
    EXECUTORS,
    MAX_MESSAGE_BYTES,
    control_device,
    exchange_flat,
    exchange_messages,
    wait_for,
)

__all__ = ["Hooks", "MoveTiming", "Mover", "RunnableSchedule", "poison"]


class RunnableSchedule(Protocol):
    """What a Mover needs of a schedule."""

    @property
    def tensors(self) -> Sequence[TensorSpec]: ...
    @property
    def rounds(self) -> int: ...
    @property
    def input_hash(self) -> bytes: ...
    def segments_for(self, rank: int) -> SegmentTable: ...


@dataclass(frozen=True)
class Hooks:
    """Faults for tests: called before each round, and for each received message before it is unpacked."""

    on_round: Callable[[int], None] | None = None
    on_receive: Callable[[int, int, torch.Tensor], None] | None = None


@dataclass(frozen=True)
class MoveTiming:
    """One move on one rank, in seconds and bytes.

    ``total_s`` is from the first round to the end of the last; ``peak_bytes`` what the move held beyond the two layouts
    at its peak, buffers included (None where unknown); ``sent_bytes`` and ``received_bytes`` what its messages carried.
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


class Mover:
    """One rank's part of a move, compiled once: message lists, views and buffers. Every rank of the group makes one."""

    def __init__(
        self,
        schedule: RunnableSchedule,
        rank: int,
        source: Mapping[str, torch.Tensor],
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

        ``rank`` is the rank in ``group``. Raises InputError on an unknown executor. Storages that do not fit are this
        rank's refusal, which ``agree`` raises on every rank.
        """
        if executor not in EXECUTORS:
            raise InputError(f"executor {executor!r} is not one of {', '.join(EXECUTORS)}")
        self._rank, self._executor, self._group = rank, executor, group
        self._world = dist.get_world_size(group)
        self._limit_s, self._heartbeat, self._hooks = time_limit_s, heartbeat, hooks or Hooks()
        self._cap = message_cap_bytes
        self._destination = destination
        held = [*source.values(), *destination.values()]
        self._device = held[0].device if held else control_device(group)
        self._table = schedule.segments_for(rank)
        self._itemsize = np.asarray([spec.itemsize for spec in schedule.tensors], dtype=np.int64)
        self._input_hash = schedule.input_hash
        self._round_count = schedule.rounds
        self._refusal = ""
        try:
            self._rounds, self._buffer = compile_rounds(
                self._table,
                schedule.rounds,
                rank=rank,
                world_size=self._world,
                executor=executor,
                source=Storages(schedule.tensors, source, rank, "source"),
                destination=Storages(schedule.tensors, destination, rank, "destination"),
                device=self._device,
            )
        except InputError as error:  # raising here would leave the other ranks waiting in agree
            self._refusal = str(error)
            self._rounds, self._buffer = [], torch.empty(0, dtype=torch.uint8)
        else:
            self._refuse_large_messages()
        self._agreed = False
        self._broken = False

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the message buffers that this rank holds."""
        return self._buffer.numel()

    def poison(self) -> None:
        """Fill this rank's destination storages and message buffers with the poison pattern, before a move under test.

        The buffers too: a message that never came must not be unpacked from what the move before left there. Local.
        """
        poison(self._destination)
        self._buffer.fill_(POISON_BYTE)

    def agree(self) -> None:
        """Raise PlanDisagreement on every rank unless all are about to run the same move. Collective, needed once."""
        self._refuse_if_broken()
        head = f"{self._executor} {DIRECT_MIN_BYTES} {DIGEST_VERSION} {self._cap}".encode()
        expected = expected_messages(self._table, self._itemsize, self._rank, self._round_count, self._world)
        with self._guard("the agreement before the move") as deadline:
            agree_on_move(
                hashlib.sha256(head + self._input_hash).digest(),
                expected,
                refusal=self._refusal,
                group=self._group,
                deadline=deadline,
                poll=self._poll,
            )
        self._agreed = True

    def run(self) -> MoveTiming:
        """Move everything once. Collective over the group; agrees first where ``agree`` was not called.

        Raises, on every rank and within the time limit, RankLost naming who stopped the move or MoveTimeout; the
        destination is not usable then, and neither is the group.
        """
        self._refuse_if_broken()
        if not self._agreed:
            self.agree()
        pack_s = communicate_s = unpack_s = 0.0
        with self._guard("the move") as deadline, PeakMemory(self._device) as peak:
            self._meet(deadline)
            begin = self._now()
            for number, step in enumerate(self._rounds):
                if self._hooks.on_round is not None:
                    self._hooks.on_round(number)
                start = self._now()
                step.pack.run()
                packed = self._now()
                self._exchange(step, number, deadline)
                arrived = self._now()
                if self._hooks.on_receive is not None:
                    for peer, tensor in step.receives:
                        self._hooks.on_receive(number, peer, tensor)
                step.unpack.run()
                step.local.run()
                pack_s += packed - start
                communicate_s += arrived - packed
                unpack_s += self._now() - arrived
            total_s = self._now() - begin
            self._meet(deadline)
        return MoveTiming(
            pack_s=pack_s,
            communicate_s=communicate_s,
            unpack_s=unpack_s,
            total_s=total_s,
            peak_bytes=None if peak.bytes is None else peak.bytes + self.buffer_bytes,
            sent_bytes=sum(tensor.numel() for step in self._rounds for _, tensor in step.sends),
            received_bytes=sum(tensor.numel() for step in self._rounds for _, tensor in step.receives),
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise InputError("an earlier move over this group failed: start the ranks again before the next one")

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[float]:
        try:
            with guarded(
                what, rank=self._rank, time_limit_s=self._limit_s, heartbeat=self._heartbeat, group=self._group
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

    def _refuse_large_messages(self) -> None:
        for step in self._rounds:
            size = max((tensor.numel() for _, tensor in step.sends + step.receives), default=0)
            if step.flat is not None and size > self._cap:
                self._refusal = (
                    f"{size} bytes with one rank in one all-to-all are more than the {self._cap} of one message: "
                    "choose a smaller bucket_bytes"
                )

    def _exchange(self, step: Round, number: int, deadline: float) -> None:
        group, poll, flat = self._group, self._poll, step.flat
        if flat is None:
            exchange_messages(
                step.sends, step.receives, tag=number, group=group, deadline=deadline, poll=poll, cap=self._cap
            )
        else:
            exchange_flat(
                flat.send,
                flat.send_splits,
                flat.receive,
                flat.receive_splits,
                group=group,
                deadline=deadline,
                poll=poll,
            )

    def _meet(self, deadline: float) -> None:
        """Wait for every rank: before, so that no rank's time counts another's delay; after, so that a rank that is
        through with its own messages still learns that the move failed elsewhere."""
        work = dist.all_reduce(torch.zeros(1, device=control_device(self._group)), group=self._group, async_op=True)
        wait_for([work] if work is not None else [], group=self._group, deadline=deadline, poll=self._poll)
