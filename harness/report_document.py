"""The report as data: what was wrong, how it was measured, and a section for each scenario and kind of row.

``document = make_document(sources, notes)``; ``document.exit_code`` is the command's answer. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import EXIT_OK, EXIT_WRONG_BITS
from relaymeter.harness.report_compare import compare_section
from relaymeter.harness.report_missing import faults, model_text, not_run
from relaymeter.harness.report_moves import move_section
from relaymeter.harness.report_soak import soak_faults, soak_section
from relaymeter.harness.report_sources import AnyRow, Source, option_words
from relaymeter.harness.report_states import offload_section, state_section
from relaymeter.harness.report_tables import Section, grouped
from relaymeter.harness.soak_rows import SoakRecord
from relaymeter.records import MoveRecord
from relaymeter.state_records import OffloadRecord, StateRecord
from relaymeter.units import counted

__all__ = ["Document", "make_document"]

#: Kinds of rows in the order of their sections.
_KINDS: tuple[type[AnyRow], ...] = (CompareRecord, MoveRecord, StateRecord, OffloadRecord)


@dataclass(frozen=True)
class Document:
    """Everything that the report says."""

    sources: tuple[Source, ...]
    wrong: tuple[str, ...]
    """Wrong bits, a line each: said before anything else."""
    failed: tuple[str, ...]
    """Other rows that are no results, and why."""
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    """What was left out, and of what commits and machines the rows are."""
    simulated: tuple[str, ...]
    """Simulated clusters that rows are of."""

    @property
    def rows(self) -> tuple[AnyRow, ...]:
        """All rows but those of soaks."""
        return tuple(row for source in self.sources for row in source.rows)

    @property
    def soaks(self) -> tuple[SoakRecord, ...]:
        """All soaks."""
        return tuple(soak for source in self.sources for soak in source.soaks)

    @property
    def exit_code(self) -> int:
        """6 where bits were wrong, else 0."""
        return EXIT_WRONG_BITS if self.wrong else EXIT_OK

    @property
    def lines(self) -> tuple[str, ...]:
        """The whole in a few lines, the worst first."""
        found = list(self.wrong)
        checked = bool(self.soaks) or any(row_checks(row) for row in self.rows)
        right = ", no wrong bit" if checked and not self.wrong else ""
        found.append(
            f"{counted(len(self.rows) + len(self.soaks), 'row')} of {counted(len(self.sources), 'result')}{right}"
        )
        found += [f"simulated: {name}: nothing moved, no bit was checked" for name in self.simulated]
        found += self.failed
        return (*found, *self.notes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "schema_version": 1,
            "command": "report",
            "exit_code": self.exit_code,
            "wrong_bits": list(self.wrong),
            "failed": list(self.failed),
            "simulated": list(self.simulated),
            "notes": list(self.notes),
            "sources": [
                {
                    "path": str(source.path),
                    "rows": len(source.launched),
                    "command": source.how and source.how.command,
                    "facts": dict(source.how.facts) if source.how else None,
                    "files": dict(source.files),
                }
                for source in self.sources
            ],
            "sections": [section.to_dict() for section in self.sections],
        }


def row_checks(row: AnyRow) -> bool:
    """Whether anything of a row was checked bit by bit."""
    return row.equal is not None if isinstance(row, OffloadRecord) else row.digest_total > 0


def make_document(sources: Sequence[Source], notes: Sequence[str] = ()) -> Document:
    """The report of the rows of ``sources``. ``notes``: what was left out of them."""
    rows = [row for source in sources for row in source.rows]
    own_files = {
        row.scenario
        for source in sources
        for row in source.rows
        if source.how is None or ".toml" in source.how.command or source.files
    }
    sections: list[Section] = []
    for kind in _KINDS:
        for scenario, mine in grouped([row for row in rows if isinstance(row, kind)], lambda row: row.scenario).items():
            shipped = scenario not in own_files
            missing = not_run(mine, shipped=shipped, options=_options(sources, mine))
            sections.append(_section(scenario, mine, missing, model_text(mine[0]) if shipped else ""))
    soaks = [soak for source in sources for soak in source.soaks]
    if soaks:
        sections.append(soak_section(soaks))
    wrong, failed = (of_rows + of_soaks for of_rows, of_soaks in zip(faults(rows), soak_faults(soaks), strict=True))
    return Document(
        sources=tuple(sources),
        wrong=wrong,
        failed=failed,
        sections=tuple(sections),
        notes=(*_mixed(rows), *_dirty([*rows, *soaks]), *notes),
        simulated=tuple(dict.fromkeys(row.simulated for row in rows if isinstance(row, MoveRecord) and row.simulated)),
    )


def _options(sources: Sequence[Source], rows: Sequence[AnyRow]) -> frozenset[str]:
    """Options that every command has that made ``rows``; none where a command is not known."""
    made = {id(row) for row in rows}
    found = [source.how for source in sources if any(id(row) in made for row in source.rows)]
    words = [frozenset(option_words(how.command)) if how is not None else frozenset[str]() for how in found]
    return frozenset.intersection(*words) if words else frozenset()


def _section(scenario: str, rows: Sequence[AnyRow], missing: Sequence[str], model: str) -> Section:
    compared = [row for row in rows if isinstance(row, CompareRecord)]
    moves = [row for row in rows if isinstance(row, MoveRecord)]
    states = [row for row in rows if isinstance(row, StateRecord)]
    if compared:
        return compare_section(scenario, compared, missing, model)
    if moves:
        return move_section(scenario, moves, missing)
    if states:
        return state_section(scenario, states, missing)
    return offload_section(scenario, [row for row in rows if isinstance(row, OffloadRecord)], missing)


def _mixed(rows: Sequence[AnyRow]) -> list[str]:
    """That rows are of several commits or machines."""
    lines = []
    for what, found in (
        ("commit", dict.fromkeys(row.commit or "unknown" for row in rows)),
        ("machine", dict.fromkeys(row.machine_id for row in rows)),
    ):
        if len(found) > 1:
            lines.append(f"rows of {len(found)} {what}s ({', '.join(found)}): each has tables of its own")
    return lines


def _dirty(rows: Sequence[AnyRow | SoakRecord]) -> list[str]:
    """That a commit alone does not repeat them."""
    found = sorted({row.commit for row in rows if row.commit and row.commit.endswith("-dirty")})
    return [f"commit {one}: the tree differed from the commit, so it alone does not repeat them" for one in found]
