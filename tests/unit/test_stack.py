"""The stacks as data: they fit their schema, their locks hold what they say, mistakes are named."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from vllm_turing import stack, wheel_patch

ROOT = Path(__file__).resolve().parents[2] / "stacks"
NAMES = ["vllm-0.24.0-cpu", "vllm-0.24.0-cu129", "vllm-0.24.0-cu130"]
REFERENCE = {
    "flashinfer-python": "0.6.12",
    "triton": "3.6.0",
    "transformers": "5.12.1",
    "numpy": "2.3.5",
}


def load(name: str, **options: Any) -> stack.Stack:
    return stack.load(ROOT, name, yaml.safe_load, **options)


def copy_of(tmp_path: Path, name: str = "vllm-0.24.0-cu129", **changes: Any) -> stack.Stack:
    """A stack with some keys changed, in a folder of its own."""
    folder = tmp_path / name
    folder.mkdir(parents=True)
    data = yaml.safe_load((ROOT / name / "stack.yml").read_text()) | changes
    (folder / "stack.yml").write_text(yaml.safe_dump(data))
    (folder / "lock.txt").write_text((ROOT / name / "lock.txt").read_text())
    (tmp_path / "patches").symlink_to(ROOT / "patches")
    return stack.load(tmp_path, name, yaml.safe_load)


def test_the_three_stacks_are_found() -> None:
    assert stack.names(ROOT) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_stack_fits_the_schema_and_contradicts_nothing(name: str) -> None:
    schema = json.loads((ROOT / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    loaded = load(name)
    jsonschema.validate(dict(loaded.data), schema)
    assert stack.problems(loaded) == []


def test_every_key_of_the_schema_is_described() -> None:
    schema = json.loads((ROOT / "schema.json").read_text())
    undescribed = [
        key
        for key, value in schema["properties"].items()
        if "description" not in value and "$ref" not in value
    ]
    assert undescribed == []


@pytest.mark.parametrize("name", NAMES)
def test_versions_are_those_of_the_reference_host(name: str) -> None:
    versions = load(name).data["versions"]
    assert {key: versions[key] for key in REFERENCE} == REFERENCE
    assert versions["torch"].split("+")[0] == "2.11.0"
    assert versions.get("flashinfer-cubin", "0.6.12") == "0.6.12"


@pytest.mark.parametrize("name", NAMES)
def test_every_locked_package_is_exact_and_has_hashes(name: str) -> None:
    lock = load(name).lock
    entries = re.findall(r"^[^#\s].*(?:\n[ \t]+.*)*", lock, re.M)
    assert len(entries) > 150
    loose = [
        entry.splitlines()[0]
        for entry in entries
        if "==" not in entry.splitlines()[0] or "--hash=sha256:" not in entry
    ]
    assert loose == []


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_names_no_host_and_no_address(name: str) -> None:
    lock = load(name).lock
    assert "://" not in lock
    assert "index-url" not in lock


def test_the_default_stack_locks_nothing_that_depends_on_the_cuda_build() -> None:
    locked = stack.locked_versions(load("vllm-0.24.0-cu129").lock)
    assert not [name for name in locked if name.endswith(("-cu12", "-cu13"))]
    assert not {"torch", "vllm", "cuda-toolkit", "nvidia-cuda-runtime"} & locked.keys()


def test_both_cuda_stacks_lock_the_same_versions_otherwise() -> None:
    here, there = (stack.locked_versions(load(name).lock) for name in NAMES[1:])
    assert {name: there[name] for name in here if name in there} == {
        name: version for name, version in here.items() if name in there
    }
    assert set(here) - set(there) == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_patches_fit_each_other_and_the_locked_versions(name: str) -> None:
    loaded = load(name)
    patches = wheel_patch.order([wheel_patch.from_mapping(patch) for patch in loaded.patches])
    assert len(patches) == len(loaded.data["patches"])


def test_an_optional_patch_takes_the_place_of_the_one_it_conflicts_with() -> None:
    plain = load(NAMES[0])
    (optional,) = plain.data["optional_patches"]
    chosen = load(NAMES[0], optional_patches=[optional])
    before = {patch["name"]: patch for patch in plain.patches}
    after = {patch["name"]: patch for patch in chosen.patches}
    assert after.keys() - before.keys() == {optional}
    assert before.keys() - after.keys() == set(after[optional]["conflicts"]) & before.keys()
    assert len(after) == len(before)
    assert chosen.fingerprint() != plain.fingerprint()


def test_an_unknown_stack_is_answered_with_the_known_ones() -> None:
    with pytest.raises(stack.StackError) as raised:
        load("vllm-0.25.0")
    assert str(raised.value) == (
        "vllm_runtime_stack is 'vllm-0.25.0', which does not exist; use one of: " + ", ".join(NAMES)
    )


def test_an_unknown_optional_patch_is_answered_with_the_offered_ones() -> None:
    with pytest.raises(stack.StackError, match=r"'speed'.*use any of: flashinfer-smem-budget"):
        load(NAMES[0], optional_patches=["speed"])


def test_a_missing_lock_names_the_command_that_makes_it(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "stack.yml").write_text("{name: s, lock: {file: lock.txt}}")
    with pytest.raises(stack.StackError, match="provision lock s"):
        stack.load(tmp_path, "s", yaml.safe_load)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cuda_toolkit_version": "13.0"}, ["cuda_toolkit_version is '13.0'", "'12.9'"]),
        ({"python": "/usr/bin/python3.11"}, ["vllm_runtime_python", "accepts Python 3.12"]),
        ({"require_hashes": True}, ["vllm_runtime_require_hashes", "torch"]),
    ],
)
def test_variables_that_do_not_fit_are_named(arguments: dict[str, Any], words: list[str]) -> None:
    found = stack.problems(load("vllm-0.24.0-cu129"), **arguments)
    assert len(found) == 1
    assert all(word in found[0] for word in words)


def test_variables_that_fit_are_no_problem() -> None:
    fitting = {"cuda_toolkit_version": "12.9", "python": "/usr/bin/python3.12"}
    assert stack.problems(load("vllm-0.24.0-cu129"), **fitting) == []
    cpu = load("vllm-0.24.0-cpu")
    assert stack.problems(cpu, cuda_toolkit_version="12.9", require_hashes=True) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cuda": {"toolkit": "12.9", "torch_tag": "cu130"}}, "torch_tag 'cu130'"),
        ({"indexes": []}, "unknown index 'pytorch'"),
        ({"forbidden": ["numpy"]}, "forbidden package numpy"),
        ({"versions": {"numpy": "2.3.6"}}, "numpy must be 2.3.6 but the lock has 2.3.5"),
    ],
)
def test_contradictions_inside_a_stack_are_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    assert any(words in text for text in stack.problems(copy_of(tmp_path, **changes)))


def test_the_fingerprint_follows_what_decides_and_nothing_else(tmp_path: Path) -> None:
    plain = copy_of(tmp_path / "a")
    same = copy_of(tmp_path / "b", description="other words")
    other = copy_of(tmp_path / "c", environment={"X": "1"})
    assert re.fullmatch(r"[0-9a-f]{16}", plain.fingerprint())
    assert same.fingerprint() == plain.fingerprint()
    assert other.fingerprint() != plain.fingerprint()
    assert plain.fingerprint("/usr/bin/python3.12") != plain.fingerprint()


def test_mirrors_are_put_into_the_addresses() -> None:
    mirrors = {"pytorch": "https://p/whl/", "vllm": "https://v", "git": "https://g"}
    resolved = load("vllm-0.24.0-cu129").resolved(mirrors)
    assert [entry["url"] for entry in resolved["indexes"]] == [
        "https://p/whl/cu129",
        "https://v/0.24.0/cu129",
    ]
    assert resolved["sources"][0]["url"] == "https://g/weicj/FlashQLA-SM70-SM75.git"


def test_an_empty_mirror_is_named_by_its_variable() -> None:
    with pytest.raises(stack.StackError, match="vllm_host_mirror_pytorch is empty"):
        load("vllm-0.24.0-cu129").resolved({"pytorch": "", "vllm": "v", "git": "g"})


def test_the_host_gets_json_and_the_lock() -> None:
    loaded = load(NAMES[0])
    files = loaded.files("0123456789abcdef")
    data = json.loads(files["stack.json"])
    assert data["fingerprint"] == "0123456789abcdef"
    assert files[data["lock"]["file"]] == loaded.lock
    for name in data["patches"]:
        assert wheel_patch.from_mapping(json.loads(files[f"patches/{name}.json"])).name == name


def lock_module() -> Any:
    spec = importlib.util.spec_from_file_location("stacks_lock", ROOT / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lock_tool_tells_what_changed_and_leaves_out_what_the_host_resolves() -> None:
    lock = lock_module()
    resolved = (
        "a==1 \\\n    --hash=sha256:11\n    # via b\nnvidia-x-cu12==3 \\\n    --hash=sha256:33\n"
        "b==2 ; python_version < '4' \\\n    --hash=sha256:22\n"
    )
    text = lock.lock_text(resolved, ["nvidia-*"])
    assert lock.versions(text) == {"a": "1", "b": "2"}
    assert "# via" not in text
    after = text.replace("a==1", "a==1.1").replace("sha256:22", "sha256:23") + "c==4\n"
    assert lock.difference(text, after) == [
        "~ a 1 -> 1.1",
        "~ b 2: other hashes or markers",
        "+ c 4",
    ]


def test_the_lock_tool_names_the_known_stacks() -> None:
    lock = lock_module()
    with pytest.raises(lock.LockError, match=r"'x' does not exist; use one of: vllm-0\.24\.0-cpu"):
        lock.make("x")
