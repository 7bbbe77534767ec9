"""The versioned rows that commands write, and the strict JSON and files they are written as.

``MoveRecord(...).to_dict()`` is one row; ``write_text(path, text)`` creates a file whole and never over another one.
Numbers carry their unit in their name; not-a-number and infinity become null.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from relaymeter.errors import InputError
from relaymeter.row_fields import Values, check_count, check_interval, check_verdict, expect, record_of, shown

__all__ = [
    "SCHEMA_VERSION",
    "MoveRecord",
    "Row",
    "check_target",
    "dump_json",
    "dump_lines",
    "load_json",
    "median_interval",
    "members",
    "parse_json",
    "plain",
    "read_input",
    "read_lines",
    "read_records",
    "write_text",
]

#: Version of the rows below. A reader takes older ones too, see ``MoveRecord.from_dict``, and refuses newer ones.
SCHEMA_VERSION = 3

#: The largest file that is read, in bytes.
_LARGEST_INPUT = 1 << 30

#: What rows of version 1, which knew one planner and one source, do not say.
_SINCE_VERSION_2 = ("source_bytes", "fallback_tensors", "bytes_in_rank", "max_extra_bytes")

_Made = TypeVar("_Made")


class Row(Protocol):
    """A row of any kind."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class MoveRecord:
    """One row of ``run``: one move by one route in one launch. A value that was not measured is None."""

    VALUES: ClassVar[Values] = Values(
        least={"error": -1},
        one_of={
            "planner": ("classes", "affine"),
            "verdict": ("ok", "wrong bits", "wire bytes differ", "not measured", "simulated"),
        },
    )

    schema_version: int = SCHEMA_VERSION
    utc: str
    """When the launch began, ISO 8601 in UTC."""
    machine_id: str
    """Hash of the environment that matters to a measurement: the profile's fingerprint."""
    launch_id: str
    """Shared by the rows of one launch."""
    commit: str | None
    """Source revision, with ``-dirty`` where files differ from it; None outside a checkout."""
    profile_mismatch: tuple[str, ...] = ()
    """Fingerprint entries in which the profile differs from this machine (only with ``--allow-mismatch``)."""
    shaped: bool
    """Whether the NICs' rates were held by the kernel (cluster in a box)."""
    simulated: str | None = None
    """The simulated cluster whose times these are, of moves that never took place; None: real ranks moved."""
    scenario: str
    move: str
    route: str
    """``direct``, ``relay``, ``spread``, or ``chosen`` for the per-class routes that the policy picked."""
    chosen: bool
    """Whether this row ran exactly the routes that the policy picked."""
    route_bytes: Mapping[str, int]
    """Destination bytes by the route that carried them, for this row."""
    source_bytes: Mapping[str, int]
    """Destination bytes by the source layout that served them: ``trainer``, ``old``."""
    planner: str
    """``classes`` (this package's own) or ``affine`` (DeepSpeed's)."""
    fallback_tensors: int
    """Tensors that the affine planner could not express, planned by our own."""
    executor: str
    ranks: int
    nodes: int
    bucket_bytes: int
    rounds: int
    bytes_total: int
    """Destination bytes, each replica counted."""
    bytes_in_rank: int | None
    """Planned payload copied within a rank; None in rows of version 1."""
    bytes_in_node: int
    """Planned payload between ranks of one node."""
    bytes_cross_node: int
    """Planned payload between nodes."""
    wire_cross_node_bytes: int | None
    """What the kernel counted leaving the NICs for other nodes, median over the repeats; None where nothing counts."""
    messages: int
    plan_s: float
    predicted_s: float | None
    predicted_low_s: float | None
    predicted_high_s: float | None
    measured_s: float | None
    """Pack, communicate and unpack: maximum over the ranks, median over the repeats."""
    measured_low_s: float | None
    measured_high_s: float | None
    error: float | None
    """Predicted over measured, less one."""
    samples_s: tuple[tuple[float, ...], ...]
    """Raw samples: per repeat, one value per rank."""
    digest_s: float | None
    """Digest of source and destination after one move, maximum over the ranks, median over the repeats."""
    bound_s: float | None
    """Lower bound of any route; None without a profile."""
    bound_by: str | None
    peak_bytes: int | None
    """Largest buffer memory of a rank while moving, storages not counted."""
    peak_predicted_bytes: int
    max_extra_bytes: int | None
    """What the move might hold beyond the larger layout, its source given up; None: the source was kept."""
    digest_version: int
    digest_passed: int
    """Tensor copies whose digest matched, over all repeats."""
    digest_total: int
    mismatch: str | None = None
    """Tensor and element range of the first wrong bits."""
    verdict: str
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with every field, in order."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    def check(self) -> None:
        """Raises InputError where what the row says of itself cannot all be true."""
        check_verdict(self, good=("ok", "simulated"))
        where = f"where verdict is {shown(self.verdict)}"
        expect(self.nodes <= self.ranks, "nodes", self.nodes, f"at most ranks, which is {self.ranks}")
        only_timed = self.verdict == "simulated"
        cluster = "the name of a cluster" if only_timed else "null"
        expect((self.simulated is not None) == only_timed, "simulated", self.simulated, f"{cluster} {where}")
        right = check_count(self, "digest") and self.mismatch is None
        if self.verdict == "wrong bits":
            expect(not right, "verdict", self.verdict, "another one where all digests passed")
        if self.verdict in ("ok", "wire bytes differ"):
            expect(self.measured_s is not None, "measured_s", self.measured_s, f"a number {where}")
            expect(self.digest_total > 0, "digest_total", self.digest_total, f"above 0 {where}")
        check_interval(self)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> MoveRecord:
        """The row that ``to_dict`` wrote, of this version, of version 2, whose rows were all of real ranks, or of
        version 1, whose rows moved from the trainer besides.

        Raises InputError for another version, for unknown or missing fields, for values of another type, and for what
        ``VALUES`` and ``check`` refuse.
        """
        if "kind" in entry:
            raise InputError(f"record of kind {entry['kind']!r} is no move of weights: row_files.read_rows reads it")
        version = entry.get("schema_version")
        if type(version) is not int or version not in (1, 2, SCHEMA_VERSION):
            raise InputError(f"record of schema_version {shown(version)}: this version reads 1 to {SCHEMA_VERSION}")
        if version == 1:
            entry = _from_version_1(entry)
        if version != SCHEMA_VERSION:
            entry = _from_version_2(entry)
        return record_of(cls, entry)


