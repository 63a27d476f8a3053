"""The lab's one mirror process: package archives, model Hub and git repositories over HTTP.

It listens on the controller's loopback only; lab hosts reach it as 10.0.2.2.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lab import git_mirror, hub
from lab.errors import LabError
from lab.state import CONTROLLER_FROM_INSIDE, State, read_json, write_json

ADDRESS = "127.0.0.1"
FIRST_PORT = 18640
# Settings of the package archives: name -> values, the first is the default.
SETTINGS = {
    "archive": ("full", "current"),
    "apt": ("up", "down"),
}
CHUNK = 1 << 16


class AptHandler:
    """Serve the published package archives below /apt/."""

    def __init__(self, state_dir: Path) -> None:
        """Serve `<state_dir>/apt/current`."""
        self.root = state_dir / "apt" / "current"
        self.settings_file = state_dir / "mirror-settings.json"

    def locate(self, path: str) -> Path | None:
        """Find the file for a path below /apt/; None when there is none or it leaves the tree."""
        name = unquote(path.partition("?")[0]).removeprefix("/apt/")
        settings = read_json(self.settings_file)
        if settings.get("archive") == "current" and name.startswith("ubuntu/dists/"):
            name = name.replace("ubuntu/dists/", "ubuntu/dists-current/", 1)
        root = self.root.resolve()
        target = (root / name).resolve()
        return target if target.is_relative_to(root) and target.is_file() else None

    def handle(self, request: BaseHTTPRequestHandler, path: str) -> bool:
        """Answer one request; False when the path is not below /apt/."""
        if not path.startswith("/apt/"):
            return False
        if read_json(self.settings_file).get("apt") == "down":
            request.send_error(503, "the lab's package mirror is switched off")
            return True
        target = self.locate(path)
        if target is None:
            request.send_error(404, "no such file")
            return True
        size = target.stat().st_size
        request.send_response(200)
        request.send_header("Content-Type", "application/octet-stream")
        request.send_header("Content-Length", str(size))
        request.send_header("Last-Modified", request.date_time_string(int(target.stat().st_mtime)))
        request.end_headers()
        if request.command == "GET":
            with target.open("rb") as source:
                while chunk := source.read(CHUNK):
                    request.wfile.write(chunk)
        return True


def handlers(state_dir: Path) -> list[Any]:
    """Create the handlers of every part."""
    parts = (hub.create_handler(state_dir), git_mirror.create_handler(state_dir))
    return [AptHandler(state_dir), *parts]


def prepare(state_dir: Path) -> None:
    """Make what the parts serve: the tiny model, the git repositories."""
    try:
        hub.prepare(state_dir)
        git_mirror.prepare(state_dir)
    except (hub.HubError, git_mirror.GitMirrorError, OSError) as error:
        raise LabError(f"The lab's models or repositories could not be made: {error}.") from error


def make_server(state_dir: Path, port: int) -> ThreadingHTTPServer:
    """Create the server; the caller runs it."""
    parts = handlers(state_dir)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "vllm-turing-lab"

        def dispatch(self) -> None:
            if self.path == "/healthz":
                body = json.dumps({"pid": os.getpid(), "state": str(state_dir)}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            if not any(part.handle(self, self.path) for part in parts):
                self.send_error(404, "the lab's mirror has /apt, /hub and /git")

        do_GET = do_HEAD = do_POST = dispatch

        def log_message(self, format: str, *args: Any) -> None:
            sys.stderr.write(f"{self.log_date_time_string()} {format % args}\n")
            sys.stderr.flush()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            kind = sys.exc_info()[0]
            if kind is not None and not issubclass(kind, ConnectionError):
                super().handle_error(request, client_address)

    return Server((ADDRESS, port), Handler)


def serve(state: State, port: int) -> None:
    """Run the server in this process until it gets SIGTERM."""
    server = make_server(state.root, port)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server.serve_forever()


def port_free(port: int) -> bool:
    """Return whether nothing listens on the loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError:
            return False
        return True


