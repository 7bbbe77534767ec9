"""What one rank has to know of a class: the rows that leave it or reach its node, and the load on every rank.

Used where a world is so large that no rank should plan for all the others. Ranks come to the same rows and the same
loads, because both follow from the pieces alone. Pure NumPy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.geometry import intersect
from relaymeter.relayout.holders import Chosen, boxes_equal_or_apart, choose_holders, missing
from relaymeter.relayout.pieces import Pieces
from relaymeter.relayout.topology import Topology

__all__ = ["estimate_load", "own_choice"]

IntArray = NDArray[np.int64]


def own_choice(src: Pieces, dst: Pieces, node: IntArray, rank: int, itemsize: int, where: str) -> Chosen:
    """The chosen regions that reach the node of ``rank``, then those that ``rank`` sends to other nodes.

    Indices are into ``src`` and ``dst``. Raises LayoutError as ``choose_holders`` and, like it, on every rank alike.
    """
    home = node[dst.rank] == node[rank]
    if not boxes_equal_or_apart(src.lo, src.shape):
        every = choose_holders(src, dst, node, itemsize, where)
        mine = home[every.dst] | (src.rank[every.src] == rank)
        return _select(every, mine)
    _refuse_missing(src, dst, where)
    near = np.flatnonzero(home)
    arriving = choose_holders(src, dst.take(near), node, itemsize, where)
    parts = [Chosen(arriving.src, near[arriving.dst], arriving.lo, arriving.shape)]
    own = src.take(src.rank == rank)
    if len(own):
        away = np.flatnonzero(~home)
        rivals = np.unique(intersect(src.lo, src.shape, own.lo, own.shape)[0])
        asking = away[np.unique(intersect(dst.lo[away], dst.shape[away], own.lo, own.shape)[0])]
        leaving = choose_holders(src.take(rivals), dst.take(asking), node, itemsize, where, evenly_cut=True)
        found = Chosen(rivals[leaving.src], asking[leaving.dst], leaving.lo, leaving.shape)
        parts.append(_select(found, src.rank[found.src] == rank))
    return Chosen(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("src", "dst", "lo", "shape")))


def _select(chosen: Chosen, keep: NDArray[np.bool_]) -> Chosen:
    return Chosen(chosen.src[keep], chosen.dst[keep], chosen.lo[keep], chosen.shape[keep])


def _refuse_missing(src: Pieces, dst: Pieces, where: str) -> None:
    """Raise LayoutError where an evenly cut source does not hold some destination piece of any rank whole."""
    dims = src.lo.shape[1]
    held = np.unique(np.column_stack([src.lo, src.shape]), axis=0)
    wanted, first = np.unique(np.column_stack([dst.lo, dst.shape]), axis=0, return_index=True)
    _, box, _, size = intersect(held[:, :dims], held[:, dims:], wanted[:, :dims], wanted[:, dims:])
    offered = np.zeros(len(wanted), dtype=np.int64)
    np.add.at(offered, box, np.prod(size, axis=1, dtype=np.int64))
    short = np.flatnonzero(offered != dst.numel[first])
    if len(short):
        bad = short[int(first[short].argmin())]
        raise missing(dst, int(first[bad]), int(offered[bad]), where)


def estimate_load(src: Pieces, dst: Pieces, topology: Topology, itemsize: int) -> NDArray[np.float64]:
    """Bytes that one tensor makes each rank send, then receive (2 * world), moved direct.

    What a rank must receive is exact for a source that holds each element on one rank; who sends it is taken in
    proportion to what the ranks hold, which is exact where holders are alike. To other nodes a layout sends what the
    layouts before it lack.
    """
    world, node = topology.world_size, topology.node_array
    need = np.bincount(dst.rank, weights=dst.numel, minlength=world)
    by_rank, by_node = _held(src, dst, None, world), _held(src, dst, node, world)
    at_home = np.minimum(by_rank, need)
    near = np.minimum(by_node, need) - at_home
    far = np.maximum(need - at_home - near, 0.0)
    held = np.bincount(src.rank, weights=src.numel, minlength=world)
    in_node = np.bincount(node, weights=held, minlength=topology.nodes)
    asked = np.bincount(node, weights=near, minlength=topology.nodes)
    sent = held / np.maximum(in_node[node], 1.0) * asked[node]
    left = 1.0  # of what goes to other nodes, the part that no layout so far holds
    for layout, whole in _whole_share(src):
        mine = np.bincount(src.rank, weights=src.numel * (src.layout == layout), minlength=world)
        sent += mine / max(mine.sum(), 1.0) * far.sum() * left * whole
        left *= 1.0 - whole
    return np.concatenate([sent, near + far]) * float(itemsize)


def _whole_share(src: Pieces) -> list[tuple[int, float]]:
    """Each source layout and the part of the tensor that it holds, taking the fullest one as whole."""
    boxes = np.unique(np.column_stack([src.layout, src.lo, src.shape]), axis=0)
    dims = src.lo.shape[1]
    held = np.bincount(boxes[:, 0], weights=np.prod(boxes[:, 1 + dims :], axis=1, dtype=np.float64))
    return [(layout, float(held[layout] / held.max())) for layout in np.unique(src.layout).tolist()]


def _held(src: Pieces, dst: Pieces, node: IntArray | None, world: int) -> NDArray[np.float64]:
    """Elements that each rank needs and that are held by itself, or by its node; several holders count once each."""
    here, there = (src.rank, dst.rank) if node is None else (node[src.rank], node[dst.rank])
    if not np.intersect1d(here, there).size:
        return np.zeros(world)
    ones = np.ones((len(src), 1), dtype=np.int64), np.ones((len(dst), 1), dtype=np.int64)
    _, ib, _, size = intersect(
        np.column_stack([here, src.lo]),
        np.column_stack([ones[0], src.shape]),
        np.column_stack([there, dst.lo]),
        np.column_stack([ones[1], dst.shape]),
    )
    numel = np.prod(size, axis=1, dtype=np.float64)
    return np.bincount(dst.rank[ib], weights=numel, minlength=world).astype(np.float64)
