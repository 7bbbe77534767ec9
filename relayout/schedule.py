"""Schedule: which segment travels in which round. Frozen data; what executors run and what prices are made of.

``build_schedule(plan, topology, route, bucket_bytes)`` cuts the tensors into buckets, picks balanced hubs, and lets
stage k of bucket b travel in round b + k - 1, together with the stages before it of the buckets after. How many stages
there are is the routes' own affair. Pure NumPy; the same on every rank.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.relayout.classplan import occurrences
from relaymeter.relayout.hubs import HubRequest, assign_hubs
from relaymeter.relayout.layout import TensorSpec
from relaymeter.relayout.planner import ClassPlan, MovePlan
from relaymeter.relayout.round_loads import round_loads
from relaymeter.relayout.routes import ROUTES, effective_codes, route_of, transfers
from relaymeter.relayout.segments import RoundLoads, SegmentTable
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transfers import Transfers

__all__ = ["DEFAULT_BUCKET_BYTES", "Schedule", "build_schedule"]

IntArray = NDArray[np.int64]

#: Bytes that a bucket may send from, or bring to, any one rank when moved direct.
DEFAULT_BUCKET_BYTES = 8 << 20
#: Buckets that take in tensors at a time.
_OPEN_BUCKETS = 8
#: Shares of bands that are added, one after the other, until none of a tensor's bands passes the bucket.
_BAND_SHARES = (512, 64, 8, 1)
_VERSION = "relaymeter-schedule-2"
_EXECUTORS = ("send-recv", "all-to-all")
#: Most stages of the routes that a rank may plan from its own rows.
_OWN_STAGES = 2


@dataclass(frozen=True, eq=False)
class _Unit:
    """One band of a plan class: the same transfers for ``tensor`` (u) in ``bucket`` (u), with ``hub`` slots (u, g).

    ``turn``: which variant of their routes these tensors take.
    """

    plan: ClassPlan
    route: NDArray[np.int8]
    turn: int
    tensor: IntArray
    bucket: IntArray
    hub: NDArray[np.int16]

    @cached_property
    def tables(self) -> tuple[Transfers, ...]:
        """Transfers of the routes that this unit uses, in order of route code."""
        return tuple(transfers(self.plan, code, self.route == code, self.turn) for code in self.codes)

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """The routes that this unit uses, ascending."""
        return tuple(np.unique(self.route).tolist())

    @property
    def stages(self) -> int:
        """Rounds that a bucket of this unit takes."""
        return max((route_of(c).stages(self.plan, self.route == c, self.turn) for c in self.codes), default=1)

    def active(self, table: Transfers) -> NDArray[np.bool_]:
        """Which rows happen for which tensor (u, n)."""
        found: NDArray[np.bool_] = np.broadcast_to(True, (len(self.tensor), len(table.hub)))
        for group, hub in ((table.group, table.hub), (table.prior_group, table.prior_hub)):
            if (hub >= 0).any():
                found = found & ((hub < 0) | (self.hub[:, group] == hub))
        return found


@dataclass(frozen=True, eq=False)
class Schedule:
    """A move cut into rounds: ``rounds`` exchanges, as many as ``buckets``, plus the stages that any block has beyond
    the first."""

    plan: MovePlan
    topology: Topology
    bucket_bytes: int
    buckets: int
    rounds: int
    units: tuple[_Unit, ...]
    input_hash: bytes

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """TensorSpec of every tensor as it arrives, indexed by SegmentTable.tensor."""
        return self.plan.tensors

    @property
    def source_tensors(self) -> tuple[TensorSpec, ...]:
        """TensorSpec of every tensor as it leaves: of another dtype where a cast was asked for."""
        return self.plan.source_tensors

    @property
    def sources(self) -> int:
        """Source layouts of the move."""
        return self.plan.sources

    def segments_for(self, rank: int) -> SegmentTable:
        """Rows that ``rank`` sends or receives, in canonical order. Raises InputError where they were not planned."""
        if self.plan.rank not in (None, rank):
            raise InputError(f"this plan holds the rows of rank {self.plan.rank}, not of rank {rank}")
        return self._segments(rank)

    @cached_property
    def all_segments(self) -> SegmentTable:
        """Rows of all ranks, in canonical order. For tests and small clusters."""
        return self._segments(None)

    def _segments(self, rank: int | None) -> SegmentTable:
        found: list[tuple[SegmentTable, IntArray]] = []
        for number, unit in enumerate(self.units):
            for code, table in enumerate(unit.tables):
                order = np.arange(len(table.group))
                if rank is not None:
                    mine = (table.src_rank == rank) | (table.dst_rank == rank)
                    table, order = table.take(mine), order[mine]
                which, row = np.nonzero(unit.active(table))
                stage = table.stage[row]
                rows = SegmentTable(
                    tensor=unit.tensor[which],
                    round=unit.bucket[which] + stage - 1,
                    stage=stage,
                    src_rank=table.src_rank[row],
                    dst_rank=table.dst_rank[row],
                    src_space=table.src_space[row],
                    src_offset=table.src_offset[row],
                    dst_offset=table.dst_offset[row],
                    shape=table.shape[row],
                    src_stride=table.src_stride[row],
                    dst_stride=table.dst_stride[row],
                )
                found.append((rows, (np.int64(number) * len(ROUTES) + code) * (1 << 40) + order[row]))
        if not found:
            return SegmentTable.empty()
        width = max((rows.shape.shape[1] for rows, _ in found), default=1)
        merged = SegmentTable.concat([_widen(rows, width) for rows, _ in found])
        last = np.concatenate([order for _, order in found])
        keys = (last, merged.tensor, merged.stage, merged.dst_rank, merged.src_rank, merged.round)
        return merged.take(np.lexsort(keys))

    def loads(self, executor: str) -> RoundLoads:
        """What the schedule asks of the cluster under ``executor`` (``"send-recv"`` or ``"all-to-all"``)."""
        if executor not in _EXECUTORS:
            raise InputError(f"executor {executor!r} is not one of {', '.join(_EXECUTORS)}")
        if executor not in self._loads:
            self._loads[executor] = round_loads(self.units, self.plan, self.topology.world_size, self.rounds, executor)
        return self._loads[executor]

    @cached_property
    def _loads(self) -> dict[str, RoundLoads]:
        return {}

    @cached_property
    def bytes_cross_node(self) -> int:
        """Payload bytes that the schedule sends between nodes, padding left out."""
        return self._planned_bytes[0]

    @cached_property
    def bytes_in_node(self) -> int:
        """Payload bytes sent between ranks of one node, copies within a rank left out."""
        return self._planned_bytes[1]

    @cached_property
    def bytes_total(self) -> int:
        """Bytes of the destination layout that the move writes, every replica counted."""
        plan = self.plan
        return sum(int((c.elements * c.fanout).sum()) * c.itemsize * len(c.tensors) for c in plan.classes)

    @cached_property
    def _planned_bytes(self) -> tuple[int, int]:
        node = self.topology.node_array
        far = near = 0
        for unit in self.units:
            for table in unit.tables:
                size = np.prod(table.shape, axis=1, dtype=np.int64) * unit.plan.itemsize
                times = unit.active(table).sum(axis=0)
                crosses = node[table.src_rank] != node[table.dst_rank]
                far += int((size * times)[crosses].sum())
                near += int((size * times)[~crosses & (table.src_rank != table.dst_rank)].sum())
        return far, near

    def messages(self, executor: str) -> int:
        """Messages that all ranks together send under ``executor``."""
        return int(self.loads(executor).messages.sum())

    def peak_bytes(self, executor: str) -> IntArray:
        """Predicted bytes of message buffers on each rank (world) in its fullest round, beyond the two layouts."""
        loads, world = self.loads(executor), self.topology.world_size
        held = np.zeros((self.rounds, world), dtype=np.int64)
        away = loads.src != loads.dst
        for rank, column in ((loads.src, loads.pack_bytes), (loads.dst, loads.unpack_bytes)):
            key = (loads.round * world + rank)[away]
            total = np.bincount(key, weights=column[away], minlength=held.size)
            held += total.astype(np.int64).reshape(held.shape)
        peak: IntArray = held.max(axis=0, initial=0)
        return peak


def _widen(rows: SegmentTable, width: int) -> SegmentTable:
    missing = width - rows.shape.shape[1]
    if not missing:
        return rows
    pad = np.zeros((len(rows), missing), dtype=np.int64)
    shape, src, dst = (
        np.concatenate([p, a], axis=1)
        for p, a in ((pad + 1, rows.shape), (pad, rows.src_stride), (pad, rows.dst_stride))
    )
    flat = (rows.tensor, rows.round, rows.stage, rows.src_rank, rows.dst_rank, rows.src_space, rows.src_offset)
    return SegmentTable(*flat, rows.dst_offset, shape, src, dst)


def build_schedule(
    plan: MovePlan, topology: Topology, route: NDArray[np.int8], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Schedule:
    """Cut ``plan`` into buckets and rounds with the route of every group (codes of ``routes.ROUTES``, in the order of
    ``routes.block_groups``; groups without a choice go direct whatever their code).

    ``bucket_bytes`` bounds what a bucket sends from or brings to any one rank when direct; a tensor larger than that is
    cut into bands. Raises InputError on a route array of the wrong length or an unknown code. Pure.
    """
    effective = effective_codes(plan, topology, route)
    if not isinstance(bucket_bytes, int | np.integer) or bucket_bytes < 1:
        raise InputError(f"bucket of {bucket_bytes} bytes: give a whole number, at least 1")
    codes = [effective[int(begin) : int(end)] for begin, end in itertools.pairwise(plan.group_start)]
    key = ("buckets", int(bucket_bytes), topology)
    if key not in plan.memo:
        plan.memo[key] = _cut_into_buckets(plan, topology, int(bucket_bytes))
    bands, members, buckets = plan.memo[key]
    units: list[_Unit] = []
    turned = np.zeros(buckets, dtype=np.int64)
    for index in range(len(plan.classes)):
        for part, band in enumerate(bands[index]):
            tensor, bucket = members[index, part]
            units += _units(band, codes[index][band.group], tensor, bucket, turned)
    stages = max((unit.stages for unit in units), default=1)
    if plan.rank is not None:  # of its own rows alone a rank cannot tell whether others relay
        stages = max(stages, _OWN_STAGES)
    _balance_hubs(units, topology, buckets + stages - 1, plan.rank is not None)
    digest = hashlib.sha256(repr((_VERSION, bucket_bytes, topology.node, topology.nic)).encode() + plan.input_hash)
    for code in codes if plan.rank is None else []:  # of its own rows alone a rank sees other groups than the next
        digest.update(code.tobytes())
    return Schedule(plan, topology, bucket_bytes, buckets, buckets + stages - 1, tuple(units), digest.digest())


def _cut_into_buckets(
    plan: MovePlan, topology: Topology, bucket_bytes: int
) -> tuple[list[list[ClassPlan]], dict[tuple[int, int], tuple[IntArray, IntArray]], int]:
    """The bands of each class; the tensors of each (class, band) and their buckets; the number of buckets. Whatever the
    routes."""
    bands: list[list[ClassPlan]] = []
    loads: list[list[NDArray[np.float64]]] = []
    class_of = np.zeros(len(plan.tensors), dtype=np.int64)
    for index, found in enumerate(plan.classes):
        class_of[found.tensors] = index
        cut, load = _cut_to_fit(found, topology, bucket_bytes)
        bands.append(cut)
        loads.append(load)
    return bands, *_fill_buckets(class_of, loads, bucket_bytes, 2 * topology.world_size)


def _units(
    band: ClassPlan, route: NDArray[np.int8], tensor: IntArray, bucket: IntArray, turned: IntArray
) -> Iterator[_Unit]:
    """A unit for each variant of the routes of a band, which the tensors of one bucket take in turn.

    Each bucket begins anew, so that stages of different buckets that share a round do not meet on one node.
    ``turned`` (buckets): bands so far that took turns; those of this one are added.
    """
    turns = max((route_of(c).turns(band, route == c) for c in np.unique(route).tolist()), default=1)
    turn_of = np.zeros(len(tensor), dtype=np.int64)
    if turns > 1:
        turn_of = (turned[bucket] + occurrences(bucket[:, None])) % turns
        turned += np.bincount(bucket, minlength=len(turned))
    for turn in range(turns):
        mine = np.flatnonzero(turn_of == turn)
        if len(mine):
            hub = np.zeros((len(mine), len(band.group)), dtype=np.int16)
            yield _Unit(band, route, turn, tensor[mine], bucket[mine], hub)


def _rank_loads(plan: ClassPlan, topology: Topology) -> NDArray[np.float64]:
    """Bytes that one tensor of the class sends from each rank, then brings to each rank (2 * world)."""
    if plan.load is not None:
        return plan.load
    world = topology.world_size
    size = np.prod(plan.shape, axis=1, dtype=np.int64) * float(plan.itemsize)
    size = np.where(plan.src_rank == plan.dst_rank, 0.0, size)
    out = np.bincount(plan.src_rank, weights=size, minlength=world)
    return np.concatenate([out, np.bincount(plan.dst_rank, weights=size, minlength=world)])


def _cut_to_fit(
    plan: ClassPlan, topology: Topology, bucket_bytes: int
) -> tuple[list[ClassPlan], list[NDArray[np.float64]]]:
    """The class in the fewest bands none of which passes ``bucket_bytes`` on any rank, and the load of each band.

    Bands begin on even borders, so that the first number that could do may leave one a little too large.
    """
    fewest = max(1, -(-int(_rank_loads(plan, topology).max(initial=0)) // bucket_bytes))
    for parts in (fewest, *(fewest + 1 + fewest // share for share in _BAND_SHARES)):
        bands = [plan.cut(parts, part) for part in range(parts)]
        loads = [_rank_loads(band, topology) for band in bands]
        if max(load.max(initial=0) for load in loads) <= bucket_bytes:
            break
    return bands, loads


def _fill_buckets(
    class_of: IntArray, loads: list[list[NDArray[np.float64]]], bucket_bytes: int, width: int
) -> tuple[dict[tuple[int, int], tuple[IntArray, IntArray]], int]:
    """Put bands of tensors, in order, into the first of the open buckets where no rank's load passes ``bucket_bytes``.

    Several are open, so that tensors that go one way and later ones that come back share their rounds. Gives for each
    (class, band) its tensors and their buckets, ascending.
    """
    placed: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    earliest: dict[tuple[int, int], int] = {}  # a band that once found a bucket too full always will
    filled = [np.zeros(width)]
    for tensor, index in enumerate(class_of.tolist()):
        for part, load in enumerate(loads[index]):
            key = (index, part)
            bucket = max(earliest.get(key, 0), len(filled) - _OPEN_BUCKETS)
            while bucket < len(filled):
                room = filled[bucket]
                if (room + load).max(initial=0) <= bucket_bytes or not room.any():
                    break
                bucket += 1
            if bucket == len(filled):
                filled.append(np.zeros(width))
            filled[bucket] += load
            earliest[key] = bucket
            tensors, buckets = placed.setdefault(key, ([], []))
            tensors.append(tensor)
            buckets.append(bucket)
    arrays = {key: (np.asarray(t, dtype=np.int64), np.asarray(b, dtype=np.int64)) for key, (t, b) in placed.items()}
    return arrays, len(filled)


def _balance_hubs(units: list[_Unit], topology: Topology, rounds: int, own: bool) -> None:
    """Choose the hub of every group that has one so that the bytes that each round brings are balanced over the NICs
    of the node.

    Where a rank planned its ``own`` rows only, the members of a group are hub in turn instead, by tensor and holder.
    """
    through = [unit for unit in units if any(route_of(code).hubs for code in unit.codes)]
    if not through:
        return
    if own:
        for unit in through:
            unit.hub[:] = (unit.tensor[:, None] + unit.plan.group_src[None, :]) % unit.plan.fanout[None, :]
        return
    world, node = topology.world_size, topology.node_array
    start = np.zeros((rounds, world))
    requests: list[HubRequest] = []
    rows: list[IntArray] = []
    for unit in units:
        for code, table in zip(unit.codes, unit.tables, strict=True):
            if route_of(code).hubs:
                continue
            far = (table.stage == 1) & (node[table.src_rank] != node[table.dst_rank])
            size = np.prod(table.shape[far], axis=1, dtype=np.int64) * float(unit.plan.itemsize)
            per_rank = np.bincount(table.dst_rank[far], weights=size, minlength=world)
            np.add.at(start, unit.bucket, per_rank[None, :])
    for number, unit in enumerate(through):
        alike: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
        for code in unit.codes:
            route = route_of(code)
            if not route.hubs:
                continue
            arrives = route.arrives(unit.plan, unit.route == code, unit.turn)
            for row in np.flatnonzero(unit.route == code).tolist():
                size_of = int(unit.plan.elements[row]) * unit.plan.itemsize
                key = (tuple(unit.plan.members(row).tolist()), size_of, int(arrives[row]) - 1)
                alike.setdefault(key, []).append(row)
        for (members, nbytes, delay), found in alike.items():
            requests.append(HubRequest(unit=number, groups=len(found), members=members, bytes=nbytes, delay=delay))
            rows.append(np.asarray(found, dtype=np.int64))
    slots = assign_hubs(requests, [unit.bucket for unit in through], start, topology)
    for request, found_rows, chosen in zip(requests, rows, slots, strict=True):
        through[request.unit].hub[:, found_rows] = chosen
