"""Jobs for real ranks: one measured cell, packing, a damaged exchange, and a whole short calibration on loopback."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
from pool import Seat

from relaymeter.calibration import measure
from relaymeter.calibration.calibrate import run_calibration
from relaymeter.calibration.cells import Sampling
from relaymeter.errors import InputError, RelaymeterError
from relaymeter.harness import calibrate_job
from relaymeter.relayout.topology import Topology


def _world(seat: Seat) -> Any:
    return SimpleNamespace(
        rank=seat.rank,
        world_size=seat.world_size,
        topology=Topology.grid(2, seat.world_size // 2),
        backend="gloo",
        device=torch.device("cpu"),
    )


def cell(seat: Seat, executor: str, nbytes: int, messages: int, calls: int) -> dict[str, Any]:
    """An uneven matrix: rank r sends (r + 1) * nbytes to the next rank and a few bytes to the one after."""
    matrix = np.zeros((seat.world_size, seat.world_size), dtype=np.int64)
    for rank in range(seat.world_size):
        matrix[rank, (rank + 1) % seat.world_size] = (rank + 1) * nbytes
        matrix[rank, (rank + 2) % seat.world_size] = 17
    sampling = Sampling(warmups=1, maximum=4, seconds=0.5)
    found = measure.RankExchange(_world(seat)).measure(
        matrix, executor, messages=messages, calls=calls, sampling=sampling
    )
    return {
        "times": list(found.times_s),
        "spent": found.spent_s,
        "wrong": [list(vars(w).values()) for w in found.wrong],
    }


def damaged(seat: Seat, executor: str, how: str) -> list[list[int]]:
    """Rank 2 receives from rank 0 what a bad link delivers; returns (src, dst, bytes) as every rank saw it."""
    real = measure._Exchange.run

    def run(self: Any) -> None:
        turn = self._turn
        view = self._from[turn][0]
        before = view.clone()
        real(self)
        if seat.rank == 2 and how == "zeros":
            view.zero_()
        elif seat.rank == 2 and how == "stale":
            view.copy_(self._owner.slice_for(0, 2, turn + 1, self._stride, len(view)) if turn % 2 else before)
        elif seat.rank == 2 and how == "bit":
            view[5] ^= 16
        elif seat.rank == 2 and how == "swap":
            view[:4096], view[4096:8192] = view[4096:8192].clone(), view[:4096].clone()

    measure._Exchange.run = run
    try:
        matrix = np.zeros((seat.world_size, seat.world_size), dtype=np.int64)
        matrix[0, 2] = 16384
        sampling = Sampling(warmups=0, maximum=2, seconds=0.2)
        found = measure.RankExchange(_world(seat)).measure(matrix, executor, sampling=sampling)
    finally:
        measure._Exchange.run = real
    return [[w.src, w.dst, w.bytes] for w in found.wrong]


def packing(seat: Seat, direction: str) -> list[float]:
    """Sample times of packing 32 runs of 256 bytes."""
    found = measure.RankPacking(_world(seat)).measure(direction, 256, 32, sampling=Sampling(maximum=3))
    return list(found.times_s)


def refuse(seat: Seat) -> str:
    """A matrix of the wrong shape."""
    try:
        measure.RankExchange(_world(seat)).measure(np.zeros((2, 2), dtype=np.int64), "send-recv")
    except InputError as error:
        return str(error)
    return ""


def calibrate(seat: Seat) -> dict[str, Any]:
    """A whole calibration whose first exchange takes 0.7 s, on ranks of which the third has little memory left."""
    seen: set[bool] = set()
    run, memory = measure._Exchange.run, psutil.virtual_memory

    def slow_at_first(self: Any) -> None:
        if self._flat not in seen:
            seen.add(self._flat)
            time.sleep(0.7)
        run(self)

    def little() -> Any:
        return SimpleNamespace(available=2 * 12 * (seat.world_size << 20), total=memory().total)

    measure._Exchange.run = slow_at_first
    if seat.rank == 2:
        psutil.virtual_memory = little
    try:
        profile = run_calibration(_world(seat), quick=True, budget_s=2.0)
    finally:
        measure._Exchange.run, psutil.virtual_memory = run, memory
    return {
        "sha256": profile.sha256,
        "text": profile.to_json() if seat.rank == 0 else "",
    }


def refused(seat: Seat, how: str) -> list[Any]:
    """What a calibration ends with where a link delivers zeros, or where a rank has no memory left."""
    run, memory = measure._Exchange.run, psutil.virtual_memory

    def zeros(self: Any) -> None:
        run(self)
        self._from[self._turn - 1][0].zero_()

    if how == "zeros" and seat.rank == 2:
        measure._Exchange.run = zeros
    if how == "memory" and seat.rank == 1:
        psutil.virtual_memory = lambda: SimpleNamespace(available=1 << 20, total=memory().total)
    try:
        run_calibration(_world(seat), quick=True, budget_s=1.0)
    except RelaymeterError as error:
        return [error.exit_code, str(error)]
    finally:
        measure._Exchange.run, psutil.virtual_memory = run, memory
    return [0, ""]


def _sleep_past_the_end_of(seat: Seat, began: float) -> None:
    """Sleep until the other ranks have said that their time is up, and have waited in vain for this one to say so."""
    others = [f"relaymeter/calibration/time-is-up/{rank}" for rank in range(seat.world_size) if rank != seat.rank]
    while not seat.store.check(others) and time.monotonic() < began + 8.0:
        time.sleep(0.05)
    time.sleep(calibrate_job._SETTLE_S + 0.5)


def sleeper(seat: Seat) -> list[Any]:
    """Rank 3 answers but takes no part in a measurement; what the others end with, and after how many seconds."""
    calibrate_job._LEAST_S, calibrate_job._SETTLE_S = 2.0, 1.0
    world = _world(seat)
    world.store = seat.store
    began = time.monotonic()
    try:
        with calibrate_job._bounded(world, "calibration", 2.0) as poll:
            if seat.rank == 3:
                _sleep_past_the_end_of(seat, began)
            matrix = np.full((seat.world_size, seat.world_size), 64, dtype=np.int64)
            measure.RankExchange(world, poll=poll).measure(matrix, "send-recv")
    except RelaymeterError as error:
        return [error.exit_code, str(error), list(getattr(error, "ranks", ())), time.monotonic() - began]
    return [0, "", [], 0.0]
