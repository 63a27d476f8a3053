"""The test command's stages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli import testing
from cli.testing import Check

PYTHON = sys.executable


def script(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.write_text(f"#!{PYTHON}\n{code}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the checks find small programs of ours where the tools would be."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(testing.sys, "executable", str(folder / "python"))
    script(folder, "good", "print('fine')")
    script(folder, "bad", "raise SystemExit(3)")
    script(folder, "pytest", "print('== 2 failed, 5 passed in 1.25s ==')\nraise SystemExit(1)")
    return folder


def test_one_failure_fails_all_and_stops_nothing(
    tmp_path: Path,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = {
        "lint": [Check("first", ("bad",)), Check("second", ("good",)), Check("third", ("gone",))],
        "unit": [Check("pytest", ("pytest",))],
        "molecule": [Check("molecule default", ("good",))],
    }
    monkeypatch.setattr(testing, "checks", lambda root, stage: table[stage])
    assert testing.run(tmp_path, list(testing.STAGES)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "pytest: 2 failed, 5 passed in 1.25s"
    text = "\n".join(lines)
    for words in (
        "first             FAILED 3",
        "second            ok",
        "third             FAILED 127",
    ):
        assert words in text
    assert "molecule  molecule default  ok" in text


def test_chosen_stages_only(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def checks(root: Path, stage: str) -> list[Check]:
        seen.append(stage)
        return [Check(stage, ("good",))]

    monkeypatch.setattr(testing, "checks", checks)
    assert testing.run(tmp_path, ["molecule", "lint"]) == 0
    assert seen == ["lint", "molecule"]


def test_shell_scripts_are_found_by_name_and_first_line(tmp_path: Path) -> None:
    for name, text in {
        "a.sh": "echo", "b": "#!/bin/bash\n", "c": "#!/usr/bin/env sh\n", "d": "#!/bin/sh -eu\n",
        "e.py": "#!/usr/bin/env python3\n", "f": "", ".venv/g.sh": "", "deep/h": "#! /bin/dash\n",
        "i": "#!/usr/bin/fish\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "link.sh").symlink_to("a.sh")
    assert testing.shell_scripts(tmp_path) == ["a.sh", "b", "c", "d", "deep/h"]


def test_every_linter_is_run_without_skips() -> None:
    commands = [check.command for check in testing.checks(Path(__file__).parents[3], "lint")]
    assert [command[0] for command in commands] == [
        *["ansible-lint", "yamllint", "ruff", "ruff", "mypy", "shellcheck"]
    ]
    for command in commands:
        assert not any("skip" in word or "exclude" in word for word in command)


@pytest.mark.parametrize(
    "line",
    [
        "============ 41 passed in 3.26s ============",
        "==== 1 failed, 3 passed, 2 skipped in 61.00s (0:01:01) ====",
        "=== no tests ran in 0.01s ===",
    ],
)
def test_pytests_last_line_is_known(line: str) -> None:
    assert testing.PYTEST_SUMMARY.match(line)
    assert not testing.PYTEST_SUMMARY.match("=== FAILURES ===")
