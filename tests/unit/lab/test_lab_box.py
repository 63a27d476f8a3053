"""Image, state and mirror of the lab: the parts that need no container."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lab import __main__ as command_line
from lab import image, mirrors, ubuntu
from lab.controller import AptSource, Controller, Indexes, parse_os_release
from lab.errors import LabError
from lab.host import Lab
from lab.state import State, read_json, write_json

PLAIN = Controller(
    "debian", "bookworm", (AptSource("http://a/debian", ("bookworm",), ("main",)),), (), (), ()
)


def test_the_box_says_it_is_ubuntu_24_04() -> None:
    files = ubuntu.presentation()
    release = parse_os_release(files["/usr/lib/os-release"])
    assert (release["ID"], release["VERSION_ID"], release["VERSION_CODENAME"]) == (
        "ubuntu",
        "24.04",
        "noble",
    )
    assert "DISTRIB_RELEASE=24.04" in files["/etc/lsb-release"]


def test_a_plain_controller_leaves_the_box_plain() -> None:
    assert image.environment_lines(PLAIN) == [
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    ]
    assert image.pip_conf(PLAIN) == "[global]\n"
    assert image.uv_toml(PLAIN) == ""


def test_proxies_certificates_and_indexes_are_carried_over() -> None:
    here = replace(
        PLAIN,
        proxies=(("http_proxy", "http://p:1"),),
        certificates=("x",),
        indexes=Indexes("https://i/simple", ("https://e/simple",)),
    )
    lines = image.environment_lines(here)
    assert "http_proxy=http://p:1" in lines
    assert "HTTP_PROXY=http://p:1" in lines
    assert "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt" in lines
    assert "index-url = https://i/simple" in image.pip_conf(here)
    assert 'index-url = "https://i/simple"' in image.uv_toml(here)
    assert "native-tls = true" in image.uv_toml(here)


def test_digests_follow_what_goes_in() -> None:
    moved = replace(PLAIN, sources=(AptSource("http://b/debian", ("bookworm",), ("main",)),))
    proxied = replace(PLAIN, proxies=(("http_proxy", "http://p:1"),))
    assert image.base_digest(PLAIN) == image.base_digest(proxied)
    assert image.base_digest(PLAIN) != image.base_digest(moved)
    assert image.box_digest(PLAIN, "1") != image.box_digest(proxied, "1")
    assert image.box_digest(PLAIN, "1") != image.box_digest(PLAIN, "2")


def test_no_network_is_one_sentence(tmp_path: Path) -> None:
    def runner(argv: list[str], **_: object) -> str:
        raise LabError("debootstrap failed")

    keyring = tmp_path / "key.gpg"
    keyring.touch()
    here = replace(
        PLAIN, sources=(AptSource("http://a/debian", ("bookworm",), ("main",), str(keyring)),)
    )
    limits = image.Limits(1024, 1024)
    with pytest.raises(
        LabError, match=r"could not be built from 'http://a/debian' \(no network\?\)"
    ):
        image.build_base(State(tmp_path), here, "runc", limits, print, runner)


@pytest.mark.parametrize("name", ["", "Upper", "../x", "a b", "-x", "x" * 40])
def test_a_name_that_is_no_host_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LabError, match="not usable"):
        Lab(name, tmp_path)


def test_two_state_folders_have_different_containers(tmp_path: Path) -> None:
    assert Lab("lab", tmp_path / "a").container != Lab("lab", tmp_path / "b").container


def test_a_host_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no lab host 'lab'; start it"):
        Lab("lab", tmp_path).ssh_command("true")


def test_host_key_checking_stays_on(tmp_path: Path) -> None:
    lab = Lab("lab", tmp_path)
    write_json(
        lab.connection_file,
        {"host": "127.0.0.1", "port": 1, "user": "admin", "private_key": "k", "known_hosts": "n"},
    )
    argv = lab.ssh_command("true")
    assert "StrictHostKeyChecking=yes" in argv
    assert "UserKnownHostsFile=n" in argv


def test_json_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "x" / "y.json"
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["y.json"]
    path.write_text("[1]")
    assert read_json(path) == {}
    path.write_text("{")
    assert read_json(path) == {}


@pytest.fixture
def apt(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    root = tmp_path / "apt" / "abc"
    for name, text in {
        "ubuntu/dists/noble-updates/InRelease": "full",
        "ubuntu/dists-current/noble-updates/InRelease": "current",
        "ubuntu/pool/main/x.deb": "deb",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "apt" / "current").symlink_to("abc")
    (tmp_path / "secret").write_text("secret")
    part = mirrors.AptHandler(tmp_path)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert part.handle(self, self.path)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield tmp_path, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


def test_the_archive_is_served_and_can_lose_its_old_versions(apt: tuple[Path, str]) -> None:
    folder, url = apt
    release = f"{url}/apt/ubuntu/dists/noble-updates/InRelease"
    assert get(f"{url}/apt/ubuntu/pool/main/x.deb") == "deb"
    assert get(release) == "full"
    mirrors.set_option(State(folder), "archive", "current")
    assert get(release) == "current"
    mirrors.set_option(State(folder), "archive", "full")
    assert get(release) == "full"


def test_the_archive_can_be_switched_off(apt: tuple[Path, str]) -> None:
    folder, url = apt
    mirrors.set_option(State(folder), "apt", "down")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(f"{url}/apt/ubuntu/pool/main/x.deb")


@pytest.mark.parametrize("path", ["/apt/nothing", "/apt/../../secret", "/apt/%2e%2e/%2e%2e/secret"])
def test_nothing_outside_the_archive_is_served(apt: tuple[Path, str], path: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(apt[1] + path)


def test_an_unknown_mirror_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"archive=full\|current"):
        mirrors.set_option(State(tmp_path), "archive", "old")


def test_a_taken_port_is_found_and_another_chosen() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_address[1]
        assert not mirrors.port_free(port)
        assert mirrors.free_port(port) > port


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_address[1]
        with pytest.raises(LabError, match=f"The port '{port}' is taken"):
            Lab("lab", tmp_path).choose_port(port, asked=True)
        assert Lab("lab", tmp_path).choose_port(port, asked=False) != port


def test_the_command_line_turns_an_error_into_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_TURING_LAB_DIR", str(tmp_path))
    assert command_line.main(["shell", "--name", "nobody"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("lab: There is no lab host 'nobody'")
    assert command_line.main(["fault", "--name", "nobody", "set", "bogus"]) == 1
    assert "There is no fault 'bogus'" in capsys.readouterr().err
