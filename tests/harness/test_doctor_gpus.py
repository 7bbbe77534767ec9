"""doctor on invented GPUs: NVML's answers, nvidia-smi's, the driver's files, and what is made of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_machines import GOOD, NETWORK, SOFTWARE, found, gpu, links, machine, write

from relaymeter.harness.doctor import probe_gpus
from relaymeter.harness.doctor.examine import findings_of
from relaymeter.harness.doctor.facts import Gpus
from relaymeter.harness.doctor.findings import State
from relaymeter.harness.doctor.judge_gpus import visible
from relaymeter.harness.doctor.judge_links import fully_linked, linked_groups, linked_pairs
from relaymeter.harness.doctor.judge_software import version_numbers
from relaymeter.harness.doctor.probe_gpus import SMI_COLUMNS, from_driver_files, from_nvml, from_smi, read_gpus
from relaymeter.harness.doctor.probe_software import torch_builds

#: Eight GPUs of which NVLink joins four pairs only.
FOUR_PAIRS = {(0, 1), (2, 3), (4, 7), (5, 6)}


def test_a_whole_machine_has_nothing_to_mend() -> None:
    findings = found()
    assert list(findings) == [one.key for one in findings_of(GOOD)]
    assert {one.state for one in findings.values()} == {State.OK, State.NOTE}
    assert [key for key, one in findings.items() if one.state is State.NOTE] == ["deepspeed.subset"]
    assert findings["gpus.found"].text == "8 x NVIDIA H200 (by NVML)"
    assert findings["links.nvlink"].text == "joins every pair of 8 GPUs, 18 links each"
    assert findings["cuda.driver"].values == {
        "version": "580.159.04", "open_kernel_modules": True, "cuda_version": "13.0",
    }  # fmt: skip


def test_links_are_those_of_pairs_and_visible_numbers_are_mapped_to_physical_ones() -> None:
    joined = links(FOUR_PAIRS)
    assert linked_pairs(joined) == tuple(sorted(FOUR_PAIRS))
    assert not fully_linked((0, 1, 2, 3), joined)
    gpus = machine(joined=FOUR_PAIRS)
    for value, whole in (("4,7", True), ("4,5", False), ("7,4", True)):
        shown, problem = visible(value, gpus.gpus)
        assert problem is None and fully_linked(shown, joined) is whole
        finding = found(gpus=gpus, environment={"CUDA_VISIBLE_DEVICES": value})["links.nvlink"]
        assert (finding.state is State.OK) is whole
        assert finding.values["linked_pairs"] == ([[4, 7]] if whole else [])


def test_pairs_that_are_joined_are_named_as_groups_to_keep_together() -> None:
    finding = found(gpus=machine(joined=FOUR_PAIRS))["links.nvlink"]
    assert finding.state is State.NOTE and "all of: 0, 1; 2, 3; 4, 7; 5, 6" in finding.text
    assert linked_groups((1, 0, 3), links(FOUR_PAIRS)) == [[0, 1], [3]]
    matrix = found(gpus=machine(4, {(0, 1)}))["links.matrix"]
    assert matrix.values["links"] == [
        ["X", "NV", "NODE", "NODE"], ["NV", "X", "NODE", "NODE"], ["NODE", "NODE", "X", "NODE"],
        ["NODE", "NODE", "NODE", "X"],
    ]  # fmt: skip
    assert len({len(line) for line in matrix.text.splitlines()}) == 1


def test_links_that_are_up_but_join_nobody_are_a_fabric_manager_that_does_not_run() -> None:
    finding = found(gpus=machine(joined=set()))["links.nvlink"]
    assert finding.state is State.WARNING and "fabricmanager" in finding.mend[0]
    none = {index: {"nvlinks": 0} for index in range(8)}
    assert found(gpus=machine(joined=set(), odd=none))["links.nvlink"].text == "none"
    fewer = found(gpus=machine(odd={3: {"nvlinks": 16}}))["links.nvlink"]
    assert fewer.state is State.WARNING and "GPU 3 has fewer" in fewer.text
    assert "links.nvlink" not in found(gpus=machine(1))


@pytest.mark.parametrize(
    ("value", "shown", "problem"),
    [
        (None, (0, 1, 2, 3), None),
        ("", (), None),
        ("-1", (), None),
        ("3,1", (3, 1), None),
        ("0,-1,2", (0,), None),
        ("0,9,1", (0,), "its entry 9 names none of the 4 GPUs here"),
        ("1,1", (), "its entry 1 comes twice, which hides all"),
        ("GPU-00000002", (2,), None),
        ("GPU-0000000", (), "its entry GPU-0000000 names several of the 4 GPUs here"),
        ("all", (), "its entry all names none of the 4 GPUs here"),
        ("MIG-aaaa", (), None),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    value: str | None, shown: tuple[int, ...], problem: str | None
) -> None:
    assert visible(value, machine(4).gpus) == (shown, problem)


def test_visible_devices_that_hide_or_mislead_are_said() -> None:
    assert found(environment={"CUDA_VISIBLE_DEVICES": "0,9"})["gpus.visible"].state is State.FAULT
    assert found(environment={"CUDA_VISIBLE_DEVICES": ""})["gpus.visible"].state is State.WARNING
    mixed = machine(2, odd={1: {"name": "NVIDIA A100"}})
    env = {"CUDA_VISIBLE_DEVICES": "1"}
    assert found(gpus=mixed, environment=env)["gpus.visible"].mend == ("export CUDA_DEVICE_ORDER=PCI_BUS_ID",)
    ordered = found(gpus=mixed, environment={**env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert ordered["gpus.visible"].state is State.OK and ordered["gpus.found"].state is State.NOTE


ODD: dict[str, tuple[dict[str, Any], str, State, str]] = {
    "MIG": ({"mig": True, "mig_instances": 7}, "gpus.mig", State.WARNING, "nvidia-smi -i 2 -mig 0"),
    "ECC off": ({"ecc": False}, "gpus.ecc", State.NOTE, "nvidia-smi -i 2 -e 1"),
    "corrected": ({"corrected_errors": 3}, "gpus.ecc", State.OK, ""),
    "uncorrected": ({"uncorrected_errors": 1}, "gpus.ecc", State.FAULT, "nvidia-smi -i 2 --gpu-reset"),
    "waiting": ({"remap_pending": True}, "gpus.ecc", State.WARNING, "nvidia-smi -i 2 --gpu-reset"),
    "broken": ({"remap_failed": True}, "gpus.ecc", State.FAULT, "nvidia-smi -q -d ROW_REMAPPER"),
    "busy": ({"used_bytes": 90 * 10**9}, "gpus.memory", State.WARNING, "nvidia-smi  # which processes"),
}


@pytest.mark.parametrize("case", sorted(ODD))
def test_one_odd_gpu_of_eight_is_named_with_what_mends_it(case: str) -> None:
    changes, key, state, mend = ODD[case]
    finding = found(gpus=machine(odd={2: changes}))[key]
    assert finding.state is state
    assert "".join(finding.mend[:1]).startswith(mend)
    assert state is State.OK or "GPU 2" in finding.text


def test_what_is_wrong_with_a_hidden_gpu_is_nobodys_business() -> None:
    gpus = machine(odd={2: {"uncorrected_errors": 1, "mig": True, "used_bytes": 10**11}})
    hidden = found(gpus=gpus, environment={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert {hidden[f"gpus.{key}"].state for key in ("ecc", "mig", "memory")} == {State.OK}
    assert found(gpus=gpus, environment={"CUDA_VISIBLE_DEVICES": "MIG-a"})["gpus.mig"].state is State.WARNING


def test_gpus_and_torch_that_do_not_fit_are_faults() -> None:
    cpu = found(software=replace(SOFTWARE, torch="2.11.0+cpu", torch_cuda=None))["torch.cuda_build"]
    assert cpu.state is State.FAULT and "pypi.org/simple torch" in cpu.mend[0]
    newer = replace(SOFTWARE, torch_cuda="13.0")
    assert found(software=newer)["cuda.driver"].state is State.OK
    old = replace(machine(), cuda=(12, 8), driver="570.86.15")
    finding = found(software=newer, gpus=old)["cuda.driver"]
    assert finding.state is State.FAULT and finding.mend[0] == "update the driver to 580 or newer"
    assert found(software=newer, gpus=replace(old, cuda=None))["cuda.driver"].state is State.FAULT
    assert found(software=replace(SOFTWARE, torch_cuda="12.9"), gpus=old)["cuda.driver"].state is State.OK
    assert found(software=replace(SOFTWARE, triton=None))["package.triton"].state is State.WARNING


@pytest.mark.parametrize(
    ("problem", "mend"),
    [
        ("Driver/library version mismatch", "reboot"),
        ("Driver Not Loaded", "modprobe nvidia"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "modprobe nvidia"),
        ("GPU is lost", "nvidia-smi, and see dmesg"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_fault_with_its_own_remedy(problem: str, mend: str) -> None:
    findings = found(gpus=Gpus(nvml_installed=True, driver="580.65.06", problem=problem))
    assert findings["cuda.nvml"].state is State.FAULT and findings["cuda.nvml"].mend[0].startswith(mend)
    assert findings["gpus.found"].state is State.FAULT


def test_a_driver_without_a_gpu_is_a_container_that_was_given_none() -> None:
    findings = found(gpus=Gpus(driver="580.65.06"))
    assert findings["gpus.found"].state is State.WARNING and "--gpus all" in findings["gpus.found"].mend[0]
    assert found(gpus=Gpus())["gpus.found"].state is State.NOTE


def test_gpus_on_the_bus_that_no_driver_has_are_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_gpus.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    for index, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        write(tmp_path, {f"sys/bus/pci/devices/0000:0{index}:00.0/{name}": f"{text}\n"
                         for name, text in (("vendor", vendor), ("class", kind))})  # fmt: skip
    gpus = read_gpus(tmp_path)
    assert gpus == Gpus(on_bus=1)
    finding = found(gpus=gpus)["gpus.found"]
    assert finding.state is State.FAULT and finding.mend[0].startswith("modprobe nvidia")


class NVMLError(Exception):
    pass


def nvml(count: int = 2, **changes: Any) -> SimpleNamespace:
    """NVML of ``count`` GPUs that are joined by NVLink and know nothing of MIG."""

    def refuse(*_: object) -> Any:
        raise NVMLError

    plain = {
        "NVMLError": NVMLError, "NVML_NVLINK_MAX_LINKS": 18, "NVML_FEATURE_ENABLED": 1, "NVML_P2P_STATUS_OK": 0,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2, "NVML_VOLATILE_ECC": 0, "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "nvmlInit": lambda: None, "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: count, "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200", "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=150, used=7),
        "nvmlDeviceGetEccMode": lambda handle: [1, 1], "nvmlDeviceGetMigMode": refuse,
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 5 * kind,
        "nvmlDeviceGetRemappedRows": lambda handle: (0, 0, 1, 0), "nvmlDeviceGetNvLinkState": lambda handle, link: 1,
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"00000000:4{handle}:00.0".encode()),
        "nvmlDeviceGetP2PStatus": lambda one, two, what: 0, "nvmlDeviceGetTopologyCommonAncestor": lambda *_: 50,
        "nvmlSystemGetDriverVersion": lambda: "580.159.04", "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **changes})


def test_nvml_tells_models_errors_links_and_places(tmp_path: Path) -> None:
    write(tmp_path, {f"sys/bus/pci/devices/0000:4{index}:00.0/numa_node": f"{index}\n" for index in range(2)})
    gpus = from_nvml(nvml(), tmp_path)
    assert (gpus.source, gpus.driver, gpus.cuda) == ("NVML", "580.159.04", (13, 1))
    one = gpus.gpus[1]
    assert (one.name, one.uuid, one.memory_bytes, one.used_bytes) == ("NVIDIA H200", "GPU-1", 150, 7)
    assert (one.mig, one.ecc, one.corrected_errors, one.uncorrected_errors) == (None, True, 0, 5)
    assert (one.remap_pending, one.remap_failed, one.nvlinks, one.numa) == (True, False, 18, 1)
    assert gpus.links == {(0, 1): "NVLink"} and not gpus.no_peer
    apart = from_nvml(nvml(nvmlDeviceGetP2PStatus=lambda *_: 5), tmp_path)
    assert apart.links == {(0, 1): "SYS"} and apart.no_peer == {(0, 1)}
    finding = found(gpus=replace(machine(2, set()), no_peer=frozenset({(0, 1)})))["links.peer"]
    assert finding.state is State.NOTE and finding.values["pairs_without"] == [[0, 1]]


def test_mig_instances_are_counted() -> None:
    def instance(handle: int, index: int) -> int:
        if index > 2:
            raise NVMLError
        return index

    gpus = from_nvml(
        nvml(1, nvmlDeviceGetMigMode=lambda handle: [1, 1], nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
             nvmlDeviceGetMigDeviceHandleByIndex=instance)
    )  # fmt: skip
    assert (gpus.gpus[0].mig, gpus.gpus[0].mig_instances) == (True, 3)


def test_an_old_nvml_that_lacks_questions_still_tells_the_rest() -> None:
    old = nvml()
    for name in ("nvmlDeviceGetRemappedRows", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetMigMode"):
        delattr(old, name)
    gpus = from_nvml(old)
    assert len(gpus.gpus) == 2 and gpus.cuda is None and gpus.gpus[0].mig is None


LINE = "{0}, GPU-{0}, NVIDIA A100-SXM4-80GB, 81920, 12, Disabled, Enabled, 0, [N/A], 00000000:0{0}:00.0, 550.54.15\n"
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tPXB\t0-31\t0
GPU1\tNV12\t X \tPHB\tPXB\t0-31\t0
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1
NIC0\tPXB\tPXB\tSYS\t X

Legend:
  X    = Self
"""


