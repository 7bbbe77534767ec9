"""Layouts put together and taken apart: pipeline stages, copies on other ranks, the part that some ranks hold.

``join_layouts([stage_0, stage_1], "pipeline")``; ``restrict_layout(layout, ranks=[3])`` is what refills a lost rank 3.
Pure, any rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from relaymeter.errors import LayoutError
from relaymeter.relayout.layout import IntArray, Layout, Placement, TensorSpec
from relaymeter.relayout.meshes import make_placement

__all__ = ["check_storage", "join_layouts", "rank_bytes", "renumber_layout", "restrict_layout", "stage_specs"]


def stage_specs(specs: Mapping[str, TensorSpec], stages: Sequence[Iterable[str]]) -> tuple[dict[str, TensorSpec], ...]:
    """The tensors of each pipeline stage, in model order. A tied tensor may stand on several stages.

    Raises LayoutError for a name that is no tensor, or a tensor on no stage.
    """
    wanted = [set(names) for names in stages]
    every = set[str]().union(*wanted)
    for number, names in enumerate(wanted):
        odd = sorted(names - set(specs))
        if odd:
            raise LayoutError(f"stage {number} names {odd[0]}, which is no tensor of the model")
    missing = [tensor for tensor in specs if tensor not in every]
    if missing:
        raise LayoutError(f"tensor {missing[0]} is on none of {len(wanted)} stages (and {len(missing) - 1} more)")
    return tuple({tensor: spec for tensor, spec in specs.items() if tensor in names} for names in wanted)


def join_layouts(layouts: Sequence[Layout], name: str = "joined", aliases: Mapping[str, str] | None = None) -> Layout:
    """One layout of several over one world. A tensor in several of them is held in a copy by each, on ranks of its own.

    ``aliases`` adds ties: a tensor that some layout holds under a tied name (the head of a last stage) becomes a copy
    of the one it is tied to. Raises LayoutError naming tensor and rank where layouts contradict each other.
    """
    if not layouts:
        raise LayoutError(f"layout {name}: nothing to join; give at least one layout")
    worlds = {layout.world_size for layout in layouts}
    if len(worlds) > 1:
        raise LayoutError(f"layout {name}: layouts of {sorted(worlds)} ranks; build all over one world")
    ties = _ties(layouts, aliases or {}, name)
    specs: dict[str, TensorSpec] = {}
    parts: dict[str, list[tuple[int, Placement]]] = {}
    for number, layout in enumerate(layouts):
        for tensor, spec in layout.specs.items():
            target = ties.get(tensor, tensor)
            known = specs.setdefault(target, spec if target == tensor else replace(spec, name=target))
            if (known.shape, known.dtype) != (spec.shape, spec.dtype):
                raise LayoutError(
                    f"layout {name}: tensor {target} is {known.dtype} {list(known.shape)}, as {tensor} in layout "
                    f"{layout.name} it is {spec.dtype} {list(spec.shape)}"
                )
            parts.setdefault(target, []).append((number, layout.placements[tensor]))
    made: dict[tuple[int, ...], Placement] = {}
    placements: dict[str, Placement] = {}
    for tensor, found in parts.items():
        key = tuple(id(place) for _, place in found)
        if key not in made:
            made[key] = _side_by_side(tensor, [(layouts[n].name, place) for n, place in found], name)
        placements[tensor] = made[key]
    joined = Layout(
        name, layouts[0].world_size, specs, placements, ties, partial=any(layout.partial for layout in layouts)
    )
    joined.check()
    return joined


def _ties(layouts: Sequence[Layout], aliases: Mapping[str, str], name: str) -> dict[str, str]:
    """All ties together. Raises LayoutError where two differ, or a layout's own tensor is tied elsewhere unasked."""
    ties: dict[str, str] = {}
    for given in (*(layout.aliases for layout in layouts), aliases):
        for alias, target in given.items():
            if ties.setdefault(alias, target) != target:
                raise LayoutError(f"layout {name}: {alias} is tied to {ties[alias]} and to {target}")
    for layout in layouts:
        for alias in ties:
            if alias in layout.specs and alias not in aliases:
                raise LayoutError(
                    f"layout {name}: {alias} is tied to {ties[alias]} in one layout and a tensor of its own in layout "
                    f"{layout.name}; give aliases={{{alias!r}: {ties[alias]!r}}} if both hold one tensor"
                )
    return ties


def _side_by_side(tensor: str, parts: Sequence[tuple[str, Placement]], name: str) -> Placement:
    if len(parts) == 1:
        return parts[0][1]
    storage: dict[int, int] = {}
    owner: dict[int, str] = {}
    copies: list[IntArray] = []
    count = 0
    for label, place in parts:
        for rank, elements in place.storage.items():
            if rank in owner:
                raise LayoutError(
                    f"layout {name}: tensor {tensor} is on rank {rank} in layout {owner[rank]} and in layout {label}; "
                    "a rank has one storage for a tensor"
                )
            owner[rank], storage[rank] = label, elements
        copies.append(place.copies + count)
        count += int(place.copies.max(initial=-1)) + 1
    places = [place for _, place in parts]
    return make_placement(
        np.concatenate([place.rank for place in places]),
        np.concatenate([place.lo for place in places]),
        np.concatenate([place.shape for place in places]),
        np.concatenate([place.offset for place in places]),
        np.concatenate([place.stride for place in places]),
        storage,
        np.concatenate(copies),
    )


