"""The simulated machine: its cards, its faults and what its kernel has loaded.

Installed in the box as /usr/lib/vllm-turing-lab/hardware.py; standard library only. Values are
those of the host this project reproduces (two RTX 2080 Ti with 22,528 MiB, two NVLinks each).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HARDWARE_FILE = Path("/var/lib/vllm-turing-lab/hardware.json")
RUN_DIR = Path("/run/vllm-turing-lab")
KERNEL_FILE = RUN_DIR / "kernel.json"
#: What /proc/driver/nvidia/version says; absent while no driver is loaded.
MODULE_FILE = RUN_DIR / "driver-version"
SETTINGS_FILE = RUN_DIR / "gpu-settings.json"

# Fault switches: name -> what the box then looks like. 'boot' ones take effect at the next boot.
FAULTS: dict[str, str] = {
    "none": "a healthy machine",
    "no-link": "both NVLinks inactive on both cards; topology shows PHB",
    "one-link": "link 1 inactive on both cards; topology shows NV1",
    "p2p-off": "peer-to-peer reads report 'chipset not supported' (IOMMU or ACS in the way)",
    "gpu-off-bus": "the second card has fallen off the bus (Xid 79)",
    "no-devices": "the driver finds no card: 'No devices were found'",
    "small-card": "the second card has 11,264 MiB",
    "foreign-card": "a GT 1030 comes first on the bus, so the 2080 Ti have index 1 and 2",
    "odd-cells": "cells of the second card read [Unknown Error], [N/A], ERR!",
    "mismatch": "the loaded module is older than the libraries on disk",
    "hang": "nvidia-smi and NVML never answer",
    "nouveau": "nouveau takes the cards although it is blacklisted (boot)",
    "secure-boot": "Secure Boot is on and the machine owner's key is not enrolled (boot)",
    "display": "a display is attached to the first card and uses memory",
}
BOOT_FAULTS = ("nouveau", "secure-boot")
MISMATCH_VERSION = "580.95.05"


@dataclass(frozen=True)
class Card:
    """One card as nvidia-smi, NVML and the PCI bus show it. Memory in MiB, power in W, MHz."""

    index: int
    bus_id: str
    uuid: str
    name: str = "NVIDIA GeForce RTX 2080 Ti"
    architecture: str = "Turing"
    compute_capability: str = "7.5"
    pci_device: int = 0x1E07
    memory: int = 22528
    reserved: int = 259
    used: int = 1
    default_power: int = 250
    min_power: int = 100
    max_power: int = 280
    max_sm_clock: int = 2160
    max_memory_clock: int = 7000
    temperature: int = 34
    links: tuple[bool, ...] = (True, True)
    usable: bool = True
    odd: bool = False
    display: bool = False

    @property
    def short_bus_id(self) -> str:
        """Bus id in the kernel's form, '0000:0a:00.0'."""
        return self.bus_id[4:].lower()


CARDS = (
    Card(0, "00000000:0A:00.0", "GPU-2080a000-7500-4000-8000-000000000001"),
    Card(
        1,
        "00000000:0B:00.0",
        "GPU-2080b000-7500-4000-8000-000000000002",
        max_sm_clock=2175,
        temperature=36,
    ),
)
FOREIGN_CARD = Card(
    0,
    "00000000:01:00.0",
    "GPU-1030c000-6100-4000-8000-000000000003",
    name="NVIDIA GeForce GT 1030",
    architecture="Pascal",
    compute_capability="6.1",
    pci_device=0x1D01,
    memory=2048,
    default_power=30,
    min_power=30,
    max_power=30,
    max_sm_clock=1911,
    max_memory_clock=3004,
    links=(),
)
# GB/s of one link, as 'nvidia-smi nvlink -s' prints it on this card.
LINK_SPEED = "25.781"


@dataclass(frozen=True)
class Kernel:
    """What the simulated kernel has: release and loaded modules (name -> details)."""

    release: str = ""
    modules: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def nvidia_version(self) -> str:
        """Version of the loaded nvidia module, empty when none is loaded."""
        return self.modules.get("nvidia", {}).get("version", "")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; anything unreadable is an empty one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_object(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON object atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    draft.replace(path)


def fault(path: Path | None = None) -> str:
    """Name of the fault that is switched on; 'none' when there is none."""
    return str(read_object(path or HARDWARE_FILE).get("fault", "none"))


def kernel(path: Path | None = None) -> Kernel:
    """Return what the simulated kernel has loaded."""
    data = read_object(path or KERNEL_FILE)
    return Kernel(str(data.get("release", "")), data.get("modules", {}))


def apply_fault(name: str, cards: tuple[Card, ...] = CARDS) -> tuple[Card, ...]:
    """Return the cards as they are under a fault."""
    first, second = cards
    if name == "no-link":
        return tuple(replace(c, links=(False, False)) for c in cards)
    if name == "one-link":
        return tuple(replace(c, links=(True, False)) for c in cards)
    if name == "gpu-off-bus":
        return (first, replace(second, usable=False))
    if name == "no-devices":
        return ()
    if name == "small-card":
        return (first, replace(second, memory=11264))
    if name == "foreign-card":
        return (FOREIGN_CARD, replace(first, index=1), replace(second, index=2))
    if name == "odd-cells":
        return (first, replace(second, odd=True))
    if name == "display":
        return (replace(first, display=True, used=612), second)
    return cards


def cards() -> tuple[Card, ...]:
    """Return the cards of this box, under its current fault."""
    return apply_fault(fault())


def pci_cards() -> tuple[Card, ...]:
    """Return the cards that sit on the PCI bus: a driver that sees none does not unplug them."""
    name = fault()
    return CARDS if name == "no-devices" else apply_fault(name)
