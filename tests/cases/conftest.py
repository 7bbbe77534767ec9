"""Fixtures for cases with several ranks: ``ranks(4)`` is a pool of four (tests/dist/pool.py), shared by the session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "dist"))

from pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """A pool of ranks by size, ended with the session."""
    pools: dict[int, RankPool] = {}

    def pool_of(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    try:
        yield pool_of
    finally:
        for pool in pools.values():
            pool.close()
