"""Remember what was verified, so that 29 GB are not read again to learn that nothing changed.

A file counts as verified while its size, times, inode and device are those it had when its sha256
was computed. A write changes the times; a copy or a restore changes the inode. What differs is read
again; only what then has another sha256 is fetched again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .model_lock import LockedFile, write_atomically


@dataclass(frozen=True)
class Stamp:
    """A file's identity when its content was read, and the content's sha256."""

    size: int
    mtime_ns: int
    ctime_ns: int
    ino: int
    dev: int
    sha256: str

    @classmethod
    def of(cls, file: Path, sha256: str) -> Stamp:
        """Stamp a file as it is now."""
        return cls._from(file.stat(), sha256)

    @classmethod
    def _from(cls, stat: os.stat_result, sha256: str) -> Stamp:
        return cls(
            stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev, sha256
        )

    def still_holds(self, file: Path) -> bool:
        """Whether the file is the one that was read."""
        try:
            return Stamp._from(file.stat(), self.sha256) == self
        except OSError:
            return False


def load(file: Path) -> dict[str, Stamp]:
    """Read a manifest; anything that is not one counts as none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return {path: Stamp(**entry) for path, entry in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def save(file: Path, stamps: Mapping[str, Stamp]) -> None:
    """Write a manifest."""
    write_atomically(
        file, json.dumps({path: asdict(stamp) for path, stamp in sorted(stamps.items())}) + "\n"
    )


def unverified(
    folder: Path, files: Mapping[str, LockedFile], stamps: Mapping[str, Stamp]
) -> list[str]:
    """Return the locked files that the manifest does not vouch for, in order."""
    out = []
    for path, locked in files.items():
        stamp = stamps.get(path)
        if (
            stamp is None
            or (locked.sha256 is not None and stamp.sha256 != locked.sha256)
            or stamp.size != locked.size
            or not stamp.still_holds(folder / path)
        ):
            out.append(path)
    return out
