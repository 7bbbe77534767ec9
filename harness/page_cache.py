"""Files and the memory in front of them: dropping them from the page cache, and which file system holds them. Linux.

``drop(folder)`` makes the next read of the folder's files a read of their device.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["MEMORY", "drop", "file_system"]

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
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, kind, *_ = line.split(" ")
            point = point.encode().decode("unicode_escape")
            inside = place == point or place.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):  # a later mount lies over an earlier one
                best, found = point, kind
        return found
    except OSError:
        return "unknown"
