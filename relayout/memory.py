"""Memory: the peak of a stretch of code beyond what was held before it.

``with PeakMemory(device) as peak: ...`` then ``peak.bytes``: on CUDA from the allocator, on Linux CPUs from the
kernel's high-water mark of resident memory, None where neither can be had. Any rank; the whole process is measured.

Resident memory is what the kernel has mapped in, not what the process still uses: glibc returns a large allocation at
once, but from its mmap threshold down (128 KiB at first, up to 32 MiB once such large ones have been freed) it keeps
what is freed for later. ``release_free_pages`` makes it return those too.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

__all__ = ["PeakMemory", "release_free_pages", "resident_bytes"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
#: What the kernel wants written to reset the high-water mark (proc(5)).
_RESET_PEAK = "5"


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status, which is in kibibytes. Raises OSError or ValueError where there is none."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{_STATUS} has no {field}")


class PeakMemory:
    """Context manager; ``bytes`` is the peak beyond the beginning, or None where it cannot be measured."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.bytes: int | None = None
        self._device = device if device is not None and device.type == "cuda" else None
        self._before: int | None = None

    def __enter__(self) -> PeakMemory:
        self.bytes = None
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return self
        try:
            _CLEAR.write_text(_RESET_PEAK)
            self._before = _status_bytes("VmRSS")
        except (OSError, ValueError):
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        if self._device is not None:
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
            return
        try:
            self.bytes = max(0, _status_bytes("VmHWM") - self._before)
        except (OSError, ValueError):
            self.bytes = None


def release_free_pages() -> None:
    """Hand pages that this process has freed back to the kernel; glibc only, nothing happens elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def resident_bytes() -> int | None:
    """Resident memory of this process now, None where the kernel does not say."""
    try:
        return _status_bytes("VmRSS")
    except (OSError, ValueError):
        return None
