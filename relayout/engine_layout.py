"""Layouts of live engines from their descriptions: JSON-able data from which any rank builds the same layout.

``build_layout(describe(...), world_size)``. A description holds what an engine's own objects say (``engine_reading``):
its ranks, tensors, cuts and optimizer groups; the builders from metadata make layouts of it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaymeter.relayout.cuts import Cut, Intervals
from relaymeter.relayout.engine_reading import HeldTensor, MasterGroup, ShardRuns
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.meshes import mesh_layout
from relaymeter.relayout.partitions import zero3_layout, zero12_layout

__all__ = ["Runs", "build_layout", "describe", "labels"]


@dataclass(frozen=True)
class Runs:
    """The cut of one dim that an engine's shards show, as a rule of ``cuts``."""

    shards: ShardRuns

    def intervals(self, extent: int, degree: int) -> Intervals:
        """``degree`` is that of the engine the cut was read from."""
        rows = [(index, *run) for index, runs in enumerate(self.shards.runs) for run in runs]
        index, lo, at, size = np.asarray(rows, dtype=np.int64).reshape(-1, 4).T
        return Intervals.make(index, lo, at, size, np.asarray(self.shards.widths, dtype=np.int64))


def describe(
    name: str,
    ranks: Sequence[Sequence[int]],
    tensors: Sequence[tuple[HeldTensor, str, str]],
    aliases: Mapping[str, str],
    groups: Sequence[MasterGroup] = (),
) -> dict[str, Any]:
    """``name``: the layout's. ``tensors``: each with its dtype in this state and how it is spread over data-parallel
    ranks: "whole" (a copy on each), "parts" (its shard flattened and cut evenly), "flat" (with a group of ``groups``).
    """
    cuts: dict[ShardRuns, int] = {}
    rows = []
    for held, dtype, spread in tensors:
        number = None if held.cut is None else cuts.setdefault(held.cut, len(cuts))
        rows.append([held.name, list(held.shape), dtype, spread, number])
    return {
        "name": name,
        "ranks": [list(column) for column in ranks],
        "tensors": rows,
        "aliases": dict(aliases),
        "cuts": [{"dim": c.dim, "widths": list(c.widths), "runs": [list(map(list, r)) for r in c.runs]} for c in cuts],
        "groups": [[list(g.names), g.alignment, g.tensor_alignment] for g in groups if g.names],
    }


def labels(description: Mapping[str, Any]) -> list[str]:
    """What the ranks of one engine have to agree on, in order; empty where the description holds no tensor."""
    if not description["tensors"]:
        return []
    found = []
    for name, shape, dtype, spread, cut in description["tensors"]:
        widths = "" if cut is None else f", cut to {description['cuts'][cut]['widths']}"
        found.append(f"{name} {shape} {dtype}, {spread}{widths}")
    for number, (names, _, _) in enumerate(description["groups"]):
        found += [f"{name} at place {place} of group {number}" for place, name in enumerate(names)]
    found += [f"{alias} tied to {name}" for alias, name in description["aliases"].items()]
    return [*found, f"ranks {description['ranks']}"]


def build_layout(description: Mapping[str, Any], world_size: int) -> Layout:
    """The layout that ``description`` describes. Raises LayoutError."""
    name, columns = description["name"], description["ranks"]
    several = len(columns) > 1
    mesh = [list(row) for row in zip(*columns, strict=True)] if several else columns[0]
    rules = [Cut(c["dim"], rule=Runs(_runs(c))) for c in description["cuts"]]
    specs: dict[str, TensorSpec] = {}
    cuts: dict[str, Cut] = {}
    spreads: dict[str, str] = {}
    for tensor, shape, dtype, spread, cut in description["tensors"]:
        specs[tensor], spreads[tensor] = TensorSpec(tensor, tuple(shape), dtype), spread
        cuts[tensor] = Cut(None) if cut is None else rules[cut]
    placements: dict[str, Placement] = {}
    over_ranks = cuts if several else None
    for spread in ("whole", "parts"):
        mine = {tensor: spec for tensor, spec in specs.items() if spreads[tensor] == spread}
        if mine and spread == "whole":
            replicas = mesh if several else [[rank] for rank in mesh]
            placements |= mesh_layout(mine, cuts, replicas, world_size, name).placements
        elif mine:
            placements |= zero3_layout(mine, mesh, world_size, name, cuts=over_ranks).placements
    for names, alignment, tensor_alignment in description["groups"]:
        mine = {tensor: specs[tensor] for tensor in names}
        placements |= zero12_layout(
            mine,
            mesh,
            world_size,
            name,
            cuts=over_ranks,
            groups=[names],
            alignment=alignment,
            tensor_alignment=tensor_alignment,
        ).placements
    layout = Layout(name, world_size, specs, {t: placements[t] for t in specs}, dict(description["aliases"]))
    layout.check()
    return layout


def _runs(cut: Mapping[str, Any]) -> ShardRuns:
    runs = tuple(tuple((int(lo), int(at), int(size)) for lo, at, size in runs) for runs in cut["runs"])
    return ShardRuns(int(cut["dim"]), tuple(cut["widths"]), runs)
