"""Read what nvidia-smi prints, in every shape that it is known to print.

Each parser takes text and returns plain data; none raises, whatever the text. Cells may be
``[N/A]``, ``[Not Supported]``, ``[Unknown Error]``, ``ERR!`` and the like: they become None.
Drivers add and rename fields: unknown ones are passed over, renamed ones are looked for under
each of their names (580: ``gpu_power_readings/current_power_limit``; older: ``power_readings/
power_limit``).
"""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field

#: Columns of the query that replaces an unusable XML; the order is the order of the answer.
QUERY_FIELDS = (
    "index", "uuid", "name", "pci.bus_id", "driver_version", "memory.total", "memory.used",
    "compute_cap", "power.limit", "power.min_limit", "power.max_limit", "clocks.max.sm",
    "clocks.max.memory", "persistence_mode", "display_active", "mig.mode.current",
    "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_BUS = re.compile(r"^(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])$")


@dataclass
class SmiGpu:
    """One card as nvidia-smi describes it; None where the driver gave no value.

    Memory is in MiB, power in watts, clocks in MHz.
    """

    index: int
    name: str = ""
    uuid: str = ""
    bus_id: str = ""
    device_id: str = ""
    architecture: str = ""
    compute_capability: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    power_limit: float | None = None
    power_min: float | None = None
    power_max: float | None = None
    power_default: float | None = None
    clock_sm_max: int | None = None
    clock_memory_max: int | None = None
    persistence: bool | None = None
    display_active: bool | None = None
    mig: bool | None = None
    compute_mode: str = ""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_gen_max: int | None = None
    processes: list[SmiProcess] = field(default_factory=list)


@dataclass(frozen=True)
class SmiProcess:
    """A process on a card; ``memory`` in MiB, ``pid`` None where the driver hides it."""

    pid: int | None
    kind: str
    name: str
    memory: int | None


@dataclass
class SmiLog:
    """What one ``nvidia-smi -q -x`` told.

    :ivar usable: whether there was a document at all
    :ivar lost: bus ids of cards that the driver could not reach
    """

    usable: bool = False
    driver_version: str = ""
    cuda_version: str = ""
    gpus: list[SmiGpu] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def number(text: str | None) -> float | None:
    """Return the number at the start of a cell (``22528 MiB``, ``[N/A]``), or None."""
    if text is None:
        return None
    match = re.match(r"\s*(-?\d{1,15}(?:\.\d{1,9})?)(?:\s*[A-Za-z/%]*)?\s*$", text, re.ASCII)
    return float(match.group(1)) if match else None


def whole(text: str | None) -> int | None:
    """Return the whole number at the start of a cell, or None."""
    value = number(text)
    return None if value is None else int(value)


def switch(text: str | None) -> bool | None:
    """Return whether a cell says Enabled (or Yes, On); None when it says neither."""
    word = (text or "").strip().lower()
    if word in ("enabled", "yes", "on"):
        return True
    return False if word in ("disabled", "no", "off") else None


def bus_id(text: str | None) -> str:
    """Return a PCI address as ``0000:0a:00.0``; empty when the text is none."""
    match = _BUS.match((text or "").strip())
    if not match:
        return ""
    domain, bus, device, function = match.groups()
    return f"{(domain or '0000')[-4:]}:{bus}:{device}.{function}".lower()


def lost_cards(text: str) -> list[str]:
    """Return the bus ids in ``Unable to determine the device handle for GPU1: 0000:0B:00.0``."""
    found = []
    for line in text.splitlines():
        if "unable to determine the device handle" in line.lower():
            match = re.search(r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])", line)
            found.append(bus_id(match.group(1)) if match else "unknown")
    return list(dict.fromkeys(found))


# -- the XML document --------------------------------------------------------------------------


def parse_xml(text: str) -> SmiLog:
    """Read ``nvidia-smi -q -x``; lines before and after the document do no harm."""
    log = SmiLog(lost=lost_cards(text))
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < start:
        return log
    try:
        root = ET.fromstring(text[start : end + len("</nvidia_smi_log>")])
    except (ET.ParseError, ValueError):
        return log
    log.usable = True
    log.driver_version = _text(root, "driver_version")
    log.cuda_version = _text(root, "cuda_version")
    log.gpus = [_gpu_of(element, index) for index, element in enumerate(root.findall("gpu"))]
    return log


