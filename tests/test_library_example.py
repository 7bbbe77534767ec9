"""The program in docs/library.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs" / "library.md"


def test_the_program_in_the_documentation_moves_every_bit(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    script = tmp_path / "move.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "6 of 6 digests equal, 2361344 bytes between nodes" in ended.stdout
