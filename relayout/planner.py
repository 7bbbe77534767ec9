"""Planner: layouts of the same tensors -> the segments that carry one into the other.

``plan_move(source, destination, topology)`` plans once per *class* (tensors of equal shape, dtypes and placements) and
keeps the class with the list of its tensors; a class's offsets count from each tensor's own storage, so instantiating
it for another tensor changes nothing but the tensor's index. Pure NumPy; every rank gets the same plan, or with
``rank`` only what that rank has to know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError, LayoutError
from relaymeter.relayout.classplan import ClassPlan, Rows, group_rows, label_names
from relaymeter.relayout.geometry import row_major_strides
from relaymeter.relayout.holders import Chosen, Preference, choose_holders
from relaymeter.relayout.layout import ITEMSIZE, IntArray, Layout, Placement, TensorSpec, refuse_cast
from relaymeter.relayout.own import estimate_load, own_choice
from relaymeter.relayout.pieces import Pieces, flatten, merge, split_at_neighbours
from relaymeter.relayout.topology import Topology

__all__ = ["ClassPlan", "MovePlan", "Rows", "RowsOf", "plan_move", "plan_rows"]

#: How a planner plans one class: spec (dtype of the destination), the placement in each source, that in the
#: destination, topology -> the rows, and why another planner stood in ("" where none did).
RowsOf = Callable[[TensorSpec, tuple[Placement, ...], Placement, Topology], tuple[Rows, str]]


@dataclass(frozen=True, eq=False)
class MovePlan:
    """A whole move, planned direct: the tensors in order, their classes, and the hash of what was planned from.

    ``tensors`` are the destination's specs and ``source_tensors`` the same tensors as the sources hold them (another
    dtype where a cast was asked for); ``sources`` counts the source layouts. ``planner`` names who planned, and
    ``fallbacks`` says of which tensors it was another one, and why. ``rank`` is the rank whose rows these are, None for
    all ranks'.
    """

    tensors: tuple[TensorSpec, ...]
    classes: tuple[ClassPlan, ...]
    topology: Topology
    input_hash: bytes
    source_tensors: tuple[TensorSpec, ...] = ()
    sources: int = 1
    planner: str = "classes"
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None

    def __post_init__(self) -> None:
        if not self.source_tensors:
            object.__setattr__(self, "source_tensors", self.tensors)

    @cached_property
    def group_start(self) -> IntArray:
        """First global group id of each class, and the total last (classes + 1)."""
        return np.concatenate([[0], np.cumsum([len(c.group) for c in self.classes])]).astype(np.int64)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What was made of the plan and does not depend on routes, kept for whoever needs it again; never changed."""
        return {}

    def converts(self, plan: ClassPlan) -> bool:
        """Whether the tensors of a class arrive in another dtype than they leave in."""
        return any(self.tensors[t].dtype != self.source_tensors[t].dtype for t in plan.tensors[:1].tolist())

    def label(self, index: int) -> str:
        """Names of a class's tensors, layer numbers as ``*``: ``model.layers.*.mlp.{gate_proj, up_proj}.weight``."""
        return label_names([self.tensors[int(t)].name for t in self.classes[index].tensors])


def plan_move(
    source: Layout | Sequence[Layout],
    destination: Layout,
    topology: Topology,
    *,
    cast: Mapping[str, str] | None = None,
    planner: str = "classes",
    rows_of: RowsOf | None = None,
    rank: int | None = None,
) -> MovePlan:
    """Plan the move of every tensor of ``destination`` out of one source layout or several that hold the same state.

    Holders are preferred in this order: the destination rank itself, its node, the order of the sources, then shared
    evenly. ``cast`` names the tensors that arrive in another dtype than they leave in, with that dtype; any other
    difference is refused. ``rank`` plans only what that rank sends and what its node receives. Raises LayoutError where
    the layouts contradict each other or a region has no holder, naming the tensor. Pure; the same on every rank.
    """
    sources = (source,) if isinstance(source, Layout) else tuple(source)
    if not sources:
        raise LayoutError(f"a move to layout {destination.name} needs at least one source layout")
    for layout in (*sources, destination):
        if layout.world_size != topology.world_size:
            raise LayoutError(
                f"layouts and topology disagree on the world: layout {layout.name} has {layout.world_size} ranks, the "
                f"topology {topology.world_size}"
            )
        layout.check()
    tensors = tuple(destination.specs.values())
    casts = dict(cast or {})
    if rank is not None and not 0 <= rank < topology.world_size:
        raise InputError(f"rank {rank} of {topology.world_size} ranks cannot plan its own rows")
    held = _source_specs(sources, tensors, casts, destination.name)
    digest = hashlib.sha256(repr((len(sources), topology.world_size, topology.node, topology.nic)).encode())
    classes: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(tensors):
        name = spec.name
        key: tuple[object, ...] = (
            spec.shape,
            spec.dtype,
            held[index].dtype,
            destination.placements[name].signature,
            *(layout.placements[name].signature if name in layout.specs else b"" for layout in sources),
        )
        classes.setdefault(key, []).append(index)
    for number, (key, members) in enumerate(classes.items()):
        digest.update(repr((number, key)).encode())
        digest.update("\n".join(f"{index} {tensors[index].name}" for index in members).encode())
    plans, fallbacks = [], {}
    for members in classes.values():
        spec = tensors[members[0]]
        places = tuple(layout.placements.get(spec.name, _nothing(spec)) for layout in sources)
        target = destination.placements[spec.name]
        _check_writable(destination.name, spec, target)
        load = None
        if rank is not None:
            rows, load = _own_rows(spec, places, target, topology, rank)
            reason = ""
        else:
            rows, reason = (rows_of or plan_rows)(spec, places, target, topology)
        if reason:
            fallbacks.update(dict.fromkeys((tensors[index].name for index in members), reason))
        steps = row_major_strides(spec.shape) if rows.lo.shape[1] == len(spec.shape) else (1,)
        plans.append(group_rows(members, spec.itemsize, rows, np.asarray(steps, dtype=np.int64), topology, load))
    return MovePlan(
        tensors=tensors,
        classes=tuple(plans),
        topology=topology,
        input_hash=digest.digest(),
        source_tensors=held,
        sources=len(sources),
        planner=planner,
        fallbacks=fallbacks,
        rank=rank,
    )


