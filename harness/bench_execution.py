"""Benchmarks of execution and memory: the parent's part, which starts the ranks and makes figures of what they found.

``shaped(say)`` moves across a cluster in a box whose NICs pass 400 Mbit/s; ``local(say)`` moves inside one machine
beside gather-then-slice; ``memory(say)`` holds the peak of every rank against what was predicted. The ranks' part is
``bench_ranks.py``.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from relaymeter.errors import EXIT_OK
from relaymeter.harness.bench_report import Figure, Found, PartFailed, Say, pair_text, plain_table
from relaymeter.harness.box import payload_rate
from relaymeter.harness.launch import ClusterSpec, launch
from relaymeter.harness.models import Qwen3Geometry
from relaymeter.harness.moves import default_executor
from relaymeter.records import dump_json, load_json, write_text
from relaymeter.units import format_bytes, format_rate, format_seconds

__all__ = ["local", "memory", "shaped"]

#: The geometry of the shipped scenario ``demo``: 59 MB of bfloat16.
DEMO = Qwen3Geometry(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=7, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, vocab_size=8192,
)  # fmt: skip
#: The same with more layers, so that more than 64 MiB cross the nodes.
LARGER = Qwen3Geometry(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=9, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, vocab_size=8192,
)  # fmt: skip
TINY = Qwen3Geometry(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    head_dim=16, vocab_size=256,
)  # fmt: skip

_NIC_BYTES_PER_S = 50e6
_EXCHANGE_BYTES = 16 << 20
_LEAST_MOVE_BYTES = 64 << 20
_OVER_BOUND = 1.10
_TWO_WAYS = 1.1
_FASTER_THAN_GATHER = 4.0
_TIME_LIMIT_S = 240.0
_DEFAULT = default_executor("auto")
Case = Mapping[str, Any]


def _launch(job: Mapping[str, Any], cluster: ClusterSpec) -> tuple[dict[str, Any], str | None]:
    """What the ranks found, and why they ran on loopback where a box was asked for. Raises PartFailed."""
    with tempfile.TemporaryDirectory(prefix="relaymeter-bench-") as folder:
        job_path, result = Path(folder) / "job.json", Path(folder) / "result.json"
        write_text(job_path, dump_json(job))
        ended = launch(
            [str(job_path), str(result)], cluster, time_limit_s=_TIME_LIMIT_S, log_dir=Path(folder),
            module="relaymeter.harness.bench_ranks",
        )  # fmt: skip
        if ended.interrupted:
            raise KeyboardInterrupt
        if ended.exit_code != EXIT_OK:
            raise PartFailed(f"the ranks of {job['part']} ended with exit code {ended.exit_code}", ended.exit_code)
        found: dict[str, Any] = load_json(result, "result")
    return found, ended.reason


def _slowest(case: Case) -> list[float]:
    """Seconds of the slowest rank, per repeat."""
    return [max(ranks) for ranks in case["seconds"]]


def _median(case: Case) -> float:
    return statistics.median(_slowest(case))


def _raw(case: Case) -> dict[str, Any]:
    return {name: case[name] for name in ("seconds", "pack_s", "communicate_s", "unpack_s")}


def _split(case: Case) -> str:
    """Where the time of the move goes: by phase the slowest rank, medians."""
    parts = [(name, statistics.median(max(r) for r in case[f"{name}_s"])) for name in ("pack", "communicate", "unpack")]
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts)


def shaped(say: Say, tiny: bool = False) -> Found:
    """Moves between two nodes of two ranks, 400 Mbit/s a rank: held against the lower bound, by the rate of the box."""
    part = "shaped"
    geometry, repeats, nbytes = (TINY, 1, 1 << 16) if tiny else (LARGER, 5, _EXCHANGE_BYTES)
    rate = payload_rate(_NIC_BYTES_PER_S)
    job = {
        "part": part, "geometry": asdict(geometry), "repeats": repeats, "exchange_bytes": nbytes,
        "payload_bytes_per_s": rate,
    }  # fmt: skip
    say("starting 2 x 2 ranks in a cluster in a box, 400 Mbit/s for each")
    found, reason = _launch(job, ClusterSpec(nodes=2, ranks_per_node=2, nic_rate_bytes_per_s=_NIC_BYTES_PER_S))
    if reason is not None:
        say(f"no box here, so nothing to hold against a bound: {reason}")
    judged = reason is None
    figures: list[Figure] = []
    moves = dict.fromkeys(case["move"] for case in found["cases"] if "->" in case["move"])
    note = (
        f"bound: distinct bytes over the NICs' payload rate in theory, {format_rate(rate)} of 50 MB/s "
        "(1448 of 1514 bytes); slowest rank, median"
        if judged
        else f"not judged, no box here: {reason}"
    )
    for move in moves:
        for executor in dict.fromkeys(case["executor"] for case in found["cases"]):
            cases = [c for c in found["cases"] if c["move"] == move and c["executor"] == executor]
            best = min(cases, key=_median)
            size = int(best["bound_s"] * rate * 2)
            bar = _OVER_BOUND if judged and size >= _LEAST_MOVE_BYTES and executor == _DEFAULT else None
            others = ", ".join(f"{c['route']} {_median(c) / c['bound_s']:.3f}" for c in cases if c is not best)
            figures.append(
                Figure(
                    part=part, name=f"{move}, {format_bytes(size)} across nodes, {best['route']}, {executor}",
                    value=_median(best) / best["bound_s"], unit="ratio", bar=bar,
                    ours=format_seconds(_median(best)),
                    peer=pair_text("bound", best["bound_s"]) + (f" ({others})" if others else ""),
                    note=note, samples={c["route"]: _raw(c) for c in cases},
                )
            )  # fmt: skip
    return [*figures, *_two_ways(part, found["cases"], nbytes, judged)], []


def _two_ways(part: str, cases: Sequence[Case], nbytes: int, judged: bool) -> list[Figure]:
    by = {(case["move"], case["executor"]): case for case in cases}
    figures = []
    for executor in dict.fromkeys(case["executor"] for case in cases):
        one = by["one way", executor]
        for ways in ("two ways", "stages swapped"):
            two = by[ways, executor]
            figures.append(
                Figure(
                    part=part, name=f"{ways} over one way, {format_bytes(nbytes)} a rank, {executor}",
                    value=_median(two) / _median(one), unit="ratio",
                    bar=_TWO_WAYS if judged and executor == _DEFAULT else None, ours=format_seconds(_median(two)),
                    peer=pair_text("one way", _median(one)), samples={"one_way": _raw(one), "two_ways": _raw(two)},
                )
            )  # fmt: skip
    return figures


def local(say: Say, tiny: bool = False) -> Found:
    """ZeRO-3 x4 -> TP4 in four local ranks: held against gather-then-slice, and against the same bytes alone."""
    part = "local"
    geometry, repeats = (TINY, 1) if tiny else (DEMO, 9)
    say("starting 4 ranks on loopback")
    found, _ = _launch(
        {"part": part, "geometry": asdict(geometry), "repeats": repeats},
        ClusterSpec(nodes=1, ranks_per_node=4, shape=False),
    )
    note = (
        f"slowest rank, median of {repeats} turns, every result checked; turned: the copy's ranks in another order, so "
        "that no rank holds what it needs; judged against the faster gather"
    )
    figures: list[Figure] = []
    for order in dict.fromkeys(case["order"] for case in found["cases"]):
        moves, peers = (
            [case for case in found["cases"] if case["order"] == order and (case["move"] == "move") == own]
            for own in (True, False)
        )
        for case in moves:
            figures += _beside_gather(part, order, case, peers, note)
    return figures, []


def _beside_gather(part: str, order: str, case: Case, peers: Sequence[Case], note: str) -> list[Figure]:
    """One executor's move beside every gather, and beside one even exchange of the same bytes."""
    name = "ZeRO-3 x4 -> TP4" + (", turned" if order == "turned" else "") + f", {case['executor']}"
    *gathers, floor = peers
    best = min(gathers, key=_median)
    figures = []
    for peer in gathers:
        judged = peer is best and order == "same" and case["executor"] == _DEFAULT
        text = f"{format_bytes(sum(peer['received_bytes']))} in {peer['collectives']} collectives"
        figures.append(
            Figure(
                part=part, name=f"{name}, against {peer['move']}", value=_median(peer) / _median(case), unit="ratio",
                bar=_FASTER_THAN_GATHER if judged else None, at_least=True, ours=format_seconds(_median(case)),
                peer=f"{format_seconds(_median(peer))}, {text}", note=note,
                samples={"move": _raw(case), "peer": peer["seconds"]},
            )
        )  # fmt: skip
    moved = format_bytes(case["bytes_in_node"] + case["bytes_cross_node"])
    figures.append(
        Figure(
            part=part, name=f"{name}, over one {floor['move']}", value=_median(case) / _median(floor), unit="ratio",
            ours=format_seconds(_median(case)), peer=f"{format_seconds(_median(floor))}, {moved}; {_split(case)}",
            samples={"floor": floor["seconds"]},
        )
    )  # fmt: skip
    return figures


