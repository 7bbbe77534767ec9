"""Messages: one rank's segments compiled into rounds of packing, messages and unpacking, as views made once.

``compile_rounds(table, rounds, rank=0, world_size=4, executor="send-recv", source=..., destination=..., device=...)``
gives what ``execute.Mover`` runs. Local; both ends of every message derive the same from the same rows.

Under send-recv a segment that is one run on both sides and has at least DIRECT_MIN_BYTES is a message of its own,
straight from storage into storage; all others of a pair and round are parts of one packed message, sent after those.
Under all-to-all everything is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from relaymeter.relayout.packing import (
    Copies,
    Storages,
    gather_copies,
    local_copies,
    part_offsets,
    read_views,
    scatter_copies,
    segment_bytes,
)
from relaymeter.relayout.segments import DIRECT_MIN_BYTES, SegmentTable

__all__ = ["Flat", "Round", "compile_rounds"]

Message = tuple[int, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Flat:
    """The operands of one all-to-all: uint8 tensors and the bytes of them that belong to each rank."""

    send: torch.Tensor
    send_splits: list[int]
    receive: torch.Tensor
    receive_splits: list[int]


@dataclass(frozen=True, eq=False)
class Round:
    """One round of one rank. ``sends`` and ``receives`` are (peer, uint8 view); ``flat`` is None under send-recv."""

    pack: Copies
    sends: list[Message]
    receives: list[Message]
    flat: Flat | None
    unpack: Copies
    local: Copies


def compile_rounds(
    table: SegmentTable,
    rounds: int,
    *,
    rank: int,
    world_size: int,
    executor: str,
    source: Storages,
    destination: Storages,
    device: torch.device,
) -> tuple[list[Round], torch.Tensor]:
    """Rounds of ``rank`` and the one buffer (uint8) that all of them use, as large as the fullest round needs.

    ``table`` holds the rows that ``rank`` sends or receives. Raises InputError where storages do not fit them.
    """
    compiler = _Compiler(rank, world_size, executor == "send-recv", source, destination)
    steps = [table.take(table.round == number) for number in range(rounds)]
    sizes = [(compiler.packed_bytes(step, "src"), compiler.packed_bytes(step, "dst")) for step in steps]
    # zeros, so that all pages are resident before the first move is timed
    buffer = torch.zeros(max((a + b for a, b in sizes), default=0), dtype=torch.uint8, device=device)
    compiled = [
        compiler.compile(step, buffer[:sent], buffer[sent : sent + received])
        for step, (sent, received) in zip(steps, sizes, strict=True)
    ]
    return compiled, buffer


@dataclass(frozen=True, eq=False)
class _Compiler:
    rank: int
    world_size: int
    allow_direct: bool
    source: Storages
    destination: Storages

    def packed_bytes(self, step: SegmentTable, side: Literal["src", "dst"]) -> int:
        """Bytes of the packed messages that the rank sends ("src") or receives ("dst") in a round."""
        rows = self._away(step, side)
        return part_offsets(segment_bytes(rows.take(~self._direct(rows)), self.source.itemsize))[1]

    def compile(self, step: SegmentTable, send: torch.Tensor, receive: torch.Tensor) -> Round:
        sends, send_splits, packed_out = self._messages(self._away(step, "src"), send, "src")
        receives, receive_splits, packed_in = self._messages(self._away(step, "dst"), receive, "dst")
        here = step.take((step.src_rank == self.rank) & (step.dst_rank == self.rank))
        return Round(
            pack=gather_copies(packed_out, send, self.source, self.destination),
            sends=sends,
            receives=receives,
            flat=None if self.allow_direct else Flat(send, send_splits, receive, receive_splits),
            unpack=scatter_copies(packed_in, receive, self.destination),
            local=local_copies(here, self.source, self.destination),
        )

    def _away(self, step: SegmentTable, side: Literal["src", "dst"]) -> SegmentTable:
        """Rows that leave or reach the rank, ordered by peer and, with one peer, as in the table."""
        mine, peer = (step.src_rank, step.dst_rank) if side == "src" else (step.dst_rank, step.src_rank)
        rows = np.flatnonzero((mine == self.rank) & (peer != self.rank))
        return step.take(rows[np.argsort(peer[rows], kind="stable")])

    def _direct(self, table: SegmentTable) -> NDArray[np.bool_]:
        large = segment_bytes(table, self.source.itemsize) >= DIRECT_MIN_BYTES
        return table.src_contiguous & table.dst_contiguous & large & self.allow_direct

    def _messages(
        self, table: SegmentTable, buffer: torch.Tensor, side: Literal["src", "dst"]
    ) -> tuple[list[Message], list[int], SegmentTable]:
        """Messages one way, packed bytes per rank, and the packed rows in the order of their parts in ``buffer``."""
        peer = table.dst_rank if side == "src" else table.src_rank
        direct = self._direct(table)
        packed, owner = table.take(~direct), peer[~direct]
        offsets, total = part_offsets(segment_bytes(packed, self.source.itemsize))
        borders = [*offsets.tolist(), total]
        first = np.searchsorted(owner, np.arange(self.world_size + 1)).tolist()
        splits = [borders[first[rank + 1]] - borders[first[rank]] for rank in range(self.world_size)]
        runs = table.take(direct)
        views = (
            read_views(runs, self.source, self.destination) if side == "src" else self.destination.views(runs, "dst")
        )
        parts: dict[int, list[torch.Tensor]] = {}
        for rank, view in zip(peer[direct].tolist(), views, strict=True):
            parts.setdefault(rank, []).append(view.view(-1).view(torch.uint8))
        for rank, size in enumerate(splits):
            if size:
                start = borders[first[rank]]
                parts.setdefault(rank, []).append(buffer[start : start + size])
        sign = 1 if side == "src" else -1  # each rank begins with its neighbour, not all of them with rank 0
        order = sorted(parts, key=lambda rank: sign * (rank - self.rank) % self.world_size)
        return [(rank, part) for rank in order for part in parts[rank]], splits, packed
