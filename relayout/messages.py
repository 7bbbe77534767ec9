"""Messages: the rounds of one rank as packing, messages and unpacking over its storages, all views made once.

``compile_round(traffic, number, held, buffer)`` makes what ``execute.Mover`` runs in one round. Local.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

from relaymeter.relayout.packing import Copies, MoveStorages, gather_copies, local_copies, scatter_copies
from relaymeter.relayout.traffic import Traffic, Way

__all__ = ["Flat", "Round", "compile_round"]

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

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes of the messages that the rank sends."""
        return sum(tensor.numel() for _, tensor in self.sends)

    @cached_property
    def received_bytes(self) -> int:
        """Bytes of the messages that the rank receives."""
        return sum(tensor.numel() for _, tensor in self.receives)


def compile_round(traffic: Traffic, number: int, held: MoveStorages, buffer: torch.Tensor) -> Round:
    """The views of round ``number`` over ``held`` and ``buffer`` (1-D uint8, at least ``traffic.buffer_bytes``).

    Raises InputError where the storages do not fit the rows.
    """
    out, back = traffic.sends(number), traffic.receives(number)
    send, receive = buffer[: out.nbytes], buffer[out.nbytes : out.nbytes + back.nbytes]
    flat = None if traffic.executor == "send-recv" else Flat(send, out.splits, receive, back.splits)
    return Round(
        pack=gather_copies(out.packed, send, held),
        sends=_messages(traffic, out, held.read_runs(out.direct), send, 1),
        receives=_messages(traffic, back, held.written_runs(back.direct), receive, -1),
        flat=flat,
        unpack=scatter_copies(back.packed, receive, held),
        local=local_copies(traffic.local(number), held),
    )


def _messages(traffic: Traffic, way: Way, runs: list[torch.Tensor], buffer: torch.Tensor, sign: int) -> list[Message]:
    parts: dict[int, list[torch.Tensor]] = {}
    for rank, run in zip(way.direct_peer, runs, strict=True):
        parts.setdefault(rank, []).append(run)
    for rank, (begin, end) in enumerate(itertools.pairwise(way.borders)):
        if end > begin:
            parts.setdefault(rank, []).append(buffer[begin:end])
    # each rank begins with its neighbour, not all of them with rank 0
    order = sorted(parts, key=lambda rank: sign * (rank - traffic.rank) % traffic.world_size)
    return [(rank, part) for rank in order for part in parts[rank]]
