"""Jobs on what ranks tell each other before they act alike."""

from __future__ import annotations

from typing import Any

from pool import Seat

from relaymeter.relayout.announce import Assembly


def orders(seat: Seat) -> dict[str, Any]:
    """What each rank gets where all have one value, its keys in an order of their own; and where rank 0 has none."""
    keys = ["exp_avg", "exp_avg_sq", "step"]
    mine = {key: {"a": 0, "b": 1} for key in (keys if seat.rank % 2 else keys[::-1])}
    every = Assembly().announce(mine, "the order")
    some = Assembly().announce(mine if seat.rank else None, "the order")
    return {"every": list(every or {}), "some": list(some or {})}