def _text(element: ET.Element, *paths: str) -> str:
    """Return the first of several paths that holds text."""
    for path in paths:
        found = element.findtext(path)
        if found is not None and found.strip():
            return found.strip()
    return ""


def _gpu_of(element: ET.Element, index: int) -> SmiGpu:
    device = _text(element, "pci/pci_device_id").removeprefix("0x").lower()
    vendor = device[4:] if len(device) == 8 else ""
    return SmiGpu(
        index=index,
        name=_text(element, "product_name"),
        uuid=_text(element, "uuid"),
        bus_id=bus_id(_text(element, "pci/pci_bus_id") or element.get("id")),
        device_id=f"{vendor}:{device[:4]}" if vendor else "",
        architecture=_text(element, "product_architecture"),
        compute_capability=_capability(_text(element, "compute_capability", "compute_cap")),
        memory_total=whole(_text(element, "fb_memory_usage/total")),
        memory_used=whole(_text(element, "fb_memory_usage/used")),
        power_limit=number(_power(element, "current_power_limit", "power_limit")),
        power_min=number(_power(element, "min_power_limit")),
        power_max=number(_power(element, "max_power_limit")),
        power_default=number(_power(element, "default_power_limit")),
        clock_sm_max=whole(_text(element, "max_clocks/sm_clock", "max_clocks/graphics_clock")),
        clock_memory_max=whole(_text(element, "max_clocks/mem_clock")),
        persistence=switch(_text(element, "persistence_mode")),
        display_active=switch(_text(element, "display_active")),
        mig=switch(_text(element, "mig_mode/current_mig")),
        compute_mode=_text(element, "compute_mode"),
        pcie_width=_width(_text(element, "pci/pci_gpu_link_info/link_widths/current_link_width")),
        pcie_width_max=_width(_text(element, "pci/pci_gpu_link_info/link_widths/max_link_width")),
        pcie_gen_max=whole(_text(element, "pci/pci_gpu_link_info/pcie_gen/max_link_gen")),
        processes=[_process_of(entry) for entry in element.findall("processes/process_info")],
    )


def _power(element: ET.Element, *names: str) -> str:
    return _text(
        element,
        *(
            f"{group}/{name}"
            for group in ("gpu_power_readings", "power_readings")
            for name in names
        ),
    )


def _width(text: str) -> int | None:
    return whole(text.removesuffix("x"))


def _capability(text: str) -> str | None:
    return text if re.fullmatch(r"\d{1,2}\.\d", text, re.ASCII) else None


def _process_of(entry: ET.Element) -> SmiProcess:
    return SmiProcess(
        pid=whole(_text(entry, "pid")),
        kind=_text(entry, "type"),
        name=_text(entry, "process_name"),
        memory=whole(_text(entry, "used_memory")),
    )


# -- the other forms ---------------------------------------------------------------------------


def parse_query(text: str, fields: tuple[str, ...] = QUERY_FIELDS) -> list[SmiGpu]:
    """Read ``--query-gpu=... --format=csv,noheader``; lines that are no row are passed over."""
    gpus: list[SmiGpu] = []
    try:
        rows = list(csv.reader(io.StringIO(text.replace("\0", "")), skipinitialspace=True))
    except csv.Error:
        return gpus
    for row in rows:
        cells = dict(zip(fields, (cell.strip() for cell in row), strict=False))
        index = whole(cells.get("index"))
        if len(row) != len(fields) or index is None:
            continue
        gpus.append(
            SmiGpu(
                index=index,
                name=cells.get("name", ""),
                uuid=cells.get("uuid", ""),
                bus_id=bus_id(cells.get("pci.bus_id")),
                compute_capability=_capability(cells.get("compute_cap", "")),
                memory_total=whole(cells.get("memory.total")),
                memory_used=whole(cells.get("memory.used")),
                power_limit=number(cells.get("power.limit")),
                power_min=number(cells.get("power.min_limit")),
                power_max=number(cells.get("power.max_limit")),
                clock_sm_max=whole(cells.get("clocks.max.sm")),
                clock_memory_max=whole(cells.get("clocks.max.memory")),
                persistence=switch(cells.get("persistence_mode")),
                display_active=switch(cells.get("display_active")),
                mig=switch(cells.get("mig.mode.current")),
                pcie_width=whole(cells.get("pcie.link.width.current")),
                pcie_width_max=whole(cells.get("pcie.link.width.max")),
            )
        )
    return gpus


