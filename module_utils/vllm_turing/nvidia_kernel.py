"""Kernels, their NVIDIA modules, and what decides whether one will load after a boot.

Everything is read from files where a file says it; commands are used only where none does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from . import deb_version
from .run import Runner, run

#: Where a module may lie below /lib/modules/KERNEL, in the order in which depmod prefers it.
_MODULE_PLACES = (
    "updates/dkms/nvidia.ko*",
    "updates/nvidia.ko*",
    "extra/nvidia.ko*",
    "kernel/nvidia-*/nvidia.ko*",
    "kernel/drivers/video/nvidia.ko*",
    "kernel/drivers/char/drm/nvidia.ko*",
)
_EFI_SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_DKMS = re.compile(
    r"^(?P<name>nvidia[\w-]*)(?:/|, )(?P<version>[\d.]+)(?:, (?P<kernel>[^,:]+))?"
    r"(?:, (?P<arch>[^,:]+))?: (?P<state>[\w-]+)"
)
MOK_PATHS = ("var/lib/shim-signed/mok/MOK.der", "var/lib/dkms/mok.pub")


@dataclass(frozen=True)
class DkmsEntry:
    """One line of ``dkms status``.

    :ivar kernel: ``""`` for a source that is merely added
    """

    version: str
    kernel: str
    state: str


def parse_dkms(text: str) -> list[DkmsEntry]:
    """Parse ``dkms status``: ``nvidia/VER, KERNEL, …`` and the older ``nvidia, VER, KERNEL, …``."""
    entries = []
    for line in text.splitlines():
        match = _DKMS.match(line.strip())
        if match:
            entries.append(DkmsEntry(match["version"], match["kernel"] or "", match["state"]))
    return entries


@dataclass(frozen=True)
class Module:
    """An NVIDIA kernel module on disk.

    :ivar signer: who signed it, ``""`` for an unsigned one
    :ivar license: ``NVIDIA`` for the proprietary module, ``Dual MIT/GPL`` for the open one
    """

    path: str
    version: str
    license: str = ""
    signer: str = ""

    @property
    def dkms(self) -> bool:
        """Whether it was built on this host."""
        return "/updates/" in self.path or "/extra/" in self.path


def module_for(kernel: str, runner: Runner = run, root: Path = Path("/")) -> Module | None:
    """Find the module that a kernel would load, and read what it says of itself."""
    folder = root / "lib/modules" / kernel
    for place in _MODULE_PLACES:
        found = sorted(folder.glob(place))
        if found:
            result = runner(["modinfo", str(found[0])])
            fields: dict[str, str] = {}
            for line in result.stdout.splitlines():
                key, colon, value = line.partition(":")
                if colon:
                    fields.setdefault(key.strip(), value.strip())
            return Module(
                str(found[0]),
                fields.get("version", ""),
                fields.get("license", ""),
                fields.get("signer", ""),
            )
    return None


def installed_kernels(root: Path = Path("/")) -> list[str]:
    """Return the kernels with an image in /boot, newest first."""
    names = [path.name.removeprefix("vmlinuz-") for path in (root / "boot").glob("vmlinuz-*")]
    names = [name for name in names if name != "old" and not name.endswith((".old", ".dpkg-bak"))]
    return sorted(names, key=deb_version.key, reverse=True)


def next_kernels(kernels: list[str], root: Path = Path("/")) -> list[str]:
    """Tell which kernel boots next, by GRUB's own configuration.

    ``GRUB_DEFAULT=0`` (or none) is the newest. A default or a saved entry that names an installed
    kernel is that one. Otherwise any may boot, and all are returned.
    """
    if not kernels:
        return []
    default = "0"
    files = [root / "etc/default/grub", *sorted((root / "etc/default/grub.d").glob("*.cfg"))]
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for match in re.finditer(r"^\s*GRUB_DEFAULT=(['\"]?)(.*?)\1\s*$", text, re.MULTILINE):
            default = match.group(2)
    entry = default
    try:
        environment = (root / "boot/grub/grubenv").read_text(encoding="utf-8", errors="replace")
    except OSError:
        environment = ""
    once = re.search(r"^next_entry=(.+)$", environment, re.MULTILINE)
    saved = re.search(r"^saved_entry=(.+)$", environment, re.MULTILINE)
    if once:
        entry = once.group(1).strip()
    elif default == "saved":
        entry = saved.group(1).strip() if saved else "0"
    if entry in ("0", ""):
        return [kernels[0]]
    named = [kernel for kernel in kernels if re.search(rf"(?<![\w.]){re.escape(kernel)}$", entry)]
    return named or kernels


def loaded_version(root: Path = Path("/")) -> str | None:
    """Return the version of the loaded module from /proc/driver/nvidia/version."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", text)
    return match.group(1) if match else None


