"""Decide what must happen so that one NVIDIA driver at one exact version is on the host.

:func:`make_plan` reads the host and answers with a :class:`Plan`; it changes nothing. On a host
that is as wished it asks dpkg and reads files, but does not ask apt. :mod:`nvidia_apply` carries
a plan out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import (
    apt_key,
    apt_source,
    apt_sources,
    deb_packages,
    deb_version,
    nvidia_kernel,
    nvidia_packages,
)
from .apt_client import Apt, AptError, Simulation, overlay
from .apt_source import Source
from .deb_packages import Package
from .nvidia_packages import Spelling
from .run import Runner, run

#: Sorts before cuda-repository-pin-600 of NVIDIA's cuda-keyring: the first match counts.
PREFERENCES = "/etc/apt/preferences.d/01-vllm-turing-driver.pref"

OPEN_WARNING = (
    "the open kernel module is known to crash on two linked RTX 2080 Ti "
    "(NVIDIA/open-gpu-kernel-modules#1211); set nvidia_driver_flavour: proprietary"
)
SECURE_BOOT_WAYS = (
    "ways out: (1) Ubuntu's signed modules (nvidia_driver_modules: prebuilt) when the archive has "
    "them for this kernel and version; (2) enrol the host's key: 'mokutil --import "
    "/var/lib/shim-signed/mok/MOK.der', reboot, confirm at the console; "
    "(3) turn Secure Boot off in the firmware"
)


#: Packages that a driver with display has and a compute-only one lacks.
_DISPLAY_STEMS = {"nvidia-driver", "xserver-xorg-video-nvidia", "libnvidia-gl"}
#: Of a driver's transaction alone: other branches go with their configuration, and the wished
#: version may be the older one.
_DRIVER_OPTIONS = ("--purge", "--allow-downgrades")
_NONE = nvidia_kernel.Module("", "")


class Refusal(Exception):
    """The wish cannot or must not be carried out; the text says why and what to do."""


@dataclass(frozen=True)
class Wish:
    """The driver that is wanted; the fields are the role's variables.

    :ivar state_dir: folder of the record, which belongs to the service account
    :ivar cache_dir: folder of the local package cache; what is installed comes from there, so
        it and its parents belong to root alone
    """

    version: str
    sources: Sequence[Source]
    state_dir: str
    cache_dir: str
    flavour: str = "proprietary"
    variant: str = "auto"
    modules: str = "auto"
    when_gone: str = "nearest"
    hold: bool = True
    release_foreign_holds: bool = False
    lock_timeout: float = 600.0


@dataclass(frozen=True)
class Resolved:
    """The exact driver that meets the wish.

    :ivar version: upstream version, ``580.173.02``
    :ivar package_version: ``580.173.02-0ubuntu0.24.04.1``
    :ivar source: name of the source, ``installed`` or ``cache``
    :ivar difference: one sentence when it is not the version asked for
    """

    version: str
    package_version: str
    source: str
    difference: str = ""


@dataclass
class Plan:
    """What is, what is wanted, and the way between.

    :ivar action: ``none``, ``repair`` (same driver: holds, files, half-done packages),
        ``install`` (there was none) or ``change`` (another version, branch or flavour)
    :ivar steps: every step in words, for people and for check mode
    :ivar arguments: what apt-get install gets
    :ivar debs: packages from the local package cache, instead of ``arguments``
    :ivar purge: installed packages of other drivers that go
    :ivar headers: kernel headers without which a module cannot be built
    :ivar build: kernels for which DKMS has the source but no installed module
    :ivar leftovers: removed packages whose configuration goes
    :ivar before: installed driver packages with their versions
    :ivar after: the same, as they will be
    """

    action: str
    resolved: Resolved
    spelling: Spelling
    steps: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    debs: list[str] = field(default_factory=list)
    purge: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    unhold: list[str] = field(default_factory=list)
    hold: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    key: Source | None = None
    findings: list[apt_sources.Finding] = field(default_factory=list)
    configure: list[str] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    build: list[str] = field(default_factory=list)
    initramfs: list[str] = field(default_factory=list)
    persistenced: list[str] = field(default_factory=list)
    load: bool = False
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    record: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Whether anything would be done."""
        return self.action != "none"


