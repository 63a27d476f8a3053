"""What becomes of a download under each fault of the hub: a table of outcomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_turing.model_http import Source
from vllm_turing.model_lock import ModelError
from vllm_turing.model_transfer import Limiter, Stopped

from .conftest import SEGMENT, Hub

SHARD = "model-00002-of-00003.safetensors"

RECOVERS: dict[str, list[Mapping[str, Any]]] = {
    "no fault": [],
    "reset once": [{"kind": "reset", "match": SHARD, "after": 30_000, "times": 1}],
    "reset on every request": [{"kind": "reset", "after": 40_000}],
    "clean close, short": [{"kind": "truncate", "match": SHARD, "after": 30_000, "times": 3}],
    "short on every request": [{"kind": "truncate", "after": 50_000}],
    "no length, and short": [
        {"kind": "no-ranges", "times": 0},
        {"kind": "no-length", "match": SHARD, "after": 20_000, "times": 2},
    ],
    "no length": [{"kind": "no-length", "where": "any"}],
    "wrong bytes once": [{"kind": "corrupt", "match": SHARD, "times": 1}],
    "lying range once": [{"kind": "lying-range", "match": SHARD, "times": 1}],
    "wrong range once": [{"kind": "wrong-range", "match": SHARD, "times": 1}],
    "429 with Retry-After": [
        {"kind": "status", "status": 429, "retry_after": 1, "where": "data", "times": 3}
    ],
    "429 without Retry-After": [{"kind": "status", "status": 429, "where": "resolve", "times": 6}],
    "503 on data": [{"kind": "status", "status": 503, "where": "data", "times": 4}],
    "416 once": [{"kind": "status", "status": 416, "where": "data", "times": 1}],
    "expired signature": [{"kind": "status", "status": 403, "where": "data", "times": 2}],
    "no ranges at all": [{"kind": "no-ranges", "where": "any"}],
    "no ranges on one file": [{"kind": "no-ranges", "match": SHARD}],
    "login page once": [{"kind": "login", "where": "data", "match": SHARD, "times": 1}],
    "login page for a small file once": [{"kind": "login", "where": "small", "times": 1}],
    "pointer once": [{"kind": "pointer", "match": SHARD, "times": 1}],
    "stall": [{"kind": "stall", "match": SHARD, "after": 10_000, "seconds": 4, "times": 1}],
    "dead redirect once": [{"kind": "redirect", "where": "resolve", "times": 2}],
    "cap of 3 connections": [{"kind": "busy", "limit": 3, "status": 429}],
    "cap of 3 connections, 503": [{"kind": "busy", "limit": 3, "status": 503}],
    "size 0 in the redirect": [{"kind": "zero-size", "where": "resolve"}],
    "xet offered": [{"kind": "xet", "where": "resolve"}],
}

FAILS: dict[str, tuple[list[Mapping[str, Any]], str, bool]] = {
    # fault, what the message must say, permanent
    "wrong bytes": ([{"kind": "corrupt", "match": SHARD}], "has sha256", True),
    "object too short": ([{"kind": "shorter", "match": SHARD}], "/", True),
    "pointer": ([{"kind": "pointer", "match": SHARD}], "a file of 131 bytes", True),
    "login page": ([{"kind": "login", "where": "resolve"}], "web page", True),
    "lying ranges": ([{"kind": "lying-range", "match": SHARD}], "has sha256", True),
    "429 for ever": (
        [{"kind": "status", "status": 429, "where": "data"}],
        "limits our requests",
        False,
    ),
    "503 for ever": ([{"kind": "status", "status": 503, "where": "data"}], "status 503", False),
    "no such file": ([{"kind": "status", "status": 404, "where": "data"}], "status 404", True),
    "denied": ([{"kind": "status", "status": 403, "where": "resolve"}], "denies access", True),
    "dead redirect": (
        [{"kind": "redirect", "where": "resolve", "to": "http://127.0.0.1:9/x"}],
        "'127.0.0.1:9' (where '",
        False,
    ),
    "unknown host": (
        [{"kind": "redirect", "where": "resolve", "to": "http://cas-bridge.invalid/x"}],
        "'cas-bridge.invalid' (where '",
        False,
    ),
    "redirect to a file": (
        [{"kind": "redirect", "where": "resolve", "to": "file:///etc/passwd"}],
        "redirects to 'file:///etc/passwd'",
        True,
    ),
}


@pytest.mark.parametrize("faults", RECOVERS.values(), ids=RECOVERS.keys())
def test_right_bytes_despite(mirror: Hub, tmp_path: Path, faults: list[Mapping[str, Any]]) -> None:
    mirror.faults(*faults)
    folder = tmp_path / "model"
    mirror.transfer(folder).run()
    assert mirror.missing_files(folder) == []
    assert mirror.wrong_files(folder) == []
    assert not (folder / ".parts").exists()


@pytest.mark.parametrize(("faults", "says", "permanent"), FAILS.values(), ids=FAILS.keys())
def test_clear_failure_then_recovery(
    mirror: Hub, tmp_path: Path, faults: list[Mapping[str, Any]], says: str, permanent: bool
) -> None:
    mirror.faults(*faults)
    folder = tmp_path / "model"
    with pytest.raises(ModelError) as caught:
        mirror.transfer(folder).run()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.permanent is permanent
    assert mirror.missing_files(folder) != []
    assert mirror.wrong_files(folder) == []
    mirror.faults()
    mirror.transfer(folder).run()
    assert mirror.missing_files(folder) == []
    assert mirror.wrong_files(folder) == []


def test_a_dead_source_is_left_for_the_next(mirror: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    mirror.transfer(folder, Source("http://127.0.0.1:9"), mirror.source).run()
    assert mirror.wrong_files(folder) == mirror.missing_files(folder) == []


def test_wrong_bytes_of_one_source_come_right_from_the_other(
    mirror: Hub, second_mirror: Hub, tmp_path: Path
) -> None:
    mirror.faults({"kind": "corrupt", "match": SHARD})
    folder = tmp_path / "model"
    mirror.transfer(folder, mirror.source, second_mirror.source).run()
    assert mirror.wrong_files(folder) == mirror.missing_files(folder) == []
    # What was right from the first is not fetched twice.
    assert mirror.sent() + second_mirror.sent() < 1.5 * sum(map(len, mirror.contents.values()))


def test_a_source_that_dies_midway_loses_nothing(
    mirror: Hub, second_mirror: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    mirror.faults({"kind": "truncate", "after": 20_000, "times": 12}, {"kind": "reset"})
    mirror.transfer(folder, mirror.source, second_mirror.source).run()
    assert mirror.wrong_files(folder) == mirror.missing_files(folder) == []


def test_the_token_stays_with_the_source(mirror: Hub, second_mirror: Hub, tmp_path: Path) -> None:
    mirror.handler.cdn = second_mirror.url
    transfer = mirror.transfer(tmp_path / "model")
    transfer.token = "hf_secret"
    transfer.run()
    assert any(seen.authorization for seen in mirror.handler.seen)
    assert second_mirror.handler.seen
    assert not any(seen.authorization for seen in second_mirror.handler.seen)


def test_a_plain_web_folder_serves_too(mirror: Hub, tmp_path: Path) -> None:
    base = f"{mirror.url}/cdn/{mirror.lock.repo}/{mirror.lock.commit}"
    folder = tmp_path / "model"
    mirror.transfer(folder, Source(base, plain=True)).run()
    assert mirror.wrong_files(folder) == mirror.missing_files(folder) == []


def test_stop_and_resume_fetches_each_byte_once(mirror: Hub, tmp_path: Path) -> None:
    mirror.faults({"kind": "slow", "rate": 100_000})
    folder = tmp_path / "model"
    first = mirror.transfer(folder, connections=4)
    threading.Timer(1.0, first.stop).start()
    with pytest.raises(Stopped):
        first.run()
    assert first.fetched > 0
    mirror.faults()
    second = mirror.transfer(folder)
    second.run()
    assert mirror.wrong_files(folder) == mirror.missing_files(folder) == []
    total = sum(map(len, mirror.contents.values()))
    assert first.fetched + second.fetched <= 1.1 * total


def test_parts_of_another_segment_size_start_over(mirror: Hub, tmp_path: Path) -> None:
    mirror.faults({"kind": "slow", "rate": 100_000})
    folder = tmp_path / "model"
    first = mirror.transfer(folder)
    threading.Timer(0.5, first.stop).start()
    with pytest.raises(Stopped):
        first.run()
    mirror.faults()
    mirror.transfer(folder, segment=3 * SEGMENT).run()
    assert mirror.wrong_files(folder) == mirror.missing_files(folder) == []


def test_a_damaged_journal_costs_bytes_not_truth(mirror: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    parts = folder / ".parts"
    parts.mkdir(parents=True)
    locked = mirror.lock.files[SHARD]
    part = parts / f"{locked.key}-{SHARD}.part"
    part.write_bytes(b"\0" * locked.size)
    positions = {str(start): start + 10 for start in range(0, locked.size, SEGMENT)}
    journal = {"size": locked.size, "segment": SEGMENT, "positions": positions}
    part.with_suffix(".json").write_text(str(journal).replace("'", '"'))
    mirror.transfer(folder).run()
    assert mirror.wrong_files(folder) == mirror.missing_files(folder) == []


def test_a_full_disk_is_named(mirror: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, position: int) -> int:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ModelError, match="is full: free some space"):
            mirror.transfer(folder).run()
    mirror.transfer(folder).run()
    assert mirror.wrong_files(folder) == mirror.missing_files(folder) == []


def test_the_redirect_is_asked_once_a_file(mirror: Hub, tmp_path: Path) -> None:
    mirror.transfer(tmp_path / "model").run()
    asked = [seen.path for seen in mirror.handler.seen if seen.where == "resolve"]
    assert len(asked) == len(set(asked)) == len(mirror.contents) - 1  # the empty one needs none


def test_a_limit_is_kept(mirror: Hub, tmp_path: Path) -> None:
    started = time.monotonic()
    mirror.transfer(tmp_path / "model", bandwidth=1_000_000).run()
    total = sum(map(len, mirror.contents.values()))
    # Half a second may be made up for at the start.
    assert time.monotonic() - started > total / 1_000_000 - 0.6


def test_a_limiter_without_a_rate_never_waits() -> None:
    limiter = Limiter(0)
    started = time.monotonic()
    for _ in range(1000):
        limiter.take(1 << 30)
    assert time.monotonic() - started < 0.5


KILLED = """
import sys; sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from vllm_turing import model_lock
from vllm_turing.model_http import Source
from vllm_turing.model_transfer import Settings, Transfer
lock = model_lock.load(Path(sys.argv[3]))
Transfer(lock.repo, lock.commit, lock.files, Path(sys.argv[4]), [Source(sys.argv[5])],
         Settings(connections=4, segment=65536, timeout=2.0), log=lambda text: None).run()
"""


def test_sigkill_at_any_time_is_survived(mirror: Hub, tmp_path: Path) -> None:
    lock_file = tmp_path / "lock.json"
    lock_file.write_text(mirror.lock.dump())
    folder = tmp_path / "model"
    root = Path(__file__).parents[3]
    mirror.faults({"kind": "slow", "rate": 150_000})
    arguments = [str(root / "module_utils"), str(root), str(lock_file), str(folder), mirror.url]
    for delay in (0.4, 0.9, 0.6):
        process = subprocess.Popen([sys.executable, "-c", KILLED, *arguments])
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert mirror.wrong_files(folder) == []
    mirror.faults()
    subprocess.run([sys.executable, "-c", KILLED, *arguments], check=True, timeout=60)
    assert mirror.wrong_files(folder) == mirror.missing_files(folder) == []
