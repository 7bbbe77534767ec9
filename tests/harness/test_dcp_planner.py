"""The planners of the DCP path in one process: every rank's writer and reader in turn, on files, without a group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from relaymeter.errors import InputError
from relaymeter.harness.paths.dcp_planner import LayoutLoadPlanner, LayoutSavePlanner, chosen_pieces, local_state
from relaymeter.relayout.cuts import Cut
from relaymeter.relayout.layout import Layout, TensorSpec
from relaymeter.relayout.meshes import mesh_layout
from relaymeter.relayout.partitions import zero3_layout, zero12_layout

SPECS = {
    spec.name: spec
    for spec in (
        TensorSpec("flat", (7, 5, 6), "bfloat16"),
        TensorSpec("tall", (8, 6), "float32"),
        TensorSpec("wide", (6, 8), "int8"),
        TensorSpec("few", (3,), "float64"),
        TensorSpec("scalar", (), "int64"),
        TensorSpec("none", (0, 4), "bool"),
    )
}
CUTS = {"flat": Cut(None), "tall": Cut(0), "wide": Cut(1), "few": Cut(None), "scalar": Cut(None), "none": Cut(None)}
LAYOUTS = {
    "zero3 x4": zero3_layout(SPECS, range(4), 4),
    "zero3 x3": zero3_layout(SPECS, range(3), 4),
    "zero1 x4": zero12_layout(SPECS, range(4), 4, groups=[[name] for name in SPECS], alignment=4),
    "tp2 twice": mesh_layout(SPECS, CUTS, [[0, 2], [1, 3]], 4),
    "tp2 and tp1": mesh_layout(SPECS, CUTS, [[1, 2], [0]], 4),
}
Tensors = dict[str, torch.Tensor]


def wholes() -> Tensors:
    """Tensors of raw bits: no element of 2 bytes and more stands in a tensor twice."""
    draw = torch.Generator().manual_seed(3)
    found = {}
    for spec in SPECS.values():
        raw = torch.randint(0, 256, (spec.numel * spec.itemsize,), generator=draw, dtype=torch.uint8)
        found[spec.name] = (raw % 2 if spec.dtype == "bool" else raw).view(getattr(torch, spec.dtype))
    return {name: value.reshape(SPECS[name].shape) for name, value in found.items()}


def views(layout: Layout, rank: int, held: Tensors, values: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece of ``rank`` in its storage, and what of ``values`` belongs there."""
    found = []
    for name, storage in held.items():
        place = layout.placements[name]
        for row in place.pieces_of(rank).tolist():
            lo, shape = place.lo[row].tolist(), place.shape[row].tolist()
            mine = storage.as_strided(shape, place.stride[row].tolist(), int(place.offset[row]))
            found.append((mine, values[name][tuple(slice(a, a + n) for a, n in zip(lo, shape, strict=True))]))
    return found


def storages(layout: Layout, rank: int) -> Tensors:
    found = {}
    for name, spec in layout.specs.items():
        size = layout.placements[name].storage.get(rank, 0)
        if size:
            found[name] = torch.zeros(size * spec.itemsize, dtype=torch.uint8).view(getattr(torch, spec.dtype))
    return found


def saved(folder: Path, layout: Layout, values: Tensors, entries: dict[str, bytes]) -> list[LayoutSavePlanner]:
    """What ``save`` does with a group, in one process."""
    planners, writers, plans = [], [], []
    for rank in range(layout.world_size):
        held = storages(layout, rank)
        for mine, value in views(layout, rank, held, values):
            mine.copy_(value)
        planner = LayoutSavePlanner(layout, rank, entries)
        planner.set_up_planner(local_state(layout, held), is_coordinator=rank == 0)
        writer = FileSystemWriter(folder, sync_files=False, overwrite=False)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        planners.append(planner)
        writers.append(writer)
    central, metadata = planners[0].create_global_plan(plans)
    central = writers[0].prepare_global_plan(central)
    results = []
    for planner, writer, plan in zip(planners, writers, central, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).value())
    writers[0].finish(metadata, results)
    return planners


