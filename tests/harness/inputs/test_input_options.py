"""DeepSpeed configs and ``--to``: what they mean, what is refused and how the error reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from input_files import write_json

from relaymeter.errors import InputError
from relaymeter.harness.inputs.autotp import PRESETS, Pattern
from relaymeter.harness.inputs.deepspeed_config import Trainer, read_trainer
from relaymeter.harness.inputs.destination import Destination, copy_ranks, parse_destination, parse_ranks
from relaymeter.relayout.topology import Topology


def trainer(tmp_path: Path, entry: Any) -> Trainer:
    return read_trainer(write_json(tmp_path / "ds.json", entry))


def test_a_config_says_stage_degrees_and_dtype(tmp_path: Path) -> None:
    assert trainer(tmp_path, {}) == Trainer(stage=0)
    found = trainer(
        tmp_path,
        {
            "train_batch_size": "auto",
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": 1,
                "mics_shard_size": -1,
                "overlap_comm": True,
            },
            "fp16": {"enabled": False},
            "bf16": {"enabled": True},
            "tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 4, "tp_grain_size": 64}},
            "expert_parallel": {"enabled": True, "autoep_size": 8},
        },
    )
    assert found == Trainer(stage=3, tensor_parallel=4, expert_parallel=8, dtype="bfloat16", grain=64)
    assert found.label == "ZeRO-3, AutoTP 4, AutoEP 8"
    assert trainer(tmp_path, {"expert_parallel": {"enabled": False, "autoep_size": 8}}).expert_parallel == 0
    assert trainer(tmp_path, {"expert_parallel": {"enabled": True}}).expert_parallel == 1
    assert trainer(tmp_path, {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}}).dtype == "float32"


def test_what_the_launcher_fills_in_is_said_or_asked_for(tmp_path: Path) -> None:
    found = trainer(tmp_path, {"bf16": {"enabled": "auto"}, "zero_optimization": {"offload_param": {"device": "cpu"}}})
    assert found.dtype is None
    assert [note.split(":")[0] for note in found.notes] == ["offload_param", 'bf16.enabled is "auto"']
    with pytest.raises(InputError, match="stage = \"auto\" is not a whole number 0 to 3; the launcher fills 'auto' in"):
        trainer(tmp_path, {"zero_optimization": {"stage": "auto"}})


def test_patterns_of_the_config_come_before_those_of_its_preset(tmp_path: Path) -> None:
    layers = [{"patterns": [".*q$", ".*k$"], "partition_type": "ROW"}, {"patterns": ["x"]}]
    own = (Pattern(".*q$", "row"), Pattern(".*k$", "row"), Pattern("x", "column"))
    parts: dict[str, Any] = {"partition_config": {"layer_specs": layers}}
    assert trainer(tmp_path, {"tensor_parallel": parts}).patterns == own
    assert trainer(tmp_path, {"tensor_parallel": {"preset_model": "llama"}}).patterns == PRESETS["llama"]
    both = {**parts, "preset_model": "llama"}
    assert trainer(tmp_path, {"tensor_parallel": both}).patterns == (*own, *PRESETS["llama"])
    parts["partition_config"]["use_default_specs"] = False
    assert trainer(tmp_path, {"tensor_parallel": {**both, **parts}}).patterns == own


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ([], "= [] is no JSON object"),
        ({"zero_optimization": True}, "zero_optimization = true is no JSON object"),
        ({"zero_optimization": {"stage": 4}}, "stage = 4 is not a whole number 0 to 3"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size = 8: a second copy"),
        ({"zero_optimization": {"mics_shard_size": 4}}, "mics_shard_size = 4: weights are sharded over a part"),
        ({"expert_parallel": {"expert_tensor_parallel_size": 2}}, "expert_tensor_parallel_size = 2: experts are cut"),
        (
            {"use_data_before_expert_parallelism": True},
            "use_data_before_expert_parallelism = true: the ranks of experts",
        ),
        ({"data_types": {"buffer_dtype": "bf16"}}, 'buffer_dtype = "bf16": buffers are kept in another dtype'),
        ({"data_types": {"param_dtype": "bf17"}}, "param_dtype \"bf17\": did you mean 'bf16'? valid: bf16, fp16, fp32"),
        ({"bf16": {"enabled": 1}}, "bf16: enabled = 1 is not true or false"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"tensor_parallel": {"autotp_size": -1}}, "autotp_size = -1 is not a whole number 0 or more"),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, "tp_size = 4, but autotp_size is 2"),
        (
            {"tensor_parallel": {"preset_model": "phi3"}},
            'preset_model "phi3": valid: deepseek_v2, llama, mixtral, qwen2',
        ),
        ({"tensor_parallel": {"preset_model": ["llama"]}}, 'preset_model ["llama"]: '),
        ({"data_types": {"param_dtype": {}}}, "param_dtype {}: "),
        ({"tensor_parallel": {"partition_config": {"layer_specs": 3}}}, "layer_specs 3 is no list"),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["("]}]}}},
            "layer_specs[0]: pattern '(' is no regular expression",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["a"], "shape": [2, -1]}]}}},
            "layer_specs[0]: shape is not planned here",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"partition_type": "diagonal"}]}}},
            'partition_type "diagonal": valid: column, row, skip',
        ),
    ],
)
def test_what_changes_the_layout_or_is_no_value_is_refused_by_name(tmp_path: Path, entry: Any, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        trainer(tmp_path, entry)


def test_a_destination_is_read_from_words() -> None:
    assert parse_destination("tp=4,replicas=2") == Destination(tensor_parallel=4, replicas=2)
    assert parse_destination("nodes=0-3, ep=16,tp=8") == Destination(tensor_parallel=8, expert_parallel=16, nodes="0-3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no KEY=VALUE: for example tp=4,replicas=2"),
        ("tp4", "'tp4' is no KEY=VALUE: for example tp=4,replicas=2"),
        ("tp=", "'tp=' is no KEY=VALUE"),
        ("tp=4,", "'' is no KEY=VALUE"),
        ("tp=four", "'tp=four' is no whole number of at least 1: for example tp=4"),
        ("tp=0", "'tp=0' is no whole number of at least 1"),
        ("tp=-2", "'tp=-2' is no whole number"),
        ("tp=4,replica=2", "unknown key in 'replica=2': did you mean 'replicas'? valid: ep, nodes, replicas, tp"),
        ("tp=4,tp=2", "tp stands twice"),
        ("nodes=half", "'nodes=half' is none of nodes=all, nodes=first-half, nodes=second-half, nodes=0-3"),
    ],
)
def test_a_bad_part_of_a_destination_is_quoted_beside_a_right_one(text: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        parse_destination(text)


def test_copies_take_neighbouring_ranks_of_the_nodes() -> None:
    grid = Topology.grid(3, 4)
    assert copy_ranks(parse_destination("tp=2,replicas=1,nodes=second-half"), grid) == ((8, 9),)
    assert copy_ranks(parse_destination("tp=4,nodes=0-1"), grid) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert len(copy_ranks(parse_destination("tp=1"), grid)) == 12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=4,replicas=4", "tp 4 x replicas 4 = 16 ranks asked, 12 ranks on nodes=all of 3 nodes given"),
        ("tp=8", "12 ranks on nodes=all of 3 nodes % tp 8 = 4, not 0: say replicas=1"),
        ("tp=2,replicas=3,ep=4", "tp 2 x replicas 3 = 6 ranks % ep 4 = 2, not 0"),
        ("tp=2,nodes=3", "--to nodes = 3: there are 3 nodes, numbered 0 to 2"),
        ("tp=2,nodes=2-1", "--to nodes = 2-1: there are 3 nodes"),
    ],
)
def test_copies_that_do_not_fit_are_refused_with_the_equation(text: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        copy_ranks(parse_destination(text), Topology.grid(3, 4))


def test_the_trainers_ranks_are_all_the_first_so_many_or_a_span() -> None:
    assert parse_ranks(None, 3) == (0, 1, 2)
    assert parse_ranks("2", 3) == (0, 1)
    assert parse_ranks("1-2", 3) == (1, 2)
    for text, said in (
        ("4", "has 3 ranks: give 1 to 3"),
        ("0", "give 1 to 3"),
        ("1-3", "there are 3 ranks"),
        ("x", "'x'"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            parse_ranks(text, 3)
