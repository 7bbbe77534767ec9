"""relaymeter: calibrate a cluster, price the moves of sharded model state, choose, move, and prove every bit.

Importing this package imports no torch, and nothing else until it is asked for. The rooms are ``relaymeter.relayout``,
``relaymeter.calibration``, ``relaymeter.policies`` and ``relaymeter.harness``;
``relaymeter.load_policy("policy.json")`` reads what ``relaymeter choose --out policy.json`` wrote;
``relaymeter.Sync(trainer, destination)`` moves a live trainer's weights at every call (it imports torch).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relaymeter.policies.policy import Policy
    from relaymeter.policies.policy_file import load_policy
    from relaymeter.relayout.sync import Sync

__version__ = "0.1.0"
__all__ = ["Policy", "Sync", "__version__", "load_policy"]

#: Where the names are that are imported when they are asked for.
_LATER = {
    "Policy": "relaymeter.policies.policy",
    "Sync": "relaymeter.relayout.sync",
    "load_policy": "relaymeter.policies.policy_file",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'relaymeter' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
