"""Engines over different ranks of one world, side by side and one after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from jobs_side_by_side import TOGETHER
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

LIMIT_S = 100.0


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


def test_engines_that_train_in_turns_do_what_each_does_alone(pool: RankPool) -> None:
    found = pool.call("jobs_side_by_side:in_turns", limit_s=LIMIT_S)
    for rank, one in enumerate(found):
        assert list(one) == [str(number) for number, (_, ranks, _) in enumerate(TOGETHER) if rank in ranks]
        for engine in one.values():
            assert engine["losses"]
            assert engine["different"] == []
            assert engine["compared"] >= 12


def test_only_a_zero3_engine_computes_with_the_linear_that_it_replaces(pool: RankPool) -> None:
    right = {
        "after building 0": True,
        "after building 3": True,
        "in the forward pass of 0": False,
        "in the forward pass of 3": True,
        "afterwards": True,
    }
    assert pool.call("jobs_side_by_side:linear_of_its_own", limit_s=LIMIT_S) == [right] * 4


def test_engines_of_every_stage_follow_one_another_over_other_ranks(pool: RankPool) -> None:
    found = pool.call("jobs_side_by_side:one_after_another", limit_s=LIMIT_S)
    assert [len(one) for one in found] == [8, 8, 8, 8]
    for one in found:
        for name, right in one.items():
            assert right is True or (name.count(",") >= 2 and right < 1e-6), name  # more ranks sum in another order


def test_ranks_that_train_and_save_one_engine_never_wait_for_the_others(pool: RankPool, tmp_path: Path) -> None:
    idle, *members, last = pool.call("jobs_side_by_side:waiting", limit_s=LIMIT_S, folder=str(tmp_path))
    assert idle == last == {}
    for one in members:
        assert one == {str(stage): [] for stage in range(4)}


def test_b35_a_training_state_moves_in_one_group_while_the_other_trains(pool: RankPool) -> None:
    found = pool.call("jobs_side_by_side:moves_in_one_group", limit_s=LIMIT_S)
    assert found[0]["different"] == []
    for one in found:
        assert one.get("arrived", one.get("trained")) in (True, 1)
        assert one["seconds"] < 30
        assert one["not a member"].endswith("call initialize_over on the group's ranks only")
    assert found[1]["alone"] == "MoveTimeout"
    assert found[1]["alone_s"] < 10


def test_b35_an_engine_over_one_of_two_ranks_leaves_the_world_usable(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).call("jobs_side_by_side:group_of_one", limit_s=LIMIT_S) == [{"steps": 1}, {}]


def test_b37_a_switch_to_evaluation_in_another_order_is_no_disagreement(pool: RankPool) -> None:
    for one in pool.call("jobs_side_by_side:evaluation", limit_s=LIMIT_S)[1:3]:
        assert one == {"losses": [True, True], "equal": [True, True]}
