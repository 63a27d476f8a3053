"""The gate decides from state (cases 1, 3, 5, 7, 58)."""

from __future__ import annotations

from typing import Any

import pytest
from driver_kit import KERNEL, V159, V173, Box, healthy_kernel, installed, library, loaded

from vllm_turing import nvidia_kernel, reboot_gate
from vllm_turing.reboot_gate import BootState, KernelState
from vllm_turing.run import Result

NEXT = "6.17.0-35-generic"


def module(version: str = "580.159.03", **over: Any) -> nvidia_kernel.Module:
    values = {"path": f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko", "version": version}
    return nvidia_kernel.Module(**{**values, **over})


def image(**over: Any) -> nvidia_kernel.Initramfs:
    values = {"kernel": KERNEL, "path": f"/boot/initrd.img-{KERNEL}", "exists": True}
    return nvidia_kernel.Initramfs(**{**values, **over})


def fresh(**over: Any) -> BootState:
    """A driver was just installed; nouveau still has the cards."""
    values: dict[str, Any] = {
        "running": KERNEL,
        "package": "580.159.03",
        "library": "580.159.03",
        "nouveau": True,
        "running_module": module(),
        "boots": (KernelState(KERNEL, module(), image(), True),),
    }
    return BootState(**{**values, **over})


def test_nouveau_gives_way_at_the_next_boot() -> None:
    decision = reboot_gate.decide(fresh())
    assert decision.needed
    assert decision.safe
    assert decision.reasons == ["nouveau owns the cards; the driver takes over at the next boot"]


def test_what_works_needs_no_reboot_and_costs_no_look(box: Box) -> None:
    installed(box)
    loaded(box, "580.159.03")
    library(box, "580.159.03")
    decision = reboot_gate.decide(reboot_gate.collect(box, box.root))
    assert not decision.needed
    assert [words[0] for words in box.ran] == ["dpkg-query", "uname"]


def test_no_driver_needs_no_reboot(box: Box) -> None:
    decision = reboot_gate.decide(reboot_gate.collect(box, box.root))
    assert (decision.needed, decision.notes) == (False, ["no driver package is installed"])


def test_a_foreign_upgrade_is_named_with_both_versions_and_the_culprit(box: Box) -> None:
    installed(box, V173)
    loaded(box, "580.159.03")
    library(box, "580.173.02")
    healthy_kernel(box, "580.173.02")
    box.write(
        "/var/log/apt/history.log",
        "Start-Date: 2026-11-20  06:12:01\nCommandline: /usr/bin/unattended-upgrade\n"
        f"Upgrade: libnvidia-compute-580:amd64 ({V159}, {V173})\n",
    )
    decision = reboot_gate.decide(reboot_gate.collect(box, box.root))
    assert decision.needed
    assert decision.safe
    (reason,) = decision.reasons
    assert "the loaded module is 580.159.03" in reason
    assert "the libraries are 580.173.02" in reason
    assert "'/usr/bin/unattended-upgrade' on 2026-11-20" in reason


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (
            {"boots": (KernelState(NEXT, None, image(), False),)},
            f"install linux-headers-{NEXT}",
        ),
        (
            {
                "boots": (KernelState(KERNEL, None, image(), True),),
                "build_log": "/var/lib/dkms/nvidia/580.159.03/build/make.log",
            },
            "its build failed, see /var/lib/dkms/nvidia/580.159.03/build/make.log",
        ),
        (
            {"boots": (KernelState(NEXT, None, image(), True),)},
            f"run 'dkms autoinstall -k {NEXT}'",
        ),
        (
            {"boots": (KernelState(KERNEL, module("590.48.01"), image(), True),)},
            "would load module 590.48.01",
        ),
        (
            {"boots": (KernelState(KERNEL, module(), image(stale=("/etc/modprobe.d/x",)), True),)},
            f"run 'update-initramfs -u -k {KERNEL}'",
        ),
        (
            {"boots": (KernelState(KERNEL, module(), image(nouveau=True), True),)},
            "would load nouveau",
        ),
        ({"unfinished": ("nvidia-dkms-580 (half configured)",)}, "run 'dpkg --configure -a'"),
        ({"boots": ()}, "no kernel image in /boot"),
        ({"mixed": ("nvidia-utils-580 580.173.02",)}, "different versions"),
        (
            {
                "boots": (KernelState(KERNEL, module(), image(), True),),
                "secure_boot": nvidia_kernel.SecureBoot("enabled", False),
            },
            "is not signed",
        ),
        (
            {
                "boots": (KernelState(KERNEL, module(signer="host key"), image(), True),),
                "secure_boot": nvidia_kernel.SecureBoot("enabled", False),
            },
            "mokutil --import",
        ),
        # any of several kernels may boot: all must have a module
        (
            {
                "boots": (
                    KernelState(KERNEL, module(), image(), True),
                    KernelState(NEXT, None, image(), True),
                )
            },
            f"kernel {NEXT} has no nvidia module",
        ),
    ],
)
def test_it_never_boots_into_a_kernel_without_a_working_module(
    over: dict[str, Any], words: str
) -> None:
    decision = reboot_gate.decide(fresh(**over))
    assert decision.needed
    assert not decision.safe
    assert words in " | ".join(decision.refusals)


