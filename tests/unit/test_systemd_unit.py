"""Our quoting is checked with systemd's own splitter where systemd is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_turing import systemd_unit

WORDS = [
    "plain",
    "two words",
    "it's",
    'say "x"',
    '{"method":"mtp","num_speculative_tokens":3}',
    "back\\slash",
    "100%",
    "%h",
    "$HOME ${HOME}",
    "tab\tand\nbreak",
    "ü—é",
    "#no comment",
    ";",
    "",
    "--x=1",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_quoted_word_comes_back(word: str) -> None:
    assert systemd_unit.split(systemd_unit.quote(word)) == [word]


def test_json_without_quotes_around_it_loses_its_own() -> None:
    assert systemd_unit.split('--c {"method":"mtp","n":3}') == ["--c", "{method:mtp,n:3}"]
    assert systemd_unit.split("""--c '{"method":"mtp"}'""") == ["--c", '{"method":"mtp"}']


@pytest.mark.parametrize("text", ['"open', "a \\q", "ends\\"])
def test_what_systemd_refuses_is_refused(text: str) -> None:
    with pytest.raises(systemd_unit.UnitError):
        systemd_unit.split(text)


def test_lines_are_joined_and_comments_inside_dropped() -> None:
    unit = systemd_unit.parse(
        "# c\n[Service]\nExecStart=/bin/a \\\n# why\n  --b 1 \\\n  --c\nEnvironment=A=1\n"
        "Environment=\nEnvironment=B=2 'C=x y'\n"
    )
    assert systemd_unit.split(systemd_unit.values(unit, "Service", "ExecStart")[0]) == [
        "/bin/a", "--b", "1", "--c",
    ]  # fmt: skip
    assert systemd_unit.environment(unit) == {"B": "2", "C": "x y"}


def test_a_line_outside_a_section_is_refused() -> None:
    with pytest.raises(systemd_unit.UnitError, match="line 1: 'A=1'"):
        systemd_unit.parse("A=1\n[Unit]\n")


def test_environment_assignments_keep_blanks_and_dollars() -> None:
    line = systemd_unit.assignment("LD_LIBRARY_PATH", "/opt/my libs:$X:50%")
    unit = systemd_unit.parse(f"[Service]\nEnvironment={line}\n")
    assert systemd_unit.environment(unit) == {"LD_LIBRARY_PATH": "/opt/my libs:$X:50%"}
    with pytest.raises(systemd_unit.UnitError, match="'1A'"):
        systemd_unit.assignment("1A", "x")


@pytest.mark.skipif(shutil.which("systemd-run") is None, reason="systemd is not installed here")
def test_systemd_itself_accepts_our_command_lines(tmp_path: Path) -> None:
    unit = tmp_path / "quoting.service"
    words = ["/bin/true", *WORDS]
    unit.write_text(
        f"[Service]\nType=oneshot\nExecStart={systemd_unit.command_line(words)}\n"
        f"Environment={systemd_unit.assignment('A', 'x y % $')}\n"
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
