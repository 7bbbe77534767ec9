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
from relaymeter.errors import InputError
from relaymeter.harness import emit_plan
from relaymeter.harness.cli import main
from relaymeter.harness.emit_plan import regret_lines, regret_of
from relaymeter.harness.offline import asked_executors, keep_layouts
from relaymeter.harness.scenario import load_scenario

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


def entry(chosen: float, fixed: float, found: float | None = None, **changes: Any) -> dict[str, Any]:
    row = {"route": changes.pop("route", "relay")}
    return {
        "planner": "classes", "executor": "send-recv", "choice": "relay", "chosen_s": chosen, "price_error": 0.03,
        "fixed_constants_s": fixed, "found_constants_s": fixed if found is None else found, "extrapolated": False,
        "beyond": [], "classes": [row], **changes,
    }  # fmt: skip


START = "keeping 65,536 elements for min_relay and min_split"
BEYOND = {"extrapolated": True, "beyond": ["loads of 8 MB between nodes, measured to 5 MB"]}
PASSED = "; beyond what was measured: loads of 8 MB between nodes, measured to 5 MB; the error here is not known"


@pytest.mark.parametrize(
    ("entries", "lines"),
    [
        (
            [entry(0.1, 0.12, 0.11), entry(0.1, 0.13)],
            [
                f"{START} costs 50 ms (+25.0%) on demo (2 moves, send-recv); the thresholds found win 10 ms of it back "
                "(20.0%)",
                "predicted for demo: 65,536 for both 250 ms; the thresholds found 240 ms (-4.0%); routes by class "
                "200 ms (-20.0%)",
            ],
        ),
        (
            [entry(0.1, 0.4, route="chain")],
            [
                f"{START} costs 300 ms (+300.0%) on demo (1 move, send-recv); the thresholds found win nothing of it "
                "back",
                "predicted for demo: 65,536 for both 400 ms; the thresholds found 400 ms (the same); routes by class "
                "100 ms (-75.0%, with chain, which the two constants cannot ask for)",
            ],
        ),
        (
            [entry(0.1, 0.101, 0.104), entry(9.0, 1.0, executor="all-to-all"), entry(9.0, 1.0, planner="affine")],
            [
                f"{START} costs 1 ms (+1.0%) on demo (1 move, send-recv); the thresholds found lose 3 ms more; within "
                "the error of the prices (3.0%), so it may as well be nothing",
                "predicted for demo: 65,536 for both 101 ms; the thresholds found 104 ms (+3.0%); routes by class "
                "100 ms (-1.0%)",
            ],
        ),
        (
            [entry(0.1, 0.099, **BEYOND)],
            [
                f"{START} saves 1 ms (-1.0%) on demo (1 move, send-recv); within the error of the prices (3.0%), so it "
                f"may as well be nothing{PASSED}",
                "predicted for demo: 65,536 for both 99 ms; the thresholds found 99 ms (the same); routes by class 100 "
                "ms (+1.0%)",
            ],
        ),
        (
            [entry(0.1, 0.1, **BEYOND)],
            [
                f"{START} costs nothing on demo (1 move, send-recv){PASSED}",
                "predicted for demo: 65,536 for both 100 ms; the thresholds found 100 ms (the same); routes by class "
                "100 ms (the same)",
            ],
        ),
        (
            [entry(0.1, 0.1, route=None)],
            [f"{START} costs nothing on demo (1 move, send-recv): every route carries its blocks alike"],
        ),
        ([entry(0.1, 0.1, choice=None)], [f"{START}: its cost is not known, demo has no prices"]),
    ],
)
def test_the_headline_says_plainly_what_today_costs_and_what_constants_win_back(
    entries: list[dict[str, Any]], lines: list[str]
) -> None:
    assert regret_lines("demo", regret_of(entries), None) == lines
    assert regret_lines("demo", regret_of(entries), "h100")[0] == f"simulated (h100): {lines[0]}"


def test_both_executors_come_with_the_default_of_the_profile_first(profile_of: Profiles) -> None:
    profile = profile_of("box")
    assert asked_executors("both", profile) == tuple(profile.executors) == ("send-recv", "all-to-all")
    turned = replace(profile, executors=dict(reversed(profile.executors.items())))
    assert asked_executors("both", turned) == ("all-to-all", "send-recv")
    assert asked_executors("auto", turned) == ("all-to-all",)
    assert asked_executors("both", None) == ("send-recv", "all-to-all")


def test_a_class_against_its_own_price_is_explained_below_the_table() -> None:
    assert emit_plan._against_price({"cheapest_alone_s": None}) == ""
    for cheapest, more in ((0.5, "100 ms more"), (0.399, "1 ms less")):
        text = emit_plan._against_price({"cheapest_alone_s": cheapest, "chosen_s": 0.4})
        assert text.endswith(f"cheapest alone the move would take {more}")


def test_a_layout_file_of_the_scenario_is_no_target(tmp_path: Path) -> None:
    scenario = load_scenario("smoke")
    layout, link = tmp_path / "layout.json", tmp_path / "link.json"
    layout.write_text("{}")
    link.symlink_to(layout)
    move = scenario.moves[0].model_copy(update={"layout": str(layout)})
    scenario = scenario.model_copy(update={"moves": (move,)})
    keep_layouts(scenario, json="-", out=None)
    keep_layouts(scenario, json=str(tmp_path / "other.json"), out=None)
    for targets in ({"json": str(link), "out": None}, {"json": None, "out": layout}):
        with pytest.raises(InputError, match="would replace the layout file"):
            keep_layouts(scenario, **targets)


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_nothing_is_written_over_what_is_read(option: str, profile: str, capsys: Printed) -> None:
    before = Path(profile).read_text()
    for command in (("choose",), ("plan", "--topology", "2x2")):
        code, _, err = run(capsys, *command, "--profile", profile, "--scenario", "smoke", option, profile, "--force")
        assert code == 2 and "--profile" in err and Path(profile).read_text() == before
