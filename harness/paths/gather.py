"""Gather, then slice: how weights usually get from ZeRO-3 partitions into tensor-parallel shards.

Every rank gathers each weight whole, out of everybody's partition, and copies its own shard out of it, as DeepSpeed's
HybridEngine, TRL and OpenRLHF do. ``GatherThenSlice(source, destination, rank, held, into).run()`` on every rank of the
group. Every view and buffer is made beforehand: only collectives and copies are left for ``run``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.relayout.geometry import row_major_strides
from relaymeter.relayout.layout import Layout, Placement, TensorSpec

__all__ = ["GatherThenSlice"]

_Copy = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Step:
    """One collective, ``send`` of every rank into ``whole``, and the copies before and after it: (target, source)."""

    before: list[_Copy]
    send: torch.Tensor
    whole: torch.Tensor
    after: list[_Copy]


class GatherThenSlice:
    """One rank's part, compiled once. Every rank of the group makes one and runs it as often as it likes."""

    def __init__(
        self,
        source: Layout,
        destination: Layout,
        rank: int,
        held: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor],
        *,
        group: dist.ProcessGroup | None = None,
        together_bytes: int = 0,
    ) -> None:
        """``held`` and ``into`` map names to this rank's 1-D storages of ``source`` and ``destination``.

        ``together_bytes`` bounds the partitions of several weights of one dtype that share a collective: they are
        copied into one message, and the weights are put together out of it. 0: a collective for each weight, straight
        out of its partition. Raises InputError where ``source`` is no even cut over exactly the ranks of the group.
        """
        self._source, self._destination, self._held, self._into = source, destination, held, into
        self._rank, self._group, self._world = rank, group, dist.get_world_size(group)
        for name, spec in source.specs.items():
            _check_partition(spec, source.placements[name], self._world)
        batches = list(self._batches(together_bytes))
        shared = [batch for batch in batches if len(batch) > 1]
        message = max((sum(map(self._part_bytes, batch)) for batch in batches), default=0)
        # zeros, so that all pages are resident before the first run is timed
        self._whole = torch.zeros(message * self._world, dtype=torch.uint8)
        self._send = torch.zeros(message if shared else 0, dtype=torch.uint8)
        joined = max((self._part_bytes(spec) * self._world for batch in shared for spec in batch), default=0)
        self._joined = torch.zeros(joined, dtype=torch.uint8)
        self._steps = [self._step(batch) for batch in batches]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this rank holds."""
        return self._whole.numel() + self._send.numel() + self._joined.numel()

    @property
    def received_bytes(self) -> int:
        """Bytes that one run brings to this rank from the others."""
        return sum(step.send.numel() * step.send.element_size() * (self._world - 1) for step in self._steps)

    @property
    def collectives(self) -> int:
        """Collectives of one run."""
        return len(self._steps)

    def run(self) -> None:
        """Bring every shard of this rank up to date. Collective."""
        for step in self._steps:
            for target, view in step.before:
                target.copy_(view)
            dist.all_gather_into_tensor(step.whole, step.send, group=self._group)
            for target, view in step.after:
                target.copy_(view)

    def _part_bytes(self, spec: TensorSpec) -> int:
        return self._source.placements[spec.name].storage[self._rank] * spec.itemsize

    def _batches(self, together_bytes: int) -> Iterator[list[TensorSpec]]:
        batch: list[TensorSpec] = []
        for name, spec in self._source.specs.items():
            if not spec.numel or name not in self._destination.specs:
                continue
            size = sum(map(self._part_bytes, [*batch, spec]))
            if batch and (size > together_bytes or batch[-1].dtype != spec.dtype):
                yield batch
                batch = []
            batch.append(spec)
        if batch:
            yield batch

    def _step(self, batch: Sequence[TensorSpec]) -> _Step:
        dtype = getattr(torch, batch[0].dtype)
        parts = [self._source.placements[spec.name].storage[self._rank] for spec in batch]
        total = sum(parts)
        whole = self._whole[: total * self._world * dtype.itemsize].view(dtype)
        if len(batch) == 1:
            return _Step([], self._held[batch[0].name], whole, self._shards(batch[0], whole))
        send = self._send[: total * dtype.itemsize].view(dtype)
        before: list[_Copy] = []
        after: list[_Copy] = []
        begin = 0
        for spec, part in zip(batch, parts, strict=True):
            before.append((send[begin : begin + part], self._held[spec.name]))
            joined = self._joined[: part * self._world * dtype.itemsize].view(dtype)
            columns = whole.view(self._world, total)[:, begin : begin + part]
            shards = self._shards(spec, joined)
            after += [(joined.view(self._world, part), columns), *shards] if shards else []
            begin += part
        return _Step(before, send, whole, after)

    def _shards(self, spec: TensorSpec, whole: torch.Tensor) -> list[_Copy]:
        """Copies of what the rank needs of a weight that lies in ``whole`` (1-D, padding last)."""
        place = self._destination.placements[spec.name]
        steps = row_major_strides(spec.shape)
        copies = []
        for piece in place.pieces_of(self._rank).tolist():
            shape = place.shape[piece].tolist()
            at = sum(lo * step for lo, step in zip(place.lo[piece].tolist(), steps, strict=True))
            target = self._into[spec.name].as_strided(
                shape, place.stride[piece].tolist(), self._into[spec.name].storage_offset() + int(place.offset[piece])
            )
            copies.append((target, whole.as_strided(shape, steps, whole.storage_offset() + at)))
        return copies


def _check_partition(spec: TensorSpec, place: Placement, world: int) -> None:
    """Refuse what one gather in order of the ranks would not put together."""
    part = -(-spec.numel // world)
    first = place.lo @ np.asarray(row_major_strides(spec.shape), dtype=np.int64)
    in_order = bool((first - place.rank * part == place.offset).all())
    complete = int(place.shape.prod(axis=1).sum()) == spec.numel
    even = not spec.numel or dict(place.storage) == dict.fromkeys(range(world), part)
    if not (in_order and complete and even):
        raise InputError(
            f"tensor {spec.name} {list(spec.shape)}: gathering needs equal ranges of {part} elements on ranks 0 to "
            f"{world - 1}, in order"
        )
