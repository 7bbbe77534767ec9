"""Labels: every 16 bytes of a message say who sends them, to whom, in which call, and where in the message they stand.

``label_words(Message(sender, receiver, call), units)`` gives the two 64-bit words of each unit, and
``read_labels(words)`` reads them back. Pure NumPy, no torch: a device needs only ``low_table`` and ``block_keys``.

A unit at offset ``u`` (in units of 16 bytes) holds the words ``T0[low] ^ key`` and ``T1[low] ^ key``. ``low`` is the
low 14 bits of u; the 64-bit key is a one-to-one linear map over GF(2) of the high 16 bits of u, the call, the sender
and the receiver; the tables are linear too but for a constant. So one exclusive or of a table that fits a cache with
one word for each block of 256 KiB makes a message; the exclusive or of the two words has 50 bits that only a genuine
label has right, which no repeated pattern does; and any two labels differ in practically all their bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError

__all__ = [
    "BLOCK_BYTES",
    "LARGEST_MESSAGE_BYTES",
    "MOST_RANKS",
    "UNIT_BYTES",
    "Labels",
    "Message",
    "block_keys",
    "calls_since",
    "label_words",
    "low_table",
    "read_labels",
]

Words = NDArray[np.uint64]
IntArray = NDArray[np.int64]

#: Bytes that carry one label. Messages are whole units.
UNIT_BYTES = 16
_LOW_BITS, _HIGH_BITS, _CALL_BITS, _RANK_BITS = 14, 16, 24, 12
#: Bytes that share a key.
BLOCK_BYTES = UNIT_BYTES << _LOW_BITS
#: A label's offset has 30 bits.
LARGEST_MESSAGE_BYTES = UNIT_BYTES << (_LOW_BITS + _HIGH_BITS)
#: A label's ranks have 12 bits each.
MOST_RANKS = 1 << _RANK_BITS
#: Calls are numbered from 1 in a label, so that none is zero, and begin anew after so many.
_CALLS = (1 << _CALL_BITS) - 1
_WORD_BITS = 64
_WORD_MASK = (1 << _WORD_BITS) - 1
#: Where the fields of a key begin.
_CALL_AT, _SENDER_AT, _RECEIVER_AT = _HIGH_BITS, _HIGH_BITS + _CALL_BITS, _HIGH_BITS + _CALL_BITS + _RANK_BITS


@dataclass(frozen=True)
class Message:
    """What one rank sends another in one call (0, 1, ... of the whole soak)."""

    sender: int
    receiver: int
    call: int


@dataclass(frozen=True, eq=False)
class Labels:
    """What was read of ``n`` units, as arrays of n. Where ``valid`` is False the others mean nothing."""

    valid: NDArray[np.bool_]
    sender: IntArray
    receiver: IntArray
    call: IntArray
    """Modulo 2^24 - 1; compare with ``calls_since``."""
    unit: IntArray
    """Offset in the message, in units of 16 bytes."""


@dataclass(frozen=True, eq=False)
class _Linear:
    """A linear map of 64-bit words over GF(2): the exclusive or of one column for each bit that is set."""

    columns: tuple[int, ...]

    @functools.cached_property
    def _tables(self) -> Words:
        tables = np.zeros((8, 256), dtype=np.uint64)
        for byte in range(8):
            for bit in range(8):
                half = 1 << bit
                tables[byte, half : 2 * half] = tables[byte, :half] ^ np.uint64(self.columns[8 * byte + bit])
        return tables

    def __call__(self, words: Words) -> Words:
        found = np.zeros_like(words)
        for byte in range(8):
            found ^= self._tables[byte, ((words >> np.uint64(8 * byte)) & np.uint64(255)).astype(np.intp)]
        return found

    def inverse(self) -> _Linear:
        """The map that takes every word back (Gauss-Jordan on the columns)."""
        rows = [(column, 1 << bit) for bit, column in enumerate(self.columns)]
        for bit in range(_WORD_BITS):
            at = next(k for k in range(bit, _WORD_BITS) if rows[k][0] >> bit & 1)
            rows[bit], rows[at] = rows[at], rows[bit]
            head, made = rows[bit]
            rows = [
                (row ^ head, by ^ made) if k != bit and row >> bit & 1 else (row, by)
                for k, (row, by) in enumerate(rows)
            ]
        return _Linear(tuple(made for _, made in rows))


@dataclass(frozen=True, eq=False)
class _Code:
    """The maps that all ranks share."""

    low: Words
    """The two words of each low part of an offset, (2^14, 2)."""
    key: _Linear
    unkey: _Linear
    unlow: _Linear
    """From the exclusive or of a unit's words to its low part; above it stands 1 where the unit is genuine."""


