"""Small facts of every rank, brought together: bytes, JSON values, and the hash of all machines.

``gather_json(world, value)`` is called by all ranks of a joined world and returns the values of all, in order.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist

from relaymeter.calibration.fingerprint import environment_facts, machine_facts
from relaymeter.calibration.measure import World
from relaymeter.records import dump_json

__all__ = ["gather_bytes", "gather_json", "gather_machines", "wire_device"]


def wire_device(world: World) -> torch.device:
    """Where tensors that travel over ``world`` must live."""
    return world.device if world.backend == "nccl" else torch.device("cpu")


def gather_bytes(world: World, content: bytes) -> list[bytes]:
    """``content`` of every rank, of equal length on all. Collective."""
    mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(wire_device(world))
    parts = [torch.empty_like(mine) for _ in range(world.world_size)]
    dist.all_gather(parts, mine)
    return [part.cpu().numpy().tobytes() for part in parts]


def gather_json(world: World, value: Any) -> list[Any]:
    """JSON-ready ``value`` of every rank, whatever its length. Collective."""
    text = dump_json(value, indent=None).encode()
    lengths = [int.from_bytes(part, "little") for part in gather_bytes(world, len(text).to_bytes(8, "little"))]
    parts = gather_bytes(world, text.ljust(max(lengths)))
    return [json.loads(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def gather_machines(world: World) -> str:
    """Hash over the machines of all ranks and their transports' settings, in order. Collective."""
    facts = {**machine_facts(), **environment_facts()}
    mine = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    return hashlib.sha256(b"".join(gather_bytes(world, mine))).hexdigest()[:16]
