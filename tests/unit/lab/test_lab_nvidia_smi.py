"""nvidia-smi of the lab: the shapes that a real driver 580.159.04 printed, our cards' values."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from lab.userland import hardware, nvidia_smi
from lab.userland.hardware import CARDS, apply_fault
from lab.userland.nvidia_smi import Machine, Process, answer

HERE = Path(__file__).parent
TEMPLATE = (Path(nvidia_smi.__file__).parent / "gpu.xml").read_text(encoding="utf-8")
VERSION = "580.159.03"

# The recorded table, without its values: two cards, no process.
RECORDED_TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.159.04             Driver Version: 580.159.04     CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H200                    On  |   00000000:00:06.0 Off |                    0 |
| N/A   42C    P0            128W /  700W |       0MiB / 143771MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA H200                    On  |   00000000:00:07.0 Off |                    0 |
| N/A   37C    P0            108W /  700W |       0MiB / 143771MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|  No running processes found                                                             |
+-----------------------------------------------------------------------------------------+
"""
RECORDED_QUERY = (
    "index, uuid, name, pci.bus_id, driver_version, memory.total [MiB], memory.used [MiB], "
    "memory.free [MiB], memory.reserved [MiB], compute_cap, power.limit [W], "
    "power.min_limit [W], power.max_limit [W], clocks.max.sm [MHz], clocks.max.memory [MHz], "
    "persistence_mode, compute_mode, mig.mode.current, ecc.mode.current, display_active, "
    "pcie.link.gen.current, pcie.link.gen.max, pcie.link.width.current, pcie.link.width.max, "
    "temperature.gpu, clocks_event_reasons.active"
)
# Elements that a GeForce card has nothing to say about: one 'N/A' in place of the group, or the
# plain thresholds in place of a data-centre card's T.Limit ones.
ONLY_THERE = ("gpu/remapped_rows/", "gpu/supported_clocks/")
TLIMIT = {
    "gpu/temperature/gpu_temp_max_tlimit_threshold",
    "gpu/temperature/gpu_temp_slow_tlimit_threshold",
    "gpu/temperature/gpu_temp_max_gpu_tlimit_threshold",
    "gpu/temperature/gpu_temp_max_mem_tlimit_threshold",
}


def healthy(fault: str = "none", **changes: object) -> Machine:
    state = Machine(apply_fault(fault), VERSION, fault, version=VERSION)
    return replace(state, **changes)  # type: ignore[arg-type]  # the test names real fields


def tags(element: ElementTree.Element, path: str = "") -> list[str]:
    found = []
    for child in element:
        name = f"{path}/{child.tag}" if path else child.tag
        found += [name, *tags(child, name)]
    return found


def test_the_table_has_the_recorded_widths_and_frames() -> None:
    text, status = answer(healthy(), [])
    lines = text.splitlines()[1:]
    recorded = RECORDED_TABLE.splitlines()
    assert status == 0
    assert [len(line) for line in lines] == [len(line) for line in recorded]
    for ours, theirs in zip(lines, recorded, strict=True):
        frame = [i for i, c in enumerate(theirs) if c in "+|"]
        assert [i for i, c in enumerate(ours) if c in "+|"] == frame
    assert lines[2:7] == recorded[2:7]
    assert lines[-6:] == recorded[-6:]


def test_the_query_has_the_recorded_header_and_our_values() -> None:
    names = [n.split(" [")[0] for n in RECORDED_QUERY.split(", ")]
    text, status = answer(healthy(), [f"--query-gpu={','.join(names)}", "--format=csv"])
    header, first, second = text.splitlines()
    assert status == 0
    assert header == RECORDED_QUERY
    assert first.startswith(
        "0, GPU-2080a000-7500-4000-8000-000000000001, NVIDIA GeForce RTX 2080 Ti, "
        "00000000:0A:00.0, 580.159.03, 22528 MiB, 1 MiB, "
    )
    assert "2175 MHz, 7000 MHz" in second


def test_nounits_and_noheader_leave_numbers_alone() -> None:
    text, _ = answer(
        healthy(),
        ["--query-gpu", "index,memory.total,power.max_limit", "--format=csv,noheader,nounits"],
    )
    assert text == "0, 22528, 280.00\n1, 22528, 280.00\n"


def test_an_unknown_field_is_refused_in_the_real_words() -> None:
    text, status = answer(healthy(), ["--query-gpu=nothing", "--format=csv"])
    assert (text, status) == ('Field "nothing" is not a valid field to query.\n\n', 2)


def test_the_xml_log_has_the_recorded_elements() -> None:
    text, status = answer(healthy(), ["-q", "-x"], TEMPLATE)
    ours = set(tags(ElementTree.fromstring(text)))
    recorded = {
        line
        for line in (HERE / "recorded_tags.txt").read_text(encoding="ascii").splitlines()
        if line and not line.startswith("#")
    }
    expected = {t for t in recorded if not t.startswith(ONLY_THERE)} - TLIMIT
    assert status == 0
    assert expected - ours == set()
    assert {t for t in ours - recorded if "gpu/temperature/" not in t} == set()
    assert "@" not in text


