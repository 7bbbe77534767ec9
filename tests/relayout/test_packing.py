from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaymeter.errors import InputError
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.messages import compile_round
from relaymeter.relayout.packing import MoveStorages, gather_copies, local_copies, scatter_copies
from relaymeter.relayout.segments import DIRECT_MIN_BYTES, FROM_DESTINATION, FROM_SOURCE, PART_ALIGN, SegmentTable
from relaymeter.relayout.traffic import Traffic, part_offsets

Row = tuple[int, int, int, int, int, int, int, int, Sequence[int], Sequence[int], Sequence[int]]


def table_of(*rows: Row) -> SegmentTable:
    """Rows of (tensor, round, stage, src, dst, space, src offset, dst offset, shape, src stride, dst stride)."""
    width = max((len(row[8]) for row in rows), default=1)
    columns = [np.asarray([row[k] for row in rows], dtype=np.int64) for k in range(8)]
    boxes = [
        np.asarray([[fill] * (width - len(row[k])) + list(row[k]) for row in rows], dtype=np.int64).reshape(-1, width)
        for k, fill in ((8, 1), (9, 0), (10, 0))
    ]
    return SegmentTable(*columns, *boxes)


Held = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Schedule:
    """The rows of one rank by hand."""

    tensors: tuple[TensorSpec, ...]
    table: SegmentTable
    rounds: int
    input_hash: bytes = b""

    @property
    def source_tensors(self) -> tuple[TensorSpec, ...]:
        return self.tensors

    def segments_for(self, rank: int) -> SegmentTable:
        return self.table


def storages(specs: Sequence[TensorSpec], source: Held, target: Held | None = None, *more: Held) -> MoveStorages:
    """Storages of a move without casts; ``more`` are further source layouts."""
    return MoveStorages(specs, specs, [source, *more], target or {}, 0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_segments_travel_through_a_buffer_unchanged(data: st.DataObject) -> None:
    kinds = ["bfloat16", "float32", "int8", "float64", "bool"]
    specs = [TensorSpec(f"t{k}", (400,), data.draw(st.sampled_from(kinds))) for k in range(3)]
    source = {s.name: torch.randint(0, 2, (400,)).to(getattr(torch, s.dtype)) for s in specs}
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    rows: list[Row] = []
    expected = {name: tensor.clone() for name, tensor in target.items()}
    for index, spec in enumerate(specs):
        for part in range(data.draw(st.integers(0, 3))):
            shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
            order = data.draw(st.permutations(range(len(shape))))
            step = [0] * len(shape)
            size = 1
            for dim in order:
                step[dim] = size
                size *= shape[dim] + 1
            dense = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
            offset = data.draw(st.integers(0, 100))
            rows.append((index, 0, 1, 0, 1, FROM_SOURCE, offset, 100 * part, shape, step, dense))
            taken = source[spec.name].as_strided(shape, step, offset)
            expected[spec.name].as_strided(shape, dense, 100 * part).copy_(taken)
    table = table_of(*rows)
    _, total = part_offsets(table.elements * np.asarray([s.itemsize for s in specs])[table.tensor])
    buffer = torch.full((total,), 77, dtype=torch.uint8)
    held = storages(specs, source, target)
    gather_copies(table, buffer, held).run()
    scatter_copies(table, buffer, held).run()
    for name, tensor in target.items():
        assert torch.equal(tensor, expected[name])
    for tensor in target.values():
        tensor.zero_()
    local_copies(table, held).run()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in target.items())


def test_parts_begin_on_multiples_of_sixteen_bytes() -> None:
    offsets, total = part_offsets(np.asarray([1, 16, 0, 17, 3]))
    assert offsets.tolist() == [0, 16, 32, 32, 64]
    assert total == 80
    assert part_offsets(np.zeros(0, dtype=np.int64))[1] == 0
    assert PART_ALIGN == 16


def test_raw_bits_survive() -> None:
    spec = TensorSpec("w", (4,), "float32")
    bits = torch.tensor(
        [0x7F800001, -0x80000000, 0x7FC00001, 1], dtype=torch.int32
    )  # signalling NaN, -0, NaN, denormal
    target = torch.zeros(4)
    table = table_of((0, 0, 1, 0, 0, FROM_SOURCE, 0, 0, [2, 2], [2, 1], [1, 2]))
    local_copies(table, storages([spec], {"w": bits.view(torch.float32)}, {"w": target})).run()
    assert target.view(torch.int32).tolist() == bits[[0, 2, 1, 3]].tolist()


