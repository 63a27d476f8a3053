"""A read-only view of a host: its files, its commands, its disks, the places it can reach.

The checks see a host only through this, so that a test can hand in a folder and recorded outputs
instead. Nothing here raises for what is missing, and nothing writes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .run import Result, Runner, run

#: Most bytes that are read of one file, unless a check asks for more.
READ_LIMIT = 4 * 1024 * 1024

#: Links that are followed before a path counts as a loop (as in the kernel).
MOST_LINKS = 40


@dataclass(frozen=True)
class Disk:
    """The file system below a path; sizes in bytes. ``inodes`` 0: it has no fixed number."""

    device: int
    path: str
    total: int
    free: int
    inodes: int
    inodes_free: int


@dataclass(frozen=True)
class Answer:
    """What an HTTP request brought.

    :ivar status: 0 when there was no answer
    :ivar error: why there was none, in the library's words
    :ivar headers: names in small letters
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str = ""


class Fetcher:
    """How a URL is asked for; tests replace :meth:`__call__`."""

    def __call__(self, method: str, url: str, *, timeout: float, limit: int) -> Answer:
        """Send one request without following redirects; never raises."""
        from .preflight_http import request

        return request(method, url, timeout=timeout, limit=limit)


class Host:
    """One machine, read only.

    :param root: folder that stands for ``/``
    :param runner: runs a command (:func:`vllm_turing.run.run`)
    :param fetch: sends one HTTP request
    :param statvfs: tells sizes of a file system
    :param uid: the user that the checks run as
    :param owners: path to (uid, gid, mode), in place of what the folder's files have
    """

    def __init__(
        self,
        root: str | Path = "/",
        runner: Runner = run,
        *,
        fetch: Callable[..., Answer] | None = None,
        statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
        uid: int | None = None,
        owners: Mapping[str, tuple[int, int, int]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep what the view is made of."""
        self.root = Path(root)
        self.uid = os.geteuid() if uid is None else uid
        self.now = clock
        self.fetch: Callable[..., Answer] = fetch or Fetcher()
        self._runner = runner
        self._statvfs = statvfs
        self._owners = dict(owners or {})
        self._results: dict[tuple[str, ...], Result] = {}
        self._lock = threading.Lock()

    # -- commands ------------------------------------------------------------------------------

    def run(self, argv: Sequence[str], timeout: float = 10.0) -> Result:
        """Run a command, once: the same command asked for again gives the same result."""
        key = tuple(argv)
        with self._lock:
            known = self._results.get(key)
        if known is not None:
            return known
        result = self._runner(key, timeout=timeout)
        with self._lock:
            return self._results.setdefault(key, result)

    def prefetch(self, commands: Iterable[tuple[Sequence[str], float]]) -> None:
        """Run several commands at the same time, so that later :meth:`run` calls have answers."""
        jobs = list(commands)
        if not jobs:
            return
        with ThreadPoolExecutor(max_workers=len(jobs)) as pool:
            list(pool.map(lambda job: self.run(job[0], job[1]), jobs))

    # -- files ---------------------------------------------------------------------------------

    def resolve(self, path: str) -> str | None:
        """Follow every link of a path inside the root.

        :returns: the path without links, as on the host; None when it does not exist or loops
        """
        pending = [part for part in path.split("/") if part not in ("", ".")]
        pending.reverse()
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                done = done[:-1]
                continue
            here = self.root.joinpath(*done, part)
            try:
                mode = os.lstat(here).st_mode
                if not stat.S_ISLNK(mode):
                    done.append(part)
                    continue
                target = str(here.readlink())
            except (OSError, ValueError):
                return None
            links += 1
            if links > MOST_LINKS:
                return None
            if target.startswith("/"):
                done = []
            pending.extend(p for p in reversed(target.split("/")) if p not in ("", "."))
        return "/" + "/".join(done)

    def real(self, path: str) -> Path | None:
        """Return the place of a path's file on this machine, or None when there is none."""
        resolved = self.resolve(path)
        return None if resolved is None else self.root / resolved.lstrip("/")

    def read_bytes(self, path: str, limit: int = READ_LIMIT, offset: int = 0) -> bytes | None:
        """Return the start of a file; None when it cannot be read."""
        place = self.real(path)
        if place is None:
            return None
        try:
            # Never block on a pipe or a device that lies where a file is expected.
            descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            with open(descriptor, "rb", closefd=True) as stream:
                if offset:
                    stream.seek(offset)
                return stream.read(limit)
        except OSError:
            return None

    def read(self, path: str, limit: int = READ_LIMIT) -> str | None:
        """Return a file's text; None when it cannot be read."""
        content = self.read_bytes(path, limit)
        return None if content is None else content.decode("utf-8", "replace")

    def exists(self, path: str) -> bool:
        """Whether a path leads to something."""
        return self.real(path) is not None

    def is_dir(self, path: str) -> bool:
        """Whether a path leads to a folder."""
        place = self.real(path)
        return place is not None and place.is_dir()

    def is_file(self, path: str) -> bool:
        """Whether a path leads to a file."""
        place = self.real(path)
        return place is not None and place.is_file()

    def is_link(self, path: str) -> bool:
        """Whether the last part of a path is a link, dangling or not."""
        return self._own(path).is_symlink()

    def link_target(self, path: str) -> str | None:
        """Return what a link says, without following it."""
        try:
            return str(self._own(path).readlink())
        except OSError:
            return None

    def _own(self, path: str) -> Path:
        """Return the place of a path whose folder's links are followed, but not its own."""
        folder, _, name = path.rstrip("/").rpartition("/")
        parent = self.real(folder or "/")
        return (parent or self.root / folder.lstrip("/")) / name

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; none when it cannot be read."""
        place = self.real(path)
        if place is None:
            return []
        try:
            return sorted(entry.name for entry in place.iterdir())
        except OSError:
            return []

    def glob(self, folder: str, pattern: str) -> list[str]:
        """Return the paths in one folder whose names match."""
        names = fnmatch.filter(self.listdir(folder), pattern)
        return [f"{folder.rstrip('/')}/{name}" for name in names]

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes, links followed."""
        place = self.real(path)
        try:
            return None if place is None else place.stat().st_size
        except OSError:
            return None

    def mtime(self, path: str) -> float | None:
        """Return when a file was last written, links followed."""
        place = self.real(path)
        try:
            return None if place is None else place.stat().st_mtime
        except OSError:
            return None

    def owner(self, path: str) -> tuple[int, int, int] | None:
        """Return (uid, gid, permission bits) of what a path leads to."""
        resolved = self.resolve(path)
        if resolved is None:
            return None
        if resolved in self._owners:
            return self._owners[resolved]
        try:
            found = (self.root / resolved.lstrip("/")).stat()
        except OSError:
            return None
        return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)

    def may(self, path: str, uid: int, groups: Iterable[int], bit: int) -> bool:
        """Whether a user may do something with a path, the folders above it included.

        :param bit: 4 to read, 2 to write, 1 to enter or execute
        """
        resolved = self.resolve(path)
        if resolved is None:
            return False
        if uid == 0:
            return True
        member = set(groups)
        parts = [part for part in resolved.split("/") if part]
        steps = [("/" + "/".join(parts[:depth]), 1) for depth in range(len(parts))]
        for place, wanted in [*steps, (resolved, bit)]:
            found = self.owner(place)
            if found is None:
                return False
            owner, group, mode = found
            shift = 6 if owner == uid else 3 if group in member else 0
            if not (mode >> shift) & wanted:
                return False
        return True

    def which(self, name: str, path: str) -> str | None:
        """Return where a program is found on a search path of this host."""
        for folder in path.split(":"):
            candidate = f"{folder.rstrip('/')}/{name}"
            if folder.startswith("/") and self.is_file(candidate):
                found = self.owner(candidate)
                if found is not None and found[2] & 0o111:
                    return candidate
        return None

    def disk(self, path: str) -> Disk | None:
        """Return the file system that a path's bytes would go to, the path existing or not."""
        here = path
        while True:
            place = self.real(here)
            if place is not None:
                break
            # A dangling link points to where the bytes would go.
            target = self.link_target(here)
            parent = here.rstrip("/").rpartition("/")[0] or "/"
            here = target if target and target.startswith("/") and target != here else parent
        with contextlib.suppress(OSError):
            sizes = self._statvfs(str(place))
            return Disk(
                device=place.stat().st_dev,
                path=here,
                total=sizes.f_blocks * sizes.f_frsize,
                free=sizes.f_bavail * sizes.f_frsize,
                inodes=sizes.f_files,
                inodes_free=sizes.f_favail,
            )
        return None
