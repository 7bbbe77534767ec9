"""What all ranks are told is the same on each, the order of its keys too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]


def test_every_rank_gets_the_keys_in_the_order_of_the_first_one_that_has_them(
    ranks: Callable[[int], RankPool],
) -> None:
    keys = ["exp_avg", "exp_avg_sq", "step"]
    for one in ranks(4).call("jobs_announce:orders", limit_s=60):
        assert one == {"every": keys[::-1], "some": keys}
