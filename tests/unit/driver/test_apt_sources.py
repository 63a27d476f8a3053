"""Source files that stop apt are found by parsing, before apt is called (cases 11 and 12)."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_turing import apt_sources

CUDA = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64"
KEY = "/usr/share/keyrings/cuda-archive-keyring.gpg"
OURS = "/etc/apt/sources.list.d/vllm-turing-nvidia.sources"


def put(root: Path, name: str, text: str) -> Path:
    path = root / "etc/apt/sources.list.d" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def with_keys(root: Path, *paths: str) -> None:
    for path in paths:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"key")


def found(root: Path) -> list[apt_sources.Finding]:
    return apt_sources.find(apt_sources.read_all(root), [OURS], root)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ("cuda-ubuntu2404-x86_64.list", f"deb [signed-by={KEY}] {CUDA}/ /\n"),
        # variant b: deb822, no closing slash, another key
        ("cuda.sources", f"Types: deb\nURIs: {CUDA}\nSuites: /\nSigned-By: /other.gpg\n"),
    ],
    ids=["list against list", "list against deb822"],
)
def test_one_repository_with_two_keys_is_a_conflict_and_is_put_right(
    tmp_path: Path, other: str, text: str
) -> None:
    put(tmp_path, "cuda.list", f"deb {CUDA}/ /\n")
    put(tmp_path, other, text)
    with_keys(tmp_path, KEY, "/other.gpg")
    findings = [f for f in found(tmp_path) if f.kind == "conflict"]
    assert len(findings) == 1
    assert "/etc/apt/sources.list.d/cuda.list:1" in findings[0].message
    assert f"/etc/apt/sources.list.d/{other}:1" in findings[0].message
    # The one without a key goes; it is kept beside under a name that apt ignores silently.
    repairs = apt_sources.repair(findings, tmp_path)
    assert [r.path for r in repairs] == ["/etc/apt/sources.list.d/cuda.list"]
    assert repairs[0].backup == "/etc/apt/sources.list.d/cuda.list.disabled"
    assert (tmp_path / repairs[0].backup.lstrip("/")).read_text() == f"deb {CUDA}/ /\n"
    assert not [f for f in found(tmp_path) if f.kind == "conflict"]


def test_our_own_file_stays_whatever_the_other_says(tmp_path: Path) -> None:
    put(tmp_path, "a-cuda.list", f"deb [signed-by={KEY}] {CUDA}/ /\n")
    ours = f"Types: deb\nURIs: {CUDA}/\nSuites: /\nSigned-By: /etc/apt/keyrings/x.gpg\n"
    put(tmp_path, OURS.rsplit("/", 1)[1], ours)
    with_keys(tmp_path, KEY)  # ours is not there yet: it is installed before apt runs
    (finding,) = found(tmp_path)
    assert [e.path for e in finding.disable] == ["/etc/apt/sources.list.d/a-cuda.list"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cuda2.sources", f"Types: deb\nURIs: {CUDA}\nSuites: /\nEnabled: no\nSigned-By: /o.gpg\n"),
        ("cuda2.list.save", f"deb [signed-by=/o.gpg] {CUDA}/ /\n"),
        ("cuda2.list", f"# deb [signed-by=/o.gpg] {CUDA}/ /\n"),
        ("cuda2.list", "deb [signed-by=/o.gpg] https://example.org/other /\n"),
    ],
    ids=["switched off", "backup", "comment", "another repository"],
)
def test_what_apt_does_not_read_is_no_conflict(tmp_path: Path, name: str, text: str) -> None:
    put(tmp_path, "cuda.list", f"deb [signed-by={KEY}] {CUDA}/ /\n")
    put(tmp_path, name, text)
    with_keys(tmp_path, KEY, "/o.gpg")
    assert found(tmp_path) == []


def test_the_same_key_twice_is_only_told(tmp_path: Path) -> None:
    put(tmp_path, "a.list", f"deb [signed-by={KEY}] {CUDA}/ /\n")
    put(tmp_path, "b.list", f"deb [arch=amd64 signed-by={KEY}] {CUDA} /\n")
    with_keys(tmp_path, KEY)
    (finding,) = found(tmp_path)
    assert finding.kind == "duplicate"
    assert finding.disable == ()


def test_components_of_one_suite_in_two_stanzas_are_fine(tmp_path: Path) -> None:
    put(
        tmp_path,
        "ubuntu.sources",
        "Types: deb\nURIs: http://archive.ubuntu.com/ubuntu\nSuites: noble noble-updates\n"
        "Components: main\n\nTypes: deb deb-src\nURIs: http://archive.ubuntu.com/ubuntu/\n"
        "Suites: noble\nComponents: universe\n",
    )
    assert found(tmp_path) == []


def test_only_the_stanza_at_fault_is_switched_off(tmp_path: Path) -> None:
    path = put(
        tmp_path,
        "mixed.sources",
        f"Types: deb\nURIs: http://example.org/x\nSuites: stable\nComponents: main\n\n"
        f"# hand-made\nTypes: deb\nURIs: {CUDA}\nSuites: /\n\n"
        "Types: deb\nURIs: http://example.org/y\nSuites: stable\nComponents: main\n",
    )
    put(
        tmp_path, OURS.rsplit("/", 1)[1], f"Types: deb\nURIs: {CUDA}\nSuites: /\nSigned-By: {KEY}\n"
    )
    with_keys(tmp_path, KEY)
    before = path.read_text()
    (repair,) = apt_sources.repair(found(tmp_path), tmp_path)
    assert (tmp_path / repair.backup.lstrip("/")).read_text() == before
    live = [e for e in apt_sources.parse_file(path, str(path)) if e.enabled]
    assert [e.uri for e in live] == ["http://example.org/x", "http://example.org/y"]
    assert found(tmp_path) == []


def test_only_the_line_at_fault_is_switched_off(tmp_path: Path) -> None:
    main = tmp_path / "etc/apt/sources.list"
    main.parent.mkdir(parents=True)
    main.write_text(f"deb http://example.org/x stable main\ndeb {CUDA}/ /\n")
    put(tmp_path, "cuda.list", f"deb [signed-by={KEY}] {CUDA}/ /\n")
    with_keys(tmp_path, KEY)
    assert apt_sources.repair(found(tmp_path), tmp_path, check=True)[0].after is not None
    # check changes nothing
    assert main.read_text().splitlines()[1].startswith("deb ")
    apt_sources.repair(found(tmp_path), tmp_path)
    assert main.read_text().splitlines()[0] == "deb http://example.org/x stable main"
    assert main.read_text().splitlines()[1].startswith("# disabled by vllm-turing: deb ")


def test_a_missing_key_is_called_that_and_nvidias_source_is_switched_off(tmp_path: Path) -> None:
    cn = "https://developer.download.nvidia.cn/compute/cuda/repos/ubuntu2404/x86_64"
    put(tmp_path, "cuda.list", f"deb [signed-by={KEY}] {cn}/ /\n")
    put(tmp_path, "else.list", "deb [signed-by=/gone.gpg] https://example.org/x stable main\n")
    kinds = {f.message: f for f in found(tmp_path)}
    nvidia = next(f for message, f in kinds.items() if "cuda.list" in message)
    other = next(f for message, f in kinds.items() if "else.list" in message)
    assert nvidia.message.startswith("key missing: ")
    assert nvidia.disable
    assert not other.disable  # somebody else's source is told, not touched


def test_a_stale_local_repository_names_the_package_to_purge(tmp_path: Path) -> None:
    put(tmp_path, "cuda-local.list", "deb file:/var/cuda-repo-ubuntu2404-12-4-local /\n")
    (finding,) = found(tmp_path)
    assert finding.kind == "local-gone"
    assert "apt-get purge 'cuda-repo-ubuntu2404-12-4*'" in finding.message
