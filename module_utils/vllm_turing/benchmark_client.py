"""One streamed chat request, timed; and the server's counters around it.

Times come from a monotonic clock. The stream is read line by line: a read of a fixed size waits
until that many bytes have come, which makes the first token look late and the rest look fast.

Definitions (those of the reference host's own measurements, so that figures can be compared):

* time to first token: from the request to the first piece of reasoning, content or tool call
* prefill rate = prompt tokens / time to first token
* decode rate = completion tokens / (last token - first token)
* acceptance = accepted draft tokens / draft tokens, from the server's counters before and after
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Clock = Callable[[], float]

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
CACHE_QUERIES = "vllm:prefix_cache_queries"
CACHE_HITS = "vllm:prefix_cache_hits"
COUNTERS = (ACCEPTED, DRAFTED, CACHE_QUERIES, CACHE_HITS)

ONE_PIECE_SECONDS = 0.02
"""All tokens within this time, and more than a few of them: something between does not stream."""
ONE_PIECE_TOKENS = 8

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")


class BenchmarkError(Exception):
    """One clear sentence for the person who measures."""


@dataclass(frozen=True)
class Server:
    """Where to measure."""

    url: str
    model: str
    key: str | None = None
    timeout: float = 900.0
    """Longest silence in seconds, which includes a whole prefill."""


@dataclass(frozen=True)
class Measurement:
    """One request. Times in seconds, rates in tokens a second; None: could not be known."""

    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    total_s: float
    prefill_tok_s: float | None
    decode_tok_s: float | None
    acceptance: float | None
    cached_tokens: int | None
    """Prompt tokens that the server took from its prefix cache, by its own counter."""
    events: int
    client_ms_per_event: float | None
    """Processor time of this client for one event of the stream."""
    finish_reason: str | None
    error: str | None = None
    """Why the figures are partial."""
    warning: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-able mapping."""
        return asdict(self)


def connect(server: Server, timeout: float) -> http.client.HTTPConnection:
    """Open a connection; BenchmarkError when nobody answers."""
    parts = urllib.parse.urlsplit(server.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchmarkError(f"the address '{server.url}' must look like http://127.0.0.1:8000.")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout)
    try:
        connection.connect()
    except OSError as error:
        reason = error.strerror or str(error)
        raise BenchmarkError(
            f"no server answers at '{server.url}' ({reason}); is the service running?"
        ) from None
    return connection


def headers(server: Server) -> dict[str, str]:
    """Return the request headers; the key goes nowhere else."""
    result = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if server.key:
        result["Authorization"] = f"Bearer {server.key}"
    return result


def path_of(server: Server, path: str) -> str:
    """Return the path below the server's address."""
    return urllib.parse.urlsplit(server.url).path.rstrip("/") + path


def counters(server: Server) -> dict[str, float]:
    """Return the server's counters in COUNTERS, summed over labels; {} if it has none."""
    connection = connect(server, 30.0)
    try:
        connection.request("GET", path_of(server, "/metrics"), headers=headers(server))
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
        return parse_counters(text) if response.status == 200 else {}
    except (OSError, http.client.HTTPException) as error:
        raise BenchmarkError(
            f"the server at '{server.url}' broke off its /metrics: {error!r}."
        ) from None
    finally:
        connection.close()


def parse_counters(text: str) -> dict[str, float]:
    """Read the counters in COUNTERS out of Prometheus' text format, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match is None:
            continue
        name = match["name"].removesuffix("_total")
        if name in COUNTERS:
            try:
                found[name] = found.get(name, 0.0) + float(match["value"])
            except ValueError:
                continue
    return found


def difference(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    """Return by how much a counter grew; None if the server lacks it or was restarted between."""
    if name not in after:
        return None
    grown = after[name] - before.get(name, 0.0)
    return grown if grown >= 0 else None


def count_tokens(server: Server, prompt: str) -> tuple[int, int | None]:
    """Return a prompt's length by the model's own tokenizer, and the longest context."""
    connection = connect(server, 120.0)
    body = {"model": server.model, "messages": messages(prompt), "add_generation_prompt": True}
    try:
        connection.request(
            "POST", path_of(server, "/tokenize"), json.dumps(body).encode(), headers(server)
        )
        response = connection.getresponse()
        raw = response.read()
        if response.status != 200:
            raise BenchmarkError(refusal(server, response.status, raw))
        answer = json.loads(raw)
        longest = answer.get("max_model_len")
        return int(answer["count"]), int(longest) if longest else None
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise BenchmarkError(
            f"the server at '{server.url}' gave no token count on /tokenize: {error!r}."
        ) from None
    finally:
        connection.close()


def messages(prompt: str) -> list[dict[str, str]]:
    """Return the conversation that is measured: one message of the user."""
    return [{"role": "user", "content": prompt}]


def refusal(server: Server, status: int, raw: bytes) -> str:
    """Return one sentence for an answer that is not 200."""
    text = raw.decode("utf-8", "replace")
    try:
        answer = json.loads(text)
        inner = answer.get("error", answer)
        said = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        said = text
    said = " ".join(said.split())[:300]
    if status in (401, 403):
        return f"the server at '{server.url}' refuses the key (HTTP {status}); name its key file."
    if status == 404:
        return f"the server at '{server.url}' does not know the model '{server.model}': {said}"
    if status == 429:
        return f"the server at '{server.url}' is busy with other requests (HTTP 429): {said}"
    return f"the server at '{server.url}' refuses the request (HTTP {status}): {said}"


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an event stream, each as soon as its line is complete."""
    while True:
        line = response.readline()
        if not line:
            return
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            return
        yield json.loads(payload)


