"""Small values told to all ranks of a group: one from the ranks that have it, a refusal on all, each rank's own.

    assembly = Assembly(group, deadline, poll)
    assembly.refuse(error_or_none)                              # raises on every rank where one has an error
    found = assembly.announce(value_or_none, "the source engine")
    table = assembly.numbers([bytes_held])                      # of every rank

Values are JSON; every method is collective over the group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relaymeter.errors import InputError, PlanDisagreement
from relaymeter.relayout.plain_state import field_differences
from relaymeter.relayout.transport import Waiter, control_device, wait_for

__all__ = ["Assembly"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Assembly:
    """The ranks of ``group`` (None: the world), who wait for each other until ``deadline`` (``time.monotonic()``; None:
    the group's own time limit). ``poll`` is called while waiting and may raise to stop; ``waiter`` is the thread that
    waits meanwhile, for a caller who has one."""

    group: dist.ProcessGroup | None = None
    deadline: float | None = None
    poll: Callable[[], None] | None = None
    waiter: Waiter | None = None

    def refuse(self, refusal: Exception | None) -> None:
        """Raise on every rank where one of them has a refusal: its own error there, an InputError with the text of the
        lowest such rank on the others."""
        self.numbers([], refusal)

    def numbers(self, values: Sequence[int], refusal: Exception | None = None) -> NDArray[np.int64]:
        """The ``values`` of every rank, [rank, value], as many on each. Raises as ``refuse``, in the same exchange."""
        text = "" if refusal is None else str(refusal) or type(refusal).__name__
        told = self._gather([len(text.encode()), *values])
        refusing = np.flatnonzero(told[:, 0])
        if not len(refusing):
            return told[:, 1:]
        first = int(refusing[0])
        reason = self._broadcast(text, first, int(told[first, 0]))
        if refusal is not None:
            raise refusal
        raise InputError(f"rank {self._world_rank(first)}: {reason}")

    def attempt(self, work: Callable[[], _T]) -> _T:
        """What ``work`` gives, which is this rank's own; an error in it is every rank's, as ``refuse`` says."""
        failed: Exception | None = None
        try:
            found = work()
        except Exception as error:
            failed = error
        self.refuse(failed)
        return found

    def announce(self, value: Any | None, what: str) -> Any | None:
        """The ``value`` of the lowest rank that has one (not None), on every rank, its dicts in that rank's order; None
        where none has.

        Raises PlanDisagreement on every rank where two have different values, naming ``what``, the two ranks and the
        places that differ.
        """
        return self.announce_beside(value, what, [])[0]

    def announce_beside(
        self, value: Any | None, what: str, numbers: Sequence[int], refusal: Exception | None = None
    ) -> tuple[Any | None, NDArray[np.int64]]:
        """``announce`` and ``numbers`` in one exchange, two where a rank has no value of its own or its dicts in
        another order."""
        text = "" if value is None else json.dumps(value)
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()  # equal in any order of dicts
        words = [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 32, 8)]
        order = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
        table = self.numbers([len(text.encode()), *words, order, *numbers], refusal)
        heads, orders, beside = table[:, :5], table[:, 5], table[:, 6:]
        having = np.flatnonzero(heads[:, 0])
        if not len(having):
            return None, beside
        first = int(having[0])
        others = [int(rank) for rank in having if (heads[rank, 1:] != heads[first, 1:]).any()]
        if not others and (orders == orders[first]).all():
            return json.loads(text), beside
        told = json.loads(self._broadcast(text, first, int(heads[first, 0])))
        if others:
            odd = others[0]
            other = json.loads(self._broadcast(text, odd, int(heads[odd, 0])))
            ranks = self._world_rank(first), self._world_rank(odd)
            places = list(field_differences(told, other, sides=(f"rank {ranks[0]}", f"rank {ranks[1]}")))
            shown = "; ".join(places[:3]) + (f"; and {len(places) - 3} more" if len(places) > 3 else "")
            raise PlanDisagreement(f"ranks {ranks[0]} and {ranks[1]} tell different things of {what}: {shown}")
        return told, beside

    def tell_all(self, value: Any) -> list[Any]:
        """The ``value`` of every rank, in the order of the group. For small values."""
        data = json.dumps(value).encode()
        sizes = self._gather([len(data)])[:, 0]
        device = control_device(self.group)
        mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = self._all_gather(mine.to(device))
        return [json.loads(_text(row[:size])) for row, size in zip(every, sizes.tolist(), strict=True)]

    def _world_rank(self, member: int) -> int:
        return member if self.group is None else dist.get_global_rank(self.group, member)

    def _gather(self, values: list[int]) -> NDArray[np.int64]:
        mine = torch.tensor(values, dtype=torch.int64, device=control_device(self.group))
        found: NDArray[np.int64] = torch.stack(self._all_gather(mine)).cpu().numpy()
        return found

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        self._wait(dist.all_gather(every, mine, group=self.group, async_op=True))
        return every

    def _broadcast(self, text: str, member: int, size: int) -> str:
        data = text.encode() if dist.get_rank(self.group) == member else bytes(size)
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(control_device(self.group))
        self._wait(dist.broadcast(buffer, self._world_rank(member), group=self.group, async_op=True))
        return _text(buffer)

    def _wait(self, work: dist.Work | None) -> None:
        wait_for(
            [work] if work is not None else [],
            group=self.group,
            deadline=self.deadline,
            poll=self.poll,
            waiter=self.waiter,
        )


def _text(data: torch.Tensor) -> str:
    return bytes(data.cpu().numpy().tobytes()).decode()