class Record:
    """The driver that this project chose, kept in ``driver.json`` of the state folder."""

    def __init__(self, state_dir: str, root: Path = Path("/")) -> None:
        """Remember where the record lies; it is read on demand."""
        self.path = root / state_dir.lstrip("/") / "driver.json"

    def read(self) -> dict[str, Any]:
        """Return the record; empty when there is none or it is damaged (it is then made anew)."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def write(self, data: Mapping[str, Any]) -> None:
        """Replace the record atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The folder belongs to the service account: a fixed scratch name could be a trap (a link).
        descriptor, scratch = tempfile.mkstemp(dir=self.path.parent, prefix=".driver.json.")
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(data, indent=2, sort_keys=True) + "\n")
        Path(scratch).chmod(0o644)
        Path(scratch).replace(self.path)


@dataclass
class Host:
    """What the plan is made from; read once.

    :ivar refresh: may fetch the host's package lists (not in check mode)
    """

    packages: list[Package]
    kernel: str
    runner: Runner
    apt: Apt
    root: Path
    refresh: bool = True
    refreshed: bool = False

    @property
    def index(self) -> dict[str, Package]:
        """Packages by name."""
        return deb_packages.by_name(self.packages)


def read_host(
    wish: Wish,
    runner: Runner = run,
    root: Path = Path("/"),
    *,
    refresh: bool = True,
    apt: Apt | None = None,
) -> Host:
    """Read the host's packages and its running kernel.

    :raises Refusal: when one of them cannot be read
    """
    try:
        packages = deb_packages.installed_packages(runner)
    except deb_packages.DpkgError as error:
        raise Refusal(str(error)) from error
    release = runner(["uname", "-r"])
    if not release.ok or not release.stdout.strip():
        raise Refusal("the running kernel's release cannot be read ('uname -r' failed)")
    return Host(
        packages, release.stdout.strip(), runner,
        apt or Apt(runner, lock_timeout=wish.lock_timeout), root, refresh,
    )  # fmt: skip


def store(wish: Wish, package_version: str) -> str:
    """Return the folder that keeps the .deb files of one driver version."""
    return f"{wish.cache_dir}/{package_version.replace(':', '_')}"


def installed_version(packages: Iterable[Package], spelling: Spelling) -> str | None:
    """Return the package version that all of a driver's installed packages share, else ``None``."""
    versions = set()
    anchor = False
    for package in nvidia_packages.driver_packages(packages):
        name = nvidia_packages.classify(package.name)
        if name is None or package.leftover:
            continue
        if not package.installed:
            return None
        if name.versioned and not spelling.foreign(name, package.version):
            versions.add(package.version)
            anchor = anchor or package.name == spelling.anchor
    return versions.pop() if anchor and len(versions) == 1 else None


def make_plan(wish: Wish, host: Host) -> Plan:
    """Compare the host with the wish.

    :raises Refusal: when the wish cannot or must not be carried out
    :raises AptError: when apt cannot be asked
    """
    branch, exact = _parse(wish.version)
    record = Record(wish.state_dir, host.root).read()
    drivers = nvidia_packages.driver_packages(host.packages)
    spelling = _spelling(wish, branch, drivers, record)
    warnings = [OPEN_WARNING] if spelling.open else []

    entries = apt_sources.read_all(host.root)
    own = {path for source in wish.sources for path in source.files}
    findings = apt_sources.find(entries, own, host.root)
    # What cannot be put right by switching a file off is only told.
    warnings += [finding.message for finding in findings if not finding.disable]
    findings = [finding for finding in findings if finding.disable]

    _refuse_run_installer(drivers, host)

    resolved = _settled(wish, branch, exact, spelling, record, host)
    plan = Plan("none", resolved or Resolved("", "", ""), spelling, warnings=warnings)
    plan.before = {p.name: p.version for p in drivers if not p.leftover}
    plan.held = sorted(p.name for p in host.packages if p.held)
    plan.findings = findings
    plan.steps += [f"switch off a source that stops apt: {finding.message}" for finding in findings]
    plan.configure = deb_packages.unfinished(host.packages)
    if plan.configure:
        plan.steps.append(f"finish what dpkg left half done: {', '.join(plan.configure)}")

    if resolved is None:
        with ExitStack() as stack:
            # What stops apt is not yet put right: look past it.
            host = replace(host, apt=_past(findings, host, stack))
            _plan_transaction(plan, wish, branch, exact, record, host, stack)
    else:
        plan.after = dict(plan.before)
    _plan_files(plan, wish, host)
    _plan_rest(plan, wish, record, host)
    if plan.action == "none" and plan.steps:
        plan.action = "repair"
    return plan


