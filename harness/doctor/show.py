"""Prints findings for people: a heading for each group, a line for each finding, what it means and what mends it.

``show(out, findings, title)``. What is right takes one line; commands stand in lines of their own, to be copied.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.text import Text

from relaymeter import __version__
from relaymeter.harness.doctor.findings import GROUPS, TITLES, Finding, State, worst
from relaymeter.harness.emit import Output
from relaymeter.units import counted

__all__ = ["DOCTOR_SCHEMA", "document", "show", "summary"]

DOCTOR_SCHEMA = 1
_STATE = max(len(state.value) for state in State) + 2
_TITLE = max(map(len, TITLES.values())) + 2
_STYLES = {State.OK: "green", State.NOTE: "cyan", State.WARNING: "yellow", State.FAULT: "bold red"}
_LEAST_WIDTH = 40


def show(out: Output, findings: Sequence[Finding], title: str) -> None:
    """Print ``findings``, which are in order, under ``title``."""
    out.say(title)
    group = None
    for finding in findings:
        if finding.group != group:
            group = finding.group
            out.say()
            out.say(Text(GROUPS[group], style="bold"))
        _show_one(out, finding)
    out.say()
    out.say(Text(summary(findings), style=_STYLES[worst(findings)]))


def _show_one(out: Output, finding: Finding) -> None:
    width = max(_LEAST_WIDTH, out.console.width - _STATE - _TITLE - 2)
    indent = " " * (_STATE + _TITLE + 2)
    lines: list[str] = []
    for line in finding.text.splitlines() or [""]:
        lines += [line] if "\n" in finding.text else textwrap.wrap(line, width, break_on_hyphens=False) or [""]
    state = f"  {finding.state.value:<{_STATE}}"
    out.say(Text.assemble((state, _STYLES[finding.state]), f"{finding.title:<{_TITLE}}{lines[0]}"))
    for line in [*lines[1:], *textwrap.wrap(finding.means, width, break_on_hyphens=False)]:
        out.say(indent + line)
    for command in finding.mend:
        out.say(f"{indent}> {command}")


def summary(findings: Sequence[Finding]) -> str:
    """``"2 faults, 1 warning, 3 notes; 20 as they should be"``."""
    counts = {state: sum(finding.state is state for finding in findings) for state in State}
    parts = [counted(counts[state], state.value) for state in (State.FAULT, State.WARNING, State.NOTE) if counts[state]]
    return f"{', '.join(parts) or 'nothing to mend'}; {counts[State.OK]} as they should be"


def document(findings: Sequence[Finding], *, utc: str, machine_id: str, host_id: str) -> dict[str, object]:
    """The findings as the command's JSON. ``machine_id``: as rows have it, alike on machines that are alike;
    ``host_id``: of this host and boot alone."""
    return {
        "kind": "doctor",
        "schema_version": DOCTOR_SCHEMA,
        "utc": utc,
        "relaymeter": __version__,
        "machine_id": machine_id,
        "host_id": host_id,
        "worst": worst(findings).value,
        "counts": {state.value: sum(finding.state is state for finding in findings) for state in State},
        "findings": [finding.to_dict() for finding in findings],
    }
