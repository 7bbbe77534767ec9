"""``calibrate --paths``: small training states changed by every path, and the costs fitted to what that took.

    refuse_paths(args, hint)                                  # before a rank starts
    code, paths = measure_paths(args, cluster, profile, out)  # what a profile keeps as ``paths``

The change is one that every path can make: a ZeRO-3 engine over all ranks goes to half of them. It is made at three
sizes, so that each can be left out in turn to find the error of the prices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from relaymeter.calibration.profiles import Profile
from relaymeter.compare_records import CompareRecord
from relaymeter.errors import EXIT_OK, EXIT_WRONG_BITS, InputError
from relaymeter.harness import compare_emit, emit
from relaymeter.harness.commands_ranks import is_shaped
from relaymeter.harness.compare_change import Making, make_change, state_bytes
from relaymeter.harness.compare_config import CompareChange, CompareScenario
from relaymeter.harness.compare_prices import HELD_OUT
from relaymeter.harness.compare_storage import Storage, check_room, find_storages
from relaymeter.harness.jobs import ClusterConfig
from relaymeter.harness.launch import WorldHint
from relaymeter.harness.results import machine_id, make_stamp
from relaymeter.harness.signals import INTERRUPTED
from relaymeter.harness.state_config import GLOBAL_BATCH, EngineConfig, TrainingConfig
from relaymeter.harness.verdict import judge_comparison
from relaymeter.policies.path_costs import PathCosts, fit_path_costs
from relaymeter.units import counted, format_bytes, format_seconds

__all__ = [
    "check_paths",
    "copy_s_per_byte",
    "measure_paths",
    "path_scenario",
    "paths_document",
    "paths_lines",
    "refuse_paths",
]

#: Widths of the model: training states of about 18, 126 and 503 MB.
_WIDTHS = (192, 512, 1024)
_LAYERS = 5
_PATHS = ("in-memory", "gather", "dcp", "universal")
_LIMIT_S = 900.0
#: What of a row a profile keeps, besides its phases.
_KEPT = (
    "path", "storage", "filesystem", "cache", "state_bytes", "written_bytes", "launch", "pause_s", "transfer_s",
    "verdict", "cannot", "failed",
)  # fmt: skip


def refuse_paths(args: argparse.Namespace, hint: WorldHint | None) -> None:
    """Refuse ``--paths`` where it cannot be measured, before any work. Raises InputError in one line."""
    if not args.paths:
        if args.storage:
            raise InputError("--storage says where --paths writes checkpoints: give --paths with it, or leave it out")
        return
    if args.check is not None:
        raise InputError("--paths does not apply to --check, which measures exchanges: leave it out")
    if args.simulate is not None:
        raise InputError(
            "--paths starts processes that train, which a simulated cluster has none of: leave one of the two out"
        )
    if hint is not None:
        raise InputError(
            f"--paths starts its ranks anew, so it cannot in the world of {hint.launcher}: calibrate without it here, "
            "and with it as a plain command (relaymeter calibrate --nodes 1 --ranks-per-node N --paths)"
        )
    find_storages(args.storage)
    if find_spec("deepspeed") is None:
        raise InputError(
            "--paths trains with DeepSpeed, which is not installed: pip install 'relaymeter[deepspeed]', or leave "
            "--paths out"
        )


def check_paths(args: argparse.Namespace, cluster: ClusterConfig) -> None:
    """Refuse storages without room for the largest state. Raises InputError."""
    check_room(find_storages(args.storage), max(state_bytes(path_scenario(cluster, width)) for width in _WIDTHS))


def path_scenario(cluster: ClusterConfig, width: int) -> CompareScenario:
    """The change at one size: ZeRO-3 over all ranks (over so many of them as divide a batch) to half of them. Pure."""
    ranks = max(n for n in range(1, cluster.nodes * cluster.ranks_per_node + 1) if GLOBAL_BATCH % n == 0)
    half = max(n for n in range(1, max(1, ranks // 2) + 1) if GLOBAL_BATCH % n == 0)
    training = TrainingConfig(
        model="blocks", layers=_LAYERS, width=width, dtype="bfloat16", optimizer="AdamW", steps=2, seed=11
    )
    change = CompareChange(
        name=f"width-{width}",
        source=EngineConfig(stage=3, ranks=tuple(range(ranks))),
        destination=EngineConfig(stage=3, ranks=tuple(range(half))),
    )
    return CompareScenario(kind="compare", name="calibrate-paths", training=training, changes=(change,))


def measure_paths(
    args: argparse.Namespace, cluster: ClusterConfig, profile: Profile, out: emit.Output
) -> tuple[int, Mapping[str, Any] | None]:
    """Make the change at every size and fit the costs. ``profile``: of the same ranks, without them.

    Returns an exit code and what a profile keeps; None where a world ended badly, bits were wrong or nothing can be
    fitted: it has been said then.
    """
    begin = time.monotonic()
    storages = find_storages(args.storage)
    rows: list[CompareRecord] = []
    for number, width in enumerate(_WIDTHS, start=1):
        code, made = _size(args, cluster, storages, number, width, begin, out)
        rows += made
        if code in INTERRUPTED:
            out.say("interrupted")
            return code, None
        verdict = judge_comparison(made, code)
        for line in verdict.lines:
            out.say(line)
        if code != EXIT_OK or verdict.exit_code == EXIT_WRONG_BITS:
            return verdict.exit_code, None
    try:
        costs = fit_path_costs(rows, copy_s_per_byte=copy_s_per_byte(profile))
    except InputError as error:
        out.say(f"warning: paths: {error}")
        return EXIT_OK, None
    document = paths_document(costs, rows, time.monotonic() - begin)
    for line in paths_lines(costs, storages, document["spent_s"]):
        out.say(line)
    return EXIT_OK, document


def copy_s_per_byte(profile: Profile) -> float:
    """Seconds per byte of a copy in memory by all ranks at once, from what packing costs. Pure."""
    pack, world = profile.costs(profile.executor).pack, profile.topology.world_size
    together = [world, *([] if pack.world_lanes is None else [pack.world_lanes])]
    together += [] if pack.node_lanes is None else [pack.node_lanes * profile.topology.nodes]
    return pack.byte_s / max(1.0, min(together))


def _size(
    args: argparse.Namespace,
    cluster: ClusterConfig,
    storages: Sequence[Storage],
    number: int,
    width: int,
    begin: float,
    out: emit.Output,
) -> tuple[int, list[CompareRecord]]:
    """Make the change at one size."""
    scenario = path_scenario(cluster, width)
    change = scenario.changes[0]
    making = Making(
        scenario, _PATHS, tuple(storages), cluster, make_stamp(machine_id(), shaped=is_shaped(cluster)),
        begin + (args.time_limit or _LIMIT_S),
    )  # fmt: skip
    out.say(
        f"paths {number} of {len(_WIDTHS)}: {change.source.label} -> {change.end.label}, about "
        f"{format_bytes(state_bytes(scenario))} of state ({time.monotonic() - begin:.0f} s so far)"
    )
    code, rows = make_change(making, change, 1, out)
    for row in rows:
        out.say(compare_emit.row_text(row))
    return code, rows


def paths_document(costs: PathCosts, rows: Sequence[CompareRecord], spent_s: float) -> dict[str, Any]:
    """What a profile keeps as ``paths``: the costs, the figures of the rows, the seconds that all took. JSON-ready."""
    return {
        "spent_s": spent_s,
        "costs": costs.to_dict(),
        "rows": [{**{name: getattr(row, name) for name in _KEPT}, "phases_s": row.phases} for row in rows],
    }


def paths_lines(costs: PathCosts, storages: Sequence[Storage], spent_s: float) -> list[str]:
    """What was measured, and how far its prices were off."""
    places = ", ".join(f"{storage.name} ({storage.filesystem})" for storage in storages)
    return [
        f"paths: {costs.source} -> {costs.destination} at {counted(len(costs.state_bytes), 'size')}, "
        f"{format_bytes(costs.state_bytes[0])} to {format_bytes(costs.state_bytes[-1])}, on {places}, in "
        f"{format_seconds(spent_s)}",
        f"prices of paths erred by {costs.error:.1%} (pause), {costs.growing_error:.1%} (without relaunch, imports and "
        f"build), {HELD_OUT[costs.held_out]}",
    ]
