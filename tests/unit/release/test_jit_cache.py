"""When compiled kernels may still be used, and what happens to them when they may not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import jit_cache

CACHES = ["flashinfer", "triton"]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A release with one patched header and one patched Python file."""
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "kernel.cuh").write_text("tile = 2\n")
    (folder / "envs.py").write_text("x = 1\n")
    return folder


def mark(fingerprint: str = "fp", sha256: str = "1") -> dict[str, Any]:
    return {
        "fingerprint": fingerprint,
        "patched": [
            {"path": "kernel.cuh", "sha256": sha256, "patches": ["p"]},
            {"path": "envs.py", "sha256": "2", "patches": ["q"]},
        ],
    }


def compiled(tmp_path: Path, release: Path, **stamp: Any) -> Path:
    """Caches of ``fp`` that hold a kernel, stamped for driver 580 and CUDA in /cuda."""
    folder = tmp_path / "cache/fp"
    (folder / "flashinfer").mkdir(parents=True)
    (folder / "flashinfer/kernel.so").write_text("compiled")
    wanted = jit_cache.wanted_stamp(release, mark(), "/cuda", "580.159.03") | stamp
    state = jit_cache.CacheState(folder, (), ())
    jit_cache.refresh(state, wanted)
    return folder


def look(tmp_path: Path, wanted: dict[str, Any]) -> jit_cache.CacheState:
    return jit_cache.look(tmp_path / "cache", "fp", CACHES, wanted)


def test_kernels_of_the_same_stack_stay(tmp_path: Path, release: Path) -> None:
    folder = compiled(tmp_path, release)
    wanted = jit_cache.wanted_stamp(release, mark(), "/cuda", "580.159.03")
    state = look(tmp_path, wanted)
    assert (state.filled, state.reasons) == (("flashinfer",), ())
    assert jit_cache.refresh(state, wanted) == []
    assert (folder / "flashinfer/kernel.so").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"driver": "590.48.01"}, "the driver was '580.159.03' and is now '590.48.01'"),
        ({"cuda_home": "/cuda-13"}, "CUDA was in '/cuda' and is now in '/cuda-13'"),
        ({"mark": mark(sha256="3")}, "the patches were others"),
        ({"mark": mark("other")}, "they belong to release fp and not to other"),
    ],
)
def test_kernels_of_another_world_are_moved_aside_once(
    tmp_path: Path, release: Path, options: dict[str, Any], words: str
) -> None:
    folder = compiled(tmp_path, release)
    now = {"mark": mark(), "cuda_home": "/cuda", "driver": "580.159.03"} | options
    wanted = jit_cache.wanted_stamp(release, **now)
    state = look(tmp_path, wanted)
    assert words in state.reasons
    moved = jit_cache.refresh(state, wanted)
    assert len(moved) == 1 and moved[0].startswith("flashinfer -> ")
    assert not (folder / "flashinfer").exists()
    assert [path.name for path in folder.glob(".aside-*/flashinfer/*")] == ["kernel.so"]
    assert look(tmp_path, wanted).reasons == ()


def test_a_header_replaced_by_an_equal_one_with_an_old_date_counts(
    tmp_path: Path, release: Path
) -> None:
    compiled(tmp_path, release)
    header = release / "kernel.cuh"
    fresh = release / "kernel.new"
    fresh.write_text(header.read_text())
    os.utime(fresh, (1, 1))
    fresh.replace(header)
    wanted = jit_cache.wanted_stamp(release, mark(), "/cuda", "580.159.03")
    assert look(tmp_path, wanted).reasons == ("a patched header was replaced since",)


def test_a_touched_python_file_does_not_cost_a_compilation(tmp_path: Path, release: Path) -> None:
    compiled(tmp_path, release)
    os.utime(release / "envs.py")
    wanted = jit_cache.wanted_stamp(release, mark(), "/cuda", "580.159.03")
    assert look(tmp_path, wanted).reasons == ()


def test_kernels_without_a_stamp_are_not_trusted(tmp_path: Path, release: Path) -> None:
    folder = compiled(tmp_path, release)
    (folder / jit_cache.STAMP).unlink()
    wanted = jit_cache.wanted_stamp(release, mark(), "/cuda", "580.159.03")
    assert look(tmp_path, wanted).reasons == ("nobody knows what they were compiled from",)


def test_an_empty_cache_is_stamped_without_a_word(tmp_path: Path, release: Path) -> None:
    wanted = jit_cache.wanted_stamp(release, mark(), "", "")
    state = look(tmp_path, wanted)
    assert (state.filled, state.reasons) == ((), ())
    assert jit_cache.refresh(state, wanted) == []
    assert (tmp_path / "cache/fp" / jit_cache.STAMP).is_file()


def test_a_link_is_moved_and_what_it_points_at_left_alone(tmp_path: Path, release: Path) -> None:
    folder = compiled(tmp_path, release)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("keep")
    (folder / "triton").symlink_to(elsewhere)
    wanted = jit_cache.wanted_stamp(release, mark(), "/other", "580.159.03")
    jit_cache.refresh(look(tmp_path, wanted), wanted)
    assert (elsewhere / "mine").read_text() == "keep"
    assert not (folder / "triton").is_symlink()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Mar", "580.159.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  R", "590.48.01"),
        ("", ""),
    ],
)
def test_the_loaded_driver_is_read(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text)
    assert jit_cache.driver_version(tmp_path / "version") == version
    assert jit_cache.driver_version(tmp_path / "none") == ""
