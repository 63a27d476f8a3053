"""The provisioned host, reached over SSH as a user of it would be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import testinfra
from testinfra.host import Host


@pytest.fixture(scope="session")
def connection() -> dict[str, Any]:
    """What lab/ wrote about the running host."""
    state = Path(os.environ.get("VLLM_TURING_LAB_DIR", "/var/cache/vllm-turing-lab"))
    name = os.environ.get("VLLM_TURING_LAB_NAME", "lab")
    return json.loads((state / "hosts" / name / "connection.json").read_text())


@pytest.fixture(scope="session")
def host(connection: dict[str, Any]) -> Host:
    """The host, with sudo."""
    return testinfra.get_host(
        f"ssh://{connection['user']}@{connection['host']}:{connection['port']}",
        ssh_identity_file=connection["private_key"],
        ssh_extra_args=(
            f"-o UserKnownHostsFile={connection['known_hosts']} -o StrictHostKeyChecking=yes"
        ),
        controlpersist=60,
        sudo=True,
    )
