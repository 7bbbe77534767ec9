"""Findings about GPUs: which there are, which of them ranks may use, their memory, MIG and ECC. Pure.

``gpu_findings(gpus, environment)``; ``visible(value, gpus)`` is what a value of CUDA_VISIBLE_DEVICES means in physical
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from relaymeter.harness.doctor.facts import Gpu, Gpus
from relaymeter.harness.doctor.findings import Finding, State
from relaymeter.units import counted, format_bytes

__all__ = ["VISIBLE", "gpu_findings", "numbers", "visible"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
#: What a driver and a display may hold of a GPU's memory.
_IDLE_BYTES = 2**30


def visible(value: str | None, gpus: Sequence[Gpu]) -> tuple[tuple[int, ...], str | None]:
    """Physical numbers of the GPUs that ``value`` of CUDA_VISIBLE_DEVICES shows, in its order, and what is wrong with
    it. As CUDA reads it: unset shows all, an entry that names none hides itself and what follows, and an entry that
    comes twice hides all. Entries are numbers in the order of the bus, or ids (``GPU-...``, also their beginnings)."""
    if value is None:
        return tuple(gpu.index for gpu in gpus), None
    found: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry in ("", "-1"):
            break
        if entry.startswith("MIG-"):
            return tuple(found), None  # an instance of some GPU: which one is CUDA's to know
        if entry.lstrip("+").isdigit():
            matches = [gpu.index for gpu in gpus if gpu.index == int(entry)]
        else:
            matches = [gpu.index for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            what = "several" if matches else "none"
            return tuple(found), f"its entry {entry[:16]} names {what} of the {counted(len(gpus), 'GPU')} here"
        if matches[0] in found:
            return (), f"its entry {entry[:16]} comes twice, which hides all"
        found += matches
    return tuple(found), None


def numbers(indices: Sequence[int]) -> str:
    """``GPU 3``, ``GPUs 0, 1``."""
    return f"GPU{'s' if len(indices) != 1 else ''} {', '.join(map(str, indices))}"


def gpu_findings(gpus: Gpus, environment: Mapping[str, str]) -> list[Finding]:
    """Findings of the group gpus."""
    if not gpus.gpus:
        values: dict[str, object] = {"count": 0, "source": gpus.source, "gpus": []}
        if gpus.problem is not None:
            means = "see NVML above"
            return [Finding("gpus.found", State.FAULT, "none that answers", means, values=values)]
        if gpus.on_bus and gpus.driver is None:
            text = f"none that can be used: {counted(gpus.on_bus, 'NVIDIA GPU')} on the PCI bus, no driver loaded"
            means = "ranks use no GPU until the driver is there"
            mends = ("modprobe nvidia  # as root; if it is not there, install the driver",)
            return [Finding("gpus.found", State.FAULT, text, means, mends, {**values, "on_bus": gpus.on_bus})]
        means = "ranks meet over gloo, and what moves lies in the memory of the host"
        mend: tuple[str, ...] = ()
        if gpus.driver is not None:
            means = "there is a driver, but no GPU is given to this process: " + means
            mend = ("docker run --gpus all ...", "srun --gpus-per-node 8 ...")
        state = State.WARNING if gpus.driver is not None else State.NOTE
        return [Finding("gpus.found", state, "none", means, mend, values)]
    shown, problem = visible(environment.get(VISIBLE), gpus.gpus)
    used = [gpu for gpu in gpus.gpus if gpu.index in shown] or gpus.gpus
    return [
        _found(gpus),
        _visible(gpus.gpus, shown, problem, environment),
        *_memory(used),
        *_mig(used),
        *_ecc(used),
    ]


def _models(gpus: Sequence[Gpu]) -> Counter[str]:
    return Counter(gpu.name or "model not known" for gpu in gpus)


def _found(gpus: Gpus) -> Finding:
    models = _models(gpus.gpus)
    text = f"{', '.join(f'{count} x {name}' for name, count in models.items())} (by {gpus.source})"
    values = {
        "count": len(gpus.gpus),
        "source": gpus.source,
        "gpus": [{"index": gpu.index, "name": gpu.name, "numa_node": gpu.numa} for gpu in gpus.gpus],
    }
    if len(models) > 1:
        means = "ranks are not alike: the slowest sets the pace of a round, and prices by class of link are coarser"
        return Finding("gpus.found", State.NOTE, text, means, values=values)
    return Finding("gpus.found", State.OK, text, values=values)


def _visible(gpus: Sequence[Gpu], shown: Sequence[int], problem: str | None, environment: Mapping[str, str]) -> Finding:
    key, value = "gpus.visible", environment.get(VISIBLE)
    values = {"physical_indices": list(shown), "set": value is not None, "device_order": environment.get(_ORDER)}
    if problem is not None:
        means = "CUDA hides the GPUs from there on: ranks get fewer than they count on"
        return Finding(key, State.FAULT, f"{VISIBLE}: {problem}", means, (f"unset {VISIBLE}",), values)
    if value is None:
        return Finding(key, State.OK, f"all {len(gpus)}", values=values)
    if "MIG-" in value:
        return Finding(key, State.NOTE, f"{VISIBLE} names MIG instances", "ranks share a GPU", values=values)
    if not shown:
        means = "ranks meet over gloo, and what moves lies in the memory of the host"
        return Finding(key, State.WARNING, f"none of {len(gpus)}", means, (f"unset {VISIBLE}",), values)
    text = f"{len(shown)} of {len(gpus)}: physical {numbers(shown)}, which torch counts from 0"
    if len(_models(gpus)) > 1 and environment.get(_ORDER) != "PCI_BUS_ID":
        means = "models differ, and CUDA then counts the fastest first, nvidia-smi by the bus: these may be others"
        return Finding(key, State.WARNING, text, means, (f"export {_ORDER}=PCI_BUS_ID",), values)
    return Finding(key, State.OK, text, values=values)


def _memory(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.memory_bytes is not None]
    if not known:
        return
    sizes = Counter(format_bytes(gpu.memory_bytes or 0) for gpu in known)
    text = ", ".join(f"{count} x {size}" if len(known) > 1 else size for size, count in sizes.items())
    values = {
        "gpus": [
            {"index": gpu.index, "total_bytes": gpu.memory_bytes, "used_bytes": gpu.used_bytes} for gpu in known
        ]
    }  # fmt: skip
    busy = [gpu for gpu in known if (gpu.used_bytes or 0) > _IDLE_BYTES]
    if busy:
        most = max(gpu.used_bytes or 0 for gpu in busy)
        text += f"; in use on {numbers([gpu.index for gpu in busy])}, up to {format_bytes(most)}"
        means = "another process works there: what is measured now holds only beside it"
        yield Finding("gpus.memory", State.WARNING, text, means, ("nvidia-smi  # which processes",), values)
    else:
        yield Finding("gpus.memory", State.OK, f"{text}, not in use", values=values)


def _mig(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.mig is not None]
    if not known:
        return
    on = [gpu.index for gpu in known if gpu.mig]
    values = {"gpus": [{"index": gpu.index, "enabled": gpu.mig, "instances": gpu.mig_instances} for gpu in known]}
    if on:
        means = "instances have neither NVLink nor peer access, and NCCL takes one of each GPU only"
        mend = (f"nvidia-smi -i {','.join(map(str, on))} -mig 0  # as root, with nothing running there",)
        yield Finding("gpus.mig", State.WARNING, f"on, on {numbers(on)}", means, mend, values)
    else:
        yield Finding("gpus.mig", State.OK, "off", values=values)


def _ecc(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.ecc is not None]
    if not known:
        return
    values = {
        "gpus": [
            {
                "index": gpu.index, "enabled": gpu.ecc, "corrected_errors": gpu.corrected_errors,
                "uncorrected_errors": gpu.uncorrected_errors, "remap_pending": gpu.remap_pending,
                "remap_failed": gpu.remap_failed,
            }
            for gpu in known
        ]
    }  # fmt: skip

    def those(wanted: Callable[[Gpu], object]) -> list[int]:
        return [gpu.index for gpu in known if wanted(gpu)]

    failed, pending = those(lambda gpu: gpu.remap_failed), those(lambda gpu: gpu.remap_pending)
    wrong, off = those(lambda gpu: gpu.uncorrected_errors), those(lambda gpu: not gpu.ecc)
    if failed:
        text = f"{numbers(failed)} could not replace broken memory"
        mend = ("nvidia-smi -q -d ROW_REMAPPER  # for whoever replaces it",)
        yield Finding("gpus.ecc", State.FAULT, text, "take it out of service", mend, values)
    elif wrong or pending:
        text = f"uncorrected errors on {numbers(wrong)}" if wrong else f"memory of {numbers(pending)} waits for a reset"
        means = "a process that reads such memory is ended, or gets wrong bits"
        which = ",".join(map(str, wrong or pending))
        mend = (f"nvidia-smi -i {which} --gpu-reset  # as root, with nothing running there",)
        yield Finding("gpus.ecc", State.FAULT if wrong else State.WARNING, text, means, mend, values)
    elif off:
        means = "a flipped bit of memory goes unseen: a digest that fails may be its fault"
        mend = (f"nvidia-smi -i {','.join(map(str, off))} -e 1  # as root, then reboot",)
        yield Finding("gpus.ecc", State.NOTE, f"off, on {numbers(off)}", means, mend, values)
    else:
        corrected = sum(gpu.corrected_errors or 0 for gpu in known)
        text = "on, no error" if not corrected else f"on, {counted(corrected, 'corrected error')}, none uncorrected"
        yield Finding("gpus.ecc", State.OK, text, values=values)
