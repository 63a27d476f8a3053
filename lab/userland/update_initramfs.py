"""update-initramfs and lsinitramfs of the box: a real cpio archive of what matters here.

It holds the modprobe files and nouveau's module (as the real one does for a graphics driver), so
"does the initramfs still carry nouveau, is it newer than the blacklist" has a true answer.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

BOOT = Path("/boot")
MODULES = Path("/lib/modules")
MODPROBE_DIRS = ("/etc/modprobe.d", "/lib/modprobe.d")


def cpio_entry(name: str, data: bytes, mode: int = 0o100644) -> bytes:
    """One entry of the 'newc' cpio format."""
    header = b"070701" + b"".join(
        b"%08X" % value for value in (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    )
    head = header + name.encode() + b"\0"
    head += b"\0" * (-len(head) % 4)
    return head + data + b"\0" * (-len(data) % 4)


def entries(data: bytes) -> list[str]:
    """Names in a 'newc' cpio archive."""
    names, at = [], 0
    while data[at : at + 6] == b"070701":
        size, length = int(data[at + 54 : at + 62], 16), int(data[at + 94 : at + 102], 16)
        name = data[at + 110 : at + 110 + length - 1].decode()
        if name == "TRAILER!!!":
            break
        names.append(name)
        at += 110 + length
        at += -at % 4
        at += size
        at += -at % 4
    return names


def build(release: str) -> bytes:
    """Build the archive for a kernel from the files of the box."""
    parts = []
    texts = []
    for directory in MODPROBE_DIRS:
        for path in sorted(Path(directory).glob("*.conf")):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            parts.append(cpio_entry(str(path).lstrip("/"), path.read_bytes()))
    blocked = any(
        line.split()[:2] == ["blacklist", "nouveau"] for t in texts for line in t.splitlines()
    )
    if not blocked:
        for path in sorted((MODULES / release).glob("kernel/**/nouveau.ko")):
            parts.append(cpio_entry(str(path).lstrip("/"), path.read_bytes()))
    parts.append(cpio_entry("TRAILER!!!", b"", 0))
    return b"".join(parts)


def kernels() -> list[str]:
    """Releases of the kernels in /boot."""
    return sorted(p.name.removeprefix("vmlinuz-") for p in BOOT.glob("vmlinuz-*"))


def update(arguments: list[str]) -> int:
    """Run as update-initramfs -c|-u|-d -k RELEASE|all."""
    release = ""
    if "-k" in arguments:
        release = arguments[arguments.index("-k") + 1]
    chosen = kernels() if release == "all" else [release or (kernels() or [""])[-1]]
    for name in filter(None, chosen):
        target = BOOT / f"initrd.img-{name}"
        if "-d" in arguments:
            target.unlink(missing_ok=True)
            continue
        print(f"update-initramfs: Generating {target}")
        draft = target.with_name(target.name + ".new")
        draft.write_bytes(gzip.compress(build(name), 1))
        draft.replace(target)
    return 0


def main(argv: list[str]) -> int:
    """Dispatch on the name the program was called by."""
    if Path(argv[0]).name == "lsinitramfs":
        for path in (a for a in argv[1:] if not a.startswith("-")):
            print("\n".join(entries(gzip.decompress(Path(path).read_bytes()))))
        return 0
    return update(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
