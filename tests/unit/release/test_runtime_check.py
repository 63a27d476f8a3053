"""The check before every start, on a real small release: every way to get a wrong engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import release_kit as kit

from vllm_turing import release, runtime_check

Build = Callable[..., release.Release]
FINGERPRINT = "a" * 16


@pytest.fixture
def selected(build: Build) -> release.Release:
    one = build(FINGERPRINT, build_tools=["c++", "Python.h"])
    release.select(one)
    return one


@pytest.fixture
def check(
    selected: release.Release,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Run the command with an environment; gives its exit status and what it said."""
    home = tmp_path / "home"
    home.mkdir()
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("c++", "ninja", "nvcc"):
        (tools / name).touch(0o755)
    monkeypatch.chdir(home)

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        for name in ("PYTHONPATH", "CUDA_HOME", "CXX"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"PATH": str(tools), **environment}.items():
            monkeypatch.setenv(name, value)
        options = ["--prefix", str(selected.prefix), "--cache-dir", str(tmp_path / "cache")]
        rc = runtime_check.main([*options, *arguments])
        said = capsys.readouterr()
        return rc, said.out + said.err

    return run


Check = Callable[..., tuple[int, str]]


def test_the_release_as_built_passes_and_quickly(check: Check) -> None:
    began = time.monotonic()
    rc, said = check()
    assert rc == 0, said
    assert f"release {FINGERPRINT} is as it was built" in said
    assert time.monotonic() - began < 3  # far above the usual 0.1 s: the machine may be busy


def test_a_pristine_reinstall_is_caught(check: Check, selected: release.Release) -> None:
    kernel = selected.packages / "demo/kernel.cuh"
    kernel.unlink()
    kernel.write_text(kit.PRISTINE)
    rc, said = check()
    assert rc == 1
    assert "demo/kernel.cuh' is not as patched (patch demo-tile)" in said
    assert "ansible-playbook site.yml" in said


def test_a_patched_file_that_is_gone_is_caught(check: Check, selected: release.Release) -> None:
    (selected.packages / "demo/kernel.cuh").unlink()
    assert "demo/kernel.cuh' is missing" in check()[1]


def test_a_second_site_packages_is_caught(check: Check, tmp_path: Path) -> None:
    other = tmp_path / "local/site-packages"
    (other / "flashinfer").mkdir(parents=True)
    (other / "flashinfer/__init__.py").touch()
    rc, said = check(PYTHONPATH=str(other))
    assert rc == 1
    assert f"'flashinfer' would be imported from {str(other)!r}" in said


def test_a_package_in_the_working_folder_is_caught(check: Check) -> None:
    Path("vllm").mkdir()
    Path("vllm/__init__.py").touch()
    assert "'vllm' would be imported from" in check()[1]


def test_a_package_of_another_version_is_caught(check: Check, selected: release.Release) -> None:
    packages = selected.packages
    (packages / "demo-1.0.dist-info").rename(packages / "demo-1.1.dist-info")
    assert "demo is 1.1 but the stack holds 1.0" in check()[1]


def test_the_precompiled_kernels_are_caught(check: Check, selected: release.Release) -> None:
    (selected.packages / "flashinfer_jit_cache-0.6.12.dist-info").mkdir()
    assert "flashinfer-jit-cache 0.6.12 is installed but must not be" in check()[1]


def test_a_missing_compiler_is_named_with_its_cure(check: Check, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    rc, said = check(PATH=str(empty))
    assert rc == 1
    assert "c++ is not found by the unit; run: apt-get install build-essential" in said


def test_no_selected_release_is_one_line(check: Check, selected: release.Release) -> None:
    (selected.prefix / "current").unlink()
    rc, said = check()
    assert rc == 1
    assert said.count("\n") == 1
    assert "selects no release" in said


def test_an_interpreter_that_is_gone_is_one_line(check: Check, selected: release.Release) -> None:
    selected.python.unlink()
    rc, said = check()
    assert rc == 1
    assert "does not run" in said


def test_stale_kernels_are_moved_aside_and_told(check: Check, tmp_path: Path) -> None:
    check()
    kernel = tmp_path / "cache" / FINGERPRINT / "flashinfer/kernel.so"
    kernel.parent.mkdir()
    kernel.touch()
    assert check()[0] == 0 and kernel.is_file()
    rc, said = check("--read-only", CUDA_HOME=str(tmp_path / "cuda-13"))
    assert rc == 1 and kernel.is_file()
    assert "may not be used" in said
    rc, said = check(CUDA_HOME=str(tmp_path / "cuda-13"))
    assert rc == 0 and not kernel.exists()
    assert "moved compiled kernels aside (CUDA was in" in said


def test_a_bypass_of_flashinfers_own_check_is_remarked(check: Check) -> None:
    rc, said = check(FLASHINFER_DISABLE_VERSION_CHECK="1")
    assert rc == 0
    assert "hides a real mismatch" in said


# --- pieces without a release ---------------------------------------------------------------------


def interpreter(*path: Path | str) -> runtime_check.Interpreter:
    return runtime_check.Interpreter("3.12.3", tuple(map(str, path)), "/nowhere")


def test_a_module_is_found_without_running_the_packages_above(tmp_path: Path) -> None:
    """The guard of the real package raises on hardware that it does not support."""
    kit.repository(tmp_path)
    sources = [{"name": "Src", "modules": ["pkg.deep.legacy"]}]
    found = runtime_check.module_problems(interpreter(tmp_path / "work"), {"sources": sources})
    assert found == []


@pytest.mark.parametrize(
    ("module", "part"), [("pkg.deep.gone", "pkg.deep.gone"), ("none.deep", "none")]
)
def test_the_part_of_a_module_that_is_missing_is_named(
    tmp_path: Path, module: str, part: str
) -> None:
    kit.repository(tmp_path)
    stack: dict[str, Any] = {"sources": [{"name": "Src", "modules": [module]}]}
    found = runtime_check.module_problems(interpreter(tmp_path / "work"), stack)
    assert len(found) == 1
    assert f"({part!r} is not found on the unit's PYTHONPATH)" in found[0]


@pytest.mark.parametrize("tool", ["nvcc", "ninja", "c++", "Python.h"])
def test_every_tool_is_looked_for_with_the_units_environment(tmp_path: Path, tool: str) -> None:
    found = runtime_check.tool_problems(interpreter(), [tool], {"PATH": str(tmp_path)})
    assert len(found) == 1 and found[0].startswith(f"{tool} is not found by the unit; ")


def test_nvcc_is_found_below_cuda_home(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch(0o755)
    environment = {"PATH": os.devnull, "CUDA_HOME": str(tmp_path)}
    assert runtime_check.tool_problems(interpreter(), ["nvcc"], environment) == []
