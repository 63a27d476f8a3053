"""Bring a list of folders, files, links and absences to the wanted state in one go.

The same list serves a host (``root="/"``) and ``playbooks/render.yml`` (``root`` is a folder),
so that what is rendered is what is installed.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ManagedFilesError(Exception):
    """A wish that cannot be fulfilled, in one sentence."""


@dataclass
class Outcome:
    """What changed (or would change, in check mode).

    :ivar changed_paths: paths as on the host, in the order of the wish
    :ivar diffs: entries in the form of Ansible's diff mode
    """

    changed_paths: list[str] = field(default_factory=list)
    diffs: list[dict[str, str]] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether anything differed from the wish."""
        return bool(self.changed_paths)

    def add(self, path: str, before: str, after: str) -> None:
        """Record one difference."""
        if path not in self.changed_paths:
            self.changed_paths.append(path)
        self.diffs.append(
            {"before_header": path, "after_header": path, "before": before, "after": after}
        )


class _Target:
    """One root folder and the rule of whether owners count there."""

    def __init__(self, root: str, check_mode: bool) -> None:
        self.root = Path(root)
        self.check_mode = check_mode
        #: Owners are the host's own; in a rendered tree everything belongs to whoever renders.
        self.owners_count = self.root == Path("/")

    def path(self, host_path: str) -> Path:
        if not host_path.startswith("/"):
            raise ManagedFilesError(f"path {host_path!r} is not absolute; write it from '/' on")
        return self.root / host_path.lstrip("/")

    def owner_ids(self, wish: Mapping[str, Any], host_path: str) -> tuple[int, int] | None:
        if not self.owners_count:
            return None
        owner, group = wish.get("owner") or "root", wish.get("group") or "root"
        try:
            return pwd.getpwnam(owner).pw_uid, grp.getgrnam(group).gr_gid
        except KeyError:
            if self.check_mode:
                return None  # the account is made by an earlier task, which check mode did not run
            raise ManagedFilesError(
                f"{host_path}: there is no account {owner!r} with group {group!r}; "
                "create it before its files"
            ) from None


def apply(
    *,
    root: str = "/",
    directories: Iterable[Mapping[str, Any]] = (),
    files: Iterable[Mapping[str, Any]] = (),
    links: Iterable[Mapping[str, Any]] = (),
    absent: Iterable[str] = (),
    check_mode: bool = False,
) -> Outcome:
    """Compare the wish with what is there and, unless ``check_mode``, make it so.

    :param root: the folder that stands for ``/``
    :param directories: ``path``, ``mode``, ``owner``, ``group``
    :param files: ``path``, ``content``, ``mode``, ``owner``, ``group``, ``sensitive``
    :param links: ``path``, ``target``
    :param absent: paths of files or links to remove; a folder is removed only when it is empty
    :param check_mode: compare only
    :raises ManagedFilesError: something else is in the way, or an account does not exist
    """
    target = _Target(root, check_mode)
    outcome = Outcome()
    for wish in directories:
        _directory(target, wish, outcome)
    for wish in files:
        _file(target, wish, outcome)
    for wish in links:
        _link(target, wish, outcome)
    for host_path in absent:
        _absent(target, host_path, outcome)
    return outcome


def _attributes(path: Path) -> tuple[int, int, int]:
    """Return mode, uid and gid of what a path leads to."""
    info = path.stat()
    return stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid


def _mode(wish: Mapping[str, Any], default: str) -> int:
    text = str(wish.get("mode") or default)
    try:
        return int(text, 8)
    except ValueError:
        raise ManagedFilesError(
            f"{wish.get('path')}: mode {text!r} is not octal; write it like '0644'"
        ) from None


def _describe(mode: int, ids: tuple[int, int] | None) -> str:
    owner = "" if ids is None else f" uid={ids[0]} gid={ids[1]}"
    return f"mode={mode:04o}{owner}\n"


def _set_attributes(
    path: Path,
    host_path: str,
    mode: int,
    ids: tuple[int, int] | None,
    target: _Target,
    out: Outcome,
) -> None:
    """Bring mode and owner of an existing path to the wish."""
    now_mode, uid, gid = _attributes(path)
    now_ids = None if ids is None else (uid, gid)
    if now_mode == mode and now_ids == ids:
        return
    out.add(host_path, _describe(now_mode, now_ids), _describe(mode, ids))
    if target.check_mode:
        return
    if ids is not None:
        os.chown(path, *ids)
    path.chmod(mode)


def _directory(target: _Target, wish: Mapping[str, Any], out: Outcome) -> None:
    host_path = str(wish["path"])
    path, mode, ids = target.path(host_path), _mode(wish, "0755"), target.owner_ids(wish, host_path)
    if path.is_dir():
        _set_attributes(path, host_path, mode, ids, target, out)
        return
    if path.exists() or path.is_symlink():
        raise ManagedFilesError(f"{host_path} is wanted as a folder but is a file; move it away")
    out.add(host_path, "absent\n", "directory " + _describe(mode, ids))
    if not target.check_mode:
        path.mkdir(parents=True)
        if ids is not None:
            os.chown(path, *ids)
        path.chmod(mode)


def _file(target: _Target, wish: Mapping[str, Any], out: Outcome) -> None:
    host_path = str(wish["path"])
    path, mode, ids = target.path(host_path), _mode(wish, "0644"), target.owner_ids(wish, host_path)
    content = str(wish["content"])
    if path.is_dir():
        raise ManagedFilesError(f"{host_path} is wanted as a file but is a folder; move it away")
    before = path.read_text(errors="replace") if path.is_file() else None
    if before == content and not path.is_symlink():
        _set_attributes(path, host_path, mode, ids, target, out)
        return
    hidden = bool(wish.get("sensitive"))
    out.add(
        host_path,
        "" if before is None else "(content hidden)\n" if hidden else before,
        "(new content hidden)\n" if hidden else content,
    )
    if target.check_mode:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the file and renamed over it: nobody ever sees half a file.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if ids is not None:
            os.chown(temporary, *ids)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _link(target: _Target, wish: Mapping[str, Any], out: Outcome) -> None:
    host_path, wanted = str(wish["path"]), str(wish["target"])
    path = target.path(host_path)
    now = str(path.readlink()) if path.is_symlink() else None
    if now == wanted:
        return
    if now is None and path.exists():
        raise ManagedFilesError(
            f"{host_path} is wanted as a link to {wanted!r} but something else is there; "
            "move it away"
        )
    out.add(host_path, "absent\n" if now is None else f"-> {now}\n", f"-> {wanted}\n")
    if target.check_mode:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(wanted)
    temporary.replace(path)


def _absent(target: _Target, host_path: str, out: Outcome) -> None:
    path = target.path(host_path)
    if not path.exists() and not path.is_symlink():
        return
    if path.is_dir() and not path.is_symlink():
        if any(path.iterdir()):
            raise ManagedFilesError(f"{host_path} is to be removed but the folder is not empty")
        out.add(host_path, "directory\n", "absent\n")
        if not target.check_mode:
            path.rmdir()
        return
    out.add(host_path, "present\n", "absent\n")
    if not target.check_mode:
        path.unlink()
