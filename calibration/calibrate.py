"""A whole calibration: probe, fit on rank 0, broadcast, compare hashes.

``run_calibration(world)`` is called by every rank of a joined world and returns the same profile on all of them;
``calibrate_cluster(instruments, topology, ...)`` is the part that needs no ranks (an invented cluster will do).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from relaymeter.calibration.cells import Cell, Instruments
from relaymeter.calibration.costs import CROSS_NODE, IN_NODE, ExecutorCosts
from relaymeter.calibration.fingerprint import world_facts
from relaymeter.calibration.gather import gather_bytes, gather_json, gather_machines, wire_device
from relaymeter.calibration.hints import RankHints, hint_warnings, rank_hints
from relaymeter.calibration.measure import RankExchange, RankPacking, World
from relaymeter.calibration.probes import Prober
from relaymeter.calibration.profiles import ExecutorProfile, Gate, Profile, from_json
from relaymeter.calibration.recorder import Findings, Settings
from relaymeter.calibration.sanity import memory_warnings, refuse_single_sizes, unsound
from relaymeter.errors import InputError, NothingMeasured, PlanDisagreement, RelaymeterError
from relaymeter.relayout.topology import Topology
from relaymeter.relayout.transport import EXECUTORS, default_executor

__all__ = ["build_profile", "calibrate_cluster", "fingerprint_of", "instruments_of", "run_calibration"]

Progress = Callable[[float, str], None]


def run_calibration(
    world: World,
    *,
    quick: bool = False,
    budget_s: float | None = None,
    executors: Sequence[str] | None = None,
    cluster: Mapping[str, Any] | None = None,
    time_limit_s: float = 120.0,
    progress: Progress | None = None,
    poll: Callable[[], None] | None = None,
) -> Profile:
    """Calibrate the joined ``world``. Every rank calls it with equal arguments; all return the same profile.

    ``executors``: in order of importance, by default the backend's own first, then the other. ``cluster``: how the
    ranks were started (kept in the fingerprint; its ``nic_rate_bytes_per_s`` is held against the measured rate).
    ``time_limit_s``: of one call. ``progress(fraction, text)`` is called on every rank. ``poll`` is called while a
    call is waited for and may raise to stop (a heartbeat's). Raises NothingMeasured in a
    world of one rank, DigestMismatch where a link alters data, and what the transport raises when a peer is lost.
    """
    if world.world_size < 2:
        raise NothingMeasured("a world of one rank has no link to measure: start at least two ranks")
    chosen = tuple(executors) if executors else _default_order(world.backend)
    settings = Settings.short() if quick else Settings()
    if budget_s is not None:
        settings = replace(settings, budget_s=budget_s)
    instruments, connect, rank = instruments_of(world, chosen, time_limit_s, poll)
    hints = [RankHints.from_dict(entry) for entry in gather_json(world, _hints(world).to_dict())]
    findings = Prober(instruments, world.topology, settings, progress).run(chosen)
    findings.warnings += memory_warnings(findings, instruments.largest_bytes, rank)
    fingerprint = fingerprint_of(world, cluster)

    def fitted() -> Profile:
        return build_profile(findings, chosen, settings, fingerprint, connect, quick=quick, hints=hints)

    return _agreed(world, fitted)


def instruments_of(
    world: World, executors: Sequence[str], time_limit_s: float, poll: Callable[[], None] | None = None
) -> tuple[Instruments, dict[str, float], int]:
    """The real ranks as instruments, the seconds that each of ``executors`` took to touch every peer first (in no
    sample), and the rank whose memory allows the least. Every rank calls it. Raises as ``run_calibration`` does."""
    exchange = RankExchange(world, time_limit_s=time_limit_s, poll=poll)
    connect = {executor: exchange.connect(executor) for executor in executors}
    largest, rank = _largest_message(world)
    packing = RankPacking(world, time_limit_s=time_limit_s, poll=poll)
    return Instruments(exchange.measure, packing.measure, largest), connect, rank


def fingerprint_of(world: World, cluster: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a profile made on ``world`` is valid for. Every rank calls it and gets what its own machine says, but for
    what is known of all."""
    on_gpu = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if on_gpu else "cpu"
    loaded = None
    if world.backend == "nccl":
        loaded = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return world_facts(world.topology, world.backend, device, gather_machines(world), cluster, loaded)


def calibrate_cluster(
    instruments: Instruments,
    topology: Topology,
    *,
    executors: Sequence[str] = ("send-recv", "all-to-all"),
    settings: Settings | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Probe and fit in this process, whatever stands behind the seam. Raises like ``run_calibration``."""
    settings = settings or Settings()
    findings = Prober(instruments, topology, settings, progress).run(executors)
    findings.warnings += memory_warnings(findings, instruments.largest_bytes)
    return build_profile(findings, executors, settings, fingerprint or {}, {}, quick=False)


def build_profile(
    findings: Findings,
    executors: Sequence[str],
    settings: Settings,
    fingerprint: Mapping[str, Any],
    connect_s: Mapping[str, float],
    *,
    quick: bool,
    hints: Sequence[RankHints] = (),
) -> Profile:
    """Fit the findings. Pure but for the clock; rank 0 calls it. ``hints``: the view of each rank. Raises
    NothingMeasured where a link has no curve, and where a figure is no number."""
    from relaymeter.calibration.fit import fit_costs, replicates  # scikit-learn: seconds, on the rank that fits alone

    refuse_single_sizes(findings, executors)
    found: dict[str, ExecutorProfile] = {}
    for number, executor in enumerate(executors):
        like = found[executors[0]].costs if number else None
        measured = findings.cells, findings.pack_cells, findings.topology, executor
        costs = fit_costs(*measured, like=like)
        drawn = replicates(*measured, settings.replicates, seed=number + 1, like=like)
        for problem in (text for one in (costs, *drawn) for text in unsound(one)):
            raise NothingMeasured(f"{executor}: {problem}, of which no price can be made: calibrate again")
        found[executor] = ExecutorProfile(costs, drawn, _intervals(costs, drawn))
    gates = _gates(findings.cells, executors, found, fingerprint)
    warnings = [*findings.warnings, *(_gate_warning(gate) for gate in gates if not gate.passed)]
    profile = Profile(
        created_utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        fingerprint=dict(fingerprint),
        topology=findings.topology,
        executors=found,
        gates=tuple(gates),
        warnings=tuple(dict.fromkeys(warnings)),
        quick=quick,
        spent_s=findings.spent_s,
        connect_s=dict(connect_s),
        cells=tuple(findings.cells),
        pack_cells=tuple(findings.pack_cells),
        sharing=tuple(findings.sharing),
        hints=tuple(one.to_dict() for one in hints),
    )
    return replace(profile, warnings=tuple(dict.fromkeys([*profile.warnings, *hint_warnings(hints, profile)])))


def _default_order(backend: str) -> tuple[str, ...]:
    first = default_executor(backend)
    return (first, *(name for name in EXECUTORS if name != first))


def _figures(costs: ExecutorCosts) -> dict[str, float]:
    figures = {
        "floor_s": costs.floor_s,
        "overlap": costs.overlap,
        "pack_segment_s": costs.pack.segment_s,
        "pack_s_per_byte": costs.pack.byte_s,
        "unpack_segment_s": costs.unpack.segment_s,
        "unpack_s_per_byte": costs.unpack.byte_s,
    }
    for kind in (IN_NODE, CROSS_NODE):
        link = costs.link(kind)
        if link is not None:
            figures[f"{kind}_smallest_s"] = link.curve.seconds[0]
            figures[f"{kind}_flow_bytes_per_s"] = link.curve.plateau_rate
            figures[f"{kind}_port_bytes_per_s"] = link.port_rate
            figures[f"{kind}_two_way"] = link.two_way
            figures[f"{kind}_message_s"] = link.message_s
    return figures


def _intervals(costs: ExecutorCosts, drawn: Sequence[ExecutorCosts]) -> dict[str, tuple[float, float, float]]:
    values = [_figures(one) for one in drawn]
    found = {}
    for name, value in _figures(costs).items():
        spread = [one[name] for one in values] or [value]
        found[name] = (value, float(np.quantile(spread, 0.05)), float(np.quantile(spread, 0.95)))
    return found


def _gates(
    cells: Sequence[Cell],
    executors: Sequence[str],
    found: Mapping[str, ExecutorProfile],
    fingerprint: Mapping[str, Any],
) -> list[Gate]:
    from relaymeter.calibration.curve_fit import held_out
    from relaymeter.calibration.fit import curve_points

    gates = []
    for executor in executors:
        for kind in (IN_NODE, CROSS_NODE):
            link = found[executor].costs.link(kind)
            if link is None:
                continue
            errors = held_out(*curve_points(cells, kind, executor))
            name = f"{executor} {kind}"
            gates.append(Gate(f"{name}: held-out sizes below 1 MiB, median error", errors.small_median, 0.10))
            gates.append(Gate(f"{name}: held-out sizes below 1 MiB, largest error", errors.small_max, 0.30))
            gates.append(Gate(f"{name}: held-out sizes of 1 MiB and more, median error", errors.large_median, 0.05))
            gates.append(Gate(f"{name}: held-out sizes of 1 MiB and more, largest error", errors.large_max, 0.15))
    declared = (fingerprint.get("cluster") or {}).get("nic_rate_bytes_per_s")
    link = found[executors[0]].costs.cross_node
    if declared and link is not None:
        gates.append(Gate("payload rate of a NIC over its declared rate", link.port_rate / declared, 1.05))
        gates.append(Gate("declared rate of a NIC over its payload rate", declared / link.port_rate, 20.0))
    return gates


def _gate_warning(gate: Gate) -> str:
    if gate.value is None:
        return f"gate not measured: {gate.name}"
    return f"gate missed: {gate.name} is {gate.value:.3g}, at most {gate.limit:g} wanted"


def _hints(world: World) -> RankHints:
    return rank_hints(str(world.device), world.backend)


def _largest_message(world: World) -> tuple[int, int]:
    """Bytes per pair that leave room for the buffers of all ranks of a machine, and the rank that has the least room;
    the same on every rank."""
    here = len(world.topology.ranks_of(world.topology.node[world.rank]))
    free = psutil.virtual_memory().available / max(here, world.world_size if world.backend == "gloo" else here)
    if world.device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info(world.device)[0])
    room = [int.from_bytes(part, "little") for part in gather_bytes(world, int(free / 12).to_bytes(8, "little"))]
    least = min(room)
    if least < 1 << 20:
        raise InputError(
            f"only {12 * least} bytes of memory are free for rank {room.index(least)}: calibration needs 12 MiB per "
            "rank; free memory or start fewer ranks"
        )
    return least, room.index(least)


def _agreed(world: World, fitted: Callable[[], Profile]) -> Profile:
    """Rank 0 fits and broadcasts the file's text; every rank reads it and all compare its hash."""
    payload, failed = b"", False
    if world.rank == 0:
        try:
            payload = fitted().to_json().encode()
        except RelaymeterError as error:
            payload, failed = str(error).encode(), True
    device = wire_device(world)
    head = torch.tensor([len(payload), int(failed)], dtype=torch.int64, device=device)
    dist.broadcast(head, src=0)
    length, failed = int(head[0]), bool(head[1])
    body = torch.empty(length, dtype=torch.uint8, device=device)
    if world.rank == 0:
        body.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(body, src=0)
    text = bytes(body.cpu().numpy().tobytes()).decode()
    if failed:
        raise NothingMeasured(text)
    profile = from_json(json.loads(text), "from rank 0")
    hashes = gather_bytes(world, bytes.fromhex(profile.sha256))
    if len(set(hashes)) > 1:
        odd = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
        raise PlanDisagreement(f"ranks {odd} hold another profile than rank 0: nothing was written")
    return profile
