"""Wrong bytes: what a receiver holds instead of what was sent, in runs, with their grid and where they came from.

``find_runs(message, units, words, world_size)`` takes the units of one message that arrived wrong; ``grid_of(runs)``
says on which power of two all runs begin and end. Pure functions on arrays, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.labels import UNIT_BYTES, Message, calls_since, label_words, read_labels

__all__ = ["ORIGINS", "WrongRun", "find_runs", "grid_of", "largest_grid"]

Words = NDArray[np.uint64]
IntArray = NDArray[np.int64]

#: Where wrong bytes can be from, see ``WrongRun.origin``.
ORIGINS = (
    "flipped bits",
    "zeros",
    "another offset",
    "another message",
    "another rank",
    "earlier call",
    "unknown",
)
_FLIPPED, _ZEROS, _OFFSET, _MESSAGE, _RANK, _EARLIER, _UNKNOWN = range(len(ORIGINS))
#: So few wrong bits in 16 bytes are flipped ones; two labels differ in about 64.
_MOST_FLIPPED = 4
#: No grid beyond this is told, in bytes.
_LARGEST_GRID = 1 << 30


@dataclass(frozen=True, kw_only=True)
class WrongRun:
    """Wrong units of a message that follow each other and have one origin. Offsets are those in the message."""

    executor: str
    call: int
    """Number of the exchange, from 0."""
    sender: int
    receiver: int
    message_bytes: int
    begin_bytes: int
    length_bytes: int
    """From the first wrong unit of 16 bytes to the last."""
    wrong_bytes: int
    """Bytes in it that differ from what was sent."""
    begin_grid_bytes: int
    """Largest power of two that the begin is a multiple of (0 is one of 2^30)."""
    length_grid_bytes: int
    """The same of the length."""
    origin: str
    """``flipped bits`` (at most 4 of a unit), ``zeros``, ``another offset`` of the same message, ``another message`` of
    this sender (meant for another rank, or of a later call), ``another rank``'s, ``earlier call`` (any rank's: stale),
    or ``unknown``."""
    origin_sender: int | None = None
    origin_receiver: int | None = None
    origin_calls_back: int | None = None
    origin_begin_bytes: int | None = None
    """Where the bytes stood in the message that they are of; None, as all of ``origin_``, where they say nothing."""
    flipped_bits: int | None = None

    @property
    def end_bytes(self) -> int:
        """Where it ends."""
        return self.begin_bytes + self.length_bytes

    def to_dict(self) -> dict[str, Any]:
        """Every field, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, eq=False)
class _Origins:
    """By unit: the origin's number, and who, when and where (in bytes, minus the unit's own offset)."""

    origin: IntArray
    sender: IntArray
    receiver: IntArray
    back: IntArray
    shift: IntArray

    @property
    def table(self) -> IntArray:
        return np.stack([self.origin, self.sender, self.receiver, self.back, self.shift])


