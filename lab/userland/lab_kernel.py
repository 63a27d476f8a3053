"""The simulated kernel: decides at boot what is loaded, and shows it where the real one would.

Verbs: 'boot' (run before systemd, as the first program of the container), 'apply' (after a fault
switch), 'modprobe' and 'rmmod' (in place of kmod's, which would ask the controller's kernel).
What is decided comes from the packages in the box alone: which kernel is the newest in /boot, what
its initramfs holds, which module files lie below /lib/modules.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import uuid
from pathlib import Path

from lab.userland import hardware
from lab.userland.hardware import Card

INIT = "/sbin/init"
NVIDIA_MODULES = ("nvidia", "nvidia-modeset", "nvidia-drm", "nvidia-uvm")
SIZES = {"nvidia": 104165376, "nvidia_modeset": 1830912, "nvidia_drm": 135168}
SIZES.update({"nvidia_uvm": 2121728, "nouveau": 3096576})
USED_BY = {"nvidia": "nvidia_uvm,nvidia_modeset", "nvidia_modeset": "nvidia_drm"}
BLACKLIST = re.compile(r"^\s*(?:blacklist\s+nouveau|install\s+nouveau\s+/bin/(?:false|true))", re.M)
MODPROBE_DIRS = (
    "/etc/modprobe.d",
    "/run/modprobe.d",
    "/usr/local/lib/modprobe.d",
    "/lib/modprobe.d",
)
SECURE_BOOT_VARIABLE = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
ROOT_UUID = "0f3c2a57-2080-4a11-8e1d-7500000000aa"
SIGNATURE_MAGIC = b"~Module signature appended~\n"
ENROLLED = Path("/var/lib/shim-signed/mok/enrolled")


def version_key(text: str) -> tuple[tuple[int, str], ...]:
    """Order kernel releases as GRUB does: numbers by value."""
    return tuple((int(p), "") if p.isdigit() else (-1, p) for p in re.findall(r"\d+|[a-z]+", text))


def newest_kernel(boot: Path = Path("/boot")) -> str:
    """Release of the newest kernel in /boot; empty when there is none."""
    found = [p.name.removeprefix("vmlinuz-") for p in boot.glob("vmlinuz-*")]
    return max(found, key=version_key, default="")


def initramfs_text(release: str, boot: Path = Path("/boot")) -> str:
    """Content of the kernel's initramfs as text; empty when it is missing."""
    path = boot / f"initrd.img-{release}"
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("latin-1")
    except (OSError, gzip.BadGzipFile, EOFError):
        return ""


def blacklisted(directories: tuple[str, ...] = MODPROBE_DIRS) -> bool:
    """Return whether a modprobe file of the root file system keeps nouveau away."""
    for directory in directories:
        for path in sorted(Path(directory).glob("*.conf")):
            if BLACKLIST.search(path.read_text(encoding="utf-8", errors="replace")):
                return True
    return False


def module_files(release: str, name: str) -> list[Path]:
    """Files of a module in depmod's order of preference: updates/dkms shadows the others."""
    root = Path("/lib/modules") / release
    return [*root.glob(f"updates/**/{name}.ko"), *root.glob(f"kernel/**/{name}.ko")]


def module_info(path: Path) -> dict[str, str]:
    """Version, license and signature of a module file."""
    data = path.read_bytes()
    found = {"path": str(path)}
    for tag in ("version", "license"):
        match = re.search(rb"(?:^|\0)" + tag.encode() + rb"=([^\0]*)", data)
        found[tag] = match.group(1).decode() if match else ""
    signed = data.endswith(SIGNATURE_MAGIC)
    found["signer"] = "canonical" if signed and b"Canonical Ltd." in data else ""
    if signed and not found["signer"]:
        found["signer"] = "owner"
    return found


def secure_boot() -> bool:
    """Return whether the simulated firmware has Secure Boot on."""
    return hardware.fault() == "secure-boot"


def may_load(info: dict[str, str]) -> bool:
    """Return whether the simulated kernel accepts the module's signature."""
    if not secure_boot() or info["signer"] == "canonical":
        return True
    return info["signer"] == "owner" and ENROLLED.exists()


