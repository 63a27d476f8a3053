"""Patches on installed packages as data: read them, tell their state, apply and undo them.

A patch is a mapping (``stacks/patches/<name>/patch.yml``) and a unified diff. It names the package
and its versions, every file with its sha256 before and after, and what it follows. From that alone
its state on a host is decided: the file's digest says where in the chain of patches it stands, so
several patches may change one file, in the order that ``requires`` gives.

Files are replaced, never written in place: uv links them from its cache, and an edit in place would
change the cache and every other environment on the machine. A replaced file is always newer than
the one it replaces, by a second at least: ninja (FlashInfer's JIT) and Python's bytecode cache
decide by modification time, and would go on with the old kernel or the old code otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from . import unified_diff

SITE_PACKAGES = "site-packages"
_TEMP_PREFIX = ".vllm-turing-patch-"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIST_INFO = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.dist-info")


class PatchError(Exception):
    """A patch that is not well formed or cannot be applied; the text is one sentence."""


class State(StrEnum):
    """Where a patch stands on a host."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    NOT_NEEDED = "not needed"
    FOREIGN = "foreign"
    #: some of its files are patched and the others pristine: an earlier run was killed in between
    HALF_APPLIED = "half-applied"


@dataclass(frozen=True)
class PatchedFile:
    """One file of a patch: path below the root, sha256 before and after (None: does not exist)."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Patch:
    """One patch. ``root`` is ``site-packages`` or the name of a source checkout."""

    name: str
    packages: tuple[str, ...]
    versions: str
    files: tuple[PatchedFile, ...]
    reason: str
    upstream: str
    root: str = SITE_PACKAGES
    not_needed_from: str | None = None
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    commit: str | None = None
    default: bool = True
    diff: str = ""


@dataclass(frozen=True)
class FileOutcome:
    """One file of a patch on a host; ``found`` and ``want`` are sha256 (None: does not exist)."""

    path: str
    state: State
    found: str | None
    want: str | None
    message: str = ""


@dataclass(frozen=True)
class Outcome:
    """One patch on a host: its state before and now, and a sentence when something is wrong."""

    name: str
    before: State
    state: State
    package: str
    version: str
    message: str
    files: tuple[FileOutcome, ...]

    @property
    def changed(self) -> bool:
        """Whether the state is (or, when only checking, would become) another one."""
        return self.before != self.state

    @property
    def ok(self) -> bool:
        """Whether the runtime has what the patch is for."""
        return self.state in (State.PATCHED, State.NOT_NEEDED)

    def as_dict(self) -> dict[str, Any]:
        """Give the same as plain data for JSON."""
        return {
            "name": self.name,
            "before": self.before.value,
            "state": self.state.value,
            "changed": self.changed,
            "package": self.package,
            "version": self.version,
            "message": self.message,
            "files": [
                {
                    "path": file.path,
                    "state": file.state.value,
                    "found": file.found,
                    "want": file.want,
                    "message": file.message,
                }
                for file in self.files
            ],
        }


# --- reading ------------------------------------------------------------------------------------


def from_mapping(data: Mapping[str, Any], *, need_diff: bool = True) -> Patch:
    """Make a patch from the mapping of its ``patch.yml``, with the diff's text under ``diff``.

    :param need_diff: False where only the state is asked for (the check at every start)
    :raises PatchError: with one sentence per first mistake
    """
    name = data.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PatchError(f"a patch's name is lower-case letters, digits and dashes, not '{name}'")
    known = {field for field in Patch.__dataclass_fields__ if field != "packages"} | {"package"}
    unknown = sorted(set(data) - known)
    if unknown:
        raise PatchError(f"patch '{name}': unknown key '{unknown[0]}'; known: {_join(known)}")

    patch = Patch(
        name=name,
        packages=_strings(name, data, "package", required=True),
        versions=_string(name, data, "versions"),
        files=_files(name, data.get("files")),
        reason=_string(name, data, "reason", required=True),
        upstream=_string(name, data, "upstream"),
        root=_string(name, data, "root") or SITE_PACKAGES,
        not_needed_from=_string(name, data, "not_needed_from") or None,
        requires=_strings(name, data, "requires"),
        conflicts=_strings(name, data, "conflicts"),
        commit=_string(name, data, "commit") or None,
        default=data.get("default", True) is True,
        diff=_string(name, data, "diff"),
    )
    if patch.commit is not None and not _COMMIT.fullmatch(patch.commit):
        raise PatchError(f"patch '{name}': commit '{patch.commit}' is not 40 hex digits")
    try:
        matches("0", patch.versions)
        if patch.not_needed_from is not None:
            _version_key(patch.not_needed_from)
    except ValueError as error:
        raise PatchError(f"patch '{name}': {error}") from None
    if need_diff:
        _check_diff(patch)
    return patch


def _check_diff(patch: Patch) -> None:
    try:
        diffs = {diff.path: diff for diff in unified_diff.parse(patch.diff)}
    except unified_diff.DiffError as error:
        raise PatchError(f"patch '{patch.name}': {error}") from None
    listed = {file.path for file in patch.files}
    if odd := sorted(listed ^ set(diffs)):
        where = "not in its diff" if odd[0] in listed else "only in its diff"
        raise PatchError(f"patch '{patch.name}': the file '{odd[0]}' is {where}")
    for file in patch.files:
        diff = diffs[file.path]
        if diff.creates != (file.before is None) or diff.removes != (file.after is None):
            raise PatchError(
                f"patch '{patch.name}': its diff and its digests disagree"
                f" on whether '{file.path}' exists"
            )


def _files(name: str, value: object) -> tuple[PatchedFile, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise PatchError(f"patch '{name}': files is a list of {{path, before, after}}")
    files: list[PatchedFile] = []
    for entry in value:
        if not isinstance(entry, Mapping) or set(entry) != {"path", "before", "after"}:
            raise PatchError(f"patch '{name}': every file has exactly path, before and after")
        path = entry["path"]
        pure = PurePosixPath(path) if isinstance(path, str) else PurePosixPath("/")
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or str(pure) != path:
            raise PatchError(f"patch '{name}': '{path}' is not a plain path below its root")
        for side in ("before", "after"):
            digest = entry[side]
            if digest is not None and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
                raise PatchError(f"patch '{name}': {side} of '{path}' is not a sha256: '{digest}'")
        if entry["before"] == entry["after"]:
            raise PatchError(f"patch '{name}': '{path}' is the same before and after")
        if any(file.path == path for file in files):
            raise PatchError(f"patch '{name}': '{path}' is listed twice")
        files.append(PatchedFile(path, entry["before"], entry["after"]))
    return tuple(files)


def _string(name: str, data: Mapping[str, Any], key: str, *, required: bool = False) -> str:
    value = data.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value.strip()):
        raise PatchError(f"patch '{name}': {key} is a text, not '{value}'")
    return value


def _strings(
    name: str, data: Mapping[str, Any], key: str, *, required: bool = False
) -> tuple[str, ...]:
    value = data.get(key, ())
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(item, str) for item in values):
        raise PatchError(f"patch '{name}': {key} is a list of names, not '{value}'")
    if required and not values:
        raise PatchError(f"patch '{name}': {key} is missing")
    return tuple(values)


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# --- order --------------------------------------------------------------------------------------


def order(patches: Iterable[Patch]) -> list[Patch]:
    """Put patches in the order in which they are applied: what they require first.

    :raises PatchError: a requirement that is missing, a cycle, two that exclude each other, two
        that change one file without following each other
    """
    given = list(patches)
    by_name = {patch.name: patch for patch in given}
    if len(by_name) != len(given):
        twice = next(p.name for p in given if sum(q.name == p.name for q in given) > 1)
        raise PatchError(f"patch '{twice}' is listed twice")
    for patch in given:
        for name in patch.requires:
            if name not in by_name:
                raise PatchError(f"patch '{patch.name}' needs patch '{name}'; list it too")
        for name in patch.conflicts:
            if name in by_name:
                raise PatchError(
                    f"patches '{patch.name}' and '{name}' exclude each other; take one of them"
                )
    done: list[Patch] = []
    waiting = given
    while waiting:
        ready = [p for p in waiting if all(by_name[name] in done for name in p.requires)]
        if not ready:
            raise PatchError(f"patches require each other in a circle: {_join(by_name)}")
        # one at a time, so that the order given is kept wherever it can be
        done.append(ready[0])
        waiting = [patch for patch in waiting if patch is not ready[0]]
    _chains(done)
    return done


def _chains(ordered: Sequence[Patch]) -> dict[tuple[str, str], list[tuple[Patch, PatchedFile]]]:
    """For every file (root, path): the patches that change it, in order; checks that they join."""
    chains: dict[tuple[str, str], list[tuple[Patch, PatchedFile]]] = {}
    for patch in ordered:
        for file in patch.files:
            chain = chains.setdefault((patch.root, file.path), [])
            if chain and chain[-1][1].after != file.before:
                raise PatchError(
                    f"patches '{chain[-1][0].name}' and '{patch.name}' both change '{file.path}',"
                    f" but the second is not made on top of the first"
                )
            chain.append((patch, file))
    for (_root, path), chain in chains.items():
        levels = _levels(chain)
        if len(set(levels)) != len(levels):
            names = "', '".join(patch.name for patch, _file in chain)
            raise PatchError(f"patches '{names}' undo each other in '{path}'")
    return chains


def _levels(chain: Sequence[tuple[Patch, PatchedFile]]) -> list[str | None]:
    """Digests of a file with no, one, two … of its patches applied."""
    return [chain[0][1].before, *(file.after for _patch, file in chain)]


# --- state --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A package as found under its root."""

    package: str
    version: str
    problem: str = ""
    not_needed: bool = False


