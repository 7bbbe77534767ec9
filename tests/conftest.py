"""Fixtures for all tests: the command as a subprocess, pools of ranks by size, skips for what a machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # before anything imports Triton, which looks once
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path.insert(0, str(Path(__file__).resolve().parent / "dist"))

import nursery
from pool import RankPool

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def _box_reason() -> str | None:
    from relaymeter.harness.box import capability

    return capability()


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("box") for item in items):
        reason = _box_reason()
        if reason is not None:
            for item in items:
                if item.get_closest_marker("box"):
                    item.add_marker(pytest.mark.skip(reason=f"no cluster in a box here: {reason}"))
    on_device = [item for item in items if item.get_closest_marker("gpu")]
    if on_device and not _has_device():
        for item in on_device:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any(item.get_closest_marker("dist") for item in session.items):
        nursery.of(0)  # imports what ranks need, beside the tests that come before theirs


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """``cli("plan", "--scenario", "smoke", ...)`` runs the command in an empty folder and returns what it printed.

    With ``warm`` command and ranks are forked from a process that has imported torch and DeepSpeed already.
    """

    def call(
        *arguments: str, limit_s: float = 60.0, env: dict[str, str] | None = None, warm: bool = False
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "COLUMNS": "200", **(env or {})}
        if warm:
            return nursery.command(arguments, tmp_path, env, limit_s)
        return subprocess.run(
            [sys.executable, "-m", "relaymeter", *arguments],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    return call


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(4)`` is a pool of four ranks. The pools of a session are shared by its tests and ended with it."""
    pools: dict[int, RankPool] = {}

    def pool_of(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    try:
        yield pool_of
    finally:
        for pool in pools.values():
            pool.close()
