"""The patched prefill kernels on a newer GPU: Turing's code path under Turing's limits.

FlashInfer is built by its own JIT as compute_75 code (`__CUDA_ARCH__` 750) and assembled for the
GPU that is there, so its result is that of the code path which a Turing card takes; ptxas's SM75
code and the speed of the card are outside this method.

Needs a GPU, nvcc, torch, ninja, and what flashinfer-python imports. Minutes of compiling:

    pytest -s tests/gpu/test_flashinfer_prefill.py
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.patches import packages
from vllm_turing import wheel_patch

torch = pytest.importorskip("torch", reason="torch is not installed here")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)
pytest.importorskip("tvm_ffi", reason="FlashInfer's binding to its kernels is not installed here")

HERE = Path(__file__).parent
BUDGET, PLACEHOLDERS = "flashinfer-smem-budget", "flashinfer-zero-size-placeholders"
TREES = ("pristine", BUDGET, PLACEHOLDERS)
CACHES = ("fp16", "fp8")
ASKED = {"pristine": 65_568, BUDGET: 49_184, PLACEHOLDERS: 65_536}


def run(*command: str, env: dict[str, str]) -> Any:
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[str]]:
    """Build every tree for both caches; give the command line that runs each."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH")
    folder = tmp_path_factory.mktemp("turing")
    limits = folder / "libturing_limits.so"
    compile_limits = ["cc", "-std=c11", "-O1", "-shared", "-fPIC", "-o", str(limits)]
    subprocess.run([*compile_limits, str(HERE / "turing_limits.c"), "-ldl"], check=True)
    major, minor = torch.cuda.get_device_capability()
    wrapper = folder / "nvcc"
    wrapper.write_text(f'#!/bin/bash\nexec {nvcc} "${{@//code=sm_75/code=sm_{major}{minor}}}"\n')
    wrapper.chmod(0o755)

    def build(tree: str, cache: str) -> list[str]:
        site = folder / tree
        result = folder / "built" / tree / cache
        run(
            *(sys.executable, str(HERE / "build_prefill.py"), cache, str(result)),
            env={
                "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
                "FLASHINFER_WORKSPACE_BASE": str(folder / "jit" / tree / cache),
                "FLASHINFER_CUDA_ARCH_LIST": "7.5",
                "FLASHINFER_NVCC": str(wrapper),
                "FLASHINFER_EXTRA_CUDAFLAGS": "-gencode=arch=compute_75,code=compute_75",
                "CUDA_HOME": str(Path(nvcc).resolve().parents[1]),
            },
        )
        return [sys.executable, str(HERE / "run_prefill.py"), str(limits), str(result), cache]

    for tree in TREES:
        (folder / tree).mkdir()
        for path in packages.wheels().glob("flashinfer*"):
            packages.copy(path, folder / tree / path.name)
        if tree != "pristine":
            wheel_patch.apply_all(packages.load(tree), {"site-packages": folder / tree})
    jobs = [(tree, cache) for tree in TREES for cache in CACHES]
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 3)) as pool:
        return dict(zip(jobs, pool.map(lambda job: build(*job), jobs), strict=True))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("tree", TREES)
def test_numbers(built: dict[tuple[str, str], list[str]], tree: str, cache: str) -> None:
    command = built[tree, cache]
    site = str(Path(command[3]).parents[2] / tree)
    answer = run(
        *command, "check", env={"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}
    )
    for result in answer["results"]:
        assert result["asked"] == ASKED[tree], result
        if tree == "pristine":
            assert "invalid argument" in result["refused"]
            continue
        assert result["error"] < 1e-3, result
        # exchanging two of many rows hardly shows in a long mean: only where keys are few
        if result["shape"][1] <= 300:
            assert result["wrong_row"] > 1e-2, result
    errors = [result.get("error", float("nan")) for result in answer["results"]]
    print(f"\n{answer['gpu']}, {tree}, {cache}: worst relative error {max(errors):.1e}")


def test_time_of_both(built: dict[tuple[str, str], list[str]]) -> None:
    """Both patches side by side at one block per SM, twice; only printed, speed is the card's."""
    for cache in CACHES:
        for _ in range(2):
            answers = {}
            for tree in (BUDGET, PLACEHOLDERS):
                command = built[tree, cache]
                site = str(Path(command[3]).parents[2] / tree)
                answers[tree] = run(
                    *command,
                    "time",
                    env={"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"},
                )["results"]
            for one, other in zip(answers[BUDGET], answers[PLACEHOLDERS], strict=True):
                assert one["ms"] > 0 and other["ms"] > 0
                print(
                    f"\n{cache} {one['queries']} queries, {one['keys']} keys:"
                    f" budget {one['ms']:.3f} ms ({one['least']:.3f} to {one['most']:.3f}),"
                    f" placeholders {other['ms']:.3f} ms ({other['least']:.3f} to"
                    f" {other['most']:.3f}), ratio {one['ms'] / other['ms']:.2f}"
                )
