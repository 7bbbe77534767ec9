"""``report``: Markdown tables, plots, and files for pandas of results that were kept.

Reads rows, starts nothing, imports no torch. Wrong bits are said first and make the exit code 6.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from relaymeter.errors import EXIT_OK, InputError
from relaymeter.harness import emit
from relaymeter.harness.commands_ranks import check_targets
from relaymeter.harness.report_document import Document, make_document
from relaymeter.harness.report_files import check_folder, default_folder, write_folder
from relaymeter.harness.report_frame import NO_PARQUET, frame, has_parquet, write_csv, write_parquet
from relaymeter.harness.report_markdown import markdown
from relaymeter.harness.report_sources import read_sources
from relaymeter.records import write_text

__all__ = ["report"]


def report(args: argparse.Namespace) -> int:
    """Write the report. Returns 6 where a row has wrong bits, else 0."""
    check_targets(json=args.json, out=args.out)
    out = emit.Output(args.json, force=args.force)
    sources, notes = read_sources(args.results)
    folder = args.out or default_folder(args.results)
    files = [source.path for source in sources]
    check_folder(folder, files, force=args.force)
    if args.json not in (None, "-"):
        _refuse_json(Path(args.json), folder, files)
    document = make_document(sources, notes)
    for line in document.lines:
        out.say(line)
    names: list[str] = []
    write_folder(folder, lambda building: names.extend(_write(building, document, out.say)), force=args.force)
    if not has_parquet():
        out.say(NO_PARQUET)
    out.say(f"report: {folder / 'report.md'} ({', '.join(name for name in names if name != 'report.md')})")
    if args.json is not None:
        out.json({**document.to_dict(), "folder": str(folder), "files": names})
    return document.exit_code if document.exit_code != EXIT_OK else out.exit_code


def _refuse_json(target: Path, folder: Path, files: list[Path]) -> None:
    if target.absolute().parent == folder.absolute():
        raise InputError(f"--json {target} lies in {folder}, which the report replaces: choose another place")
    if target.resolve() in [path.resolve() for path in files]:
        raise InputError(f"--json {target} would replace rows that are read: choose another name")


def _write(folder: Path, document: Document, say: Callable[[str], None]) -> list[str]:
    """Write every file of the report into ``folder``. Returns their names. ``say`` is told before long work."""
    from relaymeter.harness.report_plots import draw_plots

    columns, lines = frame(document.sources)
    write_csv(folder / "rows.csv", columns, lines)
    if has_parquet():
        write_parquet(folder / "rows.parquet", columns, lines)
    plots = draw_plots(document.rows, folder, say)
    write_text(folder / "report.md", markdown(document, plots))
    return sorted(path.name for path in folder.iterdir())
