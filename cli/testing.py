"""`./provision test`: lint, unit tests, the lab scenario; one failed stage stops no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.ansible import environment

STAGES = ("lint", "unit", "molecule")

SKIPPED_FOLDERS = frozenset([".git", ".venv", ".cache", "__pycache__", "results", "rendered"])
SHELL_FIRST_LINE = re.compile(rb"#!\s*\S*[/ ](ba|da|k)?sh\b")
PYTEST_SUMMARY = re.compile(r"^=+ .*\b(passed|failed|error|errors|no tests ran)\b.* in [\d.]+s")


@dataclass(frozen=True)
class Check:
    """One command of a stage."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How one check ended."""

    stage: str
    name: str
    status: int
    seconds: float
    summaries: tuple[str, ...]
    """pytest's last lines, as it wrote them."""


def run(root: Path, stages: Sequence[str]) -> int:
    """Run the stages in their fixed order, print a table of times; return 1 if any check failed."""
    outcomes: list[Outcome] = []
    for stage in STAGES:
        if stage in stages:
            for check in checks(root, stage):
                print(f"\n== {stage}: {check.name}", flush=True)
                outcomes.append(run_check(root, stage, check))
    print(table(outcomes))
    for outcome in outcomes:
        for line in outcome.summaries:
            print(f"{outcome.name}: {line}")
    return 1 if any(outcome.status for outcome in outcomes) else 0


def checks(root: Path, stage: str) -> list[Check]:
    """Return the commands of a stage; they run in the project's folder."""
    if stage == "unit":
        return [Check("pytest", ("pytest",))]
    if stage == "molecule":
        return [Check("molecule default", ("molecule", "test", "-s", "default"))]
    return [
        Check("ansible-lint", ("ansible-lint", "--profile", "production", "--strict", "--offline")),
        Check("yamllint", ("yamllint", "--strict", ".")),
        Check("ruff check", ("ruff", "check", ".")),
        Check("ruff format", ("ruff", "format", "--check", ".")),
        Check("mypy", ("mypy",)),
        Check("shellcheck", ("shellcheck", *shell_scripts(root))),
    ]


def shell_scripts(root: Path) -> list[str]:
    """Return every shell script of the project, by its name or its first line."""
    return sorted(str(path.relative_to(root)) for path in files(root) if is_shell(path))


def files(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder, without what is built or not ours."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS:
                yield from files(path)
        elif path.is_file():
            yield path


def is_shell(path: Path) -> bool:
    """Tell whether a file is a shell script."""
    if path.suffix in (".sh", ".bash"):
        return True
    with path.open("rb") as handle:
        return SHELL_FIRST_LINE.match(handle.readline(200)) is not None


def run_check(root: Path, stage: str, check: Check) -> Outcome:
    """Run one command with its output on the terminal; keep pytest's summary lines."""
    variables = environment(root)
    if not sys.stdout.isatty():
        variables["NO_COLOR"] = "1"  # the output goes through a pipe either way
    if stage == "molecule":
        variables.setdefault("PY_COLORS", "0")  # the summary is read from the text
    program = Path(sys.executable).parent / check.command[0]
    summaries: list[str] = []
    started = time.monotonic()
    try:
        with subprocess.Popen(
            [str(program), *check.command[1:]],
            cwd=root,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                if PYTEST_SUMMARY.match(line):
                    summaries.append(line.strip().strip("= "))
        status = process.returncode
    except OSError as error:
        print(f"'{program}' cannot be started: {error.strerror}")
        status = 127
    return Outcome(stage, check.name, status, time.monotonic() - started, tuple(summaries))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return one line a check and one a stage: result and seconds."""
    lines = ["", "stage     check             result     seconds"]
    for stage in STAGES:
        own = [outcome for outcome in outcomes if outcome.stage == stage]
        for outcome in own:
            result = "ok" if outcome.status == 0 else f"FAILED {outcome.status}"
            lines.append(f"{stage:<9} {outcome.name:<17} {result:<10} {outcome.seconds:7.1f}")
        if len(own) > 1:
            lines.append(f"{stage:<9} {'all':<17} {'':<10} {sum(o.seconds for o in own):7.1f}")
    total = sum(outcome.seconds for outcome in outcomes)
    lines.append(f"{'total':<38} {total:7.1f}   ({os.cpu_count()} processors)")
    return "\n".join(lines)
