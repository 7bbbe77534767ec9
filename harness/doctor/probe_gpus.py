"""GPUs of the machine: by NVML, else by nvidia-smi, else by what the driver's files name.

``read_gpus()`` asks them in this order; ``from_nvml(nvml)`` and ``from_smi(csv, topology)`` read answers, whoever gives
them, so that tests invent machines. No CUDA context is made, and CUDA_VISIBLE_DEVICES hides nothing here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from relaymeter.calibration.devices import (
    NvmlUnavailable,
    active_links,
    file_text,
    joined_by_nvlink,
    numa_of,
    nvml_session,
)
from relaymeter.calibration.fingerprint import driver_version
from relaymeter.harness.doctor.facts import Gpu, Gpus, Link, Pair

__all__ = ["SMI_COLUMNS", "from_driver_files", "from_nvml", "from_smi", "read_gpus"]

_SMI_LIMIT_S = 3.0
_LEVELS: dict[int, Link] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_WORDS: dict[str, Link] = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "NODE", "SYS": "SYS"}
#: NVML's index of reading a peer's memory; pynvml's own constant is a tuple.
_READ = 0
#: What nvidia-smi is asked for, in this order.
SMI_COLUMNS = (
    "index", "uuid", "name", "memory.total", "memory.used", "mig.mode.current", "ecc.mode.current",
    "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total", "pci.bus_id", "driver_version",
)  # fmt: skip


def read_gpus(root: Path = Path("/")) -> Gpus:
    """The GPUs of this machine. ``root`` stands for ``/`` where files are read. Local."""
    files = from_driver_files(root)
    try:
        with nvml_session() as nvml:
            found = from_nvml(nvml, root)
            return replace(found, open_driver=files.open_driver, driver=found.driver or files.driver)
    except NvmlUnavailable as error:
        files = replace(files, nvml_installed=error.installed)
        answered = _ask_smi(files) or files
        if answered.gpus and answered.problem is None:
            return answered
        if not files.gpus and files.driver is None:  # no driver: that nobody answers is no problem of its own
            return files
        return replace(files, problem=str(error) if error.installed else answered.problem)


def from_nvml(nvml: Any, root: Path = Path("/")) -> Gpus:
    """What NVML (the module, open) says. A question that a GPU does not answer leaves its member None."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    links: dict[Pair, Link] = {}
    no_peer = set()
    for (one, first), (two, second) in combinations(enumerate(handles), 2):
        joined = False
        with suppress(nvml.NVMLError):
            joined = joined_by_nvlink(nvml, first, second)
        level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", first, second)
        links[one, two] = "NVLink" if joined else _LEVELS.get(level, "?")
        peer = _ask(nvml, "nvmlDeviceGetP2PStatus", first, second, _READ)
        if not joined and peer not in (None, nvml.NVML_P2P_STATUS_OK):
            no_peer.add((one, two))
    cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    return Gpus(
        source="NVML",
        nvml_installed=True,
        driver=_text(_ask(nvml, "nvmlSystemGetDriverVersion")) or None,
        cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        gpus=tuple(_nvml_gpu(nvml, index, handle, root) for index, handle in enumerate(handles)),
        links=links,
        no_peer=frozenset(no_peer),
    )


def _nvml_gpu(nvml: Any, index: int, handle: Any, root: Path) -> Gpu:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    mig = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    ecc = _ask(nvml, "nvmlDeviceGetEccMode", handle)
    place = _ask(nvml, "nvmlDeviceGetPciInfo", handle)
    remapped = _ask(nvml, "nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    corrected, uncorrected = (
        _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, kind, nvml.NVML_VOLATILE_ECC)
        for kind in (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    )
    return Gpu(
        index=index,
        name=_text(_ask(nvml, "nvmlDeviceGetName", handle)),
        uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", handle)),
        memory_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        mig=None if mig is None else bool(mig[0]),
        mig_instances=_mig_instances(nvml, handle) if mig and mig[0] else 0,
        ecc=None if ecc is None else bool(ecc[0]),
        corrected_errors=corrected,
        uncorrected_errors=uncorrected,
        remap_pending=bool(remapped[2]),
        remap_failed=bool(remapped[3]),
        nvlinks=active_links(nvml, handle),
        numa=None if place is None else _numa(_text(place.busId), root),
    )


def _mig_instances(nvml: Any, handle: Any) -> int:
    most = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    found = (_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index) for index in range(most))
    return sum(instance is not None for instance in found)