def _past(findings: Sequence[apt_sources.Finding], host: Host, stack: ExitStack) -> Apt:
    """Return apt as it will be once the sources that stop it are switched off."""
    repairs = apt_sources.repair(findings, host.root, check=True)
    if not repairs:
        return host.apt
    main = next((r for r in repairs if r.path == "/etc/apt/sources.list"), None)
    parts = [r for r in repairs if r is not main]
    scratch = overlay(
        sources={r.path.rsplit("/", 1)[-1]: r.after for r in parts if r.after is not None},
        hide=[r.path.rsplit("/", 1)[-1] for r in parts if r.after is None],
        main=None if main is None else main.after or "",
        root=host.root,
    )
    return host.apt.view(stack.enter_context(scratch))


def _parse(version: str) -> tuple[str, str]:
    try:
        return nvidia_packages.parse_wish(version)
    except nvidia_packages.UnknownDriver as error:
        raise Refusal(str(error)) from error


def _spelling(
    wish: Wish, branch: str, drivers: Sequence[Package], record: Mapping[str, Any]
) -> Spelling:
    """Fix flavour and variant; ``auto`` keeps what the host has."""
    names = [(p.name, nvidia_packages.classify(p.name)) for p in drivers if p.installed]
    stems = {name.stem for _, name in names if name}
    is_open = any(name.open for _, name in names if name)
    flavour_open = wish.flavour == "open" or (wish.flavour == "auto" and is_open)
    # A compute-only host stays one; a host without a driver gets the usual metapackage. An
    # installation that broke off is what it was meant to be.
    compute_only = bool(stems) and not stems & _DISPLAY_STEMS
    if record.get("complete") is False and record.get("variant"):
        compute_only = record["variant"] == "compute"
    full = wish.variant == "full" or (wish.variant == "auto" and not compute_only)
    return Spelling(branch, flavour_open, full)


def _refuse_run_installer(drivers: Sequence[Package], host: Host) -> None:
    """Refuse to install over a driver that dpkg does not know."""
    owned = {deb_version.upstream(p.version) for p in drivers if not p.leftover}
    found = nvidia_kernel.run_installer(owned, host.runner, host.root)
    if found:
        raise Refusal(
            f"driver {found.version} was installed by the .run installer "
            f"({'; '.join(found.traces)}); packages on top of it give mixed libraries: "
            "run 'nvidia-uninstall', then this again"
        )


def _settled(
    wish: Wish, branch: str, exact: str, spelling: Spelling, record: Mapping[str, Any], host: Host
) -> Resolved | None:
    """Return the driver if the host already has the one wished for; no apt is asked."""
    version = installed_version(host.packages, spelling)
    if version is None:
        return None
    upstream = deb_version.upstream(version)
    recorded = record.get("requested") == wish.version and record.get("package_version") == version
    # A branch without a record adopts what is installed: no move that nobody asked for.
    adopted = upstream == exact or (not exact and not record)
    if not (adopted or recorded):
        return None
    for package in nvidia_packages.driver_packages(host.packages):
        name = nvidia_packages.classify(package.name)
        # Half-removed or other drivers' packages, also their configuration, are still to go.
        if name and spelling.foreign(name, package.version, upstream):
            return None
    index = host.index
    tools = [f"nvidia-utils-{branch}", *(spelling.display if spelling.full else [])]
    if any(name not in index or not index[name].installed for name in tools):
        return None
    if not _module_package(host.packages, spelling, host.kernel):
        return None
    if recorded:
        return Resolved(
            upstream, version, str(record.get("source", "")), str(record.get("difference", ""))
        )
    return Resolved(upstream, version, "installed")


def _module_package(packages: Iterable[Package], spelling: Spelling, kernel: str) -> bool:
    """Whether a package that brings the kernel module is installed."""
    wanted = {spelling.dkms[0], *spelling.prebuilt([kernel])}
    return any(p.name in wanted and p.installed for p in packages)


# -- finding the exact version --------------------------------------------------------------------


@dataclass(frozen=True)
class _Offer:
    """One driver version that a source offers."""

    version: str
    package_version: str
    source: Source
    rank: int
    view: Apt


