"""Benchmarks: how fast the system plans and moves, and how much memory that takes, each figure beside its peer.

``python -m relaymeter.harness.bench`` (``make bench``) runs every part, prints a table each and ends with the bars that
were missed; exit code 3 then. It takes a few minutes; other programs on the machine disturb it.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from relaymeter.errors import EXIT_GATE_MISSED, EXIT_OK, EXIT_USAGE, EXIT_WRONG_BITS, RelaymeterError
from relaymeter.harness import bench_device, bench_execution, bench_planning, bench_scale, bench_track
from relaymeter.harness.bench_report import Figure, Found, PartFailed, Say, figures_table, missed, report_dict
from relaymeter.harness.emit import print_table
from relaymeter.records import check_target, dump_json, write_text
from relaymeter.units import counted

__all__ = ["PARTS", "main"]

#: By name, in the order in which they run: what the part is about, and the part.
PARTS: dict[str, tuple[str, Callable[[Say, bool], Found]]] = {
    "planning": ("planning, beside DeepSpeed's plan_transfer", bench_planning.planning),
    "scale": ("one rank's plan of a trillion-parameter mixture-of-experts model", bench_scale.scale),
    "shaped": ("execution across nodes: 2 x 2 ranks in a box, 400 Mbit/s each", bench_execution.shaped),
    "local": ("execution inside one machine, beside gather-then-slice", bench_execution.local),
    "memory": ("peak memory of a move, beside what was predicted", bench_execution.memory),
    "device": ("packing and digest on a CUDA device, beside a plain copy; no figures without one", bench_device.device),
    "track": ("tracking's verdicts on synthetic launches, beside common gates", bench_track.track),
}

_EPILOG = """example:
  python -m relaymeter.harness.bench --only planning --only local --json bench.json

exit codes: 0 all bars met; 2 bad usage; 3 a bar missed, or a part did not end; 6 wrong bits; 130 interrupted"""


def _parser() -> argparse.ArgumentParser:
    about = "\n".join(f"  {name:9} {text}" for name, (text, _) in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m relaymeter.harness.bench",
        description=f"Run the benchmarks and hold each figure against its bar. Parts:\n{about}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", action="append", choices=tuple(PARTS), metavar="PART", help="run this part alone (may be repeated)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE|-", help="write every figure with its raw samples")
    parser.add_argument("--force", action="store_true", help="replace FILE where it exists")
    parser.add_argument(
        "--tiny", action="store_true", help="small inputs and few repeats, no bars: only to see that everything runs"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for and return the exit code. The parent calls it, no rank."""
    options = _parser().parse_args(arguments)
    alone = options.json == Path("-")
    stream = sys.stderr if alone else sys.stdout
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 132)
    began = time.monotonic()
    utc = datetime.now(timezone.utc).isoformat(timespec="seconds")
    figures: list[Figure] = []
    failed: dict[str, int] = {}
    try:
        if options.json is not None and not alone:
            check_target(options.json, force=options.force)
        chosen = [name for name in PARTS if options.only is None or name in options.only]
        for number, name in enumerate(chosen, start=1):
            title, part = PARTS[name]

            def say(text: str, head: str = f"[{number}/{len(chosen)} {name}]") -> None:
                print(f"{head} {time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

            try:
                found, tables = part(say, options.tiny)
                if options.tiny:
                    found = [replace(figure, bar=None) for figure in found]
            except PartFailed as error:
                failed[f"{name}: {error}"] = error.exit_code
                continue
            figures += found
            for table in (figures_table(title, found), *tables):
                print_table(console, table)
    except RelaymeterError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    texts = [*failed, *missed(figures)]
    for text in texts:
        console.print(f"missed: {text}", markup=False)
    judged = sum(figure.bar is not None for figure in figures)
    summary = "small inputs, no bars" if options.tiny else f"{counted(judged, 'bar')}, {len(texts)} missed"
    console.print(f"{counted(len(figures), 'figure')}, {summary}, {time.monotonic() - began:.0f} s", markup=False)
    code = EXIT_GATE_MISSED if texts else EXIT_OK
    try:
        if options.json is not None:
            head = {"utc": utc, "machine": platform.platform(), "python": platform.python_version(),
                    "tiny": options.tiny, "parts": chosen, "failed": list(failed),
                    "seconds": time.monotonic() - began}  # fmt: skip
            document = dump_json(report_dict(figures, head))
            if alone:
                sys.stdout.write(document)
                sys.stdout.flush()
            else:
                write_text(options.json, document, force=options.force)
    except (OSError, RelaymeterError) as error:
        print(f"bench: {error}", file=sys.stderr)
        code = EXIT_USAGE
    return EXIT_WRONG_BITS if EXIT_WRONG_BITS in failed.values() else code


if __name__ == "__main__":
    sys.exit(main())
