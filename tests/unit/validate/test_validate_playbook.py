"""playbooks/validate.yml as it is run: real Ansible, this machine as the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[3]

MISTAKES = """\
vllm_hosts:
  hosts:
    box:
      ansible_connection: local
      ansible_python_interpreter: {python}
      nvidia_driver_reboot: maybe
      nvidia_driver_verison: "580.159.03"
      vllm_runtime_stack: vllm-9
      vllm_host_prefix: /opt/my dir
      vllm_host_mirror_hub: hf-mirror.com
      preflight_cards: two
      gpu_power_devices: "{{{{ nowhere }}}}"
"""


def validate(inventory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), *arguments,
        "playbooks/validate.yml",
    ]  # fmt: skip
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300
    )


def test_inventory_without_hosts(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("others: {hosts: {box: {}}}\n")
    result = validate(inventory)
    assert result.returncode != 0
    assert "has no host in the group 'vllm_hosts'" in result.stdout + result.stderr


def test_all_mistakes_are_told_at_once_also_in_check_mode(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(MISTAKES.format(python=sys.executable))
    result = validate(inventory, "--check")
    assert result.returncode != 0
    for words in (
        "'maybe' is not accepted; use 'auto', 'ask' or 'never'",
        "nvidia_driver_verison: no role has this variable; did you mean 'nvidia_driver_version'?",
        "vllm_runtime_stack: 'vllm-9' is no stack; use 'vllm-0.24.0-cpu'",
        "vllm_host_prefix: '/opt/my dir' has a blank",
        "vllm_host_mirror_hub: 'hf-mirror.com' is no address",
        "preflight_cards: 'two' must be a number of type int",
        "gpu_power_devices: '{{ nowhere }}' cannot be evaluated: 'nowhere' is undefined",
    ):
        assert words in result.stdout + result.stderr, words
    assert "changed=0" in result.stdout
