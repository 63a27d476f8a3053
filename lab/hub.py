"""The lab's model hub: the protocol of the real one, a tiny model, and faults on demand.

What the real Hub does was read from its client (huggingface_hub 1.33 and 2.4) and its answers:

- ``GET /api/models/REPO[/revision/REV]`` names the commit of a branch;
- ``GET /api/models/REPO/tree/COMMIT?recursive=True`` lists files, in pages linked by ``Link``;
- ``HEAD|GET /REPO/resolve/REV/FILE`` answers 302 to a CDN for large (LFS) files, with
  ``X-Repo-Commit``, ``X-Linked-Etag`` (sha256) and ``X-Linked-Size`` on the redirect itself, and
  307 to a path of its own for small files, whose ``ETag`` is the git blob id;
- data is served with ranges.

Faults are read from ``STATE/hub/faults.json`` before every request, so a test or a person can
switch them while a download runs; :data:`KINDS` lists them. ``times`` limits how often a fault
strikes; the count starts anew whenever the file is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from lab import tiny_model

REPOSITORY = "nerkyor/Qwen3.6-27B-DSV4Pro-Thinking-Distill-FP8"
URL_PREFIX = "/hub"
LFS_PATTERNS = ("*.safetensors", "tokenizer.json", "*.bin", "*.gguf")
CHUNK = 1 << 16

#: Every fault by name, with what it does. ``where`` narrows it to a kind of request: revision,
#: tree, resolve, data (LFS files on the CDN) or small (other files).
KINDS: dict[str, str] = {
    "reset": "send `after` bytes, then reset the connection",
    "truncate": "announce the whole length, send `after` bytes, close",
    "shorter": "serve a consistent object that is `by` bytes shorter than listed",
    "no-length": "send no Content-Length; with `after`, also stop there",
    "corrupt": "serve the right size with one wrong byte",
    "status": "answer with `status`; with `retry_after`, say so in Retry-After",
    "login": "answer 200 with a page of HTML",
    "pointer": "answer 200 with the file's LFS pointer",
    "no-ranges": "ignore Range: answer 200 with the whole file",
    "wrong-range": "answer 206 with another range, and say which",
    "lying-range": "answer 206 with the bytes of another range under the asked one's name",
    "redirect": "redirect to `to`, with `status` (302 when left out)",
    "stall": "send `after` bytes, then nothing for `seconds`",
    "slow": "send at most `rate` bytes a second on each connection",
    "busy": "answer `status` while more than `limit` data requests run at once",
    "moved": "name commit `commit` for every branch",
    "zero-size": "announce a size of 0",
    "xet": "offer Xet, with a token route that does not exist",
}


class HubError(Exception):
    """The hub cannot serve what it was told to; the text says why in one sentence."""


@dataclass(frozen=True)
class HubFile:
    """One file of a repository: its size and the two names that the Hub gives its content."""

    size: int
    sha256: str
    blob_id: str
    lfs: bool


@dataclass(frozen=True)
class Repository:
    """One published revision of one repository."""

    name: str
    commit: str
    folder: Path
    files: Mapping[str, HubFile]


@dataclass
class Fault:
    """One entry of the faults file."""

    kind: str
    where: str = "data"
    match: str = "*"
    times: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def number(self, name: str, default: float) -> float:
        """Return a numeric option."""
        return float(self.options.get(name, default))


@dataclass(frozen=True)
class Seen:
    """One request as it was answered: for tests and for the access log."""

    method: str
    where: str
    path: str
    range: str
    status: int
    sent: int
    authorization: bool


def blob_id(content: bytes) -> str:
    """Return git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def publish(hub_dir: Path, name: str, contents: Mapping[str, bytes]) -> Repository:
    """Publish a revision and make it the head of ``main``; its commit id follows from the bytes.

    :param hub_dir: the hub's folder (``STATE/hub``)
    :param name: ``owner/name``
    :param contents: path to bytes
    """
    digest = hashlib.sha1(name.encode(), usedforsecurity=False)
    files: dict[str, HubFile] = {}
    for path, content in sorted(contents.items()):
        lfs = any(fnmatch(path, pattern) for pattern in LFS_PATTERNS)
        known = HubFile(len(content), hashlib.sha256(content).hexdigest(), blob_id(content), lfs)
        files[path] = known
        digest.update(f"{path}\0{known.sha256}\0".encode())
    commit = digest.hexdigest()
    base = hub_dir / "repos" / name
    folder = base / commit
    if not folder.is_dir():
        draft = base / f".{commit}.part"
        shutil.rmtree(draft, ignore_errors=True)
        for path, content in contents.items():
            target = draft / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        draft.rename(folder)
    description = {
        "name": name,
        "commit": commit,
        "files": {path: vars(known) for path, known in files.items()},
    }
    draft = base / "repo.json.part"
    draft.write_text(json.dumps(description, indent=1), encoding="utf-8")
    draft.replace(base / "repo.json")
    return Repository(name, commit, folder, files)


