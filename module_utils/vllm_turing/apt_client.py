"""Drive apt-get and apt-cache by their text output.

Offers versions with their origin, simulated transactions, real ones, and holds. python3-apt is
not used: a minimal box lacks it, and the text forms below are stable.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from . import apt_lock
from .run import Result, Runner, run

#: No dialog, no restart of services in mid-transaction (needrestart would restart vLLM).
ENVIRONMENT = {
    "DEBIAN_FRONTEND": "noninteractive",
    "NEEDRESTART_SUSPEND": "1",
    "NEEDRESTART_MODE": "l",
    "APT_LISTCHANGES_FRONTEND": "none",
    "UCF_FORCE_CONFFOLD": "1",
}

#: A package build by DKMS and an initramfs per kernel take minutes on a small box.
TRANSACTION_TIMEOUT = 3600.0
UPDATE_TIMEOUT = 600.0
QUERY_TIMEOUT = 120.0

#: Faults that pass by themselves; everything else is final at once.
_TRANSIENT = re.compile(
    r"Temporary failure resolving|Could not (?:resolve|connect)"
    r"|Connection (?:timed out|reset|failed)|Unable to connect|Cannot initiate the connection"
    r"|timed out|(?:^|\s)5\d\d\s"
    r"|Hash Sum mismatch|File has unexpected size|Mirror sync in progress"
    r"|Undetermined Error|Connection closed|Could not wait for server",
    re.MULTILINE,
)
_LOCKED = re.compile(r"Could not get lock|Unable to (?:lock|acquire)|Waiting for cache lock")


class AptError(Exception):
    """Apt refused or failed; the text is one sentence for a person."""


@dataclass(frozen=True)
class Candidate:
    """One version of a package that an index offers.

    :ivar origins: the ``o=`` fields of the indexes that carry it (``Ubuntu``, ``NVIDIA``)
    :ivar uris: those indexes' URIs
    """

    version: str
    priority: int
    origins: frozenset[str] = frozenset()
    uris: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Change:
    """One line of a simulated transaction.

    :ivar action: ``install`` (new, up or down) or ``remove``
    """

    action: str
    name: str
    old: str | None
    new: str | None


@dataclass
class Simulation:
    """What apt would do.

    :ivar error: why it cannot be done, in one sentence; ``None`` when it can
    """

    changes: list[Change] = field(default_factory=list)
    error: str | None = None

    @property
    def installs(self) -> dict[str, Change]:
        """Packages that would be unpacked, by name."""
        return {c.name: c for c in self.changes if c.action == "install"}

    @property
    def removes(self) -> dict[str, Change]:
        """Packages that would go, by name."""
        return {c.name: c for c in self.changes if c.action == "remove"}


def parse_policy_files(text: str) -> dict[str, str]:
    """Map each index of ``apt-cache policy`` (without packages) to its ``o=`` field.

    The key is the index as the version tables print it: ``http://… noble/main amd64 Packages``.
    """
    origins: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        match = re.match(r"\s+-?\d+ (\S.*)$", line)
        if match:
            current = match.group(1).strip()
        elif line.strip().startswith("release ") and current:
            fields = re.search(r"(?:^|,)o=([^,]*)", line.strip().removeprefix("release "))
            origins[current] = fields.group(1) if fields else ""
        elif line.startswith("Pinned packages"):
            break
    return origins


def parse_policy(text: str, origins: Mapping[str, str]) -> dict[str, list[Candidate]]:
    """Parse ``apt-cache policy NAME…``; a version that no index has is dropped."""
    tables: dict[str, list[Candidate]] = {}
    name, version, priority = "", "", 0
    seen_origins: set[str] = set()
    seen_uris: set[str] = set()

    def close() -> None:
        if name and version and seen_uris:
            tables.setdefault(name, []).append(
                Candidate(version, priority, frozenset(seen_origins), frozenset(seen_uris))
            )

    for line in text.splitlines():
        head = re.match(r"(\S+):$", line)
        row = re.match(r" (?:\*\*\*|   ) (\S+) (-?\d+)", line)
        source = re.match(r"\s{8,}(-?\d+) (\S.*)$", line)
        if head:
            close()
            name, version = head.group(1).split(":")[0], ""
            seen_origins, seen_uris = set(), set()
            tables.setdefault(name, [])
        elif row:
            close()
            version, priority = row.group(1), int(row.group(2))
            seen_origins, seen_uris = set(), set()
        elif source and version:
            index = source.group(2).strip()
            if index != "/var/lib/dpkg/status":
                seen_origins.add(origins.get(index, ""))
                seen_uris.add(index.split(" ", 1)[0])
    close()
    return tables


def parse_simulation(text: str) -> list[Change]:
    """Parse the ``Inst``, ``Remv`` and ``Purg`` lines of ``apt-get -s``."""
    changes: dict[tuple[str, str], Change] = {}
    for line in text.splitlines():
        match = re.match(
            r"(Inst|Remv|Purg) (\S+?)(?::\S+)?(?: \[([^\]]+)\])?(?: \((\S+))?(?:\s|$)", line
        )
        if not match:
            continue
        verb, name, old, new = match.groups()
        action = "install" if verb == "Inst" else "remove"
        changes[action, name] = Change(action, name, old, new)
    return list(changes.values())


def explain(result: Result) -> str:
    """Say in one sentence why apt failed; its raw last line is never the only message."""
    if result.error:
        return f"{result.argv[0]} {result.error}"
    text = result.stdout + "\n" + result.stderr
    if _LOCKED.search(text):
        held = re.search(r"held by process (\d+ \([^)]*\))", text)
        return f"another package manager is at work{f': process {held.group(1)}' if held else ''}"
    key = re.search(r"((?:https?|file|cdrom):\S+)\s+(?:\S+\s+)?(?:In)?Release", text)
    if "NO_PUBKEY" in text:
        number = re.search(r"NO_PUBKEY ([0-9A-F]+)", text)
        where = f" of '{key.group(1)}'" if key else ""
        name = number.group(1) if number else ""
        return f"key missing: the signing key {name}{where} is not installed"
    unmet = re.findall(r"^\s*(\S+) : ((?:Pre)?Depends|Conflicts|Breaks): (.+)$", text, re.MULTILINE)
    more = "; ".join(f"{name} {kind.lower()} {what.strip()}" for name, kind, what in unmet)
    if more:
        return f"packages do not fit together: {more}"
    missing = re.findall(r"Unable to locate package (\S+)", text)
    missing += re.findall(r"Version '([^']+)' for '([^']+)' was not found", text)
    if missing:
        names = ", ".join(m if isinstance(m, str) else f"{m[1]}={m[0]}" for m in missing)
        return f"no source has {names}"
    if "held broken packages" in text:
        return "packages on hold or of another origin are in the way (apt: held broken packages)"
    failed = re.findall(r"error processing package (\S+)", text)
    if failed:
        log = re.search(r"(/var/lib/dkms/\S+/make\.log)", text)
        return f"{', '.join(dict.fromkeys(failed))} cannot be configured" + (
            f": the module was not built, see {log.group(1)}" if log else ""
        )
    errors = [
        line.strip() for line in text.splitlines() if re.match(r"\s*(E|Err|dpkg: error)[:\s]", line)
    ]
    return "; ".join(dict.fromkeys(errors)) or f"apt ended with status {result.rc}"


def transient(result: Result) -> bool:
    """Whether the fault may pass by itself (network, a mirror in mid-update)."""
    text = result.stdout + "\n" + result.stderr
    if "NO_PUBKEY" in text or re.search(r"\s40[0-9]\s", text):
        return False
    return bool(_TRANSIENT.search(text))


class Apt:
    """The package manager of one host.

    :param runner: how commands are run
    :param options: ``-o`` options given to every apt-get and apt-cache call (a view with other
        lists or preferences, see :func:`overlay`)
    :param lock_timeout: seconds to wait for another package manager
    """

    def __init__(
        self,
        runner: Runner = run,
        options: Sequence[str] = (),
        *,
        lock_timeout: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
        wait_for_lock: Callable[[float], float] = apt_lock.wait,
    ) -> None:
        """Remember how to reach apt; nothing is run yet."""
        self._run = runner
        self._options = [part for option in options for part in ("-o", option)]
        self._lock_timeout = lock_timeout
        self._sleep = sleep
        self._wait_for_lock = wait_for_lock
        self._origins: dict[str, str] | None = None

    def view(self, options: Sequence[str]) -> Apt:
        """Return the same package manager looked at through other options."""
        other = Apt(
            self._run,
            lock_timeout=self._lock_timeout,
            sleep=self._sleep,
            wait_for_lock=self._wait_for_lock,
        )
        other._options = [*self._options, *(p for option in options for p in ("-o", option))]
        return other

    def option(self, name: str) -> str | None:
        """Return the value that this view gives to one of apt's options."""
        for option in reversed(self._options):
            if option.startswith(f"{name}="):
                return option.split("=", 1)[1]
        return None

    # -- reading ---------------------------------------------------------------------------------

    def candidates(self, names: Iterable[str]) -> dict[str, list[Candidate]]:
        """Return the versions that the indexes offer for each name; unknown names have none."""
        wanted = sorted(set(names))
        if not wanted:
            return {}
        if self._origins is None:
            files = self._run(["apt-cache", *self._options, "policy"], timeout=QUERY_TIMEOUT)
            if not files.ok:
                raise AptError(f"apt cannot be asked: {explain(files)}")
            self._origins = parse_policy_files(files.stdout)
        tables = self._run(["apt-cache", *self._options, "policy", *wanted], timeout=QUERY_TIMEOUT)
        if not tables.ok:
            raise AptError(f"apt cannot be asked: {explain(tables)}")
        found = parse_policy(tables.stdout, self._origins)
        return {name: found.get(name, []) for name in wanted}

    def show(self, name: str, version: str) -> dict[str, str]:
        """Return the fields of one package version; empty when there is none."""
        result = self._run(
            ["apt-cache", *self._options, "show", "--no-all-versions", f"{name}={version}"],
            timeout=QUERY_TIMEOUT,
        )
        fields: dict[str, str] = {}
        for line in result.stdout.splitlines():
            if not line.strip():
                break
            if line[0] not in " \t" and ":" in line:
                key, value = line.split(":", 1)
                fields[key.lower()] = value.strip()
        return fields

    def known(self, pattern: str) -> list[str]:
        """Return the names of all packages that match a regular expression."""
        result = self._run(["apt-cache", *self._options, "pkgnames"], timeout=QUERY_TIMEOUT)
        return sorted(name for name in result.stdout.split() if re.fullmatch(pattern, name))

    def holds(self) -> set[str]:
        """Return the packages on hold."""
        result = self._run(["apt-mark", "showhold"], timeout=QUERY_TIMEOUT)
        if not result.ok:
            raise AptError(f"the holds cannot be read: {explain(result)}")
        return {name.split(":")[0] for name in result.stdout.split()}

    def simulate(self, arguments: Sequence[str]) -> Simulation:
        """Tell what a transaction would do.

        :param arguments: as for :meth:`install`
        """
        result = self._run(
            ["apt-get", *self._options, "-s", *_TRANSACTION, "install", *arguments],
            timeout=QUERY_TIMEOUT,
        )
        if not result.ok:
            return Simulation(error=explain(result))
        return Simulation(parse_simulation(result.stdout))

    # -- changing --------------------------------------------------------------------------------

    def update(self) -> None:
        """Fetch the indexes; tried again only for what passes by itself.

        :raises AptError: names the source and the reason
        """
        self._origins = None
        # By default apt-get update ends with status 0 when an index could not be fetched.
        self._transaction(
            ["apt-get", *self._options, "-o", "APT::Update::Error-Mode=any", "update"],
            UPDATE_TIMEOUT,
            "the package lists cannot be fetched",
        )

    def install(self, arguments: Sequence[str], *, archives: str | None = None) -> None:
        """Run a transaction.

        :param arguments: ``name=version`` to install, ``name-`` to remove, a path of a .deb
        :param archives: folder that keeps the fetched .deb files
        :raises AptError: one sentence
        """
        extra: list[str] = []
        if archives:
            (Path(archives) / "partial").mkdir(parents=True, exist_ok=True)
            extra = [
                "-o", f"Dir::Cache::archives={archives}",
                "-o", "APT::Keep-Downloaded-Packages=true",
            ]  # fmt: skip
        self._transaction(
            ["apt-get", *self._options, *extra, *_TRANSACTION, *_DPKG, "install", *arguments],
            TRANSACTION_TIMEOUT,
            "the packages cannot be installed",
        )

    def download(self, packages: Sequence[str], archives: str) -> bool:
        """Fetch packages into a folder, installing nothing; ``False`` when one is not to be had."""
        (Path(archives) / "partial").mkdir(parents=True, exist_ok=True)
        result = self._run(
            ["apt-get", *self._options, "download", *packages],
            timeout=TRANSACTION_TIMEOUT,
            cwd=archives,
        )
        return result.ok

    def purge(self, names: Sequence[str]) -> None:
        """Remove packages and their configuration."""
        if names:
            self._transaction(
                ["apt-get", *self._options, *_TRANSACTION, *_DPKG, "purge", *names],
                TRANSACTION_TIMEOUT,
                f"{', '.join(names)} cannot be removed",
            )

    def configure(self) -> None:
        """Finish what dpkg left half configured."""
        self._wait()
        result = self._run(
            ["dpkg", "--force-confdef", "--force-confold", "--configure", "-a"],
            timeout=TRANSACTION_TIMEOUT,
            env=ENVIRONMENT,
        )
        if not result.ok:
            raise AptError(f"dpkg cannot finish what was left half done: {explain(result)}")

    def hold(self, names: Iterable[str]) -> None:
        """Put packages on hold."""
        self._mark("hold", names)

    def unhold(self, names: Iterable[str]) -> None:
        """Take packages off hold."""
        self._mark("unhold", names)

    def _mark(self, verb: str, names: Iterable[str]) -> None:
        wanted = sorted(set(names))
        if not wanted:
            return
        self._wait()
        result = self._run(["apt-mark", verb, *wanted], timeout=QUERY_TIMEOUT)
        if not result.ok:
            raise AptError(f"apt-mark {verb} failed for {', '.join(wanted)}: {explain(result)}")

    def _wait(self) -> None:
        try:
            self._wait_for_lock(self._lock_timeout)
        except apt_lock.LockTimeout as error:
            raise AptError(str(error)) from error

    def _transaction(self, argv: Sequence[str], timeout: float, what: str) -> None:
        """Run a command that takes the locks; three attempts for what passes by itself."""
        result = Result(tuple(argv), None)
        for pause in (5.0, 20.0, 0.0):
            self._wait()
            result = self._run(argv, timeout=timeout, env=ENVIRONMENT)
            if result.ok:
                return
            if not transient(result):
                break
            if pause:
                self._sleep(pause)
        raise AptError(f"{what}: {explain(result)}")


