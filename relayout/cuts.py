"""Cuts: how one dim of a tensor is dealt out over the indices of one axis of a mesh. Pure integers and NumPy.

``Cut(0)`` cuts dim 0 evenly, ``Cut(0, 8)`` by 8 heads, ``Cut(0, rule=Blocks(64))`` in blocks of 64 rows,
``Cut.qkv_by_group(0, heads=32, kv_heads=4)`` a fused query-key-value weight. A rule turns (extent, degree) into
``Intervals``: what each index holds of the dim and where in its own storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from relaymeter.errors import LayoutError
from relaymeter.relayout.geometry import intersect
from relaymeter.relayout.layout import IntArray

__all__ = [
    "Blocks",
    "Cut",
    "Even",
    "Fused",
    "FusedHeads",
    "Intervals",
    "Listed",
    "Only",
    "Padded",
    "Rule",
    "Units",
    "Widths",
    "count_out",
    "nest",
]


def count_out(count: IntArray) -> tuple[IntArray, IntArray]:
    """Row numbers 0, 1, ... each repeated ``count`` times, and the position of every repetition in its row."""
    row = np.repeat(np.arange(len(count), dtype=np.int64), count)
    return row, np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)


@dataclass(frozen=True, eq=False)
class Intervals:
    """One dim cut over ``degree`` indices: m intervals sorted by (index, at).

    Elements ``lo`` .. ``lo + size - 1`` of the dim lie from ``at`` on in the storage of ``index``, which is
    ``width[index]`` wide; what no interval fills there is padding. Intervals of two indices are equal or disjoint.
    """

    index: IntArray
    lo: IntArray
    at: IntArray
    size: IntArray
    width: IntArray

    @classmethod
    def make(cls, index: IntArray, lo: IntArray, at: IntArray, size: IntArray, width: IntArray) -> Intervals:
        """Intervals in any order: empty ones dropped, neighbours joined, and cut where those of two indices overlap."""
        keep = np.flatnonzero(size > 0)
        order = keep[np.lexsort((at[keep], index[keep]))]
        index, lo, at, size = index[order], lo[order], at[order], size[order]
        if len(index):
            apart = (np.diff(index) != 0) | (lo[1:] != lo[:-1] + size[:-1]) | (at[1:] != at[:-1] + size[:-1])
            first = np.flatnonzero(np.concatenate([[True], apart]))
            index, lo, at, size = index[first], lo[first], at[first], np.add.reduceat(size, first)
            borders = np.unique(np.concatenate([lo, lo + size]))
            begin, end = np.searchsorted(borders, lo), np.searchsorted(borders, lo + size)
            if (end - begin > 1).any():
                row, step = count_out(end - begin)
                low = borders[begin[row] + step]
                index, at, size = index[row], at[row] + low - lo[row], borders[begin[row] + step + 1] - low
                lo = low
        return cls(index, lo, at, size, width)

    @property
    def degree(self) -> int:
        return len(self.width)

    def of(self, index: int) -> list[tuple[int, int, int]]:
        """What one index holds: (first element of the dim, first element of its storage, size), in storage order."""
        rows = np.flatnonzero(self.index == index)
        return list(zip(self.lo[rows].tolist(), self.at[rows].tolist(), self.size[rows].tolist(), strict=True))


class Rule(Protocol):
    """A way to cut one dim: hashable data. ``intervals`` raises LayoutError where extent and degree do not fit."""

    def intervals(self, extent: int, degree: int) -> Intervals: ...


def _borders(begin: IntArray, end: IntArray) -> Intervals:
    """One run per index, stored as it is."""
    return Intervals.make(np.arange(len(begin), dtype=np.int64), begin, np.zeros_like(begin), end - begin, end - begin)


def _shares(units: int, degree: int) -> tuple[IntArray, IntArray]:
    """First unit of each index and the one after its last; with fewer units than indices each is held by several."""
    index = np.arange(degree, dtype=np.int64)
    begin = index * units // degree
    if units >= degree:
        return begin, (index + 1) * units // degree
    if units < 1 or degree % units:
        raise LayoutError(
            f"{units} units over {degree} ranks: neither is a multiple of the other; choose a degree that divides "
            f"{units} or is a multiple of it"
        )
    return begin, begin + 1


@dataclass(frozen=True)
class Even:
    """Any element may be a border; widths differ by at most one."""

    def intervals(self, extent: int, degree: int) -> Intervals:
        border = np.arange(degree + 1, dtype=np.int64) * extent // degree
        return _borders(border[:-1], border[1:])


@dataclass(frozen=True)
class Units:
    """``count`` equal indivisible blocks (attention heads). Fewer than indices: each is held by several (GQA)."""

    count: int

    def intervals(self, extent: int, degree: int) -> Intervals:
        if extent == 0:
            return Even().intervals(0, degree)
        if self.count < 1 or extent % self.count:
            raise LayoutError(f"{extent} is no multiple of {self.count} units; give the number of heads it holds")
        begin, end = _shares(self.count, degree)
        return _borders(begin * (extent // self.count), end * (extent // self.count))


@dataclass(frozen=True)
class Blocks:
    """Borders at multiples of ``size`` only; the last block may be short.

    Blocks left over after an even deal go one each to indices spread over the axis, the last one first: the largest
    share is then as small as can be, for a single spare block makes room for the short one. ``turn`` begins so many
    indices earlier, so that over many tensors no rank gets all the spare blocks (``meshes.deal_blocks``).
    """

    size: int
    turn: int = 0

    def intervals(self, extent: int, degree: int) -> Intervals:
        if self.size < 1:
            raise LayoutError(f"blocks of {self.size} elements; give at least 1")
        blocks = -(-extent // self.size)
        each, spare = divmod(blocks, degree)
        count = np.full(degree, each, dtype=np.int64)
        count[(degree - 1 - self.turn - np.arange(spare, dtype=np.int64) * degree // max(spare, 1)) % degree] += 1
        border = np.minimum(np.concatenate([[0], np.cumsum(count)]) * self.size, extent)
        return _borders(border[:-1], border[1:])


@dataclass(frozen=True)
class Widths:
    """Explicit widths, one per index; they add up to the extent."""

    widths: tuple[int, ...]

    def intervals(self, extent: int, degree: int) -> Intervals:
        widths = np.asarray(self.widths, dtype=np.int64)
        if len(widths) != degree or int(widths.sum()) != extent or (widths < 0).any():
            raise LayoutError(
                f"widths {list(self.widths)} ({len(widths)} of them, {int(widths.sum())} in all) for {extent} over "
                f"{degree} ranks; give {degree} that add up to {extent}"
            )
        end = np.cumsum(widths)
        return _borders(end - widths, end)


@dataclass(frozen=True)
class Padded:
    """The extent padded up to a multiple of ``multiple`` x degree and cut evenly (vocabulary). Pure padding stays in
    the storage of the last indices, which may hold nothing else."""

    multiple: int = 1

    def intervals(self, extent: int, degree: int) -> Intervals:
        if self.multiple < 1:
            raise LayoutError(f"padding to a multiple of {self.multiple}; give at least 1")
        width = -(-extent // (self.multiple * degree)) * self.multiple
        begin = np.minimum(np.arange(degree, dtype=np.int64) * width, extent)
        size = np.minimum(begin + width, extent) - begin
        index = np.arange(degree, dtype=np.int64)
        return Intervals.make(index, begin, np.zeros_like(begin), size, np.full(degree, width, dtype=np.int64))


@dataclass(frozen=True)
class Fused:
    """Several weights one after another along the dim, each cut by its own rule; an index stores its shares one after
    another. ``parts`` holds (extent, rule) pairs: ``((1024, Even()), (1024, Even()))`` for a fused gate and up."""

    parts: tuple[tuple[int, Rule], ...]

    def intervals(self, extent: int, degree: int) -> Intervals:
        if sum(size for size, _ in self.parts) != extent:
            raise LayoutError(f"fused parts of {[size for size, _ in self.parts]} do not add up to {extent}")
        width, begin = np.zeros(degree, dtype=np.int64), 0
        columns: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
        for size, rule in self.parts:
            found = rule.intervals(size, degree)
            columns.append((found.index, found.lo + begin, found.at + width[found.index], found.size))
            width, begin = width + found.width, begin + size
        index, lo, at, sizes = (np.concatenate([c[k] for c in columns]) for k in range(4))
        return Intervals.make(index, lo, at, sizes, width)


@dataclass(frozen=True)
class FusedHeads:
    """A fused query-key-value weight of ``heads`` query and ``kv_heads`` key and value heads, all of one width.

    ``stored`` is the order of the heads in a rank's storage, ``logical`` the order in the whole tensor, each one of
    ``"blocks"`` ([q; k; v] one after another) and ``"groups"`` (for every key head its query heads, key and value:
    [kv_heads, heads / kv_heads + 2, width]; with heads = kv_heads that is [heads, 3, width]). Query heads follow their
    key head. With fewer key heads than ranks each is held by several, its query heads dealt out among them.
    """

    heads: int
    kv_heads: int
    stored: str
    logical: str

    def intervals(self, extent: int, degree: int) -> Intervals:
        heads, groups = self.heads, self.kv_heads
        for order in (self.stored, self.logical):
            if order not in ("blocks", "groups"):
                raise LayoutError(f"order {order!r} of fused heads is not one of 'blocks', 'groups'")
        if groups < 1 or heads < 1 or heads % groups or extent % (heads + 2 * groups):
            raise LayoutError(
                f"{extent} for {heads} query and {groups} key heads: needs query heads that are a multiple of the key "
                f"heads and an extent that is a multiple of {heads + 2 * groups}"
            )
        per_group = heads // groups
        first, last = _shares(groups, degree)
        if groups >= degree:
            query, stop = first * per_group, last * per_group
        else:
            sharers = degree // groups
            begin, end = _shares(per_group, sharers)
            turn = np.arange(degree, dtype=np.int64) % sharers
            query, stop = first * per_group + begin[turn], first * per_group + end[turn]
        slots = [
            _head_slots(range(a, b), range(c, d), per_group, self.stored, self.logical, heads, groups)
            for a, b, c, d in zip(query.tolist(), stop.tolist(), first.tolist(), last.tolist(), strict=True)
        ]
        count = np.asarray([len(found) for found in slots], dtype=np.int64)
        index, position = count_out(count)
        width = extent // (heads + 2 * groups)
        each = np.full(len(index), width, dtype=np.int64)
        return Intervals.make(index, np.concatenate(slots) * width, position * width, each, count * width)


def _head_slots(
    query: range, key: range, per_group: int, stored: str, logical: str, heads: int, groups: int
) -> IntArray:
    """Places in the whole tensor, counted in heads, of one rank's heads in the order of its storage."""
    q, k = np.arange(query.start, query.stop, dtype=np.int64), np.arange(key.start, key.stop, dtype=np.int64)
    if logical == "blocks":
        places = (q, heads + k, heads + groups + k)
    else:
        home = k * (per_group + 2) + per_group
        places = (q + q // per_group * 2, home, home + 1)
    if stored == "blocks":
        return np.concatenate(places)
    kind = np.repeat([0, 1, 2], [len(q), len(k), len(k)])
    order = np.lexsort((kind, np.concatenate([q // per_group, k, k])))
    return np.concatenate(places)[order]


@dataclass(frozen=True)
class Listed:
    """Explicit units of each index in the order in which it stores them: the experts of a rank in any placement.

    ``units`` is the number of units along the dim (None: the extent, as in packed expert weights). A unit may be on
    several indices, and one that none names is held by nobody.
    """

    placement: tuple[tuple[int, ...], ...]
    units: int | None = None

    def intervals(self, extent: int, degree: int) -> Intervals:
        units = extent if self.units is None else self.units
        if len(self.placement) != degree:
            raise LayoutError(f"a placement over {len(self.placement)} ranks for an axis of {degree}; give {degree}")
        if units < 1 or extent % units:
            raise LayoutError(f"{extent} is no multiple of {units} units; give the number of experts it holds")
        for place, held in enumerate(self.placement):
            wrong = [unit for unit in held if not 0 <= unit < units]
            if wrong:
                raise LayoutError(f"index {place} holds unit {wrong[0]}; there are 0..{units - 1}")
            if len(set(held)) != len(held):
                twice = next(unit for unit in held if held.count(unit) > 1)
                raise LayoutError(f"index {place} holds unit {twice} twice; name it once")
        count = np.asarray([len(held) for held in self.placement], dtype=np.int64)
        index, position = count_out(count)
        unit = np.asarray([u for held in self.placement for u in held], dtype=np.int64).reshape(-1)
        size = extent // units
        each = np.full(len(index), size, dtype=np.int64)
        return Intervals.make(index, unit * size, position * size, each, count * size)


@dataclass(frozen=True)
class Only:
    """No dim is cut: the indices named hold the tensor whole, the others nothing (an expert's own weights)."""

    indices: tuple[int, ...]

    def held(self, degree: int) -> list[int]:
        """The indices, checked against the axis. Raises LayoutError."""
        wrong = [index for index in self.indices if not 0 <= index < degree]
        if wrong or not self.indices:
            said = f"index {wrong[0]}" if wrong else "no index"
            raise LayoutError(f"{said} is to hold the tensor on an axis of {degree}; give some of 0..{degree - 1}")
        return sorted(set(self.indices))


@dataclass(frozen=True)
class Cut:
    """How a weight is cut over one axis of a mesh, such as the ranks of a tensor-parallel replica.

    ``dim`` is the dim that is cut, None for a copy on every index (or on those of an ``Only`` rule). ``units`` is short
    for ``rule=Units(units)``: the number of equal indivisible blocks along the dim (attention heads); with fewer units
    than ranks each block is held by several (GQA). Neither: any element may be a border; widths differ by at most one.
    """

    dim: int | None
    units: int | None = None
    rule: Rule | Only | None = None

    def __post_init__(self) -> None:
        if self.units is not None and self.rule is not None:
            raise LayoutError(f"a cut by {self.units} units and by {self.rule}: give one of them")
        if self.rule is not None and (self.dim is None) != isinstance(self.rule, Only):
            raise LayoutError(f"a cut along dim {self.dim} by {self.rule}: only Only goes without a dim, and it must")

    def intervals(self, extent: int, degree: int) -> Intervals:
        """The dim of ``extent`` elements over ``degree`` indices. Raises LayoutError where they do not fit."""
        if self.dim is None or isinstance(self.rule, Only):
            raise LayoutError(f"{self} cuts no dim")
        rule: Rule = self.rule or (Even() if self.units is None else Units(self.units))
        return rule.intervals(extent, degree)

    @classmethod
    def experts(cls, dim: int, placement: Sequence[Sequence[int]], units: int | None = None) -> Cut:
        """Experts packed along ``dim``: ``placement[i]`` are those of index i of the axis, in storage order."""
        return cls(dim, rule=Listed(tuple(tuple(int(e) for e in held) for held in placement), units))

    @classmethod
    def only(cls, *indices: int) -> Cut:
        """Held whole by these indices of the axis and by no other: an expert's own tensor under expert parallelism."""
        return cls(None, rule=Only(tuple(indices)))

    @classmethod
    def fused(cls, dim: int, *parts: tuple[int, int | Rule | None]) -> Cut:
        """Weights one after another along ``dim``: (extent, units or rule or None for even) of each, as [gate; up]."""
        rules: list[tuple[int, Rule]] = []
        for size, rule in parts:
            rules.append((size, Even() if rule is None else Units(rule) if isinstance(rule, int) else rule))
        return cls(dim, rule=Fused(tuple(rules)))

    @classmethod
    def qkv_blocks(cls, dim: int, heads: int, kv_heads: int, logical: str = "blocks") -> Cut:
        """Fused QKV in the order [q; k; v]: a rank stores its query heads, then its key heads, then its value heads.

        ``logical`` is the order of the whole tensor where it is another one: ``"groups"``.
        """
        return cls(dim, rule=FusedHeads(heads, kv_heads, "blocks", logical))

    @classmethod
    def qkv_by_group(cls, dim: int, heads: int, kv_heads: int, logical: str = "groups") -> Cut:
        """Fused QKV interleaved per key-value group, [kv_heads, heads / kv_heads + 2, width].

        ``logical`` is the order of the whole tensor where it is another one: ``"blocks"``.
        """
        return cls(dim, rule=FusedHeads(heads, kv_heads, "groups", logical))

    @classmethod
    def qkv_by_head(cls, dim: int, heads: int, logical: str = "groups") -> Cut:
        """Fused QKV interleaved per head, [heads, 3, width]; ``logical`` as for ``qkv_by_group``."""
        return cls(dim, rule=FusedHeads(heads, heads, "groups", logical))


def nest(outer: Intervals, cut: Cut, degree: int) -> Intervals:
    """The storage of every index of ``outer`` cut again over ``degree`` indices: index o * degree + i, row-major."""
    width = np.zeros((outer.degree, degree), dtype=np.int64)
    columns = [(np.zeros(0, dtype=np.int64),) * 4]
    reach = int(outer.width.max(initial=0)) + 1  # storages of all indices laid end to end on one line
    held = (outer.index * reach + outer.at)[:, None]
    for extent in np.unique(outer.width).tolist():
        inner = cut.intervals(extent, degree)
        owners = np.flatnonzero(outer.width == extent)
        width[owners] = inner.width
        owner = np.repeat(owners, len(inner.index))
        row = np.tile(np.arange(len(inner.index), dtype=np.int64), len(owners))
        wanted = owner * reach + inner.lo[row]
        a, b, low, size = intersect(held, outer.size[:, None], wanted[:, None], inner.size[row][:, None])
        begin, row = low[:, 0], row[b]
        lo = outer.lo[a] + begin - held[a, 0]
        columns.append((owner[b] * degree + inner.index[row], lo, inner.at[row] + begin - wanted[b], size[:, 0]))
    index, lo, at, sizes = (np.concatenate([column[k] for column in columns]) for k in range(4))
    return Intervals.make(index, lo, at, sizes, width.reshape(-1))
