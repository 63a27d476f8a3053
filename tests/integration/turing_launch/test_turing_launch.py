"""FlashInfer's prefill launchers, compiled for SM75 and run against a device with Turing's limits.

Needs nvcc 12 or 13 and a C compiler, and no GPU. 10 to 60 seconds a case:

    pytest tests/integration/turing_launch
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT = 65_536  # bytes of shared memory that a block can have on SM75
FLOAT16, FLOAT8 = "half", "__nv_fp8_e4m3"
PAGED, RAGGED, SINGLE = 0, 1, 2
BUDGET, PLACEHOLDERS = "flashinfer-smem-budget", "flashinfer-zero-size-placeholders"


@dataclass(frozen=True)
class Launch:
    """What became of a launch: bytes asked for, bytes launched with, the last line."""

    asked: int
    launched: int | None
    end: str


def nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    found = str(Path(home) / "bin/nvcc") if home else shutil.which("nvcc")
    if not found or not Path(found).exists():
        pytest.skip("nvcc is not installed (CUDA_HOME, PATH), and the launcher is compiled with it")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.stderr[-3000:]}"
    return done.stdout


def launch(
    data: Path, folder: Path, head_dim: int, tile_q: int, kv: str, launcher: int = PAGED
) -> Launch:
    """Compile one configuration from FlashInfer's folder ``data`` and run it."""
    runtime, program = folder / "turing_runtime.o", folder / "launch"
    run("cc", "-std=c11", "-O1", "-c", str(HERE / "turing_runtime.c"), "-o", str(runtime))
    include = [
        f"-I{data / 'include'}",
        f"-I{data / 'cccl/cub'}",
        f"-I{data / 'cccl/libcudacxx/include'}",
        f"-I{data / 'cccl/thrust'}",
        *("-isystem", str(data / "cutlass/include")),
        *("-isystem", str(data / "spdlog/include")),
    ]
    # as FlashInfer's own JIT builds it, for SM75 alone
    formats = ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")
    run(
        nvcc(),
        *("-std=c++17", "-O1", "-gencode=arch=compute_75,code=sm_75"),
        *("--expt-relaxed-constexpr", "-static-global-template-stub=false"),
        *(f"-DFLASHINFER_ENABLE_{name}" for name in formats),
        *(f"-DDIM={head_dim}", f"-DTILE_Q={tile_q}", f"-DKV_TYPE={kv}", f"-DLAUNCHER={launcher}"),
        *include,
        *("-cudart", "none", str(HERE / "launch.cu"), str(runtime), "-o", str(program)),
    )
    lines = [line.split() for line in run(str(program)).splitlines()]
    asked = [int(line[1]) for line in lines if line[0] == "asked"]
    launched = [int(line[1]) for line in lines if line[0] == "launched"]
    assert len(asked) == 1 and len(launched) <= 1
    return Launch(asked[0], launched[0] if launched else None, " ".join(lines[-1]))


def refused(asked: int) -> Launch:
    return Launch(asked, None, "returned 1 invalid argument")


def fine(asked: int) -> Launch:
    assert asked <= LIMIT
    return Launch(asked, asked, "returned 0 no error")


# head_dim, rows of a query tile, type of the cache, launcher
SERVED_FP16 = (256, 64, FLOAT16, PAGED)
SERVED_FP8 = (256, 64, FLOAT8, PAGED)
CASES = [
    # the reference model has heads of 256; 64 rows are what FlashInfer takes for them on SM75
    ("pristine", SERVED_FP16, refused(65_568)),
    ("pristine", SERVED_FP8, refused(65_568)),
    (BUDGET, SERVED_FP16, fine(49_184)),
    (BUDGET, SERVED_FP8, fine(49_184)),
    (PLACEHOLDERS, SERVED_FP16, fine(65_536)),
    (PLACEHOLDERS, SERVED_FP8, fine(65_536)),
    # the two other launchers have the same correction
    ("pristine", (256, 64, FLOAT16, RAGGED), refused(65_568)),
    (BUDGET, (256, 64, FLOAT16, RAGGED), fine(49_184)),
    (PLACEHOLDERS, (256, 64, FLOAT16, RAGGED), fine(65_536)),
    ("pristine", (256, 64, FLOAT16, SINGLE), refused(65_568)),
    (BUDGET, (256, 64, FLOAT16, SINGLE), fine(49_184)),
    (PLACEHOLDERS, (256, 64, FLOAT16, SINGLE), fine(65_536)),
    # heads of 128: what was refused launches, what launched still does
    ("pristine", (128, 128, FLOAT16, PAGED), refused(65_568)),
    (BUDGET, (128, 128, FLOAT16, PAGED), fine(49_184)),
    (PLACEHOLDERS, (128, 128, FLOAT16, PAGED), fine(65_536)),
    ("pristine", (128, 128, FLOAT8, PAGED), fine(49_184)),
    (BUDGET, (128, 128, FLOAT8, PAGED), fine(49_184)),
    (PLACEHOLDERS, (128, 128, FLOAT8, PAGED), fine(49_152)),
    ("pristine", (128, 64, FLOAT16, PAGED), fine(32_800)),
    # two blocks per SM, 32,768 bytes each: with 32,800 only one would have fitted
    (BUDGET, (128, 64, FLOAT16, PAGED), fine(24_608)),
    (PLACEHOLDERS, (128, 64, FLOAT16, PAGED), fine(32_768)),
]


def name(case: tuple[str, tuple[int, int, str, int], Launch]) -> str:
    tree, (head_dim, tile_q, kv, launcher), _expected = case
    kind = ("paged", "ragged", "single")[launcher]
    return f"{tree} {kind} {head_dim}x{tile_q} {'fp16' if kv == FLOAT16 else 'fp8'}"


@pytest.mark.parametrize(("tree", "configuration", "expected"), CASES, ids=map(name, CASES))
def test_launch(
    trees: dict[str, Path],
    tmp_path: Path,
    tree: str,
    configuration: tuple[int, int, str, int],
    expected: Launch,
) -> None:
    assert launch(trees[tree], tmp_path, *configuration) == expected
