"""Verdicts upon a commit of a history: which commit fails, against what, and what is only a note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from track_launches import STEADY, case, commit_launches, launch, side

from relaymeter.errors import InputError, NothingMeasured
from relaymeter.harness.track import judge_history
from relaymeter.harness.track.changes import change_points
from relaymeter.harness.track.judge import check_history
from relaymeter.harness.track.records import CaseRecord, LaunchRecord
from relaymeter.harness.track.row_texts import remark
from relaymeter.harness.track.sides import values_of
from relaymeter.harness.track.verdicts import Check, Row


def row(check: Check, metric: str = "move_s", name: str = "tp2") -> Row:
    (found,) = [one for one in check.rows if (one.case, one.metric) == (name, metric)]
    return found


def exact(values: Mapping[str, int | str]) -> LaunchRecord:
    return launch(case(exact=values, samples={}))


def counted(*values: int) -> list[LaunchRecord]:
    """A history of one launch a commit, by its messages."""
    return [replace(exact({"messages": value}), commit=f"{at:02x}" * 20) for at, value in enumerate(values)]


def newest(bases: Sequence[float], **options: object) -> Check:
    return check_history(commit_launches(bases), against="history", **options)  # type: ignore[arg-type]


def test_a_jump_is_a_regression_of_the_commit_that_made_it_and_a_note_for_those_after() -> None:
    jumped = [0.01] * 6 + [0.012]
    check = newest(jumped)
    assert (row(check).verdict, row(check).ratio) == ("regression", pytest.approx(1.2))
    assert row(check).text.startswith("1.20x slower since 060606060, 95 % ")
    assert check.exit_code(warn_only=False) == 3
    for ago in range(1, 6):
        check = newest([*jumped, *[0.012] * ago])
        assert (row(check).verdict, row(check).launches_before) == ("ok", 5 * ago)
        assert check.exit_code(warn_only=False) == 0
        commits = "1 commit ago" if ago == 1 else f"{ago} commits ago"
        assert check.notes == (f"tp2: move_s is 1.20x slower since 060606060 ({commits}): not this commit's change",)
    assert newest([*jumped, *[0.012] * 11]).notes == ()


def test_within_a_wider_window_a_jump_fails_until_it_is_older() -> None:
    jumped = [0.01] * 6 + [0.012]
    for ago in range(5):
        check = newest([*jumped, *[0.012] * ago], window=5)
        found = row(check)
        assert (found.verdict, found.ratio) == ("regression", pytest.approx(1.2)), ago
        commits = {0: "", 1: " (1 commit ago)"}.get(ago, f" ({ago} commits ago)")
        assert found.text.startswith(f"1.20x slower since 060606060{commits}, 95 % ")
        assert found.text.endswith(f", 30 and {5 * (ago + 1)} launches")
    assert newest([*jumped, *[0.012] * 5], window=5).exit_code(warn_only=False) == 0
    single = [one for at in range(0, 60, 5) for one in commit_launches([0.01] * 7 + [0.02] * 5)[at : at + 1]]
    assert check_history(single, against="history").exit_code(warn_only=False) == 4
    assert check_history(single, against="history", window=5).exit_code(warn_only=False) == 3


def test_with_a_launch_a_commit_the_newest_commits_of_the_window_are_judged_together() -> None:
    history = commit_launches([0.01 * factor for factor in STEADY], 1)
    assert check_history(history, against="history").exit_code(warn_only=False) == 4
    check = check_history(history, against="history", window=5)
    assert (row(check).verdict, row(check).launches_before, row(check).launches_after) == ("ok", 7, 5)


def test_a_jump_that_came_back_is_an_improvement_over_it_and_a_note() -> None:
    check = newest([0.01] * 6 + [0.012] * 2 + [0.01])
    assert row(check).verdict == "improvement"
    assert "since 080808080" in row(check).text
    assert "1.20x slower since 060606060 (2 commits ago)" in check.notes[0]


def test_what_the_check_of_a_history_says_is_what_its_page_shows() -> None:
    rng = np.random.default_rng(11)
    agreed = []
    for base in (0.0103, 0.0108, 0.0112, 0.013):
        for _ in range(5):
            levels = [0.01 * float(np.exp(rng.normal() * 0.005)) for _ in range(5)]
            history = commit_launches([*levels, base])
            said = row(check_history(history, against="history")).verdict == "regression"
            assert said == any(change.index == 5 and change.ratio > 1 for change in change_points(history))
            agreed.append(said)
    assert 0 < sum(agreed) < len(agreed)


def test_a_steady_history_is_ok_and_its_newest_commit_is_held_against_all_before() -> None:
    check = newest([0.01] * 8)
    found = row(check)
    assert (found.verdict, found.launches_before, found.launches_after) == ("ok", 35, 5)
    assert check.before is not None
    assert (check.before.label, check.before.launches, check.after.label) == ("the 7 commits before", 35, "070707070")


def test_two_commits_are_a_history_already() -> None:
    assert row(newest([0.01, 0.012])).verdict == "regression"
    assert row(newest([0.01, 0.01])).verdict == "ok"


def test_the_first_commit_of_a_history_has_no_baseline_and_an_empty_history_nothing() -> None:
    check = newest([0.01])
    assert check.before is None
    assert {one.verdict for one in check.rows} == {"no baseline"}
    assert check.exit_code(warn_only=True) == 5
    assert "first commit of the history" in check.notes[0]
    with pytest.raises(NothingMeasured, match="relaymeter track run"):
        check_history([], against="history")


def test_a_commit_is_named_by_any_prefix_and_an_unknown_one_says_what_is_held() -> None:
    history = commit_launches([0.01, 0.01, 0.02, 0.02])
    for against in ("01", "0101010", "01" * 20):
        check = check_history(history, against=against)
        assert check.before is not None
        assert (check.before.label, check.before.commit) == ("010101010", "01" * 20)
        assert (row(check).verdict, row(check).launches_before) == ("regression", 5)
    with pytest.raises(InputError, match=r"holds no launch of feed: it holds 010101010, 020202020, 0303"):
        check_history(history, against="feed")
    check = check_history(history, against="feed" * 10)
    assert check.exit_code(warn_only=True) == 5, "a revision there is, of which nothing was measured yet"
    assert f"holds no launch of {'feed' * 10}: check it out" in check.notes[0]


def test_an_ambiguous_prefix_and_the_newest_commit_itself_are_refused() -> None:
    history = commit_launches([0.01, 0.01, 0.01])
    with pytest.raises(InputError, match="begins 000000000, 010101010, 020202020: give more"):
        check_history(history, against="0")
    with pytest.raises(InputError, match="is the newest commit of the history itself"):
        check_history(history, against="0202")


def test_dirty_launches_are_kept_apart_from_the_commit_they_began_from() -> None:
    history = commit_launches([0.01, 0.01])
    dirty = [replace(one, commit="01" * 20, dirty=True) for one in side(0.02)]
    check = check_history([*history, *dirty], against="0101")
    assert check.after.label == "010101010-dirty"
    assert check.before is not None and check.before.label == "010101010"
    assert row(check).verdict == "regression"
    assert row(check_history([*history, *dirty], against="history")).launches_before == 10
    later = [replace(one, commit="02" * 20) for one in side(0.01)]
    again = check_history([*history, *dirty, *later], against="history")
    assert (row(again).verdict, row(again).launches_before) == ("ok", 10)
    named = check_history([*history, *dirty, *later], against="0101-dirty")
    assert row(named).verdict == "improvement"


def test_sessions_of_a_changed_checkout_are_builds_of_their_own_and_of_one_name() -> None:
    history = commit_launches([0.01, 0.01])
    changed = [replace(one, commit="01" * 20, dirty=True) for one in side(0.01, 15)]
    slow = [replace(one, commit="01" * 20, dirty=True, session_id="later") for one in side(0.014)]
    check = check_history([*history, *changed, *slow], against="history")
    assert (row(check).verdict, row(check).launches_after, row(check).launches_before) == ("regression", 5, 10)
    assert (check.after.label, check.after.dirty) == ("010101010-dirty", True)
    assert check.notes == (
        "010101010-dirty: launches of 1 other session with changed files are left out: nothing tells whether the "
        "changes are the same",
    )
    named = check_history([*history, *changed, *slow, *history[:5]], against="0101", commit="0101-dirty")
    assert (row(named).verdict, row(named).launches_after) == ("regression", 5), "the newest session"
    between = check_history([*history, *changed, *slow], against="0101-dirty")
    assert (row(between).verdict, row(between).launches_before) == ("regression", 15), "the session before"
    with pytest.raises(InputError, match="is the newest commit of the history itself"):
        check_history([*history, *slow], against="0101-dirty")


def dropping(metrics: Sequence[str], dropped: int, commits: int) -> list[LaunchRecord]:
    """A history in which ``metrics`` (of a case ``old`` ``case``) are not measured any more from a commit on."""
    found = []
    for at in range(commits):
        cases = [case(exact={"digest": "ab12"}, samples={"move_s": [0.01]} if at >= dropped else
                      {"move_s": [0.01], **({"pack_s": [0.01]} if "pack_s" in metrics else {})})]  # fmt: skip
        if at < dropped and "case" in metrics:
            cases.append(case("old"))
        found += [launch(*cases, commit=f"{at:x}", number=number) for number in range(1, 6)]
    return found


@pytest.mark.parametrize(
    ("metrics", "rows", "what"), [(["pack_s"], 1, "tp2: pack_s"), (["case"], 3, "old")], ids=["metric", "case"]
)
def test_what_is_not_measured_any_more_is_undecided_at_its_commit_and_a_note_after_it(
    metrics: Sequence[str], rows: int, what: str
) -> None:
    check = check_history(dropping(metrics, 2, 3), against="history")
    missing = [one.text for one in check.rows if one.verdict == "inconclusive"]
    assert missing == ["missing on the new side since 222222222"] * rows
    assert check.exit_code(warn_only=False) == 4
    later = dropping(metrics, 2, 5)
    check = check_history(later, against="history")
    assert (check.exit_code(warn_only=False), len(check.rows)) == (0, 2)
    assert check.notes == (
        f"{what} is not measured any more since 222222222 (2 commits ago): not this commit's change",
    )
    within = check_history(later, against="history", window=3)
    assert within.exit_code(warn_only=False) == 4
    assert {one.text for one in within.rows if one.verdict == "inconclusive"} == {
        "missing on the new side since 222222222 (2 commits ago)"
    }
    assert check_history(dropping(metrics, 2, 14), against="history").notes == ()
    assert check_history(later, against="1" * 40).exit_code(warn_only=False) == 4, "against the commit that had it"


@pytest.mark.parametrize("field", ["config_hash", "suite", "machine_id"])
def test_a_launch_in_another_setting_does_not_hide_what_the_commit_did_in_the_usual_one(field: str) -> None:
    history = commit_launches([0.01, 0.01, 0.014])
    stray = replace(history[-1], **{field: "odd"})  # type: ignore[arg-type]
    check = check_history([*history, stray], against="history")
    assert (row(check).verdict, row(check).launches_before, row(check).launches_after) == ("regression", 10, 5)
    assert check.notes[0].startswith("1 launch of 020202020 in another setting (suite ")
    assert ("--suite odd shows it" in check.notes[0]) == (field == "suite")
    steady = commit_launches([0.01] * 3)
    both = [*steady, *(replace(one, **{field: "odd"}) for one in history[5:])]  # type: ignore[arg-type]
    check = check_history(both, against="history")
    assert (row(check).verdict, row(check).launches_before) == ("regression", 5), "of the one with fewer commits"
    assert "judged apart: ok: 3 rows" in check.notes[-1]


def test_a_commit_that_is_slow_as_single_days_before_were_is_undecided() -> None:
    days = [0.01] * 6 + [0.012] + [0.01] * 6 + [0.012] + [0.01] * 4
    found = row(newest([*days, 0.012]))
    assert found.verdict == "inconclusive"
    assert "2 of the 18 commits before were as slow, and the next ones were not" in found.text
    assert row(newest(days)).verdict == "ok"
    assert row(newest([*days, 0.013])).verdict == "regression", "slower than those days"
    assert row(newest([*days, 0.012, 0.012], window=5)).verdict == "inconclusive"
    level = [0.012] * 8 + [0.01] * 8
    assert row(newest([*level, 0.012])).verdict == "regression", "a level that lasted, and was mended, is no day"


def test_slow_days_of_the_machine_raise_no_alarm() -> None:
    rng = np.random.default_rng(7)
    days = np.where(rng.random((12, 30)) < 0.25, 0.012, 0.01) * np.exp(rng.normal(size=(12, 30)) * 0.01)
    days[:, -1] = 0.012
    assert [newest(list(map(float, bases))).exit_code(warn_only=False) for bases in days].count(3) == 0


def test_the_work_of_a_check_does_not_grow_with_the_square_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(launches: Sequence[LaunchRecord]) -> dict[tuple[str, str], list[float | int | str]]:
        calls.append(len(launches))
        return values_of(launches)

    monkeypatch.setattr(judge_history, "values_of", counting)
    for rows in (1, 20):
        check_history(
            [launch(*(case(f"c{at}") for at in range(rows)), commit=name) for name in "abc"], against="history"
        )
    assert len(calls[: len(calls) // 2]) == len(calls[len(calls) // 2 :]) == 6


def test_the_judged_commit_is_that_of_the_last_launch_or_the_one_that_is_named() -> None:
    history = commit_launches([0.01, 0.012, 0.012])
    again = [*history, *history[5:10]]
    check = check_history(again, against="history")
    assert (check.after.label, check.after.launches, row(check).verdict) == ("010101010", 10, "regression")
    assert check.before is not None and check.before.label == "000000000", "only what came before it"
    check = check_history([*again, *history[:5]], against="0000", commit="0101")
    assert (check.after.label, row(check).verdict, row(check).launches_before) == ("010101010", "regression", 10)
    check = check_history([*history, *history[:5]], against="history")
    assert (check.after.label, check.exit_code(warn_only=True)) == ("000000000", 5)
    with pytest.raises(InputError, match="the history holds no launch of feed: it holds 000000000, 0101"):
        check_history(history, against="history", commit="feed")


def test_outside_a_checkout_versions_are_compared_in_their_order_and_named() -> None:
    history = [
        replace(one, commit=None, version=f"0.{int(str(one.commit)[:2])}")
        for one in commit_launches([0.01] * 3 + [0.02])
    ]
    check = check_history(history, against="history")
    assert (check.after.label, row(check).verdict) == ("version 0.3", "regression")
    for against in ("0.1", "version 0.1"):
        check = check_history(history, against=against, commit="0.2")
        assert check.before is not None
        assert (check.before.label, check.after.label, row(check).verdict) == ("version 0.1", "version 0.2", "ok")
    alone = check_history(history[:5], against="history")
    assert alone.notes[0] == "version 0.0 is the first commit of the history: there is no baseline"


def test_launches_of_another_machine_do_not_stand_in_where_this_one_has_a_baseline() -> None:
    history = commit_launches([0.01, 0.01])
    other = [replace(one, machine_id="other") for one in commit_launches([0.03] * 2)]
    check = check_history([*other, *history], against="history")
    assert (row(check).verdict, row(check).launches_before, check.mismatch) == ("ok", 5, ())
    assert "times of 5 launches of another machine are left out" in check.notes
    assert row(check_history([*other, *history], against="00")).before == pytest.approx(0.01)


def test_an_exact_metric_in_a_history_fails_at_its_commit_and_is_a_note_after_it() -> None:
    found = row(check_history(counted(12, 12, 14), against="history"), "messages")
    assert (found.verdict, found.before, found.after, found.text) == (
        "regression",
        12,
        14,
        "2 more, +16.7% since 020202020",
    )
    after = check_history(counted(12, 12, 14, 14, 14), against="history")
    assert (row(after, "messages").verdict, after.exit_code(warn_only=False)) == ("ok", 0)
    assert after.notes == ("tp2: messages is 14, not 12, since 020202020 (2 commits ago): not this commit's change",)
    found = row(check_history(counted(12, 12, 14, 14, 14), against="history", window=5), "messages")
    assert (found.verdict, found.before, found.after) == ("regression", 12, 14)
    assert found.text == "2 more, +16.7% since 020202020 (2 commits ago)"
    assert row(check_history(counted(12, 14, 14, 14), against="history", window=2), "messages").verdict == "ok"
    assert row(check_history(counted(12, 14, 12), against="history"), "messages").verdict == "improvement"


def test_exact_metrics_of_a_history_are_held_against_the_commit_before_on_whatever_machine() -> None:
    history = commit_launches([0.01] * 4, 5)
    mixed = [replace(one, machine_id="m2") if 10 <= at < 15 else one for at, one in enumerate(history)]
    changed = [
        replace(one, cases=tuple(replace(c, exact={"messages": 14, "digest": "ab12"}) for c in one.cases))
        if at >= 10 else one for at, one in enumerate(mixed)
    ]  # fmt: skip
    check = check_history(changed, against="history")
    assert row(check, "messages").verdict == "ok", "the commit before, of another machine, has 14 already"
    assert (row(check).verdict, row(check).launches_before) == ("ok", 10)
    assert "times of 5 launches of another machine are left out" in check.notes


def test_a_base_that_lost_bits_is_no_baseline_and_no_fault_of_the_newest_commit() -> None:
    history = commit_launches([0.01] * 4)
    lost = [
        replace(one, cases=tuple(replace(c, digest_passed=7, exact={"digest": "bad"}) for c in one.cases))
        for one in history[:5]
    ]
    check = check_history([*lost, *history[5:]], against="history")
    assert check.exit_code(warn_only=False) == 0
    assert row(check).launches_before == 10
    assert check.notes[0] == "tp2: 7 of 8 digests matched in 5 of 15 launches of the base: left out"
    newest_lost = [*history[5:], *(replace(one, commit="ff" * 20) for one in lost)]
    assert check_history(newest_lost, against="history").exit_code(warn_only=True) == 6


@pytest.mark.parametrize("against", ["history", "0000"])
@pytest.mark.parametrize("others", [(), (case("other"),)], ids=["alone", "among others"])
def test_times_that_were_measured_only_with_wrong_bits_before_are_undecided(
    against: str, others: Sequence[CaseRecord]
) -> None:
    first, second = (
        [replace(one, cases=(replace(one.cases[0], digest_passed=passed), *others)) for one in launches]
        for passed, launches in ((1, side(0.01, commit="0")), (8, side(0.02, commit="1")))
    )
    check = check_history([*first, *second], against=against)
    assert (row(check).verdict, check.exit_code(warn_only=True)) == ("inconclusive", 4)
    assert row(check).text == "the base's bits were wrong in every launch: its times do not count"
    assert {row(check, "messages").verdict, row(check, "digest").verdict} == {"ok"}
    assert check.notes == ("tp2: 1 of 8 digests matched in 5 of 5 launches of the base: left out",)
    exact_only = check_history([*first, *second], against=against, exact_only=True)
    assert exact_only.exit_code(warn_only=False) == 0


def test_what_the_scatter_of_the_commits_hides_is_not_called_ok() -> None:
    levels = [0.01 * level for level in (1, 0.98, 1.02, 0.97, 1.01)]
    found = row(newest([*levels, 0.012]))
    assert found.verdict == "inconclusive"
    assert found.text.startswith("a slow-down of ") and "is not excluded: 1.2" in found.text
    assert found.ratio_low is not None and found.ratio_low < 1, "the interval says what the test says"


def test_each_change_within_the_window_is_judged_and_the_worst_decides() -> None:
    improved = [*commit_launches([0.01] * 10 + [0.008] * 3), *side(0.016, 3, commit="f")]
    found = row(check_history(improved, against="history", window=5))
    assert (found.verdict, found.launches_before, found.launches_after) == ("inconclusive", 15, 3)
    assert "2x slower" in found.text
    found = row(newest([0.01] * 6 + [0.02] * 2 + [0.017], window=5))
    assert (found.verdict, found.launches_before, found.launches_after) == ("regression", 30, 5)
    assert found.text.startswith("1.70x slower since 060606060 (2 commits ago), 95 % ")
    found = row(newest([0.02] * 6 + [0.01] * 2 + [0.012], window=5))
    assert found.verdict == "regression", "as with a window of one: what was gained is lost in part"
    assert row(newest([0.01] * 6 + [0.012] * 4 + [0.01], window=6)).verdict == "regression", "four days, then mended"
    assert row(newest([0.01] * 6 + [0.012] * 3 + [0.01], window=6)).verdict == "improvement", "a slow day that is over"
    for window in (1, 5):
        assert row(newest([0.01] * 8, window=window)).verdict == "ok"


def test_each_change_of_an_exact_metric_within_the_window_is_judged() -> None:
    found = row(check_history(counted(12, 20, 16), against="history", window=5), "messages")
    assert (found.verdict, found.text) == ("regression", "4 more, +33.3% since 010101010 (1 commit ago)")
    found = row(check_history(counted(12, 10, 12), against="history", window=5), "messages")
    assert (found.verdict, found.text) == ("regression", "2 more, +20% since 020202020")
    found = row(check_history(counted(12, 14, 12), against="history", window=5), "messages")
    assert (found.verdict, found.text) == ("regression", "2 more, +16.7% since 010101010 (1 commit ago)")
    assert row(check_history(counted(12, 12, 12), against="history", window=5), "messages").verdict == "ok"


def test_a_commit_is_named_only_where_it_is_separated_from_those_beside_it() -> None:
    said = {}
    for slow in range(1, 6):
        bases = [0.01 * factor for factor in STEADY * 2] + [0.013] * slow
        said[slow] = row(check_history(commit_launches(bases, 1), against="history", window=5))
    assert {slow: one.verdict for slow, one in said.items() if slow > 3} == {4: "regression", 5: "regression"}
    assert "ok" not in {one.verdict for one in said.values()}
    assert " slower among the newest 5 commits, 95 % " in said[4].text
    assert f" slower since {f'{24:02x}' * 4}1 (4 commits ago), 95 % " in said[5].text
    assert remark(said[4]) == "among the newest 5 commits"
    between = newest([0.01] * 6 + [0.010475] + [0.011] * 3, window=5)
    assert " slower among the newest 4 commits, 95 % " in row(between).text


def dated(launches: Sequence[LaunchRecord], days: Sequence[int]) -> list[LaunchRecord]:
    """Commits of five launches, each on a day of January."""
    return [replace(one, utc=f"2026-01-{days[at // 5]:02}T00:00:00Z") for at, one in enumerate(launches)]


def test_a_slow_day_of_many_commits_is_one_day_and_slow_commits_of_many_days_are_a_level() -> None:
    once = [0.01] * 6 + [0.012] * 5 + [0.01] * 6
    again = commit_launches([*once, 0.012])
    assert row(check_history(dated(again, [1] * 6 + [2] * 5 + [3] * 6 + [4]), against="history")).verdict == (
        "inconclusive"
    )
    assert row(check_history(dated(again, range(1, 19)), against="history")).verdict == "regression"
    day = [0.01] * 8 + [0.012] + [0.01] * 11
    said = [row(newest([*day, *[0.012] * slow], window=15)).verdict for slow in (1, 2, 3, 4, 8, 12)]
    assert said == ["inconclusive"] * 3 + ["regression"] * 3
    for sessions, verdict in ((1, "inconclusive"), (3, "inconclusive"), (4, "regression")):
        judged = [replace(one, commit="f" * 40, session_id=f"{at}") for at in range(sessions) for one in side(0.012)]
        check = check_history([*commit_launches(day), *judged], against="history")
        assert row(check).verdict == verdict
    single = [*commit_launches([0.01] * 8), *side(0.0135, 1, commit="e"), *commit_launches([0.01] * 20)[40:]]
    assert row(check_history([*single, *side(0.013, commit="f")], against="history")).verdict == "regression"


def test_two_commits_that_differ_by_what_days_do_raise_no_alarm() -> None:
    assert row(newest([0.01, 0.0106])).verdict != "regression"
    assert row(newest([0.01, 0.01, 0.0106])).verdict != "regression"
    named = [row(check_history(commit_launches([0.01, base]), against="0000")) for base in (0.0106, 0.012)]
    assert [one.verdict for one in named] == ["ok", "regression"]
    assert named[0].p_value == row(newest([0.01, 0.0106])).p_value
    assert row(newest([0.01] * 12 + [0.0106])).verdict == "regression", "these commits do not scatter"


def committed(order: Sequence[int], levels: Mapping[int, float], unknown: int = -1) -> list[LaunchRecord]:
    """Commits by the day on which each was committed, in the order in which they were launched."""
    return [
        replace(one, commit=f"{day:02x}" * 20, commit_utc=None if day == unknown else f"2026-01-{day:02}T00:00:00Z")
        for day in order
        for one in side(levels.get(day, 0.01))
    ]


def test_a_commit_that_was_launched_late_stands_where_it_was_committed() -> None:
    slow = dict.fromkeys(range(7, 10), 0.013)
    late = committed([1, 2, 3, 4, 5, 7, 6, 8], slow)
    check = check_history(late, against="history")
    assert (check.exit_code(warn_only=False), row(check).verdict) == (0, "ok"), "8 is as slow as 7"
    assert check.notes == (
        "060606060 was launched after 070707070, which is the newer commit: commits are in the order in which they "
        "were committed",
        "tp2: move_s is 1.30x slower since 070707070 (1 commit ago): not this commit's change",
    )
    found = row(check_history(late, against="history", commit="0707"))
    assert (found.verdict, found.launches_before) == ("regression", 30)
    assert [change.label for change in change_points(late)] == ["070707070"]
    check = check_history(committed([1, 2, 3, 4, 5, 7, 6, 8], slow, unknown=2), against="history")
    assert "order of the file, as not all launches say" in check.notes[0]
    assert row(check).verdict == "inconclusive", "6 came back, so that 7 may have been a slow day"
    assert check_history(committed(range(1, 7), {}), against="history").notes == ()
