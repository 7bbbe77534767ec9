"""Megatron-Core's refit without ranks: which changes it makes, why not others, and what is said where it is missing."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from relaymeter.harness.compare_config import CompareChange, ReplicaConfig
from relaymeter.harness.paths.megatron import import_refit, weight_bytes
from relaymeter.harness.paths.refit_changes import copies_of, unsuited, unsuited_shapes
from relaymeter.harness.paths.together import PathCannot
from relaymeter.harness.state_config import EngineConfig, TrainingConfig
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.placements import Cut, tensor_parallel_layout

SPECS = {"up": TensorSpec("up", (52, 24), "bfloat16"), "norm": TensorSpec("norm", (25,), "float32")}


def change(source: dict[str, Any], end: dict[str, Any]) -> CompareChange:
    key = "destination" if "stage" in end else "replicas"
    return CompareChange.model_validate({"name": "a", "source": source, key: end})


@pytest.mark.parametrize(
    ("source", "end", "model", "expected"),
    [
        ({"stage": 1, "ranks": 4, "tensor_parallel": 2}, {"stage": 1, "ranks": 4, "tensor_parallel": 4}, "dense", None),
        ({"stage": 0, "ranks": 4, "tensor_parallel": 4}, {"ranks": 4, "tensor_parallel": 2}, "blocks", None),
        ({"stage": 2, "ranks": 2}, {"ranks": 4, "tensor_parallel": 2}, "blocks", None),
        ({"stage": 3, "ranks": 4, "tensor_parallel": 2}, {"ranks": 4, "tensor_parallel": 4}, "dense", "no ZeRO"),
        ({"stage": 1, "ranks": 4, "tensor_parallel": 2}, {"stage": 3, "ranks": 2}, "dense", "no ZeRO partitions"),
        ({"stage": 1, "ranks": 4}, {"stage": 1, "ranks": 2}, "dense", "between tensor-parallel models"),
        ({"stage": 1, "ranks": 4}, {"ranks": 4, "tensor_parallel": 2}, "moe", "not for experts"),
        ({"stage": 1, "ranks": 4}, {"ranks": [1, 0], "tensor_parallel": 2}, "dense", "ascending order, not [1, 0]"),
    ],
)
def test_only_tensor_parallel_weights_are_for_the_refit(
    source: dict[str, Any], end: dict[str, Any], model: Any, expected: str | None
) -> None:
    found = unsuited(change(source, end), TrainingConfig(model=model))
    assert found is None if expected is None else expected in str(found)


def test_copies_are_neighbours_by_rank() -> None:
    assert copies_of(EngineConfig(stage=1, ranks=(3, 2, 1, 0), tensor_parallel=2)) == ((0, 1), (2, 3))
    assert copies_of(ReplicaConfig(ranks=(2, 3, 0, 1), tensor_parallel=2)) == ((2, 3), (0, 1))


def test_a_dim_that_the_planner_cannot_tile_is_named() -> None:
    assert unsuited_shapes(SPECS, {"up": 0, "norm": None}, (2, 4)) is None
    assert unsuited_shapes(SPECS, {"up": 1, "norm": 0}, (2, 4)) == (
        "norm [25]: Megatron-Core's planner needs dim 0 to be a multiple of 4 for tensor-parallel degrees 2 and 4"
    )
    assert "a multiple of 6" in str(unsuited_shapes(SPECS, {"up": 0, "norm": None}, (2, 3)))


def test_bytes_count_each_element_once() -> None:
    layout = tensor_parallel_layout(SPECS, {"up": Cut(0), "norm": Cut(None)}, [[0, 1], [2, 3]], 4)
    assert weight_bytes(layout) == 52 * 24 * 2 + 25 * 4


def _package(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    return module


@pytest.mark.parametrize(
    ("cuda", "modules", "expected"),
    [
        (False, {}, "Megatron-Core's refit needs CUDA, its gloo copy service too"),
        (True, {"megatron": None}, "megatron-core is not installed: pip install 'relaymeter[peers]'"),
        (
            True,
            {"megatron": _package("megatron"), "megatron.core": _package("megatron.core", __version__="0.14.1")},
            "megatron-core 0.14.1 is too old: megatron.core.resharding is in 0.16 and later ones",
        ),
    ],
)
def test_what_is_missing_for_the_refit_is_said(
    cuda: bool, modules: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    if modules:
        monkeypatch.delitem(sys.modules, "megatron.core.resharding", raising=False)
    with pytest.raises(PathCannot) as raised:
        import_refit()
    assert str(raised.value) == expected