def states(patches: Iterable[Patch], roots: Mapping[str, str | Path]) -> list[Outcome]:
    """Tell where every patch stands, reading only.

    :param roots: folder of ``site-packages`` and of each source checkout by its name
    :raises PatchError: the patches do not fit each other, or a root is not named or not there
    """
    ordered = order(patches)
    found = {patch.name: _find(patch, _root(patch, roots)) for patch in ordered}
    needed = [patch for patch in ordered if not found[patch.name].not_needed]
    chains = _chains(needed)
    contents: dict[tuple[str, str], tuple[str | None, str]] = {}
    for root, path in chains:
        contents[root, path] = _digest(Path(roots[root]) / path)
    return [_outcome(patch, found[patch.name], roots, chains, contents) for patch in ordered]


def _outcome(
    patch: Patch,
    found: _Found,
    roots: Mapping[str, str | Path],
    chains: Mapping[tuple[str, str], Sequence[tuple[Patch, PatchedFile]]],
    contents: Mapping[tuple[str, str], tuple[str | None, str]],
) -> Outcome:
    if found.not_needed:
        state = State.NOT_NEEDED
        return Outcome(patch.name, state, state, found.package, found.version, "", ())
    files: list[FileOutcome] = []
    for file in patch.files:
        chain = chains[patch.root, file.path]
        digest, problem = contents[patch.root, file.path]
        path = Path(roots[patch.root]) / file.path
        levels = _levels(chain)
        position = [entry.name for entry, _file in chain].index(patch.name) + 1
        if not problem and digest in levels:
            state = State.PATCHED if levels.index(digest) >= position else State.PRISTINE
        else:
            state = State.FOREIGN
            problem = problem or _explain(path, file.path, digest, patch)
        files.append(FileOutcome(str(path), state, digest, file.after, problem))
    kinds = {file.state for file in files}
    if found.problem:
        state, message = State.FOREIGN, found.problem
    elif State.FOREIGN in kinds:
        state = State.FOREIGN
        message = next(file.message for file in files if file.state is State.FOREIGN)
    elif len(kinds) > 1:
        state = State.HALF_APPLIED
        some = next(file.path for file in files if file.state is State.PATCHED)
        other = next(file.path for file in files if file.state is State.PRISTINE)
        message = f"'{some}' is patched and '{other}' is not; apply it again to complete it"
    else:
        state, message = kinds.pop(), ""
    message = f"patch '{patch.name}': {message}" if message else ""
    return Outcome(patch.name, state, state, found.package, found.version, message, tuple(files))


