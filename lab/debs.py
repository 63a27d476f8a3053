"""Build the stub packages that packages.yml describes, with dpkg-deb."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lab.command import Runner, run
from lab.errors import LabError

HERE = Path(__file__).parent
DATA = HERE / "packages.yml"
USERLAND = HERE / "userland"
NVIDIA_MODULES = ("nvidia", "nvidia-modeset", "nvidia-drm", "nvidia-uvm")
RELATIONS = ("Depends", "Recommends", "Provides", "Conflicts", "Replaces", "Breaks")
SCRIPTS = ("preinst", "postinst", "prerm", "postrm")
PYTHON = "#!/usr/bin/python3 -I\n"
# 2026-07-15, in seconds since 1970.
BUILD_DATE = 1784073600
CANONICAL = b"Canonical Ltd. Kernel Module Signing"


@dataclass(frozen=True)
class Package:
    """One package of one version, every placeholder filled in."""

    name: str
    version: str
    archive: str
    component: str
    description: str
    arch: str = "amd64"
    section: str = "misc"
    relations: tuple[tuple[str, str], ...] = ()
    scripts: tuple[tuple[str, str], ...] = ()
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    gone: bool = False

    @property
    def filename(self) -> str:
        """File name of the package: the epoch is left out, as archives do."""
        return f"{self.name}_{self.version.split(':', 1)[-1]}_{self.arch}.deb"

    @property
    def pool(self) -> str:
        """Folder of the package inside its archive."""
        return "." if self.archive == "nvidia" else f"pool/{self.component}"

    def control(self) -> str:
        """Return the package's control file."""
        lines = [
            f"Package: {self.name}",
            f"Version: {self.version}",
            f"Architecture: {self.arch}",
            "Maintainer: vllm-turing lab <lab@vllm-turing.invalid>",
            f"Section: {self.section}",
            "Priority: optional",
            *(f"{name}: {value}" for name, value in self.relations),
            f"Description: {self.description}",
            " Stand-in of the vllm-turing lab: real name and dependencies, no real content.",
        ]
        return "\n".join(lines) + "\n"


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace @name@ by its value; an unknown name is left, so that shell text may hold an @."""
    return re.sub(r"@(\w+)@", lambda m: values.get(m.group(1), m.group(0)), text)


def fill_all(value: Any, values: Mapping[str, str]) -> Any:
    """Fill placeholders in every string of a data structure."""
    if isinstance(value, str):
        return fill(value, values)
    if isinstance(value, dict):
        return {fill(k, values): fill_all(v, values) for k, v in value.items()}
    return value


def expand(data: Mapping[str, Any]) -> Iterator[Package]:
    """Yield every package that the data file describes."""
    constants = {k: str(v) for k, v in data.get("constants", {}).items()}
    for family in data["families"]:
        for entry in family["for"]:
            common = {**constants, **{k: str(v) for k, v in entry.items()}}
            for raw in family["packages"]:
                values = dict(common)
                values.update({k: fill(v, common) for k, v in raw.get("vars", {}).items()})
                item = fill_all({k: v for k, v in raw.items() if k != "vars"}, values)
                yield Package(
                    name=item["name"],
                    version=str(item["version"]),
                    archive=str(entry.get("archive", family["archive"])),
                    component=str(family.get("component", "main")),
                    description=item["description"],
                    arch=item.get("arch", "amd64"),
                    section=item.get("section", "misc"),
                    relations=tuple(
                        (r, " ".join(item[r.lower()].split()))
                        for r in RELATIONS
                        if item.get(r.lower())
                    ),
                    scripts=tuple((s, item[s]) for s in SCRIPTS if item.get(s)),
                    files=item.get("files", {}),
                    values=values,
                    gone=bool(entry.get("gone", False)),
                )


def load(path: Path = DATA) -> list[Package]:
    """Read the data file; raise LabError when the same package file would be built twice."""
    packages = list(expand(yaml.safe_load(path.read_text(encoding="utf-8"))))
    seen: set[tuple[str, str]] = set()
    for package in packages:
        key = (package.archive, package.filename)
        if key in seen:
            raise LabError(f"'{path.name}' describes '{package.filename}' twice in one archive.")
        seen.add(key)
    return packages


def sources_digest(*extra: str) -> str:
    """Digest of everything that decides what the packages contain."""
    total = hashlib.sha256()
    for path in sorted([DATA, Path(__file__), HERE / "archive.py", *USERLAND.iterdir()]):
        if path.is_file():
            total.update(path.name.encode() + b"\0" + path.read_bytes())
    for text in extra:
        total.update(text.encode())
    return total.hexdigest()[:16]


def signature(signer: bytes = CANONICAL) -> bytes:
    """Signature block that the kernel's tools read from the end of a module (raw signer name)."""
    key_id, body = b"\2" * 20, b"\0" * 256
    # struct module_signature: algorithm RSA, hash SHA-512 (6), id type X.509 name (1)
    block = bytes([1, 6, 1, len(signer), len(key_id), 0, 0, 0]) + len(body).to_bytes(4, "big")
    return signer + key_id + body + block + b"~Module signature appended~\n"


