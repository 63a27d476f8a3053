"""Small real things to build releases from: wheels, an index that serves them, a repository."""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PRISTINE = "tile = 1\n"
PATCHED = "tile = 2\n"


def uv() -> str:
    """The project's own uv, or the one on PATH."""
    own = Path(sys.executable).with_name("uv")
    found = str(own) if own.exists() else shutil.which("uv")
    assert found is not None, "the tests need uv (requirements-dev.txt)"
    return found


def wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str], requires: tuple[str, ...] = ()
) -> Path:
    """Write a wheel that holds some text files."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    content = dict(files) | {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: kit\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    lines = []
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"{path},sha256={digest.decode()},{len(text.encode())}")
    content[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return target


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def publish(index: Path, *wheels: Path, hashes: bool = True) -> None:
    """Lay out a package index of plain files."""
    for path in wheels:
        name = path.name.split("-")[0].replace("_", "-").lower()
        folder = index / name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)
        links = [
            f'<a href="{item.name}{f"#sha256={sha256(item)}" if hashes else ""}">{item.name}</a>'
            for item in sorted(folder.glob("*.whl"))
        ]
        (folder / "index.html").write_text("<!DOCTYPE html>\n" + "\n".join(links))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output readable."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def repository(folder: Path) -> str:
    """Make a git repository that is served as plain files; returns its commit."""
    work = folder / "work"
    (work / "pkg/deep").mkdir(parents=True)
    (work / "pkg/__init__.py").write_text("raise ValueError('only on other hardware')\n")
    (work / "pkg/deep/__init__.py").write_text("")
    (work / "pkg/deep/legacy.py").write_text("answer = 1\n")

    def git(*argv: str, cwd: Path = work) -> str:
        identity = ["-c", "user.name=kit", "-c", "user.email=kit@example.invalid"]
        done = subprocess.run(
            ["git", *identity, *argv], cwd=cwd, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    git("clone", "-q", "--bare", str(work), str(folder / "repo.git"), cwd=folder)
    git("update-server-info", cwd=folder / "repo.git")
    return git("rev-parse", "HEAD")


def patch(before: str = PRISTINE, after: str = PATCHED) -> dict[str, Any]:
    """A patch on the file demo/kernel.cuh of the package demo."""
    diff = difflib.unified_diff(
        before.splitlines(True), after.splitlines(True), "a/demo/kernel.cuh", "b/demo/kernel.cuh"
    )
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in (before, after)]
    return {
        "name": "demo-tile",
        "package": ["demo"],
        "versions": "==1.0",
        "root": "site-packages",
        "reason": "the tile is too small",
        "upstream": "none",
        "not_needed_from": None,
        "requires": [],
        "conflicts": [],
        "default": True,
        "files": [{"path": "demo/kernel.cuh", "before": digests[0], "after": digests[1]}],
        "diff": "".join(diff),
    }


def stack(**changes: Any) -> dict[str, Any]:
    """The data of a small stack: one locked package, a patch, no GPU."""
    return {
        "name": "small",
        "description": "for tests",
        "python": [PYTHON],
        "engine": {"package": "demo", "version": "1.0"},
        "cuda": None,
        "compute_capabilities": [],
        "versions": {"demo": "1.0"},
        "forbidden": ["flashinfer-jit-cache"],
        "indexes": [],
        "held": [],
        "lock": {
            "file": "lock.txt",
            "python": PYTHON,
            "exclude_newer": "2026-07-15",
            "requirements": ["demo==1.0"],
        },
        "sources": [],
        "patches": ["demo-tile"],
        "optional_patches": [],
        "build_tools": [],
        "caches": {"flashinfer": "FLASHINFER_WORKSPACE_BASE", "triton": "TRITON_CACHE_DIR"},
        "environment": {},
    } | changes


def files(data: Mapping[str, Any], lock: str, *patches: Mapping[str, Any]) -> dict[str, str]:
    """What the controller sends for a release."""
    return {
        "stack.json": json.dumps(data),
        "lock.txt": lock,
        **{f"patches/{item['name']}.json": json.dumps(item) for item in patches},
    }
