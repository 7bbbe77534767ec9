"""The package as users get it: wheel and sdist, one top-level name, data files inside, ranges instead of pins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = ("smoke", "demo", "qwen3-0.6b", "qwen3-8b", "qwen3-32b")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel made from it (as an installer would), built without network from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    script = (
        "import sys, os; from setuptools import build_meta as b; os.chdir(sys.argv[1]);"
        "print(getattr(b, 'build_' + sys.argv[3])(sys.argv[2]))"
    )

    def build(folder: Path, kind: str) -> Path:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(folder), str(out), kind],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return out / done.stdout.strip().splitlines()[-1]

    clone = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, clone / name
        if not os.path.lexists(source):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            target.write_bytes(source.read_bytes())
    sdist = build(clone, "sdist")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(unpacked, filter="data")
        else:
            archive.extractall(unpacked)
    return {"sdist": sdist, "wheel": build(next(unpacked.iterdir()), "wheel")}


def test_wheel_holds_one_top_level_package_and_its_data(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"relaymeter"}
    assert "relaymeter/py.typed" in names
    for scenario in SCENARIOS:
        assert f"relaymeter/harness/scenarios/{scenario}.toml" in names
    assert "relaymeter/harness/presets/h100-16x8.toml" in names
    assert "relaymeter/harness/suites/ci.toml" in names
    for room in ("relayout", "calibration", "policies", "harness"):
        modules = {f"relaymeter/{room}/{path.name}" for path in (ROOT / room).glob("*.py")}
        assert modules <= set(names), f"missing from the wheel: {sorted(modules - set(names))}"


@pytest.mark.timeout(240)
def test_installed_wheel_runs_from_elsewhere(built: dict[str, Path], tmp_path: Path) -> None:
    """A fresh environment that sees this one's dependencies, but not its relaymeter: only the wheel can answer."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    site = next((venv / "lib").glob("python*/site-packages"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-warn-conflicts",
         "--ignore-installed", "--target", str(site), str(built["wheel"])],
        check=True, timeout=100, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )  # fmt: skip
    outer = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = (
        f"import sys; sys.path.append({str(outer)!r})\n"
        "import relaymeter, runpy, pathlib\n"
        f"assert pathlib.Path(relaymeter.__file__).is_relative_to({str(site)!r}), relaymeter.__file__\n"
        "sys.argv = ['relaymeter', *sys.argv[1:]]\n"
        "runpy.run_module('relaymeter', run_name='__main__')\n"
    )
    for arguments, expected in (
        (["--help"], "calibrate"),
        (["plan", "--scenario", "smoke", "--topology", "2x2"], "tp1"),
    ):
        done = subprocess.run(
            [str(venv / "bin" / "python"), "-c", script, *arguments],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_pyproject_gives_ranges_and_the_lock_file_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(entry for extra in extras.values() for entry in extra)]
    assert not [entry for entry in wanted if "==" in entry.partition(";")[0]]
    assert any(entry.startswith("torch>=") and "<" not in entry for entry in wanted), "a user's torch must stay"
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lock if line and not line.startswith("#")]
    assert all(re.match(r"[A-Za-z0-9_.-]+==\S+", line) for line in pins)
    pinned = {re.split(r"==", line)[0].lower().replace("_", "-") for line in pins}
    wanted = [entry for entry in wanted if entry not in extras["peers"]]  # needs CUDA, so make setup leaves it out
    names = {re.split(r"[<>=;\s\[]", entry)[0].lower() for entry in wanted}
    assert names <= pinned, f"not locked: {sorted(names - pinned)}"
    assert not [line for line in pins if re.match(r"nvidia-|cuda-", line)]
