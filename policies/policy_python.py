"""A policy's thresholds as Python to paste where ``min_relay`` and ``min_split`` are set today.

``python_text(policies)`` is a dict of keyword arguments for the default executor, and as comments for the others. Any
process, no torch import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relaymeter import __version__
from relaymeter.policies.policy import Policy
from relaymeter.policies.reach import shape_text
from relaymeter.policies.regret import figures_text
from relaymeter.policies.thresholds import RULE_ROUTES, Threshold
from relaymeter.units import counted, format_bytes, format_seconds

__all__ = ["python_text"]

#: What stands for "never" where a number of elements has to be: more than any block has.
_NEVER = 1 << 62


def python_text(policies: Sequence[Policy]) -> str:
    """The thresholds as Python: a dict of keyword arguments by destination ranks per node, and those for most bytes.

    The first policy's are code, those of the other executors stand below as comments. Comments hold the interval of
    each and where they come from. It needs no import, and running it does nothing else, whatever the names in it.
    """
    first, *others = policies
    lines = list(_lines(first))
    for policy in others:
        lines += ["", f"# For {policy.executor} instead, as one set of thresholds does not fit both executors:"]
        lines += [line if line.startswith("#") else f"# {line}" for line in _lines(policy)]
    return "\n".join(_one_line(line) for line in lines) + "\n"


def _lines(policy: Policy) -> Iterator[str]:
    yield f"# min_relay and min_split by relaymeter {__version__} for {shape_text(policy.topology)}, {policy.executor}."
    if policy.simulated is not None:
        yield f"# SIMULATED: priced for the simulated cluster {policy.simulated}; nothing was measured."
    stamp = policy.profile
    yield f"# Profile {stamp['sha256'][:12]} of machine {stamp['machine_id']}, {stamp['created_utc']}."
    yield f"# Trust: {_trust(policy)}."
    yield from (f"# Profile of another machine: {text}" for text in policy.profile_mismatch)
    if policy.profile_note is not None:
        yield f"# Note: {policy.profile_note}."
    fixed, found, chosen = policy.fixed_constants_s, policy.found_constants_s, policy.chosen_s
    regret = fixed - chosen
    share = f" ({regret / chosen:+.1%})" if chosen > 0 else ""
    yield (
        f"# Keeping 65,536 for both: {'-' if regret < 0 else '+'}{format_seconds(abs(regret))}{share} against the "
        f"routes chosen for {policy.scenario}, predicted:"
    )
    yield from (f"# {text}" for text in figures_text(fixed, found, chosen, policy.beyond_rule).split("; "))
    yield f"# Elements of {counted(policy.itemsize, 'byte')}; {_NEVER} stands for never."
    yield "# [5 %, 95 %] of the bootstrap: the scatter of the measurement only, not the error of the model."
    fanouts = policy.priced_fanouts
    if not fanouts:
        yield "# No two nodes with two ranks on one of them: nothing can be relayed or split."
    yield "RELAYOUT_THRESHOLDS = {  # keyword arguments by destination ranks per node"
    for fanout in fanouts:
        limits = {"min_relay": policy.relay[fanout], "min_split": policy.split[fanout]}
        values = ", ".join(f'"{name}": {_number(one.elements)}' for name, one in limits.items())
        notes = ", ".join(f"{name} {_interval(one)}" for name, one in limits.items())
        yield f"    {fanout}: {{{values}}},  # {notes}"
    yield "}"
    if fanouts:
        usual, why = _usual(policy)
        yield f"# {why}"
        yield f"relayout_options = RELAYOUT_THRESHOLDS[{usual}]"


def _usual(policy: Policy) -> tuple[int, str]:
    """The number of ranks that carries most of the bytes that the constants can route, and how much that is of all
    bytes at their destination; the largest number where they can route none."""
    rows = [row for move in policy.moves for row in move.classes]
    carried = dict.fromkeys(reversed(policy.priced_fanouts), 0)
    for row in rows:
        if row.fanout in carried and len(set(row.prices_s) & set(RULE_ROUTES)) > 1:
            carried[row.fanout] += row.bytes * row.fanout
    usual = max(carried, key=lambda fanout: carried[fanout])
    total = sum(row.bytes * row.fanout for row in rows)
    if not carried[usual]:
        return usual, f"No block of {policy.scenario} is one that these constants can route; the most ranks a node:"
    routable = f"{format_bytes(sum(carried.values()))} of {format_bytes(total)}"
    return usual, f"{usual} ranks a node want most of the bytes of {policy.scenario} that these can route ({routable}):"


def _trust(policy: Policy) -> str:
    beyond = f"; beyond what was measured: {', '.join(policy.beyond)}; the error here is not known"
    if not policy.error_matrices:
        text = f"{policy.error:.1%} error of the prices assumed, not measured"
    else:
        text = f"prices erred by {policy.error:.1%} on {policy.error_matrices} matrices not fitted"
    return text + (beyond if policy.extrapolated else "")


def _number(elements: int | None) -> str:
    return str(_NEVER if elements is None else elements)


def _interval(limit: Threshold) -> str:
    value, low, high = ("never" if edge is None else f"{edge:,}" for edge in (limit.elements, limit.low, limit.high))
    return f"{value} [{low}, {high}]"


def _one_line(text: str) -> str:
    """``text`` with nothing in it that could end a comment: a name may hold any character."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
