"""The report as Markdown of GitHub's flavour, ready to paste: ``markdown(document, plots)``. Pure.

Notes of cells are footnotes below their table, numbered through the whole report; tables that a reader opens are
``<details>``.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from relaymeter import __version__
from relaymeter.compare_records import CompareRecord
from relaymeter.harness.report_document import Document
from relaymeter.harness.report_figures import WRONG_BITS
from relaymeter.harness.report_sources import How, Source, command_words, option_words
from relaymeter.harness.report_tables import Cell, ReportTable, Section, grouped
from relaymeter.harness.results import KEPT_FILES, names_file
from relaymeter.units import counted, format_rate

__all__ = ["escaped", "markdown"]

_SPECIAL = re.compile(r"[\\`*~|<]|(?<=\])\(|\[(?=\^)|(?<!\w)_|_(?!\w)")
#: Names of facts in the order in which a reader wants them; others follow.
_FIRST = ("cpu", "cores", "memory_gib", "gpu", "gpus", "kernel", "python", "torch", "deepspeed", "nccl", "backend",
          "device", "relaymeter")  # fmt: skip
#: What rows of paths should come with.
_WANTED = ("torch", "deepspeed", "python", "backend", "device")
#: Values that say nothing.
_NO_FACT = ("None", "", "{}", "[]")

#: Facts that tell ranks apart and a reader nothing.
_UNTOLD = ("machines", "nic", "node", "world")


def escaped(text: str) -> str:
    """``text`` as Markdown shows it: on one line, nothing of it markup; wrong bits are bold."""
    flat = " ".join(text.split())
    return _SPECIAL.sub(lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", flat).replace(
        WRONG_BITS, f"**{WRONG_BITS}**"
    )


def markdown(document: Document, plots: Mapping[str, str]) -> str:
    """The whole report. ``plots``: file names relative to it, with what they show."""
    names = ", ".join(dict.fromkeys([row.scenario for row in document.rows] + ["soak"] * bool(document.soaks)))
    simulated = f" (simulated: {', '.join(document.simulated)})" if document.simulated else ""
    compared = all(isinstance(row, CompareRecord) for row in document.rows) and not document.soaks
    subject = "Resharding in memory beside checkpoints: " if compared and document.rows else ""
    parts = [f"# {escaped(subject + names + simulated)}"]
    if document.wrong:
        parts.append(_bullets(document.wrong))
    parts.append(_bullets(document.lines[len(document.wrong) :]))
    parts.append(_setup(document.sources))
    numbers = iter(range(1, 1 << 30))
    parts += [_section(section, numbers) for section in document.sections]
    if plots:
        told = ", ".join(f"`{name}`" for name in plots)
        parts.append(f"Plots, which this text only links to: upload {told} beside it.")
    parts += [f"![{escaped(what)}]({name})" for name, what in plots.items()]
    parts.append(f"Made by relaymeter {__version__}: `relaymeter report`; every row is in `rows.csv`.")
    return "\n\n".join(parts) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)


def _setup(sources: Sequence[Source]) -> str:
    """Machines and versions, and the commands to repeat it."""
    parts = ["## How it was measured"]
    lines = ["| result | rows | machine | commit | launched (UTC) |", "|---|---:|---|---|---|"]
    for source in sources:
        found = [dict.fromkeys(row.machine_id for row in source.launched),
                 dict.fromkeys(row.commit or "unknown" for row in source.launched),
                 dict.fromkeys(row.utc for row in source.launched)]  # fmt: skip
        texts = [source.name, str(len(source.launched)), *(", ".join(names) for names in found)]
        lines.append("| " + " | ".join(map(escaped, texts)) + " |")
    parts.append("\n".join(lines))
    known = [(source, source.how) for source in sources if source.how is not None]
    told = grouped(known, lambda pair: pair[1].facts)
    machines: list[str] = []
    for facts, own in told.items():
        ids = ", ".join(dict.fromkeys(row.machine_id for source, _ in own for row in source.launched))
        machines.append(f"machine {ids}: {_facts(dict(facts))}{_unknown(dict(facts), own)}")
    unknown = [source.name for source in sources if source.how is None]
    machines += [f"{name}: no how.txt beside the rows, so versions and command are not known" for name in unknown]
    parts.append(_bullets(machines))
    commands = _commands(sources)
    if commands:
        parts.append("To repeat it:\n\n```sh\n" + commands + "\n```")
    parts += _kept(sources)
    files = _files(sources)
    if files:
        named = escaped(", ".join(files))
        parts.append(f"Not shipped with relaymeter, and their content is not kept here (attach them): {named}.")
    return "\n\n".join(parts)


def _facts(facts: Mapping[str, str]) -> str:
    """``cpu Xeon, 2 cores, torch 2.13.0``."""
    facts = {name: text for name, text in facts.items() if text not in _NO_FACT}
    order = [name for name in _FIRST if name in facts] + [name for name in facts if name not in _FIRST]
    short = {"cores": "{} cores", "memory_gib": "{} GiB", "cpu": "{}"}
    told = {name: _cluster(facts[name]) if name == "cluster" else facts[name] for name in order if name not in _UNTOLD}
    return ", ".join(short.get(name, name.replace("_", " ") + " {}").format(text) for name, text in told.items())


def _unknown(facts: Mapping[str, str], own: Sequence[tuple[Source, How]]) -> str:
    """What a reader wants of engines' results, and their how.txt does not say."""
    if not any(isinstance(row, CompareRecord) for source, _ in own for row in source.rows):
        return ""
    left = [name for name in _WANTED if facts.get(name, "") in _NO_FACT]
    return f"; not kept: {', '.join(left)}" if left else ""


