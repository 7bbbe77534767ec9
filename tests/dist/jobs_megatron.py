"""Jobs that move weights by Megatron-Core's refit, with its own planner: on CPU tensors through a test double."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from jobs_execute_moves import cut_out, different_bits, whole_values
from pool import Seat

from relaymeter.harness.paths.megatron import Model, Refit
from relaymeter.harness.state_engines import quiet
from relaymeter.relayout.digest import POISON_BYTE, compare, digest_layout
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.placements import Cut, tensor_parallel_layout
from relaymeter.relayout.source_digest import expected_digest

SPECS = {
    name: TensorSpec(name, shape, dtype)
    for name, shape, dtype in (
        ("enter.weight", (24, 10), "bfloat16"),
        ("layers.0.norm.weight", (24,), "float32"),
        ("layers.0.up.weight", (52, 24), "bfloat16"),
        ("layers.0.up.bias", (52,), "bfloat16"),
        ("layers.0.down.weight", (24, 52), "bfloat16"),
        ("layers.0.down.bias", (24,), "bfloat16"),
        ("gain", (1,), "float16"),
    )
}
DIMS = {name: {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(".".join(name.split(".")[2:])) for name in SPECS}


def moved(
    megatron: Any, device: torch.device, service: str, source: Sequence[Sequence[int]], end: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Two moves with other weights in between, the second by the kept plan. Every rank of the world calls this."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = tensor_parallel_layout(SPECS, {name: Cut(dim) for name, dim in DIMS.items()}, source, world)
    values = whole_values(SPECS, 1)
    held = {name: tensor.to(device) for name, tensor in cut_out(layout, rank, values, 0xA5).items()}
    copies = tuple(map(tuple, end))
    model = Model(layout, tuple(map(tuple, source)), held)
    refit = Refit(megatron, model, copies, DIMS, service=service, device=device, time_limit_s=60)
    try:
        fresh = all(bool((kept.view(torch.uint8) == POISON_BYTE).all()) for kept in refit.storages.values())
        refit.plan()
        wrong, right = [], 0
        for turn in (2, 3):
            values = whole_values(SPECS, turn)
            for name, tensor in cut_out(layout, rank, values, 0xA5).items():
                held[name].copy_(tensor)  # the module's parameters are these storages
            refit.poison()
            refit.move()
            wanted = cut_out(refit.layout, rank, values, POISON_BYTE)
            wrong += different_bits(wanted, {name: kept.cpu() for name, kept in refit.storages.items()})
            expected = expected_digest([layout], refit.layout, rank, held)
            report = compare(expected, digest_layout(refit.layout, rank, dict(refit.storages), replicas=True))
            right += report.ok
        return {"wrong": list(map(str, wrong)), "right": right, "fresh": fresh, "held": len(refit.storages)}
    finally:
        refit.close()


@contextmanager
def _no_cuda() -> Iterator[None]:
    """A test double of what the gloo copy service asks of CUDA: streams that do nothing, memory that is not pinned."""
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    plain = torch.empty

    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return plain(*sizes, **options)

    with (
        patch.multiple(
            torch.cuda,
            Stream=lambda: stream,
            current_stream=lambda: stream,
            stream=lambda _: nullcontext(),
            synchronize=lambda: None,
        ),
        patch.object(torch, "empty", empty),
    ):
        yield


def refit(seat: Seat, cases: list[list[list[list[int]]]]) -> Any:
    """``moved`` on CPU tensors for each case [source, destination]; why not where Megatron-Core cannot be imported."""
    try:
        with quiet():
            megatron = importlib.import_module("megatron.core.resharding")
    except ImportError as error:
        return str(error)
    with _no_cuda():
        return [moved(megatron, torch.device("cpu"), "gloo", source, end) for source, end in cases]
