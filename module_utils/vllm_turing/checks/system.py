"""Checks of the operating system below the driver: kernel, firmware, packages, accounts."""

from __future__ import annotations

import datetime
import re

from .. import apt_sources, deb_packages
from ..preflight_check import (
    Context,
    Outcome,
    check,
    failed,
    listing,
    passed,
    skipped,
    warned,
)

#: Certificates of the mirrors are newer than this; a clock before it breaks every download.
EARLIEST = datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC).timestamp()

_EFI = "/sys/firmware/efi"

#: There while systemd-timesyncd has the clock in step.
SYNCHRONISED = "/run/systemd/timesync/synchronized"
TIMEDATECTL = ("timedatectl", "show", "--property=NTPSynchronized", "--value")


def os_release(context: Context) -> dict[str, str]:
    """Return the fields of /etc/os-release."""
    found = {}
    for line in (context.host.read("/etc/os-release") or "").splitlines():
        key, mark, value = line.strip().partition("=")
        if mark:
            found[key] = value.strip("\"'")
    return found


@check("system", "distribution")
def distribution(context: Context) -> Outcome:
    """Check that the distribution and architecture are supported."""
    release = os_release(context)
    machine = context.host.run(("uname", "-m"))
    name = release.get("PRETTY_NAME", "")
    if not release or not machine.ok:
        return warned(
            "the distribution cannot be told", "/etc/os-release, uname -m", "look by hand"
        )
    seen = (release.get("ID"), release.get("VERSION_ID"), machine.stdout.strip())
    if seen == ("ubuntu", "24.04", "x86_64"):
        return passed(f"{name} {seen[2]}")
    return failed(
        f"this is '{name or seen[0]} {seen[2]}'; supported: Ubuntu 24.04 x86_64",
        "/etc/os-release, uname -m",
        "install Ubuntu 24.04",
    )


@check("system", "init_system")
def init_system(context: Context) -> Outcome:
    """Check that Systemd is PID 1."""
    name = (context.host.read("/proc/1/comm") or "").strip()
    if name == "systemd":
        return passed("systemd is PID 1")
    if not name:
        return skipped("/proc/1/comm cannot be read")
    return failed(
        f"PID 1 is '{name}', not systemd: the service could not be run",
        "/proc/1/comm",
        "boot the machine with systemd",
    )


@check("system", "cgroups")
def cgroups(context: Context) -> Outcome:
    """Check that control groups are of version 2."""
    if context.host.exists("/sys/fs/cgroup/cgroup.controllers"):
        return passed("unified cgroup hierarchy")
    if not context.host.listdir("/sys/fs/cgroup"):
        return skipped("/sys/fs/cgroup cannot be read")
    return warned(
        "cgroups of version 1 (or hybrid): limits of the service are less exact",
        "/sys/fs/cgroup/cgroup.controllers is not there",
        "boot without systemd.unified_cgroup_hierarchy=0",
    )


# -- kernel ------------------------------------------------------------------------------------


def module_files(context: Context, release: str) -> list[str]:
    """Return the nvidia kernel modules that are installed for a kernel."""
    base = f"/lib/modules/{release}"
    host = context.host
    found = []
    for folder in ("updates/dkms", "kernel/drivers/video", "extra", "updates"):
        found += host.glob(f"{base}/{folder}", "nvidia.ko*")
    for name in host.listdir(f"{base}/kernel"):
        if name.startswith("nvidia"):
            found += host.glob(f"{base}/kernel/{name}", "nvidia.ko*")
            found += host.glob(f"{base}/kernel/{name}/bits", "nvidia.ko*")
    return found


@check("system", "kernel_running")
def kernel_running(context: Context) -> Outcome:
    """Check that the running kernel's modules are on disk."""
    release = context.kernel
    if not release:
        return warned("uname does not tell the kernel", fix="run 'uname -r' by hand")
    if context.host.is_dir(f"/lib/modules/{release}"):
        return passed(release)
    return warned(
        f"the modules of the running kernel {release} are gone (removed since the boot)",
        f"/lib/modules/{release} is not there",
        "reboot into an installed kernel",
    )


@check("system", "kernel_next")
def kernel_next(context: Context) -> Outcome:
    """Check that the kernel that will boot has a driver module."""
    newest = context.next_kernel
    if not newest:
        return skipped("no kernel in /boot")
    if not context.driver_there:
        return skipped("the driver is not installed yet", newest)
    files = module_files(context, newest)
    if files:
        note = "" if newest == context.kernel else f" (now running: {context.kernel})"
        return passed(f"{newest} will boot and has a module{note}", files[0])
    return failed(
        f"no nvidia module for kernel {newest}, which will boot next",
        f"/lib/modules/{newest} has no nvidia.ko",
        f"apt-get install linux-headers-{newest} && dkms autoinstall -k {newest}; "
        "do not reboot before",
        mended_by="nvidia_driver",
    )