def prepare(state_dir: Path) -> Repository:
    """Publish the tiny model under the reference host's model name; the same bytes every time."""
    return publish(state_dir / "hub", REPOSITORY, tiny_model.model_files())


def set_faults(state_dir: Path, *faults: Mapping[str, Any]) -> None:
    """Write the faults file: each fault is a mapping with ``kind`` and its options.

    :raises HubError: a fault of no known kind
    """
    for fault in faults:
        if fault.get("kind") not in KINDS:
            raise HubError(f"'{fault.get('kind')}' is no fault; use one of: {', '.join(KINDS)}")
    target = state_dir / "hub" / "faults.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(".part")
    draft.write_text(json.dumps({"faults": list(faults)}), encoding="utf-8")
    draft.replace(target)


class HubHandler:
    """Answer requests below ``/hub`` in the server of somebody else."""

    def __init__(self, state_dir: Path, prefix: str = URL_PREFIX, cdn: str = "") -> None:
        """Serve one lab's hub.

        :param state_dir: the lab's state folder
        :param prefix: path below which the hub lives; also valid: ""
        :param cdn: base URL of the CDN; empty for the address the client came by
        """
        self.root = state_dir / "hub"
        self.prefix = prefix
        self.cdn = cdn
        self.seen: deque[Seen] = deque(maxlen=10_000)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._stamp: tuple[int, int] = (0, 0)
        self._running = 0

    # -- entry ---------------------------------------------------------------------------------

    def handle(self, request: BaseHTTPRequestHandler, path: str) -> bool:
        """Answer one request.

        :param request: the server's handler of it
        :param path: its path, query included
        :returns: False when the path is not the hub's
        """
        parts = urlsplit(path)
        if self.prefix and not parts.path.startswith(self.prefix + "/"):
            return False
        name = unquote(parts.path[len(self.prefix) :])
        _Answer(self, request, name, parse_qs(parts.query)).give()
        return True

    # -- what is served ------------------------------------------------------------------------

    def repository(self, name: str) -> Repository | None:
        """Return a repository as it is published now."""
        base = self.root / "repos" / name
        try:
            data = json.loads((base / "repo.json").read_text(encoding="utf-8"))
        except OSError:
            return None
        files = {path: HubFile(**known) for path, known in data["files"].items()}
        return Repository(data["name"], data["commit"], base / data["commit"], files)

    def fault(self, where: str, path: str, *kinds: str) -> Fault | None:
        """Return the first fault for a request, counting it; ``kinds`` narrows the choice."""
        with self._lock:
            self._read_faults()
            for fault in self._faults:
                if fault.where not in (where, "any") or not fnmatch(path, fault.match):
                    continue
                if (kinds and fault.kind not in kinds) or fault.times == 0:
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    def _read_faults(self) -> None:
        file = self.root / "faults.json"
        try:
            stat = file.stat()
        except OSError:
            self._faults, self._stamp = [], (0, 0)
            return
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if stamp == self._stamp:
            return
        self._faults = []
        for entry in json.loads(file.read_text(encoding="utf-8")).get("faults", []):
            options = dict(entry)
            kind = options.pop("kind")
            where = options.pop("where", "data")
            match = options.pop("match", "*")
            self._faults.append(Fault(kind, where, match, options.pop("times", None), options))
        self._stamp = stamp

    def enter(self) -> int:
        """Count a data request in; return how many run now."""
        with self._lock:
            self._running += 1
            return self._running

    def leave(self) -> None:
        """Count a data request out."""
        with self._lock:
            self._running -= 1


