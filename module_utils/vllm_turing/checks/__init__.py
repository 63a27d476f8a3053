"""The checks, one module a group; importing this package registers them all."""

from __future__ import annotations

from ..preflight_host import Host
from ..preflight_wish import Wish
from . import cuda, driver, hardware, model, network, plan, runtime, service, system

#: Commands that most hosts are asked, with their time limits in seconds.
COMMANDS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("uname", "-r"), 10.0),
    (("uname", "-m"), 10.0),
    (("lsmod",), 10.0),
    (("dkms", "status"), 15.0),
    (("mokutil", "--sb-state"), 10.0),
    (("dmesg",), 5.0),
)


def commands(host: Host, wish: Wish) -> list[tuple[tuple[str, ...], float]]:
    """Return the commands that will be asked on a host, so that all are started at once."""
    found = [*COMMANDS, (driver.transitional_query(wish), 15.0)]
    if not host.exists(system.SYNCHRONISED):
        found.append((system.TIMEDATECTL, 10.0))
    return found


__all__ = [
    "commands",
    "cuda",
    "driver",
    "hardware",
    "model",
    "network",
    "plan",
    "runtime",
    "service",
    "system",
]