def loaded_open(root: Path = Path("/")) -> bool:
    """Whether the loaded module is the open one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "Open Kernel Module" in text


def nouveau_loaded(runner: Runner = run) -> bool:
    """Whether nouveau is loaded."""
    result = runner(["lsmod"])
    return any(line.split()[:1] == ["nouveau"] for line in result.stdout.splitlines())


def library_version(root: Path = Path("/")) -> str | None:
    """Return the version of the NVML library on disk, from the file that the soname names."""
    for folder in ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib"):
        link = root / folder / "libnvidia-ml.so.1"
        try:
            target = link.resolve(strict=True).name
        except OSError:
            continue
        match = re.search(r"\.so\.(\d+\.\d[\d.]*)$", target)
        if match:
            return match.group(1)
    return None


@dataclass(frozen=True)
class SecureBoot:
    """Whether the firmware refuses unsigned modules.

    :ivar state: ``enabled``, ``disabled``, ``unsupported`` (no EFI) or ``unknown``
    :ivar key_enrolled: whether this host's own module key is enrolled; ``None`` when unknown
    """

    state: str
    key_enrolled: bool | None = None


def secure_boot(runner: Runner = run, root: Path = Path("/")) -> SecureBoot:
    """Ask mokutil, else the EFI variable itself (its fifth byte)."""
    result = runner(["mokutil", "--sb-state"])
    text = (result.stdout + result.stderr).lower()
    state = "unknown"
    if "secureboot enabled" in text:
        state = "enabled"
    elif "secureboot disabled" in text:
        state = "disabled"
    elif "efi variables are not supported" in text or not (root / "sys/firmware/efi").is_dir():
        state = "unsupported"
    else:
        try:
            data = (root / _EFI_SECURE_BOOT).read_bytes()
            state = "enabled" if data[4:5] == b"\x01" else "disabled"
        except OSError:
            state = "unknown"
    if state != "enabled":
        return SecureBoot(state)
    for name in MOK_PATHS:
        if (root / name).is_file():
            answer = runner(["mokutil", "--test-key", str(root / name)])
            words = answer.stdout + answer.stderr
            if answer.error:
                return SecureBoot(state)
            return SecureBoot(state, "already enrolled" in words or "is enrolled" in words)
    return SecureBoot(state, False)


@dataclass(frozen=True)
class Initramfs:
    """One initramfs against the files it is made from.

    :ivar stale: names of modprobe files that are newer than it
    :ivar nouveau: whether it can load nouveau before the blacklist is read; ``None`` when not
        looked at
    """

    kernel: str
    path: str
    exists: bool
    stale: tuple[str, ...] = ()
    nouveau: bool | None = None


def initramfs(
    kernel: str, runner: Runner = run, root: Path = Path("/"), *, look_inside: bool = False
) -> Initramfs:
    """Compare a kernel's initramfs with /etc/modprobe.d, and on demand look for nouveau in it.

    :param look_inside: list its content (about a second)
    """
    path = root / "boot" / f"initrd.img-{kernel}"
    shown = f"/boot/initrd.img-{kernel}"
    if not path.is_file():
        return Initramfs(kernel, shown, False)
    made = path.stat().st_mtime
    stale = tuple(
        f"/etc/modprobe.d/{conf.name}"
        for conf in sorted((root / "etc/modprobe.d").glob("*.conf"))
        if conf.is_file() and conf.stat().st_mtime > made and _about_gpu(conf)
    )
    nouveau: bool | None = None
    if look_inside:
        result = runner(["lsinitramfs", str(path)], timeout=120)
        if result.ok:
            names = result.stdout.split()
            has_module = any(re.search(r"/nouveau\.ko(\.\w+)?$", name) for name in names)
            ours = {conf.name for conf in blacklists(root)}
            has_blacklist = any(
                re.search(r"etc/modprobe\.d/", name) and name.rsplit("/", 1)[-1] in ours
                for name in names
            )
            nouveau = has_module and not has_blacklist
    return Initramfs(kernel, shown, True, stale, nouveau)


def _about_gpu(conf: Path) -> bool:
    """Whether a modprobe file speaks of nouveau or nvidia."""
    try:
        return bool(re.search(r"\b(nouveau|nvidia)", conf.read_text(errors="replace")))
    except OSError:
        return False


def blacklists(root: Path = Path("/")) -> list[Path]:
    """Return the modprobe files that blacklist nouveau."""
    found = []
    for folder in ("etc/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d"):
        for conf in sorted((root / folder).glob("*.conf")):
            try:
                text = conf.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if re.search(r"^\s*blacklist\s+nouveau\b", text, re.MULTILINE):
                found.append(conf)
    return found


@dataclass(frozen=True)
class RunInstaller:
    """Traces of a driver that NVIDIA's .run installer put beside dpkg."""

    version: str
    traces: tuple[str, ...] = field(default_factory=tuple)


