"""The programs in the documentation run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("library.md", ["6 of 6 digests equal, 2361344 bytes between nodes"]),
        ("training-state.md", ["master, exp_avg, exp_avg_sq: ", "digests equal", "step 4 after the move, lr 0.000301"]),
    ],
)
def test_the_program_in_the_documentation_moves_every_bit(page: str, printed: list[str], tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    script = tmp_path / "move.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for text in printed:
        assert text in ended.stdout
