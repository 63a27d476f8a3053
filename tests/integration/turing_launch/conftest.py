"""Trees of FlashInfer's headers: as released, and with each of the two patches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.patches import packages
from vllm_turing import wheel_patch

TREES = ("pristine", "flashinfer-smem-budget", "flashinfer-zero-size-placeholders")


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Give the folder flashinfer/data of every tree."""
    result: dict[str, Path] = {}
    for name in TREES:
        site = tmp_path_factory.mktemp(name) / "site"
        site.mkdir()
        source = packages.wheels()
        for path in [source / "flashinfer", *source.glob("flashinfer_python*.dist-info")]:
            packages.copy(path, site / path.name)
        if name != "pristine":
            wheel_patch.apply_all(packages.load(name), {"site-packages": site})
        result[name] = site / "flashinfer/data"
    return result
