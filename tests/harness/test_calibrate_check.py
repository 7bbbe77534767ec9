"""``calibrate --check`` on simulated clusters, whole commands in this process; on real ranks see ``test_run_smoke``."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from relaymeter.harness.cli import main

SLOWER = 'like = "box-rank-nics"\nabout = "the same box with slower NICs"\n[rates]\nnic = 30e6\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a quick profile of a simulated box."""
    folder = tmp_path_factory.mktemp("made")
    options = ["--simulate", "box-rank-nics", "--quick", "--budget", "4", "--executor", "send-recv"]
    assert main(["calibrate", *options, "--out", str(folder / "pé.json")]) == 0
    (folder / "slower.toml").write_text(SLOWER)
    return folder


def _check(made: Path, *options: str) -> int:
    return main(["calibrate", "--check", str(made / "pé.json"), *options])


def test_the_same_cluster_has_not_drifted(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(made, "--simulate", "box-rank-nics") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("simulated: box-rank-nics") and "no drift: 7 cells measured again by send-recv" in printed
    assert "differs from" not in printed and "spot-check by send-recv" in printed


def test_a_name_that_standard_output_cannot_encode_is_printed_as_its_escapes(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    assert _check(made, "--simulate", "box-rank-nics", "--json", str(made / "é.json")) == 0
    assert b"checked: " in out.buffer.getvalue() and b"p\\xe9.json" in out.buffer.getvalue()
    assert (made / "é.json").exists()


def test_slower_nics_are_drift_and_the_cells_are_named(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(made, "--simulate", str(made / "slower.toml"), "--json", str(made / "c.json")) == 3
    printed = capsys.readouterr().out
    found = json.loads((made / "c.json").read_text())
    assert found["command"] == "calibrate --check" and found["simulated"] == "box-rank-nics"
    assert all(f"drift: {name}: " in printed for name in found["drifted"])
    assert all(cell["drift"] > 0.15 for cell in found["cells"] if cell["verdict"] == "drift")
    assert {name.split(",")[0] for name in found["drifted"]} >= {"across nodes", "dense both ways"}
    assert not any(name.startswith(("in node", "empty", "packing")) for name in found["drifted"])
    assert "drifted: traffic between nodes got slower; prices that rest on these no longer hold here" in printed
    assert ", beyond +15%)" in printed and "-13% / +15%" in printed
    assert any(text.startswith("model: profile ") for text in found["mismatch"]) and "differs from" in printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "which has no ranks to check it on: add --simulate PRESET"),
        (("--simulate", "h100-2x8"), "of box-rank-nics, whose nodes are others"),
        (("--simulate", "box-rank-nics", "--nic", "200mbit"), "--nic is about real ranks"),
    ],
)
def test_what_does_not_fit_a_simulated_profile_is_refused(
    made: Path, options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(made, *options) == 2
    assert text in capsys.readouterr().err
