"""Whether ranks hold the same list in the same order, and where they first differ.

``check_order("trace", [0, 2, 1], ["a", "c", "b"], group)`` on every rank of a group: True, or an error on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import PlanDisagreement

__all__ = ["check_order", "first_difference"]

_NAME_BYTES = 512


def first_difference(lists: Sequence[Sequence[int]]) -> int | None:
    """The first index at which the lists do not all hold the same value (a list that ended counts as different)."""
    columns = enumerate(zip_longest(*lists))
    return next((index for index, column in columns if len(set(column)) > 1), None)


def check_order(what: str, keys: Sequence[int], names: Sequence[str], group: dist.ProcessGroup | None = None) -> bool:
    """Whether the ranks of ``group`` (default: the world) hold equal ``keys``; True when they were compared.

    ``keys``: non-negative int64 values, one per entry; ``names``: what to call each entry in an error. False means
    that every rank's list is empty: nothing was checked. Every rank of the group calls this. Raises PlanDisagreement
    on all of them alike, with the first differing position (from 0), each rank's name there, and the lengths.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return len(keys) > 0
    column = np.asarray(keys, dtype=np.int64)
    digest = hashlib.blake2b(column.tobytes(), digest_size=8).digest()
    summary = torch.tensor([len(keys), int.from_bytes(digest, "little", signed=True)])
    rows = _all_gather(summary, group)
    if all(torch.equal(row, summary) for row in rows):
        return len(keys) > 0
    lengths = [int(row[0]) for row in rows]
    padded = torch.full((max(lengths),), -1, dtype=torch.int64)
    padded[: len(keys)] = torch.from_numpy(column)
    lists = [row[:length].tolist() for row, length in zip(_all_gather(padded, group), lengths, strict=True)]
    index = first_difference(lists) or 0
    label = names[index] if index < len(keys) else "nothing"
    text = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    encoded = label.encode()[:_NAME_BYTES]
    text[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    found: dict[tuple[str, int], list[int]] = {}
    for rank, length, row in zip(ranks, lengths, _all_gather(text, group), strict=True):
        found.setdefault((bytes(row.tolist()).rstrip(b"\0").decode(errors="replace"), length), []).append(rank)
    holders = "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {name} ({length} entries)"
        for (name, length), who in found.items()
    )
    raise PlanDisagreement(f"{what}: ranks disagree first at position {index} (from 0): {holders}")


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "gloo" in str(dist.get_backend(group)):
        mine = tensor
    else:
        mine = tensor.to(torch.device(accelerator.type, torch.accelerator.current_device_index()))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [row.cpu() for row in rows]
