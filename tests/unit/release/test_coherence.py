"""Whether installed parts belong together: the cases of public reports, and ELF files read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import release_kit as kit

from vllm_turing import coherence
from vllm_turing.run import Result

CU129 = kit.stack(
    cuda={"toolkit": "12.9", "torch_tag": "cu129"},
    versions={"torch": "2.11.0+cu129", "vllm": "0.24.0+cu129", "flashinfer-python": "0.6.12"},
)


def elf(*libraries: str) -> bytes:
    """The smallest shared object whose dynamic section names some libraries."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in libraries)
    offsets, position = [], 1
    for name in libraries:
        offsets.append(position)
        position += len(name) + 1
    table = 64 + 2 * 56  # strings follow the two program headers
    tags = [(1, offset) for offset in offsets] + [(5, 0x1000 + table), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    start = table + len(strings)
    total = start + len(dynamic)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x1000, 0x1000, total, total, 4096)
    dyn = struct.pack("<IIQQQQQQ", 2, 6, start, 0x1000 + start, 0, len(dynamic), len(dynamic), 8)
    return header + load + dyn + strings + dynamic


def site(tmp_path: Path, cuda: str | None, cudart: str, **versions: str) -> Path:
    """A site-packages folder with these distributions."""
    for name, version in versions.items():
        (tmp_path / f"{name}-{version}.dist-info").mkdir(parents=True)
    for name in ("torch", "vllm"):
        (tmp_path / name).mkdir()
    said = f"cuda: Optional[str] = {cuda!r}\n"
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.11.0'\n{said}hip = None\n")
    (tmp_path / "vllm/_C.abi3.so").write_bytes(elf("libc10.so", cudart))
    return tmp_path


GOOD: dict[str, str] = {
    "torch": "2.11.0+cu129",
    "vllm": "0.24.0+cu129",
    "flashinfer_python": "0.6.12",
    "flashinfer_cubin": "0.6.12",
    "nvidia_cuda_runtime_cu12": "12.9.79",
}


def test_parts_that_belong_together_are_no_problem(tmp_path: Path) -> None:
    assert coherence.problems(site(tmp_path, "12.9", "libcudart.so.12", **GOOD), CU129) == []


@pytest.mark.parametrize(
    ("cuda", "cudart", "changes", "words"),
    [
        # The public index's vLLM beside the CUDA 12.9 torch.
        ("12.9", "libcudart.so.13", {"vllm": "0.24.0"}, ["vllm is 0.24.0", "libcudart.so.13"]),
        # A later installation swapped torch.
        (
            "13.0",
            "libcudart.so.12",
            {"torch": "2.12.0"},
            ["torch is 2.12.0", "CUDA 13.0, not 12.9"],
        ),
        (None, "libcudart.so.12", {"torch": "2.11.0+cpu"}, ["2.11.0+cpu", "not a CUDA build"]),
        ("12.9", "libcudart.so.12", {"flashinfer_cubin": "0.6.14"}, ["flashinfer-cubin is 0.6.14"]),
        ("12.9", "libcudart.so.12", {"flashinfer_jit_cache": "0.6.12"}, ["must not be"]),
        (
            "12.9",
            "libcudart.so.12",
            {"nvidia_cuda_runtime": "13.0.96", "nvidia_cuda_runtime_cu12": ""},
            ["nvidia-cuda-runtime is of CUDA 13"],
        ),
    ],
)
def test_the_part_that_moved_is_named(
    tmp_path: Path, cuda: str | None, cudart: str, changes: dict[str, str], words: list[str]
) -> None:
    versions = {name: version for name, version in (GOOD | changes).items() if version}
    found = "; ".join(coherence.problems(site(tmp_path, cuda, cudart, **versions), CU129))
    assert all(word in found for word in words), found


def test_flashinfer_without_its_cubins_is_fine(tmp_path: Path) -> None:
    versions = {name: version for name, version in GOOD.items() if name != "flashinfer_cubin"}
    assert coherence.problems(site(tmp_path, "12.9", "libcudart.so.12", **versions), CU129) == []


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Cuda compilation tools, release 12.9, V12.9.86", []),
        ("Cuda compilation tools, release 13.0, V13.0.88", ["is CUDA 13.0 but the stack is for"]),
        ("", ["does not answer; install CUDA 12.9"]),
    ],
)
def test_the_toolkits_nvcc_is_compared(said: str, expected: list[str]) -> None:
    def nvcc(argv: Any, **_: Any) -> Result:
        return Result(tuple(argv), 0 if said else None, said, "", None if said else "not found")

    found = coherence.toolkit_problems(coherence.toolkit("/usr/local/cuda-12.9", nvcc), "12.9")
    assert len(found) == len(expected)
    assert all(words in text for words, text in zip(expected, found, strict=True))


def test_the_libraries_of_a_real_program_are_read() -> None:
    import _ctypes  # an extension of the running interpreter, where it is one

    path = Path(getattr(_ctypes, "__file__", "") or "/bin/sh")
    assert any(name.startswith("libc.") for name in coherence.needed_libraries(path))


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + bytes(20)])
def test_a_file_that_is_no_library_needs_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.so").write_bytes(content)
    assert coherence.needed_libraries(tmp_path / "x.so") == []