def _offers(
    wish: Wish, spelling: Spelling, host: Host, stack: ExitStack, exact: str
) -> list[_Offer]:
    """Ask the sources in order; stop at the first that has the exact version.

    :raises Refusal: when the branch's name is only a transitional package
    """
    offers: list[_Offer] = []
    fault: str | None = None
    for rank, source in enumerate(wish.sources):
        try:
            view = apt_source.view(source, host.apt, host.root, stack)
            found = _of_source(view, source, rank, spelling)
            if not source.files and not _has(found, exact):
                # The lists may be missing (a fresh box) or old: look again before giving up.
                view = _refresh(view, host, stack)
                found = _of_source(view, source, rank, spelling)
        except (AptError, apt_key.KeyProblem) as error:
            fault = f"source '{source.name}': {error}"
            continue
        offers += found
        if _has(found, exact):
            break
    if not offers and fault:
        raise Refusal(f"no source of driver packages can be used; {fault}")
    return offers


def _has(offers: Iterable[_Offer], exact: str) -> bool:
    return any(not exact or offer.version == exact for offer in offers)


def _of_source(view: Apt, source: Source, rank: int, spelling: Spelling) -> list[_Offer]:
    """List the versions of the branch that one source offers."""
    listed = view.candidates([spelling.anchor])[spelling.anchor]
    mine = [c for c in listed if source.origin in c.origins]
    for candidate in mine:
        other = nvidia_packages.transitional(spelling.anchor, candidate.version, spelling.branch)
        if other:
            raise Refusal(
                f"branch {spelling.branch} is now a transitional package for {other} "
                f"({spelling.anchor} {candidate.version}); set nvidia_driver_version: '{other}' "
                "or an exact version that a source still has"
            )
    return [
        _Offer(deb_version.upstream(c.version), c.version, source, rank, view)
        for c in sorted(mine, key=lambda c: deb_version.key(c.version), reverse=True)
    ]


def _refresh(view: Apt, host: Host, stack: ExitStack) -> Apt:
    """Fetch the package lists: the host's own, or in check mode a scratch copy."""
    if host.refreshed:
        return view
    if host.refresh:
        host.apt.update()
        host.refreshed = True
        return view
    scratch = host.apt.view(stack.enter_context(overlay(own_lists=True, root=host.root)))
    scratch.update()
    return scratch


def _choose(
    offers: list[_Offer], wish: Wish, branch: str, exact: str, record: Mapping[str, Any]
) -> list[tuple[_Offer, str]]:
    """Put the versions in the order in which they are to be tried, each with its difference.

    :raises Refusal: names what is there
    """
    there = ", ".join(f"{o.package_version} ({o.source.name})" for o in offers) or "none"
    if not exact:
        if not offers:
            raise Refusal(
                f"no source has a driver of branch {branch}; look at nvidia_driver_sources"
            )
        recorded = (
            record.get("package_version") if record.get("requested") == wish.version else None
        )
        order = [o for o in offers if o.package_version == recorded] or [
            o for o in offers if o.rank == min(offer.rank for offer in offers)
        ]
        return [(o, "") for o in order]
    same = [o for o in offers if o.version == exact]
    if same:
        return [(o, "") for o in same]
    old = (
        f"driver {exact} is in no source any more (there is: {there}); old packages are kept at "
        f"https://launchpad.net/ubuntu/+source/nvidia-graphics-drivers-{branch} and "
        "https://snapshot.ubuntu.com (add it to nvidia_driver_sources)"
    )
    if wish.when_gone == "stop":
        raise Refusal(f"{old}; or set nvidia_driver_when_gone: nearest")
    newer = [o for o in offers if deb_version.compare(o.version, exact) > 0]
    if not newer:
        raise Refusal(f"{old}; no newer version of branch {branch} is there either")
    newer.sort(key=lambda o: (deb_version.key(o.version), o.rank))
    return [
        (
            o,
            f"driver {o.version} instead of {exact}, which no source has any more "
            f"(from '{o.source.name}')",
        )
        for o in newer
    ]


# -- the transaction ------------------------------------------------------------------------------


def _plan_transaction(
    plan: Plan,
    wish: Wish,
    branch: str,
    exact: str,
    record: Mapping[str, Any],
    host: Host,
    stack: ExitStack,
) -> None:
    """Choose version and packages, and simulate the transaction before anything is written."""
    cached = _from_cache(plan, wish, exact, record, host)
    if cached:
        attempts: list[tuple[_Offer, str]] = [cached]
    else:
        offers = _offers(wish, plan.spelling, host, stack, exact)
        attempts = _choose(offers, wish, branch, exact, record)
    reasons: list[str] = []
    for offer, difference in attempts:
        reason = _try(plan, wish, offer, difference, host)
        if reason is None:
            return
        reasons.append(f"{offer.package_version} ({offer.source.name}): {reason}")
    raise Refusal("the driver cannot be installed: " + " | ".join(dict.fromkeys(reasons)))


