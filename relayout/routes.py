"""Routes: the ways to send blocks, by name and code, and the groups of blocks among which they are chosen.

A group is what one holder sends to the same ``fanout`` destination ranks of one node. Each route is one file with its
stages (``route_direct.py``, ``route_relay.py``, ``route_spread.py``, ``route_chain.py``), entered in ``_ROUTES`` below;
nothing else knows how many routes or stages there are, and prices follow from the transfers. Pure NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaymeter.errors import InputError
from relaymeter.relayout.planner import ClassPlan, MovePlan
from relaymeter.relayout.route_chain import Chain
from relaymeter.relayout.route_direct import Direct
from relaymeter.relayout.route_relay import Relay
from relaymeter.relayout.route_spread import Spread
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transfers import Route, TransferBuilder, Transfers

__all__ = [
    "CHAIN",
    "DIRECT",
    "RELAY",
    "ROUTES",
    "SPREAD",
    "BlockClass",
    "BlockGroups",
    "block_groups",
    "effective_codes",
    "route_of",
    "transfers",
]

IntArray = NDArray[np.int64]
Codes = NDArray[np.int8]

#: By code. A route stands after the one that it falls back to.
_ROUTES: tuple[Route, ...] = (Direct(), Relay(), Spread(), Chain())

#: Names of the routes; a route's code is its place here.
ROUTES = tuple(route.name for route in _ROUTES)
DIRECT, RELAY, SPREAD, CHAIN = range(len(_ROUTES))


def route_of(code: int) -> Route:
    """The route of a code."""
    return _ROUTES[code]


def effective_codes(plan: MovePlan, topology: Topology, codes: Codes) -> Codes:
    """How the groups really travel that ``codes`` (g, in the order of ``block_groups``) ask for: a route that has
    nothing of its own to offer a group gives way to its ``otherwise``.

    What a chain can do hangs on which other groups take it. Raises InputError on an array of the wrong length, an
    unknown code, and a route that needs the rows of all ranks where the plan has those of one.
    """
    count = int(plan.group_start[-1])
    if len(codes) != count or bool(((codes < 0) | (codes >= len(ROUTES))).any()):
        raise InputError(f"a route array of {count} codes from 0 to {len(ROUTES) - 1} is needed")
    asked = [_ROUTES[code] for code in np.unique(codes).tolist()]
    for route in asked if plan.rank is not None else ():
        if route.whole_plan:
            raise InputError(
                f"route {route.name} hangs on what the other nodes want, and this plan holds the rows of rank "
                f"{plan.rank} only: plan without rank=, or take another route"
            )
    found = codes.astype(np.int8)
    node = topology.node_array
    for index, one in enumerate(plan.classes):
        part = found[int(plan.group_start[index]) : int(plan.group_start[index + 1])]  # a view
        crosses = node[one.group_src] != one.group_node
        for code in range(len(_ROUTES) - 1, -1, -1):
            mine = part == code
            if mine.any():
                route = _ROUTES[code]
                part[mine & ~route.applies(one, crosses, mine)] = ROUTES.index(route.otherwise)
    return found


@dataclass(frozen=True)
class BlockClass:
    """Blocks among which the choice is one: those of one plan class with equal elements and fanout.

    ``groups`` and ``bytes`` count all tensors of the class; ``bytes`` is what travels when each block is sent once.
    ``routes`` names the ways that differ for them, direct first; every other route gives way to one of these.
    """

    label: str
    elements: int
    itemsize: int
    fanout: int
    tensors: int
    groups: int
    bytes: int
    routes: tuple[str, ...]

    @property
    def has_choice(self) -> bool:
        return len(self.routes) > 1


@dataclass(frozen=True, eq=False)
class BlockGroups:
    """One row per group of one plan class; it stands for ``count`` groups, one in each tensor of the class.

    Columns (g): plan_class, src, node (of the destinations), elements (of the region), itemsize, fanout, segments,
    count, crosses (the holder is on another node), class_index into ``classes``. ``offers`` (routes, g): whether a
    route, taken by all groups, carries this one in a way of its own; only groups that cross have any choice.
    """

    plan_class: IntArray
    src: IntArray
    node: IntArray
    elements: IntArray
    itemsize: IntArray
    fanout: IntArray
    segments: IntArray
    count: IntArray
    crosses: NDArray[np.bool_]
    class_index: IntArray
    offers: NDArray[np.bool_]
    classes: tuple[BlockClass, ...]
    plan: MovePlan
    topology: Topology

    def __len__(self) -> int:
        return len(self.src)

    @property
    def has_choice(self) -> NDArray[np.bool_]:
        """Which groups (g) another route than direct carries otherwise."""
        found: NDArray[np.bool_] = np.asarray(self.offers[DIRECT + 1 :].any(axis=0))
        return found

    @property
    def candidates(self) -> tuple[str, ...]:
        """The routes worth comparing: those that go direct or, where they offer no group anything, would; a route that
        would only repeat another one (a chain without a second node that wants the same) is left out."""
        basic = ROUTES[DIRECT]
        return tuple(
            route.name for code, route in enumerate(_ROUTES) if route.otherwise == basic or self.offers[code].any()
        )

    def uniform(self, code: int) -> Codes:
        """The route array that sends every group by ``code`` (see ``effective`` for those it has nothing to offer)."""
        return np.full(len(self), code, dtype=np.int8)

    def effective(self, codes: Codes) -> Codes:
        """How the groups really travel that ``codes`` (g) ask for, see ``effective_codes``."""
        return effective_codes(self.plan, self.topology, codes)

    def by_threshold(self, min_relay: int | None, min_split: int | None) -> Codes:
        """The route array of two thresholds in elements of a block; None means never. Spread outranks relay."""
        route = self.uniform(DIRECT)
        if min_relay is not None:
            route[self.elements >= min_relay] = RELAY
        if min_split is not None:
            route[self.elements >= min_split] = SPREAD
        return route


def block_groups(plan: MovePlan, topology: Topology) -> BlockGroups:
    """The groups of a plan, class after class, in the order that ``build_schedule`` expects for its route array."""
    node = topology.node_array
    parts: list[list[NDArray[np.int64]]] = []
    for index, found in enumerate(plan.classes):
        ones = np.ones(len(found.group), dtype=np.int64)
        columns = [ones * index, found.group_src, found.group_node, found.elements, ones * found.itemsize]
        parts.append([*columns, found.fanout, found.segments, ones * len(found.tensors)])
    merged = [np.concatenate([p[k] for p in parts] or [np.zeros(0, np.int64)]) for k in range(8)]
    plan_class, src, home, elements, itemsize, fanout, segments, count = merged
    crosses = node[src] != home
    offers = _offers(plan, topology, len(src))
    key = np.column_stack([plan_class, elements, fanout, crosses, offers.T])
    unique, class_index = np.unique(key, axis=0, return_inverse=True)
    class_index = class_index.reshape(-1)
    classes = []
    for row, (which, size, ranks, _, *own) in enumerate(unique.tolist()):
        found = plan.classes[which]
        groups = int((class_index == row).sum()) * len(found.tensors)
        classes.append(
            BlockClass(
                label=plan.label(which),
                elements=size,
                itemsize=found.itemsize,
                fanout=ranks,
                tensors=len(found.tensors),
                groups=groups,
                bytes=groups * size * found.itemsize,
                routes=tuple(name for name, offered in zip(ROUTES, own, strict=True) if offered),
            )
        )
    return BlockGroups(
        plan_class, src, home, elements, itemsize, fanout, segments, count, crosses, class_index, offers,
        tuple(classes), plan, topology,
    )  # fmt: skip


def _offers(plan: MovePlan, topology: Topology, groups: int) -> NDArray[np.bool_]:
    """``BlockGroups.offers``. A plan of one rank's own rows has no routes that hang on other nodes."""
    found = np.zeros((len(_ROUTES), groups), dtype=np.bool_)
    for code, route in enumerate(_ROUTES):
        if plan.rank is None or not route.whole_plan:
            found[code] = effective_codes(plan, topology, np.full(groups, code, dtype=np.int8)) == code
    return found


def transfers(plan: ClassPlan, code: int, rows: NDArray[np.bool_], turn: int = 0) -> Transfers:
    """Transfers of route ``code`` for the groups where ``rows`` (g) is true, in its variant ``turn``."""
    build = TransferBuilder(plan)
    if rows.any():
        _ROUTES[code].add(build, rows, turn)
    return build.build()
