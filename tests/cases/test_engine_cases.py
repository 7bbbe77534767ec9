"""Public bug reports about DeepSpeed engines as small inputs, on live engines: each with the right value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

LIMIT_S = 100.0
STATES = ["weights", "master", "exp_avg", "exp_avg_sq"]


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


def moved(pool: RankPool, **arguments: Any) -> list[dict[str, Any]]:
    """What the ranks of a move between two engines found; every state arrived bit for bit."""
    key = "/".join(f"{name}={value}" for name, value in arguments.items())
    found = pool.call("jobs_engine_moves:between", states=STATES, key=key, limit_s=LIMIT_S, **arguments)
    for rank, one in enumerate(found):
        for state in STATES:
            assert one[state]["digests"][2], state
            assert one[state]["different"] == ([] if rank in arguments["ranks"][1] else None)
    losses = [one[f"{side} loss"] for one in found for side in ("source", "target") if f"{side} loss" in one]
    assert len(set(losses)) == 1
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_b02_padding_of_a_flat_group_belongs_to_nobody(pool: RankPool, stage: int) -> None:
    found = moved(pool, stages=[stage, 2], ranks=[[0, 1], [1, 2, 3]], kind="Uneven")
    for one in found:
        for state in STATES[1:]:
            assert one[state]["real"] == [[30, 27, 0, 0], [0, 20, 20, 17]]


@pytest.mark.parametrize("stages", [[1, 2], [2, 3], [3, 1]])
def test_b03_parameters_without_elements_have_no_owner_and_keep_their_shape(pool: RankPool, stages: list[int]) -> None:
    found = moved(pool, stages=stages, ranks=[[0, 1], [2, 3]], kind="Stepped")
    for rank, one in enumerate(found):
        assert one["weights"]["segments"]["empty.none"] == one["weights"]["segments"]["last.rows"] == 0
        assert one["weights"]["segments"]["a"] > 0
        shapes = one["source parameters" if rank < 2 else "target parameters"]
        assert shapes == {
            "a": [8],
            "b": [24],
            "empty.none": [0],
            "empty.rows": [0, 8],
            "last.none": [0],
            "last.rows": [0, 8],
        }


@pytest.mark.parametrize("sub_group_size", [100, 50])
def test_b06_several_optimizer_groups_in_sub_groups(pool: RankPool, sub_group_size: int) -> None:
    found = moved(
        pool,
        stages=[3, 3],
        ranks=[[0, 1], [0, 1, 2, 3]],
        kind="Decayed",
        groups="decay_groups",
        sub_group_size=sub_group_size,
    )
    assert found[0]["target groups"] == {"sub-groups": 2, "weight decay": [0.1, 0.0]}
    assert found[0]["source groups"] == {"sub-groups": 2 if sub_group_size == 100 else 3, "weight decay": [0.1, 0.0]}


def test_b09_tied_weights_keep_both_names_and_one_storage(pool: RankPool) -> None:
    for one in moved(pool, stages=[2, 3], ranks=[[0, 1], [2, 3]], kind="Shared"):
        side = "source" if "source loss" in one else "target"
        assert one[f"{side} tied"] == [["layers.1.weight", "layers.2.weight"]]
        for state in STATES:
            assert sorted(one[state]["segments"]) == ["layers.0.weight", "layers.1.weight"]
            assert one[state]["tensors"] == 2


def test_b16_a_layout_lists_the_logical_shape_never_the_placeholder(pool: RankPool) -> None:
    found = pool.call("jobs_engines:placeholder", rows=50272, columns=2048, limit_s=LIMIT_S)
    for rank, one in enumerate(found):
        for degree, ranks in {"DP 1": [3], "DP 2": [2, 3]}.items():
            assert one[degree]["shape"] == [50272, 2048]
            assert one[degree]["numel"] == 102_957_056
            assert one[degree]["ranks"] == ranks
            if rank in ranks:
                assert one[degree]["local"] == [0]
                assert one[degree]["storage"] == 102_957_056 // len(ranks)