def memory(say: Say, tiny: bool = False) -> Found:
    """Peak of every rank, by move, route and executor, against old + new layout + four buckets + hub buffers."""
    part = "memory"
    say("starting 2 x 2 ranks on loopback")
    found, _ = _launch(
        {"part": part, "geometry": asdict(TINY if tiny else DEMO), "repeats": 1},
        ClusterSpec(nodes=2, ranks_per_node=2, shape=False),
    )
    figures, tables = [], []
    for move in dict.fromkeys(case["move"] for case in found["cases"]):
        cases = [case for case in found["cases"] if case["move"] == move]
        tables.append(_memory_table(move, cases))
        for case in cases:
            figures += _memory_figures(part, move, case)
    figures += [_bounded_figure(part, case) for case in found["bounded"]]
    return figures, tables


def _bounded_figure(part: str, case: Case) -> Figure:
    """What a rank held at most beyond the larger of its layouts, beside what was predicted and an ordinary move."""
    peaks, predicted = _peaks(case), case["predicted_bytes"]
    rank = max(range(len(peaks)), key=lambda r: peaks[r] / max(predicted[r], 1))
    ordinary = min(case["source_bytes"][rank], case["destination_bytes"][rank]) + case["buffer_bytes"][rank]
    return Figure(
        part=part, name=f"bounded: {case['move']}, {case['executor']}: rank {rank}",
        value=peaks[rank] / max(predicted[rank], 1), unit="ratio", ours=format_bytes(peaks[rank]),
        peer=f"predicted {format_bytes(predicted[rank])}; source kept {format_bytes(ordinary)}",
        samples={key: case[key] for key in ("predicted_bytes", "peak_bytes", "source_bytes", "destination_bytes")},
        note="bounded: held beyond the larger layout, the source given up as it is read, buckets of "
        f"{format_bytes(case['bucket_bytes'])}",
    )  # fmt: skip


