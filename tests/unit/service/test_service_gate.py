import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import service_gate, service_model, service_settings
from vllm_turing.run import Result

SETTINGS = service_settings.Settings(
    name="t", host="127.0.0.1", port=0, model_name="m", release_link="/r", cache_dir="/c",
    config="/x.yaml", model_path="/m",
)  # fmt: skip


def smi(*outputs: tuple[int, str]) -> Any:
    """A stand-in nvidia-smi that says one thing after the other, then the last for ever."""
    said = list(outputs)

    def runner(argv: Sequence[str], **_: Any) -> Result:
        rc, text = said.pop(0) if len(said) > 1 else said[0]
        return Result(tuple(argv), rc, text, "")

    return runner


ONE = "GPU-aaa, 00000000:0A:00.0\n"
TWO = ONE + "GPU-bbb, 00000000:0B:00.0\n"


def run_gate(conditions: list[service_gate.Condition], timeout: float) -> tuple[list[str], float]:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    failed = service_gate.wait(conditions, timeout, clock=lambda: now[0], sleep=sleep)
    return failed, now[0]


def test_a_card_that_comes_late_is_waited_for() -> None:
    late = smi(*[(9, "NVIDIA-SMI has failed")] * 3, *[(0, ONE)] * 17, (0, TWO))
    gpus = service_gate.Condition("gpus", lambda: service_gate.gpus_reason(SETTINGS, late), True)
    assert run_gate([gpus], 120) == ([], 40.0)


def test_a_card_that_never_comes_is_told_after_the_wait() -> None:
    gpus = service_gate.Condition(
        "gpus", lambda: service_gate.gpus_reason(SETTINGS, smi((0, ONE))), True
    )
    failed, waited = run_gate([gpus], 120)
    assert failed == ["gpus: only 1 of 2 GPUs after 120 s"]
    assert waited == 120


@pytest.mark.parametrize(
    ("rc", "text", "words"),
    [
        (0, "No devices were found\n", "only 0 of 2"),
        (255, "Failed to initialize NVML: No supported GPUs were found\n", "Failed to initialize"),
        (0, "", "only 0 of 2"),
    ],
)
def test_no_card_is_never_taken_for_a_list(rc: int, text: str, words: str) -> None:
    assert words in (service_gate.gpus_reason(SETTINGS, smi((rc, text))) or "")


def test_a_missing_or_hanging_nvidia_smi_is_named() -> None:
    def missing(argv: Sequence[str], **_: Any) -> Result:
        return Result(tuple(argv), None, error="timed out after 30 s")

    assert "timed out" in (service_gate.gpus_reason(SETTINGS, missing) or "")


def test_a_card_is_wanted_by_uuid() -> None:
    settings = replace(SETTINGS, gpu_uuids=("GPU-zzz", "GPU-aaa"))
    reason = service_gate.gpus_reason(settings, smi((0, TWO)))
    assert reason == "GPU-zzz not there; nvidia-smi lists GPU-aaa, GPU-bbb"


def test_foreign_processes_are_named() -> None:
    text = "4711, 20280, GPU-aaa\n[Not Found], 3, GPU-aaa\n4712, [N/A], GPU-bbb\n"
    reason = service_gate.foreign_reason(smi((0, text))) or ""
    assert "pid 4711" in reason
    assert "20280 MiB of GPU-aaa" in reason
    assert "an unknown amount of GPU-bbb" in reason
    assert service_gate.foreign_reason(smi((0, ""))) is None


def test_a_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        reason = service_gate.port_reason("127.0.0.1", port)
        assert reason is not None
        assert f"port {port}" in reason
        assert "vllm_service_port" in reason
    assert service_gate.port_reason("127.0.0.1", port) is None


def shard(path: Path, size: int = 8, cut: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F16", "shape": [size // 2], "data_offsets": [0, size]}})
    data = struct.pack("<Q", len(header)) + header.encode() + b"\0" * size
    path.write_bytes(data[: len(data) - cut])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {f"layer.{i}": name for i, name in enumerate([*names, "mtp.safetensors"])}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in {*weight_map.values()}:
        shard(tmp_path / name)
    return tmp_path


def test_a_whole_model_has_no_problems(model: Path) -> None:
    assert service_model.problems(model) == []


def test_what_is_wrong_with_a_model_is_told_by_file(model: Path) -> None:
    (model / "mtp.safetensors").unlink()
    shard(model / "model-00002-of-00002.safetensors", cut=3)
    (model / "config.json").write_text("<html>")
    text = "\n".join(service_model.problems(model))
    assert "mtp.safetensors is missing" in text
    assert "model-00002-of-00002.safetensors has" in text
    assert "config.json is not JSON" in text


def test_a_pointer_file_is_no_shard(model: Path) -> None:
    (model / "mtp.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256")
    assert "is no safetensors file" in service_model.problems(model)[0]


def test_an_index_may_not_lead_outside(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')
    assert "'../x'" in service_model.problems(model)[0]


def test_shards_without_an_index_are_incomplete(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    assert "is missing though" in service_model.problems(model)[0]


def test_what_cannot_mend_itself_is_not_waited_for() -> None:
    gone = service_gate.Condition("model", lambda: service_gate.model_reason("/nowhere"), False)
    failed, waited = run_gate([gone], 120)
    assert "'/nowhere' is not there" in failed[0]
    assert waited == 0


def test_an_engine_without_cards_asks_for_none() -> None:
    settings = replace(SETTINGS, gpu_count=0, device_nodes=())
    names = [condition.name for condition in service_gate.conditions(settings, smi((0, "")))]
    assert names == ["model", "release", "port"]
