"""Holders: which rank serves each region that a destination piece needs, where several could.

Preferred in this order: the destination rank itself, its node, the caller's order of layouts; or as a ``Preference``
that is handed in says. A region that is left with several equal holders is cut into bands, one for each, so that all of
them (and their NICs) work; a region too small for that goes to one of them in turn. The choice looks at nothing but the
pieces, so that every rank comes to the same one, and ranks of one node that need the same region of another node name
the same holder. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import LayoutError
from relaymeter.relayout.geometry import boxes_overlap_volume, intersect, split_boxes, subtract_boxes, sum_by
from relaymeter.relayout.pieces import Pieces

__all__ = [
    "BAND_MIN_BYTES",
    "Chosen",
    "Hits",
    "Preference",
    "boxes_equal_or_apart",
    "choose_holders",
    "missing",
    "mix",
]

IntArray = NDArray[np.int64]

#: A region is cut among its holders only into bands of at least this many bytes.
BAND_MIN_BYTES = 65536
_MIX = np.uint64(0x9E3779B97F4A7C15)
_STIR = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, eq=False)
class Chosen:
    """Regions with their holders (n): ``src`` and ``dst`` index the pieces, lo and shape (n, nd) the region."""

    src: IntArray
    dst: IntArray
    lo: IntArray
    shape: IntArray


@dataclass(frozen=True, eq=False)
class Hits:
    """Who could serve what (n): a row for every holder of every region that a rank needs.

    src, dst: ranks. layout: of the holder, in the caller's order. region: a number, equal for equal boxes whichever
    rank needs them. bytes: of the region.
    """

    src: IntArray
    layout: IntArray
    dst: IntArray
    region: IntArray
    bytes: IntArray


#: The level of each hit (n), not negative: of the holders of a region that a rank needs, those of the lowest level
#: serve it, in even shares. Ranks of one node must come to the same holders of another. Called once for each class.
Preference = Callable[[Hits], IntArray]


def mix(*columns: IntArray) -> NDArray[np.uint64]:
    """One 64-bit hash word per row of integer columns (n) or (n, c): a round of splitmix64 for each column."""
    words = np.full(len(columns[0]), _MIX, dtype=np.uint64)
    for column in columns:
        for part in np.atleast_2d(column.T):
            words = (words ^ part.astype(np.uint64)) + _MIX
            words = (words ^ (words >> np.uint64(30))) * _STIR[0]
            words = (words ^ (words >> np.uint64(27))) * _STIR[1]
            words ^= words >> np.uint64(31)
    return words


def choose_holders(
    src: Pieces,
    dst: Pieces,
    node: IntArray,
    itemsize: int,
    where: str,
    *,
    evenly_cut: bool = False,
    prefer: Preference | None = None,
) -> Chosen:
    """For every destination piece the regions that fill it, each with one holder. ``node`` is the node of each rank,
    ``prefer`` replaces the order of preference.

    Raises LayoutError, naming ``where`` and the rank, for a piece that the sources do not hold whole; not where
    ``evenly_cut`` says that ``src`` are some of the pieces of a source whose boxes are equal or disjoint.
    """
    ia, ib, lo, size = intersect(src.lo, src.shape, dst.lo, dst.shape)
    region, first = _number_rows(np.column_stack([ib, lo, size]))
    distinct = sum_by(ib[first], np.prod(size[first], axis=1, dtype=np.int64), len(dst))
    uneven = np.zeros(len(dst), dtype=bool)
    if not evenly_cut:
        if not boxes_equal_or_apart(src.lo, src.shape):
            uneven[_tangled(ib[first], lo[first], size[first])] = True
        short = ~uneven & (distinct != dst.numel)
        if short.any():
            bad = int(short.argmax())
            raise missing(dst, bad, int(distinct[bad]), where)
    if prefer is not None:
        area, nbytes = _number_rows(np.column_stack([lo, size]))[0], np.prod(size, axis=1, dtype=np.int64) * itemsize
        level = prefer(Hits(src.rank[ia], src.layout[ia], dst.rank[ib], area, nbytes))
    if len(first) == len(ia) and not uneven.any():
        return Chosen(ia, ib, lo, size)
    if prefer is None:
        level = _level(src, dst, ia, ib, node)
    even = ~uneven[ib]
    best = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(best, region, level)
    keep = even & (level == best[region])
    parts = [(ia[keep], ib[keep], lo[keep], size[keep], level[keep])]
    if uneven.any():
        parts.append(_fill(src, dst, *(column[~even] for column in (ia, ib, lo, size, level)), where=where))
    ia, ib, lo, size, level = (np.concatenate([part[k] for part in parts]) for k in range(5))
    return _share(src, dst, node, itemsize, ia, ib, lo, size, level)


def _level(src: Pieces, dst: Pieces, ia: IntArray, ib: IntArray, node: IntArray) -> IntArray:
    """Preference of each hit, lower first: the rank itself, its node, then the caller's order of layouts."""
    here, there = src.rank[ia], dst.rank[ib]
    distance = np.where(here == there, 0, np.where(node[here] == node[there], 1, 2))
    level: IntArray = distance * (int(src.layout.max(initial=0)) + 1) + src.layout[ia]
    return level


