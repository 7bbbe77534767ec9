"""A whole schedule on a simulated cluster: every rank packs, exchanges, unpacks and goes on, as real ones do.

``SimulatedMove(loads, executor, ...).seconds()``. There is no barrier between rounds: a message moves when both of its
ends have come to its round, a rank goes on when all of its messages have arrived and left, and copies within a rank run
beside its exchange. Flows of different rounds share the resources. Pure, no torch import.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relaymeter.harness.simulated_config import ExecutorModel, PackingModel
from relaymeter.harness.simulated_flows import FlowNetwork
from relaymeter.harness.simulated_paths import Paths
from relaymeter.relayout.segments import RoundLoads

__all__ = ["SimulatedMove"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class SimulatedMove:
    """One run of ``loads``. An object is used once."""

    def __init__(
        self,
        loads: RoundLoads,
        executor: str,
        model: ExecutorModel,
        packing: PackingModel,
        paths: Paths,
        network: FlowNetwork,
    ) -> None:
        self._model, self._network = model, network
        self._world, self._rounds = len(paths.slowness), loads.rounds
        self._slowness = paths.slowness
        away = (loads.src != loads.dst) & (loads.bytes > 0)
        self._src, self._dst, self._round = loads.src[away], loads.dst[away], loads.round[away]
        self._flows, self._latency = paths.flows(self._src, self._dst, loads.bytes[away], executor)
        out, into = self._key(loads.round, loads.src), self._key(loads.round, loads.dst)
        apart = loads.src != loads.dst
        self._pack = self._copying(packing, "pack", out, loads.copies * apart, loads.pack_bytes * apart)
        self._unpack = self._copying(packing, "unpack", into, loads.copies * apart, loads.unpack_bytes * apart)
        self._local = self._copying(packing, "unpack", into, (~apart).astype(np.int64), loads.bytes * ~apart)
        sent = self._sum(out, loads.messages * apart)
        received = self._sum(into, loads.messages * apart)
        most = np.maximum(sent, received)
        calls = np.ones_like(most, dtype=bool) if model.together else most > 0
        begin = np.where(calls, model.floor_s + np.maximum(most - 1, 0) * model.message_s, 0.0)
        self._begin: FloatArray = begin * self._slowness
        key = np.concatenate([self._key(self._round, self._src), self._key(self._round, self._dst)])
        order = np.argsort(key, kind="stable")
        # The flows of rank r in round b are _mine[_edge[b * world + r] : _edge[b * world + r + 1]].
        self._mine: IntArray = order % max(len(self._src), 1)
        self._edge: IntArray = np.searchsorted(key[order], np.arange(self._rounds * self._world + 1))
        self._left = np.diff(self._edge).reshape(self._rounds, self._world)
        self._at = np.zeros(self._world, dtype=np.int64)  # the round that a rank is in
        self._through = np.zeros(self._world)  # when the rank is done with its round but for unpacking, as far as known
        self._start = np.zeros(len(self._src))  # when the later of a flow's ends had come, as far as known
        self._come = np.zeros(len(self._src), dtype=np.int64)  # how many of its ends have
        self._ready = np.zeros((self._rounds, self._world))
        self._missing = np.full(self._rounds, self._world)
        self._end = np.zeros(self._world)

    def _key(self, rounds: IntArray, rank: IntArray) -> IntArray:
        return rounds * self._world + rank

    def _sum(self, key: IntArray, values: IntArray) -> FloatArray:
        found = np.bincount(key, weights=values, minlength=self._rounds * self._world)
        return found.astype(np.float64).reshape(self._rounds, self._world)

    def _copying(
        self, packing: PackingModel, direction: str, key: IntArray, segments: IntArray, nbytes: IntArray
    ) -> FloatArray:
        """Seconds of copies (rounds, world); where ranks crowd each other, all that copy in a round do so at once."""
        count, moved = self._sum(key, segments), self._sum(key, nbytes)
        alone = (
            np.where(count > 0, packing.call_s, 0.0) + count * packing.segment_s + moved / packing.rate_of(direction)
        )
        crowd = np.asarray([packing.crowding(ranks) for ranks in (count > 0).sum(axis=1).tolist()])
        took: FloatArray = alone * self._slowness * crowd[:, None]
        return took

    def seconds(self) -> float:
        """Seconds until the last rank is through with the last round."""
        starts = self._go([(rank, self._model.isolated_s) for rank in range(self._world)])
        self._network.run(self._flows, starts, self._ended)
        return float(self._end.max(initial=0.0))

    def _go(self, going: list[tuple[int, float]]) -> list[tuple[float, int]]:
        """Ranks that begin their round at a time; gives the flows that start because of it.

        A rank that has nothing to wait for in a round goes on to the next one.
        """
        starts: list[tuple[float, int]] = []
        while going:
            rank, clock = going.pop()
            number = int(self._at[rank])
            if number == self._rounds:
                self._end[rank] = clock
                continue
            self._ready[number, rank] = clock + self._pack[number, rank]
            if not self._model.together:
                begun = [rank]
            else:
                self._missing[number] -= 1
                if self._missing[number]:
                    continue
                self._ready[number] = self._ready[number].max()
                begun = list(range(self._world))
            for each in begun:
                starts += self._post(number, each)
                if not self._left[number, each]:
                    going.append((each, self._leave(number, each)))
        return starts

    def _post(self, number: int, rank: int) -> list[tuple[float, int]]:
        """The rank posts its messages; gives those of them whose other end was there before."""
        ready = self._ready[number, rank]
        posted = ready + self._begin[number, rank]
        self._through[rank] = max(posted, ready + self._local[number, rank])
        place = number * self._world + rank
        mine = self._mine[self._edge[place] : self._edge[place + 1]]
        self._start[mine] = np.maximum(self._start[mine], posted)
        self._come[mine] += 1
        both = mine[self._come[mine] == 2]
        return list(zip((self._start[both] + self._latency[both]).tolist(), both.tolist(), strict=True))

    def _leave(self, number: int, rank: int) -> float:
        """The rank's exchange is over; gives when it has unpacked."""
        self._at[rank] += 1
        return float(self._through[rank] + self._unpack[number, rank])

    def _ended(self, flows: IntArray, times: FloatArray) -> list[tuple[float, int]]:
        """Flows have ended at ``times``; gives those that start because of it."""
        ranks = np.concatenate([self._src[flows], self._dst[flows]])
        np.maximum.at(self._through, ranks, np.concatenate([times, times]))
        rounds = np.concatenate([self._round[flows], self._round[flows]])
        np.subtract.at(self._left, (rounds, ranks), 1)
        over = sorted({int(rank) for rank in ranks if not self._left[self._at[rank], rank]})
        return self._go([(rank, self._leave(int(self._at[rank]), rank)) for rank in over])
