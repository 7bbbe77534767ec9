"""Options of ``relaymeter doctor``."""

from __future__ import annotations

from relaymeter.harness.arguments import Commands, add_command, add_output

__all__ = ["add_doctor"]


def add_doctor(commands: Commands) -> None:
    """Add the command to the command line."""
    doctor = add_command(
        commands,
        "doctor",
        "list what this machine offers a run, what stands in its way, and what mends it",
        "relaymeter doctor --strict\n  srun --ntasks-per-node 1 relaymeter doctor",
    )
    doctor.add_argument(
        "--strict",
        action="store_true",
        help="exit code 3 where there is a warning or a fault (default: 0 whatever was found)",
    )
    add_output(doctor, "write the findings as JSON")
    doctor.set_defaults(handler=("commands_doctor", "doctor"))
