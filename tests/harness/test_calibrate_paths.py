"""``calibrate --paths`` without ranks: where it is refused, which change it makes, what the profile keeps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from relaymeter.calibration.costs import Curve, ExecutorCosts, LinkCosts, PackCosts
from relaymeter.calibration.profiles import ExecutorProfile, Profile
from relaymeter.errors import EXIT_OK, EXIT_RANK_LOST, EXIT_WRONG_BITS, InputError
from relaymeter.harness import calibrate_paths, emit
from relaymeter.harness.calibrate_paths import copy_s_per_byte, measure_paths, path_scenario, refuse_paths
from relaymeter.harness.compare_rows import Told, rows_of
from relaymeter.harness.jobs import ClusterConfig
from relaymeter.harness.launch import WorldHint
from relaymeter.policies.path_costs import PathCosts
from relaymeter.relayout.topology import Topology

CURVE = Curve(bytes=(1024, 1 << 20), seconds=(1e-4, 2e-2), tail_s_per_byte=2e-8)
LINK = LinkCosts(CURVE, 0.0, 0.0, 1.0, 1.0, 1.0, {}, {}, 1.0, {}, 0.0)
PACK = PackCosts(1e-5, 1e-6, 4e-10, world_lanes=2.0)
PROFILE = Profile(
    created_utc="2026-01-02T03:04:05+00:00", fingerprint={}, topology=Topology.grid(1, 4), gates=(), warnings=(),
    executors={"send-recv": ExecutorProfile(ExecutorCosts(1e-4, 0.0, 0.8, 0.0, LINK, None, PACK, PACK), (), {})},
    quick=True, spent_s=1.0, connect_s={},
)  # fmt: skip


def asked(**options: Any) -> argparse.Namespace:
    kept = {"paths": True, "storage": None, "check": None, "simulate": None, "time_limit": None, **options}
    return argparse.Namespace(**kept)


def test_a_world_that_was_joined_cannot_start_anew_and_is_told_what_can() -> None:
    hint = WorldHint("torchrun", 0, 4, 0)
    with pytest.raises(
        InputError, match=r"in the world of torchrun: .*as a plain command \(relaymeter calibrate --nod"
    ):
        refuse_paths(asked(), hint)
    refuse_paths(asked(paths=False), hint)


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_paths, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed: pip install 'relaymeter\[deepspeed\]'"):
        refuse_paths(asked(), None)


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [(1, 2, (2, 1)), (1, 4, (4, 2)), (2, 4, (8, 4)), (1, 5, (4, 2)), (2, 8, (12, 6)), (1, 3, (3, 1))],
)
def test_the_change_is_one_that_every_world_can_make(nodes: int, ranks: int, expected: tuple[int, int]) -> None:
    change = path_scenario(ClusterConfig(nodes=nodes, ranks_per_node=ranks), 64).changes[0]
    assert (len(change.source.ranks), len(change.end.ranks)) == expected


def _told(width: int, slower: float = 1.0, wrong: bool = False) -> Told:
    phases = {"save": 0.1, "load": 0.002 * width * slower, "build": 1.0}
    good = {"digest_passed": 5 if wrong else 6, "digest_total": 6, "mismatch": "a" if wrong else None}
    return Told(
        saved=[{"path": "dcp", "storage": "disk", "phases": {"save": phases.pop("save")}}],
        loaded=[{"path": "dcp", "storage": "disk", "cache": None, "phases": phases, **good}],
        start={"relaunch": 4.0, "import": 8.0}, state_bytes=1000 * width,
    )  # fmt: skip


def _measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, codes: dict[int, int], wrong: int | None = None
) -> tuple[int, Any]:
    """What ``measure_paths`` gives where making a change is replaced by telling what it took."""

    def make(making: Any, change: Any, launch: int, out: Any) -> tuple[int, list[Any]]:
        width = making.scenario.training.width
        return codes.get(width, EXIT_OK), rows_of(
            making.scenario, change, _told(width, wrong=width == wrong), stamp=making.stamp, launch=launch, nodes=1,
            paths=("dcp",), storages={"disk": "ext4"}, caches={"disk": (None,)},
        )  # fmt: skip

    monkeypatch.setattr(calibrate_paths, "make_change", make)
    storage = [("disk", str(tmp_path))]
    return measure_paths(
        asked(storage=storage), ClusterConfig(nodes=1, ranks_per_node=4), PROFILE, emit.Output(None, force=False)
    )


def test_costs_are_fitted_and_kept_with_the_figures_they_stand_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, paths = _measured(monkeypatch, tmp_path, {})
    assert code == EXIT_OK
    kept = json.loads(json.dumps(paths))
    costs = PathCosts.from_dict(kept["costs"])
    assert costs.price("dcp", "disk", None, 300_000, 4, 1).pause_s == pytest.approx(13.7, rel=1e-4)
    assert [row["phases_s"]["load"] for row in kept["rows"]] == pytest.approx([0.384, 1.024, 2.048])
    assert copy_s_per_byte(PROFILE) == pytest.approx(2e-10)  # two of four ranks at full speed
    printed = capsys.readouterr().out
    assert "paths 1 of 3: zero3 x4 -> zero3 x2, about " in printed
    assert "prices of paths erred by 3.0% (pause), 3.0%" in printed


def test_wrong_bits_and_lost_ranks_leave_no_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _measured(monkeypatch, tmp_path, {}, wrong=512) == (EXIT_WRONG_BITS, None)
    assert _measured(monkeypatch, tmp_path, {192: EXIT_RANK_LOST}) == (EXIT_RANK_LOST, None)
    assert _measured(monkeypatch, tmp_path, {512: 143}) == (143, None)
