"""Chain: a block that several nodes want leaves its holder once; each node forwards it to the next. Many stages.

The same region of one holder, wanted on k other nodes, is sent to the hub of the first of them in stage 1; a hub that
got it in stage s sends it, in stage s + 1, to the hub of the next node and to the other ranks of its own. By buckets, a
node so forwards one while it receives the next. ``routes.ROUTES`` lists it. Pure NumPy.

Not every chain goes the same way: the nodes stand in a ring, and where it is cut shifts with the holder, with each
further chain of the holder, and, where those are too few, with each tensor of a bucket (``turn``). It does not shift
from bucket to bucket: in a round, stage s of one bucket and stage s + 1 of the bucket before it reach neighbours in the
ring, never the same node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relaymeter.relayout.classplan import ClassPlan, occurrences
from relaymeter.relayout.transfers import BoolArray, IntArray, Route, TransferBuilder, regions

__all__ = ["Chain"]

#: Orders of the nodes, at most, that the tensors of a bucket take in turn.
_MOST_TURNS = 8


class Chain(Route):
    """The holder sends to the first node's hub, each hub to the next node's and to the other ranks of its node."""

    name = "chain"
    otherwise = "relay"
    whole_plan = True
    hubs = True

    def applies(self, plan: ClassPlan, crosses: BoolArray, asked: BoolArray) -> BoolArray:
        found = np.zeros(len(plan.group), dtype=np.bool_)
        links = _link(plan, asked & crosses)
        found[links.group[links.length >= 2]] = True
        return found

    def turns(self, plan: ClassPlan, rows: BoolArray) -> int:
        links = _link(plan, rows)
        longest = int(links.length.max(initial=1))
        ways = len(np.unique(links.shift % longest))  # where the ring is cut by the holders alone
        return 1 if ways >= longest else min(_MOST_TURNS, longest)

    def arrives(self, plan: ClassPlan, rows: BoolArray, turn: int) -> IntArray:
        links = _link(plan, rows)
        stage = np.ones(len(plan.group), dtype=np.int64)
        group, first = np.unique(links.group, return_index=True)
        stage[group] = 1 + links.place(turn)[first]
        return stage

    def stages(self, plan: ClassPlan, rows: BoolArray, turn: int) -> int:
        links = _link(plan, rows)
        return int((1 + links.place(turn) + (plan.fanout[links.group] >= 2)).max(initial=1))

    def add(self, build: TransferBuilder, rows: BoolArray, turn: int) -> None:
        plan = build.plan
        links = _link(plan, rows)
        stage, prior = 1 + links.place(turn), links.prior(turn)
        width = plan.fanout[links.group]
        slots = range(int(width.max(initial=0)))
        for hub in slots:
            here = np.flatnonzero(width > hub)
            first, later = here[prior[here] < 0], here[prior[here] >= 0]
            build.add(links.group[first], 1, None, links.segment(plan, first, hub), hub=hub)
            for before in slots:
                come = later[width[prior[later]] > before]
                build.add(
                    links.group[come],
                    stage[come],
                    links.segment(plan, prior[come], before),
                    links.segment(plan, come, hub),
                    hub=hub,
                    prior=(links.group[prior[come]], before),
                )
            for slot in (one for one in slots if one != hub):
                near = here[width[here] > slot]
                build.add(
                    links.group[near],
                    stage[near] + 1,
                    links.segment(plan, near, hub),
                    links.segment(plan, near, slot),
                    hub=hub,
                )


@dataclass(frozen=True, eq=False)
class _Links:
    """The regions of some groups as links of chains, chain after chain, in each by ascending node.

    Columns (s): group (row of the plan), first (the region's segment for the group's first member), head (row of the
    chain's first link here), length (links of the chain), shift (where the ring is cut, before the turn is added).
    """

    group: IntArray
    first: IntArray
    head: IntArray
    length: IntArray
    shift: IntArray

    def segment(self, plan: ClassPlan, rows: IntArray, slot: int) -> IntArray:
        """The segments of these links for member ``slot`` of their groups."""
        return self.first[rows] + slot * plan.segments[self.group[rows]]

    def place(self, turn: int) -> IntArray:
        """Links before each one in its chain (s)."""
        return (np.arange(len(self.group)) - self.head - self.shift - turn) % self.length

    def prior(self, turn: int) -> IntArray:
        """The row of the link before each one, -1 for those that come from the holder (s)."""
        before = self.head + (np.arange(len(self.group)) - self.head - 1) % self.length
        return np.where(self.place(turn) == 0, -1, before)


def _link(plan: ClassPlan, rows: BoolArray) -> _Links:
    """Link the equal regions of each holder that ``rows`` (g) want on different nodes.

    A region that one node wants in several groups, because a rank holds it twice, is in as many chains.
    """
    group, first = regions(plan, np.flatnonzero(rows))
    node = plan.group_node[group]
    key = np.column_stack([plan.src_rank[first], plan.lo[first], plan.shape[first]])
    order = np.lexsort((group, node, *key.T))
    group, first, node, key = group[order], first[order], node[order], key[order]
    again = occurrences(np.column_stack([key, node]))
    order = np.lexsort((node, again, *key.T))
    group, first = group[order], first[order]
    place = occurrences(np.column_stack([key, again])[order])
    head = np.arange(len(group)) - place
    length = np.bincount(head, minlength=len(group))[head]
    lead, number = np.unique(group[head], return_inverse=True)  # groups stand holder by holder
    number = number.reshape(-1)
    holder = plan.group_src[lead]
    shift = holder + occurrences(holder[:, None])
    return _Links(group, first, head, length, shift[number])
