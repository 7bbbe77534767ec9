"""The choice: a route for every class of blocks, made on the joint load, where the gain exceeds the prices' error.

``choose(plan, topology, profile, bucket_bytes=..., executor=...)`` prices every uniform route, then improves the best
of them class by class, re-pricing the whole move each time. Knows routes by their codes in ``ROUTES`` alone, so that a
further one is chosen like the others. Pure, no torch import; equal everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.policies.fixed import fixed_route
from relaymeter.policies.price import Price, Pricer
from relaymeter.policies.reach import limits_passed
from relaymeter.policies.thresholds import Threshold, find_thresholds, possible_fanouts, threshold_route
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.planner import MovePlan
from relaymeter.relayout.routes import DIRECT, ROUTES, BlockGroups, block_groups
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.segments import RoundLoads
from relaymeter.relayout.topology import Topology

__all__ = ["Choice", "ClassRow", "choose"]

Codes = NDArray[np.int8]

#: What the search builds at most, beyond the uniform schedules; the same on every machine, unlike a time limit.
SEARCH_SCHEDULES = 24
SEARCH_ROWS = 250_000
#: A route that is this much slower than the best for a class alone is not tried for it in the whole move.
_HOPELESS = 1.25


@dataclass(frozen=True)
class ClassRow:
    """One class of blocks: what it is, its route, and its prices when all its blocks move alone.

    ``bytes`` counts each block once. ``route`` is how (most of) its blocks travel, None where every route carries them
    alike. ``prices_s`` are seconds by route, of the routes that differ for the class.
    """

    label: str
    tensors: int
    blocks: int
    bytes: int
    elements: int
    itemsize: int
    fanout: int
    route: str | None
    prices_s: Mapping[str, float]
    bound_s: float

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "prices_s": dict(self.prices_s)}


@dataclass(frozen=True, eq=False)
class Choice:
    """The routes of a move and why.

    route (g): code per group. candidates: the uniform routes' prices by name. chosen, fixed: prices of ``route`` and of
    today's constants. error: the relative error of the prices, which a gain has to exceed. min_relay, min_split: by
    destination ranks per node. regret_fixed_s: what keeping today's constants costs, against the chosen route.
    ``found``, ``cheapest`` and ``beyond`` are for reports, and come with the thresholds only.
    """

    route: Codes
    name: str
    """The one route of all groups with a choice (``direct`` where there are none), else ``mixed``."""
    classes: tuple[ClassRow, ...]
    candidates: Mapping[str, Price]
    chosen: Price
    fixed: Price
    error: float
    error_matrices: int
    """Uneven matrices, never fitted, that ``error`` is the median over; 0: none were measured, ``error`` is a guess."""
    extrapolated: bool
    min_relay: Mapping[int, Threshold]
    min_split: Mapping[int, Threshold]
    schedules: int
    """Schedules that were priced."""
    executor: str
    bucket_bytes: int
    itemsize: int
    """Bytes per element of most of the bytes that have a choice: what ``min_relay`` and ``min_split`` count in."""
    found: Price | None = None
    """Price of today's rule with ``min_relay`` and ``min_split`` in place of its constants (``threshold_route``)."""
    cheapest: Price | None = None
    """Price of ``route`` with every class that is not direct on the route which is cheapest for the class alone; None:
    they are all on it."""
    beyond: tuple[str, ...] = ()
    """What of the chosen route was not measured, in words; empty where nothing is ``extrapolated``."""

    @property
    def regret_fixed_s(self) -> float:
        return self.fixed.total_s - self.chosen.total_s

    @property
    def regret_fixed(self) -> float:
        """``regret_fixed_s`` as a share of the chosen route's time."""
        return self.regret_fixed_s / self.chosen.total_s if self.chosen.total_s > 0 else 0.0