@check("system", "kernel_headers")
def kernel_headers(context: Context) -> Outcome:
    """Check that headers of the running kernel are there for DKMS."""
    release = context.kernel
    if not release:
        return skipped("uname does not tell the kernel")
    if context.host.exists(f"/lib/modules/{release}/build"):
        return passed(f"headers of {release} are installed")
    dkms = [p for p in context.driver_packages if "-dkms-" in p.name]
    if not dkms:
        return skipped("no DKMS driver; role nvidia_driver installs headers when it needs them")
    return failed(
        f"the package linux-headers-{release} is missing: DKMS cannot build for this kernel",
        f"/lib/modules/{release}/build is not there",
        f"apt-get install linux-headers-{release} && dkms autoinstall -k {release} "
        "&& dpkg --configure -a",
        mended_by="nvidia_driver",
    )


@check("system", "initramfs")
def initramfs(context: Context) -> Outcome:
    """Check that the kernel that will boot has its initramfs, in step with the blacklist."""
    newest, host = context.next_kernel, context.host
    if not newest:
        return skipped("no kernel in /boot")
    image = f"/boot/initrd.img-{newest}"
    if not host.exists(image):
        return failed(
            f"kernel {newest} has no initramfs: the machine would not boot",
            f"{image} is not there",
            f"update-initramfs -c -k {newest}",
        )
    written = host.mtime(image) or 0.0
    newer = [
        path
        for path in host.glob("/etc/modprobe.d", "*.conf")
        if (host.mtime(path) or 0.0) > written
        and re.search(r"nouveau|nvidia", host.read(path) or "")
    ]
    if newer:
        return warned(
            f"{listing(newer)} is newer than the initramfs: it does not hold at the next boot",
            image,
            f"update-initramfs -u -k {newest}",
            mended_by="nvidia_driver",
        )
    return passed(f"{image} is in step")


@check("system", "nouveau")
def nouveau(context: Context) -> Outcome:
    """Check that Nouveau does not own the cards."""
    cards = context.gpus.pci
    owned = [card.bus_id for card in cards if card.driver == "nouveau"]
    modules = context.host.run(("lsmod",))
    text = modules.stdout if modules.ok else context.host.read("/proc/modules")
    loaded = text is not None and re.search(r"^nouveau\s", text, re.MULTILINE) is not None
    blacklist = any(
        re.search(r"^\s*blacklist\s+nouveau", context.host.read(path) or "", re.MULTILINE)
        for folder in ("/etc/modprobe.d", "/lib/modprobe.d", "/usr/lib/modprobe.d")
        for path in context.host.glob(folder, "*.conf")
    )
    fix = (
        "write 'blacklist nouveau' and 'options nouveau modeset=0' to "
        "/etc/modprobe.d/blacklist-nouveau.conf, update-initramfs -u, reboot"
    )
    if owned:
        note = "" if blacklist else "; nothing in modprobe.d blacklists it"
        return failed(
            f"nouveau owns {len(owned)} of {len(cards)} cards{note}",
            listing(owned),
            fix,
            mended_by="nvidia_driver",
        )
    if loaded:
        return warned("nouveau is loaded, though it owns no card", "lsmod", fix, "nvidia_driver")
    if text is None or (not cards and not context.gpus.gpus):
        return skipped("neither the modules nor the cards can be seen")
    if context.driver_there and not blacklist:
        return warned(
            "nothing in modprobe.d blacklists nouveau: it may take the cards at the next boot",
            "/etc/modprobe.d, /lib/modprobe.d",
            fix,
            "nvidia_driver",
        )
    return passed("nouveau is not loaded")


