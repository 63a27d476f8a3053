"""The driver: one exact version, from one origin, held, loaded."""

from __future__ import annotations

import re

import pytest
from testinfra.host import Host

VERSION = "580.159.03"


def test_every_driver_package_has_the_exact_version(host: Host) -> None:
    listed = host.check_output(
        "dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\\n' '*nvidia*'"
    )
    installed = dict(
        line.split()[1:] for line in listed.splitlines() if line.startswith(("ii ", "hi "))
    )
    driver = {name: version for name, version in installed.items() if re.search(r"-580(-|$)", name)}
    assert "nvidia-driver-580" in driver
    assert "libnvidia-compute-580" in driver
    assert {v.split("-")[0] for v in driver.values()} == {VERSION}
    assert not [name for name in installed if name.endswith("-open")], "proprietary was wanted"


def test_driver_packages_and_kernel_are_held(host: Host) -> None:
    held = set(host.check_output("apt-mark showhold").split())
    assert {"nvidia-driver-580", "libnvidia-compute-580", "nvidia-utils-580"} <= held
    assert any(name.startswith("linux-image-") for name in held)
    assert not {name for name in held if name.startswith("cuda-")}


def test_the_loaded_module_is_this_driver(host: Host) -> None:
    assert f" {VERSION} " in host.file("/proc/driver/nvidia/version").content_string
    lines = host.check_output("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader")
    assert lines.splitlines() == [f"NVIDIA GeForce RTX 2080 Ti, {VERSION}"] * 2


def test_a_full_upgrade_would_not_touch_the_driver(host: Host) -> None:
    plan = host.check_output("apt-get --simulate full-upgrade")
    moved = re.findall(r"^(?:Inst|Remv) (\S*nvidia\S*)", plan, re.MULTILINE)
    assert moved == []


def test_persistence_daemon_runs(host: Host) -> None:
    service = host.service("nvidia-persistenced")
    assert service.is_enabled
    assert service.is_running


def test_nouveau_is_kept_out(host: Host) -> None:
    assert "nouveau" not in host.check_output("lsmod")
    blacklisted = host.run(
        "grep -rhsE '^blacklist[[:space:]]+nouveau' /etc/modprobe.d /lib/modprobe.d"
    )
    assert blacklisted.stdout.strip()


def test_the_toolkit_is_12_9_and_came_without_a_driver(host: Host) -> None:
    assert "release 12.9" in host.check_output("/usr/local/cuda-12.9/bin/nvcc --version")
    policy = host.check_output("apt-cache policy nvidia-driver-580")
    candidate = re.search(r"Candidate: (\S+)", policy)
    assert candidate is not None
    assert "ubuntu0.24.04" in candidate[1], "the toolkit's repository must not offer the driver"


@pytest.mark.parametrize("index", [0, 1])
def test_the_power_limit_is_in_force(host: Host, index: int) -> None:
    limit = host.check_output(
        f"nvidia-smi -i {index} --query-gpu=power.limit --format=csv,noheader,nounits"
    )
    assert float(limit) == 200.0
