"""What a soak sends: who sends how much to whom in call 0, 1, ..., the same on every rank. No torch.

``call_matrix(call, world_size=4, message_bytes=1 << 22, peers=3)`` is the matrix of a call; ``settle_size(...)`` says
how large messages may be and how many a rank exchanges at once in the memory there is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.labels import LARGEST_MESSAGE_BYTES, UNIT_BYTES
from relaymeter.errors import InputError
from relaymeter.units import format_bytes

__all__ = ["SHAPES", "SoakSettings", "SoakSize", "call_matrix", "plan_hash", "settle_size"]

IntArray = NDArray[np.int64]

#: The shapes that calls take in turn: all messages of the full size; sizes spread evenly in their logarithm from
#: 16 bytes up; half of the pairs with nothing to send; nearly full sizes, so that messages begin off any grid.
SHAPES = ("even", "uneven", "sparse", "ragged")
#: The largest message where none is asked for, by backend: what moves send at most, and what a slow network passes in
#: a fraction of a second.
_USUAL_BYTES = {"nccl": 256 << 20}
_USUAL_ELSEWHERE = 4 << 20
_SEED = 9074


@dataclass(frozen=True, kw_only=True)
class SoakSettings:
    """How long, with what. The same on every rank."""

    seconds: float | None = 60.0
    """End after about so long; None: no matter how long."""
    total_bytes: int | None = None
    """End when all ranks together have sent so much; None: no matter how much."""
    message_bytes: int | None = None
    """Largest message; None: 256 MiB with NCCL, else 4 MiB."""
    executor: str = "auto"
    """``auto``: the backend's own; ``both`` in turn; or a name."""
    call_limit_s: float = 120.0
    """Limit of one exchange (more where its bytes need more at 4 MB/s)."""


@dataclass(frozen=True)
class SoakSize:
    """The largest message in bytes, and the number of peers a rank sends to, and receives from, in a call."""

    message_bytes: int
    peers: int


def settle_size(settings: SoakSettings, backend: str, world_size: int, memory_bytes: int) -> SoakSize:
    """Sizes for ranks that have at least ``memory_bytes`` each for their buffers. Raises InputError, naming what would
    fit, where that is too little for the message asked for, and where no label can describe one so long."""
    asked = settings.message_bytes
    if asked is not None and asked > LARGEST_MESSAGE_BYTES:
        raise InputError(f"messages of {asked} bytes are more than a label can number: at most {LARGEST_MESSAGE_BYTES}")
    room = memory_bytes // 2 // UNIT_BYTES * UNIT_BYTES
    if (asked or 0) > room or room < UNIT_BYTES:
        raise InputError(
            f"--message {asked}: the rank with the least memory has room for messages of {room} bytes "
            f"({format_bytes(memory_bytes)} for one sent and one received): give a smaller --message"
        )
    message = asked or min(_USUAL_BYTES.get(backend, _USUAL_ELSEWHERE), room)
    message = max(UNIT_BYTES, message // UNIT_BYTES * UNIT_BYTES)
    return SoakSize(message, max(1, min(world_size - 1, room // message)))


def call_matrix(call: int, *, world_size: int, message_bytes: int, peers: int) -> IntArray:
    """Bytes from each rank (row) to each other (column) in a call: multiples of 16, at most ``message_bytes``, at most
    ``peers`` messages a row and a column. Where that is not every pair, which ones changes from call to call."""
    draw = np.random.default_rng([_SEED, call])
    order = draw.permutation(world_size)
    steps = 1 + draw.permutation(world_size - 1)[:peers]
    units = max(1, message_bytes // UNIT_BYTES)
    shape = SHAPES[call % len(SHAPES)]
    size = (len(steps), world_size)
    sizes = np.full(size, units, dtype=np.int64)
    if shape == "uneven":
        sizes = np.ceil(units ** draw.random(size)).astype(np.int64).clip(1, units)
    elif shape == "sparse":
        sizes = np.where(draw.random(size) < 0.5, 0, draw.integers(1, units + 1, size))
    elif shape == "ragged":
        sizes = units - draw.integers(0, min(units, 4096), size)
    matrix = np.zeros((world_size, world_size), dtype=np.int64)
    for step, row in zip(steps, sizes, strict=True):
        matrix[order, np.roll(order, step)] = row * UNIT_BYTES
    return matrix


def plan_hash(size: SoakSize, world_size: int) -> str:
    """Stands for the matrices of the first calls: equal where ranks will send what others expect."""
    found = hashlib.sha256()
    for call in range(len(SHAPES)):
        matrix = call_matrix(call, world_size=world_size, message_bytes=size.message_bytes, peers=size.peers)
        found.update(matrix.tobytes())
    return found.hexdigest()[:16]
