"""nvidia-smi of the box: the real program's words for the cards of the simulated machine.

The shapes are those of driver 580.159.04, recorded on two linked GPUs; the values are those of two
RTX 2080 Ti. What it prints follows the state of the box: no module loaded, another module than the
libraries, the fault that is switched on. VERSION is that of the package it is installed from.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.userland import hardware
from lab.userland.hardware import Card

LIBRARY = "/usr/lib/vllm-turing-lab"
VERSION = "@u@"
MODULE_FILE = hardware.MODULE_FILE
TEMPLATE = Path(LIBRARY) / "gpu.xml"
CUDA_VERSION = "13.0"


def legend(meanings: dict[str, str]) -> str:
    """Lay out the legend below a topology table."""
    return "Legend:\n\n" + "".join(f"  {k:<4} = {v}\n" for k, v in meanings.items())


NODES = "the SMP interconnect between NUMA nodes (e.g., QPI/UPI)"
BRIDGES = "the interconnect between PCIe Host Bridges within a NUMA node"
HOST_BRIDGE = "a PCIe Host Bridge (typically the CPU)"
MANY = "multiple PCIe bridges (without traversing the PCIe Host Bridge)"
LEGEND = legend(
    {
        "X": "Self",
        "SYS": f"Connection traversing PCIe as well as {NODES}",
        "NODE": f"Connection traversing PCIe as well as {BRIDGES}",
        "PHB": f"Connection traversing PCIe as well as {HOST_BRIDGE}",
        "PXB": f"Connection traversing {MANY}",
        "PIX": "Connection traversing at most a single PCIe bridge",
        "NV#": "Connection traversing a bonded set of # NVLinks",
    }
)
P2P_LEGEND = legend(
    {
        "X": "Self",
        "OK": "Status Ok",
        "CNS": "Chipset not supported",
        "GNS": "GPU not supported",
        "TNS": "Topology not supported",
        "NS": "Not supported",
        "U": "Unknown",
    }
)
TABLE_HEAD = (
    "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
    "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
    "|                                         |                        |               MIG M. |",
    "|=========================================+========================+======================|",
)
PROCESS_HEAD = (
    "| Processes:                                                                              |",
    "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
    "|        ID   ID                                                               Usage      |",
    "|=========================================================================================|",
)
WIDE = "+" + "-" * 89 + "+"
COLUMNS = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+"
NOT_RUNNING = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
INVALID = "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"


@dataclass(frozen=True)
class Process:
    """A process that holds memory of a card (MiB)."""

    pid: int
    name: str
    card: int
    used: int


@dataclass(frozen=True)
class Machine:
    """Everything an answer depends on."""

    cards: tuple[Card, ...]
    module: str
    fault: str = "none"
    settings: dict[str, dict[str, float]] | None = None
    processes: tuple[Process, ...] = ()
    version: str = VERSION

    def power_limit(self, card: Card) -> float:
        """Power limit that is set, in W."""
        return float(
            (self.settings or {}).get(card.uuid, {}).get("power_limit", card.default_power)
        )

    def persistence(self, card: Card) -> bool:
        """Whether persistence mode is on."""
        return bool((self.settings or {}).get(card.uuid, {}).get("persistence_mode", False))

    def used(self, card: Card) -> int:
        """Memory in use, in MiB."""
        return card.used + sum(p.used for p in self.processes if p.card == card.index)


def loaded_version() -> str:
    """Version of the loaded module, read as the real library does; empty when there is none."""
    try:
        line = MODULE_FILE.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    words = [w for w in line.split() if w[:1].isdigit() and "." in w]
    return words[0] if words else ""


def processes() -> tuple[Process, ...]:
    """Return the processes that hold card memory: the fault switch's, while they live."""
    found = []
    for entry in hardware.read_object(hardware.HARDWARE_FILE).get("processes", []):
        if Path("/proc", str(entry["pid"])).is_dir():
            found.append(Process(entry["pid"], entry["name"], entry["card"], entry["used"]))
    return tuple(found)


def machine() -> Machine:
    """Read the state of this box."""
    return Machine(
        hardware.cards(),
        loaded_version(),
        hardware.fault(),
        hardware.read_object(hardware.SETTINGS_FILE),
        processes(),
    )


