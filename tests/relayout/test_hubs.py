"""Hubs are balanced over NICs, then over ranks, counting what ranks receive anyway."""

from __future__ import annotations

import numpy as np
import pytest

from relaymeter.relayout.hubs import HubRequest, assign_hubs
from relaymeter.relayout.topology import Topology

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
