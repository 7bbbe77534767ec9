"""Files and the memory in front of them: dropping them from the page cache, and which file system holds them. Linux.

``drop(folder)`` makes the next read of the folder's files a read of their device.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["MEMORY", "drop", "file_system", "unescaped"]

#: File systems whose files have no device behind them.
MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


def drop(folder: Path) -> None:
    """Write every file of ``folder`` to its device and drop it from the page cache. Raises OSError."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # dirty pages are not dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def file_system(folder: Path) -> str:
    """Name of the file system that holds ``folder``, such as ``ext4``; ``unknown`` where the kernel does not say."""
    try:
        place = os.path.realpath(folder)
        best, found = "", "unknown"
        for line in Path("/proc/self/mounts").read_bytes().splitlines():
            _, raw, kind, *_ = line.split(b" ")
            point = unescaped(raw)
            inside = place == point or place.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):  # a later mount lies over an earlier one
                best, found = point, kind.decode()
        return found
    except OSError:
        return "unknown"


def unescaped(raw: bytes) -> str:
    """A name of /proc/self/mounts, in which blanks, tabs, newlines and backslashes stand as octal numbers. Pure."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), raw))
