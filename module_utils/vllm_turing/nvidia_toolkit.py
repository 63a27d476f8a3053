"""Install a CUDA toolkit beside others, without ever moving the driver."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from . import apt_key, apt_source, deb_packages, nvidia_packages
from .apt_client import Apt, AptError
from .run import Runner, run

#: The link that packages of every toolkit version share.
SHARED_LINK = "/usr/local/cuda"


class ToolkitError(Exception):
    """The toolkit cannot or must not be installed; the text says why and what to do."""


@dataclass
class ToolkitPlan:
    """What is missing.

    :ivar missing: packages to install
    :ivar installs: what apt would install for them, with versions
    :ivar before: the wanted packages that are there
    """

    missing: list[str] = field(default_factory=list)
    installs: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def nvcc_version(home: str, runner: Runner = run, root: Path = Path("/")) -> str | None:
    """Return the release that a toolkit's nvcc reports, e.g. ``12.9``."""
    result = runner([str(root / home.lstrip("/") / "bin/nvcc"), "--version"])
    match = re.search(r"release (\d+\.\d+)", result.stdout)
    return match.group(1) if match else None


def shared_link(root: Path = Path("/")) -> tuple[str, str]:
    """Say what /usr/local/cuda is.

    :returns: (kind, target): kind is ``absent``, ``folder``, ``link`` or ``dangling``
    """
    path = root / SHARED_LINK.lstrip("/")
    if path.is_symlink():
        target = path.resolve()
        return ("link" if target.is_dir() else "dangling", str(target))
    return ("folder", str(path)) if path.is_dir() else ("absent", "")


def make_plan(
    packages: Sequence[str],
    source: apt_source.Source,
    runner: Runner = run,
    root: Path = Path("/"),
    *,
    refresh: bool = True,
    apt: Apt | None = None,
) -> ToolkitPlan:
    """Compare the wanted packages with those that are there; simulate what is missing.

    :param refresh: may fetch the host's package lists (not in check mode)
    :raises ToolkitError: names every driver package that the transaction would touch
    """
    apt = apt or Apt(runner)
    try:
        index = deb_packages.by_name(deb_packages.installed_packages(runner))
    except deb_packages.DpkgError as error:
        raise ToolkitError(str(error)) from error
    plan = ToolkitPlan()
    plan.before = {n: index[n].version for n in packages if n in index and index[n].installed}
    plan.missing = [name for name in packages if name not in plan.before]
    kind, target = shared_link(root)
    if kind == "dangling":
        plan.warnings.append(
            f"{SHARED_LINK} points to '{target}', which is not there; it is left as it is "
            "(the service uses the versioned path)"
        )
    if not plan.missing:
        return plan
    with ExitStack() as stack:
        try:
            view = apt_source.view(source, apt, root, stack)
            offered = view.candidates(plan.missing)
            if refresh and view is apt and any(not offered[name] for name in plan.missing):
                apt.update()
                offered = view.candidates(plan.missing)
        except (AptError, apt_key.KeyProblem) as error:
            raise ToolkitError(f"the CUDA repository cannot be used: {error}") from error
        absent = [
            n for n in plan.missing if not any(source.origin in c.origins for c in offered[n])
        ]
        if absent:
            raise ToolkitError(
                f"the CUDA repository has no package {', '.join(absent)}; "
                "look at cuda_toolkit_version and cuda_toolkit_packages"
            )
        simulation = view.simulate(plan.missing)
    if simulation.error:
        raise ToolkitError(f"the CUDA packages do not go in: {simulation.error}")
    changes = [(c.action, c.name, c.old, c.new) for c in simulation.changes]
    touched = nvidia_packages.driver_changes(changes)
    if touched:
        raise ToolkitError(
            f"installing the CUDA packages {'; '.join(touched)}: the driver must stay as it is. "
            "Take the package that asks for it out of cuda_toolkit_packages "
            "(cuda, cuda-12-9 and cuda-drivers pull a driver; cuda-toolkit-12-9 does not)"
        )
    if simulation.removes:
        raise ToolkitError(
            f"installing the CUDA packages would remove {', '.join(sorted(simulation.removes))}; "
            "nothing is done"
        )
    plan.installs = {name: change.new or "" for name, change in simulation.installs.items()}
    return plan


def apply(
    plan: ToolkitPlan,
    home: str,
    version: str,
    runner: Runner = run,
    root: Path = Path("/"),
    *,
    apt: Apt | None = None,
) -> None:
    """Install what is missing; an existing /usr/local/cuda stays what it is.

    :raises ToolkitError: one sentence
    """
    apt = apt or Apt(runner)
    kind, target = shared_link(root)
    try:
        try:
            apt.install(plan.missing)
        except AptError as error:
            if " 404 " not in str(error):
                raise
            apt.update()
            apt.install(plan.missing)
    except AptError as error:
        raise ToolkitError(f"the CUDA packages are not installed: {error}") from error
    finally:
        _keep_link(kind, target, runner, root)
    check(home, version, runner, root)


def check(home: str, version: str, runner: Runner = run, root: Path = Path("/")) -> None:
    """See that the toolkit's own compiler answers with the wanted version.

    :raises ToolkitError: names the path and both versions
    """
    found = nvcc_version(home, runner, root)
    if found is None:
        raise ToolkitError(f"'{home}/bin/nvcc' does not run; look at cuda_toolkit_home")
    if found != version:
        raise ToolkitError(f"'{home}/bin/nvcc' is CUDA {found}, not {version}")


def _keep_link(kind: str, target: str, runner: Runner, root: Path) -> None:
    """Put /usr/local/cuda back where it pointed, if a package's alternatives moved it."""
    if kind != "link" or shared_link(root) == (kind, target):
        return
    shown = "/" + str(Path(target).relative_to(root.resolve()))
    runner(["update-alternatives", "--set", "cuda", shown])