@pytest.mark.parametrize(
    "boot",
    [
        nvidia_kernel.SecureBoot("disabled"),
        nvidia_kernel.SecureBoot("unsupported"),
        nvidia_kernel.SecureBoot("enabled", True),
    ],
)
def test_secure_boot_that_does_not_stand_in_the_way(boot: nvidia_kernel.SecureBoot) -> None:
    signed = KernelState(KERNEL, module(signer="host key"), image(), True)
    assert reboot_gate.decide(fresh(secure_boot=boot, boots=(signed,))).safe


def test_ubuntus_signed_module_loads_under_secure_boot() -> None:
    path = f"/lib/modules/{KERNEL}/kernel/nvidia-580/nvidia.ko"
    signed = module(path=path, signer="Canonical Ltd. Kernel Module Signing")
    boots = (KernelState(KERNEL, signed, image(), True),)
    boot = nvidia_kernel.SecureBoot("enabled", False)
    assert reboot_gate.decide(fresh(secure_boot=boot, boots=boots)).safe


def test_half_done_packages_alone_ask_for_no_reboot(box: Box) -> None:
    installed(box)
    box.packages["nvidia-dkms-580"] = (V159, "iF")
    loaded(box, "580.159.03")
    library(box, "580.159.03")
    healthy_kernel(box, "580.159.03")
    decision = reboot_gate.decide(reboot_gate.collect(box, box.root))
    assert not decision.needed
    assert decision.refusals


def test_a_second_reboot_is_never_asked_for() -> None:
    decision = reboot_gate.decide(fresh())
    assert reboot_gate.after_reboot(decision, decision.reasons) == [
        "after the reboot, still: nouveau owns the cards; the driver takes over at the next boot"
    ]
    assert reboot_gate.after_reboot(reboot_gate.Decision(), ["x"]) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Result((), 0, "580.159.03\n580.159.03\n"), None),
        (Result((), 0, "580.159.04\n580.159.04\n"), "reports driver 580.159.04, not 580.159.03"),
        (Result((), 0, "No devices were found\n"), "sees no card: No devices were found"),
        (Result((), None, error="timed out after 60 s"), "timed out after 60 s"),
        (Result((), None, error="not found"), "sees no card: not found"),
        (
            Result((), 18, "Failed to initialize NVML: Driver/library version mismatch\n"),
            "Driver/library version mismatch",
        ),
    ],
)
def test_the_driver_itself_is_asked(box: Box, answer: Result, words: str | None) -> None:
    box.answers["nvidia-smi"] = answer
    fault = reboot_gate.verify(fresh(), box)
    assert fault is None if words is None else words in (fault or "")
