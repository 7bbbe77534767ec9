"""Training states through torch's distributed checkpoint: saved by engines of one layout, loaded by another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

LIMIT_S = 100.0
ADAM = {"groups": "decay", "frozen": True, "scheduler": "WarmupLR", "steps": 2}


@pytest.fixture(scope="module")
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


@pytest.mark.parametrize(
    ("path", "training"),
    [
        ([{"stage": 3, "ranks": 4}, {"stage": 3, "ranks": [1, 3]}, {"stage": 3, "ranks": 4}], ADAM),
        ([{"stage": 1, "ranks": 4}, {"stage": 3, "ranks": 4}], {"dtype": "float16", "steps": 3}),
        (
            [{"stage": 1, "ranks": 4, "tensor_parallel": degree} for degree in (2, 4)],
            ADAM | {"dtype": "float32", "optimizer": "Adam"},
        ),
    ],
    ids=["zero3 x4, x2, x4", "zero1 to zero3", "tp2 to tp4"],
)
def test_every_bit_and_field_arrives_in_an_engine_of_another_layout(
    pool: RankPool, tmp_path: Path, path: list[dict[str, Any]], training: dict[str, Any]
) -> None:
    found = pool.call("jobs_dcp:along", limit_s=LIMIT_S, path=path, training=training, folder=str(tmp_path))
    for one in found:
        for passed, total, mismatch, fields in one["digests"]:
            assert mismatch is None and fields == []
            assert passed == total > 40
        for passed, total, mismatch in one["oracle"]:
            assert mismatch is None
            assert passed == total > 30
        if path[0] == path[-1]:
            assert one["goes on"] == [] and one["fields"]
    for number in range(len(path) - 1):
        files = [entry.stat().st_size for entry in (tmp_path / str(number + 1)).glob("*.distcp")]
        assert sum(one["file_bytes"][number][0] for one in found) == sum(files)
        assert all(one["file_bytes"][number][1] >= one["tensor_bytes"][number][1] for one in found)
        assert all((one["tensor_bytes"][number][2] > 0) == (one["tensor_bytes"][number][1] > 0) for one in found)


def test_a_folder_without_a_whole_checkpoint_of_the_engine_is_refused_on_every_rank(
    pool: RankPool, tmp_path: Path
) -> None:
    found = pool.call("jobs_dcp:refusals", limit_s=LIMIT_S, folder=str(tmp_path))
    for one in found:
        passed, total, mismatch, fields = one.pop("in order")
        assert passed == total > 40 and mismatch is None and fields == []
        assert one.pop("untouched")
        assert one.pop("left") == ["whole"]
    assert all(one == found[0] for one in found)
    says = {
        "no engine": "no rank gave a source engine",
        "no folder": f"{tmp_path}/none holds no whole checkpoint (no such folder): save it again (save_dcp)",
        "taken": f"{tmp_path}/whole holds a checkpoint already: give another folder, or remove this one",
        "half": f"{tmp_path}/half holds no whole checkpoint (no .metadata in it, which is written last): save it again",
        "torn": f"{tmp_path}/torn/.metadata cannot be read (",
        "fewer": f"the checkpoint {tmp_path}/fewer does not fit the engine: exp_avg up.weight [52, 24] is wanted, but",
        "foreign": "it has no entry 'relaymeter training state': it was not written by relaymeter's save_dcp",
        "no place": f"saving to {tmp_path}/a file/below fails; what lies there is no checkpoint, give an empty folder:",
        "other optimizer": f"the checkpoint {tmp_path}/whole (the source) does not fit the engine: the source's",
        "short": f"reading the checkpoint {tmp_path}/short fails and the engine is not usable: ",
    }
    assert set(found[0]) == set(says)
    for name, text in says.items():
        assert found[0][name].startswith("InputError: ")
        assert text in found[0][name]