def log(lines: list[str]) -> None:
    """Append to the simulated kernel's log."""
    hardware.RUN_DIR.mkdir(parents=True, exist_ok=True)
    with (hardware.RUN_DIR / "dmesg").open("a", encoding="utf-8") as sink:
        for line in lines:
            sink.write(f"[{time.clock_gettime(time.CLOCK_BOOTTIME):12.6f}] {line}\n")


def decide(release: str) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the modules that the boot loads and what the kernel log says about it."""
    messages = [f"Linux version {release} (buildd@lab) #29~24.04.1-Ubuntu SMP PREEMPT_DYNAMIC"]
    early = initramfs_text(release)
    in_early = "nouveau.ko" in early and not BLACKLIST.search(early)
    forced = hardware.fault() == "nouveau"
    nouveau = module_files(release, "nouveau")
    if nouveau and (forced or in_early or not blacklisted()):
        messages.append("nouveau 0000:0a:00.0: NVIDIA TU102 (162000a1)")
        if module_files(release, "nvidia"):
            count = len(hardware.pci_cards())
            messages.append(f"NVRM: The NVIDIA probe routine was not called for {count} device(s).")
        return {"nouveau": module_info(nouveau[0])}, messages
    found = module_files(release, "nvidia")
    if not found:
        return {}, messages
    info = module_info(found[0])
    if not may_load(info):
        messages.append("Loading of module with unavailable key is rejected")
        return {}, messages
    return load_set(release, info, messages), messages


def load_set(release: str, info: dict[str, str], messages: list[str]) -> dict[str, dict[str, str]]:
    """Return the nvidia modules that belong to `info` and write the kernel's lines about them."""
    loaded = {}
    for name in NVIDIA_MODULES:
        files = module_files(release, name)
        if files:
            loaded[name.replace("-", "_")] = module_info(files[0])
    loaded["nvidia"] = info
    messages.append(f"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  {info['version']}")
    if hardware.fault() == "gpu-off-bus":
        messages.append("NVRM: Xid (PCI:0000:0b:00): 79, GPU has fallen off the bus.")
    return loaded


def config_space(card: Card) -> bytes:
    """PCI configuration space of a card: header and a PCI Express capability, 256 bytes."""
    data = bytearray(256)

    def put(offset: int, size: int, value: int) -> None:
        data[offset : offset + size] = value.to_bytes(size, "little")

    put(0x00, 2, 0x10DE)
    put(0x02, 2, card.pci_device)
    put(0x04, 2, 0x0407)
    put(0x06, 2, 0x0010)
    put(0x08, 1, 0xA1)
    put(0x0A, 2, 0x0300)
    put(0x2C, 2, 0x10DE)
    put(0x2E, 2, 0x12A4)
    put(0x34, 1, 0x78)
    # PCI Express capability: legacy endpoint, 8 GT/s x16 possible, x8 in use.
    put(0x78, 1, 0x10)
    put(0x7A, 2, 0x0012)
    put(0x84, 4, 3 | 16 << 4)
    put(0x8A, 2, 3 | 8 << 4)
    return bytes(data)


def tmpfs(path: Path) -> bool:
    """Put an empty tmpfs over a kernel folder, emptied if it is ours already."""
    if not path.is_dir():
        return False
    marker = path / ".vllm-turing-lab"
    if marker.exists():
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
        return True
    subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "mode=755", "vllm-turing-lab", str(path)], check=True
    )
    marker.touch()
    return True