def loaded(folder: Path, layout: Layout, rank: int, **entries: Any) -> tuple[Tensors, LayoutLoadPlanner, Metadata]:
    reader, planner, into = FileSystemReader(folder), LayoutLoadPlanner(layout, rank), storages(layout, rank)
    metadata = reader.read_metadata()
    planner.set_up_planner(local_state(layout, into) | entries, metadata, rank == 0)
    reader.set_up_storage_reader(metadata, rank == 0)
    reader.read_data(planner.create_local_plan(), planner)
    return into, planner, metadata


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_loads_what_another_saved(tmp_path: Path, source: str) -> None:
    values, notes = wholes(), b'{"lr": 0.1}'
    saved(tmp_path, LAYOUTS[source], values, {"notes": notes})
    for layout in LAYOUTS.values():
        for rank in range(4):
            into, planner, metadata = loaded(tmp_path, layout, rank, notes=None)
            pairs = views(layout, rank, into, values)
            assert all(same(mine, value) for mine, value in pairs)
            assert planner.entries == {"notes": notes}
            assert planner.tensor_bytes == sum(mine.numel() * mine.element_size() for mine, _ in pairs)
            assert planner.file_bytes(metadata) >= planner.tensor_bytes


@pytest.mark.parametrize("source", LAYOUTS)
def test_each_element_is_written_once_and_a_tensor_is_described_by_its_own_shape(tmp_path: Path, source: str) -> None:
    planners = saved(tmp_path, LAYOUTS[source], wholes(), {"notes": b"{}"})
    metadata = FileSystemReader(tmp_path).read_metadata()
    assert sum(planner.tensor_bytes for planner in planners) == sum(spec.nbytes for spec in SPECS.values())
    for name, spec in SPECS.items():
        kept = metadata.state_dict_metadata[name]
        assert isinstance(kept, TensorStorageMetadata)
        assert (tuple(kept.size), str(kept.properties.dtype)) == (spec.shape, f"torch.{spec.dtype}")
        assert sum(chunk.sizes.numel() for chunk in kept.chunks) == spec.numel


def test_copies_are_written_by_those_who_have_least_to_write() -> None:
    specs = {name: TensorSpec(name, (size,), "uint8") for name, size in (("a", 3), ("b", 5), ("c", 4), ("d", 2))}
    layout = mesh_layout(specs, dict.fromkeys(specs, Cut(None)), [[0], [1]], 2)
    ranks = {name: layout.placements[name].rank[rows].tolist() for name, rows in chosen_pieces(layout).items()}
    assert ranks == {"b": [0], "c": [1], "a": [1], "d": [0]}


def test_what_the_checkpoint_lacks_is_refused_by_name(tmp_path: Path) -> None:
    layout = LAYOUTS["zero3 x4"]
    saved(tmp_path, layout, wholes(), {})
    metadata = FileSystemReader(tmp_path).read_metadata()

    def refused(spec: TensorSpec | None = None, rank: int = 0, **entries: Any) -> str:
        specs = dict(layout.specs) if spec is None else {spec.name: spec}
        wanted = layout if spec is None else zero3_layout(specs, range(4), 4)
        planner = LayoutLoadPlanner(wanted, rank)
        planner.set_up_planner(local_state(wanted, {}) | entries, metadata)
        with pytest.raises(InputError) as error:
            planner.create_local_plan()
        return str(error.value)

    assert refused(TensorSpec("more", (2, 2), "int8")) == "more [2, 2] is wanted, but the checkpoint has no such tensor"
    other = replace(SPECS["tall"], shape=(6, 8))
    assert refused(other) == "tall is float32 [8, 6] in the checkpoint, float32 [6, 8] is wanted"
    other = replace(SPECS["tall"], dtype="bfloat16")
    assert refused(other) == "tall is float32 [8, 6] in the checkpoint, bfloat16 [8, 6] is wanted"
    assert "it has no entry 'notes'" in refused(notes=None)
    chunks = metadata.state_dict_metadata["tall"].chunks
    chunks.remove(chunks[-1])  # the end of rank 3's part, elements 36 to 47
    assert LayoutLoadPlanner(layout, 2).plan(metadata)
    start = "tall [8, 6]: of the 12 elements wanted from [6, 0] on, shape [2, 6]"
    assert refused(rank=3) == f"{start}, the checkpoint's chunks hold 0"


def test_nothing_is_copied_out_of_a_storage_before_it_is_written() -> None:
    layout = LAYOUTS["zero3 x4"]
    held = storages(layout, 1)
    planner = LayoutSavePlanner(layout, 1)
    planner.set_up_planner(local_state(layout, held))
    for item in planner.create_local_plan().items:
        view = planner.resolve_data(item)
        assert isinstance(view, torch.Tensor)
        assert view.untyped_storage().data_ptr() == held[item.index.fqn].untyped_storage().data_ptr()
        assert np.prod(view.shape, dtype=int) == item.tensor_data.chunk.sizes.numel()
