"""From a host's state to a driver plan (cases 3, 7, 8, 9, 14 and the version that has gone)."""

from __future__ import annotations

import pytest
from driver_kit import (
    COMPUTE,
    KERNEL,
    NVIDIA,
    UBUNTU,
    V159,
    V159_NVIDIA,
    V173,
    Box,
    healthy_kernel,
    installed,
    library,
    loaded,
    offered,
    plan,
    record,
)

from vllm_turing import nvidia_driver, nvidia_packages
from vllm_turing.nvidia_driver import Refusal
from vllm_turing.run import Result


def settled(box: Box, version: str = V159) -> None:
    """A host on which everything is as wished."""
    upstream = version.split("-")[0]
    installed(box, version, state="hi")
    healthy_kernel(box, upstream)
    loaded(box, upstream)
    library(box, upstream)
    box.write(nvidia_driver.PREFERENCES, nvidia_packages.preferences("580", version))
    held = sorted(box.packages)
    record(box, package_version=version, resolved=upstream, held=held)


def test_a_fresh_box_gets_the_exact_version_from_the_first_source(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU), (V173, UBUNTU))
    made = plan(box)
    assert made.action == "install"
    assert (made.resolved.package_version, made.resolved.source) == (V159, "ubuntu")
    assert made.resolved.difference == ""
    assert {f"{name}={V159}" for name in COMPUTE} <= set(made.arguments)
    assert set(made.after) == {*COMPUTE, "nvidia-driver-580"}
    assert nvidia_driver.PREFERENCES in made.files
    # Nothing was changed: only questions were asked.
    assert not [w for w in box.ran if w[0] == "apt-get" and "-s" not in w and "update" not in w]


def test_the_display_comes_along_only_where_it_is_wanted(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU), (V173, UBUNTU))
    assert "nvidia-driver-580" not in plan(box, variant="compute").after
    # A host that has the compute part alone stays so.
    installed(box)
    record(box)
    upgraded = plan(box, version="580.173.02")
    assert upgraded.action == "change"
    assert "nvidia-driver-580" not in upgraded.after
    assert "nvidia-driver-580" in plan(box, version="580.173.02", variant="full").after


def test_a_host_as_wished_is_not_asked_of_apt(box: Box) -> None:
    settled(box)
    made = plan(box)
    assert (made.action, made.steps) == ("none", [])
    assert not box.commands("apt-cache")
    assert not box.commands("apt-get")


def test_a_driver_that_was_there_is_adopted_and_held(box: Box) -> None:
    # The reference host: installed by hand, and its version has left the index.
    installed(box)
    healthy_kernel(box, "580.159.03")
    loaded(box, "580.159.03")
    offered(box, (V173, UBUNTU))
    made = plan(box)
    assert made.action == "repair"
    assert made.resolved == nvidia_driver.Resolved("580.159.03", V159, "installed")
    assert not made.arguments
    assert f"linux-image-{KERNEL}" in made.hold
    assert "nvidia-utils-580" in made.hold


def test_a_version_that_has_gone_gives_the_nearest_newer_of_its_branch(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V173, UBUNTU), (V159_NVIDIA, NVIDIA))
    made = plan(box)
    assert (made.resolved.package_version, made.resolved.source) == (V159_NVIDIA, "nvidia")
    assert made.resolved.difference == (
        "driver 580.159.04 instead of 580.159.03, which no source has any more (from 'nvidia')"
    )


def test_the_recorded_nearest_version_stays(box: Box) -> None:
    settled(box, V173)
    offered(box, (V159_NVIDIA, NVIDIA), (V173, UBUNTU))
    record(
        box,
        package_version=V173,
        resolved="580.173.02",
        difference="driver 580.173.02 instead of 580.159.03, …",
        held=sorted(box.packages),
    )
    made = plan(box)
    assert made.action == "none"
    assert made.resolved.difference.startswith("driver 580.173.02 instead of 580.159.03")


def test_gone_and_stop_names_what_is_there_and_how_to_get_the_old_one(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V173, UBUNTU))
    with pytest.raises(Refusal) as refusal:
        plan(box, when_gone="stop")
    text = str(refusal.value)
    assert f"{V173} (ubuntu)" in text
    assert "snapshot.ubuntu.com" in text
    assert "nvidia_driver_when_gone: nearest" in text


