"""The policy: what ``choose`` decided for a cluster and a scenario, as one object that other code asks.

``policy.route(elements, itemsize, fanout)`` names the route of a block, ``policy.min_relay(2)`` is a threshold in
elements, ``policy.routes(groups)`` the route array of a whole plan, and ``policy.replica_selector`` fits DeepSpeed's
``plan_transfer(..., replica_selector=...)``. Pure, no torch import; the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.policies.choose import Choice, ClassRow, Codes
from relaymeter.policies.reach import gates_note
from relaymeter.policies.replicas import Rates, ReplicaSelector
from relaymeter.policies.thresholds import RULE_ROUTES, Threshold, find_thresholds, possible_fanouts
from relaymeter.relayout.routes import DIRECT, RELAY, ROUTES, SPREAD, BlockGroups
from relaymeter.relayout.topology import Topology

__all__ = ["Policy", "PolicyMove", "make_policy", "profile_stamp"]

#: What identifies a block class, from the most particular on: move, label (either may be None), elements, bytes per
#: element, destination ranks per node.
_Key = tuple[str | None, str | None, int, int, int]


@dataclass(frozen=True)
class PolicyMove:
    """One move of the scenario: the routes of its block classes, and its predicted seconds with them, with 65,536 for
    both constants, and with the thresholds found for the move in their place."""

    name: str
    bucket_bytes: int
    choice: str
    chosen_s: float
    fixed_constants_s: float
    found_constants_s: float
    classes: tuple[ClassRow, ...]

    @property
    def regret_fixed_s(self) -> float:
        """What keeping today's constants costs, against the chosen routes."""
        return self.fixed_constants_s - self.chosen_s


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Routes and thresholds for one executor on one topology, and where they come from.

    relay, split: thresholds by destination ranks per node, in elements of ``itemsize`` bytes, for buckets of
    ``bucket_bytes``. error: relative error of the prices, the median over ``error_matrices`` matrices that were
    measured and not fitted (0: ``error`` is assumed). beyond: what of the moves was not measured, in words (empty where
    nothing is ``extrapolated``). profile: ``sha256``, ``machine_id`` and ``created_utc`` of the profile; profile_note:
    which gates its calibration missed (None: none). simulated: name of the simulated cluster, None for a measured one.
    """

    scenario: str
    executor: str
    topology: Topology
    rates: Rates
    moves: tuple[PolicyMove, ...]
    itemsize: int
    bucket_bytes: int
    relay: Mapping[int, Threshold]
    split: Mapping[int, Threshold]
    error: float
    error_matrices: int
    extrapolated: bool
    beyond: tuple[str, ...] = ()
    profile: Mapping[str, str]
    profile_note: str | None = None
    profile_mismatch: tuple[str, ...]
    simulated: str | None
    created_utc: str

    def route(
        self, elements: int, itemsize: int, fanout: int, *, label: str | None = None, move: str | None = None
    ) -> str:
        """The route of a block of ``elements`` of ``itemsize`` bytes that ``fanout`` ranks of another node want.

        A block of a class that was priced takes the route of its class: of that ``move`` and ``label`` where they are
        given and known, else of the classes of equal blocks, the one that carries most of their bytes. Any other block
        goes by the thresholds: spread from ``min_split`` on, else relay from ``min_relay`` on, else direct. Raises
        InputError on sizes that are none.
        """
        if elements < 0 or itemsize < 1 or fanout < 1:
            raise InputError(
                f"a block of {elements} elements of {itemsize} bytes for {fanout} ranks a node: give at least 0, 1, 1"
            )
        for key in ((move, label), (None, label), (move, None), (None, None)):
            found = self._known.get((*key, elements, itemsize, fanout))
            if found is not None:
                return found
        for code, limit in ((SPREAD, self.min_split(fanout, itemsize)), (RELAY, self.min_relay(fanout, itemsize))):
            if limit is not None and elements >= limit:
                return ROUTES[code]
        return ROUTES[DIRECT]

    def min_relay(self, fanout: int, itemsize: int | None = None) -> int | None:
        """Smallest block, in elements of ``itemsize`` bytes (None: the policy's own), from which relaying pays for
        ``fanout`` destination ranks a node; None: never.

        A fanout that is none of ``priced_fanouts`` takes the thresholds of ``nearest_fanout(fanout)``, the next smaller
        one, where a route pays later: cautious, but nobody priced it. Below 2 it is never.
        """
        return self._limit(self.relay, fanout, itemsize)

    def min_split(self, fanout: int, itemsize: int | None = None) -> int | None:
        """Smallest block from which spreading pays: as ``min_relay``."""
        return self._limit(self.split, fanout, itemsize)

    @property
    def priced_fanouts(self) -> tuple[int, ...]:
        """The numbers of destination ranks per node that the thresholds were priced for, ascending; empty on a single
        node."""
        return tuple(sorted(self.relay))

    def nearest_fanout(self, fanout: int) -> int | None:
        """The priced number of ranks whose thresholds answer for ``fanout``: itself, else the next smaller one; None:
        there is none, and the answer is never."""
        return max((priced for priced in self.relay if priced <= fanout), default=None)

    def routes(self, groups: BlockGroups, *, move: str | None = None) -> Codes:
        """The route array (g, codes of ``ROUTES``) for the groups of a plan: what ``build_schedule`` takes.

        ``move`` prefers the classes of that move. What a route has nothing to offer travels as it would anyway. Pure.
        """
        codes = np.zeros(max(len(groups.classes), 1), dtype=np.int8)
        for index, kind in enumerate(groups.classes):
            if kind.has_choice:
                name = self.route(kind.elements, kind.itemsize, kind.fanout, label=kind.label, move=move)
                codes[index] = ROUTES.index(name)
        found: Codes = groups.effective(codes[groups.class_index])
        return found

    @property
    def replica_selector(self) -> ReplicaSelector:
        """``selector()``: a fresh one each time, so take it once per move and hand it to every ``plan_transfer``."""
        return self.selector()

    def selector(
        self, choice: str = "priced", *, itemsize: int | None = None, order: Sequence[int] | None = None
    ) -> ReplicaSelector:
        """Which holder serves a region, by one of ``replicas.REPLICA_CHOICES``: fits DeepSpeed's ``replica_selector``.

        itemsize: bytes per element of what moves (None: the policy's own). order: the caller's preference of each rank
        (world), lower first; None: none. It keeps the loads of what it was asked for: one for each move, asked in the
        same order on every rank. Raises InputError on an unknown choice.
        """
        size = self.itemsize if itemsize is None else itemsize
        return ReplicaSelector(
            choice, self.topology, self.rates, itemsize=size, order=order,
            travels_once=lambda elements: self.route(elements, size, 2) != ROUTES[DIRECT],
        )  # fmt: skip

    @property
    def chosen_s(self) -> float:
        """Predicted seconds of all moves with the chosen routes."""
        return math.fsum(move.chosen_s for move in self.moves)

    @property
    def fixed_constants_s(self) -> float:
        """Predicted seconds of all moves with 65,536 for both thresholds."""
        return math.fsum(move.fixed_constants_s for move in self.moves)

    @property
    def found_constants_s(self) -> float:
        """Predicted seconds of all moves under the same rule with the thresholds found for each."""
        return math.fsum(move.found_constants_s for move in self.moves)

    @property
    def beyond_rule(self) -> tuple[str, ...]:
        """The chosen routes that no two thresholds can ask for, such as ``chain``."""
        used = {row.route for move in self.moves for row in move.classes if row.route is not None}
        return tuple(name for name in ROUTES if name in used and name not in RULE_ROUTES)

    def _limit(self, limits: Mapping[int, Threshold], fanout: int, itemsize: int | None) -> int | None:
        nearest = self.nearest_fanout(fanout)
        found = None if nearest is None else limits[nearest].elements
        if found is None or itemsize in (None, self.itemsize):
            return found
        return max(1, -(-found * self.itemsize // int(itemsize or 1)))

    @cached_property
    def _known(self) -> Mapping[_Key, str]:
        """The route that carries most bytes of the classes of each key."""
        carried: dict[_Key, dict[str, int]] = {}
        for move in self.moves:
            for row in move.classes:
                if row.route is None:
                    continue
                block = (row.elements, row.itemsize, row.fanout)
                for key in ((move.name, row.label), (None, row.label), (move.name, None), (None, None)):
                    routes = carried.setdefault((*key, *block), {})
                    routes[row.route] = routes.get(row.route, 0) + row.bytes
        return {key: max(routes, key=lambda name: routes[name]) for key, routes in carried.items()}


def make_policy(
    scenario: str,
    profile: Profile,
    choices: Mapping[str, Choice],
    *,
    executor: str,
    created_utc: str,
    mismatch: Sequence[str] = (),
    topology: Topology | None = None,
) -> Policy:
    """The policy of ``choices``, by move, that were made with ``profile`` and ``executor``. Pure.

    The thresholds are found for every number of ranks that a node of the topology has (2, 4, ..., all) and every one in
    the moves, with the bucket and the bytes per element of the move with most bytes that have a choice. Raises
    InputError without a choice, and on one made without thresholds.
    """
    if not choices:
        raise InputError("a policy needs at least one move that was priced: choose routes for one first")
    topology = profile.topology if topology is None else topology
    weight = {
        name: sum(row.bytes * row.fanout for row in choice.classes if row.route is not None)
        for name, choice in choices.items()
    }
    largest = choices[max(weight, key=lambda name: weight[name])]
    fanouts = {row.fanout for choice in choices.values() for row in choice.classes if row.route and row.fanout > 1}
    relay, split = find_thresholds(
        profile, topology, executor,
        fanouts=tuple(sorted(fanouts | set(possible_fanouts(topology)))),
        bucket_bytes=largest.bucket_bytes, itemsize=largest.itemsize,
    )  # fmt: skip
    simulated = profile.fingerprint.get("simulated")
    moves = []
    for name, one in choices.items():
        if one.found is None:
            raise InputError(f"the choice of {name} was made without thresholds: choose with thresholds=True")
        seconds = (one.chosen.total_s, one.fixed.total_s, one.found.total_s)
        moves.append(PolicyMove(name, one.bucket_bytes, one.name, *seconds, one.classes))
    return Policy(
        scenario=scenario,
        executor=executor,
        topology=topology,
        rates=Rates.of(profile, topology),
        moves=tuple(moves),
        itemsize=largest.itemsize,
        bucket_bytes=largest.bucket_bytes,
        relay=relay,
        split=split,
        error=largest.error,
        error_matrices=largest.error_matrices,
        extrapolated=any(choice.extrapolated for choice in choices.values()),
        beyond=tuple(dict.fromkeys(text for choice in choices.values() for text in choice.beyond)),
        profile=profile_stamp(profile),
        profile_note=gates_note(profile),
        profile_mismatch=tuple(mismatch),
        simulated=None if simulated is None else str(simulated),
        created_utc=created_utc,
    )


def profile_stamp(profile: Profile) -> dict[str, Any]:
    """What says which profile it was."""
    return {"sha256": profile.sha256, "machine_id": profile.machine_id, "created_utc": profile.created_utc}
