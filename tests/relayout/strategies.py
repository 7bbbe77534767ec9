"""Hypothesis strategies of topologies and layouts: ZeRO-3 and tensor-parallel, any shapes, any rank sets."""

from __future__ import annotations

from hypothesis import strategies as st

from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.placements import Cut, tensor_parallel_layout, zero3_layout
from relaymeter.relayout.topology import Topology

SIZES = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 16])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    return Topology.grid(draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.sampled_from(["rank", "node"])))


@st.composite
def _ranks(draw: st.DrawFn, world: int) -> list[int]:
    return draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True))


@st.composite
def moves(draw: st.DrawFn) -> tuple[Layout, Layout, Topology]:
    topology = draw(topologies())
    world = topology.world_size
    specs, cuts = {}, {}
    for index in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(SIZES, max_size=3)))
        name = f"layers.{index}.weight"
        specs[name] = TensorSpec(name, shape, "int64")
        cuts[name] = Cut(draw(st.sampled_from([None, *range(len(shape))])))

    def layout(name: str) -> Layout:
        ranks = draw(_ranks(world))
        if draw(st.booleans()):
            return zero3_layout(specs, ranks, world, name)
        degree = draw(st.sampled_from([d for d in range(1, len(ranks) + 1) if len(ranks) % d == 0]))
        replicas = [ranks[i : i + degree] for i in range(0, len(ranks), degree)]
        return tensor_parallel_layout(specs, cuts, replicas, world, name)

    return layout("from"), layout("to"), topology
