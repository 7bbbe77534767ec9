"""The soak on devices: labels made and compared where they are, and the whole command over NCCL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relaymeter.calibration.label_tensors import LabelTensors
from relaymeter.calibration.labels import Message, label_words

pytestmark = pytest.mark.gpu


def test_labels_are_made_and_compared_on_the_device() -> None:
    device = torch.device("cuda")
    tensors, message = LabelTensors(device), Message(3, 1, 40)
    made = torch.zeros((300 << 20) + 4080, dtype=torch.uint8, device=device)  # more than is compared at once
    tensors.write(message, made)
    units = np.array([0, 1, 16383, 16384, 1 << 24, made.numel() // 16 - 1])
    there = torch.from_numpy(units).to(device)
    found = made.view(torch.int64).view(-1, 2)[there].cpu().numpy().view(np.uint64)
    assert (found == label_words(message, units)).all()
    assert tensors.compare(message, made)[0] == 0
    made[(280 << 20) + 5] ^= 64
    count, odd, _ = tensors.compare(message, made)
    assert (count, odd.tolist()) == (1, [(280 << 20) // 16])


@pytest.mark.parametrize("fault", [None, "swap:1", "stale:0"])
def test_the_command_soaks_over_nccl(cli: Any, fault: str | None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a device for each of 2 ranks")
    options = [] if fault is None else ["--fault", fault]
    done = cli(
        "soak", "--seconds", "3", "--message", "512MiB", "--executor", "both", "--nodes", "1", "--ranks-per-node", "2",
        *options, limit_s=110,
    )  # fmt: skip
    assert done.returncode == (0 if fault is None else 6), done.stderr
    assert "over nccl" in done.stdout
    if fault is not None:
        origin = "another offset" if fault == "swap:1" else "earlier call"
        assert f"{origin}: " in done.stdout and "all on a grid of 128 KiB" in done.stdout
