"""managed_files: before, wanted, after; the same with and without a host."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import managed_files
from vllm_turing.managed_files import ManagedFilesError


def wish(tmp_path: Path, **over: Any) -> dict[str, Any]:
    return {
        "root": str(tmp_path),
        "directories": [{"path": "/etc/app", "mode": "0750"}],
        "files": [{"path": "/etc/app/app.conf", "content": "a=1\n", "mode": "0640"}],
        "links": [{"path": "/opt/current", "target": "releases/1"}],
        "absent": ["/etc/app/old.conf"],
    } | over


def test_everything_is_made_and_the_second_run_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "etc/app").mkdir(parents=True)
    (tmp_path / "etc/app/old.conf").write_text("old")
    first = managed_files.apply(**wish(tmp_path))
    assert first.changed_paths == [
        "/etc/app",
        "/etc/app/app.conf",
        "/opt/current",
        "/etc/app/old.conf",
    ]
    assert (tmp_path / "etc/app/app.conf").read_text() == "a=1\n"
    assert stat.S_IMODE((tmp_path / "etc/app/app.conf").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "etc/app").stat().st_mode) == 0o750
    assert str((tmp_path / "opt/current").readlink()) == "releases/1"
    assert not (tmp_path / "etc/app/old.conf").exists()
    assert not managed_files.apply(**wish(tmp_path)).changed


def test_check_mode_tells_the_same_and_writes_nothing(tmp_path: Path) -> None:
    outcome = managed_files.apply(**wish(tmp_path), check_mode=True)
    assert outcome.changed_paths == ["/etc/app", "/etc/app/app.conf", "/opt/current"]
    assert list(tmp_path.iterdir()) == []


def test_check_mode_does_not_need_an_account_that_comes_later() -> None:
    outcome = managed_files.apply(
        root="/",
        directories=[{"path": "/nonexistent-app", "owner": "no-such-user", "group": "no-such"}],
        check_mode=True,
    )
    assert outcome.changed_paths == ["/nonexistent-app"]


def test_a_missing_account_is_named() -> None:
    with pytest.raises(ManagedFilesError, match="no account 'no-such-user' with group 'g'"):
        managed_files.apply(
            root="/", directories=[{"path": "/tmp", "owner": "no-such-user", "group": "g"}]
        )


def test_the_diff_shows_before_and_after(tmp_path: Path) -> None:
    managed_files.apply(**wish(tmp_path))
    outcome = managed_files.apply(
        root=str(tmp_path), files=[{"path": "/etc/app/app.conf", "content": "a=2\n"}]
    )
    assert (outcome.diffs[0]["before"], outcome.diffs[0]["after"]) == ("a=1\n", "a=2\n")


def test_a_sensitive_file_stays_out_of_the_diff(tmp_path: Path) -> None:
    secret = {"path": "/key", "content": "s3cret", "mode": "0600", "sensitive": True}
    first = managed_files.apply(root=str(tmp_path), files=[secret])
    second = managed_files.apply(root=str(tmp_path), files=[secret | {"content": "other"}])
    assert "s3cret" not in str(first.diffs) + str(second.diffs)
    assert (tmp_path / "key").read_text() == "other"


def test_a_wrong_mode_alone_is_a_change(tmp_path: Path) -> None:
    managed_files.apply(**wish(tmp_path))
    (tmp_path / "etc/app/app.conf").chmod(0o666)
    assert managed_files.apply(**wish(tmp_path)).changed_paths == ["/etc/app/app.conf"]
    assert stat.S_IMODE((tmp_path / "etc/app/app.conf").stat().st_mode) == 0o640


def test_a_file_is_replaced_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    os.link(tmp_path / "a", tmp_path / "other-name")
    managed_files.apply(root=str(tmp_path), files=[{"path": "/a", "content": "2"}])
    assert (tmp_path / "other-name").read_text() == "1"


def test_a_link_in_the_place_of_a_file_is_replaced_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("2")
    (tmp_path / "a").symlink_to("elsewhere")
    managed_files.apply(root=str(tmp_path), files=[{"path": "/a", "content": "2"}])
    assert not (tmp_path / "a").is_symlink()


def test_a_link_is_pointed_elsewhere(tmp_path: Path) -> None:
    managed_files.apply(root=str(tmp_path), links=[{"path": "/l", "target": "1"}])
    outcome = managed_files.apply(root=str(tmp_path), links=[{"path": "/l", "target": "2"}])
    assert outcome.diffs[0]["before"] == "-> 1\n"
    assert str((tmp_path / "l").readlink()) == "2"


@pytest.mark.parametrize(
    ("kind", "entry", "sentence"),
    [
        ("files", {"path": "/d", "content": ""}, "wanted as a file but is a folder"),
        ("directories", {"path": "/f"}, "wanted as a folder but is a file"),
        ("links", {"path": "/f", "target": "x"}, "something else is there"),
        ("files", {"path": "relative", "content": ""}, "'relative' is not absolute"),
        ("files", {"path": "/new", "content": "", "mode": "rw"}, "mode 'rw' is not octal"),
        ("absent", "/d", "not empty"),
    ],
)
def test_what_is_in_the_way_is_named(tmp_path: Path, kind: str, entry: Any, sentence: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").touch()
    (tmp_path / "f").touch()
    with pytest.raises(ManagedFilesError, match=sentence):
        managed_files.apply(root=str(tmp_path), **{kind: [entry]})
    assert (tmp_path / "d/x").exists()
    assert (tmp_path / "f").exists()
