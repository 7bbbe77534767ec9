"""What ``validate`` measures: the cases drawn up from a profile, how they are measured, and the rows they become."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "calibration"))

from synthetic import Cluster

from relaymeter.calibration.calibrate import calibrate_cluster
from relaymeter.calibration.cells import Wrong
from relaymeter.calibration.profiles import Profile, load, save
from relaymeter.calibration.recorder import Settings
from relaymeter.errors import InputError
from relaymeter.harness.cli import main
from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.simulated import load_preset
from relaymeter.harness.simulated_profile import simulated_facts
from relaymeter.harness.validate_agenda import Extent, make_agenda
from relaymeter.harness.validate_cases import MIXED, Agenda, MoveSpec, Observed
from relaymeter.harness.validate_flows import flow_cases
from relaymeter.harness.validate_measure import Repeats, in_turns, measure_flows
from relaymeter.harness.validate_moves import plan_spec, shapes_for
from relaymeter.harness.validate_progress import Clock
from relaymeter.harness.validate_report import make_report, report_facts
from relaymeter.harness.validate_rows import About, flow_rows, move_rows
from relaymeter.policies.price import price_loads
from relaymeter.policies.thresholds import find_thresholds
from relaymeter.records import dump_json, dump_lines
from relaymeter.relayout.schedule import build_schedule
from relaymeter.relayout.topology import Topology
from relaymeter.validation_records import HARD, ValidationRecord, read_validation

GRID = Topology.grid(2, 2)
STAMP = RunStamp(utc="2026-01-02T03:04:05Z", launch_id="ab", machine_id="cd", commit=None, mismatch=(), shaped=True)


def _calibrated(topology: Topology) -> Profile:
    settings = replace(Settings.short(), replicates=3)
    return calibrate_cluster(Cluster(topology).instruments(), topology, settings=settings)


@cache
def _profile() -> Profile:
    return _calibrated(GRID)


@cache
def _agenda() -> Agenda:
    return make_agenda(_profile(), GRID, Extent(settings=1, mixes=1, buckets=(1 << 20,), tiny=1, others=False))


def test_each_executor_has_twenty_uneven_matrices_a_third_of_them_hard_none_of_them_calibrations() -> None:
    fitted = {cell.flows for cell in _profile().cells}
    for executor in _profile().executors:
        mine = [case for case in _agenda().flows if case.kind == "matrix" and case.executor == executor]
        assert len(mine) >= 20
        assert sum(bool(case.hard) for case in mine) * 3 >= len(mine)
        assert not {case.flows for case in mine} & fitted
        assert len({case.flows for case in mine}) == len(mine)


def test_held_out_sizes_lie_between_the_measured_ones_in_both_kinds_of_links_and_reach_a_mebibyte() -> None:
    sizes = [case for case in _agenda().flows if case.kind == "size"]
    measured = {cell.size for cell in _profile().cells if "curve" in cell.pattern}
    for link in ("in_node", "cross_node"):
        mine = {case.flows[0][2] for case in sizes if case.link == link}
        assert not mine & measured
        assert max(mine) >= 1 << 20 and min(mine) < 1 << 16
    assert {case.calls for case in sizes} >= {1, 8}


def test_a_size_in_a_series_is_held_to_the_price_of_a_series() -> None:
    cluster = Cluster(GRID, isolated_s=3e-4)
    profile = calibrate_cluster(cluster.instruments(), GRID, executors=("send-recv",), settings=Settings.short())
    start_s = profile.costs("send-recv").start_s
    cases = {case.name: case for case in flow_cases(profile, GRID, "send-recv", (), call_s=0.1, largest_s=0.2)}
    alone, series = (cases[f"in_node 1.98 kB {how}"].expected.seconds for how in ("alone", "in series"))
    assert start_s > 2e-4 and alone - series == pytest.approx(start_s)


def test_what_makes_a_matrix_hard_is_in_its_flows() -> None:
    node = GRID.node
    for case in _agenda().flows:
        if case.kind != "matrix":
            continue
        size = {(r, q): b for r, q, b in case.flows}
        assert len(size) == len(case.flows) and all(r != q and b > 0 for (r, q), b in size.items())
        if "two-way" in case.hard:
            assert {(q, r) for r, q in size} == set(size)
        if "in-node" in case.hard:
            # 48 MB/s between nodes, 1 GB/s inside: bytes per port over its rate, by hand
            ports = {"out": {}, "in": {}}
            for (r, q), b in size.items():
                far = node[r] != node[q]
                for end, rank in (("out", r), ("in", q)):
                    ports[end][rank, far] = ports[end].get((rank, far), 0.0) + b / (48e6 if far else 1e9)
            every = {
                **{("out", *k): v for k, v in ports["out"].items()},
                **{("in", *k): v for k, v in ports["in"].items()},
            }
            assert max(v for k, v in every.items() if not k[2]) > max(
                (v for k, v in every.items() if k[2]), default=0.0
            )
        if "incast" in case.hard:
            into = [sum((r, q) in size and node[r] != node[q] for r in range(4)) for q in range(4)]
            assert max(into) == 2


def test_whole_moves_are_many_cells_of_unlike_loads_with_the_chosen_route_among_them() -> None:
    profile, seen = _profile(), {}
    default = [case for case in _agenda().moves if case.kind == "move" and case.executor == profile.executor]
    assert len(default) >= 24
    assert sum(bool(case.hard) for case in default) * 3 >= len(default)
    assert {tag for case in default for tag in case.hard} == set(HARD) - {"unshaped"}
    for case in default:
        planned = plan_spec(case.spec, GRID)
        schedule = build_schedule(planned.plan, GRID, case.route_array, case.spec.bucket_bytes)
        loads = schedule.loads(case.executor)
        columns = (loads.round, loads.src, loads.dst, loads.bytes, loads.messages, loads.pack_segments)
        key = (case.name, *(column.tobytes() for column in columns))
        assert seen.setdefault(key, case.route) == case.route
        assert case.expected.seconds == price_loads(loads, GRID, profile, case.executor).total_s
        assert 0 < case.bound_s <= case.expected.seconds * 1.1
    for name in {case.name for case in default}:
        assert sum(case.chosen for case in default if case.name == name) == 1


@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (4, 1), (2, 3)])
def test_every_shape_of_move_covers_its_tensors_on_any_topology(grid: tuple[int, int]) -> None:
    topology = Topology.grid(*grid)
    for name, shape in shapes_for(topology).items():
        planned = plan_spec(MoveSpec(name, (2,) * shape.parts, 1 << 20), topology)
        for layout in (*planned.sources.values(), planned.destination):
            layout.check()
        assert (planned.groups.count > 0).all()
    assert ("to-all-nodes" in shapes_for(topology)) == (grid[0] > 2)


def test_batches_stand_a_quarter_below_at_and_four_times_above_the_threshold_of_their_bucket() -> None:
    profile = _profile()
    batches = [case for case in _agenda().moves if case.kind == "batch"]
    assert {case.threshold.kind for case in batches if case.threshold} == {"min_relay", "min_split"}
    for case in batches:
        limit, bucket = case.threshold, case.spec.bucket_bytes
        relay, split = find_thresholds(profile, GRID, case.executor, fanouts=(2,), bucket_bytes=bucket, itemsize=2)
        wanted = (relay if limit.kind == "min_relay" else split)[2]
        assert (limit.elements, limit.low, limit.high) == (wanted.elements, wanted.low, wanted.high)
        assert case.spec.sizes[0] >= 2000
        if wanted.elements is not None:
            share = {"T/4": 0.25, "T": 1.0, "4T": 4.0}[case.name.split(", ")[-1]]
            assert case.block_elements == pytest.approx(wanted.elements * share, abs=1)
    for name, executor in {(case.name, case.executor) for case in batches}:
        routes = {case.route for case in batches if (case.name, case.executor) == (name, executor)}
        assert {"direct", "relay", "spread"} <= routes


def test_a_box_of_mixed_routes_is_predicted_to_beat_every_uniform_one_and_says_what_was_searched() -> None:
    mixes = [case for case in _agenda().moves if case.kind == "mix"]
    by_route = {case.route: case.expected.seconds for case in mixes}
    assert by_route[MIXED] < min(took for route, took in by_route.items() if route != MIXED)
    assert all(case.note and "searched by price" in case.note for case in mixes)
    assert len({code for case in mixes if case.route == MIXED for code in case.codes}) == 2


def test_an_agenda_survives_its_way_to_the_other_ranks_and_is_the_same_wherever_it_is_drawn_up() -> None:
    assert Agenda.from_json(_agenda().to_json()) == _agenda()
    executor = _profile().executor
    again = flow_cases(_profile(), GRID, executor, (), call_s=Extent().call_s, largest_s=Extent().largest_s)
    assert tuple(again) == tuple(case for case in _agenda().flows if case.executor == executor)


def test_a_single_node_has_no_batches_and_no_mix_and_says_so() -> None:
    alone = Topology.grid(1, 3)
    agenda = make_agenda(_calibrated(alone), alone, Extent.short(), hard=("unshaped",))
    assert {case.kind for case in agenda.moves} <= {"move"}
    assert {case.link for case in agenda.flows} == {"in_node", None}
    assert all("unshaped" in case.hard for case in agenda.flows)
    assert any("no block of this topology has a choice" in note for note in agenda.notes)


def test_exchanges_are_measured_in_turns_until_they_are_settled_and_wrong_bytes_are_kept() -> None:
    cases = _agenda().flows[:6]
    quiet, wrong = Cluster(GRID, noise=0.0), Cluster(GRID, wrong=(Wrong(1, 2, 5), Wrong(0, 1, 1)))
    order: list[int] = []

    def measure(matrix, executor, **options):
        order.append(int(matrix.sum()))
        return quiet.measure(matrix, executor, **options)

    observed = measure_flows(cases, measure, GRID, Repeats(), lambda share: None)
    assert len(order) == 3 * len(cases) and order[:6] != order[6:12]
    for case, found in zip(cases, observed, strict=True):
        matrix = np.zeros((4, 4))
        for r, q, size in case.flows:
            matrix[r, q] += size
        assert found.times_s == pytest.approx([quiet.seconds(matrix, case.executor)] * 9)
        assert found.passed == found.total > 0 and found.mismatch is None
    bad = measure_flows(cases[:1], wrong.measure, GRID, Repeats(), lambda share: None)[0]
    assert bad.passed == 0 < bad.total
    assert bad.mismatch is not None and bad.mismatch.startswith("6 bytes arrived wrong over ")
    assert bad.mismatch.endswith("5 of them from rank 1 to rank 2")


def test_moves_are_repeated_in_turns_the_first_not_counted_and_unsettled_ones_longer() -> None:
    rng = np.random.default_rng(1)
    calls: list[int] = []

    def once(number: int) -> float:
        calls.append(number)
        first = calls.count(number) == 1
        return 100.0 if first else [1.0, float(rng.uniform(0.5, 2)), float(rng.uniform(0.001, 0.01))][number]

    times = in_turns(3, once, Repeats(least=7, most=10), lambda share: None)
    assert [len(found) for found in times] == [7, 10, 30]
    assert max(max(found) for found in times) < 100
    assert sorted(calls[:3]) == [0, 1, 2]


def test_rows_say_what_was_predicted_and_measured_and_come_back_from_their_file(tmp_path: Path) -> None:
    agenda, about = _agenda(), About(STAMP, "send-recv")
    seen = Observed((0.3, 0.1, 0.2), 3, 4, "tensor w: elements [0, 4)")
    rows = [
        *flow_rows(agenda.flows, [seen] * len(agenda.flows), about),
        *move_rows(agenda.moves, [seen] * len(agenda.moves), about),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(dump_lines(rows), encoding="utf-8")
    assert read_validation(path) == rows
    first = rows[0]
    assert (first.measured_s, first.measured_low_s, first.measured_high_s) == (0.2, 0.1, 0.3)
    assert first.error == pytest.approx(first.predicted_s / 0.2 - 1)
    assert (first.digest_passed, first.digest_total, first.mismatch) == (3, 4, "tensor w: elements [0, 4)")
    assert {row.executor: row.default_executor for row in rows} == {"send-recv": True, "all-to-all": False}
    simulated = flow_rows(agenda.flows[:1], [seen], replace(about, simulated="box"))[0]
    assert (simulated.digest_total, simulated.simulated) == (0, "box")
    assert all(row.threshold_elements is not None for row in rows if row.kind == "batch")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema_version": 9}, "schema_version 9"),
        ({"kind": "guess"}, 'kind = "guess": expected one of size'),
        ({"hard": ["sad"]}, r'hard\[0\] = "sad": expected one of two-way'),
        ({"threshold": "min_mix"}, 'threshold = "min_mix": expected one of min_relay, min_split'),
        ({"speed": 1}, "speed differ"),
    ],
)
def test_a_row_of_something_else_is_refused_with_its_line(change: dict[str, object], text: str, tmp_path: Path) -> None:
    row = flow_rows(_agenda().flows[:1], [Observed((1.0,), 1, 1)], About(STAMP, "send-recv"))[0]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**row.to_dict(), **change}) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=f"line 1: .*{text}"):
        read_validation(path)
    assert ValidationRecord.from_dict(row.to_dict()) == row


def _few() -> Agenda:
    """Small moves of every kind that matters on ranks: two routes and executors, a batch, a mix."""
    small = []
    for shape, sizes in {"gather-all": (1,), "batch": (64, 40, 2), "mix": (32, 16, 2, 40_000, 2)}.items():
        spec = MoveSpec(shape, sizes, 256 << 10)
        planned = plan_spec(spec, GRID)
        template = next(case for case in _agenda().moves if case.kind == "move")
        for code, executor in ((1, "send-recv"), (2, "all-to-all")):
            codes = tuple(planned.groups.uniform(code).tolist())
            small.append(replace(template, name=shape, spec=spec, executor=executor, codes=codes))
    return Agenda((), tuple(small), ())


@pytest.mark.dist
def test_ranks_move_every_case_bit_exactly_and_agree_on_its_times(ranks: Callable) -> None:
    answers = ranks(4).call("jobs_validate:moves", agenda=_few().to_json())
    values = [answer.value if hasattr(answer, "value") else answer for answer in answers]
    assert all(value == values[0] for value in values)
    for found in values[0]:
        assert len(found["times"]) >= 2 and min(found["times"]) > 0
        assert found["passed"] == found["total"] > 0 and found["mismatch"] is None


@pytest.mark.dist
def test_a_flipped_bit_is_found_and_named_and_later_moves_are_right(ranks: Callable) -> None:
    answers = ranks(4).call("jobs_validate:moves", agenda=_few().to_json(), flip=3)
    values = [answer.value if hasattr(answer, "value") else answer for answer in answers]
    first, *others = values[0]
    assert 0 < first["total"] - first["passed"] <= 2
    assert "model." in first["mismatch"]
    assert all(found["passed"] == found["total"] for found in others)


def test_a_simulated_cluster_is_validated_without_ranks_and_every_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_path, rows_path = tmp_path / "profile.json", tmp_path / "rows.jsonl"
    cluster = load_preset("box-rank-nics")
    settings = replace(Settings.short(), replicates=3)
    profile = calibrate_cluster(
        cluster.instruments(),
        cluster.declared,
        executors=cluster.executors[:1],
        settings=settings,
        fingerprint=simulated_facts(cluster),
    )
    save(profile, profile_path)
    arguments = ["validate", "--simulate", "box-rank-nics", "--quick", "--profile", str(profile_path)]
    code = main([*arguments, "--json", str(rows_path), "--results", str(tmp_path)])
    rows = read_validation(rows_path)
    assert {row.kind for row in rows} == {"size", "matrix", "move", "batch", "mix"}
    assert {(row.simulated, row.shaped, row.digest_total) for row in rows} == {(cluster.name, False, 0)}
    moves = [row for row in rows if row.kind == "move"]
    assert float(np.median([abs(row.error) for row in moves])) < 0.08
    assert code in (0, 3)
    (folder,) = (tmp_path / profile.machine_id).glob("*_validate")
    assert "simulated" in (folder / "report.md").read_text(encoding="utf-8").splitlines()[0]
    assert read_validation(folder / "rows.jsonl") == rows
    facts = report_facts(folder / "report.json")
    report = make_report(rows, load(folder / "profile.json"), **facts)
    assert dump_json(report.to_dict()) == (folder / "report.json").read_text(encoding="utf-8")
    assert report.exit_code == code
    assert facts["nic_rates"] == dict.fromkeys(range(4), cluster.truth["nic_bytes_per_s"])
    kept = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert kept["figures"][0]["key"] == "nics" and kept["figures"][0]["count"] == 4
    assert any("mixed routes: searched by price" in note for note in facts["notes"])
    docs = (Path(__file__).resolve().parents[2] / "docs" / "validation.md").read_text(encoding="utf-8")
    snippet = docs.split("## From Python")[1].split("    from ", 1)[1].split("\n`report_facts`")[0]
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(dedent("    from " + snippet), {})  # the command's report, with its notes and the true rates of the NICs
    assert capsys.readouterr().out.splitlines() == [str(code), *"\n".join(report.lines).splitlines()]
    assert "searched by price" in (folder / "report.md").read_text(encoding="utf-8")


def _simulated(profile: Path, *more: str, simulate: str = "box-rank-nics") -> int:
    return main(["validate", "--simulate", simulate, "--profile", str(profile), *more])


def _saved(path: Path, facts: dict[str, object]) -> Path:
    save(replace(_profile(), fingerprint=facts), path)
    return path


@pytest.mark.parametrize("option", ["--time-limit 1", "--nodes 2", "--nic-per rank", "--nic none", "--fault flip:0"])
def test_options_about_real_ranks_are_refused_with_a_simulated_cluster(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _saved(tmp_path / "profile.json", simulated_facts(load_preset("box-rank-nics")))
    assert _simulated(path, *option.split()) == 2
    assert f"{option.split()[0]} is about real ranks" in capsys.readouterr().err


def test_a_profile_of_a_model_that_has_changed_is_refused_and_the_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('like = "box-rank-nics"\n', encoding="utf-8")
    path = _saved(tmp_path / "profile.json", simulated_facts(load_preset(str(mine))))
    mine.write_text('like = "box-rank-nics"\n[rates]\nnic = 1e6\n', encoding="utf-8")
    assert _simulated(path, simulate=str(mine)) == 2
    told = capsys.readouterr().err
    assert "is of another mine (model" in told
    assert f"relaymeter calibrate --simulate {mine} --out" in told
    assert _simulated(path, simulate="box-node-nic") == 2
    assert "not of the simulated cluster box-node-nic" in capsys.readouterr().err


def test_a_slow_nic_is_held_to_its_own_rate(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text('like = "box-rank-nics"\n[stragglers.nics]\n2 = 4.0\n', encoding="utf-8")
    cluster = load_preset(str(file))
    usual = cluster.truth["nic_bytes_per_s"]
    assert cluster.nic_rates == {0: usual, 1: usual, 2: usual / 4, 3: usual}


def test_progress_says_how_far_it_is_and_what_is_at_hand() -> None:
    lines: list[str] = []
    part = Clock(lines.append, "plan", last_s=0.0).part("whole moves", 0.2, 0.6)
    part(0.5, "swap, send-recv")
    part(0.9)  # too soon
    assert lines == ["plan  40%  whole moves: swap, send-recv"]
