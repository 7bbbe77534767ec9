"""Jobs that run hand-built segment tables through both executors."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pool import Seat

from relaymeter.errors import RelaymeterError
from relaymeter.relayout import execute
from relaymeter.relayout.agreement import agree_on_names
from relaymeter.relayout.digest import DigestReport, compare, digest_layout
from relaymeter.relayout.execute import Hooks, Mover, MoveTiming
from relaymeter.relayout.geometry import row_major_strides
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import Cut, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.segments import FROM_DESTINATION, SegmentTable, source_space
from relaymeter.relayout.transport import exchange_flat, exchange_messages

Storage = dict[str, torch.Tensor]
Messages = Sequence[tuple[int, torch.Tensor]]


@dataclass(frozen=True)
class Segment:
    """One row of a table, strides outermost first."""

    tensor: int
    src: int
    dst: int
    shape: Sequence[int]
    src_stride: Sequence[int]
    dst_stride: Sequence[int]
    src_offset: int = 0
    dst_offset: int = 0
    round: int = 0
    stage: int = 1
    layout: int = 0
    """Which source layout a row of stage one reads."""


@dataclass(frozen=True)
class HandSchedule:
    """What a Mover needs of a schedule, with all rows given by hand. ``leaves`` maps tensors to other source dtypes."""

    tensors: tuple[TensorSpec, ...]
    segments: tuple[Segment, ...]
    rounds: int
    input_hash: bytes = b"by hand"
    leaves: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def source_tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(dataclasses.replace(t, dtype=self.leaves.get(t.name, t.dtype)) for t in self.tensors)

    def segments_for(self, rank: int) -> SegmentTable:
        rows = sorted(
            (s for s in self.segments if rank in (s.src, s.dst)),
            key=lambda s: (s.round, s.src, s.dst, s.stage, s.tensor),
        )
        width = max((len(s.shape) for s in rows), default=1)

        def column(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
            return np.asarray(values, dtype=np.int64)

        def wide(fill: int, *values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
            return np.asarray([[fill] * (width - len(v)) + list(v) for v in values], dtype=np.int64).reshape(-1, width)

        return SegmentTable(
            tensor=column(*(s.tensor for s in rows)),
            round=column(*(s.round for s in rows)),
            stage=column(*(s.stage for s in rows)),
            src_rank=column(*(s.src for s in rows)),
            dst_rank=column(*(s.dst for s in rows)),
            src_space=column(*(source_space(s.layout) if s.stage == 1 else FROM_DESTINATION for s in rows)),
            src_offset=column(*(s.src_offset for s in rows)),
            dst_offset=column(*(s.dst_offset for s in rows)),
            shape=wide(1, *(s.shape for s in rows)),
            src_stride=wide(0, *(s.src_stride for s in rows)),
            dst_stride=wide(0, *(s.dst_stride for s in rows)),
        )


def bits(count: int, dtype: str, seed: int) -> torch.Tensor:
    """Random bytes as ``dtype``."""
    values = torch.empty(count, dtype=getattr(torch, dtype))
    random = np.random.default_rng(seed).integers(0, 256, values.nbytes, dtype=np.uint8)
    values.view(torch.uint8).copy_(torch.from_numpy(random))
    return values


def fingerprint(storages: Storage) -> str:
    digest = hashlib.sha256()
    for name in sorted(storages):
        digest.update(name.encode() + storages[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_segment(source: torch.Tensor, target: torch.Tensor, s: Segment) -> None:
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        source.element_size()
    ]  # copying a bool mends it
    view = target.view(raw).as_strided(s.shape, s.dst_stride, s.dst_offset)
    view.copy_(source.view(raw).as_strided(s.shape, s.src_stride, s.src_offset))


def attempt(mover: Mover) -> dict[str, Any]:
    """What a move came to, as JSON."""
    try:
        timing = mover.run()
    except RelaymeterError as error:
        return {"error": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ()))}
    return dataclasses.asdict(timing)


def strided(seat: Seat, executor: str) -> dict[str, Any]:
    """A transposed 4 x 4 and every second column of an 8 x 8 go from rank 0 to 1; ranks 2 and 3 have no traffic."""
    tensors = (TensorSpec("square", (4, 4), "int64"), TensorSpec("columns", (8, 4), "int64"))
    segments = (Segment(0, 0, 1, [4, 4], [1, 4], [4, 1]), Segment(1, 0, 1, [8, 4], [8, 2], [4, 1]))
    source = {"square": torch.arange(16), "columns": torch.arange(64)} if seat.rank == 0 else {}
    target = {"square": torch.zeros(16).long(), "columns": torch.zeros(32).long()} if seat.rank == 1 else {}
    mover = Mover(HandSchedule(tensors, segments, 1), seat.rank, source, target, executor, time_limit_s=20)
    timing = mover.run()
    sizes = {"sent": [timing.sent_bytes], "buffers": [mover.buffer_bytes], "peak": [timing.peak_bytes]}
    return {name: tensor.tolist() for name, tensor in target.items()} | sizes


def _mixed(seed: int) -> tuple[HandSchedule, dict[int, Storage], dict[int, Storage]]:
    """25 tensors of mixed types in two rounds, some forwarded by a hub, with the storages before and after."""
    random = np.random.default_rng(seed)
    kinds = ["bfloat16", "float32", "int8", "float64", "float16", "bool", "float8_e4m3fn"]
    tensors, segments = [], []
    source: dict[int, Storage] = {rank: {} for rank in range(4)}
    wanted: dict[int, Storage] = {rank: {} for rank in range(4)}
    for index in range(25):
        shape = tuple(int(n) for n in random.integers(1, 40, int(random.integers(1, 4))))
        if index in (3, 11):
            shape = (50_000,)  # large enough to travel without packing
        spec = TensorSpec(f"t{index}", shape, kinds[index % len(kinds)])
        holder = int(random.integers(0, 3))
        source[holder][spec.name] = bits(spec.numel, spec.dtype, index)
        dense = row_major_strides(shape)
        order = random.permutation(len(shape)) if index % 3 == 0 and index not in (3, 11) else np.arange(len(shape))
        size, step = 1, [0] * len(shape)
        for dim in reversed(order.tolist()):
            step[dim] = size
            size *= shape[dim]
        first, second = (int(rank) for rank in random.permutation(4)[:2])
        rows = [Segment(index, holder, first, shape, dense, step, round=index % 2)]
        if index % 2 == 0:  # the second copy is forwarded by the first one a round later
            rows.append(Segment(index, first, second, shape, step, step, round=1, stage=2))
        else:
            rows.append(Segment(index, holder, second, shape, dense, step, round=1))
        tensors.append(spec)
        segments += rows
        for rank in (first, second):
            wanted[rank][spec.name] = torch.zeros(math.prod(shape), dtype=getattr(torch, spec.dtype))
            run_segment(source[holder][spec.name], wanted[rank][spec.name], rows[0])
    return HandSchedule(tuple(tensors), tuple(segments), 2), source, wanted


def mixed(seat: Seat, executor: str, cap: int, seed: int) -> dict[str, Any]:
    """Move 25 tensors twice over poisoned storages; whether all bits are right and addresses were kept."""
    schedule, source, wanted = _mixed(seed)
    mine = wanted[seat.rank]
    target = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    before = fingerprint(source[seat.rank])
    where = [tensor.data_ptr() for tensor in target.values()]
    mover = Mover(
        schedule, seat.rank, source[seat.rank], target, executor, time_limit_s=30, message_cap_bytes=cap
    )  # fmt: skip
    timings = []
    for _ in range(2):
        mover.poison()
        timings.append(mover.run())
        assert fingerprint(target) == fingerprint(mine)
    assert before == fingerprint(source[seat.rank])
    assert where == [tensor.data_ptr() for tensor in target.values()]
    last = timings[-1]
    assert last.total_s >= last.pack_s + last.communicate_s + last.unpack_s - 1e-3
    return {
        "sent": last.sent_bytes,
        "received": last.received_bytes,
        "peak": last.peak_bytes,
        "buffers": mover.buffer_bytes,
    }


def rows_to_nobody(seat: Seat) -> list[int]:
    """Rank 0 keeps one row of width 4 and sends one to rank 1; the others send nothing. Then nobody sends anything."""
    rest = [0] * (seat.world_size - 2)
    send_splits = [4, 4, *rest] if seat.rank == 0 else [0, 0, *rest]
    receive_splits = [4, 0, *rest] if seat.rank in (0, 1) else [0, 0, *rest]
    send = torch.arange(sum(send_splits), dtype=torch.uint8)
    receive = torch.zeros(sum(receive_splits), dtype=torch.uint8)
    moved = exchange_flat(send, send_splits, receive, receive_splits)
    assert moved == (sum(send_splits), sum(receive_splits))
    empty = torch.zeros(0, dtype=torch.uint8)
    assert exchange_flat(empty, [0, 0, *rest], torch.zeros(0, dtype=torch.uint8), [0, 0, *rest]) == (0, 0)
    assert exchange_messages([(1, empty)] if seat.rank == 0 else [], [], tag=3) == (0, 0)
    return receive.tolist()


def wrong_operands(seat: Seat) -> list[str]:
    """What an all-to-all in place, half in place, with splits that do not fit, or of a strided tensor says.

    All are refused before anything is sent.
    """
    data, other = torch.zeros(8, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    ones = [1, 1, 1, 1]
    texts = []
    for send, receive, splits in (
        (data[:4], data[:4], ones),
        (data[:4], data[2:6], ones),
        (data[:4], other, [1, 1, 1, 2]),
        (data[::2], other, ones),
    ):
        try:
            exchange_flat(send, splits, receive, ones)
        except RelaymeterError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def disagree(
    seat: Seat, executor: str, wrong_rank: int, elements: int, width: int, round_count: int = 1
) -> dict[str, Any]:
    """Ranks expect rank 0 to send ``width`` bf16 elements to each other one, the wrong rank ``elements``."""
    spec = TensorSpec("w", (64,), "bfloat16")
    count = elements if seat.rank == wrong_rank else width
    segments = tuple(Segment(0, 0, dst, [count], [1], [1]) for dst in range(1, seat.world_size))
    target = {"w": torch.full((64,), 5.0, dtype=torch.bfloat16)}
    source = {"w": torch.ones(64, dtype=torch.bfloat16)}
    rounds = round_count if seat.rank == wrong_rank else 1
    mover = Mover(HandSchedule((spec,), segments, rounds), seat.rank, source, target, executor, time_limit_s=20)
    return attempt(mover) | {"untouched": bool((target["w"] == 5).all())}


def misfit(seat: Seat) -> dict[str, Any]:
    """Rank 2 hands in a storage that is too short, and rank 1 exceeds the size of a message."""
    spec = TensorSpec("w", (64,), "float32")
    segments = tuple(Segment(0, 0, dst, [64], [1], [1]) for dst in (1, 2))
    target = {"w": torch.zeros(8 if seat.rank == 2 else 64)}
    cap = 100 if seat.rank == 1 else 1 << 20
    schedule = HandSchedule((spec,), segments, 1)
    return attempt(Mover(schedule, seat.rank, {"w": torch.ones(64)}, target, "all-to-all", message_cap_bytes=cap))


def names(seat: Seat, lists: list[list[str]]) -> dict[str, Any]:
    try:
        return {"agreed": agree_on_names(lists[seat.rank], "parameter orders")}
    except RelaymeterError as error:
        return {"error": type(error).__name__, "text": str(error)}


def _layouts() -> tuple[Layout, Layout, HandSchedule]:
    """Two tensors as ZeRO-3 halves on ranks 0 and 1, moved whole to ranks 2 and 3."""
    specs = {"up": TensorSpec("up", (700, 100), "bfloat16"), "norm": TensorSpec("norm", (101,), "float32")}
    source = zero3_layout(specs, (0, 1), 4)
    target = tensor_parallel_layout(specs, {"up": Cut(0), "norm": Cut(None)}, [(2,), (3,)], 4)
    segments = []
    for index, spec in enumerate(specs.values()):
        half = -(-spec.numel // 2)
        for src in (0, 1):
            count = min(half, spec.numel - src * half)
            segments += [Segment(index, src, dst, [count], [1], [1], 0, src * half, round=index) for dst in (2, 3)]
    return source, target, HandSchedule(tuple(specs.values()), tuple(segments), 2)


def _held(layout: Layout, rank: int, seed: int) -> Storage:
    """Storages of ``rank``: random bits where it is a source, zeros where it is not."""
    sizes = {name: place.storage.get(rank, 0) for name, place in layout.placements.items()}
    return {name: bits(size, layout.specs[name].dtype, seed + rank) for name, size in sizes.items() if size}


def _check(
    seat: Seat, hooks: Hooks | None, executor: str, before: Storage | None = None
) -> tuple[DigestReport, MoveTiming]:
    source_layout, target_layout, schedule = _layouts()
    source, target = _held(source_layout, seat.rank, 1), _held(target_layout, seat.rank, 50)
    mover = Mover(schedule, seat.rank, source, target, executor, hooks=hooks, time_limit_s=20)
    mover.poison()
    timing = mover.run()
    report = compare(
        digest_layout(source_layout, seat.rank, source), digest_layout(target_layout, seat.rank, target, replicas=True)
    )
    return report, timing


def flip(seat: Seat, executor: str) -> dict[str, Any]:
    """One bit of one block that rank 3 receives is flipped in the first of two moves."""

    def on_receive(round_number: int, src: int, tensor: torch.Tensor) -> None:
        if (seat.rank, round_number, src) == (3, 0, 1):
            tensor[20_000] ^= 8

    bad, _ = _check(seat, Hooks(on_receive=on_receive), executor)
    good, _ = _check(seat, None, executor)
    return {"bad": [bad.passed, bad.total, *map(str, bad.mismatches)], "good": [good.passed, good.total, good.ok]}


def nothing_moves(seat: Seat, executor: str, warm: bool, lies: bool) -> dict[str, Any]:
    """The transport is replaced by one that does nothing, at once or (``warm``) after a first move that was right.

    It says so, or (``lies``) says that it carried everything.
    """
    source_layout, target_layout, schedule = _layouts()
    source, target = _held(source_layout, seat.rank, 1), _held(target_layout, seat.rank, 50)
    mover = Mover(schedule, seat.rank, source, target, executor, time_limit_s=20, group=dist.new_group())
    if warm:
        mover.run()

    def no_messages(sends: Messages, receives: Messages, **_: Any) -> tuple[int, int]:
        return (_total(sends), _total(receives)) if lies else (0, 0)

    def no_flat(send: torch.Tensor, _: Any, receive: torch.Tensor, *__: Any, **___: Any) -> tuple[int, int]:
        return (send.nbytes, receive.nbytes) if lies else (0, 0)

    real = execute.exchange_messages, execute.exchange_flat
    execute.exchange_messages, execute.exchange_flat = no_messages, no_flat
    try:
        mover.poison()
        ended = attempt(mover)
    finally:
        execute.exchange_messages, execute.exchange_flat = real
    report = compare(
        digest_layout(source_layout, seat.rank, source), digest_layout(target_layout, seat.rank, target, replicas=True)
    )
    return ended | {
        "passed": report.passed,
        "total": report.total,
        "found": [str(found) for found in report.mismatches],
    }


def _total(messages: Messages) -> int:
    return sum(tensor.numel() for _, tensor in messages)
