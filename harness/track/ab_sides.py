"""The builds that an interleaved A/B launches. The parent calls it; no torch import.

``other_side("../base")`` is the one that ``--ab`` names, ``this_side()`` the one that runs. ``same_code(before,
after)`` and ``versions_differ(before, after)`` say what to make of the two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import relaymeter
from relaymeter.errors import InputError, Undecided
from relaymeter.harness.git import tree_of

__all__ = ["Side", "other_side", "refuse_other_suite", "same_code", "this_side", "versions_differ"]

_PROBE_LIMIT_S = 60.0
#: What times depend on besides the code: a machine's id holds it too, see ``launches.track_machine_id``.
_PACKAGES = ("torch", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
#: Begins the line that a probe answers with, whatever else the side prints.
_MARK = "relaymeter-probe: "
_PROBE = f"""import importlib.metadata, importlib.util, json
try:
    import relaymeter
    found = relaymeter.__file__, relaymeter.__version__
except ImportError:
    found = None, None
try:
    track = importlib.util.find_spec("relaymeter.harness.options_track") is not None
except ImportError:
    track = False
versions = {{}}
for name in {_PACKAGES}:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print("\\n{_MARK}" + json.dumps([*found, track, versions]), flush=True)
"""
_SUITE_PROBE = f"""import json, sys
from relaymeter.errors import InputError
from relaymeter.harness.track.suite import config_hash, load_suite, select_cases
try:
    found = config_hash(select_cases(load_suite(sys.argv[1]), sys.argv[2:]), {{}}), ""
except InputError as error:
    found = None, str(error)
print("\\n{_MARK}" + json.dumps(found), flush=True)
"""


@dataclass(frozen=True)
class Side:
    """A build that can be launched: the interpreter, and the folder that its code is imported from (None: as
    installed)."""

    label: str
    python: str
    path: str | None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of torch and NCCL, by the name of their packages."""
    origin: str | None = None
    """The file that its package begins with; None: not known."""

    @property
    def import_path(self) -> str | None:
        """PYTHONPATH of its processes, None for none: the side's code first, then what this process was given. A python
        with a relaymeter of its own is not given folders that hold another one, which would be imported first."""
        given = [Path(entry).absolute() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        if self.path is None:
            return os.pathsep.join(str(entry) for entry in given if not (entry / "relaymeter").is_dir()) or None
        return os.pathsep.join(dict.fromkeys([self.path, *map(str, given)]))

    def environment(self) -> dict[str, str]:
        """What its processes get: this one's environment with the import path of the side."""
        found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return found if self.import_path is None else {**found, "PYTHONPATH": self.import_path}


def this_side() -> Side:
    """The build that runs this command."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    origin = relaymeter.__file__
    return Side("this", sys.executable, str(Path(origin).parent.parent), found, origin)


def other_side(text: str) -> Side:
    """The build that ``--ab`` names: a checkout's folder, run by this interpreter, or another python executable.

    Raises InputError where it is neither, or its version has no ``track run``.
    """
    path = Path(text)
    if not text:
        raise InputError("--ab '' names nothing: give the folder of a checkout or a python executable")
    if path.is_dir():
        source = path.resolve() / "src"
        if not (source / "relaymeter" / "__init__.py").is_file():
            raise InputError(
                f"--ab {text} holds no src/relaymeter/__init__.py: name a checkout of relaymeter, such as one that git "
                "worktree add makes, or a python executable"
            )
        side = Side(text, sys.executable, str(source))
    elif path.is_file() and os.access(path, os.X_OK):
        side = Side(text, str(path.absolute()), None)  # a link into a virtual environment stays a link
    else:
        raise InputError(f"--ab {text} is neither the folder of a checkout nor a python executable")
    origin, own, track, versions = _built(side)
    if origin is None:
        raise InputError(f"--ab {text}: relaymeter is not installed there")
    if side.path is not None and not Path(origin).resolve().is_relative_to(Path(side.path).resolve()):
        raise InputError(f"--ab {text}: its code is not what is imported there, but {origin}")
    if not track:
        raise InputError(f"--ab {text} is relaymeter {own} from before track run existed: choose a base that has it")
    return replace(side, versions=versions, origin=origin)


def _built(side: Side) -> tuple[str | None, str | None, bool, dict[str, str]]:
    """Where the side's code is, its version, whether it has ``track``, and versions of what it runs on."""
    found, said = _probe(side, _PROBE)
    if not isinstance(found, list) or len(found) != 4:
        raise InputError(f"--ab {side.label} is no python that imports relaymeter: {said}")
    origin, own, track, versions = found
    return origin, own, bool(track), versions or {}


def _probe(side: Side, script: str, *arguments: str) -> tuple[Any, str]:
    """What a script, run as the side's processes are, answered after the mark (None: nothing), and the last line that
    it said of an error. Whatever bytes the side prints besides are passed over."""
    try:
        with tempfile.TemporaryDirectory(prefix="relaymeter-ab-") as folder:
            found = subprocess.run(
                [side.python, "-c", script, *arguments], env=side.environment(), cwd=folder, capture_output=True,
                stdin=subprocess.DEVNULL, timeout=_PROBE_LIMIT_S, check=False,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"--ab {side.label} cannot be run: {error}") from error
    printed, said = (text.decode("utf-8", "replace") for text in (found.stdout, found.stderr))
    answers = [line.removeprefix(_MARK) for line in printed.split("\n") if line.startswith(_MARK)]
    answer = None
    with suppress(ValueError, IndexError):
        answer = json.loads(answers[-1])
    return answer, (said.strip().splitlines() or ["nothing on standard error"])[-1]


def refuse_other_suite(side: Side, file: Path, cases: Sequence[str], own_hash: str, *, allowed: bool) -> None:
    """Refuse before any launch a side that reads the suite in ``file`` otherwise than this one, whose hash of it is
    ``own_hash``: none of their launches could be compared.

    Raises InputError with its words where it cannot read it, and Undecided where it reads other settings, unless
    ``allowed``. What cannot be asked, of an older version, is left to the launches.
    """
    found, _ = _probe(side, _SUITE_PROBE, str(file.resolve()), *cases)
    if not isinstance(found, list) or len(found) != 2:
        return
    known, said = found
    if known is None:
        raise InputError(f"--ab {side.label} cannot read the suite: {said}: give a --suite that both sides know")
    if known != own_hash and not allowed:
        raise Undecided(
            f"config_hash differs: --ab {side.label} reads the suite with other defaults ({known}, here {own_hash}): "
            "write what differs into the suite, or add --allow-mismatch, which marks the report"
        )


def same_code(before: Side, after: Side) -> str | None:
    """What to say where both sides are the same code and run on the same versions; None where anything differs, or is
    not known to be the same."""
    if before.origin is None or after.origin is None or versions_differ(before, after):
        return None
    paths = [Path(side.origin).resolve() for side in (before, after) if side.origin is not None]
    if paths[0] == paths[1]:
        return f"both sides are the same code, in {paths[0].parent}: what differs is noise"
    trees = [tree_of(path) for path in paths]
    if trees[0] is not None and trees[0] == trees[1]:
        return f"both sides are checkouts of the same files (tree {trees[0][:9]}): what differs is noise"
    return None


def versions_differ(before: Side, after: Side) -> list[str]:
    """What the sides run on besides their own code, where it differs: ``torch 2.9.0 before, 2.10.0 after``."""
    return [
        f"{name} {before.versions.get(name, 'none')} before, {after.versions.get(name, 'none')} after"
        for name in _PACKAGES
        if before.versions.get(name) != after.versions.get(name)
    ]
