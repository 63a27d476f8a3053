"""Carry out a driver plan, and put the previous driver back.

Every step leaves a state from which the same run, started again, goes on: the record is written
with ``complete: false`` before the first change, the previous driver's packages are kept before
they are replaced, and each step looks at what is there and not at what came before it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
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
from .apt_client import Apt, AptError
from .nvidia_driver import (
    PREFERENCES,
    Host,
    Plan,
    Record,
    Refusal,
    Wish,
    installed_version,
    kept_kernels,
    persistence_needs,
    read_host,
    store,
    wanted_holds,
)


class ApplyError(Exception):
    """A step failed; the text says which, why, and what to do."""


def apply(plan: Plan, wish: Wish, host: Host) -> list[str]:
    """Carry out a plan.

    :returns: warnings
    :raises ApplyError: one sentence; the host can be brought on by the same run started again
    """
    warnings: list[str] = []
    record = Record(wish.state_dir, host.root)
    apt = Apt(host.runner, lock_timeout=wish.lock_timeout)
    try:
        apt_sources.repair(plan.findings, host.root)
        if plan.key:
            apt_source.write(host.root, plan.key.key_path, apt_source.fetch_key(plan.key))
        # Sources come after their key and before apt; the pin comes just before the transaction.
        new_source = [path for path in plan.files if path != PREFERENCES]
        for path in new_source:
            apt_source.write(host.root, path, plan.files[path].encode())
        if new_source:
            apt.update()
        if plan.configure:
            _finish(plan, apt, host)
        if plan.arguments or plan.debs:
            _transaction(plan, wish, host, apt, record)
        elif PREFERENCES in plan.files:
            apt_source.write(host.root, PREFERENCES, plan.files[PREFERENCES].encode())
        if plan.leftovers:
            apt.purge(plan.leftovers)
        warnings += _after(plan, wish, host, apt, record)
    except (AptError, apt_key.KeyProblem, OSError, Refusal) as error:
        raise ApplyError(str(error)) from error
    return warnings


def _finish(plan: Plan, apt: Apt, host: Host) -> None:
    """Finish half-done packages; headers that their DKMS build lacks come first.

    A failure is final only when no transaction follows that may replace the package at fault.
    """
    kernel = host.kernel
    dkms = any(name.startswith("nvidia-dkms") for name in plan.configure)
    try:
        if dkms and not nvidia_kernel.headers_present(kernel, host.root):
            apt.install([f"linux-headers-{kernel}"])
        if dkms:
            host.runner(["dkms", "autoinstall", "-k", kernel], timeout=1800)
        apt.configure()
    except AptError as error:
        if plan.arguments or plan.debs:
            return
        log = nvidia_kernel.build_log("*", host.root)
        raise AptError(f"{error}{f'; the build failed, see {log}' if log else ''}") from error


def _transaction(plan: Plan, wish: Wish, host: Host, apt: Apt, record: Record) -> None:
    """Replace the driver's packages."""
    snapshot(plan, wish, host, apt, record)
    old = record.read()
    record.write({**old, **_record(plan, wish, old.get("held", [])), "complete": False})
    apt.unhold(plan.unhold)
    if PREFERENCES in plan.files:
        apt_source.write(host.root, PREFERENCES, plan.files[PREFERENCES].encode())
    archives = str(host.root / store(wish, plan.resolved.package_version).lstrip("/"))
    try:
        apt.install([*plan.arguments, *plan.debs], archives=None if plan.debs else archives)
    except AptError as error:
        if " 404 " not in str(error):
            raise
        # The index is older than the archive: fetch it anew, once.
        apt.update()
        apt.install([*plan.arguments, *plan.debs], archives=None if plan.debs else archives)


