"""The table of ``plan`` that says which path wins: in memory, by gathering, or through a checkpoint.

``path_table(scaling)``, ``path_lines(scaling)`` of a ``policies.path_scaling.PathScaling``.
"""

from __future__ import annotations

from rich.table import Table

from relaymeter.harness.compare_prices import HELD_OUT
from relaymeter.harness.emit import NONE, simple_table, size_text, time_text
from relaymeter.harness.report_figures import ratio_text
from relaymeter.policies.path_costs import PathPrice
from relaymeter.policies.path_scaling import PathCell, PathScaling
from relaymeter.units import counted, format_bytes

__all__ = ["path_lines", "path_table"]

#: Named in every cell, however far behind.
_ALWAYS = "universal"


def path_table(scaling: PathScaling) -> Table:
    """The path that stops training for the shortest time, by number of nodes and bytes of the training state."""
    costs = scaling.costs
    table = simple_table(
        f"which path wins ({scaling.executor}): a training state of ZeRO-3 from all ranks to half of them, "
        f"{counted(scaling.ranks_per_node, 'rank')} a node",
        [("nodes", "right"), *((size_text(size), "whole") for size in scaling.state_bytes)],
        caption="how long training stands still, and how many times as long by the next path and by a universal "
        "checkpoint;\na or b: too close to call; checkpoints over the fastest storage that all nodes can read; gather "
        f"on {counted(costs.nodes, 'node')} only\n"
        f"~ extrapolated: paths were measured from {format_bytes(costs.state_bytes[0])} to "
        f"{format_bytes(costs.state_bytes[-1])} on {counted(costs.ranks, 'rank')} of {counted(costs.nodes, 'node')}; "
        "intervals are doubled",
    )
    for nodes in scaling.nodes:
        table.add_row(str(nodes), *(_cell_text(scaling.cell(nodes, size)) for size in scaling.state_bytes))
    return table


def _cell_text(cell: PathCell) -> str:
    first, others = cell.prices[0], cell.prices[1:]
    mark = "~ " if any(price.extrapolated for price in cell.prices) else ""
    names = " or ".join(price.path for price in cell.close)
    shown = [price for number, price in enumerate(others) if number == 0 or price.path == _ALWAYS]
    behind = ", ".join(f"{price.path} {_times(price, first)}" for price in shown)
    return f"{mark}{names} {time_text(first.pause_s)}\n{behind or NONE}"


def _times(price: PathPrice, first: PathPrice) -> str:
    return ratio_text(price.pause_s, first.pause_s)


def path_lines(scaling: PathScaling) -> list[str]:
    """From which state on a path wins, by number of nodes, and what the prices stand on."""
    lines = []
    paths = dict.fromkeys(price.path for cell in scaling.cells for price in cell.prices)
    for path in paths:
        found = {nodes: scaling.wins_from(path, nodes) for nodes in scaling.nodes}
        sizes = {size for size in found.values() if size is not None}
        for size in sorted(sizes):
            where = ", ".join(str(nodes) for nodes, one in found.items() if one == size)
            what = "node" if where == "1" else "nodes"
            lines.append(f"{path} wins from {size_text(size)} of state on, on {where} {what}")
    costs = scaling.costs
    lines.append(
        f"prices of paths erred by {costs.error:.1%} (pause), {costs.growing_error:.1%} (without relaunch, imports and "
        f"build), {HELD_OUT[costs.held_out]}; the exchange in memory is priced by the network model, direct"
    )
    return lines
