"""``relaymeter.Sync``: a live trainer's weights into a layout and into another engine, bit for bit, at every call."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]


def test_copies_and_engines_follow_a_trainer(ranks: Any) -> None:
    found = ranks(4).call("jobs_sync:follows", limit_s=100.0)
    for rank, each in enumerate(found):
        assert each["verified"] == [True, False, True]
        assert each["wrong"] == [] and each["once"] and each["addresses"]
        assert each["relayed"] == ["all-to-all", True]  # as the policy says: a norm crosses once for two ranks
        assert each["shape"] == [32, 25]
        assert "holds nothing of weight no.such" in each["nothing"]
        assert "the ranks are at different steps, by rank: [0, 1, 2, 3]" in each["apart"]
        assert "InputError: 3 of 4 ranks give a layout as destination" in each["mixed"]
        assert "InputError: no rank gave a destination" in each["neither"]
        assert "the trainer's layout is not the planned one any more" in each["rebuilt"]
        assert each["from"] == [2, 3]
        assert each["engine"] == [] and (each["held"] > 0) is (rank >= 2)
