"""What a check is: a function from a host and a wish to one finding, registered under an id."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from . import deb_packages, gpu_facts, systemd_unit
from .preflight_host import Host
from .preflight_wish import Wish

#: Groups in the order of the report; worst first inside each status.
GROUPS = (
    "hardware",
    "system",
    "driver",
    "cuda",
    "runtime",
    "model",
    "network",
    "service",
    "plan",
)

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    :ivar summary: one sentence
    :ivar evidence: what it was seen by: a line, a file, a value
    :ivar fix: a command or a variable, by name
    :ivar mended_by: the role that mends it when site.yml follows; empty when nothing does
    """

    status: str
    summary: str
    evidence: str = ""
    fix: str = ""
    mended_by: str = ""


def passed(summary: str, evidence: str = "") -> Outcome:
    """Return a finding that is well."""
    return Outcome(PASS, summary, evidence)


def skipped(summary: str, evidence: str = "") -> Outcome:
    """Return that there was nothing to look at, and why."""
    return Outcome(SKIP, summary, evidence)


def warned(summary: str, evidence: str = "", fix: str = "", mended_by: str = "") -> Outcome:
    """Return what does no harm yet."""
    return Outcome(WARN, summary, evidence, fix, mended_by)


def failed(summary: str, evidence: str = "", fix: str = "", mended_by: str = "") -> Outcome:
    """Return what would go wrong."""
    return Outcome(FAIL, summary, evidence, fix, mended_by)


@dataclass(frozen=True)
class Unit:
    """A systemd unit that runs vLLM, drop-ins included.

    :ivar files: where its settings come from, the unit's own file first
    :ivar settings: sections, keys and values of all files in order
    :ivar environment: effective variables, with the file and line each comes from
    """

    name: str
    files: tuple[str, ...]
    settings: systemd_unit.Unit
    environment: Mapping[str, str]
    origin: Mapping[str, str]
    argv: tuple[str, ...]
    ours: bool
    broken: str = ""

    def value(self, section: str, key: str) -> str:
        """Return a key's last value; empty when it has none."""
        found = systemd_unit.values(self.settings, section, key)
        return found[-1] if found else ""

    def option(self, name: str) -> str | None:
        """Return the value of a ``--name value`` or ``--name=value`` option of its command."""
        for index, word in enumerate(self.argv):
            if word == f"--{name}":
                return self.argv[index + 1] if index + 1 < len(self.argv) else ""
            if word.startswith(f"--{name}="):
                return word.partition("=")[2]
        return None


@dataclass
class Context:
    """A host, a wish, and what several checks need to know, each read once."""

    host: Host
    wish: Wish = field(default_factory=Wish)
    memo: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def gpus(self) -> gpu_facts.GpuFacts:
        """The cards."""
        return gpu_facts.gather(self.host)

    @cached_property
    def packages(self) -> list[deb_packages.Package] | None:
        """What dpkg has; None when it cannot be asked."""
        result = self.host.run(PACKAGE_QUERY, timeout=20)
        return deb_packages.parse(result.stdout) if result.ok else None

    @cached_property
    def by_name(self) -> dict[str, deb_packages.Package]:
        """The packages by name."""
        return deb_packages.by_name(self.packages or [])

    @cached_property
    def kernel(self) -> str:
        """Release of the running kernel; empty when unknown."""
        result = self.host.run(("uname", "-r"))
        return result.stdout.strip() if result.ok else ""

    @cached_property
    def next_kernel(self) -> str:
        """Release of the kernel that will boot: the newest in ``/boot``; empty when unknown."""
        releases = [name.removeprefix("vmlinuz-") for name in self.host.listdir("/boot")
                    if name.startswith("vmlinuz-")]  # fmt: skip
        return max(releases, key=version_key) if releases else ""

    @cached_property
    def driver_packages(self) -> list[deb_packages.Package]:
        """Packages of the driver that are installed or half installed."""
        return [p for p in self.packages or [] if DRIVER.match(p.name) and not p.leftover]

    @cached_property
    def driver_there(self) -> bool:
        """Whether any driver has been installed, in whatever way."""
        return bool(
            self.driver_packages
            or self.gpus.module.version
            or self.gpus.gpus
            or self.host.exists("/usr/bin/nvidia-smi")
            or self.host.exists("/usr/bin/nvidia-uninstall")
        )

    @cached_property
    def units(self) -> list[Unit]:
        """Units of this host that run vLLM."""
        from .preflight_units import find_units

        return find_units(self.host, self.wish)

    @property
    def foreign_units(self) -> list[Unit]:
        """Units that run vLLM and were not made by this project."""
        return [unit for unit in self.units if not unit.ours]

    @cached_property
    def accounts(self) -> dict[str, tuple[int, int, str]]:
        """Account name to (uid, gid, home), of ``/etc/passwd``."""
        found = {}
        for line in (self.host.read("/etc/passwd") or "").splitlines():
            fields = line.split(":")
            if len(fields) >= 7 and fields[2].isdecimal() and fields[3].isdecimal():
                found[fields[0]] = (int(fields[2]), int(fields[3]), fields[5])
        return found


#: One call for everything that dpkg knows.
PACKAGE_QUERY = ("dpkg-query", "-W", f"-f={deb_packages.QUERY}")

#: Names of driver packages, kernel modules included; libraries of CUDA are none.
DRIVER = re.compile(
    r"(lib)?nvidia-(driver|dkms|kernel|utils|compute-utils|compute|gl|cfg1|common|decode|encode|"
    r"extra|fbc1|firmware|open|persistenced|headless|settings)(-|$)|"
    r"linux-modules-nvidia-|linux-objects-nvidia-|linux-signatures-nvidia-|xserver-xorg-video-nvidia|"
    r"cuda-drivers"
)


def version_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which 6.17.0-29 follows 6.8.0-100."""
    parts = re.findall(r"\d+|[a-z]+", text)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


CheckFunction = Callable[[Context], Outcome]


@dataclass(frozen=True)
class Check:
    """A registered check."""

    id: str
    group: str
    title: str
    function: CheckFunction


_REGISTRY: dict[str, Check] = {}


def check(group: str, identifier: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as a check; the first line of its docstring is the title."""

    def register(function: CheckFunction) -> CheckFunction:
        if group not in GROUPS or identifier in _REGISTRY:
            raise ValueError(f"check {identifier!r}: unknown group or id taken")
        summary = (function.__doc__ or "").strip().splitlines()[0].rstrip(".")
        title = summary.removeprefix("Check that ")
        title = title[:1].upper() + title[1:] if not title.startswith("vLLM") else title
        _REGISTRY[identifier] = Check(identifier, group, title, function)
        return function

    return register


def registered() -> dict[str, Check]:
    """Return all checks by id, in the order of their groups."""
    return dict(sorted(_REGISTRY.items(), key=lambda item: GROUPS.index(item[1].group)))


def listing(items: list[str], most: int = 5) -> str:
    """Return a list for a sentence, cut after a few."""
    shown = ", ".join(items[:most])
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def gib(size: float) -> str:
    """Return bytes as GiB for a person."""
    return f"{size / 2**30:.1f} GiB"
