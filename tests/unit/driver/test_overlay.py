"""What apt is shown before anything is written."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from driver_kit import Box
from test_apt_key import ARMOURED, FINGERPRINT

from vllm_turing import apt_key, apt_source, apt_sources
from vllm_turing.apt_client import Apt, overlay
from vllm_turing.apt_source import Source

KEY = "/etc/apt/keyrings/vllm-turing-nvidia.gpg"
SOURCES = "/etc/apt/sources.list.d/vllm-turing-nvidia.sources"
PIN = "/etc/apt/preferences.d/00-vllm-turing-nvidia.pref"
URI = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64"


def value(options: list[str], name: str) -> Path:
    return Path(next(o.split("=", 1)[1] for o in options if o.startswith(f"{name}=")))


def archive() -> Source:
    return Source(
        "nvidia",
        "NVIDIA",
        {PIN: "pin\n", SOURCES: f"Types: deb\nURIs: {URI}/\nSuites: /\nSigned-By: {KEY}\n"},
        f"{URI}/3bf863cc.pub",
        FINGERPRINT,
        KEY,
    )


def test_an_overlay_adds_changes_and_hides_and_the_host_stays_as_it_is(box: Box) -> None:
    old = box.write("/etc/apt/preferences.d/01-driver.pref", "old")
    box.write("/etc/apt/sources.list.d/cuda.list", "deb x /\n")
    box.write("/etc/apt/sources.list.d/ubuntu.sources", "u")
    options = {"01-driver.pref": "new"}
    with overlay(options, {"more.sources": "m"}, hide=["cuda.list"], root=box.root) as made:
        preferences = value(made, "Dir::Etc::preferencesparts")
        sources = value(made, "Dir::Etc::sourceparts")
        assert (preferences / "01-driver.pref").read_text() == "new"
        assert sorted(p.name for p in sources.iterdir()) == ["more.sources", "ubuntu.sources"]
    assert not sources.exists()
    assert old.read_text() == "old"


def test_own_lists_start_from_the_hosts(box: Box) -> None:
    box.write("/var/lib/apt/lists/archive_Packages", "p")
    box.write("/var/lib/apt/lists/lock")
    with overlay(own_lists=True, root=box.root) as made:
        lists = value(made, "Dir::State::Lists")
        assert (lists / "archive_Packages").read_text() == "p"
        assert not (lists / "lock").exists()


def test_an_archive_that_is_not_set_up_is_looked_at_with_its_key(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apt_key, "fetch", lambda _url, **_options: ARMOURED)
    monkeypatch.setattr(Apt, "_wait", lambda _self: None)
    box.write("/etc/apt/sources.list.d/ubuntu.sources", "u")
    seen: dict[str, Any] = {}

    def runner(argv: list[str], **options: Any) -> Any:
        folder = next(w.split("=", 1)[1] for w in argv if "sourceparts=" in w)
        seen["text"] = (Path(folder) / SOURCES.rsplit("/", 1)[1]).read_text()
        (entry,) = apt_sources.parse_deb822(seen["text"], "x")
        seen["key"] = apt_key.fingerprints(Path(entry.signed_by).read_bytes())
        return box(argv, **options)

    with ExitStack() as stack:
        looked = apt_source.view(archive(), Apt(runner), box.root, stack)
        assert looked.option("Dir::State::Lists") is not None
    assert KEY not in seen["text"]
    assert seen["key"] == [FINGERPRINT]
    assert not (box.root / SOURCES.lstrip("/")).exists()
    assert not (box.root / KEY.lstrip("/")).exists()


def test_an_archive_that_is_set_up_is_used_as_it_is(box: Box) -> None:
    source = archive()
    for path, content in source.files.items():
        box.write(path, content)
    apt_source.write(box.root, KEY, apt_key.dearmor(ARMOURED))
    apt = Apt(box)
    with ExitStack() as stack:
        assert apt_source.view(source, apt, box.root, stack) is apt
    apt_source.write(box.root, KEY, b"another")
    assert not apt_source.is_set_up(source, box.root)
