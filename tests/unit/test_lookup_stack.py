"""The lookup plugin, run by Ansible's own templating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible.plugins.loader import lookup_loader

PROJECT = Path(__file__).resolve().parents[2]


def lookup(name: str, **options: Any) -> dict[str, Any]:
    lookup_loader.add_directory(str(PROJECT / "plugins/lookup"))
    result = lookup_loader.get("stack").run([name], variables={}, **options)
    assert len(result) == 1
    return dict(result[0])


def test_a_stack_is_returned_with_its_fingerprint_and_files() -> None:
    found = lookup("vllm-0.24.0-cpu", mirrors={"pytorch": "p", "vllm": "v", "git": "http://g"})
    assert found["problems"] == []
    assert len(found["fingerprint"]) == 16
    assert found["sources"][0]["url"].startswith("http://g/")
    assert "stack.json" in found["files"]
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "-1"


def test_problems_are_returned_not_raised() -> None:
    found = lookup("vllm-0.24.0-cu129", cuda_toolkit_version="13.0")
    assert len(found["problems"]) == 1


def test_an_unknown_stack_is_one_sentence() -> None:
    with pytest.raises(AnsibleError, match=r"'nope', which does not exist; use one of: vllm-0\."):
        lookup("nope")


def test_a_stack_that_breaks_the_schema_names_the_key(tmp_path: Path) -> None:
    source = PROJECT / "stacks"
    (tmp_path / "s").mkdir()
    (tmp_path / "schema.json").write_text((source / "schema.json").read_text())
    text = (source / "vllm-0.24.0-cpu/stack.yml").read_text()
    (tmp_path / "s/stack.yml").write_text(text.replace('python: ["3.12", "3.11"]', "python: 3.12"))
    with pytest.raises(AnsibleError, match=r"stacks/s/stack\.yml does not fit .* python: 3\.12"):
        lookup("s", root=str(tmp_path))
