"""Benchmark of planning: from layouts to a move plan, beside DeepSpeed's ``plan_transfer`` called once per tensor.

``planning(say)`` gives the figures. Both planners run in this process, by turns; every repeat makes its layouts and
maps anew, so that nothing is planned twice out of what an earlier repeat left behind. No ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaymeter.errors import InputError
from relaymeter.harness.bench_report import Figure, Found, Say, pair_text
from relaymeter.harness.models import Qwen3Geometry, tensor_parallel_cuts, weight_specs
from relaymeter.relayout.affine_maps import import_affine
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import Cut, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.topology import Topology
from relaymeter.units import format_seconds

__all__ = ["planning"]

_PART = "planning"

SMALL = Qwen3Geometry(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
LARGE = Qwen3Geometry(
    hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
    head_dim=128, vocab_size=151936,
)  # fmt: skip
TINY = Qwen3Geometry(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
    head_dim=8, vocab_size=64,
)  # fmt: skip

_FASTER_THAN_PEER = 10.0
_SMALL_LIMIT_S = 0.030
_LARGE_LIMIT_S = 0.2
_REPEATS = 9


@dataclass(frozen=True)
class Shape:
    """One side of a move: ``zero3`` over ``degree`` ranks, or ``tp`` copies of ``degree`` ranks, from ``first`` on."""

    kind: str
    degree: int
    copies: int = 1
    first: int = 0

    def layout(self, geometry: Qwen3Geometry, world_size: int) -> Layout:
        """The layout of the model's weights. Pure."""
        specs = weight_specs(geometry)
        ranks = range(self.first, self.first + self.degree * self.copies)
        if self.kind == "zero3":
            return zero3_layout(specs, ranks, world_size)
        replicas = [ranks[at : at + self.degree] for at in range(0, len(ranks), self.degree)]
        return tensor_parallel_layout(specs, tensor_parallel_cuts(geometry), replicas, world_size)


@dataclass(frozen=True)
class _Case:
    name: str
    source: Shape
    destination: Shape
    topology: Topology


_AGAINST_PEER = (
    _Case("ZeRO-3 x4 -> x2", Shape("zero3", 4), Shape("zero3", 2), Topology.grid(1, 4)),
    _Case("TP4 -> TP2", Shape("tp", 4), Shape("tp", 2), Topology.grid(1, 4)),
)
_TO_COPIES = _Case("ZeRO-3 x4 -> TP2 x 2", Shape("zero3", 4), Shape("tp", 2, 2, 4), Topology.grid(2, 4))
_TO_TP8 = _Case("ZeRO-3 x8 -> TP8", Shape("zero3", 8), Shape("tp", 8, 1, 8), Topology.grid(2, 8))


def planning(say: Say, tiny: bool = False) -> Found:
    """Plan each move several times. ``tiny``: a small model and few repeats, to see that it works."""
    small, large, repeats = (TINY, TINY, 3) if tiny else (SMALL, LARGE, _REPEATS)
    say("importing deepspeed, the peer")
    plan_transfer: Callable[..., Any] = import_affine("affine_transfer", alone=True).plan_transfer
    count = len(weight_specs(small))
    figures: list[Figure] = []
    for case in _AGAINST_PEER:
        say(f"{case.name}, {count} tensors: {repeats} repeats beside plan_transfer")
        figures += _beside_peer(case, small, repeats, plan_transfer)
    say(f"{_TO_COPIES.name}, {count} tensors")
    figures.append(_alone(_TO_COPIES, small, repeats, _SMALL_LIMIT_S))
    say(f"{_TO_TP8.name}, {len(weight_specs(large))} tensors")
    figures.append(_alone(_TO_TP8, large, repeats, _LARGE_LIMIT_S))
    return figures, []


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    made = work()
    return time.perf_counter() - begin, made


def _ours(case: _Case, geometry: Qwen3Geometry) -> tuple[float, float, int]:
    """Seconds to build both layouts and to plan the move, and the bytes that the plan moves."""
    world = case.topology.world_size
    build_s, (source, destination) = _timed(
        lambda: (case.source.layout(geometry, world), case.destination.layout(geometry, world))
    )
    plan_s, plan = _timed(lambda: plan_move(source, destination, case.topology))
    moved = sum(int(c.shape.prod(axis=1).sum()) * c.itemsize * len(c.tensors) for c in plan.classes)
    return build_s, plan_s, moved


