"""Compiled kernels of a release: whether they may still be used, and moving them aside.

The caches lie in ``<cache_dir>/<fingerprint>/``, so another stack or another patch never finds
them. What the fingerprint does not know is written in a stamp beside them: the toolkit, the
driver, and when the patched headers were written. The tools behind the caches go by modification
times alone and would use a kernel of another driver or of an unpatched header without a word.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAMP = "stamp.json"
#: The kernel module's own words about its version.
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class CacheState:
    """What is to be said of one release's caches.

    :ivar folder: ``<cache_dir>/<fingerprint>``
    :ivar filled: names of the caches that hold something
    :ivar reasons: why they may not be used; empty when they may
    """

    folder: Path
    filled: tuple[str, ...]
    reasons: tuple[str, ...]


def driver_version(path: Path = DRIVER_FILE) -> str:
    """Return the version of the loaded NVIDIA driver; empty without one."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else ""


def wanted_stamp(
    release: Path, mark: Mapping[str, Any], cuda_home: str, driver: str
) -> dict[str, Any]:
    """Return what the stamp of kernels compiled now would say.

    :param release: the release's folder
    :param mark: its ``release.json``
    :param cuda_home: ``CUDA_HOME`` of the unit; empty without a toolkit
    :param driver: version of the loaded driver
    """
    patched = json.dumps(mark["patched"], sort_keys=True)
    return {
        "fingerprint": mark["fingerprint"],
        "patches": hashlib.sha256(patched.encode()).hexdigest(),
        "headers": header_times(release, mark),
        "cuda_home": os.path.realpath(cuda_home) if cuda_home else "",
        "driver": driver,
    }


def header_times(release: Path, mark: Mapping[str, Any]) -> dict[str, int]:
    """Return the change time, in nanoseconds, of every patched file that a compiler reads.

    Not the modification time, which whoever writes the file chooses: a header that is replaced by
    an equal one with an old date must count as replaced.
    """
    times = {}
    for entry in mark["patched"]:
        path = release / entry["path"]
        if path.suffix != ".py" and path.is_file():
            times[entry["path"]] = path.stat().st_ctime_ns
    return times


def look(
    cache_dir: Path, fingerprint: str, caches: Sequence[str], wanted: Mapping[str, Any]
) -> CacheState:
    """Tell whether the caches of a release may be used; reads only.

    :param cache_dir: ``vllm_runtime_cache_dir``
    :param caches: names of the folders below ``<cache_dir>/<fingerprint>``
    :param wanted: what their stamp must say
    """
    folder = cache_dir / fingerprint
    filled = tuple(name for name in caches if _holds_something(folder / name))
    if not filled:
        return CacheState(folder, (), ())
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return CacheState(folder, filled, ("nobody knows what they were compiled from",))
    return CacheState(folder, filled, tuple(differences(stamp, wanted)))


def _holds_something(folder: Path) -> bool:
    try:
        return folder.is_symlink() or any(folder.iterdir())
    except OSError:
        return False


def differences(stamp: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Tell in words what changed between two stamps."""
    words = {
        "fingerprint": "they belong to release {0} and not to {1}",
        "patches": "the patches were others",
        "headers": "a patched header was replaced since",
        "cuda_home": "CUDA was in {0!r} and is now in {1!r}",
        "driver": "the driver was {0!r} and is now {1!r}",
    }
    return [
        text.format(stamp.get(key), wanted[key])
        for key, text in words.items()
        if stamp.get(key) != wanted[key]
    ]


def refresh(state: CacheState, wanted: Mapping[str, Any]) -> list[str]:
    """Make the caches fit: move the ones aside that may not be used, and write the stamp.

    The engine must not be running. Nothing is deleted: one earlier set stays beside the new one,
    below ``<cache_dir>/<fingerprint>/.aside-<time>``. A cache that is a symbolic link is moved as
    the link; what it points at is left alone.

    :returns: what was moved, one line each; nothing when the caches may be used
    """
    state.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    moved = []
    if state.reasons:
        aside = state.folder / f".aside-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        aside.mkdir()
        for name in state.filled:
            (state.folder / name).rename(aside / name)
            moved.append(f"{name} -> {aside}")
    stamp = state.folder / STAMP
    text = json.dumps(wanted, indent=2, sort_keys=True) + "\n"
    if moved or not stamp.exists() or stamp.read_text() != text:
        temporary = stamp.with_name(f".{STAMP}.new")
        temporary.write_text(text)
        temporary.replace(stamp)
    return moved
