import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_turing import service_probe, service_verify
from vllm_turing.run import Result
from vllm_turing.service_settings import Settings

METRICS = (
    'vllm:cache_config_info{block_size="1600",cache_dtype="fp8_e4m3",enable_prefix_caching="True",'
    'engine="0",gpu_memory_utilization="0.92",kv_cache_max_concurrency="2.076923076923077",'
    'kv_cache_size_tokens="207692",mamba_cache_mode="align",mamba_ssm_cache_dtype="float32",'
    'num_gpu_blocks="162",sliding_window="None"} 1.0\n'
)
SMI = (
    "0, GPU-aaa, NVIDIA GeForce RTX 2080 Ti, 21720, 22528, 200.00\n"
    "1, GPU-bbb, NVIDIA GeForce RTX 2080 Ti, 21752, 22528, 200.00\n"
)


class Server(BaseHTTPRequestHandler):
    """Answers like vLLM; a model that calls the tool that it is offered."""

    def log_message(self, *args: Any) -> None:
        """Keep the test's output clean."""

    def reply(self, data: Any, status: int = 200) -> None:
        body = (data if isinstance(data, str) else json.dumps(data)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self) -> bool:
        if self.headers.get("Authorization") == "Bearer k":
            return True
        self.reply({"error": "Unauthorized"}, 401)
        return False

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply("")
        elif self.path == "/metrics":
            self.reply(METRICS)
        elif self.allowed():
            listed = {"data": [{"id": "qwen-local", "max_model_len": 100000}]}
            self.reply({"version": "0.24.0"} if self.path == "/version" else listed)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if self.path == "/v1/messages":
            self.reply({"content": [{"type": "text", "text": "hi"}]})
            return
        message: dict[str, Any] = {"content": "fifty-one", "reasoning": "17 times 3"}
        if "tools" in body:
            call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
            message = {"content": None, "tool_calls": [call]}
        if isinstance(body["messages"][0]["content"], str):
            text = body["messages"][0]["content"]
            if "maintenance code" in text:
                message["content"] = text.partition("unit seven is ")[2].split(".")[0]
        usage = {"completion_tokens": 3, "prompt_tokens": 95000}
        self.reply({"choices": [{"message": message}], "usage": usage})


@pytest.fixture
def settings() -> Iterator[Settings]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Settings(
        name="t", host="127.0.0.1", port=server.server_address[1], model_name="qwen-local",
        release_link="/nowhere", cache_dir="/c", config="/x.yaml", model_path="/m",
    )  # fmt: skip
    server.shutdown()
    server.server_close()


def runner(argv: Sequence[str], **_: Any) -> Result:
    text = {
        "systemctl": "ActiveState=active\nNRestarts=0\nInvocationID=abc\n",
        "nvidia-smi": SMI,
        "journalctl": (
            "INFO Using FLASHINFER attention backend out of potential backends: ['FLASHINFER'].\n"
            "INFO Using FlashQLA legacy (SM70/SM75) GDN prefill kernel\n"
        ),
    }[argv[0]]
    return Result(tuple(argv), 0, text)


def test_the_reference_hosts_section_five_is_read_back(settings: Settings) -> None:
    found = service_probe.observe(
        settings, "k", runner=runner, round_trips=tuple(service_probe.ROUND_TRIPS),
        needle_tokens=2000,
    )  # fmt: skip
    expected = {
        "unit": "active", "restarts": 0, "model": "qwen-local", "max_model_len": 100000,
        "version": "0.24.0", "key_required": True, "completion": True,
        "kv.cache_dtype": "fp8_e4m3", "kv.block_size": 1600, "kv.num_gpu_blocks": 162,
        "kv.kv_cache_size_tokens": "207692", "kv.kv_cache_max_concurrency": 2.077,
        "kv.mamba_cache_mode": "align", "kv.mamba_ssm_cache_dtype": "float32",
        "kv.enable_prefix_caching": True, "log.flashinfer_attention": True,
        "log.flashqla_legacy": True, "log.gdn_warmup_failed": False, "gpus": 2,
        "gpu_memory_used": {"min": 21720, "max": 21752}, "trip.tool_call": True,
        "trip.reasoning": True, "trip.anthropic": True, "trip.image": True, "trip.needle": True,
    }  # fmt: skip
    rows = service_verify.compare(expected, found)
    assert [row for row in rows if not row.ok] == []
    assert "k" not in json.dumps(found).split('"')
    lines = service_verify.table(rows)
    assert len(lines) == len(rows) + 1
    assert len({line.find("1600") for line in lines if "1600" in line}) == 1


@pytest.mark.parametrize(
    ("wish", "value", "ok"),
    [
        (1600, 800, False),
        ({"min": 150, "max": 175}, 162, True),
        ({"min": 150}, 149, False),
        ({"max": 5}, "x", False),
        (True, False, False),
        ("True", True, True),
        (2.077, 2.0769, True),
        (2.077, 2.07, False),
        ("align", "none", False),
        (0, None, False),
    ],
)
def test_a_difference_is_a_difference(wish: Any, value: Any, ok: bool) -> None:
    assert service_verify.matches(wish, value) == ok


def test_a_server_that_is_not_there_fails_every_row_with_its_reason() -> None:
    settings = Settings(
        name="t", host="127.0.0.1", port=9, model_name="m", release_link="/nowhere",
        cache_dir="/c", config="/x.yaml", model_path="/m",
    )  # fmt: skip
    found = service_probe.observe(settings, None, runner=runner, round_trips=("image",))
    rows = service_verify.compare(
        {"completion": True, "kv.block_size": 1, "trip.image": True}, found
    )
    assert [row.ok for row in rows] == [False, False, False]
    assert "connection refused" in rows[0].found
    assert rows[1].found == "nothing"


def test_a_wrong_key_shows_as_a_failed_completion(settings: Settings) -> None:
    found = service_probe.observe(settings, "other", runner=runner)
    assert not found["completion"]["ok"]
    assert "401" in found["completion"]["reason"]


def test_the_picture_is_a_png() -> None:
    data = service_probe.red_png(4)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
