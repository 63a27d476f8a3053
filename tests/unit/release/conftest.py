"""A package index with one small package, and a release built from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import release_kit as kit

from vllm_turing import packages, release


@pytest.fixture(autouse=True)
def own_uv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of one test's index may be found by another test."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_FIND_LINKS", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The wheel that the small stack locks."""
    content = {"demo/__init__.py": "", "demo/kernel.cuh": kit.PRISTINE}
    return kit.wheel(tmp_path / "wheels", "demo", "1.0", content)


@pytest.fixture
def index(tmp_path: Path, demo: Path) -> Iterator[str]:
    """Address of a public index that has it."""
    kit.publish(tmp_path / "index/public", demo)
    with kit.served(tmp_path / "index") as address:
        yield address


@pytest.fixture
def lock(demo: Path) -> str:
    return f"demo==1.0 \\\n    --hash=sha256:{kit.sha256(demo)}\n"


@pytest.fixture
def builder(tmp_path: Path, index: str) -> Callable[..., release.Builder]:
    """Make the builder of one release below a common prefix."""

    def make(fingerprint: str, **options: Any) -> release.Builder:
        indexes = packages.Indexes(f"{index}/public", **options)
        wanted = release.Release(tmp_path / "prefix", fingerprint)
        return release.Builder(wanted, kit.uv(), indexes, timeout=120)

    return make


@pytest.fixture
def build(builder: Callable[..., release.Builder], lock: str) -> Callable[..., release.Release]:
    """Build a whole small release for real."""

    def make(fingerprint: str, **changes: Any) -> release.Release:
        one = builder(fingerprint)
        one.prepare(kit.files(kit.stack(**changes), lock, kit.patch()), sys.executable)
        one.install(require_hashes=True)
        one.checkout(changes.get("sources", []))
        one.patch()
        one.complete()
        return one.release

    return make
