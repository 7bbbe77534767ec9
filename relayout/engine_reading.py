"""What a live DeepSpeed engine holds, read from its own objects on one rank: ranks, cuts, tensors, fragments.

``engine_ranks(engine)``, ``engine_tensors(engine)``, ``master_fragments(engine)``: what ``engines`` builds layouts and
storages from. Nothing here communicates or copies.

Shapes are logical ones: ZeRO-3 leaves a placeholder of no elements in a parameter and keeps its shape in ``ds_shape``;
AutoTP leaves this rank's shard there and keeps where it came from as affine pieces on the parameter, and so does AutoEP
with the experts of a rank, whose data-parallel group is another one than that of the other parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relaymeter.errors import InputError, LayoutError
from relaymeter.relayout.affine_maps import from_affine_map, import_affine
from relaymeter.relayout.geometry import row_major_strides

__all__ = [
    "Fragment",
    "HeldTensor",
    "MasterGroup",
    "RankGrid",
    "ShardRuns",
    "engine_groups",
    "engine_ranks",
    "engine_tensors",
    "expert_ranks",
    "master_fragments",
    "master_groups",
    "optimizer_state",
    "refuse_offloaded",
    "zero_stage",
]

#: Where AutoTP keeps on a parameter how it cut it (deepspeed.checkpoint.constants.DS_AUTOTP_UC_META).
_AUTOTP_META = "ds_autotp_universal_checkpoint_meta"
_AUTOTP_SHARD = "tensor_model_parallel"
#: Where AutoEP keeps on a parameter which experts each rank holds (deepspeed.checkpoint.constants.DS_AUTOEP_UC_META).
_AUTOEP_META = "ds_autoep_uc_meta"

#: For each rank of a tensor-parallel or expert-parallel group its data-parallel group, in order of the partitions.
RankGrid = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ShardRuns:
    """How the ranks of a tensor-parallel group hold one dim of a tensor: ``runs[i]`` are those of rank i, (first
    element of the dim, first element of its shard, elements), ``widths[i]`` what its shard holds of the dim."""

    dim: int
    widths: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True)
class HeldTensor:
    """A weight or buffer: its logical shape, its dtype, its cut (None: whole on every tensor-parallel rank), whether
    ZeRO-3 partitions it, the tensor object itself, whether it is a buffer, and its ranks where they are others than
    ``engine_ranks`` (those of experts)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: ShardRuns | None
    partitioned: bool
    tensor: Any
    buffer: bool = False
    ranks: RankGrid = ()


@dataclass(frozen=True)
class MasterGroup:
    """Parameters whose masters are kept together, in order, and this rank's tensor that holds (a part of) each master.

    In a flat group every parameter begins at a multiple of ``tensor_alignment`` elements, and the whole is padded to a
    multiple of ``alignment``. ``place``: of this rank in the data-parallel group that the masters are spread over.
    """

    names: tuple[str, ...]
    flats: tuple[torch.Tensor, ...]
    alignment: int = 1
    tensor_alignment: int = 1
    place: int = 0


@dataclass(frozen=True)
class Fragment:
    """A part of a parameter's master on this rank: ``count`` elements from ``start`` of the flattened shard, which lie
    from ``offset`` in ``flat``, the tensor that the optimizer keeps its state by. ``stored`` counts padding too."""

    name: str
    flat: torch.Tensor
    offset: int
    start: int
    count: int
    stored: int


def zero_stage(engine: Any) -> int:
    """0, 1, 2 or 3. Raises InputError for an engine whose parts are placed in ways that are not read here."""
    if getattr(engine, "pipeline_parallelism", False):
        raise InputError("pipeline engines cannot be read: give each stage an engine of its own")
    if getattr(engine, "has_moe_layers", False):
        layers = _expert_layers(engine)
        if not layers:
            raise InputError(
                "DeepSpeed's own MoE layers cannot be read: they do not say which experts a rank holds; use AutoEP "
                "(expert_parallel in the config)"
            )
        if any(layer.folding_group_handles is not None for layer in layers) or _tensor_group(engine) is not None:
            raise InputError("AutoTP together with AutoEP cannot be read: leave out tensor_parallel or expert_parallel")
    return int(engine.zero_optimization_stage())


