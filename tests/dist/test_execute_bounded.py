from __future__ import annotations

from collections.abc import Callable

import pytest
from pool import RankPool

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankPool]
MIB = 1 << 20


@pytest.mark.parametrize(("executor", "bucket"), [("send-recv", 256 << 10), ("all-to-all", 1 << 20)])
def test_a_bounded_move_holds_what_was_predicted_and_gives_right_bits(ranks: Ranks, executor: str, bucket: int) -> None:
    values = ranks(2).call(
        "jobs_execute_bounded:bounded", weights=12, rows=1024, columns=1024, bucket_bytes=bucket, executor=executor
    )
    for rank, value in enumerate(values):
        assert value["wrong"] == []
        assert value["names"]
        assert value["passed"][0] == value["passed"][1] == 14  # norm is held twice
        assert (value["source left"], value["emptied"]) == (0, True)
        assert value["predicted"] == value["counted"] > 0
        assert value["rounds"] >= 6
        # two weights at once and the buffers, where an ordinary move would hold all twelve twice
        assert value["predicted"] <= 2 * MIB + value["buffers"] + 8192 < value["new"] / 2
        if value["measured"] is not None:
            assert abs(value["measured"] - value["predicted"]) < 0.15 * value["predicted"] + MIB
        (said,) = value["said"]
        assert said == (
            f"rank {rank}: this move gives up its source: {value['old']} bytes of layout trainer are released as they "
            f"are read, at most {value['predicted']} bytes are held beyond the larger layout; should it fail, neither "
            "source nor destination is usable"
        )
        assert value["again"] == "InputError: a bounded move runs once: its source has been given up"


def test_what_cannot_be_bounded_is_refused_on_every_rank_before_anything_is_released(ranks: Ranks) -> None:
    for found in ranks(2).call("jobs_execute_bounded:refusals"):
        mine = "rank {0} refuses: rank {0}, source layout trainer: the storage of "
        wanted = {
            "too little": "of rank 0, 100 are allowed: choose a smaller bucket_bytes or set --max-extra ",
            "referred to": mine.format(1) + "w1 is referred to elsewhere (1 times): drop that first",
            "a view": mine.format(0) + "w2 is a view of 8192 bytes: its 4096 cannot be freed alone",
            "too short": mine.format(1) + "w3 has 7 elements, the layout says 2048",
        }
        for name, text in wanted.items():
            error, kept, take, _ = found[name]
            assert error.startswith("PlanDisagreement: nothing was moved by 2 ranks: ")
            assert text in error
            assert kept
            assert take == "InputError: the bounded move has not run"


def test_after_a_failure_neither_side_is_handed_out(ranks: Ranks) -> None:
    values = ranks(2).call("jobs_execute_bounded:failure")
    assert values[1]["run"] == "ValueError: no such luck"
    assert values[0]["run"].endswith(
        "the move stopped and neither the source nor the destination is usable: the move gave up the one to fill the "
        "other"
    )
    for value in values:
        assert value["take"] == "InputError: the bounded move failed: neither its source nor its destination is usable"
        assert value["again"] == "InputError: a bounded move runs once: its source has been given up"
