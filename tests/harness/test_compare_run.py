"""Real comparisons on two ranks: every path, the checkpoints' second world, the journal, wrong bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relaymeter.compare_records import CompareRecord
from relaymeter.row_files import read_rows

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

SCENARIO = """
kind = "compare"
training = { model = "blocks", layers = 1, width = 16, steps = 1, seed = 3 }
[[changes]]
name = "smaller"
source = { stage = 3, ranks = 2 }
destination = { stage = 3, ranks = [1] }
[[changes]]
name = "copies"
source = { stage = 3, ranks = [0] }
replicas = { ranks = 2, tensor_parallel = 2 }
"""


def rows_of(path: Path) -> list[CompareRecord]:
    return [row for row in read_rows(path) if isinstance(row, CompareRecord)]


def test_every_path_brings_the_same_bits_and_leaves_no_checkpoint(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SCENARIO)
    (tmp_path / "kept").mkdir()
    command = [
        "compare",
        "--scenario",
        "mine.toml",
        "--storage",
        f"disk={tmp_path / 'kept'}",
        "--journal",
        "rows.jsonl",
    ]
    done = cli(*command, "--results", "results", limit_s=220, warm=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "rows.jsonl")
    assert list(dict.fromkeys(row.change for row in rows)) == ["smaller", "copies"]
    verdicts = {(row.change, row.path): row.verdict for row in rows}
    assert {key for key, verdict in verdicts.items() if verdict == "cannot"} == {
        ("smaller", "megatron"), ("copies", "megatron"), ("copies", "universal"),
    }  # fmt: skip
    for row in rows:
        assert row.cannot or (row.ok and row.digest_passed == row.digest_total > 0), row
        if row.verdict == "ok":
            assert row.build_s is not None and row.digest_s is not None and row.pause_s is not None
    by = {(row.change, row.path, row.cache): row for row in rows}
    caches = {row.cache for row in rows if row.path == "dcp"}
    memory, dcp = by["smaller", "in-memory", None], by["smaller", "dcp", "warm" if "warm" in caches else None]
    assert memory.relaunch_s is None and memory.move_s and memory.plan_s
    assert dcp.relaunch_s and dcp.import_s and dcp.load_s and dcp.written_bytes and dcp.written_bytes > dcp.state_bytes
    assert (memory.digest_total, by["copies", "in-memory", None].digest_total) == (dcp.digest_total, 2 * 12 - 3)
    assert list((tmp_path / "kept").iterdir()) == []
    assert len(list((tmp_path / "results").glob("*/*_compare-mine/rows.jsonl"))) == 1

    again = cli(*command, "--json", "again.jsonl", limit_s=30, warm=True)
    assert again.returncode == 0 and "smaller, launch 1: in rows.jsonl already" in again.stdout
    assert rows_of(tmp_path / "again.jsonl") == rows


def test_a_wrong_bit_is_said_first_and_is_the_exit_code(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SCENARIO)
    done = cli(
        "compare", "--scenario", "mine.toml", "--change", "smaller", "--paths", "in-memory,gather", "--fault", "flip:1",
        "--storage", f"disk={tmp_path}", "--json", "rows.jsonl", limit_s=120, warm=True,
    )  # fmt: skip
    assert done.returncode == 6, done.stdout + done.stderr
    wrong, right = rows_of(tmp_path / "rows.jsonl")
    assert (wrong.path, wrong.verdict, wrong.digest_total - wrong.digest_passed) == ("in-memory", "wrong bits", 1)
    assert str(wrong.mismatch).startswith("weight ") and right.ok
    said = [line for line in done.stdout.splitlines() if not line.startswith(("  ", "smaller"))]
    assert said[0].startswith("WRONG BITS: smaller by in-memory: ")
