"""The history file: nothing is lost by killed or simultaneous writers, and nothing bad is read as good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from track_launches import case, launch

from relaymeter.errors import InputError, NothingMeasured, Undecided
from relaymeter.harness.track.history import append, read


def no_constant(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def test_what_is_appended_is_read_back_in_order_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "track.jsonl"
    first, second = launch(number=1), launch(number=2, commit=None, dirty=True)
    assert append(path, [first]) == []
    assert append(path, [second]) == []
    assert append(path, []) == []
    assert read(path) == ([first, second], [])
    assert path.read_bytes().count(b"\n") == 2


def test_a_missing_history_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(NothingMeasured, match=r"does not exist: relaymeter track run --history") as caught:
        read(tmp_path / "track.jsonl")
    assert caught.value.exit_code == 5


def test_a_torn_last_line_is_left_out_set_aside_once_and_never_merged(tmp_path: Path) -> None:
    path = tmp_path / "track.jsonl"
    append(path, [launch(number=1), launch(number=2)])
    whole = path.read_bytes()
    torn = whole.splitlines()[1][:77]
    path.write_bytes(whole + torn)
    launches, notes = read(path)
    assert len(launches) == 2
    assert "line 3 is torn after 77 bytes" in notes[0]
    notes = append(path, [launch(number=3)])
    assert "set aside as track.jsonl.torn-1" in notes[0]
    assert (tmp_path / "track.jsonl.torn-1").read_bytes() == torn
    assert [one.launch for one in read(path)[0]] == [1, 2, 3]
    path.write_bytes(path.read_bytes() + b"\0\0\xff")
    assert "torn-2" in append(path, [launch(number=4)])[0]
    assert (tmp_path / "track.jsonl.torn-1").read_bytes() == torn
    assert [one.launch for one in read(path)[0]] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 10, 200, -2])
def test_a_file_that_is_torn_in_its_only_line_starts_anew(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "track.jsonl"
    append(path, [launch()])
    path.write_bytes(path.read_bytes()[:cut])
    assert read(path)[0] == []
    append(path, [launch(number=2)])
    assert [one.launch for one in read(path)[0]] == [2]


def test_a_whole_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "track.jsonl"
    append(path, [launch(number=1)])
    path.write_bytes(path.read_bytes()[:-1])
    assert [one.launch for one in read(path)[0]] == [1]
    assert "kept" in append(path, [launch(number=2)])[0]
    assert [one.launch for one in read(path)[0]] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_a_torn_line_longer_than_what_is_read_at_once_is_found(tmp_path: Path) -> None:
    path = tmp_path / "track.jsonl"
    append(path, [launch(number=1)])
    torn = b'{"cases": "' + b"x" * 200_000
    path.write_bytes(path.read_bytes() + torn)
    append(path, [launch(number=2)])
    assert (tmp_path / "track.jsonl.torn-1").read_bytes() == torn
    assert [one.launch for one in read(path)[0]] == [1, 2]


_WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from track_launches import launch
from relaymeter.harness.track.history import append
assert "torch" not in sys.modules
sys.stdin.readline()
for number in range(1, 26):
    append(Path(sys.argv[1]), [launch(commit=sys.argv[2], number=number)] * 2)
"""


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "track.jsonl"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), commit, str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            text=True,
        )
        for commit in "ab"
    ]
    for writer in writers:
        writer.communicate("go\n", timeout=60)
    assert [writer.returncode for writer in writers] == [0, 0]
    launches, notes = read(path)
    assert notes == []
    for commit in "ab":
        numbers = [one.launch for one in launches if one.commit == commit * 40]
        assert numbers == [number for number in range(1, 26) for _ in range(2)]
    # a pair is written as one, so that no other writer's line stands in it
    assert all(one == other for one, other in zip(launches[::2], launches[1::2], strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_sample_that_would_not_be_read_back_is_refused_and_nothing_is_written(tmp_path: Path, value: float) -> None:
    path = tmp_path / "track.jsonl"
    with pytest.raises(InputError, match="move_s"):
        append(path, [launch(), launch(case(samples={"move_s": [value]}))])
    assert not path.exists()


def test_a_strict_parser_accepts_every_line_whatever_the_names(tmp_path: Path) -> None:
    path = tmp_path / "track.jsonl"
    odd = replace(launch(case('a "quoted"\n\u2028 case, \ud800')), machine_id='host "7", rack\n2')
    append(path, [odd])
    assert read(path) == ([odd], [])
    (line,) = path.read_text(encoding="ascii").splitlines()
    assert json.loads(line, parse_constant=no_constant)["schema_version"] == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"machine_id"', '"machine"', r"line 2: launch: machine, machine_id missing or unknown"),
        ('"digest_passed"', '"digests_passed"', r"line 2: case: digest_passed, digests_passed missing or unknown"),
        ('"move_s"', '"move_seconds"', r"line 2: metric 'move_seconds' is not one of move_s"),
        ('"dirty": false', '"dirty": 0', r"line 2: dirty is 0"),
        ("0.01", "NaN", r"line 2: .*NaN is no finite number"),
        ('"suite": "ci"', '"suite": "ci",', r"line 2: not valid JSON at column"),
        ('"schema_version": 1, ', "", r"line 2: schema_version None"),
        ('"messages": 12', f'"messages": 1{"0" * 400}', "line 2: case tp2: messages is a whole number of 1329 bits"),
        ('"messages": 12', '"messages": -1', "line 2: case tp2: messages is -1: a whole number below"),
        ('"messages": 12', '"messages": "12"', "line 2: case tp2: messages is '12': a whole number"),
        ('"digest": "ab12"', '"digest": 5', "line 2: case tp2: digest is 5: text was"),
        ("0.01", f"1{'0' * 400}", "line 2: case tp2: move_s is a whole number of 1329 bits"),
        ("0.01", "1e300", "line 2: case tp2: move_s is 1e.300: numbers from 1e-100 to 1e.100"),
        ('"digest_total": 8', f'"digest_total": 1{"0" * 400}', "line 2: case tp2: digest_total is a whole number of"),
        ('"launch": 2', f'"launch": 1{"0" * 400}', "line 2: launch is a whole number of"),
        ('"2026-01-01T00:00:00Z"', '"yesterday"', "line 2: utc is 'yesterday': a time in UTC such as 2026-01"),
        ('"2026-01-01T00:00:00Z"', '"2026-01-01T00:00:00+02:00"', "line 2: utc is '2026"),
        ('"commit_utc": null', '"commit_utc": "2026-13-01T00:00:00Z"', "line 2: commit_utc is '2026-13"),
    ],
)
def test_a_bad_line_or_a_renamed_key_is_named_with_file_and_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "track.jsonl"
    append(path, [launch(number=number) for number in (1, 2, 3)])
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[1]
    path.write_text(lines[0] + lines[1].replace(old, new) + lines[2])
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_empty_line_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "track.jsonl"
    append(path, [launch()])
    whole = path.read_bytes()
    path.write_bytes(b"\n" + whole)
    with pytest.raises(InputError, match="line 1: it is empty"):
        read(path)
    path.write_bytes(whole + b"\xff\n")
    with pytest.raises(InputError, match="line 2: not UTF-8"):
        read(path)


def test_the_mark_that_an_editor_writes_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "track.jsonl"
    append(path, [launch()])
    for whole in (path.read_bytes(), path.read_bytes()[:-1]):
        path.write_bytes(b"\xef\xbb\xbf" + whole)
        assert read(path) == ([launch()], [])
        append(path, [launch(number=2)])
        assert read(path)[0] == [launch(), launch(number=2)]
        path.write_bytes(whole)


def test_another_schema_version_is_refused_by_both_and_names_both(tmp_path: Path) -> None:
    path = tmp_path / "track.jsonl"
    append(path, [launch()])
    newer = path.read_text().replace('"schema_version": 1', '"schema_version": 7')
    path.write_text(newer)
    for work in (lambda: read(path), lambda: append(path, [launch()])):
        with pytest.raises(Undecided, match=r"schema_version 7, this version reads 1") as caught:
            work()
        assert caught.value.exit_code == 4
    assert path.read_text() == newer


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises((InputError, NothingMeasured)):
            read(path)
        with pytest.raises(InputError):
            append(path, [launch()])


def test_a_write_that_fails_half_way_leaves_the_history_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "track.jsonl"
    append(path, [launch()])
    whole = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        append(path, [launch(number=2)])
    assert path.read_bytes() == whole
