"""Headers of safetensors files: what is read, and every way in which one may lie."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from input_files import header_of, write_json, write_raw, write_safetensors

from relaymeter.errors import InputError
from relaymeter.harness.inputs.safetensors_headers import MAX_HEADER_BYTES, read_headers
from relaymeter.relayout.layout import TensorSpec

TWO = {"a": [2, 3], "b": [4]}


def specs(path: Path) -> dict[str, TensorSpec]:
    found = read_headers(path)
    assert found is not None
    return dict(found.specs)


def test_a_header_says_names_shapes_and_dtypes_in_its_order(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "model.safetensors", {"z": [2, 3], "a": [], "empty": [0, 5]})
    assert list(specs(file).values()) == [
        TensorSpec("z", (2, 3), "bfloat16"), TensorSpec("a", (), "bfloat16"), TensorSpec("empty", (0, 5), "bfloat16"),
    ]  # fmt: skip
    assert specs(tmp_path) == specs(file)


def test_a_header_is_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    library.save_file({"b": numpy.zeros((3, 2), "float32"), "a": numpy.zeros(5, "int8")}, tmp_path / "x.safetensors")
    found = specs(tmp_path / "x.safetensors")
    assert found == {"b": TensorSpec("b", (3, 2), "float32"), "a": TensorSpec("a", (5,), "int8")}


def test_an_index_names_the_shards_and_no_others_are_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": [2], "spare": [1]})
    write_safetensors(tmp_path / "two.safetensors", {"b": [3]})
    write_raw(tmp_path / "consolidated.safetensors", b"not read", 0, length=9999)
    write_json(
        tmp_path / "model.safetensors.index.json", {"weight_map": {"b": "two.safetensors", "a": "one.safetensors"}}
    )
    found = read_headers(tmp_path)
    assert found is not None
    assert [(name, spec.shape) for name, spec in found.specs.items()] == [("b", (3,)), ("a", (2,))]
    assert list(found.notes) == ["left out, as the index does not name them: 1 tensor of its shards"]
    assert specs(tmp_path / "model.safetensors.index.json") == dict(found.specs)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"a": "gone.safetensors", "b": "lost.safetensors"},
            "2 shards, of which 2 are not beside it: gone.safetensors, ",
        ),
        ({"a": "../one.safetensors"}, '"../one.safetensors", which is no name of a file beside the index'),
        ({"a": "/etc/one.safetensors"}, "which is no name of a file"),
        ({"a": 3}, "a is in 3, which is no name"),
        ({"c": "one.safetensors"}, "says c is in one.safetensors, whose header does not name it"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, table: Any, said: str) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": [2]})
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": table})
    with pytest.raises(InputError, match=re.escape(said)):
        read_headers(tmp_path)


def test_a_name_in_two_files_of_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": [2]})
    write_safetensors(tmp_path / "two.safetensors", {"a": [2]})
    with pytest.raises(InputError, match=r"tensor a is in .*one.safetensors and in .*two.safetensors"):
        read_headers(tmp_path)


def test_a_folder_without_files_has_no_header(tmp_path: Path) -> None:
    assert read_headers(tmp_path) is None


def changed(name: str, **fields: Any) -> dict[str, Any]:
    header, _ = header_of(TWO)
    return {**header, name: {**header[name], **fields}}


@pytest.mark.parametrize(
    ("header", "room", "said"),
    [
        (changed("b", data_offsets=[11, 19]), 20, "tensor b at bytes 11 to 19 overlaps a"),
        (changed("b", data_offsets=[0, 8]), 20, "overlaps b"),
        (changed("b", data_offsets=[14, 22]), 22, "tensor b at bytes 14 to 22 leaves 2 bytes unnamed after a"),
        (changed("b", data_offsets=[12, 20]), 19, "tensor b ends at byte 20 of the 19 that follow the header"),
        (changed("b"), 24, "4 bytes follow b, the last tensor"),
        (changed("b", data_offsets=[12, 18]), 20, "tensor b: bytes 12 to 18 are 6, BF16 [4] needs 8"),
        (changed("b", data_offsets=[20, 12]), 20, "are -8, BF16 [4] needs 8"),
        (changed("b", data_offsets=[12]), 20, "tensor b: data_offsets [12] are no whole numbers"),
        (changed("b", shape=[-4]), 20, "tensor b: shape [-4] are no whole numbers of at least 0"),
        (changed("b", shape=[2**62]), 20, "are no whole numbers"),
        (changed("b", shape=[True]), 20, "are no whole numbers"),
        (changed("b", shape=4), 20, "tensor b: shape 4 are no whole numbers"),
        (changed("b", dtype="F4"), 20, 'tensor b is of dtype "F4", which is not one of F64, F32'),
        ({"a": [1, 2]}, 20, "tensor a has no dtype, shape and data_offsets: [1, 2]"),
        ({"a": {"dtype": "BF16"}}, 20, "tensor a has no dtype, shape and data_offsets"),
        ([1], 0, "the header is no JSON object: [1]"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(
    tmp_path: Path, header: Any, room: int, said: str
) -> None:
    file = write_raw(tmp_path / "x.safetensors", json.dumps(header).encode(), room)
    with pytest.raises(InputError, match=re.escape(said)):
        read_headers(file)


@pytest.mark.parametrize(
    ("content", "length", "said"),
    [
        (b"{}", 2**63, "no safetensors file: it has 10 bytes, its first 8 say a header of 9223372036854775808"),
        (b"{}", 3, "its first 8 say a header of 3"),
        (b"", 0, "the header is not valid JSON at character 0"),
        (b"{", 1, "the header is not valid JSON at character 1"),
        (b'{"a": 1, "a": 2}', 16, "the key 'a' stands twice in one object"),
        (b"\xff\xfe", 2, "cannot read the header of"),
        (b"[" * 200_000, 200_000, "cannot read the header of"),
    ],
)
def test_a_length_or_text_that_is_no_header_is_refused(tmp_path: Path, content: bytes, length: int, said: str) -> None:
    file = write_raw(tmp_path / "x.safetensors", content, 0, length=length)
    with pytest.raises(InputError, match=re.escape(said)):
        read_headers(file)


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "x.safetensors", b"", MAX_HEADER_BYTES + 1, length=MAX_HEADER_BYTES + 1)
    with pytest.raises(InputError, match="a header of 100000001 bytes; the format allows 100000000"):
        read_headers(file)


def test_files_that_are_short_or_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.safetensors").write_bytes(b"1234")
    with pytest.raises(InputError, match=r"short.safetensors is no safetensors file: it has 4 bytes"):
        read_headers(tmp_path / "short.safetensors")
    with pytest.raises(InputError, match="cannot read the header of"):
        read_headers(tmp_path / "none.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(InputError, match=r"folder.safetensors is no regular file"):
        read_headers(tmp_path)
