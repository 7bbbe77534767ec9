"""A check in a run of GitHub Actions: ``step_summary(check)`` and ``annotations(check)``. Pure.

The summary is Markdown for the file that ``$GITHUB_STEP_SUMMARY`` names, which the commands of a step share; GitHub
drops one of more than 1 MiB whole.
Annotations are workflow commands, printed a line each; GitHub keeps 10 of a step.
"""

# why: no "from __future__ import annotations" here, it would take the name of a function below.
from collections.abc import Sequence

from relaymeter.harness.track.markdown import fitting, prose, table, top
from relaymeter.harness.track.row_texts import NOT_OK, change_text, shortened, stamps, visible
from relaymeter.harness.track.verdicts import Check, Row, Verdict
from relaymeter.units import counted

__all__ = ["LARGEST_SUMMARY_BYTES", "MOST_ANNOTATIONS", "annotations", "step_summary"]

#: The summary stays below this: 900 KiB.
LARGEST_SUMMARY_BYTES = 900 * 1024
#: The file stays below this, with what it holds already: GitHub's 1 MiB, less a line or two.
_LARGEST_FILE_BYTES = 1024 * 1024 - 1024
MOST_ANNOTATIONS = 10
#: Kept for what stands around the rows.
_RESERVE_BYTES = 4096
#: Rows that are shown without a click.
_OPEN = 50
_LONGEST_MESSAGE = 1000
#: Rows that a warning about several names.
_NAMED = 5
_LEVELS: dict[Verdict, str] = {
    "wrong bits": "error",
    "regression": "error",
    "no baseline": "warning",
    "inconclusive": "warning",
}


def step_summary(check: Check, *, held: int = 0) -> str:
    """Markdown of less than 900 KiB in UTF-8, and less than 1 MiB with the ``held`` bytes that the file has already,
    whatever the number of rows: the worst first, the rest folded, and how many were left out. Where not even the
    verdict has room it is empty."""
    rows = check.worst_first()
    whole = min(LARGEST_SUMMARY_BYTES, _LARGEST_FILE_BYTES - held) - _RESERVE_BYTES
    parts = ["", *top(check)] if held else top(check)  # an empty line, so that it begins no cell of a table above
    if sum(_size(part) + 2 for part in parts) > whole:
        parts = ["", top(check)[0], *map(prose, stamps(check))]
    room = whole - sum(_size(part) + 2 for part in parts)
    if room < 0:
        return ""
    shown = fitting(rows, room, _size)
    opened = min(len(shown), max(_OPEN, sum(row.verdict in NOT_OK for row in rows[: 2 * _OPEN])))
    if opened:
        parts.append(table(shown[:opened]))
    if shown[opened:]:
        title = f"{counted(len(shown) - opened, 'more row')}"
        parts.append(f"<details><summary>{title}</summary>\n\n{table(shown[opened:])}\n\n</details>")
    if len(shown) < len(rows):
        left = len(rows) - len(shown)
        worse = "none worse than those above: " if shown else ""
        parts.append(f"{counted(left, 'row')} left out, {worse}a summary holds 1 MiB.")
    return "\n\n".join(parts) + "\n"


def annotations(check: Check) -> list[str]:
    """At most ten workflow commands such as ``::error title=...::message``: one for each of the worst rows, where there
    are more one that says how many, and one for all rows of a verdict that is a warning. Of a good check none, unless
    its sides are not comparable: that is said."""
    if not check.rows:
        return [_command("warning", "nothing was compared", "the check had no rows: this is no pass")]
    rows = check.worst_first()
    warned = {verdict: [row for row in rows if row.verdict == verdict] for verdict in NOT_OK if _warns(verdict)}
    warnings = [_together(check, verdict, found) for verdict, found in warned.items() if found]
    bad = [row for row in rows if row.verdict in NOT_OK and not _warns(row.verdict)]
    most = MOST_ANNOTATIONS - len(warnings)
    most = most if len(bad) <= most else most - 1
    found = [_annotation(check, row) for row in bad[:most]]
    left = bad[most:]
    if left:
        counts = {verdict: sum(row.verdict == verdict for row in left) for verdict in NOT_OK}
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        found.append(_command("error", f"{len(left)} more", f"{told}: see the step summary"))
    return found + warnings or [_command("notice", "mismatch", stamp) for stamp in stamps(check)]


def _warns(verdict: Verdict) -> bool:
    return _LEVELS[verdict] == "warning"


def _together(check: Check, verdict: Verdict, rows: Sequence[Row]) -> str:
    """All rows of a verdict: of one row all that is known, of several where they are, and of the first why."""
    if len(rows) == 1:
        return _annotation(check, rows[0])
    names = [f"{visible(row.case)} {row.metric}" for row in rows[:_NAMED]]
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    first = f"the first of them: {visible(rows[0].text)}"
    title = f"{verdict}: {len(rows)} of {counted(len(check.rows), 'row')}"
    return _command(_LEVELS[verdict], title, "\n".join([", ".join(names) + more, first, *stamps(check)]))


def _annotation(check: Check, row: Row) -> str:
    title = f"{row.verdict}: {visible(row.case)} {row.metric}"
    values = change_text(row)
    told = f"{values}: {visible(row.text)}" if values else visible(row.text)
    return _command(_LEVELS[row.verdict], title, "\n".join([told, *stamps(check)]))


def _command(level: str, title: str, message: str) -> str:
    """A workflow command. Its own signs are escaped as GitHub's toolkit does it: % CR LF, in a property : and , too."""
    name = _data(shortened(title, _LONGEST_MESSAGE)).replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{_data(shortened(message, _LONGEST_MESSAGE))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _size(text: str) -> int:
    return len(text.encode("utf-8", "backslashreplace"))