def _kept(sources: Sequence[Source]) -> list[str]:
    """The TOML files that were kept with the results, each content once, for a reader to open."""
    every = [(source, name, content) for source in sources for name, content in source.files]
    parts = []
    for (name, content), own in grouped(every, lambda entry: entry[1:]).items():
        given = dict.fromkeys(
            text for source, _, _ in own for option, text in _named(source) if KEPT_FILES[option] == name
        )
        results = ", ".join(source.name for source, _, _ in own)
        told = f"{', '.join(given) or name}, kept as {name} in {results}"
        summary = html.escape(" ".join(told.split()), quote=False)
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", content))])
        parts.append(f"<details><summary>{summary}</summary>\n\n{fence}toml\n{content.rstrip()}\n{fence}\n\n</details>")
    return parts


def _named(source: Source) -> list[tuple[str, str]]:
    """Options and texts of the command by which it named TOML files."""
    words = command_words(source.how.command) if source.how is not None else []
    return [
        (word.removeprefix("--"), after)
        for word, after in pairwise(words)
        if word.startswith("--") and word.removeprefix("--") in KEPT_FILES and names_file(after)
    ]


def _files(sources: Sequence[Source]) -> list[str]:
    """TOML files that were not kept, by their names in the commands."""
    found: dict[str, None] = {}
    for source in sources:
        kept = {name for name, _ in source.files}
        found |= {text: None for option, text in _named(source) if KEPT_FILES[option] not in kept}
    return list(found)


def _cluster(text: str) -> str:
    """The cluster in a box as people say it; what is not one as it stands."""
    try:
        found = ast.literal_eval(text)
        rate = found["nic_rate_bytes_per_s"]
        nic = "not shaped" if rate is None else f"{format_rate(rate)} a NIC, one per {found['nic_per']}"
        return f"of {found['nodes']} nodes x {found['ranks_per_node']} ranks in a box, {nic}"
    except (ValueError, SyntaxError, KeyError, TypeError):
        return text


def _commands(sources: Sequence[Source]) -> str:
    """Each command once, below the commit it ran on; where there are several, with the results that it made."""
    known = [(source.launched[0].commit, source.how.command, source) for source in sources if source.how is not None]
    several = len({command for _, command, _ in known}) > 1
    lines: list[str] = []
    for commit, own in grouped(known, lambda entry: entry[0]).items():
        lines.append(f"# commit {commit or 'unknown'}")
        commands = grouped(own, lambda entry: entry[1])
        for command, made in commands.items():
            if several:
                results = ", ".join(f"{source.name} ({counted(len(source.launched), 'row')})" for _, _, source in made)
                lines.append(f"# made {' '.join(results.split())}{_again(command, list(commands))}")
            if "--work" in option_words(command):
                lines.append("# twice: the second one loads in new processes what the first has saved")
            lines.append(command)
    return "\n".join(lines).replace("```", "` ` `")


def _again(command: str, others: Sequence[str]) -> str:
    """That a command is another one with ``--force``, as after an interruption."""
    words = command_words(command)
    plain = sorted(word for word in words if word != "--force")
    if "--force" in words and any(sorted(command_words(other)) == plain for other in others):
        return ": the same command again, over files that existed (--force); not needed in a new folder"
    return ""


def _section(section: Section, numbers: Iterator[int]) -> str:
    parts = [f"## {escaped(section.title)}"]
    if section.lines:
        parts.append(_bullets(section.lines))
    if section.missing:
        parts.append("Not run:\n\n" + _bullets(section.missing))
    parts += [_table(table, numbers) for table in section.tables if table.rows]
    return "\n\n".join(parts)


def _table(table: ReportTable, numbers: Iterator[int]) -> str:
    """Title, table, captions, footnotes."""
    notes: dict[str, int] = {}

    def text(cell: Cell) -> str:
        marks = "".join(f"[^{notes.setdefault(note, 0) or _number(notes, note, numbers)}]" for note in cell.notes)
        return escaped(cell.text) + marks

    body = ["| " + " | ".join(escaped(name) for name, _ in table.columns) + " |"]
    body.append("|" + "|".join("---:" if side == "right" else "---" for _, side in table.columns) + "|")
    body += ["| " + " | ".join(map(text, row)) + " |" for row in table.rows]
    parts = ["\n".join(body), *(escaped(caption) for caption in table.captions)]
    if notes:
        parts.append("\n".join(f"[^{number}]: {escaped(note)}" for note, number in notes.items()))
    whole = "\n\n".join(parts)
    if table.folded:
        return f"<details><summary>{html.escape(table.title)}</summary>\n\n{whole}\n\n</details>"
    return f"### {escaped(table.title)}\n\n{whole}"


def _number(notes: dict[str, int], note: str, numbers: Iterator[int]) -> int:
    notes[note] = next(numbers)
    return notes[note]