def _from_version_1(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A row of version 1 as one of version 2. Raises InputError where it already has what only version 2 has."""
    newer = [name for name in _SINCE_VERSION_2 if name in entry]
    if newer:
        raise InputError(f"record does not have the expected fields: {', '.join(newer)} differ")
    added = (("source_bytes", {"trainer": entry.get("bytes_total")}), ("fallback_tensors", 0))
    nothing = (("bytes_in_rank", None), ("max_extra_bytes", None))
    return {**entry, "schema_version": 2, **dict(added + nothing)}


def _from_version_2(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A row of version 2 as one of version 3. Raises InputError where it already has what only version 3 has."""
    if "simulated" in entry:
        raise InputError("record does not have the expected fields: simulated differ")
    return {**entry, "schema_version": SCHEMA_VERSION, "simulated": None}


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Median of ``samples`` with a distribution-free interval from order statistics.

    The interval is the narrowest symmetric pair of ranked samples that holds the median with ``confidence``
    (binomial count of samples below it); with fewer than 6 samples no pair reaches 95 % and it is the whole range.
    Raises InputError without samples.
    """
    ranked = sorted(samples)
    count = len(ranked)
    if not count:
        raise InputError("no samples: a median needs at least one")
    median = (ranked[(count - 1) // 2] + ranked[count // 2]) / 2
    low = 0
    for cut in range(count // 2):
        outside = 2 * sum(math.comb(count, k) for k in range(cut + 1)) / 2**count
        if outside > 1 - confidence:
            break
        low = cut
    return median, ranked[low], ranked[count - 1 - low]


def plain(value: Any) -> Any:
    """``value`` as strict JSON has it: arrays as lists, not-a-number as None. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bool) or value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Iterable):
        return [plain(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} has no JSON form here")


def dump_json(value: Any, *, indent: int | None = 2) -> str:
    """Strict JSON text with a newline at the end; not-a-number and infinity become null."""
    return json.dumps(plain(value), indent=indent, allow_nan=False) + "\n"


def dump_lines(rows: Iterable[Row]) -> str:
    """JSON Lines: one row a line, whatever its kind."""
    return "".join(dump_json(row.to_dict(), indent=None) for row in rows)


def read_input(path: Path, what: str) -> str:
    """The text of the file ``path``, less a byte order mark. ``what`` names it in errors. Raises InputError: missing,
    unreadable, no regular file (a device or a pipe may never end), over 1 GiB, not UTF-8."""
    try:
        found = path.stat()
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise InputError(f"{what} {path} is no regular file: write it to a file first, and name that")
        if found.st_size > _LARGEST_INPUT and stat.S_ISREG(found.st_mode):
            raise InputError(f"{what} {path} has {found.st_size} bytes: at most {_LARGEST_INPUT} are read")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {path} is not a text file in UTF-8") from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {what} {path}: {getattr(error, 'strerror', None) or error}") from error


