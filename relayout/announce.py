"""One JSON value from the ranks that have it to every rank, or one refusal on all of them.

``found = announce(value_or_none, refusal_or_none, "the source engine")`` on every rank of the group. Collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import InputError, PlanDisagreement
from relaymeter.relayout.plain_state import field_differences
from relaymeter.relayout.transport import control_device, wait_for

__all__ = ["announce", "refuse_together", "tell_all"]

Poll = Callable[[], None]


def refuse_together(refusal: Exception | None, *, deadline: float | None = None, poll: Poll | None = None) -> None:
    """Raise on every rank where one of them has a refusal: its own error there, an InputError naming the lowest rank
    with its text on the others. Collective over the world."""
    text = "" if refusal is None else str(refusal) or type(refusal).__name__
    sizes = _gather([len(text.encode())], deadline, poll)[:, 0]
    refusing = np.flatnonzero(sizes)
    if not len(refusing):
        return
    first = int(refusing[0])
    told = _broadcast(text, first, int(sizes[first]), deadline, poll)
    if refusal is not None:
        raise refusal
    raise InputError(f"rank {first}: {told}")


def announce(value: Any | None, what: str, *, deadline: float | None = None, poll: Poll | None = None) -> Any | None:
    """The JSON-able ``value`` of the lowest rank that has one (not None), on every rank; None where none has.

    Collective over the world. Raises PlanDisagreement on every rank where two have different values, naming ``what``,
    the two ranks and the places that differ.
    """
    text = "" if value is None else json.dumps(value)
    digest = hashlib.sha256(text.encode()).digest()
    mine = [len(text.encode()), *(int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 32, 8))]
    heads = _gather(mine, deadline, poll)
    having = np.flatnonzero(heads[:, 0])
    if not len(having):
        return None
    first = int(having[0])
    told = json.loads(_broadcast(text, first, int(heads[first, 0]), deadline, poll))
    others = [int(rank) for rank in having if (heads[rank] != heads[first]).any()]
    if others:
        odd = others[0]
        other = json.loads(_broadcast(text, odd, int(heads[odd, 0]), deadline, poll))
        places = list(field_differences(told, other, sides=(f"rank {first}", f"rank {odd}")))
        shown = "; ".join(places[:3]) + (f"; and {len(places) - 3} more" if len(places) > 3 else "")
        raise PlanDisagreement(f"ranks {first} and {odd} tell different things of {what}: {shown}")
    return told


def _gather(values: list[int], deadline: float | None, poll: Poll | None) -> Any:
    mine = torch.tensor(values, dtype=torch.int64, device=control_device())
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(every, mine, async_op=True)
    wait_for([work] if work is not None else [], deadline=deadline, poll=poll)
    return torch.stack(every).cpu().numpy()


def _broadcast(text: str, source: int, size: int, deadline: float | None, poll: Poll | None) -> str:
    data = text.encode() if dist.get_rank() == source else bytes(size)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(control_device())
    work = dist.broadcast(buffer, source, async_op=True)
    wait_for([work] if work is not None else [], deadline=deadline, poll=poll)
    return bytes(buffer.cpu().numpy().tobytes()).decode()


def tell_all(value: Any, *, deadline: float | None = None, poll: Poll | None = None) -> list[Any]:
    """The JSON-able ``value`` of every rank, by rank, on every rank. Collective over the world; for small values."""
    data = json.dumps(value).encode()
    sizes = _gather([len(data)], deadline, poll)[:, 0]
    mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    mine = mine.to(control_device())
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(every, mine, async_op=True)
    wait_for([work] if work is not None else [], deadline=deadline, poll=poll)
    return [
        json.loads(bytes(row[:size].cpu().numpy().tobytes())) for row, size in zip(every, sizes.tolist(), strict=True)
    ]
