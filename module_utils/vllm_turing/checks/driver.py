"""Checks of the NVIDIA driver: one version, one flavour, one way of installation."""

from __future__ import annotations

import re

from ..deb_packages import Package
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
from ..preflight_wish import Wish
from .hardware import _HANG_FIX, SILENCE, kernel_log
from .system import module_files

#: Packages that stand for a whole installation: desktop, headless, or only libraries and module.
_WHOLE = ("nvidia-driver-", "nvidia-headless-", "nvidia-dkms-", "libnvidia-compute-")

_NOT_YET = "the driver is not installed yet; role nvidia_driver does"


def branch_of(name: str) -> str:
    """Return the branch in a package's name (``580`` of ``libnvidia-gl-580-server``), or ''."""
    match = re.search(r"-(\d{3})(?=-|$)", name)
    return match.group(1) if match else ""


def upstream(version: str) -> str:
    """Return NVIDIA's version in a package version (``580.159.03-0ubuntu0.24.04.1``)."""
    match = re.search(r"(\d{3}\.\d{1,4}(?:\.\d{1,4})?)", version)
    return match.group(1) if match else ""


def library_version(context: Context) -> str:
    """Return the version of the installed user-space libraries; empty when there are none."""
    for package in context.driver_packages:
        if package.name.startswith("libnvidia-compute") and package.state[1:2] not in "nc":
            return upstream(package.version)
    files = library_files(context)
    return files[-1].rsplit(".so.", 1)[-1] if files else ""


def library_files(context: Context) -> list[str]:
    """Return the driver's NVML libraries that carry a full version in their names."""
    return [
        path
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
        for path in context.host.glob(folder, "libnvidia-ml.so.*.*")
    ]


def transitional_query(wish: Wish) -> tuple[str, ...]:
    """Return the command that tells whether the wanted branch's package has moved on."""
    return (
        "apt-cache",
        "show",
        f"nvidia-driver-{wish.text('nvidia_driver_version').split('.')[0]}",
    )


@check("driver", "driver_answers")
def driver_answers(context: Context) -> Outcome:
    """Check that the driver lists its cards."""
    facts = context.gpus
    if facts.gpus:
        hung = sorted({v for v in facts.answers.values() if v.startswith("timed out")})
        if hung:
            return warned(
                f"nvidia-smi lists the cards, but another of its questions {hung[0]}",
                listing([k for k, v in facts.answers.items() if v.startswith("timed out")]),
                _HANG_FIX,
            )
        return passed(f"{len(facts.gpus)} cards ({facts.source})")
    if not context.driver_there:
        return skipped(_NOT_YET)
    if facts.silence.startswith("timed out"):
        return failed(
            f"nvidia-smi {facts.silence}: the driver hangs",
            kernel_log(context, "NVRM", "Xid"),
            _HANG_FIX,
        )
    text, fix = SILENCE.get(facts.silence, (facts.silence or "no answer", "run 'nvidia-smi'"))
    return failed(
        text, facts.answers.get("smi", "") or kernel_log(context, "NVRM", "Xid"), fix,
        mended_by="nvidia_driver" if facts.silence in ("mismatch", "module not loaded",
                                                       "not installed", "no device") else "",
    )  # fmt: skip


@check("driver", "driver_mismatch")
def driver_mismatch(context: Context) -> Outcome:
    """Check that the loaded module and the libraries are of one version."""
    loaded, libraries = context.gpus.module.version, library_version(context)
    if not loaded:
        return skipped("no driver module is loaded")
    if not libraries:
        return skipped(f"module {loaded} is loaded; the libraries' version is unknown")
    if loaded == libraries:
        return passed(f"module and libraries are {loaded}")
    who = _who_changed(context, libraries)
    by = f", replaced by {who}" if who else ""
    busy = [unit.name for unit in context.units if _is_active(context, unit.name)]
    wait = f" (this ends {listing(busy)}, which still works)" if busy else ""
    return failed(
        f"the loaded module is {loaded}, the libraries are {libraries}{by}: "
        "nothing new can use the cards",
        "/proc/driver/nvidia/version, dpkg-query -W",
        f"reboot{wait}; do not reinstall the driver, and keep it held (nvidia_driver_hold)",
        mended_by="nvidia_driver",
    )


