"""The model: every file as the lock says, readable by the account that serves."""

from __future__ import annotations

import json

from testinfra.host import Host

MODEL = "/var/lib/vllm-turing/models/Qwen3.6-27B-DSV4Pro-Thinking-FP8"


def test_every_file_has_the_size_and_digest_of_the_lock(host: Host) -> None:
    lock = json.loads(host.file(f"{MODEL}.lock.json").content_string)
    assert len(lock["commit"]) == 40
    assert any(name.endswith(".safetensors") for name in lock["files"])
    digests = dict(
        reversed(line.split(maxsplit=1))
        for line in host.check_output(
            f"cd {MODEL}/ && sha256sum {' '.join(lock['files'])}"
        ).splitlines()
    )
    assert digests == {name: entry["sha256"] for name, entry in lock["files"].items()}


def test_the_service_account_can_read_it(host: Host) -> None:
    assert host.run(f"sudo -u vllm cat {MODEL}/config.json").rc == 0


def test_nothing_unfinished_is_left(host: Host) -> None:
    left = host.check_output(
        "find /var/lib/vllm-turing/models -name '*.incomplete' -o -name '*.part'"
    )
    assert left == ""
