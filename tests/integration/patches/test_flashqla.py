"""The FlashQLA patch on the real repository, and its variant on the lab's stand-in.

The repository is fetched from VLLM_TURING_FLASHQLA_GIT (an address or a folder; GitHub
when unset); where it cannot be reached, its tests are skipped and say so.

    pytest tests/integration/patches/test_flashqla.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.patches import packages
from vllm_turing import wheel_patch
from vllm_turing.wheel_patch import PatchError, State, apply_all, revert_all, states

REPOSITORY = "https://github.com/weicj/FlashQLA-SM70-SM75.git"
LEGACY = "import flash_qla.ops.gated_delta_rule.legacy as m; print(m.__all__)"
SM90 = "from flash_qla import chunk_gated_delta_rule"


def git(*arguments: str, folder: Path) -> str:
    program = shutil.which("git")
    if program is None:
        pytest.skip("git is not installed")
    environment = {**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    done = subprocess.run(
        [program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Check the real repository out at the patch's commit."""
    (patch,) = packages.load("flashqla-sm75-import")
    assert patch.commit is not None
    source = os.environ.get("VLLM_TURING_FLASHQLA_GIT", REPOSITORY)
    folder = tmp_path / "FlashQLA"
    try:
        git("clone", "--quiet", "--no-checkout", source, str(folder), folder=tmp_path)
    except RuntimeError as error:
        pytest.skip(f"'{source}' cannot be cloned here ({str(error).splitlines()[-1]})")
    git("checkout", "--quiet", "--detach", patch.commit, folder=folder)
    return folder


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in the CPU environment, which has torch and no tilelang."""
    return subprocess.run(
        [str(packages.cpu_environment() / "bin/python"), "-B", "-c", code],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_real_repository(checkout: Path) -> None:
    patches, roots = packages.load("flashqla-sm75-import"), {"FlashQLA": checkout}
    before = python(LEGACY, checkout)
    assert before.returncode != 0
    assert "tilelang" in before.stderr  # imported by the SM90 part, before that refuses SM75

    (outcome,) = apply_all(patches, roots)
    assert (outcome.state, outcome.version) == (State.PATCHED, patches[0].commit)
    after = python(LEGACY, checkout)
    assert after.returncode == 0, after.stderr
    assert after.stdout.strip() == "['chunk_gated_delta_rule_fwd_legacy']"
    # the SM90 kernels are still there, and still say what they need
    assert "tilelang" in python(SM90, checkout).stderr
    changed = git("status", "--porcelain", folder=checkout).split("\n")
    assert {line[3:] for line in changed if line} == {file.path for file in patches[0].files}

    assert not any(o.changed for o in apply_all(patches, roots))
    revert_all(patches, roots)
    assert git("status", "--porcelain", folder=checkout) == ""


def test_real_repository_installs_beside_vllm(checkout: Path, tmp_path: Path) -> None:
    """Its pin of tilelang is another than that of vLLM 0.24.0."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("tilelang==0.1.9\ntorch==2.11.0\n")

    def resolve() -> None:
        packages.uv(
            *("pip", "compile", "--quiet", "--python-version", "3.12", str(checkout / "setup.py")),
            *("-c", str(constraints), "-o", str(tmp_path / "lock.txt")),
        )

    with pytest.raises(RuntimeError, match=r"tilelang==0\.1\.8"):
        resolve()
    apply_all(packages.load("flashqla-sm75-import"), {"FlashQLA": checkout})
    resolve()
    assert "tilelang" not in (tmp_path / "lock.txt").read_text()


def test_other_commit_is_foreign(checkout: Path) -> None:
    git("checkout", "--quiet", "HEAD~1", folder=checkout)
    with pytest.raises(PatchError, match="is at commit"):
        apply_all(packages.load("flashqla-sm75-import"), {"FlashQLA": checkout})


def test_stand_in(stand_in: Path) -> None:
    patches, roots = packages.load("flashqla-sm75-import-lab"), {"FlashQLA": stand_in}
    before = python(LEGACY, stand_in)
    assert before.returncode != 0
    assert "FlashQLA now support sm90 only." in before.stderr
    apply_all(patches, roots)
    after = python(LEGACY, stand_in)
    assert after.returncode == 0, after.stderr
    assert "FlashQLA now support sm90 only." in python(SM90, stand_in).stderr


def test_each_variant_is_for_its_own_repository(stand_in: Path) -> None:
    (outcome,) = states(packages.load("flashqla-sm75-import"), {"FlashQLA": stand_in})
    assert outcome.state is State.FOREIGN
    assert "check it out again" in outcome.message
    assert wheel_patch.checkout_commit(stand_in) == ""
