"""Kernels, modules, Secure Boot, initramfs, .run drivers, apt's history (cases 1 3 5 7 14)."""

from __future__ import annotations

import os

import pytest
from driver_kit import KERNEL, V159, V173, Box, healthy_kernel, library, loaded

from vllm_turing import nvidia_kernel
from vllm_turing.run import Result


def test_both_shapes_of_dkms_status_are_read() -> None:
    text = (
        "nvidia/580.159.03, 6.17.0-29-generic, x86_64: installed\n"
        "nvidia, 580.159.03, 6.17.0-28-generic, x86_64: installed (original_module exists)\n"
        "nvidia/590.48.01: added\nzfs/2.2.2, 6.17.0-29-generic, x86_64: installed\n"
    )
    assert [(e.version, e.kernel, e.state) for e in nvidia_kernel.parse_dkms(text)] == [
        ("580.159.03", "6.17.0-29-generic", "installed"),
        ("580.159.03", "6.17.0-28-generic", "installed"),
        ("590.48.01", "", "added"),
    ]


def test_a_dkms_copy_is_found_before_the_signed_one(box: Box) -> None:
    healthy_kernel(box, "580.159.03")
    signed = box.write(f"/lib/modules/{KERNEL}/kernel/nvidia-580/nvidia.ko.zst")
    box.answers[f"modinfo {signed}"] = Result((), 0, "version: 580.159.03\nsigner: Canonical\n")
    module = nvidia_kernel.module_for(KERNEL, box, box.root)
    assert module is not None
    assert module.dkms
    (box.root / f"lib/modules/{KERNEL}/updates/dkms/nvidia.ko").unlink()
    module = nvidia_kernel.module_for(KERNEL, box, box.root)
    assert module is not None
    assert (module.dkms, module.signer) == (False, "Canonical")


@pytest.mark.parametrize(
    ("grub", "environment", "boots"),
    [
        ("GRUB_DEFAULT=0\n", "", ["6.17.0-35-generic"]),
        ("", "", ["6.17.0-35-generic"]),
        (
            'GRUB_DEFAULT="Advanced options for Ubuntu>Ubuntu, with Linux 6.17.0-9-generic"\n',
            "",
            ["6.17.0-9-generic"],
        ),
        (
            "GRUB_DEFAULT=saved\n",
            "saved_entry=gnulinux-6.17.0-29-generic\n",
            ["6.17.0-29-generic"],
        ),
        ("GRUB_DEFAULT=saved\n", "", ["6.17.0-35-generic"]),
        (
            "GRUB_DEFAULT=0\n",
            "next_entry=Ubuntu, with Linux 6.17.0-29-generic\n",
            ["6.17.0-29-generic"],
        ),
        (
            "GRUB_DEFAULT=2\n",
            "",
            ["6.17.0-35-generic", "6.17.0-29-generic", "6.17.0-9-generic"],
        ),
    ],
    ids=["newest", "no file", "named", "saved", "saved, none", "once", "a number: any"],
)
def test_the_kernel_that_boots_next(
    box: Box, grub: str, environment: str, boots: list[str]
) -> None:
    for release in ("6.17.0-9-generic", "6.17.0-35-generic", "6.17.0-29-generic"):
        box.write(f"/boot/vmlinuz-{release}")
    box.write("/boot/vmlinuz-6.17.0-29-generic.old")
    if grub:
        box.write("/etc/default/grub", grub)
    box.write("/boot/grub/grubenv", f"# GRUB Environment Block\n{environment}####")
    kernels = nvidia_kernel.installed_kernels(box.root)
    assert kernels == ["6.17.0-35-generic", "6.17.0-29-generic", "6.17.0-9-generic"]
    assert nvidia_kernel.next_kernels(kernels, box.root) == boots


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (Result((), 0, "SecureBoot enabled\n"), "enabled"),
        (Result((), 0, "SecureBoot disabled\n"), "disabled"),
        (Result((), 1, "", "EFI variables are not supported on this system\n"), "unsupported"),
    ],
)
def test_mokutils_answer(box: Box, answer: Result, state: str) -> None:
    box.answers["mokutil --sb-state"] = answer
    assert nvidia_kernel.secure_boot(box, box.root).state == state


def test_without_mokutil_the_variable_itself_is_read(box: Box) -> None:
    assert nvidia_kernel.secure_boot(box, box.root).state == "unsupported"
    folder = box.root / "sys/firmware/efi/efivars"
    folder.mkdir(parents=True)
    assert nvidia_kernel.secure_boot(box, box.root).state == "unknown"
    variable = folder / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    variable.write_bytes(b"\x06\0\0\0\x01")
    assert nvidia_kernel.secure_boot(box, box.root) == nvidia_kernel.SecureBoot("enabled", False)
    variable.write_bytes(b"\x06\0\0\0\0")
    assert nvidia_kernel.secure_boot(box, box.root).state == "disabled"


