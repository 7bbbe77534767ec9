"""The command line's surface is frozen here: commands, options, help, exit codes, one line for every bad input."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relaymeter.calibration.costs import Curve, ExecutorCosts, LinkCosts, PackCosts
from relaymeter.calibration.fingerprint import machine_facts
from relaymeter.calibration.profiles import ExecutorProfile, Profile
from relaymeter.harness.cli import build_parser, main
from relaymeter.relayout.topology import Topology
from surface import HIDDEN, SURFACE

PLAN = ["plan", "--scenario", "smoke", "--topology", "2x2"]
MODEL = ["plan", "--model", "model", "--topology", "2x2"]
CHOOSE = ["choose", "--scenario", "smoke", "--profile"]
OLD_MOVE = [
    "run", "--scenario", "transitions", "--nodes", "2", "--ranks-per-node", "4", "--max-extra", "2MiB", "--move",
]  # fmt: skip


def _commands() -> dict[str, argparse.ArgumentParser]:
    actions = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(actions[0].choices)


def _options(parser: argparse.ArgumentParser, hidden: bool) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        if action.dest != "help" and (action.help == argparse.SUPPRESS) == hidden:
            found |= set(action.option_strings) or {action.dest}
    return found


def test_commands_and_options_are_exactly_these() -> None:
    commands = _commands()
    assert set(commands) == set(SURFACE)
    for name, parser in commands.items():
        assert _options(parser, hidden=False) == SURFACE[name], name
        assert _options(parser, hidden=True) == HIDDEN.get(name, set()), name


@pytest.mark.parametrize("command", sorted(SURFACE))
def test_help_of_each_command_carries_an_example_and_shows_no_hidden_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"example:\n  relaymeter {command} " in text
    assert ("--fault" in text) == ("--fault" in SURFACE[command])


def test_top_level_help_lists_exit_codes_and_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for piece in ("example: ", "6 wrong bits", "124 time limit", *SURFACE):
        assert piece in text
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("relaymeter 0.")


@pytest.mark.parametrize("arguments", [["--help"], [*PLAN]])
def test_help_and_plan_import_neither_torch_nor_deepspeed(arguments: list[str], tmp_path: Path) -> None:
    script = (
        "import sys\nfrom relaymeter.harness.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as ended:\n    code = ended.code\n"
        "heavy = sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'deepspeed', 'transformers'})\n"
        "print(heavy, code, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr.strip().splitlines()[-1] == "[] 0"


@pytest.fixture
def elsewhere() -> str:
    """An intact profile of a machine with another processor."""
    curve = Curve(bytes=(1024, 1 << 20), seconds=(1e-4, 2e-2), tail_s_per_byte=2e-8)
    link = LinkCosts(curve, 0.0, 0.0, 1.0, 1.0, 1.0, {}, {}, 1.0, {}, 0.0)
    pack = PackCosts(1e-5, 1e-6, 1e-10)
    found = ExecutorProfile(ExecutorCosts(1e-4, 0.0, 0.8, 0.0, link, link, pack, pack), (), {})
    profile = Profile(
        created_utc="2026-01-02T03:04:05+00:00", fingerprint={**machine_facts(), "cpu": "abacus"},
        topology=Topology.grid(2, 2), executors={"send-recv": found}, gates=(), warnings=(), quick=True, spent_s=1.0,
        connect_s={},
    )  # fmt: skip
    return profile.to_json()


BAD = {
    "no command": ([], "COMMAND"),
    "unknown command": (["chose"], "unknown command 'chose': did you mean 'choose'?"),
    "unknown option": ([*PLAN, "--fast"], "--fast"),
    "abbreviated option": (["plan", "--scen", "smoke", "--topology", "2x2"], "--scenario"),
    "unknown scenario": (
        ["plan", "--scenario", "smok", "--topology", "2x2"],
        "unknown scenario 'smok': did you mean 'smoke'? valid: demo, qwen3-0.6b, qwen3-32b, qwen3-8b, smoke, "
        "transitions",
    ),
    "unknown move": ([*PLAN, "--move", "tp3"], "scenario smoke has no move 'tp3': valid: tp1, tp2"),
    "two moves of one name": (
        ["plan", "--scenario", "twice.toml", "--topology", "2x1"],
        "twice.toml: two [[moves]] are named 'tp1': give each a name of its own",
    ),
    "unknown key of the second move": (
        ["plan", "--scenario", "hubs.toml", "--topology", "2x1"],
        "hubs.toml: [[moves]] number 2, unknown key 'hubs': valid: from, from_lost_ranks, from_nodes, from_replicas, "
        "from_tensor_parallel, kind, layout, name, nodes, only_ranks, replicas, tensor_parallel",
    ),
    "a model and a scenario": ([*PLAN, "--model", "x"], "argument --model: not allowed with argument --scenario"),
    "neither a model nor a scenario": (PLAN[:1] + PLAN[3:], "one of the arguments --scenario --model is required"),
    "a destination of a scenario": ([*PLAN, "--to", "tp=2"], "--to goes with --model: a scenario says itself where"),
    "a model without a trainer": (MODEL, "--model needs --from: for example --from ds_train.json"),
    "a model without a destination": (
        [*MODEL, "--from", "ds.json"], "--model needs --to: for example --to tp=4,replicas=2",
    ),
    "a bad destination": ([*MODEL, "--from", "ds.json", "--to", "tp=x"], "'tp=x' is no whole number of at least 1"),
    "a move of a model": (
        [*MODEL, "--from", "ds.json", "--to", "tp=2", "--move", "tp2"],
        "--move does not go with --model: it has one move",
    ),
    "a plan file of a model": (
        [*MODEL, "--from", "ds.json", "--to", "tp=2", "--out", "o.json"],
        "--out does not go with --model: run --plan runs",
    ),
    "a plan over its DeepSpeed config": (
        [*MODEL, "--from", "ds.json", "--to", "tp=2", "--json", "./ds.json", "--force"],
        "--json ./ds.json would replace the file that --from reads: choose another name",
    ),
    "no DeepSpeed config": ([*MODEL, "--from", "no.json", "--to", "tp=2"], "cannot read DeepSpeed config no.json"),
    "bad topology": ([*PLAN[:-1], "2by2"], "topology '2by2' is not NODESxRANKS_PER_NODE"),
    "bad rate": (["calibrate", "--out", "p.json", "--nic", "fast"], "'fast' is not a network rate"),
    "bad count": (["calibrate", "--out", "p.json", "--nodes", "0"], "'0' is not a whole number of at least 1"),
    "bad bucket": ([*PLAN, "--bucket-bytes", "8x"], "'8x' is not a size"),
    "nothing to calibrate": (["calibrate"], "one of the arguments --out --check is required"),
    "a check that writes a profile": (
        ["calibrate", "--check", "p.json", "--out", "q.json"], "argument --out: not allowed with argument --check",
    ),
    "a quick check": (["calibrate", "--check", "none.json", "--quick"], "--quick does not apply to --check"),
    "a budget of a check": (["calibrate", "--check", "p.json", "--budget", "3"], "--budget does not apply to --check"),
    "paths of a check": (
        ["calibrate", "--check", "none.json", "--paths"], "--paths does not apply to --check, which measures exchanges",
    ),
    "paths of a simulated cluster": (
        ["calibrate", "--out", "p.json", "--simulate", "box-rank-nics", "--paths"],
        "--paths starts processes that train, which a simulated cluster has none of: leave one of the two out",
    ),
    "a storage without paths": (
        ["calibrate", "--out", "p.json", "--storage", "disk=."], "--storage says where --paths writes checkpoints",
    ),
    "a storage of paths that is none": (
        ["calibrate", "--out", "p.json", "--paths", "--storage", "disk=nowhere"],
        "--storage disk=nowhere: no folder that can be written",
    ),
    "prices of paths without any": (
        ["compare", "--profile", "elsewhere.json"],
        "profile elsewhere.json has no costs of paths: make one with relaymeter calibrate --paths --out FILE",
    ),
    "a check of nothing": (["calibrate", "--check", "none.json"], "cannot read profile none.json"),
    "a check of another machine": (
        ["calibrate", "--check", "elsewhere.json"], "elsewhere.json was made elsewhere (cpu: profile abacus, here",
    ),
    "a check of an edited profile": (
        ["calibrate", "--check", "edited.json"],
        "edited.json was edited after it was written, in executors.send-recv.costs.floor_s: calibrate again",
    ),
    "a check in another kind of world": (
        ["calibrate", "--check", "elsewhere.json", "--allow-mismatch"],
        "elsewhere.json was made in a world that was joined: check it in one",
    ),
    "a check by an executor that was not measured": (
        ["calibrate", "--check", "elsewhere.json", "--allow-mismatch", "--executor", "all-to-all"],
        "--executor all-to-all: profile elsewhere.json measured send-recv only: leave it out",
    ),
    "a mismatch of a profile to be made": (
        ["calibrate", "--out", "p.json", "--allow-mismatch"], "--allow-mismatch is about a profile that exists",
    ),
    "no folder": (["calibrate", "--out", "no/p.json"], "folder no does not exist"),
    "a NIC out of reach": (
        ["calibrate", "--out", "p.json", "--nic", "1bit"], "--nic: a NIC rate is 8kbit..800gbit, got 1 bit/s",
    ),
    "a negative rate": (
        ["calibrate", "--out", "p.json", "--nic", "-4mbit"],
        "argument --nic: expected one argument, which does not begin with '-'",
    ),
    "a check of a policy": (
        ["calibrate", "--check", "policy.json"], "policy.json is a policy, which choose made of a profile, and no",
    ),
    "a check over its profile": (
        ["calibrate", "--check", "elsewhere.json", "--allow-mismatch", "--json", "elsewhere.json", "--force"],
        "--json elsewhere.json would replace the file that --check reads: choose another name",
    ),
    "a calibration over its cluster": (
        ["calibrate", "--simulate", "twice.toml", "--out", "./twice.toml", "--force"],
        "--out twice.toml would replace the file that --simulate reads: choose another name",
    ),
    "a run over its scenario": (
        ["run", "--scenario", "alone.toml", "--json", "./alone.toml", "--force"],
        "--json ./alone.toml would replace the file that --scenario reads: choose another name",
    ),
    "more ranks asked than given": (
        ["plan", "--scenario", "qwen3-8b", "--topology", "2x2"],
        "tensor_parallel 4 x replicas 1 = 4 ranks asked, 2 given",
    ),
    "missing profile": ([*CHOOSE, "none.json"], "cannot read profile none.json"),
    "malformed profile": ([*CHOOSE, "bad.json"], "bad.json is not valid JSON at line 2, column 3"),
    "not a profile": (["run", "--profile", "other.json", "--scenario", "smoke"], "other.json is no profile"),
    "profile of another machine": (
        [*CHOOSE, "elsewhere.json"],
        "elsewhere.json was made elsewhere (cpu: profile abacus, here",
    ),
    "layout that does not cover a weight": (
        ["plan", "--scenario", "gap.toml", "--topology", "2x1"],
        "model.norm.weight [8]: 3 of 8 elements of copy 0 are held by no rank (holders: [0])",
    ),
    "output exists": ([*PLAN, "--json", "bad.json"], "bad.json exists"),
    "nothing to run": (["run"], "one of the arguments --scenario --suite --plan is required"),
    "a suite and a scenario": (
        ["run", "--suite", "transitions", "--scenario", "smoke"],
        "argument --scenario: not allowed with argument --suite",
    ),
    "unknown suite": (
        ["run", "--suite", "smoke"],
        "unknown suite 'smoke': valid: state-matrix, transitions, or a path ending in",
    ),
    "planning a training state": (
        ["plan", "--scenario", "state-matrix", "--topology", "2x2"],
        "scenario state-matrix is of kind 'training-state', which only run takes (relaymeter run --scenario "
        "state-matrix): plan and choose are for moves of weights",
    ),
    "choosing for an offload": ([*CHOOSE[:-2], "offload", "--profile", "p.json"], "is of kind 'offload', which only"),
    "unknown change": (
        ["run", "--suite", "state-matrix", "--change", "z3-4-2"],
        "scenario state-matrix has no change 'z3-4-2': did you mean 'z3-4-2-4'? valid: ",
    ),
    "changes of rounds": (
        ["run", "--scenario", "dp4-dp2-dp4", "--move", "DP4"],
        "scenario dp4-dp2-dp4 has no changes to select: leave --change and --move out",
    ),
    "a profile for training states": (
        ["run", "--suite", "state-matrix", "--profile", "p.json"],
        "--profile does not apply to scenario state-matrix of kind 'training-state': leave it out",
    ),
    "bounded memory for training states": (
        ["run", "--scenario", "dp4-dp2-dp4", "--max-extra", "1MiB"],
        "--max-extra does not apply to scenario dp4-dp2-dp4 of kind 'training-state'",
    ),
    "a plot of training states": (["run", "--suite", "state-matrix", "--plot", "p.png"], "--plot does not apply to"),
    "repeats of changes": (["run", "--suite", "state-matrix", "--repeats", "2"], "--repeats does not apply to"),
    "a planner for an offload": (["run", "--scenario", "offload", "--planner", "both"], "--planner does not apply to"),
    "two executors for training states": (
        ["run", "--suite", "state-matrix", "--executor", "both"],
        "--executor both: scenario state-matrix runs by one executor: name it, or leave it out",
    ),
    "too few ranks for a change": (
        ["run", "--suite", "state-matrix", "--change", "z3-4-2-4", "--ranks-per-node", "2"],
        "scenario state-matrix needs 4 ranks, there are 2: give --nodes and --ranks-per-node whose product",
    ),
    "a world of another size": (
        ["run", "--scenario", "alone.toml", "--ranks-per-node", "3"],
        "change alone needs exactly 2 ranks, there are 3: select other changes with --change",
    ),
    "a bit of a rank outside": (
        ["run", "--suite", "state-matrix", "--change", "z3-4-2-4", "--fault", "flip:3"],
        "--fault flip:3: the first move ends in zero3 x2, of which rank 3 has no part",
    ),
    "unknown kind of scenario": (
        ["run", "--scenario", "kind.toml"],
        "kind.toml: kind = 'training': did you mean 'training-state'? valid: compare, offload, training-state, weights",
    ),
    "unknown planner": ([*PLAN, "--planner", "afine"], "argument --planner: invalid choice: 'afine'"),
    "not a plan": (["run", "--plan", "other.json"], "other.json is no plan: make one with relaymeter plan --out FILE"),
    "missing plan": (["run", "--plan", "none.json"], "cannot read plan none.json"),
    "plan and planner": (
        ["run", "--plan", "other.json", "--planner", "affine"],
        "--plan other.json settles --planner already: leave it out, or plan it again",
    ),
    "plan output exists": ([*PLAN, "--out", "bad.json"], "bad.json exists"),
    "two outputs of one name": ([*PLAN, "--out", "p.json", "--json", "p.json"], "--json and --out both name p.json"),
    "bad extra": ([*OLD_MOVE[:-1], "--max-extra", "much"], "'much' is not a size in bytes"),
    "giving up the trainer": (
        [*OLD_MOVE, "sync-tp4"],
        "--max-extra: scenario transitions, move sync-tp4 reads from trainer: only old replicas can be given up",
    ),
    "giving up a replica for other ranks": (
        [*OLD_MOVE, "tp2-tp2x2"],
        "move tp2-tp2x2: rank 6 belongs to only the new ones: bounded memory is for moves within the same ranks",
    ),
    "too little memory for any bucket": (
        [*OLD_MOVE[:-3], "--max-extra", "1KiB", "--move", "tp4-tp2x2"],
        "--max-extra: move tp4-tp2x2 by direct (classes, send-recv): rank 5 needs 229376 bytes beyond its larger "
        "layout with buckets of 65536 bytes, the smallest that are tried, but --max-extra allows 1024: set --max-extra "
        "229376 (bucket_bytes 65536) or more",
    ),
    "too little memory for the bucket asked for": (
        [*OLD_MOVE[:-3], "--max-extra", "1MiB", "--bucket-bytes", "64MiB", "--move", "tp4-tp2x2"],
        "with the buckets of 67108864 bytes that --bucket-bytes gives, but --max-extra allows 1048576: set --max-extra "
        "4723712 or more, or --bucket-bytes 524288",
    ),
    "too little memory for the suite's bucket": (
        ["run", "--suite", "transitions", "--move", "tp4-tp2x2", "--max-extra", "1MiB", "--executor", "both"],
        "with the buckets of 1048576 bytes that the suite gives, but --max-extra allows 1048576: set --max-extra "
        "1277952 or more, or --bucket-bytes 524288",
    ),
    "plan without a name": ([*PLAN, "--out", ""], "argument --out: '' names no file or folder: give a name"),
    "plan to standard output": ([*PLAN, "--out", "-"], "'-' names no file or folder: give a name; --json - prints"),
    "JSON without a name": ([*PLAN, "--json", ""], "argument --json: '' names no file"),
    "a mismatch of no profile": (
        ["run", "--scenario", "smoke", "--allow-mismatch"],
        "--allow-mismatch is about a profile: give --profile PROFILE with it, or leave it out",
    ),
    "results where a file is": (["run", "--scenario", "smoke", "--results", "bad.json/a"], "bad.json is no folder"),
    "results where nothing can be made": (
        ["run", "--scenario", "smoke", "--results", "/proc/x"],
        "--results /proc/x: /proc is no folder that can be written (",
    ),
    "plan that never ends": (["run", "--plan", "/dev/zero"], "plan /dev/zero is no regular file"),
    "profile that never ends": ([*CHOOSE, "/dev/zero"], "profile /dev/zero is no regular file"),
    "scenario that never ends": (
        ["plan", "--scenario", "/dev/zero", "--topology", "2x2"],
        "scenario /dev/zero is no regular file",
    ),
    "a report of nothing": (["report"], "the following arguments are required: RESULT"),
    "a report of no rows": (["report", "other.json"], "records other.json, line 1: "),
    "a report of what is not there": (
        ["report", "none", "--out", "out"], "none does not exist: name a folder that --results kept, or a file of rows",
    ),
    "a report over its rows": (
        ["report", "rows.jsonl", "--out", "out", "--json", "rows.jsonl", "--force"],
        "--json rows.jsonl would replace rows that are read: choose another name",
    ),
    "a report in no folder": (["report", "rows.jsonl", "--out", "no/out"], "folder no does not exist: make it first"),
    "a report in the folder of its rows": (
        ["report", "rows.jsonl", "--out", ".", "--force"], "--out . holds rows that are read: choose another folder",
    ),
    "a report where a file is": (["report", "rows.jsonl", "--out", "bad.json"], "--out bad.json is no folder"),
    "validating nothing": (["validate"], "the following arguments are required: --profile"),
    "validating another machine's profile": (
        ["validate", "--profile", "elsewhere.json"], "elsewhere.json was made elsewhere (cpu: profile abacus, here",
    ),
    "validating real ranks' profile on a simulated cluster": (
        ["validate", "--profile", "elsewhere.json", "--simulate", "h100-2x8"],
        "is of real ranks, not of the simulated cluster h100-2x8: relaymeter calibrate --simulate h100-2x8 --out",
    ),
    "ranks of a simulated cluster": (
        ["validate", "--profile", "elsewhere.json", "--simulate", "h100-2x8", "--nodes", "2"],
        "--nodes is about real ranks, and --simulate h100-2x8 starts none: leave it out",
    ),
    "a doctor who writes over a file": (["doctor", "--json", "bad.json"], "bad.json exists"),
    "bad fault": (["run", "--profile", "p", "--scenario", "smoke", "--fault", "melt:1"], "flip:RANK"),
}  # fmt: skip


def test_a_world_of_one_rank_is_a_clear_line_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "--nodes", "1", "--ranks-per-node", "1", "--out", "p.json"]) == 5
    printed = capsys.readouterr()
    assert "is a world of one rank, which has no link to measure: start at least two ranks" in printed.err
    assert len(printed.err.splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_gives_one_clear_line_and_exit_code_2_and_writes_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], elsewhere: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"a": 1,\n  b}')
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "elsewhere.json").write_text(elsewhere)
    (tmp_path / "policy.json").write_text('{"kind": "policy", "schema_version": 1, "executors": {}, "sha256": ""}')
    (tmp_path / "edited.json").write_text(elsewhere.replace('"floor_s": 0.0001', '"floor_s": 0.0002'))
    kept = Path(__file__).parents[1] / "results/2ef6a166130a/20261130T063432Z_76cb4bbcd6_run-demo/rows.jsonl"
    (tmp_path / "rows.jsonl").write_bytes(kept.read_bytes())
    _write_scenarios(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    arguments, expected = BAD[case]
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == 2, printed.err
    assert expected in printed.err
    assert len(printed.err.strip().splitlines()) == 1, printed.err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _write_scenarios(folder: Path) -> None:
    from relaymeter.harness.config import ModelConfig
    from relaymeter.harness.models import weight_specs

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 10}  # fmt: skip
    tensors: dict[str, Any] = {}
    for name, spec in weight_specs(ModelConfig(**sizes).geometry()).items():
        shape = [5] if name == "model.norm.weight" else list(spec.shape)
        tensors[name] = [{"rank": 0, "lo": [0] * len(shape), "shape": shape}]
    (folder / "gap.json").write_text(json.dumps({"tensors": tensors}))
    model = "\n".join(f"{key} = {value}" for key, value in sizes.items())
    gap = f'[model]\n{model}\n[source]\nkind = "file"\nlayout = "gap.json"\n[[moves]]\nname = "tp1"\n'
    (folder / "gap.toml").write_text(gap)
    (folder / "twice.toml").write_text(f'{gap}[[moves]]\nname = "tp1"\n')
    (folder / "kind.toml").write_text('kind = "training"\n')
    path = "path = [{stage = 3, ranks = 2}, {stage = 2, ranks = 2}]"
    (folder / "alone.toml").write_text(
        f'kind = "training-state"\n[[changes]]\nname = "alone"\nrow = "stage"\nworld = 2\n{path}\n'
    )
    (folder / "hubs.toml").write_text(f'{gap}[[moves]]\nname = "tp2"\nhubs = 3\n')


def test_json_on_standard_output_is_alone_there(cli: Any) -> None:
    done = cli("plan", "--scenario", "smoke", "--topology", "2x2", "--json", "-")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [move["move"] for move in document["moves"]] == ["tp2", "tp1"]
    assert "tp1: routes by block class" in done.stderr


def test_plan_shows_both_planners_and_writes_a_file_that_says_what_it_holds(cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    arguments = ("--scenario", "transitions", "--topology", "2x4", "--move", "tp4-tp2x2-both", "--planner", "both")
    done = cli("plan", *arguments, "--out", "plan.json", "--json", "-", warm=True)
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads(done.stdout)["moves"]
    assert (ours["planner"], theirs["planner"]) == ("classes", "affine")
    assert ours["fallbacks"] == []
    assert all(one["tensors"] and one["reason"] and one["labels"] for one in theirs["fallbacks"])
    for one in (ours, theirs):
        direct = one["candidates"][0]
        assert one["bytes_total"] == one["bytes_in_rank"] + direct["bytes_in_node"] + direct["bytes_cross_node"]
        assert (
            set(one["source_bytes"]) == {"old", "trainer"} and sum(one["source_bytes"].values()) == one["bytes_total"]
        )
    assert [row["bytes_cross_node"] for row in ours["candidates"]] == [
        row["bytes_cross_node"] for row in theirs["candidates"]
    ]
    for one in theirs["fallbacks"]:
        line = f"affine fell back for {one['tensors']} of {theirs['tensors']} tensors ({one['reason']}): "
        assert line + one["labels"][0] in done.stderr
    assert "plan: plan.json (run it with relaymeter run --plan plan.json)" in done.stderr
    written = json.loads((tmp_path / "plan.json").read_text())
    assert [(one["move"], one["planner"]) for one in written["moves"]] == [
        ("tp4-tp2x2-both", "classes"), ("tp4-tp2x2-both", "affine"),
    ]  # fmt: skip
    assert {"scenario", "topology", "planner", "executor", "sha256"} <= set(written)
    again = cli("run", "--plan", "plan.json", "--nodes", "2", "--ranks-per-node", "2", warm=True)
    assert again.returncode == 2
    assert "the plan was made for another topology: nodes of the ranks" in again.stderr


@pytest.mark.timeout(60)
def test_planning_a_large_model_on_a_large_cluster_takes_seconds(cli: Any) -> None:
    done = cli("plan", "--scenario", "qwen3-32b", "--topology", "16x8", "--move", "tp8", limit_s=50)
    assert done.returncode == 0, done.stderr
    assert "16 nodes x 8 ranks" in done.stdout
