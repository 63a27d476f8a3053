"""A small server with a clock of its own, for tests of the benchmark's client.

Time passes only when the server says so, and it goes on to its next event only when the client has
read the clock: a client that waits for more bytes than one event has would wait for ever (and the
test ends after PATIENCE seconds with a broken stream).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE = 5.0


class Clock:
    """Seconds that pass by `advance` only; counts how often it was read."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reads = 0
        self.changed = threading.Condition()

    def __call__(self) -> float:
        with self.changed:
            self.reads += 1
            self.changed.notify_all()
            return self.now

    def advance(self, seconds: float) -> int:
        with self.changed:
            self.now += seconds
            return self.reads

    def wait_for_read(self, after: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.reads > after, PATIENCE)


@dataclass
class Script:
    """What the server does with a request."""

    deltas: list[dict[str, Any]] = field(default_factory=list)
    first: float = 1.0
    interval: float = 0.1
    stall_at_end: float = 0.0
    usage: dict[str, Any] | None = None
    status: int = 200
    refusal: Any = None
    break_after: int | None = None
    raw_event: bytes | None = None
    cut: int | None = None
    """Send every event in transfer chunks of so many bytes."""
    lockstep: bool = True
    metrics: list[str] = field(default_factory=list)
    """Texts of /metrics, one for each time that it is asked."""
    tokens_a_word: float = 1.3
    max_model_len: int | None = 100000
    seen: list[dict[str, Any]] = field(default_factory=list)
    """Path, headers and body of every request."""


class Handler(BaseHTTPRequestHandler):
    """Speaks as much of the protocol as the client uses."""

    protocol_version = "HTTP/1.1"
    script: Script
    clock: Clock

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""

    def do_GET(self) -> None:
        self.note({})
        texts = self.script.metrics
        if not texts:
            self.answer(404, b"")
            return
        self.answer(200, (texts.pop(0) if len(texts) > 1 else texts[0]).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.note(body)
        if self.path == "/tokenize":
            count = round(len(body["messages"][0]["content"].split()) * self.script.tokens_a_word)
            answer = {"count": count + 10, "max_model_len": self.script.max_model_len}
            self.answer(200, json.dumps(answer).encode())
        elif self.script.status != 200:
            refusal = self.script.refusal
            raw = refusal if isinstance(refusal, str) else json.dumps(refusal)
            self.answer(self.script.status, raw.encode())
        else:
            self.stream()

    def note(self, body: dict[str, Any]) -> None:
        self.script.seen.append({"path": self.path, "headers": dict(self.headers), "body": body})

    def answer(self, status: int, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        script = self.script
        for index, delta in enumerate(script.deltas):
            if script.break_after == index:
                self.hang_up()
                return
            choice: dict[str, Any] = {"delta": delta, "finish_reason": None}
            if index == len(script.deltas) - 1:
                choice["finish_reason"] = "length"
            wait = script.first if index == 0 else script.interval
            self.event({"choices": [choice]}, wait)
        if script.raw_event is not None:
            self.chunk(script.raw_event)
        if script.usage is not None:
            self.event({"choices": [], "usage": script.usage}, 0.0)
        self.clock.advance(script.stall_at_end)
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, content: dict[str, Any], wait: float) -> None:
        reads = self.clock.advance(wait)
        raw = b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
        size = self.script.cut or len(raw)
        for start in range(0, len(raw), size):
            self.chunk(raw[start : start + size])
        if self.script.lockstep and not self.clock.wait_for_read(reads):
            self.hang_up()

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def chunk(self, raw: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
        self.wfile.flush()


@contextmanager
def serving(script: Script, clock: Clock) -> Iterator[str]:
    """Serve a script on a free port of the loopback; yields the address."""
    handler = type("ScriptedHandler", (Handler,), {"script": script, "clock": clock})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
