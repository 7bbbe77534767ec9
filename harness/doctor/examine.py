"""Examines this machine: asks every probe, and makes findings of what they found.

``examine()`` gives the findings in order. No probe can end it: one that fails is a finding, and one that hangs (a
driver that answers no more) is given up after ``LIMIT_S``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relaymeter.harness.box import capability
from relaymeter.harness.doctor.facts import Facts, Gpus, HostFacts, NetworkFacts, Software
from relaymeter.harness.doctor.findings import Finding, State, in_order
from relaymeter.harness.doctor.judge_environment import environment_findings
from relaymeter.harness.doctor.judge_gpus import gpu_findings
from relaymeter.harness.doctor.judge_host import host_findings
from relaymeter.harness.doctor.judge_links import link_findings
from relaymeter.harness.doctor.judge_network import network_findings
from relaymeter.harness.doctor.judge_software import software_findings
from relaymeter.harness.doctor.probe_gpus import read_gpus
from relaymeter.harness.doctor.probe_host import read_host
from relaymeter.harness.doctor.probe_network import read_network
from relaymeter.harness.doctor.probe_software import read_software

__all__ = ["LIMIT_S", "ask", "examine", "findings_of", "read_facts"]

#: What the probes together may take.
LIMIT_S = 7.0

#: For each part the finding that says that its probe failed.
_PROBES = {
    "software": "package.probe",
    "gpus": "gpus.probe",
    "network": "network.probe",
    "host": "memory.probe",
    "environment": "environment.probe",
    "box": "box.probe",
}


def examine(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> list[Finding]:
    """Findings about this machine, in order. ``environment``: this process's by default; ``root`` stands for ``/``
    where files are read. Local; joins no world, makes no CUDA context, and leaves nothing behind."""
    return findings_of(read_facts(os.environ if environment is None else environment, root))


def read_facts(environment: Mapping[str, str], root: Path = Path("/")) -> Facts:
    """What the probes find. Those of the machine run beside each other, each in a thread; the box, which makes
    namespaces and has to remove them, runs in the caller's."""
    questions: dict[str, Callable[[], Any]] = {
        "software": read_software,
        "gpus": lambda: read_gpus(root),
        "network": lambda: read_network(environment, root),
        "host": lambda: read_host(root),
    }
    answers, failed = ask(questions, LIMIT_S)
    box: str | None = None
    try:
        box = capability()
    except Exception as error:
        failed["box"] = _said(error)
    return Facts(environment=dict(environment), box=box, failed=failed, **answers)


def ask(questions: Mapping[str, Callable[[], Any]], limit_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Answers by name, and for each question without one what went wrong. All are asked at once; ``limit_s`` is for
    all together, and who has not answered by then is left behind in a thread that ends with the process."""
    answers: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def put(name: str, question: Callable[[], Any]) -> None:
        try:
            answers[name] = question()
        except Exception as error:
            failed[name] = _said(error)

    threads = {
        name: threading.Thread(target=put, args=(name, question), name=f"relaymeter-{name}", daemon=True)
        for name, question in questions.items()
    }
    deadline = time.monotonic() + limit_s
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [name for name in questions if name not in answers and name not in failed]
    kept = {name: answers[name] for name in questions if name in answers}
    return kept, {**failed, **{name: f"no answer within {limit_s:g} s" for name in late}}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def findings_of(facts: Facts) -> list[Finding]:
    """Findings of what was found, in order. Pure. A judge that fails is a finding too."""
    failed = dict(facts.failed)
    gpus = facts.gpus or Gpus()
    network = facts.network or NetworkFacts()
    environment = facts.environment
    software, host = facts.software or Software(python="", relaymeter=""), facts.host or HostFacts()
    judges: dict[str, Callable[[], Sequence[Finding]]] = {
        "software": lambda: software_findings(software, gpus),
        "gpus": lambda: [*gpu_findings(gpus, environment), *link_findings(gpus, environment)],
        "network": lambda: network_findings(network, gpus, environment),
        "host": lambda: host_findings(host, gpus, network, environment),
        "environment": lambda: environment_findings(environment, facts.gpus),
        "box": lambda: [_box(facts.box)],
    }
    findings: list[Finding] = []
    for part, judge in judges.items():
        if part in facts.failed:
            continue
        try:
            findings += judge()
        except Exception as error:
            failed[part] = _said(error)
    return in_order([*findings, *(_failed(part, said) for part, said in failed.items())])


def _failed(part: str, said: str) -> Finding:
    hung = said.startswith("no answer")
    means = "what it would have told is missing here"
    mend: tuple[str, ...] = ()
    if part == "gpus" and hung:
        means = "a driver that answers no more: ranks will hang too"
        mend = ("dmesg | grep -i nvrm", "reboot")
    state = State.FAULT if mend else State.WARNING
    return Finding(_PROBES[part], state, f"{part}: {said}", means, mend, {"part": part})


def _box(reason: str | None) -> Finding:
    values = {"possible": reason is None}
    if reason is None:
        return Finding("box.shaped", State.OK, "this machine makes a shaped cluster in a box", values=values)
    means = "--nic shapes nothing here: ranks run on loopback, and their nodes are only declared"
    return Finding("box.shaped", State.NOTE, reason, means, ("run as root, or docker run --privileged ...",), values)
