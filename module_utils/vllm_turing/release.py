"""Releases on the host: build one beside the running one, select one, remove old ones.

A release is ``<prefix>/releases/<fingerprint>/`` with ``venv/``, ``src/``, ``stack/`` (what it was
built from) and ``release.json``, which is written last: without it the folder is the rest of a
build that broke off, and the next build removes it. The venv is made under its final path, since a
venv cannot be moved. ``<prefix>/current`` and ``<prefix>/previous`` are symbolic links.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import coherence, distributions, packages, wheel_patch
from .run import Result, Runner, run

#: The mark of a complete release.
MARK = "release.json"
_TRASH = ".trash-"


class ReleaseError(Exception):
    """A release cannot be built or selected.

    The text is one sentence; ``details`` holds the last lines of the program that failed.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        """Keep the sentence and what the failing program said."""
        super().__init__(message)
        self.details = list(details)


@dataclass(frozen=True)
class Release:
    """One release of one host.

    :ivar prefix: ``vllm_host_prefix``
    :ivar fingerprint: its name
    """

    prefix: Path
    fingerprint: str

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.prefix / "releases" / self.fingerprint

    @property
    def venv(self) -> Path:
        """Its Python environment."""
        return self.path / "venv"

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.venv / "bin/python"

    @property
    def packages(self) -> Path:
        """The folder of its installed packages.

        :raises ReleaseError: the environment is broken or absent
        """
        found = distributions.site_packages(self.venv)
        if found is None:
            raise ReleaseError(f"{str(self.venv)!r} has no site-packages; run the playbook again")
        return found

    @property
    def complete(self) -> bool:
        """Whether it was built to the end."""
        return (self.path / MARK).is_file()

    def stack(self) -> dict[str, Any]:
        """Return the data of the stack it is built from.

        :raises ReleaseError: the file is absent or not JSON
        """
        return _read_json(self.path / "stack/stack.json")

    def mark(self) -> dict[str, Any]:
        """Return the completion mark.

        :raises ReleaseError: the file is absent or not JSON
        """
        return _read_json(self.path / MARK)

    def roots(self, stack: Mapping[str, Any]) -> dict[str, Path]:
        """Return the folders that patches are relative to, by the name patches use."""
        sources = {
            str(entry["name"]): self.path / "src" / entry["name"] for entry in stack["sources"]
        }
        return {wheel_patch.SITE_PACKAGES: self.packages, **sources}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReleaseError(
            f"{str(path)!r} cannot be read ({error}); run the playbook again"
        ) from None
    if not isinstance(content, dict):
        raise ReleaseError(f"{str(path)!r} is not a mapping; run the playbook again")
    return content


