"""What ``report`` reads: kept results, how each was made, and which of their rows may stand in one table.

``sources, notes = read_sources([Path("results/a2f3b263b63e")])`` finds the files of rows; ``origin_of(row)`` says where
a row was measured: rows of two origins never share a table. Offline, no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from relaymeter.compare_records import CompareRecord
from relaymeter.errors import InputError, NothingMeasured
from relaymeter.harness.results import KEPT_FILES
from relaymeter.harness.soak_rows import SoakRecord
from relaymeter.records import MoveRecord, Row, dump_json, read_input
from relaymeter.row_fields import Values, check_values, check_verdict, expect
from relaymeter.row_files import read_rows
from relaymeter.state_records import OffloadRecord, StateRecord
from relaymeter.units import counted
from relaymeter.validation_records import KINDS as VALIDATION_KINDS

__all__ = ["AnyRow", "How", "Origin", "Source", "command_words", "option_words", "origin_of", "read_sources"]

AnyRow = MoveRecord | StateRecord | OffloadRecord | CompareRecord
_Row = TypeVar("_Row", bound=AnyRow | SoakRecord)
_ROWS, _HOW = "rows.jsonl", "how.txt"
#: Kinds of rows that have no line here, and what they are.
_OTHERS: Mapping[str, str] = {
    **dict.fromkeys(VALIDATION_KINDS, "validate, whose report.md lies beside them"),
    "soak-rank": "single ranks of a soak, whose sums are in its line",
    "soak-run": "runs of wrong bytes of a soak, whose sums are in its line",
}


@dataclass(frozen=True)
class How:
    """What a ``how.txt`` says."""

    command: str
    """The command line that made the rows."""
    facts: tuple[tuple[str, str], ...]
    """Versions and machine, by name."""


@dataclass(frozen=True)
class _LeftOut:
    """A row that has no line in the report."""

    what: str

    def to_dict(self) -> dict[str, Any]:
        return {}


def _left_out(what: str) -> Callable[[Mapping[str, Any]], Row]:
    return lambda _: _LeftOut(what)


def _soak(entry: Mapping[str, Any]) -> SoakRecord:
    """The soak of a row. Raises InputError where what it says of itself cannot all be true."""
    found = SoakRecord.from_dict(entry)
    check_values(found, Values(one_of={"verdict": ("ok", "wrong bits", "not finished")}))
    check_verdict(found)
    verdict = "wrong bits" if found.wrong_bytes else "ok" if found.finished else "not finished"
    told = f"{verdict} where wrong_bytes is {found.wrong_bytes} and finished is {str(found.finished).lower()}"
    expect(found.verdict == verdict, "verdict", found.verdict, told)
    return found


_MORE: Mapping[str, Callable[[Mapping[str, Any]], Row]] = {
    "soak": _soak,
    **{kind: _left_out(what) for kind, what in _OTHERS.items()},
}


@dataclass(frozen=True)
class Source:
    """A file of rows."""

    path: Path
    """The file."""
    rows: tuple[AnyRow, ...]
    """Its rows, each once, without those that an earlier file has too."""
    how: How | None
    """What lies beside it; None: nothing does."""
    soaks: tuple[SoakRecord, ...] = ()
    """Its soaks, the same way."""
    files: tuple[tuple[str, str], ...] = ()
    """Names and contents of the TOML files that were kept with it (``results.KEPT_FILES``)."""

    @property
    def launched(self) -> tuple[AnyRow | SoakRecord, ...]:
        """Rows and soaks."""
        return (*self.rows, *self.soaks)

    @property
    def name(self) -> str:
        """What tables call it: the kept folder, or the file. Bytes that are no UTF-8 stand as their escapes."""
        kept = self.path.parent if self.path.name == _ROWS and self.how is not None else self.path
        return str(_escaped(kept.name))


def _escaped(value: Any) -> Any:
    """``value`` with what is no Unicode, such as ``\\ud800`` or a byte of a file's name, as escapes in its texts."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, tuple):
        return tuple(map(_escaped, value))
    if isinstance(value, Mapping):
        return {_escaped(key): _escaped(one) for key, one in value.items()}
    return value


def _writable(row: _Row, text: str) -> _Row:
    """``row``, whose JSON is ``text``, as it can be written and drawn."""
    if "\\ud" not in text:  # a surrogate, alone or one of two
        return row
    return replace(row, **{field.name: _escaped(getattr(row, field.name)) for field in fields(row)})


@dataclass(frozen=True, order=True)
class Origin:
    """Where rows were measured."""

    machine_id: str
    commit: str
    """``unknown`` outside a checkout."""
    shaped: bool
    simulated: str
    """The simulated cluster; empty: real ranks moved."""
    mismatch: tuple[str, ...] = ()
    """Where the profile that priced them is another machine's."""

    @property
    def text(self) -> str:
        """For a caption."""
        dirty = " (the tree differed from the commit)" if self.commit.endswith("-dirty") else ""
        where = f"simulated: {self.simulated}" if self.simulated else "shaped NICs" if self.shaped else "unshaped"
        odd = f", prices of another machine's profile ({', '.join(self.mismatch)} differ)" if self.mismatch else ""
        return f"commit {self.commit}{dirty}, machine {self.machine_id}, {where}{odd}"