def _peaks(case: Case) -> list[float]:
    """Most that each rank held beyond the two layouts in a move (not-a-number: not measured)."""
    return [max(math.nan if v is None else v for v in rank) for rank in zip(*case["peak_bytes"], strict=True)]


def _limits(case: Case) -> list[float]:
    """Old and new layout and four buckets, by rank. A hub is a destination: it needs no buffers of its own."""
    layouts = zip(case["source_bytes"], case["destination_bytes"], strict=True)
    return [old + new + 4 * case["bucket_bytes"] for old, new in layouts]


def _memory_figures(part: str, move: str, case: Case) -> list[Figure]:
    peaks, limits = _peaks(case), _limits(case)
    columns = zip(case["source_bytes"], case["destination_bytes"], peaks, case["compiling_bytes"], strict=True)
    held = [old + new + max(peak, compiling) for old, new, peak, compiling in columns]
    worst = max(range(len(held)), key=lambda rank: held[rank] / max(limits[rank], 1))
    name = f"{move}, {case['route']}, {case['executor']}"
    samples = {key: case[key] for key in ("source_bytes", "destination_bytes", "predicted_bytes", "buffer_bytes",
                                          "peak_bytes", "compiling_bytes", "bucket_bytes")}  # fmt: skip
    return [
        Figure(
            part=part, name=f"{name}: rank {worst}", value=held[worst] / limits[worst], unit="ratio",
            bar=1.0, ours=format_bytes(held[worst]), peer=f"limit {format_bytes(limits[worst])}",
            note="measured: old + new layout + the larger peak, on the rank nearest to its limit; limit: both layouts "
            "+ four buckets (hubs are destinations and need no buffers of their own)", samples=samples,
        )
    ]  # fmt: skip


def _memory_table(move: str, cases: Sequence[Case]) -> Table:
    table = plain_table(
        f"memory by rank: {move}",
        [("route", "left"), ("executor", "left"), ("rank", "right"), ("old", "right"), ("new", "right"),
         ("buffers\npredicted", "right"), ("buffers\nheld", "right"), ("peak of\ncompiling", "right"),
         ("peak of\nmove", "right"), ("four\nbuckets", "right")],
        caption="peaks: beyond both layouts, buffers included; compiling: making views and buffers, once for a move",
    )  # fmt: skip
    for case in cases:
        for rank, peak in enumerate(_peaks(case)):
            sizes = (case["source_bytes"][rank], case["destination_bytes"][rank], case["predicted_bytes"][rank],
                     case["buffer_bytes"][rank], case["compiling_bytes"][rank], peak,
                     4 * case["bucket_bytes"])  # fmt: skip
            table.add_row(case["route"], case["executor"], str(rank), *map(format_bytes, sizes))
    return table
