"""``wait-ready``: the unit counts as started only when a real completion came back.

``/health`` answers 200 before the first request can fail, so it is only the first of two questions.
Runs as ``ExecStartPost=``; watches the engine's process, so that an engine that dies while it
loads ends the start at once and not at the time limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import service_http, service_settings
from .service_http import Answer

#: Asks one short completion; the first one also waits for kernels that are compiled on first use.
QUESTION = "Reply with the word ready."
#: A server that answers health but fails this many completions in a row will not recover.
FAILED_COMPLETIONS = 3


class NotReady(Exception):
    """Why the service does not answer, in one sentence."""


Ask = Callable[[str, float], Answer]


def wait(
    health: Callable[[], Answer],
    completion: Callable[[float], Answer],
    alive: Callable[[], bool],
    *,
    timeout: float,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until a completion comes back.

    :param health: asks whether the server is up
    :param completion: asks for one completion; gets the seconds that are left
    :param alive: whether the engine's process still exists
    :param timeout: seconds after which it is given up
    :param say: gets a line of progress about twice a minute
    :returns: seconds that it took
    :raises NotReady: when the engine ended, refuses us for good, or time is up
    """
    start = clock()
    told = start
    failures = 0
    last = "no answer yet"
    while True:
        passed = clock() - start
        if not alive():
            raise NotReady(
                f"the engine ended {passed:.0f} s after its start, before it answered; "
                "its last log lines say why"
            )
        if passed >= timeout:
            raise NotReady(
                f"no completion within {timeout:.0f} s ({last}); "
                "see the log, or raise vllm_service_ready_timeout"
            )
        answer = health()
        if answer.ok:
            answer = completion(timeout - passed)
            if service_http.completed(answer) > 0:
                return clock() - start
            if answer.status in (401, 403):
                raise NotReady(
                    "the server refuses the key of this host; "
                    "restart the service after the key file changed"
                )
            if answer.status == 404:
                raise NotReady(f"the server does not serve the expected model ({answer.reason()})")
            if answer.status is not None:
                failures += 1
            last = f"health is good but the completion failed: {answer.reason()}"
            if failures >= FAILED_COMPLETIONS:
                raise NotReady(
                    f"the server answers /health but failed {failures} completions "
                    f"({answer.reason()})"
                )
        else:
            last = answer.reason()
        if clock() - told >= 30:
            told = clock()
            say(f"not ready after {told - start:.0f} s: {last}")
        sleep(2.0 if answer.ok or failures else 1.0)


def process_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def read_key(path: str | Path | None) -> str | None:
    """Read the key from a credential file.

    :raises NotReady: when a file was named and cannot be read
    """
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except OSError as error:
        raise NotReady(f"cannot read the key from {str(path)!r}: {error.strerror}") from error


def main(argv: list[str]) -> int:
    """Wait for the service named by the settings file.

    :returns: 0 when a completion came back, 1 with the reason on stderr otherwise
    """
    parser = argparse.ArgumentParser(prog="vllm-turing-host wait-ready")
    parser.add_argument("--settings", required=True)
    parser.add_argument("--key-file", help="file with the key; default: a credential of the unit")
    parser.add_argument("--pid", type=int, help="the engine's process; default: $MAINPID")
    parser.add_argument("--timeout", type=float)
    options = parser.parse_args(argv)
    try:
        settings = service_settings.load(options.settings)
        key_file = options.key_file
        if key_file is None and settings.api_key:
            key_file = credential("api-key")
        key = read_key(key_file) if settings.api_key else None
        pid = options.pid or int(os.environ.get("MAINPID", "0") or 0)
        took = wait(
            lambda: service_http.ask(f"{settings.url}/health", key=key, timeout=5),
            lambda left: service_http.chat(
                settings.url,
                settings.model_name,
                QUESTION,
                key=key,
                max_tokens=1,
                timeout=max(5.0, left),
            ),
            lambda: pid <= 0 or process_alive(pid),
            timeout=options.timeout or settings.ready_timeout,
            say=lambda text: print(text, flush=True),
        )
    except (NotReady, service_settings.SettingsError) as error:
        print(f"vllm-turing-host wait-ready: {error}", file=sys.stderr)
        return 1
    print(f"ready after {took:.0f} s: {settings.model_name!r} answers on {settings.url}")
    return 0


def credential(name: str) -> str:
    """Return the path of a systemd credential of this unit.

    :raises NotReady: outside a unit that has credentials
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    if not folder:
        raise NotReady("there is no $CREDENTIALS_DIRECTORY; start the service through systemd")
    return f"{folder}/{name}"
