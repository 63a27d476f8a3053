"""The lock file: what is accepted, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_turing.model_lock import (
    Lock,
    LockedFile,
    ModelError,
    load,
    mismatch,
    parse,
    path_problem,
)

SHA = "a" * 64
COMMIT = "b" * 40
GOOD = {
    "repo": "owner/name",
    "commit": COMMIT,
    "revision": "main",
    "files": {"config.json": {"size": 3, "sha256": SHA}},
}


def test_what_is_dumped_is_what_is_read() -> None:
    files = {
        "b.safetensors": LockedFile(7, SHA),
        "a/b.json": LockedFile(1, None, "c" * 40),
    }
    lock = Lock("owner/name", COMMIT, files, "main")
    assert parse(lock.dump(), "x") == lock
    assert list(json.loads(lock.dump())["files"]) == ["a/b.json", "b.safetensors"]
    assert not lock.complete
    assert lock.with_digests({"a/b.json": SHA}).complete


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"repo": "name"}, "has repo 'name', which must be 'owner/name'"),
        ({"commit": "main"}, "has commit 'main', which must be 40 hexadecimal digits"),
        ({"files": {}}, "names no file"),
        ({"files": {"../x": {"size": 1, "sha256": SHA}}}, "'../x', which leads out"),
        ({"files": {"/etc/x": {"size": 1, "sha256": SHA}}}, "'/etc/x', which leads out"),
        ({"files": {"a//b": {"size": 1, "sha256": SHA}}}, "not in its shortest form"),
        ({"files": {"a": {"size": -1, "sha256": SHA}}}, "has size -1 for 'a'"),
        ({"files": {"a": {"size": True, "sha256": SHA}}}, "has size True for 'a'"),
        ({"files": {"a": {"size": 1, "sha256": "ff"}}}, "has sha256 'ff' for 'a'"),
        ({"files": {"a": {"size": 1}}}, "has neither sha256 nor blob_id for 'a'"),
        ({"files": {"a": 5}}, "has no size and sha256 for 'a'"),
        ({"files": []}, "must be a mapping"),
    ],
)
def test_wrong_locks_are_refused_in_one_sentence(change: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(json.dumps({**GOOD, **change}), "my.lock.json")
    assert says in str(caught.value)
    assert "my.lock.json" in str(caught.value)
    assert caught.value.permanent


def test_a_lock_that_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lock.json"
    assert load(file) is None
    file.write_text("<html>")
    with pytest.raises(ModelError, match="is not JSON"):
        load(file)


@pytest.mark.parametrize("path", ["a", "a/b.c", "модель.bin", "a b"])
def test_plain_paths_are_accepted(path: str) -> None:
    assert path_problem(path) == ""


@pytest.mark.parametrize("path", ["", ".", "..", "a/../b", "a/./b", "/a", "a\\b", "a\n", " a"])
def test_other_paths_are_not(path: str) -> None:
    assert path_problem(path)


def test_content_is_compared_by_sha256_and_else_by_blob_id(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"what is up, doc?")
    # Git's own example of a blob id (Pro Git, chapter 10.2).
    blob = "bd9dbf5aae1a3862dd1526723246b20206e5fc37"
    assert mismatch(file, LockedFile(16, None, blob)) == ""
    assert "has git blob id" in mismatch(file, LockedFile(16, None, "0" * 40))
    assert "has sha256" in mismatch(file, LockedFile(16, SHA, blob))
    assert mismatch(file, LockedFile(15, SHA)) == "has 16 bytes and not 15"
