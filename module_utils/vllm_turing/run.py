"""Run an external command so that it can neither hang nor raise.

Every probe of this project goes through :func:`run` (or a test's stand-in for it), so that each
command has a resolved path, a fixed locale and a time limit, and so that a missing program is an
answer and not an exception.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

#: Where programs are looked for when the caller's PATH lacks the system folders (cron, sudo).
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Result:
    """What became of one command.

    :ivar argv: the command as it was asked for
    :ivar rc: exit status; ``None`` when there is none (see ``error``)
    :ivar error: why there is no exit status: ``not found``, ``timed out after N s`` or the
        operating system's own words
    """

    argv: tuple[str, ...]
    rc: int | None
    stdout: str = ""
    stderr: str = ""
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the command ran and ended with status 0."""
        return self.rc == 0


class Runner(Protocol):
    """The call that :func:`run` offers; tests hand in their own."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 20.0,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        cwd: str | None = None,
    ) -> Result:
        """Run one command and tell what became of it."""
        ...


def search_path() -> str:
    """Return the caller's PATH followed by the system folders that it lacks."""
    own = [part for part in os.environ.get("PATH", "").split(":") if part]
    return ":".join(own + [part for part in SYSTEM_PATH.split(":") if part not in own])


def run(
    argv: Sequence[str],
    *,
    timeout: float = 20.0,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    cwd: str | None = None,
) -> Result:
    """Run one command; never raises for a command that is missing, fails or hangs.

    :param argv: program (a name or a path) and its arguments
    :param timeout: seconds after which the command and all it started are killed
    :param env: variables on top of the caller's; ``LC_ALL=C`` is always set
    :param input: text for its standard input; otherwise that is empty
    :param cwd: folder to run it in
    :returns: exit status and output, or the reason why there is none
    """
    command = tuple(str(part) for part in argv)
    path = search_path()
    full_env = {**os.environ, "PATH": path, **(env or {}), "LC_ALL": "C", "LANGUAGE": "C"}
    program = shutil.which(command[0], path=full_env["PATH"])
    if program is None:
        return Result(command, None, error="not found")
    try:
        # A session of its own, so that a time-out also ends what the command started.
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=full_env,
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Result(command, None, error=error.strerror or str(error))
    try:
        stdout, stderr = process.communicate(input, timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        return Result(command, None, error=f"timed out after {timeout:g} s")
    return Result(command, process.returncode, stdout, stderr)


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the command's whole process group without waiting on its pipes for ever."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        # In an uninterruptible call (a wedged driver): nothing more can be done from here.
        for pipe in (process.stdout, process.stderr, process.stdin):
            if pipe is not None:
                pipe.close()
