"""The figures of a validation, each with its bar: pure functions on records and the profile they were predicted from.

``figures(records, profile)`` gives them in the order of a report; ``exit_code(found, records)`` judges the default
executor's. An error is predicted over measured, less one; percentiles are interpolated linearly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from relaymeter.calibration.patterns import Flow
from relaymeter.calibration.profiles import Profile
from relaymeter.errors import EXIT_GATE_MISSED, EXIT_NOTHING_MEASURED, EXIT_OK, EXIT_WRONG_BITS
from relaymeter.harness.box import payload_rate
from relaymeter.harness.validate_bars import MISSED, NONE_HERE, UNDECIDED, Bar, Figure, figure, without_meaning
from relaymeter.harness.validate_candidates import (
    AT,
    BELOW,
    Side,
    contests,
    kendall_tau,
    mixes,
    ordered_pairs,
    settled,
    sides,
)
from relaymeter.harness.validate_check import check, wrong_bits
from relaymeter.validation_records import THRESHOLDS, ValidationRecord

__all__ = [
    "error_figure",
    "executors_of",
    "exit_code",
    "figures",
    "known_nic_rates",
    "nic_errors",
]

#: Messages from this size on count for the held-out sizes, and from four times it for the NICs' rates.
LARGE_BYTES = 1 << 20
NIC_BYTES = 4 << 20
#: Whole moves: so many scenario x route cells at least, and this share of cells and matrices hard.
LEAST_CELLS = 24
HARD_SHARE = 1 / 3


def executors_of(records: Sequence[ValidationRecord], profile: Profile) -> tuple[str, ...]:
    """Executors of the records, the default one first: the records' own word for it, else the profile's."""
    default = next((row.executor for row in records if row.default_executor), profile.executor)
    return tuple(dict.fromkeys([default, *(row.executor for row in records)]))


def error_figure(
    key: str,
    title: str,
    executor: str,
    records: Sequence[ValidationRecord],
    *,
    judged: bool,
    limits: Mapping[str, float],
    more: Iterable[Bar] = (),
) -> Figure:
    """Absolute relative errors of predicted against measured times. ``limits``: statistic -> bar.

    Statistics: median, p90, max; bias (median signed error); tau (Kendall's, of predicted and measured order over all
    cases); inside (share of measured times inside the predicted interval); scatter (median half-width of the measured
    interval, a floor under any error).
    """
    found = _spread([row.error for row in records])
    if records:
        found["bias"] = float(np.median([row.error for row in records]))
        found["tau"] = kendall_tau([row.predicted_s for row in records], [row.measured_s for row in records])
        found["inside"] = float(
            np.mean([row.predicted_low_s <= row.measured_s <= row.predicted_high_s for row in records])
        )
        widths = [(row.measured_high_s - row.measured_low_s) / 2 / row.measured_s for row in records]
        found["scatter"] = float(np.median(widths))
    bars = [Bar(name, found.get(name), limit) for name, limit in limits.items()]
    hard = sum(bool(row.hard) for row in records)
    return figure(key, title, executor, judged, len(records), [*bars, *more], hard=hard, statistics=found)


def _spread(errors: Sequence[float]) -> dict[str, float | None]:
    """Median, 90th percentile and largest of the absolute values."""
    if not len(errors):
        return {}
    sizes = np.abs(np.asarray(errors, dtype=np.float64))
    return {
        "median": float(np.median(sizes)), "p90": float(np.quantile(sizes, 0.9)), "max": float(sizes.max())
    }  # fmt: skip


def _hard_share(records: Sequence[ValidationRecord]) -> Bar:
    share = sum(bool(row.hard) for row in records) / len(records) if records else None
    return Bar("hard", share, HARD_SHARE, least=True)


def figures(
    records: Sequence[ValidationRecord],
    profile: Profile,
    *,
    nic_rates: Mapping[int, float] | None = None,
    notes: Sequence[str] = (),
) -> tuple[Figure, ...]:
    """Every figure, executor by executor, the default one first. Pure.

    ``nic_rates``: the true payload rate of each NIC in bytes per second, where the profile's fingerprint does not say
    it (a simulated cluster). ``notes``: sentences on what was looked for and could not be measured; one that begins
    with "EXECUTOR min_relay", "EXECUTOR min_split" or "mixed routes" explains that figure where it has no case. Raises
    InputError on rows of which no figure can be made (``validate_check.check``). Rows with wrong bits count in the
    figure of the bits alone.
    """
    check(records, profile)
    bad = {id(row) for row in wrong_bits(records)}
    every = sides([row for row in records if id(row) not in bad])
    found: list[Figure] = []
    for place, executor in enumerate(executors_of(records, profile)):
        whole = [row for row in records if row.executor == executor]
        mine = [row for row in whole if id(row) not in bad]
        judged = place == 0
        if judged:
            truth = known_nic_rates(records, profile) if nic_rates is None else nic_rates
            found.append(_nics(profile, executor, truth))
        found += [*_errors(executor, mine, judged), _five_line(executor, mine, "move", judged)]
        found += [_five_line(executor, mine, "matrix", False), _regret(executor, mine, judged)]
        found += [_order(executor, mine, "move", judged), _order(executor, mine, "batch", False)]
        found += [*_thresholds(executor, every, judged, notes), _mix(executor, mine, judged, notes)]
        found.append(_bits(executor, whole, judged))
    return tuple(one for one in found if one.judged or one.count)


def _errors(executor: str, records: Sequence[ValidationRecord], judged: bool) -> list[Figure]:
    sizes = [row for row in records if row.kind == "size"]
    large = [row for row in sizes if row.largest_bytes >= LARGE_BYTES]
    small = [row for row in sizes if row.largest_bytes < LARGE_BYTES]
    matrices = [row for row in records if row.kind == "matrix"]
    moves = [row for row in records if row.kind == "move"]
    batches = [row for row in records if row.kind in ("batch", "mix")]
    cells = len({(case.name, row.route) for case in contests(moves) for row in case.candidates}) if moves else None
    wide = {"median": 0.08, "p90": 0.20}
    enough = Bar("cells", cells, LEAST_CELLS, least=True, number=True)
    found = [
        error_figure(
            "sizes", "held-out sizes from 1 MiB on", executor, large, judged=judged,
            limits={"median": 0.05, "max": 0.15},
        ),
        error_figure("small sizes", "held-out sizes below 1 MiB", executor, small, judged=False, limits={}),
        error_figure(
            "matrices", "uneven matrices", executor, matrices, judged=judged, limits=wide,
            more=[_hard_share(matrices)],
        ),
        error_figure(
            "moves", "whole moves", executor, moves, judged=judged, limits=wide, more=[enough, _hard_share(moves)]
        ),
        error_figure("batches", "batches and mixes", executor, batches, judged=False, limits={}),
    ]  # fmt: skip
    for link in ("in_node", "cross_node"):
        part = [row for row in large if row.link == link]
        title = f"  of these, {'inside a node' if link == 'in_node' else 'between nodes'}"
        found.insert(-4, error_figure(f"sizes {link}", title, executor, part, judged=False, limits={}))
    return found


def _five_line(executor: str, records: Sequence[ValidationRecord], kind: str, judged: bool) -> Figure:
    """Median error on the hard cases of ``kind`` over that of the five-line model on the same ones; none of them may
    lack the model's word."""
    hard = [row for row in records if row.kind == kind and row.hard]
    both = [(row.error, row.baseline_error) for row in hard if row.baseline_error is not None]
    ours, theirs = _spread([one for one, _ in both]), _spread([other for _, other in both])
    found: dict[str, float | None] = {**ours, **{f"five_line_{name}": value for name, value in theirs.items()}}
    ratio = None
    if both:
        mine, other = ours["median"] or 0.0, theirs["median"] or 0.0
        ratio = mine / other if other > 0 else math.inf
    found["ratio"] = ratio
    title = f"over the five-line model, hard {'moves' if kind == 'move' else 'matrices'}"
    bars = [Bar("ratio", ratio, 0.5)]
    if len(both) < len(hard):
        bars.append(Bar("without baseline_s", len(hard) - len(both), 0, number=True))
    return figure(f"five-line {kind}", title, executor, judged, len(hard), bars, hard=len(hard), statistics=found)


