from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import RankPool

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankPool]
LIMIT_S = 12.0


def stop(pool: RankPool, how: str, victim: int, executor: str, move_limit_s: float = LIMIT_S, **more: Any) -> list[Any]:
    more = {"own_group": False, "lost_after_s": 1.5, "move_limit_s": move_limit_s, **more}
    outcomes = pool.outcomes(
        "jobs_failure:stop_in_a_move", limit_s=move_limit_s + 8, how=how, victim=victim, executor=executor, **more
    )
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    ("how", "victim", "executor"),
    [("kill", 2, "send-recv"), ("freeze", 2, "all-to-all"), ("kill", 0, "all-to-all"), ("freeze", 0, "send-recv")],
)
def test_every_other_rank_names_the_one_that_was_lost(how: str, victim: int, executor: str) -> None:
    with RankPool(3) as pool:
        values = stop(pool, how, victim, executor)
    assert values.pop(victim) is None
    for value in values:
        assert (value["error"], value["ranks"]) == ("RankLost", [victim])
        assert value["text"] == f"rank {victim} no longer answers: the move stopped and the destination is not usable"
        assert value["seconds"] < LIMIT_S
        assert (value["alive"], value["source_kept"]) == (2, True)
        assert value["again"].startswith("an earlier move over this group failed")


def test_a_rank_that_dies_with_half_a_message_sent_is_named_long_before_the_time_limit() -> None:
    with RankPool(3) as pool:
        value = pool.outcomes("jobs_failure:die_half_sent", limit_s=60, move_limit_s=50)[2].value
    assert value is not None
    assert (value["ranks"], value["last"]) == ([1], 0)
    assert value["seconds"] < 25


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
def test_a_rank_that_fails_for_its_own_reason_is_named_by_the_others(ranks: Ranks, executor: str) -> None:
    values = stop(ranks(4), "raise", 2, executor, own_group=True)
    own = values.pop(2)
    assert (own["error"], own["text"]) == ("ValueError", "no such luck")
    for value in values:
        assert (value["error"], value["ranks"]) == ("RankLost", [2])
        assert "rank 2 failed (ValueError: no such luck)" in value["text"]
        assert value["seconds"] < LIMIT_S / 2


def test_a_slow_but_living_rank_is_a_timeout_not_a_loss(ranks: Ranks) -> None:
    for value in stop(ranks(4), "sleep", 2, "send-recv", move_limit_s=5.0, own_group=True):
        assert value["error"] == "MoveTimeout"
        assert value["text"].startswith("the time limit passed while every rank still answers")
