"""The way of a live trainer's weights into replicas: planned once, run after every step, checked by digest.

sync = WeightSync(engine_or_none, options, topology)        # every rank of the world
sync.plan(config.replica_layout(sync.layout, replicas), casts)
sync.prepare(storages, step)                                # refuses a trainer that lies otherwise than planned
timing = sync.run()
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import DigestMismatch, InputError, PlanDisagreement
from relaymeter.relayout.announce import Assembly
from relaymeter.relayout.digest import compare, digest_layout
from relaymeter.relayout.engine_layout import build_layout, labels
from relaymeter.relayout.engines import describe_engine, weights_storage
from relaymeter.relayout.execute import Hooks, Mover, MoveTiming
from relaymeter.relayout.guard import guarded
from relaymeter.relayout.heartbeat import Heartbeat
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.plain_state import field_differences
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import ROUTES, BlockGroups, Codes, block_groups
from relaymeter.relayout.schedule import DEFAULT_BUCKET_BYTES, Schedule, build_schedule
from relaymeter.relayout.source_digest import expected_digest
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import Waiter, connect_all

__all__ = ["RouteChoice", "SyncOptions", "SyncTiming", "WeightSync", "changes_of", "described"]

_SHOWN = 3


class RouteChoice(Protocol):
    """Who chooses routes: what ``relaymeter.load_policy`` gives."""

    @property
    def bucket_bytes(self) -> int: ...

    @property
    def executor(self) -> str: ...

    def routes(self, groups: BlockGroups, /) -> Codes: ...


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """How weights move, the same on every rank. Raises InputError for values that cannot be."""

    route: str = "direct"
    """One of ``routes.ROUTES``."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Bytes that a rank sends in one round."""
    executor: str | None = None
    """None: the backend's own, send-recv on gloo and all-to-all on NCCL."""
    verify_every: int = 1
    """The first move and every so many after it are checked by digest; 0: none."""
    time_limit_s: float = 120.0
    """Of each stretch in which the ranks wait for each other."""

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise InputError(f"route {self.route!r} is not one of {', '.join(ROUTES)}")
        if type(self.verify_every) is not int or self.verify_every < 0:
            raise InputError(f"verify_every {self.verify_every!r}: give a whole number of moves, 0 for no check")
        if not self.time_limit_s > 0:
            raise InputError(f"time_limit_s is {self.time_limit_s!r}: give seconds, more than 0")


@dataclass(frozen=True)
class SyncTiming:
    """One move on one rank, in seconds. ``digest_s`` is that of both digests, 0.0 where it was not ``verified``."""

    move: MoveTiming
    digest_s: float
    verified: bool


