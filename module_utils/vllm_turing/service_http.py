"""Ask the server: health, models, completions, metrics; with the key, never showing it."""

from __future__ import annotations

import http.client
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
#: Straight to the server on this host, whatever proxy the environment names.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Answer:
    """What came back.

    :ivar status: HTTP status; ``None`` when nothing came back (see ``error``)
    :ivar body: the text, cut to 4 MiB
    :ivar error: why nothing came back, in the system's words
    """

    status: int | None
    body: str = ""
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the server answered with success."""
        return self.status is not None and 200 <= self.status < 300

    def json(self) -> Any:
        """Return the decoded body, or ``None`` when it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def reason(self) -> str:
        """Say in a few words what is wrong with this answer."""
        if self.status is None:
            return self.error or "no answer"
        data = self.json()
        message = ""
        if isinstance(data, dict):
            inner = data.get("error", data)
            message = str(inner.get("message") if isinstance(inner, dict) else inner)
        return f"HTTP {self.status}: {(message or self.body.strip() or 'no text')[:300]}"


def ask(
    url: str,
    *,
    key: str | None = None,
    body: Mapping[str, Any] | None = None,
    timeout: float = 10.0,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send one request; never raises for a server that is not there or answers badly.

    :param url: full address
    :param key: sent as a bearer token
    :param body: sent as JSON by POST; otherwise GET
    :param timeout: seconds without a byte after which it is given up
    """
    request = urllib.request.Request(url, method="GET" if body is None else "POST")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    for name, value in (headers or {}).items():
        request.add_header(name, value)
    try:
        with _OPENER.open(request, timeout=timeout) as response:
            return Answer(response.status, response.read(4 << 20).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        try:
            text = error.read(1 << 16).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            text = ""
        return Answer(error.code, text)
    except urllib.error.URLError as error:
        return Answer(None, error=_words(error.reason))
    except (OSError, http.client.HTTPException) as error:
        return Answer(None, error=_words(error))


def chat(
    url: str,
    model: str,
    text: str,
    *,
    key: str | None,
    max_tokens: int,
    timeout: float,
    **more: Any,
) -> Answer:
    """Ask for one chat completion.

    :param url: the server's base address
    :param more: further fields of the request
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }
    return ask(f"{url}/v1/chat/completions", key=key, body=body, timeout=timeout)


def completed(answer: Answer) -> int:
    """Return how many tokens a completion brought; 0 when it is none."""
    data = answer.json() if answer.ok else None
    if not isinstance(data, dict) or not data.get("choices"):
        return 0
    usage = data.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return the samples of one metric from Prometheus' text format.

    :param name: full name, such as ``vllm:num_requests_running``
    :returns: labels and value of each sample
    """
    found: list[tuple[dict[str, str], float]] = []
    for line in text.splitlines():
        if not line.startswith(name):
            continue
        match = _SAMPLE.match(line)
        if match is None or match.group(1) != name:
            continue
        labels = {
            label: re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], value)
            for label, value in _LABEL.findall(match.group(2) or "")
        }
        try:
            found.append((labels, float(match.group(3))))
        except ValueError:
            continue
    return found


def in_flight(text: str) -> int:
    """Return how many requests run or wait, from the server's metrics."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return int(sum(value for name in names for _, value in samples(text, name)))


def _words(reason: object) -> str:
    """Put the system's reason for no answer into words."""
    if isinstance(reason, (TimeoutError, socket.timeout)):
        return "no answer in time"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror.lower()
    return str(reason) or type(reason).__name__
