"""What the lab takes over from the controller is detected, not assumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import controller
from lab.controller import AptSource
from lab.errors import LabError

DEB822 = """\
Types: deb
# a comment
URIs: http://archive.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb-src
URIs: http://archive.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://other.example/x
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: https://embedded.example/y
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----
"""


def test_deb822_sources_keep_enabled_binary_ones() -> None:
    found = controller.parse_deb822_sources(DEB822)
    assert [s.uri for s in found] == ["http://archive.example/debian", "https://embedded.example/y"]
    assert found[0].suites == ("bookworm", "bookworm-updates")
    assert found[0].signed_by == "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert found[1].signed_by == ""


def test_one_line_sources() -> None:
    text = (
        "# deb http://no.example/ x main\n"
        "deb-src http://no.example/ noble main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://yes.example/ubuntu noble main universe # end\n"
        "deb http://flat.example/repo /\n"
    )
    found = controller.parse_one_line_sources(text)
    assert found[0] == AptSource(
        "http://yes.example/ubuntu", ("noble",), ("main", "universe"), "/k.gpg"
    )
    assert found[1].suites == ("/",)
    assert len(found) == 2


def test_only_the_distribution_itself_is_taken_over() -> None:
    sources = [
        AptSource("http://a/debian", ("bookworm", "bookworm-updates"), ("main", "contrib")),
        AptSource("http://b/vendor", ("stable",), ("main",)),
        AptSource("http://c/vendor", ("/",), ()),
        AptSource("cdrom:[x]/", ("bookworm",), ("main",)),
        AptSource("http://d/debian-security", ("bookworm-security",), ("main",)),
    ]
    kept = controller.distribution_sources(sources, "bookworm")
    assert [s.uri for s in kept] == ["http://a/debian", "http://d/debian-security"]
    assert kept[0].components == ("main",)


def test_sources_are_read_from_both_formats(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb http://one.example/ noble main\n")
    (tmp_path / "sources.list.d/two.sources").write_text(DEB822)
    (tmp_path / "sources.list.d/three.list.disabled").write_text("deb http://no/ noble main\n")
    found = [s.uri for s in controller.read_apt_sources(tmp_path)]
    assert found == [
        "http://one.example/",
        "http://archive.example/debian",
        "https://embedded.example/y",
    ]


def test_a_machine_without_its_own_archive_is_told_so() -> None:
    here = controller.Controller("debian", "bookworm", (), (), (), ())
    with pytest.raises(LabError, match="'bookworm main'"):
        _ = here.base


def test_apt_options_that_decide_how_the_archive_is_reached() -> None:
    dump = (
        'APT::Architecture "amd64";\n'
        'Acquire::Check-Date "false";\n'
        'Acquire::http::Proxy "http://p.example:3128";\n'
        'Acquire::http::Proxy::skip.example "DIRECT";\n'
        'Acquire::https::Proxy "";\n'
        'Acquire::Changelogs::URI "x";\n'
    )
    assert controller.parse_apt_config(dump) == [
        ("Acquire::Check-Date", "false"),
        ("Acquire::http::Proxy", "http://p.example:3128"),
        ("Acquire::http::Proxy::skip.example", "DIRECT"),
    ]


def test_proxies_in_either_case() -> None:
    found = controller.proxies({"HTTP_PROXY": "http://p:1", "no_proxy": "x", "ALL_PROXY": ""})
    assert found == [("http_proxy", "http://p:1"), ("no_proxy", "x")]


def certificate(name: str) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{name}\n-----END CERTIFICATE-----\n"


def test_only_certificates_beyond_the_public_ones_are_carried(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    (public / "a.crt").write_text(certificate("PUBLIC"))
    bundle = tmp_path / "bundle.crt"
    bundle.write_text("# name\n" + certificate("PUBLIC") + certificate("COMPANY"))
    extra = tmp_path / "extra.pem"
    extra.write_text(certificate("COMPANY") + certificate("PROXY"))
    found = controller.local_certificates({"SSL_CERT_FILE": str(extra)}, bundle, public)
    assert found == [certificate("COMPANY"), certificate("PROXY")]


def test_indexes_of_pip_and_uv_without_local_folders(tmp_path: Path) -> None:
    pip = tmp_path / "pip.conf"
    pip.write_text(
        "[global]\nindex-url = https://mirror.example/simple\n"
        "extra-index-url = file:///srv/simple https://second.example/simple\n"
    )
    uv = tmp_path / "uv.toml"
    uv.write_text('[[index]]\nurl = "https://uv.example/simple"\ndefault = true\n')
    found = controller.python_indexes({}, [pip, tmp_path / "absent"])
    assert found.index == "https://mirror.example/simple"
    assert found.extra == ("https://second.example/simple",)
    assert controller.python_indexes({}, [pip, uv]).index == "https://uv.example/simple"
    named = {"UV_DEFAULT_INDEX": "https://env.example/simple"}
    assert controller.python_indexes(named, [pip, uv]).index == "https://env.example/simple"
    uv.write_text("[[index\n")
    assert controller.python_indexes({}, [uv]) == controller.Indexes()


def test_crun_is_not_chosen_for_the_hybrid_cgroup_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller.shutil, "which", lambda program, path=None: f"/bin/{program}")
    assert controller.oci_runtime(tmp_path) == "runc"
    (tmp_path / "cgroup.controllers").touch()
    assert controller.oci_runtime(tmp_path) == "crun"
    monkeypatch.setattr(controller.shutil, "which", lambda program, path=None: None)
    with pytest.raises(LabError, match="'runc'"):
        controller.oci_runtime(tmp_path)


def test_not_root_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller.os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root and runs as user id '1000'"):
        controller.require_root()


def test_no_network_names_the_packages(tmp_path: Path) -> None:
    def runner(*_: object, **__: object) -> str:
        raise LabError("apt-get failed")

    with pytest.raises(LabError, match=r"'podman' could not be installed \(no network\?\)"):
        controller.install_packages(["podman"], tmp_path / "log", runner)


def test_detect_refuses_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller.Path, "read_text", lambda *_, **__: "ID=fedora\n")
    with pytest.raises(LabError, match="this machine is 'fedora'"):
        controller.detect({}, lambda *_, **__: "")
