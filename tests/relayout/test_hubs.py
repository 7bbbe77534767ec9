"""Hubs are balanced over NICs, then over ranks, counting what ranks receive anyway."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from relaymeter.relayout.hubs import HubRequest, assign_hubs
from relaymeter.relayout.topology import Topology

IntArray = NDArray[np.int64]

OWN_NICS = Topology.grid(2, 2)
SHARED_NIC = Topology.grid(2, 2, "node")
#: Node 1 has three ranks: 1 and 2 share a NIC, 3 has its own.
MIXED = Topology(node=(0, 1, 1, 1), nic=(0, 1, 1, 2))


def hubs_of(requests: list[tuple[int, tuple[int, ...], int]], topology: Topology, start: dict[int, float]) -> list[int]:
    """The hub rank of each request (bucket, members, bytes) of one block; ``start``: a rank's bytes in every bucket."""
    buckets = [np.asarray([bucket]) for bucket, _, _ in requests]
    found = [HubRequest(unit, 1, members, size) for unit, (_, members, size) in enumerate(requests)]
    begin = np.zeros((1 + max(bucket for bucket, _, _ in requests), topology.world_size))
    for rank, received in start.items():
        begin[:, rank] = received
    slots = assign_hubs(found, buckets, begin, topology)
    return [request.members[int(slot[0, 0])] for request, slot in zip(found, slots, strict=True)]


@pytest.mark.parametrize("topology", [OWN_NICS, SHARED_NIC], ids=["own NICs", "shared NIC"])
def test_two_requests_of_one_bucket_get_different_hubs(topology: Topology) -> None:
    assert hubs_of([(0, (2, 3), 10), (0, (2, 3), 10)], topology, {}) == [2, 3]


def test_ranks_behind_a_shared_nic_take_turns_within_a_bucket_whatever_they_took_before() -> None:
    """Bucket 0 gave rank 2 far more; in bucket 1 each rank still gets one block, or stage two waits for rank 3."""
    assert hubs_of([(0, (2,), 100), (1, (2, 3), 10), (1, (2, 3), 10)], SHARED_NIC, {}) == [2, 3, 2]


def test_a_nic_that_serves_an_earlier_request_is_avoided_by_the_other_ranks_behind_it() -> None:
    assert hubs_of([(0, (1,), 10), (0, (2, 3), 10)], MIXED, {}) == [1, 3]


@pytest.mark.parametrize("topology", [OWN_NICS, SHARED_NIC], ids=["own NICs", "shared NIC"])
def test_a_rank_that_receives_bytes_directly_is_not_chosen(topology: Topology) -> None:
    assert hubs_of([(0, (2, 3), 10)], topology, {2: 100.0}) == [3]


def test_bytes_that_a_rank_receives_directly_count_for_its_whole_nic() -> None:
    assert hubs_of([(0, (2, 3), 10)], MIXED, {1: 100.0, 3: 50.0}) == [3]


def one_by_one(
    requests: list[HubRequest], buckets: list[IntArray], start: NDArray[np.float64], topology: Topology
) -> list[NDArray[np.int16]]:
    """The rule in plain words: by rounds, the largest first, each block where NIC, then rank, then total is least."""
    slots = [np.zeros((len(buckets[r.unit]), r.groups), dtype=np.int16) for r in requests]
    rank, total = start.copy(), np.zeros(topology.world_size)
    blocks = [
        (int(bucket) + request.delay, -request.bytes, number, place, group)
        for number, request in enumerate(requests)
        for place, bucket in enumerate(buckets[request.unit])
        for group in range(request.groups)
    ]
    for at, _, number, place, group in sorted(blocks):
        request = requests[number]
        port = np.bincount(topology.nic_array, weights=rank[at])
        loads = [(port[topology.nic[m]], rank[at, m], total[m], slot) for slot, m in enumerate(request.members)]
        slot = min(loads)[3]
        slots[number][place, group] = slot
        rank[at, request.members[slot]] += request.bytes
        total[request.members[slot]] += request.bytes
    return slots


@pytest.mark.parametrize("seed", range(12))
def test_every_block_goes_where_the_least_is_at_its_turn(seed: int) -> None:
    """Nodes, NICs of one or several ranks, members that overlap, equal and empty blocks, runs long and short."""
    rng = np.random.default_rng(seed)
    nodes, ranks = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    world = nodes * ranks
    new_nic = (np.arange(world) % ranks == 0) | (rng.random(world) < rng.choice([0.0, 0.5, 1.0]))
    topology = Topology(
        node=tuple(rank // ranks for rank in range(world)), nic=tuple((np.cumsum(new_nic) - 1).tolist())
    )
    buckets = [rng.integers(0, 5, size=int(rng.integers(1, 30))) for _ in range(3)]
    requests = []
    for _ in range(30):
        members = rng.permutation(ranks)[: int(rng.integers(1, ranks + 1))] + ranks * int(rng.integers(nodes))
        size = int(rng.choice([0, 1, 10, 10, 64, 1000]))
        unit, groups, delay = int(rng.integers(3)), int(rng.integers(1, 7)), int(rng.integers(3))
        requests.append(HubRequest(unit, groups, tuple(sorted(members.tolist())), size, delay))
    start = rng.integers(0, 3, size=(8, world)).astype(np.float64) * float(rng.choice([0, 10, 100]))
    for found, right in zip(
        assign_hubs(requests, buckets, start, topology), one_by_one(requests, buckets, start, topology), strict=True
    ):
        np.testing.assert_array_equal(found, right)