def test_only_older_versions_is_no_answer(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, ("580.95.05-0ubuntu0.24.04.2", UBUNTU))
    with pytest.raises(Refusal, match="no newer version of branch 580 is there either"):
        plan(box)


def test_a_branch_is_resolved_and_recorded(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU), (V173, UBUNTU))
    made = plan(box, version="580")
    assert made.resolved.package_version == V173
    settled(box)
    record(box, requested="580", held=sorted(box.packages))
    assert plan(box, version="580").resolved.package_version == V159


def test_an_old_branchs_transitional_name_is_refused(box: Box) -> None:
    healthy_kernel(box, None)
    for name in COMPUTE:
        box.offers[name.replace("580", "570")] = [(V159, UBUNTU)]
    with pytest.raises(Refusal, match=r"branch 570 is now a transitional package for 580 .*'580'"):
        plan(box, version="570")


def other_branch(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU))
    box.packages["libnvidia-compute-535"] = ("535.274.02-0ubuntu0.24.04.1", "ii")
    box.packages["nvidia-dkms-535"] = ("535.274.02-0ubuntu0.24.04.1", "ii")
    box.packages["nvidia-kernel-common-470"] = ("470.256.02-0ubuntu1", "rc")
    box.packages["cuda-toolkit-12-9"] = ("12.9.1-1", "ii")
    box.packages["libnvidia-ml-dev"] = ("12.0.140~12.0.1-4build4", "ii")


def test_another_branch_goes_and_cuda_stays(box: Box) -> None:
    other_branch(box)
    made = plan(box)
    assert made.action == "change"
    assert made.purge == ["libnvidia-compute-535", "nvidia-dkms-535"]
    assert made.leftovers == ["nvidia-kernel-common-470"]
    assert "libnvidia-compute-535-" in made.arguments
    assert "--purge" in made.arguments
    assert not any("cuda" in word or "ml-dev" in word for word in made.arguments)


def test_a_foreign_hold_in_the_way_is_named_before_apt_is_asked_to_install(box: Box) -> None:
    other_branch(box)
    box.packages["nvidia-dkms-535"] = ("535.274.02-0ubuntu0.24.04.1", "hi")
    with pytest.raises(Refusal) as refusal:
        plan(box)
    assert "on hold by somebody else and in the way: nvidia-dkms-535" in str(refusal.value)
    assert "nvidia_driver_release_foreign_holds" in str(refusal.value)
    made = plan(box, release_foreign_holds=True)
    assert made.unhold == ["nvidia-dkms-535"]


def test_our_own_hold_is_released_by_our_own_upgrade(box: Box) -> None:
    settled(box)
    offered(box, (V159, UBUNTU), (V173, UBUNTU))
    made = plan(box, version="580.173.02")
    assert made.action == "change"
    assert set(made.unhold) == set(COMPUTE)
    assert set(COMPUTE) <= set(made.hold)


def test_the_flavours_of_one_branch_are_no_neighbours(box: Box) -> None:
    settled(box)
    for name in ("nvidia-dkms-580", "nvidia-kernel-source-580"):
        box.packages[f"{name}-open"] = box.packages.pop(name)
    offered(box, (V159, UBUNTU))
    record(box, held=sorted(box.packages))
    made = plan(box)
    assert made.purge == ["nvidia-dkms-580-open", "nvidia-kernel-source-580-open"]
    assert f"nvidia-dkms-580={V159}" in made.arguments


def test_the_open_module_is_warned_of(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU))
    assert any("#1211" in warning for warning in plan(box, flavour="open").warnings)
    assert not plan(box).warnings


def test_a_transaction_that_would_take_cuda_away_is_refused_by_name(box: Box) -> None:
    other_branch(box)
    box.simulations["libnvidia-compute-580="] = Result(
        (), 0, f"Remv cuda-toolkit-12-9 [12.9.1-1]\nInst nvidia-dkms-580 ({V159} x [amd64])\n"
    )
    with pytest.raises(Refusal, match=r"would remove cuda-toolkit-12-9 12\.9\.1-1"):
        plan(box)


