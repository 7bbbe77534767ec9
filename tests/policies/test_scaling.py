"""Which route wins where: winners and borders by hand, and the table of a cluster whose answer is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from relaymeter.calibration.profiles import Profile
from relaymeter.errors import InputError
from relaymeter.harness.emit_plan import scaling_lines, scaling_table
from relaymeter.policies.price import Price
from relaymeter.policies.scaling import Scaling, ScalingCell, find_scaling, node_counts
from relaymeter.relayout.routes import ROUTES

Profiles = Callable[[str], Profile]


def cell(nodes: int, size: int, *seconds: float, error: float = 0.1) -> ScalingCell:
    prices = {
        name: Price(s, s * 0.9, s * 1.1, np.zeros(1), {}, nodes > 2) for name, s in zip(ROUTES, seconds, strict=False)
    }
    return ScalingCell(nodes, size, 64, prices, error)


def table() -> Scaling:
    """Direct for small blocks on two nodes, relay for large ones; the third route for large blocks from 4 nodes on."""
    cells = (
        cell(2, 1000, 1.0, 2.0), cell(2, 2000, 2.0, 1.0), cell(2, 4000, 4.0, 1.0),
        cell(4, 1000, 1.0, 1.05, 2.0), cell(4, 2000, 3.0, 1.0, 1.09), cell(4, 4000, 9.0, 2.0, 1.0),
        cell(8, 1000, 5.0, 1.0, 2.0), cell(8, 2000, 5.0, 2.0, 1.0), cell(8, 4000, 9.0, 3.0, 1.0),
    )  # fmt: skip
    return Scaling(2, "send-recv", 1 << 20, 2, cells)


def test_a_lead_inside_the_error_is_too_close_to_call() -> None:
    found = table()
    assert [found.cell(4, size).winner for size in (1000, 2000, 4000)] == [None, None, ROUTES[2]]
    assert found.cell(4, 2000).close == (ROUTES[1], ROUTES[2])
    assert cell(2, 1, 1.0, 1.11).winner == ROUTES[0] and cell(2, 1, 1.0).winner == ROUTES[0]


def test_borders_are_where_a_route_wins_to_the_end() -> None:
    found = table()
    assert found.wins_from(ROUTES[2]) == ((4, 4000), (8, 2000))
    assert found.wins_from(ROUTES[1]) == () and found.wins_from(ROUTES[0]) == ()
    assert found.loses_from(ROUTES[0]) == ((2, 2000), (8, 1000))
    assert scaling_lines(found) == [
        f"{ROUTES[2]} wins from 4 nodes and blocks of 4 kB on",
        f"{ROUTES[2]} wins from 8 nodes and blocks of 2 kB on",
        "direct loses from 2 nodes and blocks of 2 kB on",
        "direct loses from 8 nodes and blocks of 1 kB on",
    ]
    columns = [list(column.cells) for column in scaling_table(found).columns]
    assert columns[0] == ["2", "~ 4", "~ 8"]
    assert columns[1][1:] == ["direct or relay", "relay 5x"] and columns[3] == ["relay 4x", "spread 9x", "spread 9x"]
    assert found.to_dict()["wins_from"][ROUTES[2]] == [
        {"nodes": 4, "block_bytes": 4000}, {"nodes": 8, "block_bytes": 2000},
    ]  # fmt: skip


def test_numbers_of_nodes() -> None:
    assert node_counts(2) == (2,) and node_counts(3) == (2, 3) and node_counts(16) == (2, 3, 4, 8, 16)
    assert node_counts(12) == (2, 3, 4, 8, 12)


def test_slow_nics_make_every_route_but_direct_win_and_more_nodes_are_extrapolated(profile_of: Profiles) -> None:
    profile = profile_of("box")
    found = find_scaling(profile, 4, 2, "rank", "send-recv", bucket_bytes=1 << 20, sizes=(1 << 18, 1 << 20))
    assert found.nodes == (2, 3, 4) and found.block_bytes == (1 << 18, 1 << 20)
    for one in found.cells:
        assert ROUTES[0] not in one.close and set(one.prices) <= set(ROUTES)
        # A node's NICs send every block to both ranks of every other node, or once to each node, at 48 MB/s.
        sent = one.blocks * one.block_bytes * (one.nodes - 1) / 2
        assert one.prices["direct"].total_s == pytest.approx(2 * sent / 48e6, rel=0.1)
        assert one.prices["relay"].total_s == pytest.approx(sent / 48e6, rel=0.15)
        assert all(price.extrapolated == (one.nodes > 2) for price in one.prices.values())
        usual = found.cells[0].error
        assert one.error == pytest.approx(usual if one.nodes == 2 else 2 * usual)
    if "chain" in ROUTES:  # what leaves the first node once needs no more time for more nodes
        last = found.cell(4, 1 << 20)
        assert last.winner == "chain" and "chain" not in found.cell(2, 1 << 20).prices


def test_a_single_node_has_nothing_to_scale(profile_of: Profiles) -> None:
    with pytest.raises(InputError, match="at least 2 nodes"):
        find_scaling(profile_of("box"), 1, 4, "rank", "send-recv", bucket_bytes=1 << 20)
