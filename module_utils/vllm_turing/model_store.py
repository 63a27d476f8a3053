"""Where a model lives on a host, whether it is complete, and how it becomes the one in use.

::

    STORE/.staging/NAME/COMMIT/      files of a revision on their way; parts in .parts
    STORE/.revisions/NAME/COMMIT/    a complete, verified revision (COMMIT.2 after a repair)
    STORE/.revisions/NAME/COMMIT.manifest.json
    STORE/.status/NAME.json          what the running or last fetch says
    STORE/NAME.lock.json             the lock made on this host, unless one was given
    LINK                             symbolic link to the revision in use

A revision's folder is never changed once it has its name: a repair builds another one beside it.
The only step that the engine can notice is the exchange of the link, which is atomic.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import model_lock, model_manifest
from .model_lock import Lock, ModelError

STATES = ("listing", "adopting", "fetching", "verifying", "complete", "failed", "stopped")


@dataclass(frozen=True)
class Config:
    """What the host is to have: the content of model.json.

    :ivar link: path by which the engine finds the model
    :ivar lock: lock file given by the controller; "" for the host's own
    :ivar sources: in order of preference, see ``model_http.parse_source``; or ``/folder``
    :ivar bandwidth: MiB a second in all; 0 for no limit
    :ivar reserve: GiB that stay free on the disk
    :ivar keep: earlier revisions that are kept
    :ivar adopt: folders of this host that may hold right files already
    """

    repo: str
    revision: str
    name: str
    store: str
    link: str
    sources: tuple[str, ...]
    tools_python: str = ""
    lock: str = ""
    token_file: str = ""
    connections: int = 16
    bandwidth: float = 0.0
    reserve: float = 2.0
    keep: int = 1
    patience: float = 600.0
    adopt: tuple[str, ...] = field(default=())

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str) -> Config:
        """Read the settings.

        :raises ModelError: one is missing or of no known name; permanent
        """
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(data) - known)
        if unknown:
            raise ModelError(f"'{where}' has the unknown setting '{unknown[0]}'", permanent=True)
        values = dict(data)
        for name in ("sources", "adopt"):
            if name in values:
                values[name] = tuple(values[name])
        try:
            return cls(**values)
        except TypeError as error:
            raise ModelError(f"'{where}' lacks a setting: {error}", permanent=True) from error

    @property
    def digest(self) -> str:
        """Return a name for these settings, to tell whether a running fetch works by them."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, file: Path) -> Config:
        """Read the settings from a file.

        :raises ModelError: it is not there or not right; permanent
        """
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"'{file}' cannot be read: {error}", permanent=True) from error
        return cls.from_mapping(data, str(file))


