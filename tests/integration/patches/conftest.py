"""Fixtures of the tests against the real packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import git_mirror, tiny_model
from tests.integration.patches import packages


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Give a pristine copy of vLLM's CUDA build and FlashInfer."""
    return packages.copy(packages.wheels(), tmp_path / "site-packages")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the lab's tiny model, with room for long prompts."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model.write_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 262_144
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Write the files of the lab's stand-in for FlashQLA."""
    folder = tmp_path / "FlashQLA"
    for path, text in git_mirror.FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