def _ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """NVML's answer; None where the GPU, the driver or the Python module does not know the question."""
    try:
        return getattr(nvml, question)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _numa(bus_id: str, root: Path) -> int | None:
    """NUMA node of ``00000000:4E:00.0``; the kernel's own names have four digits of the domain."""
    domain, _, rest = bus_id.lower().partition(":")
    return numa_of(root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}") if rest else None


def _ask_smi(files: Gpus) -> Gpus | None:
    """GPUs by nvidia-smi; None where it is not there or does not answer in time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    answers: list[str] = []
    query = ["--query-gpu=" + ",".join(SMI_COLUMNS), "--format=csv,noheader,nounits"]
    for arguments in (query, ["topo", "-m"]):
        try:
            done = subprocess.run(
                [program, *arguments],
                capture_output=True, text=True, errors="replace", timeout=_SMI_LIMIT_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return replace(files, problem=f"nvidia-smi: {error}")
        if done.returncode != 0 and not answers:
            said = (done.stdout + done.stderr).strip().splitlines()
            return replace(files, problem=said[0] if said else f"nvidia-smi ended with exit code {done.returncode}")
        answers.append(done.stdout)
    return from_smi(answers[0], answers[1], open_driver=files.open_driver)


def from_smi(table: str, topology: str, *, open_driver: bool = False, root: Path = Path("/")) -> Gpus:
    """GPUs of the lines that nvidia-smi gives for SMI_COLUMNS, and links of what ``nvidia-smi topo -m`` prints."""
    gpus = []
    driver = None
    for line in table.splitlines():
        cells = dict(zip(SMI_COLUMNS, (cell.strip() for cell in line.split(",")), strict=False))
        if not cells.get("index", "").isdigit() or len(cells) < len(SMI_COLUMNS):
            continue
        driver = cells["driver_version"]
        gpus.append(
            Gpu(
                index=int(cells["index"]),
                name=cells["name"],
                uuid=cells["uuid"],
                memory_bytes=_mebibytes(cells["memory.total"]),
                used_bytes=_mebibytes(cells["memory.used"]),
                mig=_switch(cells["mig.mode.current"]),
                ecc=_switch(cells["ecc.mode.current"]),
                corrected_errors=_number(cells["ecc.errors.corrected.volatile.total"]),
                uncorrected_errors=_number(cells["ecc.errors.uncorrected.volatile.total"]),
                numa=_numa(cells["pci.bus_id"], root),
            )
        )
    return Gpus(
        source="nvidia-smi", driver=driver, open_driver=open_driver, gpus=tuple(gpus), links=_smi_links(topology)
    )


def _smi_links(text: str) -> dict[Pair, Link]:
    """Links of a matrix whose lines are ``GPU0  X  NV18  SYS ...``."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = {}
    for line in plain.splitlines():
        words = line.split()
        if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and "X" in words[1:]:
            rows[int(words[0][3:])] = words[1:]
    links: dict[Pair, Link] = {}
    for one, two in combinations(sorted(rows), 2):
        word = rows[one][two] if two < len(rows[one]) else ""
        links[one, two] = "NVLink" if re.fullmatch(r"NV\d+", word) else _WORDS.get(word, "?")
    return links


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * 2**20


def _switch(text: str) -> bool | None:
    return {"enabled": True, "disabled": False}.get(text.lower())


def from_driver_files(root: Path = Path("/")) -> Gpus:
    """What the driver's files in ``/proc`` and the device files in ``/dev`` name: models, but no links and no state."""
    version = file_text(root / "proc/driver/nvidia/version")
    common = Gpus(
        driver=driver_version(version), open_driver="Open Kernel Module" in version, on_bus=_on_bus(root)
    )  # fmt: skip
    gpus: list[Gpu] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        lines = (line.partition(":") for line in file_text(folder / "information").splitlines())
        known = {name.strip(): value.strip() for name, _, value in lines}
        gpus.append(
            Gpu(
                index=len(gpus),
                name=known.get("Model", ""),
                uuid=known.get("GPU UUID", ""),
                numa=_numa(folder.name, root),
            )
        )
    devices = sorted(path for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    if devices and len(devices) < len(gpus):  # a container sees the driver's files of all, and the devices it was given
        gpus = []
    if gpus:
        return replace(common, source="/proc", gpus=tuple(gpus))
    if devices:
        return replace(common, source="/dev", gpus=tuple(Gpu(index=index) for index in range(len(devices))))
    return common


def _on_bus(root: Path) -> int:
    """NVIDIA's display and 3D controllers on the PCI bus, whether a driver has them or not."""
    devices = (root / "sys/bus/pci/devices").glob("*")
    return sum(
        file_text(device / "vendor").strip() == "0x10de" and file_text(device / "class").startswith("0x03")
        for device in devices
    )