def bind(source: Path, target: str) -> None:
    """Show our file in place of one of the kernel's, once."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    if Path(target).exists() and f" {target} " not in mounts:
        subprocess.run(["/bin/mount", "--bind", str(source), target], check=True)


def put(path: Path, text: str) -> None:
    """Write a file below a simulated kernel folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def show_pci(modules: dict[str, dict[str, str]]) -> None:
    """Write /sys/bus/pci/devices and /sys/module as the kernel would show them."""
    devices, module_dir = Path("/sys/bus/pci/devices"), Path("/sys/module")
    drivers = Path("/sys/bus/pci/drivers")
    driver = "nvidia" if "nvidia" in modules else "nouveau" if "nouveau" in modules else ""
    if tmpfs(drivers) and driver:
        (drivers / driver).mkdir()
    if tmpfs(devices):
        for card in hardware.pci_cards():
            folder = devices / card.short_bus_id
            folder.mkdir()
            (folder / "config").write_bytes(config_space(card))
            known = f"v000010DEd0000{card.pci_device:04X}sv000010DEsd000012A4bc03sc00i00"
            no_range = " ".join(["0x0000000000000000"] * 3)
            for name, value in {
                "vendor": "0x10de",
                "device": f"0x{card.pci_device:04x}",
                "subsystem_vendor": "0x10de",
                "subsystem_device": "0x12a4",
                "class": "0x030000",
                "revision": "0xa1",
                "irq": "80",
                "boot_vga": "1" if card.display else "0",
                "current_link_speed": "8.0 GT/s PCIe",
                "current_link_width": "8",
                "max_link_speed": "8.0 GT/s PCIe",
                "max_link_width": "16",
                "numa_node": "-1",
                "local_cpulist": "0-15",
                "modalias": f"pci:{known}",
                "resource": "\n".join([no_range] * 7),
            }.items():
                put(folder / name, value + "\n")
            if driver:
                (folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
                (drivers / driver / card.short_bus_id).symlink_to(folder)
    if tmpfs(module_dir):
        for name, info in modules.items():
            holders = [h for h in USED_BY.get(name, "").split(",") if h in modules]
            put(module_dir / name / "refcnt", f"{len(holders)}\n")
            put(module_dir / name / "initstate", "live\n")
            put(module_dir / name / "coresize", f"{SIZES.get(name, 65536)}\n")
            (module_dir / name / "holders").mkdir()
            for holder in holders:
                (module_dir / name / "holders" / holder).symlink_to(f"../../{holder}")
            if info.get("version"):
                put(module_dir / name / "version", info["version"] + "\n")
            if name == "nvidia_drm":
                put(module_dir / name / "parameters/modeset", "Y\n")


def show_modules(modules: dict[str, dict[str, str]]) -> None:
    """Write the module list that lsmod reads."""
    lines = []
    for name in reversed(list(modules)):
        holders = [h for h in USED_BY.get(name, "").split(",") if h in modules]
        used = ",".join(holders) + "," if holders else "-"
        lines.append(
            f"{name} {SIZES.get(name, 65536)} {len(holders)} {used} Live 0x0000000000000000 (POE)\n"
        )
    put(hardware.RUN_DIR / "proc-modules", "".join(lines))


def show_driver(modules: dict[str, dict[str, str]]) -> None:
    """Write /proc/driver/nvidia and the device nodes of a loaded driver."""
    info = modules.get("nvidia")
    nodes = {"nvidiactl": (195, 255), "nvidia-modeset": (195, 254)}
    nodes.update({"nvidia-uvm": (511, 0), "nvidia-uvm-tools": (511, 1)})
    nodes.update({f"nvidia{c.index}": (195, c.index) for c in hardware.CARDS})
    nodes["nvidia2"] = (195, 2)
    hardware.MODULE_FILE.unlink(missing_ok=True)
    for name in nodes:
        with contextlib.suppress(FileNotFoundError):
            Path("/dev", name).unlink()
    if not tmpfs(Path("/proc/driver")) or info is None:
        return
    folder = Path("/proc/driver/nvidia")
    version = info["version"]
    built = "Tue Mar  3 10:11:12 UTC 2026"
    if info["license"] == "NVIDIA":
        first = f"NVIDIA UNIX x86_64 Kernel Module  {version}  {built}"
    else:
        first = (
            f"NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  "
            f"(buildd@lab)  {built}"
        )
    compiler = "gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04.1) "
    text = f"NVRM version: {first}\nGCC version:  {compiler}\n"
    put(folder / "version", text)
    # A unit with ProtectKernelTunables gets a fresh /proc, without what was mounted on this one; a
    # real driver's folder would be there. The stand-in programs read this copy.
    put(hardware.MODULE_FILE, text)
    put(
        folder / "params",
        "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileMode: 438\n",
    )
    put(folder / "registry", 'Binary: ""\n')
    visible = hardware.cards()
    for card in visible:
        put(
            folder / "gpus" / card.short_bus_id / "information",
            f"Model: \t\t {card.name}\nIRQ:   \t\t 80\nGPU UUID: \t {card.uuid}\n"
            f"Video BIOS: \t 90.02.0b.00.0e\nBus Type: \t PCIe\nDMA Size: \t 47 bits\n"
            f"DMA Mask: \t 0x7fffffffffff\nBus Location: \t {card.short_bus_id}\n"
            f"Device Minor: \t {card.index}\nGPU Firmware: \t N/A\nGPU Excluded:\t No\n",
        )
    wanted = [n for n in nodes if not n[-1].isdigit()] + [f"nvidia{c.index}" for c in visible]
    for name in wanted:
        path = Path("/dev", name)
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*nodes[name]))
        path.chmod(0o666)