def _expert_layers(engine: Any) -> list[Any]:
    return [module for module in engine.module.modules() if getattr(module, "_is_autoep_layer", False)]


def _is_expert(param: Any) -> bool:
    return getattr(param, "allreduce", True) is False


def refuse_offloaded(engine: Any, kind: str) -> None:
    """Raise InputError where the engine has offloaded its states of this kind (DeepSpeed's OffloadStateTypeEnum)."""
    gone = sorted(getattr(entry, "value", str(entry)) for entry in getattr(engine.optimizer, "offloaded_states", ()))
    if kind in gone:
        raise InputError(f"the engine has offloaded its {kind}: call engine.reload_states() first")


def _group_ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _data_group(engine: Any) -> Any:
    if zero_stage(engine) < 3:
        return engine.seq_data_parallel_group
    found: dict[tuple[int, ...], tuple[str, Any]] = {}
    for name, param in engine.module.named_parameters():
        if getattr(param, "ds_tensor", None) is None:
            raise InputError(f"parameter {name} is not partitioned although the engine's ZeRO stage is 3")
        if _is_expert(param):
            continue
        found.setdefault(_group_ranks(param.ds_process_group), (name, param.ds_process_group))
    if len(found) > 1:
        (one, (name, _)), (other, (odd, _)) = list(found.items())[:2]
        raise InputError(
            f"{name} is partitioned over ranks {list(one)}, {odd} over {list(other)}: one group per engine is supported"
        )
    return next((group for _, group in found.values()), engine.seq_data_parallel_group)


def _tensor_group(engine: Any) -> Any | None:
    for module in engine.module.modules():
        if getattr(module, "is_tp_parallel", False) and getattr(module, "mp_group", None) is not None:
            return module.mp_group
    return None


def engine_groups(engine: Any) -> list[Any]:
    """The process groups of this rank that, one after the other, reach every rank of the engine."""
    return [group for group in (_tensor_group(engine), _data_group(engine)) if group is not None]


def _tensor_ranks(engine: Any) -> tuple[int, ...]:
    group = _tensor_group(engine)
    return (dist.get_rank(),) if group is None else _group_ranks(group)


def engine_ranks(engine: Any) -> RankGrid:
    """Global ranks of the engine: for each tensor-parallel rank its data-parallel group, in order of the partitions.

    Raises InputError where the two kinds of group do not make a grid.
    """
    return _grid(
        _group_ranks(_data_group(engine)),
        _tensor_ranks(engine),
        "tensor-parallel",
        "let AutoTP cut the model before ZeRO-3 partitions it (no deepspeed.zero.Init)",
    )


def expert_ranks(engine: Any) -> RankGrid:
    """Global ranks of the experts of an AutoEP engine: for each expert-parallel rank its expert-data-parallel group.
    Empty where the engine has none. Raises InputError where its layers differ in their groups."""
    found: dict[tuple[tuple[int, ...], ...], None] = {}
    for layer in _expert_layers(engine):
        data = engine.expert_data_parallel_group[layer.ep_group_name]
        found.setdefault((_group_ranks(data), _group_ranks(layer.ep_group)))
    if not found:
        return ()
    if len(found) > 1:
        raise InputError(f"the engine's expert layers have several groups, {[list(map(list, one)) for one in found]}")
    (data, experts), mend = next(iter(found)), "build the engine with deepspeed.initialize on all of its ranks"
    if zero_stage(engine) == 3:
        for name, param in engine.module.named_parameters():
            if _is_expert(param) and _group_ranks(param.ds_process_group) != data:
                raise InputError(
                    f"{name} is partitioned over ranks {list(_group_ranks(param.ds_process_group))}, not "
                    f"over its expert-data-parallel ranks {list(data)}"
                )
    return _grid(data, experts, "expert-parallel", mend)


