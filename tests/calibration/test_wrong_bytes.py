from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from relaymeter.calibration.labels import Message, label_words
from relaymeter.calibration.wrong_bytes import WrongRun, find_runs, grid_of, largest_grid

RANKS = 8
MESSAGE = Message(sender=2, receiver=5, call=7)
UNITS = 4096
Bytes = NDArray[np.uint8]


def _bytes_of(message: Message, begin: int, length: int) -> Bytes:
    """The bytes that stand in ``message`` from byte ``begin`` on."""
    first, last = begin // 16, -(-(begin + length) // 16)
    data: Bytes = label_words(message, np.arange(first, last)).view(np.uint8).reshape(-1)
    return data[begin - 16 * first :][:length]


def _runs(damage: Callable[[Bytes], None]) -> list[WrongRun]:
    received = _bytes_of(MESSAGE, 0, 16 * UNITS).copy()
    damage(received)
    words = received.view(np.uint64).reshape(-1, 2)
    return find_runs(MESSAGE, np.arange(UNITS), words, RANKS, message_bytes=16 * UNITS, executor="all-to-all")


@dataclass(frozen=True)
class _Other:
    origin: str
    message: Message
    back: int


OTHERS = (
    _Other("another offset", MESSAGE, 0),
    _Other("another message", Message(2, 3, 7), 0),
    _Other("another message", Message(2, 5, 8), -1),
    _Other("another rank", Message(4, 5, 7), 0),
    _Other("another rank", Message(4, 1, 7), 0),
    _Other("earlier call", Message(2, 5, 6), 1),
    _Other("earlier call", Message(0, 3, 1), 6),
)


@given(
    st.sampled_from(OTHERS), st.integers(0, UNITS - 1), st.integers(1, 300), st.integers(0, 16 * 100_000),
)  # fmt: skip
def test_a_block_of_other_labels_is_one_run_that_names_them(other: _Other, unit: int, length: int, source: int) -> None:
    length = min(length, UNITS - unit)
    if other.origin == "another offset" and abs(source - 16 * unit) < 16:
        return

    def damage(received: Bytes) -> None:
        received[16 * unit :][: 16 * length] = _bytes_of(other.message, source, 16 * length)

    runs = _runs(damage)
    if source % 16 and length == 1:
        assert [(run.origin, run.begin_bytes) for run in runs] == [("unknown", 16 * unit)]
        return
    (run,) = runs
    assert (run.begin_bytes, run.length_bytes, run.origin) == (16 * unit, 16 * length, other.origin)
    assert run.origin_begin_bytes == source
    assert (run.origin_sender, run.origin_receiver) == (other.message.sender, other.message.receiver)
    assert run.origin_calls_back == other.back
    expected = _bytes_of(MESSAGE, 16 * unit, 16 * length)
    assert run.wrong_bytes == np.count_nonzero(expected != _bytes_of(other.message, source, 16 * length))


# Up to eight bytes into the unit: clearing its last two may change no more bits than a flip or two would.
@given(st.integers(0, UNITS - 1), st.integers(1, 300), st.integers(0, 8))
def test_zeros_are_told_even_where_they_begin_inside_a_unit(unit: int, length: int, inside: int) -> None:
    end = min(16 * (unit + length), 16 * UNITS)

    def damage(received: Bytes) -> None:
        received[16 * unit + inside : end] = 0

    (run,) = _runs(damage)
    assert (run.origin, run.begin_bytes, run.end_bytes) == ("zeros", 16 * unit, end)
    assert run.origin_begin_bytes is None and run.flipped_bits is None