def _is_active(context: Context, unit: str) -> bool:
    return context.host.run(("systemctl", "is-active", unit)).stdout.strip() == "active"


def _who_changed(context: Context, version: str) -> str:
    """Return what replaced the libraries, by apt's history; empty when it does not tell."""
    history = context.host.read("/var/log/apt/history.log") or ""
    for block in reversed(re.split(r"\n\s*\n|(?=\bStart-Date:)", history)):
        if version in block and "libnvidia-compute" in block:
            line = next((x for x in block.splitlines() if x.startswith("Commandline:")), "")
            command = line.partition(":")[2].strip()
            if "unattended-upgrade" in command:
                return "unattended-upgrades"
            return command.split()[0].rsplit("/", 1)[-1] if command else ""
        if version in block and "unattended-upgrade" in block:
            return "unattended-upgrades"
    # The file's blocks need no blank lines between them.
    if version in history and "unattended-upgrade" in history:
        return "unattended-upgrades"
    return ""


@check("driver", "driver_version")
def driver_version(context: Context) -> Outcome:
    """Check that the driver has the wanted version."""
    wanted = context.wish.text("nvidia_driver_version")
    have = context.gpus.module.version or library_version(context)
    if not have:
        return skipped(_NOT_YET)
    if have == wanted:
        return passed(have)
    branch = "the same branch" if have.split(".")[0] == wanted.split(".")[0] else "another branch"
    return warned(
        f"the driver is {have}, wanted is {wanted} ({branch})",
        "/proc/driver/nvidia/version",
        f"site.yml installs {wanted}; to keep this one set nvidia_driver_version: '{have}'",
        mended_by="nvidia_driver",
    )


@check("driver", "driver_branch")
def driver_branch(context: Context) -> Outcome:
    """Check that the installed branch is the wanted one."""
    wanted = context.wish.text("nvidia_driver_version").split(".")[0]
    query = transitional_query(context.wish)
    answer = context.host.run(query, timeout=15)
    match = re.search(r"[Tt]ransitional package.*?nvidia-driver-(\d{3})", answer.stdout)
    if match and match.group(1) != wanted:
        return failed(
            f"branch {wanted} is now a transitional package for {match.group(1)}",
            " ".join(query),
            f"set nvidia_driver_version to a version of branch {match.group(1)}, or to one "
            "that NVIDIA's repository still has",
        )
    branches = sorted(
        {
            branch_of(p.name)
            for p in context.driver_packages
            if p.name.startswith(_WHOLE) and p.installed and branch_of(p.name)
        }
    )
    if not branches:
        return skipped("no driver package is installed")
    if branches == [wanted]:
        return passed(f"branch {wanted}")
    return warned(
        f"branch {listing(branches)} is installed, wanted is {wanted}",
        "dpkg-query -W",
        f"site.yml changes to branch {wanted}",
        mended_by="nvidia_driver",
    )


@check("driver", "driver_flavour")
def driver_flavour(context: Context) -> Outcome:
    """Check that the module is of the wanted flavour."""
    module, wanted = context.gpus.module, context.wish.text("nvidia_driver_flavour")
    if not module.version:
        return skipped("no driver module is loaded")
    have = "open" if module.open_flavour else "proprietary"
    if wanted in ("auto", have):
        return passed(f"{have} module")
    text = f"the {have} module is loaded, wanted is {wanted}"
    if have == "open":
        text += " (open 580.159.03 crashed two linked 2080 Ti: open-gpu-kernel-modules#1211)"
    return warned(
        text,
        "/proc/driver/nvidia/version",
        f"site.yml changes it; to keep it set nvidia_driver_flavour: {have}",
        mended_by="nvidia_driver",
    )


