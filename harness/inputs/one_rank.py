"""A move on more ranks than anyone should plan for: loads of all ranks, and the plan of the busiest one.

``view = one_rank_view(move, topology, executor, profile)``, then ``view.tables()`` for people and ``view.to_dict()``.
Any process, no torch import.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from relaymeter.calibration.profiles import Profile
from relaymeter.harness.emit import NONE, simple_table, size_text, time_text
from relaymeter.harness.inputs.loads import RankLoads, rank_loads
from relaymeter.harness.inputs.plan_model import ModelMove
from relaymeter.relayout.bounds import lower_bound
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.routes import DIRECT, ROUTES, BlockGroups, block_groups
from relaymeter.relayout.schedule import Schedule, build_schedule
from relaymeter.relayout.topology import Topology
from relaymeter.units import format_seconds

__all__ = ["OneRankView", "one_rank_view"]

FloatArray = NDArray[np.float64]
#: Bytes of a bucket where none are asked for: that of the largest moves.
_BUCKET_BYTES = 256 << 20
#: Copies of the node's plan whose rounds are looked at, over all routes: more would take minutes.
_MOST_COPIES = 8_000_000


@dataclass(frozen=True, eq=False)
class OneRankView:
    """``loads``: of all ranks. ``rank``: whose plan it is; ``segments``: its own. ``routes``: of that plan, JSON-ready,
    None for what only rounds say where there are too many. ``bound_s``: what no route can beat, of the plan's
    traffic; None without a profile."""

    name: str
    topology: Topology
    loads: RankLoads
    rank: int
    segments: int
    routes: Sequence[Mapping[str, Any]]
    bucket_bytes: int
    bound_s: float | None
    bound_by: str | None
    plan_s: float

    @property
    def _by_node(self) -> dict[str, FloatArray]:
        node, count = self.topology.node_array, self.topology.nodes
        columns = {"from_nodes": self.loads.from_nodes, "to_nodes": self.loads.to_nodes}
        return {
            name: np.bincount(node, weights=column, minlength=count).astype(float) for name, column in columns.items()
        }

    def tables(self) -> list[Table]:
        """Totals and the busiest, then the routes of the one plan."""
        loads, by_node = self.loads, self._by_node
        first = simple_table(
            f"{self.name}: all ranks, {size_text(int(loads.into.sum()))} into place",
            [("", "left"), ("within\na rank", "right"), ("in node", "right"), ("from\nother nodes", "right"),
             ("to\nother nodes", "right")],
            caption="bytes of the direct route; what a rank sends: holders share evenly",
        )  # fmt: skip
        sums = (loads.in_rank, loads.in_node, loads.from_nodes, loads.to_nodes)
        first.add_row("all ranks", *(size_text(int(column.sum())) for column in sums))
        home = self.topology.node_array == int(by_node["from_nodes"].argmax())
        other = self.topology.node_array == int(by_node["to_nodes"].argmax())
        for title, chosen in (("most received", home), ("most sent", other)):
            label = f"node {self.topology.node[int(chosen.argmax())]} ({title})"
            first.add_row(label, *(size_text(int(column[chosen].sum())) for column in sums))
        first.add_row(f"rank {self.rank}", *(size_text(int(column[self.rank])) for column in sums))
        second = simple_table(
            f"{self.name}: the plan of rank {self.rank}, {self.segments:,} segments",
            [("route", "left"), ("node receives\nfrom other nodes", "right"), ("in node", "right"),
             ("messages\nof the rank", "right"), ("rounds", "right"), ("buffers\nof the rank", "right")],
            caption=f"planned in {format_seconds(self.plan_s)}; buckets of {size_text(self.bucket_bytes)}",
        )  # fmt: skip
        for row in self.routes:
            second.add_row(
                row["route"], size_text(row["bytes_cross_node"]), size_text(row["bytes_in_node"]),
                *(NONE if row[key] is None else f"{row[key]:,}" for key in ("messages", "rounds")),
                NONE if row["peak_predicted_bytes"] is None else size_text(row["peak_predicted_bytes"]),
            )  # fmt: skip
        return [first, second]

    def lines(self) -> list[str]:
        """The bound in words."""
        if self.bound_s is None:
            return ["no profile, so no bound: give --profile PROFILE"]
        return [
            f"no route can be faster than {time_text(self.bound_s)} ({self.bound_by}); the routes of so large a move "
            "are not priced, and chain hangs on what all nodes want: plan a smaller topology for their order"
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: bytes by rank are summed by node."""
        by_node = self._by_node
        return {
            "move": self.name,
            "bytes_total": int(self.loads.into.sum()),
            "bytes_in_rank": int(self.loads.in_rank.sum()),
            "bytes_in_node": int(self.loads.in_node.sum()),
            "bytes_cross_node": int(self.loads.from_nodes.sum()),
            "node_receives": [int(size) for size in by_node["from_nodes"]],
            "node_sends": [int(size) for size in by_node["to_nodes"]],
            "rank": self.rank,
            "segments": self.segments,
            "bucket_bytes": self.bucket_bytes,
            "routes": [dict(row) for row in self.routes],
            "bound_s": self.bound_s,
            "bound_by": self.bound_by,
            "plan_s": self.plan_s,
        }


