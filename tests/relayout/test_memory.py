from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relaymeter.relayout import memory
from relaymeter.relayout.memory import PeakMemory


def test_the_peak_counts_what_was_held_and_let_go() -> None:
    size = 64 << 20
    with PeakMemory() as peak:
        held = torch.ones(size, dtype=torch.uint8)
        del held
    if peak.bytes is None:
        pytest.skip("this kernel does not let a process reset its high-water mark")
    assert 0.95 * size < peak.bytes < 1.5 * size
    with PeakMemory() as peak:
        pass
    assert peak.bytes is not None
    assert peak.bytes < size / 4


def test_no_kernel_figure_is_none_not_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    with PeakMemory() as peak:
        pass
    assert peak.bytes is None
