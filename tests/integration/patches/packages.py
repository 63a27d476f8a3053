"""The real packages that the patches are for, in a folder of this checkout's cache.

They come from the Python index that uv is configured with. Nothing is patched in these folders: a
test takes a copy (hard links, so it costs no space; patches never write through a link).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_turing import wheel_patch

ROOT = Path(__file__).parents[3]
PATCHES = ROOT / "stacks/patches"
CACHE = Path(os.environ.get("VLLM_TURING_TEST_CACHE", ROOT / ".cache")) / "patches"
CPU_LOCK = ROOT / "stacks/vllm-0.24.0-cpu/lock.txt"
WHEELS = ("vllm==0.24.0", "flashinfer-python==0.6.12")


def load(*names: str) -> list[wheel_patch.Patch]:
    """Read patches by name."""
    patches = []
    for name in names:
        data = yaml.safe_load((PATCHES / name / "patch.yml").read_text())
        diff = (PATCHES / name / f"{name}.diff").read_text()
        patches.append(wheel_patch.from_mapping({**data, "diff": diff}))
    return patches


def names(stack: str) -> list[str]:
    """Names of the patches that a stack applies."""
    return list(yaml.safe_load((ROOT / "stacks" / stack / "stack.yml").read_text())["patches"])


def uv(*arguments: str, timeout: float = 1800) -> None:
    """Run uv, or skip the test where there is none."""
    program = shutil.which("uv") or str(ROOT / ".venv/bin/uv")
    if not Path(program).exists():
        pytest.skip("uv is not installed, and the real packages are fetched with it")
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never", "LC_ALL": "C"}
    done = subprocess.run(
        [program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"uv {arguments[0]} failed: {done.stderr.strip()[-2000:]}")


@functools.cache
def wheels() -> Path:
    """Unpack the CUDA build of vLLM and FlashInfer, without what they need, into one folder."""
    folder = CACHE / "wheels"
    mark = folder / "complete.json"
    if not mark.exists() or json.loads(mark.read_text()) != list(WHEELS):
        shutil.rmtree(folder, ignore_errors=True)
        uv("pip", "install", "--no-deps", "--target", str(folder / "site"), *WHEELS)
        mark.write_text(json.dumps(list(WHEELS)))
    return folder / "site"


@functools.cache
def cpu_environment() -> Path:
    """Build the environment of the CPU stack from its lock, or take it as it is."""
    folder = CACHE / "cpu"
    mark = folder / "complete"
    lock = CPU_LOCK.read_text()
    if not mark.exists() or mark.read_text() != lock:
        shutil.rmtree(folder, ignore_errors=True)
        uv("venv", "--python", "python3.11", str(folder))
        uv(
            *("pip", "install", "--python", str(folder / "bin/python"), "--no-deps"),
            *("--require-hashes", "-r", str(CPU_LOCK)),
        )
        mark.write_text(lock)
    return folder


def site_packages(environment: Path) -> Path:
    """Return an environment's site-packages."""
    (folder,) = environment.glob("lib/python3*/site-packages")
    return folder


def copy(source: Path, target: Path) -> Path:
    """Copy a tree by hard links."""
    shutil.copytree(source, target, symlinks=True, copy_function=_link)
    return target


def overlay(site: Path, target: Path) -> Path:
    """Copy only vLLM out of an environment, to be put before it on PYTHONPATH."""
    target.mkdir()
    for source in [site / "vllm", *site.glob("vllm*.dist-info")]:
        copy(source, target / source.name)
    return target


def _link(source: str, target: str) -> None:
    if Path(source).is_symlink():
        shutil.copy2(source, target, follow_symlinks=False)
    else:
        os.link(source, target)


def run_json(
    python: Path, script: Path, *arguments: str, first: list[Path], timeout: float = 1200
) -> Any:
    """Run a script in an environment and read the JSON of its last output line.

    :param first: folders that go before the environment's site-packages
    """
    environment = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "HOME": str(CACHE),
        "PYTHONPATH": ":".join(map(str, first)),
        "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "-1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [str(python), str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{script.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
