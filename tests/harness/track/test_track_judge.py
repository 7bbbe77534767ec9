"""Verdicts: right direction, right wording, the right exit code, and no alarm that nothing stands behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from track_launches import case, launch, side

from relaymeter.errors import NothingMeasured
from relaymeter.harness.track.judge import check_ab, check_history, level_of, next_launches
from relaymeter.harness.track.records import LaunchRecord
from relaymeter.harness.track.verdicts import Check, Row


def ab(before: Sequence[LaunchRecord], after: Sequence[LaunchRecord]) -> Check:
    return check_ab(before, after, labels=("base", "new"))


def row(check: Check, metric: str = "move_s", name: str = "tp2") -> Row:
    (found,) = [one for one in check.rows if (one.case, one.metric) == (name, metric)]
    return found


def exact(values: Mapping[str, int | str], count: int = 5, **options: int) -> list[LaunchRecord]:
    return [launch(case(exact=values, samples={}, **options), commit="b", number=at + 1) for at in range(count)]


@pytest.mark.parametrize(
    ("metric", "before", "after", "verdict", "ratio", "says"),
    [
        ("moved_bytes_per_s", 100, 120, "improvement", 100 / 120, "1.20x faster, 95 % "),
        ("moved_bytes_per_s", 120, 100, "regression", 1.2, "1.20x slower, 95 % "),
        ("move_s", 10, 12, "regression", 1.2, "1.20x slower, 95 % "),
        ("move_s", 12, 10, "improvement", 10 / 12, "1.20x faster, 95 % "),
        ("move_s", 100, 230, "regression", 2.3, "2.3x slower, +130%, 95 % "),
        ("move_s", 230, 100, "improvement", 100 / 230, "2.3x faster, -57%, 95 % "),
        ("moved_bytes_per_s", 230, 100, "regression", 2.3, "2.3x slower, -57%, 95 % "),
        ("move_s", 10, 10, "ok", 1.0, "no change shown: 1.00x, 95 % "),
        ("move_s", 10, 10.4, "ok", 1.04, "no change shown: 1.04x, 95 % "),
    ],
)
def test_above_one_is_worse_whichever_way_the_metric_counts(
    metric: str, before: float, after: float, verdict: str, ratio: float, says: str
) -> None:
    """Case B54: bandwidth 100 -> 120 is better, time 10 -> 12 worse; 100 -> 230 is 2.3x, +130%."""
    found = row(ab(side(before, metric=metric), side(after, metric=metric)), metric)
    assert (found.verdict, found.ratio) == (verdict, pytest.approx(ratio))
    assert found.text.startswith(says)
    assert found.text.endswith(", 5 launches")
    assert (found.before, found.after) == (pytest.approx(before), pytest.approx(after))
    assert found.ratio_low is not None and found.ratio_high is not None and found.ratio is not None
    assert found.ratio_low <= found.ratio <= found.ratio_high


def test_the_whole_wording_of_a_regression() -> None:
    found = row(ab(side(0.01, 8), side(0.0134, 8)))
    assert found.text == "1.34x slower, 95 % 1.32-1.36, 8 launches"


def test_bandwidth_up_and_time_up_in_one_file_are_one_better_and_one_worse() -> None:
    def both(rate: float, time: float) -> list[LaunchRecord]:
        return [
            launch(case(samples={"moved_bytes_per_s": [rate * f], "move_s": [time * f]}), number=at)
            for at, f in enumerate((1.0, 0.99, 1.01, 1.0, 1.0), start=1)
        ]

    check = ab(both(100, 10), both(120, 12))
    assert row(check, "moved_bytes_per_s").verdict == "improvement"
    assert row(check).verdict == "regression"
    assert check.exit_code(warn_only=False) == 3
    assert check.exit_code(warn_only=True) == 0


def test_ten_unchanged_runs_with_twenty_percent_noise_raise_no_alarm() -> None:
    """Case B54. With five launches such noise cannot exclude a slow-down of a quarter, which is said, not passed."""
    rng = np.random.default_rng(54)
    for _ in range(10):
        sides = [
            [launch(case(samples={"move_s": [float(np.exp(rng.normal() * 0.2))]}), number=at + 1) for at in range(5)]
            for _ in range(2)
        ]
        found = row(ab(*sides))
        assert found.verdict in ("ok", "inconclusive")
        if found.verdict == "inconclusive":
            assert "is not excluded" in found.text
            assert "take more (--launches 8)" in found.text


def test_sizes_are_judged_each_and_a_base_of_zero_is_held_to_no_limit() -> None:
    """Case B54: 8 B at 0 GB/s beside 1 GiB at 90."""

    def sizes(small: float, large: float) -> list[LaunchRecord]:
        return [
            launch(
                case("8 B", samples={"moved_bytes_per_s": [small]}),
                case("1 GiB", samples={"moved_bytes_per_s": [large * f]}),
                number=at,
            )
            for at, f in enumerate((1.0, 0.99, 1.01, 1.0, 1.0), start=1)
        ]

    check = ab(sizes(0.0, 90e9), sizes(0.0, 60e9))
    small, large = (row(check, "moved_bytes_per_s", name) for name in ("8 B", "1 GiB"))
    assert (small.verdict, small.ratio, small.text) == ("ok", None, "the base is 0: not held to a limit")
    assert (large.verdict, large.ratio) == ("regression", pytest.approx(1.5))
    assert row(ab(sizes(0.0, 90e9), sizes(1e9, 90e9)), "moved_bytes_per_s", "8 B").verdict == "ok"
    fell = row(ab(sizes(1e9, 90e9), sizes(0.0, 90e9)), "moved_bytes_per_s", "8 B")
    assert (fell.verdict, fell.text) == ("inconclusive", "5 values of 0 on the new side: no ratio")


def test_three_launches_never_decide_and_say_how_many_do() -> None:
    check = ab(side(0.01, 3), side(0.1, 3))
    found = row(check)
    assert found.verdict == "inconclusive"
    assert found.text.startswith("3 launches on a side can never decide, 5 are needed: 10x slower, +900% so far")
    assert check.exit_code(warn_only=False) == 4
    one = row(ab(side(0.01, 5), side(0.1, 1)))
    assert one.text.startswith("1 launch on a side can never decide")


def test_many_samples_in_few_launches_are_no_more_evidence() -> None:
    pooled = [[launch(case(samples={"move_s": [v] * 1000}), number=at + 1) for at in range(3)] for v in (0.01, 0.02)]
    assert row(ab(*pooled)).verdict == "inconclusive"


def test_a_row_among_twenty_needs_more_than_a_row_alone() -> None:
    """5.5 % more with 1.6 % of drift: beyond chance in one row, not in the worst of twenty that drift more."""
    before, after = side(0.01), side(0.01 * 1.055)
    assert row(ab(before, after)).verdict == "regression"

    def wide(launches: list[LaunchRecord]) -> list[LaunchRecord]:
        noisy = np.random.default_rng(7)
        return [
            replace(
                one,
                cases=(
                    *one.cases,
                    *(
                        case(f"other {at}", samples={"move_s": [float(0.01 * np.exp(noisy.normal() * 0.04))]})
                        for at in range(19)
                    ),
                ),
            )
            for one in launches
        ]

    found = row(ab(wide(before), wide(after)))
    assert found.verdict in ("inconclusive", "ok")
    assert (found.p_value or 0) > 0.02


@pytest.mark.parametrize(
    "metric", ["bytes_total", "bytes_cross_node", "bytes_in_node", "messages", "segments", "rounds"]
)
def test_more_of_an_exact_metric_is_a_regression_and_less_an_improvement_but_for_what_arrives(metric: str) -> None:
    more = row(ab(exact({metric: 1000}), exact({metric: 1001})), metric)
    less = row(ab(exact({metric: 1001}), exact({metric: 1000})), metric)
    same = row(ab(exact({metric: 1000}), exact({metric: 1000})), metric)
    fewer = "regression" if metric == "bytes_total" else "improvement"
    assert (more.verdict, less.verdict, same.verdict) == ("regression", fewer, "ok")
    assert (more.before, more.after, more.ratio, more.p_value) == (1000, 1001, None, None)
    unit = " B" if metric.startswith("bytes") else ""
    assert more.text == f"1{unit} more, +0.1%"
    assert less.text == f"1{unit} fewer, -0.0999%"
    assert same.text == "equal, 5 launches"


def test_exact_metrics_need_one_launch_and_may_come_from_none() -> None:
    found = row(ab(exact({"messages": 0}, 1), exact({"messages": 4}, 1)), "messages")
    assert (found.verdict, found.text) == ("regression", "4 more")


def test_an_exact_metric_that_does_not_repeat_is_said() -> None:
    def mixed(*values: int) -> list[LaunchRecord]:
        return [exact({"messages": value}, 1)[0] for value in values]

    assert row(ab(mixed(12, 12), mixed(12, 14)), "messages").verdict == "regression"
    assert row(ab(mixed(12, 14), mixed(12, 12)), "messages").verdict == "inconclusive"
    base = [exact({"digest": value}, 1)[0] for value in ("aa", "bb", "aa")]
    for check in (
        ab(base, exact({"digest": "aa"})),
        check_history([*(replace(one, commit="a" * 40) for one in base), *exact({"digest": "aa"})], against="history"),
        check_history([*(replace(one, commit="a" * 40) for one in base), *exact({"digest": "aa"})], against="aaaa"),
    ):
        assert (row(check, "digest").verdict, check.exit_code(warn_only=True, undecided_ok=True)) == ("inconclusive", 4)
        assert row(check, "digest").text == "the launches of the base differ, though this repeats exactly: aa, bb"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (("aa", "aa"), ("bb", "bb"), "the digest differs: aa, bb"),
        (("aa", "aa"), ("aa", "bb"), "the launches of the new side differ: aa, bb"),
        (("aa", "bb"), ("aa", "bb"), "the launches of the new side differ: aa, bb"),
    ],
)
def test_digests_that_differ_are_wrong_bits(before: Sequence[str], after: Sequence[str], says: str) -> None:
    check = ab(*([exact({"digest": value}, 1)[0] for value in values] for values in (before, after)))
    assert (row(check, "digest").verdict, row(check, "digest").text) == ("wrong bits", says)
    assert check.exit_code(warn_only=True) == 6


@pytest.mark.parametrize(
    ("passed", "total", "says"),
    [(7, 8, "7 of 8 digests matched in 1 of 5 launches of"), (0, 0, "no digest was taken in 1 of 5 launches of")],
)
def test_a_case_whose_digests_failed_on_either_side_is_wrong_bits_once(passed: int, total: int, says: str) -> None:
    good = side(0.01)
    bad = [*good[:4], replace(good[4], cases=(case(passed=passed, total=total),))]
    for check, where in ((ab(good, bad), "the new side"), (ab(bad, good), "the base")):
        found = row(check, "digest")
        assert (found.verdict, found.text) == ("wrong bits", f"{says} {where}")
        assert check.exit_code(warn_only=True) == 6
        assert row(check).verdict == "inconclusive"


def test_what_only_one_side_has_is_said_and_fails_only_where_it_went_missing() -> None:
    def named(name: str) -> list[LaunchRecord]:
        return [replace(one, cases=(*one.cases, *(case(name),))) for one in side(0.01)]

    missing = ab(named("gone"), side(0.01))
    assert row(missing, name="gone").verdict == "inconclusive"
    assert row(missing, name="gone").text == "missing on the new side"
    assert missing.exit_code(warn_only=False) == 4
    new = ab(side(0.01), named("fresh"))
    assert row(new, name="fresh").verdict == "ok"
    assert "new" in row(new, name="fresh").text
    assert "fresh: move_s is new: there is nothing to hold it against" in new.notes
    assert new.exit_code(warn_only=False) == 0


def test_nothing_to_hold_against_is_no_pass() -> None:
    check = ab([], side(0.01))
    assert check.before is None
    assert {one.verdict for one in check.rows} == {"no baseline"}
    assert check.exit_code(warn_only=True) == 5
    with pytest.raises(NothingMeasured):
        ab(side(0.01), [])


@pytest.mark.parametrize("field", ["machine_id", "config_hash", "suite"])
def test_another_machine_s_times_and_anything_of_another_configuration_are_refused_unless_allowed(field: str) -> None:
    before, after = side(0.01), [replace(one, **{field: "other-2"}) for one in side(0.01, commit="b")]
    works = (
        lambda **options: check_ab(before, after, labels=("base", "new"), **options),
        lambda **options: check_history([*before, *after], against="aaaa", **options),
        lambda **options: check_history([*before, *after], against="history", **options),
    )
    for work in works if field != "suite" else works[:2]:
        check = work()
        assert (check.exit_code(warn_only=True), check.mismatch) == (4, ())
        assert (row(check).verdict, row(check).ratio) == ("inconclusive", None)
        assert row(check).text == f"not compared: {field} differs, see the notes"
        assert row(check, "messages").verdict == ("ok" if field == "machine_id" else "inconclusive")
        text = check.notes[0]
        assert field in text and "other-2" in text and getattr(before[0], field) in text
        assert "--allow-mismatch" in text
        assert check.exit_code(warn_only=False, undecided_ok=True) == (0 if field == "machine_id" else 4)
        allowed = work(allow_mismatch=True)
        assert allowed.mismatch == (field,)
        assert allowed.exit_code(warn_only=False) == 0


def test_an_exact_metric_that_changed_is_a_regression_on_whatever_machine() -> None:
    before = exact({"messages": 12, "digest": "aa"}, 5)
    more = [replace(one, commit="b" * 40, machine_id="m2") for one in exact({"messages": 13, "digest": "aa"}, 1)]
    bits = [replace(one, commit="b" * 40, machine_id="m2") for one in exact({"messages": 12, "digest": "bb"}, 1)]
    for against in ("history", "bbbb"):
        base = [replace(one, commit="bbbb" + "0" * 36) for one in before]
        new = [replace(one, commit="c" * 40) for one in more]
        check = check_history([*base, *new], against=against)
        assert (row(check, "messages").verdict, row(check, "messages").text) == (
            "regression", "1 more, +8.33%" + (" since ccccccccc" if against == "history" else ""),
        )  # fmt: skip
    assert check_history([*base, *bits], against="history").exit_code(warn_only=True) == 6


def test_both_sides_of_an_ab_are_of_one_machine_whatever_torch_each_runs_on() -> None:
    before, after = side(0.01), [replace(one, machine_id="with torch 2.10") for one in side(0.012, commit="b")]
    check = check_ab(before, after, labels=("base", "new"), one_machine=True)
    assert (row(check).verdict, check.mismatch) == ("regression", ())
    other = [replace(one, config_hash="other") for one in after]
    assert check_ab(before, other, labels=("base", "new"), one_machine=True).exit_code(warn_only=True) == 4


def test_sides_of_an_ab_say_of_changed_files_and_outside_a_checkout_of_the_version() -> None:
    dirty = [replace(one, dirty=True) for one in side(0.01)]
    outside = [replace(one, commit=None, version="0.8") for one in side(0.01)]
    check = check_ab(outside, dirty, labels=("venv/bin/python", "this"))
    assert check.before is not None
    assert (check.before.label, check.after.label) == ("venv/bin/python, version 0.8", "this")
    assert (check.before.dirty, check.after.dirty) == (False, True)


def test_exact_metrics_alone_are_judged_by_a_launch_and_no_time_is_shown() -> None:
    for check in (
        check_ab(side(0.01, 1), side(0.1, 1), labels=("base", "new"), exact_only=True),
        check_history([*side(0.01, 1), *side(0.1, 1, commit="b")], against="history", exact_only=True),
        check_history([*side(0.01, 1), *side(0.1, 1, commit="b")], against="aa", exact_only=True),
    ):
        assert {one.metric for one in check.rows} == {"messages", "digest"}
        assert check.exit_code(warn_only=False) == 0
        assert check.notes[0].startswith("times are not judged, only exact metrics")
    assert next_launches(side(0.01, 1), side(0.01, 1), 1, exact_only=True) == 0
    assert next_launches(side(0.01), side(0.011), 5, exact_only=True) == 0


def test_undecided_times_may_pass_but_no_regression_no_missing_case_and_no_baseline() -> None:
    few = ab(side(0.01, 3), side(0.1, 3))
    assert (few.exit_code(warn_only=True), few.exit_code(warn_only=False, undecided_ok=True)) == (4, 0)
    assert few.counts()["inconclusive"] == 1
    both = replace(few, rows=(*few.rows, row(ab(side(0.01), side(0.02)))))
    codes = {
        (warn, ok): both.exit_code(warn_only=warn, undecided_ok=ok) for warn in (False, True) for ok in (False, True)
    }
    assert codes == {(False, False): 3, (True, False): 4, (False, True): 3, (True, True): 0}
    gone = [replace(one, cases=(*one.cases, case("gone"))) for one in side(0.01)]
    assert ab(gone, side(0.01)).exit_code(warn_only=False, undecided_ok=True) == 4
    assert ab([], side(0.01)).exit_code(warn_only=True, undecided_ok=True) == 5


def test_wrong_bits_are_shown_with_the_launches_and_digests_of_both_sides() -> None:
    good = side(0.01)
    bad = [replace(one, cases=(case(passed=7, exact={"messages": 12, "digest": "cd34"}),)) for one in good[:4]]
    found = row(ab(good, bad), "digest")
    assert (found.before, found.after) == ("ab12", "cd34")
    assert (found.launches_before, found.launches_after) == (5, 4)
    bare = [replace(one, cases=(case(passed=7, exact={"messages": 12}),)) for one in good]
    assert row(ab(bare, bare), "digest").launches_after == 5


def test_more_launches_are_asked_for_only_where_they_may_tell_something() -> None:
    assert next_launches([], [], 5) == 5
    assert next_launches(side(0.01, 3), side(0.01, 2), 5) == 3
    assert next_launches(side(0.01), side(0.01), 5) == 0
    assert next_launches(side(0.01), side(0.02), 5) == 0
    assert next_launches(side(0.01, 3), side(0.02, 3), 3) == 0
    steady = [0.0100, 0.0101, 0.0099, 0.01005, 0.00995]
    unsettled = [0.0112, 0.0102, 0.0115, 0.0099, 0.0108, 0.0114, 0.0112, 0.0101, 0.0113, 0.0099, 0.0112, 0.0101]
    before, after = (
        [launch(case(samples={"move_s": [value]}), number=at) for at, value in enumerate(values, start=1)]
        for values in (steady * 3, unsettled)
    )
    assert next_launches(before[:5], after[:5], 5) == 3
    assert next_launches(before[:6], after[:6], 6) == 2
    assert next_launches(before[:12], after[:12], 5) == 0
    wrong = [replace(one, cases=tuple(replace(c, digest_passed=0) for c in one.cases)) for one in after[:5]]
    assert next_launches(before[:5], wrong, 5) == 0


def test_each_look_has_its_level_and_together_they_stay_below_four_percent_of_both_directions() -> None:
    assert [level_of(count) for count in (5, 7, 8, 11, 12, 40)] == [0.02, 0.02, 0.005, 0.005, 0.01, 0.01]
    assert sum(level_of(count) for count in (5, 8, 12)) <= 0.035


def test_unchanged_launches_raise_few_alarms_and_ten_percent_is_mostly_caught() -> None:
    """A small part of the benchmark: 20 rows at 3 % drift, 5 launches a side."""
    from relaymeter.harness.bench_report import Figure
    from relaymeter.harness.bench_track import track

    figures, tables = track(lambda text: None, tiny=True)
    assert all(isinstance(one, Figure) for one in figures)
    shares = {one.name: one.value for one in figures}
    assert shares["false alarms, 3% drift, 5 launches, 20 rows"] == 0
    assert shares["+20% caught, 3% drift, 5 launches, 20 rows"] == 1
    assert tables[0].row_count == 40
