"""Configuration is frozen, refuses what it does not know with the near match, and prints equations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from relaymeter.errors import InputError, LayoutError
from relaymeter.harness.config import MoveConfig, Scenario, nearest
from relaymeter.harness.scenario import (
    destination_layout,
    load_scenario,
    load_suite,
    replica_ranks,
    shipped_scenarios,
    shipped_suites,
    source_layout,
    source_ranks,
)
from relaymeter.relayout.topology import Topology

TEXT = """
[model]
hidden_size = 8
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 4
vocab_size = 10

[source]
nodes = "first-half"

[[moves]]
name = "tp1"
tensor_parallel = 1
"""


def write(tmp_path: Path, text: str = TEXT) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_shipped_scenarios_load_and_lay_out_on_their_topologies() -> None:
    names = shipped_scenarios(weights_only=True)
    assert set(names) == {"smoke", "demo", "qwen3-0.6b", "qwen3-8b", "qwen3-32b", "transitions"}
    grids = {"smoke": (2, 2), "demo": (2, 2), "transitions": (2, 4)}
    for name in names:
        scenario = load_scenario(name)
        topology = Topology.grid(*grids.get(name, (4, 8)))
        assert source_layout(scenario, topology).specs
        for move in scenario.moves:
            destination_layout(scenario, move, topology)


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [("qwen3-0.6b", 596_049_920, 310), ("qwen3-8b", 8_190_735_360, 399), ("qwen3-32b", 32_762_123_264, 707)],
)
def test_public_geometries_have_their_public_sizes(name: str, parameters: int, tensors: int) -> None:
    specs = source_layout(load_scenario(name), Topology.grid(2, 8)).specs
    assert (sum(spec.numel for spec in specs.values()), len(specs)) == (parameters, tensors)


def test_the_demo_has_about_thirty_million_parameters_and_the_smoke_head_is_tied() -> None:
    demo = source_layout(load_scenario("demo"), Topology.grid(2, 2))
    assert 28e6 < sum(spec.numel for spec in demo.specs.values()) < 32e6
    assert not demo.aliases
    assert source_layout(load_scenario("smoke"), Topology.grid(2, 2)).aliases == {
        "lm_head.weight": "model.embed_tokens.weight"
    }


def test_a_configuration_cannot_be_changed_and_takes_keywords_only() -> None:
    move = MoveConfig(name="a")
    with pytest.raises(ValidationError, match="frozen"):
        move.tensor_parallel = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        MoveConfig("a")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ('name = "tp1"', 'name = "tp1"\ntensor_paralel = 2'),
            r"\[\[moves\]\] number 1, unknown key 'tensor_paralel': did you mean 'ten",
        ),
        (("[model]", 'name = "../../x"\n[model]'), r"mine\.toml: name = '\.\./\.\./x': give 1 to 100 letters, digits"),
        (("[model]", 'name = "a\\u001b[31m"\n[model]'), r"name = 'a\\x1b\[31m': give 1 to 100 letters, digits"),
        (('name = "tp1"', 'name = ".."'), r"\[\[moves\]\] number 1, key 'name' = '\.\.': give 1 to 100 letters"),
        (
            ("tensor_parallel = 1", 'from = "old"\nfrom_tensor_parallel = 3'),
            r"num_attention_heads 2 % from_tensor_parallel 3 = 2, not 0",
        ),
        (("[source]", "[sauce]"), r"unknown key 'sauce': did you mean 'source'\?"),
        (("vocab_size = 10", "vocab_size = 10\nhiden_size = 1"), r"'model.hiden_size': did you mean 'hidden_size'\?"),
        (("head_dim = 4\n", ""), r"key 'model.head_dim' is missing"),
        (("head_dim = 4", 'head_dim = "4"'), r"model.head_dim = '4': "),
        (("head_dim = 4", "head_dim = 0"), r"model.head_dim = 0: "),
        (
            ('nodes = "first-half"', 'nodes = "frist-half"'),
            r"source.nodes = 'frist-half': .*did you mean 'first-half'\?",
        ),
        (("tensor_parallel = 1", "tensor_parallel = [1, 0]"), r"tensor_parallel' = \[1, 0\]: give the ranks of one"),
        (("tensor_parallel = 1", "tensor_parallel = [2, 3]"), r"num_attention_heads 2 % tensor_parallel 3 = 2, not 0"),
        (
            ("tensor_parallel = 1", "tensor_parallel = [1, 1]\nreplicas = 2"),
            r"tensor_parallel \[1, 1\] gives each of 2 replicas its ranks: leave replicas out",
        ),
        (("tensor_parallel = 1", 'from = "trainr"'), r"'from' = 'trainr': give 'trainer'.*did you mean 'trainer'\?"),
        (("tensor_parallel = 1", 'from = "old"'), r"number 1, from_tensor_parallel is missing"),
        (
            ("tensor_parallel = 1", "from_nodes = [1]"),
            r"from_nodes says what the old replicas are: it needs from = 'old'",
        ),
        (("tensor_parallel = 1", "only_ranks = [1, 1]"), r"'only_ranks' = \[1, 1\]: give a list of different rank"),
        (("tensor_parallel = 1", 'kind = "zero3"\nreplicas = 2'), r"kind 'zero3' takes no replicas"),
        (("[source]", "[suite]\nplaner = 1\n[source]"), r"unknown key 'suite.planer': did you mean 'planner'\?"),
        (("num_key_value_heads = 1", "num_key_value_heads = 3"), r"num_attention_heads 2 % num_key_value_heads 3"),
        (("tensor_parallel = 1", "tensor_parallel = 3"), r"num_attention_heads 2 % tensor_parallel 3 = 2, not 0"),
        (('[source]\nnodes = "first-half"', '[source]\nkind = "file"'), r"source: kind 'file' needs layout"),
        (("[model]", "[model"), r"not valid TOML"),
    ],
)
def test_bad_scenarios_are_refused_with_file_and_key(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    path = write(tmp_path, TEXT.replace(*change))
    with pytest.raises(InputError, match=expected) as caught:
        load_scenario(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_scenarios_list_the_valid_ones_with_the_near_match() -> None:
    with pytest.raises(InputError, match=r"unknown scenario 'smok': did you mean 'smoke'\? valid: demo, qwen3-0.6b"):
        load_scenario("smok")
    with pytest.raises(InputError, match=r"cannot read scenario no/such\.toml"):
        load_scenario("no/such.toml")


def test_suites_are_the_scenarios_with_defaults_of_their_own(tmp_path: Path) -> None:
    assert shipped_suites() == ("state-matrix", "transitions")
    found = load_suite("transitions")
    assert isinstance(found, Scenario)
    suite = found.suite
    assert suite is not None and (suite.planner, suite.nodes, suite.ranks_per_node) == ("both", 2, 4)
    with pytest.raises(InputError, match=r"unknown suite 'transition': did you mean 'transitions'\?"):
        load_suite("transition")
    with pytest.raises(InputError, match=r"unknown suite 'smoke': valid: state-matrix, transitions, or a path"):
        load_suite("smoke")
    with pytest.raises(InputError, match=r"mine\.toml is no suite: add the table \[suite\]"):
        load_suite(write(tmp_path))


def test_nearest_gives_no_far_fetched_match() -> None:
    assert nearest("xyz", ["smoke", "demo"]) == "valid: demo, smoke"


def test_halves_scale_with_the_topology() -> None:
    scenario = load_scenario("smoke")
    assert source_ranks(scenario, Topology.grid(2, 2)) == (0, 1)
    assert source_ranks(scenario, Topology.grid(3, 2)) == (0, 1, 2, 3)
    assert replica_ranks(scenario, scenario.moves[0], Topology.grid(4, 2)) == ((4, 5), (6, 7))
    assert replica_ranks(scenario, scenario.moves[1], Topology.grid(2, 2)) == ((2,), (3,))


def _move(**changes: object) -> tuple[Scenario, MoveConfig]:
    scenario = load_scenario("smoke")
    return scenario, MoveConfig.model_validate({"name": "m", **changes})


@pytest.mark.parametrize(
    ("changes", "nodes", "expected"),
    [
        ({"tensor_parallel": 4}, 2, r"tensor_parallel 4 x replicas 1 = 4 ranks asked, 2 given"),
        ({"tensor_parallel": 2, "replicas": 3}, 2, r"tensor_parallel 2 x replicas 3 = 6 ranks asked, 2 given"),
        ({"tensor_parallel": 4}, 6, r"6 ranks \(nodes 3 to 5\) % tensor_parallel 4 = 2, not 0"),
        ({"tensor_parallel": [2, 1]}, 2, r"tensor_parallel 2 \+ 1 = 3 ranks asked, 2 given \(node 1\)"),
        ({"nodes": [5]}, 2, r"node 5 of 2 nodes \(numbered 0 to 1\)"),
        ({}, 1, r"the second-half of 1 node is 0 nodes"),
    ],
)
def test_more_ranks_asked_than_given_prints_the_equation(changes: dict[str, object], nodes: int, expected: str) -> None:
    scenario, move = _move(**changes)
    with pytest.raises(InputError, match=expected):
        replica_ranks(scenario, move, Topology.grid(nodes, 2))


def _layout_file(tmp_path: Path, drop: bool) -> str:
    layout = source_layout(load_scenario(write(tmp_path)), Topology.grid(2, 1))
    tensors = {}
    for name, spec in layout.specs.items():
        rows = [{"rank": 0, "lo": [0] * len(spec.shape), "shape": list(spec.shape)}]
        if drop and name == "model.norm.weight":
            rows = [{"rank": 0, "lo": [0], "shape": [5]}]
        tensors[name] = rows
    (tmp_path / "layout.json").write_text(json.dumps({"tensors": tensors}))
    return write(
        tmp_path, TEXT.replace('[source]\nnodes = "first-half"', '[source]\nkind = "file"\nlayout = "layout.json"')
    )


def test_a_layout_file_is_read_and_one_that_does_not_cover_a_weight_is_refused(tmp_path: Path) -> None:
    topology = Topology.grid(2, 1)
    good = source_layout(load_scenario(_layout_file(tmp_path, drop=False)), topology)
    assert good.placements["model.norm.weight"].storage == {0: 8}
    with pytest.raises(LayoutError, match=r"model\.norm\.weight \[8\]: 3 of 8 elements .* held by no rank .*\[0\]"):
        source_layout(load_scenario(_layout_file(tmp_path, drop=True)), topology)


def test_a_degree_that_tears_query_heads_from_their_key_heads_is_refused(tmp_path: Path) -> None:
    """Twelve query heads over four key and value heads: three ranks would hold 4 query heads of 3 groups each."""
    text = (Path(__file__).resolve().parents[2] / "harness" / "scenarios" / "smoke.toml").read_text()
    for name, value in (("num_attention_heads", 12), ("num_key_value_heads", 4), ("head_dim", 8)):
        text = re.sub(rf"{name} = \d+", f"{name} = {value}", text)
    text = re.sub(r"tensor_parallel = \d+", "tensor_parallel = 3", text)
    path = tmp_path / "torn.toml"
    path.write_text(text)
    with pytest.raises(InputError, match="num_key_value_heads 4 and tensor_parallel 3: neither is a multiple of the"):
        load_scenario(str(path))
