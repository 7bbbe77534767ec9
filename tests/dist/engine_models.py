"""Small models for tests on live engines, and what their configs need of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Empty(torch.nn.Module):
    """Trainable parameters without elements. Not called: ZeRO-3 cannot gather them together with others."""

    def __init__(self) -> None:
        super().__init__()
        self.none = torch.nn.Parameter(torch.zeros(0))
        self.rows = torch.nn.Parameter(torch.zeros(0, 8))


class Varied(torch.nn.Module):
    """Layer 1 uses layer 2's weight; odd sizes; empty, frozen and int8 parameters; buffers of many kinds, one tied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 7), torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)])
        self.layers[1].weight = self.layers[2].weight
        self.tail = torch.nn.Linear(7, 5)
        self.frozen = torch.nn.Parameter(torch.randn(3, 11), requires_grad=False)
        self.codes = torch.nn.Parameter(torch.randint(-99, 99, (9, 5)).to(torch.int8), requires_grad=False)
        self.empty = Empty()
        self.register_buffer("scale", torch.tensor(2.5, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.arange(6).view(2, 3) % 2 == 0)
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.layers[0].register_buffer("same", self.mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.tail(x).float().pow(2).sum()


class Stepped(torch.nn.Module):
    """Vectors of 8, 0 and 24 elements and an empty matrix, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(8))
        self.empty = Empty()
        self.b = torch.nn.Parameter(torch.randn(24))
        self.last = Empty()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.a).sum() * self.b).float().pow(2).sum()


class Uneven(torch.nn.Module):
    """57 elements in all, which no number of ranks divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(5, 7)
        self.b = torch.nn.Linear(7, 2, bias=False)
        self.c = torch.nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.b(torch.tanh(self.a(x))) * self.c).float().pow(2).sum()


class Decayed(torch.nn.Module):
    """Two matrices, for a group with weight decay, and two vectors, for one without."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(8, 16)
        self.two = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x))).float().pow(2).sum()


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The matrices with weight decay, then the vectors without."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]


class Shared(torch.nn.Module):
    """Linears of 100, 300 and 300: the second uses the third's weight, the first is tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (100, 200, 300)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size, size, bias=False) for size in sizes)
        self.layers[1].weight = self.layers[2].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tall = torch.cat([x, x, x], dim=1)
        return (self.layers[0](x).sum() + self.layers[2](self.layers[1](tall)).sum()).float()


#: Width of the inputs of each model.
INPUTS = {"Varied": 5, "Uneven": 5, "Stepped": 8, "Decayed": 8, "Shared": 100}


def ties(module: torch.nn.Module) -> list[list[str]]:
    """Names of parameters that are one object, for each such object."""
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def model_of(kind: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind()


class Block(torch.nn.Module):
    """For AutoTP: a norm, column linears plain and fused of three unlike parts, row linears, an odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 15)
        self.down = torch.nn.Linear(15, 8)
        self.fused = torch.nn.Linear(8, 24)
        self.outs = torch.nn.ModuleList(torch.nn.Linear(width, 8, bias=False) for width in (8, 12, 4))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fused(self.down(torch.tanh(self.up(self.norm(x)))))
        here = x.shape[-1]
        parts = x.split([here * 8 // 24, here * 12 // 24, here * 4 // 24], dim=-1)
        return sum(out(part) for out, part in zip(self.outs, parts, strict=True)).float().pow(2).sum() * self.scale


AUTOTP = [
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*fused\.weight$"], "partition_type": "column", "shape": [[8, 12, 4], -1], "partition_dim": 0},
    {"patterns": [r".*(down|outs\.\d)\.weight$"], "partition_type": "row"},
]


def autotp(degree: int) -> dict[str, Any]:
    """The config entry that cuts ``Block`` over ``degree`` ranks."""
    specs = {"use_default_specs": False, "layer_specs": AUTOTP}
    return {"tensor_parallel": {"autotp_size": degree, "partition_config": specs}}


class Letters(torch.nn.Module):
    """Layers a, b, c."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            self.add_module(name, torch.nn.Linear(3, 3, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x))).float().pow(2).sum()


class Mixed(torch.nn.Module):
    """Trainable weights of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(5, 3)
        self.b = torch.nn.Parameter(torch.randn(7, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).pow(2).sum() + self.b.float().pow(2).sum()
