"""Label tensors: messages that describe themselves, made and compared where they are, at the speed of the memory.

``labels = LabelTensors(device)``, then ``labels.write(message, target)`` and ``labels.compare(message, received)``. No
collective; for any rank at any time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from relaymeter.calibration.labels import BLOCK_BYTES, UNIT_BYTES, Message, block_keys, low_table

__all__ = ["LabelTensors"]

#: What is compared at once: on the CPU what fits the cache beside what was received.
_SLAB_BYTES = {"cpu": 4 * BLOCK_BYTES}
_SLAB_ON_DEVICE = 256 << 20
#: Wrong bytes of one message that are looked at one by one; beyond them they are only counted.
_LOOKED_AT_BYTES = 16 << 20


class LabelTensors:
    """Makes and compares messages on a ``device``. Tensors are 1-D uint8, whole units of 16 bytes, aligned to 8."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table = torch.from_numpy(low_table().view(np.int64)).to(device).view(1, -1)
        self._slab_bytes = _SLAB_BYTES.get(device.type, _SLAB_ON_DEVICE)
        self._slab = torch.empty(0, dtype=torch.uint8, device=device)

    def write(self, message: Message, target: torch.Tensor) -> None:
        """Fill ``target`` with the labels of ``message``."""
        self._write(target, self._keys(message, target.numel()))

    def _keys(self, message: Message, nbytes: int) -> torch.Tensor:
        keys = block_keys(message, -(-nbytes // BLOCK_BYTES)).view(np.int64)
        return torch.from_numpy(keys).to(self._device)[:, None]

    def _write(self, target: torch.Tensor, keys: torch.Tensor) -> None:
        whole = target.numel() // BLOCK_BYTES
        words = target.view(torch.int64)
        split = whole * self._table.numel()
        if whole:
            torch.bitwise_xor(self._table, keys[:whole], out=words[:split].view(whole, -1))
        if split < len(words):
            tail = words[split:]
            torch.bitwise_xor(self._table[0, : len(tail)], keys[whole], out=tail)

    def compare(self, message: Message, received: torch.Tensor) -> tuple[int, NDArray[np.int64], NDArray[np.uint64]]:
        """How many bytes of ``received`` are not as ``message`` has them, the offsets (in units) of wrong units and
        the two words that stand there, (n) and (n, 2): those of the first 16 MiB of them."""
        keys = self._keys(message, received.numel())
        count, room = 0, _LOOKED_AT_BYTES // UNIT_BYTES
        units: list[NDArray[np.int64]] = []
        words: list[NDArray[np.uint64]] = []
        for begin in range(0, received.numel(), self._slab_bytes):
            part = received[begin : begin + self._slab_bytes]
            if len(self._slab) < len(part):
                self._slab = torch.empty(len(part), dtype=torch.uint8, device=self._device)
            wanted = self._slab[: len(part)]
            self._write(wanted, keys[begin // BLOCK_BYTES :])
            if torch.equal(wanted.view(torch.int64), part.view(torch.int64)):
                continue
            count += int(torch.count_nonzero(wanted != part))
            found = part.view(torch.int64).view(-1, 2)
            odd = torch.nonzero((wanted.view(torch.int64).view(-1, 2) != found).any(dim=1))[:room, 0]
            room -= len(odd)
            units.append(odd.cpu().numpy() + begin // UNIT_BYTES)
            words.append(found[odd].cpu().numpy().view(np.uint64))
        if not units:
            return 0, np.empty(0, dtype=np.int64), np.empty((0, 2), dtype=np.uint64)
        return count, np.concatenate(units), np.concatenate(words)