def _from_cache(
    plan: Plan, wish: Wish, exact: str, record: Mapping[str, Any], host: Host
) -> tuple[_Offer, str] | None:
    """Return the recorded or wished version when its packages lie in the local package cache.

    Used when something else moved the driver and the sources no longer have the old version.
    """
    folder = host.root / wish.cache_dir.lstrip("/")
    if not folder.is_dir():
        return None
    for path in folder.iterdir():
        version = path.name.replace("_", ":", 1) if path.name[:2].endswith("_") else path.name
        wanted = (exact and deb_version.upstream(version) == exact) or (
            record.get("requested") == wish.version and record.get("package_version") == version
        )
        if wanted and list(path.glob(f"{plan.spelling.anchor}_*.deb")):
            source = Source("cache", "")
            difference = str(record.get("difference", "")) if not exact else ""
            offer = _Offer(deb_version.upstream(version), version, source, 0, host.apt)
            listed = host.apt.candidates([plan.spelling.anchor])[plan.spelling.anchor]
            # An index that still has it is better: it can also bring what the cache lacks.
            if any(candidate.version == version for candidate in listed):
                return None
            return offer, difference
    return None


def _try(plan: Plan, wish: Wish, offer: _Offer, difference: str, host: Host) -> str | None:
    """Try one version; fills the plan and returns ``None``, or returns why it does not go."""
    spelling = plan.spelling
    foreign, leftovers, foreign_holds = _others(plan, wish, offer, host)
    if foreign_holds and not wish.release_foreign_holds:
        raise Refusal(
            f"on hold by somebody else and in the way: {', '.join(foreign_holds)}; release them "
            f"('apt-mark unhold {' '.join(foreign_holds)}') or set "
            "nvidia_driver_release_foreign_holds: true"
        )
    plan.warnings = [w for w in plan.warnings if not w.startswith("Secure Boot")]
    reasons = []
    for kind in _module_kinds(plan, wish, offer, host):
        try:
            arguments, debs = _arguments(plan, offer, kind, foreign, wish, host)
        except AptError as error:
            reasons.append(str(error))
            continue
        preferences = nvidia_packages.preferences(spelling.branch, offer.package_version)
        name = PREFERENCES.rsplit("/", 1)[-1]
        with _Overlaid(offer.view, {name: preferences}, host) as view:
            # Our holds are still on in the simulation; they are released just before the real one.
            simulation = view.simulate(["--allow-change-held-packages", *arguments, *debs])
        faults = _faults(simulation, offer.package_version, foreign)
        if faults:
            reasons.append(f"with {kind} modules: {faults}")
            continue
        _fill(plan, offer, difference, arguments, debs, foreign, leftovers, simulation)
        return None
    return "; ".join(reasons)


class _Overlaid:
    """A view with our preferences laid over those of the view's own."""

    def __init__(self, view: Apt, preferences: Mapping[str, str], host: Host) -> None:
        self._view, self._host = view, host
        self._preferences = dict(preferences)
        self._stack = ExitStack()

    def __enter__(self) -> Apt:
        folder = self._view.option("Dir::Etc::preferencesparts")
        if folder:
            # A scratch view already has a preferences folder of its own: add to that one.
            for name, content in self._preferences.items():
                (Path(folder) / name).write_text(content, encoding="utf-8")
            return self._view
        scratch = self._stack.enter_context(overlay(self._preferences, root=self._host.root))
        return self._view.view(scratch)

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def _others(
    plan: Plan, wish: Wish, offer: _Offer, host: Host
) -> tuple[list[str], list[str], list[str]]:
    """List other drivers' installed packages, their left-over configuration, and foreign holds."""
    ours = set(Record(wish.state_dir, host.root).read().get("held", []))
    foreign, leftovers, held = [], [], []
    for package in nvidia_packages.driver_packages(host.packages):
        name = nvidia_packages.classify(package.name)
        if name is None:
            continue
        other = plan.spelling.foreign(name, package.version, offer.version)
        if package.leftover:
            if other:
                leftovers.append(package.name)
            continue
        if other:
            foreign.append(package.name)
        moves = other or (name.versioned and package.version != offer.package_version)
        if package.held and moves and package.name not in ours:
            held.append(package.name)
    return sorted(set(foreign)), sorted(set(leftovers)), sorted(set(held))


