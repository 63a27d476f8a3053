"""Selecting, pruning and finding: the parts of a release that need no program."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import packages, release
from vllm_turing.run import Result


def made(prefix: Path, name: str, built_at: str = "2026-01-01T00:00:00+00:00") -> release.Release:
    """A complete release without content."""
    one = release.Release(prefix, name)
    one.path.mkdir(parents=True)
    (one.path / "release.json").write_text(json.dumps({"built_at": built_at, "patched": []}))
    return one


def test_selecting_remembers_the_release_before(tmp_path: Path) -> None:
    first, second = made(tmp_path, "a"), made(tmp_path, "b")
    assert release.select(first) and release.select(second)
    assert release.selected(tmp_path, "current") == "b"
    assert release.selected(tmp_path, "previous") == "a"
    assert (tmp_path / "current").resolve() == second.path.resolve()


def test_selecting_the_selected_one_changes_nothing(tmp_path: Path) -> None:
    first, second = made(tmp_path, "a"), made(tmp_path, "b")
    release.select(first)
    release.select(second)
    assert release.select(second) is False
    assert release.selected(tmp_path, "previous") == "a"


def test_going_back_twice_ends_where_it_began(tmp_path: Path) -> None:
    for name in "ab":
        release.select(made(tmp_path, name))
    for expected in ("a", "b"):
        back = release.Release(tmp_path, release.selected(tmp_path, "previous"))
        release.select(back)
        assert release.selected(tmp_path, "current") == expected


def test_a_release_that_did_not_work_is_not_remembered(tmp_path: Path) -> None:
    good, bad = made(tmp_path, "a"), made(tmp_path, "b")
    release.select(good)
    release.select(bad)
    release.select(good, remember=False)
    assert release.selected(tmp_path, "current") == "a"
    assert release.selected(tmp_path, "previous") == ""


def test_an_incomplete_release_is_never_selected(tmp_path: Path) -> None:
    half = release.Release(tmp_path, "half")
    half.path.mkdir(parents=True)
    with pytest.raises(release.ReleaseError, match="'half' is not complete"):
        release.select(half)
    assert not (tmp_path / "current").is_symlink()


def test_pruning_keeps_the_newest_and_never_the_selected_ones(tmp_path: Path) -> None:
    for day, name in enumerate("abcde", start=1):
        made(tmp_path, name, f"2026-01-0{day}T00:00:00+00:00")
    for name in "ba":  # previous b, current a: the two oldest
        release.select(release.Release(tmp_path, name))
    caches = tmp_path / "cache"
    for name in "ac":
        (caches / name / "triton").mkdir(parents=True)
    assert release.prune(tmp_path, 3, caches, spare="") == ["d", "c"]
    assert [one.fingerprint for one in release.releases(tmp_path)] == ["e", "b", "a"]
    assert sorted(path.name for path in caches.iterdir()) == ["a"]


def test_pruning_spares_the_release_just_built(tmp_path: Path) -> None:
    for name in "abc":
        made(tmp_path, name)
    assert len(release.prune(tmp_path, 1, spare="b")) == 2
    assert [one.fingerprint for one in release.releases(tmp_path)] == ["b"]


def test_a_host_without_releases_needs_a_build(tmp_path: Path) -> None:
    state = release.probe(release.Release(tmp_path, "a"))
    assert (state.complete, state.needs, state.current) == (False, "build", "")


def test_a_broken_mark_is_told(tmp_path: Path) -> None:
    one = made(tmp_path, "a")
    (one.path / "release.json").write_text("{")
    with pytest.raises(release.ReleaseError, match=r"release\.json' cannot be read"):
        release.probe(one)


def test_two_runs_do_not_build_at_once(tmp_path: Path) -> None:
    with (
        release.locked(tmp_path),
        pytest.raises(release.ReleaseError, match="another run is building"),
        release.locked(tmp_path),
    ):
        pass
    with release.locked(tmp_path):  # and it is free again
        descriptor = os.open(tmp_path / "releases/.lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def test_everything_that_was_made_can_be_removed(tmp_path: Path) -> None:
    for name in "ab":
        release.select(made(tmp_path, name))
    (tmp_path / "held").mkdir()
    (tmp_path / "cache/b").mkdir(parents=True)
    (tmp_path / "lib").mkdir()  # not ours
    assert len(release.remove_all(tmp_path, tmp_path / "cache")) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["lib"]
    assert release.remove_all(tmp_path, tmp_path / "cache") == []


class Pythons:
    """A host with some interpreters."""

    def __init__(self, **versions: str) -> None:
        self.versions = versions

    def __call__(self, argv: Sequence[str], **_: Any) -> Result:
        name = Path(argv[0]).name
        if name not in self.versions:
            return Result(tuple(argv), None, error="not found")
        return Result(tuple(argv), 0, f"{self.versions[name]} /usr/bin/{name}\n")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("", "/usr/bin/python3.12"),
        ("3.11", "/usr/bin/python3.11"),
        ("/usr/bin/python3.11", "/usr/bin/python3.11"),
    ],
)
def test_the_accepted_python_is_found(asked: str, expected: str) -> None:
    host = Pythons(**{"python3.12": "3.12", "python3.11": "3.11"})
    assert release.find_python(asked, ["3.12", "3.11"], "s", host) == expected


def test_the_second_accepted_python_serves_where_the_first_is_missing() -> None:
    host = Pythons(**{"python3.11": "3.11"})
    assert release.find_python("", ["3.12", "3.11"], "s", host) == "/usr/bin/python3.11"


def test_a_host_without_an_accepted_python_is_told_what_to_install() -> None:
    host = Pythons(python3="3.10")
    with pytest.raises(release.ReleaseError) as raised:
        release.find_python("/usr/bin/python3", ["3.12"], "s", host)
    text = str(raised.value)
    assert "stack 's' needs Python 3.12" in text
    assert "/usr/bin/python3 (3.10)" in text
    assert "install python3.12 or set vllm_runtime_python" in text


# --- where packages come from ---------------------------------------------------------------------


def indexes(files: dict[str, str], **environment: str) -> packages.Indexes:
    return packages.Indexes(environment=environment, read=files.get)


def test_the_variable_decides_over_everything() -> None:
    one = packages.Indexes("https://mine/simple", environment={"UV_INDEX_URL": "https://x"})
    assert one.public() == ["--default-index", "https://mine/simple"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"/etc/pip.conf": "[global]\nindex-url = https://pip/simple\n"}, ["https://pip/simple"]),
        ({"/etc/environment": 'PIP_INDEX_URL="https://e/simple"\n'}, ["https://e/simple"]),
        ({"/etc/environment": "UV_INDEX_URL=https://u\n", "/etc/pip.conf": "[global]\n"}, []),
        ({"/etc/pip.conf": "no section\n"}, []),
    ],
)
def test_the_boxs_own_index_is_handed_to_uv(files: dict[str, str], expected: list[str]) -> None:
    assert indexes(files).public()[1:] == expected


def test_the_boxs_environment_reaches_uv_but_nothing_else_does() -> None:
    text = "UV_CACHE_DIR=/store/uv\nexport https_proxy='http://p:1'\nSECRET=x\nSSL_CERT_FILE=/ca\n"
    found = indexes({"/etc/environment": text}, SSL_CERT_FILE="/mine").public_environment()
    assert found == {"UV_CACHE_DIR": "/store/uv", "https_proxy": "http://p:1"}


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (
            "error: Request failed after 3 retries\n  Caused by: Failed to fetch: `http://m/a`\n"
            "  Caused by: dns error: failed to lookup address\n",
            ["dns error", "set vllm_host_mirror_python"],
        ),
        ("error: No space left on device (os error 28)\n", ["free space on the file system"]),
        ("  \u00d7 No solution found when resolving\n  ╰─▶ demo was not found\n", ["demo was not"]),
    ],
)
def test_uvs_failure_becomes_one_sentence(stderr: str, words: list[str]) -> None:
    sentence, details = packages.condense(Result(("uv",), 1, "", stderr), "small")
    assert sentence.startswith("uv cannot install stack 'small': ")
    assert "\n" not in sentence
    assert all(word in sentence for word in words)
    assert details == [line for line in stderr.splitlines() if line]


def test_a_missing_uv_is_told() -> None:
    sentence, _ = packages.condense(Result(("uv",), None, error="not found"), "small")
    assert "not found; the role vllm_host installs uv" in sentence


def test_constraints_are_the_locks_pins_without_hashes() -> None:
    lock = (
        "# made\na==1 \\\n    --hash=sha256:1\nb==2 ; python_version < '4' \\\n"
        "    --hash=sha256:2\nc==3 --hash=sha256:3\n"
    )
    assert packages.pins(lock) == ["a==1", "b==2 ; python_version < '4'", "c==3"]
