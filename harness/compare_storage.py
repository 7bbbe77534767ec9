"""Folders for the checkpoints of ``compare``: which there are, whether they have room, and that none is left behind.

    storages = find_storages([("disk", "/var/tmp")])
    with Workplace(storages) as places:                     # {"disk": a fresh folder}

A folder's name says which process of which machine made it, so that the next one there finds and removes what a killed
one left. What another machine, or another container, has made stays: whether it still runs cannot be seen from here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relaymeter.errors import InputError
from relaymeter.harness.page_cache import MEMORY, file_system
from relaymeter.harness.processes import has_ended, own_mark
from relaymeter.harness.signals import held_signals
from relaymeter.units import counted, format_bytes

__all__ = ["Storage", "Workplace", "check_room", "find_storages", "folder_bytes"]

Cache = Literal["warm", "cold"]
_PREFIX = "relaymeter-compare-"
#: Machine (see ``_machine``) and process (see ``own_mark``) that made a folder, and what is random.
_NAME = re.compile(rf"{_PREFIX}([0-9a-f]{{8}})-(\d+-\d+-\d+)-\w+")
#: A save, its universal form, what the converter writes on the way, and the other checkpoint, over the state's bytes.
_COPIES = 5
#: Room that the checkpoints of any state need, for all their small files, in bytes.
_LEAST_ROOM = 16 << 20


@dataclass(frozen=True)
class Storage:
    """A place for checkpoints: its name in tables, its folder, its file system."""

    name: str
    folder: Path
    filesystem: str

    @property
    def caches(self) -> tuple[Cache | None, ...]:
        """What the page cache can be made to be before a load: nothing is behind a file system in memory."""
        return (None,) if self.filesystem in MEMORY else ("warm", "cold")


def find_storages(asked: Sequence[tuple[str, str]] | None) -> tuple[Storage, ...]:
    """The storages that were asked for, by name and folder; None: a disk and tmpfs, as far as the machine has them.

    Raises InputError for a folder that cannot be written, and for two of one name.
    """
    if asked is None:
        disks = [Path(text) for text in (tempfile.gettempdir(), os.getcwd(), "/var/tmp")]
        disk = next((path for path in disks if file_system(path) not in (*MEMORY, "unknown") and _writable(path)), None)
        shm = Path("/dev/shm")
        found = [] if disk is None else [Storage("disk", disk, file_system(disk))]
        if file_system(shm) in MEMORY and _writable(shm):
            found.append(Storage("tmpfs", shm, file_system(shm)))
        if not found:
            raise InputError("no folder for checkpoints was found: give --storage NAME=DIR")
        return tuple(found)
    names = [name for name, _ in asked]
    for name, folder in asked:
        if names.count(name) > 1:
            raise InputError(f"--storage {name}={folder}: the name {name!r} is given twice")
        if not _writable(Path(folder)):
            raise InputError(f"--storage {name}={folder}: no folder that can be written: give another")
    return tuple(Storage(name, Path(folder), file_system(Path(folder))) for name, folder in asked)


def check_room(storages: Sequence[Storage], state_bytes: int) -> None:
    """Raise InputError where a storage has no room for the checkpoints of a state of so many bytes. First removes what
    killed processes have left there."""
    for storage in storages:
        _remove_abandoned(storage.folder)
    devices = [os.stat(storage.folder).st_dev for storage in storages]
    for storage, device in zip(storages, devices, strict=True):
        needed = devices.count(device) * max(_COPIES * state_bytes, _LEAST_ROOM)
        free = shutil.disk_usage(storage.folder).free
        if free < needed:
            raise InputError(
                f"--storage {storage.name}={storage.folder}: {format_bytes(free)} are free, the checkpoints of one "
                f"change there take up to {format_bytes(needed)}: free some, or give another folder"
                f"{_left_by_others(storage.folder)}"
            )


def _left_by_others(folder: Path) -> str:
    """What lies in ``folder`` of checkpoints that other machines or users have made, for the end of an error."""
    found = sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir() and not path.is_symlink())
    if not found:
        return ""
    size = ""
    with suppress(OSError):  # another command removes its own meanwhile
        size = f" hold {format_bytes(sum(map(folder_bytes, found)))}"
    return f"; {counted(len(found), 'folder')} {_PREFIX}* there{size}: remove those whose command no longer runs"


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in ``folder``; 0 where it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Workplace:
    """A fresh folder on every storage, removed at the end; first removes what killed processes have left."""

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = storages
        self._made: dict[str, Path] = {}

    def __enter__(self) -> dict[str, Path]:
        prefix = f"{_PREFIX}{_machine()}-{own_mark()}-"
        try:
            for storage in self._storages:
                _remove_abandoned(storage.folder)
                with held_signals():
                    self._made[storage.name] = Path(tempfile.mkdtemp(prefix=prefix, dir=storage.folder))
        except BaseException:
            self._remove()
            raise
        return dict(self._made)

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        with held_signals():
            for folder in self._made.values():
                shutil.rmtree(folder, ignore_errors=True)


def _machine() -> str:
    """What tells this machine, or container, from others that reach the same storage."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _remove_abandoned(folder: Path) -> None:
    """Remove the folders of processes of this machine and user that are gone; those that cannot be removed stay."""
    for path in folder.glob(f"{_PREFIX}*"):
        named = _NAME.fullmatch(path.name)
        if named is None or named[1] != _machine() or path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):
            if path.stat().st_uid == os.getuid() and has_ended(named[2]):
                shutil.rmtree(path, ignore_errors=True)


def _writable(folder: Path) -> bool:
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    except OSError:
        return False
    return True
