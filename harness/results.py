"""What a launch stamps on its rows, and the folder in which results are kept. Called by the parent; no torch.

``stamp = make_stamp(machine_id(), shaped=True)`` before the ranks start, ``keep_results(root, rows, stamp, "demo")``
after.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import relaymeter
from relaymeter.calibration.fingerprint import machine_facts
from relaymeter.errors import InputError
from relaymeter.harness.jobs import RunStamp
from relaymeter.records import Row, dump_lines, write_text

__all__ = ["keep_results", "machine_id", "make_stamp"]


def machine_id() -> str:
    """What stands for the machine where no profile has a fingerprint: a hash of what any process can state of it."""
    return hashlib.sha256(json.dumps(machine_facts(), sort_keys=True).encode()).hexdigest()[:12]


def make_stamp(machine: str, *, shaped: bool, mismatch: Sequence[str] = ()) -> RunStamp:
    """What the rows of a launch that begins now have in common. ``mismatch``: where a profile is another machine's."""
    return RunStamp(
        utc=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        launch_id=secrets.token_hex(4),
        machine_id=machine,
        commit=_commit(),
        mismatch=tuple(mismatch),
        shaped=shaped,
    )


def _commit() -> str | None:
    """Revision of the checkout this package runs from, with ``-dirty`` where files differ; None outside a checkout."""
    root = Path(relaymeter.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return found.stdout.strip() or None
    return None


def keep_results(
    root: Path,
    rows: Sequence[Row],
    stamp: RunStamp,
    scenario: str,
    facts: Mapping[str, Any] | None = None,
    *,
    suite: str | None = None,
    more: Callable[[Path], None] | None = None,
) -> Path:
    """Write ``<root>/<machine>/<UTC>_<commit>_run-<scenario>/`` with rows and how they were made, and return it.

    ``suite`` stands in for ``run-<scenario>``. ``facts``: of the machine; None: what any process can state. ``more``
    writes further files into the folder that it is given. The folder is made whole under another name and then renamed
    into place: raises InputError where it cannot be, and leaves nothing.
    """
    when = stamp.utc.replace("-", "").replace(":", "")
    home = root / stamp.machine_id
    folder = home / f"{when}_{stamp.commit or 'unknown'}_{suite or f'run-{scenario}'}"
    made = [path for path in (home, root) if not path.exists()]
    building = home / f".relaymeter-{secrets.token_hex(8)}"
    try:
        building.mkdir(parents=True)
        write_text(building / "rows.jsonl", dump_lines(rows))
        command = shlex.join(["relaymeter", *sys.argv[1:]])
        known = machine_facts() if facts is None else facts
        lines = [command, *(f"{key}: {value}" for key, value in sorted(known.items()))]
        text = "\n".join(lines) + "\n"
        write_text(building / "how.txt", text.encode("utf-8", "backslashreplace").decode())  # names need not be UTF-8
        if more is not None:
            more(building)
        if folder.exists():
            raise InputError(f"{folder} exists: choose another folder for the results")
        building.rename(folder)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            text = error.strerror or str(error)
            raise InputError(f"cannot write {folder}: {text}: choose another place") from error
        if isinstance(error, InputError):
            raise InputError(str(error).replace(str(building), str(folder))) from error
        raise
    return folder