class WeightSync:
    """Trainer, plan and mover. ``trainer`` may be replaced; its ``layout`` and the ``schedule`` are those of the last
    ``read`` and ``plan``. Every rank of the world has one and calls each method together with all others."""

    def __init__(
        self,
        trainer: Any | None,
        options: SyncOptions,
        topology: Topology | None = None,
        *,
        policy: RouteChoice | None = None,
        heartbeat: Heartbeat | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        """``trainer``: a DeepSpeed engine, None on ranks outside it. ``topology``: of the world, by default one node.
        ``policy``, the same on every rank, chooses routes, buckets and executor in place of the options.

        Raises as ``read``.
        """
        self.trainer, self.options = trainer, options
        self._rank, world = dist.get_rank(), dist.get_world_size()
        self._topology = Topology.grid(1, world) if topology is None else topology
        self._policy = policy
        asked = policy.executor if policy else options.executor
        self._executor = asked or ("all-to-all" if dist.get_backend() == "nccl" else "send-recv")
        self._heartbeat, self._hooks, self._waiter = heartbeat, hooks, Waiter()
        self._runs = 0
        self._mover: Mover | None = None
        self._source: Mapping[str, torch.Tensor] = {}
        self._target: Mapping[str, torch.Tensor] = {}
        self._places: list[int] = []
        with self.together("connecting the ranks") as ranks:
            connect_all(None, deadline=ranks.deadline, poll=ranks.poll)
        self.read()

    @contextmanager
    def together(self, what: str, consequence: str = "and nothing was moved") -> Iterator[Assembly]:
        """A stretch of collectives within the time limit. A refusal, which every rank raises, leaves the world in
        order."""
        refusal: Exception | None = None
        with guarded(
            what,
            rank=self._rank,
            time_limit_s=self.options.time_limit_s,
            heartbeat=self._heartbeat,
            consequence=consequence,
        ) as deadline:
            try:
                poll = None if self._heartbeat is None else self._heartbeat.poll
                yield Assembly(None, deadline, poll, self._waiter)
            except (InputError, PlanDisagreement, DigestMismatch) as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def read(self) -> None:
        """Take the trainer's layout as it is now. Raises InputError on every rank where none has a trainer or it cannot
        be read; PlanDisagreement where its ranks differ."""
        with self.together("reading the trainer") as ranks:
            self._described = self._describe(ranks)
        self.layout: Layout = build_layout(self._described, dist.get_world_size())
        self._mover = None

    def _describe(self, ranks: Assembly) -> dict[str, Any]:
        none = "no rank gave a trainer: the ranks that hold its engine hand it in, the others None"
        return described(self.trainer, "the trainer's weights", none, ranks)

    def plan(self, destination: Layout, casts: Mapping[str, str]) -> None:
        """Plan from the trainer, as it was read last, into ``destination``. Pure; raises LayoutError as plan_move."""
        self.destination = destination
        self.schedule = self._schedule(self.layout, destination, casts)
        self._mover = None

    def _schedule(self, source: Layout, destination: Layout, casts: Mapping[str, str]) -> Schedule:
        plan = plan_move(source, destination, self._topology, cast=casts)
        if self._policy is not None:
            codes = self._policy.routes(block_groups(plan, self._topology))
            return build_schedule(plan, self._topology, codes, self._policy.bucket_bytes)
        codes = np.full(int(plan.group_start[-1]), ROUTES.index(self.options.route), dtype=np.int8)
        return build_schedule(plan, self._topology, codes, self.options.bucket_bytes)

    def prepare(self, storages: Mapping[str, torch.Tensor], step: int) -> None:
        """Make sure that trainer and plan still fit; compile the move into ``storages`` where an address is new.

        Raises InputError on every rank where the trainer lies otherwise than planned, saying what changed, or where the
        ranks are at different steps.
        """
        with self.together("the check of the trainer") as ranks:
            found = self._describe(ranks)
            if found != self._described:
                raise InputError(
                    f"the trainer's layout is not the planned one any more: {changes_of(self._described, found)}; "
                    "replan() makes a new plan"
                )
            source = ranks.attempt(lambda: {} if self.trainer is None else weights_storage(self.trainer))
            places = [storage.data_ptr() for held in (source, storages) for storage in held.values()]
            told = ranks.numbers([int(self._mover is None or places != self._places), step])
            steps = told[:, 1].tolist()
            if len(set(steps)) > 1:
                raise InputError(f"the ranks are at different steps, by rank: {steps}")
            if told[:, 0].any():
                self._source, self._target, self._places = source, storages, places
                self._mover = self._make(self.schedule, source, storages)

    def _make(
        self, schedule: Schedule, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]
    ) -> Mover:
        return Mover(
            schedule,
            self._rank,
            source,
            target,
            self._executor,
            time_limit_s=self.options.time_limit_s,
            heartbeat=self._heartbeat,
            hooks=self._hooks,
        )

    def run(self) -> SyncTiming:
        """Move what ``prepare`` made ready. Raises as ``Mover.run``, and DigestMismatch on every rank where a bit of a
        checked move is wrong: the replicas are not usable then."""
        if self._mover is None:
            raise InputError("nothing is prepared: call prepare() first")
        every = self.options.verify_every
        verify = bool(every) and self._runs % every == 0
        self._runs += 1
        return self._run(self._mover, self.layout, self.destination, self._source, self._target, verify)

    def carry(
        self,
        old: Layout,
        new: Layout,
        source: Mapping[str, torch.Tensor],
        target: Mapping[str, torch.Tensor],
    ) -> SyncTiming:
        """One checked move between replicas: from ``source``, this rank's storages of ``old``, into ``target``."""
        mover = self._make(self._schedule(old, new, {}), source, target)
        return self._run(mover, old, new, source, target, True)

    def _run(
        self,
        mover: Mover,
        old: Layout,
        new: Layout,
        source: Mapping[str, torch.Tensor],
        target: Mapping[str, torch.Tensor],
        verify: bool,
    ) -> SyncTiming:
        begin = time.perf_counter()
        if verify:
            with self.together("the digest of the source"):
                expected = expected_digest(old, new, self._rank, source)
        digested = time.perf_counter()
        timing = mover.run()
        moved = time.perf_counter()
        if not verify:
            return SyncTiming(timing, 0.0, False)
        with self.together("the digest of the replicas", "and the replicas are not usable"):
            found = digest_layout(new, self._rank, target, replicas=True)
            compare(expected, found).raise_for_mismatch()
        return SyncTiming(timing, digested - begin + time.perf_counter() - moved, True)


def described(engine: Any | None, what: str, none: str, ranks: Assembly) -> dict[str, Any]:
    """``describe_engine`` of the ranks that hold the engine, on all of them. Collective. Raises InputError, ``none``,
    on every rank where no rank holds one, PlanDisagreement where they tell different things of ``what``."""
    mine = ranks.attempt(lambda: None if engine is None else describe_engine(engine))
    found: dict[str, Any] | None = ranks.announce(mine, what)
    if found is None:
        raise InputError(none)
    return found


def changes_of(planned: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """What differs between two descriptions of an engine, its kind and ranks first."""
    texts = [
        [said["name"], f"ranks {said['ranks']}", *(t for t in labels(said) if not t.startswith("ranks "))]
        for said in (planned, found)
    ]
    apart = [[text for text in one if text not in set(other)] for one, other in (texts, texts[::-1])]
    if not any(apart):
        return "; ".join(list(field_differences(planned, found, sides=("the plan", "the trainer")))[:_SHOWN])
    shown = [", ".join(side[:_SHOWN]) + (f" and {len(side) - _SHOWN} more" if side[_SHOWN:] else "") for side in apart]
    return f"it was {shown[0] or 'without what follows'}, it is {shown[1] or 'without that'}"
