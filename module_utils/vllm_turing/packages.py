"""Where packages come from and how the ones without a published hash are held.

Most packages of a stack are locked with hashes. A few come from indexes that are not reached from
everywhere (the CUDA variants of vLLM and torch): they are held by version and local tag, resolved
on the host under the lock's constraints, and their hashes are written down at the first
installation. Later installations accept nothing else.
"""

from __future__ import annotations

import configparser
import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import distributions
from .run import Result

#: Files in which pip looks for its index, the later one decides.
PIP_FILES = ("/etc/xdg/pip/pip.conf", "/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")
#: Variables of /etc/environment that a package installer needs and that sudo may have dropped.
_PASSED_ON = re.compile(
    r"(UV_\w+|PIP_INDEX_URL|SSL_CERT_(FILE|DIR)|(HTTPS?|ALL|NO)_PROXY|(https?|all|no)_proxy)"
)
_CONTENT = "# content "


def read_text(path: str) -> str | None:
    """Return the text of a file, or ``None`` when it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


@dataclass(frozen=True)
class Indexes:
    """The package indexes of a host.

    :ivar public_url: index of public packages; empty for the host's own configuration
    :ivar extra: further indexes, ``name`` and ``url``
    :ivar environment: the caller's environment
    :ivar read: reads a configuration file
    """

    public_url: str = ""
    extra: tuple[Mapping[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    read: Callable[[str], str | None] = read_text

    def public_environment(self) -> dict[str, str]:
        """Return the variables uv needs: those of /etc/environment that are not set already."""
        found = {}
        for line in (self.read("/etc/environment") or "").splitlines():
            name, _, value = line.strip().removeprefix("export ").partition("=")
            if _PASSED_ON.fullmatch(name) and name not in self.environment:
                found[name] = value.strip().strip("'\"")
        return found

    def public(self) -> list[str]:
        """Return uv's options for the index of public packages.

        uv does not read pip's configuration, so an index that is set there is handed over.
        """
        url = self.public_url or self._pip_index()
        return ["--default-index", url] if url else []

    def _pip_index(self) -> str:
        environment = {**self.public_environment(), **self.environment}
        if any(environment.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
            return ""
        index = environment.get("PIP_INDEX_URL", "")
        for path in PIP_FILES if not index else ():
            parser = configparser.RawConfigParser(strict=False)
            try:
                parser.read_string(self.read(path) or "")
            except configparser.Error:
                continue
            for section in ("global", "install"):
                index = parser.get(section, "index-url", fallback=index)
        return index

    def all(self) -> list[str]:
        """Return uv's options for all indexes.

        Every package is asked for at one exact version, so the order of the indexes decides
        nothing; without the strategy uv would look at the first index that has the name only.
        """
        options = [*self.public(), "--index-strategy", "unsafe-best-match"]
        for entry in self.extra:
            options += ["--index", entry["url"]]
        return options


@dataclass(frozen=True)
class HeldPackages:
    """The packages of a stack whose hashes are recorded on the host.

    :ivar folder: where records are kept
    :ivar stack: the stack's data
    :ivar lock: text of its lock
    """

    folder: Path
    stack: Mapping[str, Any]
    lock: str

    @property
    def path(self) -> Path:
        """The record: one file for each set of held packages under one lock."""
        wish = json.dumps([self.stack["held"], self.stack["lock"]], sort_keys=True) + self.lock
        digest = hashlib.sha256(wish.encode()).hexdigest()[:12]
        return self.folder / f"{self.stack['name']}-{digest}.txt"

    def resolution(self, folder: Path, indexes: Indexes, python: str) -> list[str]:
        """Write the inputs of uv's resolution and return its arguments.

        The held packages come from their own index and no other, and their own metadata decides
        what they need: the lock's overrides correct the public index's metadata, which is that of
        other builds. Everything that the lock knows is constrained to the lock's version.

        :param folder: an empty folder
        :param python: the interpreter to resolve for
        """
        held = {entry["name"]: entry for entry in self.stack["held"]}
        lock = self.stack["lock"]
        wanted = [f"{name}=={entry['version']}" for name, entry in held.items()]
        wanted += [line for line in lock["requirements"] if requirement_name(line) not in held]
        project = ["[project]", 'name = "release"', 'version = "0"', "dependencies = ["]
        project += [f"  {json.dumps(line)}," for line in wanted]
        project += ["]"]
        for entry in indexes.extra:
            project += ["[[tool.uv.index]]", f"name = {json.dumps(entry['name'])}"]
            project += [f"url = {json.dumps(entry['url'])}", "explicit = true"]
        project += ["[tool.uv.sources]"]
        project += [
            f"{json.dumps(name)} = {{ index = {json.dumps(entry['index'])} }}"
            for name, entry in held.items()
        ]
        (folder / "pyproject.toml").write_text("\n".join(project) + "\n")
        constraints = [*lock.get("constraints", []), *pins(self.lock)]
        (folder / "constraints.txt").write_text("\n".join(constraints) + "\n")
        return [
            *("pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"),
            *("--python", python, "--constraints", str(folder / "constraints.txt")),
            *indexes.public(),
            str(folder / "pyproject.toml"),
        ]

    def record(self, resolved: str) -> list[str]:
        """Write down what the lock does not know of a resolution.

        :param resolved: output of uv
        :returns: name and version of each package recorded
        """
        locked = {distributions.normalise(requirement_name(line)) for line in pins(self.lock)}
        kept = [
            entry
            for entry in requirement_entries(resolved)
            if distributions.normalise(requirement_name(entry)) not in locked
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write("\n".join(kept) + "\n")
        return [entry.split()[0] for entry in kept]

    def hold_contents(self, site_packages: Path, requirements: Sequence[str]) -> None:
        """Hold packages whose index publishes no hash by what was installed.

        The digest of the installed files is written down the first time and compared from then on.

        :param requirements: ``name==version`` each
        :raises PackagesError: a package is not what was installed the first time
        """
        text = self.path.read_text()
        for line in requirements:
            name = requirement_name(line)
            folder = distributions.info_folder(site_packages, name)
            if folder is None:
                raise PackagesError(f"{line} was not installed; run the playbook again")
            digest = distributions.content_digest((folder / "RECORD").read_text())
            known = re.search(rf"^{_CONTENT}{re.escape(line)} (\w+)$", text, re.M)
            if known is None:
                text += f"{_CONTENT}{line} {digest}\n"
            elif known.group(1) != digest:
                raise PackagesError(
                    f"{line} is not the package that was installed here the first time; compare "
                    f"the index with another one, or remove {str(self.path)!r} to accept it"
                )
        self._write(text)

    def _write(self, text: str) -> None:
        temporary = self.path.with_name(f".{self.path.name}.new")
        temporary.write_text(text)
        temporary.replace(self.path)


class PackagesError(Exception):
    """An installed package is not the one that is held; the text is one sentence."""


def requirement_name(line: str) -> str:
    """Return the name at the start of a requirement."""
    match = re.match(r"[A-Za-z0-9][\w.-]*", line)
    return match.group(0) if match else ""


def requirement_entries(text: str) -> list[str]:
    """Split requirements with hashes into entries, comments dropped."""
    entries: list[str] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line[0].isspace() and entries:
            entries[-1] += "\n" + line
        else:
            entries.append(line)
    return entries


def pins(lock: str) -> list[str]:
    """Return the entries of a lock without their hashes, usable as constraints."""
    return [
        re.split(r"\s*\\?\n|\s+\\$|\s+--hash", entry, maxsplit=1)[0].rstrip(" \\")
        for entry in requirement_entries(lock)
    ]


def split_by_hash(text: str) -> tuple[str, list[str]]:
    """Split recorded requirements into those with hashes (as text) and those without."""
    with_hash, without = [], []
    for entry in requirement_entries(text):
        if "--hash" in entry:
            with_hash.append(entry)
        else:
            without.append(entry.split(";")[0].strip())
    return "".join(f"{entry}\n" for entry in with_hash), without


def left_out(name: str, patterns: Sequence[str]) -> bool:
    """Whether a package belongs to those that the host resolves (``lock.leave_out``)."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


