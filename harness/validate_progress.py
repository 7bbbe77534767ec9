"""Lines of progress of a validation, some seconds apart: how far it is, and what is at hand.

``part = Clock(say, "validate").part("sizes and matrices", 0.0, 0.45)``, then ``part(share)`` or ``part(share, "this
one")`` as the stretch goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Clock", "Progress"]

#: Least time between two lines, in seconds.
_QUIET_S = 5.0


class Progress(Protocol):
    """Called now and then during a stretch of work."""

    def __call__(self, share: float, at: str = "") -> None:
        """``share`` of the stretch is done; ``at``: what is at hand."""


@dataclass
class Clock:
    """Says lines that begin with ``what``, the first ``_QUIET_S`` after it was made."""

    say: Callable[[str], None]
    what: str
    last_s: float = field(default_factory=time.monotonic)

    def part(self, text: str, first: float, last: float) -> Progress:
        """Progress of a stretch that goes from ``first`` to ``last`` of the whole."""

        def progress(share: float, at: str = "") -> None:
            now = time.monotonic()
            if now - self.last_s >= _QUIET_S:
                self.last_s = now
                self.say(f"{self.what} {first + (last - first) * share:4.0%}  {text}{at and f': {at}'}")

        return progress
