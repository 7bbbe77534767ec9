"""Flows that share resources max-min fairly, and when each of them ends: the heart of the simulated cluster.

``fair_rates(use, capacity, cap)`` fills all flows at once; ``FlowNetwork(...).run(events)`` lets them start, slow each
other down and end. Nothing here knows of curves, effective bytes or prices. Pure NumPy, no torch import.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FlowNetwork", "Flows", "Starts", "fair_rates"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
#: Flow numbers and the times from which they move.
Starts = Iterable[tuple[float, int]]
#: Called with the flows that have ended and when; gives the flows that start because of it.
Ended = Callable[[IntArray, FloatArray], Starts]

_CLOSE = 1e-9


def fair_rates(use: IntArray, capacity: FloatArray, cap: FloatArray) -> FloatArray:
    """Max-min fair rates (n) of flows by progressive filling.

    use (n, k): the resources that each flow passes through, as indices of ``capacity`` (m); an entry that stands for
    nothing names a resource of infinite capacity. cap (n): what a flow reaches alone, may be infinite. A flow's rate
    grows with those of all others until a resource on its path is full or its cap is reached (Bertsekas and Gallager,
    Data Networks, section 6.5.2); all resources that fill up independently of each other are settled in one step.
    """
    rate = np.zeros(len(use))
    left = capacity.copy()
    waiting = np.arange(len(use))
    while len(waiting):
        mine, most = use[waiting], cap[waiting]
        count = np.bincount(mine.ravel(), minlength=len(left))
        share = np.full(len(left), np.inf)
        np.divide(left, count, out=share, where=count > 0)
        each = share[mine]
        best = each.min(axis=1)
        limit = np.minimum(best, most)
        # A resource is full at its share unless one of its flows is held back more elsewhere.
        held = (limit[:, None] < each * (1 - _CLOSE)).ravel().astype(np.float64)
        full = np.bincount(mine.ravel(), weights=held, minlength=len(left)) == 0
        done = (most <= best) | (full[mine] & (each <= best[:, None] * (1 + _CLOSE))).any(axis=1)
        settled = limit[done]
        rate[waiting[done]] = settled
        taken = np.bincount(mine[done].ravel(), weights=np.repeat(settled, use.shape[1]), minlength=len(left))
        left = np.maximum(left - taken, 0.0)
        waiting = waiting[~done]
    return rate


@dataclass(frozen=True, eq=False)
class Flows:
    """``n`` flows: use (n, k) and cap (n) as ``fair_rates`` takes them, size (n) what has to pass, in bytes.

    extra: capacities of resources of these flows alone, numbered on from those of the network.
    """

    use: IntArray
    cap: FloatArray
    size: FloatArray
    extra: FloatArray


class FlowNetwork:
    """Runs flows over resources of ``capacity`` (m) bytes per second.

    incast (m): share of a resource's capacity that is lost where very many flows meet at it; ``k`` of them lose
    ``incast * (1 - 1 / k)``. resolution: events closer together than this share of the time that the flows at hand
    still need are taken as one, 0 for none; what a flow that ends a little earlier would have left to others in that
    time is lost.
    """

    def __init__(self, capacity: FloatArray, incast: FloatArray | None = None, resolution: float = 0.0) -> None:
        self._capacity, self._resolution = capacity, resolution
        self._incast = incast if incast is not None and bool((incast > 0).any()) else None

    def rates(self, use: IntArray, cap: FloatArray, extra: FloatArray) -> FloatArray:
        """Rates (n) of the flows that are under way, in bytes per second; arguments as in ``Flows``."""
        capacity = self._capacity
        if self._incast is not None:
            count = np.bincount(use.ravel(), minlength=len(capacity))[: len(capacity)]
            capacity = capacity * (1 - self._incast * (1 - 1 / np.maximum(count, 1)))
        return fair_rates(use, np.concatenate([capacity, extra]), cap)

    def run(self, flows: Flows, starts: Starts, ended: Ended | None = None) -> FloatArray:
        """When each flow ends (n), in seconds; not-a-number for one that never started.

        ``starts``: the flows that start whatever happens. ``ended`` is told of those that end and starts more.
        """
        waiting = list(starts)
        heapq.heapify(waiting)
        ends = np.full(len(flows.size), np.nan)
        active, left, now = np.zeros(0, dtype=np.int64), np.zeros(0), 0.0
        ahead = np.zeros(0)  # how much later than now a flow that was let in begins
        window = 0.0
        while waiting or len(active):
            if waiting and not len(active):
                now = max(now, waiting[0][0])
            came = []
            while waiting and waiting[0][0] <= now + window:
                came.append(heapq.heappop(waiting))
            if came:
                numbers = np.asarray([number for _, number in came], dtype=np.int64)
                active = np.concatenate([active, numbers])
                left = np.concatenate([left, flows.size[numbers]])
                ahead = np.concatenate([ahead, np.asarray([at for at, _ in came]) - now])
            rate = self.rates(flows.use[active], flows.cap[active], flows.extra)
            need = np.maximum(left / rate + ahead, 0.0)
            window = self._resolution * float(need.max())
            step = float(need[need <= need.min() + window].max())
            if waiting:
                step = min(step, max(waiting[0][0] - now, 0.0))
            over = need <= step + 1e-15 * now
            ends[active[over]] = now + need[over]
            left = left - rate * (step - ahead)
            now += step
            if over.any():
                finished = active[over]
                active, left = active[~over], np.maximum(left[~over], 0.0)
                for event in ended(finished, ends[finished]) if ended is not None else ():
                    heapq.heappush(waiting, event)
            ahead = np.zeros(len(active))
        return ends
