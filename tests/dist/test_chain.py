from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import RankPool

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankPool]


ON_SIX = [
    ("whole copies", 50_000, False),
    ("one rank here, two there", 1 << 30, True),
    ("all ranks to all", 1 << 30, False),
]
ON_FOUR = [("to all nodes", 50_000, False), ("casts", 1 << 30, False), ("casts", 100_000, True)]


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
@pytest.mark.parametrize(("world", "runs", "stages"), [(6, ON_SIX, [3, None, 3]), (4, ON_FOUR, [3, 3, None])])
def test_a_chain_gives_the_bits_of_gather_and_slice(
    ranks: Ranks, world: int, runs: list[Any], stages: list[int | None], executor: str
) -> None:
    """On three nodes of two ranks and on four nodes of one."""
    values = ranks(world).call("jobs_chain:chains", executor=executor, runs=runs)
    for at, (run, depth) in enumerate(zip(runs, stages, strict=True)):
        for rank, value in enumerate(found[at] for found in values):
            assert value["wrong"] == [] and not any(value["source changed"]), (run, rank)
            passed, total = value["digests"]
            assert passed == total > 0, (run, rank)
            sent, priced = value["sent"]
            assert sent == priced, (run, rank)
            held, predicted = value["buffers"]
            assert held <= predicted, (run, rank)
        if depth is not None:
            assert max(found[at]["stages"] for found in values) == depth


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
def test_a_chain_keeps_to_the_memory_that_was_predicted(ranks: Ranks, executor: str) -> None:
    for value in ranks(4).call("jobs_chain:given_up", executor=executor):
        assert value["wrong"] == []
