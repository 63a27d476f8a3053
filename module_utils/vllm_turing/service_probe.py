"""Look at the running service from the host itself: what it is, what it answers, what it holds.

Read-only. Everything is asked of the running server (its metrics and its endpoints), of systemd and
of the driver; nothing is taken from the files that this project wrote, except where to ask.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import service_http, service_launch
from .run import Runner, run
from .service_settings import Settings

#: What of vLLM's cache configuration (the metric ``vllm:cache_config_info``) people ask for.
KV_FIELDS = (
    "block_size",
    "num_gpu_blocks",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
    "cache_dtype",
    "mamba_cache_mode",
    "mamba_ssm_cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
)
#: Log lines of vLLM 0.24.0 that prove which code runs.
PROOFS = {
    "flashinfer_attention": r"Using (?:AttentionBackendEnum\.)?FLASHINFER(?: attention)? backend",
    "flashqla_legacy": r"Using FlashQLA legacy \(SM70/SM75\) GDN prefill kernel",
    "gdn_warmup_failed": r"GDN prefill kernel warmup \(T=.*\) failed",
}
PROMPT = "In one short sentence: what is NVLink?"
_PNG_SIDE = 64


def observe(
    settings: Settings,
    key: str | None,
    *,
    runner: Runner = run,
    round_trips: tuple[str, ...] = (),
    needle_tokens: int = 0,
    timeout: float = 300.0,
) -> dict[str, Any]:
    """Return everything that is told about the running service.

    :param key: the API key, if the server wants one; it is not part of the result
    :param round_trips: which of :data:`ROUND_TRIPS` to make besides the plain completion
    :param needle_tokens: length of the long-context question; 0 leaves it out
    :param timeout: seconds for one completion
    """
    found: dict[str, Any] = {"unit": unit(settings, runner), "release": release(settings)}
    health = service_http.ask(f"{settings.url}/health", key=key, timeout=5)
    found["health"] = {"ok": health.ok, "reason": "" if health.ok else health.reason()}
    if not health.ok:
        reason = f"no health: {health.reason()}"
        found |= {"models": [], "kv": {}, "version": None, "gpus": gpus(runner)}
        found["completion"] = {"ok": False, "reason": reason, "prompt": PROMPT, "text": ""}
        found["round_trips"] = {name: {"ok": False, "reason": reason} for name in round_trips}
        return found
    models = service_http.ask(f"{settings.url}/v1/models", key=key).json()
    listed = models.get("data", []) if isinstance(models, dict) else []
    found["models"] = [
        {"id": entry.get("id"), "max_model_len": entry.get("max_model_len")} for entry in listed
    ]
    version = service_http.ask(f"{settings.url}/version", key=key).json()
    found["version"] = version.get("version") if isinstance(version, dict) else None
    found["key_required"] = service_http.ask(f"{settings.url}/v1/models").status == 401
    found["completion"] = completion(settings, key, timeout)
    found["kv"] = kv(service_http.ask(f"{settings.url}/metrics", key=key).body)
    found["gpus"] = gpus(runner)
    found["log"] = log_proofs(settings, runner)
    found["round_trips"] = {name: ROUND_TRIPS[name](settings, key, timeout) for name in round_trips}
    if needle_tokens > 0:
        found["round_trips"]["needle"] = needle(settings, key, needle_tokens, timeout)
    return found


def unit(settings: Settings, runner: Runner = run) -> dict[str, str]:
    """Return systemd's view of the service."""
    names = "ActiveState,SubState,Result,NRestarts,MainPID,InvocationID"
    result = runner(["systemctl", "show", f"{settings.name}.service", "--property", names])
    return dict(line.partition("=")[::2] for line in result.stdout.splitlines() if "=" in line)


def release(settings: Settings) -> dict[str, Any]:
    """Return fingerprint, stack and versions of the release that runs."""
    try:
        data = service_launch.release_of(settings.release_link)
    except service_launch.LaunchError as error:
        return {"problem": str(error), "versions": {}}
    return {name: data.get(name) for name in ("fingerprint", "stack", "built_at", "versions")}


def completion(settings: Settings, key: str | None, timeout: float) -> dict[str, Any]:
    """Ask the question that the report shows."""
    start = time.monotonic()
    answer = service_http.chat(
        settings.url, settings.model_name, PROMPT, key=key, max_tokens=64, timeout=timeout
    )
    seconds = round(time.monotonic() - start, 2)
    tokens = service_http.completed(answer)
    return {
        "ok": tokens > 0,
        "reason": "" if tokens > 0 else answer.reason(),
        "prompt": PROMPT,
        "text": text_of(answer.json()) if answer.ok else "",
        "tokens": tokens,
        "seconds": seconds,
    }


