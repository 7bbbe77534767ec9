"""Relay: a block crosses to its node once, to a hub among its ranks, which copies it to the others. Two stages.

``routes.ROUTES`` lists it; hubs are chosen by ``hubs.assign_hubs``. Pure NumPy.
"""

from __future__ import annotations

from relaymeter.relayout.classplan import ClassPlan
from relaymeter.relayout.transfers import BoolArray, Route, TransferBuilder, regions_by_fanout

__all__ = ["Relay"]


class Relay(Route):
    """The holder sends to the hub, the hub to the other ranks of its node."""

    name = "relay"
    hubs = True

    def applies(self, plan: ClassPlan, crosses: BoolArray, asked: BoolArray) -> BoolArray:
        return asked & crosses & (plan.fanout >= 2)

    def stages(self, plan: ClassPlan, rows: BoolArray, turn: int) -> int:
        return 2

    def add(self, build: TransferBuilder, rows: BoolArray, turn: int) -> None:
        for group, index in regions_by_fanout(build.plan, rows):
            for hub in range(index.shape[1]):
                build.add(group, 1, None, index[:, hub], hub=hub)
                for slot in range(index.shape[1]):
                    if slot != hub:
                        build.add(group, 2, index[:, hub], index[:, slot], hub=hub)