def watts(value: float) -> str:
    """Format a power value."""
    return f"{value:.2f} W"


def on(value: bool) -> str:
    """Format a switch."""
    return "Enabled" if value else "Disabled"


# Query fields: name -> (header with its unit, value). The unit is left out with 'nounits'.
Field = Callable[[Machine, Card], str]
FIELDS: dict[str, tuple[str, Field]] = {
    "timestamp": ("", lambda m, c: time.strftime("%Y/%m/%d %H:%M:%S.000")),
    "driver_version": ("", lambda m, c: m.module),
    "count": ("", lambda m, c: str(len(m.cards))),
    "index": ("", lambda m, c: str(c.index)),
    "name": ("", lambda m, c: c.name),
    "gpu_name": ("", lambda m, c: c.name),
    "uuid": ("", lambda m, c: c.uuid),
    "gpu_uuid": ("", lambda m, c: c.uuid),
    "serial": ("", lambda m, c: "[N/A]"),
    "pci.bus_id": ("", lambda m, c: c.bus_id),
    "gpu_bus_id": ("", lambda m, c: c.bus_id),
    "pci.domain": ("", lambda m, c: "0x0000"),
    "pci.bus": ("", lambda m, c: f"0x{c.bus_id[9:11]}"),
    "pci.device": ("", lambda m, c: "0x00"),
    "pci.device_id": ("", lambda m, c: f"0x{c.pci_device:04X}10DE"),
    "pci.sub_device_id": ("", lambda m, c: "0x12A410DE"),
    "memory.total": ("MiB", lambda m, c: f"{c.memory} MiB"),
    "memory.used": ("MiB", lambda m, c: f"{m.used(c)} MiB"),
    "memory.free": ("MiB", lambda m, c: f"{c.memory - c.reserved - m.used(c)} MiB"),
    "memory.reserved": ("MiB", lambda m, c: f"{c.reserved} MiB"),
    "compute_cap": ("", lambda m, c: c.compute_capability),
    "compute_mode": ("", lambda m, c: "Default"),
    "power.draw": ("W", lambda m, c: watts(12.41 + c.index)),
    "power.draw.average": ("W", lambda m, c: watts(12.41 + c.index)),
    "power.draw.instant": ("W", lambda m, c: watts(12.41 + c.index)),
    "power.limit": ("W", lambda m, c: watts(m.power_limit(c))),
    "enforced.power.limit": ("W", lambda m, c: watts(m.power_limit(c))),
    "power.default_limit": ("W", lambda m, c: watts(c.default_power)),
    "power.min_limit": ("W", lambda m, c: watts(c.min_power)),
    "power.max_limit": ("W", lambda m, c: watts(c.max_power)),
    "power.management": ("", lambda m, c: "Enabled"),
    "clocks.sm": ("MHz", lambda m, c: "300 MHz"),
    "clocks.gr": ("MHz", lambda m, c: "300 MHz"),
    "clocks.mem": ("MHz", lambda m, c: "405 MHz"),
    "clocks.current.sm": ("MHz", lambda m, c: "300 MHz"),
    "clocks.current.memory": ("MHz", lambda m, c: "405 MHz"),
    "clocks.max.sm": ("MHz", lambda m, c: f"{c.max_sm_clock} MHz"),
    "clocks.max.gr": ("MHz", lambda m, c: f"{c.max_sm_clock} MHz"),
    "clocks.max.graphics": ("MHz", lambda m, c: f"{c.max_sm_clock} MHz"),
    "clocks.max.mem": ("MHz", lambda m, c: f"{c.max_memory_clock} MHz"),
    "clocks.max.memory": ("MHz", lambda m, c: f"{c.max_memory_clock} MHz"),
    "clocks_event_reasons.active": ("", lambda m, c: "0x0000000000000001"),
    "clocks_throttle_reasons.active": ("", lambda m, c: "0x0000000000000001"),
    "persistence_mode": ("", lambda m, c: on(m.persistence(c))),
    "mig.mode.current": ("", lambda m, c: "[N/A]"),
    "mig.mode.pending": ("", lambda m, c: "[N/A]"),
    "ecc.mode.current": ("", lambda m, c: "[N/A]"),
    "ecc.mode.pending": ("", lambda m, c: "[N/A]"),
    "ecc.errors.uncorrected.volatile.total": ("", lambda m, c: "[N/A]"),
    "display_active": ("", lambda m, c: on(c.display)),
    "display_mode": ("", lambda m, c: on(c.display)),
    "display_attached": ("", lambda m, c: "Yes" if c.display else "No"),
    "pcie.link.gen.current": ("", lambda m, c: "3"),
    "pcie.link.gen.gpucurrent": ("", lambda m, c: "3"),
    "pcie.link.gen.max": ("", lambda m, c: "3"),
    "pcie.link.gen.gpumax": ("", lambda m, c: "3"),
    "pcie.link.width.current": ("", lambda m, c: "8"),
    "pcie.link.width.max": ("", lambda m, c: "16"),
    "temperature.gpu": ("", lambda m, c: str(c.temperature)),
    "temperature.memory": ("", lambda m, c: "N/A"),
    "fan.speed": ("%", lambda m, c: "0 %"),
    "pstate": ("", lambda m, c: "P8"),
    "utilization.gpu": ("%", lambda m, c: "0 %"),
    "utilization.memory": ("%", lambda m, c: "0 %"),
    "vbios_version": ("", lambda m, c: "90.02.0B.00.0E"),
    "driver_model.current": ("", lambda m, c: "[N/A]"),
    "gsp.mode.current": ("", lambda m, c: "Disabled"),
}
APP_FIELDS = (
    "pid",
    "process_name",
    "name",
    "used_memory",
    "used_gpu_memory",
    "gpu_uuid",
    "gpu_name",
    "gpu_bus_id",
    "gpu_serial",
    "timestamp",
)
# Cells of a card that misbehaves, as in reports of real ones.
ODD = {
    "memory.total": "[Unknown Error]",
    "memory.used": "[N/A]",
    "temperature.gpu": "ERR!",
    "power.limit": "[Not Supported]",
    "clocks.max.sm": "[N/A]",
}


