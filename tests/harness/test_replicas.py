"""A rank's destination is one buffer whose views never move: shards in their own shape, tied names, poison."""

from __future__ import annotations

import pytest
import torch

from relaymeter.errors import LayoutError
from relaymeter.harness.replicas import ReplicaStorage
from relaymeter.harness.scenario import destination_layout, load_scenario, source_layout
from relaymeter.relayout.topology import Topology

TOPOLOGY = Topology.grid(2, 2)


def _storage(rank: int, move: int = 0) -> ReplicaStorage:
    scenario = load_scenario("smoke")
    return ReplicaStorage(destination_layout(scenario, scenario.moves[move], TOPOLOGY), rank)


def test_every_weight_is_a_view_of_one_buffer_and_stays_where_it_is() -> None:
    held = _storage(2)
    begin, end = held.buffer.data_ptr(), held.buffer.data_ptr() + held.buffer.numel()
    before = {name: view.data_ptr() for name, view in held.storages.items()}
    held.poison()
    assert before == {name: view.data_ptr() for name, view in held.storages.items()}
    assert all(begin <= address < end and address % 16 == 0 for address in before.values())
    assert all((view.view(torch.uint8) == 0xA5).all() for view in held.storages.values())


def test_a_weight_has_the_shape_of_its_shard_and_a_tied_name_shares_it() -> None:
    half, whole = _storage(3, move=0), _storage(3, move=1)
    assert half.weight("model.layers.0.mlp.down_proj.weight").shape == (128, 192)
    assert whole.weight("model.layers.0.mlp.down_proj.weight").shape == (128, 384)
    for name, storage in half.storages.items():
        assert half.weight(name).data_ptr() == storage.data_ptr(), name
    head = whole.weight("lm_head.weight")
    assert head.shape == (1024, 128)
    head[5, 7] = 3.0
    assert whole.weight("model.embed_tokens.weight")[5, 7] == 3.0


def test_a_rank_outside_the_replicas_holds_nothing() -> None:
    outside = _storage(0)
    assert outside.storages == {} and outside.buffer.numel() == 0
    with pytest.raises(LayoutError, match="holds 0 pieces"):
        outside.weight("model.norm.weight")


def test_flat_partitions_of_several_boxes_have_no_shape() -> None:
    layout = source_layout(load_scenario("smoke"), Topology.grid(2, 3))
    with pytest.raises(LayoutError, match=r"holds [23] pieces of model\.layers\.0\.self_attn\.q_proj\.weight"):
        ReplicaStorage(layout, 1).weight("model.layers.0.self_attn.q_proj.weight")
