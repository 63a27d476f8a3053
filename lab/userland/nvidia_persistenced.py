"""nvidia-persistenced of the box: a daemon that needs the device nodes and keeps a pid file."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from lab.userland import hardware

RUN = Path("/run/nvidia-persistenced")


def main(argv: list[str]) -> int:
    """Go to the background and wait for SIGTERM."""
    if not Path("/dev/nvidiactl").exists():
        print(
            "nvidia-persistenced failed to initialize. Check syslog for more details.",
            file=sys.stderr,
        )
        return 1
    if "--no-persistence-mode" not in argv:
        settings = hardware.read_object(hardware.SETTINGS_FILE)
        for card in hardware.cards():
            settings.setdefault(card.uuid, {})["persistence_mode"] = True
        hardware.write_object(hardware.SETTINGS_FILE, settings)
    RUN.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        (RUN / "nvidia-persistenced.pid").write_text(f"{child}\n", encoding="ascii")
        return 0
    os.setsid()
    with open(os.devnull, "r+b", buffering=0) as null:
        for number in (0, 1, 2):
            os.dup2(null.fileno(), number)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
