"""Results of offloads: what several ranks saw becomes one result, and what it says. Real engines: tests/dist."""

from __future__ import annotations

from typing import Any

import pytest

from relaymeter.errors import InputError
from relaymeter.harness.offload import run_offload
from relaymeter.harness.offload_results import DEEPSPEED, RELEASE, Case, OffloadResult, Seen, merge

MEBIBYTE = 2**20
CASE = Case(stage=3, way=DEEPSPEED, state="optim_states", pinned=True, blocking=False)


def seen(**fields: Any) -> Seen:
    """A rank that offloaded 64 MiB twice and got everything back."""
    plain = {
        "bytes": 64 * MEBIBYTE,
        "offload_s": [0.5, 0.1],
        "reload_s": [0.2, 0.2],
        "allocated": [100 * MEBIBYTE, 36 * MEBIBYTE, 100 * MEBIBYTE],
        "resident": [10 * MEBIBYTE, 10 * MEBIBYTE],
        "trains": "bit-equal",
    }
    return Seen(**plain | fields)


def test_the_slowest_and_the_largest_rank_make_the_result() -> None:
    other = seen(bytes=65 * MEBIBYTE, offload_s=[0.2, 0.9], reload_s=[0.1, 0.1], resident=[5, 8])
    result = merge(CASE, [seen(), other])
    assert (result.stage, result.state, result.pinned, result.blocking) == (3, "optim_states", True, False)
    assert result.bytes == 65 * MEBIBYTE
    assert result.offload_s == pytest.approx(0.55)  # the median of two cycles
    assert result.reload_s == pytest.approx(0.2)
    assert result.reload_rate == pytest.approx(65 * MEBIBYTE / 0.2)
    assert result.freed_bytes == 64 * MEBIBYTE
    assert result.host_growth_bytes == 3
    assert (result.equal, result.trains, result.note, result.verdict) == (True, "bit-equal", None, "ok")


def test_memory_that_the_allocator_does_not_get_back_is_told() -> None:
    kept = seen(allocated=[100 * MEBIBYTE, 100 * MEBIBYTE, 164 * MEBIBYTE])
    result = merge(CASE, [kept])
    assert result.freed_bytes == 0
    assert result.note == (
        f"the allocator got back 0 of {64 * MEBIBYTE} bytes; the allocator holds {64 * MEBIBYTE} bytes more than before"
    )
    assert result.verdict == "ok"


def test_without_an_allocator_that_says_there_is_no_claim_of_freed_memory() -> None:
    result = merge(CASE, [seen(allocated=[], resident=[7])])
    assert (result.allocated_before_bytes, result.freed_bytes, result.host_growth_bytes, result.note) == (None,) * 4


def test_one_rank_that_differs_makes_wrong_bits() -> None:
    result = merge(CASE, [seen(), seen(mismatch="master of b, copy 0 (ranks 1), elements [0, 7)")])
    assert (result.equal, result.mismatch, result.verdict) == (
        False,
        "master of b, copy 0 (ranks 1), elements [0, 7)",
        "wrong bits",
    )
    result = merge(CASE, [seen(trains="cannot: KeyError: 0"), seen()])
    assert (result.equal, result.trains, result.verdict) == (True, "cannot: KeyError: 0", "wrong bits")
    assert result.note == "the next step cannot: KeyError: 0"


def test_an_error_of_deepspeed_is_the_result() -> None:
    result = merge(CASE, [seen(failure="AssertionError: only for FusedAdam"), seen()])
    assert (result.outcome, result.verdict, result.equal, result.offload_s) == ("failed", "failed", None, None)
    assert result.note == "DeepSpeed fails: AssertionError: only for FusedAdam"
    released = merge(Case(stage=1, way=RELEASE, state="all"), [seen(failure="InputError: no")])
    assert released.note == "release fails: InputError: no"


def test_nothing_moved_has_no_rate() -> None:
    result = OffloadResult(stage=1, way=DEEPSPEED, state="lp_grads", moment="after a step", bytes=0, offload_s=0.1)
    assert (result.offload_rate, result.reload_rate, result.freed_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"steps": 0}, "steps = 0, repeats = 1"),
        ({"repeats": 0}, "steps = 2, repeats = 0"),
        ({"states": ["optimizer"]}, "state 'optimizer' is not one of hp_params, lp_params"),
    ],
)
def test_settings_that_measure_nothing_are_refused(settings: dict[str, Any], reason: str) -> None:
    def none(*_: object) -> Any:
        raise AssertionError("no engine is built")

    with pytest.raises(InputError) as error:
        next(run_offload(none, none, **settings))
    assert reason in str(error.value)
