"""Fixtures: profiles of invented clusters (made once), and a pool of real ranks whose jobs live in this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dist"))

from pool import RankPool

settings.register_profile("no deadline", deadline=None)  # a busy machine is not a failure
settings.load_profile("no deadline")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Four ranks on loopback that can import the jobs of this folder."""
    with RankPool(4, env={"PYTHONPATH": str(Path(__file__).resolve().parent)}) as found:
        yield found
