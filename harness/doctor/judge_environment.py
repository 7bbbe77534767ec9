"""Findings about the environment: the launcher, settings that cost or mislead, and which variables are set. Pure.

``environment_findings(environment, gpus)``. Of all variables only those of ``_PREFIXES`` and ``_NAMES`` are ever shown.
Where a name says that it holds a secret, neither name nor value is; a value that may hold a path or a name is shown by
its hash, one that looks like a key not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from relaymeter.calibration.fingerprint import is_secret, plain_setting
from relaymeter.errors import InputError
from relaymeter.harness.doctor.facts import Gpus
from relaymeter.harness.doctor.findings import Finding, State
from relaymeter.harness.doctor.judge_gpus import VISIBLE, visible
from relaymeter.harness.launch import already_in_world
from relaymeter.units import counted

__all__ = ["environment_findings", "shown_variables"]

_PREFIXES = ("NCCL_", "GLOO_", "RELAYMETER_", "TORCH_NCCL_")
_NAMES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "DS_ACCELERATOR",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
)  # fmt: skip
#: What looks like a key, whatever its variable is called: a long run of letters and digits, or a known beginning.
_LIKE_SECRET = re.compile(r"(?=[A-Za-z0-9_]*[A-Za-z])(?=[A-Za-z0-9_]*[0-9])[A-Za-z0-9_]{20,}")
_BEGINNINGS = ("hf_", "ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "sk-", "AKIA", "ASIA", "xox", "eyJ")
_HIDDEN = "not shown"

#: Settings that slow or mislead where they are on: name, what that does.
_COSTLY: tuple[tuple[str, str], ...] = (
    ("NCCL_P2P_DISABLE", "GPUs of a node do not reach each other directly, whatever NVLink joins"),
    ("NCCL_SHM_DISABLE", "ranks of a node without peer access exchange through the network"),
    ("CUDA_LAUNCH_BLOCKING", "every kernel is waited for: packing and digest look slower than they are"),
    ("NCCL_BLOCKING_WAIT", "every collective is waited for by the process"),
    ("TORCH_NCCL_BLOCKING_WAIT", "every collective is waited for by the process"),
)
_DEVICE, _DEVICES = "RELAYMETER_DEVICE", ("auto", "cpu", "cuda")


def environment_findings(environment: Mapping[str, str], gpus: Gpus | None) -> list[Finding]:
    """Findings of the group environment. ``gpus``: None where they are not known."""
    return [_launcher(environment), *_settings(environment, gpus), _variables(environment)]


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be shown, by name, with what of their values may be."""
    return {
        name: _shown(value)
        for name, value in sorted(environment.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and not is_secret(name)
    }


def _shown(value: str) -> str:
    if value.startswith(_BEGINNINGS) or _LIKE_SECRET.search(value):
        return _HIDDEN
    return plain_setting(value)


def _launcher(environment: Mapping[str, str]) -> Finding:
    key = "environment.launcher"
    try:
        hint = already_in_world(environment)
    except InputError as error:
        mend = ("unset RANK WORLD_SIZE",)
        return Finding(key, State.FAULT, str(error), "no command that starts ranks works here", mend)
    if hint is None:
        text = "none: relaymeter starts the ranks itself, on this machine"
        return Finding(key, State.OK, text, values={"launcher": None})
    values = {"launcher": hint.launcher, "rank": hint.rank, "world_size": hint.world_size}
    text = f"{hint.launcher}: rank {hint.rank} of {hint.world_size}"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        means = f"without {' and '.join(missing)} the ranks cannot meet"
        mend = ("export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500",)
        return Finding(key, State.FAULT, text, means, mend, values)
    return Finding(key, State.OK, text, values=values)


def _settings(environment: Mapping[str, str], gpus: Gpus | None) -> Iterator[Finding]:
    key, found = "environment.settings", 0
    for name, does in _COSTLY:
        if environment.get(name, "0").strip() not in ("", "0", "false", "False"):
            found += 1
            yield Finding(key, State.WARNING, f"{name} is set", does, (f"unset {name}",), {"name": name})
    if environment.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        found += 1
        means = "every rank writes many lines while it is timed"
        yield Finding(key, State.NOTE, "NCCL_DEBUG is set", means, ("unset NCCL_DEBUG",), {"name": "NCCL_DEBUG"})
    device = environment.get(_DEVICE, _DEVICES[0])
    there = gpus is None or bool(visible(environment.get(VISIBLE), gpus.gpus)[0])
    unset, named = (f"unset {_DEVICE}",), {"name": _DEVICE}
    if device not in _DEVICES or (device == "cuda" and not there):
        found += 1
        text = f"{_DEVICE} is not one of: {', '.join(_DEVICES)}"
        text = text if device not in _DEVICES else f"{_DEVICE}=cuda, and no GPU is visible"
        yield Finding(key, State.FAULT, text, "ranks are refused", unset, named)
    elif device == "cpu" and gpus is not None and gpus.gpus:
        found += 1
        yield Finding(key, State.NOTE, f"{_DEVICE}=cpu", "ranks leave the GPUs alone", unset, named)
    if not found:
        yield Finding(key, State.OK, "none that slows or misleads")


def _variables(environment: Mapping[str, str]) -> Finding:
    shown = shown_variables(environment)
    text = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none that matters is set"
    means = ""
    if any(value == _HIDDEN or value.startswith("sha256:") for value in shown.values()):
        means = "what may hold a path or a secret is hidden"
    count = sum(name.startswith(("NCCL_", "TORCH_NCCL_")) for name in shown)
    if count:
        means = "; ".join(filter(None, [f"{counted(count, 'setting')} of NCCL: set alike on all ranks", means]))
    return Finding("environment.variables", State.OK, text, means, values={"variables": shown})