def _scrambled(count: int, seed: int) -> list[int]:
    """Well mixed 64-bit words (the splitmix64 sequence), the same on every machine and version."""
    words = []
    for step in range(1, count + 1):
        word = (seed + step * 0x9E3779B97F4A7C15) & _WORD_MASK
        word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD_MASK
        word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD_MASK
        words.append(word ^ word >> 31)
    return words


def _independent(candidates: Sequence[int]) -> tuple[int, ...]:
    """The first 64 of ``candidates`` of which none is the exclusive or of others."""
    kept: list[int] = []
    reduced: dict[int, int] = {}
    for candidate in candidates:
        rest = candidate
        while rest and (top := rest.bit_length()) in reduced:
            rest ^= reduced[top]
        if rest and len(kept) < _WORD_BITS:
            reduced[rest.bit_length()] = rest
            kept.append(candidate)
    return tuple(kept)


@functools.cache
def _code() -> _Code:
    first, (mark, *second) = _scrambled(_LOW_BITS, 1), _scrambled(_LOW_BITS + 1, 2)
    low = np.zeros((1 << _LOW_BITS, 2), dtype=np.uint64)
    low[0, 1] = mark
    for bit, pair in enumerate(zip(first, second, strict=True)):
        low[1 << bit : 2 << bit] = low[: 1 << bit] ^ np.array(pair, dtype=np.uint64)
    key = _Linear(_independent(_scrambled(2 * _WORD_BITS, 3)))
    differences = [one ^ two for one, two in zip(first, second, strict=True)]
    spread = _Linear(_independent([*differences, mark, *_scrambled(2 * _WORD_BITS, 4)]))
    return _Code(low, key, key.inverse(), spread.inverse())


def low_table() -> Words:
    """The two words of each unit of a block before its key is put in, (2^14, 2). Do not write to it."""
    return _code().low


def block_keys(message: Message, blocks: int) -> Words:
    """The key of each of the first ``blocks`` blocks of 256 KiB. Raises InputError for what no label can say."""
    if not 0 <= blocks <= 1 << _HIGH_BITS:
        raise InputError(f"a message of {blocks * BLOCK_BYTES} bytes is too long: at most {LARGEST_MESSAGE_BYTES}")
    return _code().key(np.arange(blocks, dtype=np.uint64) | _fixed(message))


def _fixed(message: Message) -> np.uint64:
    if not (0 <= message.sender < MOST_RANKS and 0 <= message.receiver < MOST_RANKS):
        raise InputError(f"ranks {message.sender} and {message.receiver}: a label knows ranks 0 to {MOST_RANKS - 1}")
    call = message.call % _CALLS + 1
    return np.uint64(call << _CALL_AT | message.sender << _SENDER_AT | message.receiver << _RECEIVER_AT)


def label_words(message: Message, units: IntArray) -> Words:
    """The words (n, 2) of the units at offsets ``units`` (n, in units of 16 bytes) of ``message``."""
    code = _code()
    high = (units >> _LOW_BITS).astype(np.uint64)
    found: Words = code.low[units & ((1 << _LOW_BITS) - 1)] ^ code.key(high | _fixed(message))[:, None]
    return found


def read_labels(words: Words) -> Labels:
    """The labels in ``words`` (n, 2); bytes that hold no label are taken for one with a chance of 2^-50."""
    code = _code()
    low = code.unlow(words[:, 0] ^ words[:, 1])
    valid = low >> np.uint64(_LOW_BITS) == 1
    low &= np.uint64((1 << _LOW_BITS) - 1)
    key = code.unkey(words[:, 0] ^ code.low[low.astype(np.intp), 0])

    def field(begin: int, bits: int) -> IntArray:
        return ((key >> np.uint64(begin)) & np.uint64((1 << bits) - 1)).astype(np.int64)

    call = field(_CALL_AT, _CALL_BITS)
    return Labels(
        valid & (call > 0),
        field(_SENDER_AT, _RANK_BITS),
        field(_RECEIVER_AT, _RANK_BITS),
        call - 1,
        field(0, _HIGH_BITS) << _LOW_BITS | low.astype(np.int64),
    )


def calls_since(call: IntArray, now: int) -> IntArray:
    """How many calls before call ``now`` those of labels were: 0 the same, negative later ones."""
    behind: IntArray = (now - call) % _CALLS
    return np.where(behind > _CALLS // 2, behind - _CALLS, behind)