def plan_rows(
    spec: TensorSpec,
    sources: tuple[Placement, ...],
    destination: Placement,
    topology: Topology,
    *,
    prefer: Preference | None = None,
) -> tuple[Rows, str]:
    """Plan one class by intersecting the pieces. ``prefer`` replaces the order in which holders are preferred. Raises
    LayoutError where a rank needs what no source holds."""
    src, dst = _prepare(spec, sources, destination, topology)
    chosen = choose_holders(src, dst, topology.node_array, spec.itemsize, f"tensor {spec.name}", prefer=prefer)
    return _rows(src, dst, chosen), ""


def _own_rows(
    spec: TensorSpec, sources: tuple[Placement, ...], destination: Placement, topology: Topology, rank: int
) -> tuple[Rows, NDArray[np.float64]]:
    """Rows that reach the node of ``rank`` or leave ``rank``, and the load that one tensor puts on every rank."""
    src, dst = _prepare(spec, sources, destination, topology)
    chosen = own_choice(src, dst, topology.node_array, rank, spec.itemsize, f"tensor {spec.name}")
    return _rows(src, dst, chosen), estimate_load(src, dst, topology, spec.itemsize)


def _prepare(
    spec: TensorSpec, sources: tuple[Placement, ...], destination: Placement, topology: Topology
) -> tuple[Pieces, Pieces]:
    src, dst = merge(sources), merge((destination,))
    flat_src, flat_dst = flatten(src, spec.shape), flatten(dst, spec.shape)
    if flat_src is not None and flat_dst is not None:
        src, dst = flat_src, flat_dst
    return src, split_at_neighbours(dst, topology.node_array)


def _rows(src: Pieces, dst: Pieces, chosen: Chosen) -> Rows:
    return Rows(
        src_rank=src.rank[chosen.src],
        dst_rank=dst.rank[chosen.dst],
        src_space=src.space[chosen.src],
        lo=chosen.lo,
        shape=chosen.shape,
        src_offset=src.address(chosen.src, chosen.lo),
        src_stride=src.stride[chosen.src],
        dst_offset=dst.address(chosen.dst, chosen.lo),
        dst_stride=dst.stride[chosen.dst],
    )


def _nothing(spec: TensorSpec) -> Placement:
    """A placement of no pieces: of a tensor that a source does not have."""
    flat, wide = np.zeros(0, dtype=np.int64), np.zeros((0, len(spec.shape)), dtype=np.int64)
    return Placement(flat, wide, wide, flat, wide, {})


def _source_specs(
    sources: Sequence[Layout], tensors: Sequence[TensorSpec], casts: Mapping[str, str], destination: str
) -> tuple[TensorSpec, ...]:
    """Each tensor as the sources hold it. Raises LayoutError where they differ in more than a cast that was named."""
    names = {spec.name for spec in tensors}
    unknown = sorted(set(casts) - names)
    if unknown:
        raise LayoutError(f"cast names tensor {unknown[0]}, which does not move")
    found = []
    for spec in tensors:
        first: TensorSpec | None = None
        for layout in sources:
            have = layout.specs.get(spec.name)
            if have is None:
                continue
            if have.shape != spec.shape or (first is not None and have.dtype != first.dtype):
                other = spec if first is None or have.shape != spec.shape else first
                raise LayoutError(
                    f"tensor {spec.name}: {layout.name} has {have.dtype} {list(have.shape)}, another layout of the "
                    f"move {other.dtype} {list(other.shape)}"
                )
            first = first or have
        if first is None:
            where = " and ".join(layout.name for layout in sources)
            raise LayoutError(f"tensor {spec.name} is in the destination layout but not in layout {where}")
        asked = casts.get(spec.name, first.dtype)
        if asked not in ITEMSIZE:
            raise LayoutError(f"tensor {spec.name}: cast to {asked!r}, which is not one of {', '.join(ITEMSIZE)}")
        if asked != first.dtype and asked != spec.dtype:
            raise LayoutError(f"tensor {spec.name}: cast to {asked}, but layout {destination} has it as {spec.dtype}")
        refuse_cast(spec.name, first.dtype, spec.dtype)
        if asked != spec.dtype:
            raise LayoutError(
                f"tensor {spec.name} leaves as {first.dtype} and arrives as {spec.dtype}: name the cast "
                f"({spec.name} to {spec.dtype}) or give both sides one dtype"
            )
        found.append(first)
    return tuple(found)


def _check_writable(layout: str, spec: TensorSpec, place: Placement) -> None:
    """Raise LayoutError where two elements of one destination piece have one address."""
    order = np.argsort(place.stride, axis=1)
    stride = np.take_along_axis(place.stride, order, axis=1)
    shape = np.take_along_axis(place.shape, order, axis=1)
    reach = np.cumsum((shape - 1) * stride, axis=1) - (shape - 1) * stride
    folded = ((stride <= reach) & (shape > 1)).any(axis=1)
    if folded.any():
        row = int(folded.argmax())
        raise LayoutError(
            f"layout {layout}, tensor {spec.name} {list(spec.shape)}: strides {place.stride[row].tolist()} of rank "
            f"{int(place.rank[row])} put several elements on one address; a destination cannot hold them"
        )
