"""Releases built for real: uv, small wheels from an index over HTTP, git over plain HTTP."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import release_kit as kit

from vllm_turing import distributions, release

Build = Callable[..., release.Release]
MakeBuilder = Callable[..., release.Builder]


def test_a_release_is_built_patched_and_complete(build: Build) -> None:
    one = build("a" * 16)
    mark = one.mark()
    assert (one.packages / "demo/kernel.cuh").read_text() == kit.PATCHED
    assert mark["fingerprint"] == "a" * 16
    assert mark["versions"] == {"demo": "1.0"}
    assert [entry["patches"] for entry in mark["patched"]] == [["demo-tile"]]
    assert release.probe(one).needs == "nothing"
    answer = subprocess.run([one.python, "-c", "import demo"], check=False)
    assert answer.returncode == 0


def test_patching_leaves_the_packages_in_the_cache_alone(
    build: Build, builder: MakeBuilder, lock: str
) -> None:
    build("a" * 16)
    second = builder("b" * 16)
    second.prepare(kit.files(kit.stack(), lock, kit.patch()), sys.executable)
    second.install(require_hashes=True)
    kernel = second.release.packages / "demo/kernel.cuh"
    assert kernel.stat().st_nlink > 1, "not linked from the cache: this test would prove nothing"
    assert kernel.read_text() == kit.PRISTINE


def test_a_pristine_reinstall_is_seen_and_mended(build: Build, builder: MakeBuilder) -> None:
    one = build("a" * 16)
    kernel = one.packages / "demo/kernel.cuh"
    kernel.unlink()
    kernel.write_text(kit.PRISTINE)
    state = release.probe(one)
    assert state.needs == "patch"
    assert "demo/kernel.cuh' is not as patched (patch demo-tile)" in state.damage[0]
    assert [outcome.changed for outcome in builder("a" * 16).patch()] == [True]
    assert release.probe(one).needs == "nothing"


def test_a_foreign_edit_stops_with_the_file(build: Build, builder: MakeBuilder) -> None:
    one = build("a" * 16)
    kernel = one.packages / "demo/kernel.cuh"
    kernel.unlink()
    kernel.write_text("tile = 3\n")
    with pytest.raises(release.ReleaseError, match=r"demo/kernel\.cuh"):
        builder("a" * 16).patch()
    assert kernel.read_text() == "tile = 3\n"


def test_a_build_that_broke_off_is_removed_and_the_selected_release_stays(
    build: Build, builder: MakeBuilder, lock: str
) -> None:
    good = build("a" * 16)
    release.select(good)
    broken = builder("b" * 16)
    broken.prepare(kit.files(kit.stack(), lock, kit.patch()), sys.executable)
    broken.install(require_hashes=True)  # and here the power goes
    assert release.probe(broken.release).needs == "build"
    assert release.unfinished(good.prefix) == [broken.release.fingerprint]
    third = build("c" * 16)
    assert not broken.release.path.exists()
    assert third.complete and good.complete
    assert release.selected(good.prefix, "current") == good.fingerprint


def test_a_gone_interpreter_asks_for_a_new_build(build: Build) -> None:
    one = build("a" * 16)
    link = one.venv / "bin/python"
    link.unlink()
    link.symlink_to("/nowhere/python3")
    state = release.probe(one)
    assert state.needs == "build"
    assert "does not run" in state.damage[0]


def test_the_sources_are_at_their_commit_and_found(
    build: Build, tmp_path: Path, index: str
) -> None:
    git = tmp_path / "index/git"
    git.mkdir()
    commit = kit.repository(git)
    source = {"name": "Src", "url": f"{index}/git/repo.git", "commit": commit}
    one = build("a" * 16, sources=[{**source, "modules": ["pkg.deep.legacy"]}])
    assert (one.path / "src/Src/pkg/deep/legacy.py").is_file()
    assert one.mark()["sources"] == {"Src": commit}


def test_a_commit_that_is_not_there_is_named(builder: MakeBuilder, lock: str, index: str) -> None:
    one = builder("a" * 16)
    one.prepare(kit.files(kit.stack(), lock, kit.patch()), sys.executable)
    source = {"name": "Src", "url": f"{index}/git/none.git", "commit": "0" * 40}
    with pytest.raises(release.ReleaseError) as raised:
        one.checkout([source])
    text = str(raised.value)
    assert "Src 000000000000" in text and "none.git" in text and "vllm_host_mirror_git" in text


def test_an_unreachable_index_is_told_in_one_sentence(
    tmp_path: Path, builder: MakeBuilder, lock: str
) -> None:
    one = builder("a" * 16)
    one.prepare(kit.files(kit.stack(), lock, kit.patch()), sys.executable)
    shutil.rmtree(tmp_path / "index/public")
    with pytest.raises(release.ReleaseError) as raised:
        one.install(require_hashes=True)
    assert str(raised.value).startswith("uv cannot install stack 'small': ")
    assert "\n" not in str(raised.value)
    assert raised.value.details


def test_a_wheel_that_is_not_the_locked_one_is_refused(builder: MakeBuilder) -> None:
    one = builder("a" * 16)
    lock = f"demo==1.0 \\\n    --hash=sha256:{'0' * 64}\n"
    one.prepare(kit.files(kit.stack(), lock, kit.patch()), sys.executable)
    with pytest.raises(release.ReleaseError, match="mirror serves other files"):
        one.install(require_hashes=True)


def test_a_package_that_moved_is_named_and_the_release_not_completed(
    builder: MakeBuilder, lock: str
) -> None:
    one = builder("a" * 16)
    data = kit.stack(versions={"demo": "1.1"})
    one.prepare(kit.files(data, lock, kit.patch()), sys.executable)
    one.install(require_hashes=True)
    one.patch()
    with pytest.raises(release.ReleaseError, match=r"demo is 1\.0 but the stack holds 1\.1"):
        one.complete()
    assert not one.release.complete


# --- packages whose hashes are recorded on the host -----------------------------------------------


def variant(tmp_path: Path, text: str = "x = 1\n", *, hashes: bool = True) -> dict[str, Any]:
    """Publish a CUDA variant in an index of its own, and with it a library only it asks for."""
    library = kit.wheel(tmp_path / "wheels", "nvidia-lib", "12.9", {"nvidia_lib/a.py": ""})
    kit.publish(tmp_path / "index/public", library)
    engine = kit.wheel(
        tmp_path / "wheels",
        "engine",
        "2.0+cu129",
        {"engine/__init__.py": text},
        ("demo", "nvidia-lib==12.9"),
    )
    shutil.rmtree(tmp_path / "index/variants", ignore_errors=True)
    kit.publish(tmp_path / "index/variants", engine, hashes=hashes)
    lock = dict(kit.stack()["lock"]) | {"requirements": ["demo==1.0", "engine==2.0"]}
    return kit.stack(
        held=[{"name": "engine", "version": "2.0+cu129", "index": "variants"}],
        versions={"demo": "1.0", "engine": "2.0+cu129"},
        lock=lock,
    )


def install(one: release.Builder, data: dict[str, Any], lock: str, **options: bool) -> list[str]:
    one.prepare(kit.files(data, lock, kit.patch()), sys.executable)
    return one.install(require_hashes=options.get("require_hashes", False))


@pytest.mark.parametrize("hashes", [True, False])
def test_a_held_package_is_resolved_recorded_and_held(
    tmp_path: Path, builder: MakeBuilder, lock: str, index: str, hashes: bool
) -> None:
    data = variant(tmp_path, hashes=hashes)
    extra = ({"name": "variants", "url": f"{index}/variants"},)
    one = builder("a" * 16, extra=extra)
    recorded = install(one, data, lock)
    assert recorded == ["engine==2.0+cu129", "nvidia-lib==12.9"]
    have = distributions.installed(one.release.packages)
    assert {name: have[name] for name in ("demo", "engine", "nvidia-lib")} == {
        "demo": "1.0",
        "engine": "2.0+cu129",
        "nvidia-lib": "12.9",
    }
    one.patch()
    one.complete()
    # The same again needs no resolution and accepts the same wheel, hashes required or not.
    assert install(builder("b" * 16, extra=extra), data, lock, require_hashes=True) == []
    # Another wheel under the same version is refused from now on.
    variant(tmp_path, "x = 2\n", hashes=hashes)
    shutil.rmtree(os.environ["UV_CACHE_DIR"])
    with pytest.raises(release.ReleaseError):
        install(builder("c" * 16, extra=extra), data, lock)


def test_requiring_hashes_refuses_the_first_installation(
    tmp_path: Path, builder: MakeBuilder, lock: str, index: str
) -> None:
    data = variant(tmp_path)
    one = builder("a" * 16, extra=({"name": "variants", "url": f"{index}/variants"},))
    with pytest.raises(release.ReleaseError, match=r"vllm_runtime_require_hashes .* engine"):
        install(one, data, lock, require_hashes=True)
