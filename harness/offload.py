"""What an idle engine's offload costs and frees: DeepSpeed's own calls beside ``release`` and ``restore``.

    for result in run_offload(engine_factory, forward, stages=(1, 2, 3), repeats=3):      # every rank, together
        print(result.state, result.offload_s, result.freed_bytes, result.verdict)

``engine_factory(stage)`` builds a fresh engine over all ranks of the group, always the same one; ``forward(engine)``
gives the loss of the batch that its step count says. Every kind of state is offloaded and reloaded alone and all
together. Then every bit of weights, masters and optimizer states is held against what was there before, and the engine
takes a step, after which it must equal a twin that was never offloaded. What was freed is what the allocator says.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.errors import InputError
from relaymeter.harness.offload_results import (
    AFTER_BACKWARD,
    AFTER_PINNED,
    AFTER_STEP,
    ALL,
    BIT_EQUAL,
    DEEPSPEED,
    RELEASE,
    Case,
    OffloadResult,
    Seen,
    merge,
    result_of,
)
from relaymeter.harness.state_config import OFFLOAD_STATES
from relaymeter.relayout.digest import LayoutDigest, compare, digest_layout
from relaymeter.relayout.engine_reading import master_groups
from relaymeter.relayout.engines import MASTER, WEIGHTS, engine_layout, engine_storage, refresh_weights
from relaymeter.relayout.layout import Layout
from relaymeter.relayout.memory import resident_bytes
from relaymeter.relayout.release import filled, release, restore
from relaymeter.relayout.transport import control_device

__all__ = ["EngineFactory", "Forward", "OffloadResult", "run_offload"]

EngineFactory = Callable[[int], Any]
Forward = Callable[[Any], torch.Tensor]


def run_offload(
    engine_factory: EngineFactory,
    forward: Forward,
    *,
    stages: Sequence[int] = (1, 2, 3),
    states: Sequence[str] = OFFLOAD_STATES,
    pinned: Sequence[bool] = (True, False),
    blocking: Sequence[bool] = (True, False),
    between: Sequence[int] = (1, 2, 3),
    steps: int = 2,
    repeats: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Iterator[OffloadResult]:
    """Offload and reload each of ``states`` of an engine of each stage, ``repeats`` cycles each, then release it.

    Collective: every rank of ``group`` (default the world) exhausts it and gets the same results. ``between``: stages
    whose gradients are offloaded between a backward pass and the step too. ``steps``: training steps, at least one, of
    an engine before its first offload. A result that says ``failed`` or ``cannot`` names
    DeepSpeed's error; the next one is measured on a fresh engine. Raises InputError for settings that measure nothing.
    """
    if steps < 1 or repeats < 1:
        raise InputError(f"steps = {steps}, repeats = {repeats}: give at least 1 of each")
    unknown = [state for state in states if state not in OFFLOAD_STATES]
    if unknown:
        raise InputError(f"state {unknown[0]!r} is not one of {', '.join(OFFLOAD_STATES)}")
    for stage in stages:
        cases = list(_cases(stage, states, pinned, blocking, stage in between))
        twin = _Trained(engine_factory(stage), forward, steps, group)
        expected = [twin.step_on() for _ in range(2 * len(cases))]
        twin.close()
        trained: _Trained | None = None
        kind: tuple[str, bool | None] | None = None
        for case in cases:
            reason = _left_out(case)
            if reason is not None:
                yield result_of(case, outcome=reason[0], note=reason[1])
                continue
            if trained is not None and kind != (case.moment, case.pinned):  # what one leaves behind is not the other's
                trained.close()
                trained = None
            kind = (case.moment, case.pinned)
            if trained is None:
                trained = _Trained(engine_factory(stage), forward, steps, group)
            result = merge(case, _gather(trained.measure(case, repeats, expected), group))
            yield result
            if result.outcome == "failed" or result.trains != BIT_EQUAL:
                trained.close()
                trained = None
        if trained is not None:
            trained.close()


def _cases(
    stage: int, states: Sequence[str], pinned: Sequence[bool], blocking: Sequence[bool], between: bool
) -> Iterator[Case]:
    """The cases of an engine, those that may share one next to each other."""
    offered = [state for state in states if _offered(stage, state)]
    yield from (Case(stage=stage, way=DEEPSPEED, state=state) for state in states if state not in offered)
    for pin in pinned:
        waits = blocking if not pin or _pins() else (None,)
        rows = [(AFTER_STEP, state) for state in offered] + [(AFTER_BACKWARD, state) for state in offered]
        for moment, state in rows:
            if moment == AFTER_STEP or (between and state == "lp_grads"):
                for wait in waits:
                    yield Case(stage=stage, way=DEEPSPEED, state=state, moment=moment, pinned=pin, blocking=wait)
    if {True, False} <= set(pinned) and _pins():
        for state in offered:
            if state != "contiguous_grad_buffer":  # never copied
                yield Case(stage=stage, way=DEEPSPEED, state=state, moment=AFTER_PINNED, pinned=False, blocking=True)
    yield Case(stage=stage, way=RELEASE, state=ALL)


def _offered(stage: int, state: str) -> bool:
    return stage == 3 or state != "contiguous_grad_buffer"


def _left_out(case: Case) -> tuple[str, str] | None:
    """Why a case is not measured: its outcome and the note."""
    if case.way == DEEPSPEED and not _offered(case.stage, case.state):
        return "not offered", "not offered by DeepSpeed below ZeRO-3"
    if case.pinned and not _pins():
        return "not applicable", f"not applicable: DeepSpeed pins no memory on {_accelerator().device_name()}"
    return None


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def _pins() -> bool:
    accelerator = _accelerator()
    return bool(accelerator.is_pinned(accelerator.pin_memory(torch.zeros(1))))


class _Trained:
    """A trained engine that cases are measured on, and the layouts of its states."""

    def __init__(self, engine: Any, forward: Forward, steps: int, group: dist.ProcessGroup | None) -> None:
        self._engine, self._forward, self._group = engine, forward, group
        self._accelerator = _accelerator()
        self._steps = -steps
        for _ in range(steps):
            self._backward()
            self._step()
        self._layouts = {state: engine_layout(engine, dist.get_world_size(), state) for state in _states(engine)}

    def close(self) -> None:
        """End the engine. It is released first: ``destroy`` alone leaves memory where something still refers to it."""
        with contextlib.suppress(InputError):
            release(self._engine)
        self._engine.destroy()
        self._engine = None
        gc.collect()
        self._accelerator.empty_cache()

    def step_on(self) -> dict[str, LayoutDigest]:
        """Train one step; the digests of every state after it."""
        self._backward()
        self._step()
        return self._digests()

    def measure(self, case: Case, repeats: int, expected: Sequence[Mapping[str, LayoutDigest]]) -> Seen:
        """Offload and reload, compare, train one step, compare with the twin's digests after as many steps."""
        found = Seen()
        try:
            self._prepare(case)
        except Exception as error:  # whatever DeepSpeed raises is the result
            found.failure = _text(error)
            return found
        before, gradients = self._digests(), _gradient_digest(self._engine)
        found.bytes = _bytes(self._engine, case.state)
        found.allocated += self._allocated()
        try:
            self._cycle(case, repeats, found)
            after = self._digests()
        except Exception as error:
            found.failure = _text(error)
            return found
        found.mismatch = _first_difference(before, after)
        if case.moment == AFTER_BACKWARD and found.mismatch is None and _gradient_digest(self._engine) != gradients:
            found.mismatch = "gradients that wait for the step"
        try:
            if case.moment != AFTER_BACKWARD:
                self._backward()
            self._step()
        except Exception as error:
            found.trains = f"cannot: {_text(error)}"
            return found
        difference = _first_difference(expected[self._steps - 1], self._digests())
        found.trains = BIT_EQUAL if difference is None else f"differs: {difference}"
        return found

    def _prepare(self, case: Case) -> None:
        if case.moment == AFTER_PINNED:
            self._offload(case.state, pinned=True, blocking=True)
            self._engine.reload_states()
            self._backward()
            self._step()
        if case.moment == AFTER_BACKWARD:
            self._backward()

    def _cycle(self, case: Case, repeats: int, found: Seen) -> None:
        engine, aside = self._engine, dict[str, dict[str, torch.Tensor]]()
        if case.way == RELEASE:
            storages = {state: engine_storage(engine, state) for state in self._layouts}
            aside = {
                s: {name: part.to("cpu", copy=True) for name, part in parts.items()} for s, parts in storages.items()
            }
            del storages

        def give_back() -> None:
            if case.way == RELEASE:
                found.bytes = release(engine)
            else:
                self._offload(case.state, pinned=bool(case.pinned), blocking=bool(case.blocking))

        def take_up() -> None:
            if case.way == RELEASE:
                restore(engine)
            else:
                engine.reload_states(non_blocking=not case.blocking)

        for cycle in range(repeats):
            found.offload_s.append(self._timed(give_back))
            if not cycle:
                found.allocated += self._allocated()
            found.reload_s.append(self._timed(take_up))
            found.resident += [reading for reading in (resident_bytes(),) if reading is not None]
        found.allocated += self._allocated()
        for state, parts in aside.items():
            for name, part in engine_storage(engine, state).items():
                part.copy_(parts[name])
        if aside:
            refresh_weights(engine)
            filled(engine)

    def _offload(self, state: str, *, pinned: bool, blocking: bool) -> None:
        self._engine.offload_states(include=_included(state), pin_memory=pinned, non_blocking=not blocking)

    def _timed(self, call: Callable[[], None]) -> float:
        self._accelerator.synchronize()
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
        self._accelerator.synchronize()
        return time.perf_counter() - begin

    def _allocated(self) -> list[int]:
        if self._accelerator.device_name() == "cpu":
            return []
        gc.collect()
        return [int(self._accelerator.memory_allocated())]

    def _backward(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._engine.backward(self._forward(self._engine))

    def _step(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._engine.step()
        self._steps += 1

    def _digests(self) -> dict[str, LayoutDigest]:
        return {state: self._digest(state, layout) for state, layout in self._layouts.items()}

    def _digest(self, state: str, layout: Layout) -> LayoutDigest:
        held = engine_storage(self._engine, state)
        return digest_layout(layout, dist.get_rank(), held, replicas=True, group=self._group)


def _states(engine: Any) -> list[str]:
    """Weights, masters, and the optimizer states of one value per weight."""
    optimizer = engine.optimizer
    kept = getattr(optimizer, "optimizer", optimizer).state
    names: dict[str, None] = {}
    for group in master_groups(engine)[1]:
        for flat in group.flats:
            found = kept.get(flat, {}).items()
            names |= {
                k: None for k, v in found if isinstance(v, torch.Tensor) and v.dim() and v.numel() == flat.numel()
            }
    return [WEIGHTS, MASTER, *names]


def _first_difference(wanted: Mapping[str, LayoutDigest], found: Mapping[str, LayoutDigest]) -> str | None:
    for state, digest in wanted.items():
        report = compare(digest, found[state])
        if not report.ok:
            return f"{state} of {report.mismatches[0]}"
    return None


def _included(state: str) -> list[Any] | None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    return None if state == ALL else [OffloadStateTypeEnum(state)]


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    """The gradients that wait for a step on this rank."""
    found = []
    for group in getattr(optimizer, "averaged_gradients", {}).values():
        found += [part for part in (group or []) if isinstance(part, torch.Tensor)]
    return found


def _gradient_digest(engine: Any) -> str:
    digest = hashlib.sha256()
    for part in _gradients(engine.optimizer):
        digest.update(part.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _bytes(engine: Any, state: str) -> int:
    """Bytes that the engine holds of a kind of state on this rank, each storage once."""
    kinds = [kind for kind in OFFLOAD_STATES if kind != ALL] if state == ALL else [state]
    storages: dict[int, int] = {}
    for kind in kinds:
        for part in _held(engine.optimizer, kind):
            storages[part.data_ptr()] = max(part.nbytes, storages.get(part.data_ptr(), 0))
    return sum(storages.values())


def _held(optimizer: Any, kind: str) -> Iterator[torch.Tensor]:
    """What DeepSpeed offloads of this kind, as its optimizers of ZeRO-1 to 3 hold it."""
    third = hasattr(optimizer, "fp32_partitioned_groups_flat")
    if kind == "hp_params":
        yield from optimizer.fp32_partitioned_groups_flat if third else optimizer.single_partition_of_fp32_groups
    elif kind == "lp_params":
        yield from [optimizer.lp_param_buffer] if third else optimizer.bit16_groups_flat
    elif kind == "lp_grads":
        yield from [optimizer.grad_partitions_flat_buffer] if third else _gradients(optimizer)
    elif kind == "contiguous_grad_buffer":
        buckets = optimizer.ipg_buckets.values() if third else ()
        yield from (bucket.buffer for bucket in buckets if bucket.buffer is not None)
    else:
        for entry in optimizer.optimizer.state.values():
            wanted = ("exp_avg", "exp_avg_sq") if third else tuple(entry)
            yield from (entry[key] for key in wanted if isinstance(entry.get(key), torch.Tensor))


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _gather(mine: Seen, group: dist.ProcessGroup | None) -> list[Seen]:
    """What every rank of the group saw. Collective."""
    data = json.dumps(vars(mine)).encode()
    device, ranks = control_device(group), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    padded = bytearray(data.ljust(int(max(sizes))))
    rows = [torch.zeros(len(padded), dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(rows, torch.frombuffer(padded, dtype=torch.uint8).to(device), group=group)
    return [Seen(**json.loads(row.cpu().numpy().tobytes())) for row in rows]
