import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import service_http, service_ready
from vllm_turing.service_http import Answer

GOOD = Answer(200, json.dumps({"choices": [{}], "usage": {"completion_tokens": 1}}))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait(health: Any, completion: Any, alive: Any = lambda: True, timeout: float = 100) -> float:
    clock = Clock()
    return service_ready.wait(
        health, completion, alive, timeout=timeout, clock=clock, sleep=clock.sleep
    )


def test_health_alone_is_not_ready() -> None:
    answers = [Answer(None, error="connection refused")] * 5 + [Answer(200)] * 9
    completions = [Answer(500, "warming up"), GOOD]
    took = wait(lambda: answers.pop(0), lambda left: completions.pop(0))
    assert took >= 5
    assert completions == []


def test_a_server_that_only_answers_health_fails_with_the_reason() -> None:
    with pytest.raises(service_ready.NotReady, match=r"failed 3 completions \(HTTP 500: no kernel"):
        wait(lambda: Answer(200), lambda left: Answer(500, '{"error": {"message": "no kernel"}}'))


def test_an_engine_that_dies_ends_the_wait_at_once() -> None:
    lives = [True, True, False]
    with pytest.raises(service_ready.NotReady, match="ended 2 s after its start"):
        wait(lambda: Answer(None, error="x"), lambda left: GOOD, lambda: lives.pop(0))


def test_time_is_up_with_the_last_reason() -> None:
    with pytest.raises(service_ready.NotReady, match=r"within 20 s \(connection refused\)"):
        wait(lambda: Answer(None, error="connection refused"), lambda left: GOOD, timeout=20)


@pytest.mark.parametrize(
    ("status", "words"), [(401, "refuses the key"), (404, "does not serve the expected model")]
)
def test_what_waiting_cannot_mend_fails_at_once(status: int, words: str) -> None:
    with pytest.raises(service_ready.NotReady, match=words):
        wait(lambda: Answer(200), lambda left: Answer(status, "{}"))


def test_a_two_hundred_without_a_token_is_no_completion() -> None:
    empty = Answer(200, json.dumps({"choices": [{}], "usage": {"completion_tokens": 0}}))
    with pytest.raises(service_ready.NotReady):
        wait(lambda: Answer(200), lambda left: empty)


class Server(BaseHTTPRequestHandler):
    key = "secret"
    seen: list[dict[str, Any]] = []

    def log_message(self, *args: Any) -> None:
        """Keep the test's output clean."""

    def reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self.reply(200, "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {self.key}":
            self.reply(401, '{"error": "Unauthorized"}')
            return
        self.seen.append(body)
        self.reply(200, GOOD.body)


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Server.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def settings_file(tmp_path: Path, port: int) -> Path:
    path = tmp_path / "service.json"
    path.write_text(
        json.dumps(
            {
                "name": "t", "host": "0.0.0.0", "port": port, "model_name": "qwen-local",
                "release_link": "/r", "cache_dir": "/c", "config": "/x.yaml", "model_path": "/m",
                "ready_timeout": 5,
            }
        )
    )  # fmt: skip
    return path


def test_the_program_asks_with_the_units_credential(
    server: ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "api-key").write_text("secret\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("MAINPID", raising=False)
    settings = settings_file(tmp_path, server.server_address[1])
    assert service_ready.main(["--settings", str(settings)]) == 0
    assert Server.seen[0]["model"] == "qwen-local"
    assert Server.seen[0]["max_tokens"] == 1
    assert "secret" not in "".join(capsys.readouterr())


def test_the_program_tells_a_wrong_key(
    server: ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "api-key").write_text("other")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    settings = settings_file(tmp_path, server.server_address[1])
    assert service_ready.main(["--settings", str(settings)]) == 1
    assert "refuses the key" in capsys.readouterr().err


def test_metrics_are_read_with_their_labels() -> None:
    text = (
        "# HELP x y\n"
        'vllm:num_requests_running{engine="0",model_name="a \\"b\\""} 2.0\n'
        'vllm:num_requests_waiting{engine="0"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0"} 7.0\n'
    )
    assert service_http.in_flight(text) == 3
    assert service_http.samples(text, "vllm:num_requests_running")[0][0]["model_name"] == 'a "b"'


def test_no_server_is_an_answer() -> None:
    answer = service_http.ask("http://127.0.0.1:9/health", timeout=2)
    assert answer.status is None
    assert answer.reason() == "connection refused"
