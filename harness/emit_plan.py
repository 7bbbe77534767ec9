"""Tables of ``choose`` and ``plan``: what a plan carries, its routes by class of blocks, the whole move by every route.

All of them read the entries of the command's JSON document (docs/output.md): one per move, planner and executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from relaymeter.harness.emit import NONE, simple_table, size_text, time_text, time_with_interval
from relaymeter.units import format_seconds

__all__ = ["candidate_table", "choice_lines", "fallback_lines", "plan_table", "price_table"]

Entry = Mapping[str, Any]


def plan_table(entries: Sequence[Entry]) -> Table:
    """What the plans of one move carry, one row per planner: segments, and bytes by link class and by source."""
    first = entries[0]
    sources = [("from " + name, "right") for name in first["source_bytes"]]
    table = simple_table(
        f"{first['move']}: the plan, {size_text(first['bytes_total'])} into place",
        [("planner", "left"), ("tensors", "right"), ("fell\nback", "right"), ("segments", "right"),
         ("within\na rank", "right"), ("in node", "right"), ("across\nnodes", "right"), *sources,
         ("planned\nin", "right")],
        caption="bytes of the direct route",
    )  # fmt: skip
    for entry in entries:
        direct = entry["candidates"][0]
        table.add_row(
            entry["planner"], f"{entry['tensors']:,}", f"{sum(one['tensors'] for one in entry['fallbacks']):,}",
            f"{entry['segments']:,}", size_text(entry["bytes_in_rank"]), size_text(direct["bytes_in_node"]),
            size_text(direct["bytes_cross_node"]), *(size_text(count) for count in entry["source_bytes"].values()),
            time_text(direct["plan_s"]),
        )  # fmt: skip
    return table


def fallback_lines(entry: Entry) -> list[str]:
    """Which tensors the planner left to another, and why, one line for each reason."""
    total = entry["tensors"]
    return [
        f"{entry['move']}: {entry['planner']} fell back for {one['tensors']} of {total} tensors ({one['reason']}): "
        + ", ".join(one["labels"])
        for one in entry["fallbacks"]
    ]


def _title(entry: Entry, full_name: bool) -> str:
    return f"{entry['move']} ({entry['planner']}, {entry['executor']})" if full_name else str(entry["move"])


def price_table(entry: Entry, *, full_name: bool = False) -> Table:
    """Route and prices of every block class of one entry; ``full_name`` names its planner and executor too."""
    table = simple_table(
        f"{_title(entry, full_name)}: routes by block class",
        [("weights", "left"), ("tensors", "right"), ("block\nelements", "right"), ("ranks\na node", "right"),
         ("bytes", "right"), ("route", "left"), ("direct", "right"), ("relay", "right"), ("spread", "right")],
        caption="prices: all blocks of the class moved alone; bytes: each block counted once",
    )  # fmt: skip
    for row in entry["classes"]:
        prices = [time_text(row[f"price_{route}_s"]) for route in ("direct", "relay", "spread")]
        table.add_row(
            row["label"], f"{row['tensors']:,}", f"{row['elements']:,}", str(row["fanout"]), size_text(row["bytes"]),
            row["route"] or NONE, *prices,
        )  # fmt: skip
    return table


def candidate_table(entries: Sequence[Entry]) -> Table:
    """The whole move by every route, planner and executor: predicted time, bytes, messages and memory."""
    first = entries[0]
    bound = first["bound_s"]
    kinds = [key for key in ("planner", "executor") if len({entry[key] for entry in entries}) > 1]
    table = simple_table(
        f"{first['move']}: the whole move" + (f" (bound {time_text(bound)}, {first['bound_by']})" if bound else ""),
        [*((key, "left") for key in kinds), ("route", "left"), ("predicted", "right"), ("/ bound", "right"),
         ("across\nnodes", "right"), ("in node", "right"), ("messages", "right"), ("rounds", "right"),
         ("peak\nbuffers", "right")],
    )  # fmt: skip
    if any(row["extrapolated"] for entry in entries for row in entry["candidates"]):
        table.caption = "~ extrapolated: beyond the measured sizes, or another topology than the measured one"
    for entry in entries:
        for row in entry["candidates"]:
            predicted = row["predicted_s"]
            table.add_row(
                *(entry[key] for key in kinds), row["route"] + (" *" if row["chosen"] else ""),
                ("~ " if row["extrapolated"] else "")
                + time_with_interval(predicted, row["predicted_low_s"], row["predicted_high_s"]),
                NONE if predicted is None or not bound else f"{predicted / bound:.2f}",
                size_text(row["bytes_cross_node"]), size_text(row["bytes_in_node"]), f"{row['messages']:,}",
                str(row["rounds"]), size_text(row["peak_predicted_bytes"]),
            )  # fmt: skip
    return table


def choice_lines(move: Entry, *, full_name: bool = False) -> list[str]:
    """The choice in words, ``min_relay`` and ``min_split`` by ranks per node, and the regret of today's constants."""
    if move["choice"] is None:
        return []
    lines = [f"{_title(move, full_name)}: chosen {move['choice']}; {_trust(move)}"]
    for name in ("min_relay", "min_split"):
        for fanout, found in move["thresholds"][name].items():
            value, low, high = found["elements"], found["low"], found["high"]
            text = f"{name}({fanout} ranks per node) = {_elements(value)}"
            lines.append(text + ("" if low == high else f" [{_edge(low)}, {_edge(high)}]"))
    regret, fixed = move["regret_fixed_s"], move["fixed_constants_s"]
    share = f" ({regret / (fixed - regret):+.1%})" if fixed > regret else ""
    lines.append(
        f"today's constants (65,536 elements) would take {time_text(fixed)}: {_signed(regret)} over the choice{share}"
    )
    return lines


def _trust(move: Entry) -> str:
    """How far the prices may be off, and how that is known."""
    matrices, error = move["price_error_matrices"], move["price_error"]
    if not matrices:
        text = f"{error:.1%} error assumed: the calibration measured no matrix that it did not fit"
    else:
        text = f"prices erred by {error:.1%} (median, 3% at least) on {matrices} matrices measured but not fitted"
    return text + ("; beyond what was measured, so the error here is not known" if move["extrapolated"] else "")


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + format_seconds(abs(seconds))


def _elements(count: int | None) -> str:
    return "never" if count is None else f"{count:,} elements"


def _edge(elements: int | None) -> str:
    return "never" if elements is None else f"{elements:,}"