def run_installer(
    owned_upstreams: Iterable[str], runner: Runner = run, root: Path = Path("/")
) -> RunInstaller | None:
    """Find a driver that the .run installer put on the host.

    :param owned_upstreams: driver versions that dpkg packages bring
    """
    owned = set(owned_upstreams)
    traces = []
    version = ""
    library = library_version(root)
    if (root / "usr/bin/nvidia-uninstall").exists():
        traces.append("/usr/bin/nvidia-uninstall")
    if library and library not in owned:
        traces.append(f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{library} belongs to no package")
        version = library
    if not traces:
        return None
    for entry in parse_dkms(runner(["dkms", "status"]).stdout):
        if entry.version not in owned:
            traces.append(f"dkms nvidia/{entry.version} belongs to no package")
            version = version or entry.version
    return RunInstaller(version or "of unknown version", tuple(dict.fromkeys(traces)))


def headers_present(kernel: str, root: Path = Path("/")) -> bool:
    """Whether a module can be built for a kernel: its build folder exists."""
    return (root / "lib/modules" / kernel / "build").exists()


def build_log(version: str, root: Path = Path("/")) -> str | None:
    """Return the path of a DKMS build log that ends in an error."""
    for path in sorted((root / "var/lib/dkms/nvidia").glob(f"{version}/**/make.log")):
        try:
            tail = path.read_text(encoding="utf-8", errors="replace")[-4000:]
        except OSError:
            continue
        if "error" in tail.lower():
            return "/" + str(path.relative_to(root))
    return None


@dataclass(frozen=True)
class AptEvent:
    """The transaction of apt's history that last changed a package."""

    date: str
    command: str
    old: str
    new: str


def last_change(package: str, history: str) -> AptEvent | None:
    """Find in apt's history.log who last upgraded a package.

    :param package: name without architecture
    :param history: content of /var/log/apt/history.log
    """
    found = None
    for block in re.split(r"\n\s*\n", history):
        match = re.search(
            rf"^(?:Upgrade|Install|Downgrade):.*?\b{re.escape(package)}(?::\w+)? \(([^)]*)\)",
            block,
            re.MULTILINE,
        )
        if not match:
            continue
        versions = [v.strip() for v in match.group(1).split(",")]
        old, new = (versions[0], versions[-1]) if len(versions) > 1 else ("", versions[0])
        if new == "automatic":
            old, new = "", versions[0]
        command = re.search(r"^Commandline: (.*)$", block, re.MULTILINE)
        date = re.search(r"^Start-Date: (.*)$", block, re.MULTILINE)
        found = AptEvent(
            date.group(1).strip() if date else "",
            command.group(1).strip() if command else "unknown",
            old,
            new,
        )
    return found
