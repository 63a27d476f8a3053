"""Making .venv: stamps, progress, and sentences for what goes wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli import bootstrap


class FakePip:
    """Stands where subprocess.Popen does; prints what pip would."""

    calls: list[Sequence[str]] = []

    def __init__(self, text: str, status: int) -> None:
        self.text, self.returncode = text, status
        self.stdout = io.StringIO(text)
        self.environment: dict[str, str] = {}

    def __call__(self, command: Sequence[str], **rest: Any) -> FakePip:
        self.command, self.environment = command, rest["env"]
        return self

    def __enter__(self) -> FakePip:
        return self

    def __exit__(self, *rest: object) -> None:
        return None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".venv/bin/python").symlink_to("/bin/true")
    (tmp_path / "requirements.txt").write_text("a==1 \\\n    --hash=sha256:00\nb[x]==2\n# c==3\n")
    (tmp_path / "requirements-dev.txt").write_text("a==1\nd==4\n")
    return tmp_path


def install(root: Path, text: str, status: int, file: str = "requirements.txt") -> FakePip:
    pip = FakePip(text, status)
    bootstrap.install(root, file, popen=pip)  # type: ignore[arg-type]  # it behaves like Popen
    return pip


def test_a_second_start_only_reads_the_stamp(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(root, "Collecting a==1\n", 0)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a program was started"))
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("pip was started"))
    assert bootstrap.ensure(root, "requirements.txt") == root / ".venv/bin/python"


def test_changed_requirements_are_not_in_step(root: Path) -> None:
    install(root, "", 0)
    assert bootstrap.in_step(root, "requirements.txt")
    (root / "requirements.txt").write_text("a==2\n")
    assert not bootstrap.in_step(root, "requirements.txt")


def test_the_test_set_contains_the_run_set_and_not_the_other_way(root: Path) -> None:
    install(root, "", 0)
    assert not bootstrap.in_step(root, "requirements-dev.txt")
    install(root, "", 0, "requirements-dev.txt")
    assert bootstrap.in_step(root, "requirements-dev.txt")
    assert bootstrap.in_step(root, "requirements.txt")


def test_an_interpreter_that_is_gone_is_not_in_step(root: Path) -> None:
    install(root, "", 0)
    (root / ".venv/bin/python").unlink()
    (root / ".venv/bin/python").symlink_to(root / "gone")
    assert not bootstrap.in_step(root, "requirements.txt")


def test_another_python_is_not_in_step(root: Path) -> None:
    install(root, "", 0)
    stamp = root / ".venv" / bootstrap.STAMP
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "python": "3.9"}))
    assert not bootstrap.in_step(root, "requirements.txt")


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_a_spoilt_stamp_is_no_stamp(root: Path, text: str) -> None:
    (root / ".venv" / bootstrap.STAMP).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert bootstrap.read_stamp(root / ".venv") == {}


def test_hashes_are_demanded_and_pip_keeps_its_own_configuration(root: Path) -> None:
    pip = install(root, "", 0)
    assert "--require-hashes" in pip.command
    for option in ("--index-url", "-i", "--trusted-host", "--cert", "--no-index"):
        assert option not in pip.command
    kept = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    assert {key: pip.environment.get(key) for key in kept} == kept


def test_a_failure_leaves_no_stamp(root: Path) -> None:
    with pytest.raises(bootstrap.BootstrapError):
        install(root, "ERROR: boom\n", 1)
    assert bootstrap.read_stamp(root / ".venv") == {}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(\"<pip…>: Failed to "
            "establish a new connection: [Errno -3] Temporary failure in name resolution\")'\n"
            "ERROR: No matching distribution found for a==1\n",
            "index cannot be reached",
        ),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n", "its hash"),
        ("ERROR: No space left on device\n", "No space left on device"),
        ("", "see the log"),
    ],
)
def test_a_failure_is_one_sentence(root: Path, output: str, words: str) -> None:
    with pytest.raises(bootstrap.BootstrapError) as caught:
        install(root, output, 1)
    text = str(caught.value)
    assert words in text and "\n" not in text
    assert (root / ".cache/venv-pip.log").read_text() == output


def test_locked_packages_are_counted(root: Path) -> None:
    assert bootstrap.count_packages(root / "requirements.txt") == 2


def test_without_ensurepip_and_root_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: "/usr/bin/apt-get")
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000)
    with pytest.raises(bootstrap.BootstrapError, match="sudo apt-get install python3-venv"):
        bootstrap.install_venv_package()


def test_without_apt_no_package_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    with pytest.raises(bootstrap.BootstrapError, match="your distribution's"):
        bootstrap.install_venv_package()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("a file where the folder should be")
    with pytest.raises(bootstrap.BootstrapError, match="cannot write"), bootstrap.lock(tmp_path):
        pass
