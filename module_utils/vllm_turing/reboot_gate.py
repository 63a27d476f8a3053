"""The reboot gate: whether the host must be rebooted for its driver, and whether it may be.

The decision comes from state, never from which task changed something. :func:`collect` reads,
:func:`decide` is a pure function of what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import deb_packages, deb_version, nvidia_kernel, nvidia_packages
from .run import Runner, run


@dataclass(frozen=True)
class KernelState:
    """One kernel that may boot next.

    :ivar module: the NVIDIA module that it would load
    :ivar headers: whether a module could be built for it
    """

    release: str
    module: nvidia_kernel.Module | None = None
    initramfs: nvidia_kernel.Initramfs | None = None
    headers: bool = False


@dataclass(frozen=True)
class BootState:
    """What the gate looks at.

    :ivar package: upstream version of the installed driver packages, ``None`` without any
    :ivar loaded: version of the loaded module, ``None`` when none is
    :ivar library: version of the NVML library on disk
    :ivar running_module: the module on disk for the running kernel
    :ivar boots: the kernels that may boot next
    :ivar unfinished: half-done packages
    :ivar culprit: who changed the driver packages last, from apt's history
    :ivar mixed: driver packages whose versions differ from the others
    :ivar build_log: a DKMS log that ends in an error
    """

    running: str
    package: str | None = None
    loaded: str | None = None
    library: str | None = None
    nouveau: bool = False
    running_module: nvidia_kernel.Module | None = None
    boots: tuple[KernelState, ...] = ()
    secure_boot: nvidia_kernel.SecureBoot = field(
        default_factory=lambda: nvidia_kernel.SecureBoot("unsupported")
    )
    unfinished: tuple[str, ...] = ()
    culprit: nvidia_kernel.AptEvent | None = None
    mixed: tuple[str, ...] = ()
    build_log: str | None = None


@dataclass
class Decision:
    """What the gate says.

    :ivar needed: the driver works only after a reboot
    :ivar safe: the host would come up with a working driver
    :ivar reasons: why a reboot is needed
    :ivar refusals: why it must not be done now, each with what to do
    :ivar notes: what else is worth knowing
    """

    needed: bool = False
    safe: bool = True
    reasons: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def collect(runner: Runner = run, root: Path = Path("/")) -> BootState:
    """Read the state; changes nothing.

    :raises deb_packages.DpkgError: when dpkg cannot be asked
    """
    packages = deb_packages.installed_packages(runner)
    running = runner(["uname", "-r"]).stdout.strip()
    versions: dict[str, list[str]] = {}
    for package in nvidia_packages.driver_packages(packages):
        name = nvidia_packages.classify(package.name)
        if name is not None and name.versioned and not package.leftover:
            versions.setdefault(deb_version.upstream(package.version), []).append(package.name)
    anchors = [
        deb_version.upstream(p.version)
        for p in packages
        if not p.leftover and p.name.startswith("libnvidia-compute")
    ]
    wanted = anchors[0] if anchors else (max(versions, key=deb_version.key) if versions else None)
    loaded = nvidia_kernel.loaded_version(root)
    nouveau = loaded is None and nvidia_kernel.nouveau_loaded(runner)
    library = nvidia_kernel.library_version(root)
    in_step = loaded is not None and loaded == wanted and library in (None, wanted)
    unfinished = tuple(deb_packages.unfinished(packages))
    if wanted is None or (in_step and not unfinished and len(versions) == 1):
        # Nothing to decide: what follows costs commands and says nothing about the present.
        return BootState(running, wanted, loaded, library, nouveau, unfinished=unfinished)
    kernels = nvidia_kernel.next_kernels(nvidia_kernel.installed_kernels(root), root)
    boots = tuple(
        KernelState(
            kernel,
            nvidia_kernel.module_for(kernel, runner, root),
            nvidia_kernel.initramfs(kernel, runner, root, look_inside=True),
            nvidia_kernel.headers_present(kernel, root),
        )
        for kernel in kernels
    )
    history = ""
    for log in ("history.log", "history.log.1"):
        try:
            history = (root / "var/log/apt" / log).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if "nvidia" in history:
            break
    anchor = next((p.name for p in packages if p.name.startswith("libnvidia-compute")), "")
    return BootState(
        running=running,
        package=wanted,
        loaded=loaded,
        library=library,
        nouveau=nouveau,
        running_module=nvidia_kernel.module_for(running, runner, root),
        boots=boots,
        secure_boot=nvidia_kernel.secure_boot(runner, root),
        unfinished=unfinished,
        culprit=nvidia_kernel.last_change(anchor, history) if anchor else None,
        mixed=tuple(
            f"{', '.join(sorted(names))} {version}"
            for version, names in sorted(versions.items())
            if version != wanted
        ),
        build_log=nvidia_kernel.build_log(wanted, root),
    )


def decide(state: BootState) -> Decision:
    """Decide from state."""
    decision = Decision()
    if state.package is None:
        decision.notes.append("no driver package is installed")
        return decision
    if state.loaded is None:
        if state.nouveau:
            decision.reasons.append(
                "nouveau owns the cards; the driver takes over at the next boot"
            )
        elif state.running_module and state.running_module.version == state.package:
            decision.reasons.append(
                f"module {state.package} is built for the running kernel {state.running} "
                "but is not loaded"
            )
        else:
            decision.reasons.append(f"no nvidia module for the running kernel {state.running}")
    elif state.loaded != state.package or state.library not in (None, state.loaded):
        who = ""
        if (
            state.culprit
            and state.culprit.new
            and deb_version.upstream(state.culprit.new) == state.package
        ):
            who = f", changed by '{state.culprit.command}'" + (
                f" on {state.culprit.date}" if state.culprit.date else ""
            )
        decision.reasons.append(
            f"the loaded module is {state.loaded}, the libraries are "
            f"{state.library or state.package}{who}: programs that run keep working, "
            "new ones cannot start until the host is rebooted"
        )
    decision.needed = bool(decision.reasons)
    decision.refusals = _refusals(state, decision.needed)
    decision.safe = not decision.refusals
    if state.boots and decision.needed and all(b.release != state.running for b in state.boots):
        decision.notes.append(
            f"the next boot starts kernel {state.boots[0].release}, not {state.running}"
        )
    if state.secure_boot.state == "unknown" and decision.needed:
        decision.notes.append("Secure Boot: state unknown (install mokutil to see it)")
    return decision


def _refusals(state: BootState, needed: bool) -> list[str]:
    """List why a reboot would not bring a working driver."""
    refusals = []
    if state.unfinished:
        refusals.append(
            f"dpkg left half done: {', '.join(state.unfinished)}; run 'dpkg --configure -a'"
        )
    if state.mixed:
        refusals.append(
            f"driver packages of different versions are installed ({'; '.join(state.mixed)} "
            f"beside {state.package}); run the role again"
        )
    if not needed:
        return refusals
    if not state.boots:
        refusals.append("no kernel image in /boot, so it is unknown which kernel boots next")
    for kernel in state.boots:
        refusals += _kernel_refusals(kernel, state)
    return refusals


def _kernel_refusals(kernel: KernelState, state: BootState) -> list[str]:
    """List why one kernel would come up without a working driver."""
    refusals = []
    release = kernel.release
    if kernel.module is None:
        if not kernel.headers:
            refusals.append(
                f"kernel {release} has no nvidia module and no headers to build one; "
                f"install linux-headers-{release}"
            )
        elif state.build_log:
            refusals.append(
                f"kernel {release} has no nvidia module: its build failed, see {state.build_log}"
            )
        else:
            refusals.append(
                f"kernel {release} has no nvidia module; run 'dkms autoinstall -k {release}'"
            )
    elif kernel.module.version != state.package:
        refusals.append(
            f"kernel {release} would load module {kernel.module.version or 'of unknown version'} "
            f"({kernel.module.path}), but the libraries are {state.package}; "
            f"run 'dkms autoinstall -k {release}' or remove the old module"
        )
    else:
        refusals += _secure_boot_refusals(kernel.module, release, state.secure_boot)
    image = kernel.initramfs
    if image is not None and image.exists:
        if image.stale:
            refusals.append(
                f"{image.path} is older than {', '.join(image.stale)}; "
                f"run 'update-initramfs -u -k {release}'"
            )
        elif image.nouveau:
            refusals.append(
                f"{image.path} would load nouveau; run 'update-initramfs -u -k {release}'"
            )
    return refusals


def _secure_boot_refusals(
    module: nvidia_kernel.Module, release: str, boot: nvidia_kernel.SecureBoot
) -> list[str]:
    """Say why Secure Boot would refuse the module."""
    if boot.state != "enabled":
        return []
    if not module.signer:
        return [
            f"Secure Boot is on and the module for {release} is not signed; "
            "use nvidia_driver_modules: prebuilt, or turn Secure Boot off in the firmware"
        ]
    if module.dkms and boot.key_enrolled is not True:
        return [
            f"Secure Boot is on and the module for {release} is signed with this host's own key, "
            "which is not enrolled; run 'mokutil --import /var/lib/shim-signed/mok/MOK.der', "
            "reboot and confirm at the console, or use nvidia_driver_modules: prebuilt"
        ]
    return []


def after_reboot(decision: Decision, before: Sequence[str]) -> list[str]:
    """List what is still wrong after the one reboot of a run; a second is never done.

    :param before: the reasons for which the host was rebooted
    """
    if not decision.needed:
        return []
    same = [reason for reason in decision.reasons if reason in before]
    words = "still" if same else "now"
    return [f"after the reboot, {words}: {reason}" for reason in decision.reasons]


def unit_active(unit: str, runner: Runner = run) -> bool:
    """Whether a unit runs or is about to."""
    if not unit:
        return False
    result = runner(["systemctl", "show", "-p", "ActiveState", unit])
    return result.stdout.strip() in ("ActiveState=active", "ActiveState=activating")


def verify(state: BootState, runner: Runner = run) -> str | None:
    """Ask the driver itself whether it works.

    :returns: what is wrong, or ``None``
    """
    if state.package is None:
        return "no driver package is installed"
    result = runner(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], timeout=60
    )
    versions = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    # Decided on rows, not on the status, which differs between driver versions.
    rows = [version for version in versions if version[:1].isdigit()]
    if not rows:
        words = result.error or (versions or result.stderr.strip().splitlines() or ["no output"])[0]
        return f"driver {state.package} is installed but nvidia-smi sees no card: {words}"
    wrong = sorted({version for version in rows if version != state.package})
    if wrong:
        return f"nvidia-smi reports driver {', '.join(wrong)}, not {state.package}"
    return None
