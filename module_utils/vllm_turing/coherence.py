"""Whether the parts of an installed stack belong together, and if not, which one moved.

Read from files alone: neither torch nor vLLM is imported, which would take seconds and needs a GPU
to be trusted.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from . import distributions
from .run import Runner, run

#: NVIDIA's wheels carry the CUDA major in the name up to 12 and only in the version from 13 on.
_RUNTIME = "nvidia-cuda-runtime"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit on the host.

    :ivar home: its folder
    :ivar release: what its nvcc says, ``12.9``; ``None`` when there is no nvcc that answers
    """

    home: str
    release: str | None


def toolkit(home: str, runner: Runner = run) -> Toolkit:
    """Ask the nvcc of a toolkit for its release."""
    answer = runner([f"{home}/bin/nvcc", "--version"], timeout=20)
    match = re.search(r"release (\d+\.\d+)", answer.stdout) if answer.ok else None
    return Toolkit(home, match.group(1) if match else None)


def problems(
    packages: Path, stack: Mapping[str, Any], found_toolkit: Toolkit | None = None
) -> list[str]:
    """Compare what is installed with what the stack says.

    :param packages: ``site-packages`` of the release
    :param stack: the stack's data (``stack.json``)
    :param found_toolkit: the toolkit that compiles at run time; ``None`` to leave that out
    :returns: one sentence for each part that does not fit
    """
    have = distributions.installed(packages)
    found = version_problems(have, stack)
    cuda = stack["cuda"]
    if cuda:
        found += cuda_problems(packages, have, str(cuda["toolkit"]))
        if found_toolkit:
            found += toolkit_problems(found_toolkit, str(cuda["toolkit"]))
    return found


def version_problems(have: Mapping[str, str], stack: Mapping[str, Any]) -> list[str]:
    """Compare distributions with ``versions`` and ``forbidden`` of a stack.

    :param have: installed distributions, normalised names
    """
    found = []
    for name, wanted in stack["versions"].items():
        installed = have.get(distributions.normalise(name))
        if installed is None:
            found.append(f"{name} {wanted} is not installed")
        elif installed != wanted:
            found.append(f"{name} is {installed} but the stack holds {wanted}")
    for name in stack["forbidden"]:
        installed = have.get(distributions.normalise(name))
        if installed is not None:
            found.append(f"{name} {installed} is installed but must not be")
    pair = have.get("flashinfer-python"), have.get("flashinfer-cubin")
    if None not in pair and pair[0] != pair[1]:
        found.append(f"flashinfer-python is {pair[0]} but flashinfer-cubin is {pair[1]}")
    return found


def cuda_problems(packages: Path, have: Mapping[str, str], release: str) -> list[str]:
    """Compare the CUDA release of torch, of its runtime wheel and of vLLM's extensions.

    :param release: the stack's CUDA release, ``12.9``
    """
    found = []
    torch = torch_cuda(packages)
    if torch is None:
        found.append(f"torch is not a CUDA build but the stack is for CUDA {release}")
    elif torch != release:
        found.append(f"torch {have.get('torch')} is built for CUDA {torch}, not {release}")
    major = release.split(".")[0]
    runtimes = {
        have[name].split(".")[0] for name in (_RUNTIME, f"{_RUNTIME}-cu{major}") if name in have
    }
    if runtimes and major not in runtimes:
        found.append(f"{_RUNTIME} is of CUDA {runtimes.pop()}, torch needs {major}")
    for extension in sorted((packages / "vllm").glob("*.so")):
        for library in needed_libraries(extension):
            match = re.fullmatch(r"libcudart\.so\.(\d+)", library)
            if match and match.group(1) != major:
                found.append(
                    f"vllm {have.get('vllm')} ({extension.name}) links {library}, a CUDA "
                    f"{match.group(1)} build, but the stack is for CUDA {release}"
                )
                return found  # the extensions of one wheel agree; one sentence is enough
    return found


def toolkit_problems(found: Toolkit, release: str) -> list[str]:
    """Compare the toolkit's nvcc with the stack's CUDA release."""
    if found.release is None:
        return [f"{found.home}/bin/nvcc does not answer; install CUDA {release} (cuda_toolkit)"]
    if found.release != release:
        return [f"{found.home}/bin/nvcc is CUDA {found.release} but the stack is for {release}"]
    return []


def torch_cuda(packages: Path) -> str | None:
    """Return the CUDA release that torch was built for, from its ``version.py``."""
    try:
        text = (packages / "torch/version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+\.\d+)", text, re.M)
    return match.group(1) if match else None


def needed_libraries(path: Path) -> list[str]:
    """Return the shared libraries that an ELF file asks for (DT_NEEDED), without loading it.

    Only 64-bit little-endian files are read, the only kind on this project's hosts; anything else
    gives an empty list. Layout: System V ABI, chapters 4 and 5.
    """
    try:
        with path.open("rb") as file:
            return _needed(file)
    except (OSError, struct.error, ValueError):
        return []


def _needed(file: BinaryIO) -> list[str]:
    header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":
        return []
    program_offset, entry_size, entries = (
        struct.unpack_from("<Q", header, 32)[0],
        *struct.unpack_from("<HH", header, 54),
    )
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for index in range(entries):
        file.seek(program_offset + index * entry_size)
        kind, _flags, offset, address, _physical, size = struct.unpack("<IIQQQQ", file.read(40))
        if kind == 1:  # PT_LOAD
            loads.append((address, offset, size))
        elif kind == 2:  # PT_DYNAMIC
            dynamic = (offset, size)
    if dynamic is None:
        return []
    file.seek(dynamic[0])
    tags = list(struct.iter_unpack("<qQ", file.read(dynamic[1] // 16 * 16)))
    table = next((value for tag, value in tags if tag == 5), None)  # DT_STRTAB
    if table is None:
        return []
    strings = next((o + table - a for a, o, size in loads if a <= table < a + size), None)
    if strings is None:
        return []
    names = []
    for tag, value in tags:
        if tag == 1:  # DT_NEEDED
            file.seek(strings + value)
            names.append(file.read(256).split(b"\0", 1)[0].decode(errors="replace"))
    return names
