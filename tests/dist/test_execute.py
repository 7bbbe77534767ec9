from __future__ import annotations

from collections.abc import Callable

import pytest
from pool import RankPool

pytestmark = pytest.mark.dist

EXECUTORS = ["send-recv", "all-to-all"]
Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(("executor", "cap"), [("send-recv", 1 << 28), ("send-recv", 10_000), ("all-to-all", 1 << 28)])
def test_mixed_tensors_arrive_bit_equal_in_place_and_again(ranks: Ranks, executor: str, cap: int) -> None:
    for seed in (1, 2):
        values = ranks(4).call("jobs_execute:mixed", executor=executor, cap=cap, seed=seed)
        assert sum(value["sent"] for value in values) == sum(value["received"] for value in values) > 0
        assert all(value["peak"] is None or value["peak"] >= value["buffers"] for value in values)


def test_disagreement_on_rounds_and_misfits_are_refused_on_every_rank(ranks: Ranks) -> None:
    values = ranks(4).call(
        "jobs_execute:disagree", executor="send-recv", wrong_rank=3, width=4, elements=4, round_count=2, limit_s=15
    )
    (text,) = {value["text"] for value in values}
    assert "planned from different inputs: ranks [0, 1, 2] (1 rounds); ranks [3] (2 rounds)" in text
    values = ranks(4).call("jobs_execute:misfit", limit_s=15)
    (text,) = {value["text"] for value in values}
    assert "rank 2 refuses: rank 2, destination: a segment needs element 63 of w, the storage handed in has 8" in text
    assert "rank 1 refuses: 256 bytes with one rank in one all-to-all are more than the 100 of one message" in text


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_bit_flipped_in_transit_is_caught_and_named(ranks: Ranks, executor: str) -> None:
    for value in ranks(4).call("jobs_execute:flip", executor=executor):
        passed, total, text = value["bad"]
        assert (passed, total) == (3, 4)
        # 35,000 elements of rank 0, then byte 20,000 of rank 1's
        assert text == "up, copy 1 (ranks 3), elements [40960, 45056): holds one changed element, 45000"
        assert value["good"] == [4, 4, True]
