"""Which bytes a model consists of: the lock file.

A lock names a repository, one commit of it and, for every file, its size and sha256. Bytes are
compared with the lock and never with what a mirror says about itself, so a mirror has to be
reachable but need not be trusted.

A lock that was just made from a listing may lack the sha256 of small files: the Hub gives only
their git blob id. That is completed when the files are there and agree with the blob id.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

_SHA256 = re.compile("[0-9a-f]{64}")
_SHA1 = re.compile("[0-9a-f]{40}")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelError(Exception):
    """The model cannot be had; the text says why, where and what to do, in one sentence.

    :ivar permanent: trying again without a change by a person cannot help
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        """Keep the sentence and whether a later try can help."""
        super().__init__(message)
        self.permanent = permanent


@dataclass(frozen=True)
class LockedFile:
    """One file: size in bytes, sha256, and git's id of its content where the Hub gave one."""

    size: int
    sha256: str | None
    blob_id: str | None = None

    @property
    def key(self) -> str:
        """A name for the content, independent of repository and file name."""
        return self.sha256 or f"blob-{self.blob_id}"


@dataclass(frozen=True)
class Lock:
    """One revision of one repository.

    :ivar revision: what was asked for when the lock was made, such as ``main``
    """

    repo: str
    commit: str
    files: Mapping[str, LockedFile]
    revision: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files.values())

    @property
    def complete(self) -> bool:
        """Whether every file has its sha256."""
        return all(file.sha256 for file in self.files.values())

    def with_digests(self, digests: Mapping[str, str]) -> Lock:
        """Return the lock with the sha256 of files that lacked it."""
        files = {
            path: file if file.sha256 else replace(file, sha256=digests.get(path))
            for path, file in self.files.items()
        }
        return replace(self, files=files)

    def dump(self) -> str:
        """Return the lock as the text of a lock file: sorted, so that a change reads well."""
        files: dict[str, dict[str, Any]] = {}
        for path, file in sorted(self.files.items()):
            files[path] = {"size": file.size, "sha256": file.sha256}
            if file.blob_id:
                files[path]["blob_id"] = file.blob_id
        value = {
            "repo": self.repo,
            "revision": self.revision,
            "commit": self.commit,
            "files": files,
        }
        return json.dumps(value, indent=2) + "\n"


def parse(text: str, where: str) -> Lock:
    """Read a lock file.

    :param where: the file's name, for messages
    :raises ModelError: anything in it that is not as it must be; permanent
    """

    def wrong(what: str) -> ModelError:
        return ModelError(f"the model lock '{where}' {what}", permanent=True)

    try:
        data = json.loads(text)
    except ValueError as error:
        raise wrong(f"is not JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("files"), dict):
        raise wrong("must be a mapping with 'repo', 'commit' and 'files'")
    repo, commit = data.get("repo"), data.get("commit")
    if not isinstance(repo, str) or not _REPO.fullmatch(repo):
        raise wrong(f"has repo {repo!r}, which must be 'owner/name'")
    if not isinstance(commit, str) or not _SHA1.fullmatch(commit):
        raise wrong(f"has commit {commit!r}, which must be 40 hexadecimal digits")
    if not data["files"]:
        raise wrong("names no file")
    files: dict[str, LockedFile] = {}
    for path, entry in data["files"].items():
        problem = path_problem(path)
        if problem:
            raise wrong(f"names the file {path!r}, which {problem}")
        if not isinstance(entry, dict):
            raise wrong(f"has no size and sha256 for '{path}'")
        size, sha256, blob = entry.get("size"), entry.get("sha256"), entry.get("blob_id")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise wrong(f"has size {size!r} for '{path}', which must be a number of bytes")
        if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
            raise wrong(f"has sha256 {sha256!r} for '{path}', which must be 64 hexadecimal digits")
        if blob is not None and not (isinstance(blob, str) and _SHA1.fullmatch(blob)):
            raise wrong(f"has blob_id {blob!r} for '{path}', which must be 40 hexadecimal digits")
        if sha256 is None and blob is None:
            raise wrong(f"has neither sha256 nor blob_id for '{path}'")
        files[path] = LockedFile(size, sha256, blob)
    return Lock(repo, commit, files, str(data.get("revision") or ""))


def load(file: Path) -> Lock | None:
    """Read a lock file; None when there is none.

    :raises ModelError: it cannot be read or is not a lock
    """
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"the model lock '{file}' cannot be read: {error}", permanent=True
        ) from error
    return parse(text, str(file))


def path_problem(path: str) -> str:
    """Return why a path from outside cannot be a file of a model, or ""."""
    parts = PurePosixPath(path).parts
    if not path or path != path.strip() or "\\" in path or "\0" in path or "\n" in path:
        return "is not a plain relative path"
    if not parts or path.startswith("/") or ".." in parts or str(PurePosixPath(path)) != path:
        return "leads out of the model's folder or is not in its shortest form"
    return ""


def write_atomically(file: Path, text: str, mode: int = 0o644, *, sync: bool = True) -> None:
    """Replace a file's content so that a reader sees either the old or the new text.

    :param sync: have it survive a power cut too; without, only the death of this process
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.part")
    with draft.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        if sync:
            os.fsync(stream.fileno())
    draft.chmod(mode)
    draft.replace(file)


def file_digests(file: Path, blob: bool = False) -> tuple[str, str]:
    """Return the sha256 of a file and, if asked for, its git blob id (else "").

    ``hashlib`` reads at the speed of one core with SHA instructions (1.7 GB/s measured), about
    four times what ``sha256sum`` of Debian 12 reaches.
    """
    sha256 = hashlib.sha256()
    sha1 = hashlib.sha1(usedforsecurity=False)
    buffer = memoryview(bytearray(1 << 20))
    with file.open("rb", buffering=0) as stream:
        if blob:
            sha1.update(b"blob %d\0" % os.fstat(stream.fileno()).st_size)
        while count := stream.readinto(buffer):
            sha256.update(buffer[:count])
            if blob:
                sha1.update(buffer[:count])
    return sha256.hexdigest(), sha1.hexdigest() if blob else ""


def mismatch(file: Path, locked: LockedFile) -> str:
    """Compare a file's content with the lock; return what differs in words, or "" for equal."""
    size = file.stat().st_size
    if size != locked.size:
        return f"has {size} bytes and not {locked.size}"
    sha256, blob = file_digests(file, blob=locked.sha256 is None)
    if locked.sha256 is not None and sha256 != locked.sha256:
        return f"has sha256 {sha256} and not {locked.sha256}"
    if locked.sha256 is None and blob != locked.blob_id:
        return f"has git blob id {blob} and not {locked.blob_id}"
    return ""
