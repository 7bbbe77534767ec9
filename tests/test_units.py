"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest

from relaymeter.errors import InputError
from relaymeter.relayout.topology import parse_grid
from relaymeter.units import counted, format_bytes, format_rate, parse_bytes, parse_rate


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("64KiB", 65536), ("4 MiB", 4 << 20), ("1GB", 10**9)])
def test_sizes_are_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_network_rates_are_bits_and_become_bytes() -> None:
    assert parse_rate("400mbit") == 50e6
    assert format_rate(107.37e9) == "107 GB/s" and format_bytes(2**30) == "1.07 GB"


@pytest.mark.parametrize("text", ["0", "0.5", "-1", "1e3", "4 parsecs", "", "99999999999TiB"])
def test_what_is_no_size_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(InputError, match="size in bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["16", "0x8", "16x", "²x2", "ax2", "100000x100000", "9" * 5000 + "x2"])
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="topology"):
        parse_grid(text)


def test_one_thing_is_not_several() -> None:
    assert [counted(n, "repeat") for n in (0, 1, 5)] == ["0 repeats", "1 repeat", "5 repeats"]
