"""Every figure computed by hand on small made-up records."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaymeter.calibration.cells import Cell
from relaymeter.calibration.costs import Curve, ExecutorCosts, LinkCosts, PackCosts
from relaymeter.calibration.profiles import ExecutorProfile, Profile
from relaymeter.errors import InputError
from relaymeter.harness.validate_bars import Figure
from relaymeter.harness.validate_candidates import Side, contests, kendall_tau, mixes, ordered_pairs, settled, sides
from relaymeter.harness.validate_figures import exit_code, figures, nic_errors
from relaymeter.harness.validate_plots import draw_plots
from relaymeter.harness.validate_report import make_report
from relaymeter.records import dump_json
from relaymeter.relayout.topology import Topology
from relaymeter.validation_records import ValidationRecord

#: 50 MB/s of wire rate: 1448 of 1514 bytes are payload.
PAYLOAD = 50e6 * 1448 / 1514


def link(rate: float, latency_s: float = 1e-4) -> LinkCosts:
    sizes = tuple(1024 * 2**k for k in range(14))
    curve = Curve(sizes, tuple(latency_s + size / rate for size in sizes), 1 / rate)
    return LinkCosts(
        curve=curve, two_way=0.0, turn=0.0, fan_out=1.0, fan_in=1.0, port=1.0, ports_out={}, ports_in={}, node=1.0,
        crowd={}, message_s=0.0,
    )  # fmt: skip


def profile(
    cells: tuple[Cell, ...] = (), *, cross: LinkCosts | None = None, cluster: Any = None, **facts: Any
) -> Profile:
    costs = ExecutorCosts(
        floor_s=1e-4, start_s=0.0, overlap=0.5, in_node=link(1e9), cross_node=cross or link(PAYLOAD),
        pack=PackCosts(1e-5, 1e-6, 1e-10), unpack=PackCosts(1e-5, 1e-6, 1e-10),
    )  # fmt: skip
    found = {name: ExecutorProfile(costs, (), {}) for name in ("send-recv", "all-to-all")}
    return Profile(
        created_utc="2026-01-01T00:00:00Z", fingerprint={"cluster": cluster, **facts}, topology=Topology.grid(2, 2),
        executors=found, gates=(), warnings=(), quick=False, spent_s=1.0, connect_s={}, cells=cells,
    )  # fmt: skip


SHAPED = {"shape": True, "nic_rate_bytes_per_s": 50e6}


def row(kind: str, predicted_s: float, measured_s: float, **changed: Any) -> ValidationRecord:
    """A row whose measured interval is 1 % wide on each side."""
    fields: dict[str, Any] = {
        "kind": kind, "name": "a case", "link": None, "route": None, "chosen": False, "executor": "send-recv",
        "default_executor": True, "hard": (), "bytes_total": 1 << 22, "largest_bytes": 1 << 22,
        "predicted_s": predicted_s, "predicted_low_s": predicted_s / 1.1, "predicted_high_s": predicted_s * 1.1,
        "baseline_s": None, "samples_s": (measured_s,), "measured_s": measured_s, "measured_low_s": measured_s * 0.99,
        "measured_high_s": measured_s * 1.01, "bound_s": None, "block_elements": None, "itemsize": None, "fanout": None,
        "threshold": None, "threshold_elements": None, "threshold_low": None, "threshold_high": None,
        "bucket_bytes": None, "digest_passed": 2, "digest_total": 2, "simulated": None, "shaped": True,
        "machine_id": "m", "commit": None, "utc": "2026-01-01T00:00:00Z", "launch_id": "l",
    }  # fmt: skip
    return ValidationRecord(**{**fields, **changed})


def batch(threshold: str, elements: int, direct_s: float, other_s: float, **changed: Any) -> list[ValidationRecord]:
    limits = {"threshold_elements": 100, "threshold_low": 90, "threshold_high": 110, "bucket_bytes": 1 << 20}
    shared = {
        "name": f"{threshold} {elements}", "threshold": threshold, "block_elements": elements, "itemsize": 2,
        "fanout": 2, "bytes_total": 2048 * 2 * 2 * elements, **limits, **changed,
    }  # fmt: skip
    other = {"min_relay": "relay", "min_split": "spread"}[threshold]
    return [row("batch", took, took, route=route, **shared) for route, took in (("direct", direct_s), (other, other_s))]


def of(found: tuple[Figure, ...], key: str, executor: str = "send-recv") -> Figure:
    return next(one for one in found if one.key == key and one.executor == executor)


def value(figure: Figure, statistic: str) -> float:
    found = figure.statistics[statistic]
    assert found is not None
    return found


# Errors of predicted times


def test_errors_of_sizes_have_median_percentile_and_largest() -> None:
    # predicted over measured: +2 %, -4 %, +6 %, -8 %, +10 %; the smallest message is below 1 MiB and stands apart
    errors = (0.02, -0.04, 0.06, -0.08, 0.10)
    rows = [row("size", 0.1 * (1 + e), 0.1, link="cross_node", largest_bytes=1 << 20) for e in errors]
    rows.append(row("size", 0.2, 0.1, link="in_node", largest_bytes=(1 << 20) - 1))
    found = of(figures(rows, profile()), "sizes")
    assert found.count == 5 and found.hard == 0
    assert value(found, "median") == pytest.approx(0.06)
    assert value(found, "p90") == pytest.approx(0.08 + 0.6 * 0.02)  # place 3.6 of 0..4 in the ranked errors
    assert value(found, "max") == pytest.approx(0.10)
    assert value(found, "bias") == pytest.approx(0.02)
    assert value(found, "scatter") == pytest.approx(0.01)
    assert value(found, "inside") == 1.0
    assert [(bar.statistic, bar.limit, bar.met) for bar in found.bars] == [("median", 0.05, False), ("max", 0.15, True)]
    assert found.status == "missed"
    assert value(of(figures(rows, profile()), "small sizes"), "max") == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("errors", "status"),
    [((0.0499, 0.04, 0.1499), "met"), ((0.0501, 0.06, 0.0), "missed"), ((0.0, 0.0, 0.1501), "missed")],
)
def test_sizes_are_held_to_five_and_fifteen_per_cent(errors: tuple[float, ...], status: str) -> None:
    rows = [row("size", 0.125 * (1 - e), 0.125, link="in_node") for e in errors]
    assert of(figures(rows, profile()), "sizes").status == status


def test_matrices_need_a_third_hard() -> None:
    rows = [row("matrix", 0.1, 0.1, name=str(k), hard=("two-way",) if k < 3 else ()) for k in range(9)]
    assert of(figures(rows, profile()), "matrices").status == "met"
    found = of(figures([*rows, row("matrix", 0.1, 0.1)], profile()), "matrices")
    assert found.hard == 3 and found.count == 10 and found.status == "missed"
    assert [bar.statistic for bar in found.bars if not bar.met] == ["hard"]


@pytest.mark.parametrize(
    ("usual", "worst", "status"),
    [(0.07, 0.0, "met"), (0.07, 0.19, "met"), (0.07, 0.21, "missed"), (0.0799, 0.19, "met"), (0.0801, 0.19, "missed")],
)  # two of eleven errors lie above the 90th percentile's place
def test_matrices_are_held_to_their_median_and_90th_percentile(usual: float, worst: float, status: str) -> None:
    rows = [row("matrix", 0.1 * (1 + (worst if k < 2 else usual)), 0.1, hard=("incast",)) for k in range(11)]
    assert of(figures(rows, profile()), "matrices").status == status


def test_whole_moves_need_24_cells_of_scenario_and_route() -> None:
    def moves(count: int) -> list[ValidationRecord]:
        routes = ("direct", "relay", "spread")
        return [
            row("move", 0.1, 0.1, name=f"m{k // 3}", route=routes[k % 3], hard=("unshaped",), launch_id=str(k))
            for k in range(count)
        ]

    assert of(figures(moves(24), profile()), "moves").status == "met"
    few = of(figures([*moves(23), *moves(1)], profile()), "moves")  # a cell measured twice is one cell
    assert few.count == 24 and few.status == "missed"
    assert [(bar.statistic, bar.value) for bar in few.bars if not bar.met] == [("cells", 23)]


@pytest.mark.parametrize(("baseline", "status"), [(0.0801, "met"), (0.0799, "missed")])
def test_ours_errs_at_most_half_as_much_as_the_five_line_model_on_hard_moves(baseline: float, status: str) -> None:
    hard = [
        row("move", 0.125 * (1 + 0.04), 0.125, route="direct", hard=("two-way",), baseline_s=0.125 * (1 - baseline))
        for _ in range(3)
    ]
    easy = [row("move", 0.5, 0.1, route="direct", baseline_s=0.1) for _ in range(5)]
    found = of(figures([*hard, *easy], profile()), "five-line move")
    assert found.count == 3 and found.status == status
    assert value(found, "ratio") == pytest.approx(0.04 / baseline)
    assert value(found, "five_line_median") == pytest.approx(baseline)


def test_a_five_line_model_without_error_cannot_be_beaten() -> None:
    rows = [row("move", 0.11, 0.1, route="direct", hard=("two-way",), baseline_s=0.1)]
    found = of(figures(rows, profile()), "five-line move")
    assert found.statistics["ratio"] == math.inf and found.status == "missed"


# Candidates


def move(name: str, times: dict[str, tuple[float, float]], chosen: str, **changed: Any) -> list[ValidationRecord]:
    """Routes -> (predicted, measured)."""
    return [
        row("move", *pair, name=name, route=route, chosen=route == chosen, **changed) for route, pair in times.items()
    ]


def test_regret_is_the_chosen_over_the_best_measured() -> None:
    rows = [
        *move("a", {"direct": (0.2, 0.20), "relay": (0.1, 0.11), "spread": (0.1, 0.10)}, "relay"),  # 10 %
        *move("b", {"direct": (0.2, 0.20), "relay": (0.1, 0.30)}, "direct"),  # 0
        *move("c", {"direct": (0.2, 0.20), "relay": (0.1, 0.204)}, "relay"),  # 2 %
        *move("alone", {"direct": (0.2, 0.20)}, "direct"),
    ]
    assert [case.regret for case in contests(rows)] == [pytest.approx(0.1), 0, pytest.approx(0.02), None]
    found = of(figures(rows, profile()), "regret")
    assert found.count == 3
    assert value(found, "median") == pytest.approx(0.02) and value(found, "max") == pytest.approx(0.10)


@pytest.mark.parametrize(
    ("regrets", "status"),
    [((0.0, 0.0199, 0.0999), "met"), ((0.0, 0.0201, 0.0999), "missed"), ((0.0, 0.0199, 0.1001), "missed")],
)
def test_regret_is_held_to_two_and_ten_per_cent(regrets: tuple[float, ...], status: str) -> None:
    rows = [
        one
        for k, regret in enumerate(regrets)
        for one in move(str(k), {"direct": (0.1, 0.1 * (1 + regret)), "relay": (0.1, 0.1)}, "direct")
    ]
    assert of(figures(rows, profile()), "regret").status == status


def test_the_same_routes_run_twice_are_one_candidate() -> None:
    rows = move("a", {"direct": (0.1, 0.10), "relay": (0.2, 0.2)}, "direct")
    rows += [row("move", 0.1, 0.12, name="a", route="mixed", chosen=True)]
    assert contests(rows)[0].regret == 0
    assert ordered_pairs(contests(rows)) == (2, 2)


def test_only_pairs_measured_apart_are_ordered() -> None:
    rows = [
        *move("a", {"direct": (0.30, 0.30), "relay": (0.20, 0.20), "spread": (0.10, 0.201)}, "spread"),
        # relay and spread overlap; direct is slower than both, as predicted
        *move("b", {"direct": (0.10, 0.30), "relay": (0.20, 0.20)}, "direct"),  # the wrong way
        *move("c", {"direct": (0.10, 0.30), "relay": (0.10, 0.20)}, "direct"),  # no order predicted
    ]
    assert ordered_pairs(contests(rows)) == (2, 4)
    found = of(figures(rows, profile()), "order move")
    assert found.count == 4 and value(found, "share") == 0.5 and found.status == "missed"
    assert found.note == "2 of 4"


def test_nineteen_of_twenty_pairs_suffice() -> None:
    times = {"direct": (0.2, 0.2), "relay": (0.1, 0.1)}
    rows = [one for k in range(19) for one in move(str(k), times, "relay")]
    wrong = move("wrong", {"direct": (0.2, 0.1), "relay": (0.1, 0.2)}, "relay")
    assert of(figures([*rows, *wrong], profile()), "order move").status == "met"
    assert of(figures([*rows[2:], *wrong], profile()), "order move").status == "missed"


def test_candidates_of_other_executors_and_launches_are_no_rivals() -> None:
    rows = move("a", {"direct": (0.2, 0.2), "relay": (0.1, 0.1)}, "relay")
    rows += move("a", {"direct": (0.2, 0.02)}, "direct", launch_id="later")
    rows += move("a", {"direct": (0.2, 0.02)}, "direct", executor="all-to-all", default_executor=False)
    assert [case.regret for case in contests(rows)] == [0, None, None]


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=12))
def test_kendall_tau_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    agree = one_tied = two_tied = total = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        total += 1
        one_tied += a == c
        two_tied += b == d
        agree += 0 if a == c or b == d else 1 if (a < c) == (b < d) else -1
    found = kendall_tau(*zip(*pairs, strict=True))
    if total in (one_tied, two_tied):
        assert found is None
    else:
        assert found == pytest.approx(agree / math.sqrt((total - one_tied) * (total - two_tied)))


# Thresholds


def test_each_side_of_a_threshold_is_won_by_the_predicted_route() -> None:
    rows = [
        *batch("min_relay", 25, 0.10, 0.20),
        *batch("min_relay", 100, 0.10, 0.12),
        *batch("min_relay", 400, 0.20, 0.10),
        *batch("min_split", 25, 0.20, 0.10),  # wrong
        *batch("min_split", 400, 0.10, 0.1005),  # undecided
    ]
    found = [(one.threshold, one.elements, one.side, one.verdict) for one in sides(rows)]
    assert found == [
        ("min_relay", 25, "below", "right"),
        ("min_relay", 100, "at", "not judged"),
        ("min_relay", 400, "above", "right"),
        ("min_split", 25, "below", "wrong"),
        ("min_split", 400, "above", "undecided"),
    ]
    assert settled(sides(rows)) == (1, 2)
    every = figures(rows, profile())
    assert of(every, "min_relay").status == "met" and of(every, "min_relay").count == 2
    assert of(every, "min_split").status == "missed"
    assert of(every, "min_split").note == "right 0 below, 0 above; 1 wrong, 1 undecided"
    assert of(every, "settled").status == "met" and of(every, "settled").note == "1 of 2 settings"
    assert sides(rows)[0].gain == pytest.approx(-1.0)


def test_a_threshold_with_one_side_decided_is_not_settled() -> None:
    rows = [*batch("min_relay", 25, 0.10, 0.1005), *batch("min_relay", 400, 0.20, 0.10)]
    every = figures(rows, profile())
    assert of(every, "min_relay").status == "met"
    assert of(every, "settled").status == "none here" and of(every, "settled").passed


def test_a_wrong_batch_unsettles_a_setting_and_a_bucket_is_a_setting() -> None:
    good = [*batch("min_relay", 25, 0.1, 0.2), *batch("min_relay", 400, 0.2, 0.1)]
    wrong = batch("min_relay", 800, 0.1, 0.2)
    other = batch("min_relay", 800, 0.1, 0.2, bucket_bytes=1 << 21)
    assert settled(sides([*good, *wrong])) == (0, 1)
    assert settled(sides([*good, *other])) == (1, 2)


def test_nothing_decided_at_a_threshold_is_not_met() -> None:
    rows = batch("min_relay", 25, 0.1, 0.1)
    found = of(figures(rows, profile()), "min_relay")
    assert found.count == 1 and found.status == "missed" and not found.passed


def test_below_a_threshold_that_is_never_direct_wins_at_every_size() -> None:
    never = {"threshold_elements": None, "threshold_low": None, "threshold_high": None}
    rows = [*batch("min_split", 8, 0.1, 0.2, **never), *batch("min_split", 1 << 20, 0.2, 0.1, **never)]
    assert [(one.side, one.verdict) for one in sides(rows)] == [("below", "right"), ("below", "wrong")]


def test_batches_without_their_rival_are_left_out() -> None:
    assert sides(batch("min_relay", 25, 0.1, 0.2)[:1]) == ()


# Mixes


def mix(measured: dict[str, float], note: str | None = None) -> list[ValidationRecord]:
    return [row("mix", 0.1, took, name="tiny and large", route=route, note=note) for route, took in measured.items()]


def test_a_mix_wins_only_beyond_the_intervals_of_every_uniform_route() -> None:
    clear = mix({"direct": 0.2, "relay": 0.12, "mixed": 0.10})
    assert [one.wins for one in mixes(clear)] == [True]
    assert mixes(clear)[0].gain == pytest.approx(1 - 0.10 / 0.12)
    near = mix({"direct": 0.2, "relay": 0.101, "mixed": 0.10})
    assert [one.wins for one in mixes(near)] == [False]
    assert [one.wins for one in mixes(mix({"direct": 0.2, "mixed": 0.1}))] == [False]  # not every uniform choice
    assert of(figures(clear, profile()), "mix").status == "met"
    assert of(figures(near, profile()), "mix").status == "missed"


def test_no_such_box_is_an_answer_where_the_search_is_described() -> None:
    near = mix({"direct": 0.2, "relay": 0.101, "mixed": 0.10}, note="64 pairs of sizes priced")
    found = of(figures(near, profile()), "mix")
    assert found.status == "none here" and found.passed
    assert found.note == "no such box found: 0 of 1 measured mixes win; 64 pairs of sizes priced"
    assert of(figures(move("a", {"direct": (1, 1)}, "direct"), profile()), "mix").status == "not measured"


# NICs


def test_every_nic_is_held_to_its_payload_rate() -> None:
    size = 1 << 22
    slow = Cell("nic", "send-recv", ((0, 2, size),), (size / PAYLOAD * 1.04,))
    fast = Cell("nic", "send-recv", ((1, 3, size),), (size / PAYLOAD * 1.01,))
    small = Cell("nic", "send-recv", ((3, 1, size // 2),), (size / PAYLOAD,))
    truth = dict.fromkeys(range(4), PAYLOAD)
    found = nic_errors(profile((slow, fast, small), cluster=SHAPED), truth)
    assert found[0][-1] == found[2][-1] == pytest.approx(1 / 1.04 - 1)
    assert found[1][-1] == pytest.approx(1 / 1.01 - 1) and len(found[1]) == 3
    assert found[3] == found[1]  # the small one does not count
    assert -0.002 < found[0][0] == found[0][1] < 0  # fitted, sending and receiving: the latency of a large message
    rows = [row("size", 0.1, 0.1)]
    judged = of(figures(rows, profile((slow, fast), cluster=SHAPED)), "nics")
    assert judged.count == 4 and judged.status == "missed" and value(judged, "max") == pytest.approx(1 - 1 / 1.04)
    assert of(figures(rows, profile((fast,), cluster=SHAPED)), "nics").status == "met"
    assert of(figures(rows, profile(cluster=SHAPED, cross=link(PAYLOAD * 1.04))), "nics").status == "missed"


def test_rates_of_nics_mean_nothing_where_none_is_known() -> None:
    unshaped = {"shape": True, "nic_rate_bytes_per_s": None}
    rows = [row("size", 0.1, 0.1)]
    assert of(figures(rows, profile(cluster=unshaped)), "nics").status == "does not apply"
    unheld = figures([row("size", 0.1, 0.1, shaped=False)], profile(cluster=SHAPED))
    assert of(unheld, "nics").status == "does not apply" and of(unheld, "nics").passed
    told = figures(rows, profile(), nic_rates=dict.fromkeys(range(4), PAYLOAD * 1.1))
    assert of(told, "nics").status == "missed" and of(told, "nics").count == 4


# What could not be measured


def test_a_threshold_that_cannot_be_measured_is_explained_or_not_measured() -> None:
    rows = batch("min_split", 25, 0.1, 0.2)
    why = "send-recv min_relay, 2 destination ranks: T = 3 has no blocks below it"
    told = figures(rows, profile(), notes=[why, "all-to-all min_split, 2 destination ranks: as above"])
    assert of(told, "min_relay").status == "none here" and of(told, "min_relay").note == why
    assert of(told, "settled").status == "none here" and of(told, "settled").count == 1
    assert of(figures(rows, profile()), "min_relay").status == "not measured"
    one = figures([row("size", 0.1, 0.1)], profile(), notes=[why])
    assert of(one, "settled").status == of(one, "min_split").status == "not measured"
    both = figures([row("size", 0.1, 0.1)], profile(), notes=[why, "send-recv min_split: never"])
    assert of(both, "settled").status == "none here"


def test_a_search_without_a_box_is_an_answer() -> None:
    search = "mixed routes: 72 boxes priced, none pays"
    rows = [one for one in whole() if one.kind != "mix"]
    report = make_report(rows, profile(cluster=SHAPED), notes=[search, "matrices: one left out"])
    assert report.exit_code == 0
    assert report.lines[1:] == (
        f"a mix beats every uniform route: no such box found: {search}", "matrices: one left out",
    )  # fmt: skip


# The whole


def whole(**changed: Any) -> list[ValidationRecord]:
    """Records that meet every bar."""
    hard: dict[str, Any] = {"hard": ("two-way",), "baseline_s": 0.3, **changed}
    rows = [
        row("size", 0.1, 0.1, link=kind, calls=calls, **changed)
        for kind in ("in_node", "cross_node")
        for calls in (1, 5)
    ]
    rows += [row("matrix", 0.1, 0.1, name=str(k), **hard) for k in range(3)]
    times = {"direct": (0.2, 0.2), "relay": (0.1, 0.1), "spread": (0.15, 0.15)}
    rows += [one for k in range(8) for one in move(f"m{k}", times, "relay", **hard)]
    for name in ("min_relay", "min_split"):
        rows += [*batch(name, 25, 0.1, 0.2, **changed), *batch(name, 400, 0.2, 0.1, **changed)]
    return rows + [
        row("mix", took, took, name="x", route=route, **changed)
        for route, took in (("direct", 0.2), ("relay", 0.3), ("mixed", 0.1))
    ]


def test_all_bars_met_is_exit_code_0() -> None:
    report = make_report(whole(), profile(cluster=SHAPED))
    assert report.exit_code == 0
    assert report.lines[0].startswith("12 of 12 figures meet their bars (send-recv, the default executor;")
    assert len(report.lines) == 1


def test_a_figure_that_was_not_measured_never_passes() -> None:
    for kind, title in (
        ("size", "held-out sizes from 1 MiB on"), ("matrix", "uneven matrices"), ("mix", "a mix beats"),
        ("batch", "min_relay: the predicted side wins"), ("move", "regret of the chosen routes"),
    ):  # fmt: skip
        report = make_report([one for one in whole() if one.kind != kind], profile(cluster=SHAPED))
        assert report.exit_code == 3
        assert any(line.startswith(f"not measured: {title}") for line in report.lines), kind


def test_a_missed_bar_is_exit_code_3_and_says_what_was_reached() -> None:
    rows = [*whole(), row("size", 0.5, 0.1, link="in_node")]
    report = make_report(rows, profile(cluster=SHAPED))
    assert report.exit_code == 3
    assert "missed: held-out sizes from 1 MiB on: max 400 %, at most 15 % asked" in report.lines


def test_wrong_bits_outrank_everything_and_stand_first() -> None:
    other = {"executor": "all-to-all", "default_executor": False}
    bad = row("move", 0.1, 0.1, name="m", route="relay", digest_passed=1, mismatch="w[3:9]", **other)
    report = make_report([*whole(), bad], profile(cluster=SHAPED))
    assert report.exit_code == 6
    assert report.lines[0] == "WRONG BITS in move m by relay (all-to-all): 1 of 2 digests differ; first: w[3:9]"
    assert make_report([row("size", 1, 1, mismatch="x")], profile()).exit_code == 6
    assert make_report([row("size", 1, 1, digest_passed=1)], profile()).exit_code == 6


def test_bits_that_nobody_checked_are_not_right() -> None:
    rows = [*whole(), row("move", 0.1, 0.1, name="m", route="relay", digest_passed=0, digest_total=0)]
    report = make_report(rows, profile(cluster=SHAPED))
    found = of(report.figures, "bits")
    assert report.exit_code == 3 and found.status == "missed" and value(found, "unchecked") == 1


def test_no_record_is_nothing_measured() -> None:
    report = make_report([], profile())
    assert report.exit_code == 5 and report.lines == ("nothing was measured",)


def test_the_other_executor_is_reported_and_not_judged() -> None:
    rows = [*whole(), row("size", 0.5, 0.1, link="in_node", executor="all-to-all", default_executor=False)]
    found = figures(rows, profile(cluster=SHAPED))
    assert exit_code(found, rows) == 0
    assert of(found, "sizes", "all-to-all").status == "missed" and not of(found, "sizes", "all-to-all").judged
    assert {one.executor for one in found if one.judged} == {"send-recv"}


def test_simulated_times_are_called_so_everywhere(tmp_path: Path) -> None:
    rows = whole(simulated="h100-2x8", shaped=False, digest_passed=0, digest_total=0)
    facts = profile(simulated="h100-2x8")
    report = make_report(rows, facts, nic_rates=dict.fromkeys(range(4), PAYLOAD))
    assert report.exit_code == 0 and of(report.figures, "bits").status == "does not apply"
    assert report.lines[0].startswith("simulated: ") and "h100-2x8" in report.lines[0]
    text = report.to_markdown()
    assert text.splitlines()[0] == "# Predicted against measured (simulated: h100-2x8)"
    assert report.to_dict()["simulated"] == "h100-2x8"
    assert make_report([], facts).simulated == "h100-2x8"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"measured_s": 0.0}, "not all positive"),
        ({"predicted_s": math.nan}, "not all positive"),
        ({"simulated": "h100-2x8"}, "several simulated clusters"),
        ({"executor": "all-to-all"}, "several default executors"),
    ],
)
def test_rows_of_which_no_figure_can_be_made_are_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        make_report(
            [row("size", 0.1, 0.1), row("size", **{"predicted_s": 0.1, "measured_s": 0.1, **changed})], profile()
        )


def test_the_markdown_has_every_table_and_the_plots() -> None:
    report = make_report(whole(), profile(cluster=SHAPED))
    text = report.to_markdown(["predicted.png"])
    for table in report.tables:
        assert f"## {table.title}" in text
    assert text.rstrip().endswith("![predicted.png](predicted.png)")
    widths = {line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("| uneven matrices")}
    assert widths == {9, 8}  # two tables that name it: of 8 and of 7 columns
    again = json.loads(dump_json(report.to_dict()))
    assert [one["key"] for one in again["figures"]][:2] == ["nics", "sizes"]
    assert again["figures"][1]["bars"][0] == {
        "statistic": "median", "value": 0, "limit": 0.05, "least": False, "number": False, "met": True
    }  # fmt: skip


def test_plots_are_drawn_once_and_not_over_others(tmp_path: Path) -> None:
    rows = [one for one in whole() if one.threshold != "min_split"]
    paths = draw_plots(rows, profile(cluster=SHAPED), tmp_path)
    assert [path.name for path in paths] == ["sizes-send-recv.png", "predicted.png", "thresholds-send-recv.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    with pytest.raises(InputError, match="exists"):
        draw_plots(rows, profile(), tmp_path)
    assert draw_plots([], profile(), tmp_path) == ()


def test_a_side_says_its_setting() -> None:
    one = sides(batch("min_relay", 25, 0.1, 0.2))[0]
    assert isinstance(one, Side) and one.setting == ("min_relay", "send-recv", 2, 2, 1 << 20, 100)
    assert np.isclose(one.gain, -1.0)
