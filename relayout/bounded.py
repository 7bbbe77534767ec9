"""Bounded memory: a move that gives its source up as it goes, so that a rank never holds both layouts whole.

    source = OwnedStorages(storages)                    # takes every tensor out of the dict ``storages``
    mover = BoundedMover(schedule, rank, [layout], [source], destination, executor, max_extra_bytes=64 << 20)
    print(mover.notice)
    mover.run()
    new = mover.take()

on every rank of the group, once. A source storage is released as soon as the last round that reads it has passed, a
destination storage is allocated just before the first round that writes it; ``timeline`` knows in advance what that
holds. Where a move fails in the middle neither source nor destination is usable: only a checkpoint brings them back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.relayout.digest import POISON_BYTE
from relaymeter.relayout.execute import Hooks, MoveTiming, RoundRunner
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.memory import PeakMemory, release_free_pages
from relaymeter.relayout.messages import Round, compile_round
from relaymeter.relayout.packing import MoveStorages, Storages, check_extents
from relaymeter.relayout.segments import source_space
from relaymeter.relayout.timeline import Timeline
from relaymeter.relayout.traffic import RunnableSchedule
from relaymeter.relayout.transport import MAX_MESSAGE_BYTES

__all__ = ["BoundedMover", "OwnedStorages"]


class OwnedStorages:
    """One rank's storages of one layout, by tensor name, that nothing else refers to: letting go of one frees it.

    ``refusal`` says why a storage could not be freed, where that is so; a ``BoundedMover`` raises it on every rank
    before anything moves.
    """

    def __init__(self, storages: dict[str, torch.Tensor]) -> None:
        """Take every tensor out of ``storages``, which is empty afterwards. The caller keeps no other reference."""
        self._held: dict[str, torch.Tensor] = {}
        problems = []
        for name in list(storages):
            tensor = storages.pop(name)
            whole, more = tensor.untyped_storage().nbytes(), _references(tensor) - _own_references()
            if whole > tensor.nbytes:
                problems.append(
                    f"the storage of {name} is a view of {whole} bytes: its {tensor.nbytes} cannot be freed alone"
                )
            elif more > 0:
                problems.append(f"the storage of {name} is referred to elsewhere ({more} times): drop that first")
            self._held[name] = tensor
        self.refusal = problems[0] if problems else ""
        if len(problems) > 1:
            self.refusal += f" (and {len(problems) - 1} more such storages)"

    @property
    def storages(self) -> Mapping[str, torch.Tensor]:
        """What is held now. A reference kept beyond the move defeats the purpose."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(tensor.nbytes for tensor in self._held.values())

    def release(self, names: Sequence[str]) -> int:
        """Let go of the storages of ``names``. Returns their bytes."""
        return sum(self._held.pop(name).nbytes for name in names if name in self._held)


def _references(tensor: torch.Tensor) -> int:
    """References to a tensor and to its memory, those of this call included."""
    return sys.getrefcount(tensor) + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _own_references() -> int:
    """What ``_references`` says of a tensor that only its caller refers to."""
    tensor = torch.empty(1)
    return _references(tensor)


