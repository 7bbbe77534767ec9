"""doctor as a command: what it prints, its JSON, its exit codes, what it never shows, and probes that fail or hang."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_machines import GOOD, found, machine

from relaymeter.errors import InputError
from relaymeter.harness import commands_doctor
from relaymeter.harness.cli import main
from relaymeter.harness.doctor import examine
from relaymeter.harness.doctor.examine import ask, findings_of
from relaymeter.harness.doctor.facts import Facts
from relaymeter.harness.doctor.findings import GROUPS, TITLES, Finding, State, in_order, worst
from relaymeter.harness.doctor.judge_environment import shown_variables
from relaymeter.harness.doctor.show import summary

ROOT = Path(__file__).resolve().parents[2]
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmn", "AWS_SECRET_ACCESS_KEY": "aws-value", "AWS_SESSION_TOKEN": "session-value",
    "WANDB_API_KEY": "wandb-value", "GITHUB_TOKEN": "ghp_value", "HOME": "/home/somebody", "PATH": "/opt/bin",
    "NCCL_AUTH_TOKEN": "inside1", "RELAYMETER_API_KEY": "inside2", "GLOO_SECRET": "inside3",
    "TORCH_NCCL_PASSWORD": "inside4", "SLURM_JWT": "inside5", "SLURM_JOB_USER": "somebody", "OMPI_MCA_key": "inside6",
    "NCCL_TOPO_FILE": "/home/somebody/topo.xml", "RELAYMETER_X": "ghp_0123456789", "NCCL_Y": "0123456789abcdef01234567",
}  # fmt: skip
SAFE = {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "8", "SLURM_PROCID": "3"}


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, and no box: what this test session has of either is not what is tested."""
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(examine, "capability", lambda: "not root: run as root")


