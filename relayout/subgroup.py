"""DeepSpeed engines over a subset of the ranks.

    group = make_group([1, 2])                          # every rank of the world
    with subgroup_engines():                            # every rank that holds an engine, for as long as it trains
        engine = initialize_over(group, model, config)  # the ranks of the group

DeepSpeed up to 0.19.8 runs ZeRO-3's barriers and rank-agreement checks over the world, compares process-wide ids of
modules and parameters, and leaves an engine's groups set for the next one. While installed, the barriers and checks
run over the engine's own groups, compare the position of each id among the engine's own, and every rank of a
disagreement raises with the first differing position and names. A version whose checks already take a group keeps its
own barriers. DeepSpeed's shared-memory all-reduce (CPU inference), whose start waits for every rank of the host, is not
started. All ranks of one engine need it installed, also for an engine over the world that comes after such an
engine. The checks run in a forward pass whenever a new trace is recorded, so leave it installed while engines train.

Below ZeRO-3 and under AutoTP an engine looks for its groups in process-wide variables; it trains among its own
(``own_groups``). It saves and loads checkpoints among its own ranks (``own_checkpoint``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.relayout.own_groups import Grid, OwnGroups
from relaymeter.relayout.rank_order import check_order

__all__ = [
    "Scoping",
    "checks_take_group",
    "initialize_over",
    "install",
    "make_group",
    "subgroup_engines",
    "uninstall",
]

_Function = Callable[..., Any]
_FOREIGN = 1 << 40
_MARK = "_relaymeter_scoping"
_OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"

#: Settings that make groups over the world or belong to another stage: refused on a part of the world.
_WORLD_ONLY = (
    ("sequence_parallel_size", (None, 1)),
    ("zero_optimization.zero_hpz_partition_size", (None, 1)),
    ("zero_optimization.zero_quantized_gradients", (None, False)),
)


def make_group(ranks: Sequence[int], *, time_limit_s: float | None = None) -> dist.ProcessGroup | None:
    """The process group of ``ranks`` (any order), or None on a rank outside it.

    Every rank of the world calls this, in the same order as its other group makings. Raises InputError where ``ranks``
    is empty, has duplicates, or names a rank outside the world.
    """
    world = dist.get_world_size()
    wanted = sorted(int(rank) for rank in ranks)
    if not wanted or len(set(wanted)) != len(wanted) or wanted[0] < 0 or wanted[-1] >= world:
        raise InputError(f"ranks {list(ranks)} are not distinct ranks of the world 0..{world - 1}")
    limit = None if time_limit_s is None else timedelta(seconds=time_limit_s)
    group = dist.new_group(wanted, timeout=limit)
    return group if dist.get_rank() in wanted else None


@dataclass(frozen=True)
class _Table:
    """The ids of one engine: position of each id, and the name at each position."""

    position: Mapping[int, int]
    names: Sequence[str]
    kind: str

    @classmethod
    def of(cls, kind: str, ids: Mapping[int, str]) -> _Table:
        ordered = sorted(ids)
        return cls({ds_id: index for index, ds_id in enumerate(ordered)}, [ids[ds_id] for ds_id in ordered], kind)

    @classmethod
    def of_parameters(cls, module: torch.nn.Module) -> _Table:
        return cls.of("parameter", {p.ds_id: n for n, p in module.named_parameters() if hasattr(p, "ds_id")})

    @classmethod
    def of_modules(cls, module: torch.nn.Module) -> _Table:
        return cls.of("module", {m.ds_id: n or "the model" for n, m in module.named_modules() if hasattr(m, "ds_id")})

    def look_up(self, ids: Sequence[int]) -> tuple[list[int], list[str]]:
        """Positions and names. Ids that are not the engine's own come behind all positions and stay what they are."""
        keys = [self.position.get(ds_id, _FOREIGN + ds_id) for ds_id in ids]
        names = [self.names[key] if key < _FOREIGN else f"{key - _FOREIGN}, not the engine's own" for key in keys]
        return keys, [f"{self.kind} {name}" for name in names]


@dataclass
class _Frame:
    """A DeepSpeed method under way: the group of its checks, and what each of its checks compares, in order."""

    group: dist.ProcessGroup | None
    expected: list[tuple[str, _Table | str]]


class _ScopedComm:
    """``deepspeed.comm`` whose barrier without a group waits for ``group`` only."""

    def __init__(self, comm: ModuleType, group: dist.ProcessGroup, counts: Counter[str]) -> None:
        self._comm, self._group, self._counts = comm, group, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def barrier(self, group: dist.ProcessGroup | None = None, **options: Any) -> Any:
        self._counts["barrier"] += 1
        return self._comm.barrier(group=self._group if group is None else group, **options)


