"""Direct: every destination rank gets its block from the holder. One stage; ``routes.ROUTES`` lists it. Pure NumPy."""

from __future__ import annotations

from relaymeter.relayout.classplan import ClassPlan
from relaymeter.relayout.transfers import BoolArray, Route, TransferBuilder, regions_by_fanout

__all__ = ["Direct"]


class Direct(Route):
    """The holder sends to each rank."""

    name = "direct"

    def applies(self, plan: ClassPlan, crosses: BoolArray, asked: BoolArray) -> BoolArray:
        return asked

    def stages(self, plan: ClassPlan, rows: BoolArray, turn: int) -> int:
        return 1

    def add(self, build: TransferBuilder, rows: BoolArray, turn: int) -> None:
        for group, index in regions_by_fanout(build.plan, rows):
            for slot in range(index.shape[1]):
                build.add(group, 1, None, index[:, slot])
