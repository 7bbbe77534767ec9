"""Benchmarks: how long planning takes, and what a two-way exchange costs against a one-way one.

``python -m relaymeter.harness.bench`` prints both; returns 3 where a bar is missed: planning the largest scenario on
128 ranks takes at most 10 s, a two-way exchange by send-recv at most 1.1 of a one-way one. The exchange runs on two
ranks of a cluster in a box, or on loopback where the machine makes none.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from relaymeter.errors import EXIT_GATE_MISSED, EXIT_OK
from relaymeter.harness.launch import ClusterSpec, launch
from relaymeter.harness.moves import plan_scenario
from relaymeter.harness.scenario import load_scenario
from relaymeter.records import dump_json, load_json, write_text
from relaymeter.relayout.topology import Topology
from relaymeter.units import format_seconds

__all__ = ["main"]

_CASES = (("demo", 2, 2), ("qwen3-0.6b", 2, 8), ("qwen3-8b", 4, 8), ("qwen3-32b", 16, 8))
_PLAN_LIMIT_S = 10.0
_TWO_WAY_LIMIT = 1.1
_BYTES = 4 << 20
_RATE_BYTES_PER_S = 50e6


def _planning(console: Console) -> bool:
    """Plan and schedule every move of the larger scenarios by every route; whether the slowest is within its bar."""
    table = Table("scenario", "ranks", "moves", "plan and schedule", title="planning", title_justify="left")
    worst = 0.0
    for name, nodes, ranks_per_node in _CASES:
        begin = time.perf_counter()
        moves = plan_scenario(load_scenario(name), Topology.grid(nodes, ranks_per_node))
        for move in moves:
            for codes in move.uniform().values():
                move.schedule(codes)[0].loads("send-recv")
        took = time.perf_counter() - begin
        worst = max(worst, took)
        table.add_row(name, f"{nodes}x{ranks_per_node}", str(len(moves)), format_seconds(took))
    console.print(table)
    return worst <= _PLAN_LIMIT_S


def _exchanges(console: Console) -> bool:
    """One-way and two-way exchanges between two nodes; whether send-recv is within its bar."""
    with tempfile.TemporaryDirectory(prefix="relaymeter-bench-") as folder:
        result = Path(folder) / "result.json"
        cluster = ClusterSpec(nodes=2, ranks_per_node=1, nic_rate_bytes_per_s=_RATE_BYTES_PER_S)
        ended = launch(
            ["--rank-result", str(result)],
            cluster,
            time_limit_s=120.0,
            log_dir=Path(folder),
            module="relaymeter.harness.bench",
        )
        if ended.exit_code != EXIT_OK:
            return False
        found = load_json(result, "result")
    where = "shaped box" if ended.in_box else "loopback"
    table = Table(
        "executor", "one way", "two ways", "ratio", title=f"{_BYTES >> 20} MiB, {where}", title_justify="left"
    )
    for executor, (one, two) in found.items():
        table.add_row(executor, format_seconds(one), format_seconds(two), f"{two / one:.3f}")
    console.print(table)
    one, two = found["send-recv"]
    return bool(two <= _TWO_WAY_LIMIT * one)


def _rank(result: Path) -> int:
    """The ranks' part of the exchanges: medians by executor, written by rank 0."""
    import numpy as np

    from relaymeter.calibration.measure import RankExchange
    from relaymeter.harness.world import join
    from relaymeter.relayout.transport import EXECUTORS

    world = join(60.0)
    exchange = RankExchange(world)
    found = {}
    for executor in EXECUTORS:
        one = np.asarray([[0, _BYTES], [0, 0]], dtype=np.int64)
        exchange.connect(executor)
        samples = [exchange.measure(matrix, executor).times_s for matrix in (one, one + one.T)]
        found[executor] = [statistics.median(times) for times in samples]
    if world.rank == 0:
        write_text(result, dump_json(found))
    world.close()
    return EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks and return the exit code (as a rank: its part of them)."""
    parser = argparse.ArgumentParser(prog="python -m relaymeter.harness.bench", description="Run the benchmarks.")
    parser.add_argument("--rank-result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_result is not None:
        return _rank(options.rank_result)
    console = Console(highlight=False)
    missed = []
    if not _planning(console):
        missed.append(f"planning took more than {_PLAN_LIMIT_S:g} s")
    if not _exchanges(console):
        missed.append(f"a two-way exchange took more than {_TWO_WAY_LIMIT:g} of a one-way one, or did not end")
    for text in missed:
        console.print(f"missed: {text}")
    return EXIT_GATE_MISSED if missed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