def parse_list(text: str) -> list[SmiGpu]:
    """Read ``nvidia-smi -L``; MIG children are indented and are no cards."""
    gpus = []
    for line in text.splitlines():
        match = re.match(
            r"GPU (\d{1,4}): (.*?) \(UUID: (GPU-[0-9A-Za-z.\-]+)\)\s*$", line, re.ASCII
        )
        if match:
            gpus.append(SmiGpu(int(match.group(1)), match.group(2), match.group(3)))
    return gpus


def has_mig_children(text: str) -> bool:
    """Whether ``nvidia-smi -L`` lists MIG children."""
    return re.search(r"^\s+MIG ", text, re.MULTILINE) is not None


def parse_nvlink(text: str) -> dict[int, dict[int, float | None]]:
    """Read ``nvidia-smi nvlink -s``.

    :returns: card index to link number to its speed in GB/s; None for an inactive link
    """
    cards: dict[int, dict[int, float | None]] = {}
    current: dict[int, float | None] | None = None
    for line in text.splitlines():
        header = re.match(r"GPU (\d{1,4}):", line, re.ASCII)
        if header:
            current = cards.setdefault(int(header.group(1)), {})
            continue
        link = re.match(r"\s+Link (\d{1,3}):\s*(.*)$", line, re.ASCII)
        if link and current is not None:
            speed = number(link.group(2))
            current[int(link.group(1))] = speed if speed else None
    return cards


def parse_matrix(text: str) -> dict[tuple[int, int], str]:
    """Read the matrix of ``nvidia-smi topo -m`` or ``topo -p2p r``.

    :returns: (row card, column card) to the cell (``NV2``, ``PHB``, ``OK``, ``CNS`` ...); a card's
        own cell is left out
    """
    cells: dict[tuple[int, int], str] = {}
    columns: list[int | None] = []
    for raw in text.splitlines():
        words = _ANSI.sub("", raw).split()
        if not words:
            continue
        names = [re.fullmatch(r"GPU(\d{1,4})", word, re.ASCII) for word in words]
        if len(words) > 1 and names[0] and names[1]:
            columns = [int(name.group(1)) if name else None for name in names]
        elif names[0] and columns:
            row = int(names[0].group(1))
            for column, cell in zip(columns, words[1:], strict=False):
                if column is not None and column != row and cell != "X":
                    cells[(row, column)] = cell
        elif len(words) == 1 and names[0]:
            columns = [int(names[0].group(1))]
    return cells


def silence_reason(rc: int | None, stdout: str, stderr: str, error: str | None) -> str:
    """Tell why nvidia-smi listed no card, from its words and not from its status.

    The status differs between driver versions (0, 6, 9 and 255 are known for the same words).

    :returns: one of ``timed out after N s``, ``not installed``, ``no device``,
        ``no supported device``, ``module not loaded``, ``mismatch``, ``unknown``
    """
    if error:
        return error if error.startswith("timed out") else (
            "not installed" if error == "not found" else "unknown"
        )  # fmt: skip
    words = f"{stdout}\n{stderr}".lower()
    for pattern, reason in (
        ("driver/library version mismatch", "mismatch"),
        ("no supported gpus were found", "no supported device"),
        ("no devices were found", "no device"),
        ("couldn't communicate with the nvidia driver", "module not loaded"),
        ("driver not loaded", "module not loaded"),
    ):
        if pattern in words:
            return reason
    return "unknown"
