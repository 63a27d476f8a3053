"""Keep one small venv of command-line tools equal to a hash-locked requirements text.

The venv is built under a name made from its content and selected by a symbolic link, so that a
build that breaks off never replaces tools that work.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .run import Result, Runner, run

#: Written last; without it a folder is the rest of a build that broke off.
MARK = ".complete"


class PythonToolsError(Exception):
    """The tools cannot be installed, in one sentence."""


@dataclass(frozen=True)
class Tools:
    """One wanted set of tools.

    :ivar link: the path under which the tools are used (``<link>/bin/uv``)
    :ivar python: interpreter that makes the venv
    :ivar requirements: hash-locked requirements, pip's format
    :ivar index_url: package index; empty for the host's own pip configuration
    """

    link: Path
    python: str
    requirements: str
    index_url: str = ""

    @property
    def folder(self) -> Path:
        """Where this very set lives: beside the link, named by what it holds."""
        wish = f"{self.python}\n{self.requirements}"
        digest = hashlib.sha256(wish.encode()).hexdigest()[:12]
        return self.link.with_name(f"{self.link.name}-{digest}")

    @property
    def ready(self) -> bool:
        """Whether this set is complete and selected."""
        return (self.folder / MARK).is_file() and _points_to(self.link, self.folder)


def _points_to(link: Path, folder: Path) -> bool:
    return link.is_symlink() and link.parent / link.readlink() == folder


def install(tools: Tools, runner: Runner = run) -> None:
    """Build the set beside the present one, then select it and remove the others.

    :param tools: the wanted set
    :param runner: runs external commands
    :raises PythonToolsError: no venv can be made, or pip cannot install the requirements
    """
    if not (tools.folder / MARK).is_file():
        _build(tools, runner)
    temporary = tools.link.with_name(f".{tools.link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(tools.folder.name)
    temporary.replace(tools.link)
    for other in tools.link.parent.glob(f"{tools.link.name}-*"):
        if other != tools.folder:
            shutil.rmtree(other)


def leftovers(link: Path) -> list[Path]:
    """Return everything that :func:`install` ever left at or beside a link.

    :param link: the path under which the tools are used
    """
    folders = [path for path in link.parent.glob(f"{link.name}-*") if path.is_dir()]
    return ([link] if link.is_symlink() else []) + sorted(folders)


def remove(link: Path) -> None:
    """Remove the tools: the link first, so that nobody uses half a folder.

    :param link: the path under which the tools are used
    """
    for path in leftovers(link):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def _build(tools: Tools, runner: Runner) -> None:
    shutil.rmtree(tools.folder, ignore_errors=True)
    tools.folder.parent.mkdir(parents=True, exist_ok=True)
    made = runner([tools.python, "-m", "venv", str(tools.folder)], timeout=120)
    if not made.ok:
        raise PythonToolsError(
            f"{tools.python!r} cannot make a venv at {str(tools.folder)!r} ({last_line(made)}); "
            "install the package python3-venv and run again"
        )
    lock = tools.folder / "requirements.txt"
    lock.write_text(tools.requirements)
    command = [str(tools.folder / "bin/python"), "-m", "pip", "install", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--require-hashes", "--requirement", str(lock)]
    if tools.index_url:
        command += ["--index-url", tools.index_url]
    installed = runner(command, timeout=900)
    if not installed.ok:
        where = repr(tools.index_url) if tools.index_url else "the host's own pip configuration"
        raise PythonToolsError(
            f"pip cannot install the host's tools from {where} ({last_line(installed)}); "
            "set vllm_host_mirror_python to an index that this host reaches"
        )
    mark = tools.folder / MARK
    mark.touch()
    os.sync()


def last_line(result: Result, skip: Sequence[str] = ("WARNING", "[notice]")) -> str:
    """Return the last telling line of a command's output, or why there is none.

    :param result: what became of the command
    :param skip: beginnings of lines that tell nothing
    """
    if result.error:
        return result.error
    lines = [line.strip() for line in (result.stdout + "\n" + result.stderr).splitlines()]
    telling = [line for line in lines if line and not line.startswith(tuple(skip))]
    return telling[-1] if telling else f"exit status {result.rc}"
