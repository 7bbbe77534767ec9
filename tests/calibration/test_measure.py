from __future__ import annotations

import json

import pytest
from pool import RankPool

from relaymeter.calibration.profiles import from_json
from relaymeter.relayout.topology import Topology

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
@pytest.mark.parametrize(("messages", "calls"), [(1, 1), (5, 1), (1, 3)])
def test_all_ranks_get_the_same_samples_and_every_byte_is_right(
    pool: RankPool, executor: str, messages: int, calls: int
) -> None:
    found = pool.call("jobs_calibration:cell", executor=executor, nbytes=40_000, messages=messages, calls=calls)
    assert all(answer == found[0] for answer in found)
    assert 1 <= len(found[0]["times"]) <= 4
    assert all(0 < seconds < 5 for seconds in found[0]["times"])
    assert found[0]["wrong"] == []


@pytest.mark.parametrize("executor", ["send-recv", "all-to-all"])
@pytest.mark.parametrize(
    ("how", "least", "most"),
    [("zeros", 32_000, 32_768), ("stale", 16_000, 32_768), ("bit", 2, 2), ("swap", 12_000, 16_384)],
)
def test_wrong_bytes_are_counted_on_every_rank(pool: RankPool, executor: str, how: str, least: int, most: int) -> None:
    found = pool.call("jobs_calibration:damaged", executor=executor, how=how)
    assert all(answer == found[0] for answer in found)
    ((src, dst, count),) = found[0]
    assert (src, dst) == (0, 2)
    assert least <= count <= most


@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_packing_is_timed_on_every_rank_alike(pool: RankPool, direction: str) -> None:
    found = pool.call("jobs_calibration:packing", direction=direction)
    assert all(answer == found[0] for answer in found)
    assert all(0 < seconds < 1 for seconds in found[0])


def test_a_matrix_of_the_wrong_shape_is_refused(pool: RankPool) -> None:
    assert all("4 x 4" in text for text in pool.call("jobs_calibration:refuse"))


def test_a_short_calibration_gives_one_profile_on_all_ranks_and_says_what_hindered_it(pool: RankPool) -> None:
    found = pool.call("jobs_calibration:calibrate", limit_s=100.0)
    assert len({answer["sha256"] for answer in found}) == 1
    profile = from_json(json.loads(found[0]["text"]), "of the test")
    assert list(profile.executors) == ["send-recv", "all-to-all"]
    assert profile.topology.nodes == 2 and profile.topology.world_size == 4
    assert profile.fingerprint["backend"] == "gloo" and profile.fingerprint["world_size"] == 4
    assert profile.nic_rate(0) > 1e6 and (profile.port_rate() or 0) > 1e6
    assert profile.topology == Topology.grid(2, 2) or profile.warnings
    # The first exchange of each executor takes 0.7 s and is in no other figure.
    assert set(profile.connect_s) == {"send-recv", "all-to-all"} and min(profile.connect_s.values()) >= 0.7
    curves = [cell for cell in profile.cells if cell.pattern.endswith("curve")]
    assert all(min(cell.samples_s) < 0.5 for cell in curves)
    # Rank 2 has the least memory: its cap is that of all ranks.
    assert max(cell.size for cell in curves) == 11 << 17  # the next one would be more than 2.1 MB
    assert any("free memory of rank 2, the least of any, allows at most 2.1 MB" in text for text in profile.warnings)
    assert len(profile.hints) == 4 and len({entry["host"] for entry in profile.hints}) == 1


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("zeros", 6, "from rank 0 to rank 2; a link that alters data has no rate"),
        ("memory", 2, "only 262140 bytes of memory are free for rank 1: calibration needs 12 MiB per rank"),
    ],
)
def test_a_link_of_zeros_and_a_rank_without_memory_end_the_calibration_on_all_ranks(
    pool: RankPool, how: str, code: int, text: str
) -> None:
    for found in pool.call("jobs_calibration:refused", how=how):
        assert found[0] == code and text in found[1], found


def test_a_rank_that_answers_but_takes_no_part_is_named_within_the_limit(pool: RankPool) -> None:
    for code, text, ranks, seconds in pool.call("jobs_calibration:sleeper")[:3]:
        assert (code, ranks) == (7, [3])
        assert "rank 3 hangs: it answers but takes no part in the calibration" in text
        assert seconds < 6
    pool.close()  # the group is broken