def command_words(command: str) -> list[str]:
    """The words of a command line as a shell reads it, ``--option=value`` in two; of a broken one those between
    spaces."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    parts = [word.split("=", 1) if word.startswith("--") else [word] for word in words]
    return [part for found in parts for part in found]


def option_words(command: str) -> list[str]:
    """Its options: ``--change``."""
    return [word for word in command_words(command) if word.startswith("--")]


def origin_of(row: AnyRow) -> Origin:
    """Where ``row`` was measured."""
    return Origin(
        machine_id=row.machine_id,
        commit=row.commit or "unknown",
        shaped=row.shaped,
        simulated=(row.simulated or "") if isinstance(row, MoveRecord) else "",
        mismatch=row.profile_mismatch if isinstance(row, MoveRecord) else (),
    )


def read_sources(paths: Sequence[Path]) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """The files of rows in ``paths``, folders (kept results, or folders of them) or files, and what was left out.

    Raises InputError where a path is missing or a file is no file of rows, NothingMeasured where no row is left.
    """
    sources: list[Source] = []
    notes: list[str] = []
    seen: dict[str, Path] = {}
    for path in _files(paths, notes):
        rows: list[AnyRow] = []
        soaks: list[SoakRecord] = []
        twice: dict[Path, int] = {}
        others: dict[str, int] = {}
        for row in read_rows(path, _MORE):
            if isinstance(row, _LeftOut):
                others[row.what] = others.get(row.what, 0) + 1
                continue
            text = dump_json(row.to_dict(), indent=None)
            if text in seen:
                twice[seen[text]] = twice.get(seen[text], 0) + 1
                continue
            seen[text] = path
            if isinstance(row, SoakRecord):
                soaks.append(_writable(row, text))
            elif isinstance(row, AnyRow):
                rows.append(_writable(row, text))
            else:
                raise InputError(f"records {path}: rows of {type(row).__name__} have no table: leave the file out")
        notes += [f"left out: {path}: {counted(n, 'row')} of {what}" for what, n in others.items()]
        notes += [_repeated(n, path, first) for first, n in twice.items()]
        how = _how(path.parent / _HOW)
        sources.append(Source(path, tuple(rows), how, tuple(soaks), _kept(path.parent) if how is not None else ()))
    if not any(source.launched for source in sources):
        told = "; ".join(notes)
        raise NothingMeasured(f"no rows in {', '.join(map(str, paths))}{': ' * bool(told)}{told}: make some with "
                              "relaymeter run --results DIR")  # fmt: skip
    return tuple(source for source in sources if source.launched), tuple(notes)


def _repeated(number: int, path: Path, first: Path) -> str:
    rows = counted(number, "row")
    if path == first:
        return f"{rows} of {path} {'repeats' if number == 1 else 'repeat'} an earlier one of it: counted once"
    return f"{rows} of {path} {'stands' if number == 1 else 'stand'} in {first} too: counted once"


def _files(paths: Sequence[Path], notes: list[str]) -> list[Path]:
    """The files of rows, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        try:
            is_folder, is_there = path.is_dir(), path.exists()
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
        if not is_there:
            raise InputError(f"{path} does not exist: name a folder that --results kept, or a file of rows")
        inside = sorted(path.rglob(_ROWS)) if is_folder else [path]
        inside = [one for one in inside if not any(part.startswith(".relaymeter-") for part in one.parts)]
        if not inside:
            why = "a report" if (path / "report.md").is_file() else f"no {_ROWS} in it"
            notes.append(f"left out: {path}: {why}")
        for one in inside:
            found.setdefault(one.resolve(), one)
    return list(found.values())


def _kept(folder: Path) -> tuple[tuple[str, str], ...]:
    """The TOML files that were kept in ``folder``, by name."""
    names = sorted({name for name in KEPT_FILES.values() if (folder / name).is_file()})
    return tuple((name, read_input(folder / name, "the kept")) for name in names)


def _how(path: Path) -> How | None:
    """The command in the first line (which may hold line breaks, quoted), then ``name: value`` lines."""
    if not path.is_file():
        return None
    command: list[str] = []
    facts: list[tuple[str, str]] = []
    for line in read_input(path, "how the results were made,").removesuffix("\n").split("\n"):
        name, colon, value = line.partition(": ")
        if command and colon and name.replace("_", "").isalnum() and name.islower():
            facts.append((name, value))
        else:
            command.append(line)
    return How("\n".join(command), tuple(facts))