def show_nvml() -> None:
    """Write the cards for the stand-in NVML, one line a card (see nvml.c for the order)."""
    lines = []
    if hardware.fault() == "hang":
        lines.append("hang\n")
    settings = hardware.read_object(hardware.SETTINGS_FILE)
    for card in hardware.cards():
        power = float(settings.get(card.uuid, {}).get("power_limit", card.default_power))
        major_minor = card.compute_capability
        lines.append(
            f"{card.index} {card.bus_id} {card.uuid} {major_minor} {card.memory} {card.used} "
            f"{int(power * 1000)} {card.min_power * 1000} {card.max_power * 1000} "
            f"{card.pci_device:x} {sum(card.links)} {int(card.usable)} {card.name}\n"
        )
    put(hardware.RUN_DIR / "nvml", "".join(lines))


def show_firmware() -> None:
    """Write the firmware variables: Secure Boot's state."""
    if tmpfs(Path("/sys/firmware")):
        variables = Path("/sys/firmware/efi/efivars")
        variables.mkdir(parents=True)
        # four bytes of attributes, one of value
        (variables / SECURE_BOOT_VARIABLE).write_bytes(b"\6\0\0\0" + bytes([secure_boot()]))


def show(release: str, modules: dict[str, dict[str, str]]) -> None:
    """Write everything that the state of the kernel decides."""
    hardware.write_object(hardware.KERNEL_FILE, {"release": release, "modules": modules})
    if hardware.fault() == "mismatch":
        older = {"version": hardware.MISMATCH_VERSION}
        modules = {k: v | older if k.startswith("nvidia") else v for k, v in modules.items()}
    show_pci(modules)
    show_modules(modules)
    show_driver(modules)
    show_nvml()


def boot() -> None:
    """Boot the newest kernel: decide, then show."""
    shutil.rmtree(hardware.RUN_DIR, ignore_errors=True)
    hardware.RUN_DIR.mkdir(parents=True)
    # systemd makes / shared on a real machine and leaves it alone in a container; without it
    # credentials (LoadCredential=) never reach a unit.
    subprocess.run(["/bin/mount", "--make-rshared", "/"], check=True)
    release = newest_kernel()
    modules, messages = decide(release)
    number = re.search(r"-(\d+)-", release)
    version = f"#{number.group(1) if number else 1}~24.04.1-Ubuntu SMP PREEMPT_DYNAMIC"
    put(hardware.RUN_DIR / "uname", f"{release}\n{version}\n")
    put(hardware.RUN_DIR / "osrelease", f"{release}\n")
    put(hardware.RUN_DIR / "version", f"Linux version {release} (buildd@lab) {version}\n")
    put(
        hardware.RUN_DIR / "cmdline",
        f"BOOT_IMAGE=/boot/vmlinuz-{release} root=UUID={ROOT_UUID} ro quiet\n",
    )
    put(hardware.RUN_DIR / "boot_id", f"{uuid.uuid4()}\n")
    show_firmware()
    bind(hardware.RUN_DIR / "osrelease", "/proc/sys/kernel/osrelease")
    bind(hardware.RUN_DIR / "version", "/proc/version")
    bind(hardware.RUN_DIR / "cmdline", "/proc/cmdline")
    bind(hardware.RUN_DIR / "boot_id", "/proc/sys/kernel/random/boot_id")
    log(messages)
    show(release, modules)


