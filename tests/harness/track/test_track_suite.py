"""Suites: what the file may say, what a case moves, and what is refused before a rank is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from exact_metrics import committed

from relaymeter.errors import InputError
from relaymeter.harness.config import check
from relaymeter.harness.jobs import TrackJob, dump, job_of
from relaymeter.harness.moves import default_executor
from relaymeter.harness.track.case_plan import available_bytes, refuse_idle_routes, refuse_too_large, schedule
from relaymeter.harness.track.suite import (
    TrackSuite,
    config_hash,
    exact_toml,
    load_suite,
    select_cases,
    shipped_track_suites,
    suite_path,
)

SIDES = {"from": {"kind": "zero3", "nodes": "first-half"}, "to": {"kind": "replicas", "nodes": "second-half"}}
CASE: dict[str, Any] = {"name": "a", "tensors": [{"shape": [8, 8]}], **SIDES}


def _suite(**changes: Any) -> TrackSuite:
    return check(TrackSuite, {"name": "s", "cases": [CASE], **changes}, "s.toml")


def test_the_shipped_suite_covers_routes_executors_sizes_and_both_kinds_of_layout() -> None:
    suite = load_suite("ci")
    assert "ci" in shipped_track_suites()
    assert {case.route for case in suite.cases} == {"direct", "relay", "spread"}
    assert {case.executor for case in suite.cases} == {"send-recv", "all-to-all"}
    assert {case.dtype for case in suite.cases} == {"bfloat16", "float32"}
    assert (suite.world.nodes, suite.world.ranks_per_node, suite.world.nic_rate_bytes_per_s) == (2, 2, None)
    refuse_idle_routes(suite)


def test_the_committed_exact_metrics_are_those_of_the_schedules() -> None:
    suite = load_suite("ci")
    known = committed()
    assert list(known) == [case.name for case in suite.cases]
    for case in suite.cases:
        source, destination, made = schedule(case, suite, suite.topology())
        exact = dict(known[case.name])
        assert len(exact.pop("digest")) == 16
        assert exact == {
            "bytes_total": made.bytes_total,
            "bytes_cross_node": made.bytes_cross_node,
            "bytes_in_node": made.bytes_in_node,
            "messages": made.messages(default_executor(case.executor)),
            "segments": len(made.all_segments.tensor),
            "rounds": made.rounds,
        }
        held = sum(destination.storage_bytes(rank) for rank in range(4))
        assert made.bytes_total == held, "every copy at the destination is counted"
        assert sum(source.storage_bytes(rank) for rank in range(4)) > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repeat": 3}, "s.toml: unknown key 'repeat': did you mean 'repeats'?"),
        ({"repeats": 0}, "repeats = 0"),
        ({"cases": []}, "cases"),
        ({"cases": [CASE, CASE]}, "two [[cases]] are named 'a': give each a name of its own"),
        ({"cases": [{**CASE, "model": "m"}]}, "give what moves: either model or tensors"),
        ({"cases": [{"name": "a", **SIDES}]}, "give what moves: either model or tensors"),
        ({"cases": [{"name": "a", "model": "m", **SIDES}]}, "case a: no model 'm'"),
        ({"cases": [{**CASE, "route": "relais"}]}, "did you mean 'relay'? valid: chain, direct, relay, spread"),
        ({"cases": [{**CASE, "times": ["move"]}]}, "did you mean 'move_s'?"),
        ({"cases": [{**CASE, "times": ["move_s", "move_s"]}]}, "give a list of different times"),
        ({"cases": [{**CASE, "bucket": "1KiB"}]}, "at least 4096 bytes"),
        ({"cases": [{**CASE, "bucket": "big"}]}, "'big' is not a size in bytes"),
        ({"cases": [{**CASE, "dtype": "bf16"}]}, "'dtype' = 'bf16': valid: bfloat16, complex64, "),
        ({"cases": [{**CASE, "tensors": [{"shape": [8], "cut": 1}]}]}, "cut 1 is no dim of a tensor of shape [8]"),
        ({"cases": [{**CASE, "to": {"kind": "replicas", "nodes": [2]}}]}, "case a: to: node 2 of 2 nodes"),
        (
            {"cases": [{**CASE, "to": {"kind": "replicas", "nodes": [1], "tensor_parallel": 3}}]},
            "case a: to: 2 ranks % tensor_parallel 3 = 2, not 0",
        ),
        (
            {"cases": [{**CASE, "to": {"kind": "zero3", "nodes": [1], "tensor_parallel": 2}}]},
            "kind 'zero3' takes no tensor_parallel",
        ),
        ({"world": {"nodes": 1}}, "case a: to: the second-half of 1 node is 0 nodes: give at least 2 nodes"),
        ({"world": {"nic": "fast"}}, "'fast' is not a network rate"),
        ({"world": {"nic": 0}}, "give 'none', or a rate such as '400mbit'"),
        ({"world": {"nic": True}}, "give 'none', or a rate such as '400mbit'"),
        ({"world": {"nic": float("nan")}}, "give 'none', or a rate such as '400mbit'"),
        (
            {"world": {"nodes": 10**9}},
            "nodes 1000000000 x ranks_per_node 2 = 2000000000 ranks: a suite has at most 4096",
        ),
        (
            {"cases": [{**CASE, "tensors": [{"shape": [2**40, 2**40], "count": 2}]}]},
            f"case a: its tensors have {2**82} bytes together: at most {2**50}",
        ),
    ],
)
def test_a_suite_that_says_nonsense_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        _suite(**changes)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_suite_that_this_machine_does_not_hold_is_refused_with_the_numbers() -> None:
    cases = [CASE, {**CASE, "name": "b", "tensors": [{"shape": [2**20, 2**20], "count": 2}]}]
    suite, held = _suite(cases=cases), 2**42 * (1 + 2 * 2)  # a source, and two copies that arrive and are kept
    for room in (None, held + 10**9):
        refuse_too_large(suite, room)
    with pytest.raises(
        InputError, match=f"suite s, case b: its ranks hold {held} bytes .* and this machine has 600000000"
    ):
        refuse_too_large(suite, 10**9)
    with pytest.raises(
        InputError, match=r"suite s: 4 ranks need 400 MB before they hold a tensor, .* give \[world\] fewer"
    ):
        refuse_too_large(suite, 10**8)
    assert (available_bytes() or 1) > 0


def test_all_that_is_wrong_in_a_suite_is_told_at_once(tmp_path: Path) -> None:
    text = suite_path("ci").read_text(encoding="utf-8")
    file = tmp_path / "s.toml"
    file.write_text("repeat = 1\nwarmup = 2\n" + text.replace('route = "relay"', 'route = "relais"'), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_suite(str(file))
    assert "unknown key 'repeat': did you mean 'repeats'?" in str(refused.value)
    assert re.search(r"; also wrong: cases\.\d\.route, warmup \(unknown\)$", str(refused.value))
    (tmp_path / "one.toml").write_text(
        '[[cases]]\nname = "a"\nfoo = 1\ntensors = [{ shape = [8] }]\nfrom = { kind = "zero3", nodes = "all" }\n'
        'to = { kind = "zero3", nodes = "all" }\n',
        encoding="utf-8",
    )
    with pytest.raises(InputError, match=r"unknown key 'foo': valid: [a-z, ]*$"):
        load_suite(str(tmp_path / "one.toml"))
    with pytest.raises(InputError, match=r"cannot read suite .*none\.toml: No such file"):
        load_suite(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(("mark", "end"), [("\ufeff", "\n"), ("", "\r\n")], ids=["byte order mark", "CRLF"])
def test_a_suite_from_another_editor_is_the_same(mark: str, end: str, tmp_path: Path) -> None:
    text = suite_path("ci").read_text(encoding="utf-8")
    (tmp_path / "ci.toml").write_bytes((mark + text.replace("\n", end)).encode())
    assert load_suite(str(tmp_path / "ci.toml")) == load_suite("ci")


def test_a_suite_reaches_the_ranks_as_it_was_read() -> None:
    suite = load_suite("ci").model_copy(update={"world": _suite(world={"nic": "400mbit"}).world})
    job = TrackJob(suite=suite, time_limit_s=60, move_limit_s=30)
    again = job_of(dump(job), "job")
    assert again == job
    assert isinstance(again, TrackJob)
    assert again.suite.world.nic_rate_bytes_per_s == 50e6


def test_unknown_suites_and_cases_are_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown suite 'cii': did you mean 'ci'\? valid: ci, or a path ending"):
        suite_path("cii")
    with pytest.raises(InputError, match=r"suite ci has no case 'zero3-tp3': did you mean 'zero3-tp2'\?"):
        select_cases(load_suite("ci"), ["zero3-tp3"])
    assert [case.name for case in select_cases(load_suite("ci"), ["small-blocks"]).cases] == ["small-blocks"]
    file = tmp_path / "mine.toml"
    file.write_text(suite_path("ci").read_text(encoding="utf-8"), encoding="utf-8")
    assert load_suite(str(file)).name == "mine"


def test_a_route_that_carries_nothing_is_refused() -> None:
    lone = {**CASE, "route": "relay", "to": {"kind": "replicas", "nodes": [1], "tensor_parallel": 2}}
    with pytest.raises(InputError, match="suite s, case a: route 'relay' has no block to carry there: valid: direct"):
        refuse_idle_routes(_suite(cases=[lone]))


def test_the_hash_is_of_content_and_of_how_ranks_were_started_not_of_the_name() -> None:
    how = {"launcher": None}
    known = config_hash(_suite(), how)
    assert config_hash(_suite(name="other"), how) == known
    for suite, started in (
        (_suite(repeats=3), how),
        (_suite(cases=[{**CASE, "executor": "all-to-all"}]), how),
        (_suite(world={"nic": "400mbit"}), how),
        (_suite(), {"launcher": "torchrun"}),
    ):
        assert config_hash(suite, started) != known


def test_a_suite_for_exact_metrics_alone_is_the_same_but_for_one_repeat(tmp_path: Path) -> None:
    suite = load_suite("ci")
    (tmp_path / "suite.toml").write_text(exact_toml(suite), encoding="utf-8")
    found = load_suite(str(tmp_path / "suite.toml"))
    assert found == suite.model_copy(update={"repeats": 1, "warmups": 0, "plan_repeats": 1})


def test_a_suite_may_time_nothing(tmp_path: Path) -> None:
    text = suite_path("ci").read_text(encoding="utf-8")
    (tmp_path / "none.toml").write_text(re.sub(r"times = .*", "times = []", text), encoding="utf-8")
    assert {case.times for case in load_suite(str(tmp_path / "none.toml")).cases} == {()}