def choose(
    plan: MovePlan,
    topology: Topology,
    profile: Profile,
    *,
    bucket_bytes: int,
    executor: str,
    groups: BlockGroups | None = None,
    thresholds: bool = True,
    joined: bool = True,
    built: Sequence[tuple[Codes, Schedule]] = (),
) -> Choice:
    """Choose a route for every block class of ``plan``. Pure.

    ``groups`` spares computing them again; ``thresholds`` False leaves those, and what else only a report needs, empty;
    ``joined`` False prices each segment as a copy of its own (``RoundLoads.apart``); ``built``: schedules of some route
    arrays, with these buckets, that exist already. Raises InputError where the profile lacks the executor or a kind of
    link that the move uses.
    """
    groups = block_groups(plan, topology) if groups is None else groups
    before = {groups.effective(codes).tobytes(): schedule for codes, schedule in built}
    search = _Search(plan, topology, profile, bucket_bytes, executor, groups, joined, before)
    candidates = {name: search.price(groups.uniform(ROUTES.index(name))) for name in groups.candidates}
    fixed = search.price(fixed_route(groups))
    codes, chosen = search.best(candidates)
    codes = groups.effective(codes)
    used = set(np.unique(codes[groups.has_choice]).tolist())
    relay: Mapping[int, Threshold] = {}
    split: Mapping[int, Threshold] = {}
    found: Price | None = None
    cheapest: Price | None = None
    beyond: tuple[str, ...] = ()
    itemsize = _itemsize(groups)
    if thresholds:
        fanouts = tuple(sorted(set(groups.fanout[groups.has_choice].tolist()) - {1})) or possible_fanouts(topology)
        relay, split = find_thresholds(
            profile, topology, executor, fanouts=fanouts, bucket_bytes=bucket_bytes, itemsize=itemsize
        )
        found = search.price(threshold_route(groups, relay, split))
        cheapest = search.each_cheapest(codes)
        beyond = search.beyond(codes) if chosen.extrapolated else ()
    return Choice(
        route=codes,
        name=ROUTES[DIRECT] if not used else ROUTES[used.pop()] if len(used) == 1 else "mixed",
        classes=tuple(search.row(index, codes) for index in range(len(groups.classes))),
        candidates=candidates,
        chosen=chosen,
        fixed=fixed,
        error=search.pricer.error,
        error_matrices=search.pricer.held_out,
        extrapolated=chosen.extrapolated,
        min_relay=relay,
        min_split=split,
        schedules=search.built,
        executor=executor,
        bucket_bytes=bucket_bytes,
        itemsize=itemsize,
        found=found,
        cheapest=cheapest,
        beyond=beyond,
    )