@pytest.mark.parametrize(
    ("words", "enrolled"), [("is already enrolled", True), ("is not enrolled", False)]
)
def test_enrolment_of_the_hosts_own_key(box: Box, words: str, enrolled: bool) -> None:
    key = box.write("/var/lib/shim-signed/mok/MOK.der", "der")
    box.answers["mokutil --sb-state"] = Result((), 0, "SecureBoot enabled\n")
    box.answers["mokutil --test-key"] = Result((), 0 if enrolled else 1, f"{key} {words}\n")
    assert nvidia_kernel.secure_boot(box, box.root).key_enrolled is enrolled


def test_an_initramfs_older_than_the_blacklist_is_stale(box: Box) -> None:
    image = box.write(f"/boot/initrd.img-{KERNEL}", "x")
    conf = box.write("/etc/modprobe.d/vllm-turing-nouveau.conf", "blacklist nouveau\n")
    other = box.write("/etc/modprobe.d/snd.conf", "options snd index=0\n")
    os.utime(image, (100, 100))
    os.utime(conf, (200, 200))
    os.utime(other, (300, 300))
    state = nvidia_kernel.initramfs(KERNEL, box, box.root)
    assert state.stale == ("/etc/modprobe.d/vllm-turing-nouveau.conf",)
    os.utime(image, (250, 250))
    assert nvidia_kernel.initramfs(KERNEL, box, box.root).stale == ()


@pytest.mark.parametrize(
    ("listing", "nouveau"),
    [
        ("usr/lib/modules/6/kernel/drivers/gpu/drm/nouveau/nouveau.ko.zst", True),
        ("usr/lib/modules/6/nouveau.ko\netc/modprobe.d/vllm-turing-nouveau.conf", False),
        ("usr/lib/modules/6/kernel/fs/ext4.ko", False),
    ],
    ids=["nouveau alone", "nouveau with the blacklist", "none"],
)
def test_nouveau_inside_the_initramfs(box: Box, listing: str, nouveau: bool) -> None:
    box.write(f"/boot/initrd.img-{KERNEL}", "x")
    box.write("/etc/modprobe.d/vllm-turing-nouveau.conf", "blacklist nouveau\n")
    box.answers["lsinitramfs"] = Result((), 0, listing + "\n")
    state = nvidia_kernel.initramfs(KERNEL, box, box.root, look_inside=True)
    assert state.nouveau is nouveau


def test_a_driver_of_the_run_installer_is_found_by_its_traces(box: Box) -> None:
    box.write("/usr/bin/nvidia-uninstall")
    library(box, "590.48.01")
    box.answers["dkms status"] = Result(
        (), 0, "nvidia/590.48.01, 6.17.0-29-generic, x86_64: installed\n"
    )
    found = nvidia_kernel.run_installer([], box, box.root)
    assert found is not None
    assert found.version == "590.48.01"
    assert any("libnvidia-ml.so.590.48.01 belongs to no package" in t for t in found.traces)


def test_a_packaged_driver_is_not_taken_for_one(box: Box) -> None:
    library(box, "580.159.03")
    assert nvidia_kernel.run_installer(["580.159.03"], box, box.root) is None


def test_the_culprit_comes_from_apts_history() -> None:
    history = (
        "\nStart-Date: 2026-11-01  06:00:00\nCommandline: apt install libnvidia-compute-580\n"
        f"Install: libnvidia-compute-580:amd64 ({V159})\nEnd-Date: 2026-11-01  06:01:00\n"
        "\nStart-Date: 2026-11-20  06:12:01\nCommandline: /usr/bin/unattended-upgrade\n"
        f"Upgrade: libnvidia-cfg1-580:amd64 ({V159}, {V173}), "
        f"libnvidia-compute-580:amd64 ({V159}, {V173})\nEnd-Date: 2026-11-20  06:13:00\n"
    )
    event = nvidia_kernel.last_change("libnvidia-compute-580", history)
    assert event is not None
    assert (event.command, event.old, event.new) == ("/usr/bin/unattended-upgrade", V159, V173)
    assert nvidia_kernel.last_change("libnvidia-compute-535", history) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue", "580.159.03"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
            "580.159.04",
        ),
    ],
)
def test_the_loaded_module_of_either_flavour(box: Box, text: str, version: str) -> None:
    assert nvidia_kernel.loaded_version(box.root) is None
    box.write("/proc/driver/nvidia/version", text)
    assert nvidia_kernel.loaded_version(box.root) == version
    assert nvidia_kernel.loaded_open(box.root) is ("Open" in text)


def test_loaded_helper_of_the_kit_is_read(box: Box) -> None:
    loaded(box, "580.159.03")
    assert nvidia_kernel.loaded_version(box.root) == "580.159.03"