def test_the_xml_log_names_both_cards_and_their_processes() -> None:
    state = healthy(processes=(Process(4711, "VLLM::Worker_TP", 1, 20280),))
    root = ElementTree.fromstring(answer(state, ["-q", "-x"], TEMPLATE)[0])
    cards = root.findall("gpu")
    assert [c.get("id") for c in cards] == [c.bus_id for c in CARDS]
    assert [c.findtext("fb_memory_usage/used") for c in cards] == ["1 MiB", "20281 MiB"]
    assert [c.findtext("processes/process_info/pid") for c in cards] == [None, "4711"]
    assert root.findtext("driver_version") == VERSION


def test_topology_and_links_of_healthy_cards() -> None:
    topology, _ = answer(healthy(), ["topo", "-m"])
    head, first, second = topology.splitlines()[:3]
    assert head == "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    assert first == "GPU0\t X \tNV2\t0-15\t0\t\tN/A"
    assert second == "GPU1\tNV2\t X \t0-15\t0\t\tN/A"
    assert "  NODE = Connection traversing PCIe as well as the interconnect" in topology
    links, _ = answer(healthy(), ["nvlink", "-s"])
    assert links.splitlines()[:3] == [
        "GPU 0: NVIDIA GeForce RTX 2080 Ti (UUID: GPU-2080a000-7500-4000-8000-000000000001)",
        "\t Link 0: 25.781 GB/s",
        "\t Link 1: 25.781 GB/s",
    ]


@pytest.mark.parametrize(
    ("fault", "arguments", "expected"),
    [
        ("one-link", ["topo", "-m"], "GPU0\t X \tNV1"),
        ("one-link", ["nvlink", "-s"], "\t Link 1: <inactive>"),
        ("no-link", ["topo", "-m"], "GPU0\t X \tPHB"),
        ("no-link", ["topo", "-p2p", "r"], " GPU0\tX\tNS"),
        ("p2p-off", ["topo", "-p2p", "r"], " GPU0\tX\tCNS"),
        ("small-card", ["--query-gpu=memory.total", "--format=csv,noheader"], "11264 MiB"),
        ("foreign-card", ["-L"], "GPU 0: NVIDIA GeForce GT 1030"),
        ("display", ["--query-gpu=display_active", "--format=csv,noheader"], "Enabled"),
        ("odd-cells", ["--query-gpu=memory.total", "--format=csv,noheader"], "[Unknown Error]"),
    ],
)
def test_faults_show(fault: str, arguments: list[str], expected: str) -> None:
    broken, status = answer(healthy(fault), arguments)
    assert status == 0
    assert expected in broken
    assert expected not in answer(healthy(), arguments)[0]


def test_a_card_off_the_bus_is_named_and_changes_the_status() -> None:
    text, status = answer(healthy("gpu-off-bus"), ["-L"])
    assert text.splitlines()[0].startswith("GPU 0: ")
    assert text.splitlines()[1] == (
        "Unable to determine the device handle for GPU1: 0000:0B:00.0: Unknown Error"
    )
    assert status == 255
    for arguments in ([], ["-q", "-x"], ["--query-gpu=index", "--format=csv"]):
        assert answer(healthy("gpu-off-bus"), arguments, TEMPLATE)[1] == 255


@pytest.mark.parametrize("arguments", [[], ["-L"], ["-q", "-x"], ["topo", "-m"], ["-pl", "200"]])
def test_without_a_usable_driver_nothing_is_answered(arguments: list[str]) -> None:
    text, status = answer(healthy(module=""), arguments)
    assert status == 9
    assert text.startswith("NVIDIA-SMI has failed because it couldn't communicate")
    text, status = answer(healthy(module="580.95.05"), arguments)
    assert status == 18
    assert text == (
        "Failed to initialize NVML: Driver/library version mismatch\n"
        "NVML library version: 580.159\n"
    )
    text, status = answer(healthy("no-devices"), arguments)
    assert (text, status) == ("No devices were found\n", 6)


def test_the_power_limit_is_bounded_stored_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hardware, "SETTINGS_FILE", tmp_path / "settings.json")
    uuid = CARDS[1].uuid
    text, status = answer(healthy(), ["-i", uuid, "-pl", "200"])
    assert status == 0
    assert "0B:00.0 was set to 200.00 W from 250.00 W" in text
    assert "0A:00.0" not in text
    after = healthy(settings=hardware.read_object(tmp_path / "settings.json"))
    query = ["--query-gpu=power.limit", "--format=csv,noheader"]
    assert answer(after, query)[0] == "250.00 W\n200.00 W\n"
    before = (tmp_path / "settings.json").read_text(encoding="utf-8")
    text, status = answer(after, ["-pl", "281"])
    assert status == 2
    assert "between 100.00 W and 280.00 W" in text
    assert (tmp_path / "settings.json").read_text(encoding="utf-8") == before


def test_changing_a_card_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert answer(healthy(), ["-pl", "200"])[1] == 4


def test_arguments_that_mean_nothing_are_refused() -> None:
    assert answer(healthy(), ["--nonsense"])[1] == 1
    assert answer(healthy(), ["topo"])[1] == 1


def test_the_loaded_version_is_read_from_both_kinds_of_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "version"
    monkeypatch.setattr(nvidia_smi, "MODULE_FILE", path)
    assert nvidia_smi.loaded_version() == ""
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Mar  3\n")
    assert nvidia_smi.loaded_version() == "580.159.03"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  Release Build\n"
    )
    assert nvidia_smi.loaded_version() == "595.58.03"
