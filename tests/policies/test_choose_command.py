"""``choose`` and ``plan`` with a profile, in this process: headline, policy, what standard output gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaymeter import load_policy
from relaymeter.calibration.profiles import Profile, save
from relaymeter.harness.cli import main
from relaymeter.harness.emit_plan import regret_line, regret_of

Profiles = Callable[[str], Profile]
Printed = pytest.CaptureFixture[str]


@pytest.fixture
def profile(profile_of: Profiles, tmp_path: Path) -> str:
    found = profile_of("box")
    path = tmp_path / "profile.json"
    save(replace(found, fingerprint={**found.fingerprint, "simulated": "two slow nodes"}), path)
    return str(path)


def run(printed: Printed, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(list(arguments))
    except SystemExit as ended:
        code = int(ended.code or 0)
    found = printed.readouterr()
    return code, found.out, found.err


def test_choose_begins_with_the_regret_and_writes_what_load_policy_reads(
    profile: str, tmp_path: Path, capsys: Printed
) -> None:
    target, prices = tmp_path / "policy.json", tmp_path / "prices.json"
    arguments = ("choose", "--profile", profile, "--scenario", "smoke", "--executor", "both")
    code, out, err = run(capsys, *arguments, "--out", str(target), "--json", str(prices))
    assert (code, err) == (0, "")
    first = out.splitlines()[0]
    assert first.startswith("simulated (two slow nodes): keeping 65,536 elements for min_relay and min_split ")
    document = json.loads(prices.read_text())
    regret = document["regret"]
    assert document["simulated"] == "two slow nodes" and regret["moves"] == 2
    mine = [one for one in document["moves"] if one["executor"] == "send-recv"]
    assert regret["chosen_s"] == pytest.approx(sum(one["chosen_s"] for one in mine))
    assert f"({regret['regret_fixed_s'] / regret['chosen_s']:+.1%})" in first
    policy, other = load_policy(target), load_policy(target, "all-to-all")
    assert (policy.executor, other.executor, policy.simulated) == ("send-recv", "all-to-all", "two slow nodes")
    for move, entry in zip(policy.moves, mine, strict=True):
        assert (move.name, move.chosen_s, move.choice) == (entry["move"], entry["chosen_s"], entry["choice"])
        assert [row.to_dict() for row in move.classes] == entry["classes"]
    assert run(capsys, *arguments, "--out", str(target))[0] == 2


@pytest.mark.parametrize("form", ["json", "python"])
def test_a_format_is_alone_on_standard_output(form: str, profile: str, tmp_path: Path, capsys: Printed) -> None:
    arguments = ("choose", "--profile", profile, "--scenario", "smoke", "--format", form)
    code, out, err = run(capsys, *arguments)
    assert code == 0 and "routes by block class" in err and err.startswith("simulated (two slow nodes): keeping")
    if form == "json":
        path = tmp_path / "policy.json"
        path.write_text(out)
        assert load_policy(path).scenario == "smoke"
    else:
        names: dict[str, Any] = {}
        exec(compile(out, "pasted", "exec"), {"__builtins__": {}}, names)
        assert set(names["relayout_options"]) == {"min_relay", "min_split"}
    code, _, err = run(capsys, *arguments, "--json", "-")
    assert code == 2 and "both want standard output" in err


def test_plan_with_a_profile_says_which_route_wins_where(profile: str, capsys: Printed) -> None:
    code, out, err = run(
        capsys, "plan", "--profile", profile, "--scenario", "smoke", "--topology", "3x2", "--json", "-"
    )
    document = json.loads(out)
    assert code == 0 and err.startswith("simulated (two slow nodes): smoke on 3 nodes x 2 ranks")
    assert "every price is extrapolated" in err and "direct loses from 2 nodes and blocks of " in err
    cells = document["scaling"]["cells"]
    assert {one["nodes"] for one in cells} == {2, 3} and all(one["extrapolated"] for one in cells if one["nodes"] == 3)


def entry(chosen: float, fixed: float, **changes: Any) -> dict[str, Any]:
    row = {"route": changes.pop("route", "relay")}
    return {
        "planner": "classes", "executor": "send-recv", "choice": "relay", "chosen_s": chosen, "price_error": 0.03,
        "fixed_constants_s": fixed, "extrapolated": False, "classes": [row], **changes,
    }  # fmt: skip


START = "keeping 65,536 elements for min_relay and min_split"


@pytest.mark.parametrize(
    ("entries", "line"),
    [
        (
            [entry(0.1, 0.12), entry(0.1, 0.13)],
            f"{START} costs 50 ms (+25.0%) on demo (2 moves, send-recv): 250 ms predicted against 200 ms with the "
            "routes below",
        ),
        (
            [entry(0.1, 0.101), entry(9.0, 1.0, executor="all-to-all"), entry(9.0, 1.0, planner="affine")],
            f"{START} costs 1 ms (+1.0%) on demo (1 move, send-recv): 101 ms predicted against 100 ms with the routes "
            "below; within the error of the prices (3.0%), so it may as well be nothing",
        ),
        (
            [entry(0.1, 0.099)],
            f"{START} saves 1 ms (-1.0%) on demo (1 move, send-recv): 99 ms predicted against 100 ms with the routes "
            "below; within the error of the prices (3.0%), so it may as well be nothing",
        ),
        (
            [entry(0.1, 0.1, extrapolated=True)],
            f"{START} costs nothing on demo (1 move, send-recv): 100 ms predicted with it and with the routes below; "
            "beyond what was measured",
        ),
        (
            [entry(0.1, 0.1, route=None)],
            f"{START} costs nothing on demo (1 move, send-recv): every route carries its blocks alike",
        ),
        ([entry(0.1, 0.1, choice=None)], f"{START}: its cost is not known, demo has no prices"),
    ],
)
def test_the_headline_says_plainly_what_today_costs(entries: list[dict[str, Any]], line: str) -> None:
    assert regret_line("demo", regret_of(entries), None) == line
    assert regret_line("demo", regret_of(entries), "h100") == f"simulated (h100): {line}"
