"""Which packages are a GPU driver, and how a wanted driver is spelt in packages.

Names follow Ubuntu's archive and NVIDIA's repository for Ubuntu: every package of a driver
carries its branch (``libnvidia-compute-580``), optionally ``-server`` and ``-open``; from branch
590 on NVIDIA's repository drops the branch from its names (``nvidia-driver``, ``nvidia-open``).
Development files (``libnvidia-ml-dev``), the container toolkit and CUDA are no driver packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import deb_version
from .deb_packages import Package

#: A package with a branch in its name. ``nvidia-firmware-580-580.159.03`` carries its version too.
_BRANCHED = re.compile(
    r"^(?P<stem>(?:lib)?nvidia-[a-z0-9-]*?[a-z][a-z0-9]*|nvidia|xserver-xorg-video-nvidia|cuda-drivers"
    r"|cuda-drivers-fabricmanager)"
    r"-(?P<branch>[3-9]\d\d)(?P<server>-server)?(?P<open>-open)?(?:-(?P<version>\d[\d.]*))?$"
)
#: Prebuilt kernel modules: their versions are the kernel's.
_PREBUILT = re.compile(
    r"^linux-(?P<stem>modules|objects|signatures)-nvidia-(?P<branch>[3-9]\d\d)(?P<server>-server)?"
    r"(?P<open>-open)?-(?P<kernel>.+)$"
)
#: Names without a branch that are driver packages all the same (NVIDIA's repository, 590 and on).
_UNBRANCHED_NAMES = """
    cuda-drivers nvidia-driver nvidia-driver-assistant nvidia-driver-cuda nvidia-driver-libs
    nvidia-driver-bin nvidia-open nvidia-dkms nvidia-dkms-open nvidia-kernel-dkms
    nvidia-kernel-open-dkms nvidia-kernel-support nvidia-kernel-common nvidia-kernel-source
    nvidia-kernel-source-open nvidia-headless nvidia-headless-open nvidia-firmware nvidia-utils
    nvidia-compute-utils nvidia-persistenced nvidia-modprobe nvidia-settings nvidia-xconfig
    nvidia-smi nvidia-alternative nvidia-egl-common nvidia-vulkan-common nvidia-opencl-common
    nvidia-opencl-icd nvidia-vdpau-driver nvidia-suspend-common nvidia-fabricmanager nvidia-imex
    libcuda1 libcudadebugger1 libnvcuvid1 libnvoptix1 libnvidia-ml1 libnvidia-cfg1
    libnvidia-compute libnvidia-gl libnvidia-decode libnvidia-encode libnvidia-extra
    libnvidia-fbc1 libnvidia-common libnvidia-allocator1 libnvidia-api1 libnvidia-eglcore
    libnvidia-encode1 libnvidia-glcore libnvidia-glvkspirv libnvidia-gpucomp libnvidia-ngx1
    libnvidia-nvvm4 libnvidia-opticalflow1 libnvidia-ptxjitcompiler1 libnvidia-rtcore
    libnvidia-sandboxutils libnvidia-vksc-core libnvsdm xserver-xorg-video-nvidia libxnvctrl0
"""
UNBRANCHED = frozenset(_UNBRANCHED_NAMES.split())
#: Unbranched names that Ubuntu ships beside any driver and that need not have its version.
_COMPANIONS = frozenset({"nvidia-settings", "libxnvctrl0", "nvidia-modprobe", "nvidia-xconfig"})
#: Stems of the packages that make up a driver, for apt's preferences.
_STEMS = """
    nvidia-driver nvidia-headless nvidia-headless-no-dkms nvidia-dkms nvidia-kernel-common
    nvidia-kernel-source nvidia-utils nvidia-compute-utils nvidia-firmware libnvidia-cfg1
    libnvidia-common libnvidia-compute libnvidia-decode libnvidia-encode libnvidia-extra
    libnvidia-fbc1 libnvidia-gl xserver-xorg-video-nvidia nvidia-open cuda-drivers