def _beside_peer(case: _Case, geometry: Qwen3Geometry, repeats: int, plan_transfer: Callable[..., Any]) -> list[Figure]:
    """``repeats`` rounds, in each both planners once, the order turned round every time; medians."""
    specs, cuts = weight_specs(geometry), tensor_parallel_cuts(geometry)
    samples: dict[str, list[float]] = {"layouts_s": [], "plan_s": [], "plan_transfer_s": []}
    moved: set[int] = set()

    def ours() -> None:
        build_s, plan_s, count = _ours(case, geometry)
        samples["layouts_s"].append(build_s)
        samples["plan_s"].append(plan_s)
        moved.add(count)

    def theirs() -> None:
        maps = [(affine_map(s, case.destination, cuts), affine_map(s, case.source, cuts)) for s in specs.values()]
        taken, plans = _timed(lambda: [plan_transfer(target, source) for target, source in maps])
        samples["plan_transfer_s"].append(taken)
        moved.add(sum(p.moved_elements * s.itemsize for p, s in zip(plans, specs.values(), strict=True)))

    for turn in range(repeats + 1):
        for work in (ours, theirs) if turn % 2 else (theirs, ours):
            work()
    kept = {name: found[1:] for name, found in samples.items()}
    if len(moved) != 1:
        raise InputError(f"{case.name}: the two planners move {sorted(moved)} bytes: they were not given the same move")
    layouts, plan, peer = (statistics.median(kept[name]) for name in ("layouts_s", "plan_s", "plan_transfer_s"))
    name = f"{case.name}, {len(specs)} tensors"
    note = "median of turns within one process; plan_move from ready layouts, plan_transfer from ready maps"
    return [
        Figure(
            part=_PART, name=name, value=peer / plan, unit="ratio", bar=_FASTER_THAN_PEER, at_least=True,
            ours=format_seconds(plan), peer=pair_text("plan_transfer", peer), note=note, samples=kept,
        ),
        Figure(
            part=_PART, name=f"{case.name}, layouts built as well", value=peer / (plan + layouts), unit="ratio",
            at_least=True, ours=f"{format_seconds(layouts)} + {format_seconds(plan)}",
            peer=pair_text("plan_transfer", peer),
        ),
    ]  # fmt: skip


def _alone(case: _Case, geometry: Qwen3Geometry, repeats: int, limit_s: float) -> Figure:
    times = [_ours(case, geometry)[:2] for _ in range(repeats + 1)][1:]
    layouts, plan = (statistics.median(column) for column in zip(*times, strict=True))
    return Figure(
        part=_PART, name=f"{case.name}, {len(weight_specs(geometry))} tensors", value=plan, unit="s", bar=limit_s,
        ours=format_seconds(plan), peer=pair_text("layouts apart", layouts),
        samples={"layouts_s": [t[0] for t in times], "plan_s": [t[1] for t in times]},
    )  # fmt: skip


def affine_map(spec: TensorSpec, shape: Shape, cuts: Mapping[str, Cut]) -> Any:
    """DeepSpeed's ``ParamAffineMap`` of one weight on one side of a move, made with DeepSpeed's own constructors.

    A ZeRO-3 partition is a range of the flattened weight, so its map has one dim. Raises InputError for several copies.
    """
    affine = import_affine("affine", alone=True)
    if shape.copies != 1:
        raise InputError("the peer plans into one copy at a time")
    if shape.kind == "zero3":
        part = -(-spec.numel // shape.degree)
        return affine.contiguous_split_map((spec.numel,), _widths(spec.numel, part, shape.degree), 0)
    cut = cuts[spec.name]
    if cut.dim is None:
        return affine.replicated_map(spec.shape, shape.degree)
    return affine.contiguous_split_map(spec.shape, [spec.shape[cut.dim] // shape.degree] * shape.degree, cut.dim)


def _widths(numel: int, part: int, ranks: int) -> Sequence[int]:
    return [max(0, min(numel, (rank + 1) * part) - rank * part) for rank in range(ranks)]