def _number_rows(rows: IntArray) -> tuple[IntArray, IntArray]:
    """The number of each row (n) among the distinct rows, in an order that depends on the rows alone, and the first row
    of each number (d)."""
    order = np.lexsort(rows.T[::-1])
    number, first = np.zeros(len(rows), dtype=np.int64), np.zeros(0, dtype=np.int64)
    if len(rows):
        fresh = np.concatenate([[True], (rows[order][1:] != rows[order][:-1]).any(axis=1)])
        number[order] = np.cumsum(fresh) - 1
        first = order[fresh]
    return number, first


def boxes_equal_or_apart(lo: IntArray, shape: IntArray) -> bool:
    """Whether any two boxes (n, nd) are equal or share nothing: the source of a move is evenly cut."""
    boxes = np.unique(np.column_stack([lo, shape]), axis=0)
    return not boxes_overlap_volume(boxes[:, : lo.shape[1]], boxes[:, lo.shape[1] :])


def _tangled(piece: IntArray, lo: IntArray, size: IntArray) -> IntArray:
    """The destination pieces among whose distinct regions (n, nd) two overlap."""
    ones = np.ones((len(piece), 1), dtype=np.int64)
    boxes = np.column_stack([piece, lo]), np.column_stack([ones, size])
    one, two, _, _ = intersect(*boxes, *boxes)
    found: IntArray = np.unique(piece[one[one != two]])
    return found


def missing(dst: Pieces, piece: int, offered: int, where: str) -> LayoutError:
    """What to raise for a destination piece of which the sources hold only ``offered`` elements."""
    need = int(dst.numel[piece])
    return LayoutError(f"{where}: rank {int(dst.rank[piece])} needs {need} elements, the source offers {offered}")


_Hits = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]


def _fill(
    src: Pieces,
    dst: Pieces,
    ia: IntArray,
    ib: IntArray,
    lo: IntArray,
    size: IntArray,
    level: IntArray,
    *,
    where: str,
) -> _Hits:
    """Hits of pieces that are cut differently: each destination piece is filled in order of preference, a hit giving
    what the ones before it left open. Returns (src, dst, lo, shape, level), every equal holder of a part included."""
    order = np.lexsort((*lo.T[::-1], src.rank[ia], src.layout[ia], level, ib))
    turn = np.arange(len(order)) - np.searchsorted(ib[order], ib[order], side="left")
    open_dst = np.unique(ib)
    open_lo, open_size = dst.lo[open_dst], dst.shape[open_dst]
    hit_of = np.full(len(dst), -1, dtype=np.int64)
    found: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    for step in range(int(turn.max(initial=-1)) + 1):
        hit_of[:] = -1
        now = order[turn == step]
        hit_of[ib[now]] = now
        hit = hit_of[open_dst]
        rest_lo, rest_size, rest_dst = [open_lo[hit < 0]], [open_size[hit < 0]], [open_dst[hit < 0]]
        rows = np.flatnonzero(hit >= 0)
        hit = hit[rows]
        begin = np.maximum(open_lo[rows], lo[hit])
        extent = np.minimum(open_lo[rows] + open_size[rows], lo[hit] + size[hit]) - begin
        meets = (extent > 0).all(axis=1)
        found.append((hit[meets], open_dst[rows][meets], begin[meets], extent[meets]))
        rest_lo.append(open_lo[rows[~meets]])
        rest_size.append(open_size[rows[~meets]])
        rest_dst.append(open_dst[rows[~meets]])
        cut = rows[meets]
        which, left_lo, left_size = subtract_boxes(open_lo[cut], open_size[cut], begin[meets], extent[meets])
        open_lo = np.concatenate([*rest_lo, left_lo])
        open_size = np.concatenate([*rest_size, left_size])
        open_dst = np.concatenate([*rest_dst, open_dst[cut][which]])
        if not len(open_dst):
            break
    if len(open_dst):
        bad = int(open_dst[0])
        gap = int(np.prod(open_size[open_dst == bad], axis=1, dtype=np.int64).sum())
        raise missing(dst, bad, int(dst.numel[bad]) - gap, where)
    hit, part_dst, part_lo, part_size = (np.concatenate([entry[k] for entry in found]) for k in range(4))
    part_level = level[hit]
    return _all_holders(src, ia, ib, level, part_dst, part_lo, part_size, part_level)