class _Answer:
    """One request and its answer."""

    def __init__(
        self,
        hub: HubHandler,
        request: BaseHTTPRequestHandler,
        name: str,
        query: Mapping[str, list[str]],
    ) -> None:
        self.hub = hub
        self.request = request
        self.name = name
        self.query = query
        self.where = "other"
        self.status = 0
        self.sent = 0

    def give(self) -> None:
        """Route, answer, and note what happened."""
        try:
            self._route()
        except (BrokenPipeError, ConnectionResetError):
            self.request.close_connection = True
        finally:
            self.hub.seen.append(
                Seen(
                    self.request.command,
                    self.where,
                    self.name,
                    self.request.headers.get("Range", ""),
                    self.status,
                    self.sent,
                    "Authorization" in self.request.headers,
                )
            )

    def _route(self) -> None:
        if self.request.command not in ("GET", "HEAD"):
            self._text(405, "the lab's hub is read-only")
            return
        routes = (
            (r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self._revision),
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", self._tree),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            (r"/cdn/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", self._data),
            (r"/api/resolve-cache/models/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", self._small),
        )
        for pattern, answer in routes:
            match = re.fullmatch(pattern, self.name)
            if match:
                answer(*(group or "" for group in match.groups()))
                return
        self._text(404, "Not Found")

    # -- API -------------------------------------------------------------------------------------

    def _revision(self, name: str, revision: str) -> None:
        self.where = "revision"
        repo = self._repo(name, revision or "main")
        if repo is None or self._early_fault(name):
            return
        moved = self.hub.fault(self.where, name, "moved")
        commit = str(moved.options["commit"]) if moved else repo.commit
        siblings = [{"rfilename": path} for path in repo.files]
        self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings}, commit)

    def _tree(self, name: str, revision: str) -> None:
        self.where = "tree"
        repo = self._repo(name, revision)
        if repo is None or self._early_fault(name):
            return
        entries: list[dict[str, Any]] = []
        folders = {str(parent) for path in repo.files for parent in Path(path).parents} - {"."}
        for folder in sorted(folders):
            oid = hashlib.sha1(folder.encode(), usedforsecurity=False).hexdigest()
            entries.append({"type": "directory", "oid": oid, "size": 0, "path": folder})
        for path, known in repo.files.items():
            entry = {"type": "file", "oid": known.blob_id, "size": known.size, "path": path}
            if known.lfs:
                entry["lfs"] = {"oid": known.sha256, "size": known.size, "pointerSize": 134}
            entries.append(entry)
        limit = int(self.query.get("limit", ["1000"])[0])
        start = int(self.query.get("cursor", ["0"])[0])
        page = entries[start : start + limit]
        links = {}
        if start + limit < len(entries):
            url = f"{self._base()}/api/models/{name}/tree/{revision}"
            query = f"recursive=True&expand=False&limit={limit}&cursor={start + limit}"
            links["Link"] = f'<{url}?{query}>; rel="next"'
        self._json(page, repo.commit, links)

    # -- files -----------------------------------------------------------------------------------

    def _resolve(self, name: str, revision: str, path: str) -> None:
        self.where = "resolve"
        repo = self._repo(name, revision)
        if repo is None:
            return
        known = repo.files.get(path)
        if known is None:
            self._text(404, "Entry not found", {"X-Error-Code": "EntryNotFound"})
            return
        if self._early_fault(path):
            return
        headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        quoted = quote(f"{name}/{repo.commit}/{path}")
        if not known.lfs:
            location = f"{self.hub.prefix}/api/resolve-cache/models/{quoted}"
            self._send(307, b"", {**headers, "Location": location})
            return
        headers["X-Linked-Etag"] = f'"{known.sha256}"'
        headers["X-Linked-Size"] = str(known.size)
        if self.hub.fault(self.where, path, "zero-size"):
            headers["X-Linked-Size"] = "0"
        headers["ETag"] = f'"{known.sha256}"'
        if self.hub.fault(self.where, path, "xet"):
            token = f"{self._base()}/api/models/{name}/xet-read-token/{repo.commit}"
            headers["X-Xet-Hash"] = known.sha256
            headers["Link"] = f'<{token}>; rel="xet-auth"'
        cdn = self.hub.cdn or self._base()
        self._send(302, b"", {**headers, "Location": f"{cdn}/cdn/{quoted}?signature=lab"})

    def _data(self, name: str, commit: str, path: str) -> None:
        self.where = "data"
        running = self.hub.enter()
        try:
            busy = self.hub.fault(self.where, path, "busy")
            if busy and running > busy.number("limit", 16):
                self._refuse(int(busy.number("status", 429)), busy)
                return
            self._file(name, commit, path)
        finally:
            self.hub.leave()

    def _small(self, name: str, commit: str, path: str) -> None:
        self.where = "small"
        self._file(name, commit, path)

    def _file(self, name: str, commit: str, path: str) -> None:
        repo = self._repo(name, commit)
        if repo is None:
            return
        known = repo.files.get(path)
        if known is None:
            self._text(404, "Entry not found", {"X-Error-Code": "EntryNotFound"})
            return
        if self._early_fault(path):
            return
        content = (repo.folder / path).read_bytes()
        fault = self.hub.fault(
            self.where,
            path,
            *("shorter", "corrupt", "pointer", "no-ranges", "wrong-range", "lying-range"),
            *("reset", "truncate", "stall", "slow", "no-length"),
        )
        kind = fault.kind if fault else ""
        if kind == "pointer":
            content = (
                "version https://git-lfs.github.com/spec/v1\n"
                f"oid sha256:{known.sha256}\nsize {known.size}\n"
            ).encode()
        elif kind == "shorter" and fault:
            content = content[: max(0, len(content) - int(fault.number("by", 1000)))]
        elif kind == "corrupt":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        headers = {
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "ETag": f'"{known.sha256 if known.lfs else known.blob_id}"',
            # A client that takes the CDN for the Hub itself (same host) still finds these.
            "X-Repo-Commit": commit,
        }
        if known.lfs:
            headers["X-Linked-Etag"] = headers["ETag"]
            headers["X-Linked-Size"] = str(len(content))
        status, body = 200, content
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.request.headers.get("Range", ""))
        if asked and kind not in ("no-ranges", "pointer"):
            low = int(asked[1])
            high = min(int(asked[2] or len(content) - 1), len(content) - 1)
            if low >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            shift = min(low, 7) if low else 7
            if kind in ("wrong-range", "lying-range"):
                body = content[low - shift if low else shift :][: high - low + 1]
            else:
                body = content[low : high + 1]
            said = low - shift if low else shift
            first = said if kind == "wrong-range" else low
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{len(content)}"
            status = 206
        self._body(status, body, headers, fault)

    def _body(
        self, status: int, body: bytes, headers: Mapping[str, str], fault: Fault | None
    ) -> None:
        kind = fault.kind if fault else ""
        request = self.request
        self.status = status
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        if kind == "no-length":
            request.send_header("Connection", "close")
            request.close_connection = True
        else:
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "HEAD":
            return
        end = len(body)
        if fault and kind in ("reset", "truncate", "stall", "no-length"):
            end = min(end, int(fault.number("after", end if kind == "no-length" else 0)))
        rate = fault.number("rate", 1 << 20) if fault and kind == "slow" else 0.0
        piece = max(1, min(CHUNK, int(rate / 20))) if rate else CHUNK
        for start in range(0, end, piece):
            part = body[start : min(start + piece, end)]
            if rate:
                time.sleep(len(part) / rate)
            request.wfile.write(part)
            self.sent += len(part)
        request.wfile.flush()
        if fault and kind == "reset":
            _reset(request)
        elif kind in ("truncate", "no-length"):
            request.close_connection = True
            with contextlib.suppress(OSError):
                request.connection.shutdown(socket.SHUT_RDWR)
        elif fault and kind == "stall":
            time.sleep(fault.number("seconds", 30))
            _reset(request)

    # -- helpers -------------------------------------------------------------------------------

    def _repo(self, name: str, revision: str) -> Repository | None:
        """Return the repository, having answered 404 when there is none or no such revision."""
        repo = self.hub.repository(name)
        if repo is None:
            # The real one answers 401 for what does not exist, so that names are not disclosed.
            code = {"X-Error-Code": "RepoNotFound"}
            self._text(401, "Invalid username or password.", code)
            return None
        if revision in ("main", repo.commit):
            return repo
        earlier = self.hub.root / "repos" / name / revision
        if re.fullmatch("[0-9a-f]{40}", revision) and earlier.is_dir():
            files = {
                str(file.relative_to(earlier)): _known(file)
                for file in sorted(earlier.rglob("*"))
                if file.is_file()
            }
            return Repository(name, revision, earlier, files)
        self._text(404, "Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
        return None

    def _early_fault(self, path: str) -> bool:
        """Give the answers that replace the normal one altogether."""
        fault = self.hub.fault(self.where, path, "status", "login", "redirect")
        if fault is None:
            return False
        if fault.kind == "status":
            self._refuse(int(fault.number("status", 503)), fault)
        elif fault.kind == "login":
            page = (
                b"<!DOCTYPE html>\n<html><body>Please sign in to use this network.</body></html>\n"
            )
            self._send(200, page, {"Content-Type": "text/html"})
        else:
            target = str(fault.options.get("to", "http://127.0.0.1:9/blocked"))
            self._send(int(fault.number("status", 302)), b"", {"Location": target})
        return True

    def _refuse(self, status: int, fault: Fault) -> None:
        wait = fault.options.get("retry_after")
        self._text(status, "refused", {} if wait is None else {"Retry-After": str(wait)})

    def _base(self) -> str:
        """Return the hub's own base URL as the client sees it."""
        host = self.request.headers.get("Host")
        if not host:
            address, port = self.request.connection.getsockname()[:2]
            host = f"{address}:{port}"
        return f"http://{host}{self.hub.prefix}"

    def _json(self, value: object, commit: str, headers: Mapping[str, str] | None = None) -> None:
        extra = {"Content-Type": "application/json", "X-Repo-Commit": commit, **(headers or {})}
        self._send(200, json.dumps(value).encode(), extra)

    def _text(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        extra = {"X-Error-Message": text, **(headers or {})} if status >= 400 else headers
        self._send(status, text.encode(), {"Content-Type": "text/plain", **(extra or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.status = status
        self.request.send_response(status)
        for name, value in headers.items():
            self.request.send_header(name, value)
        self.request.send_header("Content-Length", str(len(body)))
        self.request.end_headers()
        if self.request.command != "HEAD":
            self.request.wfile.write(body)
            self.sent += len(body)


def _known(file: Path) -> HubFile:
    content = file.read_bytes()
    lfs = any(fnmatch(file.name, pattern) for pattern in LFS_PATTERNS)
    return HubFile(len(content), hashlib.sha256(content).hexdigest(), blob_id(content), lfs)


def _reset(request: BaseHTTPRequestHandler) -> None:
    """Close a connection with a TCP reset."""
    request.close_connection = True
    with contextlib.suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        # The server's own orderly shutdown must find the socket gone, or it would send FIN first.
        request.rfile.close()
        request.connection.close()


def create_handler(state_dir: Path) -> HubHandler:
    """Return the handler that the lab's mirror process calls for every request."""
    return HubHandler(state_dir)
