"""Switch the simulated hardware of a lab host between healthy and broken."""

from __future__ import annotations

from lab.errors import LabError
from lab.host import Lab
from lab.state import read_json, write_json
from lab.userland.hardware import BOOT_FAULTS, FAULTS

HARDWARE = "var/lib/vllm-turing-lab/hardware.json"


def current(lab: Lab) -> str:
    """Name of the fault that is switched on."""
    lab.connection()
    return str(read_json(lab.rootfs / HARDWARE).get("fault", "none"))


def switch(lab: Lab, name: str) -> str:
    """Switch a fault on ('none' switches it off); return what the box now looks like."""
    if name not in FAULTS:
        raise LabError(f"There is no fault '{name}'; use one of: {', '.join(FAULTS)}.")
    lab.connection()
    write_json(lab.rootfs / HARDWARE, {"fault": name})
    if lab.is_running():
        lab.inside("/usr/lib/vllm-turing-lab/lab-kernel apply")
    note = "; reboot the host for it to take effect" if name in BOOT_FAULTS else ""
    return FAULTS[name] + note
