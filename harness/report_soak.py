"""The section of ``report`` for soaks: a line a soak, wrong bytes by origin. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from relaymeter.harness.report_tables import Cell, ReportTable, Section, cells
from relaymeter.harness.soak_rows import SoakRecord, binary_text
from relaymeter.units import counted, format_rate, format_seconds

__all__ = ["soak_faults", "soak_section"]

_COLUMNS = (
    ("launched (UTC)", "left"), ("machine", "left"), ("commit", "left"), ("ranks", "right"), ("nodes", "right"),
    ("executors", "left"), ("moved", "right"), ("calls", "right"), ("messages", "right"), ("time", "right"),
    ("rate", "right"), ("wrong bytes", "right"), ("verdict", "left"),
)  # fmt: skip


def soak_section(soaks: Sequence[SoakRecord]) -> Section:
    """The soaks, the earliest first."""
    ordered = sorted(soaks, key=lambda soak: (soak.utc, soak.launch_id))
    lines = []
    for soak in ordered:
        rate = format_rate(soak.bytes_total / soak.elapsed_s) if soak.elapsed_s > 0 else "-"
        lines.append(cells(
            soak.utc, soak.machine_id, soak.commit or "unknown", str(soak.ranks), str(soak.nodes),
            f"{', '.join(soak.executors)} over {soak.backend}", binary_text(soak.bytes_total), str(soak.calls),
            str(soak.messages), format_seconds(soak.elapsed_s), rate, str(soak.wrong_bytes),
            Cell(soak.verdict, _origins(soak)),
        ))  # fmt: skip
    caption = "bare collectives, each byte checked by its receiver; ranks and runs of wrong bytes stand in the rows"
    return Section("soak", (), (ReportTable("soaks", _COLUMNS, tuple(lines), (caption,)),))


def _origins(soak: SoakRecord) -> tuple[str, ...]:
    """Where wrong bytes came from, one note for each origin."""
    return tuple(
        f"{origin}: {counted(found.get('bytes', 0), 'wrong byte')} in {counted(found.get('runs', 0), 'run')}"
        for origin, found in soak.origins.items()
    )


def soak_faults(soaks: Sequence[SoakRecord]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Soaks with wrong bytes, and those that did not end, each in a line."""
    wrong, other = [], []
    for soak in soaks:
        where = f"soak of {soak.utc} ({counted(soak.ranks, 'rank')}, {' and '.join(soak.executors)})"
        if soak.wrong_bytes or soak.verdict == "wrong bits":
            wrong.append(
                f"WRONG BITS in {where}: {counted(soak.wrong_bytes, 'byte')} of "
                f"{counted(soak.wrong_messages, 'message')} not as sent"
            )
        elif not soak.ok:
            other.append(f"{where}: {soak.verdict}: what was checked before was right")
    return tuple(wrong), tuple(other)
