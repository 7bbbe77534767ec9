"""Plain values of training state: round trip bit for bit, refusals by place, differences by place."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaymeter.errors import InputError
from relaymeter.relayout.plain_state import decode, encode, field_differences

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def carried(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "here"), allow_nan=False)))


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@given(_VALUES)
def test_values_come_back_equal_in_value_and_type(value: Any) -> None:
    assert same(carried(value), value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([1 + 2**-10, -0.0, float("nan")], dtype=torch.float32),
        torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16),
        torch.tensor(True),
    ],
)
def test_tensors_come_back_bit_for_bit(tensor: torch.Tensor) -> None:
    back = carried(tensor)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_counters_sets_and_dtypes_keep_their_types() -> None:
    value = {"milestones": Counter({3: 1, 7: 2}), "seen": {1, 2}, "dtype": torch.bfloat16}
    back = carried(value)
    assert back == value and type(back["milestones"]) is Counter and type(back["seen"]) is set


@pytest.mark.parametrize("value", [{"a": [object()]}, {"a": [torch.zeros(2000)]}, {"a": [lambda: 0]}])
def test_what_cannot_be_carried_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(InputError, match=r"group 0\.a\[0\]"):
        encode(value, "group 0")


def test_differences_name_each_place_and_both_values() -> None:
    wanted = {"lr": 0.1, "step": encode(torch.tensor(3.0), ""), "betas": encode((0.9, 0.95), ""), "gone": 1}
    found = {"lr": 0.2, "step": encode(torch.tensor(4.0), ""), "betas": encode((0.9, 0.99), ""), "new": None}
    assert list(field_differences(wanted, found, "group 1")) == [
        "group 1.lr: 0.1 in the source, 0.2 in the destination",
        "group 1.step: 3.0 (torch.float32) in the source, 4.0 (torch.float32) in the destination",
        "group 1.betas[1]: 0.95 in the source, 0.99 in the destination",
        "group 1.gone: 1 in the source, missing in the destination",
        "group 1.new: missing in the source, None in the destination",
    ]


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, None), ("1", 1)])
def test_equal_values_of_different_types_differ(one: Any, other: Any) -> None:
    assert len(list(field_differences({"a": one}, {"a": other}))) == 1


def test_no_differences_in_equal_values() -> None:
    value = encode({"a": [1, {"b": (float("inf"), torch.zeros(2))}]}, "")
    assert list(field_differences(value, json.loads(json.dumps(value)))) == []