def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of a JSON object: an ``object_pairs_hook``. Raises ValueError where a key stands twice: readers would
    differ on its value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:60]!r} stands twice in one object")
    return found


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError: malformed (JSONDecodeError), a key that stands twice, and, with its
    place, a number that is not finite (``NaN``, ``1e999``): written out again it would be null."""
    odd: list[str] = []

    def number(digits: str) -> float:
        found = float(digits)
        if not math.isfinite(found):
            odd.append(digits)
        return found

    value = json.loads(text, object_pairs_hook=members, parse_float=number, parse_constant=number)
    if odd:
        place = next(_odd_places(value), "")
        raise ValueError(f"{place + ': ' if place else ''}{odd[0][:60]} is no finite number")
    return value


def _odd_places(value: Any, place: str = "") -> Iterator[str]:
    """Where a JSON value holds a number that is not finite, such as ``executors.send-recv.price_error``."""
    if isinstance(value, float) and not math.isfinite(value):
        yield place
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _odd_places(entry, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _odd_places(entry, f"{place}[{number}]")


def load_json(path: Path, what: str) -> Any:
    """The JSON value in ``path``. ``what`` names it in errors. Raises InputError (missing, unreadable, malformed, a key
    that stands twice, a number that is not finite)."""
    text = read_input(path, what)
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{what} {path} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{what} {path} is not usable JSON: {error}") from error


def read_lines(path: Path, make: Callable[[dict[str, Any]], _Made]) -> list[_Made]:
    """``make`` of the JSON object in every line of the file ``path``. A line ends with a line feed, a carriage return
    or both: JSON texts hold neither, but may hold every other separator. Raises InputError naming the line."""
    lines = read_input(path, "records").split("\n")
    found = []
    for number, line in enumerate(lines if lines[-1] else lines[:-1], start=1):
        try:
            if not line.strip():
                raise InputError("an empty line: every line holds one row, so delete it")
            entry = parse_json(line.removeprefix("\ufeff"))  # of a file that was appended
            if not isinstance(entry, dict):
                raise InputError(f"{shown(entry)} is no row: expected an object")
            found.append(make(entry))
        except json.JSONDecodeError as error:
            told = f"not valid JSON at column {error.colno}: {error.msg}"
            raise InputError(f"records {path}, line {number}: {told}") from error
        except RecursionError as error:
            raise InputError(f"records {path}, line {number}: nested too deeply for a row") from error
        except (ValueError, InputError) as error:
            raise InputError(f"records {path}, line {number}: {error}") from error
    return found


def read_records(path: Path) -> list[MoveRecord]:
    """The rows of a JSON Lines file. Raises InputError naming the line."""
    return read_lines(path, MoveRecord.from_dict)


def check_target(path: Path, *, force: bool = False) -> None:
    """Refuse early what ``write_text`` would refuse after the work is done: what exists, what is no regular file, what
    cannot be written. Raises InputError; leaves nothing behind."""
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder: name a file in it")
        if (path.exists() or path.is_symlink()) and (path.is_symlink() or not path.is_file()):
            raise InputError(f"{path} is no regular file: choose another name")
        if path.exists() and not force:
            raise InputError(f"{path} exists: choose another name, or add --force to replace it")
        if not path.parent.is_dir():
            raise InputError(f"folder {path.parent} does not exist: make it first (mkdir -p {path.parent})")
        handle, name = _beside(path)
        os.close(handle)
        os.unlink(name)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def write_text(path: Path, text: str, *, force: bool = False) -> None:
    """Write ``path`` whole: to a new file beside it, then into place.

    Raises InputError where it exists (no ``force``) or cannot be written; nothing half-written is left.
    """
    check_target(path, force=force)
    try:
        handle, name = _beside(path)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(name, 0o666 & ~_umask())
            if force:
                os.replace(name, path)
                return
            os.link(name, path)
            os.unlink(name)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except FileExistsError as error:
        raise InputError(f"{path} exists: choose another name, or add --force to replace it") from error
    except OSError as error:
        raise _unwritable(path, error) from error


def _beside(path: Path) -> tuple[int, str]:
    """A new file in the folder of ``path``, refused where ``path`` itself has a name that is too long."""
    path.exists()
    return tempfile.mkstemp(dir=path.parent, prefix=".relaymeter-")


def _unwritable(path: Path, error: OSError | ValueError) -> InputError:
    text = getattr(error, "strerror", None) or str(error)
    return InputError(f"cannot write {str(path)[:200]}: {text}: choose another place")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
