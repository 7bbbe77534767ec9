"""The programs in the documentation run as they stand: one as torchrun starts it, one on ranks that are forked warm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nursery
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def program_of(page: str, folder: Path) -> Path:
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    script = folder / "documented_move.py"
    script.write_text(program)
    return script


@pytest.mark.dist
def test_the_program_in_the_documentation_moves_every_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command.append(str(program_of("library.md", tmp_path)))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, env=ENVIRONMENT, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "6 of 6 digests equal, 2361344 bytes between nodes" in ended.stdout


@pytest.mark.dist
@pytest.mark.parametrize(
    ("page", "texts"),
    [
        (
            "training-state.md",
            ("master, exp_avg, exp_avg_sq: ", "digests equal", "step 4 after the move, lr 0.000301"),
        ),
        (
            "training-loop.md",
            (
                "step 0: 67592 bytes, checked by digest, (1, 128)",
                "step 1: 67592 bytes, not checked",
                "step 2: 67592 bytes, checked by digest",
            ),
        ),
    ],
)
def test_the_programs_in_the_documentation_do_what_they_say(page: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    module = program_of(page, tmp_path).stem
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    ended = nursery.command([str(tmp_path), module], tmp_path, environment, 110.0, module="launched")
    assert ended.returncode == 0, ended.stderr[-3000:]
    for text in texts:
        assert text in ended.stderr  # where the launcher sends what rank 0 prints