def snapshot(plan: Plan, wish: Wish, host: Host, apt: Apt, record: Record) -> None:
    """Keep what is needed to come back: the list of the present packages, and their files.

    Nothing is kept of a half-changed state, so that a run started again after a kill does not
    replace a good snapshot by a bad one.
    """
    packages = [p for p in nvidia_packages.driver_packages(host.packages) if not p.leftover]
    upstreams = {
        deb_version.upstream(p.version)
        for p in packages
        if (name := nvidia_packages.classify(p.name)) is not None and name.versioned
    }
    if not packages or len(upstreams) != 1 or any(not p.installed for p in packages):
        return
    version = next(
        p.version
        for p in packages
        if (name := nvidia_packages.classify(p.name)) is not None and name.versioned
    )
    folder = host.root / store(wish, version).lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for package in packages:
        pattern = f"{package.name}_{package.version.replace(':', '%3a')}_*.deb"
        if list(folder.glob(pattern)):
            continue
        cached = list((host.root / "var/cache/apt/archives").glob(pattern))
        if cached:
            shutil.copy2(cached[0], folder / cached[0].name)
        else:
            missing.append(f"{package.name}={package.version}")
    if missing:
        apt.download(missing, str(folder))
    kept = {path.name.split("_", 1)[0] for path in folder.glob("*.deb")}
    data = {
        "package_version": version,
        "packages": {p.name: p.version for p in packages},
        "held": sorted(p.name for p in packages if p.held),
        "record": record.read(),
        "preferences": _text(host.root, PREFERENCES),
        "complete": all(p.name in kept for p in packages),
        "missing": sorted(p.name for p in packages if p.name not in kept),
    }
    path = _previous(wish, host.root)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    scratch.replace(path)


def _text(root: Path, path: str) -> str:
    try:
        return (root / path.lstrip("/")).read_text(encoding="utf-8")
    except OSError:
        return ""


def _previous(wish: Wish, root: Path) -> Path:
    return root / f"{wish.cache_dir}/previous.json".lstrip("/")


