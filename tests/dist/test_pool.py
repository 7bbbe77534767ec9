from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pool import RankPool

pytestmark = pytest.mark.dist


def test_values_come_back_by_rank_and_processes_are_kept(ranks: Callable[[int], RankPool]) -> None:
    pool = ranks(4)
    assert pool.call("jobs_pool:total", add=1) == [10, 10, 10, 10]
    before = pool.pids
    assert {outcome.error for outcome in pool.outcomes("jobs_pool:refuse")} == {"ValueError"}
    assert pool.call("jobs_pool:total", add=0) == [6, 6, 6, 6]
    assert pool.pids == before


def test_an_error_shows_rank_and_trace(ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed on 4 of 4 ranks.*\[rank 3\].*rank 3 refuses"):
        ranks(4).call("jobs_pool:refuse")


def test_dead_and_silent_ranks_are_told_apart_and_every_process_ends() -> None:
    with RankPool(3) as pool:
        pool.call("jobs_pool:total", add=0)
        pids = pool.pids
        first, dead, silent = pool.outcomes("jobs_pool:misbehave", limit_s=1.0)
        assert (first.value, first.answered) == ("fine", True)
        assert (dead.answered, dead.exit_code) == (False, -9)
        assert (silent.answered, silent.exit_code) == (False, None)
        assert pool.pids == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