class Builder:
    """Builds packages into a folder; compiled parts are made once and shared."""

    def __init__(self, work: Path, nvidia_key: bytes, runner: Runner = run) -> None:
        """Use `work` for compiled parts; `nvidia_key` goes into cuda-keyring."""
        self.work = work
        self.nvidia_key = nvidia_key
        self.runner = runner

    def compile(self, name: str, source: str, *flags: str) -> Path:
        """Compile one C file of the userland, once for each `name`."""
        target = self.work / name
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mktemp(dir=target.parent))
            self.runner(
                ["gcc", "-O2", "-Wall", "-Wextra", *flags, "-o", str(draft), str(USERLAND / source)]
            )
            draft.replace(target)
        return target

    def shim(self) -> Path:
        """Compile the library that is preloaded into every process of a box."""
        return self.compile("shim.so", "shim.c", "-fPIC", "-shared", "-ldl")

    def nvml(self, version: str) -> Path:
        """Compile the stand-in NVML of one driver version."""
        define = f'-DLIBRARY_VERSION="{version}"'
        flags = ("-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1", define)
        return self.compile(f"nvml-{version}.so", "nvml.c", *flags)

    def module(self, name: str, kernel: str, license_: str, version: str = "") -> Path:
        """Compile a stand-in kernel module."""
        flags = [
            "-c",
            f'-DMODULE_NAME="{name.replace("-", "_")}"',
            f'-DMODULE_KERNEL="{kernel}"',
            f'-DMODULE_LICENSE="{license_}"',
        ]
        if version:
            flags.append(f'-DMODULE_VERSION="{version}"')
        if name in NVIDIA_MODULES[1:]:
            flags.append('-DMODULE_DEPENDS="nvidia"')
        key = hashlib.sha256(f"{name} {kernel} {license_} {version}".encode()).hexdigest()[:12]
        return self.compile(f"modules/{name}-{key}.o", "module.c", *flags)

    def place(self, package: Package, root: Path, path: str, what: dict[str, Any]) -> None:
        """Put one file of a package into its tree."""
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        build = what.get("build")
        if "link" in what:
            target.symlink_to(what["link"])
            return
        if "text" in what:
            target.write_text(what["text"], encoding="utf-8")
        elif "source" in what:
            text = fill((USERLAND / what["source"]).read_text(encoding="utf-8"), package.values)
            target.write_text((PYTHON if what.get("python") else "") + text, encoding="utf-8")
        elif build == "shim":
            shutil.copyfile(self.shim(), target)
        elif build == "nvml":
            shutil.copyfile(self.nvml(package.values["u"]), target)
        elif build == "signature":
            target.write_bytes(signature())
        elif build == "key":
            target.write_bytes(self.nvidia_key)
        elif build == "module":
            made = self.module(what["module"], package.values["k"], what["license"])
            target.write_bytes(made.read_bytes() + (signature() if what.get("signed") else b""))
        elif build == "modules":
            target.mkdir()
            for name in NVIDIA_MODULES:
                made = self.module(name, what["kernel"], what["license"], package.values["u"])
                placed = target / f"{name}{what.get('suffix', '.ko')}"
                shutil.copyfile(made, placed)
                placed.chmod(0o644)
            return
        else:
            raise LabError(f"'{path}' of package '{package.name}' has no known content: {what}.")
        target.chmod(int(str(what.get("mode", "0755" if what.get("python") else "0644")), 8))

    def build(self, package: Package, archive: Path) -> Path:
        """Build one package file below `archive` and return its path."""
        target = archive / package.archive / package.pool / package.filename
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            root = Path(folder) / "root"
            control = root / "DEBIAN"
            control.mkdir(parents=True)
            root.chmod(0o755)
            for path, what in package.files.items():
                self.place(package, root, path, what)
            (control / "control").write_text(package.control(), encoding="utf-8")
            for name, text in package.scripts:
                script = control / name
                script.write_text(f"#!/bin/sh\nset -e\n{text.strip()}\n", encoding="utf-8")
                script.chmod(0o755)
            options = ["--root-owner-group", "-Zgzip", "-z1"]
            # One date for all: a package that did not change is the same bytes in every build.
            self.runner(
                ["dpkg-deb", *options, "--build", str(root), str(target)],
                env={"SOURCE_DATE_EPOCH": str(BUILD_DATE)},
            )
        return target

    def build_all(self, packages: list[Package], archive: Path) -> None:
        """Build all packages, two at a time."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(lambda p: self.build(p, archive), packages))