def _module_kinds(plan: Plan, wish: Wish, offer: _Offer, host: Host) -> list[str]:
    """Tell in which order to try DKMS and prebuilt modules; Secure Boot decides first.

    :raises Refusal: when Secure Boot would refuse the only kind allowed
    """
    boot = nvidia_kernel.secure_boot(host.runner, host.root)
    if boot.state == "unknown":
        plan.warnings.append(
            "Secure Boot: state unknown (mokutil is missing); look at "
            "/sys/firmware/efi/efivars/SecureBoot-* or install mokutil"
        )
    locked = boot.state == "enabled" and boot.key_enrolled is not True
    if wish.modules == "dkms" and locked:
        raise Refusal(
            "Secure Boot is on and the key that signs modules built on this host is not enrolled, "
            f"so the driver would not load; {SECURE_BOOT_WAYS}"
        )
    if wish.modules != "auto":
        return [wish.modules]
    if locked:
        return ["prebuilt"]
    names = {p.name for p in host.packages if p.installed}
    prebuilt_now = names & set(plan.spelling.prebuilt([host.kernel]))
    if prebuilt_now and plan.spelling.dkms[0] not in names:
        return ["prebuilt", "dkms"]
    return ["dkms", "prebuilt"]


def _arguments(
    plan: Plan, offer: _Offer, kind: str, foreign: Sequence[str], wish: Wish, host: Host
) -> tuple[list[str], list[str]]:
    """Spell the transaction for apt-get install.

    :returns: arguments, and the paths of .deb files from the local package cache
    :raises AptError: when a package that is needed is not offered, with its name
    """
    spelling, version = plan.spelling, offer.package_version
    present = [
        p.name
        for p in nvidia_packages.driver_packages(host.packages)
        if not p.leftover and p.name not in foreign and _moves(p)
    ]
    kernels = list(dict.fromkeys([host.kernel, *_boot_kernels(host)]))
    modules = spelling.dkms if kind == "dkms" else spelling.prebuilt(kernels)
    display = spelling.display if spelling.full else []
    missing = _missing_headers(kernels, host) if kind == "dkms" else []
    arguments = [f"{name}-" for name in foreign]
    if offer.source.name == "cache":
        folder = host.root / store(wish, version).lstrip("/")
        debs = sorted(str(path) for path in folder.glob("*.deb"))
        return [*_DRIVER_OPTIONS, *arguments], debs

    names = list(dict.fromkeys([*spelling.compute, *display, *modules, *present]))
    offered = offer.view.candidates([*names, *missing])
    absent = [name for name in missing if not offered[name]]
    if host.kernel in {name.removeprefix("linux-headers-") for name in absent}:
        raise AptError(
            f"the module cannot be built for the running kernel: linux-headers-{host.kernel} is in "
            "no source; boot a kernel whose headers are there"
        )
    plan.warnings += [
        f"{name} is in no source: no module can be built for that kernel" for name in absent
    ]
    arguments += [name for name in missing if name not in absent]
    required = {spelling.anchor, f"nvidia-utils-{spelling.branch}", modules[0], *display}
    for name in names:
        versions = offered[name]
        if _prebuilt(name):
            if versions:
                arguments.append(name)
                continue
        elif any(candidate.version == version for candidate in versions):
            arguments.append(f"{name}={version}")
            continue
        if name in required:
            raise AptError(
                f"{name} {'' if _prebuilt(name) else version} is in no source".replace("  ", " ")
            )
    return [*_DRIVER_OPTIONS, *arguments], []


def _moves(package: Package) -> bool:
    """Whether an installed driver package must follow the driver's version."""
    name = nvidia_packages.classify(package.name)
    return name is not None and name.versioned


def _prebuilt(name: str) -> bool:
    return name.startswith("linux-modules-nvidia-")


def _boot_kernels(host: Host) -> list[str]:
    """Return the kernels that may boot next."""
    return nvidia_kernel.next_kernels(nvidia_kernel.installed_kernels(host.root), host.root)


def _missing_headers(kernels: Iterable[str], host: Host) -> list[str]:
    """Return the header packages that are missing to build a module for the kernels."""
    return [
        f"linux-headers-{kernel}"
        for kernel in kernels
        if not nvidia_kernel.headers_present(kernel, host.root)
    ]


def _faults(simulation: Simulation, version: str, allowed: Sequence[str]) -> str:
    """Say what is wrong with a simulated transaction; ``""`` when it is as wished."""
    if simulation.error:
        return simulation.error
    return "; ".join(
        nvidia_packages.transaction_faults(
            [(c.action, c.name, c.old, c.new) for c in simulation.changes], version, allowed
        )
    )