def restrict_layout(
    layout: Layout, ranks: Iterable[int] | None = None, names: Iterable[str] | None = None, name: str | None = None
) -> Layout:
    """What ``ranks`` hold of the tensors ``names`` (None: all), as a partial layout: the refill of lost ranks, or what
    the survivors still have. Tensors of which these ranks have no storage are left out.

    Raises LayoutError for a rank outside the world or a name the layout does not have.
    """
    keep = None if ranks is None else np.unique(np.asarray(list(ranks), dtype=np.int64))
    if keep is not None and len(keep) and (keep[0] < 0 or keep[-1] >= layout.world_size):
        wrong = int(keep[0] if keep[0] < 0 else keep[-1])
        raise LayoutError(f"layout {layout.name}: rank {wrong} is outside the world of {layout.world_size}")
    wanted = set(layout.specs) if names is None else {layout.aliases.get(tensor, tensor) for tensor in names}
    odd = sorted(wanted - set(layout.specs))
    if odd:
        raise LayoutError(f"layout {layout.name}: there is no tensor {odd[0]} to keep")
    made: dict[int, Placement] = {}
    placements: dict[str, Placement] = {}
    for tensor, place in layout.placements.items():
        if tensor not in wanted:
            continue
        if id(place) not in made:
            made[id(place)] = place if keep is None else _held_by(place, keep)
        if made[id(place)].storage:
            placements[tensor] = made[id(place)]
    specs = {tensor: layout.specs[tensor] for tensor in layout.specs if tensor in placements}
    ties = {alias: target for alias, target in layout.aliases.items() if target in specs}
    partial = layout.partial or keep is not None
    return Layout(name or layout.name, layout.world_size, specs, placements, ties, partial=partial)


def _held_by(place: Placement, ranks: IntArray) -> Placement:
    rows = np.flatnonzero(np.isin(place.rank, ranks))
    kept = set(ranks.tolist())
    storage = {rank: elements for rank, elements in place.storage.items() if rank in kept}
    copy = np.unique(place.copies[rows], return_inverse=True)[1].reshape(-1).astype(np.int64)
    return make_placement(
        place.rank[rows], place.lo[rows], place.shape[rows], place.offset[rows], place.stride[rows], storage, copy
    )


def renumber_layout(layout: Layout, ranks: Sequence[int]) -> Layout:
    """The same placements among the ``ranks`` of a group: rank ``ranks[i]`` of the world becomes ``i``.

    Raises LayoutError where the layout holds something on a rank outside the group. Pure, any rank.
    """
    at = np.full(layout.world_size, -1, dtype=np.int64)
    at[list(ranks)] = np.arange(len(ranks))
    known: dict[bytes, Placement] = {}
    placements = {}
    for name, place in layout.placements.items():
        if place.signature not in known:
            holders = sorted({*place.ranks, *(rank for rank, kept in place.storage.items() if kept)})
            outside = [rank for rank in holders if at[rank] < 0]
            if outside:
                raise LayoutError(
                    f"layout {layout.name}, tensor {name}: rank {outside[0]} holds a part of it, but the group is "
                    f"ranks {list(ranks)}: make the group of all ranks that hold a part"
                )
            order = np.argsort(at[place.rank], kind="stable")
            storage = {int(at[rank]): kept for rank, kept in place.storage.items() if at[rank] >= 0}
            known[place.signature] = Placement(
                at[place.rank][order],
                place.lo[order],
                place.shape[order],
                place.offset[order],
                place.stride[order],
                storage,
                None if place.copy is None else place.copy[order],
            )
        placements[name] = known[place.signature]
    return replace(layout, world_size=len(ranks), placements=placements)


def rank_bytes(layout: Layout) -> IntArray:
    """Bytes that each rank holds, padding included (world_size): a plan reports the largest, not the mean."""
    total = np.zeros(layout.world_size, dtype=np.int64)
    weight: dict[int, int] = {}
    places = {id(place): place for place in layout.placements.values()}
    for tensor, spec in layout.specs.items():
        kind = id(layout.placements[tensor])
        weight[kind] = weight.get(kind, 0) + spec.itemsize
    for kind, itemsize in weight.items():
        held = places[kind].storage
        ranks = np.fromiter(held.keys(), dtype=np.int64, count=len(held))
        total[ranks] += np.fromiter(held.values(), dtype=np.int64, count=len(held)) * itemsize
    return total


def check_storage(layout: Layout, held: Mapping[int, Mapping[str, int]]) -> None:
    """Compare what ranks say they hold with the layout: ``held`` maps a rank to the elements of each of its storages.

    Raises LayoutError naming layout, tensor, rank and both counts. Pure, any rank.
    """
    for rank, sizes in held.items():
        for tensor, spec in layout.specs.items():
            have, want = sizes.get(tensor, 0), layout.placements[tensor].storage.get(rank, 0)
            if have != want:
                raise LayoutError(
                    f"layout {layout.name}, tensor {tensor} {list(spec.shape)}: rank {rank} holds {have} elements, the "
                    f"layout gives it {want}: describe how the tensor is cut, or load the whole of it"
                )
