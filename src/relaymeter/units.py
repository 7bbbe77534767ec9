"""Bytes, seconds and rates. Bytes and seconds are stored; rates are derived (1 GB/s = 1e9 bytes per second).

``parse_rate("400mbit")`` gives bytes per second; ``parse_bytes("4MiB")`` gives bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from relaymeter.errors import InputError

__all__ = ["counted", "format_bytes", "format_rate", "format_seconds", "parse_bytes", "parse_rate"]

_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def _split(text: str, units: Mapping[str, float], what: str) -> tuple[float, float]:
    match = _NUMBER.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in units or float(match.group(1)) <= 0:
        names = ", ".join(name for name in units if name)
        raise InputError(f"{text!r} is not a {what}: give a positive number with one of these units: {names}")
    return float(match.group(1)), float(units[unit])


def parse_rate(text: str) -> float:
    """Bytes per second of a network rate such as ``"400mbit"``. Raises InputError."""
    number, factor = _split(text, _BITS, "network rate")
    return number * factor / 8.0


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``"64MiB"`` or ``"65536"``. Raises InputError."""
    number, factor = _split(text, _BYTES, "size in bytes")
    if number * factor < 1 or number * factor >= 2**63:
        raise InputError(f"{text!r} is not a size in bytes: give 1 byte to 2^63")
    return int(number * factor)


def format_bytes(count: float) -> str:
    """A size for people, in powers of 1,000."""
    for limit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= limit:
            return f"{count / limit:.3g} {name}" if count / limit < 100 else f"{count / limit:.0f} {name}"
    return f"{count:.0f} B"


def counted(count: int, noun: str) -> str:
    """A number of things for people: ``"1 repeat"``, ``"5 repeats"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_rate(bytes_per_s: float) -> str:
    """A rate for people: ``"47.8 MB/s"``."""
    return format_bytes(bytes_per_s) + "/s"


def format_seconds(seconds: float) -> str:
    """A duration for people, with three significant digits."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"