@dataclass(frozen=True)
class Status:
    """What a fetch says about itself: one small file that anybody may read.

    :ivar rate: bytes a second over the last seconds
    :ivar config: :attr:`Config.digest` of the settings that it works by
    """

    state: str
    repo: str = ""
    commit: str = ""
    total: int = 0
    done: int = 0
    rate: float = 0.0
    files_left: int = 0
    file: str = ""
    source: str = ""
    message: str = ""
    permanent: bool = False
    config: str = ""
    pid: int = 0
    updated: float = 0.0

    def line(self) -> str:
        """Return the state as one line for people."""
        if self.state == "fetching" and self.total:
            parts = [
                f"{100 * self.done / self.total:.0f} %",
                f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB",
            ]
            if self.rate > 0:
                left = (self.total - self.done) / self.rate
                parts += [f"{self.rate / 1e6:.1f} MB/s", f"{_duration(left)} left"]
            parts += [f"{self.file} from {self.source}" if self.file else f"from {self.source}"]
            return ", ".join(parts)
        words = {
            "listing": "asking the Hub what the revision consists of",
            "adopting": "looking for files that are already on this host",
            "verifying": "comparing the files with the lock",
            "complete": f"complete at {self.commit[:12]}",
        }
        return self.message or words.get(self.state, self.state)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Store:
    """The folders of one model on one host."""

    def __init__(self, config: Config) -> None:
        """Name the folders; nothing is touched."""
        self.config = config
        self.root = Path(config.store)
        self.link = Path(config.link)
        self.revisions = self.root / ".revisions" / config.name
        self.staging_root = self.root / ".staging" / config.name
        self.status_file = self.root / ".status" / f"{config.name}.json"
        self.host_lock = self.root / f"{config.name}.lock.json"

    def own_paths(self) -> list[Path]:
        """Return all that was made here for this model: never a folder that was there before."""
        name = self.config.name
        status = [path for path in self.status_file.parent.glob(f"{name}.*") if path.is_file()]
        link = [self.link] if self.link.is_symlink() else []
        return [*link, self.revisions, self.staging_root, self.host_lock, *status]

    # -- lock ------------------------------------------------------------------------------------

    def lock(self) -> Lock | None:
        """Return the lock that holds here, or None when one has still to be made.

        :raises ModelError: the given lock is missing, unreadable or of another repository
        """
        if self.config.lock:
            lock = model_lock.load(Path(self.config.lock))
            if lock is None:
                raise ModelError(
                    f"the model lock '{self.config.lock}' does not exist", permanent=True
                )
            if lock.repo != self.config.repo:
                raise ModelError(
                    f"the model lock '{self.config.lock}' is for '{lock.repo}' and not for "
                    f"'{self.config.repo}': set hf_model_repo or hf_model_lock",
                    permanent=True,
                )
            return lock
        lock = model_lock.load(self.host_lock)
        if lock is None or lock.repo != self.config.repo:
            return None
        # Another wish than the one the lock was made for: a new lock. "main" stays where it was.
        return lock if self.config.revision in (lock.revision, lock.commit) else None

    def save_lock(self, lock: Lock) -> None:
        """Keep the host's own lock."""
        model_lock.write_atomically(self.host_lock, lock.dump())

    # -- state -----------------------------------------------------------------------------------

    def manifest_file(self, folder: Path) -> Path:
        """Return the manifest of a revision's folder (or of a folder that was there before)."""
        if folder.parent == self.revisions:
            return folder.with_name(f"{folder.name}.manifest.json")
        return self.root / ".status" / f"{self.config.name}.adopted.manifest.json"

    def current(self) -> Path | None:
        """Return the folder that the engine finds by the link, if there is one."""
        if self.link.is_symlink():
            target = Path(os.path.normpath(self.link.parent / self.link.readlink()))
            return target if target.is_dir() else None
        return self.link if self.link.is_dir() else None

    def complete(self, lock: Lock | None) -> bool:
        """Whether the link leads to verified files of the lock; reads no file's content."""
        folder = self.current()
        if lock is None or folder is None or not lock.complete:
            return False
        stamps = model_manifest.load(self.manifest_file(folder))
        return not model_manifest.unverified(folder, lock.files, stamps)

    def ready_revision(self, lock: Lock) -> Path | None:
        """Return a revision that was verified for this lock before, if it is still as it was."""
        if not lock.complete or not self.revisions.is_dir():
            return None
        for folder in sorted(self.revisions.glob(f"{lock.commit}*")):
            if folder.is_dir():
                stamps = model_manifest.load(self.manifest_file(folder))
                if not model_manifest.unverified(folder, lock.files, stamps):
                    return folder
        return None

    def staging(self, lock: Lock) -> Path:
        """Return where a revision is put together."""
        return self.staging_root / lock.commit

    def free_name(self, lock: Lock) -> Path:
        """Return a name for a new revision's folder that nothing has yet."""
        candidate = self.revisions / lock.commit
        number = 2
        while candidate.exists():
            candidate = self.revisions / f"{lock.commit}.{number}"
            number += 1
        return candidate

    def promote(self, lock: Lock, stamps: Mapping[str, model_manifest.Stamp]) -> Path:
        """Give a complete staging folder its final name and turn the link to it.

        :raises ModelError: the link's place is taken by a folder that is not ours
        """
        self.check_link()
        folder = self.free_name(lock)
        folder.parent.mkdir(parents=True, exist_ok=True)
        model_manifest.save(self.manifest_file(folder), stamps)
        self.staging(lock).rename(folder)
        sync_folder(folder.parent)
        self.point_to(folder)
        return folder

    def check_link(self) -> None:
        """Refuse to put the link over something that somebody else made.

        :raises ModelError: what is there is no link; permanent
        """
        if self.link.exists() and not self.link.is_symlink():
            raise ModelError(
                f"'{self.link}' is a folder that was not made here and does not agree with the "
                "lock: move it away and run again (its right files were taken over)",
                permanent=True,
            )

    def point_to(self, folder: Path) -> None:
        """Turn the link to a revision, atomically."""
        self.link.parent.mkdir(parents=True, exist_ok=True)
        draft = self.link.with_name(f".{self.link.name}.part")
        draft.unlink(missing_ok=True)
        draft.symlink_to(folder)
        draft.replace(self.link)
        sync_folder(self.link.parent)

    def prune(self) -> list[Path]:
        """Remove revisions beyond those to keep, except one that is in use; return them."""
        current = self.current()
        if not self.revisions.is_dir():
            return []
        others = [path for path in self.revisions.iterdir() if path.is_dir() and path != current]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        removed = []
        for folder in others[self.config.keep :]:
            if in_use(folder):
                continue
            # Under another name first: half a revision must never carry a commit's name.
            doomed = folder.with_name(f".{folder.name}.removed")
            folder.rename(doomed)
            self.manifest_file(folder).unlink(missing_ok=True)
            shutil.rmtree(doomed)
            removed.append(folder)
        return removed

    def drop_other_staging(self, lock: Lock) -> None:
        """Remove what was fetched for revisions that are not wanted any more."""
        if self.staging_root.is_dir():
            for folder in self.staging_root.iterdir():
                if folder.name != lock.commit:
                    shutil.rmtree(folder)

    def forget_verification(self) -> None:
        """Make the next fetch read every file of the revision in use again."""
        folder = self.current()
        if folder is not None:
            self.manifest_file(folder).unlink(missing_ok=True)

    # -- status ----------------------------------------------------------------------------------

    def write_status(self, status: Status) -> None:
        """Write the status file."""
        now = {"config": self.config.digest, "pid": os.getpid(), "updated": time.time()}
        text = json.dumps({**asdict(status), **now})
        model_lock.write_atomically(self.status_file, text + "\n", sync=False)

    def read_status(self) -> Status | None:
        """Return what the running or last fetch said, if anything."""
        try:
            return Status(**json.loads(self.status_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Hold the model for one process; gives False when another one has it."""
        file = self.status_file.with_suffix(".flock")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                yield False
                return
            yield True


def in_use(folder: Path) -> bool:
    """Whether a process has a file below a folder open or mapped, as far as we may look."""
    prefix = f"{folder}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    if str(link.readlink()).startswith(prefix):
                        return True
        with suppress(OSError):
            if prefix in (process / "maps").read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def free_bytes(folder: Path) -> int:
    """Return the bytes that a normal user may still write to the file system of a folder."""
    while not folder.exists():
        folder = folder.parent
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
