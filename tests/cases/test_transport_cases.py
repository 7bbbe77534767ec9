"""Public bug reports about exchanges between ranks as small inputs, each with the right value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pool import RankPool

pytestmark = pytest.mark.dist

EXECUTORS = ["send-recv", "all-to-all"]
Ranks = Callable[[int], "RankPool"]


@pytest.mark.parametrize("size", [2, 4])
def test_b25_ranks_that_send_or_receive_nothing_do_not_stall(ranks: Ranks, size: int) -> None:
    values = ranks(size).call("jobs_execute:rows_to_nobody", limit_s=20)
    assert values == [[0, 1, 2, 3], [4, 5, 6, 7], [], []][:size]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("size", "sent", "wanted"), [(2, 1, 3), (2, 1, 2), (4, 16, 12)])
def test_b26_disagreement_on_counts_is_refused_on_every_rank(
    ranks: Ranks, executor: str, size: int, sent: int, wanted: int
) -> None:
    wrong = size - 1
    values = ranks(size).call(
        "jobs_execute:disagree", executor=executor, wrong_rank=wrong, width=sent, elements=wanted, limit_s=20
    )
    assert {value["error"] for value in values} == {"PlanDisagreement"}
    assert all(value["untouched"] for value in values)
    (text,) = {value["text"] for value in values}
    assert f"round 0: rank 0 sends {2 * sent} bytes, rank {wrong} expects {2 * wanted}" in text
    assert text.count("expects") == 1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_b28_strided_sources_arrive_as_from_a_contiguous_copy(ranks: Ranks, executor: str) -> None:
    values = ranks(4).call("jobs_execute:strided", executor=executor)
    assert values[1]["square"] == [4 * column + row for row in range(4) for column in range(4)]
    assert values[1]["columns"] == [8 * row + 2 * column for row in range(8) for column in range(4)]
    copied = 16 * 8 + 32 * 8
    assert [value["sent"] for value in values] == [[copied], [0], [0], [0]]
    assert [value["buffers"] for value in values] == [[copied], [copied], [0], [0]]
    assert all(value["peak"][0] is None or value["peak"][0] >= value["buffers"][0] for value in values)


def test_b30_large_uneven_exchanges_of_ten_processes_arrive_whole() -> None:
    from pool import RankPool

    largest, missing = 1_000_000, 3
    with RankPool(10) as pool:
        for value in pool.call("jobs_execute_cases:uneven", largest=largest, limit_s=60):
            sent, received = value["right"]
            assert value["counts agree"]
            assert value["messages"] == [[sent - value["own"], received - value["own"]], []]
            assert value["flat"] == [[sent, received], []]
        for executor in EXECUTORS:
            values = pool.call(
                "jobs_execute_cases:uneven_wrong", largest=largest, missing=missing, executor=executor, limit_s=60
            )
            assert {(value["error"], value["untouched"]) for value in values} == {("PlanDisagreement", True)}
            (text,) = {value["text"] for value in values}
            assert f"rank 7 sends {8 * largest} bytes, rank 3 expects {8 * (largest - missing)}" in text
            assert text.count("expects") == 1


def test_b34_an_exchange_in_place_is_not_applicable_and_wrong_splits_are_refused(ranks: Ranks) -> None:
    in_place, shifted, splits, strided = ranks(4).call("jobs_execute:wrong_operands")[0]
    not_applicable = "InputError: an all-to-all in place is not applicable: send and receive must not share memory"
    assert (in_place, shifted) == (not_applicable, not_applicable)
    assert strided == "InputError: send: a contiguous 1-D tensor is needed, got strides [2]"
    assert splits == "InputError: send splits [1, 1, 1, 2] do not cut 4 elements for 4 ranks"


def test_b35_a_move_in_one_group_waits_for_no_other_rank(ranks: Ranks) -> None:
    values = ranks(4).call("jobs_execute_cases:groups", limit_s=40)
    assert [value.get("arrived") for value in values] == [False, None, None, True]  # rank 0 sends, rank 3 receives
    assert values[1]["seconds"] < 3
    assert values[2]["seconds"] < 3
    for value in values:
        assert value["not a member"].endswith("but this process is no member of the group: each member makes its own")
        assert "but this process is rank" in value["wrong rank"]
    assert values[1]["alone"] == "MoveTimeout"
    assert values[1]["alone_s"] < 6


def test_b35_a_group_of_one_rank_moves_alone(ranks: Ranks) -> None:
    values = ranks(2).call("jobs_execute_cases:group_of_one", limit_s=30)
    assert values == [{"moved": [0, 1, 2, 3, 4, 5, 6, 7]}, {}]


def test_b37_orders_of_names_are_compared(ranks: Ranks) -> None:
    def ask(*lists: list[str]) -> list[dict[str, object]]:
        return ranks(4).call("jobs_execute:names", lists=lists)

    same = ["a", "b", "c"]
    assert ask(same, same, same, same) == [{"agreed": True}] * 4
    assert ask([], [], [], []) == [{"agreed": False}] * 4
    (swapped,) = {value["text"] for value in ask(same, ["a", "c", "b"], same, same)}
    assert (
        swapped
        == "the ranks follow different parameter orders: position 1 holds 'b' on ranks [0, 2, 3]; 'c' on ranks [1]"
    )
    (lacking,) = {value["text"] for value in ask(same, ["a", "b"], same, same)}
    assert "position 2 holds 'c' on ranks [0, 2, 3]; nothing on ranks [1]" in str(lacking)