"""
#: Metapackages that move the kernel.
_KERNEL_META = re.compile(
    r"^linux-(?:(?:image|headers|modules-extra|tools|cloud-tools)-)?"
    r"(?:generic|lowlatency|virtual|oem|aws|gcp|azure|oracle|kvm|nvidia)"
    r"(?:-(?:hwe|edge|lts|\d\d\.\d\d[a-z]?))*$"
)
#: Branched names that only carry apt preferences.
_PINNING = re.compile(r"^nvidia-driver-pinning-")


class UnknownDriver(Exception):
    """A wish that no driver meets; the text is one sentence for a person."""


@dataclass(frozen=True)
class DriverName:
    """What a package's name says.

    :ivar stem: e.g. ``libnvidia-compute``, ``linux-modules-nvidia``
    :ivar branch: e.g. ``580``; ``""`` for names without one
    :ivar server: Ubuntu's server variant of the branch
    :ivar open: the open kernel module
    :ivar kernel: for prebuilt modules, the kernel or kernel flavour
    :ivar version: for firmware, the driver version in its name
    """

    stem: str
    branch: str = ""
    server: bool = False
    open: bool = False
    kernel: str = ""
    version: str = ""

    @property
    def versioned(self) -> bool:
        """Whether the package's version is the driver's version."""
        return not self.kernel and self.stem not in _COMPANIONS


def classify(name: str) -> DriverName | None:
    """Read a package's name; ``None`` when it is not part of a driver."""
    if _PINNING.match(name):
        return None
    match = _PREBUILT.match(name)
    if match:
        return DriverName(
            f"linux-{match['stem']}-nvidia", match["branch"], bool(match["server"]),
            bool(match["open"]), match["kernel"],
        )  # fmt: skip
    match = _BRANCHED.match(name)
    if match:
        return DriverName(
            match["stem"],
            match["branch"],
            bool(match["server"]),
            bool(match["open"]) or match["stem"] == "nvidia-open",
            version=match["version"] or "",
        )
    if name in UNBRANCHED:
        return DriverName(
            name, open=name.endswith(("-open", "-open-dkms")) or name == "nvidia-open"
        )
    return None


def branch_of(package: Package) -> str:
    """Return the branch of an installed driver package: by its name, else by its version."""
    name = classify(package.name)
    if name is None:
        return ""
    return name.branch or (deb_version.branch(package.version) if name.versioned else "")


def driver_packages(packages: Iterable[Package]) -> list[Package]:
    """Pick the driver packages, left-over configuration included."""
    return [package for package in packages if classify(package.name) is not None]


def parse_wish(version: str) -> tuple[str, str]:
    """Split the wished version into branch and exact upstream version.

    :returns: ``("580", "580.159.03")``, or ``("580", "")`` when only a branch is asked for
    :raises UnknownDriver: for anything else
    """
    text = version.strip()
    if re.fullmatch(r"[3-9]\d\d", text):
        return text, ""
    if re.fullmatch(r"[3-9]\d\d(\.\d+){1,2}", text):
        return text.split(".", 1)[0], text
    raise UnknownDriver(
        f"nvidia_driver_version is '{version}'; give a branch such as '580' "
        "or an exact version such as '580.159.03'"
    )


@dataclass(frozen=True)
class Spelling:
    """How one driver is spelt in package names.

    :ivar branch: e.g. ``580``
    :ivar open: the open kernel module
    :ivar full: with display (``nvidia-driver-580``) or the compute part only
    """

    branch: str
    open: bool = False
    full: bool = False

    @property
    def suffix(self) -> str:
        """Suffix of the packages that differ between the two kernel modules."""
        return f"{self.branch}-open" if self.open else self.branch

    @property
    def anchor(self) -> str:
        """The package whose version stands for the driver's."""
        return f"libnvidia-compute-{self.branch}"

    @property
    def compute(self) -> list[str]:
        """Packages that a machine without display needs: libraries, daemon, tools."""
        return [
            self.anchor,
            f"libnvidia-cfg1-{self.branch}",
            f"nvidia-compute-utils-{self.branch}",
            f"nvidia-kernel-common-{self.branch}",
            f"nvidia-utils-{self.branch}",
        ]

    @property
    def dkms(self) -> list[str]:
        """Packages that build the kernel module on the host."""
        return [f"nvidia-dkms-{self.suffix}", f"nvidia-kernel-source-{self.suffix}"]

    def prebuilt(self, kernels: Iterable[str]) -> list[str]:
        """Return the packages with Ubuntu's signed modules for kernels or kernel flavours."""
        return [f"linux-modules-nvidia-{self.suffix}-{kernel}" for kernel in kernels]

    @property
    def display(self) -> list[str]:
        """The metapackage with display."""
        return [f"nvidia-driver-{self.suffix}"]

    def foreign(self, name: DriverName, version: str, wanted_upstream: str = "") -> bool:
        """Whether a driver package must go before this driver comes.

        :param name: the package's name, read
        :param version: its installed version
        :param wanted_upstream: the wanted driver version; firmware of another one goes
        """
        if name.stem in _COMPANIONS:
            return False
        branch = name.branch or (deb_version.branch(version) if name.versioned else "")
        if branch != self.branch or name.server:
            return True
        if name.version and wanted_upstream and name.version != wanted_upstream:
            return True
        # Only these differ between the proprietary and the open kernel module.
        split = name.stem in (
            "nvidia-dkms", "nvidia-kernel-source", "nvidia-driver", "nvidia-headless",
            "nvidia-headless-no-dkms", "nvidia-open", "linux-modules-nvidia",
            "linux-objects-nvidia",
        )  # fmt: skip
        return split and name.open != self.open