def apply() -> None:
    """Show the hardware again after a fault switch; what the boot decided stays."""
    kernel = hardware.kernel()
    show(kernel.release, kernel.modules)
    if hardware.fault() == "gpu-off-bus":
        log(["NVRM: Xid (PCI:0000:0b:00): 79, GPU has fallen off the bus."])


def modprobe(arguments: list[str]) -> int:
    """Load or unload a module in the simulated kernel; queries go to the real program."""
    options = [a for a in arguments if a.startswith("-")]
    names = [a for a in arguments if not a.startswith("-") and "=" not in a]
    queries = {"-c", "--showconfig", "-D", "--show-depends", "-n", "--dry-run", "-R", "-V"}
    if not names or queries & set(options) or any(o.startswith("--show") for o in options):
        real = "/usr/sbin/modprobe.distrib"
        os.execv(real, [real, *arguments])
    quiet = "-q" in options or "--quiet" in options
    kernel = hardware.kernel()
    modules = dict(kernel.modules)
    if {"-r", "--remove"} & set(options):
        for name in names:
            modules.pop(name.replace("-", "_"), None)
        show(kernel.release, modules)
        return 0
    for name in names if {"-a", "--all"} & set(options) else names[:1]:
        key = name.replace("-", "_")
        files = module_files(kernel.release, name.replace("_", "-"))
        if key in modules:
            continue
        if not files:
            if not quiet:
                where = f"/lib/modules/{kernel.release}"
                print(
                    f"modprobe: FATAL: Module {name} not found in directory {where}",
                    file=sys.stderr,
                )
            return 1
        info = module_info(files[0])
        trouble = ""
        if not may_load(info):
            trouble = "Key was rejected by service"
        elif key.startswith("nvidia") and "nouveau" in modules:
            trouble = "No such device"
            log(["NVRM: The NVIDIA probe routine was not called for 2 device(s)."])
        if trouble:
            print(f"modprobe: ERROR: could not insert '{name}': {trouble}", file=sys.stderr)
            return 1
        messages: list[str] = []
        if key.startswith("nvidia"):
            base = module_files(kernel.release, "nvidia")
            if base and "nvidia" not in modules:
                modules["nvidia"] = module_info(base[0])
                messages.append(
                    f"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  {info['version']}"
                )
        modules[key] = info
        log(messages)
    show(kernel.release, modules)
    return 0


def rmmod(arguments: list[str]) -> int:
    """Unload modules from the simulated kernel."""
    kernel = hardware.kernel()
    modules = dict(kernel.modules)
    for name in (a for a in arguments if not a.startswith("-")):
        key = name.replace("-", "_")
        if key not in modules:
            print(f"rmmod: ERROR: Module {name} is not currently loaded", file=sys.stderr)
            return 1
        holders = [h for h in USED_BY.get(key, "").split(",") if h in modules]
        if holders:
            print(f"rmmod: ERROR: Module {name} is in use by: {' '.join(holders)}", file=sys.stderr)
            return 1
        del modules[key]
    show(kernel.release, modules)
    return 0


def main(argv: list[str]) -> int:
    """Dispatch on the verb, or on the name the program was called by."""
    called = Path(argv[0]).name
    if called in ("modprobe", "rmmod"):
        return modprobe(argv[1:]) if called == "modprobe" else rmmod(argv[1:])
    verb = argv[1] if len(argv) > 1 else ""
    if verb == "boot":
        try:
            boot()
        except Exception as error:  # the box must come up, so that a person can look
            print(f"vllm-turing-lab: the simulated boot failed: {error!r}", file=sys.stderr)
            put(Path("/run/vllm-turing-lab/boot-error"), f"{error!r}\n")
        os.execv(INIT, [INIT])
    if verb == "apply":
        apply()
        return 0
    print(f"usage: {called} boot|apply", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