def test_nvidia_smi_tells_the_same_where_nvml_is_not_installed() -> None:
    assert len(LINE.split(",")) == len(SMI_COLUMNS)
    gpus = from_smi("".join(LINE.format(index) for index in range(3)), TOPOLOGY)
    one = gpus.gpus[2]
    assert (one.index, one.name, one.memory_bytes) == (2, "NVIDIA A100-SXM4-80GB", 81920 * 2**20)
    assert (one.mig, one.ecc, one.corrected_errors, one.uncorrected_errors) == (False, True, 0, None)
    assert gpus.links == {(0, 1): "NVLink", (0, 2): "SYS", (1, 2): "PHB"} and gpus.driver == "550.54.15"
    assert from_smi("No devices were found\n", "").gpus == ()
    assert found(gpus=gpus)["cuda.nvml"].mend == ("pip install nvidia-ml-py",)


def test_the_drivers_files_name_models_where_nothing_else_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 55\nGPU UUID: \t GPU-abc\n"
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n",
            "proc/driver/nvidia/gpus/0000:4e:00.0/information": information,
            "sys/bus/pci/devices/0000:4e:00.0/numa_node": "1\n",
        },
    )
    gpus = from_driver_files(tmp_path)
    assert (gpus.source, gpus.driver, gpus.open_driver) == ("/proc", "580.65.06", True)
    assert gpus.gpus == (gpu(0, memory_bytes=None, used_bytes=None, mig=None, ecc=None, corrected_errors=None,
                             uncorrected_errors=None, nvlinks=None, numa=1, uuid="GPU-abc"),)  # fmt: skip
    assert found(gpus=gpus)["cuda.nvml"].state is State.WARNING
    monkeypatch.setattr(probe_gpus.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert read_gpus(tmp_path) == gpus
    assert read_gpus(tmp_path / "nothing") == Gpus()
    write(tmp_path, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""})
    assert len(from_driver_files(tmp_path / "none").gpus) == 0
    (tmp_path / "proc/driver/nvidia/gpus/0000:4e:00.0/information").unlink()
    (tmp_path / "proc/driver/nvidia/gpus/0000:4e:00.0").rmdir()
    assert (from_driver_files(tmp_path).source, len(from_driver_files(tmp_path).gpus)) == ("/dev", 2)