@check("driver", "driver_module")
def driver_module(context: Context) -> Outcome:
    """Check that the running kernel has a driver module that loads."""
    if not context.driver_there:
        return skipped(_NOT_YET)
    if context.gpus.module.version:
        return passed(f"module {context.gpus.module.version} is loaded")
    release = context.kernel
    files = module_files(context, release) if release else []
    if not files:
        host = context.host
        headers = f"linux-headers-{release}"
        if not host.exists(f"/lib/modules/{release}/build"):
            seen, fix = (
                f"/lib/modules/{release}/build is not there",
                f"apt-get install {headers} && dkms autoinstall -k {release} "
                "&& dpkg --configure -a",
            )
        else:
            logs = [
                f"/var/lib/dkms/nvidia/{name}/build/make.log"
                for name in host.listdir("/var/lib/dkms/nvidia")
            ]
            log = next((name for name in logs if host.exists(name)), "make.log of DKMS")
            seen, fix = log, f"read the error at the end of {log}"
        return failed(
            f"no nvidia module for the running kernel {release}",
            seen,
            fix,
            mended_by="nvidia_driver",
        )
    rejected = kernel_log(context, "Key was rejected", "Lockdown", "module verification failed")
    if "rejected" in rejected:
        return failed(
            "the module is refused: it is signed with a key that is not enrolled",
            rejected,
            "see secure_boot",
        )
    return failed(
        "a module is installed but not loaded",
        files[0],
        "modprobe nvidia, or reboot",
        mended_by="nvidia_driver",
    )


@check("driver", "driver_devices")
def driver_devices(context: Context) -> Outcome:
    """Check that the device nodes are there."""
    facts = context.gpus
    if not facts.gpus:
        return skipped("seen once the driver runs")
    wanted = ["nvidiactl", "nvidia-uvm", *(f"nvidia{gpu.index}" for gpu in facts.gpus)]
    missing = [f"/dev/{name}" for name in wanted if not context.host.exists(f"/dev/{name}")]
    if missing:
        return warned(
            f"missing: {listing(missing)}; a service started now would find no card",
            "/dev",
            "nvidia-modprobe -u -c=0; the service's gate waits for them at boot",
        )
    return passed(listing([f"/dev/{name}" for name in wanted]))


@check("driver", "driver_packages")
def driver_packages(context: Context) -> Outcome:
    """Check that all driver packages are of one branch and version."""
    if context.packages is None:
        return skipped("dpkg-query does not answer")
    wanted = context.wish.text("nvidia_driver_version").split(".")[0]
    installed = [p for p in context.driver_packages if branch_of(p.name)]
    leftovers = [
        p for p in context.packages
        if p.leftover and "nvidia" in p.name and branch_of(p.name) not in ("", wanted)
    ]  # fmt: skip
    if not installed and not leftovers:
        return skipped(_NOT_YET)
    other = [p for p in installed if branch_of(p.name) != wanted]
    held = [p.name for p in other if p.held]
    if other or leftovers:
        names = [f"{p.name} {p.version} ({p.state})" for p in [*other, *leftovers]]
        hold = f"; on hold: {listing(held)}" if held else ""
        unhold = f"apt-mark unhold {' '.join(held)}; " if held else ""
        purge = " ".join(p.name for p in [*other, *leftovers][:8])
        status = failed if held else warned
        return status(
            f"packages of other branches than {wanted} stand in the way: {listing(names)}{hold}",
            "dpkg-query -W",
            f"{unhold}apt-get purge {purge}",
            mended_by="nvidia_driver",
        )
    versions: dict[str, list[Package]] = {}
    for package in installed:
        if upstream(package.version):
            versions.setdefault(upstream(package.version), []).append(package)
    if len(versions) > 1:
        parts = [f"{v}: {listing([p.name for p in ps], 3)}" for v, ps in sorted(versions.items())]
        return failed(
            f"driver packages of different versions: {'; '.join(parts)}",
            "dpkg-query -W",
            f"site.yml brings all to {context.wish.text('nvidia_driver_version')}",
            mended_by="nvidia_driver",
        )
    return passed(f"{len(installed)} packages, all {next(iter(versions), 'of one branch')}")


@check("driver", "driver_holds")
def driver_holds(context: Context) -> Outcome:
    """Check that the driver packages are held, so that nothing replaces them under the service."""
    installed = [p for p in context.driver_packages if branch_of(p.name) and p.installed]
    if not installed:
        return skipped("no driver package is installed")
    loose = [p.name for p in installed if not p.held]
    if not loose:
        return passed(f"{len(installed)} packages held")
    return warned(
        f"{len(loose)} of {len(installed)} driver packages are not held: an automatic upgrade "
        "would replace them under the running service",
        listing(loose),
        f"apt-mark hold {' '.join(loose[:6])}",
        mended_by="nvidia_driver",
    )


