from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaymeter.calibration.label_tensors import LabelTensors
from relaymeter.calibration.labels import (
    LARGEST_MESSAGE_BYTES,
    Message,
    block_keys,
    calls_since,
    label_words,
    read_labels,
)
from relaymeter.errors import InputError

UNITS = st.lists(st.integers(0, LARGEST_MESSAGE_BYTES // 16 - 1), min_size=1, max_size=8, unique=True)
MESSAGES = st.builds(Message, st.integers(0, 4095), st.integers(0, 4095), st.integers(0, (1 << 24) - 2))


@given(MESSAGES, UNITS)
def test_a_label_says_what_was_written_into_it(message: Message, units: list[int]) -> None:
    labels = read_labels(label_words(message, np.array(units)))
    assert labels.valid.all()
    assert labels.unit.tolist() == units
    assert {*labels.sender.tolist()} == {message.sender}
    assert {*labels.receiver.tolist()} == {message.receiver}
    assert {*labels.call.tolist()} == {message.call}


@given(st.binary(min_size=16, max_size=16))
def test_other_bytes_hold_no_label(data: bytes) -> None:
    words = np.frombuffer(data, dtype=np.uint64).reshape(1, 2)
    labels = read_labels(words)
    if labels.valid[0]:  # practically never, and then it must be the one of these very bytes
        message = Message(int(labels.sender[0]), int(labels.receiver[0]), int(labels.call[0]))
        assert (label_words(message, labels.unit) == words).all()


@given(MESSAGES, MESSAGES, st.integers(0, 1 << 29), st.integers(0, 1 << 29))
def test_two_labels_differ_in_nearly_every_byte(one: Message, two: Message, here: int, there: int) -> None:
    if (one, here) == (two, there):
        return
    first, second = label_words(one, np.array([here])), label_words(two, np.array([there]))
    differing = np.count_nonzero(first.view(np.uint8) != second.view(np.uint8))
    assert differing >= 8  # either word differs, and a changed word in practically all of its 8 bytes
    assert first.any()


@given(st.integers(0, 2**64 - 1))
def test_a_repeated_pattern_holds_no_label(word: int) -> None:
    words = np.array([[word, word], [0, 0], [2**64 - 1, 2**64 - 1]], dtype=np.uint64)
    assert not read_labels(words).valid.any()


@pytest.mark.parametrize("nbytes", [0, 16, 48, 256 << 10, (256 << 10) + 16, (5 << 20) + 4080])
def test_tensors_hold_the_labels_of_every_unit_and_compare_finds_each_change(nbytes: int) -> None:
    tensors, message = LabelTensors(torch.device("cpu")), Message(3, 1, 40)
    made = torch.zeros(nbytes, dtype=torch.uint8)
    tensors.write(message, made)
    expected = label_words(message, np.arange(nbytes // 16)).view(np.uint8).reshape(-1)
    assert (made.numpy() == expected).all()
    assert tensors.compare(message, made)[0] == 0
    for place in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        damaged = made.clone()
        damaged[place] ^= 1
        count, units, words = tensors.compare(message, damaged)
        assert (count, units.tolist()) == (1, [place // 16])
        unit = place // 16 * 16
        assert words.view(np.uint8).reshape(-1).tolist() == damaged[unit : unit + 16].tolist()


def test_compare_counts_everything_and_looks_at_the_first_16_mib() -> None:
    tensors, message = LabelTensors(torch.device("cpu")), Message(0, 1, 0)
    received = torch.zeros(20 << 20, dtype=torch.uint8)
    count, units, words = tensors.compare(message, received)
    assert count > 0.99 * received.numel()
    assert len(units) == len(words) == (16 << 20) // 16


def test_calls_count_on_past_the_end_of_their_field() -> None:
    cycle = (1 << 24) - 1
    before = read_labels(label_words(Message(0, 1, cycle - 1), np.array([0]))).call
    after = read_labels(label_words(Message(0, 1, cycle), np.array([0]))).call
    assert calls_since(before, cycle).tolist() == [1]
    assert calls_since(after, cycle).tolist() == [0]
    assert calls_since(after, cycle - 1).tolist() == [-1]


def test_what_no_label_can_say_is_refused() -> None:
    with pytest.raises(InputError, match="ranks 0 to 4095"):
        label_words(Message(4096, 0, 0), np.array([0]))
    with pytest.raises(InputError, match="too long: at most 17179869184"):
        block_keys(Message(0, 1, 0), (1 << 16) + 1)
