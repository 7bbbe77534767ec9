from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import RankPool

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankPool]
NAMES = [
    "trainer to replicas", "replicas to trainer", "degree changes", "both serve", "refill of a lost rank",
    "survivors in two layouts", "copies cut differently", "casts", "casts out of two",
]  # fmt: skip


def check(values: list[dict[str, Any]]) -> None:
    for value in values:
        assert value["wrong"] == []
        assert not any(value["source changed"])
        assert value["passed"] == value["total"] > 0
    flipped = {(tensor, rank) for rank, value in enumerate(values) for tensor in value["flipped"]}
    assert flipped <= {(tensor, rank) for tensor, rank in values[0]["found"]}
    assert {tensor for tensor, _ in values[0]["found"]} == {"up", "small"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("route", "executor"), [("direct", "send-recv"), ("relay", "all-to-all")])
def test_every_kind_of_move_gives_the_bits_of_gather_and_slice(
    ranks: Ranks, name: str, route: str, executor: str
) -> None:
    check(ranks(4).call("jobs_execute_moves:move", case=name, route=route, executor=executor, bucket_bytes=1 << 20))


@pytest.mark.parametrize("name", ["both serve", "casts"])
@pytest.mark.parametrize(("bucket_bytes", "route"), [(700, "spread"), (20_000, "relay"), (1 << 30, "spread")])
def test_bits_do_not_depend_on_buckets_or_routes(ranks: Ranks, name: str, bucket_bytes: int, route: str) -> None:
    check(
        ranks(4).call(
            "jobs_execute_moves:move", case=name, route=route, executor="send-recv", bucket_bytes=bucket_bytes, seed=2
        )
    )


@pytest.mark.parametrize(
    ("name", "layout", "tensor", "flat", "stale", "elements"),
    [
        ("both serve", 1, "up", 20_000, "old replica (ranks 2, 3)", "[16384, 20480)"),
        ("both serve", 0, "norm", 128, "old replica, copy 0 (ranks 2)", "[0, 129)"),
        ("casts out of two", 1, "down", 38_399, "old replica (ranks 2, 3)", "[36864, 38400)"),
        ("survivors in two layouts", 1, "up", 10, "old replica (ranks 2)", "[0, 4096)"),
    ],
)
def test_sources_that_hold_different_states_are_refused_before_the_move(
    ranks: Ranks, name: str, layout: int, tensor: str, flat: int, stale: str, elements: str
) -> None:
    values = ranks(4).call("jobs_execute_moves:stale", case=name, layout=layout, tensor=tensor, flat=flat)
    assert {value[0] for value in values} == {"DigestMismatch"}
    (found,) = {value[1] for value in values}
    assert found.startswith("nothing was moved, because the sources do not hold the same state: ")
    assert f"tensor {tensor}: layout {stale} differs from layout trainer (ranks 0, 1) in elements {elements}" in found


def test_storages_of_too_few_source_layouts_are_refused_on_every_rank(ranks: Ranks) -> None:
    for value in ranks(4).call("jobs_execute_moves:wrong_space"):
        assert value["error"] == "PlanDisagreement"
        assert "a segment reads source layout 1, the last one is 0" in value["text"]


def test_a_destination_over_the_source_is_refused_on_every_rank(ranks: Ranks) -> None:
    for value in ranks(4).call("jobs_execute_moves:in_place"):
        assert (value["error"], value["touched"]) == ("PlanDisagreement", [])
        assert (
            "rank 1 refuses: rank 1: a move in place is not applicable: the destination writes memory" in value["text"]
        )
        assert "storages of up and up share" in value["text"]
