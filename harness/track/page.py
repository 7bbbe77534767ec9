"""The history as one HTML page that needs nothing else: ``page(launches, change_points(launches))``. Pure.

No network: its policy forbids every request. It is whole without a script, which only adds reading by hover and keys
and a filter. Any text of the history is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import count

from relaymeter import __version__
from relaymeter.harness.emit import NONE
from relaymeter.harness.track.changes import Change
from relaymeter.harness.track.page_plot import change_text, plot, sparkline, spot_text
from relaymeter.harness.track.page_series import (
    CaseView,
    ExactChange,
    ExactView,
    MetricView,
    Setting,
    settings_of,
)
from relaymeter.harness.track.page_style import SCRIPT, STYLE, policy
from relaymeter.harness.track.records import LaunchRecord, metric_of
from relaymeter.harness.track.row_texts import value_text, visible
from relaymeter.units import counted

__all__ = ["page"]

#: Commits times plots of a setting: about 250 bytes each.
_MOST_SPOTS = 10_000
#: Rows of the list of changes, and changes shown of an exact metric.
_MOST_CHANGES, _MOST_STEPS = 100, 8
_LEGEND = (
    "A point is the median of one launch, the line joins the medians of the commits' launches, a grey bar is the level "
    "between two changes. Hollow: a checkout with changed files. Triangle: a launch beyond the axis. Cross: launches "
    "with wrong bits, whose times are not drawn. Hover over a commit for its numbers, or go to a plot by Tab and use "
    "the arrow keys."
)
#: More commits than this are drawn finer.
_DENSE = 80
#: A change of a time, or one of an exact metric with its name.
AnyChange = Change | tuple[str, ExactChange]
#: A case and what changed in it at one commit.
Together = tuple[CaseView, list[AnyChange]]


def page(launches: Sequence[LaunchRecord], changes: Sequence[Change]) -> str:
    """The page, from the launches of a history and the changes that were found in the same launches.

    Launches of another machine, configuration or suite than the newest stand below, folded. Of hundreds of commits of
    many cases only the newest are drawn, and the page says how many are not: it stays below 5 MB a setting.
    """
    found = settings_of(launches, changes, most_spots=_MOST_SPOTS)
    title = f"Move latency: {visible(found[0].suite)}" if found else "Move latency"
    ids = count(1)
    body = [_setting(setting, ids) for setting in found[:1]]
    if found[1:]:
        body.append('<h2 id="others">Other machines, configurations and suites</h2>')
        body.append('<p class="quiet">Times of different ones are not compared.</p>')
    for setting in found[1:]:
        name = f"{setting.suite} on machine {setting.machine_id}, configuration {setting.config_hash}"
        told = f"{_text(name)}, until {_text(setting.last.utc[:10])}"
        body.append(f"<details><summary>{told}</summary>{_setting(setting, ids)}</details>")
    head = (
        _head(found[0], found[1:])
        if found
        else "<p>The history is empty: <code>relaymeter track run</code> adds launches.</p>"
    )
    return "".join([
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy())}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body>",
        f"<header><h1>{_text(title)}</h1>{head}</header>\n<main>",
        *body,
        f'</main>\n<footer class="quiet">Made by relaymeter {_text(__version__)}: <code>relaymeter track show</code>. ',
        f"This page asks nothing of the network.</footer>\n<script>{SCRIPT}</script></body></html>\n",
    ])  # fmt: skip


def _text(text: str) -> str:
    return escape(visible(text), quote=True)


def _head(setting: Setting, others: Sequence[Setting]) -> str:
    """What a reader wants first."""
    timed = [first for _, (first, *_) in _changes(setting) if isinstance(first, Change)]
    worse = sum(change.ratio >= 1 for change in timed)
    exact = sum(len(view.changes) for case in setting.cases for view in case.exact)
    wrong = sum(case.wrong for case in setting.cases)
    bits = (
        _fact(wrong, "result with WRONG BITS", "results with WRONG BITS", "bad") if wrong else "<b>all</b> bits arrived"
    )
    facts = [
        _fact(len(setting.commits) + setting.left_out, "commit"),
        _fact(setting.launches, "launch", "launches"),
        _fact(len(setting.cases), "case"),
        _fact(worse, "change of times for the worse", "changes of times for the worse"),
        _fact(len(timed) - worse, "for the better", "for the better"),
        _fact(exact, "change of an exact metric", "changes of exact metrics"),
        bits,
    ]
    last = setting.last
    where = f"machine <code>{_text(setting.machine_id)}</code>, configuration <code>{_text(setting.config_hash)}</code>"
    newest = f"newest commit <code>{_text(setting.commits[-1].label)}</code>, measured {_text(last.utc)}"
    listed = "".join(f"<li>{fact}</li>" for fact in facts)
    elsewhere = sum(other.launches for other in others)
    launches = f"{elsewhere} launch{'es' if elsewhere > 1 else ''}"
    more = f'<p><a href="#others">{launches} of other machines, configurations or suites</a> stand below.</p>'
    return (
        f'<p class="quiet">{newest}; {where}</p>{more if others else ""}<ul class="facts">{listed}</ul>'
        '<p class="filter" hidden><label>Show cases with <input type="search" autocomplete="off"></label></p>'
    )


def _fact(count: int, one: str, several: str = "", kind: str = "") -> str:
    """A number of things: ``<b>1</b> commit``."""
    noun = one if count == 1 else several or f"{one}s"
    return f"<b{f' class={kind}' if kind else ''}>{count}</b> {noun}"


def _changes(setting: Setting) -> list[Together]:
    """The changes of one case at one commit together, the whole move first, exact metrics last; the newest first."""
    found: dict[tuple[int, str], Together] = {}
    for case in setting.cases:
        for timed in case.metrics:
            for _, change in timed.changes:
                found.setdefault((change.index, case.name), (case, []))[1].append(change)
        for exact in case.exact:
            for step in exact.changes:
                found.setdefault((step.index, case.name), (case, []))[1].append((exact.metric, step))
    return [found[key] for key in sorted(found, key=lambda key: -key[0])]


def _setting(setting: Setting, ids: Iterator[int]) -> str:
    numbers = {case.name: f"case-{next(ids)}" for case in setting.cases}
    changes = _changes(setting)
    parts = [_overview(setting, numbers, changes), _change_list(changes, numbers)]
    if setting.left_out:
        parts.append(f'<p class="quiet">{counted(setting.left_out, "older commit")} not drawn.</p>')
    if any(case.metrics for case in setting.cases):
        parts.append(f'<p class="quiet legend">{_LEGEND}</p>')
    dense = len(setting.commits) > _DENSE
    return "".join(parts + [_case(case, numbers[case.name], dense) for case in setting.cases])


def _overview(setting: Setting, numbers: dict[str, str], changes: Sequence[Together]) -> str:
    newest = {case.name: together[0] for case, together in reversed(changes)}
    rows = []
    for case in setting.cases:
        link = f'<a href="#{numbers[case.name]}"><code>{_text(case.name)}</code></a>'
        cells = [f'<th scope="row">{link}</th>']
        if case.metrics:
            view = case.metrics[0]
            median = next((spot.median for spot in reversed(view.spots) if spot.median is not None), None)
            cells += [
                f"<td><code>{_text(view.metric)}</code></td>",
                f'<td class="num">{value_text(view.metric, median)}</td>',
            ]
            cells.append(f"<td>{sparkline(view)}</td>")
        else:
            cells.append('<td colspan="3" class="quiet">no times</td>')
        cells.append(f"<td>{_last_change(newest.get(case.name))}</td>")
        bad = f'<span class="bad">WRONG in {case.wrong} launch{"" if case.wrong == 1 else "es"}</span>'
        cells.append(f"<td>{bad if case.wrong else 'all arrived'}</td>")
        rows.append(f'<tr data-case="{_text(case.name)}">{"".join(cells)}</tr>')
    heads = ("case", "metric", "now", "over the commits", "newest change", "bits")
    return f'<section class="card"><h2>Overview</h2>{_table(heads, rows, right=("now",))}</section>'


def _last_change(change: AnyChange | None) -> str:
    """The newest change of a case, of whichever metric."""
    if change is None:
        return '<span class="quiet">none found</span>'
    label, metric, _, tag = _told(change)
    return f"{tag} <code>{_text(metric)}</code> at <code>{_text(label)}</code>"


def _tag(change: Change) -> str:
    kind, sign = ("worse", "\u25b2") if change.ratio >= 1 else ("better", "\u25bc")
    return f'<span class="tag {kind}">{sign} {change_text(change)}</span>'


def _exact_tag(metric: str, step: ExactChange) -> str:
    """``+37.5%``; of a digest, which has no more and no less, what it means."""
    if step.worse is None:
        return f'<span class="tag other">\u25c6 {"other bits" if metric == "digest" else "varies"}</span>'
    before, after = (float(values[0]) for values in (step.before, step.after))
    kind, sign = "worse" if step.worse else "better", "\u25b2" if after > before else "\u25bc"
    share = f"{100 * (after / before - 1):+.3g}%" if before else f"{after - before:+.0f}"
    return f'<span class="tag {kind}">{sign} {share}</span>'


def _told(change: AnyChange) -> tuple[str, str, list[str], str]:
    """Commit, metric, the tag, both values and p."""
    if isinstance(change, Change):
        values = [value_text(change.metric, value) for value in (change.before, change.after)]
        p_value = "&lt;0.0001" if change.p_value < 1e-4 else f"{change.p_value:.2g}"
        return change.label, change.metric, [*values, p_value], _tag(change)
    metric, step = change
    values = [_exact_text(metric, step.before), _exact_text(metric, step.after)]
    return step.spot.label, metric, [*values, "exact"], _exact_tag(metric, step)


def _also(change: AnyChange) -> str:
    _, metric, (before, after, _), _ = _told(change)
    what = change_text(change) if isinstance(change, Change) else f"{before} \u2192 {after}"
    return f"<code>{_text(metric)}</code> {what}"


def _change_list(found: Sequence[Together], numbers: dict[str, str]) -> str:
    if not found:
        return '<section class="card"><h2>Changes</h2><p>No metric changed over these commits.</p></section>'
    rows = []
    for case, (change, *others) in found[:_MOST_CHANGES]:
        label, metric, values, tag = _told(change)
        also = "; ".join(map(_also, others))
        cells = [
            f'<td class="first"><code>{_text(label)}</code></td>',
            f'<td class="first"><a href="#{numbers[case.name]}"><code>{_text(case.name)}</code></a></td>',
            f"<td><code>{_text(metric)}</code></td>",
            f"<td>{tag}</td>",
            *(f'<td class="num">{value}</td>' for value in values),
            f'<td class="quiet more">{also or NONE}</td>',
        ]
        rows.append(f'<tr data-case="{_text(case.name)}">{"".join(cells)}</tr>')
    left = len(found) - len(rows)
    more = f'<p class="quiet">{counted(left, "older one")} not listed.</p>' if left else ""
    heads = ("first commit after", "case", "metric", "change", "before", "after", "p", "also changed there")
    return f'<section class="card"><h2>Changes</h2>{_table(heads, rows, right=heads[4:7])}{more}</section>'


def _table(heads: Sequence[str], rows: Sequence[str], *, right: Sequence[str] = ()) -> str:
    names = "".join(f'<th scope="col"{" class=num" if head in right else ""}>{head}</th>' for head in heads)
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _case(case: CaseView, number: str, dense: bool) -> str:
    parts = [
        f'<section class="card" id="{number}" data-case="{_text(case.name)}"><h2><code>{_text(case.name)}</code></h2>'
    ]
    if case.metrics:
        figures = "".join(map(_figure, case.metrics))
        parts.append(f'<div class="plots{" dense" if dense else ""}">{figures}</div>{_values(case)}')
    if case.exact:
        parts.append(_exact(case.exact))
    return "".join(parts) + "</section>"


def _figure(view: MetricView) -> str:
    timed = [spot for spot in view.spots if spot.median is not None]
    better = f"{metric_of(view.metric).better} is better"
    now = value_text(view.metric, timed[-1].median)
    caption = f'<span><code>{_text(view.metric)}</code> <span class="quiet legend">{better}</span></span><b>{now}</b>'
    readout = f'<p class="readout" aria-live="polite">{_text(spot_text(view.metric, timed[-1]))}</p>'
    return f"<figure><figcaption>{caption}</figcaption>{plot(view)}{readout}</figure>"


def _values(case: CaseView) -> str:
    """The medians of all plots as a table, for those who do not see them."""
    lines = [
        f"<tr><th scope=row><code>{_text(row[0].label)}</code></th><td>{_text(row[0].date)}</td>"
        + "".join(
            f"<td class=num>{value_text(view.metric, spot.median)}</td>"
            for view, spot in zip(case.metrics, row, strict=True)
        )
        + "</tr>"
        for row in reversed(list(zip(*(view.spots for view in case.metrics), strict=True)))
    ]
    names = [_text(view.metric) for view in case.metrics]
    table = _table(["commit", "date", *names], lines, right=names)
    return f"<details><summary>Medians as a table</summary>{table}</details>"


def _exact(views: Sequence[ExactView]) -> str:
    rows = []
    for view in views:
        steps = [
            f"<code>{_text(step.spot.label)}</code>: {_exact_text(view.metric, step.before)} \u2192 "
            f"{_exact_text(view.metric, step.after)}"
            for step in reversed(view.changes)
        ]
        if len(steps) > _MOST_STEPS:
            steps = [*steps[:_MOST_STEPS], f"and {len(steps) - _MOST_STEPS} before"]
        told = "<br>".join(steps) or '<span class="quiet">never</span>'
        name = f"<th scope=row><code>{_text(view.metric)}</code></th>"
        rows.append(f"<tr>{name}<td class=num>{_exact_text(view.metric, view.now)}</td><td>{told}</td></tr>")
    return f"<h3>Exact metrics</h3>{_table(('metric', 'now', 'changed at'), rows, right=('now',))}"


def _exact_text(metric: str, values: Sequence[int | str]) -> str:
    """One value; several where launches of a commit differ, which none of these should."""
    return " or ".join(_text(value_text(metric, value)) for value in values) or NONE
