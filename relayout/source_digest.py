"""Source digest: what every copy at the destination must come to, taken on the source layouts before a move.

``compare(expected_digest(sources, destination, rank, storages), digest_layout(destination, ..., replicas=True))`` holds
for every move: for destinations that leave elements out, for several source layouts (which must agree wherever they
hold the same elements), and for tensors that arrive in another dtype. It follows from the layouts alone: no plan is
asked who sends what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import DigestMismatch, InputError
from relaymeter.relayout.block_sums import add_boxes, block_count, block_sums, piece_box, word_box
from relaymeter.relayout.casts import convert
from relaymeter.relayout.device_sums import WordBox
from relaymeter.relayout.digest import DIGEST_VERSION, LayoutDigest, SharedSums, stretches
from relaymeter.relayout.geometry import intersect, subtract_boxes
from relaymeter.relayout.layout import IntArray, Layout, Placement, TensorSpec

__all__ = ["expected_digest"]

#: Disagreements that an error lists.
_SHOWN = 8


@dataclass(frozen=True, eq=False)
class _Region:
    """Disjoint boxes of a tensor: lo, shape (n, nd)."""

    lo: IntArray
    shape: IntArray

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, axis=1, dtype=np.int64).sum())

    @property
    def key(self) -> bytes:
        return self.lo.tobytes() + self.shape.tobytes()

    def meet(self, other: _Region) -> _Region:
        _, _, lo, shape = intersect(self.lo, self.shape, other.lo, other.shape)
        return _Region(lo, shape)

    def without(self, other: _Region) -> _Region:
        lo, shape = self.lo, self.shape
        while True:
            hit, _, cut_lo, cut_shape = intersect(lo, shape, other.lo, other.shape)
            if not len(hit):
                return _Region(lo, shape)
            box, first = np.unique(hit, return_index=True)
            _, rest_lo, rest_shape = subtract_boxes(lo[box], shape[box], cut_lo[first], cut_shape[first])
            keep = np.ones(len(lo), dtype=np.bool_)
            keep[box] = False
            lo, shape = np.concatenate([lo[keep], rest_lo]), np.concatenate([shape[keep], rest_shape])


@dataclass(frozen=True, eq=False)
class _Cover:
    """One cover of a source: ``number`` among those of its layout, its pieces, and the elements that it holds."""

    layout: int
    number: int
    pieces: IntArray
    region: _Region


@dataclass(frozen=True, eq=False)
class _Share:
    """Elements of one cover that count in a sum; region None stands for all of them."""

    cover: _Cover
    region: _Region | None


@dataclass(eq=False)
class _Sums:
    """The sums to take of the tensors of one class.

    ``slots`` hold what is added up, as it arrives (True) or as it leaves; ``expected`` is the slot of each cover of the
    destination; ``checks`` are pairs of slots that must agree, with the covers they stand for.
    """

    slots: list[tuple[list[_Share], bool]] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    checks: list[tuple[int, int, _Cover, _Cover]] = field(default_factory=list)
    _known: dict[tuple[object, ...], int] = field(default_factory=dict)

    def slot(self, shares: list[_Share], arriving: bool) -> int:
        """The number of the slot of these shares, the same for the same ones."""
        key = (arriving, *((id(s.cover), s.region.key if s.region is not None else b"all") for s in shares))
        if key not in self._known:
            self._known[key] = len(self.slots)
            self.slots.append((shares, arriving))
        return self._known[key]


def expected_digest(
    sources: Layout | Sequence[Layout],
    destination: Layout,
    rank: int,
    storages: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]],
    *,
    group: dist.ProcessGroup | None = None,
) -> LayoutDigest:
    """The sums that each cover of every tensor of ``destination`` must have after a move out of ``sources``.

    Collective over ``group``, before the move; every rank gets the whole result. ``storages`` maps tensor names to the
    1-D storages that ``rank`` holds, one mapping for each source layout. All copies of an element, in one source layout
    or in several, are read: raises DigestMismatch on every rank, naming layout, tensor and range, where two differ.
    Raises InputError where the sources do not hold all that the destination needs.
    """
    layouts = [sources] if isinstance(sources, Layout) else list(sources)
    held = [storages] if isinstance(storages, Mapping) else list(storages)
    if len(layouts) != len(held):
        raise InputError(f"{len(layouts)} source layouts need as many mappings of storages, got {len(held)}")
    known: dict[tuple[object, ...], _Sums] = {}
    sums_of: dict[str, _Sums] = {}
    counts: list[int] = []
    for name, spec in destination.specs.items():
        if spec.numel:
            sums_of[name] = _sums_of_class(layouts, destination, name, known)
            counts += [block_count(_spec(layouts, spec, arriving)) for _, arriving in sums_of[name].slots]
    devices = (storage.device for storages_of in held for storage in storages_of.values())
    with SharedSums(counts, next(devices, torch.device("cpu")), group) as shared:
        slots = iter(shared.parts)
        boxes: list[WordBox] = []
        for name, sums in sums_of.items():
            boxes += _word_boxes(layouts, destination.specs[name], rank, held, sums, [next(slots) for _ in sums.slots])
            if layouts[0].specs[name].dtype != destination.specs[name].dtype:  # what was converted is not kept
                add_boxes(boxes)
                boxes = []
        add_boxes(boxes)
    found = iter(shared.totals)
    complete = {name: [next(found) for _ in sums.slots] for name, sums in sums_of.items()}
    _refuse_disagreement(layouts, destination, sums_of, complete)
    expected = {
        name: tuple(complete[name][slot] for slot in sums_of[name].expected) if spec.numel else ()
        for name, spec in destination.specs.items()
    }
    return LayoutDigest(destination, DIGEST_VERSION, expected, expected=True)


def _spec(layouts: Sequence[Layout], spec: TensorSpec, arriving: bool) -> TensorSpec:
    """``spec`` of the destination, or the same tensor as the sources hold it."""
    return spec if arriving else next(layout.specs[spec.name] for layout in layouts if spec.name in layout.specs)


def _boxes(place: Placement, pieces: Sequence[int]) -> _Region:
    rows = np.asarray(pieces, dtype=np.int64)
    return _Region(place.lo[rows], place.shape[rows])


def _sums_of_class(
    layouts: Sequence[Layout], destination: Layout, name: str, known: dict[tuple[object, ...], _Sums]
) -> _Sums:
    """What to add up for tensor ``name``; worked out once for all tensors of its shape, dtypes and placements."""
    spec, target = destination.specs[name], destination.placements[name]
    holders = [(k, layout) for k, layout in enumerate(layouts) if name in layout.specs]
    if not holders:
        raise InputError(f"tensor {name} is in layout {destination.name} but in none of the source layouts")
    key = (
        spec.shape,
        spec.dtype,
        target.signature,
        *((k, layout.specs[name].dtype, layout.placements[name].signature) for k, layout in holders),
    )
    if key not in known:
        casts = holders[0][1].specs[name].dtype != spec.dtype
        known[key] = _plan_sums([(k, layout.placements[name]) for k, layout in holders], spec, target, casts)
    return known[key]


def _plan_sums(sources: Sequence[tuple[int, Placement]], spec: TensorSpec, target: Placement, casts: bool) -> _Sums:
    sums = _Sums()
    fresh: list[tuple[_Cover, _Region]] = []
    for layout, place in sources:
        for number, pieces in enumerate(place.covers):
            cover = _Cover(layout, number, np.asarray(pieces, dtype=np.int64), _boxes(place, pieces))
            left = cover.region
            for first, region in fresh:
                both = left.meet(region)
                if both.numel:
                    pair = [sums.slot([_share(each, both)], not casts) for each in (first, cover)]
                    sums.checks.append((pair[0], pair[1], first, cover))
                    left = left.without(region)
            if left.numel:
                fresh.append((cover, left))
    for pieces in target.covers:
        wanted = _boxes(target, pieces)
        shares, held = [], 0
        for cover, region in fresh:
            both = region if wanted.numel == spec.numel else region.meet(wanted)
            if both.numel:
                shares.append(_share(cover, both))
                held += both.numel
        if held != wanted.numel:
            raise InputError(
                f"tensor {spec.name} {list(spec.shape)}: the sources hold {held} of the {wanted.numel} elements that "
                "a copy at the destination needs"
            )
        sums.expected.append(sums.slot(shares, True))
    return sums


def _share(cover: _Cover, region: _Region) -> _Share:
    return _Share(cover, None if region.numel == cover.region.numel else region)


def _word_boxes(
    layouts: Sequence[Layout],
    spec: TensorSpec,
    rank: int,
    held: Sequence[Mapping[str, torch.Tensor]],
    sums: _Sums,
    views: Sequence[torch.Tensor],
) -> list[WordBox]:
    """What ``rank`` holds of one tensor, to be added to the slots' ``views``; on a CPU whole pieces are added here, so
    that each is read once."""
    boxes: list[WordBox] = []
    ready: dict[tuple[int, bool], torch.Tensor] = {}
    whole: dict[tuple[int, int, bool], torch.Tensor] = {}
    for (shares, arriving), view in zip(sums.slots, views, strict=True):
        seen_as = _spec(layouts, spec, arriving)
        for share in shares:
            layout = share.cover.layout
            place = layouts[layout].placements[spec.name]
            mine = share.cover.pieces[place.rank[share.cover.pieces] == rank]
            if not len(mine):
                continue
            if (layout, arriving) not in ready:
                storage = held[layout].get(spec.name)
                if storage is None:
                    raise InputError(
                        f"tensor {spec.name}: rank {rank} holds a piece of it in layout {layouts[layout].name} but "
                        "handed in no storage"
                    )
                ready[layout, arriving] = convert(storage, getattr(torch, seen_as.dtype))
            storage = ready[layout, arriving]
            if share.region is None:
                for piece in mine.tolist():
                    if storage.device.type == "cuda":
                        boxes.append(piece_box(view, seen_as, place, piece, storage))
                        continue
                    key = (layout, piece, arriving)
                    if key not in whole:
                        whole[key] = block_sums(seen_as, place, [piece], storage)
                    view += whole[key]
                continue
            which, _, lo, shape = intersect(place.lo[mine], place.shape[mine], share.region.lo, share.region.shape)
            rows = mine[which]
            offset = place.offset[rows] + ((lo - place.lo[rows]) * place.stride[rows]).sum(axis=1)
            for k, row in enumerate(rows.tolist()):
                box = (lo[k].tolist(), shape[k].tolist())
                boxes.append(word_box(view, seen_as, *box, storage, int(offset[k]), place.stride[row].tolist()))
    return boxes


def _refuse_disagreement(
    layouts: Sequence[Layout],
    destination: Layout,
    sums_of: Mapping[str, _Sums],
    complete: Mapping[str, Sequence[torch.Tensor]],
) -> None:
    """Raise DigestMismatch where two copies in the sources differ, on every rank alike."""
    texts: list[str] = []
    for name, sums in sums_of.items():
        for one, two, first, cover in sums.checks:
            bad = torch.nonzero(complete[name][one] != complete[name][two]).view(-1).tolist()
            if not bad:
                continue
            spec = _spec(layouts, destination.specs[name], sums.slots[one][1])
            ranges = stretches(spec, bad)
            start, stop, _ = ranges[0]
            more = f" and {len(ranges) - 1} more ranges" if len(ranges) > 1 else ""
            texts.append(
                f"tensor {name}: {_name(layouts, name, cover)} differs from {_name(layouts, name, first)} in elements "
                f"[{start}, {stop}){more}"
            )
    if texts:
        more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        raise DigestMismatch(
            "nothing was moved, because the sources do not hold the same state: " + "; ".join(texts[:_SHOWN]) + more
        )


def _name(layouts: Sequence[Layout], name: str, cover: _Cover) -> str:
    place = layouts[cover.layout].placements[name]
    ranks = ", ".join(str(rank) for rank in sorted({int(rank) for rank in place.rank[cover.pieces]}))
    copy = f", copy {cover.number}" if len(place.covers) > 1 else ""
    return f"layout {layouts[cover.layout].name}{copy} (ranks {ranks})"