def _explain(path: Path, relative: str, digest: str | None, patch: Patch) -> str:
    """Say what is odd about a file that is neither the released nor the patched one."""
    mend = f"reinstall {patch.packages[0]}" if patch.root == SITE_PACKAGES else "check it out again"
    if digest is None:
        return f"'{path}' does not exist; {mend} and apply the patch again"
    detail = ""
    if patch.diff:
        content = path.read_bytes()
        diff = next((d for d in unified_diff.parse(patch.diff) if d.path == relative), None)
        if diff is not None:
            new, old = unified_diff.hunks_in_place(content, diff)
            if new and old:
                detail = f"half-applied: {new} of {len(diff.hunks)} hunks are in place; "
            elif new == len(diff.hunks):
                detail = "the change is in place, but something else was edited too; "
    return (
        f"'{path}' is neither the released file nor the patched one"
        f" ({detail}sha256 '{digest[:16]}…'); {mend} and apply the patch again"
    )


def _root(patch: Patch, roots: Mapping[str, str | Path]) -> Path:
    if patch.root not in roots:
        raise PatchError(f"patch '{patch.name}' needs the folder '{patch.root}'; name it in roots")
    path = Path(roots[patch.root])
    if not path.is_dir():
        raise PatchError(f"patch '{patch.name}': there is no folder '{path}' ({patch.root})")
    return path