# --- what is there -----------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a host has of one release.

    :ivar complete: built to the end
    :ivar current: the release that is selected, by fingerprint; empty for none
    :ivar previous: the release selected before, or empty
    :ivar damage: what no longer is as it was built, one sentence each
    :ivar needs: ``nothing``, ``patch`` (patched files were replaced) or ``build``
    """

    complete: bool
    current: str
    previous: str
    damage: tuple[str, ...] = ()
    needs: str = "build"


def selected(prefix: Path, link: str) -> str:
    """Return the fingerprint that ``current`` or ``previous`` names; empty for none."""
    try:
        return (prefix / link).readlink().name
    except OSError:
        return ""


def probe(release: Release) -> State:
    """Tell what is to be done for a release; reads only, and starts no program.

    :param release: the wanted release
    """
    current, previous = (selected(release.prefix, link) for link in ("current", "previous"))
    if not release.complete:
        return State(False, current, previous)
    mark = release.mark()
    if not os.access(release.python, os.X_OK):
        broken = f"{str(release.python)!r} does not run: the Python it was made from is gone"
        return State(True, current, previous, (broken,), "build")
    damage = tuple(patched_problems(release, mark))
    return State(True, current, previous, damage, "patch" if damage else "nothing")


def patched_problems(release: Release, mark: Mapping[str, Any]) -> list[str]:
    """Compare every patched file with the digest recorded when it was patched."""
    found = []
    for entry in mark["patched"]:
        path = release.path / entry["path"]
        digest = distributions.sha256(path)
        if digest != entry["sha256"]:
            state = "is missing" if digest is None else "is not as patched"
            found.append(f"{str(path)!r} {state} (patch {', '.join(entry['patches'])})")
    return found


@contextlib.contextmanager
def locked(prefix: Path) -> Iterator[None]:
    """Hold the lock that keeps two runs from building on one host at the same time.

    :raises ReleaseError: another run holds it
    """
    folder = prefix / "releases"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReleaseError(
                f"another run is building below {str(folder)!r}; wait until it has ended"
            ) from None
        yield
    finally:
        os.close(descriptor)


# --- building, piece by piece ------------------------------------------------------------------


@dataclass(frozen=True)
class Builder:
    """The pieces of one build, in the order they are called in.

    :ivar release: what is built
    :ivar uv: path of the uv program
    :ivar indexes: how packages are found
    :ivar timeout: seconds that one program may take
    """

    release: Release
    uv: str
    indexes: packages.Indexes = field(default_factory=packages.Indexes)
    timeout: float = 10800.0
    runner: Runner = run

    def prepare(self, files: Mapping[str, str], python: str) -> None:
        """Start anew: remove what broke off, write the stack's files, make the empty venv.

        :param files: content by path below ``stack/``
        :param python: interpreter asked for, a path or a version; empty for the stack's own
        :raises ReleaseError: no accepted Python, or uv cannot make a venv
        """
        remove_unfinished(self.release.prefix)
        discard(self.release.path)
        stack = json.loads(files["stack.json"])
        interpreter = find_python(python, stack["python"], stack["name"], self.runner)
        for name, content in files.items():
            path = self.release.path / "stack" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        self._uv(["venv", "--no-project", "--python", interpreter, str(self.release.venv)])

    def install(self, *, require_hashes: bool) -> list[str]:
        """Install the stack's packages.

        :param require_hashes: refuse packages whose hash is not known beforehand
        :returns: what was recorded for the first time, one line a package
        :raises ReleaseError: uv failed, or a hash is unknown and required
        """
        stack = self.release.stack()
        lock = self.release.path / "stack" / stack["lock"]["file"]
        self._install(["--require-hashes", "--requirement", str(lock)], self.indexes.public())
        if not stack["held"]:
            return []
        held = packages.HeldPackages(self.release.prefix / "held", stack, lock.read_text())
        recorded: list[str] = []
        if not held.path.is_file():
            if require_hashes:
                names = ", ".join(entry["name"] for entry in stack["held"])
                raise ReleaseError(
                    f"vllm_runtime_require_hashes is true but no hash is known for {names} of "
                    f"stack {stack['name']!r}; set it to false for the first installation"
                )
            resolved = self._resolve_held(held)
            recorded = held.record(resolved)
        text = held.path.read_text()
        with_hash, without = packages.split_by_hash(text)
        requirement = self.release.path / "stack/held.txt"
        if with_hash:
            requirement.write_text(with_hash)
            self._install(
                ["--require-hashes", "--requirement", str(requirement)], self.indexes.all()
            )
        if without:
            self._install(without, self.indexes.all())
            held.hold_contents(self.release.packages, without)
        requirement.write_text(text)
        return recorded

    def _resolve_held(self, held: packages.HeldPackages) -> str:
        folder = self.release.path / "stack/resolve"
        folder.mkdir(exist_ok=True)
        argv = held.resolution(folder, self.indexes, str(self.release.python))
        return self._uv(argv, env=self.indexes.public_environment()).stdout

    def _install(self, what: Sequence[str], where: Sequence[str]) -> None:
        argv = ["pip", "install", "--python", str(self.release.python), "--no-deps", *where, *what]
        self._uv(argv, env=self.indexes.public_environment())

    def _uv(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Result:
        full = {
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_NO_PROGRESS": "1",
            # Two hosts of one lab share a cache: the second waits for the first's large wheels.
            "UV_LOCK_TIMEOUT": f"{self.timeout:.0f}",
            # uv's own 30 s without a byte is too little for a slow international link.
            "UV_HTTP_TIMEOUT": "120",
            **(env or {}),
        }
        result = self.runner([self.uv, *argv], timeout=self.timeout, env=full)
        if not result.ok:
            name = self.release.stack()["name"] if argv[0] != "venv" else self.release.fingerprint
            raise ReleaseError(*packages.condense(result, name))
        return result

    def checkout(self, sources: Sequence[Mapping[str, str]]) -> list[str]:
        """Check out every source at its commit.

        :param sources: ``name``, ``url``, ``commit``
        :returns: one line a source
        :raises ReleaseError: git cannot get the commit
        """
        for source in sources:
            self._checkout(source)
        return [f"{source['name']} {source['commit']}" for source in sources]

    def _checkout(self, source: Mapping[str, str]) -> None:
        folder = self.release.path / "src" / source["name"]
        discard(folder)
        folder.mkdir(parents=True)
        commit = source["commit"]
        self._git(folder, source, ["init", "--quiet"])
        self._git(folder, source, ["remote", "add", "origin", source["url"]])
        shallow = ["fetch", "--quiet", "--depth", "1", "origin", commit]
        if not self._run_git(folder, shallow).ok:
            # A server that gives no single commit (plain files over HTTP): everything, then.
            self._git(folder, source, ["fetch", "--quiet", "--tags", "origin"])
        self._git(folder, source, ["checkout", "--quiet", "--detach", commit])
        head = self._git(folder, source, ["rev-parse", "HEAD"]).stdout.strip()
        if head != commit:
            raise ReleaseError(f"{source['url']!r} gave {head!r} where {commit!r} was asked for")

    def _run_git(self, folder: Path, argv: Sequence[str]) -> Result:
        # A transfer that stands still for a minute ends with git's own words.
        options = ["-c", "http.lowSpeedLimit=1", "-c", "http.lowSpeedTime=60"]
        command = ["git", "-C", str(folder), "-c", "advice.detachedHead=false", *options, *argv]
        return self.runner(command, timeout=self.timeout, env={"GIT_TERMINAL_PROMPT": "0"})

    def _git(self, folder: Path, source: Mapping[str, str], argv: Sequence[str]) -> Result:
        result = self._run_git(folder, argv)
        if not result.ok:
            lines = _tail(result)
            raise ReleaseError(
                f"git cannot get {source['name']} {source['commit'][:12]} from {source['url']!r} "
                f"({result.error or (lines[-1] if lines else result.rc)}); check "
                "vllm_host_mirror_git and that the repository has the commit",
                lines,
            )
        return result

    def patch(self, *, check: bool = False) -> list[wheel_patch.Outcome]:
        """Apply the stack's patches, all or nothing.

        :param check: only tell what would be done
        :raises ReleaseError: a patch fits neither the pristine nor the patched file
        """
        stack = self.release.stack()
        try:
            return wheel_patch.apply_all(
                self.patches(stack), self.release.roots(stack), check=check
            )
        except wheel_patch.PatchError as error:
            raise ReleaseError(str(error)) from None

    def patches(self, stack: Mapping[str, Any]) -> list[wheel_patch.Patch]:
        """Return the stack's patches as they lie in the release."""
        folder = self.release.path / "stack/patches"
        return [
            wheel_patch.from_mapping(_read_json(folder / f"{name}.json"))
            for name in stack["patches"]
        ]

    def complete(self, cuda_home: str = "") -> dict[str, Any]:
        """Check that all parts belong together and write the completion mark.

        :param cuda_home: folder of the toolkit that compiles at run time; empty to leave that out
        :returns: the mark
        :raises ReleaseError: a part does not belong, named
        """
        stack = self.release.stack()
        toolkit = coherence.toolkit(cuda_home, self.runner) if cuda_home and stack["cuda"] else None
        found = coherence.problems(self.release.packages, stack, toolkit)
        if found:
            raise ReleaseError(
                f"the packages of stack {stack['name']!r} do not belong together: "
                f"{'; '.join(found)}",
                found,
            )
        mark = {
            "fingerprint": self.release.fingerprint,
            "stack": stack["name"],
            "built_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "python": _python_version(self.release.venv),
            "versions": stack["versions"],
            "sources": {entry["name"]: entry["commit"] for entry in stack["sources"]},
            "patched": self._patched(stack),
        }
        write_atomically(
            self.release.path / MARK, json.dumps(mark, indent=2, sort_keys=True) + "\n"
        )
        return mark

    def _patched(self, stack: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the files that patches changed, relative to the release, with their digests."""
        try:
            outcomes = wheel_patch.states(self.patches(stack), self.release.roots(stack))
        except wheel_patch.PatchError as error:
            raise ReleaseError(str(error)) from None
        wrong = [outcome for outcome in outcomes if not outcome.ok]
        if wrong:
            raise ReleaseError(f"patch {wrong[0].name!r} is {wrong[0].state}: {wrong[0].message}")
        by_path: dict[str, list[str]] = {}
        for outcome in outcomes:
            if outcome.state is wheel_patch.State.PATCHED:
                for file in outcome.files:
                    by_path.setdefault(file.path, []).append(outcome.name)
        return [
            {
                "path": str(Path(path).relative_to(self.release.path)),
                "sha256": distributions.sha256(Path(path)),
                "patches": names,
            }
            for path, names in sorted(by_path.items())
        ]


def _python_version(venv: Path) -> str:
    config = (venv / "pyvenv.cfg").read_text()
    match = re.search(r"^version_info\s*=\s*(\S+)|^version\s*=\s*(\S+)", config, re.M)
    return (match.group(1) or match.group(2)) if match else ""


def find_python(asked: str, accepted: Sequence[str], stack: str, runner: Runner = run) -> str:
    """Find an interpreter that the stack accepts.

    :param asked: ``vllm_runtime_python``: a path, a version such as ``3.12``, or empty
    :param accepted: versions that the stack accepts, the preferred one first
    :param stack: its name, for the message
    :raises ReleaseError: none is there
    """
    candidates = [asked] if asked else [f"python{version}" for version in accepted]
    tried = []
    for name in candidates:
        name = f"python{name}" if re.fullmatch(r"\d+\.\d+", name) else name
        answer = runner(
            [name, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"]
        )
        version, _, path = answer.stdout.strip().partition(" ")
        if answer.ok and version in accepted:
            return path
        tried.append(f"{name} ({version or answer.error or 'does not run'})")
    raise ReleaseError(
        f"stack {stack!r} needs Python {' or '.join(accepted)} but the host has none; tried "
        f"{', '.join(tried)}; install python{accepted[0]} or set vllm_runtime_python to its path"
    )


def _tail(result: Result, count: int = 5) -> list[str]:
    lines = [line.rstrip() for line in (result.stdout + "\n" + result.stderr).splitlines()]
    return [line for line in lines if line][-count:]


# --- housekeeping ------------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the whole new one."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def discard(path: Path) -> None:
    """Remove a folder so that it is gone at once under its own name, however long it takes."""
    if not path.exists():
        return
    trash = path.with_name(f"{_TRASH}{path.name}-{os.getpid()}")
    path.rename(trash)
    shutil.rmtree(trash)


def releases(prefix: Path) -> list[Release]:
    """Return the complete releases of a host, the newest first."""
    folder = prefix / "releases"
    if not folder.is_dir():
        return []
    found = [
        Release(prefix, path.name) for path in folder.iterdir() if not path.name.startswith(".")
    ]
    complete = [release for release in found if release.complete]
    return sorted(complete, key=lambda release: str(release.mark()["built_at"]), reverse=True)


def unfinished(prefix: Path) -> list[str]:
    """Return the names of the folders that builds left behind that broke off."""
    folder = prefix / "releases"
    if not folder.is_dir():
        return []
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_dir() and (path.name.startswith(_TRASH) or not (path / MARK).is_file())
    )


def remove_unfinished(prefix: Path) -> list[str]:
    """Remove what builds left behind that broke off; returns the names of the folders."""
    found = unfinished(prefix)
    for name in found:
        path = prefix / "releases" / name
        if name.startswith(_TRASH):
            shutil.rmtree(path)
        else:
            discard(path)
    return found


def prune(prefix: Path, keep: int, caches: Path | None = None, spare: str = "") -> list[str]:
    """Remove old releases and their caches.

    :param keep: how many complete releases stay; the selected and the previous one always do
    :param caches: folder with one folder of caches per fingerprint
    :param spare: one more release that stays, the one just built
    :returns: the fingerprints removed
    """
    protected = {selected(prefix, "current"), selected(prefix, "previous"), spare}
    existing = releases(prefix)
    free = max(0, keep - sum(1 for release in existing if release.fingerprint in protected))
    candidates = [release for release in existing if release.fingerprint not in protected]
    removed = []
    for release in candidates[free:]:
        discard(release.path)
        removed.append(release.fingerprint)
        if caches and (caches / release.fingerprint).is_dir():
            discard(caches / release.fingerprint)
    return removed


def remnants(prefix: Path, caches: Path | None = None) -> list[Path]:
    """Return everything that this module ever made on a host and that is still there.

    :param caches: folder with one folder of caches per fingerprint
    """
    links = [prefix / "current", prefix / "previous"]
    folders = [prefix / "releases", prefix / "held", *([caches] if caches else [])]
    return [path for path in links if path.is_symlink()] + [
        path for path in folders if path.is_dir()
    ]


def remove_all(prefix: Path, caches: Path | None = None) -> list[Path]:
    """Remove all releases, their links, records and caches; returns what was removed."""
    found = remnants(prefix, caches)
    for path in found:
        if path.is_symlink():
            path.unlink()
        else:
            discard(path)
    return found


def select(release: Release, *, remember: bool = True) -> bool:
    """Make a release the one that ``current`` names.

    :param remember: let ``previous`` name the release that was selected until now; ``False`` when
        a release is put back because the selected one did not work
    :returns: whether anything changed
    :raises ReleaseError: the release is absent or was not built to the end
    """
    if not release.complete:
        raise ReleaseError(
            f"release {release.fingerprint!r} is not complete; run the playbook to build it"
        )
    before = selected(release.prefix, "current")
    if before == release.fingerprint:
        return False
    if remember and before and Release(release.prefix, before).complete:
        _point(release.prefix, "previous", before)
    elif selected(release.prefix, "previous") == release.fingerprint:
        (release.prefix / "previous").unlink()
    _point(release.prefix, "current", release.fingerprint)
    return True


def _point(prefix: Path, link: str, fingerprint: str) -> None:
    temporary = prefix / f".{link}.new"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path("releases") / fingerprint)
    temporary.replace(prefix / link)