def _all_holders(
    src: Pieces,
    ia: IntArray,
    ib: IntArray,
    level: IntArray,
    part_dst: IntArray,
    part_lo: IntArray,
    part_size: IntArray,
    part_level: IntArray,
) -> _Hits:
    """Every hit of the same destination piece and level that holds a part whole, in the order of the parts."""
    by_piece = np.lexsort((level, ib))
    key = ib[by_piece] * (int(level.max(initial=0)) + 1) + level[by_piece]
    wanted = part_dst * (int(level.max(initial=0)) + 1) + part_level
    first, last = np.searchsorted(key, wanted, side="left"), np.searchsorted(key, wanted, side="right")
    count = last - first
    part = np.repeat(np.arange(len(part_dst)), count)
    hit = by_piece[np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)]
    box_lo, box_end = src.lo[ia[hit]], src.lo[ia[hit]] + src.shape[ia[hit]]
    whole = ((box_lo <= part_lo[part]) & (part_lo[part] + part_size[part] <= box_end)).all(axis=1)
    part, hit = part[whole], hit[whole]
    return ia[hit], part_dst[part], part_lo[part], part_size[part], part_level[part]


def _share(
    src: Pieces,
    dst: Pieces,
    node: IntArray,
    itemsize: int,
    ia: IntArray,
    ib: IntArray,
    lo: IntArray,
    size: IntArray,
    level: IntArray,
) -> Chosen:
    """One holder for each region, or each band of it, out of its equal ones (rows of equal dst, lo and shape)."""
    order = np.lexsort((src.rank[ia], *size.T[::-1], *lo.T[::-1], ib))
    ia, ib, lo, size, level = ia[order], ib[order], lo[order], size[order], level[order]
    rows = np.column_stack([ib, lo, size])
    head = np.flatnonzero(np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])) if len(rows) else ib
    holders = np.diff(np.append(head, len(rows)))
    there = dst.rank[ib[head]]
    far = node[src.rank[ia[head]]] != node[there]
    caller = np.where(far, node[there], there)  # ranks of a node name the same far holder, near ones take turns
    start = ((mix(lo[head], size[head]) >> np.uint64(33)).astype(np.int64) + caller) % np.maximum(holders, 1)
    volume = np.prod(size[head], axis=1, dtype=np.int64) * itemsize
    bands = np.clip(volume // BAND_MIN_BYTES, 1, holders)
    found: list[Chosen] = []
    for parts in np.unique(bands).tolist():
        of = np.flatnonzero(bands == parts)
        for part in range(parts):
            row = head[of] + (start[of] + part * holders[of] // parts) % holders[of]
            begin, extent = split_boxes(size[row], parts, part)
            keep = (extent > 0).all(axis=1)
            found.append(Chosen(ia[row][keep], ib[row][keep], (lo[row] + begin)[keep], extent[keep]))
    return Chosen(
        *(np.concatenate([getattr(part, name) for part in found] or [getattr(Chosen(ia, ib, lo, size), name)])
          for name in ("src", "dst", "lo", "shape"))
    )  # fmt: skip