def carries_tokens(event: Mapping[str, Any]) -> bool:
    """Tell whether an event holds output of the model: reasoning counts as much as content."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if any(
            delta.get(key) for key in ("reasoning_content", "reasoning", "content", "tool_calls")
        ):
            return True
    return False


def measure(
    server: Server, prompt: str, max_tokens: int, clock: Clock = time.perf_counter
) -> Measurement:
    """Send one request and time its stream.

    A server that goes away in the middle gives a Measurement with `error` and what was seen so far;
    BenchmarkError means that nothing was measured at all.
    """
    before = counters(server)
    body = {
        "model": server.model,
        "messages": messages(prompt),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    payload = json.dumps(body).encode()
    connection = connect(server, server.timeout)
    try:
        started = clock()
        processor = time.thread_time()
        connection.request(
            "POST", path_of(server, "/v1/chat/completions"), payload, headers(server)
        )
        response = connection.getresponse()
        if response.status != 200:
            raise BenchmarkError(refusal(server, response.status, response.read()))
        seen = read_stream(response, clock)
        processor = time.thread_time() - processor
    except (OSError, http.client.HTTPException) as error:
        raise BenchmarkError(
            f"the server at '{server.url}' broke off before it answered: {error!r}."
        ) from None
    finally:
        connection.close()
    try:
        after = counters(server)
    except BenchmarkError:
        after = {}
    return evaluate(started, seen, processor, before, after)


@dataclass
class Stream:
    """What a stream brought; times on the caller's clock."""

    first: float | None = None
    last: float | None = None
    ended: float = 0.0
    events: int = 0
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    error: str | None = None


def read_stream(response: http.client.HTTPResponse, clock: Clock) -> Stream:
    """Read a stream to its end or to where it breaks off."""
    seen = Stream()
    try:
        for event in events(response):
            now = clock()
            seen.events += 1
            if "error" in event:
                seen.error = f"the server reported in its stream: {str(event['error'])[:300]}"
                break
            if carries_tokens(event):
                seen.first = now if seen.first is None else seen.first
                seen.last = now
            for choice in event.get("choices") or ():
                seen.finish_reason = choice.get("finish_reason") or seen.finish_reason
            seen.usage = event.get("usage") or seen.usage
    except (OSError, http.client.HTTPException) as error:
        seen.error = f"the stream broke off after {seen.events} events: {error!r}"
    except ValueError as error:
        seen.error = f"the stream holds something that is not JSON: {error}"
    seen.ended = clock()
    if seen.error is None and seen.finish_reason is None:
        seen.error = f"the stream ended after {seen.events} events without a finish reason"
    return seen


def evaluate(
    started: float,
    seen: Stream,
    processor: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> Measurement:
    """Turn what was seen into figures; anything that cannot be known is None, never zero."""
    usage = seen.usage or {}
    prompt_tokens = number(usage.get("prompt_tokens"))
    completion_tokens = number(usage.get("completion_tokens"))
    ttft = None if seen.first is None else seen.first - started
    span = 0.0 if seen.first is None or seen.last is None else seen.last - seen.first
    warning = None
    decode = None
    if completion_tokens and seen.error is None:
        if completion_tokens > ONE_PIECE_TOKENS and span < ONE_PIECE_SECONDS:
            warning = (
                "all tokens came at once: something between server and client does not stream, "
                "so there is no decode rate"
            )
        elif span > 0:
            decode = completion_tokens / span
    drafted = difference(before, after, DRAFTED)
    accepted = difference(before, after, ACCEPTED)
    cached = difference(before, after, CACHE_HITS)
    return Measurement(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        ttft_s=ttft,
        total_s=seen.ended - started,
        prefill_tok_s=prompt_tokens / ttft if prompt_tokens and ttft else None,
        decode_tok_s=decode,
        acceptance=accepted / drafted if drafted and accepted is not None else None,
        cached_tokens=None if cached is None else round(cached),
        events=seen.events,
        client_ms_per_event=1000 * processor / seen.events if seen.events else None,
        finish_reason=seen.finish_reason,
        error=seen.error,
        warning=warning,
    )


def number(value: object) -> int | None:
    """Return a whole number, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
