import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_turing import differences

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference inventory, rendered by the playbook that the launcher runs."""
    folder = tmp_path_factory.mktemp("rendered")
    playbook = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [playbook, "playbooks/render.yml", "-i", "inventories/reference", "-e", f"dest={folder}"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def ours(rendered: Path) -> differences.Service:
    environment = json.loads((rendered / "effective-environment.json").read_text())
    # The release's fingerprint names its caches and changes with every patch.
    fingerprint = Path(environment["TRITON_CACHE_DIR"]).parent.name
    return differences.from_unit(
        (rendered / "etc/systemd/system/vllm-turing.service").read_text(),
        json.loads((rendered / "effective-command.json").read_text()),
        {name: value.replace(fingerprint, "<fingerprint>") for name, value in environment.items()},
    )


@pytest.fixture(scope="session")
def reference() -> differences.Service:
    data: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "reference.yml").read_text())
    argv = list(data["command"])
    for flag, value in data["arguments"]:
        argv.append(flag)
        if isinstance(value, dict):
            argv.append(json.dumps(value))
        elif value is not None:
            argv.append(value)
    keys = {
        f"{section}.{key}": [value]
        for section, pairs in data["unit"].items()
        for key, value in pairs.items()
    }
    return differences.Service(keys, data["environment"], argv)
