"""Parsers of nvidia-smi's outputs: recordings, every odd cell, and arbitrary text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.preflight import fabricated as f
from vllm_turing import gpu_facts, nvidia_smi
from vllm_turing.preflight_host import Host
from vllm_turing.run import Result

H200 = f.SMI / "h200-x2-580.159.04"
ODD = [
    "[N/A]", "N/A", "[Not Supported]", "[Insufficient Permissions]", "[Unknown Error]", "ERR!",
    "", "Requested functionality has been deprecated", "None",
]  # fmt: skip


def test_made_recordings_are_in_step() -> None:
    spec = importlib.util.spec_from_file_location("make", f.SMI / "make.py")
    assert spec and spec.loader
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    for name, text in make.outputs().items():
        assert (f.TI / name).read_text() == text, name


def test_recording_of_two_h200() -> None:
    log = nvidia_smi.parse_xml((H200 / "q.xml").read_text())
    assert log.usable
    assert (log.driver_version, log.cuda_version) == ("580.159.04", "13.0")
    assert [gpu.bus_id for gpu in log.gpus] == ["0000:00:06.0", "0000:00:07.0"]
    card = log.gpus[0]
    assert (card.memory_total, card.memory_used) == (143771, 0)
    assert (card.power_limit, card.power_min, card.power_max) == (700.0, 200.0, 700.0)
    assert (card.clock_sm_max, card.clock_memory_max) == (1980, 3201)
    assert card.device_id == "10de:2335"
    assert (card.persistence, card.mig, card.display_active) == (True, False, False)
    assert (card.pcie_width, card.pcie_width_max) == (16, 16)
    assert gpu_facts.capability(card) == "9.0"
    links = nvidia_smi.parse_nvlink((H200 / "nvlink_s.txt").read_text())
    assert [len(cards) for cards in links.values()] == [18, 18]
    assert nvidia_smi.parse_matrix((H200 / "topo_m.txt").read_text()) == {
        (0, 1): "NV18",
        (1, 0): "NV18",
    }
    module = gpu_facts.parse_proc_version((H200 / "proc_version.txt").read_text())
    assert module == gpu_facts.Module("580.159.04", True)


def test_made_recording_of_two_2080_ti() -> None:
    log = nvidia_smi.parse_xml((f.TI / "q.xml").read_text())
    assert [gpu.memory_total for gpu in log.gpus] == [22528, 22528]
    assert [gpu.clock_sm_max for gpu in log.gpus] == [2160, 2175]
    assert {gpu.clock_memory_max for gpu in log.gpus} == {7000}
    assert {gpu_facts.capability(gpu) for gpu in log.gpus} == {"7.5"}
    assert [gpu.bus_id for gpu in log.gpus] == ["0000:0a:00.0", "0000:0b:00.0"]
    assert nvidia_smi.parse_nvlink((f.TI / "nvlink_s.txt").read_text())[1] == {
        0: 25.781,
        1: 25.781,
    }
    assert nvidia_smi.parse_matrix((f.TI / "topo_p2p.txt").read_text())[(0, 1)] == "OK"
    module = gpu_facts.parse_proc_version((f.TI / "proc_version.txt").read_text())
    assert module == gpu_facts.Module("580.159.03", False)


def test_query_of_two_2080_ti() -> None:
    text = (
        "0, GPU-1, NVIDIA GeForce RTX 2080 Ti, 00000000:0A:00.0, 580.159.03, 22528 MiB, 4 MiB, "
        "7.5, [N/A], 100.00 W, 280.00 W, 2160 MHz, 7000 MHz, Enabled, Disabled, [N/A], 8, 16\n"
        "1, GPU-2, NVIDIA GeForce RTX 2080 Ti, 00000000:0B:00.0, 580.159.03, [Unknown Error], "
        "[N/A], 7.5, [Not Supported], ERR!, ERR!, ERR!, ERR!, ERR!, ERR!, ERR!, ERR!, ERR!\n\n"
    )
    first, second = nvidia_smi.parse_query(text)
    assert (first.memory_total, first.power_limit, first.power_max) == (22528, None, 280.0)
    assert (second.memory_total, second.power_limit, second.persistence) == (None, None, None)
    assert second.compute_capability == "7.5"


@pytest.mark.parametrize("cell", ODD)
def test_odd_cells_have_no_number(cell: str) -> None:
    assert nvidia_smi.number(cell) is None
    assert nvidia_smi.whole(cell) is None
    assert nvidia_smi.bus_id(cell) == ""


@pytest.mark.parametrize("cell", [cell for cell in ODD if cell])
def test_odd_cells_anywhere_in_the_document(cell: str) -> None:
    xml = (f.TI / "q.xml").read_text()
    for old in ("22528 MiB", "200.00 W", "2160 MHz", "7000 MHz", "8x", "Disabled", "Turing"):
        log = nvidia_smi.parse_xml(xml.replace(old, cell))
        assert len(log.gpus) == 2
        if old == "22528 MiB":
            assert log.gpus[0].memory_total is None


def test_unknown_and_renamed_fields_do_no_harm() -> None:
    xml = (f.TI / "q.xml").read_text()
    newer = xml.replace("<product_name>", "<fresh><deep>1</deep></fresh><product_name>")
    older = xml.replace("gpu_power_readings", "power_readings").replace(
        "current_power_limit", "power_limit"
    )
    assert nvidia_smi.parse_xml(newer).gpus == nvidia_smi.parse_xml(xml).gpus
    assert nvidia_smi.parse_xml(older).gpus[0].power_limit == 200.0


def test_lines_around_the_document() -> None:
    xml = "WARNING: infoROM is corrupted\n" + (f.TI / "q.xml").read_text() + "\nWARNING: again\n"
    assert len(nvidia_smi.parse_xml(xml).gpus) == 2


def test_mig_children_are_no_cards() -> None:
    text = (
        "GPU 0: NVIDIA A100-PCIE-40GB (UUID: GPU-00000000-0000-0000-0000-000000000000)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-00000000-0000-0000-0000-000000000001)\n"
    )
    assert len(nvidia_smi.parse_list(text)) == 1
    assert nvidia_smi.has_mig_children(text)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((0, "No devices were found", "", None), "no device"),
        ((6, "No devices were found", "", None), "no device"),
        ((255, "Failed to initialize NVML: No supported GPUs were found", "", None),
         "no supported device"),
        ((9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "",
          None), "module not loaded"),
        ((None, "", "", "not found"), "not installed"),
        ((0, "", "", None), "unknown"),
        ((18, "", "Failed to initialize NVML: Driver/library version mismatch", None), "mismatch"),
        ((None, "", "", "timed out after 15 s"), "timed out after 15 s"),
        ((None, "", "", "Exec format error"), "unknown"),
    ],
)  # fmt: skip
def test_reasons_for_silence(answer: tuple[Any, str, str, Any], reason: str) -> None:
    assert nvidia_smi.silence_reason(*answer) == reason


def test_bus_ids_are_of_one_form() -> None:
    for text in ("00000000:0A:00.0", "0000:0a:00.0", "0a:00.0", " 0A:00.0 "):
        assert nvidia_smi.bus_id(text) == "0000:0a:00.0"


def test_lspci_takes_display_controllers_only() -> None:
    cards = gpu_facts.parse_lspci(f.PCI.format(driver="nouveau"))
    assert [(c.bus_id, c.device_id, c.driver) for c in cards] == [
        ("0000:0a:00.0", "10de:1e07", "nouveau"),
        ("0000:0b:00.0", "10de:1e07", "nouveau"),
    ]


def test_query_and_list_stand_in_for_an_unusable_document(tmp_path: Path) -> None:
    rows = {
        f.SMI_XML: Result((), 0, "<nvidia_smi_log><gpu"),
        f.SMI_QUERY: Result((), 0, ""),
        f.SMI_LIST: Result((), 0, (f.TI / "L.txt").read_text()),
    }
    info = tmp_path / "proc/driver/nvidia/gpus/0000:0a:00.0"
    info.mkdir(parents=True)
    (info / "information").write_text(
        "Model: \t\tNVIDIA\nGPU UUID: \t GPU-11111111-1111-1111-1111-111111111111\n"
    )

    def runner(argv: Any, **_: Any) -> Result:
        return rows.get(tuple(argv), Result(tuple(argv), None, error="not found"))

    facts = gpu_facts.gather(Host(tmp_path, runner))
    assert facts.source == "nvidia-smi -L"
    assert [gpu.bus_id for gpu in facts.gpus] == ["0000:0a:00.0", ""]
    assert facts.as_dict()["gpus"][0]["memory_total"] is None


# -- arbitrary text ----------------------------------------------------------------------------

TEXT = st.one_of(
    st.text(max_size=400),
    st.lists(
        st.sampled_from([
            "GPU 0: x (UUID: GPU-1)", "\t Link 0: 25.781 GB/s", "\t Link 1: <inactive>", "GPU0",
            "\tGPU0\tGPU1", "GPU0\t X \tNV2", "0, a, b", '"', "<nvidia_smi_log>", "<gpu>",
            "</gpu>", "</nvidia_smi_log>", "\x1b[4m", "nvidia/1, 2, x: installed", "0a:00.0 VGA",
            "0000:0a:00.0 VGA compatible controller [0300]: NVIDIA [10de:1e07]",
            "\tKernel driver in use: nvidia", "NVRM version: x Kernel Module 580.159.03",
        ]),
        max_size=12,
    ).map("\n".join),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_no_text_breaks_a_parser(text: str) -> None:
    log = nvidia_smi.parse_xml(text)
    for gpu in [*log.gpus, *nvidia_smi.parse_query(text), *nvidia_smi.parse_list(text)]:
        assert gpu.memory_total is None or gpu.memory_total >= 0 or "-" in text
        gpu_facts.capability(gpu)
    nvidia_smi.parse_nvlink(text)
    nvidia_smi.parse_matrix(text)
    nvidia_smi.lost_cards(text)
    nvidia_smi.has_mig_children(text)
    gpu_facts.parse_lspci(text)
    gpu_facts.parse_proc_version(text)
    assert nvidia_smi.silence_reason(0, text, text, None)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_no_cell_breaks_a_conversion(text: str) -> None:
    nvidia_smi.number(text)
    nvidia_smi.whole(text)
    nvidia_smi.switch(text)
    nvidia_smi.bus_id(text)


@settings(max_examples=150, deadline=None)
@given(TEXT)
def test_arbitrary_answers_never_make_two_good_cards(text: str) -> None:
    """Only a whole document with numbers may count as cards with memory."""

    def runner(argv: Any, **_: Any) -> Result:
        return Result(tuple(argv), 0, text)

    facts = gpu_facts.gather(Host("/nonexistent", runner))
    assert not [gpu for gpu in facts.gpus if gpu.memory_total]
