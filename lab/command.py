"""Run external programs: resolved path, C locale, time limit, and an error a person can use."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.errors import LabError

Runner = Callable[..., str]


def resolve(program: str) -> str:
    """Return the absolute path of a program; raise LabError when it is not installed."""
    path = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise LabError(f"The program '{program}' is not installed; run 'python -m lab up' as root.")
    return path


def run(
    argv: Sequence[str],
    *,
    timeout: float = 60.0,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    inherit_env: bool = True,
) -> str:
    """Run a program and return its standard output.

    With `log`, standard output and error are appended to that file instead and '' is returned.
    Raises LabError on a missing program, a timeout, or (with `check`) a non-zero exit status.
    """
    command = [resolve(argv[0]), *argv[1:]]
    environment = dict(os.environ) if inherit_env else {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    environment.update({"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"})
    environment.update(env or {})
    shown = " ".join(argv[:3])
    try:
        if log is None:
            done = subprocess.run(
                command,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                env=environment,
                cwd=cwd,
            )
            output, trouble = done.stdout, done.stderr
        else:
            with log.open("a", encoding="utf-8") as sink:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=timeout,
                    check=False,
                    env=environment,
                    cwd=cwd,
                )
            output, trouble = "", f"see '{log}'"
    except subprocess.TimeoutExpired as error:
        raise LabError(f"'{shown}' did not end within {timeout:.0f} seconds.") from error
    if check and done.returncode != 0:
        lines = (trouble or output).strip().splitlines() or ["no message"]
        raise LabError(f"'{shown}' failed with status {done.returncode}: {lines[-1]}")
    return output