def _regret(executor: str, records: Sequence[ValidationRecord], judged: bool) -> Figure:
    regrets = [case.regret for case in contests(records)]
    found = _spread([one for one in regrets if one is not None])
    bars = [Bar("median", found.get("median"), 0.02), Bar("max", found.get("max"), 0.10)]
    count = sum(one is not None for one in regrets)
    return figure(
        "regret", "regret of the chosen routes", executor, judged, count, bars, statistics=found
    )  # fmt: skip


def _order(executor: str, records: Sequence[ValidationRecord], kind: str, judged: bool) -> Figure:
    """Pairs of candidates that were measured apart; tau: the mean, over the cases, of Kendall's tau of its routes."""
    cases = contests(records, kind)
    right, total = ordered_pairs(cases)
    share = right / total if total else None
    taus = [
        kendall_tau([row.predicted_s for row in case.candidates], [row.measured_s for row in case.candidates])
        for case in cases
    ]
    known = [tau for tau in taus if tau is not None]
    what = "moves" if kind == "move" else "batches"
    pairs = sum(math.comb(len(case.candidates), 2) for case in cases)
    return figure(
        f"order {kind}", f"pairs of routes in order, {what}", executor, judged, total or pairs,
        [Bar("share", share, 0.95, least=True)],
        statistics={"share": share, "tau": float(np.mean(known)) if known else None},
        otherwise=MISSED if total else UNDECIDED,
        note=f"{right} of {total}" if total else f"0 of {pairs} measured apart",
    )  # fmt: skip


