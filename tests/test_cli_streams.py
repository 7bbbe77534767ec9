"""The command line's standard streams: full, closed, and cut off by Ctrl-C while modules are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = ["plan", "--scenario", "smoke", "--topology", "2x2"]


@pytest.mark.parametrize("json_too", [(), ("--json", "-")])
def test_a_full_disk_behind_standard_output_is_one_line_and_no_success(json_too: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "relaymeter", *PLAN, *json_too],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith(": No space left on device")


@pytest.mark.parametrize("module", ["pydantic", "numpy", "relaymeter.harness.commands_plan"])
@pytest.mark.parametrize("start", ["-m", "-c"])
def test_an_interrupt_while_modules_are_imported_is_one_line(module: str, start: str, tmp_path: Path) -> None:
    """Both ways in: ``python -m relaymeter``, and what the installed script does."""
    hook = (
        "import sys\nclass Stop:\n    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n            raise KeyboardInterrupt\nsys.meta_path.insert(0, Stop())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hook)
    what = "relaymeter" if start == "-m" else "import sys; from relaymeter.harness.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, start, what, *PLAN],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "relaymeter: interrupted\n")


@pytest.mark.parametrize("closed", [(2,), (1, 2), (0, 1, 2)])
def test_a_stream_that_is_closed_at_the_start_is_the_null_device(closed: tuple[int, ...], tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys\n"
        "from relaymeter.harness.cli import main\n"
        "code = main(sys.argv[2:])\n"
        "print('heard by nobody', file=sys.stderr, flush=True)\n"
        'child = \'import os, sys; print(os.readlink("/proc/self/fd/1"), file=open(sys.argv[1], "w"))\'\n'
        "subprocess.run([sys.executable, '-c', child, sys.argv[1]], stdout=2, check=True)\n"
        "sys.exit(code)"
    )
    shell = 'exec "$@"' + "".join(f" {number}>&-" for number in closed)
    note, plan = tmp_path / "note", tmp_path / "plan.json"
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", program, str(note), *PLAN, "--json", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert note.read_text() == "/dev/null\n"
    assert json.loads(plan.read_text())
