"""A check as JUnit XML: ``junit(check)``. Pure.

The form is the one that Jenkins' xUnit plugin checks (``junit-10.xsd``), which GitLab and GitHub's report actions read
too: a test case per row, wrong bits and regressions failures, what could not be decided or had no baseline skipped, the
two sides as properties of the suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from relaymeter.harness.track.records import metric_of
from relaymeter.harness.track.row_texts import headline, number, ratio_text, sides_text, stamps, values_text, visible
from relaymeter.harness.track.verdicts import Check, Row, Side

__all__ = ["junit"]

_FAILED = ("wrong bits", "regression")
_SKIPPED = ("no baseline", "inconclusive")


def junit(check: Check) -> str:
    """The XML text, in UTF-8. Names and texts may hold anything: what XML cannot carry shows as an escape.

    Where nothing was compared there is one skipped test case that says so, so that an empty report never passes for a
    good one.
    """
    rows = check.worst_first()
    failures = sum(row.verdict in _FAILED for row in rows)
    skipped = sum(row.verdict in _SKIPPED for row in rows) if rows else 1
    suite = visible(check.suite)
    counts = f'tests="{len(rows) or 1}" failures="{failures}" errors="0"'
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuites name={_quoted('relaymeter track')} {counts}>",
        f'<testsuite name={_quoted(suite)} {counts} skipped="{skipped}">',
        "<properties>",
        *(f"<property name={_quoted(name)} value={_quoted(value)}/>" for name, value in _properties(check)),
        "</properties>",
    ]
    parts += [_case(check, row) for row in rows]
    if not rows:
        parts.append(f"<testcase classname={_quoted(suite)} name={_quoted('rows')}>{_skip(headline(check))}</testcase>")
    told = [headline(check), *stamps(check), sides_text(check), *map(visible, check.notes)]
    parts += [f"<system-out>{escape(chr(10).join(told))}</system-out>", "</testsuite>", "</testsuites>"]
    return "\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    return quoteattr(visible(text))


def _properties(check: Check) -> Iterator[tuple[str, str]]:
    """Verdict, mismatch and both sides, by name."""
    yield "verdict", headline(check)
    yield "kind", check.kind
    for stamp in stamps(check):
        yield "mismatch", stamp
    for name, side in (("before", check.before), ("after", check.after)):
        yield from ((f"{name}.{field}", value) for field, value in _side(side))


def _side(side: Side | None) -> Iterator[tuple[str, str]]:
    if side is None:
        yield "label", "no baseline"
        return
    for field in ("label", "commit", "version", "machine_id", "config_hash", "launches"):
        value = getattr(side, field)
        yield field, "unknown" if value is None else str(value)


def _case(check: Check, row: Row) -> str:
    before, after = values_text(row)
    what = visible(row.text)
    details = escape(
        "\n".join([what, f"before {before}, after {after}, ratio {ratio_text(row)}",
                   f"launches {row.launches_before} before, {row.launches_after} after", *stamps(check)])
    )  # fmt: skip
    inner = ""
    if row.verdict in _FAILED:
        inner = f"<failure type={_quoted(row.verdict)} message={_quoted(what)}>{details}</failure>"
    elif row.verdict in _SKIPPED:
        inner = _skip(f"{row.verdict}: {what}")
    else:
        inner = f"<system-out>{details}</system-out>"
    seconds = number(row.after) if metric_of(row.metric).unit == "s" else None
    time = "" if seconds is None else f' time="{seconds:.9f}"'
    name = f"classname={_quoted(f'{check.suite}.{row.case}')} name={_quoted(row.metric)}{time}"
    return f"<testcase {name}>{inner}</testcase>"


def _skip(reason: str) -> str:
    """The reason twice: Jenkins reads the attribute, GitLab the text."""
    return f"<skipped message={_quoted(reason)}>{escape(visible(reason))}</skipped>"
