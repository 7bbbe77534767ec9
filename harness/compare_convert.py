"""A process that converts a saved checkpoint into a universal one, as DeepSpeed's command does, and says how long its
imports and the conversion took.

``python -m relaymeter.harness.compare_convert FOLDER`` prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import psutil

__all__ = ["main"]


def main() -> int:
    """Convert; returns the exit code: 1 where DeepSpeed refuses, with what it says on standard error, 3 where there was
    no room or no right to write."""
    from relaymeter.harness.compare_ranks import as_lack_of_room
    from relaymeter.harness.paths.together import say_error
    from relaymeter.harness.paths.universal import convert_universal

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    import_s = time.time() - psutil.Process().create_time()
    begin = time.perf_counter()
    try:
        convert_universal(Path(sys.argv[1]))
    except Exception as error:
        told = as_lack_of_room(error, Path(sys.argv[1]))
        print(say_error(error) if told is error else told, file=sys.stderr)
        return 3 if isinstance(told, OSError | MemoryError) else 1
    print(json.dumps({"import_s": import_s, "convert_s": time.perf_counter() - begin}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