class BoundedMover(RoundRunner):
    """One rank's part of a bounded move. Every rank of the group makes one; it runs once.

    ``MoveTiming.peak_bytes`` of its ``run`` is the measured counterpart of ``predicted_extra_bytes``: the peak of this
    process, less the larger of the rank's two layouts. On a CPU that is resident memory as the kernel counts it. glibc
    keeps what is freed below its mmap threshold, which grows up to 32 MiB, so free pages are handed back after every
    round that released something (see ``memory.release_free_pages``). On CUDA it is what tensors occupy, not what the
    caching allocator keeps.
    """

    _consequence = "and neither the source nor the destination is usable: the move gave up the one to fill the other"

    def __init__(
        self,
        schedule: RunnableSchedule,
        rank: int,
        source_layouts: Sequence[Layout],
        sources: Sequence[OwnedStorages],
        destination: Layout,
        executor: str,
        *,
        max_extra_bytes: int | None = None,
        device: torch.device | str = "cpu",
        say: Callable[[str], None] | None = None,
        group: dist.ProcessGroup | None = None,
        time_limit_s: float = 120.0,
        heartbeat: Heartbeat | None = None,
        hooks: Hooks | None = None,
        message_cap_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """``sources`` own this rank's storages of the ``source_layouts``, in the order in which they were planned.

        ``say`` is told ``notice`` before the move. A rank that would exceed ``max_extra_bytes``, whose storages do not
        fit or could not be freed, refuses; ``agree`` and ``run`` raise that on every rank, and nothing is released.
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
        self._device = torch.device(device)
        self._sources, self._say = list(sources), say
        self._names = [spec.name for spec in schedule.tensors]
        self._layouts = list(source_layouts)
        self._size = [destination.placements[name].storage.get(rank, 0) for name in self._names]
        self._made: dict[str, torch.Tensor] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._started = self._ended = False
        self.timeline = Timeline.of(self._traffic, self._names, source_layouts, destination)
        self.held_bytes = 0
        """The most bytes of storages and buffers that were held in any round so far."""
        extra = self.timeline.extra_bytes
        if max_extra_bytes is not None and extra > max_extra_bytes:
            self._refusal = (
                f"the move needs {extra} bytes beyond the larger layout of rank {rank}, {max_extra_bytes} are allowed: "
                f"choose a smaller bucket_bytes or set --max-extra {extra} or more"
            )
        try:
            self._check()
        except InputError as error:
            self._refusal = str(error)

    @property
    def notice(self) -> str:
        """What the caller should print before the move: that it gives the source up, and what it will hold."""
        nbytes = sum(source.nbytes for source in self._sources)
        names = " and ".join(layout.name for layout in self._layouts)
        return (
            f"rank {self._rank}: this move gives up its source: {nbytes} bytes of layout {names} are released as they "
            f"are read, at most {self.timeline.extra_bytes} bytes are held beyond the larger layout; should it fail, "
            "neither source nor destination is usable"
        )

    def run(self) -> MoveTiming:
        """Move everything, once. Collective over the group; agrees first where ``agree`` was not called.

        Raises what ``Mover.run`` raises; after any error but PlanDisagreement neither the source nor the destination is
        usable on any rank.
        """
        if self._started:
            raise InputError("a bounded move runs once: its source has been given up")
        if not self._agreed:
            self.agree()
        if self._say is not None:
            self._say(self.notice)
        self._started = True
        timing = super().run()
        if not self._traffic.rounds:
            self._release(-1)
            self._end()
        self._ended = True
        return timing

    def take(self) -> dict[str, torch.Tensor]:
        """Hand over the destination's storages, 1-D by tensor name, after a move that ended well.

        Raises InputError where there was none; what a failed move left is not handed out.
        """
        if not self._ended:
            what = "failed: neither its source nor its destination is usable" if self._started else "has not run"
            raise InputError(f"the bounded move {what}")
        made, self._made = self._made, {}
        return made

    def _check(self) -> None:
        """Raise InputError where a source cannot be freed or a row does not fit."""
        table, rank = self._traffic.table, self._rank
        if len(self._sources) != len(self._layouts):
            raise InputError(f"{len(self._layouts)} source layouts need as many storages, got {len(self._sources)}")
        for number, (source, layout) in enumerate(zip(self._sources, self._layouts, strict=True)):
            where = f"rank {rank}, source layout {layout.name}"
            if source.refusal:
                raise InputError(f"{where}: {source.refusal}")
            have = {name: tensor.numel() for name, tensor in source.storages.items()}
            wanted = {name: place.storage.get(rank, 0) for name, place in layout.placements.items()}
            odd = [name for name in {**wanted, **have} if wanted.get(name, 0) != have.get(name, 0)]
            if odd:
                raise InputError(
                    f"{where}: the storage of {odd[0]} has {have.get(odd[0], 0)} elements, the layout says "
                    f"{wanted.get(odd[0], 0)}"
                )
            rows = table.take((table.src_rank == rank) & (table.src_space == source_space(number)))
            Storages(self._schedule.source_tensors, source.storages, where).check(rows, "src")
        check_extents(
            table.take(table.dst_rank == rank), "dst", np.asarray(self._size), self._names, f"rank {rank}, destination"
        )

    def _step(self, number: int) -> Round:
        if number == 0:
            self._release(-1)
            self._buffer = torch.zeros(self.buffer_bytes, dtype=torch.uint8, device=self._device)
        self._allocate(number)
        owned = [source.storages for source in self._sources]
        held = MoveStorages(self._schedule.tensors, self._schedule.source_tensors, owned, self._made, self._rank)
        now = self.buffer_bytes + sum(t.nbytes for storages in (*owned, self._made) for t in storages.values())
        self.held_bytes = max(self.held_bytes, now)
        return compile_round(self._traffic, number, held, self._buffer)

    def _finished(self, number: int) -> None:
        self._release(number)
        if number == self._traffic.rounds - 1:
            self._end()

    def _end(self) -> None:
        """Let go of the buffer and of what is left of the source, and make the storages that no round wrote."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._allocate(self._traffic.rounds)

    def _allocate(self, number: int) -> None:
        """Make the destination storages that round ``number`` is the first to write, filled with poison."""
        for index in np.flatnonzero(self.timeline.first_write == number).tolist():
            name, size = self._names[index], self._size[index]
            if size:
                dtype = getattr(torch, self._schedule.tensors[index].dtype)
                self._made[name] = torch.empty(size, dtype=dtype, device=self._device)
                self._made[name].view(torch.uint8).fill_(POISON_BYTE)

    def _release(self, number: int) -> None:
        """Let go of the source storages that round ``number`` was the last to read."""
        freed = 0
        for source, last in zip(self._sources, self.timeline.last_read, strict=True):
            freed += source.release([self._names[index] for index in np.flatnonzero(last == number).tolist()])
        if freed and self._device.type == "cpu":
            release_free_pages()

    def _peak(self, peak: PeakMemory) -> int | None:
        if peak.bytes is None:
            return None
        old, new = self.timeline.old_bytes, self.timeline.new_bytes
        return max(0, peak.bytes + old - max(old, new))
