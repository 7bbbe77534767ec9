"""Agreement: before the first byte moves all ranks check that they are about to run the same move.

``agree_on_move(...)`` compares a hash of the plan's inputs, then for every pair of ranks and every round the bytes and
a hash of the segments that both ends expect; ``agree_on_names`` compares ordered lists of names. Both are collective
and raise the same PlanDisagreement on every rank of the group.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relaymeter.errors import PlanDisagreement
from relaymeter.relayout.segments import SegmentTable
from relaymeter.relayout.transport import control_device, wait_for

__all__ = ["agree_on_move", "agree_on_names", "expected_messages"]

IntArray = NDArray[np.int64]
Poll = Callable[[], None]


def expected_messages(table: SegmentTable, itemsize: IntArray, rank: int, rounds: int, world_size: int) -> IntArray:
    """What ``rank`` expects to exchange: int64 (2, world_size, rounds, 2).

    The first axis is what it sends and what it receives, the last the bytes and a hash of the segments of that pair and
    round; zeros where nothing travels. Copies within the rank are left out. Pure.
    """
    found = np.zeros((2, world_size, rounds, 2), dtype=np.int64)
    nbytes = table.elements * itemsize[table.tensor]
    for way, (mine, other) in enumerate(((table.src_rank, table.dst_rank), (table.dst_rank, table.src_rank))):
        rows = np.flatnonzero((mine == rank) & (other != rank))
        key = other[rows] * rounds + table.round[rows]
        rows = rows[np.argsort(key, kind="stable")]
        key = np.sort(key, kind="stable")
        borders = [*np.flatnonzero(np.diff(key, prepend=-1)).tolist(), len(rows)]
        for start, stop in itertools.pairwise(borders):
            peer, step = divmod(int(key[start]), rounds)
            part = rows[start:stop]
            found[way, peer, step] = (int(nbytes[part].sum()), _hash_rows(table.take(part), itemsize))
    return found


def _hash_rows(rows: SegmentTable, itemsize: IntArray) -> int:
    """The same 64 bits on both ends, whose tables may have more dims than these rows need."""
    used = np.flatnonzero((rows.shape != 1).any(axis=0))
    first = int(used[0]) if len(used) else rows.shape.shape[1] - 1
    columns = [getattr(rows, field.name) for field in fields(rows)]
    trimmed = [column if column.ndim == 1 else column[:, first:] for column in columns]
    joined = np.column_stack([*trimmed, itemsize[rows.tensor]])
    return int.from_bytes(hashlib.sha256(np.ascontiguousarray(joined).tobytes()).digest()[:8], "little", signed=True)


def _gather(
    values: Sequence[int], group: dist.ProcessGroup | None, deadline: float | None, poll: Poll | None
) -> IntArray:
    """The equally many int64 ``values`` of every rank (world_size, n). Collective."""
    device = control_device(group)
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(every, mine, group=group, async_op=True)
    wait_for([work] if work is not None else [], group=group, deadline=deadline, poll=poll)
    return torch.stack(every).cpu().numpy()


def _as_integers(digest: bytes) -> list[int]:
    return [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 32, 8)]


def _by_value(rows: IntArray) -> list[list[int]]:
    """Ranks grouped by equal rows, the group of rank 0 first."""
    groups: dict[bytes, list[int]] = {}
    for rank in range(len(rows)):
        groups.setdefault(rows[rank].tobytes(), []).append(rank)
    return list(groups.values())


def agree_on_move(
    input_hash: bytes,
    expected: IntArray,
    *,
    refusal: str = "",
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    poll: Poll | None = None,
) -> None:
    """Raise PlanDisagreement on every rank of ``group`` unless all are about to run the same move. Collective.

    ``input_hash`` covers layouts, routes, buckets, executor and versions; ``expected`` is ``expected_messages`` of this
    rank. ``refusal`` is a reason of this rank's own not to start. Three small exchanges, once per move.
    """
    me, members = dist.get_rank(group), dist.get_world_size(group)
    rounds = expected.shape[2]
    hashed = _as_integers(hashlib.sha256(input_hash).digest())
    heads = _gather([rounds, len(refusal.encode()), *hashed], group, deadline, poll)
    problems: list[str] = []
    if bool(heads[:, 1].any()):
        texts = _gather_texts(refusal, heads[:, 1], group, deadline, poll)
        problems += [f"rank {rank} refuses: {text}" for rank, text in enumerate(texts) if text]
    plans = _by_value(np.delete(heads, 1, axis=1))
    if len(plans) > 1:
        parts = "; ".join(f"ranks {ranks} ({int(heads[ranks[0], 0])} rounds)" for ranks in plans)
        problems.append(f"the ranks planned from different inputs: {parts}")
    if len(set(heads[:, 0].tolist())) == 1:
        told = _exchange_expectations(expected[0], group, deadline, poll)
        differs = np.argwhere((told != expected[1]).any(axis=2))
        peer, step = (int(differs[0][0]), int(differs[0][1])) if len(differs) else (0, 0)
        counts = [int(told[peer, step, 0]), int(expected[1, peer, step, 0])] if len(differs) else [0, 0]
        row = [len(differs), peer, me, step, *counts]
        for count, src, dst, at, sent, wanted in _gather(row, group, deadline, poll).tolist():
            if count:
                what = f"sends {sent} bytes, rank {dst} expects {wanted}"
                if sent == wanted:
                    what = f"sends {sent} bytes and rank {dst} expects as many, but of other segments"
                problems.append(f"round {at}: rank {src} {what}" + (f" ({count - 1} more such)" if count > 1 else ""))
    if problems:
        raise PlanDisagreement(f"nothing was moved by {members} ranks: " + "; ".join(problems))


def _exchange_expectations(
    sends: IntArray, group: dist.ProcessGroup | None, deadline: float | None, poll: Poll | None
) -> IntArray:
    """What every rank says it will send to this one (world_size, rounds, 2), from what this one says. Collective."""
    mine = torch.from_numpy(np.ascontiguousarray(sends)).to(control_device(group))
    told = torch.empty_like(mine)
    if mine.numel():
        work = dist.all_to_all_single(told, mine, group=group, async_op=True)
        wait_for([work] if work is not None else [], group=group, deadline=deadline, poll=poll)
    return told.cpu().numpy()


def _gather_texts(
    text: str, sizes: IntArray, group: dist.ProcessGroup | None, deadline: float | None, poll: Poll | None
) -> list[str]:
    """Every rank's text; ``sizes`` are their lengths in UTF-8 bytes. Collective."""
    data = text.encode()
    longest = int(sizes.max(initial=0))
    rows = _gather(list(data) + [0] * (longest - len(data)), group, deadline, poll)
    return [bytes(rows[rank, : sizes[rank]].astype(np.uint8)).decode() for rank in range(len(rows))]