def _thresholds(executor: str, every: Sequence[Side], judged: bool, notes: Sequence[str]) -> list[Figure]:
    """Per threshold: of the decided batches below and above it, the share where the predicted side won. Then the
    settings that have both sides decided, of which the bar asks one among all boxes; ``every``: of all executors."""
    ours = [one for one in every if one.executor == executor]
    found = []
    why = {name: _said(notes, f"{executor} {name}") for name in THRESHOLDS}
    for name in THRESHOLDS:
        mine = [one for one in ours if one.threshold == name and one.side != AT]
        right, wrong, open_ = (sum(one.verdict == word for one in mine) for word in ("right", "wrong", "undecided"))
        below = sum(one.verdict == "right" and one.side == BELOW for one in mine)
        share = right / (right + wrong) if right + wrong else None
        note = f"right {below} below, {right - below} above; {wrong} wrong, {open_} undecided"
        bars = [Bar("share", share, 1.0, least=True)]
        found.append(
            figure(
                name, f"{name}: the predicted side wins", executor, judged, len(mine), bars,
                statistics={"share": share}, otherwise=UNDECIDED if share is None else MISSED, note=note,
                why_none=why[name],
            )
        )  # fmt: skip
    decided, settings = settled(ours)
    bars = [Bar("settings", len(decided), 1, least=True, number=True)]
    rivals = [other for other in dict.fromkeys(one.executor for one in every) if other != executor]
    others = "; ".join(_settings_of(other, every) for other in rivals)
    more = f"; {others}" if judged and others and not decided else ""
    why_none = "; ".join(why.values()) if all(why.values()) else ""
    found.append(
        figure(
            "settled", "thresholds with both sides decided", executor, judged, settings, bars,
            statistics={"settings": len(decided)}, otherwise=NONE_HERE,
            note=f"{len(decided)} of {settings} settings of {executor}{more}",
            why_none=why_none and why_none + more,
        )
    )  # fmt: skip
    return found


def _settings_of(executor: str, every: Sequence[Side]) -> str:
    """How many settings of an executor have both sides decided, and which one is the first of them."""
    decided, settings = settled([one for one in every if one.executor == executor])
    return f"{len(decided)} of {settings} of {executor}" + (f" ({decided[0].where})" if decided else "")


def _said(notes: Sequence[str], begin: str) -> str:
    return "; ".join(note for note in notes if note.startswith(begin))


def _mix(executor: str, records: Sequence[ValidationRecord], judged: bool, notes: Sequence[str]) -> Figure:
    """A mix of routes that beats every uniform choice by more than the intervals; where none does, the search that was
    made has to be described."""
    mine = [row for row in records if row.kind == "mix"]
    found = mixes(mine)
    wins = [one for one in found if one.wins]
    told = list(dict.fromkeys(row.note for row in mine if row.note))
    search = _said(notes, "mixed routes") if judged else ""
    gain = max((one.gain for one in wins or found), default=None)
    note = f"{len(wins)} of {len(found)} measured mixes win"
    if not wins and (told or search):
        lost = f"{note}; " if found else ""
        note = f"no such box found: {lost}{search or '; '.join(told)}"
    bars = [Bar("mixes", len(wins) if mine else None, 1, least=True, number=True)]
    return figure(
        "mix", "a mix beats every uniform route", executor, judged, len(found), bars,
        statistics={"gain": gain, "mixes": len(wins)}, otherwise=NONE_HERE if told or search else MISSED,
        note=note, why_none=note if search else "",
    )  # fmt: skip


