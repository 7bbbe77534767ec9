"""Checkpoints of engines over some of the ranks, and changes through DeepSpeed's universal checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

LIMIT_S = 100.0
EVERY = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


def expected_files(stage: int, columns: int, degree: int, bf16: bool) -> list[str]:
    """The files of a world of ``columns`` data-parallel and ``degree`` tensor-parallel ranks."""
    grid = [(column, row) for column in range(columns) for row in range(degree)]
    models = {f"mp_rank_{row:02d}_model_states.pt" for _, row in grid}
    if stage == 3:
        models = {f"zero_pp_rank_{column}_mp_rank_{row:02d}_model_states.pt" for column, row in grid}
    start = "bf16_zero_pp_rank" if bf16 else "zero_pp_rank"
    parts = {f"{start}_{column}_mp_rank_{row:02d}_optim_states.pt" for column, row in grid if stage}
    return sorted(models | parts)


@pytest.mark.parametrize(
    ("stage", "members", "degree", "dtype"),
    [
        (0, [1, 2], 1, "bfloat16"),
        (1, [1, 2], 1, "float16"),
        (2, [0, 1], 1, "bfloat16"),
        (3, [1, 2], 1, "bfloat16"),
        (1, [2, 3], 2, "float32"),
        (3, [2, 3], 2, "bfloat16"),
    ],
)
def test_an_engine_over_some_ranks_saves_and_loads_while_the_others_stay_out(
    pool: RankPool, tmp_path: Path, stage: int, members: list[int], degree: int, dtype: str
) -> None:
    arguments = {"stage": stage, "ranks": members, "degree": degree, "dtype": dtype, "folder": str(tmp_path)}
    found = pool.call("jobs_checkpoint:subset", limit_s=LIMIT_S, **arguments)
    for rank, one in enumerate(found):
        if rank not in members:
            assert one == {}
            continue
        assert one["different"] == one["goes on"] == one["saving changed"] == []
        assert one["compared"] >= 23
        assert one["counters"]
        assert one["steps"] == 3
        assert one["mark"] == stage
        assert one["files"] == expected_files(stage, 2 // degree, degree, dtype == "bfloat16")
        assert one["latest"] == "kept"
        assert one["module as before"]
        assert one["rank as before"]


def test_one_rank_of_the_engine_writes_what_rank_0_of_a_world_would(pool: RankPool, tmp_path: Path) -> None:
    idle, *members, last = pool.call("jobs_checkpoint:by_one_rank", limit_s=LIMIT_S, folder=str(tmp_path))
    assert idle == last == {}
    for rank, one in enumerate(members):
        assert one["equal tags"] is True
        assert one["other tags"].startswith(f"[rank={rank}] The checkpoint tag name 'of rank {rank + 1}' is not consi")
        assert one["tied"] == {"layers.2.weight": "layers.1.weight"}
        assert one["scripts"] == ["zero_to_fp32.py", "zero_to_torch.py"]
        assert one["consolidated"] is True
        assert one["whole"] == []
        assert one["no folder"] == "RuntimeError"
        assert one["as before"]
        assert "pipeline_loading_checkpoint passes from each rank" in one["one after the other"]
        assert "checkpoint.writer.decoupled waits for the whole world" in one["decoupled"]


def test_a_later_engine_over_the_world_saves_as_usual(pool: RankPool, tmp_path: Path) -> None:
    for one in pool.call("jobs_checkpoint:whole_world", limit_s=LIMIT_S, folder=str(tmp_path)):
        assert one == {"different": [], "counters": True, "latest": "global_step3", "followed": False, "files": 8}


@pytest.mark.parametrize(
    ("source", "destination", "options"),
    [
        ([3, EVERY, 1], [3, [0, 1], 1], {"dtype": "bfloat16"}),
        ([2, [1, 2], 1], [1, EVERY, 1], {"dtype": "float16"}),
        ([1, [0], 1], [1, EVERY, 1], {}),  # no rank is left out, so that each reads its own engine's states
        ([1, EVERY, 2], [1, [2, 3], 1], {}),
        ([3, EVERY, 2], [3, [0, 1], 2], {}),
    ],
)
def test_a_universal_checkpoint_brings_the_training_state(
    pool: RankPool, tmp_path: Path, source: list[Any], destination: list[Any], options: dict[str, Any]
) -> None:
    arguments = {"source": source, "destination": destination, "folder": str(tmp_path)} | options
    for rank, one in enumerate(pool.call("jobs_checkpoint:universal", limit_s=LIMIT_S, **arguments)):
        assert one["refused"] == "no error"
        assert one["left"] == []
        passed, total, mismatch = one["digests"]
        assert mismatch is None
        assert passed == total >= 16
        if rank in destination[1]:
            assert one["different"] == one["fields"] == []
            assert one["compared"]["exp_avg"] == one["compared"]["master"] >= 4
            assert one["micro steps"] == 0


@pytest.mark.parametrize(
    ("source", "destination", "options", "says"),
    [
        ([3, [0, 1], 1], [1, [0, 1], 1], {}, "loading fails: FileNotFoundError: ZeRO-1 looks for mp_rank_"),
        (
            [1, [0, 1], 1],
            [1, EVERY, 1],
            {"optimizer": "SGD"},
            "converting fails: DeepSpeed's extract_zero_shards looks for 'exp",
        ),
        ([0, [0, 1], 1], [0, EVERY, 1], {}, "converting fails: FileNotFoundError in _get_checkpoint_files: can't find"),
        ([3, [0, 1], 1], [3, [0, 1], 2], {}, "loading fails: RuntimeError in load_hp_checkpoint_state_from_checkpoint"),
    ],
)
def test_what_deepspeed_cannot_change_is_refused_on_every_rank_and_leaves_no_files(
    pool: RankPool, tmp_path: Path, source: list[Any], destination: list[Any], options: dict[str, Any], says: str
) -> None:
    arguments = {"source": source, "destination": destination, "folder": str(tmp_path)} | options
    found = pool.call("jobs_checkpoint:universal", limit_s=LIMIT_S, **arguments)
    assert len({one["refused"] for one in found}) == 1
    for one in found:
        assert one["refused"].startswith("UniversalRefused: no way through a universal checkpoint, ")
        assert says in one["refused"]
        assert one["left"] == []


def test_misuses_are_no_refusals_of_deepspeed(pool: RankPool, tmp_path: Path) -> None:
    found = pool.call("jobs_checkpoint:universal_misused", limit_s=LIMIT_S, folder=str(tmp_path))
    assert len({str(one) for one in found}) == 1
    assert found[0].pop("left") == []
    assert all(text.startswith("InputError: ") for text in found[0].values())
    assert "no rank of the group gave a source engine" in found[0]["no source"]
    assert "making a folder fails: FileNotFoundError" in found[0]["no folder"]
    assert "building the destination fails: ValueError: no memory (ranks [2])" in found[0]["not built"]
    assert "the destination's config lacks checkpoint.load_universal" in found[0]["no entry"]
