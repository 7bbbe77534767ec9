"""The two sides of every row, and the rows that come of them. Pure; no torch import.

``base_of(before, after)`` says what may be held against what: exact metrics (bytes, messages, digests) of one suite and
configuration are the same on every machine, times are not. ``pair_up(base, after)`` gathers, ``judged(both, ...)``
gives the rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relaymeter.harness.track.evidence import MIN_LAUNCHES, Finding, Pair, Spread, compare, spread_of
from relaymeter.harness.track.records import CaseRecord, LaunchRecord, metric_of
from relaymeter.harness.track.row_verdicts import Exact, Timed, Value, bare_row, exact_row, timed_row
from relaymeter.harness.track.verdicts import Row, Side, severity
from relaymeter.units import counted

__all__ = [
    "Base",
    "Both",
    "Judged",
    "Key",
    "base_of",
    "judged",
    "pair_up",
    "settings_differ",
    "side_of",
    "values_of",
    "wrong_bits",
]

#: What has to agree between the sides, and what to do about it.
_SETTINGS = {
    "machine_id": "take both sides on one machine",
    "config_hash": "take both sides with the same suite and options",
    "suite": "take both sides with the same --suite",
    "schema_version": "take both sides with one version of relaymeter",
}
Key = tuple[str, str]


@dataclass(frozen=True)
class Base:
    """Of the launches before: those whose times may be held against, and those whose exact metrics may."""

    times: tuple[LaunchRecord, ...] = ()
    exact: tuple[LaunchRecord, ...] = ()
    mismatch: Mapping[str, str] = field(default_factory=dict)
    """By setting, how the sides differ, let through by ``--allow-mismatch``."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """By setting, how they differ, and why times, or everything, is not compared."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Both:
    """What both sides measured of one row: a value of every launch, empty where a side lacks it."""

    case: str
    metric: str
    before: tuple[float | Value, ...]
    after: tuple[float | Value, ...]
    since: str = ""
    """Of a change in a history: ``since 1a2b3c4d5 (2 commits ago)``, or ``among the newest 5 commits``."""
    doubt: str = ""
    """Why a slow-down in it need not be a change."""
    spread: Spread | None = None
    """Of the whole series, where more is known than both sides tell."""
    p_value: float | None = None
    """Corrected already, where a history gives it."""
    refused: str = ""
    """Why the sides must not be compared in this row."""

    @property
    def exact(self) -> bool:
        """Whether the metric is held to equality."""
        return metric_of(self.metric).better == "equal"


