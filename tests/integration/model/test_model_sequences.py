"""Any sequence of faults leaves right bytes or clearly unfinished ones, and a healthy run mends it.

Slow (minutes), so not among the unit tests: `pytest tests/integration/model`.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab import hub
from vllm_turing.model_http import Source
from vllm_turing.model_lock import Lock, LockedFile, ModelError
from vllm_turing.model_transfer import Settings, Transfer

ROOT = Path(__file__).parents[3]
REPO = "lab/model"
SMALL = Settings(connections=4, segment=4096, timeout=1.0, patience=0.3, backoff=0.001)


class Mirror:
    """A hub with one small repository."""

    def __init__(self, state: Path, size: int) -> None:
        self.state = state
        self.handler = hub.create_handler(state)
        handler = self.handler

        class Request(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                handler.handle(self, self.path)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Request)
        Thread(target=self.server.serve_forever, daemon=True, args=(0.05,)).start()
        self.source = Source(f"http://127.0.0.1:{self.server.server_port}/hub")
        chance = random.Random(1)
        self.contents = {f"{n}.safetensors": chance.randbytes(size + n) for n in range(3)}
        self.contents["config.json"] = b"{}\n"
        repo = hub.publish(state / "hub", REPO, self.contents)
        files = {p: LockedFile(k.size, k.sha256, k.blob_id) for p, k in repo.files.items()}
        self.lock = Lock(REPO, repo.commit, files)

    def transfer(self, folder: Path) -> Transfer:
        return Transfer(
            REPO,
            self.lock.commit,
            self.lock.files,
            folder,
            [self.source],
            SMALL,
            log=lambda text: None,
        )

    def check(self, folder: Path) -> bool:
        """Fail on wrong bytes under a final name; tell whether all files are there."""
        for path, content in self.contents.items():
            file = folder / path
            assert not file.exists() or file.read_bytes() == content, path
        return all((folder / path).exists() for path in self.contents)


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mirror]:
    running = Mirror(tmp_path_factory.mktemp("lab"), 30_000)
    yield running
    running.server.shutdown()


FAULT = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["reset", "truncate", "no-length"]),
            "where": st.sampled_from(["data", "small", "any"]),
            "after": st.integers(0, 5000),
            "times": st.integers(1, 20),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(
                [
                    *("corrupt", "shorter", "pointer", "no-ranges", "wrong-range"),
                    *("lying-range", "login", "redirect"),
                ]
            ),
            "where": st.sampled_from(["data", "resolve", "small"]),
            "match": st.sampled_from(["*", "1.safetensors"]),
            "times": st.one_of(st.none(), st.integers(1, 10)),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("status"),
            "where": st.sampled_from(["data", "resolve", "small"]),
            "status": st.sampled_from([403, 404, 416, 429, 500, 503]),
            "retry_after": st.just(0),
            "times": st.one_of(st.none(), st.integers(1, 10)),
        }
    ),
)
#: What may happen to the parts between two runs.
DAMAGE = st.sampled_from(["nothing", "nothing", "flip", "truncate", "journal", "vanish"])


def harm(folder: Path, damage: str, chance: random.Random) -> None:
    parts = sorted((folder / ".parts").glob("*.part")) if (folder / ".parts").is_dir() else []
    if not parts:
        return
    part = chance.choice(parts)
    if damage == "flip" and part.stat().st_size:
        data = bytearray(part.read_bytes())
        data[chance.randrange(len(data))] ^= 1
        part.write_bytes(data)
    elif damage == "truncate":
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    elif damage == "journal":
        part.with_suffix(".json").write_text('{"size": 1')
    elif damage == "vanish":
        part.unlink()


@given(
    runs=st.lists(st.tuples(st.lists(FAULT, max_size=3), DAMAGE), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_sequence_of_faults(
    mirror: Mirror, runs: list[tuple[list[Mapping[str, Any]], str]], seed: int
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="model-sequences-"))
    try:
        for faults, damage in runs:
            hub.set_faults(mirror.state, *faults)
            try:
                mirror.transfer(folder).run()
            except ModelError as error:
                assert "\n" not in str(error)
                assert not mirror.check(folder)
            else:
                assert mirror.check(folder)
            harm(folder, damage, random.Random(seed))
        hub.set_faults(mirror.state)
        mirror.transfer(folder).run()
        assert mirror.check(folder)
    finally:
        shutil.rmtree(folder)


WORKER = """
import sys; sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from vllm_turing import model_lock
from vllm_turing.model_http import Source
from vllm_turing.model_transfer import Settings, Transfer
lock = model_lock.load(Path(sys.argv[3]))
Transfer(lock.repo, lock.commit, lock.files, Path(sys.argv[4]), [Source(sys.argv[5])],
         Settings(connections=4, segment=1 << 20), log=lambda text: None).run()
"""


def test_thirty_kills_cost_a_tenth_at_most(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "lab", 100_000_000)
    hub.set_faults(mirror.state, {"kind": "slow", "rate": 1_000_000})
    lock = tmp_path / "lock.json"
    lock.write_text(mirror.lock.dump())
    folder = tmp_path / "model"
    arguments = [str(ROOT / "module_utils"), str(ROOT), str(lock), str(folder)]
    command = [sys.executable, "-c", WORKER, *arguments, mirror.source.base]
    chance = random.Random(7)
    for _ in range(30):
        worker = subprocess.Popen(command)
        time.sleep(chance.uniform(0.5, 2.5))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        mirror.check(folder)
    hub.set_faults(mirror.state)
    subprocess.run(command, check=True, timeout=120)
    assert mirror.check(folder)
    sent = sum(seen.sent for seen in mirror.handler.seen if seen.where in ("data", "small"))
    total = sum(map(len, mirror.contents.values()))
    mirror.server.shutdown()
    assert sent <= 1.1 * total, f"{sent / total:.2f} times the model was sent"