def _fill(
    plan: Plan,
    offer: _Offer,
    difference: str,
    arguments: list[str],
    debs: list[str],
    foreign: list[str],
    leftovers: list[str],
    simulation: Simulation,
) -> None:
    """Write one feasible transaction into the plan."""
    plan.resolved = Resolved(offer.version, offer.package_version, offer.source.name, difference)
    plan.arguments, plan.debs = arguments, debs
    plan.purge, plan.leftovers = foreign, leftovers
    plan.after = {k: v for k, v in plan.before.items() if k not in simulation.removes}
    touched = []
    for name, change in simulation.installs.items():
        if nvidia_packages.classify(name) is not None:
            plan.after[name] = change.new or ""
        touched.append(name)
    plan.unhold = sorted(set(plan.held) & {*touched, *foreign})
    plan.key = offer.source if offer.source.key_url else None
    if not plan.before:
        plan.action = "install"
    elif touched or foreign:
        plan.action = "change"
    else:
        plan.action = "repair"
    # Only files that differ are written; _plan_files decides.
    plan.files.update(offer.source.files)
    old = sorted({deb_version.upstream(v) for v in plan.before.values()})
    if touched or foreign:
        plan.steps.append(
            f"install driver {offer.package_version} from '{offer.source.name}'"
            + (f" in place of {', '.join(old)}" if old else "")
            + f": {', '.join(sorted(touched))}"
        )
    if foreign:
        plan.steps.append(f"purge packages of other drivers: {', '.join(foreign)}")
    if leftovers:
        plan.steps.append(f"purge left-over configuration of: {', '.join(leftovers)}")


# -- files, holds and the rest --------------------------------------------------------------------