def kernel_packages(packages: Iterable[Package], running: str) -> list[str]:
    """Pick the kernel packages to hold with the driver.

    The metapackages that move the kernel, and the running kernel's own image, modules and headers.

    :param running: release of the running kernel, e.g. ``6.17.0-29-generic``
    """
    own = {
        f"linux-{part}-{running}"
        for part in ("image", "image-unsigned", "modules", "modules-extra", "headers")
    }
    return sorted(
        p.name for p in packages if p.installed and (_KERNEL_META.match(p.name) or p.name in own)
    )


def preferences(branch: str, version: str) -> str:
    """Return the preferences file under which apt takes one driver version and no other.

    The driver's packages exist in Ubuntu's archive and in NVIDIA's repository under the same
    names with different versions; naming the version names the origin. Records are read in order
    and the first that matches a version counts, so everything else falls to the second record.

    :param branch: e.g. ``580``
    :param version: whole package version, e.g. ``580.159.03-0ubuntu0.24.04.1``
    """
    own = (
        f"nvidia-*-{branch} nvidia-*-{branch}-open nvidia-firmware-{branch}-* "
        f"libnvidia-*-{branch} xserver-xorg-video-nvidia-{branch} "
        f"nvidia-open-{branch} cuda-drivers-{branch}"
    )
    unbranched = sorted(UNBRANCHED - _COMPANIONS)
    others = " ".join([f"{stem}-[3-9]*" for stem in _STEMS.split()] + unbranched)
    return f"""\
# Written by the role nvidia_driver. One driver version from one origin; the hold in dpkg says the
# same, but a hold alone does not keep apt from proposing other branches.
Explanation: the driver of this host
Package: {own} {" ".join(unbranched)}
Pin: version {version}
Pin-Priority: 1001

Explanation: no other version, branch or origin of a driver package
Package: {others}
Pin: version *
Pin-Priority: -1
"""


def transitional(name: str, version: str, wanted_branch: str) -> str | None:
    """Tell which branch a package really brings, when its name says another one.

    In Ubuntu an old branch's names live on as empty packages that depend on a newer branch; their
    version is the newer branch's.

    :returns: the other branch, or ``None`` when name and version agree
    """
    real = deb_version.branch(version)
    named = classify(name)
    if named is None or not named.versioned:
        return None
    return real if real != wanted_branch and real.isdigit() else None


def transaction_faults(
    changes: Iterable[tuple[str, str, str | None, str | None]],
    wanted_version: str,
    allowed_removals: Iterable[str],
) -> list[str]:
    """List what a simulated transaction would do against the wish, with the packages' names.

    :param changes: (action, name, old version, new version)
    :param wanted_version: the driver's whole package version
    :param allowed_removals: names that are meant to go
    """
    allowed = set(allowed_removals)
    faults = []
    for action, name, old, new in changes:
        driver = classify(name)
        if action == "remove" and name not in allowed:
            faults.append(f"would remove {name} {old or ''}".rstrip())
        elif action == "install" and driver is not None and driver.versioned:
            if new != wanted_version:
                faults.append(f"would install {name} {new} instead of {wanted_version}")
        elif action == "install" and re.match(r"linux-image-(unsigned-)?\d", name):
            faults.append(f"would install the kernel {name}")
        elif action == "install" and old is not None and _KERNEL_META.match(name):
            faults.append(f"would move the kernel package {name} from {old} to {new}")
    return faults


def driver_changes(changes: Iterable[tuple[str, str, str | None, str | None]]) -> list[str]:
    """List every driver package that a transaction would touch (for the toolkit, which may not)."""
    words: Mapping[str, str] = {"install": "install or change", "remove": "remove"}
    return [
        f"would {words[action]} {name} {new or old or ''}".rstrip()
        for action, name, old, new in changes
        if classify(name) is not None
    ]
