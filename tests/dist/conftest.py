"""Fixtures for tests with several ranks: ``ranks(4)`` is a pool of four, shared by the whole test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """A pool of ranks by size. The pools of a session are shared by its tests and ended with it."""
    pools: dict[int, RankPool] = {}

    def pool_of(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    try:
        yield pool_of
    finally:
        for pool in pools.values():
            pool.close()
