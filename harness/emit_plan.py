"""Tables of ``choose`` and ``plan``: what a plan carries, its routes by class of blocks, the whole move by every route.

All of them read the entries of the command's JSON document (docs/output.md): one per move, planner and executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from relaymeter.harness.emit import NONE, simple_table, size_text, time_text, time_with_interval
from relaymeter.policies.regret import figures_text, won_back_text
from relaymeter.policies.scaling import Scaling, ScalingCell
from relaymeter.policies.thresholds import RULE_ROUTES
from relaymeter.relayout.routes import ROUTES
from relaymeter.units import counted, format_seconds

__all__ = [
    "candidate_table",
    "choice_lines",
    "fallback_lines",
    "plan_table",
    "price_table",
    "regret_lines",
    "regret_of",
    "scaling_lines",
    "scaling_table",
]

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
    routes = [name for name in ROUTES if any(name in row["prices_s"] for row in entry["classes"])]
    table = simple_table(
        f"{_title(entry, full_name)}: routes by block class",
        [("weights", "left"), ("tensors", "right"), ("block\nelements", "right"), ("ranks\na node", "right"),
         ("bytes", "right"), ("route", "left"), *((name, "right") for name in routes)],
        caption="prices: all blocks of the class moved alone; bytes: each block counted once" + _against_price(entry),
    )  # fmt: skip
    for row in entry["classes"]:
        prices = [time_text(row["prices_s"].get(route)) for route in routes]
        table.add_row(
            row["label"], f"{row['tensors']:,}", f"{row['elements']:,}", str(row["fanout"]), size_text(row["bytes"]),
            row["route"] or NONE, *prices,
        )  # fmt: skip
    return table


def _against_price(entry: Entry) -> str:
    """Why classes may go by another route than their cheapest alone, where some do, and what it gains."""
    if entry.get("cheapest_alone_s") is None:
        return ""
    more = entry["cheapest_alone_s"] - entry["chosen_s"]
    return (
        "\na route is chosen for what the whole move gains, as classes share rounds and messages: with every class by "
        f"its\ncheapest alone the move would take {format_seconds(abs(more))} {'less' if more < 0 else 'more'}"
    )


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
    """The choice in words, ``min_relay`` and ``min_split`` by ranks per node, and what today's constants, these and the
    chosen routes take."""
    if move["choice"] is None:
        return []
    lines = [f"{_title(move, full_name)}: chosen {move['choice']}; {_trust(move)}"]
    for name in ("min_relay", "min_split"):
        for fanout, found in move["thresholds"][name].items():
            value, low, high = found["elements"], found["low"], found["high"]
            text = f"{name}({fanout} ranks per node) = {_elements(value)}"
            lines.append(text + ("" if low == high else f" [{_edge(low)}, {_edge(high)}]"))
    if any(one["low"] != one["high"] for by in move["thresholds"].values() for one in by.values()):
        lines.append("[5 %, 95 %] of the bootstrap: the scatter of the measurement only, not the error of the model")
    lines.append(f"predicted: {_figures(move, _beyond_rule([move]))}")
    return lines


def regret_of(entries: Sequence[Entry]) -> dict[str, Any] | None:
    """What keeping today's constants costs over all moves, of the first planner and executor, JSON-ready; None where
    they have no prices."""
    first = entries[0]
    mine = [one for one in entries if (one["planner"], one["executor"]) == (first["planner"], first["executor"])]
    if not mine or any(one["choice"] is None for one in mine):
        return None
    keys = ("chosen_s", "fixed_constants_s", "found_constants_s")
    chosen, fixed, found = (sum(one[key] for one in mine) for key in keys)
    error = max(one["price_error"] for one in mine)
    return {
        "executor": mine[0]["executor"],
        "moves": len(mine),
        "choices": sum(row["route"] is not None for one in mine for row in one["classes"]),
        "chosen_s": chosen,
        "fixed_constants_s": fixed,
        "found_constants_s": found,
        "beyond_rule": _beyond_rule(mine),
        "regret_fixed_s": fixed - chosen,
        "price_error": error,
        "within_error": abs(fixed - chosen) <= error * chosen,
        "extrapolated": any(one["extrapolated"] for one in mine),
        "beyond": list(dict.fromkeys(text for one in mine for text in one["beyond"])),
    }


def _beyond_rule(entries: Sequence[Entry]) -> list[str]:
    """The chosen routes that no two thresholds can ask for."""
    used = {row["route"] for one in entries for row in one["classes"]}
    return [name for name in ROUTES if name in used and name not in RULE_ROUTES]


def regret_lines(scenario: str, regret: Mapping[str, Any] | None, simulated: str | None) -> list[str]:
    """The headline of ``choose``: in seconds and per cent what keeping 65,536 costs, also where it costs nothing, and
    how much of it better constants win back; below it the predicted times that it is made of."""
    lines = [_headline(scenario, regret, simulated)]
    if regret is not None and regret["choices"]:
        lines.append(f"predicted for {scenario}: {_figures(regret, regret['beyond_rule'])}")
    return lines


def _figures(found: Mapping[str, Any], beyond_rule: Sequence[str]) -> str:
    return figures_text(found["fixed_constants_s"], found["found_constants_s"], found["chosen_s"], beyond_rule)


def _headline(scenario: str, regret: Mapping[str, Any] | None, simulated: str | None) -> str:
    start = "" if simulated is None else f"simulated ({simulated}): "
    start += "keeping 65,536 elements for min_relay and min_split"
    if regret is None:
        return f"{start}: its cost is not known, {scenario} has no prices"
    what = f"{scenario} ({counted(regret['moves'], 'move')}, {regret['executor']})"
    if not regret["choices"]:
        return f"{start} costs nothing on {what}: every route carries its blocks alike"
    lost, chosen, fixed = (regret[key] for key in ("regret_fixed_s", "chosen_s", "fixed_constants_s"))
    if abs(lost) <= 1e-9 * chosen:
        text = f"{start} costs nothing on {what}"
    else:
        share = f"{abs(lost) / chosen:.1%}" if chosen else "all"
        verb, sign = ("costs", "+") if lost > 0 else ("saves", "-")
        text = f"{start} {verb} {format_seconds(abs(lost))} ({sign}{share}) on {what}"
        if lost > 0:
            text += f"; {won_back_text(fixed, regret['found_constants_s'], chosen)}"
        if regret["within_error"]:
            text += f"; within the error of the prices ({regret['price_error']:.1%}), so it may as well be nothing"
    return text + _beyond(regret)


def scaling_table(scaling: Scaling) -> Table:
    """The fastest route by number of nodes and block size, and its lead over direct."""
    table = simple_table(
        f"which route wins ({scaling.executor}): equal blocks of one node, wanted whole by all "
        f"{counted(scaling.ranks_per_node, 'rank')} of each other node",
        [("nodes", "right"), *((size_text(size), "left") for size in scaling.block_bytes), ("error", "right")],
        caption="by bytes of a block; 3.1x: times as fast as direct; a or b: inside the error, too close to call\n"
        f"~ extrapolated: the profile measured {counted(scaling.measured_nodes, 'node')}; the error is doubled",
    )
    for nodes in scaling.nodes:
        row = [scaling.cell(nodes, size) for size in scaling.block_bytes]
        extrapolated = any(price.extrapolated for cell in row for price in cell.prices.values())
        mark = "~ " if extrapolated else ""
        table.add_row(f"{mark}{nodes}", *(_cell_text(cell) for cell in row), f"{max(c.error for c in row):.1%}")
    return table


def _cell_text(cell: ScalingCell) -> str:
    lead = cell.prices[ROUTES[0]].total_s / cell.prices[cell.ranked[0]].total_s
    return " or ".join(cell.close) + ("" if ROUTES[0] in cell.close else f" {lead:.3g}x")


def scaling_lines(scaling: Scaling) -> list[str]:
    """From which number of nodes and block size on each route wins, and direct loses, in words."""
    lines = []
    for route in ROUTES:
        for nodes, size in scaling.wins_from(route):
            lines.append(f"{route} wins from {counted(nodes, 'node')} and blocks of {size_text(size)} on")
    for nodes, size in scaling.loses_from(ROUTES[0]):
        lines.append(f"{ROUTES[0]} loses from {counted(nodes, 'node')} and blocks of {size_text(size)} on")
    return lines or ["no route wins or loses beyond the error up to the largest numbers"]


def _trust(move: Entry) -> str:
    """How far the prices may be off, and how that is known."""
    matrices, error = move["price_error_matrices"], move["price_error"]
    if not matrices:
        text = f"{error:.1%} error assumed: the calibration measured no matrix that it did not fit"
    else:
        text = f"prices erred by {error:.1%} (median, 3% at least) on {matrices} matrices measured but not fitted"
    return text + _beyond(move)


def _beyond(found: Mapping[str, Any]) -> str:
    """Which limits of what was measured a price passes."""
    if not found["extrapolated"]:
        return ""
    return f"; beyond what was measured: {', '.join(found['beyond'])}; the error here is not known"


def _elements(count: int | None) -> str:
    return "never" if count is None else f"{count:,} elements"


def _edge(elements: int | None) -> str:
    return "never" if elements is None else f"{elements:,}"
