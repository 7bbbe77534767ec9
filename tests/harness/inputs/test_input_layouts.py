"""Layouts of trainers and copies from names and numbers, their loads, and the command that plans between them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_files import DEEPSEEK, LLAMA, ZERO3, write_json, write_safetensors

from relaymeter.errors import InputError
from relaymeter.harness import commands_plan
from relaymeter.harness.cli import main
from relaymeter.harness.inputs.autotp import PRESETS, autotp_cuts, shard_widths
from relaymeter.harness.inputs.deepspeed_config import Trainer
from relaymeter.harness.inputs.destination import Destination, copy_ranks, parse_destination
from relaymeter.harness.inputs.layouts import copies_layout, trainer_layout
from relaymeter.harness.inputs.loads import rank_loads, segments_of
from relaymeter.harness.inputs.model import Model, read_model
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.planner import plan_move
from relaymeter.relayout.topology import Topology


def model_of(tmp_path: Path, entry: dict[str, Any]) -> Model:
    return read_model(write_json(tmp_path / "config.json", entry))


def held(layout: Layout, name: str) -> dict[int, list[list[int]]]:
    """By rank, (lo, shape) of the pieces of a weight."""
    place = layout.placements[name]
    return {
        rank: [[*place.lo[row].tolist(), *place.shape[row].tolist()] for row in place.pieces_of(rank)]
        for rank in place.ranks
    }


def test_zero3_with_autotp_cuts_shards_of_neighbours_over_every_second_rank(tmp_path: Path) -> None:
    model = model_of(tmp_path, LLAMA)
    layout = trainer_layout(model, Trainer(stage=3, tensor_parallel=2), range(4), 4)
    name = "model.layers.0.mlp.down_proj.weight"  # [16, 24], cut along its columns
    assert held(layout, name) == {0: [[0, 0, 8, 12]], 1: [[0, 12, 8, 12]], 2: [[8, 0, 8, 12]], 3: [[8, 12, 8, 12]]}
    below = trainer_layout(model, Trainer(stage=2, tensor_parallel=2), range(4), 4)
    assert held(below, name) == {0: [[0, 0, 16, 12]], 1: [[0, 12, 16, 12]], 2: [[0, 0, 16, 12]], 3: [[0, 12, 16, 12]]}
    assert held(below, "model.norm.weight") == {rank: [[0, 16]] for rank in range(4)}


def test_experts_lie_whole_on_neighbours_and_a_buffer_on_every_rank(tmp_path: Path) -> None:
    model = model_of(tmp_path, DEEPSEEK)
    layout = trainer_layout(model, Trainer(stage=3, expert_parallel=2), range(4), 4)
    mlp = "model.layers.1.mlp"
    assert held(layout, f"{mlp}.experts.3.up_proj.weight") == {0: [[0, 0, 4, 16]], 2: [[4, 0, 4, 16]]}
    assert held(layout, f"{mlp}.experts.4.up_proj.weight") == {1: [[0, 0, 4, 16]], 3: [[4, 0, 4, 16]]}
    assert held(layout, f"{mlp}.gate.e_score_correction_bias") == {rank: [[0, 8]] for rank in range(4)}
    assert held(layout, f"{mlp}.gate.weight") == {rank: [[2 * rank, 0, 2, 16]] for rank in range(4)}
    copies = copies_layout(model, Destination(tensor_parallel=2, expert_parallel=4), [(0, 1), (2, 3)], 4)
    assert held(copies, f"{mlp}.experts.5.up_proj.weight") == {2: [[0, 0, 8, 16]]}
    assert held(copies, f"{mlp}.shared_experts.up_proj.weight")[3] == [[4, 0, 4, 16]]
    assert held(copies, f"{mlp}.gate.weight") == {rank: [[0, 0, 8, 16]] for rank in range(4)}
    alone = copies_layout(model, Destination(tensor_parallel=2), [(0, 1), (2, 3)], 4)
    assert held(alone, f"{mlp}.experts.5.down_proj.weight")[1] == [[0, 4, 16, 4]]


def test_experts_of_one_tensor_are_dealt_out_along_its_first_dim() -> None:
    names = {"m.mlp.experts.gate_up_proj": (4, 6, 5), "m.mlp.experts.down_proj": (4, 5, 3), "m.mlp.gate.weight": (4, 5)}
    model = Model("m", {name: TensorSpec(name, shape, "bfloat16") for name, shape in names.items()}, {})
    copies = copies_layout(model, Destination(expert_parallel=2), [(0,), (1,)], 2)
    assert held(copies, "m.mlp.experts.down_proj") == {0: [[0, 0, 0, 2, 5, 3]], 1: [[2, 0, 0, 2, 5, 3]]}
    shared = copies_layout(replace(model, heads=0), Destination(tensor_parallel=3), [(0, 1, 2)], 3)
    assert held(shared, "m.mlp.experts.gate_up_proj")[1] == [[0, 1, 0, 4, 1, 5], [0, 4, 0, 4, 1, 5]]


def test_fewer_key_value_heads_than_ranks_are_held_twice_by_copies_and_by_the_first_ranks_of_autotp(
    tmp_path: Path,
) -> None:
    model, name = model_of(tmp_path, LLAMA), "model.layers.0.self_attn.k_proj.weight"
    copies = copies_layout(model, Destination(tensor_parallel=4), [(0, 1, 2, 3)], 4)
    assert held(copies, name) == {0: [[0, 0, 4, 16]], 1: [[0, 0, 4, 16]], 2: [[4, 0, 4, 16]], 3: [[4, 0, 4, 16]]}
    for stage in (1, 3):
        layout = trainer_layout(model, Trainer(stage=stage, tensor_parallel=4), range(4), 4)
        assert held(layout, name) == {0: [[0, 0, 4, 16]], 1: [[4, 0, 4, 16]]}


def test_widths_are_those_of_deepspeeds_get_shard_size() -> None:
    assert shard_widths(18, 4, "model.layers.0.self_attn.q_proj", 3) == (6, 6, 6, 0)
    assert shard_widths(18, 4, "model.layers.0.mlp.up_proj", 3) == (5, 5, 4, 4)
    assert shard_widths(18, 4, "lm_head", 3) == (5, 5, 4, 4)
    assert shard_widths(18, 4, "lm_head", 0, grain=4) == (4, 4, 4, 6)
    assert shard_widths(3, 4, "lm_head", 0, grain=8) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: trainer_layout(m, Trainer(stage=3, tensor_parallel=3), range(4), 4), "4 ranks % tensor_parallel"),
        (lambda m: trainer_layout(m, Trainer(stage=3, expert_parallel=2), range(4), 4), "llama has no routed experts"),
        (lambda m: copies_layout(m, Destination(tensor_parallel=3), [(0, 1, 2)], 4), "4 attention heads of llama % 3"),
        (lambda m: copies_layout(m, Destination(expert_parallel=2), [(0,), (1,)], 4), "--to ep = 2, but llama has no"),
        (lambda m: autotp_cuts(replace(m, family=None), 2), "llama has no config.json beside it"),
        (lambda m: autotp_cuts(replace(m, family="mixtral"), 2), "no tensor-parallel plan for mixtral that it can"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_equation(tmp_path: Path, make: Any, said: str) -> None:
    model = replace(model_of(tmp_path, LLAMA), name="llama")
    with pytest.raises(InputError, match=re.escape(said)):
        make(model)


def test_experts_that_cannot_be_dealt_out_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, DEEPSEEK)
    with pytest.raises(InputError, match=r"autoep_size = 3: 8 experts % 3 = 2, not 0"):
        trainer_layout(model, Trainer(stage=3, expert_parallel=3), range(3), 3)


def test_a_tied_head_is_cut_with_its_embedding_or_not_at_all(tmp_path: Path) -> None:
    model = model_of(tmp_path, {**LLAMA, "tie_word_embeddings": True})
    embedding = "model.embed_tokens.weight"
    assert autotp_cuts(model, 2)[embedding].dim == 0
    assert autotp_cuts(model, 2, vocab_parallel_head=False)[embedding].dim is None
    assert autotp_cuts(model, 2, patterns=PRESETS["llama"])[embedding].dim is None
    assert autotp_cuts(model, 2, patterns=PRESETS["llama"], vocab_parallel_head=True)[embedding].dim == 0


@pytest.mark.parametrize("entry", [LLAMA, DEEPSEEK])
@pytest.mark.parametrize("to", ["tp=4", "tp=2,nodes=1", "tp=4,replicas=1,ep=4"])
@pytest.mark.parametrize("stage", [2, 3])
def test_loads_are_those_of_the_plan(tmp_path: Path, entry: dict[str, Any], to: str, stage: int) -> None:
    model, topology = model_of(tmp_path, entry), Topology.grid(2, 4)
    if "ep=" in to and not model.experts:
        to = to.partition(",ep")[0]
    destination = parse_destination(to)
    trainer = Trainer(stage=stage, expert_parallel=2 if model.experts else 0)
    source = trainer_layout(model, trainer, range(6), 8)
    copies = copies_layout(model, destination, copy_ranks(destination, topology), 8)
    plan, loads = plan_move(source, copies, topology), rank_loads(source, copies, topology)
    found = np.zeros((3, 8))
    for one in plan.classes:
        size = np.prod(one.shape, axis=1) * float(one.itemsize * len(one.tensors))
        kind = np.where(one.src_rank == one.dst_rank, 0, 1 + (one.src_rank // 4 != one.dst_rank // 4))
        np.add.at(found, (kind, one.dst_rank), size)
    assert np.array_equal(found, np.stack([loads.in_rank, loads.in_node, loads.from_nodes]))
    assert loads.to_nodes.sum() == pytest.approx(loads.from_nodes.sum())
    segments = sum(len(one.src_rank) * len(one.tensors) for one in plan.classes)
    assert segments / 8 <= segments_of(source, copies) <= segments * 8


def plan(tmp_path: Path, *more: str) -> list[str]:
    write_json(tmp_path / "ds.json", ZERO3)
    return ["plan", "--model", str(tmp_path), "--from", str(tmp_path / "ds.json"), "--to", "tp=2", *more]


def test_the_command_says_what_it_understood_and_plans_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(tmp_path / "config.json", {**LLAMA, "dtype": "float32"})
    target = tmp_path / "plan.json"
    assert main(plan(tmp_path, "--topology", "2x2", "--json", str(target), "--planner", "classes")) == 0
    text = capsys.readouterr().out
    assert f"model: {tmp_path.name} (llama), 21 weights, 9.89 kB in bfloat16" in text
    assert "from: ZeRO-3 on ranks 0 to 3\nto: 2 copies of 2 ranks on ranks 0 to 3\n" in text
    document = json.loads(target.read_text(encoding="utf-8"))
    assert document["scenario"] == tmp_path.name
    assert document["inputs"]["trainer"] == {
        "zero_stage": 3,
        "tensor_parallel": 1,
        "expert_parallel": 0,
        "ranks": [0, 1, 2, 3],
    }
    assert document["inputs"]["copies"] == [[0, 1], [2, 3]]
    assert [one["move"] for one in document["moves"]] == ["tp2-x2"]


def test_a_move_that_is_too_large_shows_all_loads_and_one_ranks_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "config.json", DEEPSEEK)
    assert main(plan(tmp_path, "--topology", "2x2", "--json", str(tmp_path / "whole.json"))) == 0
    monkeypatch.setattr(commands_plan, "MOST_SEGMENTS", 10)
    assert main(plan(tmp_path, "--topology", "2x2", "--json", str(tmp_path / "one.json"))) == 0
    assert "loads of all ranks follow, and the plan of the busiest one" in capsys.readouterr().out
    whole, one = (json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in ("whole", "one"))
    move, view = whole["moves"][0], one["one_rank"]
    assert [view[key] for key in ("bytes_total", "bytes_in_rank")] == [
        move[key] for key in ("bytes_total", "bytes_in_rank")
    ]
    direct = {row["route"]: row for row in move["candidates"]}
    assert view["bytes_cross_node"] == direct["direct"]["bytes_cross_node"]
    assert view["bytes_in_node"] == direct["direct"]["bytes_in_node"]
    assert sum(view["node_receives"]) == view["bytes_cross_node"]
    assert [row["route"] for row in view["routes"]] == ["direct", "relay", "spread"]
    assert view["routes"][0]["bytes_cross_node"] == max(view["node_receives"])
    assert main(plan(tmp_path, "--topology", "2x2", "--planner", "affine")) == 2
    assert "only classes plans for one rank" in capsys.readouterr().err


def test_headers_alone_are_enough_and_unknown_names_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = {"model.embed_tokens.weight": (8, 4), "a.odd": (3, 2), "b.odd": (3,), "c.odd": (2,), "d.odd": (2,)}
    write_safetensors(tmp_path / "model.safetensors", shapes)
    assert main(plan(tmp_path, "--topology", "1x2")) == 0
    text = capsys.readouterr().out
    assert "note: 4 weights of unknown part, kept whole on every rank of a copy: a.odd, b.odd, c.odd and 1 more" in text
    assert "note: no config.json beside it" in text


def test_the_commands_of_the_document_run_and_say_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "inputs.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    relaymeter (plan .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    write_json(
        tmp_path / "models/qwen3-8b/config.json",
        {
            "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "tie_word_embeddings": False, "dtype": "bfloat16",
        },
    )  # fmt: skip
    write_json(tmp_path / "ds_train.json", {**ZERO3, "tensor_parallel": {"autotp_size": 2}})
    large = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 16}
    write_json(tmp_path / "config.json", {**DEEPSEEK, **large})
    write_json(tmp_path / "ds.json", ZERO3)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert main(command.split()) == 0
    said = capsys.readouterr().out
    for line in re.findall(r"^    ((?:model|from|to): .*)$", text, re.MULTILINE):
        assert f"{line}\n" in said