def gpu_line(card: Card) -> str:
    """Name and UUID of a card, as 'nvidia-smi -L' prints them."""
    return f"GPU {card.index}: {card.name} (UUID: {card.uuid})"


def lost(card: Card) -> str:
    """Return what the real program says of a card that has fallen off the bus."""
    where = f"{card.bus_id[4:]}"
    return f"Unable to determine the device handle for GPU{card.index}: {where}: Unknown Error\n"


def trouble(state: Machine) -> tuple[str, int]:
    """Message and status when nothing can be answered; empty message when all is well."""
    if not state.module:
        return NOT_RUNNING, 9
    if state.module != state.version:
        short = ".".join(state.version.split(".")[:2])
        text = "Failed to initialize NVML: Driver/library version mismatch\n"
        return f"{text}NVML library version: {short}\n", 18
    if not state.cards:
        return "No devices were found\n", 6
    return "", 0


def list_cards(state: Machine) -> tuple[str, int]:
    """Answer -L."""
    text = ""
    for card in state.cards:
        if not card.usable:
            return text + lost(card), 255
        text += gpu_line(card) + "\n"
    return text, 0


def nvlink_status(state: Machine) -> str:
    """Answer 'nvlink -s'."""
    lines = []
    for card in state.cards:
        lines.append(gpu_line(card))
        for number, up in enumerate(card.links):
            speed = f"{hardware.LINK_SPEED} GB/s" if up else "<inactive>"
            lines.append(f"\t Link {number}: {speed}")
    return "\n".join(lines) + "\n"


def connection(one: Card, other: Card) -> str:
    """How two cards reach each other: NV# over links that are up on both, else the host bridge."""
    if one.index == other.index:
        return " X "
    links = sum(a and b for a, b in zip(one.links, other.links, strict=False))
    return f"NV{links}" if links else "PHB"


