"""What a launch stamps on its rows, and the folder in which results are kept. Called by the parent; no torch.

``stamp = make_stamp(machine_id(), shaped=True)`` before the ranks start, ``keep_results(root, rows, stamp, "demo")``
after.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relaymeter.calibration.fingerprint import machine_facts
from relaymeter.errors import InputError
from relaymeter.harness.git import checkout_root, git_says
from relaymeter.harness.jobs import RunStamp
from relaymeter.harness.launch import WorldHint, already_in_world
from relaymeter.records import Row, dump_lines, read_input, write_text

__all__ = ["KEPT_FILES", "command_line", "keep_results", "machine_id", "make_stamp", "named_files", "names_file"]

#: By the option that names a TOML file, what results call their copy of it.
KEPT_FILES: Mapping[str, str] = MappingProxyType(
    {"scenario": "scenario.toml", "suite": "scenario.toml", "simulate": "simulated.toml"}
)
#: By launcher, the variable with the number of ranks on a node, and that with the number of nodes.
_SIZES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "torchrun": ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
        "deepspeed": ("LOCAL_SIZE", "CROSS_SIZE"),
        "srun": ("", "SLURM_STEP_NUM_NODES"),
        "mpirun": ("OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    }
)


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
    root = checkout_root()
    if root is not None:
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            return git_says(root, "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*") or None
    return None


def names_file(text: str) -> bool:
    """Whether ``--scenario`` and the like name a file by this, not something shipped. Pure."""
    return text.endswith(".toml") or "/" in text


def named_files(**options: str | None) -> dict[str, str]:
    """The contents of the files that ``options`` (of ``KEPT_FILES``) name, by the names that results give them, for
    ``keep_results``; read when the command begins, since a file may be another one at its end. Raises InputError."""
    named = {name: text for name, text in options.items() if text is not None and names_file(text)}
    return {KEPT_FILES[name]: read_input(Path(text), name) for name, text in named.items()}


def command_line(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The command that made the results, as a shell takes it: in a world that a launcher made with the launcher and its
    numbers of nodes and ranks. Where a launcher needs an address it is ``HOST``. ``environment``: os.environ by
    default."""
    env = os.environ if environment is None else environment
    hint = already_in_world(env)
    start = ["relaymeter"] if hint is None else _launcher(hint, env)
    return shlex.join([*start, *arguments])


def _launcher(hint: WorldHint, env: Mapping[str, str]) -> list[str]:
    """The words that start a world like this one, up to those of relaymeter."""
    ranks, name = str(hint.world_size), hint.launcher
    if name == "torchrun" and "TORCHELASTIC_RUN_ID" not in env:  # RANK and WORLD_SIZE alone: deepspeed's, or by hand
        name = "deepspeed" if "CROSS_SIZE" in env else "by hand"
    local, nodes = (env.get(variable) for variable in _SIZES.get(name, ("", "")))
    if nodes is None and local is not None and local.isdigit() and int(local):
        nodes = str(-(-hint.world_size // int(local)))

    def option(word: str, value: str | None) -> list[str]:
        return [] if value is None else [word, value]

    if name == "torchrun":
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"] if nodes not in (None, "1") else []
        sizes = [*option("--nnodes", nodes), *option("--nproc-per-node", local)]
        return ["torchrun", *sizes, *meeting, "-m", "relaymeter"]
    if name == "deepspeed":
        sizes = [*option("--num_nodes", nodes), *option("--num_gpus", local)]
        return ["deepspeed", *sizes, "--module", "relaymeter"]
    if name == "srun":
        return ["srun", *option("--nodes", nodes), "--ntasks", ranks, "python", "-m", "relaymeter"]
    if name == "mpirun":
        place = None if local is None else f"ppr:{local}:node"
        return ["mpirun", "-n", ranks, *option("--map-by", place), "python", "-m", "relaymeter"]
    return ["env", "RANK=K", f"WORLD_SIZE={ranks}", "python", "-m", "relaymeter"]


def keep_results(
    root: Path,
    rows: Sequence[Row],
    stamp: RunStamp,
    scenario: str,
    facts: Mapping[str, Any] | None = None,
    *,
    suite: str | None = None,
    files: Mapping[str, str] = MappingProxyType({}),
    more: Callable[[Path], None] | None = None,
) -> Path:
    """Write ``<root>/<machine>/<UTC>_<commit>_run-<scenario>/`` with rows and how they were made, and return it.

    ``suite`` stands in for ``run-<scenario>``. ``facts``: of the machine; None: what any process can state. ``files``:
    contents by name, of ``named_files``. ``more`` writes further files into the folder that it is given. Where the name
    is taken, by results of the same second, it ends in ``-2``, ``-3`` and so on. The folder is made whole under another
    name and then renamed into place: raises InputError where it cannot be, and leaves nothing.
    """
    when = stamp.utc.replace("-", "").replace(":", "")
    home = root / stamp.machine_id
    folder = home / f"{when}_{stamp.commit or 'unknown'}_{suite or f'run-{scenario}'}"
    made = [path for path in (home, root) if not path.exists()]
    building = home / f".relaymeter-{secrets.token_hex(8)}"
    try:
        building.mkdir(parents=True)
        write_text(building / "rows.jsonl", dump_lines(rows))
        for name, content in files.items():
            write_text(building / name, content)
        known = machine_facts() if facts is None else facts
        lines = [command_line(sys.argv[1:]), *(f"{key}: {value}" for key, value in sorted(known.items()))]
        text = "\n".join(lines) + "\n"
        write_text(building / "how.txt", text.encode("utf-8", "backslashreplace").decode())  # names need not be UTF-8
        if more is not None:
            more(building)
        return _into_place(building, folder)
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


def _into_place(building: Path, folder: Path) -> Path:
    """Rename to the first of ``folder``, ``folder``-2, ... that is not taken; returns it. Raises OSError."""
    number, free = 1, folder
    while True:
        try:
            if not os.path.lexists(free):
                building.rename(free)
                return free
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # taken meanwhile
                raise
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
