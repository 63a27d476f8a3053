"""What is installed in a venv, read from its files without starting its interpreter."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

_DIST_INFO = re.compile(r"(?P<name>.+?)-(?P<version>\d[^-]*)\.dist-info")
#: Lines that the installer adds to RECORD; they differ between installations of one wheel.
_INSTALLERS_OWN = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json")


def normalise(name: str) -> str:
    """Return a distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def site_packages(venv: Path) -> Path | None:
    """Return the folder of a venv that holds its packages; ``None`` for a broken venv."""
    return next(iter(sorted(venv.glob("lib/python3.*/site-packages"))), None)


def installed(packages: Path) -> dict[str, str]:
    """Return name and version of every distribution in a ``site-packages`` folder."""
    found = {}
    for entry in packages.iterdir():
        match = _DIST_INFO.fullmatch(entry.name)
        if match:
            found[normalise(match["name"])] = match["version"]
    return found


def info_folder(packages: Path, name: str) -> Path | None:
    """Return the ``.dist-info`` folder of one distribution, or ``None``."""
    for entry in packages.iterdir():
        match = _DIST_INFO.fullmatch(entry.name)
        if match and normalise(match["name"]) == normalise(name):
            return entry
    return None


def content_digest(record: str) -> str:
    """Return one sha256 for the content of an installed wheel.

    :param record: text of the ``RECORD`` file of the distribution
    :returns: the same digest for every installation of the same wheel
    """
    lines: Iterable[str] = (line for line in record.splitlines() if line)
    kept = sorted(
        line
        for line in lines
        if line.split(",")[0].rsplit("/", 1)[-1] not in _INSTALLERS_OWN
        and not line.startswith("../")  # console scripts hold the venv's path
        and ".pyc," not in line
    )
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def sha256(path: Path) -> str | None:
    """Return the sha256 of a file, or ``None`` when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
