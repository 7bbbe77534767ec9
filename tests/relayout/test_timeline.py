from __future__ import annotations

import numpy as np
import pytest

from relaymeter.errors import InputError
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.partitions import zero3_layout
from relaymeter.relayout.placements import Cut, tensor_parallel_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import ROUTES
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.segments import FROM_DESTINATION, source_space
from relaymeter.relayout.timeline import choose_bucket, predicted_extra_bytes
from relaymeter.relayout.topology import Topology

WORLD = 4


def layouts() -> tuple[list[Layout], Layout]:
    """A trainer on ranks 0 and 1 and an old replica on 2 and 3 serve replicas on all; one tensor does not move."""
    kinds = {"a": "bfloat16", "b": "float32", "c": "int8", "d": "bfloat16"}
    specs = {name: TensorSpec(name, (48, 40), kind) for name, kind in kinds.items()}
    cuts = {"a": Cut(0), "b": Cut(1), "c": Cut(None), "d": Cut(1)}
    kept = {"kept": TensorSpec("kept", (500,), "float32")}
    trainer = zero3_layout(specs | kept, (0, 1), WORLD, "trainer")
    old = tensor_parallel_layout(specs, cuts, [(2, 3)], WORLD, "old replica")
    return [trainer, old], tensor_parallel_layout(specs, cuts, [(0, 1), (2, 3)], WORLD, "replicas")


def schedule_of(sources: list[Layout], destination: Layout, bucket_bytes: int, route: str = "direct") -> Schedule:
    topology = Topology.grid(2, 2, "rank")
    plan = plan_move(sources, destination, topology)
    codes = np.full(int(plan.group_start[-1]), ROUTES.index(route), dtype=np.int8)
    return build_schedule(plan, topology, codes, bucket_bytes)


def held_by_hand(schedule: Schedule, rank: int, sources: list[Layout], destination: Layout) -> int:
    """The most storage bytes in any round, storage by storage and round by round."""
    table = schedule.all_segments
    most = 0
    for number in range(schedule.rounds):
        total = 0
        for index, spec in enumerate(schedule.tensors):
            rows = [k for k in range(len(table)) if table.tensor[k] == index]
            for k, layout in enumerate(sources):
                read = [
                    int(table.round[row])
                    for row in rows
                    if table.src_rank[row] == rank and table.src_space[row] == source_space(k) != FROM_DESTINATION
                ]
                if read and max(read) >= number:
                    total += layout.placements[spec.name].storage.get(rank, 0) * spec.itemsize
            written = [int(table.round[row]) for row in rows if table.dst_rank[row] == rank]
            if written and min(written) <= number:
                total += destination.placements[spec.name].storage.get(rank, 0) * spec.itemsize
        for layout in sources:
            for name in set(layout.specs) - set(destination.specs):
                total += layout.placements[name].storage.get(rank, 0) * layout.specs[name].itemsize
        most = max(most, total)
    return most


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
@pytest.mark.parametrize(("route", "bucket_bytes"), [("direct", 300), ("relay", 2000), ("spread", 1 << 20)])
def test_the_prediction_counts_every_storage_and_buffer(executor: str, route: str, bucket_bytes: int) -> None:
    sources, destination = layouts()
    schedule = schedule_of(sources, destination, bucket_bytes, route)
    for rank in range(WORLD):
        larger = max(sum(layout.storage_bytes(rank) for layout in sources), destination.storage_bytes(rank))
        buffers = int(schedule.peak_bytes(executor)[rank])
        wanted = max(0, held_by_hand(schedule, rank, sources, destination) + buffers - larger)
        assert predicted_extra_bytes(schedule, rank, sources, destination, executor) == wanted


def test_the_largest_bucket_that_fits_is_chosen() -> None:
    sources, destination = layouts()
    extra = {
        bucket: [
            predicted_extra_bytes(schedule_of(sources, destination, bucket), rank, sources, destination, "send-recv")
            for rank in range(WORLD)
        ]
        for bucket in (512, 1024, 2048, 4096, 8192)
    }
    assert max(extra[512]) < max(extra[8192])

    def choose(limit: int) -> tuple[int, list[int]]:
        choice = choose_bucket(
            lambda bucket: schedule_of(sources, destination, bucket), sources, destination, "send-recv", limit,
            largest=8192, smallest=512,
        )  # fmt: skip
        assert choice.schedule.rounds == schedule_of(sources, destination, choice.bucket_bytes).rounds
        return choice.bucket_bytes, list(choice.extra_bytes)

    for limit in {max(each) for each in extra.values()} | {1 << 30}:
        largest = max(bucket for bucket, each in extra.items() if max(each) <= limit)
        assert choose(limit) == (largest, extra[largest])
    least, bucket = min((max(each), bucket) for bucket, each in extra.items())
    worst = max(extra[512])
    with pytest.raises(InputError) as refused:
        choose(least - 1)
    assert str(refused.value) == (
        f"rank {extra[512].index(worst)} needs {worst} bytes beyond its larger layout with buckets of 512 bytes, the "
        f"smallest that are tried, but --max-extra allows {least - 1}: set --max-extra {least} "
        f"(bucket_bytes {bucket}) or more, or leave it out to keep the source"
    )