@pytest.mark.usefixtures("calm")
def test_the_command_prints_a_list_and_json_of_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "-"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["kind"], document["schema_version"]) == ("doctor", 1)
    assert document["utc"].endswith("Z") and len(document["machine_id"]) == len(document["host_id"]) == 12
    findings = document["findings"]
    assert {one["group"] for one in findings} >= {"package", "torch", "cuda", "gpus", "network", "memory", "box"}
    assert all(one["key"] in TITLES and one["state"] in ("ok", "note", "warning", "fault") for one in findings)
    assert document["counts"]["ok"] + document["counts"]["note"] > 10 and not [
        one for one in findings if one["key"].endswith(".probe")
    ]
    keys = [one["key"] for one in findings]
    assert len(keys) == len(set(keys))
    for group in {one["group"] for one in findings}:
        assert f"\n{GROUPS[group]}\n" in printed.err
    assert "shaped box      not root: run as root" in printed.err


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(
    ("states", "code", "strict"),
    [((), 0, 0), ((State.NOTE,), 0, 0), ((State.NOTE, State.WARNING), 0, 3), ((State.FAULT, State.OK), 0, 3)],
)
def test_the_exit_code_is_0_and_with_strict_3_from_warnings_on(
    states: tuple[State, ...], code: int, strict: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = [Finding("gpus.found", state, "seen", "means", ("mend",)) for state in states]
    monkeypatch.setattr(commands_doctor, "examine", lambda: made)
    assert main(["doctor"]) == code
    assert main(["doctor", "--strict", "--json", str(tmp_path / "d.json")]) == strict
    assert len(json.loads((tmp_path / "d.json").read_text())["findings"]) == len(states)
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 2


@pytest.mark.usefixtures("calm")
def test_one_rank_of_each_node_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = [Finding("package.python", State.WARNING, "seen")]
    monkeypatch.setattr(commands_doctor, "examine", lambda: made)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (main(["doctor", "--strict"]), capsys.readouterr().out) == (0, "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["doctor", "--strict"]) == 3 and "Python" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "9")
    assert main(["doctor"]) == 0


def test_no_secret_is_printed_whatever_its_prefix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(examine, "capability", lambda: None)
    for name, value in {**SECRETS, **SAFE}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--json", "-"]) == 0
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        for name, value in SECRETS.items():
            assert value not in text, name
        assert "CUDA_VISIBLE_DEVICES" in text
    shown = shown_variables({**SECRETS, **SAFE})
    assert set(shown) == {*SAFE, "NCCL_TOPO_FILE", "RELAYMETER_X", "NCCL_Y"}
    assert shown["NCCL_TOPO_FILE"].startswith("sha256:") and shown["NCCL_Y"] == shown["RELAYMETER_X"] == "not shown"
    assert {name: shown[name] for name in SAFE} == SAFE


def test_settings_that_slow_or_mislead_are_said() -> None:
    def said(environment: dict[str, str], facts: Facts = GOOD) -> Finding:
        return found(facts, environment=environment)["environment.settings"]

    assert said({}).state is State.OK and said({"NCCL_P2P_DISABLE": "0"}).state is State.OK
    assert said({"NCCL_P2P_DISABLE": "1"}).mend == ("unset NCCL_P2P_DISABLE",)
    assert said({"NCCL_DEBUG": "INFO"}).state is State.NOTE
    assert said({"RELAYMETER_DEVICE": "gpu"}).state is State.FAULT
    assert said({"RELAYMETER_DEVICE": "cuda"}).state is State.OK
    assert said({"RELAYMETER_DEVICE": "cpu"}).state is State.NOTE
    assert said({"RELAYMETER_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}).text.endswith("no GPU is visible")


def test_the_launcher_is_named_and_what_contradicts_itself_is_a_fault() -> None:
    world = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert found(environment=world)["environment.launcher"].text == "torchrun: rank 1 of 4"
    slurm = {"RANK": "1", "WORLD_SIZE": "4"}
    assert "MASTER_ADDR and MASTER_PORT" in found(environment=slurm)["environment.launcher"].means
    assert found(environment={**world, "RANK": "4"})["environment.launcher"].state is State.FAULT


def test_a_probe_that_fails_or_hangs_is_a_finding_and_the_others_go_on() -> None:
    release = threading.Event()

    def broken() -> int:
        raise OSError("no such device")

    answers, failed = ask({"host": broken, "gpus": lambda: release.wait(60), "network": lambda: 7}, 0.3)
    release.set()
    assert answers == {"network": 7}
    assert failed == {"host": "OSError: no such device", "gpus": "no answer within 0.3 s"}
    findings = findings_of(replace(GOOD, gpus=None, host=None, failed=failed))
    by_key = {one.key: one for one in findings}
    assert by_key["memory.probe"].state is State.WARNING and "no such device" in by_key["memory.probe"].text
    assert by_key["gpus.probe"].state is State.FAULT and "hang" in by_key["gpus.probe"].means
    assert "network.gloo" in by_key and "gpus.found" not in by_key and "memory.shm" not in by_key


def test_a_judge_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> list[Finding]:
        raise KeyError("links")

    monkeypatch.setattr(examine, "link_findings", broken)
    by_key = {one.key: one for one in findings_of(GOOD)}
    assert by_key["gpus.probe"].text == "gpus: KeyError: 'links'" and "network.gloo" in by_key


def test_nothing_known_at_all_is_no_crash() -> None:
    failed = {part: "OSError: x" for part in ("software", "gpus", "network", "host", "box")}
    findings = findings_of(Facts(environment={}, failed=failed))
    assert sum(one.key.endswith(".probe") for one in findings) == 5


def test_findings_have_known_keys_an_order_and_a_sum() -> None:
    with pytest.raises(InputError, match=r"finding 'gpus\.colour' is not one of: package\.relaymeter, "):
        Finding("gpus.colour", State.OK, "")
    mixed = [
        Finding("box.shaped", State.FAULT, ""),
        Finding("gpus.ecc", State.OK, ""),
        Finding("gpus.found", State.NOTE, ""),
    ]
    assert [one.key for one in in_order(mixed)] == ["gpus.found", "gpus.ecc", "box.shaped"]
    assert worst(mixed) is State.FAULT and worst([]) is State.OK
    assert summary(mixed) == "1 fault, 1 note; 1 as they should be"
    assert summary(mixed[1:2]) == "nothing to mend; 1 as they should be"
    assert {key.partition(".")[0] for key in TITLES} == set(GROUPS)


def test_values_are_plain_and_every_key_is_explained_in_the_docs() -> None:
    text = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    missing = [key for key in TITLES if f"`{key}`" not in text and not key.endswith(".probe")]
    assert not missing
    for finding in findings_of(replace(GOOD, gpus=machine(odd={1: {"ecc": False}}))):
        assert json.loads(json.dumps(finding.to_dict())) == finding.to_dict()


def test_the_box_says_why_it_cannot_be_made() -> None:
    finding = found(box="not root: user id 1000 may not make a UTS namespace; run as root")["box.shaped"]
    assert finding.state is State.NOTE and finding.values == {"possible": False}