def find_runs(
    message: Message, units: IntArray, words: Words, world_size: int, *, message_bytes: int, executor: str
) -> list[WrongRun]:
    """The runs of the units that arrived wrong: their offsets ``units`` (n, ascending, in units of 16 bytes) and what
    was received there, ``words`` (n, 2). Where nothing is wrong there is no run."""
    expected = label_words(message, units)
    wrong = (words != expected).any(axis=1)
    units, words, expected = units[wrong], words[wrong], expected[wrong]
    if not len(units):
        return []
    differing = np.ascontiguousarray(words ^ expected).view(np.uint8).reshape(-1, UNIT_BYTES)
    found = _origins(message, units, words, differing, world_size)
    table = found.table
    same = (table[:, 1:] == table[:, :-1]).all(axis=0) & (np.diff(units) == 1)
    begins = np.flatnonzero(np.concatenate([[True], ~same]))
    ends = np.append(begins[1:], len(units))
    bytes_wrong = np.add.reduceat(np.count_nonzero(differing, axis=1), begins)
    bits_wrong = np.add.reduceat(np.unpackbits(differing, axis=1).sum(axis=1, dtype=np.int64), begins)
    runs = []
    for k, (first, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        begin, length = int(units[first]) * UNIT_BYTES, (end - first) * UNIT_BYTES
        origin = int(found.origin[first])
        told = _OFFSET <= origin <= _EARLIER
        runs.append(
            WrongRun(
                executor=executor,
                call=message.call,
                sender=message.sender,
                receiver=message.receiver,
                message_bytes=message_bytes,
                begin_bytes=begin,
                length_bytes=length,
                wrong_bytes=int(bytes_wrong[k]),
                begin_grid_bytes=largest_grid(begin),
                length_grid_bytes=largest_grid(length),
                origin=ORIGINS[origin],
                origin_sender=int(found.sender[first]) if told else None,
                origin_receiver=int(found.receiver[first]) if told else None,
                origin_calls_back=int(found.back[first]) if told else None,
                origin_begin_bytes=begin + int(found.shift[first]) if told else None,
                flipped_bits=int(bits_wrong[k]) if origin == _FLIPPED else None,
            )
        )
    return runs


def _origins(
    message: Message, units: IntArray, words: Words, differing: NDArray[np.uint8], world_size: int
) -> _Origins:
    received = np.ascontiguousarray(words).view(np.uint8).reshape(-1, UNIT_BYTES)
    bad = differing != 0
    bits = np.unpackbits(differing, axis=1).sum(axis=1, dtype=np.int64)
    found = _Origins(*(np.zeros(len(units), dtype=np.int64) for _ in range(5)))
    found.origin[:] = _UNKNOWN
    _read(found, message, units, words, world_size)
    plain = found.origin == _UNKNOWN
    found.origin[plain & (bits <= _MOST_FLIPPED)] = _FLIPPED
    zeros = ((received == 0) | ~bad).all(axis=1) & (bits > _MOST_FLIPPED)
    found.origin[plain & zeros] = _ZEROS
    _read_between_units(found, message, units, received, world_size)
    return found


def _read(
    found: _Origins, message: Message, units: IntArray, words: Words, world_size: int, at: IntArray | None = None
) -> None:
    """Note the origin of the units whose ``words`` hold a label. ``at``: where in ``found``; None: all of it."""
    labels = read_labels(words)
    known = labels.valid & (labels.sender < world_size) & (labels.receiver < world_size)
    places = np.flatnonzero(known) if at is None else at[known]
    sender, receiver = labels.sender[known], labels.receiver[known]
    back = calls_since(labels.call[known], message.call)
    found.sender[places], found.receiver[places], found.back[places] = sender, receiver, back
    found.shift[places] = (labels.unit[known] - units[known]) * UNIT_BYTES
    found.origin[places] = np.select(
        [back > 0, sender != message.sender, (back < 0) | (receiver != message.receiver)],
        [_EARLIER, _RANK, _MESSAGE],
        _OFFSET,
    )


def _read_between_units(
    found: _Origins, message: Message, units: IntArray, received: NDArray[np.uint8], world_size: int
) -> None:
    """Read labels that stand across two unknown units, as where bytes moved by no multiple of 16."""
    unknown = found.origin == _UNKNOWN
    pairs = np.flatnonzero(unknown[1:] & unknown[:-1] & (np.diff(units) == 1))
    if not len(pairs):
        return
    both = np.concatenate([received[pairs], received[pairs + 1]], axis=1)
    for offset in range(1, UNIT_BYTES):
        words = np.ascontiguousarray(both[:, offset : offset + UNIT_BYTES]).view(np.uint64)
        labels = read_labels(words)
        known = labels.valid & (labels.sender < world_size) & (labels.receiver < world_size)
        if not known.any():
            continue
        for side in (1, 0):  # the first unit of a stretch has only the label that begins in it
            places = pairs[known] + side
            _read(found, message, units[pairs[known]], words[known], world_size, at=places)
            found.shift[places] -= offset


def largest_grid(offset: int) -> int:
    """The largest power of two, up to 2^30, that ``offset`` (bytes) is a multiple of."""
    return min(offset & -offset, _LARGEST_GRID) if offset else _LARGEST_GRID


def grid_of(runs: Iterable[WrongRun]) -> int | None:
    """The largest power of two, in bytes, on which every run begins and ends, or ends with its message. None without
    runs, and where all of them are whole messages, which tell no grid."""
    grids = []
    for run in runs:
        ends = [] if run.end_bytes >= run.message_bytes else [largest_grid(run.end_bytes)]
        grids += ends + ([largest_grid(run.begin_bytes)] if run.begin_bytes else [])
    return min(grids, default=None)
