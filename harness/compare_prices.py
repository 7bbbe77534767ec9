"""Prices of paths beside what ``compare`` measured: the costs of a profile, and how far off they were.

``costs = open_path_costs(path)``, ``rows = with_prices(rows, costs)``, ``price_lines(rows, costs)``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from relaymeter.calibration.fingerprint import machine_facts
from relaymeter.calibration.profiles import Profile, differences
from relaymeter.calibration.profiles import load as load_profile
from relaymeter.compare_records import CompareRecord, pausing
from relaymeter.errors import InputError
from relaymeter.harness.commands_ranks import describe_cluster
from relaymeter.harness.config import check
from relaymeter.harness.jobs import ClusterConfig
from relaymeter.policies.path_costs import GROWING, PathCosts
from relaymeter.units import counted

__all__ = ["HELD_OUT", "error_text", "open_path_costs", "path_costs_of", "price_lines", "with_prices"]

#: What the errors of costs were found on, in words.
HELD_OUT = {
    "rows": "on rows that were not fitted",
    "sizes": "each size of the state left out in turn",
    "launches": "each launch left out in turn",
    "nothing": "twice the error on what was fitted, as nothing could be left out",
}


def path_costs_of(profile: Profile) -> PathCosts | None:
    """The costs of paths that a profile holds; None where it was made without ``--paths``. Raises InputError."""
    return None if profile.paths is None else PathCosts.from_dict(profile.paths.get("costs") or {})


def open_path_costs(path: Path, cluster: ClusterConfig | None = None) -> PathCosts:
    """The costs of paths of a profile of this machine. Raises InputError where it has none or is another's, or was
    measured on other ranks than ``cluster`` (None: a world that was joined, whose ranks are not compared)."""
    profile = load_profile(path)
    if profile.simulated is not None:
        raise InputError(
            f"profile {path} is of the simulated cluster {profile.simulated}, which takes no checkpoint: give one of "
            "this machine"
        )
    costs = path_costs_of(profile)
    if costs is None:
        raise InputError(f"profile {path} has no costs of paths: make one with relaymeter calibrate --paths --out FILE")
    differ = differences(profile, machine_facts())
    if differ:
        raise InputError(f"profile {path} was made elsewhere ({'; '.join(differ)}): calibrate here with --paths")
    known = profile.fingerprint.get("cluster")
    if cluster is not None and known is not None:
        for key in ("nodes", "ranks_per_node", "nic_rate_bytes_per_s"):
            if known.get(key) != getattr(cluster, key):
                measured = check(ClusterConfig, known, f"profile {path}, cluster")
                raise InputError(
                    f"profile {path} was measured on {describe_cluster(measured)}, this is "
                    f"{describe_cluster(cluster)}: give the same --nodes, --ranks-per-node and --nic, or leave "
                    "--profile out"
                )
    return costs


def with_prices(rows: Sequence[CompareRecord], costs: PathCosts) -> list[CompareRecord]:
    """The rows with ``predicted_pause_s``; None where the costs have no such path, storage or page cache. Pure."""
    return [replace(row, predicted_pause_s=_price(row, costs)) for row in rows]


def _price(row: CompareRecord, costs: PathCosts) -> float | None:
    if row.pause_s is None or not costs.has(row.path, row.storage, row.cache):
        return None
    return costs.price(row.path, row.storage, row.cache, row.state_bytes, row.ranks, row.nodes).pause_s


def error_text(predicted: float | None, measured: float | None) -> str:
    """``"+3.2%"``: predicted over measured, less one; empty without either."""
    return "" if predicted is None or not measured else f"{predicted / measured - 1:+.1%}"


def price_lines(rows: Sequence[CompareRecord], costs: PathCosts) -> list[str]:
    """How far the prices were off, and what they stand on. Pure."""
    priced = [row for row in rows if row.ok and row.pause_s and row.predicted_pause_s is not None]
    if not priced:
        return ["no price: the profile's paths, storages and page caches are others than the rows'"]
    off = statistics.median(abs((row.predicted_pause_s or 0.0) / (row.pause_s or 1.0) - 1) for row in priced)
    grown = [error for row in priced if (error := _growing_error(row, costs)) is not None]
    text = f"prices of the pause erred by {off:.1%} (median of {counted(len(priced), 'row')})"
    if grown:
        text += f", without relaunch, imports and build by {statistics.median(grown):.1%}"
    stands = (
        f"at calibration {costs.error:.1%} and {costs.growing_error:.1%}, {HELD_OUT[costs.held_out]}; every price "
        f"is lines fitted to {costs.source} -> {costs.destination}, the move in memory too"
    )
    return [f"{text}; {stands}"]


def _growing_error(row: CompareRecord, costs: PathCosts) -> float | None:
    """Relative error of what moves the state, in the pause; None where nothing of it was measured."""
    predicted = costs.price(row.path, row.storage, row.cache, row.state_bytes, row.ranks, row.nodes).phases
    names = [name for name in pausing(row.phases) if name in GROWING]
    took = sum(row.phases[name] for name in names)
    return abs(sum(predicted.get(name, 0.0) for name in names) / took - 1) if took > 0 else None