#: Options of every transaction, simulated or real.
_TRANSACTION = (
    "-y",
    "--no-install-recommends",
    "-o", "DPkg::Lock::Timeout=60",
    "-o", "APT::Get::Always-Include-Phased-Updates=true",
)  # fmt: skip
_DPKG = ("-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold")


@contextmanager
def overlay(
    preferences: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
    *,
    hide: Iterable[str] = (),
    own_lists: bool = False,
    main: str | None = None,
    sources_from: str | None = None,
    root: Path = Path("/"),
) -> Iterator[list[str]]:
    """Give apt options under which it sees other preferences and sources than the host's.

    Used to simulate a transaction before anything is written, and by check mode.

    :param preferences: file name to content, laid over /etc/apt/preferences.d
    :param sources: the same for /etc/apt/sources.list.d
    :param hide: names of files of either folder that apt is not to see
    :param sources_from: take the sources from this folder instead of the host's
    :param main: another content for /etc/apt/sources.list
    :param own_lists: keep fetched indexes in the overlay too (the host's are copied in first)
    """
    hidden = set(hide)
    with tempfile.TemporaryDirectory(prefix="vllm-turing-apt-") as name:
        folder = Path(name)
        # apt fetches as the user _apt, which must be able to look in.
        folder.chmod(0o755)
        options = []
        for key, part, changes in (
            ("Dir::Etc::preferencesparts", "preferences.d", preferences),
            ("Dir::Etc::sourceparts", "sources.list.d", sources),
        ):
            if changes is None and not hidden:
                continue
            target = folder / part
            target.mkdir()
            origin = root / "etc/apt" / part
            if part == "sources.list.d" and sources_from:
                origin = Path(sources_from)
            if origin.is_dir():
                for path in origin.iterdir():
                    if path.is_file() and path.name not in hidden:
                        shutil.copy(path, target / path.name)
            for filename, content in (changes or {}).items():
                (target / filename).write_text(content, encoding="utf-8")
            options.append(f"{key}={target}")
        if main is not None:
            (folder / "sources.list").write_text(main, encoding="utf-8")
            options.append(f"Dir::Etc::sourcelist={folder / 'sources.list'}")
        if own_lists:
            lists = folder / "lists"
            (lists / "partial").mkdir(parents=True)
            (folder / "cache/archives/partial").mkdir(parents=True)
            origin = root / "var/lib/apt/lists"
            if origin.is_dir():
                for path in origin.iterdir():
                    if path.is_file() and path.name != "lock":
                        (lists / path.name).symlink_to(path)
            options += [f"Dir::State::Lists={lists}", f"Dir::Cache={folder / 'cache'}"]
        yield options