def text_of(data: Any) -> str:
    """Return what a chat completion says: its content, or its reasoning while that is all."""
    try:
        message = data["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        return ""
    for name in ("content", "reasoning_content", "reasoning"):
        text = message.get(name)
        if isinstance(text, str) and text.strip():
            return text.strip()
    return ""


def kv(metrics: str) -> dict[str, Any]:
    """Return the KV cache as the engine sized it, from its metrics."""
    found = service_http.samples(metrics, "vllm:cache_config_info")
    if not found:
        return {}
    labels = found[0][0]
    return {name: typed(labels[name]) for name in KV_FIELDS if name in labels}


def typed(text: str) -> Any:
    """Return a metric's label as the value that it spells."""
    if text in ("True", "False"):
        return text == "True"
    if text == "None":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def gpus(runner: Runner = run) -> list[dict[str, Any]]:
    """Return memory and power of each card; empty without a driver."""
    query = "index,uuid,name,memory.used,memory.total,power.limit"
    result = runner(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"], timeout=30
    )
    cards = []
    for line in result.stdout.splitlines() if result.ok else ():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 6 and cells[1].startswith("GPU-"):
            cards.append(dict(zip(query.split(","), map(typed, cells), strict=True)))
    return cards


def log_proofs(settings: Settings, runner: Runner = run) -> dict[str, bool]:
    """Return which telling lines the log of this start holds."""
    if settings.log_file:
        try:
            text = Path(settings.log_file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        # The file holds earlier starts too; the gate's last line begins this one.
        text = text[max(0, text.rfind("gate: open")) :]
    else:
        start = unit(settings, runner).get("InvocationID", "")
        text = runner(
            ["journalctl", "--no-pager", "--output", "cat", f"_SYSTEMD_INVOCATION_ID={start}"],
            timeout=60,
        ).stdout
    return {name: re.search(pattern, text) is not None for name, pattern in PROOFS.items()}


def _tool_call(settings: Settings, key: str | None, timeout: float) -> dict[str, Any]:
    """Make the model call a function, through the OpenAI endpoint."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    tool = {"name": "get_weather", "description": "Weather of a city.", "parameters": parameters}
    answer = service_http.chat(
        settings.url,
        settings.model_name,
        "What is the weather in Paris? Use the tool.",
        key=key,
        max_tokens=512,
        timeout=timeout,
        tools=[{"type": "function", "function": tool}],
    )
    try:
        call = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]
        arguments = json.loads(call["arguments"])
        good = call["name"] == "get_weather" and "paris" in str(arguments.get("city", "")).lower()
        return {"ok": good, "reason": "" if good else f"the call was {call!r}"}
    except (KeyError, IndexError, TypeError, ValueError):
        return {"ok": False, "reason": _short(answer, "no tool call")}


def _reasoning(settings: Settings, key: str | None, timeout: float) -> dict[str, Any]:
    """See that thinking comes apart from the answer."""
    answer = service_http.chat(
        settings.url, settings.model_name, "What is 17 * 3?", key=key, max_tokens=256,
        timeout=timeout,
    )  # fmt: skip
    try:
        message = answer.json()["choices"][0]["message"]
        thought = message.get("reasoning_content") or message.get("reasoning")
        content = message.get("content") or ""
        good = bool(thought) and "<think>" not in content
        return {"ok": good, "reason": "" if good else "no reasoning apart from the content"}
    except (KeyError, IndexError, TypeError):
        return {"ok": False, "reason": _short(answer, "no completion")}


def _anthropic(settings: Settings, key: str | None, timeout: float) -> dict[str, Any]:
    """Ask through the Anthropic Messages endpoint, as coding clients of that kind do."""
    body = {
        "model": settings.model_name,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    answer = service_http.ask(
        f"{settings.url}/v1/messages",
        key=key,
        body=body,
        timeout=timeout,
        headers={"anthropic-version": "2023-06-01"},
    )
    data = answer.json()
    good = answer.ok and isinstance(data, dict) and bool(data.get("content"))
    return {"ok": good, "reason": "" if good else _short(answer, "no content")}


def _image(settings: Settings, key: str | None, timeout: float) -> dict[str, Any]:
    """Send a small red picture and have it described."""
    url = f"data:image/png;base64,{base64.b64encode(red_png(_PNG_SIDE)).decode()}"
    body = {
        "model": settings.model_name,
        "max_tokens": 64,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "Which colour is this?"},
                ],
            }
        ],
    }
    answer = service_http.ask(
        f"{settings.url}/v1/chat/completions", key=key, body=body, timeout=timeout
    )
    good = service_http.completed(answer) > 0
    return {"ok": good, "reason": "" if good else answer.reason()}


def needle(settings: Settings, key: str | None, tokens: int, timeout: float) -> dict[str, Any]:
    """Hide a number in a long text and ask for it.

    :param tokens: about how many tokens the text has; the server's own count is reported
    """
    secret = "714-Q-2290"
    # About 12 tokens a line; the needle lies at two fifths.
    lines = [
        f"Record {number}: nothing of interest happened on day {number}."
        for number in range(tokens // 14)
    ]
    lines.insert(len(lines) * 2 // 5, f"The maintenance code of unit seven is {secret}.")
    question = (
        "\n".join(lines) + "\nWhat is the maintenance code of unit seven? Answer with it alone."
    )
    answer = service_http.chat(
        settings.url, settings.model_name, question, key=key, max_tokens=512,
        timeout=max(timeout, tokens / 100),
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    data = answer.json() if answer.ok else None
    usage = data.get("usage", {}) if isinstance(data, dict) else {}
    good = secret in text_of(data)
    reason = "" if good else _short(answer, f"the answer was {text_of(data)[:80]!r}")
    return {"ok": good, "reason": reason, "prompt_tokens": usage.get("prompt_tokens")}


def red_png(side: int) -> bytes:
    """Return a square red PNG; nothing but the format's own rules is needed for that."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    rows = (b"\x00" + b"\xff\x00\x00" * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def _short(answer: service_http.Answer, otherwise: str) -> str:
    """Return why an answer is no success, or what a successful one lacks."""
    return otherwise if answer.ok else answer.reason()


#: Name to the question that is asked.
ROUND_TRIPS: Mapping[str, Callable[[Settings, str | None, float], dict[str, Any]]] = {
    "tool_call": _tool_call,
    "reasoning": _reasoning,
    "anthropic": _anthropic,
    "image": _image,
}


def read_key(path: str | None) -> str | None:
    """Read the key file as root does; ``None`` when there is none."""
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