@given(st.lists(st.integers(0, 16 * UNITS * 8 - 1), min_size=1, max_size=6, unique=True))
def test_flipped_bits_are_counted(places: list[int]) -> None:
    per_unit = {place // 128: sum(other // 128 == place // 128 for other in places) for place in places}
    if max(per_unit.values()) > 4:
        return

    def damage(received: Bytes) -> None:
        for place in places:
            received[place // 8] ^= 1 << (place % 8)

    runs = _runs(damage)
    assert {run.origin for run in runs} == {"flipped bits"}
    assert sum(run.flipped_bits or 0 for run in runs) == len(places)
    assert sum(run.length_bytes for run in runs) == 16 * len(per_unit)
    assert sum(run.wrong_bytes for run in runs) == len({place // 8 for place in places})


@pytest.mark.parametrize(("bits", "origin"), [(4, "flipped bits"), (5, "unknown")])
def test_four_bits_of_a_unit_are_flipped_and_five_are_noise(bits: int, origin: str) -> None:
    def damage(received: Bytes) -> None:
        received[100] ^= (1 << bits) - 1

    (run,) = _runs(damage)
    assert (run.origin, run.wrong_bytes) == (origin, 1)


@given(st.data())
def test_noise_is_unknown(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    noise = np.random.default_rng(seed).integers(0, 256, 160, dtype=np.uint8)

    def damage(received: Bytes) -> None:
        received[320:480] = noise

    runs = _runs(damage)
    assert {run.origin for run in runs} == {"unknown"}
    assert sum(run.length_bytes for run in runs) == 160


def test_labels_of_ranks_that_do_not_exist_are_unknown() -> None:
    def damage(received: Bytes) -> None:
        received[64:96] = _bytes_of(Message(RANKS, 5, 7), 0, 32)

    assert [run.origin for run in _runs(damage)] == ["unknown"]


def test_swapped_blocks_are_two_runs_on_their_grid() -> None:
    def damage(received: Bytes) -> None:
        kept = received[8192:12288].copy()
        received[8192:12288] = received[12288:16384]
        received[12288:16384] = kept

    one, two = _runs(damage)
    assert (one.begin_bytes, one.length_bytes, one.origin_begin_bytes) == (8192, 4096, 12288)
    assert (two.begin_bytes, two.length_bytes, two.origin_begin_bytes) == (12288, 4096, 8192)
    assert (one.begin_grid_bytes, one.length_grid_bytes, two.begin_grid_bytes) == (8192, 4096, 4096)
    assert grid_of([one, two]) == 4096


def test_where_two_moved_stretches_meet_inside_a_unit_it_goes_to_the_label_that_begins_in_it() -> None:
    def damage(received: Bytes) -> None:
        received[160:328] = _bytes_of(MESSAGE, 16 * 100 + 8, 168)
        received[328:480] = _bytes_of(MESSAGE, 16 * 300, 152)

    one, two = _runs(damage)
    assert (one.begin_bytes, one.length_bytes, one.origin_begin_bytes) == (160, 160, 16 * 100 + 8)
    assert (two.begin_bytes, two.length_bytes, two.origin_begin_bytes) == (320, 160, 16 * 300 - 8)


def test_right_bytes_are_no_run() -> None:
    assert _runs(lambda received: None) == []


def _run(begin: int, length: int, message: int) -> WrongRun:
    return WrongRun(
        executor="send-recv", call=0, sender=0, receiver=1, message_bytes=message, begin_bytes=begin,
        length_bytes=length, wrong_bytes=length, begin_grid_bytes=1, length_grid_bytes=1, origin="unknown",
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(1, 1 << 12), st.booleans()), max_size=5))
def test_the_grid_is_the_largest_power_of_two_that_holds_every_begin_and_inner_end(
    places: list[tuple[int, int, bool]],
) -> None:
    runs, edges = [], []
    for begin, length, last in places:
        end = 16 * (begin + length)
        runs.append(_run(16 * begin, 16 * length, end if last else end + 16))
        edges += [16 * begin] + ([] if last else [end])
    edges = [edge for edge in edges if edge]
    powers = [1 << k for k in range(31) if all(edge % (1 << k) == 0 for edge in edges)]
    assert grid_of(runs) == (max(powers) if edges else None)


@pytest.mark.parametrize(("offset", "grid"), [(0, 1 << 30), (1 << 31, 1 << 30), (16, 16), (3 << 17, 1 << 17), (17, 1)])
def test_the_grid_of_one_offset(offset: int, grid: int) -> None:
    assert largest_grid(offset) == grid
