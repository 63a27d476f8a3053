"""Gather what can be known of the cards, from whichever source answers.

``nvidia-smi -q -x`` knows most; where it is silent, ``--query-gpu``, ``-L``,
``/proc/driver/nvidia/gpus`` and finally the PCI bus (``lspci`` or ``/sys/bus/pci``) fill in.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from . import nvidia_smi
from .preflight_host import Host
from .run import Result

#: PCI device ids (vendor 10de) with compute capability 7.5: TU102, TU104, TU106, TU116, TU117.
#: Source: the PCI id database and NVIDIA's table of CUDA capable cards.
TURING_IDS = re.compile(r"10de:(1e[0-9a-f]{2}|1f[0-9a-f]{2}|21[89a-d][0-9a-f])$")

#: TU102 as GeForce RTX 2080 Ti: first revision, "Rev. A", and engineering boards.
RTX_2080_TI_IDS = frozenset({"10de:1e03", "10de:1e04", "10de:1e07"})

#: Architecture names of nvidia-smi with one compute capability each.
CAPABILITY_OF = {"Turing": "7.5", "Volta": "7.0", "Hopper": "9.0"}

SMI_TIMEOUT = 15.0


@dataclass(frozen=True)
class PciCard:
    """An NVIDIA display controller on the PCI bus; ``driver`` is the kernel driver that owns it."""

    bus_id: str
    device_id: str
    name: str = ""
    driver: str = ""


@dataclass(frozen=True)
class Module:
    """The loaded kernel module; ``version`` is empty when none is loaded."""

    version: str = ""
    open_flavour: bool = False


@dataclass
class GpuFacts:
    """Everything known of the cards.

    :ivar gpus: cards that the driver can use
    :ivar source: which answer ``gpus`` comes from; empty when there are none
    :ivar silence: why nvidia-smi gave no card; empty when it gave one
    :ivar pci: cards on the bus, whether or not a driver uses them
    :ivar links: card to link to GB/s (None: inactive)
    """

    gpus: list[nvidia_smi.SmiGpu] = field(default_factory=list)
    source: str = ""
    silence: str = ""
    lost: list[str] = field(default_factory=list)
    module: Module = field(default_factory=Module)
    driver_version: str = ""
    cuda_version: str = ""
    pci: list[PciCard] = field(default_factory=list)
    pci_source: str = ""
    links: dict[int, dict[int, float | None]] = field(default_factory=dict)
    topology: dict[tuple[int, int], str] = field(default_factory=dict)
    p2p: dict[tuple[int, int], str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain data for a module's result."""
        return {
            "gpus": [dataclasses.asdict(gpu) for gpu in self.gpus],
            "source": self.source,
            "silence": self.silence,
            "lost": list(self.lost),
            "module_version": self.module.version,
            "module_open": self.module.open_flavour,
            "driver_version": self.driver_version,
            "cuda_version": self.cuda_version,
            "pci": [dataclasses.asdict(card) for card in self.pci],
            "pci_source": self.pci_source,
            "nvlink": [
                {"gpu": gpu, "link": link, "gb_per_s": speed}
                for gpu, links in sorted(self.links.items())
                for link, speed in sorted(links.items())
            ],
            "topology": [
                {"from": pair[0], "to": pair[1], "connection": cell}
                for pair, cell in sorted(self.topology.items())
            ],
            "p2p_read": [
                {"from": pair[0], "to": pair[1], "state": cell}
                for pair, cell in sorted(self.p2p.items())
            ],
        }


def capability(gpu: nvidia_smi.SmiGpu) -> str | None:
    """Return a card's compute capability, by the driver's word, architecture or PCI id."""
    if gpu.compute_capability:
        return gpu.compute_capability
    if gpu.architecture in CAPABILITY_OF:
        return CAPABILITY_OF[gpu.architecture]
    return "7.5" if TURING_IDS.match(gpu.device_id) else None


def parse_lspci(text: str) -> list[PciCard]:
    """Read ``lspci -Dnnk -d 10de:``; only display controllers (class 03xx) are cards."""
    cards: list[PciCard] = []
    keep = False
    for line in text.splitlines():
        head = re.match(r"([0-9a-fA-F:]{5,13}\.[0-7]) .*?\[(03\d\d)\]: (.*)$", line, re.ASCII)
        if head:
            ids = re.findall(r"\[(10de:[0-9a-f]{4})\]", head.group(3).lower())
            keep = bool(ids) and bool(nvidia_smi.bus_id(head.group(1)))
            if keep:
                name = re.sub(r"\s*\[10de:.*$", "", head.group(3), flags=re.IGNORECASE)
                cards.append(PciCard(nvidia_smi.bus_id(head.group(1)), ids[-1], name.strip()))
        elif line[:1].strip():
            keep = False
        elif keep and "kernel driver in use:" in line.lower():
            owner = line.split(":", 1)[1].strip()
            cards[-1] = dataclasses.replace(cards[-1], driver=owner)
    return cards


