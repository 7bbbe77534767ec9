"""Costs of paths: known lines are found again, prices rise with the state, errors are honest, bad input is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaymeter.calibration.profiles import Profile, from_json, save
from relaymeter.compare_records import PHASES, CompareRecord, pausing
from relaymeter.errors import InputError
from relaymeter.harness.cli import main
from relaymeter.harness.compare_emit import comparison_tables
from relaymeter.harness.compare_prices import price_lines, with_prices
from relaymeter.harness.emit_paths import path_lines, path_table
from relaymeter.harness.report_compare import compare_section
from relaymeter.policies.path_costs import PathCosts, PhaseLine, fit_path_costs
from relaymeter.policies.path_scaling import find_path_scaling

Profiles = Callable[[str], Profile]
Truth = dict[str, PhaseLine]
Place = tuple[str, str | None, str | None]
MB = 10**6
SIZES = (18 * MB, 60 * MB, 126 * MB)
STILL = {"relaunch": 4.0, "import": 8.0, "build": 1.0}
#: By path, storage and page cache: fixed seconds and seconds per byte.
TRUTH: dict[Place, Truth] = {
    ("in-memory", None, None): {
        "plan": PhaseLine(0.1, 0.0), "move": PhaseLine(0.05, 1e-9), "refresh": PhaseLine(0.0, 2e-10),
    },
    ("gather", None, None): {"gather": PhaseLine(0.2, 4e-9), "slice": PhaseLine(0.0, 4e-10)},
    ("dcp", "disk", "warm"): {"save": PhaseLine(0.1, 3e-9), "load": PhaseLine(0.2, 4e-9)},
    ("dcp", "disk", "cold"): {"save": PhaseLine(0.1, 3e-9), "load": PhaseLine(0.2, 8e-9)},
    ("universal", "disk", "cold"): {
        "save": PhaseLine(0.05, 1e-9), "convert": PhaseLine(0.5, 1e-8), "load": PhaseLine(0.1, 4e-9),
    },
    ("universal", "tmpfs", None): {
        "save": PhaseLine(0.05, 1e-9), "convert": PhaseLine(0.5, 5e-9), "load": PhaseLine(0.1, 4e-9),
    },
}  # fmt: skip


def row(place: Place, size: int, scale: float = 1.0, launch: int = 1) -> CompareRecord:
    """A row of the true costs, its growing phases ``scale`` times as long."""
    path, storage, cache = place
    phases = {name: line.at(size) * scale for name, line in TRUTH[place].items()}
    phases |= STILL if storage is not None else {"build": 1.0}
    pause = sum(phases[name] for name in pausing(phases))
    return CompareRecord(
        utc="2026-01-02T03:04:05Z", machine_id="m", launch_id="l", commit="c", shaped=False, scenario="s", change="c",
        source="zero3 x4", destination="zero3 x2", path=path, storage=storage,
        filesystem={"disk": "ext4", "tmpfs": "tmpfs"}.get(storage or ""), cache=cache, launch=launch, ranks=4, nodes=1,
        model="blocks", dtype="bfloat16", optimizer="AdamW", state_bytes=size, digest_version=1, digest_passed=9,
        digest_total=9, verdict="ok", ok=True, pause_s=pause,
        transfer_s=pause, total_s=sum(phases.values()),
        **{f"{name}_s": phases.get(name) for name in PHASES},
    )  # fmt: skip


def rows(sizes: Sequence[int] = SIZES, scale: float = 1.0) -> list[CompareRecord]:
    return [row(place, size, scale) for place in TRUTH for size in sizes]


def test_known_lines_and_medians_are_found_again() -> None:
    costs = fit_path_costs(rows())
    assert (costs.ranks, costs.nodes, costs.state_bytes, costs.held_out) == (4, 1, SIZES, "sizes")
    for fit in costs.fits:
        for name, line in TRUTH[fit.path, fit.storage, fit.cache].items():
            found = fit.lines[name]
            assert found.s_per_byte == pytest.approx(line.s_per_byte, rel=1e-6, abs=1e-15), (fit.path, name)
            assert found.fixed_s == pytest.approx(line.fixed_s, abs=1e-6)
        assert dict(fit.medians) == (STILL if fit.storage else {"build": 1.0})
    assert costs.error == costs.growing_error == 0.03  # no price is taken to be better
    found = costs.price("universal", "disk", "cold", 100 * MB, 4, 1)
    assert found.pause_s == pytest.approx(13.0 + 0.65 + 1.5) and not found.extrapolated
    assert found.phases["convert"] == pytest.approx(1.5) and found.growing_s == pytest.approx(2.15)
    memory = costs.price("in-memory", None, None, 100 * MB, 4, 1)
    assert memory.pause_s == pytest.approx(0.17)  # plan and build come before


@given(st.lists(st.floats(0.2, 5.0), min_size=3, max_size=3), st.integers(1, 10**12), st.integers(1, 10**12))
def test_prices_never_fall_where_the_state_grows_however_rows_scatter(
    scales: list[float], size: int, other: int
) -> None:
    place = ("dcp", "disk", "warm")
    costs = fit_path_costs([row(place, at, scale) for at, scale in zip(SIZES, scales, strict=True)])
    small, large = (costs.price(*place, at, 4, 1) for at in sorted((size, other)))
    assert 0 <= small.pause_s <= large.pause_s and small.low_s <= small.pause_s <= small.high_s


def test_errors_are_those_of_rows_that_no_fit_saw() -> None:
    """A middle size that takes twice as long as the line is off by half when it is left out."""
    place = ("gather", None, None)
    bent = [row(place, SIZES[0]), row(place, SIZES[1], 2.0), row(place, SIZES[2])]
    costs = fit_path_costs(bent)
    left_out = {one.state_bytes: one.pause for one in costs.errors}
    assert costs.held_out == "sizes" and left_out[SIZES[1]] == pytest.approx(0.5)
    held = fit_path_costs(rows(SIZES[::2]), [row(place, SIZES[1], 2.0)])
    assert held.held_out == "rows" and held.error == pytest.approx(0.5)
    again = [row(place, size, scale, launch) for size in SIZES[::2] for launch, scale in ((1, 1.0), (2, 1.25))]
    assert fit_path_costs(again).held_out == "launches"
    assert fit_path_costs(again).error == pytest.approx(0.225, abs=0.03)  # 0.2 one way, 0.25 the other
    start = [replace(row(("dcp", "disk", "warm"), size), relaunch_s=seconds, pause_s=1.0 + seconds)
             for size, seconds in ((SIZES[0], 2.0), (SIZES[2], 6.0))]  # fmt: skip
    assert fit_path_costs(start).held_out == "nothing" and fit_path_costs(start).error > 0.2


def test_nothing_is_priced_below_a_copy_in_memory_however_small_states_scatter() -> None:
    """Rows that got quicker as the state grew (a machine that calmed down) have a slope of 0 by themselves."""
    place = ("dcp", "disk", "warm")
    calmer = [row(place, size, scale) for size, scale in ((SIZES[0], 2.0), (SIZES[1], 1.0), (SIZES[2], 0.4))]
    flat, floored = fit_path_costs(calmer), fit_path_costs(calmer, copy_s_per_byte=1e-10)
    assert flat.price(*place, 10**12, 4, 1).growing_s < 1.0
    found = floored.price(*place, 10**12, 4, 1)
    assert found.growing_s == pytest.approx(200.0, rel=0.01)
    largest = floored.price(*place, SIZES[2], 4, 1).growing_s
    assert found.high_s > largest * 10**12 / SIZES[2]  # all of it may grow
    assert fit_path_costs(rows(), copy_s_per_byte=1e-10).fits == fit_path_costs(rows()).fits


def test_what_lies_beyond_the_measurement_is_extrapolated_and_its_interval_doubled() -> None:
    costs = fit_path_costs(rows())
    place = ("dcp", "disk", "cold")
    inside = costs.price(*place, 100 * MB, 4, 1)
    for size, ranks, nodes in ((127 * MB, 4, 1), (17 * MB, 4, 1), (100 * MB, 8, 1), (100 * MB, 4, 2)):
        found = costs.price(*place, size, ranks, nodes)
        assert found.extrapolated and found.pause_s / found.low_s == pytest.approx(1.06)
    assert inside.high_s / inside.pause_s == pytest.approx(1.03)
    more = costs.price("gather", None, None, 100 * MB, 8, 1)
    assert more.phases["slice"] == pytest.approx(0.02) and more.phases["gather"] == pytest.approx(0.6)


def test_costs_are_read_back_equal_and_refused_where_they_are_none() -> None:
    costs = fit_path_costs(rows())
    entry = json.loads(json.dumps(costs.to_dict()))
    assert PathCosts.from_dict(entry) == costs
    for wrong in ({}, {**entry, "fits": []}, {**entry, "fits": [{}]}, {**entry, "errors": []}):
        with pytest.raises(InputError, match="calibrate again"):
            PathCosts.from_dict(wrong)
    entry["fits"][0]["lines"]["move"]["s_per_byte"] = -1.0
    with pytest.raises(InputError, match="are no costs"):
        PathCosts.from_dict(entry)


def test_rows_of_which_no_costs_can_be_made_are_refused() -> None:
    with pytest.raises(InputError, match="two state sizes or more, there are none"):
        fit_path_costs([])
    with pytest.raises(InputError, match="two state sizes or more, there are those of 18 MB"):
        fit_path_costs(rows(SIZES[:1]))
    failed = [replace(one, ok=False, verdict="wrong bits") for one in rows()]
    with pytest.raises(InputError, match="there are none"):
        fit_path_costs(failed)
    for change in ({"destination": "zero3 x1"}, {"ranks": 8}, {"nodes": 2}, {"machine_id": "n"}):
        with pytest.raises(InputError, match=f"rows of {next(iter(change))} .* have costs of their own"):
            fit_path_costs([*rows(), replace(rows()[0], **change)])
    costs = fit_path_costs(rows())
    with pytest.raises(InputError, match=r"no costs of universal on nfs \(cold cache\): the profile has in-memory, "):
        costs.price("universal", "nfs", "cold", MB, 4, 1)
    with pytest.raises(InputError, match="has no price"):
        costs.price("gather", None, None, MB, 0, 1)


def test_rows_get_their_price_and_the_error_is_said() -> None:
    costs = fit_path_costs(rows())
    other = replace(row(("universal", "tmpfs", None), MB), storage="nfs")
    priced = with_prices([row(("gather", None, None), 100 * MB, 1.25), other], costs)
    assert priced[0].predicted_pause_s == pytest.approx(0.64) and priced[1].predicted_pause_s is None
    assert price_lines(priced, costs)[0].startswith(
        "prices of the pause erred by 20.0% (median of 1 row), without relaunch, imports and build by 20.0%; at "
        "calibration 3.0% and 3.0%, each size of the state left out in turn"
    )
    assert price_lines(priced[1:], costs)[0].startswith("no price: ")
    entry = {name: value for name, value in priced[1].to_dict().items() if name != "predicted_pause_s"}
    assert CompareRecord.from_dict(entry) == priced[1]  # rows that were kept before there were prices


def test_tables_show_the_price_beside_what_was_measured_and_only_where_there_is_one() -> None:
    plain = [row(("in-memory", None, None), 100 * MB), row(("gather", None, None), 100 * MB, 1.25)]
    priced = with_prices(plain, fit_path_costs(rows()))
    for these, expected in ((plain, []), (priced, ["170 ms", "640 ms"])):
        columns = {str(column.header): list(column.cells) for column in comparison_tables(these)[0].columns}
        assert columns.get("priced", []) == expected
        assert columns.get("error", [])[1:] == (["-20.0%"] if expected else [])
        table = next(one for one in compare_section("s", these).tables if "phases" not in one.title)
        names = [name for name, _ in table.columns]
        assert ("priced" in names) == bool(expected)
        if expected:
            assert table.rows[1][names.index("priced")].text == "640 ms, -20.0%"


def test_a_profile_keeps_costs_of_paths_and_one_without_is_the_same_as_ever(profile_of: Profiles) -> None:
    plain = profile_of("box")
    assert "paths" not in plain.to_dict()
    kept = replace(plain, paths={"costs": fit_path_costs(rows()).to_dict(), "rows": [], "spent_s": 1.0})
    entry = kept.to_dict()
    again = from_json(entry, "p")
    assert again.sha256 == kept.sha256 != plain.sha256 and again.paths == json.loads(json.dumps(kept.paths))
    entry["paths"]["costs"]["ranks"] = 8
    with pytest.raises(InputError, match=r"edited after it was written, in paths\.costs\.ranks"):
        from_json(entry, "p")


def test_plan_prints_the_table_and_writes_it_where_the_profile_has_costs(
    profile_of: Profiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = profile_of("box")
    for name, paths in (("with", {"costs": fit_path_costs(rows()).to_dict()}), ("without", None), ("bad", {})):
        save(replace(plain, paths=paths), tmp_path / name)
        command = ["plan", "--scenario", "smoke", "--topology", "2x2", "--profile", str(tmp_path / name)]
        code = main([*command, "--json", str(tmp_path / f"{name}.json")])
        printed = capsys.readouterr()
        assert code == (2 if name == "bad" else 0)
        assert ("which path wins" in printed.out) == (name == "with")
        assert ("costs of paths are incomplete" in printed.err) == (name == "bad")
    assert json.loads((tmp_path / "without.json").read_text())["paths"] is None
    found = json.loads((tmp_path / "with.json").read_text())["paths"]
    assert [cell["nodes"] for cell in found["cells"]] == [1, 1, 1, 1, 2, 2, 2, 2]


def test_the_table_names_the_fastest_path_and_how_far_others_are_behind(profile_of: Profiles) -> None:
    costs = fit_path_costs(rows())
    found = find_path_scaling(profile_of("box"), costs, 4, 2, "rank", "send-recv", sizes=(10**9, 10**10))
    assert found.nodes == (1, 2, 3, 4)
    one, two = found.cell(1, 10**9), found.cell(2, 10**10)
    assert one.winner == "in-memory" and one.prices[0].network and one.prices[0].extrapolated
    assert {price.path for price in one.prices} == {"in-memory", "gather", "dcp", "universal"}
    assert {price.path for price in two.prices} == {"in-memory", "dcp", "universal"}  # gather was measured on one node
    universal = one.price("universal"), two.price("universal")
    assert universal[0] and universal[0].storage == "tmpfs"  # fastest on one node, no way to another
    assert universal[1] and universal[1].storage == "disk"
    by_nodes = [found.cell(nodes, 10**10).price("in-memory") for nodes in (2, 4)]
    assert by_nodes[0] and by_nodes[1] and by_nodes[0].pause_s > by_nodes[1].pause_s  # more NICs share the state
    columns = [[str(cell) for cell in column.cells] for column in path_table(found).columns]
    assert columns[0] == ["1", "2", "3", "4"]
    cell = columns[1][0]
    assert cell.startswith("~ in-memory ") and "gather " in cell and "universal " in cell
    assert "in-memory wins from 1 GB of state on, on 1, 2, 3, 4 nodes" in path_lines(found)
    document = json.loads(json.dumps(found.to_dict()))
    assert document["cells"][0]["winner"] == "in-memory" and document["wins_from"]["in-memory"]["1"] == 10**9
