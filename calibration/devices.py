"""What the system's files and NVML say of NUMA nodes, NICs, ports and GPU links: readers that hints and doctor share.

``port_rate(text)``, ``interface_rate(name)`` and ``core_list("0-3,8")`` read files of ``/sys``; with
``nvml_session()`` NVML is open while a block runs. ``root`` stands for ``/sys``. A file that is not there, or holds
something else, is None or empty, never an error. No torch import.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from relaymeter.errors import RelaymeterError

__all__ = [
    "SYS",
    "NvmlUnavailable",
    "active_links",
    "core_list",
    "file_text",
    "interface_rate",
    "joined_by_nvlink",
    "numa_of",
    "nvml_session",
    "port_rate",
    "uuid_of",
]

SYS = Path("/sys")
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*Gb/sec")
#: NVLinks of one GPU where NVML does not say how many it asks for.
_LINKS = 18


class NvmlUnavailable(RelaymeterError):
    """NVML cannot be asked: ``installed`` says whether its Python module is there, the message what it answered."""

    def __init__(self, message: str, *, installed: bool) -> None:
        super().__init__(message)
        self.installed = installed


def file_text(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def core_list(text: str) -> Iterator[int]:
    """Cores of a list such as ``0-3,8``."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last or first) + 1)


def numa_of(device: Path) -> int | None:
    """NUMA node of a device's folder in ``/sys``; None where the machine states none (it then says -1)."""
    text = file_text(device / "numa_node").strip()
    return int(text) if text.isdigit() else None


def interface_rate(name: str, root: Path = SYS) -> float | None:
    """What a physical interface states as its rate, bytes per second one way; a virtual one's statement means
    nothing."""
    if not name or not (root / "class/net" / name / "device").exists():
        return None
    state = psutil.net_if_stats().get(name) if root == SYS else None
    speed = 0 if state is None else state.speed  # Mbit/s; 0: not known
    if not speed:
        text = file_text(root / "class/net" / name / "speed").strip()
        speed = int(text) if text.isdigit() else 0
    return speed * 1e6 / 8 if 0 < speed < 2**31 else None


def port_rate(text: str) -> float | None:
    """Bytes per second one way of an InfiniBand port's ``rate`` file, such as ``400 Gb/sec (4X NDR)``."""
    found = _RATE.match(text)
    return float(found.group(1)) * 1e9 / 8 if found is not None else None


@contextmanager
def nvml_session() -> Iterator[Any]:
    """NVML (the module pynvml of nvidia-ml-py) while the block runs. Makes no CUDA context. Raises NvmlUnavailable
    where it is not installed or the driver does not answer; what the block raises passes."""
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable(str(error), installed=False) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(str(error), installed=True) from error
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def uuid_of(nvml: Any, handle: Any) -> str:
    """Unique id of a GPU, ``GPU-...``."""
    found = nvml.nvmlDeviceGetUUID(handle)
    return found.decode() if isinstance(found, bytes) else str(found)


def active_links(nvml: Any, own: Any) -> int:
    """Active NVLinks of a GPU, to other GPUs or to a switch: how wide its way out is, not whom it reaches."""
    count = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _LINKS)):
        with suppress(nvml.NVMLError):
            count += int(nvml.nvmlDeviceGetNvLinkState(own, link) == nvml.NVML_FEATURE_ENABLED)
    return count


def joined_by_nvlink(nvml: Any, one: Any, two: Any) -> bool:
    """Whether NVLink joins this pair of GPUs, directly or through a switch. Raises NVMLError where NVML cannot say."""
    status = nvml.nvmlDeviceGetP2PStatus(one, two, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == nvml.NVML_P2P_STATUS_OK)
