"""The moves that ``validate`` measures, as layouts from metadata: no trainer stands behind them. Pure, no torch import.

``plan_spec(MoveSpec("sync-tp1", (6,), 8 << 20), topology)`` is a move planned and ready to be scheduled by every route,
the same on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from relaymeter.errors import InputError
from relaymeter.harness.models import Qwen3Geometry, tensor_parallel_cuts, weight_specs
from relaymeter.harness.moves import PlannedMove, default_bucket_bytes
from relaymeter.harness.validate_cases import MoveSpec
from relaymeter.relayout.cuts import Cut, Widths
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.placements import join_layouts, mesh_layout, replicated_layout, shard_placement, zero3_layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import block_groups
from relaymeter.relayout.topology import Topology

__all__ = ["ITEMSIZE", "SHAPES", "Shape", "plan_spec", "shapes_for"]

#: Bytes per element of the blocks of batches and mixes, and their dtype.
ITEMSIZE = 2
_DTYPE = "bfloat16"
_WIDTH = 256
#: Columns of a shard whose rows are short runs.
_NARROW = 32
#: Elements of a small tensor, and how many there are of them for one unit of scale.
_SMALL, _SMALL_COUNT = 96, 256
#: Different widths of uneven shards, and holders of small tensors, at most: each makes classes of blocks of its own,
#: which the choice looks at one by one.
_UNLIKE = 8
#: A unit of scale is about this many bytes.
_UNIT_ROWS = 2048

Ends = tuple[Layout, Layout]


@dataclass(frozen=True)
class Shape:
    """A kind of move. ``make(topology, sizes)`` lays out both ends.

    ``hard``: what makes it hard. ``parts``: how many numbers scale it, the first of two those that cross nodes.
    ``buckets``: about how many it is cut into; None: as moves are by default. ``nodes``, ``ranks_per_node``: the least
    that it needs.
    """

    make: Callable[[Topology, Sequence[int]], Ends]
    hard: tuple[str, ...] = ()
    parts: int = 1
    buckets: int | None = None
    nodes: int = 2
    ranks_per_node: int = 1


def plan_spec(spec: MoveSpec, topology: Topology, name: str = "") -> PlannedMove:
    """Plan the move of ``spec``; a bucket of 0 bytes stands for the default one. Raises InputError, LayoutError."""
    begin = time.perf_counter()
    if spec.shape not in SHAPES:
        raise InputError(f"no move of shape {spec.shape!r}: one of {', '.join(SHAPES)}")
    source, destination = SHAPES[spec.shape].make(topology, spec.sizes)
    plan = plan_move(source, destination, topology)
    groups = block_groups(plan, topology)
    bucket = spec.bucket_bytes or default_bucket_bytes(plan)
    return PlannedMove(
        name=name or spec.shape,
        planner="classes",
        sources={"trainer": source},
        destination=destination,
        plan=plan,
        groups=groups,
        topology=topology,
        bucket_bytes=bucket,
        plan_s=time.perf_counter() - begin,
    )


def shapes_for(topology: Topology) -> dict[str, Shape]:
    """The whole moves that this topology has room for (batches and mixes left out)."""
    fewest = min(len(topology.ranks_of(node)) for node in range(topology.nodes))
    return {
        name: shape
        for name, shape in SHAPES.items()
        if name not in ("batch", "mix") and topology.nodes >= shape.nodes and fewest >= shape.ranks_per_node
    }


def _halves(topology: Topology) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks of the first half of the nodes (the larger one), and of the others."""
    first = -(-topology.nodes // 2)
    ranks = range(topology.world_size)
    return tuple(r for r in ranks if topology.node[r] < first), tuple(r for r in ranks if topology.node[r] >= first)


def _tensors(prefix: str, count: int, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
    return {f"{prefix}.{k}": TensorSpec(f"{prefix}.{k}", shape, _DTYPE) for k in range(count)}


def _model(scale: int) -> Qwen3Geometry:
    """A small decoder of about one MiB for each unit of ``scale``, with grouped-query attention."""
    return Qwen3Geometry(
        hidden_size=_WIDTH,
        intermediate_size=128 * scale,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=256 * scale,
    )


def _alike(specs: Mapping[str, TensorSpec], place: Placement, world_size: int, name: str) -> Layout:
    """A layout in which all of ``specs``, of one shape, lie alike."""
    return Layout(name, world_size, dict(specs), dict.fromkeys(specs, place))


def _blocks(specs: Mapping[str, TensorSpec], holders: Sequence[int], targets: Sequence[int], world_size: int) -> Ends:
    """Tensors of one dim, each whole on one of ``holders`` in turn, wanted whole by all ``targets``."""
    source: dict[str, Placement] = {}
    known: dict[tuple[int, int], Placement] = {}
    for number, (name, spec) in enumerate(specs.items()):
        key = (holders[number % len(holders)], spec.numel)
        if key not in known:
            known[key] = shard_placement(spec.shape, {key[0]: ((0,), spec.shape)})
        source[name] = known[key]
    return Layout("blocks", world_size, dict(specs), source), replicated_layout(specs, targets, world_size)


def _both(parts: Sequence[Ends]) -> Ends:
    """Moves of different tensors as one."""
    befores, afters = zip(*parts, strict=True)
    return join_layouts(befores, "source"), join_layouts(afters, "destination")


def _sync_whole(topology: Topology, sizes: Sequence[int]) -> Ends:
    """ZeRO-3 over the first half, a whole copy on every rank of the other."""
    first, second = _halves(topology)
    specs, world = weight_specs(_model(sizes[0])), topology.world_size
    return zero3_layout(specs, first, world), replicated_layout(specs, second, world)


def _sync_pairs(topology: Topology, sizes: Sequence[int]) -> Ends:
    """ZeRO-3 over the first half, tensor-parallel copies of two ranks on the other."""
    first, second = _halves(topology)
    geometry, world = _model(sizes[0]), topology.world_size
    specs = weight_specs(geometry)
    pairs = [second[k : k + 2] for k in range(0, len(second) - 1, 2)]
    return zero3_layout(specs, first, world), mesh_layout(specs, tensor_parallel_cuts(geometry), pairs, world)


def _gather_all(topology: Topology, sizes: Sequence[int]) -> Ends:
    """ZeRO-3 over all ranks, a whole copy on every one: both directions and inside the nodes at once."""
    specs, world = weight_specs(_model(sizes[0])), topology.world_size
    return zero3_layout(specs, range(world), world), replicated_layout(specs, range(world), world)


def _swap(topology: Topology, sizes: Sequence[int]) -> Ends:
    """Each half of the nodes sends half of the tensors to every rank of the other."""
    first, second = _halves(topology)
    world, rows = topology.world_size, max(1, sizes[0] * _UNIT_ROWS // 16)
    ends = []
    for prefix, here, there in (("ahead", first, second), ("back", second, first)):
        specs = _tensors(prefix, 8, (rows, _WIDTH))
        ends.append((zero3_layout(specs, here, world), replicated_layout(specs, there, world)))
    return _both(ends)


def _inside(topology: Topology, sizes: Sequence[int]) -> Ends:
    """Every node gathers tensors of its own on all its ranks; beside them a few that cross."""
    world, ends = topology.world_size, [_crossing(topology, sizes[0])]
    for node in range(topology.nodes):
        ranks, specs = topology.ranks_of(node), _tensors(f"node{node}", 4, (sizes[1] * _UNIT_ROWS // 4, _WIDTH))
        ends.append((zero3_layout(specs, ranks, world), replicated_layout(specs, ranks, world)))
    return _both(ends)


def _recut_inside(topology: Topology, sizes: Sequence[int]) -> Ends:
    """Every node turns row shards of its own tensors into narrow column shards; beside them a few that cross."""
    world, ends = topology.world_size, [_crossing(topology, sizes[0])]
    for node in range(topology.nodes):
        ranks = topology.ranks_of(node)
        columns = _NARROW * len(ranks)
        specs = _tensors(f"node{node}", 4, (sizes[1] * _UNIT_ROWS * _WIDTH // (4 * columns), columns))
        before = mesh_layout(specs, dict.fromkeys(specs, Cut(0)), [ranks], world, "rows")
        ends.append((before, mesh_layout(specs, dict.fromkeys(specs, Cut(1)), [ranks], world, "columns")))
    return _both(ends)


def _crossing(topology: Topology, scale: int) -> Ends:
    """Tensors of the first half's ranks that every rank of the second half wants."""
    first, second = _halves(topology)
    specs = _tensors("crossing", 4, (max(1, scale * _UNIT_ROWS // 64), _WIDTH))
    return zero3_layout(specs, first, topology.world_size), replicated_layout(specs, second, topology.world_size)


def _narrow_columns(topology: Topology, sizes: Sequence[int]) -> Ends:
    """Narrow column shards on the first half, whole matrices on every rank of the second: short runs."""
    first, second = _halves(topology)
    world, columns = topology.world_size, _NARROW * len(first)
    specs = _tensors("matrix", 8, (max(1, sizes[0] * _UNIT_ROWS * _WIDTH // (8 * columns)), columns))
    before = mesh_layout(specs, dict.fromkeys(specs, Cut(1)), [first], world, "columns")
    return before, replicated_layout(specs, second, world)


def _many_small(topology: Topology, sizes: Sequence[int]) -> Ends:
    """Hundreds of tiny tensors, dealt to the first half's ranks, wanted by every rank of the second."""
    first, second = _halves(topology)
    specs = _tensors("bias", sizes[0] * _SMALL_COUNT, (_SMALL,))
    return _blocks(specs, first, second, topology.world_size)


def _incast(topology: Topology, sizes: Sequence[int]) -> Ends:
    """Everybody else sends to the last rank; a tenth of the bytes is wanted by every rank of the second half."""
    first, second = _halves(topology)
    world, target = topology.world_size, topology.world_size - 1
    rows = max(1, sizes[0] * _UNIT_ROWS // 8)
    specs = _tensors("incast", 8, (rows, _WIDTH))
    senders = [rank for rank in range(world) if rank != target]
    main = (zero3_layout(specs, senders, world), replicated_layout(specs, [target], world))
    shared = _tensors("shared", 8, (max(1, rows // 8), _WIDTH))
    return _both([main, (zero3_layout(shared, first, world), replicated_layout(shared, second, world))])


def _one_holder(topology: Topology, sizes: Sequence[int]) -> Ends:
    """Everything lies on rank 0, and every rank of the second half wants it."""
    _, second = _halves(topology)
    specs = _tensors("weight", 8, (max(1, sizes[0] * _UNIT_ROWS // 8), _WIDTH))
    return _alike(specs, _whole(specs, 0), topology.world_size, "holder"), replicated_layout(
        specs, second, topology.world_size
    )


def _whole(specs: Mapping[str, TensorSpec], rank: int) -> Placement:
    shape = next(iter(specs.values())).shape
    return shard_placement(shape, {rank: ((0,) * len(shape), shape)})


def _uneven(topology: Topology, sizes: Sequence[int]) -> Ends:
    """Row shards of widths 1, 2, 3, ... (to 8, then again from 1) on the first half, whole copies on the second."""
    first, second = _halves(topology)
    widths = [1 + k % _UNLIKE for k in range(len(first))]
    world, parts = topology.world_size, sum(widths)
    unit = max(1, sizes[0] * _UNIT_ROWS // (8 * parts))
    specs = _tensors("expert", 8, (unit * parts, _WIDTH))
    cut = Cut(0, rule=Widths(tuple(unit * width for width in widths)))
    before = mesh_layout(specs, dict.fromkeys(specs, cut), [first], world, "uneven")
    return before, replicated_layout(specs, second, world)


def _to_all_nodes(topology: Topology, sizes: Sequence[int]) -> Ends:
    """ZeRO-3 over node 0, a whole copy on every rank of all other nodes."""
    world, first = topology.world_size, topology.ranks_of(0)
    others = [rank for rank in range(world) if rank not in first]
    specs = weight_specs(_model(sizes[0]))
    return zero3_layout(specs, first, world), replicated_layout(specs, others, world)


def _batch(topology: Topology, sizes: Sequence[int]) -> Ends:
    """``sizes``: blocks, elements, fanout. Equal blocks of one node's ranks, each wanted by ``fanout`` of another's."""
    count, elements, fanout = sizes
    holders, targets = _node_pair(topology, fanout)
    return _blocks(_tensors("block", count, (elements,)), holders, targets, topology.world_size)


def _mix(topology: Topology, sizes: Sequence[int]) -> Ends:
    """``sizes``: blocks and elements of the tiny ones, of the large ones, and the fanout of all."""
    tiny, tiny_elements, large, large_elements, fanout = sizes
    holders, targets = _node_pair(topology, fanout)
    specs = {**_tensors("large", large, (large_elements,)), **_tensors("tiny", tiny, (tiny_elements,))}
    return _blocks(specs, holders, targets, topology.world_size)


def _node_pair(topology: Topology, fanout: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Holders and targets as the thresholds have them: the last node with enough ranks, and the first other one."""
    wide = [node for node in range(topology.nodes) if len(topology.ranks_of(node)) >= fanout]
    if not wide or topology.nodes < 2:
        raise InputError(f"no node of this topology has {fanout} destination ranks beside another node")
    source = next(node for node in range(topology.nodes) if node != wide[-1])
    return topology.ranks_of(source), topology.ranks_of(wide[-1])[:fanout]


SHAPES: Mapping[str, Shape] = {
    "sync-tp1": Shape(_sync_whole),
    "sync-tp2": Shape(_sync_pairs, ranks_per_node=2),
    "small-buckets": Shape(_sync_whole, buckets=12),
    "one-holder": Shape(_one_holder, buckets=6),
    "uneven-shards": Shape(_uneven),
    "to-all-nodes": Shape(_to_all_nodes, nodes=3),
    "gather-all": Shape(_gather_all, hard=("two-way",), buckets=6),
    "swap": Shape(_swap, hard=("two-way",)),
    "inside": Shape(_inside, hard=("in-node",), parts=2, ranks_per_node=2),
    "recut-inside": Shape(_recut_inside, ("in-node", "small segments"), parts=2, buckets=4, ranks_per_node=2),
    "narrow-columns": Shape(_narrow_columns, hard=("small segments",)),
    "many-small": Shape(_many_small, hard=("small segments",)),
    "incast": Shape(_incast, hard=("incast",), buckets=4),
    "batch": Shape(_batch, parts=3),
    "mix": Shape(_mix, parts=5),
}
