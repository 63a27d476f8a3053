"""Apt's source files: parse them, find what would stop apt, and put it right with a backup.

Apt itself cannot be asked, since a conflict makes every apt command fail. The comparison follows
apt's own: the URI without its closing slashes and the suite name an index; two entries for one
index whose ``Signed-By`` differ (or of which one has none) are an error; the same entry twice is
a warning.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

#: The list files whose names apt ignores without a word (apt.conf ``Dir::Ignore-Files-Silently``).
DISABLED_SUFFIX = ".disabled"

_OPTION = re.compile(r"([\w-]+)\+?=(\"[^\"]*\"|\S+)")
_NVIDIA_HOST = re.compile(r"^https?://developer\.download\.nvidia\.(com|cn)/compute/cuda/repos/")


@dataclass(frozen=True)
class Entry:
    """One index that one source file declares.

    :ivar line: first line of the declaration, counted from 1
    :ivar uri: without closing slashes
    :ivar suite: ``./`` or ``/`` for a flat repository
    :ivar signed_by: path or fingerprint or key block, blanks normalised; ``""`` when there is none
    """

    path: str
    line: int
    kind: str
    uri: str
    suite: str
    components: tuple[str, ...] = ()
    signed_by: str = ""
    enabled: bool = True
    options: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def index(self) -> tuple[str, str]:
        """What apt takes for the same index."""
        suite = self.suite.strip("/.") if set(self.suite) <= set("./") else self.suite.rstrip("/")
        return (self.uri, suite)

    @property
    def place(self) -> str:
        """File and line for a message."""
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """Something wrong with the sources.

    :ivar kind: ``conflict`` (apt cannot run), ``duplicate`` (apt warns), ``key-missing`` (the
        source can never be verified), ``local-gone`` (a file: repository that is not there)
    :ivar disable: the entries to switch off to put it right; empty when it is only reported
    """

    kind: str
    message: str
    disable: tuple[Entry, ...] = ()


def parse_list(text: str, path: str) -> list[Entry]:
    """Parse a one-line-style ``.list`` file."""
    entries = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        match = re.match(r"(deb|deb-src)\s+(?:\[(.*?)\]\s*)?(\S+)\s+(\S+)\s*(.*)$", line)
        if not match:
            continue
        kind, raw_options, uri, suite, components = match.groups()
        options = {
            key.lower(): value.strip('"') for key, value in _OPTION.findall(raw_options or "")
        }
        entries.append(
            Entry(
                path, number, kind, uri.rstrip("/"), suite, tuple(components.split()),
                " ".join(options.get("signed-by", "").split()), True, options,
            )
        )  # fmt: skip
    return entries


def _stanzas(text: str) -> Iterable[tuple[int, dict[str, str]]]:
    """Yield each deb822 stanza with the number of its first line; field names in small letters."""
    fields: dict[str, str] = {}
    start, last = 0, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.startswith("#"):
            continue
        if not line.strip():
            if fields:
                yield start, fields
            fields, last = {}, ""
        elif line[0] in " \t" and last:
            fields[last] += "\n" + line.strip()
        elif ":" in line:
            name, value = line.split(":", 1)
            last = name.strip().lower()
            if not fields:
                start = number
            fields[last] = value.strip()


def parse_deb822(text: str, path: str) -> list[Entry]:
    """Parse a deb822 ``.sources`` file."""
    entries = []
    for line, fields in _stanzas(text):
        enabled = fields.get("enabled", "yes").lower() not in (
            "no",
            "false",
            "without",
            "off",
            "0",
            "disable",
        )
        for kind in fields.get("types", "").split():
            for uri in fields.get("uris", "").split():
                for suite in fields.get("suites", "").split():
                    entries.append(
                        Entry(
                            path, line, kind, uri.rstrip("/"), suite,
                            tuple(fields.get("components", "").split()),
                            " ".join(fields.get("signed-by", "").split()), enabled, fields,
                        )
                    )  # fmt: skip
    return entries


def parse_file(path: Path, shown: str) -> list[Entry]:
    """Parse one source file by its suffix; a file that is not readable text has no entries."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return parse_deb822(text, shown) if path.suffix == ".sources" else parse_list(text, shown)


def read_all(root: Path = Path("/")) -> list[Entry]:
    """Read every source file that apt would read, in apt's order."""
    entries: list[Entry] = []
    main = root / "etc/apt/sources.list"
    if main.is_file():
        entries += parse_file(main, "/etc/apt/sources.list")
    folder = root / "etc/apt/sources.list.d"
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.suffix in (".list", ".sources") and path.is_file():
                entries += parse_file(path, f"/etc/apt/sources.list.d/{path.name}")
    return entries


def _key_file_missing(entry: Entry, root: Path) -> bool:
    """Whether Signed-By names key files and one of them is not there."""
    names = [name for name in re.split(r"[,\s]+", entry.signed_by) if name.startswith("/")]
    return any(not (root / name.lstrip("/")).is_file() for name in names)