def _read(root: Path, path: str) -> str | None:
    """Return a file's text, or ``None``."""
    try:
        return (root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _plan_files(plan: Plan, wish: Wish, host: Host) -> None:
    """Keep of the wanted files those that differ from what is on the host."""
    wanted = dict(plan.files)
    wanted[PREFERENCES] = nvidia_packages.preferences(
        plan.spelling.branch, plan.resolved.package_version
    )
    plan.files = {p: content for p, content in wanted.items() if _read(host.root, p) != content}
    plan.steps += [f"write {path}" for path in plan.files]
    if plan.key and apt_source.key_is_right(plan.key, host.root):
        plan.key = None
    if plan.key:
        plan.steps.append(f"install the signing key {plan.key.key_path}")


def wanted_holds(packages: Iterable[Package], kernels: Iterable[str]) -> list[str]:
    """Return the packages to hold, by name: every driver package and the kernels' own.

    :param kernels: see :func:`kept_kernels`
    """
    listed = list(packages)
    drivers = [
        p.name
        for p in nvidia_packages.driver_packages(listed)
        if not p.leftover and p.state[1:2] != "n"
    ]
    return sorted({*drivers, *kernel_holds(listed, kernels)})


def kernel_holds(packages: Iterable[Package], kernels: Iterable[str]) -> set[str]:
    """Return the packages of the given kernels, by name."""
    listed = list(packages)
    return {name for k in kernels for name in nvidia_packages.kernel_packages(listed, k)}


def kept_kernels(host: Host) -> list[str]:
    """Return the kernels that must stay: the running one and those that may boot next.

    Both, so that a run after the reboot into the newer one finds it held already.
    """
    return list(dict.fromkeys([host.kernel, *_boot_kernels(host)]))


def _plan_rest(plan: Plan, wish: Wish, record: Mapping[str, Any], host: Host) -> None:
    """Plan holds, initramfs, persistenced and the record."""
    transaction = bool(plan.arguments or plan.debs)
    kept = kept_kernels(host)
    wanted = wanted_holds(host.packages, kept) if wish.hold else []
    if transaction:
        # The list is made from what is installed afterwards; this is its forecast.
        kernels = kernel_holds(host.packages, kept)
        plan.hold = sorted({*plan.after, *kernels}) if wish.hold else []
    else:
        plan.hold = wanted
    missing = sorted(set(plan.hold) - set(plan.held))
    if wish.hold and (missing or (transaction and plan.unhold)):
        plan.steps.append(f"hold {', '.join(missing or plan.hold)}")
    if not wish.hold:
        ours = set(record.get("held", []))
        plan.unhold = sorted({*plan.unhold, *(ours & set(plan.held))})
        if plan.unhold:
            plan.steps.append(f"release the hold of {', '.join(plan.unhold)}")

    if not transaction:
        _plan_modules(plan, host)
    for kernel in nvidia_kernel.installed_kernels(host.root):
        state = nvidia_kernel.initramfs(kernel, host.runner, host.root)
        if state.exists and state.stale:
            plan.initramfs.append(kernel)
            plan.steps.append(f"rebuild {state.path}, which is older than {', '.join(state.stale)}")
    loaded = nvidia_kernel.loaded_version(host.root)
    if not transaction:
        plan.persistenced = persistence_needs(host, running=loaded == plan.resolved.version)
        plan.steps += [f"{verb} nvidia-persistenced" for verb in plan.persistenced]
    if loaded is None and not nvidia_kernel.nouveau_loaded(host.runner):
        module = nvidia_kernel.module_for(host.kernel, host.runner, host.root)
        built = (module or _NONE).version == plan.resolved.version
        plan.load = transaction or built or host.kernel in plan.build
        if plan.load:
            plan.steps.append("load the kernel module")
    wanted_record = {
        "requested": wish.version,
        "resolved": plan.resolved.version,
        "package_version": plan.resolved.package_version,
        "difference": plan.resolved.difference,
        "flavour": "open" if plan.spelling.open else "proprietary",
        "held": plan.hold,
        "complete": True,
    }
    if any(record.get(key) != value for key, value in wanted_record.items()):
        plan.record = True
        plan.steps.append(f"record the driver in {wish.state_dir}/driver.json")


def _plan_modules(plan: Plan, host: Host) -> None:
    """Plan the DKMS modules that the running kernel or the one that boots next lacks."""
    names = {p.name for p in host.packages if p.installed}
    if not names & {plan.spelling.dkms[0], "nvidia-dkms"}:
        return
    for kernel in dict.fromkeys([host.kernel, *_boot_kernels(host)]):
        module = nvidia_kernel.module_for(kernel, host.runner, host.root)
        if (module or _NONE).version == plan.resolved.version:
            continue
        if not nvidia_kernel.headers_present(kernel, host.root):
            name = f"linux-headers-{kernel}"
            if not host.apt.candidates([name])[name]:
                plan.warnings.append(f"{name} is in no source: kernel {kernel} gets no module")
                continue
            plan.headers.append(name)
            plan.steps.append(f"install {name}")
        plan.build.append(kernel)
        plan.steps.append(f"build module {plan.resolved.version} for kernel {kernel}")


def persistence_needs(host: Host, *, running: bool) -> list[str]:
    """Tell what nvidia-persistenced needs: ``enable``, ``start`` or nothing."""
    result = host.runner(
        [
            "systemctl",
            "show",
            "-p",
            "LoadState,UnitFileState,ActiveState",
            "nvidia-persistenced.service",
        ]
    )
    fields = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    if not result.ok or fields.get("LoadState") != "loaded":
        return []
    needed = []
    # "static" is Ubuntu's form: a udev rule starts it when the driver binds.
    if fields.get("UnitFileState") == "disabled":
        needed.append("enable")
    if running and fields.get("ActiveState") in ("inactive", "failed"):
        needed.append("start")
    return needed


def describe(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data for the module's result."""
    return {
        "action": plan.action,
        "version": plan.resolved.version,
        "package_version": plan.resolved.package_version,
        "source": plan.resolved.source,
        "difference": plan.resolved.difference,
        "flavour": "open" if plan.spelling.open else "proprietary",
        "steps": plan.steps,
        "warnings": plan.warnings,
        "packages": plan.after,
        "spelling": asdict(plan.spelling),
    }


def installed_drivers(packages: Iterable[Package]) -> dict[str, str]:
    """Return the driver packages on the host with their versions."""
    return {p.name: p.version for p in nvidia_packages.driver_packages(packages) if not p.leftover}


def held(host: Host) -> list[str]:
    """Return the packages on hold."""
    return sorted(p.name for p in host.packages if p.held)


def as_text(packages: Mapping[str, str], held: Iterable[str], files: Iterable[str] = ()) -> str:
    """Show packages with their versions and holds, one a line, for a diff."""
    on_hold = set(held)
    lines = [
        f"{name} {version}{' hold' if name in on_hold else ''}"
        for name, version in sorted(packages.items())
    ]
    lines += [f"{name} hold" for name in sorted(on_hold - set(packages))]
    return "\n".join([*lines, *files]) + "\n" if (lines or files) else ""
