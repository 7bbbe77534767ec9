"""Rows of a check as people read them: one wording for all outputs. Pure.

``headline(check)`` is the whole verdict in a line; ``value_text("move_s", 0.0172)`` is ``17.2 ms``; ``visible(name)``
is a name without anything that a terminal, an XML parser or a log could take for something else.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from relaymeter.harness.emit import NONE
from relaymeter.harness.track.records import metric_of
from relaymeter.harness.track.verdicts import Check, Row, Side, Verdict
from relaymeter.units import counted, format_rate, format_seconds

__all__ = [
    "NOT_OK",
    "RATIO",
    "change_text",
    "headline",
    "launches_text",
    "number",
    "ratio_text",
    "remark",
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
#: What the column of ratios holds, for the reader of a table.
RATIO = (
    "ratio: above 1 is worse, whichever way the metric counts; the median of the quotients of every launch after by "
    "every launch before, not the quotient of the two medians"
)
#: Categories of characters that are shown as escapes: controls, formats (text that runs backwards), surrogates (bytes
#: that were no UTF-8), line and paragraph separators, unassigned ones.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp", "Cn")
#: Letters of a digest or revision that a table shows.
_LETTERS = 12
_SINCE = re.compile(r"(?:since|among the newest) [^,]*")
#: What a text repeats of the columns.
_NUMBERS = re.compile(r": \d[\d.]*x, 95 % [\d.-]+, [\w ]*launch(?:es)?(?=:|$)")


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
    interval = "" if low is None or high is None else f" [{_times(low)}, {_times(high)}]"
    return f"{_times(ratio)}x{interval}"


def _times(ratio: float) -> str:
    """At least two decimals below 10, then three digits."""
    if ratio < 10:
        return f"{ratio:.2f}"
    return f"{ratio:.3g}" if ratio < 100 else f"{ratio:.0f}"


def change_text(row: Row) -> str:
    """``32 -> 44``; one value where the sides are equal or one has none; nothing where neither has."""
    before, after = values_text(row)
    known = [value for value in (before, after) if value != NONE]
    return " -> ".join(dict.fromkeys(known))


def launches_text(row: Row) -> str:
    """``8``, or where the sides have a different number ``8+6``, before first; ``NONE`` where neither has any."""
    if row.launches_before == row.launches_after:
        return str(row.launches_after) if row.launches_after else NONE
    return f"{row.launches_before}+{row.launches_after}"


def remark(row: Row) -> str:
    """What the text of a row adds to its values and ratio: since when, why it is not decided, what is wrong. Often
    nothing."""
    if row.ratio is not None and row.verdict in ("regression", "improvement", "ok"):
        found = _SINCE.search(row.text)
        return visible(found[0]) if found else ""
    if row.verdict == "ok" and row.before is not None and row.before == row.after:
        return ""
    return visible(_NUMBERS.sub("", row.text))


def headline(check: Check) -> str:
    """The verdict upon the whole and the counts, the worst first: ``regression: 2 of 14 rows; also 12 ok``."""
    counts, total = dict(check.counts()), len(check.rows)
    worst = next(iter(counts), None)
    if worst is None:
        return "nothing was compared"
    if worst not in NOT_OK:
        better = counts.get("improvement", 0)
        return f"ok: {counted(total, 'row')}" + (f", {better} improved" if better else "")
    count = counts.pop(worst)
    also = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    name = "WRONG BITS" if worst == "wrong bits" else worst
    return f"{name}: {count} of {counted(total, 'row')}" + (f"; also {also}" if also else "")


def side_text(side: Side | None) -> str:
    """``main (1a2b3c4d5, 8 launches)``; ``../base (1a2b3c4d5-dirty, 8 launches)`` with changed files."""
    if side is None:
        return "no baseline"
    label, commit = visible(side.label), visible(side.commit or "")[:9]
    commit += "-dirty" if commit and side.dirty else ""
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
