"""Layouts of live engines from their descriptions: JSON-able data from which any rank builds the same layout.

``build_layout(describe(...), world_size)``. A description holds what an engine's own objects say (``engine_reading``):
its ranks, tensors, cuts and optimizer groups; the builders from metadata make layouts of it. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from relaymeter.errors import LayoutError
from relaymeter.relayout.cuts import Cut, Intervals
from relaymeter.relayout.engine_reading import HeldTensor, MasterGroup, RankGrid, ShardRuns
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
    """``name``: the layout's. ``ranks``: those of the tensors that name no others, for each part of a cut its
    data-parallel group. ``tensors``: each with its dtype in this state and how it is spread over data-parallel ranks:
    "whole" (a copy on each), "parts" (its shard flattened and cut evenly), "flat" (with a group of ``groups``).
    """
    cuts: dict[ShardRuns, int] = {}
    grids: dict[RankGrid, int] = {}
    rows = []
    for held, dtype, spread in tensors:
        cut = None if held.cut is None else cuts.setdefault(held.cut, len(cuts))
        grid = grids.setdefault(held.ranks, len(grids)) if held.ranks else None
        rows.append([held.name, list(held.shape), dtype, spread, cut, grid])
    return {
        "name": name,
        "ranks": [list(column) for column in ranks],
        "grids": [[list(column) for column in grid] for grid in grids],
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
    for name, shape, dtype, spread, cut, grid in description["tensors"]:
        widths = "" if cut is None else f", cut to {description['cuts'][cut]['widths']}"
        over = "" if grid is None else f", over ranks {description['grids'][grid]}"
        found.append(f"{name} {shape} {dtype}, {spread}{widths}{over}")
    for number, (names, _, _) in enumerate(description["groups"]):
        found += [f"{name} at place {place} of group {number}" for place, name in enumerate(names)]
    found += [f"{alias} tied to {name}" for alias, name in description["aliases"].items()]
    return [*found, f"ranks {description['ranks']}"]


def build_layout(description: Mapping[str, Any], world_size: int) -> Layout:
    """The layout that ``description`` describes; of equal descriptions the same one. Raises LayoutError."""
    return _built(json.dumps(description), world_size)


@lru_cache(maxsize=4)  # weights and masters of two engines: agreeing, reading and announcing each ask for them
def _built(text: str, world_size: int) -> Layout:
    description = json.loads(text)
    name, rules = description["name"], [Cut(c["dim"], rule=Runs(_runs(c))) for c in description["cuts"]]
    specs: dict[str, TensorSpec] = {}
    cuts: dict[str, Cut] = {}
    spreads: dict[tuple[int | None, str], list[str]] = {}
    grids: dict[str, int | None] = {}
    for tensor, shape, dtype, spread, cut, grid in description["tensors"]:
        specs[tensor], grids[tensor] = TensorSpec(tensor, tuple(shape), dtype), grid
        cuts[tensor] = Cut(None) if cut is None else rules[cut]
        spreads.setdefault((grid, spread), []).append(tensor)
    placements: dict[str, Placement] = {}
    for (grid, spread), names in spreads.items():
        mesh, over_ranks = _mesh(description, grid, cuts)
        mine = {tensor: specs[tensor] for tensor in names}
        if spread == "whole":
            replicas = mesh if over_ranks is not None else [[rank] for rank in mesh]
            placements |= mesh_layout(mine, cuts, replicas, world_size, name).placements
        elif spread == "parts":
            placements |= zero3_layout(mine, mesh, world_size, name, cuts=over_ranks).placements
    for names, alignment, tensor_alignment in description["groups"]:
        several = sorted({str(grids[tensor]) for tensor in names})
        if len(several) > 1:
            raise LayoutError(f"layout {name}: the group of {names[0]} is spread over {len(several)} sets of ranks")
        mesh, over_ranks = _mesh(description, grids[names[0]], cuts)
        placements |= zero12_layout(
            {tensor: specs[tensor] for tensor in names},
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


def _mesh(
    description: Mapping[str, Any], grid: int | None, cuts: Mapping[str, Cut]
) -> tuple[list[Any], Mapping[str, Cut] | None]:
    """The mesh of one set of ranks, data-parallel ranks first, and the cuts over its other axis (None: it has none)."""
    columns = description["ranks"] if grid is None else description["grids"][grid]
    if len(columns) == 1:
        return columns[0], None
    return [list(row) for row in zip(*columns, strict=True)], cuts


def _runs(cut: Mapping[str, Any]) -> ShardRuns:
    runs = tuple(tuple((int(lo), int(at), int(size)) for lo, at, size in runs) for runs in cut["runs"])
    return ShardRuns(int(cut["dim"]), tuple(cut["widths"]), runs)
