"""What today's constants cost and what better ones win back, in words: shared by the headline and the pasted Python.

``figures_text(fixed_s, found_s, chosen_s, beyond_rule)`` puts three predicted times side by side. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaymeter.units import format_seconds

__all__ = ["figures_text", "won_back_text"]

#: Shares below this print as 0.0%.
_NONE = 5e-4


def figures_text(fixed_s: float, found_s: float, chosen_s: float, beyond_rule: Sequence[str]) -> str:
    """Predicted seconds of 65,536 for both constants, of the thresholds found in their place, and of the chosen routes,
    of which ``beyond_rule`` names those that the two constants cannot ask for."""
    share = _share(fixed_s, chosen_s)
    if beyond_rule:
        share += f", with {' and '.join(beyond_rule)}, which the two constants cannot ask for"
    return (
        f"65,536 for both {format_seconds(fixed_s)}; the thresholds found {format_seconds(found_s)} "
        f"({_share(fixed_s, found_s)}); routes by class {format_seconds(chosen_s)} ({share})"
    )


def won_back_text(fixed_s: float, found_s: float, chosen_s: float) -> str:
    """How much of the seconds between today's constants and the chosen routes the thresholds found win back."""
    won, lost = fixed_s - found_s, fixed_s - chosen_s
    if abs(won) < _NONE * fixed_s:
        return "the thresholds found win nothing of it back"
    if won < 0:
        return f"the thresholds found lose {format_seconds(-won)} more"
    return f"the thresholds found win {format_seconds(won)} of it back ({won / lost:.1%})"


def _share(fixed_s: float, seconds: float) -> str:
    change = seconds / fixed_s - 1 if fixed_s > 0 else 0.0
    return "the same" if abs(change) < _NONE else f"{change:+.1%}"
