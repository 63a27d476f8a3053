"""Folders that look like a model and are none (public reports on broken downloads)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from lab import tiny_model
from vllm_turing.model_safetensors import header_problem, inspect_folder

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:0000000000000000000000000000000000000000000000000000000000000000\n"
    "size 2415919104\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model.write_model(tmp_path / "model")
    return tmp_path / "model"


def found(folder: Path, *expected: str) -> list[tuple[str, str]]:
    return [(finding.kind, finding.path) for finding in inspect_folder(folder, expected)]


def test_the_tiny_model_is_in_order(folder: Path) -> None:
    assert found(folder) == []
    assert found(folder, *(path.name for path in folder.iterdir())) == []


def test_a_missing_shard_is_named_though_the_loader_would_not_mind(folder: Path) -> None:
    (folder / "model-00003-of-00004.safetensors").unlink()
    assert found(folder) == [("missing", "model-00003-of-00004.safetensors")]


def test_a_stray_shard_is_only_told(folder: Path) -> None:
    stray = folder / "model.safetensors"
    stray.write_bytes((folder / "mtp.safetensors").read_bytes())
    (finding,) = inspect_folder(folder)
    assert (finding.kind, finding.path, finding.fatal) == ("stray", stray.name, False)


def test_shards_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert found(folder) == [("index", "model.safetensors.index.json")]


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"weight_map": 5}', "{}"])
def test_an_index_that_is_none(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert found(folder) == [("index", "model.safetensors.index.json")]


def test_an_index_that_leads_out(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["x"] = "../mtp.safetensors"
    index.write_text(json.dumps(data))
    assert found(folder) == [("index", index.name)]


@pytest.mark.parametrize("name", ["model-00004-of-00004.safetensors", "tokenizer.json"])
def test_an_lfs_pointer_is_named_with_the_real_size(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    (finding,) = inspect_folder(folder)
    assert (finding.kind, finding.path) == ("pointer", name)
    assert "2415919104 bytes" in finding.message


def test_a_web_page_under_a_models_name(folder: Path) -> None:
    (folder / "config.json").write_text("\n<!DOCTYPE html>\n<html>sign in</html>")
    assert found(folder) == [("html", "config.json")]


def test_a_link_to_a_cache_that_is_gone(folder: Path) -> None:
    name = "model-00001-of-00004.safetensors"
    (folder / name).unlink()
    (folder / name).symlink_to("../../blobs/abc")
    assert ("dangling", name) in found(folder)


def test_a_link_to_a_cache_that_is_there_is_fine(folder: Path, tmp_path: Path) -> None:
    file = folder / "mtp.safetensors"
    file.rename(tmp_path / "blob")
    file.symlink_to(tmp_path / "blob")
    assert found(folder) == []


def test_leftovers_of_other_tools_are_told(folder: Path) -> None:
    names = [path.name for path in folder.iterdir()]
    leftover = folder / ".cache/huggingface/download/x.incomplete"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"12")
    assert found(folder, *names) == [("stray", ".cache/huggingface/download/x.incomplete")]


def write(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


@pytest.mark.parametrize(
    ("header", "data", "length", "says"),
    [
        ({}, b"", 1 << 40, "announces a header of"),
        (b"{", b"", None, "not JSON"),
        ([], b"", None, "not a mapping"),
        ({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 1]}}, b"1", None, "'a'"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}, b"1", None, "1 bytes where"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"12", None, "a hole"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"1", None, "describes"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"123", None, "describes"),
    ],
)
def test_damaged_headers(
    tmp_path: Path, header: Any, data: bytes, length: int | None, says: str
) -> None:
    assert says in header_problem(write(tmp_path / "x.safetensors", header, data, length))


def test_a_file_of_a_few_bytes(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"123")
    assert "too short" in header_problem(file)


def test_a_right_header(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [4, 6]},
        "c": {"dtype": "F32", "shape": [0], "data_offsets": [6, 6]},
    }
    assert header_problem(write(tmp_path / "x.safetensors", header, b"123456")) == ""
