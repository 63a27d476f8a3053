"""A hub on a loopback port, and a model of a few files in it."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lab import hub
from vllm_turing.model_http import Source
from vllm_turing.model_lock import Lock, LockedFile
from vllm_turing.model_transfer import Settings, Transfer

REPO = "lab/model"
SEGMENT = 64 << 10
#: Fast enough for tests, with every mechanism of the real settings.
FAST = Settings(connections=8, segment=SEGMENT, timeout=2.0, patience=3.0, backoff=0.01)


def shard(seed: int, size: int) -> bytes:
    """Return a valid safetensors file with ``size`` random bytes of data."""
    header = {"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + Random(seed).randbytes(size)


def contents() -> dict[str, bytes]:
    """Return the files of a small model: three shards, one empty file, one in a folder."""
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    files = {name: shard(number, 500_000 + 10_000 * number) for number, name in enumerate(names)}
    index = {"weight_map": {f"layer.{number}": name for number, name in enumerate(names)}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["config.json"] = b'{"model_type": "qwen3_5"}\n'
    files["empty.txt"] = b""
    files["extra/notes.txt"] = b"in a folder\n" * 100
    return files


@dataclass
class Hub:
    """A running hub, its published revision and the lock of it."""

    state: Path
    handler: hub.HubHandler
    url: str
    contents: dict[str, bytes]
    lock: Lock

    @property
    def source(self) -> Source:
        return Source(self.url)

    def faults(self, *faults: Mapping[str, Any]) -> None:
        hub.set_faults(self.state, *faults)

    def publish(self, files: dict[str, bytes]) -> Lock:
        self.contents = files
        repo = hub.publish(self.state / "hub", REPO, files)
        locked = {
            path: LockedFile(known.size, known.sha256, known.blob_id)
            for path, known in repo.files.items()
        }
        self.lock = Lock(REPO, repo.commit, locked, "main")
        return self.lock

    def sent(self, where: str = "data") -> int:
        """Return the bytes of data that the hub has sent."""
        return sum(seen.sent for seen in self.handler.seen if seen.where == where)

    def transfer(self, folder: Path, *sources: Source, **settings: Any) -> Transfer:
        """Return a transfer of the whole model with fast settings."""
        wanted = Settings(**{**vars(FAST), **settings})
        return Transfer(
            REPO,
            self.lock.commit,
            self.lock.files,
            folder,
            sources or (self.source,),
            wanted,
            log=lambda text: None,
        )

    def wrong_files(self, folder: Path) -> list[str]:
        """Return the files whose content is not what was published; missing ones do not count."""
        return [
            path
            for path, content in self.contents.items()
            if (folder / path).exists() and (folder / path).read_bytes() != content
        ]

    def missing_files(self, folder: Path) -> list[str]:
        return [path for path in self.contents if not (folder / path).exists()]


def serve(handler: hub.HubHandler) -> ThreadingHTTPServer:
    """Start a server for a handler on a free loopback port."""

    class Request(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not handler.handle(self, self.path):
                self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that goes away is part of every test here

    server = Server(("127.0.0.1", 0), Request)
    threading.Thread(target=server.serve_forever, daemon=True, args=(0.05,)).start()
    return server


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Hub]:
    """Start a hub with the small model."""
    state = tmp_path / "lab"
    handler = hub.create_handler(state)
    server = serve(handler)
    running = Hub(state, handler, f"http://127.0.0.1:{server.server_port}/hub", {}, None)  # type: ignore[arg-type]  # set in the next line
    running.publish(contents())
    yield running
    server.shutdown()
    server.server_close()


@pytest.fixture
def second_mirror(tmp_path: Path) -> Iterator[Hub]:
    """Start another hub with the same model."""
    state = tmp_path / "lab2"
    handler = hub.create_handler(state)
    server = serve(handler)
    running = Hub(state, handler, f"http://127.0.0.1:{server.server_port}/hub", {}, None)  # type: ignore[arg-type]  # set in the next line
    running.publish(contents())
    yield running
    server.shutdown()
    server.server_close()
