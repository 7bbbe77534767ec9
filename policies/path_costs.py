"""Costs of the paths of a change: in memory, by gathering, through checkpoints; fitted to rows of ``compare``. Pure.

    costs = fit_path_costs(rows)                                  # rows of one change at two state sizes or more
    costs.price("universal", "disk", "cold", 10**9, ranks=4, nodes=1).pause_s

Every phase that grows with the state is a line, ``fixed_s + s_per_byte * bytes``, non-negative and weighted relative to
the seconds; relaunch, imports and build are medians. What a price assumes where ranks or nodes grow stands at
``PathCosts.price``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from relaymeter.compare_records import PATHS, CompareRecord, pausing
from relaymeter.errors import InputError
from relaymeter.policies.price import ERROR_FLOOR
from relaymeter.units import format_bytes

__all__ = ["GROWING", "STARTING", "PathCosts", "PathError", "PathFit", "PathPrice", "PhaseLine", "fit_path_costs"]

#: Phases that grow with the state: lines.
GROWING = ("plan", "move", "gather", "slice", "save", "convert", "load", "refresh")
#: Phases that do not, or hardly: medians.
STARTING = ("relaunch", "import", "build")
#: Phases that bring every byte of the state somewhere, and so take at least what a copy in memory does.
_COPYING = ("move", "gather", "slice", "save", "convert", "load")
#: Phases in which a rank works on its own part of the state alone, so that more ranks have less of it each.
_OWN_PART = ("slice", "refresh")

HeldOut = Literal["rows", "sizes", "launches", "nothing"]
#: What of a row belongs to the same costs: another change or world has costs of its own.
_ALIKE = ("source", "destination", "ranks", "nodes", "model", "dtype", "optimizer", "machine_id", "shaped")


@dataclass(frozen=True)
class PhaseLine:
    """Seconds of a phase: ``fixed_s + s_per_byte * bytes``, both non-negative."""

    fixed_s: float
    s_per_byte: float

    def at(self, state_bytes: float, share: float = 1.0) -> float:
        """Seconds at a state of so many bytes, of which ``share`` is worked on."""
        return self.fixed_s + self.s_per_byte * state_bytes * share


@dataclass(frozen=True)
class PathFit:
    """What one path costs over one storage: lines and medians by phase."""

    path: str
    storage: str | None
    cache: str | None
    filesystem: str | None
    lines: Mapping[str, PhaseLine]
    medians: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> PathFit:
        lines = {name: PhaseLine(one["fixed_s"], one["s_per_byte"]) for name, one in entry["lines"].items()}
        medians = {name: float(seconds) for name, seconds in entry["medians"].items()}
        return cls(entry["path"], entry["storage"], entry["cache"], entry["filesystem"], lines, medians)


@dataclass(frozen=True)
class PathError:
    """How far the price of one row was off that its fit had not seen: relative, of the pause and of what moves the
    state (the growing phases)."""

    path: str
    state_bytes: int
    pause: float
    growing: float


@dataclass(frozen=True)
class PathPrice:
    """Predicted seconds of a change by one path.

    pause_s: how long training stands still, and low_s, high_s its interval. phases: all of them, those before the pause
    (``plan``, ``build`` where nothing is relaunched) too. extrapolated: another size, number of ranks or nodes than
    measured. network: whether the move was priced by the network model, not by a line.
    """

    path: str
    storage: str | None
    cache: str | None
    pause_s: float
    low_s: float
    high_s: float
    phases: Mapping[str, float]
    extrapolated: bool
    network: bool = False

    @property
    def growing_s(self) -> float:
        """Seconds of the phases that grow with the state."""
        return sum(seconds for name, seconds in self.phases.items() if name in GROWING)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PathCosts:
    """Costs of every path of one kind of change, and how far their prices were off."""

    source: str
    """Engine that the state came from, such as ``zero3 x4``."""
    destination: str
    ranks: int
    nodes: int
    state_bytes: tuple[int, ...]
    """The measured sizes, ascending."""
    fits: tuple[PathFit, ...]
    errors: tuple[PathError, ...]
    held_out: HeldOut
    """What the errors were found on: ``rows`` that were not fitted, each of the ``sizes`` or ``launches`` left out in
    turn, or ``nothing``: the errors are twice those on what was fitted."""

    @property
    def error(self) -> float:
        """Median relative error of the pause over all paths, at least ``ERROR_FLOOR``."""
        return max(ERROR_FLOOR, statistics.median(one.pause for one in self.errors))

    @property
    def growing_error(self) -> float:
        """The same of what moves the state alone, without relaunch, imports and build."""
        return max(ERROR_FLOOR, statistics.median(one.growing for one in self.errors))

    def has(self, path: str, storage: str | None, cache: str | None) -> bool:
        return any((fit.path, fit.storage, fit.cache) == (path, storage, cache) for fit in self.fits)

    def price(
        self, path: str, storage: str | None, cache: str | None, state_bytes: int, ranks: int, nodes: int
    ) -> PathPrice:
        """The price of a change of ``state_bytes`` by one path. Pure.

        Assumed, not measured, where ``ranks`` or ``nodes`` are others than at calibration: saves and loads are done by
        all ranks at once but share the rate of the storage as it was measured, so that they take as long by however
        many ranks; a conversion is one process over all bytes; a relaunch with its imports and the build takes as long
        as measured, and so does a gather, which brings every byte to every rank; slicing and refreshing is done by each
        rank for its own part, so that its seconds per byte fall with the number of ranks. Such a price is marked as
        extrapolated, as one beyond the measured sizes is.

        Raises InputError where the path was not measured over this storage and page cache.
        """
        fit = next((one for one in self.fits if (one.path, one.storage, one.cache) == (path, storage, cache)), None)
        if fit is None:
            known = ", ".join(dict.fromkeys(_place(one.path, one.storage, one.cache) for one in self.fits))
            raise InputError(f"no costs of {_place(path, storage, cache)}: the profile has {known}")
        if state_bytes < 0 or ranks < 1 or nodes < 1:
            raise InputError(f"a state of {state_bytes} bytes on {ranks} ranks of {nodes} nodes has no price")
        share = self.ranks / ranks
        found = {
            name: line.at(state_bytes, share if name in _OWN_PART else 1.0) for name, line in fit.lines.items()
        } | dict(fit.medians)
        inside = self.state_bytes[0] <= state_bytes <= self.state_bytes[-1]
        return self.price_of(
            fit, found, state_bytes, extrapolated=not (inside and (ranks, nodes) == (self.ranks, self.nodes))
        )

    def price_of(
        self,
        fit: PathFit,
        phases: Mapping[str, float],
        state_bytes: int,
        *,
        extrapolated: bool,
        network_spread: float | None = None,
    ) -> PathPrice:
        """The price that is made of ``phases``.

        Its interval is that of its parts: nine tenths of the errors of what grows, nine tenths of those of the pause
        for the rest; ``network_spread`` for the move, where the network model priced it. It is doubled where the price
        is extrapolated. Beyond the largest measured state it also reaches up to what it would be if all that a line
        says there grew: which part of that does is what a few small states say least well.
        """
        growing, starting = self.spread_of(fit.path), _spread([one.pause for one in self._errors_of(fit.path)])
        times = state_bytes / self.state_bytes[-1]
        total = wide = most = 0.0
        for name in pausing(phases):
            seconds, spread = phases[name], growing if name in GROWING else starting
            networked = name == "move" and network_spread is not None
            if networked:
                spread = network_spread or 0.0
            total, wide = total + seconds, wide + seconds * spread
            line = fit.lines.get(name)
            grown = 0.0 if line is None or networked or times <= 1 else line.fixed_s * (times - 1)
            most += seconds + grown
        width = (wide / total if total else 0.0) * (2 if extrapolated else 1)
        return PathPrice(
            fit.path, fit.storage, fit.cache, total, total / (1 + width), max(total, most) * (1 + width), dict(phases),
            extrapolated, network_spread is not None,
        )  # fmt: skip

    def spread_of(self, path: str) -> float:
        """Relative half-width that nine tenths of the errors of what grows lie within, of one path."""
        return _spread([one.growing for one in self._errors_of(path)])

    def _errors_of(self, path: str) -> list[PathError]:
        return [one for one in self.errors if one.path == path] or list(self.errors)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "source": self.source,
            "destination": self.destination,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "state_bytes": list(self.state_bytes),
            "held_out": self.held_out,
            "errors": [asdict(one) for one in self.errors],
            "fits": [fit.to_dict() for fit in self.fits],
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> PathCosts:
        """What ``to_dict`` gave. Raises InputError for anything else."""
        try:
            found = cls(
                source=entry["source"],
                destination=entry["destination"],
                ranks=int(entry["ranks"]),
                nodes=int(entry["nodes"]),
                state_bytes=tuple(int(size) for size in entry["state_bytes"]),
                fits=tuple(PathFit.from_dict(one) for one in entry["fits"]),
                errors=tuple(PathError(**one) for one in entry["errors"]),
                held_out=entry["held_out"],
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(
                f"the profile's costs of paths are incomplete ({type(error).__name__}: {error}): calibrate again"
            ) from error
        numbers = [number for fit in found.fits for line in fit.lines.values() for number in asdict(line).values()]
        numbers += [number for fit in found.fits for number in fit.medians.values()]
        if not found.fits or not found.errors or not np.all(np.isfinite(numbers)) or min(numbers, default=0.0) < 0:
            raise InputError("the profile's costs of paths are no costs: calibrate again with --paths")
        return found


def fit_path_costs(
    rows: Sequence[CompareRecord], held_out: Sequence[CompareRecord] = (), *, copy_s_per_byte: float = 0.0
) -> PathCosts:
    """Fit the costs of every path, storage and page cache that has good rows at two state sizes or more.

    ``rows``: of one kind of change, in one world, on one machine. Rows that failed, cannot be or have wrong bits are
    left out. ``copy_s_per_byte``: of a copy in memory by all ranks at once, below which no phase that brings every byte
    somewhere grows, however rows of small states scatter.

    The error is found on ``held_out`` if given; else by leaving out each of three sizes or more in turn, or each launch
    of sizes that have several; else it is twice the error on what was fitted.

    Raises InputError on rows of several changes or worlds, and where no path has two sizes.
    """
    good, other = ([row for row in some if row.ok and row.pause_s is not None] for some in (rows, held_out))
    for name in _ALIKE:
        values = list(dict.fromkeys(getattr(row, name) for row in (*good, *other)))
        if len(values) > 1:
            raise InputError(
                f"rows of {name} {values[0]} and {values[1]} have costs of their own: fit the rows of one change, in "
                "one world"
            )
    fits = _fits(good, copy_s_per_byte)
    if not fits:
        sizes = sorted({row.state_bytes for row in good})
        raise InputError(
            "costs of paths need good rows at two state sizes or more, there are "
            + (f"those of {', '.join(map(format_bytes, sizes))}" if sizes else "none")
        )
    errors, how = _errors(good, other, fits, copy_s_per_byte)
    first = good[0]
    return PathCosts(
        first.source, first.destination, first.ranks, first.nodes, tuple(sorted({row.state_bytes for row in good})),
        fits, errors, how,
    )  # fmt: skip


def _place(path: str, storage: str | None, cache: str | None) -> str:
    return path if storage is None else f"{path} on {storage}" + (f" ({cache} cache)" if cache else "")


def _key(row: CompareRecord) -> tuple[str, str | None, str | None]:
    return row.path, row.storage, row.cache


def _fits(rows: Sequence[CompareRecord], copy: float) -> tuple[PathFit, ...]:
    """A fit for every path over every storage with rows at two sizes, in the order of ``PATHS``."""
    found: dict[tuple[str, str | None, str | None], list[CompareRecord]] = {}
    for row in rows:
        found.setdefault(_key(row), []).append(row)
    order = sorted(found, key=lambda key: PATHS.index(key[0]) if key[0] in PATHS else len(PATHS))
    return tuple(_fit(found[key], copy) for key in order if len({row.state_bytes for row in found[key]}) > 1)


def _fit(rows: Sequence[CompareRecord], copy: float) -> PathFit:
    phases = [row.phases for row in rows]
    names = [name for name in (*GROWING, *STARTING) if all(name in found for found in phases)]
    lines = {
        name: _line(
            [row.state_bytes for row in rows],
            [found[name] for found in phases],
            copy if name in _COPYING else 0.0,
        )
        for name in names
        if name in GROWING
    }
    medians = {name: statistics.median(found[name] for found in phases) for name in names if name in STARTING}
    first = rows[0]
    return PathFit(first.path, first.storage, first.cache, first.filesystem, lines, medians)


def _line(sizes: Sequence[int], seconds: Sequence[float], least: float) -> PhaseLine:
    """The non-negative line with the smallest sum of squared relative errors that grows by ``least`` seconds per byte.
    A phase that took no time costs none."""
    from relaymeter.calibration.curve_fit import relative_line  # scikit-learn, which pricing does without

    size, time = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    some = time > 0
    if not some.any():
        return PhaseLine(0.0, 0.0)
    size, time = size[some], time[some]
    fixed, slope = relative_line(np.column_stack([np.ones(len(size)), size]), time).tolist()
    if slope < least:
        weight = 1.0 / time**2
        fixed, slope = float(((time - least * size) * weight).sum() / weight.sum()), least
    return PhaseLine(max(0.0, fixed), max(0.0, slope))


def _errors(
    rows: Sequence[CompareRecord], other: Sequence[CompareRecord], fits: Sequence[PathFit], copy: float
) -> tuple[tuple[PathError, ...], HeldOut]:
    """Errors on rows that a fit had not seen, and what was held out."""
    if found := _missed(fits, other):
        return tuple(found), "rows"

    def in_turn(part: Callable[[CompareRecord], object]) -> list[PathError]:
        parts = dict.fromkeys(part(row) for row in rows)
        return [
            error
            for one in parts
            for error in _missed(
                _fits([row for row in rows if part(row) != one], copy), [row for row in rows if part(row) == one]
            )
        ]

    if len({row.state_bytes for row in rows}) > 2 and (found := in_turn(lambda row: row.state_bytes)):
        return tuple(found), "sizes"
    if found := in_turn(lambda row: (row.state_bytes, row.launch_id, row.launch)):
        return tuple(found), "launches"
    return tuple(
        PathError(one.path, one.state_bytes, 2 * one.pause, 2 * one.growing) for one in _missed(fits, rows)
    ), "nothing"


def _missed(fits: Sequence[PathFit], rows: Sequence[CompareRecord]) -> list[PathError]:
    """How far each of ``rows`` that has a fit lies from it."""
    by = {(fit.path, fit.storage, fit.cache): fit for fit in fits}
    found = []
    for row in rows:
        fit = by.get(_key(row))
        if fit is None:
            continue
        predicted = {name: line.at(row.state_bytes) for name, line in fit.lines.items()} | dict(fit.medians)
        names = pausing(row.phases)
        growing = [name for name in names if name in GROWING]
        found.append(
            PathError(
                row.path,
                row.state_bytes,
                _off(row.phases, predicted, names),
                _off(row.phases, predicted, growing),
            )
        )
    return found


def _off(measured: Mapping[str, float], predicted: Mapping[str, float], names: Sequence[str]) -> float:
    """Relative error of a sum of phases; 0 where nothing was measured."""
    took = sum(measured[name] for name in names)
    return abs(sum(predicted.get(name, 0.0) for name in names) / took - 1) if took > 0 else 0.0


def _spread(errors: Sequence[float]) -> float:
    """Relative half-width of an interval that nine tenths of the errors lie in."""
    return max(ERROR_FLOOR, float(np.quantile(np.asarray(errors, dtype=np.float64), 0.9)))