def previous(wish: Wish, root: Path = Path("/")) -> dict[str, Any]:
    """Return the snapshot of the driver before the last change; empty when there is none."""
    try:
        data = json.loads(_previous(wish, root).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _record(plan: Plan, wish: Wish, held: list[str]) -> dict[str, Any]:
    return {
        "requested": wish.version,
        "resolved": plan.resolved.version,
        "package_version": plan.resolved.package_version,
        "source": plan.resolved.source,
        "difference": plan.resolved.difference,
        "flavour": "open" if plan.spelling.open else "proprietary",
        "variant": "full" if plan.spelling.full else "compute",
        "held": held,
    }


def _after(plan: Plan, wish: Wish, host: Host, apt: Apt, record: Record) -> list[str]:
    """Check what is installed, then set holds, initramfs, daemon, module and record."""
    warnings: list[str] = []
    now = read_host(wish, host.runner, host.root, apt=apt)
    version = installed_version(now.packages, plan.spelling)
    if version != plan.resolved.package_version:
        found = {
            f"{p.name} {p.version} ({p.unfinished or p.state})"
            for p in nvidia_packages.driver_packages(now.packages)
            if not p.leftover and (not p.installed or p.version != plan.resolved.package_version)
        }
        raise AptError(
            f"after the transaction the driver is not {plan.resolved.package_version}: "
            f"{', '.join(sorted(found)) or 'its packages are missing'}"
        )
    wanted = wanted_holds(now.packages, kept_kernels(now)) if wish.hold else []
    held = {p.name for p in now.packages if p.held}
    apt.hold(set(wanted) - held)
    if not wish.hold:
        apt.unhold(set(plan.unhold) & held)

    if plan.headers:
        apt.install(plan.headers)
    _build(plan, now)
    stale = [
        kernel
        for kernel in nvidia_kernel.installed_kernels(now.root)
        if nvidia_kernel.initramfs(kernel, now.runner, now.root).stale
    ]
    for kernel in stale:
        result = now.runner(["update-initramfs", "-u", "-k", kernel], timeout=900)
        if not result.ok:
            raise AptError(
                f"update-initramfs failed for {kernel}: "
                f"{result.error or (result.stderr.strip().splitlines() or ['no message'])[-1]}"
            )
    if plan.load:
        result = now.runner(["modprobe", "nvidia"], timeout=120)
        if result.ok:
            # The compute node devices; nvidia-modprobe makes them on demand as well.
            now.runner(["modprobe", "nvidia-uvm"], timeout=60)
        else:
            reason = result.error or (result.stderr.strip().splitlines() or ["no message"])[-1]
            warnings.append(f"the module did not load now ({reason}); the reboot gate decides")
    warnings += _persistence(plan, now)

    fresh = _record(plan, wish, wanted)
    old = record.read()
    if plan.resolved.source == "installed" and old.get("package_version") == version:
        fresh["source"] = old.get("source", "installed")
    fresh["complete"] = True
    record.write(fresh)
    _prune(wish, now, version)
    return warnings


def _build(plan: Plan, host: Host) -> None:
    """Build what DKMS has the source of but no module for.

    :raises AptError: names the kernel and the build log
    """
    for kernel in plan.build:
        result = host.runner(
            [
                "dkms",
                "install",
                "-m",
                "nvidia",
                "-v",
                plan.resolved.version,
                "-k",
                kernel,
                "--force",
            ],
            timeout=1800,
        )
        module = nvidia_kernel.module_for(kernel, host.runner, host.root)
        if module is None or module.version != plan.resolved.version:
            log = nvidia_kernel.build_log(plan.resolved.version, host.root)
            lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
            reason = result.error or (lines or [f"status {result.rc}"])[0]
            raise AptError(
                f"module {plan.resolved.version} was not built for kernel {kernel}: {reason}"
                + (f"; see {log}" if log else "")
            )


def _persistence(plan: Plan, host: Host) -> list[str]:
    """Enable the persistence daemon, and start it when the module it talks to is the right one."""
    running = nvidia_kernel.loaded_version(host.root) == plan.resolved.version
    warnings = []
    for verb in persistence_needs(host, running=running):
        result = host.runner(["systemctl", verb, "nvidia-persistenced.service"], timeout=60)
        if not result.ok:
            reason = result.error or (result.stderr.strip().splitlines() or ["no message"])[0]
            warnings.append(f"nvidia-persistenced: systemctl {verb} failed ({reason})")
    return warnings


def _prune(wish: Wish, host: Host, version: str) -> None:
    """Keep the packages of the present driver and of the one before."""
    folder = host.root / wish.cache_dir.lstrip("/")
    keep = {version, str(previous(wish, host.root).get("package_version", ""))}
    names = {name.replace(":", "_") for name in keep}
    if folder.is_dir():
        for path in folder.iterdir():
            if path.is_dir() and path.name not in names:
                shutil.rmtree(path, ignore_errors=True)


# -- the way back ---------------------------------------------------------------------------------


def way_back(wish: Wish, host: Host) -> tuple[Mapping[str, Any], list[str], list[str]]:
    """Tell how the previous driver comes back: its snapshot, its .deb files, packages that go.

    :raises Refusal: when there is no way back, with the reason
    """
    data = previous(wish, host.root)
    if not data:
        raise Refusal("there is no previous driver to go back to (no snapshot was taken)")
    if not data.get("complete"):
        raise Refusal(
            f"driver {data['package_version']} cannot come back without network: the packages of "
            f"{', '.join(data.get('missing', []))} are not in the local package cache"
        )
    folder = host.root / store(wish, str(data["package_version"])).lstrip("/")
    wanted: dict[str, str] = data["packages"]
    debs = []
    for name, version in sorted(wanted.items()):
        found = sorted(folder.glob(f"{name}_{version.replace(':', '%3a')}_*.deb"))
        if not found:
            raise Refusal(f"the package file of {name} {version} has gone from '{folder}'")
        debs.append(str(found[0]))
    going = sorted(
        p.name
        for p in nvidia_packages.driver_packages(host.packages)
        if not p.leftover and p.name not in wanted
    )
    return data, debs, going


def is_back(data: Mapping[str, Any], host: Host) -> bool:
    """Whether the host already has exactly the snapshot's driver packages."""
    now = {
        p.name: p.version
        for p in nvidia_packages.driver_packages(host.packages)
        if not p.leftover and p.installed
    }
    return now == dict(data["packages"])


def restore(wish: Wish, host: Host, reason: str = "") -> None:
    """Put the previous driver back from the local package cache; no network is used.

    :param reason: why, for the record
    :raises ApplyError: one sentence
    """
    apt = Apt(host.runner, lock_timeout=wish.lock_timeout)
    held = [p.name for p in nvidia_packages.driver_packages(host.packages) if p.held]
    try:
        data, debs, going = way_back(wish, host)
        failed = Record(wish.state_dir, host.root).read()
        apt.unhold(held)
        preferences = data.get("preferences") or ""
        if preferences:
            apt_source.write(host.root, PREFERENCES, preferences.encode())
        else:
            (host.root / PREFERENCES.lstrip("/")).unlink(missing_ok=True)
        if not is_back(data, host):
            # No archive is known to apt here, so that nothing can come from one. (--no-download
            # would refuse the local files too.)
            alone = apt.view(["Dir::Etc::sourcelist=/dev/null", "Dir::Etc::sourceparts=/dev/null"])
            leaving = [f"{name}-" for name in going]
            alone.install(["--purge", "--allow-downgrades", *leaving, *debs])
        now = read_host(wish, host.runner, host.root, apt=apt)
        if not is_back(data, now):
            raise AptError(f"driver {data['package_version']} did not come back whole")
        record = dict(data.get("record") or {})
        wanted = (
            wanted_holds(now.packages, kept_kernels(now))
            if wish.hold
            else list(data.get("held", []))
        )
        apt.hold(wanted)
        record.update(held=wanted, complete=True)
        record.setdefault("requested", deb_version.upstream(str(data["package_version"])))
        record.setdefault("resolved", deb_version.upstream(str(data["package_version"])))
        record.setdefault("package_version", data["package_version"])
        record["failed"] = {"version": failed.get("resolved", ""), "reason": reason}
        Record(wish.state_dir, host.root).write(record)
        for kernel in nvidia_kernel.installed_kernels(now.root):
            if nvidia_kernel.initramfs(kernel, now.runner, now.root).stale:
                now.runner(["update-initramfs", "-u", "-k", kernel], timeout=900)
    except (AptError, Refusal, OSError) as error:
        with contextlib.suppress(AptError):
            left = deb_packages.by_name(deb_packages.installed_packages(host.runner))
            apt.hold(name for name in held if name in left)
        raise ApplyError(f"the previous driver is not back: {error}") from error


def release(wish: Wish, host: Host, *, check: bool = False) -> list[str]:
    """Let go of the driver: our holds, the pin, the record and the package cache.

    :param check: only tell
    :returns: what was, or would be, taken off
    :raises ApplyError: one sentence
    """
    record = Record(wish.state_dir, host.root)
    ours = set(record.read().get("held", []))
    held = sorted(p.name for p in host.packages if p.held and p.name in ours)
    pin = host.root / PREFERENCES.lstrip("/")
    cache = host.root / wish.cache_dir.lstrip("/")
    done = [f"hold of {name}" for name in held]
    done += [str(path) for path in (pin, record.path, cache) if path.exists()]
    if check or not done:
        return done
    try:
        Apt(host.runner, lock_timeout=wish.lock_timeout).unhold(held)
        pin.unlink(missing_ok=True)
        record.path.unlink(missing_ok=True)
        shutil.rmtree(cache, ignore_errors=True)
    except (AptError, OSError) as error:
        raise ApplyError(str(error)) from error
    return done
