"""What dpkg knows: installed packages, their states, and what is left half done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .run import Runner, run

#: One line a package; ``db:Status-Abbrev`` is what ``dpkg -l`` shows in its first column.
QUERY = r"${Package}\t${Architecture}\t${Version}\t${db:Status-Abbrev}\n"

#: Second letter of the state: these are neither installed nor gone.
UNFINISHED = {
    "U": "unpacked, not configured",
    "F": "half configured",
    "H": "half installed",
    "W": "waiting for a trigger",
    "t": "a trigger is pending",
}


class DpkgError(Exception):
    """dpkg cannot be asked; the text is one sentence for a person."""


@dataclass(frozen=True)
class Package:
    """One package as dpkg has it.

    :ivar state: two letters, wish and state, e.g. ``ii``, ``hi``, ``rc``, ``iF``
    """

    name: str
    arch: str
    version: str
    state: str

    @property
    def installed(self) -> bool:
        """Whether its files are unpacked and it is configured."""
        return self.state[1:2] == "i"

    @property
    def leftover(self) -> bool:
        """Whether only configuration files remain."""
        return self.state[1:2] == "c"

    @property
    def unfinished(self) -> str | None:
        """Say in words what is left half done, or ``None``."""
        words = UNFINISHED.get(self.state[1:2])
        if words is None and self.state[2:3] == "R":
            return "must be reinstalled"
        return words

    @property
    def held(self) -> bool:
        """Whether it is on hold."""
        return self.state[0:1] == "h"


def parse(text: str) -> list[Package]:
    """Parse the output of ``dpkg-query -W -f=QUERY``; what is wholly gone is left out."""
    packages = []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 4 or not fields[0]:
            continue
        name, arch, version, state = fields
        # The third letter (reinstall required) is a blank in the usual case.
        state = state.rstrip()
        if state[1:2] in ("", "n"):
            continue
        packages.append(Package(name, arch, version, state))
    return packages


def installed_packages(runner: Runner = run) -> list[Package]:
    """Ask dpkg for everything it has, in one call.

    :raises DpkgError: when dpkg-query does not answer
    """
    result = runner(["dpkg-query", "-W", f"-f={QUERY}"], timeout=60)
    if not result.ok:
        reason = result.error or result.stderr.strip().splitlines()[-1:] or f"status {result.rc}"
        raise DpkgError(
            f"dpkg-query did not list the installed packages ({reason}); is dpkg sound?"
        )
    return parse(result.stdout)


def by_name(packages: Iterable[Package], arch: str = "amd64") -> dict[str, Package]:
    """Index packages by name; of two architectures the native one wins."""
    index: dict[str, Package] = {}
    for package in packages:
        if package.name not in index or package.arch == arch:
            index[package.name] = package
    return index


def unfinished(packages: Iterable[Package]) -> list[str]:
    """List what is half done, in words: ``nvidia-dkms-580 (half configured)``."""
    return [f"{p.name} ({p.unfinished})" for p in packages if p.unfinished]