@check("system", "secure_boot")
def secure_boot(context: Context) -> Outcome:
    """Check that Secure Boot lets the driver's module load."""
    enabled, seen = secure_boot_state(context)
    if enabled is False:
        return passed(f"Secure Boot is off ({seen})")
    if enabled is None:
        return warned(
            "whether Secure Boot is on is unknown",
            seen,
            "read it: od -An -t u1 /sys/firmware/efi/efivars/SecureBoot-* (last number 1 = on), "
            "or install mokutil",
        )
    if any(
        p.name.startswith("linux-modules-nvidia-") and p.installed for p in context.packages or []
    ):
        return passed("Secure Boot is on; Canonical's signed modules are installed", seen)
    loaded = context.gpus.module.version
    if loaded:
        return passed(f"Secure Boot is on and the module {loaded} is loaded", seen)
    key = "/var/lib/shim-signed/mok/MOK.der"
    answer = context.host.run(("mokutil", "--test-key", key))
    enrolled = f"{answer.stdout}{answer.stderr}"
    if "is already enrolled" in enrolled:
        return passed("Secure Boot is on; the key that DKMS signs with is enrolled", key)
    return failed(
        "Secure Boot is on and the key that DKMS signs with is not enrolled: "
        "the module would be refused ('Key was rejected by service')",
        enrolled.strip() or seen,
        f"either mokutil --import {key} (a one-time password, confirmed at the console at the "
        "next boot), or Ubuntu's signed modules (linux-modules-nvidia-...-generic), or turn "
        "Secure Boot off in the firmware",
        # Left to itself the role takes Ubuntu's signed modules here; DKMS needs a person.
        "" if context.wish.text("nvidia_driver_modules") == "dkms" else "nvidia_driver",
    )


def secure_boot_state(context: Context) -> tuple[bool | None, str]:
    """Return whether Secure Boot is on (None: unknown) and by what it was seen."""
    host = context.host
    files = host.glob(f"{_EFI}/efivars", "SecureBoot-*")
    for path in files:
        content = host.read_bytes(path, 16)
        # Four bytes of attributes, then the value.
        if content is not None and len(content) == 5:
            return content[4] == 1, path
    answer = host.run(("mokutil", "--sb-state"))
    words = f"{answer.stdout} {answer.stderr}".lower()
    if "secureboot enabled" in words:
        return True, "mokutil --sb-state"
    if "secureboot disabled" in words:
        return False, "mokutil --sb-state"
    if "efi variables are not supported" in words:
        return False, "mokutil: EFI variables are not supported"
    if host.is_dir("/sys/firmware") and not host.exists(_EFI):
        return False, "started without EFI"
    return None, answer.error or "mokutil says nothing"


# -- packages ----------------------------------------------------------------------------------


@check("system", "dpkg_state")
def dpkg_state(context: Context) -> Outcome:
    """Check that no package is left half installed."""
    if context.packages is None:
        return warned(
            "dpkg-query does not answer",
            context.host.run(("dpkg-query", "--version")).error or "",
            "run 'dpkg --audit' by hand",
        )
    if not context.packages:
        return skipped("dpkg lists no package")
    broken = deb_packages.unfinished(context.packages)
    if not broken:
        return passed(f"{len(context.packages)} packages, all whole")
    release = context.kernel or "$(uname -r)"
    fix = "dpkg --configure -a"
    seen = "dpkg-query -W"
    if any("nvidia-dkms" in text for text in broken):
        if not context.host.exists(f"/lib/modules/{release}/build"):
            fix = (
                f"apt-get install linux-headers-{release} && dkms autoinstall -k {release} "
                "&& dpkg --configure -a"
            )
            seen = f"/lib/modules/{release}/build is not there (linux-headers-{release})"
        else:
            logs = [
                f"/var/lib/dkms/nvidia/{name}/build/make.log"
                for name in context.host.listdir("/var/lib/dkms/nvidia")
                if context.host.exists(f"/var/lib/dkms/nvidia/{name}/build/make.log")
            ]
            if logs:
                seen = listing(logs)
                fix = f"read the error at the end of {logs[-1]}; then dpkg --configure -a"
    return failed(f"half installed: {listing(broken)}", seen, fix)


@check("system", "dpkg_lock")
def dpkg_lock(context: Context) -> Outcome:
    """Check that no other package manager is at work."""
    host = context.host
    locks = host.read("/proc/locks")
    if locks is None:
        return skipped("/proc/locks cannot be read")
    for name in ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock"):
        place = host.real(name)
        if place is None:
            continue
        inode = place.stat().st_ino
        for line in locks.splitlines():
            match = re.search(r"\s(\d+)\s+[0-9a-f]+:[0-9a-f]+:(\d+)\s", line)
            if match and int(match.group(2)) == inode:
                who = (host.read(f"/proc/{match.group(1)}/comm") or "unknown").strip()
                return warned(
                    f"{name} is held by process {match.group(1)} ({who})",
                    "/proc/locks",
                    "wait for it to end; the roles wait, too (do not delete the lock file)",
                )
    return passed("no lock is held")


