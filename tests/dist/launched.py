"""``python -m launched FOLDER`` runs ``FOLDER/job.json`` on two declared nodes of two ranks each, on plain loopback."""

from __future__ import annotations

import sys
from pathlib import Path

from relaymeter.harness.launch import ClusterSpec, launch

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    files = [str(folder / "job.json"), str(folder / "result.json")]
    cluster = ClusterSpec(nodes=2, ranks_per_node=2, shape=False)
    sys.exit(launch(files, cluster, time_limit_s=110, log_dir=folder).exit_code)
