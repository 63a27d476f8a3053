"""python_tools: a venv that is either whole and selected, or not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import python_tools
from vllm_turing.python_tools import PythonToolsError, Tools
from vllm_turing.run import Result


class FakeRunner:
    """Makes the folders that a venv would have; fails at a chosen program."""

    def __init__(self, fails_at: str = "", stderr: str = "") -> None:
        self.calls: list[tuple[str, ...]] = []
        self.fails_at, self.stderr = fails_at, stderr

    def __call__(self, argv: Sequence[str], **_: Any) -> Result:
        self.calls.append(tuple(argv))
        if self.fails_at and self.fails_at in argv:
            return Result(tuple(argv), 1, stderr=self.stderr)
        if "venv" in argv:
            (Path(argv[-1]) / "bin").mkdir(parents=True)
        return Result(tuple(argv), 0)


def tools(tmp_path: Path, requirements: str = "uv==1 --hash=sha256:0\n", index: str = "") -> Tools:
    return Tools(tmp_path / "tools", "/usr/bin/python3", requirements, index)


def test_built_once_and_then_left_alone(tmp_path: Path) -> None:
    wanted = tools(tmp_path)
    assert not wanted.ready
    python_tools.install(wanted, FakeRunner())
    assert wanted.ready
    assert (tmp_path / "tools/requirements.txt").read_text() == wanted.requirements


def test_other_requirements_replace_the_old_set(tmp_path: Path) -> None:
    old, new = tools(tmp_path), tools(tmp_path, "uv==2\n")
    python_tools.install(old, FakeRunner())
    assert not new.ready
    python_tools.install(new, FakeRunner())
    assert new.ready
    assert not old.folder.exists()


def test_a_failed_build_leaves_the_old_tools_in_use(tmp_path: Path) -> None:
    old, new = tools(tmp_path), tools(tmp_path, "uv==2\n")
    python_tools.install(old, FakeRunner())
    with pytest.raises(PythonToolsError, match=r"No matching dist.*vllm_host_mirror_python"):
        python_tools.install(new, FakeRunner("install", "ERROR: No matching distribution\n"))
    assert old.ready
    python_tools.install(new, FakeRunner())
    assert new.ready


def test_the_index_is_named_only_when_chosen(tmp_path: Path) -> None:
    runner = FakeRunner()
    python_tools.install(tools(tmp_path), runner)
    assert "--index-url" not in runner.calls[1]
    assert "--require-hashes" in runner.calls[1]
    runner = FakeRunner()
    python_tools.install(tools(tmp_path, "uv==3\n", "https://index.example/simple"), runner)
    assert runner.calls[1][-2:] == ("--index-url", "https://index.example/simple")


def test_a_python_without_venv_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(PythonToolsError, match="install the package python3-venv"):
        python_tools.install(tools(tmp_path), FakeRunner("venv", "ensurepip is not available"))


def test_last_line_skips_what_tells_nothing() -> None:
    result = Result(("x",), 1, stderr="ERROR: the cause\n[notice] A new release\n\n")
    assert python_tools.last_line(result) == "ERROR: the cause"
    assert python_tools.last_line(Result(("x",), None, error="timed out")) == "timed out"
    assert python_tools.last_line(Result(("x",), 4)) == "exit status 4"


def test_removal_takes_the_link_and_every_set(tmp_path: Path) -> None:
    wanted = tools(tmp_path)
    python_tools.install(wanted, FakeRunner())
    (tmp_path / "tools-unfinished").mkdir()
    (tmp_path / "toolsmith").mkdir()
    python_tools.remove(wanted.link)
    assert [path.name for path in tmp_path.iterdir()] == ["toolsmith"]
    assert python_tools.leftovers(wanted.link) == []