#: What uv says, and what a person can do about it.
_HINTS = (
    (r"[Nn]o space left", "free space on the file system that holds vllm_host_prefix"),
    (r"[Hh]ash mismatch", "the mirror serves other files than were locked; choose another mirror"),
    (
        r"dns error|[Cc]onnection (refused|reset)|timed out|tcp connect|error sending request",
        "check the network, or set vllm_host_mirror_python, vllm_host_mirror_pytorch and "
        "vllm_host_mirror_vllm to indexes that this host reaches",
    ),
    (
        r"[Nn]o solution found|was not found in the package registry|no version",
        "check that the indexes hold these versions",
    ),
    (r"not found$", "the role vllm_host installs uv; run the whole playbook"),
)


def condense(result: Result, stack: str, count: int = 8) -> tuple[str, list[str]]:
    """Turn uv's failure into one sentence and the last lines of what it said.

    :param result: what became of uv
    :param stack: name for the message
    """
    lines = [line.rstrip() for line in result.stderr.splitlines() if line.strip()]
    # uv frames its chain of causes with line-drawing characters.
    telling = [re.sub(r"^[^\w`'\"(]+", "", line) for line in lines]
    telling = [re.sub(r"^(error|cause|Caused by):\s*", "", line) for line in telling if line]
    reason = result.error or (telling[-1] if telling else f"exit status {result.rc}")
    everything = "\n".join([reason, *telling])
    hint = next((text for pattern, text in _HINTS if re.search(pattern, everything, re.M)), "")
    sentence = f"uv cannot install stack {stack!r}: {reason}"
    return (f"{sentence}; {hint}" if hint else sentence), lines[-count:]
