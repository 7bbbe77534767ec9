"""Spread: each rank of the node fetches a band of the block, then they exchange the bands. Two stages.

``routes.ROUTES`` lists it. Pure NumPy.
"""

from __future__ import annotations

from relaymeter.relayout.classplan import ClassPlan
from relaymeter.relayout.transfers import BoolArray, Route, TransferBuilder, regions_by_fanout

__all__ = ["Spread"]


class Spread(Route):
    """The holder sends a band to each rank, each rank its band to the others."""

    name = "spread"

    def applies(self, plan: ClassPlan, crosses: BoolArray, asked: BoolArray) -> BoolArray:
        return asked & crosses & (plan.fanout >= 2)

    def stages(self, plan: ClassPlan, rows: BoolArray, turn: int) -> int:
        return 2

    def add(self, build: TransferBuilder, rows: BoolArray, turn: int) -> None:
        for group, index in regions_by_fanout(build.plan, rows):
            ranks = index.shape[1]
            for part in range(ranks):
                band = (ranks, part)
                build.add(group, 1, None, index[:, part], band=band)
                for slot in range(ranks):
                    if slot != part:
                        build.add(group, 2, index[:, part], index[:, slot], band=band)
