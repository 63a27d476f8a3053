"""mokutil of the box: reads the simulated firmware, in the real program's words."""

from __future__ import annotations

import sys
from pathlib import Path

VARIABLE = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
ENROLLED = Path("/var/lib/shim-signed/mok/enrolled")


def main(argv: list[str]) -> int:
    """Answer --sb-state, --list-enrolled and --test-key FILE."""
    verb = argv[1] if len(argv) > 1 else ""
    path = Path("/sys/firmware/efi/efivars") / VARIABLE
    if not path.is_file():
        print("EFI variables are not supported on this system", file=sys.stderr)
        return 1
    if verb == "--sb-state":
        print("SecureBoot enabled" if path.read_bytes()[-1] else "SecureBoot disabled")
        return 0
    if verb == "--test-key" and len(argv) > 2:
        enrolled = ENROLLED.exists()
        print(f"{argv[2]} is {'already' if enrolled else 'not'} enrolled")
        return 1 if enrolled else 0
    if verb in ("--list-enrolled", "-l"):
        name = "Canonical Ltd. Master Certificate Authority"
        print(f"[key 1]\nSubject: C=GB, O=Canonical Ltd., CN={name}")
        return 0
    print("Usage:\n  mokutil OPTIONS [ARGS...]", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