def _bits(executor: str, records: Sequence[ValidationRecord], judged: bool) -> Figure:
    """Cases whose bits were compared, and were right."""
    real = [row for row in records if row.simulated is None]
    wrong, unchecked = len(wrong_bits(real)), sum(row.digest_total == 0 for row in real)
    bars = [Bar(name, value, 0, number=True) for name, value in (("wrong", wrong), ("unchecked", unchecked))]
    found = figure(
        "bits", "bits checked and right", executor, judged, len(real), bars,
        statistics={"wrong": wrong, "unchecked": unchecked}, note=f"{len(real) - wrong - unchecked} of {len(real)}",
    )  # fmt: skip
    return without_meaning(found, "nothing moves on a simulated cluster") if records and not real else found


def known_nic_rates(records: Sequence[ValidationRecord], profile: Profile) -> dict[int, float]:
    """The payload rate that the kernel holds each NIC to, in bytes per second; empty where nothing is shaped."""
    cluster = profile.fingerprint.get("cluster") or {}
    declared = cluster.get("nic_rate_bytes_per_s")
    if not declared or not cluster.get("shape") or not all(row.shaped for row in records):
        return {}
    return dict.fromkeys(sorted(set(profile.topology.nic)), payload_rate(float(declared)))


def nic_errors(profile: Profile, truth: Mapping[int, float]) -> dict[int, tuple[float, ...]]:
    """Per NIC, how far its rates are off the true ones: as fitted, sending and receiving, and as measured in the
    profile's own cells that carry 4 MiB and more through it (bytes over the median time, latency included). A cell is
    held to the slowest of the NICs that it goes through.

    ``truth``: payload bytes per second by NIC."""
    link = profile.costs(profile.executor).cross_node
    if link is None:
        return {}
    found: dict[int, list[float]] = {}
    for nic, rate in truth.items():
        fitted = (link.curve.plateau_rate / factor for factor in (link.port_out(nic), link.port_in(nic)))
        found[nic] = [value / rate - 1 for value in fitted]
    for cell in profile.cells:
        through = sum(flow[2] for flow in cell.flows)
        if cell.pattern != "nic" or through < NIC_BYTES:
            continue
        ends = [_through(profile, cell.flows, end) for end in (0, 1)]
        if all(nic in truth for end in ends for nic in end):
            least_s = max(nbytes / truth[nic] for end in ends for nic, nbytes in end.items())
            for nic in (next(iter(end)) for end in ends if len(end) == 1):
                found[nic].append(least_s / cell.median_s - 1)
    return {nic: tuple(errors) for nic, errors in found.items()}


def _through(profile: Profile, flows: Iterable[Flow], end: int) -> dict[int, int]:
    """Bytes that each NIC sends (``end`` 0) or receives (1)."""
    found: dict[int, int] = {}
    for flow in flows:
        nic = profile.topology.nic[flow[end]]
        found[nic] = found.get(nic, 0) + flow[2]
    return found


def _nics(profile: Profile, executor: str, truth: Mapping[int, float]) -> Figure:
    errors = nic_errors(profile, truth)
    found = _spread([max(of, key=abs) for of in errors.values()])
    bars = [Bar("max", found.get("max"), 0.03)]
    title = "rate of every NIC"
    rates = figure("nics", title, executor, True, len(errors), bars, statistics=found)
    return rates if truth else without_meaning(rates, "no NIC has a rate that is known from elsewhere")


def exit_code(found: Sequence[Figure], records: Sequence[ValidationRecord]) -> int:
    """6 wrong bits of any executor, 5 no record at all, 3 a judged figure that does not pass, else 0."""
    if wrong_bits(records):
        return EXIT_WRONG_BITS
    if not records:
        return EXIT_NOTHING_MEASURED
    return EXIT_OK if all(one.passed for one in found if one.judged) else EXIT_GATE_MISSED
