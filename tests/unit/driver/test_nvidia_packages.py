"""Which packages are a driver, what is held, what apt may take (cases 1, 8, 9)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from driver_kit import KERNEL, V159

from vllm_turing import nvidia_packages
from vllm_turing.deb_packages import Package
from vllm_turing.nvidia_packages import Spelling

ROLE = Path(__file__).parents[3] / "roles/nvidia_driver"

DRIVER = """
    nvidia-driver-580 nvidia-driver-580-open nvidia-driver-580-server nvidia-driver-580-server-open
    nvidia-headless-580 nvidia-headless-no-dkms-580-open nvidia-dkms-580 nvidia-dkms-580-open
    nvidia-kernel-common-580 nvidia-kernel-source-580-open nvidia-utils-580 nvidia-compute-utils-580
    nvidia-firmware-580-580.159.03 nvidia-firmware-580-server-580.159.03 libnvidia-compute-580
    libnvidia-cfg1-580 libnvidia-fbc1-580 libnvidia-gl-390 xserver-xorg-video-nvidia-580
    cuda-drivers cuda-drivers-580 nvidia-open nvidia-open-580 nvidia-driver nvidia-dkms-open
    linux-modules-nvidia-580-generic-hwe-24.04 linux-modules-nvidia-580-open-6.17.0-29-generic
    linux-objects-nvidia-580-6.17.0-29-generic libnvidia-nscq-580 nvidia-fabricmanager-580
"""
OTHER = """
    libnvidia-ml-dev nvidia-cuda-toolkit nvidia-cuda-dev nvidia-container-toolkit
    libnvidia-container1
    libnvidia-container-tools nvidia-prime libnvidia-egl-wayland1 nvidia-fs-dkms cuda-nvcc-12-9
    cuda-toolkit-12-9 libcublas-dev-12-9 linux-image-6.17.0-29-generic nvidia-gds-12-9
    nvidia-driver-pinning-580 nsight-compute-2025.2.1
"""


@pytest.mark.parametrize("name", DRIVER.split())
def test_driver_packages_are_known_by_name(name: str) -> None:
    assert nvidia_packages.classify(name) is not None


@pytest.mark.parametrize("name", OTHER.split())
def test_development_files_cuda_and_containers_are_no_driver(name: str) -> None:
    assert nvidia_packages.classify(name) is None


def test_unattended_upgrades_is_kept_from_drivers_and_kernels_and_from_nothing_else() -> None:
    text = (ROLE / "templates/unattended-upgrades.j2").read_text()
    patterns = re.findall(r'^\s+"(.*)";$', text, re.MULTILINE)

    def kept(name: str) -> bool:
        return any(re.match(pattern, name) for pattern in patterns)

    kernels = (
        "linux-image-6.17.0-29-generic linux-generic-hwe-24.04 linux-headers-generic-hwe-24.04"
    )
    for name in [*DRIVER.split(), *kernels.split()]:
        assert kept(name), name
    # The kernel's own names are kept on purpose.
    for name in OTHER.replace("linux-image-6.17.0-29-generic", "linux-firmware").split():
        if name != "nvidia-driver-pinning-580":
            assert not kept(name), name
    assert not kept("linux-libc-dev")


def test_only_the_kernel_that_matters_is_held() -> None:
    names = [
        "linux-generic-hwe-24.04",
        "linux-image-generic-hwe-24.04",
        f"linux-image-{KERNEL}",
        f"linux-modules-{KERNEL}",
        "linux-image-6.14.0-1-generic",
        "linux-libc-dev",
        "linux-firmware",
        "linux-base",
    ]
    packages = [Package(name, "amd64", "1", "ii") for name in names]
    assert nvidia_packages.kernel_packages(packages, KERNEL) == sorted(names[:4])


@pytest.mark.parametrize(
    ("name", "version", "goes"),
    [
        ("libnvidia-compute-535", "535.274.02-0ubuntu1", True),
        ("nvidia-dkms-580-open", V159, True),
        ("nvidia-driver-580-server", V159, True),
        ("nvidia-kernel-common-580", V159, False),
        ("nvidia-dkms-580", V159, False),
        ("nvidia-firmware-580-580.173.02", "580.173.02-0ubuntu1", True),
        ("nvidia-firmware-580-580.159.03", V159, False),
        ("nvidia-driver", "595.58.03-1ubuntu1", True),
        ("nvidia-persistenced", "580.159.03-1ubuntu1", False),
        ("nvidia-settings", "510.47.03-0ubuntu4", False),
        ("linux-modules-nvidia-570-6.17.0-29-generic", "6.17.0-29.29", True),
    ],
)
def test_what_goes_before_the_proprietary_580_comes(name: str, version: str, goes: bool) -> None:
    read = nvidia_packages.classify(name)
    assert read is not None
    assert Spelling("580").foreign(read, version, "580.159.03") is goes


@pytest.mark.parametrize(
    ("text", "wish"),
    [("580", ("580", "")), ("580.159.03", ("580", "580.159.03")), (" 595.58 ", ("595", "595.58"))],
)
def test_a_wish_is_a_branch_or_a_version(text: str, wish: tuple[str, str]) -> None:
    assert nvidia_packages.parse_wish(text) == wish


@pytest.mark.parametrize("text", ["", "latest", "580.159.03-0ubuntu0.24.04.1", "58", "580.x"])
def test_anything_else_is_refused_with_the_variable(text: str) -> None:
    with pytest.raises(nvidia_packages.UnknownDriver, match=f"nvidia_driver_version is '{text}'"):
        nvidia_packages.parse_wish(text)


def test_the_preferences_take_one_version_and_refuse_every_other() -> None:
    text = nvidia_packages.preferences("580", V159)
    first, second = text.split("\n\n")
    assert f"Pin: version {V159}\nPin-Priority: 1001" in first
    assert "Pin: version *\nPin-Priority: -1" in second
    for words in (first, second):
        assert "libnvidia-ml-dev" not in words
        assert "cuda-toolkit" not in words
        assert "container" not in words


def test_a_transitional_name_is_found_out() -> None:
    assert nvidia_packages.transitional("libnvidia-compute-570", V159, "570") == "580"
    assert nvidia_packages.transitional("libnvidia-compute-580", V159, "580") is None


def test_a_transaction_against_the_wish_is_told_by_name() -> None:
    changes = [
        ("install", "libnvidia-compute-580", None, "580.159.04-1ubuntu1"),
        ("install", "linux-image-6.17.0-35-generic", None, "6.17.0-35.35"),
        ("install", "linux-libc-dev", "6.1", "6.2"),
        ("remove", "cuda-toolkit-12-9", "12.9.1-1", None),
        ("remove", "nvidia-dkms-535", "535.1-1", None),
    ]
    faults = nvidia_packages.transaction_faults(changes, V159, ["nvidia-dkms-535"])
    assert f"would install libnvidia-compute-580 580.159.04-1ubuntu1 instead of {V159}" in faults
    assert "would install the kernel linux-image-6.17.0-35-generic" in faults
    assert "would remove cuda-toolkit-12-9 12.9.1-1" in faults
    assert not any("535" in fault for fault in faults)
    assert not any("linux-libc-dev" in fault for fault in faults)
