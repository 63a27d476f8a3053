"""Wait for apt's and dpkg's locks, and name who holds them.

The locks are POSIX record locks: they end with the process that took them, so a lock file that
merely lies there is not a lock and is never removed.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LOCK_FILES = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
)

#: ``struct flock`` of Linux on 64 bit: type, whence, (padding), start, length, pid, (padding).
_FLOCK = "hhqqi4x"


class LockTimeout(Exception):
    """The lock was not released in time; the text names the holder."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    :ivar pid: process id, or 0 when the process lives in another pid namespace
    """

    path: str
    pid: int
    command: str

    def describe(self) -> str:
        """Say who holds which file."""
        who = (
            f"process {self.pid} ({self.command})"
            if self.pid
            else "a process outside this container"
        )
        return f"{self.path} is held by {who}"


def holder(path: str, proc: Path = Path("/proc")) -> Holder | None:
    """Tell who holds the lock on one file, without taking it; ``None`` when nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, query)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    kind, _whence, _start, _length, pid = struct.unpack(_FLOCK, answer)
    if kind == fcntl.F_UNLCK:
        return None
    try:
        command = (proc / str(pid) / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        command = "unknown"
    return Holder(path, max(pid, 0), command)


def wait(
    timeout: float,
    paths: Sequence[str] = LOCK_FILES,
    *,
    find: Callable[[str], Holder | None] = holder,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Wait until no lock is held.

    :param timeout: seconds to wait at most
    :returns: seconds waited
    :raises LockTimeout: names the file, the process and the time waited
    """
    start = clock()
    while True:
        held = next((found for found in map(find, paths) if found is not None), None)
        waited = clock() - start
        if held is None:
            return waited
        if waited >= timeout:
            raise LockTimeout(
                f"{held.describe()} and was not released in {waited:.0f} s; "
                "wait for that process to end (do not delete the file), then run this again"
            )
        sleep(min(2.0, max(0.1, timeout - waited)))
