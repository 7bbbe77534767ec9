"""Training state from one live engine into another: masters, moments, steps, groups, scheduler, scaler, counters.

    move = TrainingStateMove(source_engine, destination_engine)     # every rank of the world; None where there is none
    move.prepare()                                                  # while training goes on; else run does it
    timing = move.run(prove=True)
    move.verify().raise_for_mismatch()

The engines are DeepSpeed's, of any ZeRO stage, tensor- or expert-parallel degree and ranks, over the same world; they
train the same model by the same optimizer. Nothing whole is gathered on any rank, no file is written, the source is not
changed. The destination is usable once ``verify`` found nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import DigestMismatch, InputError, PlanDisagreement
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.digest import DigestReport, LayoutDigest, Mismatch, compare, digest_layout
from relaymeter.relayout.execute import Hooks, Mover, MoveTiming
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.memory import PeakMemory
from relaymeter.relayout.plain_state import field_differences
from relaymeter.relayout.planner import MovePlan, plan_move
from relaymeter.relayout.release import filled
from relaymeter.relayout.routes import ROUTES
from relaymeter.relayout.schedule import DEFAULT_BUCKET_BYTES, Schedule, build_schedule
from relaymeter.relayout.source_digest import expected_digest
from relaymeter.relayout.spare_states import SpareStates, missing_bytes
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.traffic import Traffic
from relaymeter.relayout.training_fields import read_fields, write_fields
from relaymeter.relayout.training_match import expected_fields
from relaymeter.relayout.training_state import (
    check_ready,
    check_writable,
    only_tensors,
    read_together,
    refresh_from_masters,
    refuse_other_model,
    training_storages,
    zero_filled,
)
from relaymeter.relayout.transport import Waiter, connect_all

__all__ = ["StateMoveReport", "StateMoveTiming", "TrainingStateMove"]

#: Fields that ``verify`` compares, in this order.
_COMPARED = ("engine", "groups", "per_weight", "per_parameter", "scheduler", "scaler", "autocast")


@dataclass(frozen=True)
class StateMoveTiming:
    """One move on one rank, in seconds and bytes, from the moment when all ranks had come.

    ``prepare_s``: reading the source's fields, and what ``TrainingStateMove.prepare`` does where that was not called or
    a storage has moved since; ``move_s``: the exchange; ``fields_s``: writing the fields; ``refresh_s``: making the
    low-precision weights; ``digest_s``: digest of the source, if asked for, which ``total_s`` leaves out.
    ``peak_bytes``: most memory held beyond both engines as they were before the move was prepared, None where unknown;
    ``allocated_bytes`` of it stay, as the destination's optimizer state.
    """

    prepare_s: float
    move_s: float
    fields_s: float
    refresh_s: float
    digest_s: float
    total_s: float
    peak_bytes: int | None
    allocated_bytes: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class StateMoveReport:
    """What ``verify`` found: digests of copies of tensors that passed, of all, and fields that differ."""

    passed: int
    total: int
    mismatches: tuple[Mismatch, ...] = ()
    fields: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every bit and every field arrived."""
        return self.passed == self.total and not self.fields

    @property
    def mismatch(self) -> str | None:
        """The first wrong bits: state, parameter, ranks and elements."""
        return str(self.mismatches[0]) if self.mismatches else None

    def raise_for_mismatch(self) -> None:
        """Raise DigestMismatch naming states, parameters and fields, unless everything arrived."""
        if self.ok:
            return
        found = [str(mismatch) for mismatch in self.mismatches] + [f"field {text}" for text in self.fields]
        more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
        raise DigestMismatch(
            f"the training state did not arrive whole ({self.total - self.passed} of {self.total} digests, "
            f"{len(self.fields)} fields differ): {'; '.join(found[:8])}{more}"
        )


