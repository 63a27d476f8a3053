"""vllm_turing.run: no command hangs, none raises."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from vllm_turing.run import run


def test_output_and_status_of_a_command() -> None:
    result = run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.rc, result.stdout, result.stderr, result.error) == (3, "out\n", "err\n", None)
    assert not result.ok


def test_a_missing_command_is_an_answer() -> None:
    result = run(["no-such-program-here"])
    assert result.rc is None
    assert result.error == "not found"


def test_a_file_that_cannot_run_is_an_answer(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x00\x01")
    program.chmod(0o755)
    result = run([str(program)])
    assert result.rc is None
    assert result.error


def test_the_locale_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    monkeypatch.setenv("LANGUAGE", "zh_CN")
    assert run(["sh", "-c", "echo $LC_ALL $LANGUAGE"]).stdout == "C C\n"
    assert run(["sh", "-c", "echo $LC_ALL"], env={"LC_ALL": "de_DE"}).stdout == "C\n"


def test_system_programs_are_found_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert run(["true"]).ok


def test_a_hanging_command_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    result = run(["sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"], timeout=1)
    assert result.rc is None
    assert result.error == "timed out after 1 s"
    child = int(pid_file.read_text())
    for _ in range(50):
        if not Path(f"/proc/{child}").exists() or _is_zombie(child):
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the command's child outlived the time-out")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_bytes_that_are_no_text_are_no_error() -> None:
    assert run(["printf", "\\377ok"]).stdout == "\ufffdok"


def test_input_is_handed_over() -> None:
    assert run(["cat"], input="line\n").stdout == "line\n"
