"""Rows of a check as people read them: one wording for all outputs. Pure.

``headline(check)`` is the whole verdict in a line; ``value_text("move_s", 0.0172)`` is ``17.2 ms``; ``visible(name)``
is a name without anything that a terminal, an XML parser or a log could take for something else.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from relaymeter.harness.emit import NONE
from relaymeter.harness.track.records import metric_of
from relaymeter.harness.track.verdicts import Check, Row, Side, Verdict
from relaymeter.units import counted, format_rate, format_seconds

__all__ = [
    "NOT_OK",
    "headline",
    "number",
    "ratio_text",
    "shortened",
    "side_text",
    "sides_text",
    "stamps",
    "value_text",
    "values_text",
    "visible",
]

#: Verdicts that somebody has to look at, the worst first.
NOT_OK: tuple[Verdict, ...] = ("wrong bits", "regression", "no baseline", "inconclusive")
#: Categories of characters that are shown as escapes: controls, formats (text that runs backwards), surrogates (bytes
#: that were no UTF-8), line and paragraph separators, unassigned ones.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp", "Cn")
#: Letters of a digest or revision that a table shows.
_LETTERS = 16


def visible(text: str) -> str:
    """``text`` on one line, with escapes such as ``\\x1b`` for every character that does not show or has no place in
    XML 1.0. An undecodable byte shows as itself: ``\\xff``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(letter) if unicodedata.category(letter) in _HIDDEN else letter for letter in text)


def _escape(letter: str) -> str:
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if code <= 0xFF:
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def shortened(text: str, limit: int) -> str:
    """``text``, cut to ``limit`` characters where it is longer, its end then an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "\u2026"


def number(value: float | int | str | None) -> float | int | None:
    """The value where it is a finite number, else None."""
    if value is None or isinstance(value, str | bool) or not math.isfinite(value):
        return None
    return value


def value_text(metric: str, value: float | int | str | None) -> str:
    """A value with its unit: ``17.2 ms``, ``48 MB/s``, ``16,777,216 B``, the beginning of a digest; ``NONE``."""
    if isinstance(value, str):
        return shortened(visible(value), _LETTERS)
    found = number(value)
    if found is None:
        return NONE
    unit = metric_of(metric).unit
    if unit == "s":
        return format_seconds(found)
    if unit == "B/s":
        return format_rate(found)
    text = f"{found:,}" if isinstance(found, int) else f"{found:,.6g}"
    return f"{text} {unit}".rstrip()


def values_text(row: Row) -> tuple[str, str]:
    """Both values of a row. Texts that begin alike and differ later are given whole."""
    before, after = value_text(row.metric, row.before), value_text(row.metric, row.after)
    if before == after and isinstance(row.before, str) and isinstance(row.after, str) and row.before != row.after:
        return visible(row.before), visible(row.after)
    return before, after


def ratio_text(row: Row) -> str:
    """``1.34x [1.22, 1.47]``, above 1 worse; ``NONE`` for exact metrics."""
    ratio, low, high = (number(value) for value in (row.ratio, row.ratio_low, row.ratio_high))
    if ratio is None:
        return NONE
    return f"{ratio:.2f}x" if low is None or high is None else f"{ratio:.2f}x [{low:.2f}, {high:.2f}]"


def headline(check: Check) -> str:
    """The verdict upon the whole, the worst first: ``regression: 2 of 14 rows``."""
    counts, total = check.counts(), len(check.rows)
    worst = next(iter(counts), None)
    if worst is None:
        return "nothing was compared"
    if worst == "wrong bits":
        return f"WRONG BITS: {counts[worst]} of {counted(total, 'row')}"
    if worst in NOT_OK:
        return f"{worst}: {counts[worst]} of {counted(total, 'row')}"
    better = counts.get("improvement", 0)
    return f"ok: {counted(total, 'row')}" + (f", {better} improved" if better else "")


def side_text(side: Side | None) -> str:
    """``main (1a2b3c4d5, 8 launches)``."""
    if side is None:
        return "no baseline"
    label, commit = visible(side.label), visible(side.commit or "")[:9]
    inner = [commit] if commit and not label.startswith(commit) else []
    launches = "1 launch" if side.launches == 1 else f"{side.launches} launches"
    return f"{label} ({', '.join([*inner, launches])})"


def sides_text(check: Check) -> str:
    """``suite ci: after (8 launches) against before (8 launches), interleaved``."""
    how = "interleaved" if check.kind == "ab" else "by the history"
    return f"suite {visible(check.suite)}: {side_text(check.after)} against {side_text(check.before)}, {how}"


def stamps(check: Check) -> Sequence[str]:
    """What has to stand on every output of a check whose sides are not comparable; nothing where they are."""
    if not check.mismatch:
        return ()
    names = ", ".join(map(visible, check.mismatch))
    return (f"MISMATCH in {names}: the sides are not comparable, let through by --allow-mismatch",)
