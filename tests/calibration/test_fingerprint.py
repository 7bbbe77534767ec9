from __future__ import annotations

from pathlib import Path

import pytest

from relaymeter.calibration import fingerprint
from relaymeter.calibration.fingerprint import environment_facts, machine_facts, world_facts
from relaymeter.relayout.topology import Topology


def test_settings_of_the_transports_are_taken_and_nothing_else() -> None:
    found = environment_facts(
        {
            "NCCL_P2P_DISABLE": "1", "GLOO_DEVICE_TRANSPORT": "TCP", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
            "NCCL_TOPO_FILE": "/home/me/topo.xml", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "nic0",
            "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/x", "NCCL_COMM_ID": "10.0.0.1:1", "NCCL_HOSTID": "a",
            "HOME": "/home/me", "MY_NCCL_THING": "1",
        }
    )  # fmt: skip
    assert set(found) == {"NCCL_P2P_DISABLE", "GLOO_DEVICE_TRANSPORT", "NCCL_IB_HCA", "NCCL_TOPO_FILE"}
    assert (found["NCCL_P2P_DISABLE"], found["NCCL_IB_HCA"]) == ("1", "=mlx5_0:1,mlx5_1:1")
    assert found["NCCL_TOPO_FILE"].startswith("sha256:") and "home" not in found["NCCL_TOPO_FILE"]


def test_values_that_differ_have_hashes_that_differ() -> None:
    one, two = (environment_facts({"NCCL_TOPO_FILE": f"/opt/{name}.xml"}) for name in ("a", "b"))
    assert one != two
    assert one == environment_facts({"NCCL_TOPO_FILE": "/opt/a.xml"})
    assert environment_facts({}) == {}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 22:50:36 UTC 2025\nGCC version: 12\n",
         "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("nothing\n", None),
        (None, None),
    ],
)  # fmt: skip
def test_the_driver_is_named_by_its_version(
    text: str | None, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "version").write_text(text)
    monkeypatch.setattr(fingerprint, "_DRIVER", tmp_path / "version")
    assert machine_facts()["gpu_driver"] == version


def test_a_world_states_what_its_machine_does_and_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PXN_DISABLE", "1")
    found = world_facts(Topology.grid(2, 2), "nccl", "H200", "abc", None, "2.28.9")
    assert machine_facts().items() <= found.items()
    assert found["environment"] == {"NCCL_PXN_DISABLE": "1"} and found["nccl_loaded"] == "2.28.9"
    assert (found["world_size"], found["node"], found["nic"]) == (4, [0, 0, 1, 1], [0, 1, 2, 3])
