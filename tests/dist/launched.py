"""``python -m launched FOLDER`` runs ``FOLDER/job.json`` on two declared nodes of two ranks each, on plain loopback.

``python -m launched FOLDER MODULE`` runs ``python -m MODULE`` on four ranks of one node, as torchrun would.
"""

from __future__ import annotations

import sys
from pathlib import Path

from relaymeter.harness.launch import ClusterSpec, launch

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2:]:
        cluster = ClusterSpec(nodes=1, ranks_per_node=4, shape=False)
        ended = launch([], cluster, time_limit_s=100, log_dir=folder, module=sys.argv[2])
    else:
        files = [str(folder / "job.json"), str(folder / "result.json")]
        cluster = ClusterSpec(nodes=2, ranks_per_node=2, shape=False)
        ended = launch(files, cluster, time_limit_s=110, log_dir=folder)
    sys.exit(ended.exit_code)
