"""An archive that may have to be made known to apt first: key, files, a look beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import apt_key
from .apt_client import Apt, overlay


@dataclass(frozen=True)
class Source:
    """One archive.

    :ivar name: for messages and the record, e.g. ``ubuntu``
    :ivar origin: the ``Origin`` of the archive's Release file, e.g. ``Ubuntu``, ``NVIDIA``
    :ivar files: apt files that make it known, path to content; none for one that the host has
    :ivar key_url: the archive's signing key; none when the host already has it
    :ivar key_path: where the key is stored, as ``Signed-By`` in the files names it
    """

    name: str
    origin: str
    files: Mapping[str, str] = field(default_factory=dict)
    key_url: str = ""
    key_fingerprint: str = ""
    key_path: str = ""


#: The same as options of an Ansible module; a path, not a key, is what ``key_path`` holds.
OPTIONS: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "required": True},
    "origin": {"type": "str", "required": True},
    "files": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "path": {"type": "str", "required": True},
            "content": {"type": "str", "required": True},
        },
    },
    "key_url": {"type": "str", "default": ""},
    "key_fingerprint": {"type": "str", "default": ""},
    "key_path": {"type": "str", "default": "", "no_log": False},
}


def from_parameters(given: Mapping[str, Any]) -> Source:
    """Make a source of what a module was given by :data:`OPTIONS`."""
    return Source(
        given["name"],
        given["origin"],
        {file["path"]: file["content"] for file in given["files"]},
        given["key_url"],
        given["key_fingerprint"],
        given["key_path"],
    )


def key_is_right(source: Source, root: Path = Path("/")) -> bool:
    """Whether the stored key is the one wanted."""
    try:
        data = (root / source.key_path.lstrip("/")).read_bytes()
        return apt_key.fingerprints(data) == [apt_key.normalise(source.key_fingerprint)]
    except (OSError, apt_key.KeyProblem):
        return False


def fetch_key(source: Source) -> bytes:
    """Fetch the archive's key and check it.

    :raises apt_key.KeyProblem: one sentence
    """
    data = apt_key.fetch(source.key_url)
    return apt_key.verified(data, source.key_fingerprint, source.key_url)


def write(root: Path, path: str, data: bytes) -> None:
    """Replace one file atomically, readable by all (apt reads keys and sources as its own user)."""
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.new")
    scratch.write_bytes(data)
    scratch.chmod(0o644)
    scratch.replace(target)


def is_set_up(source: Source, root: Path = Path("/")) -> bool:
    """Whether the host has the archive's files and key as wanted."""
    for path, content in source.files.items():
        try:
            if (root / path.lstrip("/")).read_text(encoding="utf-8") != content:
                return False
        except OSError:
            return False
    return not source.key_url or key_is_right(source, root)


def view(source: Source, apt: Apt, root: Path, stack: ExitStack) -> Apt:
    """Look at apt as if the archive were set up; its index is fetched into a scratch folder.

    :param stack: keeps the scratch folder until the caller is done
    :raises AptError, apt_key.KeyProblem: one sentence
    """
    if is_set_up(source, root):
        return apt
    key = fetch_key(source)
    preferences, sources = {}, {}
    for path, content in source.files.items():
        name = path.rsplit("/", 1)[-1]
        if "/preferences.d/" in path:
            preferences[name] = content
        else:
            sources[name] = content
    # Sources that the given view hides or has changed stay hidden or changed.
    shown = apt.option("Dir::Etc::sourceparts")
    scratch = stack.enter_context(
        overlay(preferences, sources, own_lists=True, root=root, sources_from=shown)
    )
    folder = next(o.split("=", 1)[1] for o in scratch if o.startswith("Dir::Etc::sourceparts="))
    # The key is not on the host yet: the scratch source names a scratch copy.
    key_path = Path(folder) / "scratch-key.gpg"
    key_path.write_bytes(key)
    key_path.chmod(0o644)
    for name, content in sources.items():
        (Path(folder) / name).write_text(
            content.replace(source.key_path, str(key_path)), encoding="utf-8"
        )
    looked = apt.view(scratch)
    looked.update()
    return looked