def sysfs_cards(host: Host) -> list[PciCard]:
    """Read the cards from ``/sys/bus/pci/devices``."""
    cards = []
    for name in host.listdir("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{name}"
        if (host.read(f"{folder}/vendor") or "").strip() != "0x10de":
            continue
        if not (host.read(f"{folder}/class") or "").strip().startswith("0x03"):
            continue
        device = (host.read(f"{folder}/device") or "").strip().removeprefix("0x").lower()
        driver = (host.link_target(f"{folder}/driver") or "").rstrip("/").rsplit("/", 1)[-1]
        cards.append(PciCard(nvidia_smi.bus_id(name) or name, f"10de:{device}", "", driver))
    return cards


def parse_proc_version(text: str) -> Module:
    """Read ``/proc/driver/nvidia/version``: the module's version and flavour."""
    for line in text.splitlines():
        match = re.match(r"NVRM version:.*?Kernel Module.*?\s(\d{3}(?:\.\d{1,4}){1,2})\b", line)
        if match:
            return Module(match.group(1), "Open Kernel Module" in line)
    return Module()


#: The calls that the facts are made of; preflight starts them all at the same time.
COMMANDS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("nvidia-smi", "-q", "-x"), SMI_TIMEOUT),
    (("nvidia-smi", "nvlink", "-s"), SMI_TIMEOUT),
    (("nvidia-smi", "topo", "-m"), SMI_TIMEOUT),
    (("nvidia-smi", "topo", "-p2p", "r"), SMI_TIMEOUT),
    (("lspci", "-Dnnk", "-d", "10de:"), 10.0),
)


def gather(host: Host) -> GpuFacts:
    """Gather the facts; never raises.

    :param host: the machine, or a test's stand-in for it
    """
    facts = GpuFacts(module=parse_proc_version(host.read("/proc/driver/nvidia/version") or ""))
    listing = host.run(COMMANDS[4][0], timeout=COMMANDS[4][1])
    facts.pci = parse_lspci(listing.stdout) if listing.ok else []
    facts.pci_source = "lspci" if facts.pci else ""
    if not facts.pci:
        facts.pci = sysfs_cards(host)
        facts.pci_source = "/sys/bus/pci" if facts.pci else ""
    _ask_smi(host, facts)
    if facts.gpus:
        facts.links = nvidia_smi.parse_nvlink(_answer(host, facts, "nvlink", COMMANDS[1][0]))
        facts.topology = nvidia_smi.parse_matrix(_answer(host, facts, "topo", COMMANDS[2][0]))
        facts.p2p = nvidia_smi.parse_matrix(_answer(host, facts, "p2p", COMMANDS[3][0]))
    return facts


def _answer(host: Host, facts: GpuFacts, name: str, argv: tuple[str, ...]) -> str:
    """Return a command's output; remember why there is none."""
    result = host.run(argv, timeout=SMI_TIMEOUT)
    if result.error:
        facts.answers[name] = result.error
    elif not result.ok:
        facts.answers[name] = _last_line(result) or f"status {result.rc}"
    return result.stdout


def _last_line(result: Result) -> str:
    lines = [line.strip() for line in f"{result.stdout}\n{result.stderr}".splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _ask_smi(host: Host, facts: GpuFacts) -> None:
    """Fill in the cards that the driver can use."""
    result = host.run(COMMANDS[0][0], timeout=SMI_TIMEOUT)
    log = nvidia_smi.parse_xml(result.stdout)
    facts.lost = log.lost or nvidia_smi.lost_cards(result.stderr)
    facts.gpus, facts.source = log.gpus, "nvidia-smi -q -x" if log.gpus else ""
    facts.driver_version, facts.cuda_version = log.driver_version, log.cuda_version
    if facts.gpus:
        return
    facts.silence = nvidia_smi.silence_reason(result.rc, result.stdout, result.stderr, result.error)
    facts.answers["smi"] = result.error or _last_line(result)
    if facts.silence in ("unknown",) and result.error is None:
        _ask_smi_otherwise(host, facts)


def _ask_smi_otherwise(host: Host, facts: GpuFacts) -> None:
    """Fall back to the query and the list, when the document was no use."""
    query = f"--query-gpu={','.join(nvidia_smi.QUERY_FIELDS)}"
    rows = host.run(("nvidia-smi", query, "--format=csv,noheader"), timeout=SMI_TIMEOUT)
    facts.gpus, facts.source = nvidia_smi.parse_query(rows.stdout), "nvidia-smi --query-gpu"
    if not facts.gpus:
        names = host.run(("nvidia-smi", "-L"), timeout=SMI_TIMEOUT)
        facts.gpus, facts.source = nvidia_smi.parse_list(names.stdout), "nvidia-smi -L"
        facts.lost = facts.lost or nvidia_smi.lost_cards(f"{names.stdout}\n{names.stderr}")
        if not facts.gpus:
            facts.silence = nvidia_smi.silence_reason(
                names.rc, names.stdout, names.stderr, names.error
            )
    if facts.gpus:
        facts.silence = ""
        _complete_from_proc(host, facts.gpus)
    else:
        facts.source = ""


def _complete_from_proc(host: Host, gpus: list[nvidia_smi.SmiGpu]) -> None:
    """Add bus ids from ``/proc/driver/nvidia/gpus/*/information`` by UUID."""
    for name in host.listdir("/proc/driver/nvidia/gpus"):
        text = host.read(f"/proc/driver/nvidia/gpus/{name}/information") or ""
        match = re.search(r"GPU UUID:\s*(\S+)", text)
        for gpu in gpus:
            if match and gpu.uuid == match.group(1) and not gpu.bus_id:
                gpu.bus_id = nvidia_smi.bus_id(name)