def one_rank_view(
    move: ModelMove, topology: Topology, executor: str, profile: Profile | None, bucket_bytes: int | None = None
) -> OneRankView:
    """Loads of all ranks, and the plan of the rank that receives most on the node that receives most."""
    begin = time.perf_counter()
    loads = rank_loads(move.source_layout, move.copies_layout, topology)
    received = np.bincount(topology.node_array, weights=loads.from_nodes, minlength=topology.nodes)
    home = topology.ranks_of(int(received.argmax()))
    rank = max(home, key=lambda one: (loads.from_nodes[one], loads.into[one], -one))
    plan = plan_move(move.source_layout, move.copies_layout, topology, rank=rank)
    groups = block_groups(plan, topology)
    size = bucket_bytes or _BUCKET_BYTES
    left = _MOST_COPIES
    rows: list[dict[str, Any]] = []
    for name in groups.candidates:
        codes = groups.uniform(ROUTES.index(name))
        left -= sum(len(found.src_rank) * len(found.tensors) for found in plan.classes)
        schedule = build_schedule(plan, topology, codes, size) if left >= 0 else None
        rows.append({"route": name, **_node_bytes(groups, codes, rank), **_rounds(schedule, rank, executor)})
    bound = None
    if profile is not None:
        bound = lower_bound(plan, topology, profile.nic_rates(topology), profile.port_rate())
    return OneRankView(
        name=move.name,
        topology=topology,
        loads=loads,
        rank=rank,
        segments=sum(
            int(((found.src_rank == rank) | (found.dst_rank == rank)).sum()) * len(found.tensors)
            for found in plan.classes
        ),
        routes=rows,
        bucket_bytes=size,
        bound_s=None if bound is None else bound.seconds,
        bound_by=None if bound is None else bound.bound_by,
        plan_s=move.layouts_s + time.perf_counter() - begin,
    )


def _node_bytes(groups: BlockGroups, codes: NDArray[np.int8], rank: int) -> dict[str, int]:
    """Bytes that the node of ``rank`` receives from others, and those that its ranks send to each other: a block that
    is relayed or spread arrives once and is passed on inside the node."""
    here = groups.node == groups.topology.node[rank]
    size = groups.elements * groups.itemsize * groups.count
    passed = np.where(groups.effective(codes) == DIRECT, 0, groups.fanout - 1) * groups.crosses
    inside = 0
    for found in groups.plan.classes:
        node = groups.topology.node_array
        near = (node[found.src_rank] == node[rank]) & (node[found.dst_rank] == node[rank])
        near &= found.src_rank != found.dst_rank
        each = np.prod(found.shape[near], axis=1, dtype=np.int64).sum()
        inside += int(each) * found.itemsize * len(found.tensors)
    return {
        "bytes_cross_node": int((size * (groups.fanout - passed))[here & groups.crosses].sum()),
        "bytes_in_node": inside + int((size * passed)[here].sum()),
    }


def _rounds(schedule: Schedule | None, rank: int, executor: str) -> dict[str, int | None]:
    """Messages, rounds and buffers of the rank."""
    if schedule is None:
        return dict.fromkeys(("messages", "rounds", "peak_predicted_bytes"))
    loads = schedule.loads(executor)
    mine = (loads.src == rank) | (loads.dst == rank)
    return {
        "messages": int(loads.messages[mine].sum()),
        "rounds": schedule.rounds,
        "peak_predicted_bytes": int(schedule.peak_bytes(executor)[rank]),
    }
