"""Proof of a plan: from its segments alone, that it fills a destination out of the sources, each element once.

``check_plan(plan, sources, destination)`` raises with tensor, rank and counts where it does not. It shares no step with
the planners: it only looks up where segments lie among the pieces of the layouts. Pure NumPy; any rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError, LayoutError
from relaymeter.relayout.classplan import ClassPlan
from relaymeter.relayout.geometry import intersect, subtract_boxes
from relaymeter.relayout.layout import Layout, Placement, TensorSpec
from relaymeter.relayout.pieces import Pieces, flatten, merge
from relaymeter.relayout.planner import MovePlan
from relaymeter.relayout.topology import Topology

__all__ = ["check_classes", "check_plan"]

IntArray = NDArray[np.int64]


def check_plan(
    plan: MovePlan, sources: Layout | Sequence[Layout], destination: Layout, topology: Topology | None = None
) -> None:
    """Prove that the plan's segments fill ``destination`` out of ``sources``: every element of every part that a rank
    holds is written exactly once, and read where a source holds that element.

    Raises InputError where the plan is of other tensors, ranks or sources, LayoutError where its segments do not fit,
    naming tensor, rank and counts. Any rank.
    """
    layouts = (sources,) if isinstance(sources, Layout) else tuple(sources)
    _check_inputs(plan, layouts, destination, topology)
    check_classes(plan.classes, plan.tensors)
    for number, found in enumerate(plan.classes):
        seen: set[tuple[bytes, ...]] = set()
        for tensor in found.tensors.tolist():
            spec = plan.tensors[tensor]
            target = destination.placements[spec.name]
            places = [layout.placements.get(spec.name, _none_of(target)) for layout in layouts]
            key = (target.signature, *(place.signature for place in places))
            if key not in seen:
                seen.add(key)
                _check_class(found, spec, f"plan, class {number}, tensor {spec.name}", places, target)


def _none_of(place: Placement) -> Placement:
    none = np.zeros(0, dtype=np.int64)
    return Placement(none, place.lo[:0], place.shape[:0], none, place.stride[:0], {})


def _check_inputs(plan: MovePlan, layouts: Sequence[Layout], destination: Layout, topology: Topology | None) -> None:
    if plan.rank is not None:
        raise InputError(f"this plan holds the rows of rank {plan.rank} only: plan for all ranks to check it")
    if len(layouts) != plan.sources:
        raise InputError(f"the plan reads {plan.sources} source layouts, {len(layouts)} are given")
    if topology is not None and topology != plan.topology:
        raise InputError("the plan is of another topology (nodes or NICs of the ranks differ): plan the move again")
    for layout in (*layouts, destination):
        if layout.world_size != plan.topology.world_size:
            raise InputError(
                f"the plan is of {plan.topology.world_size} ranks, layout {layout.name} of {layout.world_size}"
            )
        layout.check()
    planned = {spec.name: spec for spec in plan.tensors}
    for name in (*destination.specs, *planned):
        here = destination.specs.get(name)
        if planned.get(name) != here:
            raise InputError(
                f"tensor {name}: {_described(planned.get(name))} in the plan, {_described(here)} in layout "
                f"{destination.name}: plan the move again"
            )
    for held in plan.source_tensors:
        for layout in layouts:
            if layout.specs.get(held.name, held) != held:
                raise InputError(
                    f"tensor {held.name}: {_described(held)} at the sources of the plan, "
                    f"{_described(layout.specs[held.name])} in layout {layout.name}: plan the move again"
                )


def _described(spec: TensorSpec | None) -> str:
    return "not there" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _check_class(
    found: ClassPlan, spec: TensorSpec, where: str, places: Sequence[Placement], target: Placement
) -> None:
    src, dst = merge(places), merge((target,))
    if found.lo.shape[1] != len(spec.shape):
        flat_src, flat_dst = flatten(src, spec.shape), flatten(dst, spec.shape)
        if flat_src is None or flat_dst is None:
            raise LayoutError(f"{where}: planned as flat ranges, which the layouts do not hold: plan the move again")
        src, dst = flat_src, flat_dst
    full = np.asarray(spec.shape if found.lo.shape[1] == len(spec.shape) else (spec.numel,), dtype=np.int64)
    world = int(max(found.src_rank.max(initial=0), found.dst_rank.max(initial=0), src.rank.max(initial=0))) + 1
    reads = found.src_space * world + found.src_rank, src.space * world + src.rank
    hits = _hits(reads, found.lo, found.shape, found.src_offset, found.src_stride, src, full)
    _check_hits(found, hits, where, "reads", found.src_rank)
    writes = found.dst_rank, dst.rank
    hits = _hits(writes, found.lo, found.shape, found.dst_offset, found.dst_stride, dst, full)
    _check_hits(found, hits, where, "writes", found.dst_rank)
    _, piece, lo, size = hits
    written = np.zeros(len(dst), dtype=np.int64)
    np.add.at(written, piece, np.prod(size, axis=1, dtype=np.int64))
    boxes = _apart(piece, len(dst), lo, size, full)
    ia, ib, _, _ = intersect(*boxes, *boxes)
    wrong = np.concatenate([np.flatnonzero(written != dst.numel), piece[ia[ia < ib]]])
    if len(wrong):
        bad = int(wrong[0])
        mine = piece == bad
        count, rank = int(dst.numel[bad]), int(dst.rank[bad])
        missing = _left_open(dst.lo[bad], dst.shape[bad], lo[mine], size[mine])
        raise LayoutError(
            f"{where}: of the {count} elements that rank {rank} holds from {dst.lo[bad].tolist()} on, {missing} are "
            f"never written and {int(written[bad]) - count + missing} are written again"
        )


def _left_open(lo: IntArray, shape: IntArray, cut_lo: IntArray, cut_shape: IntArray) -> int:
    """Elements of one box (nd) that none of the others (n, nd) covers."""
    open_lo, open_shape = lo[None, :], shape[None, :]
    for one_lo, one_shape in zip(cut_lo, cut_shape, strict=True):
        begin = np.maximum(open_lo, one_lo)
        extent = np.minimum(open_lo + open_shape, one_lo + one_shape) - begin
        meets = (extent > 0).all(axis=1)
        _, rest_lo, rest_shape = subtract_boxes(open_lo[meets], open_shape[meets], begin[meets], extent[meets])
        open_lo = np.concatenate([open_lo[~meets], rest_lo])
        open_shape = np.concatenate([open_shape[~meets], rest_shape])
    return int(np.prod(open_shape, axis=1, dtype=np.int64).sum())


_Hits = tuple[IntArray, IntArray, IntArray, IntArray]


def _apart(owner: IntArray, owners: int, lo: IntArray, shape: IntArray, full: IntArray) -> tuple[IntArray, IntArray]:
    """Boxes (n, nd) of a tensor of shape ``full`` (nd) with a leading dim in which those of two owners (n; at most
    ``owners``) never meet.

    They are moved apart along every other dim too, so that a sweep along any of them passes over other owners' boxes.
    """
    if owners * int(full.max(initial=1)) < 1 << 62:
        lo = lo + owner[:, None] * full
    return np.column_stack([owner, lo]), np.column_stack([np.ones_like(owner), shape])


def _hits(
    owner: tuple[IntArray, IntArray],
    lo: IntArray,
    shape: IntArray,
    offset: IntArray,
    stride: IntArray,
    pieces: Pieces,
    full: IntArray,
) -> _Hits:
    """Where segments (n) lie in pieces of their owner at the very address that the piece gives: (segment, piece, lo,
    shape) of each common box. ``owner``: a number for each segment and each piece."""
    owners = 1 + max(int(numbers.max(initial=0)) for numbers in owner)
    mine = _apart(owner[0], owners, lo, shape, full)
    segment, piece, _, size = intersect(*mine, *_apart(owner[1], owners, pieces.lo, pieces.shape, full))
    at, size = np.maximum(lo[segment], pieces.lo[piece]), size[:, 1:]
    address = offset[segment] + ((at - lo[segment]) * stride[segment]).sum(axis=1)
    same = ((stride[segment] == pieces.stride[piece]) | (size == 1)).all(axis=1)
    same &= address == pieces.address(piece, at)
    return segment[same], piece[same], at[same], size[same]


def _check_hits(found: ClassPlan, hits: _Hits, where: str, verb: str, rank: IntArray) -> None:
    inside = np.zeros(len(found.lo), dtype=np.int64)
    np.add.at(inside, hits[0], np.prod(hits[3], axis=1, dtype=np.int64))
    count = np.prod(found.shape, axis=1, dtype=np.int64)
    if (inside != count).any():
        bad = int(np.flatnonzero(inside != count)[0])
        raise LayoutError(
            f"{where}: segment {bad} {verb} {int(count[bad])} elements from {found.lo[bad].tolist()} on at rank "
            f"{int(rank[bad])}, which holds {int(inside[bad])} of them there"
        )


def check_classes(plans: Sequence[ClassPlan], tensors: Sequence[TensorSpec]) -> None:
    """Raise InputError, naming the tensor, where one is in no class of a plan or in several."""
    listed = [plan.tensors for plan in plans]
    times = np.bincount(np.concatenate([*listed, np.zeros(0, dtype=np.int64)]), minlength=len(tensors))
    if (times != 1).any():
        bad = int(np.flatnonzero(times != 1)[0])
        raise InputError(f"plan: tensor {tensors[bad].name} is in {int(times[bad])} of its classes, not in one")
