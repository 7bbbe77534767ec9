"""Gather-then-slice, the usual way from ZeRO-3 partitions to tensor-parallel shards, against slices of the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pool import RankPool

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("together_bytes", [0, 40, 1 << 20])
@pytest.mark.parametrize("replicas", [[[0, 1, 2, 3]], [[1, 2, 3, 0]], [[2, 3], [0, 1]], [[1], [3]]])
def test_every_rank_gets_its_shard_of_every_weight(
    ranks: Ranks, together_bytes: int, replicas: list[list[int]]
) -> None:
    values = ranks(4).call("jobs_gather:shards", together_bytes=together_bytes, replicas=replicas, limit_s=30)
    for value in values:
        assert value["found"] == value["wanted"]
    assert sum(len(value["found"]) for value in values) == 5 * sum(map(len, replicas))
    parts = 2 * (15 + 16 + 3) + 4 * (1 + 9)
    assert {value["received"] for value in values} == {3 * parts}
    assert {value["collectives"] for value in values} == {{0: 5, 40: 3, 1 << 20: 2}[together_bytes]}


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2, 3]])
def test_partitions_that_do_not_follow_the_ranks_are_refused(ranks: Ranks, order: list[int]) -> None:
    for value in ranks(4).call("jobs_gather:refused", ranks=order, limit_s=30):
        assert value.startswith("InputError: tensor rows [12, 5]: gathering needs equal ranges of 15 elements on ranks")
