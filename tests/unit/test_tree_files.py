"""The tree_files filter: what a folder on the controller becomes on the host."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from ansible.errors import AnsibleFilterError


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "plugins/filter/tree_files.py"
    spec = importlib.util.spec_from_file_location("tree_files", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_listed_with_their_content(plugin: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sub/__pycache__").mkdir(parents=True)
    (tmp_path / "b.py").write_text("b\n")
    (tmp_path / "sub/a.py").write_text("a\n")
    (tmp_path / "sub/__pycache__/a.py").write_text("compiled")
    (tmp_path / "notes.txt").write_text("n")
    assert plugin.tree_files(str(tmp_path), "/opt/lib", ".py") == [
        {"path": "/opt/lib/b.py", "content": "b\n", "mode": "0644"},
        {"path": "/opt/lib/sub/a.py", "content": "a\n", "mode": "0644"},
    ]


def test_a_missing_folder_is_named(plugin: ModuleType) -> None:
    with pytest.raises(AnsibleFilterError, match="no folder '/nonexistent'"):
        plugin.tree_files("/nonexistent", "/opt")
