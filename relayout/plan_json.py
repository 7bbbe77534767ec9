"""Plans as JSON: written, read back strictly, and proved against the layouts that are really there.

``plan_to_dict(plan)`` is ready for ``json.dumps``; ``plan_from_dict(entry)`` gives the plan back or says which entry is
wrong; ``check_plan`` (see ``plan_check``) proves it against layouts. Pure NumPy; any rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.relayout.classplan import ClassPlan, Rows, group_rows
from relaymeter.relayout.geometry import row_major_strides
from relaymeter.relayout.layout import ITEMSIZE, TensorSpec
from relaymeter.relayout.plan_check import check_classes, check_plan
from relaymeter.relayout.planner import MovePlan
from relaymeter.relayout.segments import FROM_SOURCE, source_space
from relaymeter.relayout.topology import Topology

__all__ = ["PLAN_VERSION", "check_plan", "plan_from_dict", "plan_to_dict"]

IntArray = NDArray[np.int64]

#: ``schema_version`` of the entries below. A reader refuses another one.
PLAN_VERSION = 1

_FLAT = ("src_rank", "dst_rank", "src_space", "src_offset", "dst_offset")
_WIDE = ("lo", "shape", "src_stride", "dst_stride")
_KEYS = ("schema_version", "planner", "sources", "topology", "input_hash", "tensors", "fallbacks", "classes")
_LARGEST = (1 << 63) - 1


def plan_to_dict(plan: MovePlan) -> dict[str, Any]:
    """The plan as plain lists, numbers and texts.

    ``tensors``: [name, shape, dtype, dtype at the source] each; ``fallbacks``: tensor names by reason; ``classes``: the
    tensors of each by number, ``dims`` of its regions, and its segments column by column, a column of regions or
    strides as one list for each dim. Raises InputError for a plan that holds one rank's rows only.
    """
    if plan.rank is not None:
        raise InputError(f"this plan holds the rows of rank {plan.rank} only: plan for all ranks to write it down")
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.fallbacks.items():
        reasons.setdefault(reason, []).append(name)
    return {
        "schema_version": PLAN_VERSION,
        "planner": plan.planner,
        "sources": plan.sources,
        "topology": plan.topology.to_dict(),
        "input_hash": plan.input_hash.hex(),
        "tensors": [
            [spec.name, list(spec.shape), spec.dtype, held.dtype]
            for spec, held in zip(plan.tensors, plan.source_tensors, strict=True)
        ],
        "fallbacks": reasons,
        "classes": [_class_to_dict(found) for found in plan.classes],
    }


def _class_to_dict(found: ClassPlan) -> dict[str, Any]:
    columns: dict[str, Any] = {name: getattr(found, name).tolist() for name in _FLAT}
    columns.update({name: getattr(found, name).T.tolist() for name in _WIDE})
    return {"tensors": found.tensors.tolist(), "dims": found.lo.shape[1], "segments": columns}


def plan_from_dict(entry: object) -> MovePlan:
    """The plan that ``plan_to_dict`` wrote. Raises InputError naming the entry that is wrong, and how."""
    top = _members(entry, _KEYS, "plan")
    if top["schema_version"] != PLAN_VERSION or isinstance(top["schema_version"], bool):
        raise InputError(
            f"plan: schema_version {top['schema_version']!r}, this version reads {PLAN_VERSION}: plan the move again"
        )
    planner, sources = top["planner"], top["sources"]
    if not isinstance(planner, str):
        raise InputError(f"plan, planner: {planner!r} is no name")
    if type(sources) is not int or sources < 1:
        raise InputError(f"plan, sources: {sources!r} is no number of source layouts")
    topology = _topology(top["topology"])
    tensors, held = _tensors(top["tensors"])
    classes = _sequence(top["classes"], "plan, classes")
    plans = tuple(
        _class_from_dict(one, f"plan, class {number}", tensors, held, sources, topology)
        for number, one in enumerate(classes)
    )
    check_classes(plans, tensors)
    return MovePlan(
        tensors=tensors,
        classes=plans,
        topology=topology,
        input_hash=_hash(top["input_hash"]),
        source_tensors=held,
        sources=sources,
        planner=planner,
        fallbacks=_fallbacks(top["fallbacks"], {spec.name for spec in tensors}),
    )


def _members(entry: object, keys: Sequence[str], where: str) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: {_short(entry)} is no object with {', '.join(keys)}")
    wrong = [key for key in (*keys, *entry) if (key in keys) != (key in entry)]
    if wrong:
        raise InputError(f"{where}: {wrong[0]!r} is {'missing' if wrong[0] in keys else 'no entry that it has'}")
    return entry


def _sequence(value: object, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{where}: {_short(value)} is no list")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _integers(value: object, where: str, each: str) -> IntArray:
    """A list of whole numbers as an array. ``each`` names one of them in what is raised."""
    values = _sequence(value, where)
    if set(map(type, values)) - {int}:
        at = next(k for k, one in enumerate(values) if type(one) is not int)
        raise InputError(f"{where}, {each} {at}: {_short(values[at])} is no whole number")
    if values and not -_LARGEST <= min(values) <= max(values) <= _LARGEST:
        at = next(k for k, one in enumerate(values) if not -_LARGEST <= one <= _LARGEST)
        raise InputError(f"{where}, {each} {at}: {values[at]} does not fit 64 bits")
    return np.asarray(values, dtype=np.int64)


def _topology(entry: object) -> Topology:
    where = "plan, topology"
    columns = _members(entry, ("node", "nic"), where)
    node, nic = (_integers(columns[key], f"{where}, {key}", "rank").tolist() for key in ("node", "nic"))
    try:
        return Topology(node=tuple(node), nic=tuple(nic))
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _hash(value: object) -> bytes:
    if not isinstance(value, str) or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise InputError(f"plan, input_hash: {_short(value)} is not 64 hexadecimal digits")
    return bytes.fromhex(value)


def _tensors(value: object) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    found, held, seen = [], [], set()
    for number, entry in enumerate(_sequence(value, "plan, tensors")):
        where = f"plan, tensor {number}"
        if len(_sequence(entry, where)) != 4:
            raise InputError(f"{where}: {_short(entry)} is not [name, shape, dtype, dtype at the source]")
        name, shape, *dtypes = entry
        if not isinstance(name, str) or name in seen:
            raise InputError(f"{where}: {_short(name)} is {'there twice' if isinstance(name, str) else 'no name'}")
        seen.add(name)
        sizes = _integers(shape, f"{where} ({name}), shape", "dim").tolist()
        if min(sizes, default=0) < 0 or math.prod(sizes) > _LARGEST:
            raise InputError(f"{where} ({name}): shape {sizes} is no shape of a tensor")
        for dtype in dtypes:
            if not isinstance(dtype, str) or dtype not in ITEMSIZE:
                raise InputError(f"{where} ({name}): dtype {_short(dtype)} is not one of {', '.join(ITEMSIZE)}")
        found.append(TensorSpec(name, tuple(sizes), dtypes[0]))
        held.append(TensorSpec(name, tuple(sizes), dtypes[1]))
    return tuple(found), tuple(held)


def _fallbacks(value: object, names: set[str]) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InputError(f"plan, fallbacks: {_short(value)} is no object with tensor names by reason")
    found: dict[str, str] = {}
    for reason, listed in value.items():
        for name in _sequence(listed, f"plan, fallbacks, {_short(reason)}"):
            if not isinstance(name, str) or name not in names or name in found:
                raise InputError(f"plan, fallbacks: {_short(name)} is no tensor of the plan, or there twice")
            found[name] = reason
    return found


def _class_from_dict(
    entry: object,
    where: str,
    tensors: Sequence[TensorSpec],
    held: Sequence[TensorSpec],
    sources: int,
    topology: Topology,
) -> ClassPlan:
    members = _members(entry, ("tensors", "dims", "segments"), where)
    numbers = _integers(members["tensors"], f"{where}, tensors", "entry")
    if not len(numbers) or numbers.min() < 0 or numbers.max() >= len(tensors):
        raise InputError(f"{where}, tensors: {_short(numbers.tolist())} are not numbers of the plan's {len(tensors)}")
    spec, there = tensors[int(numbers[0])], held[int(numbers[0])]
    for number in numbers.tolist():
        other = (tensors[number].shape, tensors[number].dtype, held[number].dtype)
        if other != (spec.shape, spec.dtype, there.dtype):
            raise InputError(f"{where}: {tensors[number].name} and {spec.name} differ in shape or dtype")
    dims = members["dims"]
    if type(dims) is not int or dims not in (1, len(spec.shape)):
        raise InputError(f"{where}, dims: {_short(dims)} fits no regions of a tensor of shape {list(spec.shape)}")
    full = spec.shape if dims == len(spec.shape) else (spec.numel,)
    rows = _rows(members["segments"], where, dims)
    _check_rows(rows, where, full, sources, topology.world_size)
    steps = np.asarray(row_major_strides(full), dtype=np.int64)
    return group_rows(numbers.tolist(), spec.itemsize, rows, steps, topology)


def _rows(entry: object, where: str, dims: int) -> Rows:
    columns = _members(entry, (*_FLAT, *_WIDE), f"{where}, segments")
    found: dict[str, IntArray] = {name: _integers(columns[name], f"{where}, {name}", "segment") for name in _FLAT}
    count = len(found["src_rank"])
    for name in _WIDE:
        lists = _sequence(columns[name], f"{where}, {name}")
        if len(lists) != dims:
            raise InputError(f"{where}, {name}: {len(lists)} lists for {dims} dims")
        parts = [_integers(one, f"{where}, {name}, dim {dim}", "segment") for dim, one in enumerate(lists)]
        for dim, part in enumerate(parts):
            if len(part) != count:
                raise InputError(f"{where}, {name}, dim {dim}: {len(part)} entries for {count} segments")
        found[name] = np.stack(parts, axis=1) if parts else np.zeros((count, 0), dtype=np.int64)
    for name in _FLAT:
        if len(found[name]) != count:
            raise InputError(f"{where}, {name}: {len(found[name])} entries for {count} segments")
    return Rows(**found)


def _check_rows(rows: Rows, where: str, full: Sequence[int], sources: int, world: int) -> None:
    """Raise InputError, naming the first such segment, where a value lies outside what it can be."""
    last = source_space(sources - 1)
    no_source = (rows.src_space != FROM_SOURCE) & ((rows.src_space < source_space(1)) | (rows.src_space > last))
    outside = (rows.lo < 0) | (rows.shape < 1) | (rows.shape > full) | (rows.lo > np.asarray(full) - rows.shape)
    for name, wrong, expected in (
        ("src_rank", (rows.src_rank < 0) | (rows.src_rank >= world), f"outside the world of {world} ranks"),
        ("dst_rank", (rows.dst_rank < 0) | (rows.dst_rank >= world), f"outside the world of {world} ranks"),
        ("src_space", no_source, f"no storage of the plan's {sources} source layouts"),
        ("lo", outside.any(axis=1), "with shape {shape} no region of a tensor of shape {full}"),
        ("src_offset", rows.src_offset < 0, "negative"),
        ("dst_offset", rows.dst_offset < 0, "negative"),
        ("src_stride", (rows.src_stride < 0).any(axis=1), "negative"),
        ("dst_stride", (rows.dst_stride < 0).any(axis=1), "negative"),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            said = expected.format(shape=rows.shape[row].tolist(), full=list(full))
            raise InputError(f"{where}, segment {row}: {name} {getattr(rows, name)[row].tolist()} is {said}")
