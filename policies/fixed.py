"""Today's constants: a block of 65,536 elements or more is relayed, and split into bands, whatever the cluster.

``fixed_route(groups)`` is the route array that they lead to: what a choice is held against.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relaymeter.relayout.routes import BlockGroups

__all__ = ["FIXED_MIN_RELAY", "FIXED_MIN_SPLIT", "fixed_route"]

#: Elements of a block from which today's code relays it, and from which it splits it into bands.
FIXED_MIN_RELAY = 65_536
FIXED_MIN_SPLIT = 65_536


def fixed_route(groups: BlockGroups) -> NDArray[np.int8]:
    """Route codes per group under the two constants. Pure."""
    return groups.by_threshold(FIXED_MIN_RELAY, FIXED_MIN_SPLIT)
