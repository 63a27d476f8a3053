"""The checks, one module a group; importing this package registers them all."""

from __future__ import annotations

from . import cuda, driver, hardware, model, network, plan, runtime, service, system

#: Commands that most hosts are asked, with their time limits: started side by side at first.
COMMANDS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("uname", "-r"), 10.0),
    (("uname", "-m"), 10.0),
    (("lsmod",), 10.0),
    (("dkms", "status"), 15.0),
    (("mokutil", "--sb-state"), 10.0),
    (("dmesg",), 5.0),
)

__all__ = ["cuda", "driver", "hardware", "model", "network", "plan", "runtime", "service", "system"]
