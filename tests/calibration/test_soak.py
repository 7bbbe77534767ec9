from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool import RankPool

from relaymeter.calibration.soak_plan import SHAPES, SoakSettings, call_matrix, plan_hash, settle_size
from relaymeter.errors import InputError

Ranks = Callable[[int], RankPool]
dist = pytest.mark.dist
MESSAGE = 512 << 10
BLOCK = 128 << 10


def _soak(ranks: Ranks, executor: str, total: int | None = 24 << 20, **options: Any) -> list[dict[str, Any]]:
    arguments = {"message": MESSAGE, "seconds": None, "faults": {}, **options}
    found = ranks(4).call("jobs_soak:soaked", executor=executor, total=total, **arguments)
    assert all(answer["shared"] == found[0]["shared"] for answer in found)
    return found


@dist
@pytest.mark.parametrize("executor", ["send-recv", "all-to-all", "both"])
def test_a_clean_soak_reports_nothing_and_counts_every_byte(ranks: Ranks, executor: str) -> None:
    found = _soak(ranks, executor)
    shared = found[0]["shared"]
    assert (shared["wrong_bytes"], shared["wrong_messages"], shared["runs"]) == (0, 0, [])
    assert shared["finished"] and shared["size"] == {"message_bytes": MESSAGE, "peers": 3}
    assert (24 << 20) <= shared["total_bytes"] < (24 << 20) + 12 * 16
    assert shared["ranks"] == [answer["own"] for answer in found]
    assert shared["total_bytes"] == sum(answer["own"]["received_bytes"] for answer in found)
    assert shared["messages"] == sum(answer["own"]["messages"] for answer in found)
    assert shared["executors"] == {"both": ["send-recv", "all-to-all"]}.get(executor, [executor])
    assert all(answer["own"]["largest_message_bytes"] == MESSAGE for answer in found)


DAMAGES = {
    "swap": [("another offset", BLOCK), ("another offset", 2 * BLOCK)],
    "zeros": [("zeros", 2 * BLOCK)],
    "stale": [("earlier call", 2 * BLOCK)],
}


@dist
@pytest.mark.parametrize(
    ("executor", "kind"),
    [("send-recv", "swap"), ("all-to-all", "swap"), ("both", "zeros"), ("all-to-all", "stale")],
)
def test_damaged_blocks_are_found_with_their_grid_and_origin(ranks: Ranks, executor: str, kind: str) -> None:
    found = _soak(ranks, executor, faults={"2": kind})
    shared = found[0]["shared"]
    assert found[2]["done"]
    assert [(run["origin"], run["begin_bytes"]) for run in shared["runs"]] == DAMAGES[kind]
    for run in shared["runs"]:
        assert (run["receiver"], run["call"]) == (2, len(SHAPES))
        assert run["executor"] == {"both": "all-to-all"}.get(executor, executor)  # after four calls the other one
        assert (run["length_bytes"], run["length_grid_bytes"]) == (BLOCK, BLOCK)
        assert run["begin_grid_bytes"] % BLOCK == 0
        assert run["message_bytes"] == MESSAGE
        assert 0.98 * BLOCK < run["wrong_bytes"] <= BLOCK
    if kind == "swap":
        assert [run["origin_begin_bytes"] for run in shared["runs"]] == [2 * BLOCK, BLOCK]
    if kind == "stale":
        assert (shared["runs"][0]["origin_calls_back"], shared["runs"][0]["origin_receiver"]) == (1, 2)
    assert shared["wrong_messages"] == 1
    assert shared["wrong_bytes"] == sum(run["wrong_bytes"] for run in shared["runs"])
    assert [answer["own"]["wrong_bytes"] for answer in found] == [0, 0, shared["wrong_bytes"], 0]


@dist
def test_wrong_bytes_of_several_ranks_stand_in_one_summary_on_every_rank(ranks: Ranks) -> None:
    shared = _soak(ranks, "send-recv", faults={"1": "flip", "3": "zeros"})[0]["shared"]
    assert [(run["receiver"], run["origin"]) for run in shared["runs"]] == [(1, "flipped bits"), (3, "zeros")]
    flip = shared["runs"][0]
    assert (flip["wrong_bytes"], flip["flipped_bits"], flip["length_bytes"]) == (1, 1, 16)
    assert flip["begin_bytes"] == MESSAGE // 3 // 16 * 16
    assert (shared["wrong_messages"], shared["wrong_bytes"]) == (2, 1 + shared["runs"][1]["wrong_bytes"])
    assert [totals["wrong_messages"] for totals in shared["ranks"]] == [0, 1, 0, 1]


