"""What is installed, by the packages' metadata and files: nothing is imported, no CUDA context is made.

``read_software()`` gives versions; torch's CUDA version stands in its ``version.py``.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
from pathlib import Path

from relaymeter import __version__
from relaymeter.calibration.devices import file_text
from relaymeter.calibration.fingerprint import nccl_package, package_version
from relaymeter.harness.doctor.facts import Software

__all__ = ["read_software", "torch_builds"]

_BUILD = re.compile(r"^(cuda|hip|rocm|xpu)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def read_software() -> Software:
    """Versions of this environment's packages. Local; imports none of them."""
    builds = torch_builds(_torch_version_file())
    return Software(
        python=platform.python_version(),
        relaymeter=__version__,
        torch=package_version("torch"),
        torch_cuda=builds.get("cuda"),
        torch_build=", ".join(f"{name} {value}" for name, value in builds.items() if name != "cuda"),
        nccl=nccl_package(),
        triton=package_version("triton"),
        deepspeed=package_version("deepspeed"),
        transformers=package_version("transformers"),
        compiler=shutil.which("g++") is not None,
        ninja=shutil.which("ninja") is not None or package_version("ninja") is not None,
    )


def torch_builds(text: str) -> dict[str, str]:
    """What torch's ``version.py`` says it was built for: ``{"cuda": "12.8"}``; empty for a build for CPUs. Pure."""
    return dict(_BUILD.findall(text))


def _torch_version_file() -> str:
    found = importlib.util.find_spec("torch")  # finds a package of the top level without importing it
    if found is None or found.origin is None:
        return ""
    return file_text(Path(found.origin).parent / "version.py")
