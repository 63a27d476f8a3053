"""Make or complete the lock file of a stack: ``python stacks/lock.py STACK [--check]``.

Everything that decides the result is data in the stack's ``lock`` section; uv resolves it. Needs
the package index, uv on PATH and PyYAML. Prints what changed, package by package. The lock names
no index: where packages come from is a matter of the host that installs them.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent
_HEADER = "# Made by stacks/lock.py from the section `lock` of stack.yml; all held by hash.\n"
_NEW_ENTRY = re.compile(r"\n(?=[A-Za-z0-9])")


class LockError(Exception):
    """No lock can be made; the text says why in one sentence."""


def command(lock: dict[str, Any], folder: Path) -> list[str]:
    """Write the inputs of one resolution into ``folder`` and return uv's command line.

    :param lock: the ``lock`` section of a stack
    :param folder: an empty folder for the input files
    """
    argv = ["uv", "pip", "compile", "--quiet", "--universal", "--no-header", "--generate-hashes"]
    argv += ["--python-version", lock["python"], "--exclude-newer", lock["exclude_newer"]]
    for option, key in (("--overrides", "overrides"), ("--constraints", "constraints")):
        if lock.get(key):
            path = folder / f"{key}.txt"
            path.write_text("\n".join(lock[key]) + "\n")
            argv += [option, str(path)]
    wanted = folder / "requirements.in"
    wanted.write_text("\n".join(lock["requirements"]) + "\n")
    return [*argv, str(wanted)]


def entries(text: str) -> dict[str, str]:
    """Split a lock into ``name: lines of its entry``; comments about origin are dropped."""
    result: dict[str, str] = {}
    for block in _NEW_ENTRY.split("\n" + text):
        lines = [line for line in block.splitlines() if line and not line.lstrip().startswith("#")]
        if lines:
            result[re.split(r"[=\[ ;]", lines[0], maxsplit=1)[0]] = "\n".join(lines)
    return result


def lock_text(resolved: str, leave_out: list[str]) -> str:
    """Return the lock: uv's output without the packages that are resolved on the host.

    :param resolved: output of ``uv pip compile``
    :param leave_out: patterns of names, as in a shell
    """
    kept = {
        name: entry
        for name, entry in entries(resolved).items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in leave_out)
    }
    return _HEADER + "\n".join(kept[name] for name in sorted(kept)) + "\n"


def versions(text: str) -> dict[str, str]:
    """Return the version of every package of a lock."""
    found = {}
    for name, entry in entries(text).items():
        match = re.search(r"==([^\s;\\]+)", entry)
        found[name] = match.group(1) if match else ""
    return found


def difference(before: str, after: str) -> list[str]:
    """Return one line for each package that appears, goes or changes its version or hashes."""
    old, new = versions(before), versions(after)
    old_entries, new_entries = entries(before), entries(after)
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            lines.append(f"+ {name} {new[name]}")
        elif name not in new:
            lines.append(f"- {name} {old[name]}")
        elif old[name] != new[name]:
            lines.append(f"~ {name} {old[name]} -> {new[name]}")
        elif old_entries[name] != new_entries[name]:
            lines.append(f"~ {name} {new[name]}: other hashes or markers")
    return lines


def make(stack: str, *, check: bool = False) -> list[str]:
    """Resolve a stack and write its lock.

    :param stack: name of a folder below ``stacks``
    :param check: only tell what would change
    :returns: the differences, one line each
    :raises LockError: the stack is unknown or cannot be resolved
    """
    description = ROOT / stack / "stack.yml"
    if not description.is_file():
        known = ", ".join(sorted(path.parent.name for path in ROOT.glob("*/stack.yml")))
        raise LockError(f"stack {stack!r} does not exist; use one of: {known}")
    lock = yaml.safe_load(description.read_text())["lock"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command(lock, Path(folder)),
                capture_output=True,
                text=True,
                timeout=900,
                check=False,
            )
        except FileNotFoundError as error:
            raise LockError("uv is not on PATH; install it (requirements.txt names it)") from error
    if done.returncode != 0:
        raise LockError(f"uv cannot resolve stack {stack!r}:\n{done.stderr.strip()}")
    target = description.with_name(lock["file"])
    before = target.read_text() if target.exists() else ""
    after = lock_text(done.stdout, lock.get("leave_out", []))
    changes = difference(before, after)
    if not check and after != before:
        target.write_text(after)
    return changes


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 1 when ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stack", help="name of a folder below stacks/")
    parser.add_argument("--check", action="store_true", help="only show the difference")
    options = parser.parse_args(argv)
    try:
        changes = make(options.stack, check=options.check)
    except LockError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(changes) if changes else f"{options.stack}: the lock is as resolved")
    return 1 if options.check and changes else 0


if __name__ == "__main__":
    raise SystemExit(main())
