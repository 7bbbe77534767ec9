"""Options of ``relaymeter report``."""

from __future__ import annotations

from relaymeter.harness.arguments import Commands, add_command, add_output, named

__all__ = ["add_report"]


def add_report(commands: Commands) -> None:
    """Add the command to the command line."""
    report = add_command(
        commands,
        "report",
        "make Markdown tables, plots and files for pandas of results that were kept",
        "relaymeter report results/a2f3b263b63e --out report\n  relaymeter report rows.jsonl --out report --force",
    )
    report.add_argument(
        "results",
        nargs="+",
        type=named,
        metavar="RESULT",
        help="a folder that --results kept, a folder of such folders, or a file of rows that --json wrote; rows of "
        "several commits or machines get tables of their own, launches of the same one are taken together",
    )
    report.add_argument(
        "--out",
        type=named,
        metavar="DIR",
        help="new folder for report.md, rows.csv, rows.parquet and the plots (default: report in the folder given, or "
        "beside the folders given)",
    )
    add_output(report, "write the tables as JSON")
    report.set_defaults(handler=("commands_report", "report"))