@dataclass(frozen=True)
class Judged:
    """Rows, and what the launches say of the timed ones among them that have enough."""

    rows: tuple[Row, ...]
    tested: tuple[Key, ...]
    """Case and metric of each finding."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def values_of(launches: Sequence[LaunchRecord]) -> dict[Key, list[float | Value]]:
    """Per case and metric a value of every launch, in order: of a time the median of its repeats. Times of moves that
    lost bits are left out."""
    found: dict[Key, list[float | Value]] = {}
    for launch in launches:
        for case in launch.cases:
            for metric, value in case.exact.items():
                found.setdefault((case.name, metric), []).append(value)
            for metric in case.samples:
                values = found.setdefault((case.name, metric), [])
                median = case.median(metric)
                if median is not None and case.ok:
                    values.append(median)
    return found


def pair_up(base: Base, after: Sequence[LaunchRecord], *, exact_only: bool = False) -> list[Both]:
    """Every row that either side has, in the order of the newer one; only the exact ones with ``exact_only``."""
    old, new = values_of(base.times), values_of(after)
    # why: an exact metric is held against the launches of every machine
    old = {key: values for key, values in old.items() if metric_of(key[1]).better != "equal"}
    old |= {key: values for key, values in values_of(base.exact).items() if metric_of(key[1]).better == "equal"}
    refused = f"not compared: {' and '.join(base.refused)} differs, see the notes" if base.refused else ""
    found = []
    for case, metric in dict.fromkeys((*new, *old)):
        exact = metric_of(metric).better == "equal"
        if not exact and exact_only:
            continue
        found.append(
            Both(
                case=case,
                metric=metric,
                before=tuple(old.get((case, metric), ())),
                after=tuple(new.get((case, metric), ())),
                refused="" if exact and base.exact else refused,
            )
        )
    return found


def wrong_bits(launches: Sequence[LaunchRecord], where: str) -> dict[str, str]:
    """By case, where not every digest matched: what to say of it. ``where`` names the side."""
    found: dict[str, list[CaseRecord]] = {}
    for launch in launches:
        for case in launch.cases:
            if not case.ok:
                found.setdefault(case.name, []).append(case)
    texts = {}
    for name, cases in found.items():
        worst = min(cases, key=lambda case: (case.digest_passed / case.digest_total) if case.digest_total else -1.0)
        what = f"{worst.digest_passed} of {worst.digest_total} digests matched"
        if not worst.digest_total:
            what = "no digest was taken"
        texts[name] = f"{what} in {len(cases)} of {len(launches)} launches of {where}"
    return texts


def settings_differ(before: Sequence[LaunchRecord], after: Sequence[LaunchRecord]) -> dict[str, str]:
    """By setting in which launches differ: both values and what to do. Empty: they may be compared."""
    found = {}
    for name, advice in _SETTINGS.items():
        old = dict.fromkeys(str(getattr(launch, name)) for launch in before)
        new = dict.fromkeys(str(getattr(launch, name)) for launch in after)
        if len({**old, **new}) > 1:
            found[name] = f"{name} differs ({', '.join(old)} before, {', '.join(new)} after): {advice}"
    return found


def base_of(
    before: Sequence[LaunchRecord], after: Sequence[LaunchRecord], *, allowed: bool, one_machine: bool = False
) -> Base:
    """What of ``before`` may be held against ``after``, whose launches agree in every setting.

    Times: launches of the same machine, configuration and suite. Exact metrics: of the same configuration and suite,
    on whatever machine. ``allowed``: where there are none of these, what differs is let through. ``one_machine``: both
    sides are known to be launched on one machine, whose id differs with the version of torch.
    """
    alike = [one for one in before if not set(settings_differ([one], after)) - {"machine_id"}]
    same = alike if one_machine else [one for one in alike if not settings_differ([one], after)]
    if same:
        left = [len(alike) - len(same), len(before) - len(alike)]
        notes = [
            f"{what}{count} {'launch' if count == 1 else 'launches'} of another {of} are left out"
            for count, what, of in zip(left, ("times of ", ""), ("machine", "configuration"), strict=True)
            if count
        ]
        return Base(tuple(same), tuple(alike), notes=tuple(notes))
    differ = settings_differ(alike or before, after)
    if allowed or not differ:
        return Base(tuple(alike or before), tuple(alike or before), mismatch=differ)
    what = "times are not compared, exact metrics are" if alike else "nothing is compared"
    said = f"{'; '.join(differ.values())}; or add --allow-mismatch, which marks the report: {what}"
    return Base((), tuple(alike), refused=differ, notes=(said,))


def side_of(launches: Sequence[LaunchRecord], label: str) -> Side:
    """One side of a report. ``launches``: at least one."""
    last = launches[-1]
    return Side(
        label=label,
        commit=last.commit if len({launch.commit for launch in launches}) == 1 else None,
        version=last.version,
        machine_id=last.machine_id,
        config_hash=last.config_hash,
        launches=len(launches),
        dirty=any(launch.dirty for launch in launches),
    )


def judged(both: Sequence[Both], wrong: dict[str, str], *, level: float, at_least: float, hint: str) -> Judged:
    """The rows of one check. Where ``both`` has a row several times, the worst decides, the first among equals.

    ``wrong``: by case, what to say of bits that did not arrive. ``level``: the corrected two-sided p below which a
    change of a time counts. ``hint``: how to take more launches, for people.
    """
    exact: dict[str, list[Both]] = {case: [] for case in wrong}
    for one in both:
        if one.case in exact and one.exact:
            exact[one.case].append(one)
    rows: dict[Key, Row] = {(case, "digest"): _wrong_row(case, text, exact[case]) for case, text in wrong.items()}
    given = set(rows)
    notes = []

    def say(row: Row) -> None:
        key = row.case, row.metric
        rows[key] = min(rows.get(key, row), row, key=lambda one: severity(one.verdict))

    known = any(one.before or one.refused for one in both)
    tested: list[Both] = []
    for one in both:
        key, counts = (one.case, one.metric), (len(one.before), len(one.after))
        if key in given:
            continue
        if one.refused:
            values = {"before": _middle(one.before), "after": _middle(one.after), "launches": counts}
            say(bare_row(*key, "inconclusive", one.refused, **values))  # type: ignore[arg-type]
        elif not one.after:
            text = f"missing on the new side {one.since}".rstrip()
            text = text if one.case not in wrong else "no launch with the right bits"
            say(bare_row(*key, "inconclusive", text, before=_middle(one.before), launches=counts))
        elif not one.before:
            text = "new: there is nothing to hold it against"
            verdict = "ok" if known else "no baseline"
            say(bare_row(*key, verdict, text, after=_middle(one.after), launches=counts))  # type: ignore[arg-type]
            if known:
                notes.append(f"{one.case}: {one.metric} is new: there is nothing to hold it against")
        elif one.exact:
            before = [value for value in one.before if not isinstance(value, float)]
            after = [value for value in one.after if not isinstance(value, float)]
            say(exact_row(Exact(case=one.case, metric=one.metric, before=before, after=after, since=one.since)))
        elif min(_numbers(one.before)) <= 0 or min(_numbers(one.after)) <= 0:
            say(_not_above_zero(one, counts))
        else:
            tested.append(one)
    enough = [one for one in tested if min(len(one.before), len(one.after)) >= MIN_LAUNCHES]
    few = [one for one in tested if min(len(one.before), len(one.after)) < MIN_LAUNCHES]
    findings = _findings(enough)
    for one, found in (*zip(enough, findings, strict=True), *zip(few, _findings(few), strict=True)):
        timed = Timed(
            case=one.case,
            metric=one.metric,
            before=statistics.median(_numbers(one.before)),
            after=statistics.median(_numbers(one.after)),
            launches=(len(one.before), len(one.after)),
            finding=found,
            since=one.since,
            doubt=one.doubt,
        )
        say(timed_row(timed, level=level, at_least=at_least, rows=len(enough), hint=hint))
    order = dict.fromkeys((one.case, one.metric) for one in both)
    order = dict.fromkeys((*(key for key in rows if key not in order), *order))
    keys = tuple((one.case, one.metric) for one in enough)
    return Judged(tuple(rows[key] for key in order), keys, tuple(findings), tuple(notes))


def _wrong_row(case: str, text: str, exact: Sequence[Both]) -> Row:
    """A case in which bits were wrong, with its digests and launches where they were taken."""
    own = next((one for one in exact if one.metric == "digest"), None)
    if own is None:
        counts = max(((len(one.before), len(one.after)) for one in exact), default=(0, 0))
        return bare_row(case, "digest", "wrong bits", text, launches=counts)
    counts = (len(own.before), len(own.after))
    before, after = _middle(own.before), _middle(own.after)
    return bare_row(case, "digest", "wrong bits", text, before=before, after=after, launches=counts)


def _findings(both: Sequence[Both]) -> list[Finding]:
    pairs = [Pair(_numbers(one.before), _numbers(one.after), metric_of(one.metric).better == "higher") for one in both]
    spreads = [one.spread or spread_of((pair.before, pair.after)) for one, pair in zip(both, pairs, strict=True)]
    found = compare(pairs, spreads)
    return [what if one.p_value is None else what.corrected(one.p_value) for one, what in zip(both, found, strict=True)]


def _not_above_zero(one: Both, counts: tuple[int, int]) -> Row:
    values = {"before": _middle(one.before), "after": _middle(one.after), "launches": counts}
    if min(_numbers(one.before)) <= 0:
        return bare_row(one.case, one.metric, "ok", "the base is 0: not held to a limit", **values)  # type: ignore[arg-type]
    text = f"{counted(sum(value <= 0 for value in _numbers(one.after)), 'value')} of 0 on the new side: no ratio"
    return bare_row(one.case, one.metric, "inconclusive", text, **values)  # type: ignore[arg-type]


def _numbers(values: Sequence[float | Value]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _middle(values: Sequence[float | Value]) -> float | Value | None:
    """What a row shows of a side: of times the median, of exact metrics the last one."""
    if not values:
        return None
    return statistics.median(_numbers(values)) if isinstance(values[0], float) else values[-1]
