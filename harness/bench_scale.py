"""Benchmark of scale: one rank's plan of a trillion-parameter mixture-of-experts model, at 64 and at 1,024 ranks.

``scale(say)`` gives the figures. Every plan is made in a process of its own, ``python -m
relaymeter.harness.bench_scale RANKS RANK``, so that its peak memory is its own. No ranks are started.

The trainer is on the first half of the ranks: ZeRO-3 over all of them, the experts over groups of 8. The inference copy
is on the second half: the rest in copies of 8 ranks, each expert over 8 ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaymeter.errors import EXIT_OK, RelaymeterError
from relaymeter.harness.bench_report import Figure, Found, Say
from relaymeter.harness.moe import TRILLION, MoeGeometry, serving_layout, trainer_layout
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.topology import Topology
from relaymeter.units import format_bytes, format_seconds

__all__ = ["TINY", "expert_layouts", "main", "scale"]

_PART = "scale"
#: Ranks that share an expert in the trainer, ranks of an expert and of a copy of the rest in the inference copy.
_DEGREE = 8
_WORLDS = (64, 1024)
_TINY_WORLDS = (16, 32)
_REPEATS = 3
_TIME_LIMIT_S = 10.0
_MEMORY_LIMIT_BYTES = 4 << 30
_GROWTH_LIMIT = 1.5
_BUCKET_BYTES = 256 << 20
_PROCESS_LIMIT_S = 300.0
_STATUS = Path("/proc/self/status")

TINY = MoeGeometry(
    hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3, first_k_dense_replace=1,
    n_routed_experts=16, n_shared_experts=1, num_attention_heads=8, q_lora_rank=24, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, vocab_size=256,
)  # fmt: skip


def expert_layouts(geometry: MoeGeometry, world_size: int) -> tuple[Layout, Layout]:
    """The trainer on the first half of the ranks and the inference copy on the second. Pure."""
    half = world_size // 2
    source = trainer_layout(geometry, range(half), half // _DEGREE, world_size)
    destination = serving_layout(
        geometry,
        range(half, world_size),
        tensor_parallel=_DEGREE,
        expert_parallel=half // _DEGREE,
        expert_tensor_parallel=_DEGREE,
        world_size=world_size,
    )
    return source, destination


def scale(say: Say, tiny: bool = False) -> Found:
    """Plan for one sender and one receiver at both sizes; the slower of the two counts. ``tiny``: a small model."""
    worlds, repeats = (_TINY_WORLDS, 1) if tiny else (_WORLDS, _REPEATS)
    places = [(world, role, rank) for world in worlds for role, rank in (("sender", 0), ("receiver", world // 2))]
    taken: dict[tuple[int, str], list[dict[str, Any]]] = {(world, role): [] for world, role, _ in places}
    for repeat in range(1, repeats + 1):  # by turns, so that a busy moment does not fall on one size alone
        for world, role, rank in places:
            say(f"{role}, rank {rank} of {world:,} ({repeat} of {repeats})")
            taken[world, role].append(_in_process(world, rank, tiny))
    found = {place: {name: [run[name] for run in runs] for name in runs[0]} for place, runs in taken.items()}
    figures: list[Figure] = []
    for (world, role), measured in found.items():
        figures += _rank_figures(world, role, measured, judged=world == worlds[-1])
    for role in ("sender", "receiver"):
        small, large = found[worlds[0], role], found[worlds[-1], role]
        for what, names in (
            ("with layouts", ("layouts_s", "plan_s", "schedule_s")),
            ("without layouts", ("plan_s", "schedule_s")),
        ):
            figures.append(_growth(worlds, role, what, [_per_segment(runs, names) for runs in (small, large)]))
    return figures, []


def _in_process(world: int, rank: int, tiny: bool) -> dict[str, Any]:
    """What ``main`` prints for one rank. Raises RelaymeterError where the process failed."""
    command = [sys.executable, "-m", "relaymeter.harness.bench_scale", str(world), str(rank), *(["--tiny"] * tiny)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROCESS_LIMIT_S, check=False)
    if ended.returncode != EXIT_OK:
        raise RelaymeterError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _middle(runs: dict[str, Any], *names: str) -> float:
    return float(statistics.median(sum(values) for values in zip(*(runs[name] for name in names), strict=True)))


def _per_segment(runs: dict[str, Any], names: Sequence[str]) -> tuple[float, float, int]:
    total, segments = _middle(runs, *names), runs["segments"][0]
    return total / max(segments, 1), total, segments


def _rank_figures(world: int, role: str, runs: dict[str, Any], *, judged: bool) -> list[Figure]:
    layouts, plan, schedule = (_middle(runs, name) for name in ("layouts_s", "plan_s", "schedule_s"))
    total, peak = _middle(runs, "layouts_s", "plan_s", "schedule_s"), max(runs["peak_bytes"])
    where = f"{role} of {world:,} ranks"
    split = f"layouts {format_seconds(layouts)}, plan {format_seconds(plan)}, rounds {format_seconds(schedule)}"
    note = f"layouts of the whole model ({runs['tensors'][0]:,} tensors), the rank's own plan and its segments by round"
    return [
        Figure(
            part=_PART, name=f"{where}: time", value=total, unit="s", bar=_TIME_LIMIT_S if judged else None,
            ours=format_seconds(total), peer=f"{split}; {runs['segments'][0]:,} segments", samples=runs, note=note,
        ),
        Figure(
            part=_PART, name=f"{where}: peak memory", value=float(peak), unit="bytes",
            bar=float(_MEMORY_LIMIT_BYTES) if judged else None, ours=format_bytes(peak),
            peer=f"imports alone {format_bytes(max(runs['imported_bytes']))}",
        ),
    ]  # fmt: skip


def _growth(worlds: Sequence[int], role: str, what: str, both: list[tuple[float, float, int]]) -> Figure:
    (before, _, few), (after, _, many) = both
    return Figure(
        part=_PART, name=f"{role}: growth of cost per segment, {what}",
        value=after / before, unit="ratio", bar=_GROWTH_LIMIT, ours=format_seconds(after),
        peer=f"{format_seconds(before)} on {worlds[0]:,} ranks; {few:,} -> {many:,} segments",
        samples={"seconds_per_segment": [before, after]},
    )  # fmt: skip


def _peak_bytes() -> int:
    """Most memory that this process has had resident. Linux's own count of the process starts at exec; the portable one
    begins with what the parent had, because it is inherited."""
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank's plan in this process: prints seconds, segments and peak bytes as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m relaymeter.harness.bench_scale", description=main.__doc__)
    parser.add_argument("ranks", type=int, help="size of the world: a multiple of 16")
    parser.add_argument("rank", type=int, help="the rank whose plan is made")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    options = parser.parse_args(arguments)
    imported = _peak_bytes()
    begin = time.perf_counter()
    source, destination = expert_layouts(TINY if options.tiny else TRILLION, options.ranks)
    built = time.perf_counter()
    topology = Topology.grid(options.ranks // _DEGREE, _DEGREE)
    plan = plan_move(source, destination, topology, rank=options.rank)
    planned = time.perf_counter()
    direct = np.zeros(int(plan.group_start[-1]), dtype=np.int8)
    schedule = build_schedule(plan, topology, direct, _BUCKET_BYTES)
    segments = schedule.segments_for(options.rank)
    ended = time.perf_counter()
    found = {
        "layouts_s": built - begin,
        "plan_s": planned - built,
        "schedule_s": ended - planned,
        "segments": len(segments),
        "tensors": len(plan.tensors),
        "peak_bytes": _peak_bytes(),
        "imported_bytes": imported,
    }
    print(json.dumps(found))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
