"""See that a list of distribution packages is installed, asking apt only when one is missing.

:mod:`ansible.builtin.apt` opens apt's whole cache several times for the same answer; dpkg knows it
at once, and a run that has nothing to do should cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .apt_client import Apt, AptError
from .deb_packages import DpkgError, installed_packages
from .run import Runner, run


class BasePackagesError(Exception):
    """The packages cannot be installed, in one sentence."""


@dataclass(frozen=True)
class Plan:
    """What is wanted and not there.

    :ivar missing: names in the order of the wish
    """

    missing: tuple[str, ...]


def make_plan(names: Sequence[str], runner: Runner = run) -> Plan:
    """Compare the wish with what dpkg has.

    :param names: package names
    :param runner: runs external commands
    :raises BasePackagesError: dpkg cannot be asked
    """
    try:
        there = {package.name for package in installed_packages(runner) if package.installed}
    except DpkgError as error:
        raise BasePackagesError(str(error)) from error
    return Plan(tuple(name for name in names if name not in there))


def install(plan: Plan, apt: Apt | None = None) -> None:
    """Install what is missing; nothing that is installed is removed for it.

    :param plan: see :func:`make_plan`
    :param apt: the host's package manager
    :raises BasePackagesError: a package is in no archive, or something would have to go
    """
    if not plan.missing:
        return
    manager = apt or Apt()
    try:
        manager.update()
        simulation = manager.simulate(plan.missing)
        if simulation.error:
            raise BasePackagesError(
                f"{', '.join(plan.missing)} cannot be installed: {simulation.error}"
            )
        if simulation.removes:
            raise BasePackagesError(
                f"installing {', '.join(plan.missing)} would remove "
                f"{', '.join(sorted(simulation.removes))}; nothing was done, "
                "install the former by hand the way you want it"
            )
        manager.install(plan.missing)
    except AptError as error:
        raise BasePackagesError(str(error)) from error
