"""What stands in no table of ``report``: what a scenario asks for and no row has, and the rows that are no results.

``not_run(rows, shipped=True)`` and ``faults(rows)``, the worst first. Pure, but for reading shipped scenarios.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product

from relaymeter.compare_records import PATHS, CompareRecord
from relaymeter.errors import InputError
from relaymeter.harness.compare_config import CompareScenario
from relaymeter.harness.config import Scenario
from relaymeter.harness.report_compare import paths_of, tables_of
from relaymeter.harness.report_figures import fault_lines, is_wrong
from relaymeter.harness.report_sources import AnyRow
from relaymeter.harness.report_tables import grouped, rows_by_origin
from relaymeter.harness.scenario import AnyScenario, load_any, shipped_scenarios
from relaymeter.harness.state_config import OffloadScenario, StateScenario
from relaymeter.records import MoveRecord
from relaymeter.state_records import OffloadRecord, StateRecord
from relaymeter.units import counted

__all__ = ["faults", "model_text", "not_run"]

#: Routes that a move may have no rows of because they would repeat another one, or because nothing was priced.
_OPTIONAL = ("chain", "chosen")


def faults(rows: Iterable[AnyRow]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Wrong bits, and whatever else is wrong with a row, each in a line."""
    every = list(rows)
    wrong, other = [row for row in every if is_wrong(row)], [row for row in every if not is_wrong(row)]
    return fault_lines(wrong), fault_lines(other)


def not_run(rows: Sequence[AnyRow], *, shipped: bool, options: Collection[str] = ()) -> tuple[str, ...]:
    """What the scenario of ``rows`` (of one kind) has and no row is of, by where they were measured. ``shipped``:
    whether the scenario is known to be the one that comes with this package; ``options``: those of every command that
    made the rows: what ``--change``, ``--move`` or ``--paths`` left out was not selected."""
    by_origin = rows_by_origin(rows)
    scenario = _scenario(rows[0]) if shipped else None
    lines: list[str] = []
    for origin, mine in by_origin.items():
        where = f" (commit {origin.commit} on {origin.machine_id})" if len(by_origin) > 1 else ""
        lines += [line + where for line in (*_named(mine, scenario, options), *_holes(mine, options))]
    return tuple(dict.fromkeys(lines))


def _scenario(row: AnyRow) -> AnyScenario | None:
    if row.scenario not in shipped_scenarios():
        return None
    try:
        return load_any(row.scenario)
    except InputError:
        return None


def model_text(row: AnyRow) -> str:
    """The size of the model of a shipped scenario: ``5 residual blocks of width 512``; empty where it has none."""
    scenario = _scenario(row)
    if not isinstance(scenario, CompareScenario) or scenario.training.model != "blocks":
        return ""
    return f"{scenario.training.layers} residual blocks of width {scenario.training.width}"


def _selected(options: Collection[str], *names: str) -> str:
    """What a line begins with where one of the options ``names`` chose."""
    return next((f"not selected by {name}: " for name in names if name in options), "")


def _named(rows: Sequence[AnyRow], scenario: AnyScenario | None, options: Collection[str]) -> list[str]:
    """Moves and changes of the scenario that no row is of. Rows that are of none of them are of another scenario."""
    have = {row.move if isinstance(row, MoveRecord) else _change(row) for row in rows}
    names: list[str] = []
    if isinstance(scenario, Scenario):
        names = [move.name for move in scenario.moves]
    elif isinstance(scenario, CompareScenario):
        names = [change.name for change in scenario.changes]
    elif isinstance(scenario, StateScenario) and scenario.rounds is not None:
        first, second = scenario.rounds.first_name, scenario.rounds.second_name
        names = [f"{first} -> {second}", f"{second} -> {first}"]
    elif isinstance(scenario, StateScenario):
        names = [change.name for change in scenario.changes]
    elif isinstance(scenario, OffloadScenario):
        names = [f"zero{stage}" for stage in scenario.stages]
    left = [name for name in names if name not in have]
    if not left or len(left) == len(names):
        return []
    what = "move" if isinstance(scenario, Scenario) else "stage" if isinstance(scenario, OffloadScenario) else "change"
    chosen = _selected(options, "--change", "--move")
    return [f"{chosen}{counted(len(left), what)} of {len(names)}: {', '.join(left)}"]


def _change(row: StateRecord | CompareRecord | OffloadRecord | MoveRecord) -> str:
    if isinstance(row, OffloadRecord):
        return f"zero{row.stage}"
    return row.move if isinstance(row, MoveRecord) else row.change


def _holes(rows: Sequence[AnyRow], options: Collection[str]) -> list[str]:
    """Combinations that some of the moves or changes were run in, and others not."""
    compared = [row for row in rows if isinstance(row, CompareRecord)]
    if compared:
        return _paths_without_rows(compared, options)
    moves = [row for row in rows if isinstance(row, MoveRecord)]
    states = [row for row in rows if isinstance(row, StateRecord)]
    lines = []
    if moves:
        ways = [{row.planner for row in moves}, {row.executor for row in moves}]
        routes = {row.route for row in moves} - set(_OPTIONAL)
        every = list(product(*map(sorted, ways), sorted(routes)))
        for move, own in grouped(moves, lambda row: row.move).items():
            have = {(row.planner, row.executor, row.route) for row in own}
            lines += [f"{move}: {', '.join(way)}" for way in every if way not in have]
    if states:
        planners = sorted({row.planner for row in states})
        for change, mine in grouped(states, lambda row: row.change).items():
            left = [planner for planner in planners if planner not in {row.planner for row in mine}]
            lines += [f"{change}: planned by {planner}" for planner in left]
    return lines


def _paths_without_rows(rows: Sequence[CompareRecord], options: Collection[str]) -> list[str]:
    tables = tables_of(rows)
    have = {name: {(path.label, path.on) for path in paths_of(mine)} for (_, name), mine in tables.items()}
    labels = {label for found in have.values() for label, _ in found}
    never = [path for path in PATHS if path not in labels]
    lines = [f"{_selected(options, '--paths')}no change by {path}" for path in never]
    some = sorted({key for found in have.values() for key in found})
    stated = {name: {row.path for row in mine if row.cannot is not None} for (_, name), mine in tables.items()}
    for name, found in have.items():
        lines += [
            f"{name}: {label}{'' if on == '-' else f' on {on}'}"
            for label, on in some
            if (label, on) not in found and label not in stated[name]
        ]
    return lines
