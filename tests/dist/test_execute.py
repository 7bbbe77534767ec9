from __future__ import annotations

from collections.abc import Callable

import pytest
from pool import RankPool

pytestmark = pytest.mark.dist

EXECUTORS = ["send-recv", "all-to-all"]
Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_strided_sources_arrive_as_from_a_contiguous_copy(ranks: Ranks, executor: str) -> None:
    values = ranks(4).call("jobs_execute:strided", executor=executor)
    assert values[1]["square"] == [4 * column + row for row in range(4) for column in range(4)]
    assert values[1]["columns"] == [8 * row + 2 * column for row in range(8) for column in range(4)]
    assert [value["sent"] for value in values] == [[16 * 8 + 32 * 8], [0], [0], [0]]


@pytest.mark.parametrize(("executor", "cap"), [("send-recv", 1 << 28), ("send-recv", 10_000), ("all-to-all", 1 << 28)])
def test_mixed_tensors_arrive_bit_equal_in_place_and_again(ranks: Ranks, executor: str, cap: int) -> None:
    for seed in (1, 2):
        values = ranks(4).call("jobs_execute:mixed", executor=executor, cap=cap, seed=seed)
        assert sum(value["sent"] for value in values) == sum(value["received"] for value in values) > 0
        assert all(value["peak"] is None or value["peak"] >= value["buffers"] for value in values)


def test_ranks_that_send_or_receive_nothing_do_not_stall(ranks: Ranks) -> None:
    assert ranks(4).call("jobs_execute:rows_to_nobody", limit_s=10) == [[0, 1, 2, 3], [4, 5, 6, 7], [], []]


def test_exchanges_in_place_or_with_wrong_splits_are_refused(ranks: Ranks) -> None:
    in_place, splits = ranks(4).call("jobs_execute:wrong_operands")[0]
    assert in_place.startswith("InputError: an all-to-all in place is not applicable")
    assert splits == "InputError: send splits [1, 1, 1, 2] do not cut 4 elements for 4 ranks"


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("sent", "wanted"), [(1, 3), (1, 2), (16, 12)])
def test_disagreement_on_counts_is_refused_on_every_rank(ranks: Ranks, executor: str, sent: int, wanted: int) -> None:
    values = ranks(4).call(
        "jobs_execute:disagree", executor=executor, wrong_rank=1, width=sent, elements=wanted, limit_s=15
    )
    assert {value["error"] for value in values} == {"PlanDisagreement"}
    assert all(value["untouched"] for value in values)
    (text,) = {value["text"] for value in values}
    assert f"round 0: rank 0 sends {2 * sent} bytes, rank 1 expects {2 * wanted}" in text
    assert "rank 2" not in text


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


def test_orders_of_names_are_compared(ranks: Ranks) -> None:
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


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_bit_flipped_in_transit_is_caught_and_named(ranks: Ranks, executor: str) -> None:
    for value in ranks(4).call("jobs_execute:flip", executor=executor):
        passed, total, text = value["bad"]
        assert (passed, total) == (3, 4)
        assert text == "up, copy 1 (ranks 3), elements [40960, 45056)"  # 35,000 of rank 0, then byte 20,000 of rank 1's
        assert value["good"] == [4, 4, True]


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_transport_that_moves_nothing_fails(ranks: Ranks, executor: str, warm: bool) -> None:
    for passed, total, *texts in ranks(4).call("jobs_execute:nothing_moves", executor=executor, warm=warm):
        assert (passed, total) == (0, 4)
        up = "ranks {}), elements [0, 70000): holds the poison pattern: never written"
        assert texts[0].endswith(up.format(2))
        assert texts[1].endswith(up.format(3))
