"""The exact metrics of the shipped suite ``ci``, as committed: ``python tests/harness/track/exact_metrics.py`` makes a
launch and writes them anew, for a change that is meant to move other bytes, messages, segments, rounds or bits."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("exact_ci.jsonl")
COMMAND = ("track", "run", "--suite", "ci", "--launches", "1", "--json", "-")

Exact = Mapping[str, Mapping[str, Any]]


def exact_of(launch: str) -> Exact:
    """By case the exact metrics of a launch, as ``track run --json -`` printed it."""
    return {case["name"]: case["exact"] for case in json.loads(launch)["cases"]}


def committed() -> Exact:
    lines = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return {line.pop("case"): line for line in lines}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # its history is of no use
        done = subprocess.run(
            [sys.executable, "-m", "relaymeter", *COMMAND], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
        )
    found = exact_of(done.stdout)
    lines = [json.dumps({"case": name, **exact}) + "\n" for name, exact in found.items()]
    FILE.write_text("".join(lines), encoding="utf-8")
    print(f"{FILE}: {len(found)} cases")
