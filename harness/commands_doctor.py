"""``doctor``: what this machine offers a run, what stands in its way, and what mends it.

Starts no rank, joins no world, imports neither torch nor DeepSpeed. In a world that a launcher made, the first rank of
each node speaks for it.
"""

from __future__ import annotations

import argparse
import hashlib
import socket
from datetime import datetime, timezone
from pathlib import Path

from relaymeter.calibration.devices import file_text
from relaymeter.errors import EXIT_GATE_MISSED, EXIT_OK, InputError
from relaymeter.harness import emit
from relaymeter.harness.doctor.examine import examine
from relaymeter.harness.doctor.findings import State, worst
from relaymeter.harness.doctor.show import document, show
from relaymeter.harness.launch import already_in_world
from relaymeter.harness.results import machine_id

__all__ = ["doctor"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def doctor(args: argparse.Namespace) -> int:
    """Print the findings. Returns 3 with ``--strict`` where one is a warning or a fault, else 0."""
    if _is_silent():
        return EXIT_OK
    out = emit.Output(args.json, force=args.force)
    findings = examine()
    utc = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    show(out, findings, f"doctor: {socket.gethostname()}, {utc}")
    if args.json is not None:
        host = f"{socket.gethostname()} {file_text(_BOOT_ID).strip()}"
        host_id = hashlib.sha256(host.encode()).hexdigest()[:12]
        out.json(document(findings, utc=utc, machine_id=machine_id(), host_id=host_id))
    missed = args.strict and worst(findings).rank >= State.WARNING.rank
    return EXIT_GATE_MISSED if missed else out.exit_code


def _is_silent() -> bool:
    """Whether this is a rank beside the first one of its node. What contradicts itself is a finding, not an end."""
    try:
        hint = already_in_world()
    except InputError:
        return False
    return hint is not None and hint.local_rank not in (None, 0)