def topology(state: Machine) -> str:
    """Answer 'topo -m'."""
    names = [f"GPU{c.index}" for c in state.cards]
    head = "\t" + "\t".join(["\x1b[4m" + names[0], *names[1:]])
    lines = [head + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"]
    for card in state.cards:
        cells = [connection(card, other) for other in state.cards]
        lines.append("\t".join([f"GPU{card.index}", *cells, "0-15", "0", "", "N/A"]))
    return "\n".join(lines) + "\n\n" + LEGEND


def peer_access(state: Machine) -> str:
    """Answer 'topo -p2p r' (and w, n, a, p: all the same here)."""
    names = [f"GPU{c.index}" for c in state.cards]
    lines = [" \t" + "\t".join(["\x1b[4m" + names[0], *names[1:]]) + "\x1b[0m"]
    for card in state.cards:
        cells = []
        for other in state.cards:
            if card.index == other.index:
                cells.append("X")
            elif state.fault == "p2p-off":
                cells.append("CNS")
            else:
                linked = connection(card, other).startswith("NV")
                cells.append("OK" if linked else "NS")
        lines.append("\t".join([f" GPU{card.index}", *cells]))
    return "\n".join(lines) + "\n\n" + P2P_LEGEND


def select(state: Machine, wanted: str) -> list[Card]:
    """Cards that '-i' names: by index, UUID or bus id, several with commas."""
    chosen = []
    for name in filter(None, wanted.split(",")):
        for card in state.cards:
            if (
                name.lower() in (str(card.index), card.uuid.lower(), card.bus_id.lower())
                or name.lower() == card.short_bus_id
            ):
                chosen.append(card)
    return chosen if wanted else list(state.cards)


def cell(state: Machine, card: Card, name: str, units: bool) -> str:
    """One cell of a query."""
    if card.odd and name in ODD:
        return ODD[name]
    value = FIELDS[name][1](state, card)
    unit = FIELDS[name][0]
    return value if units or not unit else value.removesuffix(f" {unit}")


def query(
    state: Machine, names: Sequence[str], form: Sequence[str], wanted: str
) -> tuple[str, int]:
    """Answer --query-gpu."""
    for name in names:
        if name not in FIELDS:
            return f'Field "{name}" is not a valid field to query.\n\n', 2
    if "csv" not in form:
        return '"--format=" switch must be specified, as "csv".\n', 2
    units = "nounits" not in form
    lines = []
    if "noheader" not in form:
        heads = [f"{n} [{FIELDS[n][0]}]" if FIELDS[n][0] else n for n in names]
        lines.append(", ".join(heads))
    for card in select(state, wanted):
        if not card.usable:
            return "".join(f"{x}\n" for x in lines) + lost(card), 255
        lines.append(", ".join(cell(state, card, n, units) for n in names))
    return "\n".join(lines) + "\n", 0


def query_apps(state: Machine, names: Sequence[str], form: Sequence[str]) -> tuple[str, int]:
    """Answer --query-compute-apps."""
    for name in names:
        if name not in APP_FIELDS:
            return f'Field "{name}" is not a valid field to query.\n\n', 2
    lines = []
    memory = ("used_memory", "used_gpu_memory")
    if "noheader" not in form:
        lines.append(", ".join(f"{n} [MiB]" if n in memory else n for n in names))
    for process in state.processes:
        for card in state.cards:
            if card.index == process.card:
                unit = "" if "nounits" in form else " MiB"
                values = {
                    "pid": str(process.pid),
                    "process_name": process.name,
                    "name": process.name,
                    "used_memory": f"{process.used}{unit}",
                    "used_gpu_memory": f"{process.used}{unit}",
                    "gpu_uuid": card.uuid,
                    "gpu_name": card.name,
                    "gpu_bus_id": card.bus_id,
                    "gpu_serial": "[N/A]",
                    "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
                }
                lines.append(", ".join(values[n] for n in names))
    return "".join(f"{x}\n" for x in lines), 0


def xml_processes(state: Machine, card: Card) -> str:
    """Return the process entries of a card in the XML log."""
    text = ""
    for process in state.processes:
        if process.card == card.index:
            text += (
                "\t\t\t<process_info>\n\t\t\t\t<gpu_instance_id>N/A</gpu_instance_id>\n"
                "\t\t\t\t<compute_instance_id>N/A</compute_instance_id>\n"
                f"\t\t\t\t<pid>{process.pid}</pid>\n\t\t\t\t<type>C</type>\n"
                f"\t\t\t\t<process_name>{process.name}</process_name>\n"
                f"\t\t\t\t<used_memory>{process.used} MiB</used_memory>\n\t\t\t</process_info>\n"
            )
    return text


def xml(state: Machine, template: str, wanted: str = "") -> tuple[str, int]:
    """Answer '-q -x'."""
    text = (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'
        f"<nvidia_smi_log>\n\t<timestamp>{time.strftime('%a %b %e %H:%M:%S %Y')}</timestamp>\n"
        f"\t<driver_version>{state.module}</driver_version>\n"
        f"\t<cuda_version>{CUDA_VERSION}</cuda_version>\n"
        f"\t<attached_gpus>{len(state.cards)}</attached_gpus>\n"
    )
    for card in select(state, wanted):
        if not card.usable:
            return text + "</nvidia_smi_log>\n" + lost(card), 255
        used = state.used(card)
        values = {
            "index": str(card.index),
            "bus_id": card.bus_id,
            "bus": card.bus_id[9:11],
            "uuid": card.uuid,
            "name": card.name,
            "architecture": card.architecture,
            "pci_device": f"{card.pci_device:04X}",
            "display_attached": "Yes" if card.display else "No",
            "display_active": on(card.display),
            "persistence": on(state.persistence(card)),
            "fan": "0 %",
            "memory": "Unknown Error" if card.odd else f"{card.memory} MiB",
            "reserved": f"{card.reserved} MiB",
            "used": "N/A" if card.odd else f"{used} MiB",
            "free": f"{card.memory - card.reserved - used} MiB",
            "temperature": "ERR!" if card.odd else f"{card.temperature} C",
            "power_draw": watts(12.41 + card.index),
            "power_limit": "Not Supported" if card.odd else watts(state.power_limit(card)),
            "default_power": watts(card.default_power),
            "min_power": watts(card.min_power),
            "max_power": watts(card.max_power),
            "max_sm_clock": f"{card.max_sm_clock} MHz",
            "max_memory_clock": f"{card.max_memory_clock} MHz",
            "processes": xml_processes(state, card),
        }
        part = template
        for name, value in values.items():
            part = part.replace(f"@{name}@", value)
        text += part + "\n"
    return text + "</nvidia_smi_log>\n", 0


def table(state: Machine) -> tuple[str, int]:
    """Answer a call without arguments."""
    versions = f"NVIDIA-SMI {state.version:22} Driver Version: {state.module:14} "
    lines = [
        f"{time.strftime('%a %b %e %H:%M:%S %Y')}       ",
        WIDE,
        f"| {versions + 'CUDA Version: ' + CUDA_VERSION:<87} |",
        COLUMNS,
        *TABLE_HEAD,
    ]
    text = "\n".join(lines) + "\n"
    for card in state.cards:
        if not card.usable:
            return text + lost(card), 255
        mode = "On" if state.persistence(card) else "Off"
        shown = "On" if card.display else "Off"
        power = f"{12 + card.index}W / {state.power_limit(card):.0f}W"
        memory = f"{state.used(card)}MiB / {card.memory}MiB"
        temperature = "ERR!" if card.odd else f"{card.temperature}C"
        text += (
            f"| {card.index:>3}  {card.name:<28.28}{mode:>6} |   {card.bus_id} {shown:<4}|"
            f" {'N/A':>20} |\n"
            f"| {'0%':>3}   {temperature:<6} P8    {power:>20} | {memory:>22} |"
            f" {'0%':>7}      Default |\n"
            f"|{'':41}|{'':24}|{'N/A':>21} |\n{COLUMNS}\n"
        )
    text += "\n".join(["", WIDE, *PROCESS_HEAD]) + "\n"
    if not state.processes:
        text += f"|  {'No running processes found':<86} |\n"
    for process in state.processes:
        text += (
            f"| {process.card:>4}   N/A  N/A {process.pid:>15}      C   {process.name:<33.33}"
            f"{process.used:>13}MiB |\n"
        )
    return text + WIDE + "\n", 0


def change(state: Machine, option: str, value: str, wanted: str) -> tuple[str, int]:
    """Answer -pl, -pm, -lgc and -rgc; what is set lasts until the next boot."""
    if os.geteuid() != 0:
        return "Insufficient permissions, this operation requires root.\n", 4
    chosen = select(state, wanted)
    if not chosen:
        return "No devices were found\n", 6
    settings = {k: dict(v) for k, v in (state.settings or {}).items()}
    text = ""
    for card in chosen:
        entry = settings.setdefault(card.uuid, {})
        if option == "-pl":
            try:
                limit = float(value)
            except ValueError:
                return INVALID, 2
            if not card.min_power <= limit <= card.max_power:
                span = f"{watts(card.min_power)} and {watts(card.max_power)}"
                text += (
                    f"Provided power limit {watts(limit)} is not a valid power limit which should "
                    f"be between {span} for GPU {card.bus_id}\n"
                    "Terminating early due to previous errors.\n"
                )
                return text, 2
            before = state.power_limit(card)
            entry["power_limit"] = limit
            text += (
                f"Power limit for GPU {card.bus_id} was set to {watts(limit)} "
                f"from {watts(before)}.\n"
            )
        elif option == "-pm":
            entry["persistence_mode"] = value in ("1", "ENABLED")
            text += (
                f"{on(bool(entry['persistence_mode']))} persistence mode for GPU {card.bus_id}.\n"
            )
        else:
            entry["locked_clocks"] = 0.0 if option == "-rgc" else 1.0
            text += f"GPU clocks set for GPU {card.bus_id}\n"
    hardware.write_object(hardware.SETTINGS_FILE, settings)
    return text + "All done.\n", 0


LONG = {
    "--list-gpus": "-L",
    "--query": "-q",
    "--xml-format": "-x",
    "--id": "-i",
    "--power-limit": "-pl",
    "--persistence-mode": "-pm",
    "--lock-gpu-clocks": "-lgc",
    "--reset-gpu-clocks": "-rgc",
}
TAKES_VALUE = ("-i", "-pl", "-pm", "-lgc", "--query-gpu", "--format", "--query-compute-apps")


def parse(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the command line into options and words; '=' and a following word both give values."""
    options: dict[str, str] = {}
    words: list[str] = []
    rest = list(arguments)
    while rest:
        name, mark, value = rest.pop(0).partition("=")
        name = LONG.get(name, name)
        if not name.startswith("-"):
            words.append(name)
            continue
        if name in TAKES_VALUE and not mark and rest:
            value = rest.pop(0)
        options[name] = value
    return options, words


def answer(state: Machine, arguments: Sequence[str], template: str = "") -> tuple[str, int]:
    """Return what nvidia-smi prints and its exit status."""
    options, words = parse(arguments)
    if "--version" in options:
        return (
            f"NVIDIA-SMI version  : {state.version}\nNVML version        : {state.version[:7]}\n"
            f"DRIVER version      : {state.module or 'N/A'}\n"
            f"CUDA Version        : {CUDA_VERSION}\n",
            0,
        )
    message, status = trouble(state)
    if message:
        return message, status
    wanted = options.get("-i", "")
    form = [f.strip() for f in options.get("--format", "").split(",")]
    if words[:1] == ["topo"]:
        if "-m" in options:
            return topology(state), 0
        return (peer_access(state), 0) if "-p2p" in options else (INVALID, 1)
    if words[:1] == ["nvlink"]:
        return (nvlink_status(state), 0) if {"-s", "--status"} & set(options) else (INVALID, 1)
    if "-L" in options:
        return list_cards(state)
    if "--query-gpu" in options:
        names = [n.strip() for n in options["--query-gpu"].split(",")]
        return query(state, names, form, wanted)
    if "--query-compute-apps" in options:
        names = [n.strip() for n in options["--query-compute-apps"].split(",")]
        return query_apps(state, names, form)
    if "-q" in options and "-x" in options:
        return xml(state, template, wanted)
    for option in ("-pl", "-pm", "-lgc", "-rgc"):
        if option in options:
            return change(state, option, options[option], wanted)
    if set(options) <= {"-i"} and not words:
        return table(state)
    return INVALID, 1


def main(argv: Sequence[str]) -> int:
    """Print the answer for this box."""
    state = machine()
    if state.fault == "hang" and state.module:
        time.sleep(3600)
    template = TEMPLATE.read_text(encoding="utf-8") if TEMPLATE.is_file() else ""
    text, status = answer(state, argv, template)
    sys.stdout.write(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
