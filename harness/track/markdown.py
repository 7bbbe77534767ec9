"""A check as a comment under a pull request, in Markdown of GitHub's flavour: ``comment(check)``. Pure.

``cells``, ``table`` and ``top`` also make GitHub's step summary.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from relaymeter.harness.report_markdown import escaped
from relaymeter.harness.track.row_texts import (
    NOT_OK,
    RATIO,
    headline,
    launches_text,
    ratio_text,
    remark,
    shortened,
    sides_text,
    stamps,
    values_text,
    visible,
)
from relaymeter.harness.track.verdicts import Check, Row, Verdict
from relaymeter.units import counted

__all__ = ["cells", "code", "comment", "fitting", "prose", "table", "top"]

#: GitHub refuses a comment of more than 65,536 characters.
_LARGEST_COMMENT = 60_000
#: Rows of the table that is not folded.
_SHOWN = 20
#: Characters of a name or text in a table, and of all notes.
_LONGEST, _LONGEST_NOTE, _MOST_NOTES = 300, 500, 20
_HEAD = ("verdict", "case", "metric", "before", "after", "ratio [95 %]", "launches", "remark")
_RULE = "|---|---|---|---:|---:|---:|---:|---|"
_LEGEND = (
    f"{RATIO[0].upper()}{RATIO[1:]}. Launches: 9+5 are 9 before and 5 after; a launch that lacks a metric, or in whose "
    "case bits were wrong, does not count for its row."
)
_MARKS = {
    "wrong bits": "\U0001f6d1",
    "regression": "\U0001f534",
    "no baseline": "\u26aa",
    "inconclusive": "\U0001f7e1",
    "improvement": "\U0001f7e2",
    "ok": "\u2705",
}
#: What is no letter, digit or plain sign, and no underscore between two of them.
_SIGN = re.compile(r"[^\w ,.-]|(?<![^\W_])_|_(?![^\W_])")
#: What calls a person or links an issue when it stands in a comment.
_CALL = re.compile(r"[@#](?=\w)")


def prose(text: str) -> str:
    """Any text on one line, nothing of it markup; it calls no person and links no issue."""
    return _CALL.sub(r"\g<0><!-- -->", escaped(visible(text)))


def code(text: str) -> str:
    """A name in the font of code, whatever it holds: everything but letters, digits and plain signs is a character
    reference, which no table, code span or HTML takes for its own sign (a backslash before a pipe would not do: it
    fails where the name itself ends in one)."""
    shown = _SIGN.sub(lambda found: f"&#{ord(found[0])};", shortened(visible(text), _LONGEST))
    return f"<code>{shown or ' '}</code>"


def cells(row: Row) -> str:
    """A row as a line of ``table``."""
    before, after = (shortened(text, _LONGEST) for text in values_text(row))
    texts = [
        f"{_MARKS[row.verdict]} {row.verdict}",
        code(row.case),
        code(row.metric),
        prose(before),
        prose(after),
        prose(ratio_text(row)),
        launches_text(row),
        prose(shortened(remark(row), _LONGEST)),
    ]
    return "| " + " | ".join(texts) + " |"


def table(lines: Iterable[str]) -> str:
    """A table of lines that ``cells`` made."""
    return "\n".join(["| " + " | ".join(_HEAD) + " |", _RULE, *lines])


def top(check: Check) -> list[str]:
    """Paragraphs above the table: verdict with the counts, mismatch, sides, how to read it, notes."""
    worst = next(iter(check.counts()), "no baseline")
    parts = [f"### {_MARKS[worst]} {prose(headline(check))}"]
    parts += [f"> [!WARNING]\n> **{prose(stamp)}**" for stamp in stamps(check)]
    parts.append(prose(shortened(sides_text(check), _LONGEST_NOTE)))
    if check.before is None:
        parts.append("There was no baseline to compare with. This is no pass.")
    if check.rows:
        parts.append(f"<sub>{_LEGEND}</sub>")
    notes = [f"- {prose(shortened(note, _LONGEST_NOTE))}" for note in check.notes[:_MOST_NOTES]]
    if len(check.notes) > _MOST_NOTES:
        notes.append(f"- {len(check.notes) - _MOST_NOTES} more notes are in the terminal's output")
    return [*parts, "\n".join(notes)] if notes else parts


def fitting(rows: Sequence[Row], room: int, size: Callable[[str], int]) -> list[str]:
    """The lines of as many rows as fit ``room``, in order."""
    found: list[str] = []
    for row in rows:
        line = cells(row)
        room -= size(line) + 1
        if room < 0:
            break
        found.append(line)
    return found


def comment(check: Check) -> str:
    """A short text: the verdict and a table of what is not ok, its 20 worst rows; everything else is folded. At most
    60,000 characters, whatever the number of rows; what is left out is counted."""
    rows = check.worst_first()
    bad = [row for row in rows if row.verdict in NOT_OK]
    parts = top(check)
    if bad:
        parts.append(table(map(cells, bad[:_SHOWN])))
    if len(bad) > _SHOWN:
        parts.append(f"{len(bad) - _SHOWN} more rows that are not ok are in the details.")
    rest = [*bad[_SHOWN:], *(row for row in rows if row.verdict not in NOT_OK)]
    shown = fitting(rest, _LARGEST_COMMENT - sum(len(part) + 2 for part in parts) - 1000, len)
    if rest:
        left = len(rest) - len(shown)
        after = f"\n\n{counted(left, 'row')} left out: a comment holds no more." if left else ""
        more = ", ".join(f"{count} {verdict}" for verdict, count in _counts(rest).items())
        title = f"Details: {counted(len(rest), 'other row')} ({more})"
        parts.append(f"<details><summary>{title}</summary>\n\n{table(shown)}{after}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _counts(rows: Sequence[Row]) -> dict[Verdict, int]:
    """How many rows have each verdict, in their order."""
    return dict(Counter(row.verdict for row in rows))