def agree_on_names(
    names: Sequence[str],
    what: str,
    *,
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
    poll: Poll | None = None,
) -> bool:
    """Whether all ranks of ``group`` follow the same order of ``names`` (``what`` says of what). Collective.

    True means agreed; False means not checked, because every rank's list is empty. Raises PlanDisagreement on every
    rank otherwise, with the first position that differs and what stands there.
    """
    text = json.dumps(list(names))
    size = len(text.encode())
    heads = _gather([len(names), size, *_as_integers(hashlib.sha256(text.encode()).digest())], group, deadline, poll)
    if len(_by_value(heads)) == 1:
        return bool(heads[0, 0])
    lists: list[list[str]] = [json.loads(entry) for entry in _gather_texts(text, heads[:, 1], group, deadline, poll)]
    for position in range(max(len(entry) for entry in lists)):
        here: dict[str, list[int]] = {}
        for rank, entry in enumerate(lists):
            label = repr(entry[position]) if position < len(entry) else "nothing"
            here.setdefault(label, []).append(rank)
        if len(here) > 1:
            parts = "; ".join(f"{label} on ranks {ranks}" for label, ranks in here.items())
            raise PlanDisagreement(f"the ranks follow different {what}: position {position} holds {parts}")
    raise PlanDisagreement(f"the ranks follow different {what}, whose texts differ but not their names")
