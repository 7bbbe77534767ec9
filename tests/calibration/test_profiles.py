from __future__ import annotations

import json
from pathlib import Path

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


def test_an_edited_profile_is_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    entry = profile.to_dict()
    entry["executors"]["send-recv"]["costs"]["cross_node"]["port"] = 0.5
    path.write_text(json.dumps(entry))
    with pytest.raises(InputError, match="edited"):
        load(path)


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
    with pytest.raises(InputError, match="schema_version 99"):
        from_json({**profile.to_dict(), "schema_version": 99}, "p.json")


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