class Scoping:
    """What is installed. ``counts``: how often each thing ran scoped (barrier, trace, gather, gradient), and
    ``empty``: checks that compared nothing because the trace was empty on every rank."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.active = True
        self._frame: ContextVar[_Frame | None] = ContextVar("relaymeter_subgroup_frame", default=None)
        self._offloads: weakref.WeakSet[Any] = weakref.WeakSet()

    def _check(self, kind: str, frame: _Frame, ints: Sequence[int]) -> None:
        what, table = frame.expected.pop(0) if frame.expected else ("rank-agreement check", "value")
        if isinstance(table, _Table):
            keys, names = table.look_up(ints)
        else:
            keys, names = list(ints), [f"{table} {value}" for value in ints]
        self.counts[kind if check_order(what, keys, names, frame.group) else "empty"] += 1

    @contextlib.contextmanager
    def _during(self, frame: _Frame) -> Iterator[None]:
        token = self._frame.set(frame)
        try:
            yield
        finally:
            self._frame.reset(token)

    def _assertion(self, kind: str, original: _Function) -> _Function:
        def assert_ints_same_as_other_ranks(ints: Sequence[int], *rest: Any, **options: Any) -> Any:
            frame = self._frame.get()
            if frame is None or not self.active:
                return original(ints, *rest, **options)
            return self._check(kind, frame, ints)

        return assert_ints_same_as_other_ranks

    def _without_shm(self, original: _Function) -> _Function:
        def build_shm_op() -> Any:
            # Its start waits for every rank of the host, also those without an engine. Only inference uses it.
            return None if self.active else original()

        return build_shm_op

    def _barriers(self, namespace: ModuleType, original: _Function) -> _Function:
        def scoped(optimizer: Any, *args: Any, **options: Any) -> Any:
            comm = namespace.dist
            if not self.active or isinstance(comm, _ScopedComm):
                return original(optimizer, *args, **options)
            namespace.dist = _ScopedComm(comm, optimizer.dp_process_group, self.counts)  # type: ignore[attr-defined]
            try:
                return original(optimizer, *args, **options)
            finally:
                namespace.dist = comm  # type: ignore[attr-defined]

        return scoped

    def _owner(self, original: _Function) -> _Function:
        def get_param_coordinator(offload: Any) -> Any:
            if offload not in self._offloads:
                self._offloads.add(offload)
                for param in offload.module.parameters():
                    _Gather.of(param, offload.module)
            return original(offload)

        return get_param_coordinator

    def _trace(self, original: _Function) -> _Function:
        def reset_step(coordinator: Any) -> Any:
            # Every forward comes here through get_param_coordinator, so the owner is known unless it is being built.
            owner = next((o for o in self._offloads if getattr(o, "param_coordinator", None) is coordinator), None)
            if owner is None or not self.active or coordinator.is_complete_trace():
                return original(coordinator)
            expected: list[tuple[str, _Table | str]] = [
                ("ZeRO-3 trace of modules", _Table.of_modules(owner.module)),
                ("ZeRO-3 trace of parameters", _Table.of_parameters(owner.module)),
                ("ZeRO-3 trace of last uses", "step"),
            ]
            with self._during(_Frame(_common_group(owner.module), expected)):
                return original(coordinator)

        return reset_step

    def _gradients(self, original: _Function) -> _Function:
        def reduce_and_partition(optimizer: Any, communication_data_type: torch.dtype) -> Any:
            bucket = optimizer.ipg_buckets[communication_data_type]
            if not self.active or not optimizer.enable_sanity_checks or not bucket.params:
                return original(optimizer, communication_data_type)
            table = _Table.of_parameters(optimizer.module)
            with self._during(_Frame(bucket.process_group, [("ZeRO-3 gradient bucket", table)])):
                return original(optimizer, communication_data_type)

        return reduce_and_partition

    def _conversion(self, original: _Function) -> _Function:
        def convert(init: Any, param: torch.nn.Parameter) -> None:
            original(init, param)
            _Gather.of(param, init.module)

        return convert

    def _check_gather(self, params: Sequence[Any]) -> None:
        by_group: dict[int, list[Any]] = {}
        for param in params:
            by_group.setdefault(id(param.ds_process_group), []).append(param)
        for members in by_group.values():
            members.sort(key=lambda param: int(param.ds_id))
            owners = {id(owner): owner for owner in (_Gather.of(param).owner() for param in members)}
            owner = next(iter(owners.values())) if len(owners) == 1 else None
            table = _Table.of("parameter", {}) if owner is None else _Table.of_parameters(owner)
            what = "ZeRO-3 coalesced gather"
            frame = _Frame(members[0].ds_process_group, [(what, table), (what, "elements per rank:")])
            self._check("gather", frame, [param.ds_id for param in members])
            self._check("gather", frame, [param.ds_tensor.ds_numel for param in members])


class _Gather:
    """A parameter's ``all_gather_coalesced`` whose safe mode checks over the parameters' own groups, before it gathers.

    It stays on the parameter, and is DeepSpeed's own while nothing is installed.
    """

    def __init__(self, original: _Function) -> None:
        self._original = original
        self._owner: weakref.ref[torch.nn.Module] | None = None

    @classmethod
    def of(cls, param: Any, owner: torch.nn.Module | None = None) -> _Gather:
        """The gather of ``param``, put in place where it is not yet; ``owner`` is the model of its engine."""
        gather = param.all_gather_coalesced
        if not isinstance(gather, _Gather):
            param.all_gather_coalesced = gather = cls(gather)
        if owner is not None:
            gather._owner = weakref.ref(owner)
        return gather

    def owner(self) -> torch.nn.Module | None:
        return None if self._owner is None else self._owner()

    def __call__(self, params: Any, safe_mode: bool = False, quantize: bool = False) -> Any:
        params = list(params)
        scoping = _installed() if safe_mode else None
        if scoping is not None:
            scoping._check_gather(params)
        return self._original(params, safe_mode=safe_mode and scoping is None, quantize=quantize)


def _common_group(module: torch.nn.Module) -> dist.ProcessGroup | None:
    """The group over which the module's parameters are partitioned, the largest one where experts are partitioned over
    parts of it, or None (the world) where parameters are partitioned over others."""
    groups = {id(p.ds_process_group): p.ds_process_group for p in module.parameters() if hasattr(p, "ds_process_group")}
    ranks = {key: set(dist.get_process_group_ranks(group)) for key, group in groups.items()}
    widest = max(ranks, key=lambda key: len(ranks[key]), default=None)
    return groups[widest] if widest is not None and all(r <= ranks[widest] for r in ranks.values()) else None


_Maker = Callable[[Scoping, _Function], _Function]


def checks_take_group(check: _Function | None = None) -> bool:
    """Whether this DeepSpeed's rank-agreement ``check`` (default: ZeRO's own) already takes a process group."""
    from deepspeed.runtime.zero import utils

    return "group" in inspect.signature(inspect.unwrap(check or utils.assert_ints_same_as_other_ranks)).parameters


def _sites() -> list[tuple[Any, str, _Maker]]:
    """Every attribute of DeepSpeed that is replaced: its owner, its name, and what makes the replacement."""
    from deepspeed.runtime.zero import parameter_offload, partition_parameters, partitioned_param_coordinator, stage3

    comm = importlib.import_module("deepspeed.comm.torch")  # its package has a name "torch" that means torch itself
    optimizer = getattr(stage3, _OPTIMIZER)
    check = "assert_ints_same_as_other_ranks"
    sites: list[tuple[Any, str, _Maker]] = [
        (comm, "build_shm_op", Scoping._without_shm),
        (stage3, check, lambda s, f: s._assertion("gradient", f)),
        (partitioned_param_coordinator, check, lambda s, f: s._assertion("trace", f)),
        (parameter_offload.DeepSpeedZeRoOffload, "get_param_coordinator", Scoping._owner),
        (partitioned_param_coordinator.PartitionedParameterCoordinator, "reset_step", Scoping._trace),
        (partition_parameters.Init, "_convert_to_deepspeed_param", Scoping._conversion),
        (optimizer, f"_{_OPTIMIZER}__reduce_and_partition_ipg_grads", Scoping._gradients),
    ]
    if not checks_take_group():
        for method in ("_create_fp16_partitions_with_defragmentation", "_setup_for_real_optimizer"):
            sites.append((optimizer, method, lambda s, f: s._barriers(stage3, f)))
    return sites


def _installed() -> Scoping | None:
    from deepspeed.runtime.zero import partitioned_param_coordinator

    return getattr(partitioned_param_coordinator.assert_ints_same_as_other_ranks, _MARK, None)


def install() -> Scoping:
    """Scope ZeRO-3's barriers and checks in this process; a second call returns what is installed already.

    Raises InputError where this DeepSpeed lacks one of the functions, before anything is changed. No communication.
    """
    current = _installed()
    if current is not None:
        return current
    sites = _sites()
    missing = [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in sites if name not in vars(owner)]
    if missing:
        import deepspeed

        raise InputError(
            f"DeepSpeed {deepspeed.__version__} has no {', '.join(missing)}: subgroup engines know 0.19.8; "
            "install that version, or train over the whole world"
        )
    scoping = Scoping()
    for owner, name, make in sites:
        original = vars(owner)[name]
        replacement = functools.wraps(original, updated=())(make(scoping, original))
        setattr(replacement, _MARK, scoping)
        setattr(owner, name, replacement)
    return scoping


def uninstall() -> None:
    """Give DeepSpeed its own functions back. Nothing happens where nothing is installed. No communication."""
    current = _installed()
    if current is None:
        return
    current.active = False
    for owner, name, _ in _sites():
        if getattr(vars(owner)[name], _MARK, None) is current:
            setattr(owner, name, vars(owner)[name].__wrapped__)


@contextlib.contextmanager
def subgroup_engines() -> Iterator[Scoping]:
    """``install()`` for the length of a block. Inside another such block it changes nothing."""
    outermost = _installed() is None
    scoping = install()
    try:
        yield scoping
    finally:
        if outermost:
            uninstall()


def initialize_over(
    group: dist.ProcessGroup | None,
    model: torch.nn.Module,
    config: Mapping[str, Any],
    *,
    grid: Grid | None = None,
    **options: Any,
) -> Any:
    """An engine for ``model`` over the ranks of ``group``: ``deepspeed.initialize`` with the right groups.

    The ranks of the group call this, with equal models and configs, inside ``subgroup_engines()``; other ranks need not
    even import DeepSpeed. ``options`` go to ``deepspeed.initialize``. DeepSpeed's process-wide groups are as before
    afterwards, so an engine over other ranks can follow. Any ZeRO stage; ``tensor_parallel.autotp_size`` needs a
    ``grid`` of the group's ranks (``own_groups.make_grid``), and so does ``expert_parallel`` on a part of the world
    (over all of it, DeepSpeed makes groups of experts for each engine that is given none). Raises InputError for a rank
    outside the group, or for settings that need the whole world; PlanDisagreement where the ranks' parameters differ in
    order, name or shape.
    """
    if group is None or dist.get_rank(group) < 0:
        raise InputError(f"rank {dist.get_rank()} is not in the group: call initialize_over on the group's ranks only")
    partial = dist.get_world_size(group) < dist.get_world_size()
    stage = _check_config(config, partial, grid)
    if "LOCAL_RANK" not in os.environ:
        raise InputError("LOCAL_RANK is not set: DeepSpeed needs it; start the ranks with torchrun or set it yourself")
    import deepspeed

    if _installed() is None:
        raise InputError("subgroup engines are not installed: wrap the engine's life in `with subgroup_engines():`")
    shapes = [f"{n} {list(getattr(p, 'ds_shape', p.shape))} {p.dtype}" for n, p in model.named_parameters()]
    keys = [int.from_bytes(hashlib.blake2b(s.encode(), digest_size=7).digest(), "little") for s in shapes]
    check_order("parameters of the model", keys, shapes, group)
    options.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    groups = OwnGroups()
    unit = groups.parallel_unit(group, stage, grid)
    with groups.entered():
        engine, *_ = deepspeed.initialize(model=model, config=dict(config), mpu=unit, **options)
    groups.follow(engine)
    return engine


def _check_config(config: Mapping[str, Any], partial: bool, grid: Grid | None) -> int:
    """The ZeRO stage."""
    wanted, degree = _setting(config, "tensor_parallel.autotp_size") or 1, 1 if grid is None else grid.degree
    if _setting(config, "expert_parallel.enabled"):
        _check_experts(_setting(config, "expert_parallel.autoep_size") or 1, wanted, partial, grid)
    if wanted != degree:
        raise InputError(
            f"tensor_parallel.autotp_size is {wanted}, the grid's {degree}: make one on every rank of the world with "
            "own_groups.make_grid and give it as grid="
        )
    stage = _setting(config, "zero_optimization.stage") or 0
    if stage not in range(4):
        raise InputError(
            f"zero_optimization.stage is {stage!r}: an engine over a group of ranks has stage 0, 1, 2 or 3"
        )
    for path, valid in _WORLD_ONLY:
        value = _setting(config, path)
        if partial and value not in valid:
            raise InputError(f"{path} = {value!r} makes groups over the whole world: leave it out on a part of it")
    return int(stage)


def _check_experts(size: int, tensor_parallel: int, partial: bool, grid: Grid | None) -> None:
    if tensor_parallel > 1:
        raise InputError(
            f"tensor_parallel.autotp_size = {tensor_parallel} together with expert_parallel.enabled = True: engines "
            "with AutoTP and AutoEP at once cannot be read; leave one of them out"
        )
    if grid is None and partial:
        raise InputError(
            "expert_parallel.enabled = True makes groups over the whole world: on a part of it, make a grid on every "
            f"rank of the world with own_groups.make_grid(ranks, expert_parallel={size}) and give it as grid="
        )
    if grid is not None and grid.expert_degree != size:
        raise InputError(
            f"expert_parallel.autoep_size is {size}, the grid's {grid.expert_degree}: make one on every rank of the "
            f"world with own_groups.make_grid(ranks, expert_parallel={size})"
        )


def _setting(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
