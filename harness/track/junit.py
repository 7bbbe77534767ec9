"""A check as JUnit XML: ``junit(check)``.

The form is the one that Jenkins' xUnit plugin checks (``junit-10.xsd``), which GitLab and GitHub's report actions read
too: a test case per row, wrong bits and regressions failures, what could not be decided or had no baseline skipped, the
two sides as properties of the suite. A test case has no ``time``: how long a move takes is what is tested, not how long
the test took.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from xml.sax.saxutils import escape, quoteattr

from relaymeter.harness.emit import NONE
from relaymeter.harness.track.row_texts import (
    change_text,
    headline,
    launches_text,
    ratio_text,
    sides_text,
    stamps,
    visible,
)
from relaymeter.harness.track.verdicts import Check, Row, Side

__all__ = ["junit"]

_FAILED = ("wrong bits", "regression")
_SKIPPED = ("no baseline", "inconclusive")


def junit(check: Check, *, utc: datetime | None = None) -> str:
    """The XML text, in UTF-8. Names and texts may hold anything: what XML cannot carry shows as an escape. ``utc``: the
    time stamp of the suite; default now.

    Where nothing was compared there is one skipped test case that says so, so that an empty report never passes for a
    good one.
    """
    rows = check.worst_first()
    failures = sum(row.verdict in _FAILED for row in rows)
    skipped = sum(row.verdict in _SKIPPED for row in rows) if rows else 1
    suite = visible(check.suite)
    counts = f'tests="{len(rows) or 1}" failures="{failures}" errors="0"'
    stamp = f"{utc or datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S}"
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuites name={_quoted('relaymeter track')} {counts}>",
        f'<testsuite name={_quoted(suite)} {counts} skipped="{skipped}" timestamp="{stamp}">',
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
    for field in ("label", "commit", "dirty", "version", "machine_id", "config_hash", "launches"):
        value = getattr(side, field)
        yield field, "unknown" if value is None else str(value)


def _case(check: Check, row: Row) -> str:
    what = visible(row.text)
    inner = f"<system-out>{escape(_details(check, row))}</system-out>"
    if row.verdict in _FAILED:
        inner = f"<failure type={_quoted(row.verdict)} message={_quoted(what)}>{escape(_details(check, row))}</failure>"
    elif row.verdict in _SKIPPED:
        inner = _skip(f"{row.verdict}: {what}", _details(check, row))
    name = f"classname={_quoted(f'{check.suite}.{row.case}')} name={_quoted(row.metric)}"
    return f"<testcase {name}>{inner}</testcase>"


def _details(check: Check, row: Row) -> str:
    """The numbers, which say in their way what the message says, for readers that show the text alone, as GitLab does.
    Where they do not say it, the message."""
    values, ratio = change_text(row), ratio_text(row)
    numbers = [values, "" if ratio == NONE else ratio, f"launches {launches_text(row)}"]
    numberless = not values or row.verdict == "wrong bits"
    told = visible(row.text) if numberless else ", ".join(filter(None, numbers))
    return "\n".join([f"{row.verdict}: {told}", *stamps(check)])


def _skip(reason: str, details: str = "") -> str:
    """The reason as an attribute, which Jenkins reads, the details as the text, which GitLab reads."""
    return f"<skipped message={_quoted(reason)}>{escape(details or visible(reason))}</skipped>"
