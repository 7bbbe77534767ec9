"""Hypothesis strategies of topologies, layouts by every builder, and moves between them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from relaymeter.relayout.combine import join_layouts, restrict_layout, stage_specs
from relaymeter.relayout.cuts import Blocks, Cut, Even, Fused, Padded, Rule, Widths
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.meshes import mesh_layout
from relaymeter.relayout.partitions import zero3_layout, zero12_layout
from relaymeter.relayout.placements import replicated_layout
from relaymeter.relayout.topology import Topology

SIZES = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 16])
#: The largest tensor that is drawn, in elements: the oracle walks element by element.
MOST = 600

Specs = dict[str, TensorSpec]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    return Topology.grid(draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.sampled_from(["rank", "node"])))


@st.composite
def tensor_specs(draw: st.DrawFn, dtype: str = "int64") -> Specs:
    """One to five tensors of at most three dims, zero-size and scalar ones among them."""
    specs = {}
    for index in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(SIZES, max_size=3))
        while math.prod(shape) > MOST:
            shape[shape.index(max(shape))] = 2
        name = f"layers.{index}.weight"
        specs[name] = TensorSpec(name, tuple(shape), dtype)
    return specs


@st.composite
def loose_rules(draw: st.DrawFn) -> Rule | None:
    """Rules that fit any extent and any degree."""
    kind = draw(st.sampled_from(["even", "blocks", "padded"]))
    if kind == "blocks":
        return Blocks(draw(st.sampled_from([1, 2, 3, 64])), draw(st.integers(0, 3)))
    return Padded(draw(st.sampled_from([1, 2, 8]))) if kind == "padded" else None


@st.composite
def cuts_along(draw: st.DrawFn, dim: int, extent: int, degree: int) -> Cut:
    """A cut of any kind along a dim of ``extent`` over ``degree`` indices that leaves no element out."""
    kinds = ["loose", "widths", "fused", "experts"]
    units = [u for u in range(1, extent + 1) if extent % u == 0 and (u >= degree or degree % u == 0)]
    if units:
        kinds.append("units")
    heads = [
        (h * g, g)
        for h in range(1, 5)
        for g in range(1, 5)
        if extent and extent % (h * g + 2 * g) == 0 and (g >= degree or degree % g == 0)
        if g >= degree or h >= degree // g or (degree // g) % h == 0
    ]
    if heads:
        kinds.append("heads")
    kind = draw(st.sampled_from(kinds))
    if kind == "units":
        return Cut(dim, draw(st.sampled_from(units)))
    if kind == "heads":
        count, groups = draw(st.sampled_from(heads))
        logical = draw(st.sampled_from(["blocks", "groups"]))
        made = draw(st.sampled_from([Cut.qkv_blocks, Cut.qkv_by_group]))
        return made(dim, count, groups, logical)
    if kind == "widths":
        borders = sorted(draw(st.lists(st.integers(0, extent), min_size=degree - 1, max_size=degree - 1)))
        return Cut(dim, rule=Widths(tuple(b - a for a, b in zip([0, *borders], [*borders, extent], strict=True))))
    if kind == "fused":
        split = draw(st.integers(0, extent))
        return Cut(dim, rule=Fused(((split, draw(loose_rules()) or Even()), (extent - split, Even()))))
    if kind == "experts" and extent:
        homes = [draw(st.lists(st.integers(0, degree - 1), min_size=1, max_size=2, unique=True)) for _ in range(extent)]
        order = draw(st.permutations(range(extent)))
        return Cut.experts(dim, [[e for e in order if index in homes[e]] for index in range(degree)])
    return Cut(dim, rule=draw(loose_rules()))


@st.composite
def cuts_over(draw: st.DrawFn, spec: TensorSpec, degrees: Sequence[int]) -> tuple[Cut, ...]:
    """A cut per axis for one tensor, along any dims, nested ones among them."""
    found: list[Cut] = []
    for degree in degrees:
        dim = draw(st.sampled_from([None, *range(len(spec.shape))]))
        if dim is None:
            whole = draw(st.booleans())
            some = draw(st.lists(st.integers(0, degree - 1), min_size=1, max_size=degree, unique=True))
            found.append(Cut(None) if whole else Cut.only(*some))
        elif any(cut.dim == dim for cut in found):
            found.append(Cut(dim, rule=draw(loose_rules())))
        else:
            found.append(draw(cuts_along(dim, spec.shape[dim], degree)))
    return tuple(found)


@st.composite
def _degrees(draw: st.DrawFn, count: int, axes: int) -> list[int]:
    """``axes`` degrees whose product divides ``count``."""
    degrees = []
    for _ in range(axes):
        degrees.append(draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0])))
        count //= degrees[-1]
    return degrees


@st.composite
def _one_copy(draw: st.DrawFn, specs: Specs, ranks: list[int], world: int, name: str) -> Layout:
    """A layout of all ``specs`` by one builder over some or all of ``ranks``; ZeRO over replicated shards gives more
    than one copy."""
    kind = draw(st.sampled_from(["zero3", "zero12", "mesh", "replicated", "stages"]))
    if kind == "replicated":
        return replicated_layout(specs, ranks, world, name)
    if kind == "stages" and len(specs) > 1:
        where = [draw(st.sampled_from([(0,), (1,), (0, 1)])) for _ in specs]
        chosen = [[n for n, stages in zip(specs, where, strict=True) if k in stages] for k in (0, 1)]
        tied = any(len(stages) > 1 for stages in where)
        if tied and len(ranks) < 2:
            return replicated_layout(specs, ranks, world, name)
        border = draw(st.integers(1, len(ranks) - 1)) if tied else len(ranks)
        halves = (ranks[:border], ranks[border:]) if tied else (ranks, ranks)
        stages = [
            draw(_one_copy(part, half, world, f"{name}.{k}"))
            for k, (part, half) in enumerate(zip(stage_specs(specs, chosen), halves, strict=True))
            if part
        ]
        return join_layouts(stages, name)
    axes = draw(st.integers(1, 3 if kind == "mesh" else 2))
    degrees = draw(_degrees(len(ranks), axes))
    mesh = np.array(ranks[: math.prod(degrees)]).reshape(degrees)
    model = degrees if kind == "mesh" else degrees[1:]
    cuts = {n: draw(cuts_over(spec, model)) for n, spec in specs.items()}
    if kind == "mesh":
        return mesh_layout(specs, cuts, [mesh], world, name)
    if kind == "zero3":
        return zero3_layout(specs, mesh, world, name, cuts=cuts if model else None)
    order = draw(st.permutations(list(specs)))
    border = draw(st.integers(0, len(order)))
    return zero12_layout(
        specs, mesh, world, name, cuts=cuts if model else None,
        groups=draw(st.sampled_from([None, [order], [order[:border], order[border:]]])),
        alignment=draw(st.sampled_from([None, degrees[0], 5 * degrees[0], 64 * degrees[0]])),
        tensor_alignment=draw(st.sampled_from([1, 1, 4])),
    )  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, specs: Specs, world: int, name: str = "drawn") -> Layout:
    """A whole layout of ``specs``: one to three copies on disjoint ranks, each by its own builder and degree."""
    ranks = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True))
    copies = draw(st.integers(1, min(3, len(ranks))))
    if copies > 1 and draw(st.booleans()):  # one builder, equal rules, unequal degrees
        cuts = {
            n: Cut(dim, rule=draw(loose_rules()) if dim is not None else None)
            for n, spec in specs.items()
            for dim in [draw(st.sampled_from([None, *range(len(spec.shape))]))]
        }
        return mesh_layout(specs, cuts, _chunks(draw, ranks, copies), world, name)
    parts = [
        draw(_one_copy(specs, chunk, world, f"{name}.{number}"))
        for number, chunk in enumerate(_chunks(draw, ranks, copies))
    ]
    return parts[0] if copies == 1 else join_layouts(parts, name)


def _chunks(draw: st.DrawFn, ranks: list[int], count: int) -> list[list[int]]:
    if count == 1:
        return [ranks]
    borders = sorted(
        draw(st.lists(st.integers(1, len(ranks) - 1), min_size=count - 1, max_size=count - 1, unique=True))
    )
    return [ranks[a:b] for a, b in zip([0, *borders], [*borders, len(ranks)], strict=True)]


@st.composite
def destinations(draw: st.DrawFn, specs: Specs, world: int) -> Layout:
    """A layout to move to: whole, or the part of some ranks or of some tensors."""
    whole = draw(layouts(specs, world, "to"))
    kind = draw(st.sampled_from(["whole", "whole", "ranks", "names"]))
    if kind == "ranks":
        return restrict_layout(whole, draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True)))
    if kind == "names":
        return restrict_layout(whole, names=draw(st.lists(st.sampled_from(list(specs)), min_size=1, unique=True)))
    return whole


@st.composite
def moves(draw: st.DrawFn) -> tuple[Layout, Layout, Topology]:
    """A whole source, a destination that may be partial, and the cluster."""
    topology = draw(topologies())
    world = topology.world_size
    specs = draw(tensor_specs())
    return draw(layouts(specs, world, "from")), draw(destinations(specs, world)), topology


@st.composite
def moves_from_several(draw: st.DrawFn) -> tuple[list[Layout], Layout, Topology]:
    """One to three sources that together hold everything; the first may have lost some ranks where others are whole."""
    topology = draw(topologies())
    world = topology.world_size
    specs = draw(tensor_specs())
    sources = [draw(layouts(specs, world, f"from{number}")) for number in range(draw(st.integers(1, 3)))]
    if len(sources) > 1 and draw(st.booleans()):
        lost = draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
        sources[0] = restrict_layout(sources[0], [rank for rank in range(world) if rank not in lost], name="survivors")
    return sources, draw(destinations(specs, world)), topology
