"""The command line as it is promised: the options of every command, and those for tests alone."""

from __future__ import annotations

RANKS = {"--nodes", "--ranks-per-node", "--nic", "--nic-per", "--time-limit"}
OUTPUT = {"--json", "--force"}
PRICING = {"--scenario", "--move", "--bucket-bytes"}
SURFACE = {
    "calibrate": {"--out", "--check", "--simulate", "--allow-mismatch", "--executor", "--quick", "--budget"}
    | {"--paths", "--storage"} | RANKS | OUTPUT,
    "choose": {"--profile", "--simulate", "--executor", "--allow-mismatch", "--out", "--format"} | PRICING | OUTPUT,
    "compare": {"--scenario", "--change", "--paths", "--storage", "--launches", "--journal", "--work", "--results"}
    | {"--profile"} | RANKS | OUTPUT,
    "doctor": {"--strict"} | OUTPUT,
    "plan": {"--topology", "--nic-per", "--profile", "--planner", "--executor", "--out"}
    | {"--model", "--from", "--from-ranks", "--to"} | PRICING | OUTPUT,
    "run": {
        "--suite", "--plan", "--change", "--profile", "--planner", "--executor", "--max-extra", "--repeats",
        "--move-limit", "--allow-mismatch", "--plot", "--results", "--simulate",
    } | PRICING | RANKS | OUTPUT,
    "report": {"results", "--out"} | OUTPUT,
    "soak": {"--seconds", "--bytes", "--message", "--executor", "--fault"} | RANKS | OUTPUT,
    "track": {"action"},
    "validate": {"--profile", "--simulate", "--quick", "--results"} | RANKS | OUTPUT,
}  # fmt: skip
#: The commands of ``track``.
TRACK = {
    "run": {"--suite", "--history", "--launches", "--case", "--time-limit"} | OUTPUT,
    "check": {"--against", "--ab", "--suite", "--launches", "--history", "--allow-mismatch", "--warn-only"}
    | {"--commit", "--window", "--case", "--exact-only", "--undecided-ok", "--time-limit"}
    | {"--junit", "--github", "--markdown", "--action-benchmark", "--hud", "--otava"} | OUTPUT,
    "show": {"--history", "--out", "--force"},
}  # fmt: skip
TRACK_HIDDEN = {"run": {"--fault"}, "check": {"--fault"}}
HIDDEN = {"compare": {"--fault"}, "run": {"--fault"}, "validate": {"--fault"}}