def test_transposed_and_skipping_sources_equal_a_contiguous_copy() -> None:
    specs = [TensorSpec("square", (4, 4), "int64"), TensorSpec("columns", (8, 4), "int64")]
    square, wide = torch.arange(16), torch.arange(64)
    target = {"square": torch.zeros(16, dtype=torch.int64), "columns": torch.zeros(32, dtype=torch.int64)}
    table = table_of(
        (0, 0, 1, 0, 1, FROM_SOURCE, 0, 0, [4, 4], [1, 4], [4, 1]),
        (1, 0, 1, 0, 1, FROM_SOURCE, 0, 0, [8, 4], [8, 2], [4, 1]),
    )
    buffer = torch.zeros(16 * 8 + 32 * 8, dtype=torch.uint8)
    held = storages(specs, {"square": square, "columns": wide}, target)
    gather_copies(table, buffer, held).run()
    scatter_copies(table, buffer, held).run()
    assert torch.equal(target["square"].view(4, 4), square.view(4, 4).t())
    assert torch.equal(target["columns"].view(8, 4), wide.view(8, 8)[:, ::2])


def test_second_stage_rows_read_the_destination() -> None:
    spec = TensorSpec("w", (4,), "int16")
    held = storages(
        [spec], {"w": torch.full((4,), 1, dtype=torch.int16)}, {"w": torch.full((4,), 2, dtype=torch.int16)}
    )
    table = table_of(
        (0, 1, 1, 0, 1, FROM_SOURCE, 0, 0, [2], [1], [1]), (0, 1, 2, 0, 1, FROM_DESTINATION, 0, 0, [2], [1], [1])
    )
    buffer = torch.zeros(32, dtype=torch.uint8)
    gather_copies(table, buffer, held).run()
    assert buffer.view(torch.int16).tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0]


def test_storages_that_do_not_fit_are_refused() -> None:
    spec = TensorSpec("w", (10,), "float32")
    table = table_of((0, 0, 1, 0, 1, FROM_SOURCE, 6, 0, [5], [1], [1]))
    with pytest.raises(InputError, match="a segment needs element 10 of w, the storage handed in has 10"):
        storages([spec], {"w": torch.zeros(20)[:10]}).reads(table)
    with pytest.raises(InputError, match="the storage handed in has 0"):
        storages([spec], {}).reads(table)
    for wrong in (torch.zeros(10, dtype=torch.bfloat16), torch.zeros(2, 5), torch.zeros(20)[::2]):
        with pytest.raises(InputError, match="storage of w must be a contiguous 1-D tensor of float32"):
            storages([spec], {"w": wrong})
    with pytest.raises(InputError, match="a message of 32 bytes needs a uint8 buffer, got 16"):
        gather_copies(
            table_of((0, 0, 1, 0, 1, FROM_SOURCE, 0, 0, [5], [1], [1])),
            torch.zeros(16, dtype=torch.uint8),
            storages([spec], {"w": torch.zeros(10)}),
        )


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
def test_large_runs_are_messages_of_their_own_under_send_recv_only(executor: str) -> None:
    count = DIRECT_MIN_BYTES // 4
    spec = TensorSpec("w", (4 * count,), "float32")
    held = torch.zeros(4 * count)
    table = table_of(
        (0, 0, 1, 0, 1, FROM_SOURCE, 0, 0, [count], [1], [1]),
        (0, 0, 1, 0, 1, FROM_SOURCE, count, 0, [count - 1], [1], [1]),
        (0, 0, 1, 0, 2, FROM_SOURCE, 0, 0, [2, count], [2 * count, 1], [count, 1]),
        (0, 0, 1, 0, 0, FROM_SOURCE, 0, 0, [count], [1], [1]),
    )
    traffic = Traffic(Schedule((spec,), table, 2), 0, 4, executor)
    buffer = torch.zeros(traffic.buffer_bytes, dtype=torch.uint8)
    move = storages([spec], {"w": held}, {"w": torch.zeros_like(held)})
    rounds = [compile_round(traffic, number, move, buffer) for number in range(2)]
    whole, short, strided = 4 * count, 4 * count, 8 * count  # the short one is padded
    sizes = [(peer, tensor.numel()) for peer, tensor in rounds[0].sends]
    assert not rounds[1].sends
    assert len(rounds[0].local.targets) == 1
    if executor == "send-recv":
        assert sizes == [(1, whole), (1, short), (2, strided)]
        assert rounds[0].sends[0][1].data_ptr() == held.data_ptr()
        assert (rounds[0].flat, buffer.numel()) == (None, short + strided)
    else:
        flat = rounds[0].flat
        assert sizes == [(1, whole + short), (2, strided)]
        assert flat is not None
        assert (flat.send_splits, flat.receive_splits) == ([0, whole + short, strided, 0], [0, 0, 0, 0])
        assert buffer.numel() == whole + short + strided
