"""Findings about what is installed: package, torch, CUDA, driver, NCCL and DeepSpeed. Pure.

``software_findings(software, gpus)`` takes the facts of both, as a CUDA build matters where there are GPUs only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from relaymeter.harness.doctor.facts import Gpus, Software
from relaymeter.harness.doctor.findings import Finding, State

__all__ = ["software_findings", "version_numbers"]

_LEAST_TORCH = (2, 9)
#: The DeepSpeed that this package is tested with, and up to which ZeRO-3 over some of the ranks hangs.
_DEEPSPEED = (0, 19, 8)
#: The newest transformers with which AutoEP is tested, and the first with which it is known to fail.
_TRANSFORMERS, _NO_AUTOEP = (5, 17, 0), (5, 23)
#: The oldest driver that runs a major version of CUDA.
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
_INSTALL = "pip install 'relaymeter[deepspeed]'"
_OF_CUDA = "pip install --force-reinstall --index-url https://pypi.org/simple torch  # on Linux built for CUDA"


def version_numbers(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``2.13.0+cpu`` is (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def software_findings(software: Software, gpus: Gpus) -> list[Finding]:
    """Findings of the groups package, torch, cuda and deepspeed."""
    return [
        Finding("package.relaymeter", State.OK, software.relaymeter, values={"version": software.relaymeter}),
        Finding("package.python", State.OK, software.python, values={"version": software.python}),
        _triton(software, gpus),
        _compiler(software),
        _torch(software),
        *_cuda_build(software, gpus),
        _driver(software, gpus),
        *_nvml(gpus),
        *_nccl(software, gpus),
        *_deepspeed(software),
    ]


def _triton(software: Software, gpus: Gpus) -> Finding:
    values = {"version": software.triton}
    if software.triton is not None:
        return Finding("package.triton", State.OK, software.triton, values=values)
    if gpus.gpus:
        means = "packing and digest on GPUs go by torch's own copies and sums, many times slower"
        return Finding("package.triton", State.WARNING, "not installed", means, ("pip install triton",), values)
    return Finding("package.triton", State.OK, "not installed, and not needed without a GPU", values=values)


def _compiler(software: Software) -> Finding:
    values = {"gxx": software.compiler, "ninja": software.ninja}
    missing = [name for name, there in (("g++", software.compiler), ("ninja", software.ninja)) if not there]
    if not missing:
        return Finding("package.compiler", State.OK, "g++ and ninja are there", values=values)
    text = f"{' and '.join(missing)} not found"
    if software.deepspeed is None:
        return Finding("package.compiler", State.OK, f"{text}, and not needed without DeepSpeed", values=values)
    means = "DeepSpeed compiles some of its operators when they are first used: that fails"
    mend = ("apt-get install g++", "pip install ninja")
    return Finding("package.compiler", State.WARNING, text, means, mend, values)


def _torch(software: Software) -> Finding:
    values = {"version": software.torch, "build": software.torch_build}
    if software.torch is None:
        means = "choose, plan and report work; whatever starts ranks does not"
        return Finding("torch.version", State.FAULT, "not installed", means, ("pip install 'torch>=2.9'",), values)
    if version_numbers(software.torch) < _LEAST_TORCH:
        mend = ("pip install 'torch>=2.9'",)
        return Finding("torch.version", State.WARNING, software.torch, "older than what is tested: 2.9", mend, values)
    if software.torch_build:
        text = f"{software.torch}, built for {software.torch_build}"
        return Finding("torch.version", State.NOTE, text, "on GPUs only builds for CUDA are tested", values=values)
    return Finding("torch.version", State.OK, software.torch, values=values)


def _cuda_build(software: Software, gpus: Gpus) -> Iterator[Finding]:
    if software.torch is None:
        return
    key, build = "torch.cuda_build", software.torch_cuda
    values = {"cuda_version": build}
    if build is None and gpus.gpus:
        means = "ranks use no GPU: they meet over gloo, and what moves lies in the memory of the host"
        yield Finding(key, State.FAULT, "built without CUDA, on a machine with GPUs", means, (_OF_CUDA,), values)
    elif build is None:
        yield Finding(key, State.OK, "built without CUDA, as this machine has no GPU", values=values)
    elif gpus.gpus:
        yield Finding(key, State.OK, f"CUDA {build}", values=values)
    else:
        yield Finding(key, State.OK, f"CUDA {build}, on a machine without a GPU", values=values)


def _driver(software: Software, gpus: Gpus) -> Finding:
    key = "cuda.driver"
    offered = None if gpus.cuda is None else f"{gpus.cuda[0]}.{gpus.cuda[1]}"
    values = {"version": gpus.driver, "open_kernel_modules": gpus.open_driver, "cuda_version": offered}
    if gpus.driver is None:
        if gpus.gpus:
            means = "which CUDA version it runs is not known"
            return Finding(key, State.NOTE, "its version is not told here", means, ("nvidia-smi",), values)
        return Finding(key, State.OK, "no NVIDIA driver, as this machine shows no GPU", values=values)
    text = gpus.driver + (f", up to CUDA {offered}" if offered else "") + (", open modules" if gpus.open_driver else "")
    wanted = version_numbers(software.torch_cuda or "")
    if not wanted:
        return Finding(key, State.OK, text, values=values)
    least = _LEAST_DRIVER.get(wanted[0])
    too_old = gpus.cuda[0] < wanted[0] if gpus.cuda else least is not None and version_numbers(gpus.driver) < (least,)
    if too_old:
        means = f"torch is built for CUDA {software.torch_cuda}, which this driver does not run"
        mend = [f"update the driver to {least} or newer"] if least else []
        mend.append(f"or install a torch built for CUDA {offered or 'of this driver'} or older")
        return Finding(key, State.FAULT, text, means, tuple(mend), values)
    return Finding(key, State.OK, text, values=values)


def _nvml(gpus: Gpus) -> Iterator[Finding]:
    values = {"installed": gpus.nvml_installed, "source": gpus.source}
    if gpus.problem is not None:
        low = gpus.problem.lower()
        mend = "reboot, or unload and load the nvidia modules again: the driver was updated while it ran"
        if "not loaded" in low or "communicate" in low:
            mend = "modprobe nvidia, and see dmesg for why it was not loaded"
        elif "mismatch" not in low:
            mend = "nvidia-smi, and see dmesg for messages that begin with NVRM"
        means = "the driver does not answer: torch will most likely see no GPU either"
        yield Finding("cuda.nvml", State.FAULT, gpus.problem, means, (mend,), values)
    elif gpus.gpus and gpus.source != "NVML":
        poor = gpus.source in ("/proc", "/dev")
        lacks = "memory, links, MIG and ECC are not known" if poor else "peer access and remapped memory are not known"
        text = f"GPUs were found by {gpus.source}"
        state = State.WARNING if poor else State.NOTE
        yield Finding("cuda.nvml", state, text, lacks, ("pip install nvidia-ml-py",), values)


def _nccl(software: Software, gpus: Gpus) -> Iterator[Finding]:
    values = {"version": software.nccl}
    if software.nccl is not None:
        yield Finding("cuda.nccl", State.OK, f"{software.nccl}, beside torch", values=values)
    elif software.torch_cuda is not None:
        means = "torch brings its own, or takes the system's: NCCL_DEBUG=VERSION shows which when ranks meet"
        yield Finding("cuda.nccl", State.NOTE, "no package of it is installed", means, values=values)
    elif not gpus.gpus:
        yield Finding(
            "cuda.nccl", State.OK, "none, as torch is built without CUDA: ranks meet over gloo", values=values
        )


def _deepspeed(software: Software) -> Iterator[Finding]:
    version = software.deepspeed
    values = {"version": version, "tested_version": ".".join(map(str, _DEEPSPEED))}
    if version is None:
        means = "run and compare train with it; calibrate, choose, plan, report, soak and track do without"
        yield Finding("deepspeed.version", State.NOTE, "not installed", means, (_INSTALL,), values)
        return
    numbers = version_numbers(version)
    if numbers < _DEEPSPEED:
        means = f"older than what is tested ({values['tested_version']}): engines may not start"
        yield Finding("deepspeed.version", State.WARNING, version, means, (_INSTALL,), values)
    elif numbers > _DEEPSPEED:
        means = f"newer than what is tested ({values['tested_version']}): what it changed is not known here"
        yield Finding("deepspeed.version", State.NOTE, version, means, values=values)
    else:
        yield Finding("deepspeed.version", State.OK, version, values=values)
    subset = {"version": version, "mended_up_to": values["tested_version"]}
    if numbers <= _DEEPSPEED:
        text = f"{version} hangs where a ZeRO-3 engine has some of the ranks only"
        means = "relaymeter mends that for the engines it starts; your own need it too"
        mend = ("with relaymeter.relayout.subgroup.subgroup_engines(): ...  # on every rank, while they train",)
        yield Finding("deepspeed.subset", State.NOTE, text, means, mend, subset)
    yield _autoep(software.transformers)


def _autoep(transformers: str | None) -> Finding:
    key = "deepspeed.autoep"
    values = {"transformers_version": transformers, "tested_version": ".".join(map(str, _TRANSFORMERS))}
    mend = (f"pip install 'transformers<={values['tested_version']}'",)
    if transformers is None:
        means = "scenarios with models of transformers (AutoTP, AutoEP) cannot run"
        return Finding(key, State.NOTE, "transformers is not installed", means, (_INSTALL,), values)
    numbers = version_numbers(transformers)
    if numbers >= _NO_AUTOEP:
        means = "DeepSpeed's AutoEP fails with transformers from 5.23 on, in its output recorders"
        return Finding(key, State.WARNING, f"transformers {transformers}", means, mend, values)
    if numbers > _TRANSFORMERS:
        means = f"AutoEP is tested up to {values['tested_version']} and fails from 5.23 on; between is not known"
        return Finding(key, State.NOTE, f"transformers {transformers}", means, mend, values)
    return Finding(key, State.OK, f"transformers {transformers} suits it", values=values)
