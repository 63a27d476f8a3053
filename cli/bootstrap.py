"""Make .venv from a hash-locked requirements file, once. Standard library only.

A stamp inside .venv holds the digest of what was installed, so that the next start only reads two
files. pip's own configuration is left alone: mirrors, certificates and proxies stay the box's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

STAMP = "provision-stamp.json"
PIP_TIMEOUT = 1800.0
APT_TIMEOUT = 600.0

NETWORK_SIGNS = re.compile(
    r"NewConnectionError|Failed to establish a new connection|NameResolutionError|"
    r"Temporary failure in name resolution|Network is unreachable|ProxyError|ReadTimeoutError|"
    r"ConnectTimeoutError|Connection refused|Could not fetch URL"
)
"""Words of pip's output that mean: the index was not reached."""


class BootstrapError(Exception):
    """One clear sentence for the person at the terminal."""


def digest(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_stamp(venv: Path) -> dict[str, str]:
    """Return the stamp of a .venv (file name -> digest, 'python' -> X.Y), or nothing."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def wanted_stamp(root: Path, requirements: str) -> dict[str, str]:
    """Return what the stamp must contain for these requirements on this interpreter."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        requirements: digest(root / requirements),
    }


def in_step(root: Path, requirements: str) -> bool:
    """Tell whether .venv already holds these requirements (the test set contains the run set)."""
    stamp = read_stamp(root / ".venv")
    python = root / ".venv/bin/python"
    if not python.exists():  # also false for a link to an interpreter that is gone
        return False
    return all(stamp.get(key) == value for key, value in wanted_stamp(root, requirements).items())


def ensure(root: Path, requirements: str) -> Path:
    """Bring .venv in step with the requirements file and return its interpreter.

    Raises BootstrapError with one sentence when that cannot be done.
    """
    python = root / ".venv/bin/python"
    if in_step(root, requirements):
        return python
    with lock(root):
        if not in_step(root, requirements):  # another start may have done it while we waited
            make_venv(root)
            install(root, requirements)
    return python


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """Let only one start at a time build .venv."""
    folder = root / ".cache"
    try:
        folder.mkdir(exist_ok=True)
        handle = (folder / "venv.lock").open("w")
    except OSError as error:
        raise BootstrapError(f"cannot write in '{folder}': {error.strerror}.") from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make_venv(root: Path) -> None:
    """Create .venv, or give it pip if it has none; start over if its interpreter is another one."""
    venv = root / ".venv"
    if not have_ensurepip():
        install_venv_package()
    command = [sys.executable, "-m", "venv", str(venv)]
    if venv.exists() and venv_python(venv) != wanted_stamp_python():
        command.insert(-1, "--clear")
    (venv / STAMP).unlink(missing_ok=True)
    if (venv / "bin/python").exists() and run_quiet(
        [str(venv / "bin/python"), "-m", "pip", "--version"]
    ):
        return
    say(f"making .venv with Python {wanted_stamp_python()}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise BootstrapError(f"'{' '.join(command)}' failed: {last[0]}")


def wanted_stamp_python() -> str:
    """Return X.Y of the interpreter that runs us."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def venv_python(venv: Path) -> str | None:
    """Return X.Y of the interpreter of a virtual environment, None if it cannot be run."""
    python = venv / "bin/python"
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def have_ensurepip() -> bool:
    """Tell whether `python3 -m venv` can install pip (Debian and Ubuntu package that apart)."""
    return run_quiet([sys.executable, "-m", "ensurepip", "--version"])


def run_quiet(command: list[str]) -> bool:
    """Run a short command and tell whether it succeeded."""
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def install_venv_package() -> None:
    """Install python3-venv with apt; BootstrapError when we are not root or there is no apt."""
    package = "python3-venv"
    apt = shutil.which("apt-get")
    if apt is None:
        raise BootstrapError(
            "this Python has no 'ensurepip' module: install your distribution's venv package."
        )
    if os.geteuid() != 0:
        raise BootstrapError(
            f"this Python has no 'ensurepip' module: run sudo apt-get install {package}."
        )
    say(f"installing {package}")
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        [apt, "-q", "update"],
        [apt, "-q", "-y", "install", "--no-install-recommends", package],
    ):
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=APT_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BootstrapError(
                f"'{' '.join(command)}' did not end in {APT_TIMEOUT:.0f} s."
            ) from None
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
            raise BootstrapError(f"'{' '.join(command)}' failed: {last[0]}")


def install(
    root: Path, requirements: str, popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen
) -> None:
    """Install a requirements file with its hashes, with progress, and write the stamp."""
    venv = root / ".venv"
    total = count_packages(root / requirements)
    say(f"installing {total} locked packages from {requirements}")
    command = [
        str(venv / "bin/python"), "-m", "pip", "install", "--require-hashes", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2",
        "-r", requirements,
    ]  # fmt: skip
    started = time.monotonic()
    lines: list[str] = []
    with popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    ) as process:  # fmt: skip
        seen = 0
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith(("Collecting ", "Requirement already satisfied: ")):
                seen += 1
                progress(
                    seen, total, line.split(": ")[-1].split()[-1 if "Collecting" in line else 0]
                )
            if time.monotonic() - started > PIP_TIMEOUT:
                process.kill()
                raise BootstrapError(
                    f"pip did not end in {PIP_TIMEOUT:.0f} s; start again, it goes on where it was."
                )
    progress(0, 0, "")
    log = root / ".cache/venv-pip.log"
    log.write_text("".join(lines))
    if process.returncode:
        raise BootstrapError(explain(lines, log))
    stamp = {**read_stamp(venv), **wanted_stamp(root, requirements)}
    if requirements == "requirements-dev.txt":  # the test set contains the run set
        stamp.update(wanted_stamp(root, "requirements.txt"))
    (venv / STAMP).write_text(json.dumps(stamp, indent=1, sort_keys=True) + "\n")
    say(f".venv is ready ({time.monotonic() - started:.0f} s)")


def count_packages(path: Path) -> int:
    """Count the pinned packages of a lock file (those for other interpreters included)."""
    return sum(
        1
        for line in path.read_text().splitlines()
        if re.match(r"[A-Za-z0-9][\w.\-]*(\[.*\])?==", line)
    )


def explain(lines: list[str], log: Path) -> str:
    """Turn pip's output into one sentence."""
    text = "".join(lines)
    if NETWORK_SIGNS.search(text):
        return (
            "the Python package index cannot be reached; check the network, or name a mirror with "
            f"PIP_INDEX_URL or pip's configuration (details: {log})."
        )
    if "DO NOT MATCH THE HASHES" in text:
        return (
            "a downloaded package is not the locked one (its hash differs); "
            f"try another mirror (details: {log})."
        )
    errors = [line.strip() for line in lines if line.startswith("ERROR:")]
    return f"pip failed: {errors[-1][7:] if errors else 'see the log'} (details: {log})."


def say(text: str) -> None:
    """Print one line about what is going on."""
    print(f"provision: {text}", file=sys.stderr, flush=True)


def progress(seen: int, total: int, name: str) -> None:
    """Show which package is being read, on one line of a terminal; silent elsewhere."""
    if not sys.stderr.isatty():
        return
    text = f"  [{seen}/{total}] {name}" if total else ""
    print(f"\r\033[K{text[:78]}", end="", file=sys.stderr, flush=True)
