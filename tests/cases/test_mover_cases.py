"""Public bug reports about moves of tensors as small inputs, each with the right value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from relaymeter.errors import LayoutError
from relaymeter.relayout.cuts import Cut
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.partitions import zero3_layout
from relaymeter.relayout.placements import replicated_layout, tensor_parallel_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.traffic import Traffic

if TYPE_CHECKING:
    from pool import RankPool

dist = pytest.mark.dist

EXECUTORS = ["send-recv", "all-to-all"]
Ranks = Callable[[int], "RankPool"]
MIB = 1 << 20


def schedule_of(source: Layout, destination: Layout, bucket_bytes: int) -> Schedule:
    topology = Topology.grid(1, source.world_size, "rank")
    plan = plan_move(source, destination, topology)
    return build_schedule(plan, topology, np.zeros(int(plan.group_start[-1]), dtype=np.int8), bucket_bytes)


@dist
def test_b03_tensors_without_elements_keep_name_and_shape_and_send_nothing(ranks: Ranks) -> None:
    shapes = {"a": [8], "none": [0], "b": [24], "last": [0, 8]}
    for rank, found in enumerate(ranks(4).call("jobs_execute_cases:empty", limit_s=40)):
        there, back = found["trainer to tp"], found["tp to trainer"]
        for each in (there, back):
            assert each["wrong"] == []
            assert each["shapes"] == shapes
            assert each["moved"] == ["a", "b"]
        assert there["passed"] == [4, 4]
        assert back["passed"] == [2, 2]
        assert there["bytes"] == [0, 0, 128, 128]
        assert back["bytes"] == [64, 64, 0, 0]
        assert there["sent"] == (128 if rank < 2 else 0)


@dist
def test_b17_every_tensor_keeps_its_dtype_unless_a_cast_is_named(ranks: Ranks) -> None:
    for value in ranks(4).call("jobs_execute_cases:masters", cast={}, limit_s=30):
        assert value == {
            "ok": True,
            "weight": ["torch.bfloat16", [1.0]],
            "master": ["torch.float32", [1 + 2**-10]],
            "momentum": ["torch.bfloat16", [1.0]],
        }
    for value in ranks(4).call("jobs_execute_cases:masters", cast={"master": "bfloat16"}, limit_s=30):
        assert value["ok"]
        assert value["master"] == ["torch.bfloat16", [1.0]]
    source = zero3_layout({"master": TensorSpec("master", (7, 9), "float32")}, (0, 1), 4)
    target = zero3_layout({"master": TensorSpec("master", (7, 9), "bfloat16")}, range(4), 4)
    with pytest.raises(LayoutError, match="tensor master leaves as float32 and arrives as bfloat16: name the cast"):
        plan_move(source, target, Topology.grid(1, 4, "rank"))


@dist
@pytest.mark.parametrize("executor", EXECUTORS)
def test_b27_elements_past_two_to_the_31_arrive_and_are_checked(ranks: Ranks, executor: str) -> None:
    for value in ranks(2).call("jobs_execute_cases:far", executor=executor, limit_s=60):
        count = (1 << 31) + (1 << 20)
        assert value["right"]
        assert value["passed"] == [1, 1]
        assert value["largest"] > 1 << 31
        assert value["last offset"] == count
        assert value["found"] == [
            f"w, copy 0 (ranks 1), elements [{count - 4096}, {count}): holds one changed element, {count - 1}"
        ]


def test_b27_plans_count_in_64_bits() -> None:
    square = {"w": TensorSpec("w", (46341, 46341), "bfloat16")}
    assert square["w"].numel == 2_147_488_281
    schedule = schedule_of(
        zero3_layout(square, range(8), 8), tensor_parallel_layout(square, {"w": Cut(0)}, [range(8)], 8), 1 << 40
    )
    table = schedule.all_segments
    assert int(table.elements.sum()) == 2_147_488_281
    flat = {"w": TensorSpec("w", ((1 << 31) + 8,), "int8")}
    schedule = schedule_of(replicated_layout(flat, [0], 2), replicated_layout(flat, [1], 2), 1 << 40)
    (row,) = schedule.all_segments.shape.tolist()
    assert row[-1] == (1 << 31) + 8
    gathered = {"w": TensorSpec("w", (8, 134_217_728), "float32")}
    schedule = schedule_of(zero3_layout(gathered, range(8), 8), replicated_layout(gathered, [0], 8), 256 * MIB)
    traffic = Traffic(schedule, 0, 8, "all-to-all")
    received = [traffic.receives(number) for number in range(schedule.rounds)]
    assert sum(way.nbytes for way in received) == 4_294_967_296 * 7 // 8
    assert max(max(way.splits) for way in received) < 256 * MIB
    table = schedule.segments_for(0)
    ends = np.sort(table.dst_offset + table.elements)
    assert int(ends[-1]) == 8 * 134_217_728
    assert int(table.elements.sum()) == 8 * 134_217_728


@dist
@pytest.mark.parametrize(("executor", "kind", "repeats"), [
    ("send-recv", "flip", [2, 5, 7]), ("all-to-all", "flip", [0, 1, 9]), ("send-recv", "nan", [4]),
])  # fmt: skip
def test_b31_exactly_the_damaged_repeats_are_flagged(
    ranks: Ranks, executor: str, kind: str, repeats: list[int]
) -> None:
    for value in ranks(2).call(
        "jobs_execute_cases:corrupted", repeats=repeats, executor=executor, kind=kind, limit_s=60
    ):
        assert [number for number, text in enumerate(value) if text] == repeats
        element = 524_288 // 4
        text = (
            "DigestMismatch: wrong bits in 1 of 2 checks: w, copy 0 (ranks 1), elements "
            f"[{element}, {element + 4096}): holds one changed element, {element}"
        )
        assert {value[number] for number in repeats} == {text}


@dist
@pytest.mark.parametrize("executor", EXECUTORS)
def test_b38_bits_do_not_depend_on_the_size_of_buckets(ranks: Ranks, executor: str) -> None:
    sizes = [1 << 10, 20_000, 100_000, 1 << 20, 1 << 40]  # about one tensor, ten, and all of them among these
    values = ranks(4).call("jobs_execute_cases:buckets", bucket_bytes=sizes, executor=executor, limit_s=90)
    for value in values:
        assert {size: found["wrong"] for size, found in value.items()} == {str(size): [] for size in sizes}
    rounds, buffers = (
        [max(value[str(size)][what] for value in values) for size in sizes] for what in ("rounds", "buffers")
    )
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[0] >= 25
    assert rounds[-1] == 1
    assert buffers == sorted(buffers)


@dist
def test_b39_a_tensor_larger_than_the_bucket_travels_in_pieces(ranks: Ranks) -> None:
    for rank, value in enumerate(ranks(2).call("jobs_execute_cases:oversize", bucket_bytes=MIB, limit_s=30)):
        assert value == {"wrong": [], "rounds": 2, "sent": 1_228_800 if rank == 0 else 0}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_b39_an_embedding_of_2425_mib_fits_buckets_of_2048(executor: str) -> None:
    specs = {"embedding": TensorSpec("embedding", (248_320, 5120), "bfloat16")}
    schedule = schedule_of(replicated_layout(specs, [0], 2), replicated_layout(specs, [1], 2), 2048 * MIB)
    sent = np.bincount(schedule.loads(executor).round, weights=schedule.loads(executor).bytes)
    assert sent.sum() == 2_542_796_800
    assert len(sent) == 2
    assert sent.max() <= 2048 * MIB


@dist
@pytest.mark.parametrize("executor", EXECUTORS)
def test_b40_a_receiver_keeps_its_shard_and_no_more(ranks: Ranks, executor: str) -> None:
    values = ranks(3).call("jobs_execute_cases:shards", repeats=5, executor=executor, limit_s=90)
    shard = 8 * MIB
    for rank, repeats in enumerate(values):
        for number, found in enumerate(repeats):
            assert found["right"]
            assert found["storage"] == ([shard] if rank else [])
            packed = shard if rank == 0 else shard // 2  # half of both shards in each of two rounds
            assert found["buffers"] == (packed if executor == "all-to-all" else 0)
            if number and found["grown"] is not None:  # the first makes connections too
                assert abs(found["grown"] - (shard if rank else 0)) < 2 * MIB
                assert found["buffers"] <= found["peak"] < found["buffers"] + 4 * MIB


@dist
def test_b42_a_shard_that_passes_for_the_whole_is_refused_before_the_first_write(ranks: Ranks) -> None:
    values = ranks(2).call("jobs_execute_cases:half_held", limit_s=30)
    for value in values:
        assert value["error"] == "PlanDisagreement"
        assert value["untouched"]
        assert (
            "rank 0 refuses: rank 0, source: a segment needs element 4095 of experts, the storage handed in has 2048"
            in value["text"]
        )
    assert values[0]["digest"] == (
        "tensor experts: rank 0 needs a 1-D storage of 4096 elements of 2 bytes, got [2048] of 2"
    )
    assert values[1]["digest"] == "1 other ranks could not digest what they hold; their errors say why"


@dist
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("warm", "lies"), [(False, False), (False, True), (True, True)])
def test_b43_a_transport_that_moves_nothing_fails(ranks: Ranks, executor: str, warm: bool, lies: bool) -> None:
    values = ranks(4).call("jobs_execute:nothing_moves", executor=executor, warm=warm, lies=lies)
    for rank, value in enumerate(values):
        assert (value["passed"], value["total"]) == (0, 4)
        up = "ranks {}), elements [0, 70000): holds the poison pattern: never written"
        assert value["found"][0].endswith(up.format(2))
        assert value["found"][1].endswith(up.format(3))
        if lies:
            assert "error" not in value
            continue
        assert value["error"] == "DigestMismatch"
        sent = 2 * 70_000 if rank < 2 else 0  # half of 70,000 bf16 elements to each of two ranks
        received = 0 if rank < 2 else 2 * 70_000
        assert value["text"] == (
            f"round 0: the transport carried 0 of {sent} bytes from rank {rank} and 0 of {received} to it"
        )
