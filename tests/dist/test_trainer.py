"""The trainer: a transformers model under ZeRO-3 on ranks 1 and 2 of three."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

LIMIT_S = 100.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of its own: rank 0 must not have imported DeepSpeed before, and dies in the end."""
    with RankPool(3, fresh=True) as own:
        yield own


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_trainer_on_two_of_three_ranks_holds_what_the_metadata_says(pool: RankPool, tied: bool) -> None:
    found = pool.call("jobs_trainer:build", tied=tied, limit_s=LIMIT_S)
    for rank, one in enumerate(found):
        assert one["engine"] is (rank > 0)
        assert one["imported"] == (["deepspeed", "transformers"] if rank else [])
        assert one["specs"]
        assert one["aliases"]
        assert one["placements"]
        assert one["printed"] == ""
    for member in found[1:]:
        assert member["sizes"]
        assert member["bfloat16"]
        assert member["wrong"] == []
        assert member["kinds"] == ["exp_avg", "exp_avg_sq", "master", "step", "weight"]
        assert member["still"]
        assert member["changed"]
        assert member["repeated"]
        assert all(math.isfinite(loss) for loss in member["losses"])


def test_the_trainer_goes_on_when_the_world_group_is_dead(pool: RankPool) -> None:
    dead, *members = pool.outcomes("jobs_trainer:world_dies", limit_s=LIMIT_S)
    assert (dead.answered, dead.exit_code) == (False, -9)
    for member in members:
        assert member.error is None, member.trace
        assert member.value["world"].startswith("dead")
        assert member.value["kept"]
        assert member.value["trained"]
        assert all(math.isfinite(loss) for loss in member.value["losses"])
