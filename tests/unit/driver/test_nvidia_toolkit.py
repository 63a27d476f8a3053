"""CUDA goes in beside others and never moves the driver (cases 26 and part 5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver_kit import NVIDIA, V159, Box, installed

from vllm_turing import nvidia_toolkit
from vllm_turing.apt_client import Apt
from vllm_turing.apt_source import Source
from vllm_turing.nvidia_toolkit import ToolkitError
from vllm_turing.run import Result

PACKAGES = ["cuda-nvcc-12-9", "cuda-cudart-dev-12-9"]


def make(box: Box, packages: list[str] = PACKAGES) -> nvidia_toolkit.ToolkitPlan:
    apt = Apt(box, wait_for_lock=lambda _t: 0.0, sleep=lambda _s: None)
    return nvidia_toolkit.make_plan(packages, Source("nvidia", "NVIDIA"), box, box.root, apt=apt)


def offer(box: Box, *names: str) -> None:
    for name in names:
        box.offers[name] = [("12.9.86-1", NVIDIA)]


def test_what_is_missing_is_installed_and_nothing_more(box: Box) -> None:
    installed(box)
    offer(box, *PACKAGES)
    box.packages["cuda-nvcc-12-9"] = ("12.9.86-1", "ii")
    plan = make(box)
    assert plan.missing == ["cuda-cudart-dev-12-9"]
    assert plan.installs == {"cuda-cudart-dev-12-9": "12.9.86-1"}


def test_a_complete_toolkit_is_not_asked_of_apt(box: Box) -> None:
    for name in PACKAGES:
        box.packages[name] = ("12.9.86-1", "ii")
    assert make(box).missing == []
    assert not box.commands("apt-cache")


@pytest.mark.parametrize(
    "line",
    [
        "Inst cuda-drivers (595.58.03-1ubuntu1 NVIDIA CUDA [amd64])",
        f"Inst libnvidia-compute-580 [{V159}] (580.159.04-1ubuntu1 NVIDIA CUDA [amd64])",
        f"Remv nvidia-dkms-580 [{V159}]",
    ],
)
def test_a_transaction_that_touches_the_driver_is_refused_by_name(box: Box, line: str) -> None:
    installed(box)
    offer(box, *PACKAGES)
    box.simulations["cuda-nvcc"] = Result((), 0, f"Inst cuda-nvcc-12-9 (12.9.86-1 x)\n{line}\n")
    with pytest.raises(ToolkitError, match="the driver must stay as it is") as error:
        make(box)
    assert line.split()[1] in str(error.value)


def test_a_transaction_that_takes_something_away_is_refused(box: Box) -> None:
    offer(box, *PACKAGES)
    box.simulations["cuda-nvcc"] = Result((), 0, "Remv cuda-toolkit-11-8 [11.8.0-1]\n")
    with pytest.raises(ToolkitError, match="would remove cuda-toolkit-11-8"):
        make(box)


def test_a_package_that_the_repository_lacks_is_named(box: Box) -> None:
    offer(box, "cuda-nvcc-12-9")
    with pytest.raises(ToolkitError, match="has no package cuda-cudart-dev-12-9"):
        make(box)


def test_the_shared_link_is_told_apart(tmp_path: Path) -> None:
    local = tmp_path / "usr/local"
    local.mkdir(parents=True)
    assert nvidia_toolkit.shared_link(tmp_path)[0] == "absent"
    (local / "cuda").symlink_to(local / "cuda-12.9")
    assert nvidia_toolkit.shared_link(tmp_path)[0] == "dangling"
    (local / "cuda-12.9").mkdir()
    assert nvidia_toolkit.shared_link(tmp_path) == ("link", str(local / "cuda-12.9"))
    (local / "cuda").unlink()
    (local / "cuda").mkdir()
    assert nvidia_toolkit.shared_link(tmp_path)[0] == "folder"


def test_an_existing_link_is_put_back_when_a_package_moves_it(box: Box) -> None:
    local = box.root / "usr/local"
    (local / "cuda-13.0").mkdir(parents=True)
    (local / "cuda-12.9").mkdir()
    link = local / "cuda"
    link.symlink_to(local / "cuda-13.0")
    offer(box, *PACKAGES)
    nvcc = local / "cuda-12.9/bin/nvcc"
    box.answers[str(nvcc)] = Result((), 0, "Cuda compilation tools, release 12.9, V12.9.86\n")
    plan = make(box)

    class Moving(Apt):
        def install(self, arguments: object, *, archives: str | None = None) -> None:
            link.unlink()
            link.symlink_to(local / "cuda-12.9")

    nvidia_toolkit.apply(plan, "/usr/local/cuda-12.9", "12.9", box, box.root, apt=Moving(box))
    assert ["update-alternatives", "--set", "cuda", "/usr/local/cuda-13.0"] in box.ran


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Result((), None, error="not found"), "does not run"),
        (Result((), 0, "Cuda compilation tools, release 13.0, V13.0.88\n"), "is CUDA 13.0, not"),
    ],
)
def test_the_compiler_itself_is_asked(box: Box, answer: Result, words: str) -> None:
    box.answers[str(box.root / "usr/local/cuda-12.9/bin/nvcc")] = answer
    with pytest.raises(ToolkitError, match=words):
        nvidia_toolkit.check("/usr/local/cuda-12.9", "12.9", box, box.root)