def _find(patch: Patch, root: Path) -> _Found:
    """Find the package under its root, and what is wrong with it."""
    if patch.root != SITE_PACKAGES:
        commit = checkout_commit(root)
        if patch.commit and commit and commit != patch.commit:
            problem = f"'{root}' is at commit '{commit}', the patch is for '{patch.commit}'"
            return _Found(patch.packages[0], commit, problem)
        return _Found(patch.packages[0], commit)
    wanted = {_normalise(name): name for name in patch.packages}
    there: list[tuple[str, str]] = []
    for entry in sorted(path.name for path in root.iterdir()):
        match = _DIST_INFO.fullmatch(entry)
        if match and _normalise(match["name"]) in wanted:
            there.append((wanted[_normalise(match["name"])], match["version"]))
    if not there:
        names = "' or '".join(patch.packages)
        return _Found(patch.packages[0], "", f"'{names}' is not installed in '{root}'")
    package, version = there[0]
    if len(there) > 1:
        both = " and ".join(f"'{name} {number}'" for name, number in there)
        return _Found(package, version, f"'{root}' holds {both}; make the environment anew")
    try:
        if patch.not_needed_from and _version_key(version) >= _version_key(patch.not_needed_from):
            return _Found(package, version, not_needed=True)
        fits = matches(version, patch.versions)
    except ValueError as error:
        return _Found(package, version, f"{package}: {error}")
    if not fits:
        problem = f"is for {package} {patch.versions}, but '{version}' is installed in '{root}'"
        return _Found(package, version, problem)
    return _Found(package, version)


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _digest(path: Path) -> tuple[str | None, str]:
    """Give a file's sha256 (None: does not exist), and what is wrong with it as a file."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, f"'{path}' cannot be read ({error.strerror})"
    if not stat.S_ISREG(status.st_mode):
        return None, f"'{path}' is not a plain file (a link or a folder); make it one"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest(), ""
    except OSError as error:
        return None, f"'{path}' cannot be read ({error.strerror})"


def checkout_commit(root: Path) -> str:
    """Give the commit that a git checkout stands at, without git; empty if it is none."""
    git = root / ".git"
    with contextlib.suppress(OSError):
        if git.is_file():  # a worktree: "gitdir: PATH"
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head if _COMMIT.fullmatch(head) else ""
        ref = head.removeprefix("ref:").strip()
        if (git / ref).is_file():
            return (git / ref).read_text().strip()
        for line in (git / "packed-refs").read_text().splitlines():
            commit, _, name = line.partition(" ")
            if name == ref:
                return commit
    return ""


# --- versions -----------------------------------------------------------------------------------


def matches(version: str, specifiers: str) -> bool:
    """Whether a version is in a range like ``>=0.24.0,<0.25`` (empty: any).

    The subset of PEP 440 that patches need; a local tag (``+cu129``) does not count.

    :raises ValueError: the version or the range cannot be read
    """
    result = True
    for part in (item.strip() for item in specifiers.split(",")):
        if not part:
            continue
        match = re.fullmatch(r"(==|!=|>=|<=|>|<)\s*(\S+)", part)
        if match is None:
            raise ValueError(f"'{part}' is no version range; write it like '>=0.24.0,<0.25'")
        have, want = _version_key(version), _version_key(match[2])
        result &= {
            "==": have == want,
            "!=": have != want,
            ">=": have >= want,
            "<=": have <= want,
            ">": have > want,
            "<": have < want,
        }[match[1]]
    return result


def _version_key(version: str) -> tuple[tuple[int, ...], int, int]:
    """Make a key that sorts versions: release without trailing zeros, then dev/pre/final/post."""
    public = version.partition("+")[0]
    match = re.fullmatch(
        r"(\d+(?:\.\d+)*)(?:[.-]?(dev|a|b|rc|post)(\d*))?(?:\.dev(\d+))?", public.lower()
    )
    if match is None:
        raise ValueError(f"'{version}' is no version number")
    release = [int(number) for number in match[1].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    kind = match[2] or "final"
    rank = {"dev": 0, "a": 1, "b": 2, "rc": 3, "final": 4, "post": 5}[kind]
    return tuple(release), rank, int(match[3] or 0)


# --- change -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    path: Path
    before: bytes | None
    after: bytes | None


def apply_all(
    patches: Iterable[Patch], roots: Mapping[str, str | Path], *, check: bool = False
) -> list[Outcome]:
    """Apply patches, all or none of them.

    Every new content is made and its digest compared before the first file is touched; if a
    replacement fails after that, those already made are taken back.

    :param check: only tell what would be
    :raises PatchError: the sentence of the first patch that cannot be applied; nothing was changed
    """
    return _bring(patches, roots, State.PATCHED, check=check)


def revert_all(
    patches: Iterable[Patch], roots: Mapping[str, str | Path], *, check: bool = False
) -> list[Outcome]:
    """Undo patches, all or none of them: the counterpart of :func:`apply_all`."""
    return _bring(patches, roots, State.PRISTINE, check=check)


def file_changes(
    patches: Iterable[Patch], roots: Mapping[str, str | Path], *, revert: bool = False
) -> list[tuple[str, bytes | None, bytes | None]]:
    """List the files that applying (or undoing) would change, with both contents."""
    given = list(patches)
    changes = _changes(given, states(given, roots), roots, revert=revert)
    return [(str(change.path), change.before, change.after) for change in changes]


def _bring(
    patches: Iterable[Patch], roots: Mapping[str, str | Path], wanted: State, *, check: bool
) -> list[Outcome]:
    given = list(patches)
    before = states(given, roots)
    changes = _changes(given, before, roots, revert=wanted is State.PRISTINE)
    if check:
        return [
            old if old.state is State.NOT_NEEDED else replace(old, state=wanted, message="")
            for old in before
        ]
    if not changes:
        return before
    _replace_all(changes)
    after = {outcome.name: outcome for outcome in states(given, roots)}
    return [replace(after[old.name], before=old.state) for old in before]


def _changes(
    given: Sequence[Patch],
    current: Sequence[Outcome],
    roots: Mapping[str, str | Path],
    *,
    revert: bool,
) -> list[_Change]:
    """Make what has to be written so that all (or none) of the patches are there."""
    for outcome in current:
        if outcome.state is State.FOREIGN:
            raise PatchError(outcome.message)
    not_needed = {o.name for o in current if o.state is State.NOT_NEEDED}
    needed = [patch for patch in order(given) if patch.name not in not_needed]
    diffs = {
        (patch.name, diff.path): diff for patch in needed for diff in unified_diff.parse(patch.diff)
    }
    changes: list[_Change] = []
    for (root, relative), chain in _chains(needed).items():
        path = Path(roots[root]) / relative
        content = path.read_bytes() if path.exists() else None
        levels = _levels(chain)
        level = levels.index(_sha256(content))
        steps = chain[:level][::-1] if revert else chain[level:]
        new = content
        for patch, file in steps:
            diff = diffs[patch.name, relative]
            want = file.before if revert else file.after
            try:
                new = unified_diff.apply(new, diff.reversed() if revert else diff)
            except unified_diff.DiffError as error:
                raise PatchError(f"patch '{patch.name}': {error}") from None
            if _sha256(new) != want:
                raise PatchError(
                    f"patch '{patch.name}': its diff does not give the sha256 '{want}'"
                    f" that it names for '{relative}'"
                )
        if steps:
            changes.append(_Change(path, content, new))
    return changes


def _sha256(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _replace_all(changes: Sequence[_Change]) -> None:
    """Replace files, all or none."""
    staged: list[tuple[_Change, Path | None]] = []
    done: list[_Change] = []
    try:
        for change in changes:
            staged.append((change, _stage(change.path, change.after)))
        for change, temporary in staged:
            _put(change.path, temporary)
            done.append(change)
    except OSError as error:
        for change in reversed(done):
            _put(change.path, _stage(change.path, change.before))
        where = error.filename or ""
        raise PatchError(
            f"'{where}' cannot be written ({error.strerror}); nothing was changed"
        ) from None
    finally:
        for _change, temporary in staged:
            if temporary is not None:
                temporary.unlink(missing_ok=True)


def _stage(path: Path, content: bytes | None) -> Path | None:
    """Write the new content beside the file, with its mode and owner and a newer time."""
    if content is None:
        return None
    old = path.stat() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{_TEMP_PREFIX}*"):
        if time.time() - left.stat().st_mtime > 3600:  # of a run that was killed
            left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(prefix=_TEMP_PREFIX, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(stat.S_IMODE(old.st_mode) if old else 0o644)
        if old is not None:
            now = temporary.stat()
            if (old.st_uid, old.st_gid) != (now.st_uid, now.st_gid):
                os.chown(temporary, old.st_uid, old.st_gid)
            newest = max(now.st_mtime_ns, (int(old.st_mtime) + 1) * 10**9)
            os.utime(temporary, ns=(newest, newest))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _put(path: Path, temporary: Path | None) -> None:
    if temporary is None:
        path.unlink(missing_ok=True)
    else:
        temporary.replace(path)
