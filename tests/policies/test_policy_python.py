"""The thresholds as Python to paste: they parse, say where they are from, and whose bytes they are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from test_policy import by_hand, policy_of

from relaymeter.calibration.profiles import Profile
from relaymeter.policies.choose import ClassRow
from relaymeter.policies.policy import PolicyMove
from relaymeter.policies.policy_python import python_text
from relaymeter.policies.thresholds import Threshold

Profiles = Callable[[str], Profile]
NEVER = 1 << 62
HAND = {2: {"min_relay": 1000, "min_split": 4000}, 4: {"min_relay": 300, "min_split": NEVER}}


def pasted(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "pasted", "exec"), {"__builtins__": {}}, names)
    return names


def row(fanout: int, nbytes: int, *routes: str) -> ClassRow:
    prices = dict.fromkeys(("direct", *routes), 1.0)
    route = routes[0] if routes else None
    return ClassRow("w", 1, 1, nbytes, nbytes // 2, 2, fanout, route, prices, 0.5)


def test_the_python_text_holds_the_thresholds_their_intervals_and_where_they_are_from() -> None:
    beyond = ("loads of 8 MB between nodes, measured to 5 MB",)
    note = "this profile missed 13 of 18 gates (worst: overlap: 2, limit 1): prices and thresholds are rough"
    text = python_text(
        [by_hand(simulated="h100", error_matrices=0, extrapolated=True, beyond=beyond, profile_note=note)]
    )
    names = pasted(text)
    assert names["RELAYOUT_THRESHOLDS"] == HAND and names["relayout_options"] == HAND[4]
    for piece in (
        "SIMULATED", "h100", "min_relay 1,000 [900, 1,100]", "min_split never [70,000, never]", "assumed",
        "the scatter of the measurement only, not the error of the model", f"# Note: {note}.",
        f"beyond what was measured: {beyond[0]}",
        "No block of by hand is one that these constants can route",
    ):  # fmt: skip
        assert piece in text
    assert all(len(line) <= 160 for line in text.splitlines())


@pytest.mark.parametrize("letter", ["\n", "\r", "\x0b", "\x0c", "\x00", "\x85", "\u2028", "\ud800"])
def test_no_name_ends_a_comment(letter: str) -> None:
    odd = f"a{letter}raise SystemExit"
    moves = (PolicyMove(odd, 1, odd, 1.0, 2.0, 3.0, (row(2, 10, "relay"),)),)
    text = python_text(
        [
            by_hand(
                scenario=odd, simulated=odd, profile_mismatch=(odd,), profile_note=odd, moves=moves, extrapolated=True,
                beyond=(odd,), profile={"sha256": odd, "machine_id": odd, "created_utc": odd}, executor=odd,
            )
        ]
        * 2
    )  # fmt: skip
    names = pasted(text)
    assert set(names) == {"RELAYOUT_THRESHOLDS", "relayout_options"} and names["RELAYOUT_THRESHOLDS"] == HAND


def test_the_other_executor_stands_below_as_comments() -> None:
    other = by_hand(executor="send-recv", relay={2: Threshold(2, 77, 7, 99)}, split={2: Threshold(2, 88, 8, 99)})
    text = python_text([by_hand(executor="all-to-all"), other])
    assert pasted(text)["RELAYOUT_THRESHOLDS"] == HAND
    head, tail = text.split("# For send-recv instead")
    assert "all-to-all." in head and "77" not in head
    assert '#     2: {"min_relay": 77, "min_split": 88},' in tail
    assert all(line.startswith("#") for line in tail.splitlines()[1:])


def test_what_most_bytes_want_is_told_of_those_that_the_constants_can_route() -> None:
    """Nearly all bytes go to one rank a node, where only a chain is a choice; of the others most to two ranks."""
    rows = (row(1, 1_000_000, "chain"), row(2, 3_000, "relay", "spread"), row(4, 1_000, "relay"), row(4, 7_000))
    text = python_text([by_hand(moves=(PolicyMove("m", 1, "mixed", 1.0, 2.0, 2.0, rows),))])
    assert "# 2 ranks a node want most of the bytes of by hand that these can route (10 kB of 1.04 MB):" in text
    assert pasted(text)["relayout_options"] == HAND[2]
    assert "routes by class 1 s (-50.0%, with chain, which the two constants cannot ask for)" in text


def test_the_most_used_number_of_ranks_is_what_the_python_text_offers(profile_of: Profiles) -> None:
    (policy,) = policy_of(profile_of("gpus"))
    assert sorted(policy.relay) == [2, 4]
    carried = {
        fanout: sum(row.bytes * fanout for m in policy.moves for row in m.classes if row.route and row.fanout == fanout)
        for fanout in policy.relay
    }
    usual = max(carried, key=lambda fanout: carried[fanout])
    assert f"relayout_options = RELAYOUT_THRESHOLDS[{usual}]" in python_text([policy])
    none = replace(policy, moves=())
    assert "RELAYOUT_THRESHOLDS[4]" in python_text([none])