def _grid(data: tuple[int, ...], other: tuple[int, ...], kind: str, mend: str) -> RankGrid:
    me = dist.get_rank()
    grid = tuple(tuple(column + rank - me for column in data) for rank in other)
    everyone = [rank for column in grid for rank in column]
    if me not in data or me not in other or len(set(everyone)) != len(everyone):
        raise InputError(
            f"rank {me}: data-parallel ranks {list(data)} and {kind} ranks {list(other)} make no grid; {mend}"
        )
    return grid


def engine_tensors(engine: Any) -> tuple[list[HeldTensor], dict[str, str]]:
    """Every weight and every persistent buffer once, by the first name it has, weights first, each in model order; and
    the aliases (tied name -> name), found by identity. Raises InputError where a cut cannot be read."""
    module, stage = engine.module, zero_stage(engine)
    place = _tensor_ranks(engine).index(dist.get_rank())
    grid = expert_ranks(engine)
    held: dict[int, HeldTensor] = {}
    aliases: dict[str, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in held:
            aliases[name] = held[id(param)].name
        elif _is_expert(param):
            held[id(param)] = _held_parameter(name, param, stage == 3, _place(grid)[0], grid)
        else:
            held[id(param)] = _held_parameter(name, param, stage == 3, place)
    for name, buffer in _persistent_buffers(module):
        if id(buffer) not in held:
            held[id(buffer)] = HeldTensor(name, tuple(buffer.shape), _dtype(buffer), None, False, buffer, True)
        else:
            aliases[name] = held[id(buffer)].name
    return list(held.values()), aliases


def _place(grid: RankGrid) -> tuple[int, int]:
    """Where this rank is: which data-parallel group of the grid, which rank of it."""
    me = dist.get_rank()
    return next((at, column.index(me)) for at, column in enumerate(grid) if me in column)


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _held_parameter(name: str, param: Any, partitioned: bool, place: int, ranks: RankGrid = ()) -> HeldTensor:
    mine = tuple(param.ds_shape if partitioned else param.shape)
    dtype = _dtype(param.ds_tensor if partitioned else param)
    shape, cut = _experts_of(name, param, mine, len(ranks)) if ranks else _cut_of(name, param, mine)
    if cut is not None:
        said = (*shape[: cut.dim], cut.widths[place], *shape[cut.dim + 1 :])
        if said != mine:
            raise InputError(
                f"parameter {name}: this rank holds {list(mine)}, its cut says {list(said)}: the engine's weights were "
                f"replaced after {'AutoEP' if ranks else 'AutoTP'} cut them"
            )
    return HeldTensor(name, shape, dtype, cut, partitioned, param, ranks=ranks)


def _experts_of(name: str, param: Any, mine: tuple[int, ...], degree: int) -> tuple[tuple[int, ...], ShardRuns | None]:
    """The logical shape of a tensor of all experts, and which of them each expert-parallel rank holds (None: all)."""
    found = (getattr(param, _AUTOEP_META, None) or {}).get("affine_map")
    if not found:
        raise InputError(f"parameter {name} holds experts but not which: only AutoEP's layers can be read")
    table = import_affine("affine", alone=True).ParamAffineMap.from_dict(found)
    shape = tuple(int(size) for size in table.logical_shape)
    if len(table.shard_shapes) != degree:
        raise InputError(f"parameter {name} is cut over {len(table.shard_shapes)} ranks, its group has {degree}")
    if degree == 1 and shape == mine:
        return shape, None
    return shape, _runs_of(name, shape, table.shard_shapes, table)


def _cut_of(name: str, param: Any, mine: tuple[int, ...]) -> tuple[tuple[int, ...], ShardRuns | None]:
    """The logical shape of a parameter and how AutoTP cut it (None: it did not)."""
    found = (getattr(param, _AUTOTP_META, None) or {}).get("conversion")
    if not found:
        if getattr(param, _AUTOTP_SHARD, False):
            raise InputError(f"parameter {name} is a tensor-parallel shard that does not say how it was cut")
        return mine, None
    if found.get("replicated"):
        return mine, None
    if found.get("unsupported_reason") or not found.get("affine_map"):
        reason = found.get("unsupported_reason") or "its layer gives no affine map"
        raise InputError(f"parameter {name}: how AutoTP cut it cannot be read: {reason}")
    make = import_affine("affine", alone=True).ParamAffineMap
    table = make.from_dict(found["affine_map"])
    shape = tuple(int(size) for size in found.get("original_shape") or table.logical_shape)
    return shape, _runs_of(name, shape, table.shard_shapes, make(shape, table.shard_shapes, table.pieces_by_rank))


def _runs_of(name: str, shape: tuple[int, ...], shards: Mapping[int, tuple[int, ...]], table: Any) -> ShardRuns:
    """The one dim along which ``table`` cuts a tensor. Raises InputError where there are several."""
    try:
        place = from_affine_map(table)
    except LayoutError as error:
        raise InputError(f"parameter {name}: {error}") from error
    dims: set[int] = set()
    for rank, shard in shards.items():
        extents = place.shape[place.pieces_of(rank)]
        if len(shard) == len(shape):
            extents = np.concatenate([extents, np.asarray([shard], dtype=np.int64)])
        dims |= set(np.flatnonzero((extents != np.asarray(shape)).any(axis=0)).tolist())
    dim = min(dims, default=0)
    across = math.prod(shape) // max(shape[dim], 1)
    widths = [math.prod(shards[rank]) // max(across, 1) for rank in range(len(shards))]
    runs = []
    for rank, width in enumerate(widths):
        rows = place.pieces_of(rank)
        steps = row_major_strides((*shape[:dim], width, *shape[dim + 1 :]))
        whole = (place.stride[rows] == np.asarray(steps)) | (place.shape[rows] == 1)
        if len(dims) > 1 or not whole.all() or (place.offset[rows] % steps[dim]).any():
            raise InputError(f"parameter {name} {list(shape)} is cut along dims {sorted(dims)}: one dim can be read")
        columns = place.lo[rows, dim], place.offset[rows] // steps[dim], place.shape[rows, dim]
        runs.append(tuple(zip(*(column.tolist() for column in columns), strict=True)))
    return ShardRuns(dim, tuple(widths), tuple(runs))


def master_groups(engine: Any) -> tuple[str, list[MasterGroup]]:
    """How the engine keeps its master weights, and the parameters that have one.

    ``"flat"``: each group flattened into one buffer that is cut evenly over its data-parallel ranks (ZeRO-1/2);
    ``"parts"``: each parameter cut evenly by itself (ZeRO-3; one group per sub-group); ``"whole"``: on every rank.
    Parameters that are frozen or have no elements have none. Raises InputError where the engine has no optimizer.
    """
    optimizer = _optimizer(engine)
    names = {id(param): name for name, param in engine.module.named_parameters()}
    grids = {False: engine_ranks(engine), True: expert_ranks(engine)}
    start = int(getattr(optimizer, "nccl_start_alignment_factor", 1))

    def group(params: Sequence[Any], flats: Any, tensor_alignment: int = 1) -> MasterGroup:
        held = (flats,) * len(params) if isinstance(flats, torch.Tensor) else tuple(flats)
        grid = grids[bool(params) and _is_expert(params[0])]
        alignment, place = start * len(grid[0]), _place(grid)[1]
        return MasterGroup(tuple(names[id(param)] for param in params), held, alignment, tensor_alignment, place)

    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        parts = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        return "parts", [group(params, flat) for params, flat in parts]
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        pairs = zip(optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
        aligned = bool(optimizer.parameter_alignment)
        return "flat", [group(p, flat, _sixteen_bytes(p[0]) if aligned else 1) for p, flat in pairs]
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        pairs = zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True)
        return "flat", [group(params, flat) for params, flat in pairs]
    if hasattr(optimizer, "fp16_groups"):
        flats = getattr(optimizer, "fp32_groups_flat", None) or optimizer.fp32_groups
        return "whole", [group(params, flat) for params, flat in zip(optimizer.fp16_groups, flats, strict=True)]
    trained = [[p for p in g["params"] if p.requires_grad and p.numel()] for g in optimizer.param_groups]
    return "whole", [group(params, params) for params in trained]


def _sixteen_bytes(param: torch.Tensor) -> int:
    """Elements of ``param``'s dtype in 16 bytes, at least 1."""
    return 16 // math.gcd(16, param.element_size())


def _optimizer(engine: Any) -> Any:
    optimizer = engine.optimizer
    if optimizer is None or not hasattr(optimizer, "param_groups"):
        raise InputError("the engine has no optimizer: it keeps no master weights and no optimizer state")
    return optimizer


def optimizer_state(engine: Any, flat: torch.Tensor, key: str) -> torch.Tensor:
    """The state ``key`` (``"exp_avg"``) that the optimizer keeps beside the master ``flat``.

    Raises InputError where there is none (before the first step), or where it has not one value per master value.
    """
    optimizer = _optimizer(engine)
    kept = getattr(optimizer, "optimizer", optimizer).state.get(flat, {})
    found = kept.get(key)
    if found is None:
        have = ", ".join(sorted(map(str, kept))) or "none yet: take a step first"
        raise InputError(f"the optimizer keeps no state {key!r} (it has: {have})")
    if not isinstance(found, torch.Tensor) or found.numel() != flat.numel():
        raise InputError(f"the optimizer's {key!r} is no tensor of one value per weight: it cannot move as a layout")
    return found


def master_fragments(engine: Any) -> Iterator[Fragment]:
    """Where this rank's master weights lie. Same errors as ``master_groups``; also where a part is not in memory."""
    optimizer = _optimizer(engine)
    kind, groups = master_groups(engine)
    if kind == "parts":
        yield from _partition_fragments(optimizer, groups)
        return
    for index, group in enumerate(groups):
        if kind == "whole" and len(set(map(id, group.flats))) == len(group.flats):
            for name, master in zip(group.names, group.flats, strict=True):
                yield Fragment(name, master, 0, 0, master.numel(), master.numel())
            continue
        sizes, offsets, part = _flat_group(optimizer, index)
        yield from _in_flat(group, index, sizes, offsets, group.place * part if kind == "flat" else 0, part)


def _flat_group(optimizer: Any, index: int) -> tuple[list[int], list[int], int]:
    """Of a flattened group: sizes and offsets of its parameters in the whole buffer, and elements of a partition."""
    if hasattr(optimizer, "round_robin_bit16_meta"):
        sizes = [meta.numel() for meta in optimizer.round_robin_bit16_meta[index]]
        return sizes, list(optimizer.round_robin_bit16_offsets[index]), int(optimizer.partition_size[index])
    partitioned = hasattr(optimizer, "bf16_groups")
    params = (optimizer.bf16_groups if partitioned else optimizer.fp16_groups)[index]
    sizes = [param.numel() for param in params]
    part = optimizer.bf16_partitioned_groups[index][0].numel() if partitioned else sum(sizes)
    return sizes, list(itertools.accumulate(sizes, initial=0))[:-1], part


def _in_flat(
    group: MasterGroup, index: int, sizes: Sequence[int], offsets: Sequence[int], lo: int, part: int
) -> Iterator[Fragment]:
    """What of parameters at ``offsets`` of a group's whole buffer lies in [lo, lo + part), this rank's tensor."""
    for name, flat, size, at in zip(group.names, group.flats, sizes, offsets, strict=True):
        begin, end = max(at, lo), min(at + size, lo + part)
        if begin < end:
            yield Fragment(name, _present(flat, part, index), begin - lo, begin - at, end - begin, end - begin)


def _partition_fragments(optimizer: Any, groups: Sequence[MasterGroup]) -> Iterator[Fragment]:
    for index, group in enumerate(groups):
        params = optimizer.fp16_groups[index]
        parts = [int(param.partition_numel()) for param in params]
        at = 0
        for name, flat, param, part in zip(group.names, group.flats, params, parts, strict=True):
            _present(flat, sum(parts), index)
            start = min(group.place * part, int(param.ds_numel))
            yield Fragment(name, flat, at, start, min(part, int(param.ds_numel) - start), part)
            at += part


def _present(flat: torch.Tensor, elements: int, group: int) -> torch.Tensor:
    if flat.numel() != elements:
        raise InputError(
            f"group {group}: its masters of {elements} elements are not in memory ({flat.numel()} there): reload the "
            "engine's states first"
        )
    return flat
