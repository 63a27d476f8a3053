"""Versions in dpkg's order; package states."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest

from vllm_turing import deb_packages, deb_version

VERSIONS = [
    "580.159.03-0ubuntu0.24.04.1",
    "580.159.04-1ubuntu1",
    "580.173.02-0ubuntu0.24.04.1",
    "580.178.04-1ubuntu1",
    "595.58.03-0ubuntu0.24.04.1",
    "1:1.0-1",
    "1.0~rc1-1",
    "1.0-1",
    "1.0-1ubuntu1",
    "1.0a-1",
    "1.0+dfsg-1",
    "1.0-1~bpo12+1",
    "6.17.0-29.29~24.04.1",
    "6.17.0-9.9",
    "0",
    "1.0",
    "1.",
    "2.36-9+deb12u14",
    "2.36-9+deb12u9",
]


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="dpkg itself is the reference")
def test_every_pair_is_ordered_as_dpkg_orders_it() -> None:
    for left, right in itertools.combinations(VERSIONS, 2):
        older = subprocess.run(["dpkg", "--compare-versions", left, "lt", right]).returncode == 0
        newer = subprocess.run(["dpkg", "--compare-versions", left, "gt", right]).returncode == 0
        assert deb_version.compare(left, right) == newer - older, (left, right)


def test_upstream_and_branch_of_a_driver_package() -> None:
    assert deb_version.upstream("580.159.03-0ubuntu0.24.04.1") == "580.159.03"
    assert deb_version.branch("580.159.03-0ubuntu0.24.04.1") == "580"
    assert deb_version.split("1:2.0-3-4") == (1, "2.0-3", "4")


def test_states_are_read_and_the_half_done_is_named() -> None:
    text = (
        "nvidia-dkms-580\tamd64\t580.159.03-0ubuntu0.24.04.1\tiF \n"
        "nvidia-driver-580\tamd64\t580.159.03-0ubuntu0.24.04.1\tiU \n"
        "libnvidia-compute-580\tamd64\t580.159.03-0ubuntu0.24.04.1\thi \n"
        "nvidia-kernel-common-470\tamd64\t470.1-1\trc \n"
        "gone\tamd64\t\tun \n"
        "broken\tamd64\t1\tiHR\n"
    )
    packages = deb_packages.parse(text)
    assert [p.name for p in packages if p.held] == ["libnvidia-compute-580"]
    assert [p.name for p in packages if p.leftover] == ["nvidia-kernel-common-470"]
    assert deb_packages.unfinished(packages) == [
        "nvidia-dkms-580 (half configured)",
        "nvidia-driver-580 (unpacked, not configured)",
        "broken (half installed)",
    ]