@check("system", "apt_sources")
def apt_sources_agree(context: Context) -> Outcome:
    """Check that the declared package sources let apt run."""
    host = context.host
    entries = apt_sources.read_all(host.root)
    if not entries:
        return warned(
            "no package source is declared",
            "/etc/apt/sources.list.d",
            "restore /etc/apt/sources.list.d/ubuntu.sources, or set vllm_host_mirror_apt",
        )
    found = apt_sources.find(entries, root=host.root)
    by_kind = {kind: [f.message for f in found if f.kind == kind] for kind in
               ("conflict", "local-gone", "key-missing", "duplicate")}  # fmt: skip
    unsafe = [e.place for e in entries if e.enabled and e.options.get("trusted") == "yes"]
    if by_kind["conflict"]:
        return failed(
            "; ".join(by_kind["conflict"]),
            "Conflicting values set for option Signed-By",
            "rename the file that is too many so that it ends in .disabled",
            mended_by="nvidia_driver",
        )
    if by_kind["local-gone"] or by_kind["key-missing"]:
        return failed(
            "; ".join(by_kind["local-gone"] + by_kind["key-missing"]),
            fix="install the key (package cuda-keyring for NVIDIA's), or remove that source",
            mended_by="nvidia_driver" if any(f.disable for f in found) else "",
        )
    if unsafe:
        return warned(
            f"unsigned packages are allowed in {listing(unsafe)} (trusted=yes)",
            fix="remove trusted=yes there and install the repository's key",
        )
    if by_kind["duplicate"]:
        return warned("; ".join(by_kind["duplicate"]), fix="remove one of the two")
    return passed(f"{len([e for e in entries if e.enabled])} sources agree")


# -- time, language, accounts ------------------------------------------------------------------


@check("system", "clock")
def clock(context: Context) -> Outcome:
    """Check that the clock is right enough for certificates."""
    now = context.host.now()
    if now < EARLIEST:
        date = datetime.datetime.fromtimestamp(now, datetime.UTC).date().isoformat()
        return failed(
            f"the clock says {date}: every download would fail on its certificate",
            fix="timedatectl set-ntp true",
        )
    if context.host.exists(SYNCHRONISED):
        return passed("synchronised", SYNCHRONISED)
    answer = context.host.run(TIMEDATECTL)
    if answer.ok and answer.stdout.strip() == "yes":
        return passed("synchronised", "timedatectl")
    return skipped("whether the clock is synchronised is unknown; its date is plausible")


@check("system", "locale")
def locale(context: Context) -> Outcome:
    """Check that the system's locale is UTF-8."""
    host = context.host
    text = host.read("/etc/default/locale") or host.read("/etc/locale.conf") or ""
    match = re.search(r"^\s*(LC_ALL|LANG)=[\"']?([^\"'\s]*)", text, re.MULTILINE)
    if not match or not match.group(2):
        return skipped("no locale is set; the service sets its own")
    if re.search(r"utf-?8$", match.group(2), re.IGNORECASE):
        return passed(f"{match.group(1)}={match.group(2)}")
    return warned(
        f"{match.group(1)}='{match.group(2)}' is no UTF-8 locale: names beyond ASCII break",
        "/etc/default/locale",
        "update-locale LANG=C.UTF-8",
    )


@check("system", "service_account")
def service_account(context: Context) -> Outcome:
    """Check that the account that serves is usable."""
    name, host = context.wish.text("vllm_host_user"), context.host
    if not context.accounts:
        return warned("/etc/passwd cannot be read", fix="look by hand")
    if name not in context.accounts:
        return skipped(f"account '{name}' is not there yet; role vllm_host creates it")
    uid, gid, home = context.accounts[name]
    if uid == 0:
        return failed(
            f"account '{name}' is root: the service must not run as root",
            "/etc/passwd",
            "set vllm_host_user to an ordinary account",
        )
    if not host.is_dir(home):
        return warned(
            f"the home '{home}' of '{name}' is not there",
            "/etc/passwd",
            f"install -d -o {name} -m 0750 {home}",
            mended_by="vllm_host",
        )
    if not host.may(home, uid, [gid], 2):
        return warned(
            f"'{name}' cannot write to its home '{home}': caches would fail",
            str(host.owner(home)),
            f"chown {name}: {home}",
            mended_by="vllm_host",
        )
    if re.search(r"\s", home):
        return warned(
            f"the home '{home}' of '{name}' has a blank: compilers split such paths",
            "/etc/passwd",
            "set vllm_host_state_dir and vllm_host_prefix to paths without blanks",
        )
    return passed(f"'{name}' (uid {uid}), home '{home}'")
