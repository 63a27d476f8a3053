"""The service: what systemd and the kernel say of the running process, not what we wrote."""

from __future__ import annotations

import json

import pytest
from testinfra.host import Host

UNIT = "vllm-turing.service"
URL = "http://127.0.0.1:8000"


def properties(host: Host, *names: str) -> dict[str, str]:
    shown = host.check_output(f"systemctl show {UNIT} --property={','.join(names)}")
    return dict(line.split("=", 1) for line in shown.splitlines())


@pytest.fixture(scope="module")
def process(host: Host) -> dict[str, list[str]]:
    """Argument vector and environment of the main process, from /proc."""
    pid = properties(host, "MainPID")["MainPID"]
    assert int(pid) > 1
    return {
        name: host.check_output(f"tr '\\0' '\\n' < /proc/{pid}/{name}").splitlines()
        for name in ("cmdline", "environ")
    }


def test_the_unit_is_active_and_was_never_restarted(host: Host) -> None:
    shown = properties(host, "ActiveState", "SubState", "NRestarts", "Result")
    assert shown == {
        "ActiveState": "active",
        "SubState": "running",
        "NRestarts": "0",
        "Result": "success",
    }
    assert host.service(UNIT).is_enabled


def test_restarts_are_bounded_and_stops_take_everything_along(host: Host) -> None:
    shown = properties(host, "Restart", "StartLimitBurst", "StartLimitIntervalUSec", "KillMode")
    # The engine ends with status 0 when it dies, which on-failure would take for success.
    assert shown["Restart"] == "always"
    assert int(shown["StartLimitBurst"]) > 0
    assert shown["StartLimitIntervalUSec"] not in ("0", "10s")
    assert shown["KillMode"] in ("control-group", "mixed")


def test_it_runs_as_the_service_account(host: Host) -> None:
    pid = properties(host, "MainPID")["MainPID"]
    assert host.check_output(f"ps -o user= -p {pid}").strip() == "vllm"


def test_the_running_command_is_the_releases_own_engine(process: dict[str, list[str]]) -> None:
    command = process["cmdline"]
    assert command[0] == "/opt/vllm-turing/current/venv/bin/python"
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]


def test_no_stub_library_is_on_the_loader_path(process: dict[str, list[str]]) -> None:
    environment = dict(line.split("=", 1) for line in process["environ"] if "=" in line)
    assert "stubs" not in environment.get("LD_LIBRARY_PATH", "")
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert environment["CUDA_HOME"] == "/usr/local/cuda-12.9"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_it_listens_on_loopback_alone(host: Host) -> None:
    listening = host.check_output("ss -Hltn 'sport = :8000'").splitlines()
    assert [line.split()[3] for line in listening] == ["127.0.0.1:8000"]


def test_without_the_key_it_refuses(host: Host) -> None:
    status = host.check_output(
        "python3 -c 'import urllib.request as u, urllib.error as e\n"
        f'try: print(u.urlopen("{URL}/v1/models").status)\n'
        "except e.HTTPError as x: print(x.code)'"
    )
    assert status == "401"


def test_with_the_key_it_answers_a_chat(host: Host) -> None:
    script = (
        "import json, urllib.request as u\n"
        "key = open('/etc/vllm-turing/api-key').read().strip()\n"
        "body = {'model': 'qwen-local', 'max_tokens': 8,"
        " 'messages': [{'role': 'user', 'content': 'hello'}]}\n"
        f"r = u.Request('{URL}/v1/chat/completions', json.dumps(body).encode(),"
        " {'Authorization': 'Bearer ' + key, 'Content-Type': 'application/json'})\n"
        "print(u.urlopen(r, timeout=120).read().decode())\n"
    )
    answer = json.loads(host.check_output("python3 -c %s", script))
    assert answer["model"] == "qwen-local"
    assert answer["usage"]["completion_tokens"] == 8


def test_the_key_is_private_and_nowhere_else(host: Host, process: dict[str, list[str]]) -> None:
    key_file = host.file("/etc/vllm-turing/api-key")
    assert key_file.mode == 0o600
    assert key_file.user == "root"
    key = key_file.content_string.strip()
    assert len(key) >= 32
    assert key not in " ".join(process["cmdline"])
    for unit in (UNIT, "vllm-turing-model.service"):
        assert key not in host.check_output(f"journalctl --no-pager -u {unit}")
    assert key not in host.check_output(f"systemctl show {UNIT}")


def test_the_flags_arrived(host: Host) -> None:
    log = host.check_output(f"journalctl --no-pager -u {UNIT}")
    assert "'served_model_name': ['qwen-local']" in log
    assert "'max_model_len': 8192" in log
    assert "'reasoning_parser': 'qwen3'" in log