def free_port(first: int, taken: Callable[[int], bool] = lambda _: False) -> int:
    """Find a free loopback port from `first` on."""
    for port in range(first, first + 200):
        if not taken(port) and port_free(port):
            return port
    raise LabError(f"No free port from {first} to {first + 199} on '{ADDRESS}'.")


def answers(port: int, state: State) -> int:
    """Process id of our mirror on the port; 0 when nobody or somebody else answers."""
    try:
        with urllib.request.urlopen(f"http://{ADDRESS}:{port}/healthz", timeout=3) as reply:
            data = json.loads(reply.read())
    except (OSError, ValueError):
        return 0
    return int(data.get("pid", 0)) if data.get("state") == str(state.root) else 0


def ensure(state: State, progress: Callable[[str], None]) -> int:
    """Start the mirror process if it does not run; return its port.

    The port is kept: lab hosts have it in their configuration.
    """
    code = code_digest()
    known = read_json(state.mirror_file)
    port = int(known.get("port", 0))
    if port and answers(port, state):
        if known.get("code") == code:
            return port
        stop(state)
    if port and not wait_free(port):
        raise LabError(
            f"The port '{port}' of the lab's mirror is taken by another program; end it, or "
            "remove the lab with 'python -m lab down --all' and start again."
        )
    port = port or free_port(FIRST_PORT)
    prepare(state.root)
    progress(f"mirror: serving packages, models and git on {ADDRESS}:{port}")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with state.mirror_log.open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lab", "mirrors", "serve", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**environment, "VLLM_TURING_LAB_DIR": str(state.root)},
        )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        if answers(port, state):
            write_json(state.mirror_file, {"port": port, "pid": process.pid, "code": code})
            return port
        time.sleep(0.1)
    if process.poll() is None:
        process.terminate()
    raise LabError(f"The lab's mirror did not start; see '{state.mirror_log}'.")


def code_digest() -> str:
    """Digest of the files the mirror process runs, so that a changed one restarts it."""
    total = hashlib.sha256()
    for name in ("mirrors.py", "state.py", "hub.py", "git_mirror.py", "tiny_model.py"):
        path = Path(__file__).parent / name
        total.update(path.read_bytes() if path.is_file() else b"")
    return total.hexdigest()[:16]


def wait_free(port: int, seconds: float = 3.0) -> bool:
    """Wait until a port that we have just given up is free."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if port_free(port):
            return True
        time.sleep(0.1)
    return port_free(port)


def stop(state: State) -> bool:
    """End the mirror process; return whether one ran."""
    port = int(read_json(state.mirror_file).get("port", 0))
    pid = answers(port, state) if port else 0
    if not pid:
        return False
    os.kill(pid, signal.SIGTERM)
    return wait_free(port)


def set_option(state: State, name: str, value: str) -> None:
    """Set one of the SETTINGS."""
    if name not in SETTINGS or value not in SETTINGS[name]:
        options = "; ".join(f"{k}={'|'.join(v)}" for k, v in SETTINGS.items())
        raise LabError(f"The mirror has no setting '{name}={value}'; use one of: {options}.")
    path = state.root / "mirror-settings.json"
    write_json(path, {**read_json(path), name: value})


def hub_fault(state: State, words: list[str]) -> str:
    """Make the model Hub misbehave: a kind and NAME=VALUE options; 'none' heals it."""
    kind, options = (words or [""])[0], dict(w.partition("=")[::2] for w in words[1:])
    fault: dict[str, Any] = {"kind": kind}
    for name, value in options.items():
        fault[name] = int(value) if value.isdigit() else value
    try:
        hub.set_faults(state.root, *([] if kind == "none" else [fault]))
    except hub.HubError as error:
        raise LabError(f"{error}.") from error
    return "healthy" if kind == "none" else json.dumps(fault)


def url_from_inside(port: int) -> str:
    """Address of the mirror as a lab host sees it."""
    return f"http://{CONTROLLER_FROM_INSIDE}:{port}"