class TrainingStateMove:
    """The way of a training state from one engine into another, planned once and run as often as wanted.

    Every rank of the group makes one and calls each method, together with all others.
    """

    def __init__(
        self,
        source_engine: Any | None,
        destination_engine: Any | None,
        *,
        topology: Topology | None = None,
        planner: str = "classes",
        route: str = "direct",
        executor: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
        time_limit_s: float = 120.0,
        heartbeat: Heartbeat | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        """Read both engines and plan; nothing is written.

        ``group``: the ranks that take part, by default the world; all that hold one of the engines have to be among
        them. ``topology``: of the group's ranks, by default one node. ``planner``: ``classes`` or ``affine``;
        ``route``: one of ``routes.ROUTES``; ``executor``: by default that of the backend. Raises on every rank of the
        group, before anything moves: InputError where an engine's state cannot be read (offloaded, inside an
        accumulation window), or the two do not train the same model by the same optimizer; PlanDisagreement where the
        ranks of an engine differ.
        """
        self._group, self._rank = group, dist.get_rank(group)
        if self._rank < 0:
            raise InputError(f"rank {dist.get_rank()} is not in the group of the move: let its members alone call this")
        members = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
        self._members = tuple(members)
        self._source, self._destination = source_engine, destination_engine
        self._limit_s, self._heartbeat, self._hooks = time_limit_s, heartbeat, hooks
        self._waiter = Waiter()
        self._topology = Topology.grid(1, len(self._members)) if topology is None else topology
        self._executor = executor or ("all-to-all" if dist.get_backend(group) == "nccl" else "send-recv")
        if not time_limit_s > 0:
            raise InputError(f"time_limit_s is {time_limit_s!r}: give seconds, more than 0")
        if route not in ROUTES:
            raise InputError(f"route {route!r} is not one of {', '.join(ROUTES)}")
        if planner not in ("classes", "affine"):
            raise InputError(f"planner {planner!r} is not one of classes, affine")
        with self._together("reading the engines") as ranks:
            connect_all(group, deadline=ranks.deadline, poll=ranks.poll)
            same = source_engine is not None and source_engine is destination_engine
            ranks.refuse(InputError("source and destination are one engine: give two") if same else None)
            self._state = read_together(source_engine, "source", ranks, time_limit_s=time_limit_s)
            self._target = read_together(destination_engine, "destination", ranks, time_limit_s=time_limit_s)
        refuse_other_model(self._state, self._target)
        self._wanted = expected_fields(self._state.fields, self._target.fields)
        moved = self._state.fields["per_weight"]
        self._layouts = self._state.joined(moved), self._target.joined(moved)
        begin = time.perf_counter()
        self.schedule = self._plan(planner, route, bucket_bytes)
        self.plan_s = time.perf_counter() - begin
        self._missing_bytes = missing_bytes(destination_engine, self._wanted)
        self._mover: Mover | None = None
        self._places: Sequence[int] = ()
        self._allocated = 0
        self._spare = SpareStates()
        self._written: Mapping[str, Any] = {}
        self._expected: LayoutDigest | None = None
        self._ran = False

    @contextmanager
    def _together(self, what: str, consequence: str = "and nothing was moved") -> Iterator[Assembly]:
        """A stretch of collectives. A refusal, which every rank raises, leaves the group in order."""
        refusal: Exception | None = None
        with guarded(
            what,
            rank=self._rank,
            time_limit_s=self._limit_s,
            heartbeat=self._heartbeat,
            group=self._group,
            consequence=consequence,
        ) as deadline:
            try:
                poll = None if self._heartbeat is None else self._heartbeat.poll
                yield Assembly(self._group, deadline, poll, self._waiter)
            except (InputError, PlanDisagreement, DigestMismatch) as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def _plan(self, planner: str, route: str, bucket_bytes: int) -> Schedule:
        source, destination = self._layouts
        plan: MovePlan
        if planner == "affine":
            from relaymeter.relayout.affine import plan_move_affine

            plan = plan_move_affine(source, destination, self._topology)
        else:
            plan = plan_move(source, destination, self._topology)
        codes = np.full(int(plan.group_start[-1]), ROUTES.index(route), dtype=np.int8)
        return build_schedule(plan, self._topology, codes, bucket_bytes)

    @cached_property
    def peak_predicted_bytes(self) -> int:
        """Most memory that this rank will hold beyond both engines as they were when this move was made: message
        buffers, and what the destination's optimizer lacked."""
        traffic = Traffic(self.schedule, self._rank, len(self._members), self._executor)
        return self._missing_bytes + traffic.buffer_bytes

    @property
    def states(self) -> tuple[str, ...]:
        """What moves: ``master``, the optimizer's states of one value per weight, ``frozen`` where there is any."""
        return tuple(dict.fromkeys(name.partition(" ")[0] for name in self._layouts[1].specs))

    @property
    def executor(self) -> str:
        return self._executor

    @property
    def bytes_total(self) -> int:
        """Bytes that the destination's ranks come to hold, each copy counted."""
        return self.schedule.bytes_total

    @cached_property
    def bytes_in_rank(self) -> int:
        """Bytes that are copied within a rank."""
        total = 0
        for found in self.schedule.plan.classes:
            size = np.prod(found.shape, axis=1, dtype=np.int64) * found.itemsize * len(found.tensors)
            total += int(size[found.src_rank == found.dst_rank].sum())
        return total

    @property
    def bytes_in_node(self) -> int:
        return self.schedule.bytes_in_node

    @property
    def bytes_cross_node(self) -> int:
        return self.schedule.bytes_cross_node

    @property
    def messages(self) -> int:
        return self.schedule.messages(self._executor)

    @property
    def fallbacks(self) -> Mapping[str, str]:
        """Tensors that the affine planner could not express, and why."""
        return self.schedule.plan.fallbacks

    def prepare(self) -> int:
        """Allocate what the destination's optimizer lacks, compile the move and agree on it, so that ``run``, in which
        training stands still, finds all that ready. Collective; returns the bytes allocated on this rank.

        Not needed: ``run`` does what was not done. Neither engine is changed: what the destination's optimizer lacks is
        kept aside until ``run``, so that it may train, be saved or be a source meanwhile. Raises as ``run``.
        """
        with self._together("preparing the move") as ranks:
            mover = self._ready(ranks)
        mover.agree()
        return self._allocated

    def run(self, *, prove: bool = False) -> StateMoveTiming:
        """Move everything once, then the fields, then refresh the low-precision weights. Collective.

        ``prove`` takes the source's digest before, for ``verify``. Raises InputError where an engine's state has
        changed in kind since the plan (a first step, a window begun): make a new move. RankLost and MoveTimeout as
        ``Mover.run``; the destination is not usable then.
        """
        broken = "and the destination is not usable"
        with self._together("reading the source's fields") as ranks:
            ranks.refuse(None)  # so that no rank's time counts another's delay
            begin = time.perf_counter()
            mover = self._ready(ranks)
            allocated, self._allocated = self._allocated, 0
        prepared = time.perf_counter()
        with self._together("the digest of the source") as ranks:
            self._expected = self._digest_source(ranks) if prove else None
        proved = time.perf_counter()
        self._spare.attach(self._destination)
        zero_filled(self._destination, self._wanted)
        self._written = self._wanted
        moved: MoveTiming = mover.run()
        arrived = time.perf_counter()
        with self._together("the refresh of the weights", broken) as ranks, PeakMemory(self._device) as refreshing:
            if self._destination is not None:
                ranks.attempt(lambda: write_fields(self._destination, self._written))
            else:
                ranks.refuse(None)
            written = time.perf_counter()
            if self._destination is not None:
                refresh_from_masters(self._destination)
                filled(self._destination)
            ranks.refuse(None)
        end = time.perf_counter()
        self._ran = True
        peaks = [moved.peak_bytes, refreshing.bytes]
        return StateMoveTiming(
            prepare_s=prepared - begin,
            move_s=arrived - proved,
            fields_s=written - arrived,
            refresh_s=end - written,
            digest_s=proved - prepared,
            total_s=end - begin - (proved - prepared),
            peak_bytes=None if None in peaks else allocated + max(peak for peak in peaks if peak is not None),
            allocated_bytes=allocated,
            sent_bytes=moved.sent_bytes,
            received_bytes=moved.received_bytes,
        )

    @property
    def _device(self) -> torch.device:
        engine = self._destination if self._destination is not None else self._source
        return torch.device("cpu") if engine is None else torch.device(engine.device)

    def _ready(self, ranks: Assembly) -> Mover:
        """The mover, with the source's fields as they are now: read anew, and compiled anew where nothing was compiled
        yet or a storage has another address on any rank."""
        fields: dict[str, Any] | None = None
        refusal: Exception | None = None
        changed = True
        try:
            fields = self._read()
            if self._mover is not None and self._spare.suffice(self._destination, self._wanted):
                changed = self._places_of(*self._storages()) != self._places
        except Exception as error:
            refusal = error
        what = "the source engine's fields"
        found, told = ranks.announce_beside(None if refusal else fields, what, [changed], refusal)
        if found is None or found["per_weight"] != self._state.fields["per_weight"]:
            raise InputError(
                "the source's optimizer holds other states than when this move was planned: make a new "
                "TrainingStateMove"
            )
        self._state = dataclasses.replace(self._state, fields=found)
        self._wanted = expected_fields(found, self._target.fields)
        return self._compile(ranks) if self._mover is None or told.any() else self._mover

    def _read(self) -> dict[str, Any] | None:
        """The source's fields; None where this rank has no source. Raises InputError where an engine is not ready."""
        side, fields = "source", None
        try:
            if self._source is not None:
                check_ready(self._source)
                fields = read_fields(self._source)
            side = "destination"
            if self._destination is not None:
                check_writable(self._destination)
        except InputError as error:
            raise InputError(f"{side}: {error}") from error
        return fields

    def _storages(self) -> list[dict[str, torch.Tensor]]:
        names = list(self._layouts[1].specs)
        source = training_storages(self._source, names)
        return [source, training_storages(self._destination, names, self._spare)]

    @staticmethod
    def _places_of(source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]) -> list[int]:
        return [storage.data_ptr() for held in (source, destination) for storage in held.values()]

    def _compile(self, ranks: Assembly) -> Mover:
        """Make the mover over both engines' storages, and spare ones for what the destination's optimizer lacks."""

        def storages() -> list[dict[str, torch.Tensor]]:
            self._allocated += self._spare.allocate(self._destination, self._wanted)
            return self._storages()

        source, destination = ranks.attempt(storages)
        self._places = self._places_of(source, destination)
        self._mover = Mover(
            self.schedule,
            self._rank,
            source,
            destination,
            self._executor,
            group=self._group,
            time_limit_s=self._limit_s,
            heartbeat=self._heartbeat,
            hooks=self._hooks,
        )
        return self._mover

    def _proof(self) -> tuple[Layout, Layout]:
        """Layouts of source and destination with the low-precision weights beside the states."""
        moved = self._state.fields["per_weight"]
        source, destination = (state.joined(moved, weights=True) for state in (self._state, self._target))
        same = [name for name, spec in destination.specs.items() if source.specs[name].dtype == spec.dtype]
        return only_tensors(source, same), only_tensors(destination, same)

    def _digest_source(self, ranks: Assembly) -> LayoutDigest:
        source, destination = self._proof()
        held = ranks.attempt(lambda: training_storages(self._source, source.specs))
        try:
            return expected_digest(source, destination, self._rank, held, group=self._group)
        except DigestMismatch as error:
            raise DigestMismatch(
                f"the source's own copies differ, so that none can be proved: {error}. Buffers that each rank computes "
                "for itself, such as running statistics, have to be made equal first (broadcast them)"
            ) from error

    def verify(self) -> StateMoveReport:
        """Hold the destination against the source, bit by bit and field by field. Collective, the same on every rank.

        Digests of every copy of every master, moment, frozen weight and low-precision weight, and each field that
        ``run`` wrote. Without ``run(prove=True)`` the source is digested now, so it must not have trained on since.
        """
        with self._together("the check of the move", "") as ranks:
            if not self._ran:
                raise InputError("nothing has moved yet: call run() before verify()")
            expected = self._digest_source(ranks) if self._expected is None else self._expected
            layout = expected.layout
            held = ranks.attempt(lambda: training_storages(self._destination, layout.specs))
            report: DigestReport = compare(
                expected, digest_layout(layout, self._rank, held, replicas=True, group=self._group)
            )
            fields: list[str] = []
            if self._destination is not None:
                found = read_fields(self._destination)
                for key in _COMPARED:
                    fields += field_differences(self._written[key], found[key], key)
            told = [text for texts in ranks.tell_all(fields) for text in texts]
        return StateMoveReport(report.passed, report.total, report.mismatches, tuple(dict.fromkeys(told)))