def test_gpus_are_asked_of_nvml_first_and_its_refusal_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06\n"})
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert (read_gpus(tmp_path).source, read_gpus(tmp_path).open_driver) == ("NVML", True)

    def refuse() -> None:
        raise NVMLError("Driver/library version mismatch")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=refuse))
    monkeypatch.setattr(probe_gpus.shutil, "which", lambda name: None)
    gpus = read_gpus(tmp_path)
    assert (gpus.nvml_installed, gpus.problem) == (True, "Driver/library version mismatch")


def test_torch_says_in_a_file_what_it_was_built_for() -> None:
    text = (
        "from typing import Optional\n__version__ = '2.11.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    assert torch_builds(text) == {"cuda": "12.8"}
    assert torch_builds("cuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n") == {"hip": "6.2"}
    assert torch_builds("cuda = '12.4'\n") == {"cuda": "12.4"} and torch_builds("") == {}
    assert version_numbers("2.13.0+cpu") == (2, 13, 0) and version_numbers("unknown") == ()


@pytest.mark.parametrize(
    ("version", "state", "subset"),
    [
        ("0.18.2", State.WARNING, True),
        ("0.19.8", State.OK, True),
        ("0.20.0", State.NOTE, False),
        (None, State.NOTE, False),
    ],
)
def test_deepspeeds_defects_are_those_of_its_version(version: str | None, state: State, subset: bool) -> None:
    findings = found(software=replace(SOFTWARE, deepspeed=version))
    assert findings["deepspeed.version"].state is state
    assert ("deepspeed.subset" in findings) is subset
    assert ("deepspeed.autoep" in findings) is (version is not None)


@pytest.mark.parametrize(
    ("version", "state"),
    [("5.17.0", State.OK), ("4.57.1", State.OK), ("5.20.1", State.NOTE), ("5.23.0", State.WARNING),
     ("6.0", State.WARNING), (None, State.NOTE)],
)  # fmt: skip
def test_transformers_from_5_23_on_break_autoep(version: str | None, state: State) -> None:
    finding = found(software=replace(SOFTWARE, transformers=version))["deepspeed.autoep"]
    assert finding.state is state
    assert state is not State.WARNING or finding.mend == ("pip install 'transformers<=5.17.0'",)


def test_without_gpus_nothing_is_asked_about_their_network() -> None:
    findings = found(replace(GOOD, gpus=Gpus(), network=replace(NETWORK, peer_memory=False)))
    assert "network.gpudirect" not in findings and "links.matrix" not in findings and "gpus.mig" not in findings