def test_a_half_set_from_another_origin_is_refused_by_name(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU))
    box.simulations["libnvidia-compute-580="] = Result(
        (), 0, "Inst nvidia-firmware-580-580.159.04 (580.159.04-1ubuntu1 NVIDIA CUDA [amd64])\n"
    )
    with pytest.raises(Refusal, match=f"580.159.04-1ubuntu1 instead of {V159}"):
        plan(box)


def test_a_driver_of_the_run_installer_is_not_installed_over(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU))
    box.write("/usr/bin/nvidia-uninstall")
    library(box, "590.48.01")
    with pytest.raises(Refusal, match=r"driver 590\.48\.01 was installed by the \.run installer"):
        plan(box)
    assert not box.commands("apt-cache")


def test_headers_that_are_missing_come_along(box: Box) -> None:
    box.write(f"/boot/vmlinuz-{KERNEL}")
    offered(box, (V159, UBUNTU))
    assert f"linux-headers-{KERNEL}" in plan(box).arguments


def test_headers_that_nobody_has_are_named(box: Box) -> None:
    box.write(f"/boot/vmlinuz-{KERNEL}")
    offered(box, (V159, UBUNTU))
    del box.offers[f"linux-headers-{KERNEL}"]
    with pytest.raises(Refusal, match=f"linux-headers-{KERNEL} is in no source"):
        plan(box, modules="dkms")


def test_half_configured_packages_are_finished(box: Box) -> None:
    settled(box)
    box.packages["nvidia-dkms-580"] = (V159, "iF")
    offered(box, (V159, UBUNTU))
    made = plan(box)
    assert made.action == "repair"
    assert made.configure == ["nvidia-dkms-580 (half configured)"]


def test_a_module_missing_for_the_next_kernel_is_built(box: Box) -> None:
    settled(box)
    healthy_kernel(box, None, "6.17.0-35-generic")
    made = plan(box)
    assert made.build == ["6.17.0-35-generic"]
    assert made.action == "repair"


def test_secure_boot_without_the_hosts_key_takes_ubuntus_signed_modules(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU))
    box.offers[f"linux-modules-nvidia-580-{KERNEL}"] = [("6.17.0-29.29~24.04.1", UBUNTU)]
    box.answers["mokutil --sb-state"] = Result((), 0, "SecureBoot enabled\n")
    made = plan(box)
    assert f"linux-modules-nvidia-580-{KERNEL}" in made.arguments
    assert not any(word.startswith("nvidia-dkms") for word in made.arguments)


def test_secure_boot_and_dkms_alone_stops_with_the_ways_out(box: Box) -> None:
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU))
    box.answers["mokutil --sb-state"] = Result((), 0, "SecureBoot enabled\n")
    with pytest.raises(Refusal) as refusal:
        plan(box, modules="dkms")
    for way in ("nvidia_driver_modules: prebuilt", "mokutil --import", "firmware"):
        assert way in str(refusal.value)


def test_a_conflict_of_sources_is_planned_past(box: Box) -> None:
    cuda = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64"
    box.write("/etc/apt/sources.list.d/cuda.list", f"deb {cuda}/ /\n")
    box.write("/etc/apt/sources.list.d/cuda2.list", f"deb [signed-by=/k.gpg] {cuda}/ /\n")
    box.write("/k.gpg")
    healthy_kernel(box, None)
    offered(box, (V159, UBUNTU))
    made = plan(box)
    assert made.steps[0].startswith("switch off a source that stops apt")
    assert all("Dir::Etc::sourceparts=" in " ".join(w) for w in box.commands("apt-cache"))


def test_without_hold_nothing_of_ours_stays_held(box: Box) -> None:
    settled(box)
    made = plan(box, hold=False)
    assert set(made.unhold) == set(box.packages)
    assert made.hold == []


def test_a_branch_that_nobody_has_is_named(box: Box) -> None:
    healthy_kernel(box, None)
    with pytest.raises(
        Refusal, match=r"driver 580\.159\.03 is in no source any more .there is: none"
    ):
        plan(box)
