from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from relaymeter.errors import InputError
from relaymeter.relayout.casts import convert
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.packing import MoveStorages, gather_copies, local_copies, scatter_copies
from relaymeter.relayout.segments import DIRECT_MIN_BYTES, FROM_DESTINATION, FROM_SOURCE, SegmentTable
from relaymeter.relayout.traffic import Traffic, converted

FLOATS = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
RAW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Schedule:
    """The rows of one rank by hand, in two rounds."""

    tensors: tuple[TensorSpec, ...]
    source_tensors: tuple[TensorSpec, ...]
    table: SegmentTable
    rounds: int = 2
    input_hash: bytes = b""

    def segments_for(self, rank: int) -> SegmentTable:
        return self.table


def any_bits(count: int, dtype: str) -> torch.Tensor:
    values = torch.empty(count, dtype=getattr(torch, dtype))
    random = np.random.default_rng(5).integers(0, 256, values.nbytes, dtype=np.uint8)
    values.view(torch.uint8).copy_(torch.from_numpy(random))
    return values


def raw(values: torch.Tensor) -> torch.Tensor:
    return values.view(RAW[values.element_size()])


def rows(count: int, *runs: tuple[int, int, int, int]) -> SegmentTable:
    """Runs of (space, source offset, source step, length), one after the other in a destination of ``count``."""
    column = [np.asarray(values, dtype=np.int64) for values in zip(*runs, strict=True)]
    space, offset, step, length = column
    zero = np.zeros(len(runs), dtype=np.int64)
    ends = np.cumsum(length)
    assert ends[-1] <= count
    wide = [values[:, None] for values in (length, step, zero + 1)]
    return SegmentTable(zero, zero, zero + 1, zero, zero, space, offset, ends - length, *wide)


@pytest.mark.parametrize(("leaves", "arrives"), [*itertools.permutations(FLOATS, 2)])
def test_a_cast_gives_the_same_bits_packed_copied_and_digested(leaves: str, arrives: str) -> None:
    values = any_bits(4001, leaves)
    source, target = TensorSpec("w", (4001,), leaves), TensorSpec("w", (4001,), arrives)
    right = convert(values, getattr(torch, arrives))
    numbers = right.to(torch.float64)
    assert torch.equal(numbers.isnan(), values.to(torch.float64).to(torch.float32).to(right.dtype).double().isnan())
    table = rows(
        4001, (FROM_SOURCE, 0, 2, 2001), (FROM_SOURCE, 1, 2, 5), (FROM_SOURCE, 11, 2, 1), (FROM_SOURCE, 13, 2, 1994)
    )
    order = torch.cat([torch.arange(0, 4001, 2), torch.arange(1, 4001, 2)])
    for way in ("packed", "local"):
        made = torch.zeros(4001, dtype=getattr(torch, arrives))
        held = MoveStorages([target], [source], [{"w": values}], {"w": made}, 0)
        if way == "packed":
            buffer = torch.zeros(4 * 16 + 4001 * 8, dtype=torch.uint8)
            gather_copies(table, buffer, held).run()
            scatter_copies(table, buffer, held).run()
        else:
            local_copies(table, held).run()
        assert torch.equal(raw(made), raw(right)[order])


def test_rounding_is_to_nearest_with_ties_to_even() -> None:
    one = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8), 1 + 2**-10])
    assert convert(one, torch.bfloat16).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0, 1.0]
    assert convert(one, torch.float32) is one


def test_the_second_stage_moves_the_destinations_bits_as_they_are() -> None:
    source, target = TensorSpec("w", (4,), "float32"), TensorSpec("w", (4,), "bfloat16")
    made = torch.tensor([0x7F81, -1, 0, 0], dtype=torch.int16).view(torch.bfloat16)  # NaNs that a cast would settle
    held = MoveStorages([target], [source], [{"w": torch.ones(4)}], {"w": made}, 0)
    table = rows(4, (FROM_DESTINATION, 0, 1, 2), (FROM_SOURCE, 0, 1, 2))
    buffer = torch.zeros(32, dtype=torch.uint8)
    gather_copies(table, buffer, held).run()
    assert buffer.view(torch.int16).tolist() == [0x7F81, -1, 0, 0, 0, 0, 0, 0, 0x3F80, 0x3F80, 0, 0, 0, 0, 0, 0]


def test_a_large_run_is_converted_on_its_way_into_a_packed_message() -> None:
    count = DIRECT_MIN_BYTES
    source, target = TensorSpec("w", (count,), "float32"), TensorSpec("w", (count,), "bfloat16")
    columns = [np.asarray(values, dtype=np.int64) for values in ([0, 0], [0, 1], [1, 2], [0, 0], [1, 1])]
    space, zero = np.asarray([FROM_SOURCE, FROM_DESTINATION]), np.zeros(2, dtype=np.int64)
    wide = [np.asarray([[value], [value]], dtype=np.int64) for value in (count, 1, 1)]
    table = SegmentTable(*columns, space, zero, zero, *wide)
    for leaves, packed, direct in ((source, 2 * count, 0), (target, 0, 1)):
        traffic = Traffic(Schedule((target,), (leaves,), table), 0, 2, "send-recv")
        assert traffic.sends(0).nbytes == packed
        assert len(traffic.sends(0).direct) == direct
        assert len(traffic.sends(1).direct) == 1  # stage two: already converted
        assert traffic.buffer_bytes == packed


def test_storages_of_another_dtype_and_undefined_casts_are_refused() -> None:
    def specs(dtype: str) -> list[TensorSpec]:
        return [TensorSpec("w", (4,), dtype)]

    with pytest.raises(InputError, match=r"rank 3, source: storage of w must be a contiguous 1-D tensor of float32"):
        MoveStorages(specs("bfloat16"), specs("float32"), [{"w": torch.zeros(4, dtype=torch.int32)}], {}, 3)
    for leaves, arrives in (("float32", "int32"), ("bfloat16", "uint8"), ("complex64", "float32")):
        with pytest.raises(InputError, match=f"tensor w: no cast from {leaves} to {arrives} is offered"):
            converted(specs(arrives), specs(leaves))
    for leaves, arrives in (("int64", "float32"), ("int32", "int8"), ("bool", "bfloat16"), ("float32", "complex64")):
        assert converted(specs(arrives), specs(leaves)).tolist() == [True]
    with pytest.raises(InputError, match="must have the same names in the same order"):
        converted(specs("int8"), [TensorSpec("v", (4,), "int8")])
