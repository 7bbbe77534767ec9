from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import Cluster

from relaymeter.calibration.calibrate import calibrate_cluster
from relaymeter.calibration.profiles import Profile, differences, from_json, load, save
from relaymeter.calibration.recorder import Settings
from relaymeter.errors import InputError
from relaymeter.relayout.topology import Topology

FACTS = {"torch": "2.13.0", "cores": 2, "nic": [0, 1, 2, 3], "cluster": {"nic_rate_bytes_per_s": 50e6}}


@pytest.fixture(scope="module")
def profile() -> Profile:
    topology = Topology.grid(2, 2)
    settings = Settings.short()
    return calibrate_cluster(Cluster(topology).instruments(), topology, settings=settings, fingerprint=FACTS)


def test_a_saved_profile_is_read_back_equal(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(profile, path)
    again = load(path, FACTS)
    assert again == profile and again.sha256 == profile.sha256 and again.machine_id == profile.machine_id
    assert "NaN" not in path.read_text()


def test_an_existing_file_is_not_replaced_without_force(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        save(profile, path)
    assert path.read_text() == "mine"
    save(profile, path, force=True)
    assert load(path).sha256 == profile.sha256
    assert list(tmp_path.iterdir()) == [path]


def test_a_profile_of_another_machine_is_refused_naming_what_differs(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(profile, path)
    here = {**FACTS, "torch": "2.12.1"}
    with pytest.raises(InputError, match=r"torch: profile 2\.13\.0, here 2\.12\.1.*--allow-mismatch"):
        load(path, here)
    assert load(path, here, allow_mismatch=True) == profile
    assert differences(profile, here) == ("torch: profile 2.13.0, here 2.12.1",)
    assert differences(profile, {"gpu": "H200"}) == ("gpu: profile null, here H200",)


def _port(entry: dict[str, Any]) -> None:
    entry["executors"]["send-recv"]["costs"]["cross_node"]["port"] = 0.5


def _sample(entry: dict[str, Any]) -> None:
    entry["cells"][4]["samples_s"][0] *= 2


def _rank(entry: dict[str, Any]) -> None:
    entry["fingerprint"]["cores"] = 8


def _four(entry: dict[str, Any]) -> None:
    _port(entry)
    _sample(entry)
    _rank(entry)
    entry["quick"] = not entry["quick"]


def _default(entry: dict[str, Any]) -> None:
    entry["executors"] = dict(reversed(entry["executors"].items()))


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a cost": (_port, r"in executors\.send-recv\.costs\.cross_node\.port: calibrate again"),
    "a sample": (_sample, r"in cells\[4\]: calibrate"),
    "the world": (_rank, r"in fingerprint\.cores: calibrate"),
    "four members": (
        _four, r"in fingerprint\.cores, quick, executors\.send-recv\.costs\.cross_node\.port and 1 more: calibrate",
    ),
    "a member more": (lambda entry: entry.update(note="mine"), r"in note \(added\): calibrate"),
    "a member less": (lambda entry: entry.pop("sharing"), r"in sharing \(missing\): calibrate"),
    "no cells": (lambda entry: entry.update(cells=[]), r"in cells: calibrate"),
    "a hash": (lambda entry: entry["hashes"].update(quick="00000000"), r"in quick: calibrate"),
    "no hashes": (lambda entry: entry.pop("hashes"), r"in hashes: calibrate"),
    "the hash of all": (lambda entry: entry.update(sha256="0" * 64), r"in hashes or sha256: calibrate"),
    "the default executor": (_default, r"in the order of executors: calibrate"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_profile_is_refused_naming_the_member(profile: Profile, tmp_path: Path, edit: str) -> None:
    path = tmp_path / "profile.json"
    entry = profile.to_dict()
    change, text = EDITS[edit]
    change(entry)
    path.write_text(json.dumps(entry))
    with pytest.raises(InputError, match=r"profile\.json was edited after it was written, " + text):
        load(path)


def test_a_profile_that_was_only_laid_out_anew_is_intact(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.to_dict(), indent=3, sort_keys=False))
    assert load(path) == profile


def test_malformed_json_names_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{\n  "schema_version": 1,\n  "sha256": \n}\n')
    with pytest.raises(InputError, match=r"profile\.json.*line 4, column 1"):
        load(path)


@pytest.mark.parametrize("entry", [[], {}, {"sha256": "x"}, "text", None])
def test_other_json_is_no_profile(entry: object) -> None:
    with pytest.raises(InputError, match="is no profile"):
        from_json(entry, "p.json")


def test_another_schema_is_refused(profile: Profile) -> None:
    with pytest.raises(InputError, match="schema_version 99, this version reads 2: calibrate again"):
        from_json({**profile.to_dict(), "schema_version": 99}, "p.json")
    old = {key: value for key, value in profile.to_dict().items() if key not in ("hashes", "hints", "executor")}
    with pytest.raises(InputError, match="schema_version 1, from an older version of this tool; this version reads 2"):
        from_json({**old, "schema_version": 1}, "p.json")


def test_members_of_objects_are_named_where_fingerprints_differ(profile: Profile) -> None:
    here = {**FACTS, "cluster": {"nic_rate_bytes_per_s": 25e6, "nodes": 2}, "environment": {"NCCL_P2P_DISABLE": "1"}}
    assert differences(profile, here) == (
        "cluster.nic_rate_bytes_per_s: profile 50000000.0, here 25000000.0",
        "cluster.nodes: profile null, here 2",
        'environment: profile null, here {"NCCL_P2P_DISABLE": "1"}',
    )
    assert differences(profile, {"cluster": None})[0].startswith("cluster: profile {")


def test_a_simulated_profile_says_so(profile: Profile) -> None:
    assert profile.simulated is None
    assert replace(profile, fingerprint={"simulated": "h100-2x8"}).simulated == "h100-2x8"


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read profile"):
        load(tmp_path / "none.json")


def test_an_unknown_executor_lists_the_measured_ones(profile: Profile) -> None:
    with pytest.raises(InputError, match="only send-recv, all-to-all"):
        profile.costs("ring")


def test_rates_of_another_topology_are_the_usual_ones(profile: Profile) -> None:
    rates = profile.nic_rates(Topology.grid(16, 8))
    assert len(rates) == 128 and len(set(rates.values())) == 1
    assert profile.nic_rates(Topology.grid(1, 4)) == {}