@check("driver", "driver_runfile")
def driver_runfile(context: Context) -> Outcome:
    """Check that no driver of the .run installer is mixed in."""
    host = context.host
    if context.packages is None:
        return skipped("dpkg-query does not answer, so files outside it cannot be told")
    uninstaller = host.exists("/usr/bin/nvidia-uninstall")
    owned = {upstream(p.version) for p in context.driver_packages if p.name.startswith("libnvidia")}
    strangers = sorted({
        path.rsplit(".so.", 1)[-1] for path in library_files(context)
    } - owned)  # fmt: skip
    if not uninstaller and not strangers:
        if not host.listdir("/usr/lib"):
            return skipped("/usr/lib cannot be read")
        return passed("no file of the .run installer")
    version = strangers[-1] if strangers else ""
    log = host.read("/var/log/nvidia-installer.log") or ""
    found = re.search(r"(\d{3}\.\d{2,3}(?:\.\d{2})?)", log)
    version = version or (found.group(1) if found else "")
    if uninstaller:
        return failed(
            f"driver {version or 'of unknown version'} was installed by the .run installer",
            "/usr/bin/nvidia-uninstall",
            "nvidia-uninstall, then run this again",
        )
    return failed(
        f"driver libraries {listing(strangers)} belong to no package",
        listing(library_files(context)),
        "find out with 'dpkg -S' who brought them; remove those that no package owns",
    )


def parse_dkms(text: str) -> list[tuple[str, str, str, str]]:
    """Read ``dkms status`` in both shapes.

    :returns: (module, version, kernel or '', state)
    """
    found = []
    for line in text.splitlines():
        match = re.match(
            r"([\w.-]+)[/,]\s*([\w.:~+-]+?)(?:,\s*([\w.~+-]+),\s*[\w-]+)?:\s*([a-zA-Z]+)",
            line.strip(),
        )
        if match:
            module, version, kernel, state = match.groups()
            found.append((module, version, kernel or "", state.lower()))
    return found


@check("driver", "driver_dkms")
def driver_dkms(context: Context) -> Outcome:
    """Check that DKMS has built the driver for the running kernel."""
    answer = context.host.run(("dkms", "status"), timeout=15)
    if answer.error == "not found":
        return skipped("DKMS is not installed")
    if not answer.ok:
        return warned(
            "dkms status does not answer", answer.error or answer.stderr.strip(), "run it by hand"
        )
    rows = [row for row in parse_dkms(answer.stdout) if row[0].startswith("nvidia")]
    if not rows:
        return skipped("DKMS has no driver module")
    release = context.kernel
    built = [row for row in rows if row[2] == release and row[3] == "installed"]
    versions = sorted({row[1] for row in built})
    if len(versions) > 1:
        return failed(
            f"DKMS has several drivers for {release}: {listing(versions)}",
            "dkms status",
            f"dkms remove nvidia/{versions[-1]} --all",
        )
    if built:
        libraries = library_version(context)
        if libraries and versions[0] != libraries:
            return failed(
                f"DKMS has module {versions[0]}, the libraries are {libraries}: "
                "the module of DKMS would win",
                "dkms status",
                f"dkms remove nvidia/{versions[0]} --all",
            )
        return passed(f"{rows[0][0]} {versions[0]} for {release}")
    states = [f"{row[1]} {row[2]} {row[3]}".replace("  ", " ") for row in rows]
    return failed(
        f"DKMS has no module for the running kernel {release}",
        listing(states),
        f"apt-get install linux-headers-{release} && dkms autoinstall -k {release}",
        mended_by="nvidia_driver",
    )


@check("driver", "driver_persistence")
def driver_persistence(context: Context) -> Outcome:
    """Check that the driver stays initialised between clients."""
    gpus = context.gpus.gpus
    if not gpus:
        return skipped("seen once the driver runs")
    if any(gpu.persistence is None for gpu in gpus):
        return skipped("the driver does not tell its persistence mode")
    off = [str(gpu.index) for gpu in gpus if not gpu.persistence]
    if off:
        return warned(
            f"persistence is off on GPU {listing(off)}: each call initialises the driver anew",
            "nvidia-smi -q",
            "nvidia-smi -pm 1, and nvidia-persistenced without --no-persistence-mode",
            mended_by="nvidia_driver",
        )
    return passed("persistence is on")