class _Search:
    """Prices route arrays of one plan, each once. ``before``: schedules that exist, by what groups really take."""

    def __init__(
        self,
        plan: MovePlan,
        topology: Topology,
        profile: Profile,
        bucket_bytes: int,
        executor: str,
        groups: BlockGroups,
        joined: bool,
        before: Mapping[bytes, Schedule],
    ) -> None:
        self._joined = joined
        self.plan, self.topology, self.profile = plan, topology, profile
        self.bucket_bytes, self.executor, self.groups = bucket_bytes, executor, groups
        self.pricer = Pricer(profile, topology, executor)
        self.built = 0
        self._before = before
        self._rows = 0
        self._known: dict[bytes, Price] = {}
        self._alone: dict[int, dict[int, float]] = {}
        self._rates = profile.nic_rates(topology)

    def price(self, codes: Codes) -> Price:
        """Price of a route array, or of one with which every group travels alike."""
        key = self.groups.effective(codes).tobytes()
        if key not in self._known:
            self._known[key] = self._build(self.plan, codes)
            self.built += 1
        return self._known[key]

    def _build(self, plan: MovePlan, codes: Codes) -> Price:
        loads = self._loads(plan, codes)
        self._rows = max(self._rows, len(loads.src))
        return self.pricer.price(loads)

    def _loads(self, plan: MovePlan, codes: Codes) -> RoundLoads:
        key = self.groups.effective(codes).tobytes() if plan is self.plan else b""
        schedule = self._before.get(key) or build_schedule(plan, self.topology, codes, self.bucket_bytes)
        loads = schedule.loads(self.executor)
        return loads if self._joined else loads.apart()

    def beyond(self, codes: Codes) -> tuple[str, ...]:
        """What of a route array was not measured, in words."""
        return limits_passed(self._loads(self.plan, codes), self.topology, self.profile, self.executor)

    def each_cheapest(self, codes: Codes) -> Price | None:
        """Price of ``codes`` with every class that is not direct on its cheapest route alone; None: they all are."""
        trial = codes.copy()
        for index, kind in enumerate(self.groups.classes):
            mine = self.groups.class_index == index
            travels = int(np.bincount(codes[mine]).argmax())
            if kind.has_choice and travels != DIRECT:
                alone = self.alone(index)
                best = min(alone, key=lambda code: alone[code])
                if alone[best] < alone.get(travels, np.inf):
                    trial[mine] = best
        return None if np.array_equal(trial, codes) else self.price(trial)

    def best(self, uniform: Mapping[str, Price]) -> tuple[Codes, Price]:
        """The chosen route array: the best of four starts, then improved class by class.

        Starts: all direct, the best of the other uniform routes, every class by its own best route alone, and today's
        constants. One is taken over the one before, and a class is switched, only where the gain exceeds the error of
        what it is a gain on: the whole move's price, the class's own price.
        """
        direct, error = uniform[ROUTES[DIRECT]], self.pricer.error
        codes, price = self.groups.uniform(DIRECT), direct
        name = min(uniform, key=lambda route: uniform[route].total_s)
        if direct.total_s - uniform[name].total_s > error * direct.total_s:
            codes, price = self.groups.uniform(ROUTES.index(name)), uniform[name]
        for start in (self._each_alone(), fixed_route(self.groups)):
            found = self.price(start)
            if price.total_s - found.total_s > error * price.total_s:
                codes, price = start, found
        return self._improve(codes, price)

    def _each_alone(self) -> Codes:
        codes = self.groups.uniform(DIRECT)
        for index in self._choices:
            codes[self.groups.class_index == index] = self._best_alone(index)
        return codes

    def _improve(self, codes: Codes, price: Price) -> tuple[Codes, Price]:
        """Switch class by class, largest first: away from direct for a gain beyond the error of the class's price, back
        to direct where that costs no more than it. Classes too small to tell take the route that is best alone, unless
        that slows the move down."""
        small = self._small_alone(codes)
        found = self.price(small)
        if found.total_s <= price.total_s:  # many small classes together may be what matters
            codes, price = small, found
        limit = self.built + min(SEARCH_SCHEDULES, SEARCH_ROWS // max(self._rows, 1))
        for index in self._choices:
            mine = self.groups.class_index == index
            alone = self.alone(index)
            fastest = min(alone.values())
            margin = self.pricer.error * fastest
            for code in (k for k, seconds in alone.items() if seconds <= _HOPELESS * fastest):
                if self.built >= limit:
                    return codes, price
                trial = np.where(mine, np.int8(code), codes)
                found = self.price(trial)
                if price.total_s - found.total_s > (-margin if code == DIRECT else margin):
                    codes, price = trial, found
        return codes, price

    def _small_alone(self, codes: Codes) -> Codes:
        codes = codes.copy()
        small = [i for i, kind in enumerate(self.groups.classes) if kind.has_choice and i not in self._choices]
        for index in small:
            codes[self.groups.class_index == index] = self._best_alone(index)
        return codes

    def _best_alone(self, index: int) -> int:
        """Route of a class that moves alone: direct unless another gains more than the error."""
        prices = self.alone(index)
        best = min(prices, key=lambda code: prices[code])
        return best if prices[DIRECT] - prices[best] > self.pricer.error * prices[DIRECT] else DIRECT

    @cached_property
    def _choices(self) -> tuple[int, ...]:
        """Block classes that have a choice and are more than the error's share of all bytes, largest first."""
        kinds = self.groups.classes
        weight = [kind.bytes * kind.fanout for kind in kinds]
        least = self.pricer.error * sum(weight) / 4
        order = sorted(range(len(kinds)), key=lambda index: (-weight[index], index))
        return tuple(index for index in order if kinds[index].has_choice and weight[index] > least)

    def alone(self, index: int) -> dict[int, float]:
        """Seconds of a block class moved alone, by the code of each route that differs for it, direct first."""
        if index not in self._alone:
            rows = np.flatnonzero(self.groups.class_index == index)
            codes = [ROUTES.index(name) for name in self.groups.classes[index].routes]
            part = self._only(rows)
            self._alone[index] = {code: self._build(part, np.full(len(rows), code, np.int8)).total_s for code in codes}
        return self._alone[index]

    def row(self, index: int, codes: Codes) -> ClassRow:
        """The table's row of a block class."""
        kind = self.groups.classes[index]
        rows = np.flatnonzero(self.groups.class_index == index)
        travels = int(np.bincount(codes[rows]).argmax())
        bound = lower_bound(self._only(rows), self.topology, self._rates, self.profile.port_rate())
        return ClassRow(
            label=kind.label,
            tensors=kind.tensors,
            blocks=kind.groups,
            bytes=kind.bytes,
            elements=kind.elements,
            itemsize=kind.itemsize,
            fanout=kind.fanout,
            route=ROUTES[travels] if kind.has_choice else None,
            prices_s={ROUTES[code]: seconds for code, seconds in self.alone(index).items()},
            bound_s=bound.seconds,
        )

    def _only(self, rows: NDArray[np.int64]) -> MovePlan:
        """The plan of these groups (of one plan class) alone."""
        which = int(self.groups.plan_class[rows[0]])
        whole = self.plan.classes[which]
        local = rows - int(self.plan.group_start[which])
        tensors = tuple(self.plan.tensors[int(t)] for t in whole.tensors)
        alone = replace(whole.only(local), tensors=np.arange(len(tensors), dtype=np.int64))
        return MovePlan(tensors, (alone,), self.topology, self.plan.input_hash)


def _itemsize(groups: BlockGroups) -> int:
    """Bytes per element of most of the bytes that have a choice."""
    size = groups.elements * groups.itemsize * groups.count * (groups.has_choice if groups.has_choice.any() else 1)
    sizes = np.unique(groups.itemsize)
    if not len(sizes):
        return 2
    return int(max(sizes.tolist(), key=lambda item: float(size[groups.itemsize == item].sum())))