@dist
def test_a_soak_ends_with_its_time(ranks: Ranks) -> None:
    shared = _soak(ranks, "send-recv", total=None, seconds=0.5, message=65536)[0]["shared"]
    assert shared["calls"] > 1 and 0.2 < shared["elapsed_s"] < 5
    least, volume = _soak(ranks, "send-recv", total=1, seconds=30.0)[0]["shared"], 12 * 16
    assert (least["calls"], least["total_bytes"]) == (1, volume)  # one unit of every pair


@dist
def test_messages_that_do_not_fit_are_refused_on_every_rank(ranks: Ranks) -> None:
    texts = ranks(4).call("jobs_soak:refused", message=16 << 30)
    assert all("room for messages of" in text and "smaller --message" in text for text in texts)


@dist
def test_a_rank_that_ends_is_named_by_all_others(ranks: Ranks) -> None:
    outcomes = ranks(4).outcomes("jobs_soak:bereft")
    assert outcomes[2].exit_code == -9
    for outcome in (outcomes[rank] for rank in (0, 1, 3)):
        assert outcome.value == {
            "lost": [2], "text": "rank 2 no longer answers: the soak stopped", "calls": len(SHAPES)
        }  # fmt: skip


@given(st.integers(0, 40), st.integers(2, 12), st.integers(16, 1 << 20), st.integers(1, 11))
def test_a_call_keeps_to_its_sizes_and_peers(call: int, world_size: int, message: int, peers: int) -> None:
    matrix = call_matrix(call, world_size=world_size, message_bytes=message, peers=min(peers, world_size - 1))
    assert matrix.shape == (world_size, world_size)
    assert (matrix % 16 == 0).all() and not matrix.diagonal().any() and (matrix >= 0).all()
    assert matrix.max() <= message
    counts = matrix > 0
    assert max(counts.sum(axis=0).max(), counts.sum(axis=1).max()) <= min(peers, world_size - 1)
    again = call_matrix(call, world_size=world_size, message_bytes=message, peers=min(peers, world_size - 1))
    assert (matrix == again).all()
    if SHAPES[call % len(SHAPES)] == "even":
        assert (matrix[counts] == message // 16 * 16).all()
        assert (counts.sum(axis=0) == min(peers, world_size - 1)).all()


def test_calls_differ_in_size_and_in_who_sends_to_whom() -> None:
    options = {"world_size": 8, "message_bytes": 1 << 20, "peers": 2}
    calls = [call_matrix(call, **options) for call in range(8)]
    assert len({matrix.tobytes() for matrix in calls}) == 8
    assert (np.sum([matrix > 0 for matrix in calls], axis=0) > 0).sum() > 30  # of 56 pairs
    uneven = calls[1][calls[1] > 0]
    assert uneven.max() > 8 * uneven.min()
    assert (calls[2] > 0).sum() < 16
    assert len({*(calls[3] % 4096).flatten().tolist()}) > 4
    assert plan_hash(settle_size(SoakSettings(message_bytes=4096), "gloo", 4, 1 << 20), 4) != plan_hash(
        settle_size(SoakSettings(message_bytes=8192), "gloo", 4, 1 << 20), 4
    )


@pytest.mark.parametrize(
    ("backend", "asked", "ranks", "memory", "message", "peers"),
    [
        ("gloo", None, 4, 1 << 30, 4 << 20, 3),
        ("nccl", None, 16, 80 << 30, 256 << 20, 15),
        ("nccl", None, 1024, 80 << 30, 256 << 20, 160),
        ("nccl", 4 << 30, 16, 80 << 30, 4 << 30, 10),
        ("gloo", None, 4, 1 << 20, 1 << 19, 1),
        ("gloo", 100, 4, 1 << 20, 96, 3),
        ("gloo", 3, 4, 1 << 20, 16, 3),
    ],
)
def test_sizes_follow_what_is_asked_and_the_memory(
    backend: str, asked: int | None, ranks: int, memory: int, message: int, peers: int
) -> None:
    size = settle_size(SoakSettings(message_bytes=asked), backend, ranks, memory)
    assert (size.message_bytes, size.peers) == (message, peers)


def test_a_message_longer_than_a_label_can_number_is_refused() -> None:
    with pytest.raises(InputError, match="at most 17179869184"):
        settle_size(SoakSettings(message_bytes=(16 << 30) + 16), "gloo", 2, 1 << 40)
