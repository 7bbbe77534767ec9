"""min_relay and min_split: from which block size on relaying, or splitting into bands, lowers the predicted time.

``find_thresholds(profile, topology, executor, fanouts=(2,), ...)`` prices a batch of equal blocks that fills the NICs,
by every route, over a grid of block sizes, and finds where the curves cross. Pure NumPy, no torch import.

The batch: ``BATCH_BLOCKS`` blocks held evenly by the ranks of one node, each wanted whole by the same ``fanout`` ranks
of another node; relayed with hubs in turn, or spread over all of them. A threshold is the smallest block from which on
the route is faster than direct; "never" (None) where from there on it gains nowhere more than the prices' own error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.policies.price import Pricer, RoundTerms
from relaymeter.relayout.routes import DIRECT, RELAY, ROUTES, SPREAD, BlockGroups
from relaymeter.relayout.segments import DIRECT_MIN_BYTES, PART_ALIGN, RoundLoads
from relaymeter.relayout.topology import Topology

__all__ = [
    "BATCH_BLOCKS",
    "RULE_ROUTES",
    "Batch",
    "BatchLoads",
    "Threshold",
    "batch_loads",
    "batch_seconds",
    "find_thresholds",
    "pair_batch",
    "possible_fanouts",
    "threshold_route",
]

FloatArray = NDArray[np.float64]

#: Blocks of a batch.
BATCH_BLOCKS = 2048
#: Block sizes that are priced, in bytes: half octaves from 16 bytes to 256 MiB.
_SIZES = np.unique((16 * 2.0 ** (np.arange(49) / 2)).astype(np.int64) // 16 * 16)
_LOW, _HIGH = 0.05, 0.95
#: The routes that two thresholds can ask for.
RULE_ROUTES = (ROUTES[DIRECT], ROUTES[RELAY], ROUTES[SPREAD])
#: Kinds of rounds per size: direct; first, middle and last of relay; the same of spread.
_KINDS = 7


@dataclass(frozen=True)
class Threshold:
    """Smallest block, in elements, from which on the route pays for ``fanout`` destination ranks per node; None: never.

    low, high: 5 % and 95 % of the bootstrap (None: never).
    """

    fanout: int
    elements: int | None
    low: int | None
    high: int | None

    def to_dict(self) -> dict[str, Any]:
        return {"elements": self.elements, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Batch:
    """Who sends the equal blocks of a batch to whom. ``sources`` on one node, ``targets`` on another."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    bucket_bytes: int

    def cut(self, block_bytes: int) -> tuple[int, int, int]:
        """Blocks in a bucket, bytes of each of them there (a block larger than its share is cut), and buckets."""
        room = min(self.bucket_bytes, self.bucket_bytes * len(self.sources) // len(self.targets))
        least = len(self.sources) * len(self.targets)  # so that every source serves every hub in every bucket
        blocks = max(1, min(room // block_bytes, BATCH_BLOCKS) // least) * least
        piece = min(block_bytes, max(PART_ALIGN, room // blocks // PART_ALIGN * PART_ALIGN))
        return blocks, piece, max(1, -(-BATCH_BLOCKS * block_bytes // (blocks * piece)))


class _Rows:
    """Rows of RoundLoads under construction, given as messages of equal blocks."""

    def __init__(self, executor: str) -> None:
        self._executor = executor
        self._rows: list[tuple[int, int, int, int, int, int, int]] = []

    def add(self, number: int, src: int, dst: int, blocks: float, nbytes: int) -> None:
        """``blocks`` contiguous blocks of ``nbytes`` each from ``src`` to ``dst`` in round ``number``."""
        count = max(1, round(blocks))
        padded = -(-nbytes // PART_ALIGN) * PART_ALIGN
        own = self._executor == "send-recv" and nbytes >= DIRECT_MIN_BYTES
        size, messages = (nbytes * count, count) if own else (padded * count, 1)
        packed, segments = (0, 0) if own else (size, count)
        self._rows.append((number, src, dst, size, messages, packed, segments))

    def loads(self, rounds: int) -> RoundLoads:
        table = np.asarray(self._rows, dtype=np.int64).reshape(-1, 7)
        number, src, dst, size, messages, packed, segments = table.T
        return RoundLoads(
            rounds, number, src, dst, size, messages, packed, segments, packed, segments, segments, segments, segments
        )


def _direct_rows(rows: _Rows, number: int, batch: Batch, blocks: int, nbytes: int) -> None:
    for src in batch.sources:
        for dst in batch.targets:
            rows.add(number, src, dst, blocks / len(batch.sources), nbytes)


def _stage_one(rows: _Rows, number: int, batch: Batch, route: int, blocks: int, nbytes: int) -> None:
    ranks = len(batch.targets)
    for src in batch.sources:
        for dst in batch.targets:
            if route == RELAY:
                rows.add(number, src, dst, blocks / (len(batch.sources) * ranks), nbytes)
            else:
                rows.add(number, src, dst, blocks / len(batch.sources), max(1, nbytes // ranks))


def _stage_two(rows: _Rows, number: int, batch: Batch, route: int, blocks: int, nbytes: int) -> None:
    ranks = len(batch.targets)
    for src in batch.targets:
        for dst in batch.targets:
            if src != dst and route == RELAY:
                rows.add(number, src, dst, blocks / ranks, nbytes)
            elif src != dst:
                rows.add(number, src, dst, blocks, max(1, nbytes // ranks))


@dataclass(frozen=True, eq=False)
class BatchLoads:
    """The rounds of a batch by every route for every block size: seven kinds of rounds each, and their buckets."""

    loads: RoundLoads
    buckets: NDArray[np.int64]


def batch_loads(batch: Batch, sizes: Sequence[int], executor: str) -> BatchLoads:
    """Loads of the batch for block ``sizes`` in bytes. Pure; no cost enters."""
    rows = _Rows(executor)
    buckets = np.zeros(len(sizes), dtype=np.int64)
    for place, size in enumerate(sizes):
        blocks, piece, buckets[place] = batch.cut(int(size))
        base = _KINDS * place
        _direct_rows(rows, base, batch, blocks, piece)
        for slot, route in ((1, RELAY), (4, SPREAD)):
            _stage_one(rows, base + slot, batch, route, blocks, piece)
            _stage_one(rows, base + slot + 1, batch, route, blocks, piece)
            _stage_two(rows, base + slot + 1, batch, route, blocks, piece)
            _stage_two(rows, base + slot + 2, batch, route, blocks, piece)
    return BatchLoads(rows.loads(_KINDS * len(sizes)), buckets)


def batch_seconds(pricer: Pricer, batch: BatchLoads) -> FloatArray:
    """Predicted seconds by direct, relay and spread (3, sizes). Pure."""
    terms, buckets = pricer.terms(batch.loads), batch.buckets
    first = _KINDS * np.arange(len(buckets))
    once, between = np.ones_like(buckets), buckets - 1
    return np.stack(
        [
            _sequence(terms, [(first, buckets)]),
            _sequence(terms, [(first + 1, once), (first + 2, between), (first + 3, once)]),
            _sequence(terms, [(first + 4, once), (first + 5, between), (first + 6, once)]),
        ]
    )


def _sequence(terms: RoundTerms, parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> FloatArray:
    """Seconds of rounds that follow each other, each kind of round so many times; all ranks wait for each other."""
    total: FloatArray = terms.pack[parts[0][0]].max(axis=1) + terms.unpack[parts[-1][0]].max(axis=1)
    before: NDArray[np.int64] | None = None
    for number, times in parts:
        total = total + times * terms.communicate[number].max(axis=1)
        again = (terms.unpack[number] + terms.pack[number]).max(axis=1)
        total = total + np.maximum(times - 1, 0) * again
        if before is not None:
            # Where the middle kind does not happen at all, the first is followed by the last.
            total = total + np.where(times > 0, (terms.unpack[before] + terms.pack[number]).max(axis=1), 0.0)
            before = np.where(times > 0, number, before)
        else:
            before = number
    return total


def possible_fanouts(topology: Topology) -> tuple[int, ...]:
    """Numbers of destination ranks per node that a move may have: 2, 4, 8, ... and all ranks of a node."""
    most = max(len(topology.ranks_of(node)) for node in range(topology.nodes))
    return tuple(sorted({2**k for k in range(1, most.bit_length()) if 2**k <= most} | ({most} if most > 1 else set())))


def find_thresholds(
    profile: Profile,
    topology: Topology,
    executor: str,
    *,
    fanouts: Sequence[int],
    bucket_bytes: int,
    itemsize: int = 2,
) -> tuple[dict[int, Threshold], dict[int, Threshold]]:
    """``min_relay`` and ``min_split`` by fanout, in elements of ``itemsize`` bytes.

    Empty on a single node. Raises InputError where no node has as many ranks as a fanout.
    """
    relay: dict[int, Threshold] = {}
    split: dict[int, Threshold] = {}
    if topology.nodes < 2:
        return relay, split
    for fanout in fanouts:
        pair, batch = pair_batch(topology, fanout, bucket_bytes)
        loads = batch_loads(batch, _SIZES.tolist(), executor)
        pricer = Pricer(profile, pair, executor)
        central = batch_seconds(pricer, loads)
        drawn = [
            batch_seconds(Pricer(profile, pair, executor, costs), loads)
            for costs in profile.executors[executor].replicates
        ]
        for found, row in ((relay, 1), (split, 2)):
            value = _crossing(central[0], central[row], pricer.error)
            edges = [_crossing(one[0], one[row], pricer.error) for one in drawn] or [value]
            low, high = (float(np.quantile(edges, q, method="nearest")) for q in (_LOW, _HIGH))
            low, high = min(low, value), max(high, value)
            found[fanout] = Threshold(fanout, *(_elements(edge, itemsize) for edge in (value, low, high)))
    return relay, split


def threshold_route(
    groups: BlockGroups, relay: Mapping[int, Threshold], split: Mapping[int, Threshold]
) -> NDArray[np.int8]:
    """Route codes per group (g) under today's rule with other constants: those of ``relay`` and ``split`` for as many
    destination ranks per node, in elements of a block as the rule counts them. Direct where there are none. Pure."""
    codes = groups.uniform(DIRECT)
    for fanout in sorted(set(relay) & set(split)):
        mine = groups.fanout == fanout
        codes[mine] = groups.by_threshold(relay[fanout].elements, split[fanout].elements)[mine]
    return codes


def pair_batch(topology: Topology, fanout: int, bucket_bytes: int) -> tuple[Topology, Batch]:
    """Two nodes of the topology on their own (every pair of nodes may be busy alike), and the batch between them.

    Raises InputError where no node has ``fanout`` ranks.
    """
    target = next((n for n in range(topology.nodes - 1, -1, -1) if len(topology.ranks_of(n)) >= fanout), None)
    if target is None or fanout < 2:
        raise InputError(f"no node of this topology has {fanout} destination ranks, or they are fewer than 2")
    source = next(n for n in range(topology.nodes) if n != target)
    if topology.nodes == 2:
        return topology, Batch(topology.ranks_of(source), topology.ranks_of(target)[:fanout], bucket_bytes)
    ranks = [*topology.ranks_of(source), *topology.ranks_of(target)]
    width = len(topology.ranks_of(source))
    pair = Topology(
        node=tuple([0] * width + [1] * (len(ranks) - width)), nic=tuple(topology.nic[rank] for rank in ranks)
    )
    return pair, Batch(tuple(range(width)), tuple(range(width, width + fanout)), bucket_bytes)


def _crossing(direct: FloatArray, other: FloatArray, error: float) -> float:
    """Bytes from which on ``other`` is faster than ``direct``, infinity for never; interpolated in the log.

    What counts is the gain beyond the last losing size: one below it, however large, is no reason for a threshold.
    """
    gain = 1 - other / direct
    last = int(np.flatnonzero(gain <= 0).max(initial=-1))
    if gain[last + 1 :].max(initial=0.0) <= error:
        return float("inf")
    if last < 0:
        return float(_SIZES[0])
    share = -gain[last] / (gain[last + 1] - gain[last])
    return float(np.exp(np.log(_SIZES[last]) + share * np.log(_SIZES[last + 1] / _SIZES[last])))


def _elements(nbytes: float, itemsize: int) -> int | None:
    return None if not np.isfinite(nbytes) else max(1, int(np.ceil(nbytes / itemsize - 1e-9)))