def find(
    entries: Iterable[Entry], own: Iterable[str] = (), root: Path = Path("/")
) -> list[Finding]:
    """Find what would stop apt.

    :param own: paths of the source files that this project writes; their entries win
    :param root: folder that stands for ``/``, to look key files up
    """
    live = [entry for entry in entries if entry.enabled and entry.kind == "deb"]
    own_paths = set(own)
    findings: list[Finding] = []
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in live:
        groups.setdefault(entry.index, []).append(entry)
    for (uri, _suite), group in groups.items():
        if len(group) < 2:
            continue
        # The keeper: our own file, else one whose key is really there, else the newer format.
        keeper = min(
            group,
            key=lambda e: (
                e.path not in own_paths,
                not e.signed_by or _key_file_missing(e, root),
                not e.path.endswith(".sources"),
            ),
        )
        if len({entry.signed_by for entry in group}) > 1:
            others = tuple(entry for entry in group if entry.signed_by != keeper.signed_by)
            places = " and ".join(f"{e.place} (Signed-By '{e.signed_by or 'none'}')" for e in group)
            findings.append(
                Finding(
                    "conflict",
                    f"apt cannot run: '{uri}' is declared with different keys in {places}; "
                    f"{keeper.place} is kept",
                    others,
                )
            )
        else:
            components: set[str] = set()
            doubled = []
            for entry in group:
                names = set(entry.components) or {""}
                if names & components:
                    doubled.append(entry)
                components |= names
            if doubled:
                places = " and ".join(e.place for e in group)
                findings.append(Finding("duplicate", f"'{uri}' is declared twice, in {places}"))
    findings += _find_dead(live, own_paths, root)
    return findings


def _find_dead(live: list[Entry], own: set[str], root: Path) -> list[Finding]:
    """Find sources that can never be verified or are not there."""
    findings = []
    for entry in live:
        if entry.path in own:
            continue
        if entry.uri.startswith("file:"):
            folder = re.sub(r"^file:(//)?", "", entry.uri)
            if not (root / folder.lstrip("/")).is_dir():
                name = folder.rstrip("/").rsplit("/", 1)[-1].removesuffix("-local")
                findings.append(
                    Finding(
                        "local-gone",
                        f"{entry.place} names the local repository '{folder}', which is not there; "
                        f"purge its package (apt-get purge '{name}*')",
                        (entry,),
                    )
                )
        elif _key_file_missing(entry, root):
            nvidia = bool(_NVIDIA_HOST.match(entry.uri + "/"))
            findings.append(
                Finding(
                    "key-missing",
                    f"key missing: {entry.place} wants '{entry.signed_by}', which is not there",
                    (entry,) if nvidia else (),
                )
            )
    return findings


def _free_name(path: Path, suffix: str) -> Path:
    """Return a name for a backup that is not taken."""
    candidate = path.with_name(path.name + suffix)
    number = 1
    while candidate.exists():
        candidate = path.with_name(f"{path.name}.{number}{suffix}")
        number += 1
    return candidate


def _without(text: str, path: Path, lines: set[int]) -> str:
    """Return the file's text with the entries that start at the given lines switched off."""
    rows = text.splitlines(keepends=True)
    if path.suffix != ".sources":
        for number in lines:
            rows[number - 1] = f"# disabled by vllm-turing: {rows[number - 1]}"
        return "".join(rows)
    for number in sorted(lines, reverse=True):
        end = number
        while end < len(rows) and rows[end].strip():
            end += 1
        stanza = [row for row in rows[number - 1 : end] if not row.lower().startswith("enabled:")]
        rows[number - 1 : end] = ["Enabled: no\n", *stanza]
    return "".join(rows)


@dataclass(frozen=True)
class Repair:
    """What was, or would be, done to one source file."""

    path: str
    backup: str
    before: str
    after: str | None


def repair(
    findings: Iterable[Finding], root: Path = Path("/"), *, check: bool = False
) -> list[Repair]:
    """Switch off the entries that the findings name, each file kept beside as a backup.

    A file all of whose entries go is renamed; otherwise its lines or stanzas are switched off.

    :param check: only tell what would be done
    """
    per_file: dict[str, set[int]] = {}
    for finding in findings:
        for entry in finding.disable:
            per_file.setdefault(entry.path, set()).add(entry.line)
    repairs = []
    for shown, lines in sorted(per_file.items()):
        path = root / shown.lstrip("/")
        before = path.read_text(encoding="utf-8", errors="replace")
        remaining = [e for e in parse_file(path, shown) if e.line not in lines and e.enabled]
        backup = _free_name(path, DISABLED_SUFFIX if not remaining else ".bak")
        after = _without(before, path, lines) if remaining else None
        if not check:
            if after is None:
                path.rename(backup)
            else:
                shutil.copy2(path, backup)
                scratch = path.with_name(f".{path.name}.new")
                scratch.write_text(after, encoding="utf-8")
                shutil.copymode(path, scratch)
                scratch.replace(path)
        repairs.append(Repair(shown, os.path.join("/", backup.relative_to(root)), before, after))  # noqa: PTH118 - the path as on the host
    return repairs
