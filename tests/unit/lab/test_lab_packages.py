"""The stub packages: the data file holds together, and a package built from it is a real one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lab import archive, debs
from lab.errors import LabError
from lab.userland import dkms, lab_kernel, update_initramfs

# Names that the box's own distribution brings.
FROM_DISTRIBUTION = {"kmod", "python3", "adduser", "build-essential"}


@pytest.fixture(scope="module")
def packages() -> list[debs.Package]:
    return debs.load()


def relation_names(text: str) -> list[list[str]]:
    return [
        [re.split(r"[\s(]", option.strip(), maxsplit=1)[0] for option in group.split("|")]
        for group in text.split(",")
    ]


def test_every_placeholder_is_filled(packages: list[debs.Package]) -> None:
    for package in packages:
        assert not re.search(r"@\w+@", package.control()), package.name
        for path in package.files:
            assert "@" not in path, (package.name, path)


def test_every_dependency_can_be_had(packages: list[debs.Package]) -> None:
    names = {p.name for p in packages} | FROM_DISTRIBUTION
    for package in packages:
        for relation, text in package.relations:
            if relation == "Provides":
                names.update(options[0] for options in relation_names(text))
    for package in packages:
        for relation, text in package.relations:
            if relation == "Depends":
                for options in relation_names(text):
                    assert names.intersection(options), (package.name, options)


def test_exact_dependencies_point_at_a_version_that_exists(packages: list[debs.Package]) -> None:
    known = {(p.name, p.version) for p in packages}
    checked = 0
    for package in packages:
        for relation, text in package.relations:
            if relation != "Depends":
                continue
            for name, version in re.findall(r"([\w.+-]+) \(= ([^)]+)\)", text):
                assert (name, version) in known, (package.name, name, version)
                checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("archive_name", "name", "version"),
    [
        ("ubuntu", "nvidia-driver-580", "580.159.03-0ubuntu0.24.04.1"),
        ("ubuntu", "nvidia-driver-580-open", "580.173.02-0ubuntu0.24.04.1"),
        ("ubuntu", "nvidia-driver-580-server", "580.159.03-0ubuntu0.24.04.1"),
        ("ubuntu", "linux-modules-nvidia-580-6.17.0-29-generic", "6.17.0-29.29~24.04.1"),
        ("ubuntu", "linux-image-6.17.0-35-generic", "6.17.0-35.35~24.04.1"),
        ("ubuntu", "libnvidia-ml-dev", "12.0.140~12.0.1-4build4"),
        ("nvidia", "nvidia-driver-580", "580.159.04-1ubuntu1"),
        ("nvidia", "cuda-toolkit-12-9", "12.9.1-1"),
        ("nvidia", "cuda-toolkit-13-0", "13.0.2-1"),
        ("nvidia", "cuda-keyring", "1.1-1"),
    ],
)
def test_the_packages_of_a_real_host_are_there(
    packages: list[debs.Package], archive_name: str, name: str, version: str
) -> None:
    assert (archive_name, name, version) in {(p.archive, p.name, p.version) for p in packages}


def test_driver_packages_of_one_kind_exclude_each_other(packages: list[debs.Package]) -> None:
    for name in ("libnvidia-compute-580", "libnvidia-compute-595", "nvidia-driver-580-open"):
        relations = dict(next(p for p in packages if p.name == name).relations)
        kind = "nvidia-driver-binary" if "driver" in name else "libnvidia-compute"
        assert kind in relations["Conflicts"]
        assert kind in relations["Provides"]


def test_the_same_file_twice_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "twice.yml"
    data.write_text(
        "families:\n  - archive: ubuntu\n    for: [{V: '1'}, {V: '1'}]\n    packages:\n"
        "      - {name: x, version: '@V@', description: d}\n"
    )
    with pytest.raises(LabError, match=r"'x_1_amd64.deb' twice"):
        debs.load(data)


def test_unknown_placeholders_stay_so_that_shell_text_survives() -> None:
    assert debs.fill('a "$@" @x@ @y@', {"x": "1"}) == 'a "$@" 1 @y@'


needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, ("dpkg-deb", "gcc"))), reason="needs dpkg-deb and gcc"
)


@needs_tools
def test_a_built_package_holds_what_the_data_says(
    packages: list[debs.Package], tmp_path: Path
) -> None:
    package = next(
        p for p in packages if p.name == "libnvidia-compute-580" and p.values["u"] == "580.159.03"
    )
    built = debs.Builder(tmp_path / "work", b"").build
    (tmp_path / "work").mkdir()
    path = built(package, tmp_path)
    again = path.read_bytes()
    built(package, tmp_path)
    assert path.read_bytes() == again, "a build is reproducible"
    fields = subprocess.run(
        ["dpkg-deb", "--field", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert "Version: 580.159.03-0ubuntu0.24.04.1\n" in fields
    listing = subprocess.run(
        ["dpkg-deb", "--contents", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert "root/root" in listing
    assert "libnvidia-ml.so.1 -> libnvidia-ml.so.580.159.03" in listing


@needs_tools
def test_a_stand_in_module_is_read_by_its_information(tmp_path: Path) -> None:
    made = debs.Builder(tmp_path, b"").module(
        "nvidia-uvm", "6.17.0-29-generic", "Dual MIT/GPL", "580.159.03"
    )
    plain = tmp_path / "nvidia-uvm.ko"
    plain.write_bytes(made.read_bytes())
    info = lab_kernel.module_info(plain)
    assert (info["version"], info["license"], info["signer"]) == ("580.159.03", "Dual MIT/GPL", "")
    plain.write_bytes(made.read_bytes() + debs.signature())
    assert lab_kernel.module_info(plain)["signer"] == "canonical"
    plain.write_bytes(made.read_bytes() + dkms.signature(dkms.OWNER))
    assert lab_kernel.module_info(plain)["signer"] == "owner"


def test_what_has_left_the_real_archive_is_left_out() -> None:
    index = "Package: a\nFilename: pool/main/a_1.deb\n\nPackage: b\nFilename: pool/main/b_1.deb\n"
    assert archive.filter_gone(index, set()) == index
    assert "Package: a" not in archive.filter_gone(index, {"a_1.deb"})
    assert "Package: b" in archive.filter_gone(index, {"a_1.deb"})


def test_the_reference_driver_is_among_the_gone(packages: list[debs.Package]) -> None:
    gone = {p.name for p in packages if p.gone}
    left = {(p.name, p.version) for p in packages if not p.gone}
    assert "nvidia-driver-580" in gone
    assert ("nvidia-driver-580", "580.173.02-0ubuntu0.24.04.1") in left
    assert ("nvidia-driver-580", "580.159.03-0ubuntu0.24.04.1") not in left


def test_kernels_are_ordered_by_number(tmp_path: Path) -> None:
    for name in ("6.17.0-9-generic", "6.17.0-29-generic", "6.8.0-110-generic"):
        (tmp_path / f"vmlinuz-{name}").touch()
    assert lab_kernel.newest_kernel(tmp_path) == "6.17.0-29-generic"
    assert lab_kernel.newest_kernel(tmp_path / "absent") == ""


def test_an_initramfs_is_a_cpio_archive_that_lists_its_files() -> None:
    data = update_initramfs.cpio_entry("lib/modprobe.d/x.conf", b"blacklist nouveau\n")
    data += update_initramfs.cpio_entry("a", b"12345")
    data += update_initramfs.cpio_entry("TRAILER!!!", b"", 0)
    assert update_initramfs.entries(data) == ["lib/modprobe.d/x.conf", "a"]
    if shutil.which("cpio"):
        listed = subprocess.run(["cpio", "-it"], input=data, capture_output=True, check=True)
        assert listed.stdout.split() == [b"lib/modprobe.d/x.conf", b"a"]


def test_nouveau_stays_out_of_the_initramfs_once_it_is_blacklisted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "modules/6.17/kernel/drivers/nouveau.ko"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"x")
    conf = tmp_path / "modprobe.d"
    conf.mkdir()
    monkeypatch.setattr(update_initramfs, "MODULES", tmp_path / "modules")
    monkeypatch.setattr(update_initramfs, "MODPROBE_DIRS", (str(conf),))
    assert any("nouveau.ko" in n for n in update_initramfs.entries(update_initramfs.build("6.17")))
    (conf / "a.conf").write_text("# blacklist nouveau\n")
    assert any("nouveau.ko" in n for n in update_initramfs.entries(update_initramfs.build("6.17")))
    (conf / "b.conf").write_text("blacklist nouveau\n")
    names = update_initramfs.entries(update_initramfs.build("6.17"))
    assert not any("nouveau.ko" in n for n in names)


def test_the_configuration_space_names_the_card_and_its_link() -> None:
    data = lab_kernel.config_space(lab_kernel.hardware.CARDS[0])
    assert len(data) == 256
    assert data[:4] == bytes.fromhex("de10071e")
    assert data[0x0A:0x0C] == bytes.fromhex("0003")
    assert data[data[0x34]] == 0x10
